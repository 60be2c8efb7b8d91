//! A meta store that fails now and then, before or after what it was asked for is done.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;

use crate::error::{Error, ErrorKind, Result};
use crate::metadata::backend::{MetaStore, Watch};

pub(super) struct Faulty {
    inner: Arc<dyn MetaStore>,
    seed: AtomicU64,
    /// How many requests have failed that were done, and that were not.
    done: AtomicU64,
    not_done: AtomicU64,
}

impl Faulty {
    pub(super) fn new(inner: Arc<dyn MetaStore>, seed: u64) -> Self {
        let (done, not_done) = (AtomicU64::new(0), AtomicU64::new(0));
        Self { inner, seed: AtomicU64::new(seed), done, not_done }
    }

    /// The same, which does not fail.
    pub(super) fn bare(&self) -> Arc<dyn MetaStore> {
        self.inner.clone()
    }

    /// Whether requests have failed that were done, and such that were not.
    pub(super) fn has_failed(&self) -> bool {
        [&self.done, &self.not_done].into_iter().all(|count| count.load(Ordering::Relaxed) > 0)
    }

    /// Of eight requests one is done and its answer is lost, and another one is not done.
    async fn may<T>(&self, work: impl Future<Output = Result<T>>) -> Result<T> {
        let step = self.seed.fetch_add(0x9E37_79B9_7F4A_7C15, Ordering::Relaxed);
        let mixed = (step ^ (step >> 31)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let failed = |count: &AtomicU64| {
            count.fetch_add(1, Ordering::Relaxed);
            Error::new(ErrorKind::Unreachable, "it fails now and then")
        };
        match mixed >> 61 {
            0 => Err(failed(&self.not_done)),
            1 => {
                work.await?;
                Err(failed(&self.done))
            }
            _ => work.await,
        }
    }
}

#[async_trait]
impl MetaStore for Faulty {
    async fn create(&self, name: &str, record: Vec<u8>) -> Result<bool> {
        self.may(self.inner.create(name, record)).await
    }

    async fn list_records(&self, name: &str) -> Result<Vec<(String, Option<Vec<u8>>)>> {
        self.may(self.inner.list_records(name)).await
    }

    async fn follow(
        &self,
        folder: &str,
        last: Option<&str>,
        next: &str,
        record: Vec<u8>,
    ) -> Result<bool> {
        self.may(self.inner.follow(folder, last, next, record)).await
    }

    async fn settle(&self, name: &str) -> Result<()> {
        self.may(self.inner.settle(name)).await
    }

    async fn get(&self, name: &str) -> Result<Option<Vec<u8>>> {
        self.may(self.inner.get(name)).await
    }

    async fn list(&self, name: &str) -> Result<Vec<String>> {
        self.may(self.inner.list(name)).await
    }

    async fn delete(&self, name: &str) -> Result<()> {
        self.may(self.inner.delete(name)).await
    }

    async fn retire(&self, folder: &str, names: Vec<String>) -> Vec<String> {
        self.inner.retire(folder, names).await
    }

    fn grace(&self) -> Option<Duration> {
        self.inner.grace()
    }

    fn keeps_away(&self) -> bool {
        self.inner.keeps_away()
    }

    async fn lock(&self, name: &str) -> Result<Box<dyn Any + Send>> {
        self.may(self.inner.lock(name)).await
    }

    async fn session(&self, name: &str, record: Vec<u8>) -> Result<Box<dyn Any + Send>> {
        self.may(self.inner.session(name, record)).await
    }

    async fn has_ended(&self, name: &str) -> Result<bool> {
        self.may(self.inner.has_ended(name)).await
    }

    fn watch(&self, name: &str, patience: Duration) -> Box<dyn Watch> {
        self.inner.watch(name, patience)
    }
}
