//! Blobs as objects of a bucket.

mod fetch;
mod upload;

use std::sync::Arc;

use bytes::Bytes;
use object_store::path::Path;
use object_store::{GetOptions, GetRange, ObjectStore, ObjectStoreExt};
use tokio::task::JoinSet;
use tssd_format::{Blob, MANIFEST};

use self::fetch::Fetcher;
use self::upload::{Small, Spare, Upload};
use super::{Archived, Far, Near, Reservation, Volume};
use crate::bucket::{Bucket, again, optional};
use crate::disk::TEMPORARY;
use crate::error::{ErrorKind, Result};
use crate::ledger::Durability;
use crate::route::{Route, Transport};

/// So many bytes of the end of an archive come when it is opened: its index, if that is not larger.
const TAIL_BYTES: u64 = 256 << 10;

/// The same for an object that is opened by itself, of which the beginning comes too.
const ALONE_TAIL_BYTES: u64 = 1 << 20;
const HEAD_BYTES: u64 = 4 << 10;

#[derive(Clone)]
pub(crate) struct ObjectVolume {
    bucket: Bucket,
    holder: Arc<Fetcher>,
    spare: Arc<Spare>,
}

impl ObjectVolume {
    pub(crate) fn new(bucket: Bucket) -> Self {
        Self { holder: Arc::new(Fetcher::new(bucket.clone())), spare: Arc::default(), bucket }
    }

    /// Opens blobs, all at once; none for those that are not there.
    fn far(&self, names: &[String]) -> Result<Vec<Option<Far>>> {
        let mut paths = Vec::with_capacity(names.len());
        for name in names {
            paths.push(self.bucket.path(name)?);
        }
        let (objects, requests) = (self.bucket.objects(), self.bucket.requests());
        let open = async move {
            let mut opening = JoinSet::new();
            for (place, path) in paths.into_iter().enumerate() {
                let (objects, requests) = (objects.clone(), requests.clone());
                opening.spawn(async move {
                    let _one = requests.acquire().await;
                    (place, tail(&*objects, &path, TAIL_BYTES).await)
                });
            }
            let mut tails: Vec<_> = opening.join_all().await;
            tails.sort_unstable_by_key(|(place, _)| *place);
            tails.into_iter().map(|(_, tail)| tail).collect()
        };
        let first = names.first().map_or("", String::as_str);
        let tails: Vec<Option<(u64, Bytes)>> = self.bucket.wait(first, open)?;
        let far = |(name, tail): (&String, Option<(u64, Bytes)>)| {
            let (len, tail) = tail?;
            let (holder, blob) = (self.holder.clone(), name.as_str().into());
            Some(Far { holder, blob, len, tail: Some(tail) })
        };
        Ok(names.iter().zip(tails).map(far).collect())
    }

    /// Gives up an upload that somebody has left behind.
    fn abort(&self, name: &str, marker: &str) -> Result<()> {
        let (objects, uploads) = (self.bucket.objects(), self.bucket.uploads());
        let (path, marker) = (self.bucket.path(name)?, self.bucket.path(marker)?);
        self.bucket.wait(name, async move {
            let id = match objects.get(&marker).await {
                Err(object_store::Error::NotFound { .. }) => return Ok(()),
                found => found?.bytes().await?,
            };
            let id = String::from_utf8_lossy(&id).into_owned();
            match uploads.abort_multipart(&path, &id).await {
                // It is complete, or was given up already.
                Ok(()) | Err(object_store::Error::NotFound { .. }) => objects.delete(&marker).await,
                // It stays noted, for whoever sweeps next. That hinders nobody.
                Err(_) => Ok(()),
            }
        })
    }
}

/// An object by itself: what is looked at when it is opened comes in two requests at once.
struct Alone {
    far: Far,
    head: Bytes,
}

impl Blob for Alone {
    fn size(&self) -> std::io::Result<u64> {
        self.far.size()
    }

    fn read_exact_at(&self, target: &mut [u8], offset: u64) -> std::io::Result<()> {
        let within = usize::try_from(offset)
            .ok()
            .and_then(|start| self.head.get(start..start.checked_add(target.len())?));
        match within {
            Some(head) => target.copy_from_slice(head),
            None => self.far.read_exact_at(target, offset)?,
        }
        Ok(())
    }

    fn bytes(&self) -> Option<&Bytes> {
        None
    }
}

