//! Blobs as objects of a bucket.

mod fetch;
mod upload;

use std::sync::Arc;

use bytes::Bytes;
use object_store::path::Path;
use object_store::{GetOptions, GetRange, ObjectStore, ObjectStoreExt};
use tokio::task::JoinSet;
use tssd_format::{Blob, MANIFEST_NAME};

use self::fetch::BucketReader;
use self::upload::{BufferPool, MultipartUpload, SingleUpload};
use crate::blob::{OpenArchive, RemoteArchive, Reservation, Volume, open_resolved};
use crate::error::{ErrorKind, Result};
use crate::io::bucket::{Bucket, optional, retry};
use crate::io::disk::TEMPORARY_PREFIX;
use crate::io::local_archive::LocalArchive;
use crate::ledger::Durability;
use crate::route::{Route, Transport};

/// Bytes to fetch from the end of an archive when it is opened.
///
/// They include the index, unless it is larger.
const TAIL_BYTES: u64 = 256 << 10;

/// As [`TAIL_BYTES`], for a single object. Its first [`HEAD_BYTES`] are fetched at the same time.
const OBJECT_TAIL_BYTES: u64 = 1 << 20;
const HEAD_BYTES: u64 = 4 << 10;

/// A volume in a bucket. Each blob is an object.
#[derive(Clone)]
pub(crate) struct ObjectVolume {
    bucket: Bucket,
    reader: Arc<BucketReader>,
    buffers: Arc<BufferPool>,
}

impl ObjectVolume {
    pub(crate) fn new(bucket: Bucket) -> Self {
        Self {
            reader: Arc::new(BucketReader::new(bucket.clone())),
            buffers: Arc::default(),
            bucket,
        }
    }

    /// Opens blobs with concurrent requests. The result has none for each blob that does not exist.
    fn open_remote(&self, names: &[String]) -> Result<Vec<Option<RemoteArchive>>> {
        let mut paths = Vec::with_capacity(names.len());
        for name in names {
            paths.push(self.bucket.path(name)?);
        }
        let (objects, permits) = (self.bucket.objects(), self.bucket.request_permits());
        let open = async move {
            let mut tasks = JoinSet::new();
            for (index, path) in paths.into_iter().enumerate() {
                let (objects, permits) = (objects.clone(), permits.clone());
                tasks.spawn(async move {
                    let _one = permits.acquire().await;
                    (index, read_tail(&*objects, &path, TAIL_BYTES).await)
                });
            }
            let mut tails: Vec<_> = tasks.join_all().await;
            tails.sort_unstable_by_key(|(index, _)| *index);
            tails.into_iter().map(|(_, tail)| tail).collect()
        };
        let first = names.first().map_or("", String::as_str);
        let tails: Vec<Option<(u64, Bytes)>> = self.bucket.request_blocking(first, open)?;
        let to_remote = |(name, tail): (&String, Option<(u64, Bytes)>)| {
            let (len, tail) = tail?;
            let (reader, blob) = (self.reader.clone(), name.as_str().into());
            Some(RemoteArchive { reader, blob, len, tail: Some(tail) })
        };
        Ok(names.iter().zip(tails).map(to_remote).collect())
    }

    /// Aborts an upload that another process left behind.
    fn abort(&self, name: &str, marker: &str) -> Result<()> {
        let (objects, uploads) = (self.bucket.objects(), self.bucket.uploads());
        let (path, marker) = (self.bucket.path(name)?, self.bucket.path(marker)?);
        self.bucket.request_blocking(name, async move {
            let id = match objects.get(&marker).await {
                Err(object_store::Error::NotFound { .. }) => return Ok(()),
                found => found?.bytes().await?,
            };
            let id = String::from_utf8_lossy(&id).into_owned();
            match uploads.abort_multipart(&path, &id).await {
                // The upload is complete or was aborted already.
                Ok(()) | Err(object_store::Error::NotFound { .. }) => objects.delete(&marker).await,
                // The marker stays for the next sweep. It does not affect readers or writers.
                Err(_) => Ok(()),
            }
        })
    }
}

/// A single object. Two concurrent requests fetch its head and its tail, which readers need to open it.
struct ObjectBlob {
    remote: RemoteArchive,
    head: Bytes,
}

impl Blob for ObjectBlob {
    fn size(&self) -> std::io::Result<u64> {
        self.remote.size()
    }

    fn read_exact_at(&self, target: &mut [u8], offset: u64) -> std::io::Result<()> {
        let within = usize::try_from(offset)
            .ok()
            .and_then(|start| self.head.get(start..start.checked_add(target.len())?));
        match within {
            Some(head) => target.copy_from_slice(head),
            None => self.remote.read_exact_at(target, offset)?,
        }
        Ok(())
    }

    fn bytes(&self) -> Option<&Bytes> {
        None
    }
}

