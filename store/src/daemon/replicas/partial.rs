//! A partial replica of an archive: its bytes are fetched on demand, each byte once for all readers.

mod pieces;
mod shared_fetch;

use std::ops;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock, RwLock};
use std::time::{Duration, Instant};

use bytes::Bytes;
use rangemap::RangeSet;
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tssd_format::checksum;

use crate::control::layout::ArchiveName;
use crate::convert::to_usize;
use crate::daemon::chunk_verifier::{copy_ranges, total_bytes};
use crate::daemon::delta_base::DeltaBase;
use crate::daemon::read_encoder::{EncodedRead, ReadEncoder};
use crate::daemon::remote_blobs::{ReadEncodings, RemoteBlobIndex, RemoteRead};
use crate::daemon::replicas::partial::pieces::Pieces;
pub(crate) use crate::daemon::replicas::partial::shared_fetch::MIN_SHARED_BYTES;
use crate::daemon::replicas::progress::FetchProgress;
use crate::error::{Error, ErrorKind, Result};
use crate::io::exec::run_blocking;
use crate::io::sync::{Lock, MutexGuard, boxed};
use crate::net::tls::Endpoint;
use crate::net::wire::{Encodings, MAX_READ_BYTES, Range, ReadChecksum};
use crate::shm::BlobWriter;

/// Maximum number of ranges in a request, so that any ranges fit into a frame.
const MAX_RANGES: usize = 250;

/// Number of concurrent requests for the rest of an archive.
const REST_REQUESTS: usize = 4;

/// Maximum number of runs of the ranges that readers want of an archive. It bounds the memory for them.
const MAX_WANTED_RUNS: u64 = 1 << 20;

/// Number of reads that may fail to decode before all bytes come as they are.
const MAX_DECODE_FAILURES: u32 = 3;

/// Rate in bytes per second up to which bytes come in byte planes. Two cores code and decode them faster.
const MAX_PLANES_RATE: u64 = 500_000_000;

/// Bytes that come before the rate counts.
const MIN_MEASURED_BYTES: u64 = 4 << 20;

/// Time for which the bits of the present pieces are reused. Many daemons ask for them.
const PRESENT_BITS_TTL: Duration = Duration::from_millis(50);

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
    pub(crate) progress: Arc<FetchProgress>,
    encoder: Arc<ReadEncoder>,
    /// In which encodings its bytes may come. In byte planes, only if the network is slow.
    encodings: Lock<ReadEncodings>,
    /// Number of reads whose bytes did not decode.
    decode_failures: AtomicU32,
    /// Whether no daemon with the whole archive has its base.
    holders_lack_base: AtomicBool,
    /// Notified when a fetch has ended, with or without success.
    changed: Notify,
    /// Notified when a reader wants more, or when the replica is evicted.
    wants_changed: Notify,
    /// The pieces in which daemons share the archive, once they are known.
    pieces: OnceLock<Arc<Pieces>>,
    /// The bits of [`PartialReplica::present_pieces`], and when they were computed.
    present_bits: Lock<Option<(Instant, Vec<u8>)>>,
}

