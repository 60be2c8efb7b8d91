//! Uploads to a bucket.
//!
//! A small blob takes one request. A large blob is sent in parts, each as soon as it is full.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::ops::Range;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use object_store::multipart::PartId;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt, PutMode, PutPayload};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tssd_format::{JobChecksums, WriteJob};

use super::upload_marker;
use crate::blob::{Part, Reservation, split};
use crate::convert::to_u64;
use crate::error::{Error, ErrorKind, Result};
use crate::io::bucket::{Bucket, retry};
use crate::io::exec::backoff;
use crate::io::sync::{Lock, MutexGuard};

/// Maximum bytes of a blob that is uploaded in one request.
pub(super) const MAX_SINGLE_BYTES: u64 = 16 << 20;

/// Minimum bytes of a part. All parts but the last have the same length, which some stores require.
const PART_BYTES: u64 = 16 << 20;

/// Maximum number of parts that every store accepts.
const MAX_PARTS: u64 = 10_000;

/// Maximum number of parts of one upload that are in flight.
const MAX_PARTS_IN_FLIGHT: u32 = 8;

/// Buffers of sent parts, for reuse by later parts. It holds at most [`MAX_PARTS_IN_FLIGHT`] buffers.
///
/// New memory costs more time than the work done in it.
#[derive(Default)]
pub(super) struct BufferPool(Lock<Vec<Bytes>>);

impl BufferPool {
    fn lock(&self) -> MutexGuard<'_, Vec<Bytes>> {
        self.0.lock()
    }

    /// Returns a buffer of `len` bytes: one of a sent part if the client has dropped it, else a new one.
    fn acquire(&self, len: usize) -> BytesMut {
        let reused = {
            let mut buffers = self.lock();
            let free = buffers.iter().position(|bytes| bytes.len() == len && bytes.is_unique());
            free.map(|free| buffers.swap_remove(free))
        };
        match reused.map(Bytes::try_into_mut) {
            Some(Ok(reused)) => reused,
            _ => BytesMut::zeroed(len),
        }
    }

    /// Adds the buffer of a sent part, to which the client may still hold a reference.
    ///
    /// Only buffers of [`PART_BYTES`] are kept: the length of a last part is rarely needed again.
    fn release(&self, part: Bytes) {
        let mut buffers = self.lock();
        if to_u64(part.len()) == PART_BYTES && buffers.len() < MAX_PARTS_IN_FLIGHT as usize {
            buffers.push(part);
        }
    }
}

/// Maximum number of checks whether an object exists after all.
const TRIES: u32 = 4;

/// A blob that one request creates.
pub(super) struct SingleUpload {
    bucket: Bucket,
    name: String,
    path: Path,
    bytes: Vec<u8>,
}

impl SingleUpload {
    pub(super) fn new(bucket: Bucket, name: &str, len: u64) -> Result<Self> {
        let len = usize::try_from(len).map_err(|_| too_large(len))?;
        let path = bucket.path(name)?;
        Ok(Self { bucket, name: name.to_owned(), path, bytes: vec![0; len] })
    }
}

impl Reservation for SingleUpload {
    fn parts(&mut self, lens: &[u64]) -> Vec<Box<dyn Part + '_>> {
        split(&mut self.bytes, lens)
    }

    /// Creates the object.
    ///
    /// If the name is taken, an earlier request of this call may have created the object and lost its response. The
    /// call returns true if the object has the same bytes.
    fn seal(self: Box<Self>) -> Result<bool> {
        let Self { bucket, name, path, bytes } = *self;
        let objects = bucket.objects();
        let payload = PutPayload::from(bytes);
        bucket.request_blocking(&name, async move {
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
                    Err(_) if tries < TRIES => backoff(tries).await,
                    Err(_) => return Err(error),
                }
            }
        })
    }
}

/// A blob that is uploaded in parts.
pub(super) struct MultipartUpload(Arc<Inner>);

struct Inner {
    bucket: Bucket,
    name: String,
    path: Path,
    marker: Path,
    id: String,
    len: u64,
    part_len: u64,
    buffers: Arc<BufferPool>,
    /// The parts that are being filled, by number.
    parts: Lock<BTreeMap<u64, PartBuffer>>,
    state: Lock<State>,
    /// Limits the parts in flight.
    in_flight: Arc<Semaphore>,
}

