//! A meta store of objects in a bucket.

use std::any::Any;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use object_store::{ObjectStore, ObjectStoreExt, PutMode, PutPayload};

use super::{MetaStore, NameLocks, PollingWatch, Watch};
use crate::error::{Error, ErrorKind, Result};
use crate::io::bucket::{Bucket, optional, retry};
use crate::io::environment::{Environment, SystemEnvironment};
use crate::io::exec::backoff;

/// Minimum time that a superseded record stays.
///
/// A bucket cannot exclude other processes. A process that was paused must find that the record it is about to create
/// exists already.
const GRACE: Duration = Duration::from_mins(10);

/// Number of superseded records from which on they are deleted.
const RETIRE_THRESHOLD: usize = 32;

/// Maximum interval at which a watch polls.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// Maximum number of attempts to create a record that neither exists nor can be created.
const MAX_ATTEMPTS: u32 = 8;

/// Time after which creating a record is not retried.
const RETRY_LIMIT: Duration = Duration::from_secs(30);

/// Length in bytes of the token that follows each record: 32 hexadecimal digits that identify its creation.
const TOKEN_BYTES: usize = 32;

pub(crate) struct ObjectMeta {
    bucket: Bucket,
    locks: NameLocks,
    environment: SystemEnvironment,
    grace: Duration,
}

impl ObjectMeta {
    pub(crate) fn new(bucket: Bucket) -> Self {
        let (locks, environment) = (NameLocks::default(), SystemEnvironment);
        Self { bucket, locks, environment, grace: GRACE }
    }

    /// Returns the meta store with another grace period.
    #[cfg(test)]
    pub(crate) fn with_grace_period(self, grace: Duration) -> Self {
        Self { grace, ..self }
    }

    /// Reads a record and its token.
    async fn read(&self, name: &str) -> Result<Option<(Vec<u8>, Vec<u8>)>> {
        let (objects, path) = (self.bucket.objects(), self.bucket.path(name)?);
        let read = async move {
            let get = || async { objects.get(&path).await?.bytes().await };
            optional(retry(get).await)
        };
        let Some(object) = self.bucket.request(name, read).await? else { return Ok(None) };
        let mut record = object.to_vec();
        let Some(len) = record.len().checked_sub(TOKEN_BYTES) else {
            let text = format_args!("`{}` is cut off", self.bucket.display_name(name));
            return Err(Error::new(ErrorKind::Corrupt, text));
        };
        let token = record.split_off(len);
        Ok(Some((record, token)))
    }
}

#[async_trait]
impl MetaStore for ObjectMeta {
    /// Creates a record.
    ///
    /// If the response to a request is lost, the retry finds that the object exists. The token shows whether this call
    /// created it.
    async fn create(&self, name: &str, mut record: Vec<u8>) -> Result<bool> {
        let token = format!("{:032x}", self.environment.random_id());
        record.extend(token.as_bytes());
        let (payload, path) = (PutPayload::from(record), self.bucket.path(name)?);
        let (started, mut last) = (Instant::now(), None);
        for round in 0..MAX_ATTEMPTS {
            if round > 0 {
                if started.elapsed() > RETRY_LIMIT {
                    break;
                }
                backoff(round).await;
            }
            let (objects, path, payload) = (self.bucket.objects(), path.clone(), payload.clone());
            let create = async move {
                match objects.put_opts(&path, payload, PutMode::Create.into()).await {
                    Ok(_) => Ok(Some(true)),
                    Err(
                        object_store::Error::AlreadyExists { .. }
                        | object_store::Error::Precondition { .. },
                    ) => Ok(None),
                    Err(error) => Err(error),
                }
            };
            match self.bucket.request(name, create).await {
                Ok(Some(created)) => return Ok(created),
                Ok(None) => {}
                Err(error) if error.kind() != ErrorKind::Unreachable => return Err(error),
                Err(error) => last = Some(error),
            }
            match self.read(name).await {
                Ok(Some((_, found))) => return Ok(found == token.as_bytes()),
                // The object does not exist. A concurrent create made this one fail, and then failed itself.
                Ok(None) => {}
                Err(error) => last = Some(error),
            }
        }
        let busy = || {
            let text =
                format_args!("`{}` is neither there nor free", self.bucket.display_name(name));
            Error::new(ErrorKind::Busy, text)
        };
        Err(last.unwrap_or_else(busy))
    }

    async fn sync(&self, _name: &str) -> Result<()> {
        Ok(())
    }

    async fn get(&self, name: &str) -> Result<Option<Vec<u8>>> {
        Ok(self.read(name).await?.map(|(record, _)| record))
    }

    async fn list(&self, name: &str) -> Result<Vec<String>> {
        self.bucket.request(name, self.bucket.list(name)?).await
    }

    async fn delete(&self, name: &str) -> Result<()> {
        let (objects, path) = (self.bucket.objects(), self.bucket.path(name)?);
        let deleted = self.bucket.request(name, async move { objects.delete(&path).await }).await;
        match deleted {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            deleted => deleted,
        }
    }

    /// Deletes records that were superseded before the grace period, by the clock of the bucket.
    async fn delete_superseded(&self, folder: &str, names: Vec<String>) -> Vec<String> {
        if names.len() < RETIRE_THRESHOLD {
            return names;
        }
        let Ok(path) = self.bucket.path(folder) else { return names };
        let objects = self.bucket.objects();
        let listed = async move { objects.list_with_delimiter(Some(&path)).await };
        let Ok(listed) = self.bucket.request(folder, listed).await else { return names };
        let mut records: Vec<_> = listed
            .objects
            .iter()
            .filter_map(|object| Some((object.location.filename()?, object.last_modified)))
            .collect();
        records.sort_unstable();
        let Some(now) = records.iter().map(|(_, created)| *created).max() else { return names };
        let superseded = records.windows(2).map(|pair| (pair[0].0, now - pair[1].1));
        let mut deleted = Vec::new();
        // Oldest first. A gap would look like the end of the records.
        for (name, age) in superseded {
            if age.to_std().is_ok_and(|age| age <= self.grace) {
                break;
            }
            // Other objects of the folder are not records of the ledger.
            if !names.iter().any(|record| record == name) {
                continue;
            }
            if self.delete(&format!("{folder}/{name}")).await.is_err() {
                break;
            }
            deleted.push(name);
        }
        names.into_iter().filter(|name| !deleted.contains(&name.as_str())).collect()
    }

    fn grace_period(&self) -> Option<Duration> {
        Some(self.grace)
    }

    fn excludes_other_processes(&self) -> bool {
        false
    }

    async fn lock(&self, name: &str) -> Result<Box<dyn Any + Send>> {
        Ok(Box::new(self.locks.lock(name).await))
    }

    async fn has_ended(&self, _name: &str) -> Result<bool> {
        Ok(false)
    }

    fn watch(&self, _name: &str, timeout: Duration) -> Box<dyn Watch> {
        Box::new(PollingWatch::new(POLL_INTERVAL, timeout))
    }
}
