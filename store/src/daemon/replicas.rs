//! Archives of other daemons that readers of this host have asked for: each byte comes once, and stays until its version
//! goes or the memory is needed.

mod coming;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use bytes::Bytes;
use tokio::sync::{Mutex as AsyncMutex, Notify};
use tssd_format::Archive;

use self::coming::{Coming, Memory};
use super::elsewhere::Elsewhere;
use super::registry::Registry;
use crate::control::layout::folder_of;
use crate::error::{Error, ErrorKind, Result};
use crate::io::exec::run_blocking;
use crate::io::parallel;
use crate::io::sync::{Lock, MutexGuard, boxed};
use crate::key::Key;
use crate::net::wire::{INLINE, Range, Sum};
use crate::shm::{Exhausted, Pool, Spare};

/// Runs shorter than this, in a loop, are not kept: to know which of them are here takes more than they do.
const MIN_RUN: u64 = 256;

/// How often it is looked whether the versions of replicas are still visible.
const UPKEEP: Duration = Duration::from_secs(5);

/// For how long a read waits to hear which versions are visible.
const REGISTRY: Duration = Duration::from_secs(1);

/// For how long memory is not looked for again.
const REFUSED: Duration = Duration::from_secs(1);

pub(crate) struct Replicas {
    pool: Arc<Pool>,
    elsewhere: Arc<Elsewhere>,
    inner: Lock<Inner>,
    /// Whoever has it tells others what is kept here, or lets go of something.
    telling: AsyncMutex<()>,
    /// Rung whenever one is complete, or will not be.
    pub(crate) changed: Notify,
}

#[derive(Default)]
struct Inner {
    /// Those of which something is missing, by their names.
    coming: BTreeMap<String, Arc<Coming>>,
    /// Those that are in the pool, each with the how-manieth it was.
    whole: BTreeMap<String, u64>,
    /// For what there was no memory, and when.
    refused: BTreeMap<String, Instant>,
    next: u64,
}

impl Inner {
    /// Drops an archive that has come in part, and is not to come whole now. Says whether there was one.
    fn drop_partial(&mut self, may_go: impl Fn(&String) -> bool) -> bool {
        let mut partial = self.coming.iter().filter(|(_, coming)| !coming.is_rest_asked());
        let name = partial.find(|(name, _)| may_go(name)).map(|(name, _)| name.clone());
        name.and_then(|name| self.coming.remove(&name)).is_some()
    }
}

impl Replicas {
    pub(crate) fn new(pool: Arc<Pool>, elsewhere: Arc<Elsewhere>) -> Self {
        let (inner, telling) = (Lock::default(), AsyncMutex::default());
        Self { pool, elsewhere, inner, telling, changed: Notify::new() }
    }