/// The buffer of a part that several threads fill. Each thread owns a piece of it.
struct PartBuffer {
    /// Pieces not taken yet, by their offsets. `full` has the filled pieces.
    free: BTreeMap<usize, BytesMut>,
    full: BTreeMap<usize, BytesMut>,
    missing: usize,
}

/// A piece of the buffer of a part.
struct Piece {
    number: u64,
    start: usize,
    bytes: BytesMut,
    /// Bytes written so far.
    filled: usize,
}

#[derive(Default)]
struct State {
    sent: BTreeMap<u64, PartId>,
    error: Option<object_store::Error>,
    is_sealed: bool,
}

impl MultipartUpload {
    pub(super) fn begin(
        bucket: Bucket,
        buffers: Arc<BufferPool>,
        name: &str,
        len: u64,
    ) -> Result<Self> {
        // Whole MiB, so that most chunks lie in one part.
        let part_len = PART_BYTES.max(len.div_ceil(MAX_PARTS).next_multiple_of(1 << 20));
        let (path, marker) = (bucket.path(name)?, bucket.path(&upload_marker(name))?);
        let (uploads, objects) = (bucket.uploads(), bucket.objects());
        let begin = {
            let (path, marker) = (path.clone(), marker.clone());
            async move {
                let id = uploads.create_multipart(&path).await?;
                // If this process dies, a later sweep finds the marker and aborts the upload.
                match objects.put(&marker, PutPayload::from(id.clone())).await {
                    Ok(_) => Ok(id),
                    Err(error) => {
                        let _ = uploads.abort_multipart(&path, &id).await;
                        Err(error)
                    }
                }
            }
        };
        let id = bucket.request_blocking(name, begin)?;
        Ok(Self(Arc::new(Inner {
            bucket,
            name: name.to_owned(),
            path,
            marker,
            id,
            len,
            part_len,
            buffers,
            parts: Lock::default(),
            state: Lock::default(),
            in_flight: Arc::new(Semaphore::new(MAX_PARTS_IN_FLIGHT as usize)),
        })))
    }
}

impl PartBuffer {
    fn new(memory: BytesMut, len: usize) -> Self {
        let free = BTreeMap::from([(0, memory)]);
        Self { free, full: BTreeMap::new(), missing: len }
    }

    fn take_range(&mut self, within: Range<usize>) -> BytesMut {
        let (&start, _) = self.free.range(..=within.start).next_back().expect("nobody had it yet");
        let mut before = self.free.remove(&start).expect("it was found");
        let mut piece = before.split_off(within.start - start);
        let after = piece.split_off(within.len());
        if within.start > start {
            self.free.insert(start, before);
        }
        self.free.insert(within.end, after);
        piece
    }
}

impl Inner {
    fn parts(&self) -> MutexGuard<'_, BTreeMap<u64, PartBuffer>> {
        self.parts.lock()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Takes the piece of the part's buffer for these bytes of the blob, up to the end of the part.
    ///
    /// No other call takes the same bytes.
    fn take_piece(&self, range: Range<u64>) -> Result<Piece> {
        let number = range.start / self.part_len;
        let start = number * self.part_len;
        let end = self.len.min(start + self.part_len);
        let part_len = native(end - start)?;
        let within = native(range.start - start)?..native(range.end.min(end) - start)?;
        let mut parts = self.parts();
        let part = parts
            .entry(number)
            .or_insert_with(|| PartBuffer::new(self.buffers.acquire(part_len), part_len));
        Ok(Piece { number, start: within.start, bytes: part.take_range(within), filled: 0 })
    }

    /// Returns a filled piece. If it is the last one of its part, sends the part.
    fn return_piece(self: &Arc<Self>, piece: Piece) -> Result<()> {
        let full = {
            let mut parts = self.parts();
            let part = parts.get_mut(&piece.number).expect("a part is there until it is full");
            part.missing -= piece.bytes.len();
            part.full.insert(piece.start, piece.bytes);
            if part.missing > 0 {
                return Ok(());
            }
            parts.remove(&piece.number)
        };
        let pieces = full.map(|part| part.full).into_iter().flatten();
        let whole = pieces.map(|(_, piece)| piece).reduce(|mut whole, piece| {
            // The pieces are adjacent in memory: `unsplit` copies nothing.
            whole.unsplit(piece);
            whole
        });
        self.send(piece.number, whole.unwrap_or_default().freeze())
    }

