//! The bases of replicas: archives of earlier versions from which later ones come as differences.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Inner, Replicas, blob_key, version_folder};
use crate::control::layout::ArchiveName;
use crate::daemon::control_plane::ControlPlane;
use crate::daemon::delta_base::{
    DeltaBase, HeldArchive, RETENTION, newest_earlier, oldest_later, retain_versions,
};
use crate::daemon::replicas::partial::PartialReplica;
use crate::daemon::replicas::progress::FetchProgress;
use crate::io::exec::run_blocking;
use crate::key::Key;
use crate::shm::Retain;

/// Time without a fetch after which a replica needs no base any more.
const BASE_IDLE_TIMEOUT: Duration = Duration::from_secs(10);

impl Inner {
    /// Keeps an incomplete replica as a base, instead of those of other versions of its key.
    pub(super) fn keep_as_base(&mut self, replica: Arc<PartialReplica>) {
        // A base keeps no base of its own.
        drop(replica.take_base());
        let name = &replica.name;
        let is_older = |other: &String| {
            blob_key(other) == blob_key(name) && version_folder(other) != version_folder(name)
        };
        self.replaced.retain(|other, _| !is_older(other));
        self.replaced.insert(name.clone(), replica);
    }
}

impl Replicas {
    /// Returns the newest archive that is like another one, of an earlier version, if there is one in memory.
    pub(super) fn find_base(
        &self,
        inner: &Inner,
        name: &str,
        len: u64,
    ) -> Option<Arc<dyn DeltaBase>> {
        let partial = || inner.partial.values().chain(inner.replaced.values());
        let prefix = ArchiveName::parse(name)?.prefix();
        let complete = self.pool.names_with_retained(&prefix);
        let all = partial().map(|it| (it.name.clone(), it.len())).chain(complete);
        let base = newest_earlier(name, len, all)?;
        if let Some(replica) = partial().find(|it| it.name == base) {
            return Some(replica.clone());
        }
        Some(Arc::new(HeldArchive::open(&self.pool, &base)?))
    }

    /// Returns whether this daemon can send an archive as a difference from one that another daemon has, or will be able to.
    pub(crate) fn has_base(&self, name: &str, base: &str) -> bool {
        if !self.deltas || !self.is_allocated(name) {
            return false;
        }
        if self.encoder.has_base(name, base) {
            return true;
        }
        // It passes differences on that it has received.
        let inner = self.inner();
        let own = match (inner.partial.get(name), inner.complete.get(name)) {
            (Some(replica), _) => replica.base_name(),
            (None, Some(replica)) => replica.base.as_ref().map(|base| base.name().to_owned()),
            (None, None) => None,
        };
        own.is_some_and(|own| own == base)
    }

    /// Has the version of a key retained that the next put replaces: its upload to the bucket may be a delta.
    pub(crate) fn retain_base(&self, key: &Key) {
        let prefix = format!("{}/", key.to_path());
        self.pool.retain_deleted(&prefix, Retain::Superseded, Instant::now() + RETENTION);
        self.encoder.history().record_request(prefix);
    }

    /// Derives the differences of retained archives from those that follow them. Then their memory is free.
    ///
    /// The differences are short, so hosts that have an earlier version can have the newest one as a difference for longer.
    pub(super) async fn derive_deltas(self: &Arc<Self>) {
        for (earlier, len) in self.pool.retained() {
            let Some(name) = ArchiveName::parse(&earlier) else { continue };
            let complete = self.pool.names_with_retained(&name.prefix());
            let Some(later) = oldest_later(&earlier, len, complete) else { continue };
            let (encoder, names) = (self.encoder.clone(), [later, earlier.clone()]);
            let derived = run_blocking(move || {
                let [later, earlier] = &names;
                encoder.derive(later, earlier)
            });
            if let Err(error) = derived.await {
                tracing::warn!(earlier, %error, "its difference from the next version is not kept");
            }
            self.pool.free_retained(&earlier);
        }
    }

    /// Frees bases that no transfer needs any more, and has the archives retained that are bases of the next version.
    pub(super) async fn maintain_bases(&self, control_plane: &dyn ControlPlane) {
        self.pool.free_expired();
        self.encoder.forget_unused(BASE_IDLE_TIMEOUT);
        self.encoder.history().forget_unused();
        self.release_idle_bases();
        self.free_deleted_keys(control_plane).await;
        if self.deltas {
            for name in self.names() {
                retain_versions(&self.pool, &name, Retain::Last);
            }
        }
    }

    /// Frees what is retained of keys without versions, and incomplete replicas that are retained for too long.
    async fn free_deleted_keys(&self, control_plane: &dyn ControlPlane) {
        let mut prefixes = self.pool.retained_prefixes();
        prefixes.extend(self.encoder.history().prefixes());
        let is_retained = |name: &String| prefixes.iter().any(|prefix| name.starts_with(prefix));
        self.inner().replaced.retain(|name, _| is_retained(name));
        for prefix in &prefixes {
            let Some(key) = prefix.strip_suffix('/').and_then(Key::from_path) else { continue };
            // Without an answer, there may be versions.
            if control_plane.versions(&key).await.is_ok_and(|versions| versions.is_empty()) {
                self.pool.free_retained(prefix);
                self.encoder.history().forget(prefix);
                self.inner().replaced.retain(|name, _| blob_key(name).as_ref() != Some(&key));
            }
        }
    }

    /// Releases the bases of replicas for which nothing was fetched for a while.
    fn release_idle_bases(&self) {
        let now = Instant::now();
        let is_idle = |progress: &FetchProgress| {
            now.saturating_duration_since(progress.span(now).1) > BASE_IDLE_TIMEOUT
        };
        let mut inner = self.inner();
        let partial = inner.partial.values().filter(|replica| is_idle(&replica.progress));
        let mut bases: Vec<_> = partial.filter_map(|replica| replica.take_base()).collect();
        let complete = inner.complete.values_mut().filter(|replica| is_idle(&replica.progress));
        bases.extend(complete.filter_map(|replica| replica.base.take()));
        drop(inner);
        for base in bases {
            self.free_base(base);
        }
    }

    /// Frees the archive from which another one came as a difference. That one is the next base.
    fn free_base(&self, base: Arc<dyn DeltaBase>) {
        let name = base.name().to_owned();
        drop(base);
        self.inner().replaced.remove(&name);
        // `derive_deltas` frees it otherwise.
        if !self.encoder.history().is_requested(&name) {
            self.pool.free_retained(&name);
        }
    }

    /// Frees a base that is kept for other daemons only. Returns whether there was one.
    pub(super) fn evict_base(&self) -> bool {
        let base = self.inner().complete.values_mut().find_map(|replica| replica.base.take());
        let Some(base) = base else { return false };
        let name = base.name().to_owned();
        self.free_base(base);
        self.pool.free_retained(&name);
        true
    }
}
