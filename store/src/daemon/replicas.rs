//! Archives of other daemons that readers of this host have asked for: each byte comes once, and stays until its version
//! goes or the memory is needed.

mod coming;

use std::collections::{BTreeMap, BTreeSet};
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::Notify;
use tssd_format::Archive;

use self::coming::{Coming, Memory};
use super::elsewhere::Elsewhere;
use super::registry::Registry;
use crate::arena::{Exhausted, Pool};
use crate::controller::folder_of;
use crate::environment::wait;
use crate::error::{Error, ErrorKind, Result};
use crate::key::Key;
use crate::parallel;
use crate::wire::{INLINE, Range, Sum};

/// Runs shorter than this, in a loop, are not kept: to know which of them are here takes more than they do.
const MIN_RUN: u64 = 256;

/// How often it is looked whether the versions of replicas are still visible.
const UPKEEP: Duration = Duration::from_secs(5);

pub(super) struct Replicas {
    pool: Arc<Pool>,
    elsewhere: Arc<Elsewhere>,
    inner: Mutex<Inner>,
    /// Rung whenever one is complete, or will not be.
    pub(super) changed: Notify,
}

#[derive(Default)]
struct Inner {
    /// Those of which something is missing, by their names.
    coming: BTreeMap<String, Arc<Coming>>,
    /// Those that are in the pool, each with the how-manieth it was.
    whole: BTreeMap<String, u64>,
    /// What is let go of now.
    leaving: BTreeSet<String>,
    next: u64,
}

/// What is kept only because it was read.
pub(super) struct Spare {
    pub(super) name: String,
    /// Whether others may know of it.
    is_whole: bool,
}

impl Replicas {
    pub(super) fn new(pool: Arc<Pool>, elsewhere: Arc<Elsewhere>) -> Self {
        Self { pool, elsewhere, inner: Mutex::default(), changed: Notify::new() }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().expect("nobody panics while holding the replicas")
    }

    /// Bytes of an archive that others keep, with their checksum if they are to be proven; none if it is in the pool.
    ///
    /// # Errors
    ///
    /// As [`Elsewhere::read`].
    pub(super) async fn read(
        self: &Arc<Self>,
        name: &str,
        ranges: &[Range],
        prove: bool,
    ) -> Result<Option<(Bytes, Sum)>> {
        let is_fine = |range: &Range| !range.2.is_empty() && range.1 < MIN_RUN;
        let coming = if ranges.iter().any(is_fine) { None } else { self.find(name) };
        if let Some(coming) = coming {
            if let Some(read) = coming.read(&self.elsewhere, ranges, prove).await? {
                if coming.wants_its_rest() {
                    let replicas = self.clone();
                    drop(tokio::spawn(async move {
                        if let Err(error) = replicas.bring_rest(&coming).await {
                            coming.give_up_rest();
                            tracing::debug!(name = coming.name, %error, "its rest did not come");
                        }
                    }));
                }
                return Ok(Some(read));
            }
            self.settled(&coming).await;
            if self.pool.span(name).is_some() {
                return Ok(None);
            }
        }
        // It is not kept.
        self.elsewhere.read(name, ranges, prove).await.map(Some)
    }

    fn find(&self, name: &str) -> Option<Arc<Coming>> {
        self.inner().coming.get(name).cloned()
    }

    /// Whether an archive is in the pool, or has room there.
    pub(super) fn has_begun(&self, name: &str) -> bool {
        self.inner().coming.contains_key(name) || self.pool.span(name).is_some()
    }

    /// Makes room for an archive of so many bytes, if there is none yet and it is not in the pool.
    pub(super) fn begin(&self, name: &str, len: u64) -> std::io::Result<Result<(), Exhausted>> {
        let mut inner = self.inner();
        if inner.coming.contains_key(name) || self.pool.span(name).is_some() {
            return Ok(Ok(()));
        }
        let small = usize::try_from(len).ok().filter(|_| len <= INLINE.into());
        let memory = match small {
            Some(len) => Memory::Small(vec![0; len]),
            None => match self.pool.write_sparse(len)? {
                Ok(writing) => Memory::Segment(writing),
                Err(exhausted) => return Ok(Err(exhausted)),
            },
        };
        let coming = Arc::new(Coming::new(name.to_owned(), len, memory));
        inner.coming.insert(name.to_owned(), coming);
        Ok(Ok(()))
    }

