use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tracing::Instrument;
use tssd_format::StateDict;

use super::get::{GetContext, GetOptions, PlanCache};
use super::put::{self, PendingPut, PutOptions, PutReport, WriterProcess};
use super::version::{Contents, OpenVersion};
use crate::control::{Controller, LocatedVersion, VersionFollower};
use crate::error::Result;
use crate::io::exec::run_blocking;
use crate::io::sync::Lock;
use crate::key::Key;

/// Number of keys whose last contents are kept.
const MAX_KNOWN_CONTENTS: usize = 16;

/// The state that all operations on one store share.
pub(crate) struct Context {
    get: GetContext,
    /// Contents of the version of each key that was read last: its index and its verified chunks.
    known_contents: Lock<BTreeMap<Key, Arc<Contents>>>,
    writer_process: Arc<WriterProcess>,
}

impl Context {
    pub(crate) fn new(controller: impl Controller + 'static) -> Self {
        Self {
            get: GetContext { controller: Arc::new(controller), plans: PlanCache::default() },
            known_contents: Lock::default(),
            writer_process: Arc::new(WriterProcess::new()),
        }
    }

    pub(crate) fn controller(&self) -> &Arc<dyn Controller> {
        &self.get.controller
    }

    /// Returns the state that gets share.
    pub(crate) fn get(&self) -> &GetContext {
        &self.get
    }

    pub(crate) fn writer_process(&self) -> &Arc<WriterProcess> {
        &self.writer_process
    }

    /// Puts a state dict as one archive.
    pub(crate) async fn put(
        &self,
        key: &Key,
        dict: &StateDict,
        options: &PutOptions,
    ) -> Result<PutReport> {
        put::put(self.controller(), &self.writer_process, key, dict, options).await
    }

    /// As [`Context::put`], but returns as soon as the memory of the state dict is no longer read.
    pub(crate) async fn put_later(
        &self,
        key: &Key,
        dict: &StateDict,
        options: &PutOptions,
    ) -> Result<PendingPut> {
        put::put_later(self.controller(), &self.writer_process, key, dict, options).await
    }

    /// Opens a version.
    pub(crate) async fn open(&self, key: &Key, options: &GetOptions) -> Result<OpenVersion> {
        let span = tracing::debug_span!("get", %key, version = tracing::field::Empty);
        let started = Instant::now();
        let locate = self.controller().locate(key, options.version.clone());
        let located = locate.instrument(span.clone()).await?;
        located.route.check_required(options.require_transport)?;
        let locate_seconds = started.elapsed().as_secs_f64();
        let version = self.open_located(&span, key, located).await?;
        let entered = span.enter();
        tracing::debug!(locate_seconds, seconds = started.elapsed().as_secs_f64(), "open");
        drop(entered);
        Ok(version)
    }

    /// Opens the next version that a follower receives. None after `timeout`.
    pub(crate) async fn open_next(
        &self,
        key: &Key,
        following: &mut dyn VersionFollower,
        options: &GetOptions,
        timeout: Duration,
    ) -> Result<Option<OpenVersion>> {
        let Some(located) = following.next(timeout).await? else { return Ok(None) };
        located.route.check_required(options.require_transport)?;
        let span = tracing::debug_span!("get", %key, version = tracing::field::Empty);
        self.open_located(&span, key, located).await.map(Some)
    }

    async fn open_located(
        &self,
        span: &tracing::Span,
        key: &Key,
        located: LocatedVersion,
    ) -> Result<OpenVersion> {
        let known = self.known_contents.lock().get(key).cloned();
        let is_remote = located.archives.values().any(|archive| archive.remote().is_some());
        let in_span = span.clone();
        let open = move || in_span.in_scope(|| OpenVersion::open(located, known));
        // The index of a remote archive is requested.
        let version = if is_remote { run_blocking(open).await? } else { open()? };
        let mut known = self.known_contents.lock();
        if known.len() >= MAX_KNOWN_CONTENTS && !known.contains_key(key) {
            known.pop_first();
        }
        known.insert(key.clone(), version.contents().clone());
        drop(known);
        span.record("version", version.number);
        Ok(version)
    }
}

impl std::fmt::Debug for Context {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Context")
    }
}
