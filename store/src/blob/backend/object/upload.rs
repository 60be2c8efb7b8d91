//! Blobs on their way to a bucket: small ones in one request, others in parts, as soon as each is full.

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

use super::marker;
use crate::blob::{Part, Reservation, split};
use crate::error::{Error, ErrorKind, Result};
use crate::io::bucket::{Bucket, again};
use crate::io::exec::backoff;
use crate::io::sync::{Lock, MutexGuard};

/// A blob of at most so many bytes goes in one request.
pub(super) const SMALL_BYTES: u64 = 16 << 20;

/// A part has at least so many bytes, and all but the last have the same number: some stores want that.
const PART_BYTES: u64 = 16 << 20;

/// No store takes more parts than this.
const MAX_PARTS: u64 = 10_000;

/// How many parts of an upload are under way at once.
const PARTS_UNDER_WAY: u32 = 8;

/// Memory of parts that were sent, for those to come: new memory costs more than what is done with it. At most
/// as many as are under way at once.
#[derive(Default)]
pub(super) struct Spare(Lock<Vec<Bytes>>);

impl Spare {
    fn held(&self) -> MutexGuard<'_, Vec<Bytes>> {
        self.0.lock()
    }

    /// So many bytes for a part: warm ones, of an earlier part, if the bucket has let go of it.
    fn take(&self, len: usize) -> BytesMut {
        let warm = {
            let mut held = self.held();
            let free = held.iter().position(|bytes| bytes.len() == len && bytes.is_unique());
            free.map(|free| held.swap_remove(free))
        };
        match warm.map(Bytes::try_into_mut) {
            Some(Ok(warm)) => warm,
            _ => BytesMut::zeroed(len),
        }
    }

    /// A part was sent, though the bucket may still look at it. The last one of a blob is seldom as long as another's.
    fn keep(&self, part: Bytes) {
        let mut held = self.held();
        if wide(part.len()) == PART_BYTES && held.len() < PARTS_UNDER_WAY as usize {
            held.push(part);
        }
    }
}

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
                    Err(_) if tries < TRIES => backoff(tries).await,
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
    spare: Arc<Spare>,
    /// The parts that are being filled, by number.
    filling: Lock<BTreeMap<u64, Filling>>,
    state: Lock<State>,
    /// The right to have a part under way.
    under_way: Arc<Semaphore>,
}

/// A part that is being filled, by any number of threads: each has a piece of its memory.
struct Filling {
    /// Pieces that nobody has had yet, and those that are full, by where they begin.
    free: BTreeMap<usize, BytesMut>,
    full: BTreeMap<usize, BytesMut>,
    missing: usize,
}

/// A piece of a part that is being filled.
struct Piece {
    number: u64,
    start: usize,
    bytes: BytesMut,
    /// How many of them are written.
    filled: usize,
}

#[derive(Default)]
struct State {
    sent: BTreeMap<u64, PartId>,
    failed: Option<object_store::Error>,
    is_sealed: bool,
}

impl Upload {
    pub(super) fn begin(bucket: Bucket, spare: Arc<Spare>, name: &str, len: u64) -> Result<Self> {
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
            spare,
            filling: Lock::default(),
            state: Lock::default(),
            under_way: Arc::new(Semaphore::new(PARTS_UNDER_WAY as usize)),
        })))
    }
}

impl Filling {
    fn new(memory: BytesMut, len: usize) -> Self {
        let free = BTreeMap::from([(0, memory)]);
        Self { free, full: BTreeMap::new(), missing: len }
    }

