//! A metadata store with random faults, before or after the execution of a request.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;

use crate::error::{Error, ErrorKind, Result};
use crate::metadata::backend::{MetaStore, Watch};

/// A metadata store with random faults.
pub(super) struct FaultyMetaStore {
    inner: Arc<dyn MetaStore>,
    seed: AtomicU64,
    /// Number of failed requests that were executed.
    executed: AtomicU64,
    /// Number of failed requests that were not executed.
    not_executed: AtomicU64,
}

impl FaultyMetaStore {
    pub(super) fn new(inner: Arc<dyn MetaStore>, seed: u64) -> Self {
        let (executed, not_executed) = (AtomicU64::new(0), AtomicU64::new(0));
        Self { inner, seed: AtomicU64::new(seed), executed, not_executed }
    }

    /// Returns the underlying store, which does not fail.
    pub(super) fn inner(&self) -> Arc<dyn MetaStore> {
        self.inner.clone()
    }

    /// Returns whether both kinds of fault have occurred: after execution, and without execution.
    pub(super) fn has_triggered_all_faults(&self) -> bool {
        [&self.executed, &self.not_executed]
            .into_iter()
            .all(|count| count.load(Ordering::Relaxed) > 0)
    }

    /// Executes a request with a random fault.
    ///
    /// With probability 1/8 the request is executed and its response is lost. With probability 1/8 it is not executed.
    async fn execute<T>(&self, work: impl Future<Output = Result<T>>) -> Result<T> {
        let step = self.seed.fetch_add(0x9E37_79B9_7F4A_7C15, Ordering::Relaxed);
        let mixed = (step ^ (step >> 31)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let failed = |count: &AtomicU64| {
            count.fetch_add(1, Ordering::Relaxed);
            Error::new(ErrorKind::Unreachable, "it fails now and then")
        };
        match mixed >> 61 {
            0 => Err(failed(&self.not_executed)),
            1 => {
                work.await?;
                Err(failed(&self.executed))
            }
            _ => work.await,
        }
    }
}

#[async_trait]
impl MetaStore for FaultyMetaStore {
    async fn create(&self, name: &str, record: Vec<u8>) -> Result<bool> {
        self.execute(self.inner.create(name, record)).await
    }

    async fn list_records(&self, name: &str) -> Result<Vec<(String, Option<Vec<u8>>)>> {
        self.execute(self.inner.list_records(name)).await
    }

    async fn create_next(
        &self,
        folder: &str,
        last: Option<&str>,
        next: &str,
        record: Vec<u8>,
    ) -> Result<bool> {
        self.execute(self.inner.create_next(folder, last, next, record)).await
    }

    async fn sync(&self, name: &str) -> Result<()> {
        self.execute(self.inner.sync(name)).await
    }

    async fn get(&self, name: &str) -> Result<Option<Vec<u8>>> {
        self.execute(self.inner.get(name)).await
    }

    async fn list(&self, name: &str) -> Result<Vec<String>> {
        self.execute(self.inner.list(name)).await
    }

    async fn delete(&self, name: &str) -> Result<()> {
        self.execute(self.inner.delete(name)).await
    }

    async fn delete_superseded(&self, folder: &str, names: Vec<String>) -> Vec<String> {
        self.inner.delete_superseded(folder, names).await
    }

    fn grace_period(&self) -> Option<Duration> {
        self.inner.grace_period()
    }

    fn excludes_other_processes(&self) -> bool {
        self.inner.excludes_other_processes()
    }

    async fn lock(&self, name: &str) -> Result<Box<dyn Any + Send>> {
        self.execute(self.inner.lock(name)).await
    }

    async fn hold_session(&self, name: &str, record: Vec<u8>) -> Result<Box<dyn Any + Send>> {
        self.execute(self.inner.hold_session(name, record)).await
    }

    async fn has_ended(&self, name: &str) -> Result<bool> {
        self.execute(self.inner.has_ended(name)).await
    }

    fn watch(&self, name: &str, timeout: Duration) -> Box<dyn Watch> {
        self.inner.watch(name, timeout)
    }
}
