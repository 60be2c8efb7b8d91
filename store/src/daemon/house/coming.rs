//! What of a version comes from elsewhere before it is read: manifests, what is fetched ahead of time, and what comes back
//! from the bucket.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use super::House;
use super::leases::{Leased, Registered};
use crate::daemon::mirror::Why;
use crate::daemon::registry::Grant;
use crate::daemon::tiers::Place;
use crate::error::{Error, ErrorKind, Result};
use crate::io::exec::run_blocking;
use crate::key::Key;
use crate::ledger::Selector;
use crate::net::tls::Endpoint;
use crate::shm::{PeerId, Pool, Span};

/// Who holds what is fetched.
const FETCHER: PeerId = 0;

impl House {
    /// Lets go of what was brought back from the bucket and is visible no more.
    pub(crate) async fn let_go_of_replaced(&self, key: &Key) {
        let fetched = self.inner().fetched.get(key).map(|grant| (grant.id, grant.lease));
        let Some((id, lease)) = fetched.filter(|_| self.mirror.is_some()) else { return };
        let Ok(versions) = self.registry.versions(key).await else { return };
        if versions.iter().all(|version| version.id != id) {
            {
                let mut inner = self.inner();
                if inner.fetched.get(key).is_some_and(|grant| grant.lease == lease) {
                    inner.fetched.remove(key);
                }
            }
            self.release(FETCHER, lease).await;
        }
    }

    /// Brings what of a version nobody else has who answers back from the bucket into memory, where it stays until
    /// another version of its key is fetched.
    async fn restore(&self, key: &Key, grant: &Grant) -> Result<()> {
        let Some(mirror) = &self.mirror else { return Ok(()) };
        let (mut missing, now) = (Vec::new(), Instant::now());
        for name in grant.names() {
            match self.tiers.place(name)? {
                None => missing.push((name.clone(), Why::Alone)),
                Some(Place::There(..)) => {
                    let elsewhere = &self.tiers.elsewhere;
                    let is_only_there = !grant.stored && !elsewhere.are_several(name);
                    let is_there = is_only_there || elsewhere.prefer_who_answers(name, now).await;
                    if grant.stored && !is_there {
                        missing.push((name.clone(), Why::Unanswered));
                    }
                }
                Some(Place::Here(_) | Place::Hollow(_)) => {}
            }
        }
        if missing.is_empty() {
            return Ok(());
        }
        let own = match self.registry.lease(FETCHER, key, Selector::Id(grant.id)).await {
            Ok(own) => self.hold(FETCHER, key, own),
            // It was replaced meanwhile: whoever has leased it before gets it all the same.
            Err(_) => return mirror.restore(key, grant.id, missing).await,
        };
        match mirror.restore(key, own.id, missing).await {
            Ok(()) => self.fetched(key, own).await,
            Err(error) => {
                self.give_up(&own).await;
                return Err(error);
            }
        }
        Ok(())
    }

    /// Brings an archive that somebody holds back from the bucket, if it is there: whoever keeps it has failed.
    pub(crate) async fn rescue(&self, name: &String, failed: Error) -> Result<()> {
        let held = {
            let inner = self.inner();
            let held = inner.leases.values().find(|held| held.names.contains(name));
            held.map(|held| (held.key.clone(), held.id))
        };
        let (Some(mirror), Some((key, id))) = (&self.mirror, held) else { return Err(failed) };
        let missing = vec![(name.clone(), Why::Unanswered)];
        let restored = mirror.restore(&key, id, missing).await;
        if restored.is_ok() && self.pool.span(name).is_some() { Ok(()) } else { Err(failed) }
    }

    /// Where the manifest and the archives of a version are that is held.
    pub(crate) async fn place(
        &self,
        key: &Key,
        grant: &Grant,
    ) -> Result<(Span, BTreeMap<String, Place>)> {
        self.restore(key, grant).await?;
        self.copy_manifest(key, grant).await?;
        let Place::Here(manifest) = self.found(key, grant, &grant.manifest)? else {
            return Err(Error::new(ErrorKind::Corrupt, "the manifest is elsewhere"));
        };
        let archives = grant.archives.iter();
        let archives =
            archives.map(|(file, name)| Ok((file.clone(), self.found(key, grant, name)?)));
        Ok((manifest, archives.collect::<Result<_>>()?))
    }

    /// Where something is that a version consists of.
    fn found(&self, key: &Key, grant: &Grant, name: &str) -> Result<Place> {
        self.tiers.place(name)?.ok_or_else(|| {
            let text = format_args!("key `{key}`: version {} lacks `{name}`", grant.number);
            Error::new(ErrorKind::Corrupt, text)
        })
    }