    /// Brings all of an archive that has [begun](Replicas::begin), and proves it.
    ///
    /// # Errors
    ///
    /// As [`Elsewhere::read`]; `Corrupt` if it is damaged.
    pub(super) async fn complete(self: &Arc<Self>, name: &str) -> Result<()> {
        match self.find(name) {
            Some(coming) => self.bring_rest(&coming).await,
            None => Ok(()),
        }
    }

    async fn bring_rest(self: &Arc<Self>, coming: &Arc<Coming>) -> Result<()> {
        coming.complete(&self.elsewhere).await?;
        if let Some(memory) = coming.take() {
            let (replicas, name) = (self.clone(), coming.name.clone());
            let published = wait(move || replicas.publish(&name, memory)).await;
            let mut inner = self.inner();
            if inner.coming.get(&coming.name).is_some_and(|it| Arc::ptr_eq(it, coming)) {
                inner.coming.remove(&coming.name);
            }
            if published.is_ok() {
                let number = inner.next;
                inner.next += 1;
                inner.whole.insert(coming.name.clone(), number);
            }
            drop(inner);
            self.changed.notify_waiters();
            return published;
        }
        self.settled(coming).await;
        if self.pool.span(&coming.name).is_some() {
            return Ok(());
        }
        let text = format_args!("`{}` did not come whole; get it again", coming.name);
        Err(Error::new(ErrorKind::Corrupt, text))
    }

    /// Waits until an archive of which all has come is proven, or is not.
    async fn settled(&self, coming: &Arc<Coming>) {
        loop {
            let mut changed = pin!(self.changed.notified());
            changed.as_mut().enable();
            if self.find(&coming.name).is_none_or(|it| !Arc::ptr_eq(&it, coming)) {
                return;
            }
            changed.await;
        }
    }

    /// Proves an archive, and gives it its name in the pool.
    fn publish(&self, name: &str, memory: Memory) -> Result<()> {
        let failed = |error| Error::io(name, error);
        // It has its name when it is proven.
        let unproven = format!("fetch/{name}");
        match memory {
            Memory::Small(bytes) => {
                let written = self.pool.write(&unproven, &bytes).map_err(failed)?;
                written.map_err(|exhausted| Error::new(ErrorKind::Busy, exhausted))?;
            }
            Memory::Segment(writing) => writing.publish(&unproven).map_err(failed)?,
        }
        let proven = self.prove(&unproven, name);
        // If it has come from the bucket meanwhile, that is as good.
        if proven.is_err() || !self.pool.rename(&unproven, name) {
            self.pool.delete(&unproven);
        }
        proven
    }

    fn prove(&self, blob: &str, name: &str) -> Result<()> {
        let failed = |error| Error::format(name, error);
        let opened = self.pool.open(blob).map_err(|error| Error::io(name, error))?;
        let opened = opened.ok_or_else(|| {
            Error::new(ErrorKind::Busy, format_args!("`{name}` was deleted meanwhile"))
        })?;
        let archive = Archive::from_blob(opened.blob).map_err(failed)?;
        parallel::map(archive.verify_jobs(), |job| job.run()).map(drop).map_err(failed)
    }

    /// Whether something is in the pool only because it was read.
    pub(super) fn is_one(&self, name: &str) -> bool {
        self.inner().whole.contains_key(name)
    }

    /// The names of what is kept in the pool and stays: all but what is let go of.
    pub(super) fn staying(&self) -> Vec<String> {
        let inner = self.inner();
        let mut names = self.pool.names("");
        names.retain(|name| !inner.leaving.contains(name) && !self.pool.is_doomed(name));
        names
    }

