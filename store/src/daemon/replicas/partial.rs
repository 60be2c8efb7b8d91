//! A partial replica of an archive: its bytes are fetched on demand, each byte once for all readers.

mod shared_fetch;

use std::ops;
use std::pin::pin;
use std::sync::{Arc, RwLock};

use bytes::Bytes;
use rangemap::RangeSet;
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tssd_format::checksum;

use crate::convert::to_usize;
use crate::daemon::chunk_verifier::{copy_ranges, total_bytes};
use crate::daemon::remote_blobs::RemoteBlobIndex;
use crate::error::{Error, Result};
use crate::io::exec::run_blocking;
use crate::io::sync::{Lock, MutexGuard};
use crate::net::wire::{MAX_READ_BYTES, Range, ReadChecksum};
use crate::shm::BlobWriter;

/// Maximum number of ranges in a request, so that any ranges fit into a frame.
const MAX_RANGES: usize = 250;

/// Number of concurrent requests for the rest of an archive.
const FETCHERS: usize = 4;

/// Maximum size of the rest of an archive that is fetched without a request.
///
/// It is 1/`REST_DIVISOR` of the archive, or `REST_BYTES` bytes if that is more. The rest is padding, the index, and
/// tensors that no reader has requested yet.
const REST_DIVISOR: u64 = 16;
const REST_BYTES: u64 = 256 << 10;

/// The memory in which a replica is assembled.
pub(crate) enum ReplicaBuffer {
    /// For small archives: the heap. It is copied into a slab of the pool when it is complete.
    Heap(Vec<u8>),
    /// A segment of the pool.
    Segment(BlobWriter),
}

impl ReplicaBuffer {
    /// Returns the bytes of the archive, of which some may be missing.
    pub(crate) fn bytes(&self) -> &[u8] {
        match self {
            Self::Heap(bytes) => bytes,
            Self::Segment(writing) => writing.bytes(),
        }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            Self::Heap(bytes) => bytes,
            Self::Segment(writing) => writing.bytes_mut(),
        }
    }
}

/// An archive of which some bytes are on this host.
pub(crate) struct PartialReplica {
    pub(crate) name: String,
    len: u64,
    /// `None` once the archive is complete and its memory was taken.
    buffer: RwLock<Option<ReplicaBuffer>>,
    state: Lock<State>,
    /// Notified when a fetch has ended, with or without success.
    changed: Notify,
}

/// State of the bytes of an archive.
#[derive(Default)]
struct State {
    /// Bytes that are present.
    present: RangeSet<u64>,
    /// Number of bytes in `present`.
    present_bytes: u64,
    /// Bytes in `present` whose chunks the sender has verified.
    verified: RangeSet<u64>,
    /// Bytes that a reader is fetching.
    in_flight: RangeSet<u64>,
    /// Whether the rest of the archive is being fetched, or will be.
    is_rest_requested: bool,
}

impl State {
    /// Adds a run that was fetched.
    fn add(&mut self, run: ops::Range<u64>, is_verified: bool) {
        self.present_bytes += self.present.gaps(&run).map(|gap| gap.end - gap.start).sum::<u64>();
        if is_verified {
            self.verified.insert(run.clone());
        }
        self.present.insert(run);
    }

    /// Returns the bytes that a read can use: only verified ones if `verify` is true.
    fn usable(&self, verify: bool) -> &RangeSet<u64> {
        if verify { &self.verified } else { &self.present }
    }
}

/// The bytes that a read is missing.
enum MissingRanges<'a> {
    /// No byte is missing.
    Empty,
    /// Ranges that this reader must fetch.
    Claimed(FetchClaim<'a>),
    /// Other readers are fetching all of them.
    InFlight,
}

/// Ranges that one reader fetches. After the drop, other readers can claim what is still missing.
struct FetchClaim<'a> {
    replica: &'a PartialReplica,
    ranges: Vec<Range>,
}

impl Drop for FetchClaim<'_> {
    fn drop(&mut self) {
        let mut state = self.replica.state();
        for range in &self.ranges {
            range.for_each_run(|at| state.in_flight.remove(at..at + range.1));
        }
        drop(state);
        self.replica.changed.notify_waiters();
    }
}