/// Opens the object `name`. Returns none if it does not exist.
pub(crate) fn open_object(bucket: Bucket, name: &str) -> Result<Option<impl Blob + use<>>> {
    let (objects, path) = (bucket.objects(), bucket.path(name)?);
    let opened = bucket.request_blocking(name, async move {
        let (head, tail) = tokio::join!(
            objects.get_range(&path, 0..HEAD_BYTES),
            read_tail(&*objects, &path, OBJECT_TAIL_BYTES)
        );
        // A range request for an empty object fails. Its head is empty.
        Ok(tail?.map(|(len, tail)| (len, tail, head.unwrap_or_default())))
    })?;
    let Some((len, tail, head)) = opened else { return Ok(None) };
    let (reader, blob) = (Arc::new(BucketReader::new(bucket)), name.into());
    Ok(Some(ObjectBlob { remote: RemoteArchive { reader, blob, len, tail: Some(tail) }, head }))
}

/// Returns the length of an object and its last bytes. Returns none if the object does not exist.
async fn read_tail(
    objects: &dyn ObjectStore,
    path: &Path,
    wanted: u64,
) -> object_store::Result<Option<(u64, Bytes)>> {
    let request = || async {
        let range = Some(GetRange::Suffix(wanted));
        let options = GetOptions { range, ..GetOptions::default() };
        match objects.get_opts(path, options).await {
            // Azure supports no suffix ranges: the length comes first.
            Err(object_store::Error::NotSupported { .. }) => {
                let size = objects.head(path).await?.size;
                let range = size.saturating_sub(wanted)..size;
                Ok((size, objects.get_range(path, range).await?))
            }
            response => {
                let response = response?;
                Ok((response.meta.size, response.bytes().await?))
            }
        }
    };
    // The tail lives as long as the archive is open. A copy does not retain the larger buffer it may be part of.
    let copy_tail = |(len, tail): (u64, Bytes)| (len, Bytes::copy_from_slice(&tail));
    Ok(optional(retry(request).await)?.map(copy_tail))
}

/// Returns the name of the marker object, which contains the ID of the upload of a blob in progress.
fn upload_marker(name: &str) -> String {
    match name.rsplit_once('/') {
        Some((folder, file)) => format!("{folder}/{TEMPORARY_PREFIX}{file}"),
        None => format!("{TEMPORARY_PREFIX}{name}"),
    }
}

/// Returns the blob whose upload the marker `name` belongs to. Returns none if `name` is not a marker.
fn blob_of_marker(name: &str) -> Option<String> {
    let (folder, file) = name.rsplit_once('/').unwrap_or(("", name));
    let file = file.strip_prefix(TEMPORARY_PREFIX)?;
    Some(if folder.is_empty() { file.to_owned() } else { format!("{folder}/{file}") })
}

impl Volume for ObjectVolume {
    /// An object is durable when its put completes.
    fn admit(&self, wanted: Durability) -> Result<Durability> {
        Ok(if wanted == Durability::Object { Durability::Disk } else { wanted })
    }

    fn reserve(
        &self,
        name: &str,
        len: u64,
        _durability: Durability,
    ) -> Result<Box<dyn Reservation>> {
        // A manifest of any length is created by a conditional put. A multipart upload has no such condition.
        if len <= upload::MAX_SINGLE_BYTES || name.ends_with(MANIFEST_NAME) {
            return Ok(Box::new(SingleUpload::new(self.bucket.clone(), name, len)?));
        }
        let (bucket, buffers) = (self.bucket.clone(), self.buffers.clone());
        Ok(Box::new(MultipartUpload::begin(bucket, buffers, name, len)?))
    }

    fn open(&self, name: &str) -> Result<Option<LocalArchive>> {
        let opened = self.open_all(&[name.to_owned()])?.and_then(|mut all| all.pop());
        Ok(opened.map(OpenArchive::into_local))
    }

    fn open_all(&self, names: &[String]) -> Result<Option<Vec<OpenArchive>>> {
        let open = |names: &[String]| {
            let opened = self.open_remote(names)?;
            Ok(opened
                .into_iter()
                .map(|archive| archive.map(OpenArchive::Remote))
                .collect::<Vec<_>>())
        };
        open_resolved(names, open)
    }

