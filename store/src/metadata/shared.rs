//! Ledgers that several processes advance, each under the lock of the key.

use std::any::Any;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use super::records::{Record, Records};
use super::{LedgerGuard, Ledgers, initial_state};
use crate::error::Result;
use crate::key::Key;
use crate::ledger::{SessionId, State};
use crate::metadata::backend::MetaStore;

/// The folder of sessions. Each process that writes holds a session as long as it lives.
const SESSIONS: &str = ".sessions";

#[derive(Clone)]
pub(crate) struct SharedLedgers {
    records: Records,
    /// The state of a key that was never written.
    default_state: Arc<State>,
    /// The ledgers of the bucket from which keys without records are restored.
    origin: Option<Arc<dyn Ledgers>>,
    /// The record of this process, which other processes find under its session.
    own_record: Arc<Vec<u8>>,
}

impl SharedLedgers {
    pub(crate) fn new(meta: Arc<dyn MetaStore>) -> Self {
        let (records, default_state, own_record) =
            (Records::new(meta), Arc::default(), Arc::default());
        Self { records, default_state, origin: None, own_record }
    }

    /// Creates the ledgers of a process that other hosts find by `record`.
    ///
    /// A new key keeps its newest `keep` versions.
    pub(crate) fn for_host(meta: Arc<dyn MetaStore>, record: Vec<u8>, keep: NonZeroU32) -> Self {
        let default_state = Arc::new(State::with_keep(keep));
        Self { default_state, own_record: Arc::new(record), ..Self::new(meta) }
    }

    /// Restores keys without records from the ledgers of a bucket.
    pub(crate) fn restore(self, origin: Arc<dyn Ledgers>) -> Self {
        Self { origin: Some(origin), ..self }
    }

    /// Returns the record of a session, or `None` if the session has ended.
    pub(crate) async fn session_record(&self, id: SessionId) -> Result<Option<Vec<u8>>> {
        self.records.meta.get(&session_name(id)).await
    }

    /// Returns the records of all sessions that have not ended.
    pub(crate) async fn session_records(&self) -> Result<Vec<(SessionId, Vec<u8>)>> {
        let records = self.records.meta.list_records(SESSIONS).await?.into_iter();
        Ok(records.filter_map(|(name, record)| Some((name.parse().ok()?, record?))).collect())
    }

    async fn load(&self, key: &Key) -> Result<Record> {
        let mut record = self.records.load(key).await?;
        if record.number == 0 {
            record.state = initial_state(self.origin.as_ref(), key, &self.default_state).await?;
        }
        Ok(record)
    }
}

#[async_trait]
impl Ledgers for SharedLedgers {
    async fn state(&self, key: &Key) -> Result<Arc<State>> {
        Ok(Arc::new(self.load(key).await?.state))
    }

    async fn lock(&self, key: &Key) -> Result<Box<dyn LedgerGuard>> {
        let lock = self.records.meta.lock(&format!("{}/.lock", key.to_path())).await?;
        let (records, record) = (self.records.clone(), self.load(key).await?);
        Ok(Box::new(SharedLedgerGuard { records, key: key.clone(), record, _lock: lock }))
    }

    async fn begin_session(&self, id: SessionId) -> Result<Option<Box<dyn Any + Send>>> {
        let meta = &self.records.meta;
        let names = meta.list(SESSIONS).await?;
        // Other names are not sessions.
        for other in names.iter().filter_map(|name| name.parse().ok()) {
            // This removes the remains of a session that has ended. If it fails, a later call removes them.
            let _ = meta.has_ended(&session_name(other)).await;
        }
        meta.hold_session(&session_name(id), self.own_record.to_vec()).await.map(Some)
    }

    async fn has_ended(&self, id: SessionId) -> Result<bool> {
        self.records.meta.has_ended(&session_name(id)).await
    }

    async fn keys(&self) -> Result<Vec<Key>> {
        let mut keys = self.records.keys().await?;
        if let Some(origin) = &self.origin {
            match origin.keys().await {
                Ok(others) => keys.extend(others),
                Err(error) => tracing::warn!(%error, "the keys in the bucket cannot be listed"),
            }
            keys.sort_unstable();
            keys.dedup();
        }
        Ok(keys)
    }

    async fn changed(&self, key: &Key, seen: &Arc<State>, timeout: Duration) {
        let mut watch = self.records.watch(key, timeout);
        while watch.changed().await {
            // The caller finds a read error when it loads the state.
            if self.load(key).await.map_or(true, |record| record.state != **seen) {
                return;
            }
        }
    }
}

struct SharedLedgerGuard {
    records: Records,
    key: Key,
    record: Record,
    _lock: Box<dyn Any + Send>,
}

#[async_trait]
impl LedgerGuard for SharedLedgerGuard {
    fn state(&self) -> &State {
        &self.record.state
    }

    async fn sync(&mut self) -> Result<()> {
        self.records.sync(&self.key, &self.record).await
    }

    async fn save(&mut self, next: State) -> Result<bool> {
        self.records.append(&self.key, &mut self.record, next).await
    }
}

fn session_name(id: SessionId) -> String {
    format!("{SESSIONS}/{id}")
}