    /// The manifest of a version that another daemon has is small: it is copied, and stays while somebody
    /// holds the version.
    async fn copy_manifest(&self, key: &Key, grant: &Grant) -> Result<()> {
        let missing = grant.missing.clone().or_else(|| {
            let (keeper, len) = self.tiers.elsewhere.place(&grant.manifest)?;
            Some((grant.manifest.clone(), keeper.endpoint, len))
        });
        if missing.is_none() && self.tiers.place(&grant.manifest)?.is_some() {
            return Ok(());
        }
        let _copying = self.copying.lock().await;
        if self.pool.span(&grant.manifest).is_some() {
            return Ok(());
        }
        let bytes = self.manifest(key, grant, missing).await?;
        let nobody_waits = std::future::ready(());
        let write = |pool: &Arc<Pool>| pool.write(&grant.manifest, &bytes);
        let written = self.tiers.replicas.in_memory(&*self.registry, nobody_waits, write).await;
        let written = written.map_err(|error| Error::io(&grant.manifest, error))?;
        written.map_err(|exhausted| self.no_room(&exhausted))?;
        // As long as somebody holds the version.
        self.pool.delete(&grant.manifest);
        Ok(())
    }

    /// A manifest, from whoever has it. If he does not answer, it is made of the archives once more, if those are to be
    /// had.
    async fn manifest(
        &self,
        key: &Key,
        grant: &Grant,
        at: Option<(String, Endpoint, u64)>,
    ) -> Result<Vec<u8>> {
        let (elsewhere, now) = (&self.tiers.elsewhere, Instant::now());
        let is_there = match &at {
            Some((_, endpoint, _)) => elsewhere.answers(endpoint, now).await,
            None => false,
        };
        if !is_there {
            let mut can_be_made = true;
            for name in grant.archives.values() {
                let is_here =
                    matches!(self.tiers.place(name)?, Some(Place::Here(_) | Place::Hollow(_)));
                can_be_made &= is_here || elsewhere.prefer_who_answers(name, now).await;
            }
            if can_be_made && let Some(made) = self.registry.manifest(key, grant.id).await? {
                return Ok(made);
            }
        }
        let Some((name, endpoint, len)) = at else {
            for name in grant.archives.values() {
                self.found(key, grant, name)?;
            }
            let number = grant.number;
            let text = format_args!("key `{key}`: nobody has the manifest of version {number}");
            return Err(Error::new(ErrorKind::Unreachable, text));
        };
        let lines = elsewhere.host(&endpoint);
        run_blocking(move || lines.manifest(&name, len)).await
    }

    /// A version that is on its way here: what of it is elsewhere, and has to be copied. It is held until it
    /// is [fetched](House::fetched).
    pub(crate) async fn fetch(
        &self,
        key: &Key,
        selector: Selector,
        only: Option<&[String]>,
    ) -> Result<(Grant, Vec<(String, u64)>)> {
        let Leased { grant, archives, .. } = self.lease(FETCHER, key, selector).await?;
        let wanted =
            archives.into_iter().filter(|(file, _)| only.is_none_or(|only| only.contains(file)));
        let far = wanted.filter_map(|(file, place)| match place {
            Place::Here(_) | Place::Hollow(_) => None,
            Place::There(_, len) => Some((grant.archives[&file].clone(), len)),
        });
        let far = far.collect();
        Ok((grant, far))
    }

    /// A version is here, as far as it was wanted: it stays until another one of its key is. If all of it is
    /// a copy, whoever else has it need not keep it for us.
    pub(crate) async fn fetched(&self, key: &Key, grant: Grant) {
        let is_copy = |name: &String| self.pool.is_doomed(name) || self.tiers.replicas.is_one(name);
        let is_copied = grant.names().all(is_copy);
        let lease = grant.lease;
        let (earlier, registered) = {
            let mut inner = self.inner();
            let held = inner.leases.get_mut(&lease).filter(|_| is_copied);
            let registered = held.and_then(|held| held.registered.take());
            (inner.fetched.insert(key.clone(), grant), registered)
        };
        if let Some(Registered { key, lease, .. }) = registered.and_then(Arc::into_inner) {
            self.registry.release(&key, lease).await;
        }
        if let Some(earlier) = earlier {
            self.release(FETCHER, earlier.lease).await;
        }
    }

    /// It did not come.
    pub(crate) async fn give_up(&self, grant: &Grant) {
        self.release(FETCHER, grant.lease).await;
    }
}
