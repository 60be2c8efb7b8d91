//! A meta store in the memory of this process.

use std::any::Any;
use std::collections::BTreeMap;

use async_trait::async_trait;

use super::{MetaStore, NameLocks};
use crate::blob::child_names;
use crate::error::Result;
use crate::io::sync::{Lock, MutexGuard};

#[derive(Debug, Default)]
pub(crate) struct MemoryMeta {
    records: Lock<BTreeMap<String, Vec<u8>>>,
    locks: NameLocks,
}

impl MemoryMeta {
    fn records(&self) -> MutexGuard<'_, BTreeMap<String, Vec<u8>>> {
        self.records.lock()
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

    async fn sync(&self, _name: &str) -> Result<()> {
        Ok(())
    }

    async fn get(&self, name: &str) -> Result<Option<Vec<u8>>> {
        Ok(self.records().get(name).cloned())
    }

    async fn list(&self, name: &str) -> Result<Vec<String>> {
        let prefix = if name.is_empty() { String::new() } else { format!("{name}/") };
        let records = self.records();
        let names = records.range(prefix.clone()..).map(|(name, _)| name.as_str());
        Ok(child_names(&prefix, names))
    }

    async fn delete(&self, name: &str) -> Result<()> {
        self.records().remove(name);
        Ok(())
    }

    async fn lock(&self, name: &str) -> Result<Box<dyn Any + Send>> {
        Ok(Box::new(self.locks.lock(name).await))
    }

    async fn has_ended(&self, name: &str) -> Result<bool> {
        Ok(self.locks.is_free(name))
    }
}