/// State of the shared fetch of an archive.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum SharedFetchState {
    #[default]
    Ended,
    /// It runs, and knows what readers want.
    Running,
    /// It runs, and readers want more than it knows.
    Outdated,
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
    /// Bytes that are requested from a holder of the archive.
    in_flight: RangeSet<u64>,
    /// Bytes that readers of this host want, or wanted before.
    wanted: RangeSet<u64>,
    /// Number of runs of all wanted ranges.
    wanted_runs: u64,
    /// Bytes in `wanted` that the shared fetch has to fetch. Readers wait for it.
    claimed: RangeSet<u64>,
    /// Bytes in `claimed` that the shared fetch fetches from a holder. Other daemons wait for it.
    owned: RangeSet<u64>,
    /// Offsets in `owned` that other daemons wait for.
    demanded: Vec<u64>,
    shared_fetch: SharedFetchState,
    /// Whether the replica is evicted. Nothing is fetched for it.
    is_evicted: bool,
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
        self.claimed.remove(run.clone());
        self.owned.remove(run.clone());
        self.present.insert(run);
    }

    /// Adds a run that a reader wants. The shared fetch has to fetch what is missing of it.
    fn add_wanted(&mut self, run: ops::Range<u64>) {
        let is_known = self.wanted.gaps(&run).next().is_none() && !self.lacks(&run);
        if is_known || self.wanted_runs >= MAX_WANTED_RUNS {
            return;
        }
        self.wanted_runs += 1;
        let missing: Vec<_> = self.present.gaps(&run).collect();
        self.claimed.extend(missing);
        self.wanted.insert(run);
    }

    /// Returns whether bytes of a run are missing that the shared fetch has not claimed.
    fn lacks(&self, run: &ops::Range<u64>) -> bool {
        self.present.gaps(run).any(|gap| self.claimed.gaps(&gap).next().is_some())
    }

    /// Returns the parts of a run that no task fetches. The tasks are those that a reader waits for.
    fn unclaimed(&self, run: &ops::Range<u64>, waiting: Waiting) -> Vec<ops::Range<u64>> {
        let parts: Vec<_> = self.in_flight.gaps(run).collect();
        match self.shared(waiting) {
            None => parts,
            Some(shared) => parts.iter().flat_map(|part| shared.gaps(part)).collect(),
        }
    }

    /// Returns the bytes of the shared fetch that a read waits for.
    fn shared(&self, waiting: Waiting) -> Option<&RangeSet<u64>> {
        match waiting {
            Waiting::Requests => None,
            Waiting::Holders => Some(&self.owned),
            Waiting::All => Some(&self.claimed),
        }
    }

    /// Has the shared fetch fetch ranges next. Returns whether it fetches any of them from a holder.
    fn demand(&mut self, ranges: &[Range]) -> bool {
        let before = self.demanded.len();
        for range in ranges {
            let first_run = range.0..range.0 + range.1;
            let is_owned = self.owned.overlaps(&first_run);
            self.demanded.extend(is_owned.then_some(first_run.start));
        }
        self.demanded.len() > before
    }

    /// Ends the shared fetch. Readers fetch the bytes that it has claimed.
    fn end_shared_fetch(&mut self) {
        // Other daemons are not to ask for these.
        for run in std::mem::take(&mut self.claimed).iter() {
            self.wanted.remove(run.clone());
        }
        self.owned.clear();
        self.demanded.clear();
        self.shared_fetch = SharedFetchState::Ended;
    }

    /// Returns the bytes that a read can use: only verified ones if `verify` is true.
    fn usable(&self, verify: bool) -> &RangeSet<u64> {
        if verify { &self.verified } else { &self.present }
    }
}

/// Which fetches of other tasks a read waits for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Waiting {
    /// Requests to holders of the archive.
    Requests,
    /// Those, and the requests to holders that the shared fetch will make.
    Holders,
    /// All requests of the shared fetch.
    All,
}

/// The bytes that are present, for a later version.
impl DeltaBase for PartialReplica {
    fn name(&self) -> &str {
        &self.name
    }

