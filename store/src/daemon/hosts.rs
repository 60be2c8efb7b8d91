//! Daemons that share their ledgers: each is found by its session, and keeps what is put to it.

use std::any::Any;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use tssd_format::MANIFEST_NAME;

use super::elsewhere::{Elsewhere, Keeper, Source};
use super::replicas::{Replicas, key_of};
use crate::control::{Keepers, Reached};
use crate::engine::local::LocalController;
use crate::error::Result;
use crate::io::environment::{Environment, SystemEnvironment};
use crate::io::sync::Lock;
use crate::key::Key;
use crate::ledger::{ManifestReference, SessionId, Version};
use crate::metadata::SharedLedgers;
use crate::net::tls::Endpoint;
use crate::shm::Pool;

/// For how long it is believed that a daemon is where it was found.
const BELIEF: Duration = Duration::from_secs(3);

/// How often the keys of which something is kept are looked after.
const UPKEEP: Duration = Duration::from_secs(5);

/// With what pauses that is done at most.
const REST: Duration = Duration::from_millis(500);

/// How many of those are asked who keep something only because it was read there, before the one it was put to.
const MAX_REPLICAS: usize = 2;

/// Where the other daemons are.
pub(crate) struct Hosts {
    ledgers: SharedLedgers,
    elsewhere: Arc<Elsewhere>,
    /// What is here.
    pool: Arc<Pool>,
    /// What was found last.
    found: Lock<BTreeMap<SessionId, (Endpoint, Instant)>>,
}

impl Hosts {
    pub(crate) fn new(ledgers: SharedLedgers, elsewhere: Arc<Elsewhere>, pool: Arc<Pool>) -> Self {
        Self { ledgers, elsewhere, pool, found: Lock::default() }
    }

    /// Where a daemon is; none if it has ended.
    async fn find(&self, session: SessionId) -> Result<Option<Endpoint>> {
        let believed = {
            let mut found = self.found.lock();
            found.retain(|_, (_, since)| since.elapsed() < BELIEF);
            found.get(&session).map(|(endpoint, _)| endpoint.clone())
        };
        if believed.is_some() {
            return Ok(believed);
        }
        let Some(record) = self.ledgers.session_record(session).await? else { return Ok(None) };
        let endpoint: Endpoint = String::from_utf8_lossy(&record).parse()?;
        let mut found = self.found.lock();
        found.insert(session, (endpoint.clone(), Instant::now()));
        Ok(Some(endpoint))
    }
}

#[async_trait]
impl Keepers for Hosts {
    fn are_many(&self) -> bool {
        true
    }

    async fn all(&self) -> Result<Vec<(SessionId, String)>> {
        let records = self.ledgers.session_records().await?.into_iter();
        Ok(records.map(|(id, it)| (id, String::from_utf8_lossy(&it).into_owned())).collect())
    }

    async fn reach(&self, folder: &str, version: &Version, own: SessionId) -> Result<Reached> {
        let mut noted = Noted { elsewhere: self.elsewhere.clone(), names: Vec::new() };
        let mut ended = Vec::new();
        for contribution in version.contributions.values() {
            let keepers: Vec<SessionId> = contribution.keepers().collect();
            let name = |file: &str| format!("{folder}/{file}");
            let mut names = contribution.archives().iter().map(|archive| name(&archive.name));
            if keepers.contains(&own) && names.all(|name| self.pool.span(&name).is_some()) {
                continue;
            }
            let keepers: Vec<_> = keepers.into_iter().filter(|keeper| *keeper != own).collect();
            let mut found = Vec::new();
            for (keeper, source) in asked(&keepers, SystemEnvironment.random()) {
                match self.find(keeper).await? {
                    Some(endpoint) => found.push(Keeper { endpoint, source }),
                    None => ended.push(keeper),
                }
            }
            if found.is_empty() {
                continue;
            }
            for archive in contribution.archives() {
                noted.note(name(&archive.name), &found, archive.file_len);
            }
        }
        if let Some(ManifestReference { keeper: Some(keeper), file_len, .. }) = version.manifest()
            && *keeper != own
            && let Some(endpoint) = self.find(*keeper).await?
        {
            let keeper = Keeper { endpoint, source: Source::Origin };
            noted.note(format!("{folder}/{MANIFEST_NAME}"), &[keeper], *file_len);
        }
        ended.sort_unstable();
        ended.dedup();
        let held = Some(Arc::new(noted) as Arc<dyn Any + Send + Sync>);
        Ok(Reached { held, ended })
    }
}

