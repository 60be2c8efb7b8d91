//! Records in this process.

use std::any::Any;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;

use async_trait::async_trait;

use super::{MetaStore, Turns};
use crate::error::Result;

#[derive(Debug, Default)]
pub(crate) struct MemoryMeta {
    records: Mutex<BTreeMap<String, Vec<u8>>>,
    turns: Turns,
}

impl MemoryMeta {
    fn records(&self) -> std::sync::MutexGuard<'_, BTreeMap<String, Vec<u8>>> {
        self.records.lock().expect("nobody panics while holding the records")
    }
}

#[async_trait]
impl MetaStore for MemoryMeta {
    async fn create(&self, name: &str, record: Vec<u8>) -> Result<bool> {
        let mut records = self.records();
        let is_new = !records.contains_key(name);
        if is_new {
            records.insert(name.to_owned(), record);
        }
        Ok(is_new)
    }

    async fn get(&self, name: &str) -> Result<Option<Vec<u8>>> {
        Ok(self.records().get(name).cloned())
    }

    async fn list(&self, name: &str) -> Result<Vec<String>> {
        let prefix = if name.is_empty() { String::new() } else { format!("{name}/") };
        let records = self.records();
        let below =
            records.range(prefix.clone()..).map_while(|(name, _)| name.strip_prefix(&*prefix));
        let parts: BTreeSet<&str> =
            below.map(|rest| rest.split_once('/').map_or(rest, |(part, _)| part)).collect();
        Ok(parts.into_iter().map(str::to_owned).collect())
    }

    async fn delete(&self, name: &str) -> Result<()> {
        self.records().remove(name);
        Ok(())
    }

    async fn lock(&self, name: &str) -> Result<Box<dyn Any + Send>> {
        Ok(Box::new(self.turns.take(name).await))
    }
}
