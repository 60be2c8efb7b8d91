//! Daemons that share their ledgers: each is found by its session, and keeps what is put to it.

use std::any::Any;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use tssd_format::MANIFEST;

use super::elsewhere::Elsewhere;
use crate::arena::Pool;
use crate::controller::{Keepers, LocalController, Reached};
use crate::error::Result;
use crate::key::Key;
use crate::ledger::{ManifestReference, SessionId, Version};
use crate::ledgers::SharedLedgers;
use crate::net::Endpoint;
use crate::sync::Mutex;

/// For how long it is believed that a daemon is where it was found.
const BELIEF: Duration = Duration::from_secs(3);

/// How often the keys of which something is kept are looked after.
const UPKEEP: Duration = Duration::from_secs(5);

/// Where the other daemons are.
pub(super) struct Hosts {
    ledgers: SharedLedgers,
    elsewhere: Arc<Elsewhere>,
    /// What was found last.
    found: Mutex<BTreeMap<SessionId, (Endpoint, Instant)>>,
}

impl Hosts {
    pub(super) fn new(ledgers: SharedLedgers, elsewhere: Arc<Elsewhere>) -> Self {
        Self { ledgers, elsewhere, found: Mutex::default() }
    }

    /// Where a daemon is; none if it has ended.
    async fn find(&self, session: SessionId) -> Result<Option<Endpoint>> {
        let believed = {
            let mut found = self.found.lock().expect("nobody panics while holding the hosts");
            found.retain(|_, (_, since)| since.elapsed() < BELIEF);
            found.get(&session).map(|(endpoint, _)| endpoint.clone())
        };
        if believed.is_some() {
            return Ok(believed);
        }
        let Some(record) = self.ledgers.session_record(session).await? else { return Ok(None) };
        let endpoint: Endpoint = String::from_utf8_lossy(&record).parse()?;
        let mut found = self.found.lock().expect("nobody panics while holding the hosts");
        found.insert(session, (endpoint.clone(), Instant::now()));
        Ok(Some(endpoint))
    }
}

#[async_trait]
impl Keepers for Hosts {
    fn are_many(&self) -> bool {
        true
    }

    async fn reach(&self, folder: &str, version: &Version, own: SessionId) -> Result<Reached> {
        let mut noted = Noted { elsewhere: self.elsewhere.clone(), names: Vec::new() };
        let mut ended = Vec::new();
        for contribution in version.contributions.values() {
            let mut place = None;
            for keeper in contribution.keepers() {
                if keeper == own {
                    place = None;
                    break;
                }
                match self.find(keeper).await? {
                    Some(endpoint) => place = Some(endpoint),
                    None => ended.push(keeper),
                }
            }
            let Some(endpoint) = place else { continue };
            for archive in contribution.archives() {
                noted.note(format!("{folder}/{}", archive.name), &endpoint, archive.file_len);
            }
        }
        if let Some(ManifestReference { keeper: Some(keeper), file_len, .. }) = version.manifest()
            && *keeper != own
            && let Some(endpoint) = self.find(*keeper).await?
        {
            noted.note(format!("{folder}/{MANIFEST}"), &endpoint, *file_len);
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
    fn note(&mut self, name: String, endpoint: &Endpoint, len: u64) {
        self.elsewhere.note(&name, endpoint, len);
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

/// Now and then looks after the keys of which something is kept here: who has ended is said, and what no ledger knows
/// is deleted, because whoever has deleted its version could not say so here.
pub(super) async fn look_after(controller: LocalController, pool: Arc<Pool>) {
    loop {
        tokio::time::sleep(UPKEEP).await;
        let keys: BTreeSet<Key> = pool.names("").iter().filter_map(|name| key_of(name)).collect();
        for key in keys {
            if let Err(error) = controller.look_after(&key).await {
                tracing::warn!(%key, %error, "not looked after");
            }
        }
    }
}

/// The key of an archive or manifest.
fn key_of(name: &str) -> Option<Key> {
    let (version, _) = name.rsplit_once('/')?;
    let (key, _) = version.rsplit_once('/')?;
    Key::from_path(key)
}