/// The object of this name; none if there is none.
pub(crate) fn alone(bucket: Bucket, name: &str) -> Result<Option<impl Blob + use<>>> {
    let (objects, path) = (bucket.objects(), bucket.path(name)?);
    let opened = bucket.wait(name, async move {
        let (head, tail) = tokio::join!(
            objects.get_range(&path, 0..HEAD_BYTES),
            tail(&*objects, &path, ALONE_TAIL_BYTES)
        );
        // Of an object without bytes no range can be had, and none is needed.
        Ok(tail?.map(|(len, tail)| (len, tail, head.unwrap_or_default())))
    })?;
    let Some((len, tail, head)) = opened else { return Ok(None) };
    let (holder, blob) = (Arc::new(Fetcher::new(bucket)), name.into());
    Ok(Some(Alone { far: Far { holder, blob, len, tail: Some(tail) }, head }))
}

/// The length of an object and its last bytes; none if there is no such object.
async fn tail(
    objects: &dyn ObjectStore,
    path: &Path,
    wanted: u64,
) -> object_store::Result<Option<(u64, Bytes)>> {
    let tail = || async {
        let range = Some(GetRange::Suffix(wanted));
        let options = GetOptions { range, ..GetOptions::default() };
        match objects.get_opts(path, options).await {
            // Azure gives no last bytes: the length comes first.
            Err(object_store::Error::NotSupported { .. }) => {
                let size = objects.head(path).await?.size;
                let range = size.saturating_sub(wanted)..size;
                Ok((size, objects.get_range(path, range).await?))
            }
            got => {
                let got = got?;
                Ok((got.meta.size, got.bytes().await?))
            }
        }
    };
    // It is kept as long as the archive is open: not so what it may be a part of.
    let own = |(len, tail): (u64, Bytes)| (len, Bytes::copy_from_slice(&tail));
    Ok(optional(again(tail).await)?.map(own))
}

/// Where it is noted which upload of a blob is under way.
fn marker(name: &str) -> String {
    match name.rsplit_once('/') {
        Some((folder, file)) => format!("{folder}/{TEMPORARY}{file}"),
        None => format!("{TEMPORARY}{name}"),
    }
}

/// The blob whose upload is noted under a name.
fn marked(name: &str) -> Option<String> {
    let (folder, file) = name.rsplit_once('/').unwrap_or(("", name));
    let file = file.strip_prefix(TEMPORARY)?;
    Some(if folder.is_empty() { file.to_owned() } else { format!("{folder}/{file}") })
}

impl Volume for ObjectVolume {
    /// What is seen here is in the bucket.
    fn admit(&self, wanted: Durability) -> Result<Durability> {
        Ok(if wanted == Durability::Object { Durability::Disk } else { wanted })
    }

    fn reserve(
        &self,
        name: &str,
        len: u64,
        _durability: Durability,
    ) -> Result<Box<dyn Reservation>> {
        // A manifest is created, however long it is, which parts cannot be.
        if len <= upload::SMALL_BYTES || name.ends_with(MANIFEST) {
            return Ok(Box::new(Small::new(self.bucket.clone(), name, len)?));
        }
        let (bucket, spare) = (self.bucket.clone(), self.spare.clone());
        Ok(Box::new(Upload::begin(bucket, spare, name, len)?))
    }

    fn open(&self, name: &str) -> Result<Option<Near>> {
        Ok(self.far(&[name.to_owned()])?.pop().flatten().map(Near::new))
    }

    fn open_all(&self, names: &[String]) -> Result<Option<Vec<Archived>>> {
        let all: Option<Vec<Far>> = self.far(names)?.into_iter().collect();
        Ok(all.map(|all| all.into_iter().map(Archived::Far).collect()))
    }

    fn delete(&self, name: &str) -> Result<()> {
        if let Some(blob) = marked(name) {
            return self.abort(&blob, name);
        }
        let (objects, path) = (self.bucket.objects(), self.bucket.path(name)?);
        match self.bucket.wait(name, async move { objects.delete(&path).await }) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            deleted => deleted,
        }
    }

    fn list(&self, name: &str) -> Result<Vec<String>> {
        self.bucket.wait(name, self.bucket.list(name)?)
    }

    fn route(&self) -> Route {
        Route::new(Transport::Object, "the store is a bucket")
    }

    fn remove_folder(&self, _name: &str) -> Result<()> {
        Ok(())
    }
}
