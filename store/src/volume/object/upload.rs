//! Blobs on their way to a bucket: small ones in one request, others in parts, as soon as each is full.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::sync::{Arc, Mutex, MutexGuard};

use object_store::multipart::PartId;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt, PutMode, PutPayload};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tssd_format::{Fill, Filled};

use super::marker;
use crate::bucket::{Bucket, again};
use crate::environment::pause;
use crate::error::{Error, ErrorKind, Result};
use crate::volume::{Part, Reservation, split};

/// A blob of at most so many bytes goes in one request.
pub(super) const SMALL_BYTES: u64 = 16 << 20;

/// A part has at least so many bytes, and all but the last have the same number: some stores want that.
const PART_BYTES: u64 = 16 << 20;

/// No store takes more parts than this.
const MAX_PARTS: u64 = 10_000;

/// How many parts of an upload are under way at once.
const PARTS_UNDER_WAY: u32 = 8;

/// How often it is asked whether an object is there after all.
const TRIES: u32 = 4;

/// A blob that goes in one request, which creates it.
pub(super) struct Small {
    bucket: Bucket,
    name: String,
    path: Path,
    bytes: Vec<u8>,
}

impl Small {
    pub(super) fn new(bucket: Bucket, name: &str, len: u64) -> Result<Self> {
        let len = usize::try_from(len).map_err(|_| too_large(len))?;
        let path = bucket.path(name)?;
        Ok(Self { bucket, name: name.to_owned(), path, bytes: vec![0; len] })
    }
}

impl Reservation for Small {
    fn parts(&mut self, lens: &[u64]) -> Vec<Box<dyn Part + '_>> {
        split(&mut self.bytes, lens)
    }

    /// If it is there already, an earlier request of this call may have created it, whose answer was lost: what
    /// has the same bytes is it.
    fn seal(self: Box<Self>) -> Result<bool> {
        let Self { bucket, name, path, bytes } = *self;
        let objects = bucket.objects();
        let payload = PutPayload::from(bytes);
        bucket.wait(&name, async move {
            let mut tries = 0;
            loop {
                let put = objects.put_opts(&path, payload.clone(), PutMode::Create.into()).await;
                let Err(error) = put else { return Ok(true) };
                tries += 1;
                let found = match objects.get(&path).await {
                    Ok(found) => found.bytes().await,
                    Err(error) => Err(error),
                };
                match found {
                    Ok(found) => return Ok(payload.iter().flatten().eq(found.iter())),
                    Err(_) if tries < TRIES => pause(tries).await,
                    Err(_) => return Err(error),
                }
            }
        })
    }
}

/// A blob that goes in parts.
pub(super) struct Upload(Arc<Inner>);

struct Inner {
    bucket: Bucket,
    name: String,
    path: Path,
    marker: Path,
    id: String,
    len: u64,
    part_len: u64,
    /// The parts that are being filled, by number.
    filling: Mutex<BTreeMap<u64, Arc<Mutex<Filling>>>>,
    state: Mutex<State>,
    /// The right to have a part under way.
    under_way: Arc<Semaphore>,
}

#[derive(Default)]
struct Filling {
    bytes: Vec<u8>,
    filled: u64,
}

#[derive(Default)]
struct State {
    sent: BTreeMap<u64, PartId>,
    failed: Option<object_store::Error>,
    is_sealed: bool,
}

impl Upload {
    pub(super) fn begin(bucket: Bucket, name: &str, len: u64) -> Result<Self> {
        // Whole MiB, so that parts are filled in whole chunks mostly.
        let part_len = PART_BYTES.max(len.div_ceil(MAX_PARTS).next_multiple_of(1 << 20));
        let (path, marker) = (bucket.path(name)?, bucket.path(&marker(name))?);
        let (uploads, objects) = (bucket.uploads(), bucket.objects());
        let begin = {
            let (path, marker) = (path.clone(), marker.clone());
            async move {
                let id = uploads.create_multipart(&path).await?;
                // Whoever finds that this process has ended gives the upload up.
                match objects.put(&marker, PutPayload::from(id.clone())).await {
                    Ok(_) => Ok(id),
                    Err(error) => {
                        let _ = uploads.abort_multipart(&path, &id).await;
                        Err(error)
                    }
                }
            }
        };
        let id = bucket.wait(name, begin)?;
        Ok(Self(Arc::new(Inner {
            bucket,
            name: name.to_owned(),
            path,
            marker,
            id,
            len,
            part_len,
            filling: Mutex::default(),
            state: Mutex::default(),
            under_way: Arc::new(Semaphore::new(PARTS_UNDER_WAY as usize)),
        })))
    }
}