/// What is noted to be elsewhere.
struct Noted {
    elsewhere: Arc<Elsewhere>,
    names: Vec<String>,
}

impl Noted {
    fn note(&mut self, name: String, keepers: &[Keeper], len: u64) {
        self.elsewhere.note(&name, keepers, len);
        self.names.push(name);
    }
}

impl Drop for Noted {
    fn drop(&mut self) {
        for name in &self.names {
            self.elsewhere.forget(name);
        }
    }
}

/// Of those who keep the same, who is asked for it, first one of those who have it only because it was read there: some
/// of these, by chance, so that not all readers ask the same one.
fn asked(keepers: &[SessionId], chance: u128) -> Vec<(SessionId, Source)> {
    let Some((origin, replicas)) = keepers.split_first() else { return Vec::new() };
    let mut asked = replicas.to_vec();
    if let Some(last) = u128::try_from(replicas.len()).ok().filter(|count| *count > 0) {
        asked.rotate_left(usize::try_from(chance % last).unwrap_or_default());
    }
    asked.truncate(MAX_REPLICAS);
    let replicas = asked.into_iter().map(|replica| (replica, Source::Replica));
    replicas.chain([(*origin, Source::Origin)]).collect()
}

/// Now and then, and when something was read that stays, looks after the keys of which something is kept here: that it
/// is, and who has ended, is said, and what no ledger knows is deleted, because whoever has deleted its version could not
/// say so here.
pub(crate) async fn look_after(controller: LocalController, replicas: Arc<Replicas>) {
    loop {
        // What is read meanwhile is looked after in the next round.
        let mut changed = std::pin::pin!(replicas.changed.notified());
        changed.as_mut().enable();
        let keys: BTreeSet<Key> =
            replicas.staying(None).iter().filter_map(|name| key_of(name)).collect();
        for key in keys {
            let staying = || replicas.staying(Some(&key));
            let told = replicas.tell(controller.say_kept(&key, &staying)).await;
            let looked_after = controller.look_after(&key).await;
            if let Err(error) = told.and(looked_after) {
                tracing::warn!(%key, %error, "not looked after");
            }
        }
        let _ = tokio::time::timeout(UPKEEP, changed).await;
        // Several archives of a version are said at once.
        tokio::time::sleep(REST).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replicas_are_asked_before_the_origin_each_as_often() {
        let keepers = |count: u128| (0..count).map(SessionId).collect::<Vec<_>>();
        assert_eq!(asked(&keepers(0), 7), []);
        assert_eq!(asked(&keepers(1), 7), [(SessionId(0), Source::Origin)]);
        let mut first = BTreeMap::new();
        for chance in 0..400 {
            let asked = asked(&keepers(5), chance);
            assert_eq!(asked.len(), MAX_REPLICAS + 1);
            assert_eq!(asked.last(), Some(&(SessionId(0), Source::Origin)));
            let replicas: BTreeSet<_> = asked[..MAX_REPLICAS].iter().copied().collect();
            assert!(replicas.len() == MAX_REPLICAS && !replicas.iter().any(|it| it.0.0 == 0));
            *first.entry(asked[0].0).or_insert(0) += 1;
        }
        assert!(first.len() == 4 && first.values().all(|count| *count == 100), "{first:?}");
    }
}