    /// Sends a part. Blocks while [`MAX_PARTS_IN_FLIGHT`] parts are in flight.
    fn send(self: &Arc<Self>, number: u64, bytes: Bytes) -> Result<()> {
        if let Some(error) = &self.state().error {
            return Err(self.bucket.error(&self.name, error));
        }
        let permit = self.permit(1)?;
        let inner = self.clone();
        self.bucket.spawn(async move {
            let sent = inner.put(number, PutPayload::from(bytes.clone())).await;
            inner.buffers.release(bytes);
            let mut state = inner.state();
            match sent {
                Ok(id) => drop(state.sent.insert(number, id)),
                Err(error) => drop(state.error.get_or_insert(error)),
            }
            drop(permit);
        });
        Ok(())
    }

    async fn put(&self, number: u64, payload: PutPayload) -> object_store::Result<PartId> {
        let uploads = self.bucket.uploads();
        let index = usize::try_from(number).unwrap_or(usize::MAX);
        retry(|| uploads.put_part(&self.path, &self.id, index, payload.clone())).await
    }

    fn permit(&self, count: u32) -> Result<OwnedSemaphorePermit> {
        let in_flight = self.in_flight.clone();
        self.bucket.request_blocking(&self.name, async move {
            Ok(in_flight.acquire_many_owned(count).await.expect("it is never closed"))
        })
    }

    /// Completes the upload.
    ///
    /// If the response is lost, the length of the object shows whether the request succeeded.
    async fn complete(&self, parts: Vec<PartId>) -> object_store::Result<()> {
        let (uploads, objects) = (self.bucket.uploads(), self.bucket.objects());
        let mut tries = 0;
        loop {
            let completed = uploads.complete_multipart(&self.path, &self.id, parts.clone()).await;
            let Err(error) = completed else { return Ok(()) };
            tries += 1;
            match objects.head(&self.path).await {
                // No other upload writes to this name.
                Ok(found) if found.size == self.len => return Ok(()),
                _ if tries < TRIES => backoff(tries).await,
                _ => return Err(error),
            }
        }
    }
}

impl Drop for MultipartUpload {
    fn drop(&mut self) {
        let inner = self.0.clone();
        if inner.state().is_sealed {
            return;
        }
        self.0.bucket.spawn(async move {
            // A part still in flight would outlive the aborted upload.
            let _all = inner.in_flight.acquire_many(MAX_PARTS_IN_FLIGHT).await;
            let aborted = inner.bucket.uploads().abort_multipart(&inner.path, &inner.id).await;
            if matches!(aborted, Ok(()) | Err(object_store::Error::NotFound { .. })) {
                let _ = inner.bucket.objects().delete(&inner.marker).await;
            }
        });
    }
}

impl Reservation for MultipartUpload {
    fn parts(&mut self, lens: &[u64]) -> Vec<Box<dyn Part + '_>> {
        let mut offset = 0;
        let mut parts: Vec<Box<dyn Part + '_>> = Vec::with_capacity(lens.len());
        for len in lens {
            let rest = offset..offset + len;
            offset = rest.end;
            parts.push(Box::new(UploadPart { inner: self.0.clone(), rest, piece: None }));
        }
        parts
    }

    fn seal(self: Box<Self>) -> Result<bool> {
        let inner = &self.0;
        drop(inner.permit(MAX_PARTS_IN_FLIGHT)?);
        let parts: Vec<PartId> = {
            let mut state = inner.state();
            if let Some(error) = &state.error {
                return Err(inner.bucket.error(&inner.name, error));
            }
            let wanted = inner.len.div_ceil(inner.part_len);
            if to_u64(state.sent.len()) != wanted {
                let text = format_args!("{} of {wanted} parts were written", state.sent.len());
                return Err(Error::new(ErrorKind::Invalid, text));
            }
            std::mem::take(&mut state.sent).into_values().collect()
        };
        let completing = inner.clone();
        inner.bucket.request_blocking(&inner.name, async move {
            completing.complete(parts).await?;
            completing.state().is_sealed = true;
            // A leftover marker has no effect. It is deleted with the version.
            let _ = completing.bucket.objects().delete(&completing.marker).await;
            Ok(true)
        })
    }
}

struct UploadPart {
    inner: Arc<Inner>,
    /// The bytes for which no memory was taken yet.
    rest: Range<u64>,
    piece: Option<Piece>,
}

impl UploadPart {
    /// Takes the memory for the next bytes, up to the end of a part of the upload.
    fn next(&mut self) -> Result<Piece> {
        let piece = self.inner.take_piece(self.rest.clone())?;
        self.rest.start += to_u64(piece.bytes.len());
        Ok(piece)
    }

