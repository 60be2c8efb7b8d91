//! Ledgers that several processes advance: whoever does locks the key.

use std::any::Any;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use super::records::{Record, Records};
use super::{Ledgers, Turn, first};
use crate::error::Result;
use crate::key::Key;
use crate::ledger::{SessionId, State};
use crate::metadata::backend::MetaStore;

/// Where each process that writes holds a session as long as it lives.
const SESSIONS: &str = ".sessions";

#[derive(Clone)]
pub(crate) struct SharedLedgers {
    records: Records,
    /// What the ledger of a key is before anybody has written it.
    blank: Arc<State>,
    /// Where keys are found of which nothing is recorded.
    origin: Option<Arc<dyn Ledgers>>,
    /// What others find under the session of this process.
    record: Arc<Vec<u8>>,
}

impl SharedLedgers {
    pub(crate) fn new(meta: Arc<dyn MetaStore>) -> Self {
        let (records, blank, record) = (Records::new(meta), Arc::default(), Arc::default());
        Self { records, blank, origin: None, record }
    }

    /// The same of a process that others find by what is said here, and which keeps so many versions of a key as long
    /// as nobody says otherwise.
    pub(crate) fn of_host(meta: Arc<dyn MetaStore>, record: Vec<u8>, keep: NonZeroU32) -> Self {
        let blank = Arc::new(State::keeping(keep));
        Self { blank, record: Arc::new(record), ..Self::new(meta) }
    }

    /// The same, with the versions that are in a bucket, of the keys of which nothing is recorded.
    pub(crate) fn restore(self, origin: Arc<dyn Ledgers>) -> Self {
        Self { origin: Some(origin), ..self }
    }

    /// What a process has said of itself; none if it has ended.
    pub(crate) async fn session_record(&self, id: SessionId) -> Result<Option<Vec<u8>>> {
        self.records.meta.get(&session_name(id)).await
    }

    /// What all processes that have not ended have said of themselves.
    pub(crate) async fn session_records(&self) -> Result<Vec<(SessionId, Vec<u8>)>> {
        let records = self.records.meta.list_records(SESSIONS).await?.into_iter();
        Ok(records.filter_map(|(name, record)| Some((name.parse().ok()?, record?))).collect())
    }

    async fn load(&self, key: &Key) -> Result<Record> {
        let mut record = self.records.load(key).await?;
        if record.number == 0 {
            record.state = first(self.origin.as_ref(), key, &self.blank).await?;
        }
        Ok(record)
    }
}

#[async_trait]
impl Ledgers for SharedLedgers {
    async fn state(&self, key: &Key) -> Result<Arc<State>> {
        Ok(Arc::new(self.load(key).await?.state))
    }

    async fn turn(&self, key: &Key) -> Result<Box<dyn Turn>> {
        let lock = self.records.meta.lock(&format!("{}/.lock", key.to_path())).await?;
        let (records, record) = (self.records.clone(), self.load(key).await?);
        Ok(Box::new(SharedTurn { records, key: key.clone(), record, _lock: lock }))
    }

    async fn session(&self, id: SessionId) -> Result<Option<Box<dyn Any + Send>>> {
        let meta = &self.records.meta;
        let names = meta.list(SESSIONS).await?;
        // What has another name is not ours.
        for other in names.iter().filter_map(|name| name.parse().ok()) {
            // What a process that has ended has left behind goes now or later.
            let _ = meta.has_ended(&session_name(other)).await;
        }
        meta.session(&session_name(id), self.record.to_vec()).await.map(Some)
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

    async fn changed(&self, key: &Key, seen: &Arc<State>, patience: Duration) {
        let mut watch = self.records.watch(key, patience);
        while watch.changed().await {
            // What cannot be read now is for the caller to find.
            if self.load(key).await.map_or(true, |record| record.state != **seen) {
                return;
            }
        }
    }
}

struct SharedTurn {
    records: Records,
    key: Key,
    record: Record,
    _lock: Box<dyn Any + Send>,
}

#[async_trait]
impl Turn for SharedTurn {
    fn state(&self) -> &State {
        &self.record.state
    }

    async fn settle(&mut self) -> Result<()> {
        self.records.settle(&self.key, &self.record).await
    }

    async fn save(&mut self, next: State) -> Result<bool> {
        self.records.append(&self.key, &mut self.record, next).await
    }
}

fn session_name(id: SessionId) -> String {
    format!("{SESSIONS}/{id}")
}