    /// Where they are.
    pub(crate) fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock()
    }

    /// Bytes of an archive that others keep, with their checksum if they are to be proven; none if it is in the pool.
    ///
    /// # Errors
    ///
    /// As [`Elsewhere::read`].
    pub(crate) async fn read(
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
                    drop(tokio::spawn(boxed(async move {
                        if let Err(error) = replicas.bring_rest(&coming).await {
                            tracing::debug!(name = coming.name, %error, "its rest did not come");
                        }
                    })));
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
    fn has_begun(&self, name: &str) -> bool {
        self.inner().coming.contains_key(name) || self.pool.span(name).is_some()
    }

    /// Makes room for an archive of so many bytes, if there is none yet and it is not in the pool.
    pub(crate) fn begin(
        &self,
        name: &str,
        len: u64,
    ) -> io::Result<std::result::Result<(), Exhausted>> {
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
    pub(crate) async fn complete(self: &Arc<Self>, name: &str) -> Result<()> {
        match self.find(name) {
            Some(coming) => {
                // It is not let go of on its way.
                coming.ask_for_rest();
                self.bring_rest(&coming).await
            }
            None if self.pool.span(name).is_some() => Ok(()),
            None => Err(Self::not_whole(name)),
        }
    }

    fn not_whole(name: &str) -> Error {
        let text = format_args!("`{name}` did not come whole; get it again");
        Error::new(ErrorKind::Corrupt, text)
    }

    async fn bring_rest(self: &Arc<Self>, coming: &Arc<Coming>) -> Result<()> {
        let complete = coming.complete(&self.elsewhere).await;
        complete.inspect_err(|_| coming.give_up_rest())?;
        if let Some(memory) = coming.take() {
            let (replicas, name) = (self.clone(), coming.name.clone());
            let published = run_blocking(move || replicas.publish(&name, memory)).await;
            let number = self.number();
            let mut inner = self.inner();
            if inner.coming.get(&coming.name).is_some_and(|it| Arc::ptr_eq(it, coming)) {
                inner.coming.remove(&coming.name);
            }
            if let Ok(true) = published {
                inner.whole.insert(coming.name.clone(), number);
            }
            drop(inner);
            self.changed.notify_waiters();
            return published.map(drop);
        }
        self.settled(coming).await;
        if self.pool.span(&coming.name).is_some() {
            return Ok(());
        }
        Err(Self::not_whole(&coming.name))
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

    /// Proves an archive, and gives it its name in the pool, unless another one has that.
    fn publish(&self, name: &str, memory: Memory) -> Result<bool> {
        let failed = |error| Error::io(name, error);
        // It has its name when it is proven; until then one that is no key's.
        let unproven = format!("fetch/{}", self.number());
        match memory {
            Memory::Small(bytes) => {
                let written = self.pool.write(&unproven, &bytes).map_err(failed)?;
                written.map_err(|exhausted| Error::new(ErrorKind::Busy, exhausted))?;
            }
            Memory::Segment(writing) => writing.publish(&unproven).map_err(failed)?,
        }
        let proven = self.prove(&unproven, name);
        let is_named = proven.is_ok() && self.pool.rename(&unproven, name);
        if !is_named {
            self.pool.delete(&unproven);
        }
        proven?;
        if self.pool.span(name).is_none() {
            let text = format_args!("`{name}` was deleted meanwhile");
            return Err(Error::new(ErrorKind::Busy, text));
        }
        // If it has come from the bucket meanwhile, that is as good, and stays as long as it does.
        Ok(is_named)
    }

    /// One that no other has.
    fn number(&self) -> u64 {
        let mut inner = self.inner();
        inner.next += 1;
        inner.next
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
    pub(crate) fn is_one(&self, name: &str) -> bool {
        self.inner().whole.contains_key(name)
    }

    /// The names of what is in the pool and stays, of one key or of all.
    pub(crate) fn staying(&self, key: Option<&Key>) -> BTreeSet<String> {
        let prefix = key.map_or_else(String::new, |key| format!("{}/", key.to_path()));
        let mut names = self.pool.names(&prefix);
        names.retain(|name| !self.pool.is_doomed(name));
        names.into_iter().collect()
    }

    /// Tells others what is kept here, and nothing of that is let go of meanwhile.
    pub(crate) async fn tell<T>(&self, telling: impl Future<Output = T>) -> T {
        let _telling = self.telling.lock().await;
        telling.await
    }

    /// Lets go of something: of what has come in part and nobody reads, of the oldest that is whole and nobody reads, or,
    /// if it `must` be, of what somebody reads in part, who gets the rest without it. Says whether there was something.
    pub(crate) async fn let_go_of_one(&self, must: bool, registry: &dyn Registry) -> bool {
        // What others are told is so as long as they are told.
        let _telling = self.telling.lock().await;
        loop {
            let (name, key) = {
                let mut inner = self.inner();
                let is_free = |name: &String| !self.pool.is_held(name);
                if inner.drop_partial(is_free) {
                    return true;
                }
                let oldest = inner.whole.iter().filter(|(name, _)| is_free(name));
                let Some((name, _)) = oldest.min_by_key(|(_, number)| **number) else {
                    return must && inner.drop_partial(|_| true);
                };
                (name.clone(), key_of(name))
            };
            let may_go = match key {
                Some(key) => registry.let_go(&key, &name).await,
                None => Ok(true),
            };
            match may_go {
                Ok(may_go) => {
                    // What nobody else keeps is no replica any more.
                    self.inner().whole.remove(&name);
                    if may_go {
                        self.pool.delete(&name);
                        return true;
                    }
                }
                Err(error) => {
                    tracing::warn!(name, %error, "it is kept, because nobody can be asked");
                    return false;
                }
            }
        }
    }

    /// Lets go of the memory of an archive that is in the directory or in the bucket too, and that nobody reads: whoever
    /// asks for it has it from there. Says whether there was one.
    async fn let_go_of_lasting(&self, registry: &dyn Registry) -> bool {
        let _telling = self.telling.lock().await;
        let keys: BTreeSet<Key> =
            self.pool.names("").iter().filter_map(|name| key_of(name)).collect();
        for key in keys {
            let Ok(lasting) = registry.lasting(&key).await else { continue };
            let idle = lasting
                .into_iter()
                .find(|name| self.pool.takes_idle_memory(name) && !self.is_one(name));
            if let Some(name) = idle {
                self.pool.delete(&name);
                return true;
            }
        }
        false
    }

    /// Does something that needs memory, as [`Pool::when_free`]; what is here only because it was read goes before anybody
    /// waits.
    pub(crate) async fn in_memory<T>(
        &self,
        registry: &dyn Registry,
        waits_no_more: impl Future<Output = ()>,
        work: impl FnMut(&Arc<Pool>) -> io::Result<std::result::Result<T, Exhausted>>,
    ) -> io::Result<std::result::Result<T, Exhausted>> {
        let spare = Held { replicas: self, registry };
        self.pool.when_free(waits_no_more, &spare, work).await
    }

    /// What is read of an archive of others stays from now on, if there is memory for it.
    pub(crate) async fn make(&self, name: &str, len: u64, registry: &dyn Registry) {
        if self.has_begun(name) || self.was_refused(name) {
            return;
        }
        if let Some(key) = key_of(name)
            && self.is_first_of_its_version(name)
        {
            // What it replaces is written over. Nobody waits long for that.
            let _ = tokio::time::timeout(REGISTRY, self.drop_replaced(&key, registry)).await;
        }
        let begun = loop {
            match self.begin(name, len) {
                Ok(Err(exhausted))
                    if exhausted.wanted <= exhausted.limit
                        && self.let_go_of_one(false, registry).await => {}
                begun => break begun,
            }
        };
        let why = match begun {
            Ok(Ok(())) => return,
            Ok(Err(exhausted)) => exhausted.to_string(),
            Err(error) => error.to_string(),
        };
        tracing::debug!(name, why, "what is read of it is not kept");
        self.inner().refused.insert(name.to_owned(), Instant::now());
    }

    /// Whether there was no memory for an archive a moment ago.
    fn was_refused(&self, name: &str) -> bool {
        let mut inner = self.inner();
        inner.refused.retain(|_, since| since.elapsed() < REFUSED);
        inner.refused.contains_key(name)
    }

    /// Forgets all: whoever decides knows nothing of it any more.
    pub(crate) fn clear(&self) {
        *self.inner() = Inner::default();
        self.changed.notify_waiters();
    }

    /// The names of all.
    fn names(&self) -> Vec<String> {
        let inner = self.inner();
        inner.coming.keys().chain(inner.whole.keys()).cloned().collect()
    }

    /// Whether nothing of the version that an archive is of has been read here.
    fn is_first_of_its_version(&self, name: &str) -> bool {
        self.names().iter().all(|other| folder(other) != folder(name))
    }

    /// Drops what was read of versions of a key that are visible no more.
    async fn drop_replaced(&self, key: &Key, registry: &dyn Registry) {
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

/// What is kept, and who is asked before it goes.
struct Held<'a> {
    replicas: &'a Replicas,
    registry: &'a dyn Registry,
}

#[async_trait]
impl Spare for Held<'_> {
    async fn let_go_of_one(&self) -> bool {
        let Self { replicas, registry } = *self;
        replicas.let_go_of_one(false, registry).await
            || replicas.let_go_of_lasting(registry).await
            || replicas.let_go_of_one(true, registry).await
    }
}

/// Now and then drops what was read of versions that are visible no more.
pub(crate) async fn look_after(replicas: Arc<Replicas>, registry: Arc<dyn Registry>) {
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
pub(crate) fn key_of(name: &str) -> Option<Key> {
    let (key, _) = folder(name)?.rsplit_once('/')?;
    Key::from_path(key)
}