    /// What is let go of first if memory is needed: the oldest that nobody reads.
    pub(super) fn spare(&self) -> Option<Spare> {
        let mut inner = self.inner();
        let is_free = |name: &&String| !self.pool.is_held(name);
        if let Some(name) = inner.coming.keys().find(is_free).cloned() {
            inner.coming.remove(&name);
            return Some(Spare { name, is_whole: false });
        }
        let free = inner.whole.iter().filter(|(name, _)| !self.pool.is_held(name));
        let free = free.filter(|(name, _)| !inner.leaving.contains(*name));
        let name = free.min_by_key(|(_, number)| **number)?.0.clone();
        inner.leaving.insert(name.clone());
        Some(Spare { name, is_whole: true })
    }

    /// Lets go of it, or keeps it if nobody else does. Says whether there is more memory now.
    pub(super) async fn let_go(&self, spare: Spare, registry: &dyn Registry) -> bool {
        let Spare { name, is_whole } = spare;
        if !is_whole {
            return true;
        }
        let may_go = match key_of(&name) {
            Some(key) => matches!(registry.let_go(&key, &name).await, Ok(true)),
            None => true,
        };
        let mut inner = self.inner();
        inner.leaving.remove(&name);
        // What nobody else keeps is no replica any more.
        inner.whole.remove(&name);
        drop(inner);
        if may_go {
            self.pool.delete(&name);
        }
        may_go
    }

    /// Forgets all: whoever decides knows nothing of it any more.
    pub(super) fn clear(&self) {
        *self.inner() = Inner::default();
        self.changed.notify_waiters();
    }

    /// The names of all.
    fn names(&self) -> Vec<String> {
        let inner = self.inner();
        inner.coming.keys().chain(inner.whole.keys()).cloned().collect()
    }

    /// Whether nothing of the version that an archive is of has been read here.
    pub(super) fn is_first_of_its_version(&self, name: &str) -> bool {
        self.names().iter().all(|other| folder(other) != folder(name))
    }

    /// Drops what was read of versions of a key that are visible no more.
    pub(super) async fn drop_replaced(&self, key: &Key, registry: &dyn Registry) {
        let names = self.names().into_iter().filter(|name| key_of(name).as_ref() == Some(key));
        let names: Vec<String> = names.collect();
        if names.is_empty() {
            return;
        }
        // Whoever cannot be asked may have it still.
        let Ok(versions) = registry.versions(key).await else { return };
        let visible = versions.iter().map(|it| folder_of(key, it.epoch, it.number, it.id));
        let visible: BTreeSet<String> = visible.collect();
        for name in names {
            if folder(&name).is_some_and(|folder| !visible.contains(folder)) {
                self.forget(&name);
            }
        }
    }

    /// Drops a replica, at the latest when nobody reads it.
    fn forget(&self, name: &str) {
        let mut inner = self.inner();
        if !self.pool.is_held(name) {
            inner.coming.remove(name);
        }
        let was_whole = inner.whole.remove(name).is_some();
        drop(inner);
        if was_whole {
            self.pool.delete(name);
        }
        self.changed.notify_waiters();
    }
}

/// Now and then drops what was read of versions that are visible no more.
pub(super) async fn look_after(replicas: Arc<Replicas>, registry: Arc<dyn Registry>) {
    loop {
        tokio::time::sleep(UPKEEP).await;
        let keys: BTreeSet<Key> = replicas.names().iter().filter_map(|name| key_of(name)).collect();
        for key in keys {
            replicas.drop_replaced(&key, &*registry).await;
        }
    }
}

/// The folder of the version that an archive is of.
fn folder(name: &str) -> Option<&str> {
    name.rsplit_once('/').map(|(folder, _)| folder)
}

/// The key of an archive or manifest.
pub(super) fn key_of(name: &str) -> Option<Key> {
    let (key, _) = folder(name)?.rsplit_once('/')?;
    Key::from_path(key)
}
