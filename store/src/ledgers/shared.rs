//! Ledgers that several processes advance: whoever does locks the key.

use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use super::records::{Record, Records};
use super::{Ledgers, Turn};
use crate::error::Result;
use crate::key::Key;
use crate::ledger::{SessionId, State};
use crate::meta::MetaStore;

/// Where each process that writes holds a session as long as it lives.
const SESSIONS: &str = ".sessions";

#[derive(Clone)]
pub(crate) struct SharedLedgers(Records);

impl SharedLedgers {
    pub(crate) fn new(meta: Arc<dyn MetaStore>) -> Self {
        Self(Records::new(meta))
    }
}

#[async_trait]
impl Ledgers for SharedLedgers {
    async fn state(&self, key: &Key) -> Result<Arc<State>> {
        Ok(Arc::new(self.0.load(key).await?.state))
    }

    async fn turn(&self, key: &Key) -> Result<Box<dyn Turn>> {
        let lock = self.0.meta.lock(&format!("{}/.lock", key.to_path())).await?;
        let record = self.0.load(key).await?;
        Ok(Box::new(SharedTurn { records: self.0.clone(), key: key.clone(), record, _lock: lock }))
    }

    async fn session(&self, id: SessionId) -> Result<Option<Box<dyn Any + Send>>> {
        let meta = &self.0.meta;
        let names = meta.list(SESSIONS).await?;
        // What has another name is not ours.
        for other in names.iter().filter_map(|name| name.parse().ok()) {
            // What a process that has ended has left behind goes now or later.
            let _ = meta.has_ended(&session_name(other)).await;
        }
        meta.lock(&session_name(id)).await.map(Some)
    }

    async fn has_ended(&self, id: SessionId) -> Result<bool> {
        self.0.meta.has_ended(&session_name(id)).await
    }

    async fn keys(&self) -> Result<Vec<Key>> {
        self.0.keys().await
    }

    async fn changed(&self, key: &Key, seen: &Arc<State>, patience: Duration) {
        let mut watch = self.0.watch(key, patience);
        while watch.changed().await {
            // What cannot be read now is for the caller to find.
            if self.0.load(key).await.map_or(true, |record| record.state != **seen) {
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