    fn delete(&self, name: &str) -> Result<()> {
        if let Some(blob) = blob_of_marker(name) {
            return self.abort(&blob, name);
        }
        let (objects, path) = (self.bucket.objects(), self.bucket.path(name)?);
        match self.bucket.request_blocking(name, async move { objects.delete(&path).await }) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            deleted => deleted,
        }
    }

    fn list(&self, name: &str) -> Result<Vec<String>> {
        self.bucket.request_blocking(name, self.bucket.list(name)?)
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
    use crate::testing::faulty_bucket::FaultyBucket;

    fn bucket(objects: &Arc<FaultyBucket>) -> Bucket {
        Bucket::new(objects.clone(), Path::default(), "s3://test").unwrap()
    }

    fn put(bucket: &Bucket, name: &str, bytes: &[u8]) {
        let (objects, path) = (bucket.objects(), Path::from(name));
        let payload = PutPayload::from(bytes.to_vec());
        bucket.request_blocking(name, async move { objects.put(&path, payload).await }).unwrap();
    }

    /// Bytes that differ at each offset.
    fn bytes(len: usize) -> Vec<u8> {
        (0..).flat_map(u32::to_le_bytes).take(len).collect()
    }

    #[test]
    fn single_object_requests_only_bytes_outside_its_head_and_tail() {
        let objects = Arc::default();
        let bucket = bucket(&objects);
        let head = native(HEAD_BYTES);
        let tail = |len: usize| len.saturating_sub(native(OBJECT_TAIL_BYTES));
        for len in [0, 100, head, head + 1, 3 << 20] {
            let written = bytes(len);
            put(&bucket, "object", &written);
            objects.clear_fault();
            let opened = open_object(bucket.clone(), "object").unwrap().unwrap();
            let size = opened.size().unwrap();
            assert_eq!((size, objects.request_stats().0), (len.try_into().unwrap(), 2));
            for (range, requests) in [
                (0..head, 0),
                (head - 1..head, 0),
                (head - 1..head + 1, 1),
                (tail(len).saturating_sub(1)..len, 1),
                (tail(len)..len, 0),
                (len.saturating_sub(1)..len, 0),
            ] {
                let Some(wanted) = written.get(range.clone()) else { continue };
                // The tail contains all of a short object.
                let requests = if tail(len) == 0 { 0 } else { requests };
                objects.clear_fault();
                let mut found = vec![0; wanted.len()];
                opened.read_exact_at(&mut found, range.start.try_into().unwrap()).unwrap();
                assert!(found == wanted, "{len} {range:?}");
                assert_eq!(objects.request_stats().0, requests, "{len} {range:?}");
            }
            assert!(opened.bytes().is_none(), "nobody has all of them");
        }
        assert!(open_object(bucket, "another").unwrap().is_none());
    }

    #[test]
    fn opened_archive_reads_its_tail_without_a_request() {
        let objects = Arc::default();
        let volume = ObjectVolume::new(bucket(&objects));
        let (tail, long) = (native(TAIL_BYTES), bytes(native(TAIL_BYTES) + 1));
        put(&volume.bucket, "a/long", &long);
        put(&volume.bucket, "a/short", &long[..10]);
        objects.clear_fault();
        let names = ["a/short", "a/long"].map(str::to_owned);
        let opened = volume.open_all(&names).unwrap().unwrap();
        for (archive, bytes) in opened.iter().zip([&long[..10], &long]) {
            let mut found = vec![0; tail.min(bytes.len())];
            let start = bytes.len() - found.len();
            archive.blob().read_exact_at(&mut found, start.try_into().unwrap()).unwrap();
            assert!(found == bytes[start..]);
        }
        assert_eq!(objects.request_stats().0, 2);
        opened[1].blob().read_exact_at(&mut [0], 0).unwrap();
        assert_eq!(objects.request_stats().0, 3, "the rest is asked for");
        let all = [&names[..], &["a/none".to_owned()]].concat();
        assert!(volume.open_all(&all).unwrap().is_none());
    }

    #[test]
    fn small_blobs_and_manifests_are_created_by_one_request() {
        let objects = Arc::default();
        let volume = ObjectVolume::new(bucket(&objects));
        let long = upload::MAX_SINGLE_BYTES + 1;
        for (name, len) in [("a/blob", 10), ("a/blob", long - 1), ("a/manifest.tssd", long)] {
            let name = format!("{len}/{name}");
            for (is_new, byte) in [(true, 1), (false, 2)] {
                objects.clear_fault();
                let mut reserved = volume.reserve(&name, len, Durability::Disk).unwrap();
                for part in &mut reserved.parts(&[len]) {
                    part.write(&vec![byte; native(len)]).unwrap();
                }
                assert_eq!(reserved.seal().unwrap(), is_new, "{name}");
                assert_eq!(objects.open_uploads(), 0);
                // If the name is taken, the writer reads the object: its own earlier request may have created it.
                assert_eq!(objects.request_stats().0, 2 - usize::from(is_new), "{name}");
            }
        }
    }

    #[test]
    fn bucket_volume_admits_every_durability() {
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
    fn delete_of_missing_blob_succeeds() {
        let volume = ObjectVolume::new(bucket(&Arc::default()));
        put(&volume.bucket, "a/blob", b"7");
        for name in ["a/blob", "a/blob", "a/.tmp-none", "none"] {
            volume.delete(name).unwrap();
            assert!(volume.open(name).unwrap().is_none());
        }
        assert_eq!(volume.list("a").unwrap(), [""; 0]);
    }

    #[test]
    fn upload_marker_lies_in_the_folder_of_its_blob() {
        for name in ["blob", "a/blob", "a/b/blob"] {
            let marker = upload_marker(name);
            assert_eq!(
                marker.rsplit_once('/').map(|it| it.0),
                name.rsplit_once('/').map(|it| it.0)
            );
            assert_eq!(blob_of_marker(&marker).as_deref(), Some(name));
            assert_eq!(blob_of_marker(name), None);
        }
    }

    fn native(len: u64) -> usize {
        len.try_into().unwrap()
    }
}
