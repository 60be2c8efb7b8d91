//! Blobs as objects of a bucket.

mod fetch;
mod upload;

use std::sync::Arc;

use bytes::Bytes;
use object_store::path::Path;
use object_store::{GetOptions, GetRange, ObjectStore, ObjectStoreExt};
use tokio::task::JoinSet;
use tssd_format::{Blob, MANIFEST_NAME};

use self::fetch::Fetcher;
use self::upload::{Small, Spare, Upload};
use crate::blob::{Archived, Far, Reservation, Volume};
use crate::error::{ErrorKind, Result};
use crate::io::bucket::{Bucket, again, optional};
use crate::io::disk::TEMPORARY;
use crate::io::local_archive::Near;
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
        if len <= upload::SMALL_BYTES || name.ends_with(MANIFEST_NAME) {
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

#[cfg(test)]
mod tests {
    use object_store::PutPayload;

    use super::*;
    use crate::testing::faulty_bucket::Faulty;

    fn bucket(objects: &Arc<Faulty>) -> Bucket {
        Bucket::new(objects.clone(), Path::default(), "s3://test").unwrap()
    }

    fn put(bucket: &Bucket, name: &str, bytes: &[u8]) {
        let (objects, path) = (bucket.objects(), Path::from(name));
        let payload = PutPayload::from(bytes.to_vec());
        bucket.wait(name, async move { objects.put(&path, payload).await }).unwrap();
    }

    /// Bytes that differ wherever they are.
    fn bytes(len: usize) -> Vec<u8> {
        (0..).flat_map(u32::to_le_bytes).take(len).collect()
    }

    #[test]
    fn an_object_by_itself_is_asked_for_what_its_two_ends_do_not_have() {
        let objects = Arc::default();
        let bucket = bucket(&objects);
        let head = native(HEAD_BYTES);
        let tail = |len: usize| len.saturating_sub(native(ALONE_TAIL_BYTES));
        for len in [0, 100, head, head + 1, 3 << 20] {
            let written = bytes(len);
            put(&bucket, "object", &written);
            objects.mend();
            let opened = alone(bucket.clone(), "object").unwrap().unwrap();
            let size = opened.size().unwrap();
            assert_eq!((size, objects.seen().0), (len.try_into().unwrap(), 2));
            for (range, requests) in [
                (0..head, 0),
                (head - 1..head, 0),
                (head - 1..head + 1, 1),
                (tail(len).saturating_sub(1)..len, 1),
                (tail(len)..len, 0),
                (len.saturating_sub(1)..len, 0),
            ] {
                let Some(wanted) = written.get(range.clone()) else { continue };
                // All of what is short is in its end.
                let requests = if tail(len) == 0 { 0 } else { requests };
                objects.mend();
                let mut found = vec![0; wanted.len()];
                opened.read_exact_at(&mut found, range.start.try_into().unwrap()).unwrap();
                assert!(found == wanted, "{len} {range:?}");
                assert_eq!(objects.seen().0, requests, "{len} {range:?}");
            }
            assert!(opened.bytes().is_none(), "nobody has all of them");
        }
        assert!(alone(bucket, "another").unwrap().is_none());
    }

    #[test]
    fn an_archive_that_is_opened_has_its_end() {
        let objects = Arc::default();
        let volume = ObjectVolume::new(bucket(&objects));
        let (tail, long) = (native(TAIL_BYTES), bytes(native(TAIL_BYTES) + 1));
        put(&volume.bucket, "a/long", &long);
        put(&volume.bucket, "a/short", &long[..10]);
        objects.mend();
        let names = ["a/short", "a/long"].map(str::to_owned);
        let opened = volume.open_all(&names).unwrap().unwrap();
        for (archive, bytes) in opened.iter().zip([&long[..10], &long]) {
            let mut found = vec![0; tail.min(bytes.len())];
            let start = bytes.len() - found.len();
            archive.blob().read_exact_at(&mut found, start.try_into().unwrap()).unwrap();
            assert!(found == bytes[start..]);
        }
        assert_eq!(objects.seen().0, 2);
        opened[1].blob().read_exact_at(&mut [0], 0).unwrap();
        assert_eq!(objects.seen().0, 3, "the rest is asked for");
        let all = [&names[..], &["a/none".to_owned()]].concat();
        assert!(volume.open_all(&all).unwrap().is_none());
    }

    #[test]
    fn what_is_small_or_a_manifest_is_created_by_one_request() {
        let objects = Arc::default();
        let volume = ObjectVolume::new(bucket(&objects));
        let long = upload::SMALL_BYTES + 1;
        for (name, len) in [("a/blob", 10), ("a/blob", long - 1), ("a/manifest.tssd", long)] {
            let name = format!("{len}/{name}");
            for (is_new, byte) in [(true, 1), (false, 2)] {
                objects.mend();
                let mut reserved = volume.reserve(&name, len, Durability::Disk).unwrap();
                for part in &mut reserved.parts(&[len]) {
                    part.write(&vec![byte; native(len)]).unwrap();
                }
                assert_eq!(reserved.seal().unwrap(), is_new, "{name}");
                assert_eq!(objects.uploads(), 0);
                // Who finds it taken looks whether that was an earlier request of its own.
                assert_eq!(objects.seen().0, 2 - usize::from(is_new), "{name}");
            }
        }
    }

    #[test]
    fn what_is_in_a_bucket_is_durable() {
        let volume = ObjectVolume::new(bucket(&Arc::default()));
        for (wanted, admitted) in [
            (Durability::Memory, Durability::Memory),
            (Durability::Disk, Durability::Disk),
            (Durability::Object, Durability::Disk),
        ] {
            assert_eq!(volume.admit(wanted).unwrap(), admitted);
        }
    }

    #[test]
    fn what_is_not_there_can_be_deleted() {
        let volume = ObjectVolume::new(bucket(&Arc::default()));
        put(&volume.bucket, "a/blob", b"7");
        for name in ["a/blob", "a/blob", "a/.tmp-none", "none"] {
            volume.delete(name).unwrap();
            assert!(volume.open(name).unwrap().is_none());
        }
        assert_eq!(volume.list("a").unwrap(), [""; 0]);
    }

    #[test]
    fn the_note_of_an_upload_is_beside_its_blob() {
        for name in ["blob", "a/blob", "a/b/blob"] {
            let marker = marker(name);
            assert_eq!(
                marker.rsplit_once('/').map(|it| it.0),
                name.rsplit_once('/').map(|it| it.0)
            );
            assert_eq!(marked(&marker).as_deref(), Some(name));
            assert_eq!(marked(name), None);
        }
    }

    fn native(len: u64) -> usize {
        len.try_into().unwrap()
    }
}