impl PartialReplica {
    pub(crate) fn new(name: String, len: u64, buffer: ReplicaBuffer) -> Self {
        let (state, changed) = (Lock::default(), Notify::new());
        Self { name, len, buffer: RwLock::new(Some(buffer)), state, changed }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Reads ranges, and fetches those that are missing.
    ///
    /// If `verify` is true, the sender verifies the chunks that contain the ranges, and the result has the checksum of
    /// the data.
    /// Returns `None` if the archive is complete and its memory was taken.
    ///
    /// # Errors
    ///
    /// As [`RemoteBlobIndex::read`]; `Invalid` as [`total_bytes`].
    pub(crate) async fn read(
        self: &Arc<Self>,
        remote_blobs: &RemoteBlobIndex,
        ranges: &[Range],
        verify: bool,
    ) -> Result<Option<(Bytes, ReadChecksum)>> {
        let bytes = total_bytes(ranges, self.len)?;
        if let Some(fetched) = self.fetch_missing(remote_blobs, ranges, verify).await? {
            return Ok(Some(fetched));
        }
        let (replica, ranges) = (self.clone(), ranges.to_vec());
        run_blocking(move || {
            let buffer = replica.buffer.read().expect("nobody panics while writing");
            let Some(buffer) = &*buffer else { return Ok(None) };
            let data = copy_ranges(buffer.bytes(), &ranges, bytes);
            let crc32 = verify.then(|| checksum(&data));
            Ok(Some((data, ReadChecksum { crc32 })))
        })
        .await
    }

    /// Fetches all missing bytes, from holders and from daemons that fetch the archive too.
    pub(crate) async fn complete(
        self: &Arc<Self>,
        remote_blobs: &Arc<RemoteBlobIndex>,
    ) -> Result<()> {
        shared_fetch::fetch(self, remote_blobs).await?;
        let parts = Arc::new(Lock::new(self.missing_requests().into_iter()));
        let mut fetchers: JoinSet<Result<()>> = JoinSet::new();
        for _ in 0..FETCHERS {
            let (replica, remote_blobs, parts) =
                (self.clone(), remote_blobs.clone(), parts.clone());
            fetchers.spawn(async move {
                loop {
                    let next = parts.lock().next();
                    let Some(part) = next else { return Ok(()) };
                    replica.fetch_missing(&remote_blobs, &part, false).await?;
                }
            });
        }
        while let Some(fetched) = fetchers.join_next().await {
            let ended = |error| Error::io(&self.name, std::io::Error::other(error));
            fetched.map_err(ended)??;
        }
        Ok(())
    }

    /// Whether so little is missing that the rest must be fetched. Returns true only once.
    pub(crate) fn claim_rest(&self) -> bool {
        let mut state = self.state();
        let rest = self.len - state.present_bytes;
        let is_little = rest <= (self.len / REST_DIVISOR).max(REST_BYTES);
        is_little && !std::mem::replace(&mut state.is_rest_requested, true)
    }

    /// Requests the rest of the archive.
    pub(crate) fn request_rest(&self) {
        self.state().is_rest_requested = true;
    }

    /// Whether the rest of the archive is requested.
    pub(crate) fn is_rest_requested(&self) -> bool {
        self.state().is_rest_requested
    }

    /// Cancels the request for the rest of the archive.
    pub(crate) fn cancel_rest(&self) {
        self.state().is_rest_requested = false;
    }

    /// Takes the memory of the complete archive. `None` if another task has taken it.
    pub(crate) fn take_buffer(&self) -> Option<ReplicaBuffer> {
        self.buffer.write().expect("nobody panics while writing").take()
    }

    /// Returns the missing ranges, grouped by request.
    fn missing_requests(&self) -> Vec<Vec<Range>> {
        if self.len == 0 {
            return Vec::new();
        }
        let gaps: Vec<_> = self.state().present.gaps(&(0..self.len)).collect();
        let mut parts: Vec<Vec<Range>> = Vec::new();
        let mut budget = 0;
        for gap in gaps {
            let mut at = gap.start;
            while at < gap.end {
                if budget == 0 || parts.last().is_none_or(|part| part.len() >= MAX_RANGES) {
                    parts.push(Vec::new());
                    budget = MAX_READ_BYTES;
                }
                let len = budget.min(gap.end - at);
                parts.last_mut().expect("there is one").push(Range::contiguous(at, len));
                (at, budget) = (at + len, budget - len);
            }
        }
        parts
    }

    /// Fetches the missing bytes of these ranges.
    ///
    /// Returns the data if one request fetched exactly these ranges.
    async fn fetch_missing(
        self: &Arc<Self>,
        remote_blobs: &RemoteBlobIndex,
        ranges: &[Range],
        verify: bool,
    ) -> Result<Option<(Bytes, ReadChecksum)>> {
        loop {
            // Registered before the state is read, so that no change is missed.
            let mut changed = pin!(self.changed.notified());
            changed.as_mut().enable();
            let claim = match self.claim_missing(ranges, verify) {
                MissingRanges::Empty => return Ok(None),
                MissingRanges::InFlight => {
                    changed.await;
                    continue;
                }
                MissingRanges::Claimed(claim) => claim,
            };
            for part in claim.ranges.chunks(MAX_RANGES) {
                let fetched = remote_blobs.read(&self.name, part, verify).await?;
                let (replica, part) = (self.clone(), part.to_vec());
                let (fetched, part) = run_blocking(move || {
                    replica.store(&part, &fetched.0, verify);
                    Ok((fetched, part))
                })
                .await?;
                if part == ranges {
                    return Ok(Some(fetched));
                }
            }
        }
    }

    /// Returns the missing bytes of these ranges, and claims those that no reader is fetching.
    fn claim_missing(&self, ranges: &[Range], verify: bool) -> MissingRanges<'_> {
        let mut state = self.state();
        let (mut claimed, mut is_in_flight) = (Vec::new(), false);
        for range in ranges {
            let mut is_unclaimed = true;
            range.for_each_run(|at| {
                let run = at..at + range.1;
                is_unclaimed &=
                    !state.usable(verify).overlaps(&run) && !state.in_flight.overlaps(&run);
            });
            if is_unclaimed {
                claimed.push(range.clone());
                range.for_each_run(|at| state.in_flight.insert(at..at + range.1));
                continue;
            }
            range.for_each_run(|at| {
                let gaps: Vec<_> = state.usable(verify).gaps(&(at..at + range.1)).collect();
                for gap in gaps {
                    is_in_flight |= state.in_flight.overlaps(&gap);
                    let unclaimed: Vec<_> = state.in_flight.gaps(&gap).collect();
                    for part in unclaimed {
                        claimed.push(Range::contiguous(part.start, part.end - part.start));
                        state.in_flight.insert(part);
                    }
                }
            });
        }
        match (claimed.is_empty(), is_in_flight) {
            (false, _) => MissingRanges::Claimed(FetchClaim { replica: self, ranges: claimed }),
            (true, true) => MissingRanges::InFlight,
            (true, false) => MissingRanges::Empty,
        }
    }

    /// Copies fetched bytes into the replica and marks them as present.
    fn store(&self, ranges: &[Range], data: &Bytes, verify: bool) {
        {
            let mut buffer = self.buffer.write().expect("nobody panics while writing");
            // `None` if the archive was completed meanwhile. It has these bytes then, from a fetch without
            // verification.
            if let Some(buffer) = &mut *buffer {
                let (target, mut rest) = (buffer.bytes_mut(), &data[..]);
                for range in ranges {
                    let len = to_usize(range.1);
                    range.for_each_run(|at| {
                        let (run, remaining) = rest.split_at(len);
                        target[to_usize(at)..][..len].copy_from_slice(run);
                        rest = remaining;
                    });
                }
            }
        }
        let mut state = self.state();
        for range in ranges {
            range.for_each_run(|at| state.add(at..at + range.1, verify));
        }
    }
}