    fn put(&mut self, mut bytes: &[u8]) -> Result<()> {
        while !bytes.is_empty() {
            let mut piece = match self.piece.take() {
                Some(piece) => piece,
                None if self.rest.is_empty() => {
                    return Err(Error::new(ErrorKind::Invalid, "more bytes than were announced"));
                }
                None => self.next()?,
            };
            let missing = &mut piece.bytes[piece.filled..];
            let (head, rest) = bytes.split_at(missing.len().min(bytes.len()));
            missing[..head.len()].copy_from_slice(head);
            piece.filled += head.len();
            if piece.filled == piece.bytes.len() {
                self.inner.return_piece(piece)?;
            } else {
                self.piece = Some(piece);
            }
            bytes = rest;
        }
        Ok(())
    }
}

impl Part for UploadPart {
    fn write_job(&mut self, job: &WriteJob) -> Result<JobChecksums> {
        let inner = self.inner.clone();
        let format_error = |error| Error::from_format(&inner.name, error);
        if !self.rest.is_empty() {
            let mut piece = self.next()?;
            if self.rest.is_empty() {
                // One piece of memory holds the whole part.
                let checksums = job.run(&mut piece.bytes).map_err(format_error)?;
                inner.return_piece(piece)?;
                return Ok(checksums);
            }
            self.piece = Some(piece);
        }
        job.write_to(self).map_err(format_error)
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.put(bytes)
    }
}

impl Write for UploadPart {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.put(bytes).map_err(io::Error::other)?;
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

#[cfg(test)]
mod tests {
    use object_store::memory::InMemory;
    use proptest::prelude::{ProptestConfig, any, prop, prop_assert, proptest};

    use super::*;
    use crate::testing::faulty_bucket::{Fault, FaultyBucket};

    proptest! {
        #![proptest_config(ProptestConfig { cases: 6, ..ProptestConfig::default() })]

        /// Each byte is where it belongs, for any lengths and any order of the writers.
        #[test]
        fn threads_fill_parts_in_any_order(
            lens in prop::collection::vec((0..6_u64 << 20, any::<u32>()), 6..14),
            block in 1_usize..3 << 20,
        ) {
            let total: u64 = lens.iter().map(|(len, _)| len).sum::<u64>() + 1;
            let mut wanted = vec![0; native(total).unwrap()];
            for (number, word) in wanted.chunks_exact_mut(8).enumerate() {
                word.copy_from_slice(&to_u64(number).to_le_bytes());
            }
            let objects = Arc::new(InMemory::new());
            let bucket = Bucket::new(objects.clone(), Path::default(), "memory").unwrap();
            let buffers = Arc::new(BufferPool::default());
            let cut: Vec<u64> = lens.iter().map(|(len, _)| *len).chain([1]).collect();
            // The second upload reuses the memory of the first.
            for (name, factor) in [("blob", 1), ("another", 2)] {
                for byte in &mut wanted {
                    *byte = byte.wrapping_mul(factor);
                }
                let mut upload = MultipartUpload::begin(bucket.clone(), buffers.clone(), name, total).unwrap();
                let mut offset = 0;
                let mut jobs: Vec<_> = upload.parts(&cut).into_iter().zip(&cut).map(|(part, len)| {
                    let bytes = &wanted[offset..offset + native(*len).unwrap()];
                    offset += bytes.len();
                    (part, bytes)
                }).collect();
                let mut orders = lens.iter().map(|(_, order)| *order).chain([0]);
                jobs.sort_by_cached_key(|_| orders.next());
                let jobs = Lock::new(jobs);
                std::thread::scope(|scope| for _ in 0..3 {
                    scope.spawn(|| loop {
                        let Some((mut part, bytes)) = jobs.lock().pop() else { break };
                        bytes.chunks(block).for_each(|bytes| part.write(bytes).unwrap());
                        assert_eq!(part.write(&[0]).unwrap_err().kind(), ErrorKind::Invalid);
                    });
                });
                drop(jobs);
                prop_assert!(Box::new(upload).seal().unwrap());
                let (objects, path) = (objects.clone(), Path::from(name));
                let found = bucket.request_blocking(name, async move { objects.get(&path).await?.bytes().await });
                prop_assert!(found.unwrap() == wanted);
            }
        }
    }

