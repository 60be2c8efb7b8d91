//! Who decides for the sessions of a daemon what versions there are.

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::Arc;

use async_trait::async_trait;

use crate::control::layout::{archives, folder};
use crate::control::{Catalog, Place, Progress, Proposal, Reached};
use crate::engine::local::LocalController;
use crate::error::{Error, ErrorKind, Result};
use crate::key::Key;
use crate::ledger::{Digest, Durability, LeaseId, Refusal, Selector, Version, VersionId};
use crate::net::tls::Endpoint;
use crate::shm::PeerId;
use crate::status::HostStatus;

/// A controller whose parts a daemon calls one by one, for those who are connected.
#[async_trait]
pub(crate) trait Registry: Catalog {
    /// Opens a version for a writer, or joins one; waits for others that are in the way, as long as it
    /// is wanted. Returns also what the writer has committed to it before.
    async fn open(
        &self,
        key: &Key,
        proposal: &Proposal,
        is_wanted: &(dyn Fn() -> bool + Sync),
    ) -> Result<(Place, Option<Digest>)>;

    /// Commits a contribution, whose archives have these lengths in bytes.
    async fn commit(&self, place: &Place, digest: Digest, lens: &[u64]) -> Result<Progress>;

    /// Why a put failed: what has become of the version comes before what that has led to.
    async fn reason(&self, place: &Place, error: Error) -> Error;

    /// Takes back what is not committed, up to so many archives.
    async fn withdraw(&self, place: &Place, count: usize);

    /// A visible version, which stays for this holder until it is released.
    async fn lease(&self, holder: PeerId, key: &Key, selector: Selector) -> Result<Grant>;

    /// The manifest of a version, made of its archives once more; none if whoever decides is elsewhere.
    async fn manifest(&self, key: &Key, id: VersionId) -> Result<Option<Vec<u8>>>;

    /// A holder hands a lease back.
    async fn release(&self, key: &Key, lease: LeaseId);

    /// Need not keep an archive of others any more, which was read here; false if nobody else keeps it.
    async fn let_go(&self, key: &Key, name: &str) -> Result<bool>;

    /// The archives of a key's visible versions that are not in memory alone, by their names in the volume, the oldest
    /// first; without those of the newest version.
    async fn lasting(&self, key: &Key) -> Result<Vec<String>>;

    /// Whether there is a version, or a part of one, that ends with this daemon.
    async fn holds_memory(&self) -> Result<bool>;

    /// The daemon ends: whoever shares its ledgers need not wait until he misses it.
    async fn leave(&self);

    /// The daemons that decide with this one, itself included, or the one that decides for it.
    async fn hosts(&self) -> Result<Vec<HostStatus>>;

    /// Proves that what is to be so durable may be put to this daemon.
    fn admit(&self, durability: Durability) -> Result<()>;

    /// Another one as soon as what was leased before may be gone.
    fn instance(&self) -> u64;

    /// Whether other daemons decide about what is kept here.
    fn is_elsewhere(&self) -> bool;
}

/// A lease, and the names of what it holds.
#[derive(Clone)]
pub(crate) struct Grant {
    pub(crate) lease: LeaseId,
    pub(crate) id: VersionId,
    pub(crate) number: u64,
    pub(crate) epoch: u32,
    /// That of the registry which gave it.
    pub(crate) instance: u64,
    /// The name of the manifest in the volume.
    pub(crate) manifest: String,
    /// Whether it is in the bucket too.
    pub(crate) stored: bool,
    /// Who has the manifest under which name, and how long it is, if it is to be copied here.
    pub(crate) missing: Option<(String, Endpoint, u64)>,
    /// The names of the archives in the volume, by those that the manifest gives them.
    pub(crate) archives: BTreeMap<String, String>,
    /// What others keep of it can be opened as long as this lives.
    pub(crate) reached: Option<Arc<dyn Any + Send + Sync>>,
}

impl Grant {
    /// The names of all that it holds.
    pub(crate) fn names(&self) -> impl Iterator<Item = &String> {
        self.archives.values().chain([&self.manifest])
    }
}

/// For how long a lease gives the right to new reads.
const LEASE: std::time::Duration = std::time::Duration::from_mins(10);

/// The ledgers of this daemon.
#[async_trait]
impl Registry for LocalController {
    async fn open(
        &self,
        key: &Key,
        proposal: &Proposal,
        is_wanted: &(dyn Fn() -> bool + Sync),
    ) -> Result<(Place, Option<Digest>)> {
        LocalController::open(self, key, proposal, is_wanted).await
    }

    async fn commit(&self, place: &Place, digest: Digest, lens: &[u64]) -> Result<Progress> {
        LocalController::commit(self, place, digest, lens).await
    }

    async fn reason(&self, place: &Place, error: Error) -> Error {
        LocalController::reason(self, place, error).await
    }

    async fn withdraw(&self, place: &Place, count: usize) {
        LocalController::withdraw(self, place, count).await;
    }

    async fn lease(&self, holder: PeerId, key: &Key, selector: Selector) -> Result<Grant> {
        let taken = self.take(key, selector, holder.to_string(), LEASE).await?;
        let (lease, version, Reached { held: reached, .. }) = taken;
        let Version { id, epoch, number, stored, .. } = version;
        let folder = folder(key, &version);
        let manifest = version.manifest().map(|manifest| manifest.name.clone());
        let manifest = manifest.ok_or_else(|| Error::refused(key, Refusal::Unknown { id }))?;
        let named = archives(&version).into_iter();
        let archives = named.map(|name| (name.clone(), format!("{folder}/{name}"))).collect();
        Ok(Grant {
            lease,
            id,
            number,
            epoch,
            instance: 0,
            manifest,
            stored,
            missing: None,
            archives,
            reached,
        })
    }

    async fn manifest(&self, key: &Key, id: VersionId) -> Result<Option<Vec<u8>>> {
        LocalController::manifest(self, key, id).await
    }

    async fn release(&self, key: &Key, lease: LeaseId) {
        LocalController::release(self, key, lease).await;
    }

    async fn let_go(&self, key: &Key, name: &str) -> Result<bool> {
        LocalController::let_go(self, key, name).await
    }

    async fn lasting(&self, key: &Key) -> Result<Vec<String>> {
        LocalController::lasting(self, key).await
    }

    async fn holds_memory(&self) -> Result<bool> {
        LocalController::holds_memory(self).await
    }

    async fn leave(&self) {
        LocalController::leave(self).await;
    }

    async fn hosts(&self) -> Result<Vec<HostStatus>> {
        LocalController::hosts(self).await
    }

    fn admit(&self, durability: Durability) -> Result<()> {
        if self.are_many() && durability == Durability::Disk {
            let text = "the disk of one host does not outlast that: put with durability `object`, to daemons with \
                        serve --bucket URL";
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        Ok(())
    }

    fn instance(&self) -> u64 {
        0
    }

    fn is_elsewhere(&self) -> bool {
        self.are_many()
    }
}