    fn lend(&mut self, within: Range<usize>) -> BytesMut {
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
    fn filling(&self) -> MutexGuard<'_, BTreeMap<u64, Filling>> {
        self.filling.lock()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// The memory of bytes of the blob, as far as they are in one part. Nobody else asks for them.
    fn lend(&self, bytes: Range<u64>) -> Result<Piece> {
        let number = bytes.start / self.part_len;
        let start = number * self.part_len;
        let end = self.len.min(start + self.part_len);
        let part_len = native(end - start)?;
        let within = native(bytes.start - start)?..native(bytes.end.min(end) - start)?;
        let mut filling = self.filling();
        let part = filling
            .entry(number)
            .or_insert_with(|| Filling::new(self.spare.take(part_len), part_len));
        Ok(Piece { number, start: within.start, bytes: part.lend(within), filled: 0 })
    }

    /// Takes memory back that is full, and sends the part if it is the last of it.
    fn take_back(self: &Arc<Self>, piece: Piece) -> Result<()> {
        let full = {
            let mut filling = self.filling();
            let part = filling.get_mut(&piece.number).expect("a part is there until it is full");
            part.missing -= piece.bytes.len();
            part.full.insert(piece.start, piece.bytes);
            if part.missing > 0 {
                return Ok(());
            }
            filling.remove(&piece.number)
        };
        let pieces = full.map(|part| part.full).into_iter().flatten();
        let whole = pieces.map(|(_, piece)| piece).reduce(|mut whole, piece| {
            // They are neighbours in memory: nothing moves.
            whole.unsplit(piece);
            whole
        });
        self.send(piece.number, whole.unwrap_or_default().freeze())
    }

    /// Sends a part as soon as not too many are under way.
    fn send(self: &Arc<Self>, number: u64, bytes: Bytes) -> Result<()> {
        if let Some(error) = &self.state().failed {
            return Err(self.bucket.error(&self.name, error));
        }
        let permit = self.permit(1)?;
        let inner = self.clone();
        self.bucket.spawn(async move {
            let sent = inner.put(number, PutPayload::from(bytes.clone())).await;
            inner.spare.keep(bytes);
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
                _ if tries < TRIES => backoff(tries).await,
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
            let rest = offset..offset + len;
            offset = rest.end;
            parts.push(Box::new(UploadPart { inner: self.0.clone(), rest, piece: None }));
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
    /// What was not asked for yet.
    rest: Range<u64>,
    piece: Option<Piece>,
}

impl UploadPart {
    /// The memory of what comes next, as far as it is in one part of the upload.
    fn next(&mut self) -> Result<Piece> {
        let piece = self.inner.lend(self.rest.clone())?;
        self.rest.start += wide(piece.bytes.len());
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
            let (now, rest) = bytes.split_at(missing.len().min(bytes.len()));
            missing[..now.len()].copy_from_slice(now);
            piece.filled += now.len();
            if piece.filled == piece.bytes.len() {
                self.inner.take_back(piece)?;
            } else {
                self.piece = Some(piece);
            }
            bytes = rest;
        }
        Ok(())
    }
}

impl Part for UploadPart {
    fn fill(&mut self, job: &WriteJob) -> Result<JobChecksums> {
        let inner = self.inner.clone();
        let failed = |error| Error::format(&inner.name, error);
        if !self.rest.is_empty() {
            let mut piece = self.next()?;
            if self.rest.is_empty() {
                // All of it is in one piece of memory.
                let filled = job.run(&mut piece.bytes).map_err(failed)?;
                inner.take_back(piece)?;
                return Ok(filled);
            }
            self.piece = Some(piece);
        }
        job.write_to(self).map_err(failed)
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

fn wide(len: usize) -> u64 {
    u64::try_from(len).expect("usize is at most 64 bits")
}

#[cfg(test)]
mod tests {
    use object_store::memory::InMemory;
    use proptest::prelude::{ProptestConfig, any, prop, prop_assert, proptest};

    use super::*;
    use crate::testing::faulty_bucket::{Fault, Faulty};

    proptest! {
        #![proptest_config(ProptestConfig { cases: 6, ..ProptestConfig::default() })]

        /// Whatever the cuts, and whoever writes first: each byte is where it belongs.
        #[test]
        fn parts_are_filled_by_many_threads_in_any_order(
            lens in prop::collection::vec((0..6_u64 << 20, any::<u32>()), 6..14),
            block in 1_usize..3 << 20,
        ) {
            let total: u64 = lens.iter().map(|(len, _)| len).sum::<u64>() + 1;
            let mut wanted = vec![0; native(total).unwrap()];
            for (number, word) in wanted.chunks_exact_mut(8).enumerate() {
                word.copy_from_slice(&wide(number).to_le_bytes());
            }
            let objects = Arc::new(InMemory::new());
            let bucket = Bucket::new(objects.clone(), Path::default(), "memory").unwrap();
            let spare = Arc::new(Spare::default());
            let cut: Vec<u64> = lens.iter().map(|(len, _)| *len).chain([1]).collect();
            // The second one is in memory of the first.
            for (name, turn) in [("blob", 1), ("another", 2)] {
                for byte in &mut wanted {
                    *byte = byte.wrapping_mul(turn);
                }
                let mut upload = Upload::begin(bucket.clone(), spare.clone(), name, total).unwrap();
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
                let found = bucket.wait(name, async move { objects.get(&path).await?.bytes().await });
                prop_assert!(found.unwrap() == wanted);
            }
        }
    }

    #[test]
    fn memory_of_parts_comes_back_when_the_bucket_has_let_go_of_it() {
        let len = native(PART_BYTES).unwrap();
        let spare = Spare::default();
        let part = |byte| {
            let mut part = spare.take(len);
            part.fill(byte);
            part.freeze()
        };
        let first = part(1);
        let (place, looked_at) = (first.as_ptr(), first.clone());
        spare.keep(first);
        assert_ne!(part(2).as_ptr(), place);
        assert_eq!(looked_at[len - 1], 1);
        drop(looked_at);
        let again = spare.take(len);
        assert_eq!((again.as_ptr(), again.len()), (place, len));
        // What is shorter is not kept, nor more than are under way.
        spare.keep(Bytes::from_static(&[1; 100]));
        let parts: Vec<_> = (0..20).map(part).collect();
        for part in parts {
            spare.keep(part);
        }
        assert_eq!(spare.held().len(), PARTS_UNDER_WAY as usize);
        assert_eq!(spare.take(100).len(), 100, "it is not what a shorter part needs");
    }

    /// A bucket, and whatever is put there on its way: in one request, or in parts of which all have come.
    fn on_their_way() -> [(Arc<Faulty>, Bucket, Box<dyn Reservation>); 2] {
        [false, true].map(|in_parts| {
            let objects = Arc::<Faulty>::default();
            let bucket = Bucket::new(objects.clone(), Path::default(), "s3://test").unwrap();
            if !in_parts {
                let mut small = Small::new(bucket.clone(), "blob", 10).unwrap();
                small.parts(&[10])[0].write(&[7; 10]).unwrap();
                return (objects, bucket, Box::new(small) as Box<dyn Reservation>);
            }
            let mut upload = Upload::begin(bucket.clone(), Arc::default(), "blob", 10).unwrap();
            upload.parts(&[10])[0].write(&[7; 10]).unwrap();
            drop(upload.0.permit(PARTS_UNDER_WAY).unwrap());
            (objects, bucket, Box::new(upload))
        })
    }

    fn found(bucket: &Bucket) -> Bytes {
        let objects = bucket.objects();
        let read = async move { objects.get(&Path::from("blob")).await?.bytes().await };
        bucket.wait("blob", read).unwrap()
    }

    #[test]
    fn what_was_not_done_is_done_again() {
        for (objects, bucket, reservation) in on_their_way() {
            objects.plan(0, Fault::NotDone);
            assert!(reservation.seal().unwrap());
            assert_eq!(found(&bucket), [7; 10][..]);
        }
    }

    #[test]
    fn what_was_done_and_not_answered_is_not_done_again() {
        for (objects, bucket, reservation) in on_their_way() {
            objects.plan(0, Fault::LostAnswer);
            assert!(reservation.seal().unwrap());
            assert_eq!(found(&bucket), [7; 10][..]);
        }
    }

    #[test]
    fn what_is_never_done_is_an_error_after_some_tries() {
        for (objects, _bucket, reservation) in on_their_way() {
            objects.end();
            assert_eq!(reservation.seal().unwrap_err().kind(), ErrorKind::Unreachable);
            // Each looks whether it is there after all; an upload that has failed is given up besides.
            assert_eq!(objects.seen().0 / 2, TRIES as usize);
        }
    }

    /// What is there is not what was put in parts, if it is not as long.
    #[test]
    fn parts_are_put_together_whatever_was_there() {
        let [_, (objects, bucket, upload)] = on_their_way();
        let (put, payload) = (bucket.objects(), PutPayload::from_static(b"another"));
        bucket.wait("blob", async move { put.put(&Path::from("blob"), payload).await }).unwrap();
        objects.plan(0, Fault::NotDone);
        assert!(upload.seal().unwrap());
        assert_eq!(found(&bucket), [7; 10][..]);
    }

    #[test]
    fn an_upload_that_is_dropped_is_given_up() {
        let [_, (objects, bucket, upload)] = on_their_way();
        assert_eq!(objects.uploads(), 1);
        drop(upload);
        for _ in 0..2000 {
            if bucket.wait("", bucket.list("").unwrap()).unwrap().is_empty() {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        assert_eq!(objects.uploads(), 0);
        assert_eq!(bucket.wait("", bucket.list("").unwrap()).unwrap(), [""; 0]);
    }
}