    fn read(&self, ranges: &[Range]) -> Option<Bytes> {
        let bytes = total_bytes(ranges, self.len).ok()?;
        if !self.has(ranges, false) {
            return None;
        }
        let buffer = self.buffer.read().expect("the lock is not poisoned");
        Some(copy_ranges(buffer.as_ref()?.bytes(), ranges, bytes))
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
    pub(crate) fn new(
        name: String,
        len: u64,
        buffer: ReplicaBuffer,
        encodings: ReadEncodings,
        encoder: Arc<ReadEncoder>,
    ) -> Self {
        Self {
            name,
            len,
            encoder,
            encodings: Lock::new(encodings),
            decode_failures: AtomicU32::new(0),
            holders_lack_base: AtomicBool::new(false),
            buffer: RwLock::new(Some(buffer)),
            state: Lock::default(),
            progress: Arc::new(FetchProgress::new(Instant::now())),
            changed: Notify::new(),
            wants_changed: Notify::new(),
            pieces: OnceLock::new(),
            present_bits: Lock::default(),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Returns the length of the archive in bytes.
    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// Returns the number of bytes that are present.
    pub(crate) fn present_bytes(&self) -> u64 {
        self.state().present_bytes
    }

    /// Returns the name of the archive from which the bytes may come as differences.
    pub(crate) fn base_name(&self) -> Option<String> {
        self.encodings.lock().base.as_ref().map(|base| base.name().to_owned())
    }

    /// Returns whether no daemon with the whole archive has its base.
    pub(super) fn holders_lack_base(&self) -> bool {
        self.holders_lack_base.load(Ordering::Relaxed)
    }

    /// Removes the archive from which the bytes may come as differences.
    pub(crate) fn take_base(&self) -> Option<Arc<dyn DeltaBase>> {
        self.encodings.lock().base.take()
    }

    /// As [`PartialReplica::read_from`], from a holder.
    async fn read_from_holder(
        &self,
        remote_blobs: &RemoteBlobIndex,
        ranges: &[Range],
        verify: bool,
    ) -> Result<RemoteRead> {
        let read = self.read_from(None, remote_blobs, ranges, verify).await?;
        read.ok_or_else(|| Error::new(ErrorKind::NotFound, "a holder sent no data"))
    }

    /// Reads ranges from a fetcher, or else from a holder, and records what was sent.
    ///
    /// If the bytes do not decode, they are read once more, as they are. Those of a fetcher are not verified.
    /// Returns `None` if a fetcher lacks the base, and a holder may have it.
    async fn read_from(
        &self,
        fetcher: Option<&Endpoint>,
        remote_blobs: &RemoteBlobIndex,
        ranges: &[Range],
        verify: bool,
    ) -> Result<Option<RemoteRead>> {
        let mut encodings = self.accepted_encodings();
        loop {
            let (name, ranges) = (&self.name, ranges.to_vec());
            let read = match fetcher {
                Some(fetcher) => {
                    remote_blobs.read_from_fetcher(fetcher, name, ranges, &encodings).await
                }
                None => remote_blobs.read(name, &ranges, verify, &encodings).await.map(Some),
            };
            match read {
                Err(error)
                    if error.kind() == ErrorKind::Corrupt
                        && (encodings.base.is_some() || encodings.planes) =>
                {
                    tracing::warn!(name, %error, "its bytes are read once more, as they are");
                    encodings = ReadEncodings::default();
                    if self.decode_failures.fetch_add(1, Ordering::Relaxed) >= MAX_DECODE_FAILURES {
                        *self.encodings.lock() = ReadEncodings::default();
                    }
                }
                Err(error) => return Err(error),
                Ok(None) => return Ok(None),
                Ok(Some(read)) => {
                    if read.lacks_base && fetcher.is_none() {
                        self.holders_lack_base.store(true, Ordering::Relaxed);
                    }
                    self.progress.add(&read.sender, read.moved_bytes(), Instant::now());
                    let base = read.encoded.as_ref().and_then(|(_, used)| used.base.as_ref());
                    let version = base.and_then(|base| Some(ArchiveName::parse(base)?.position.1));
                    self.progress.set_base(version);
                    return Ok(Some(read));
                }
            }
        }
    }

    /// Returns the encodings in which bytes may come now.
    fn accepted_encodings(&self) -> ReadEncodings {
        let encodings = self.encodings.lock().clone();
        let rate = self.progress.rate(Instant::now());
        let is_slow = rate.is_some_and(|rate| (1..=MAX_PLANES_RATE).contains(&rate));
        let planes = encodings.planes && is_slow && self.present_bytes() >= MIN_MEASURED_BYTES;
        let base_only = encodings.base.is_some() && !self.holders_lack_base();
        ReadEncodings { planes, base_only, ..encodings }
    }

    /// Remembers bytes that came encoded, to send them to other daemons.
    fn remember_encoded(&self, ranges: &[Range], encoded: Option<(Bytes, Encodings)>) {
        if let Some((encoded, accept)) = encoded {
            let (blob, ranges) = (self.name.clone(), ranges.to_vec());
            self.encoder.insert(EncodedRead { blob, ranges, accept }, encoded);
        }
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
        waiting: Waiting,
    ) -> Result<Option<(Bytes, ReadChecksum)>> {
        total_bytes(ranges, self.len)?;
        // Bytes for a fetcher are verified, if they can be: readers of this host may need verified ones.
        let pieces = self.pieces.get().filter(|_| waiting == Waiting::Holders);
        let verify_fetch = verify || pieces.is_some_and(|pieces| pieces.are_in_raw_chunks(ranges));
        let fetched = self.fetch_missing(remote_blobs, ranges, verify_fetch, waiting).await?;
        if let Some((data, sum)) = fetched {
            return Ok(Some((data, if verify { sum } else { ReadChecksum { crc32: None } })));
        }
        self.copy(ranges, verify).await
    }

    /// Reads ranges that are present. Returns `None` if some bytes are missing, or if the memory was taken.
    ///
    /// # Errors
    ///
    /// `Invalid` as [`total_bytes`].
    pub(crate) async fn read_present(
        self: &Arc<Self>,
        ranges: &[Range],
        verify: bool,
    ) -> Result<Option<(Bytes, ReadChecksum)>> {
        total_bytes(ranges, self.len)?;
        if self.has(ranges, verify) { self.copy(ranges, verify).await } else { Ok(None) }
    }

    /// Returns whether ranges are present: only verified bytes if `verify` is true.
    fn has(&self, ranges: &[Range], verify: bool) -> bool {
        let state = self.state();
        ranges.iter().all(|range| {
            let mut is_present = true;
            range.for_each_run(|at| {
                let run = at..at + range.1;
                is_present = is_present && state.usable(verify).gaps(&run).next().is_none();
            });
            is_present
        })
    }

    /// Copies ranges that are present. Returns `None` if the memory was taken.
    async fn copy(
        self: &Arc<Self>,
        ranges: &[Range],
        verify: bool,
    ) -> Result<Option<(Bytes, ReadChecksum)>> {
        let bytes = total_bytes(ranges, self.len)?;
        let (replica, ranges) = (self.clone(), ranges.to_vec());
        run_blocking(move || {
            let buffer = replica.buffer.read().expect("the lock is not poisoned");
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
        if !self.misses_little() {
            self.request_ranges(remote_blobs, &[Range::contiguous(0, self.len)]);
            self.wait_for_shared_fetch().await;
        }
        // The rest, or all if it could not be shared.
        let parts = Arc::new(Lock::new(self.missing_requests().into_iter()));
        let mut requests: JoinSet<Result<()>> = JoinSet::new();
        for _ in 0..REST_REQUESTS {
            let (replica, remote_blobs, parts) =
                (self.clone(), remote_blobs.clone(), parts.clone());
            requests.spawn(async move {
                loop {
                    let next = parts.lock().next();
                    let Some(part) = next else { return Ok(()) };
                    replica.fetch_missing(&remote_blobs, &part, false, Waiting::All).await?;
                }
            });
        }
        while let Some(fetched) = requests.join_next().await {
            let ended = |error| Error::io(&self.name, std::io::Error::other(error));
            fetched.map_err(ended)??;
        }
        Ok(())
    }

    /// Has ranges fetched that readers will read: together with other daemons, in the background.
    ///
    /// Does nothing for ranges that are not valid, or beyond [`MAX_WANTED_RUNS`].
    pub(crate) fn request_ranges(
        self: &Arc<Self>,
        remote_blobs: &Arc<RemoteBlobIndex>,
        ranges: &[Range],
    ) {
        if remote_blobs.own().is_none() || self.len < MIN_SHARED_BYTES {
            return;
        }
        let mut state = self.state();
        if state.is_evicted {
            return;
        }
        for range in ranges {
            let runs = range.total_bytes(self.len).map(|bytes| bytes / range.1);
            if runs.is_some_and(|runs| runs <= MAX_WANTED_RUNS) {
                range.for_each_run(|at| state.add_wanted(at..at + range.1));
            }
        }
        if state.claimed.is_empty() {
            return;
        }
        let before = std::mem::replace(&mut state.shared_fetch, SharedFetchState::Outdated);
        drop(state);
        if before == SharedFetchState::Ended {
            drop(tokio::spawn(boxed(shared_fetch::run(self.clone(), remote_blobs.clone()))));
        } else {
            self.wants_changed.notify_one();
        }
    }

    /// Returns a bit for each piece: whether all that readers want of it is here. Empty if the pieces are not known.
    pub(crate) fn present_pieces(&self) -> Vec<u8> {
        let Some(pieces) = self.pieces.get() else { return Vec::new() };
        let mut cached = self.present_bits.lock();
        if let Some((since, bits)) = &*cached
            && since.elapsed() < PRESENT_BITS_TTL
        {
            return bits.clone();
        }
        let state = self.state();
        let mut bits = vec![0; to_usize(u64::from(pieces.count().div_ceil(8)))];
        for number in 0..pieces.count() {
            let range = pieces.range(number);
            if state.wanted.overlaps(&range) && !state.claimed.overlaps(&range) {
                bits[to_usize(u64::from(number / 8))] |= 1 << (number % 8);
            }
        }
        *cached = Some((Instant::now(), bits.clone()));
        bits
    }

    /// Waits until no shared fetch runs.
    async fn wait_for_shared_fetch(&self) {
        loop {
            let mut changed = pin!(self.changed.notified());
            changed.as_mut().enable();
            if self.state().shared_fetch == SharedFetchState::Ended {
                return;
            }
            changed.await;
        }
    }

    /// Ends the shared fetch. Its readers fetch what they miss themselves.
    pub(crate) fn evict(&self) {
        self.state().is_evicted = true;
        self.wants_changed.notify_one();
    }

    /// Whether so little is missing that the rest must be fetched. Returns true only once.
    pub(crate) fn claim_rest(&self) -> bool {
        self.misses_little() && !std::mem::replace(&mut self.state().is_rest_requested, true)
    }

    fn misses_little(&self) -> bool {
        self.len - self.state().present_bytes <= (self.len / REST_DIVISOR).max(REST_BYTES)
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

    /// Returns whether the memory of the complete archive was taken.
    pub(crate) fn is_taken(&self) -> bool {
        self.buffer.read().expect("the lock is not poisoned").is_none()
    }

    /// Takes the memory of the complete archive. `None` if another task has taken it.
    pub(crate) fn take_buffer(&self) -> Option<ReplicaBuffer> {
        self.buffer.write().expect("the lock is not poisoned").take()
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
        waiting: Waiting,
    ) -> Result<Option<(Bytes, ReadChecksum)>> {
        let mut has_demanded = waiting != Waiting::Holders;
        loop {
            // Registered before the state is read, so that no change is missed.
            let mut changed = pin!(self.changed.notified());
            changed.as_mut().enable();
            if !has_demanded && self.state().demand(ranges) {
                has_demanded = true;
                self.wants_changed.notify_one();
            }
            let claim = match self.claim_missing(ranges, verify, waiting) {
                MissingRanges::Empty => return Ok(None),
                MissingRanges::InFlight => {
                    changed.await;
                    continue;
                }
                MissingRanges::Claimed(claim) => claim,
            };
            for part in claim.ranges.chunks(MAX_RANGES) {
                let fetched = self.read_from_holder(remote_blobs, part, verify).await?;
                let (replica, part) = (self.clone(), part.to_vec());
                let (fetched, part) = run_blocking(move || {
                    replica.store(&part, &fetched.data, verify);
                    Ok((fetched, part))
                })
                .await?;
                if part == ranges {
                    return Ok(Some((fetched.data, fetched.checksum)));
                }
            }
        }
    }

    /// Returns the missing bytes of these ranges, and claims those that no reader is fetching.
    fn claim_missing(&self, ranges: &[Range], verify: bool, waiting: Waiting) -> MissingRanges<'_> {
        let mut state = self.state();
        let (mut claimed, mut is_in_flight) = (Vec::new(), false);
        for range in ranges {
            let mut is_unclaimed = true;
            range.for_each_run(|at| {
                let run = at..at + range.1;
                is_unclaimed &= !state.shared(waiting).is_some_and(|shared| shared.overlaps(&run))
                    && !state.usable(verify).overlaps(&run)
                    && !state.in_flight.overlaps(&run);
            });
            if is_unclaimed {
                claimed.push(range.clone());
                range.for_each_run(|at| state.in_flight.insert(at..at + range.1));
                continue;
            }
            range.for_each_run(|at| {
                let gaps: Vec<_> = state.usable(verify).gaps(&(at..at + range.1)).collect();
                for gap in gaps {
                    let unclaimed = state.unclaimed(&gap, waiting);
                    is_in_flight |= unclaimed != [gap];
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
    ///
    /// Bytes that are not verified do not replace others.
    fn store(&self, ranges: &[Range], data: &Bytes, is_verified: bool) {
        // Held until the state is changed, so that no other bytes come between. The state is locked only briefly: copies
        // to new memory take long, and readers need it.
        let mut buffer = self.buffer.write().expect("the lock is not poisoned");
        let mut rest = &data[..];
        let mut copies = Vec::new();
        let state = self.state();
        for range in ranges {
            range.for_each_run(|at| {
                let (bytes, remaining) = rest.split_at(to_usize(range.1));
                rest = remaining;
                let run = at..at + range.1;
                if is_verified {
                    copies.push((at, bytes));
                    return;
                }
                for part in state.present.gaps(&run) {
                    let within = to_usize(part.start - at)..to_usize(part.end - at);
                    copies.push((part.start, &bytes[within]));
                }
            });
        }
        drop(state);
        // No buffer: the archive was completed meanwhile, and has these bytes.
        if let Some(buffer) = &mut *buffer {
            let target = buffer.bytes_mut();
            for (at, bytes) in copies {
                target[to_usize(at)..][..bytes.len()].copy_from_slice(bytes);
            }
        }
        let mut state = self.state();
        for range in ranges {
            range.for_each_run(|at| state.add(at..at + range.1, is_verified));
        }
    }
}