    #[test]
    fn part_buffers_are_reused_once_the_client_drops_them() {
        let len = native(PART_BYTES).unwrap();
        let pool = BufferPool::default();
        let part = |byte| {
            let mut part = pool.acquire(len);
            part.fill(byte);
            part.freeze()
        };
        let first = part(1);
        let (address, shared) = (first.as_ptr(), first.clone());
        pool.release(first);
        assert_ne!(part(2).as_ptr(), address);
        assert_eq!(shared[len - 1], 1);
        drop(shared);
        let reused = pool.acquire(len);
        assert_eq!((reused.as_ptr(), reused.len()), (address, len));
        // Neither shorter buffers nor more than `MAX_PARTS_IN_FLIGHT` are kept.
        pool.release(Bytes::from_static(&[1; 100]));
        let parts: Vec<_> = (0..20).map(part).collect();
        for part in parts {
            pool.release(part);
        }
        assert_eq!(pool.lock().len(), MAX_PARTS_IN_FLIGHT as usize);
        assert_eq!(pool.acquire(100).len(), 100, "it is not what a shorter part needs");
    }

    /// A bucket and a blob in it ready to be sealed: in one request, or in parts that have all arrived.
    fn unsealed_blobs() -> [(Arc<FaultyBucket>, Bucket, Box<dyn Reservation>); 2] {
        [false, true].map(|in_parts| {
            let objects = Arc::<FaultyBucket>::default();
            let bucket = Bucket::new(objects.clone(), Path::default(), "s3://test").unwrap();
            if !in_parts {
                let mut small = SingleUpload::new(bucket.clone(), "blob", 10).unwrap();
                small.parts(&[10])[0].write(&[7; 10]).unwrap();
                return (objects, bucket, Box::new(small) as Box<dyn Reservation>);
            }
            let mut upload =
                MultipartUpload::begin(bucket.clone(), Arc::default(), "blob", 10).unwrap();
            upload.parts(&[10])[0].write(&[7; 10]).unwrap();
            drop(upload.0.permit(MAX_PARTS_IN_FLIGHT).unwrap());
            (objects, bucket, Box::new(upload))
        })
    }

    fn found(bucket: &Bucket) -> Bytes {
        let objects = bucket.objects();
        let read = async move { objects.get(&Path::from("blob")).await?.bytes().await };
        bucket.request_blocking("blob", read).unwrap()
    }

    #[test]
    fn seal_retries_a_request_that_failed() {
        for (objects, bucket, reservation) in unsealed_blobs() {
            objects.inject_fault(0, Fault::NotExecuted);
            assert!(reservation.seal().unwrap());
            assert_eq!(found(&bucket), [7; 10][..]);
        }
    }

    #[test]
    fn seal_does_not_repeat_a_request_whose_response_was_lost() {
        for (objects, bucket, reservation) in unsealed_blobs() {
            objects.inject_fault(0, Fault::LostResponse);
            assert!(reservation.seal().unwrap());
            assert_eq!(found(&bucket), [7; 10][..]);
        }
    }

    #[test]
    fn seal_fails_after_the_last_retry() {
        for (objects, _bucket, reservation) in unsealed_blobs() {
            objects.fail_all();
            assert_eq!(reservation.seal().unwrap_err().kind(), ErrorKind::Unreachable);
            // Each try checks whether the object exists. The failed upload is also aborted.
            assert_eq!(objects.request_stats().0 / 2, TRIES as usize);
        }
    }

    /// An object with another length is not the result of the upload.
    #[test]
    fn upload_replaces_an_existing_object() {
        let [_, (objects, bucket, upload)] = unsealed_blobs();
        let (put, payload) = (bucket.objects(), PutPayload::from_static(b"another"));
        bucket
            .request_blocking("blob", async move { put.put(&Path::from("blob"), payload).await })
            .unwrap();
        objects.inject_fault(0, Fault::NotExecuted);
        assert!(upload.seal().unwrap());
        assert_eq!(found(&bucket), [7; 10][..]);
    }

    #[test]
    fn dropped_upload_is_aborted() {
        let [_, (objects, bucket, upload)] = unsealed_blobs();
        assert_eq!(objects.open_uploads(), 1);
        drop(upload);
        for _ in 0..2000 {
            if bucket.request_blocking("", bucket.list("").unwrap()).unwrap().is_empty() {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        assert_eq!(objects.open_uploads(), 0);
        assert_eq!(bucket.request_blocking("", bucket.list("").unwrap()).unwrap(), [""; 0]);
    }
}
