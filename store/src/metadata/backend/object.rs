//! Records as objects of a bucket.

use std::any::Any;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use object_store::{ObjectStore, ObjectStoreExt, PutMode, PutPayload};

use super::{MetaStore, Poll, Turns, Watch};
use crate::error::{Error, ErrorKind, Result};
use crate::io::bucket::{Bucket, again, optional};
use crate::io::environment::{Environment, SystemEnvironment};
use crate::io::exec::backoff;

/// How long a record that others have followed stays. Nobody can be kept from creating one, so who has stopped in
/// between must find that it is there.
const GRACE: Duration = Duration::from_mins(10);

/// Records that others have followed are looked through when there are so many of them.
const RETIRE_AT: usize = 32;

/// How often a record is looked for by somebody who waits.
const POLL: Duration = Duration::from_millis(500);

/// How often it is tried to create a record that is neither there nor can be created.
const TRIES: u32 = 8;

/// After this time it is not tried again.
const PATIENCE: Duration = Duration::from_secs(30);

/// Behind each record stands who has created it: 32 hexadecimal digits.
const TOKEN_BYTES: usize = 32;

pub(crate) struct ObjectMeta {
    bucket: Bucket,
    turns: Turns,
    environment: SystemEnvironment,
    grace: Duration,
}

impl ObjectMeta {
    pub(crate) fn new(bucket: Bucket) -> Self {
        let (turns, environment) = (Turns::default(), SystemEnvironment);
        Self { bucket, turns, environment, grace: GRACE }
    }

    /// The same, whose records stay for another time.
    #[cfg(test)]
    pub(crate) fn keeping(self, grace: Duration) -> Self {
        Self { grace, ..self }
    }

    /// What is under a name, with its token.
    async fn read(&self, name: &str) -> Result<Option<(Vec<u8>, Vec<u8>)>> {
        let (objects, path) = (self.bucket.objects(), self.bucket.path(name)?);
        let read = async move {
            let get = || async { objects.get(&path).await?.bytes().await };
            optional(again(get).await)
        };
        let Some(object) = self.bucket.ask(name, read).await? else { return Ok(None) };
        let mut record = object.to_vec();
        let Some(len) = record.len().checked_sub(TOKEN_BYTES) else {
            let text = format_args!("`{}` is cut off", self.bucket.shown(name));
            return Err(Error::new(ErrorKind::Corrupt, text));
        };
        let token = record.split_off(len);
        Ok(Some((record, token)))
    }
}

#[async_trait]
impl MetaStore for ObjectMeta {
    /// An answer that says that there is such an object may be one to an earlier request of this call, whose own
    /// answer was lost: the token tells.
    async fn create(&self, name: &str, mut record: Vec<u8>) -> Result<bool> {
        let token = format!("{:032x}", self.environment.random());
        record.extend(token.as_bytes());
        let (payload, path) = (PutPayload::from(record), self.bucket.path(name)?);
        let (started, mut last) = (Instant::now(), None);
        for round in 0..TRIES {
            if round > 0 {
                if started.elapsed() > PATIENCE {
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
            match self.bucket.ask(name, create).await {
                Ok(Some(created)) => return Ok(created),
                Ok(None) => {}
                Err(error) if error.kind() != ErrorKind::Unreachable => return Err(error),
                Err(error) => last = Some(error),
            }
            match self.read(name).await {
                Ok(Some((_, found))) => return Ok(found == token.as_bytes()),
                // It was in the way of another one's that has failed.
                Ok(None) => {}
                Err(error) => last = Some(error),
            }
        }
        let busy = || {
            let text = format_args!("`{}` is neither there nor free", self.bucket.shown(name));
            Error::new(ErrorKind::Busy, text)
        };
        Err(last.unwrap_or_else(busy))
    }

    async fn settle(&self, _name: &str) -> Result<()> {
        Ok(())
    }

    async fn get(&self, name: &str) -> Result<Option<Vec<u8>>> {
        Ok(self.read(name).await?.map(|(record, _)| record))
    }

    async fn list(&self, name: &str) -> Result<Vec<String>> {
        self.bucket.ask(name, self.bucket.list(name)?).await
    }

    async fn delete(&self, name: &str) -> Result<()> {
        let (objects, path) = (self.bucket.objects(), self.bucket.path(name)?);
        let deleted = self.bucket.ask(name, async move { objects.delete(&path).await }).await;
        match deleted {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            deleted => deleted,
        }
    }

    /// By the bucket's own clock: a record is followed when the next one is created.
    async fn retire(&self, folder: &str, names: Vec<String>) -> Vec<String> {
        if names.len() < RETIRE_AT {
            return names;
        }
        let Ok(path) = self.bucket.path(folder) else { return names };
        let objects = self.bucket.objects();
        let listed = async move { objects.list_with_delimiter(Some(&path)).await };
        let Ok(listed) = self.bucket.ask(folder, listed).await else { return names };
        let mut records: Vec<_> = listed
            .objects
            .iter()
            .filter_map(|object| Some((object.location.filename()?, object.last_modified)))
            .collect();
        records.sort_unstable();
        let Some(now) = records.iter().map(|(_, created)| *created).max() else { return names };
        let followed = records.windows(2).map(|pair| (pair[0].0, now - pair[1].1));
        let mut retired = Vec::new();
        // The oldest first, so that no gap arises that looks like an end.
        for (name, age) in followed {
            if age.to_std().is_ok_and(|age| age <= self.grace) {
                break;
            }
            // What is not among them is not ours.
            if !names.iter().any(|own| own == name) {
                continue;
            }
            if self.delete(&format!("{folder}/{name}")).await.is_err() {
                break;
            }
            retired.push(name);
        }
        names.into_iter().filter(|name| !retired.contains(&name.as_str())).collect()
    }

    fn grace(&self) -> Option<Duration> {
        Some(self.grace)
    }

    fn keeps_away(&self) -> bool {
        false
    }

    async fn lock(&self, name: &str) -> Result<Box<dyn Any + Send>> {
        Ok(Box::new(self.turns.take(name).await))
    }

    async fn has_ended(&self, _name: &str) -> Result<bool> {
        Ok(false)
    }

    fn watch(&self, _name: &str, patience: Duration) -> Box<dyn Watch> {
        Box::new(Poll::new(POLL, patience))
    }
}