impl Inner {
    fn filling(&self) -> MutexGuard<'_, BTreeMap<u64, Arc<Mutex<Filling>>>> {
        self.filling.lock().expect("nobody panics while holding the parts")
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("nobody panics while holding the state")
    }

    /// Bytes at a place of the blob.
    fn write(self: &Arc<Self>, mut offset: u64, mut bytes: &[u8]) -> Result<()> {
        while !bytes.is_empty() {
            let number = offset / self.part_len;
            let start = number * self.part_len;
            let part_len = self.part_len.min(self.len.saturating_sub(start));
            let within = native(offset - start)?;
            let room = native(part_len)?.saturating_sub(within);
            let (now, rest) = bytes.split_at(room.min(bytes.len()));
            if now.is_empty() {
                return Err(Error::new(ErrorKind::Invalid, "more bytes than were announced"));
            }
            let part = self.filling().entry(number).or_default().clone();
            let full = {
                let mut part = part.lock().expect("nobody panics while filling a part");
                if part.bytes.is_empty() {
                    part.bytes = vec![0; native(part_len)?];
                }
                part.bytes[within..within + now.len()].copy_from_slice(now);
                part.filled += wide(now.len());
                (part.filled == part_len).then(|| std::mem::take(&mut part.bytes))
            };
            if let Some(bytes) = full {
                self.filling().remove(&number);
                self.send(number, bytes)?;
            }
            offset += wide(now.len());
            bytes = rest;
        }
        Ok(())
    }

    /// Sends a part as soon as not too many are under way.
    fn send(self: &Arc<Self>, number: u64, bytes: Vec<u8>) -> Result<()> {
        if let Some(error) = &self.state().failed {
            return Err(self.bucket.error(&self.name, error));
        }
        let permit = self.permit(1)?;
        let (inner, payload) = (self.clone(), PutPayload::from(bytes));
        self.bucket.spawn(async move {
            let sent = inner.put(number, payload).await;
            let mut state = inner.state();
            match sent {
                Ok(id) => drop(state.sent.insert(number, id)),
                Err(error) => drop(state.failed.get_or_insert(error)),
            }
            drop(permit);
        });
        Ok(())
    }

    async fn put(&self, number: u64, payload: PutPayload) -> object_store::Result<PartId> {
        let uploads = self.bucket.uploads();
        let index = usize::try_from(number).unwrap_or(usize::MAX);
        again(|| uploads.put_part(&self.path, &self.id, index, payload.clone())).await
    }

    fn permit(&self, count: u32) -> Result<OwnedSemaphorePermit> {
        let under_way = self.under_way.clone();
        self.bucket.wait(&self.name, async move {
            Ok(under_way.acquire_many_owned(count).await.expect("it is never closed"))
        })
    }

    /// Puts the parts together. If the answer is lost, the object itself tells.
    async fn complete(&self, parts: Vec<PartId>) -> object_store::Result<()> {
        let (uploads, objects) = (self.bucket.uploads(), self.bucket.objects());
        let mut tries = 0;
        loop {
            let completed = uploads.complete_multipart(&self.path, &self.id, parts.clone()).await;
            let Err(error) = completed else { return Ok(()) };
            tries += 1;
            match objects.head(&self.path).await {
                // No other upload has its name.
                Ok(found) if found.size == self.len => return Ok(()),
                _ if tries < TRIES => pause(tries).await,
                _ => return Err(error),
            }
        }
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        let inner = self.0.clone();
        if inner.state().is_sealed {
            return;
        }
        self.0.bucket.spawn(async move {
            // Parts that are still under way would be parts of nothing.
            let _all = inner.under_way.acquire_many(PARTS_UNDER_WAY).await;
            let aborted = inner.bucket.uploads().abort_multipart(&inner.path, &inner.id).await;
            if matches!(aborted, Ok(()) | Err(object_store::Error::NotFound { .. })) {
                let _ = inner.bucket.objects().delete(&inner.marker).await;
            }
        });
    }
}

impl Reservation for Upload {
    fn parts(&mut self, lens: &[u64]) -> Vec<Box<dyn Part + '_>> {
        let mut offset = 0;
        let mut parts: Vec<Box<dyn Part + '_>> = Vec::with_capacity(lens.len());
        for len in lens {
            parts.push(Box::new(UploadPart { inner: self.0.clone(), offset }));
            offset += len;
        }
        parts
    }

    fn seal(self: Box<Self>) -> Result<bool> {
        let inner = &self.0;
        drop(inner.permit(PARTS_UNDER_WAY)?);
        let parts: Vec<PartId> = {
            let mut state = inner.state();
            if let Some(error) = &state.failed {
                return Err(inner.bucket.error(&inner.name, error));
            }
            let wanted = inner.len.div_ceil(inner.part_len);
            if wide(state.sent.len()) != wanted {
                let text = format_args!("{} of {wanted} parts were written", state.sent.len());
                return Err(Error::new(ErrorKind::Invalid, text));
            }
            std::mem::take(&mut state.sent).into_values().collect()
        };
        let completing = inner.clone();
        inner.bucket.wait(&inner.name, async move {
            completing.complete(parts).await?;
            completing.state().is_sealed = true;
            // A note that stays is of nothing, and goes with the version.
            let _ = completing.bucket.objects().delete(&completing.marker).await;
            Ok(true)
        })
    }
}

struct UploadPart {
    inner: Arc<Inner>,
    offset: u64,
}

impl Part for UploadPart {
    fn fill(&mut self, job: &Fill) -> Result<Filled> {
        let name = self.inner.name.clone();
        job.write_to(self).map_err(|error| Error::format(name, error))
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.inner.write(self.offset, bytes)
    }
}

impl Write for UploadPart {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.inner.write(self.offset, bytes).map_err(io::Error::other)?;
        self.offset += wide(bytes.len());
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn too_large(len: u64) -> Error {
    Error::new(ErrorKind::Invalid, format_args!("{len} bytes do not fit into memory"))
}

fn native(len: u64) -> Result<usize> {
    usize::try_from(len).map_err(|_| too_large(len))
}

fn wide(len: usize) -> u64 {
    u64::try_from(len).expect("usize is at most 64 bits")
}
