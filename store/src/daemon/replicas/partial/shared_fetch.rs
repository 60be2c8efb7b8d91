//! Fetches an archive together with other daemons: each piece comes from its holder once, and is passed on.
//!
//! [`FetchPlan`] decides. This module asks the origin for the other daemons, and sends the requests.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::Instant;
use tssd_format::{Archive, checksum};

use super::PartialReplica;
use crate::convert::to_usize;
use crate::daemon::remote_blobs::RemoteBlobIndex;
use crate::error::{Error, ErrorKind, Result};
use crate::fanout::{FetchPlan, Fetcher, FetcherId, PieceNumber, PieceRequest, Source};
use crate::io::exec::run_blocking;
use crate::net::tls::Endpoint;
use crate::net::wire::{self, MAX_READ_BYTES};

/// Smallest archive that daemons fetch together.
const MIN_SHARED_BYTES: u64 = 4 << 20;

/// Smallest piece, in bytes. It has whole chunks.
const MIN_PIECE_BYTES: u64 = 1 << 20;

/// Number of pieces that an archive has, unless they would be too small or too large.
const TARGET_PIECES: u64 = 512;

/// Delays before a daemon asks for the other daemons again.
const ANNOUNCE_DELAYS: [Duration; 4] = [
    Duration::from_millis(10),
    Duration::from_millis(20),
    Duration::from_millis(40),
    Duration::from_millis(100),
];

/// The delay after those.
const LAST_ANNOUNCE_DELAY: Duration = Duration::from_millis(200);

/// Time that the first requests wait for the names of the other daemons.
const FIRST_ANNOUNCE_TIMEOUT: Duration = Duration::from_secs(1);

/// Interval at which the plan looks for slow daemons.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// Fetches the chunks of an archive that are missing. The rest, such as the index, stays missing.
///
/// Does nothing for a small archive, if other daemons do not reach this one, or if the index cannot be read now.
///
/// # Errors
///
/// As [`RemoteBlobIndex::read`]. A fetcher that fails is replaced.
pub(super) async fn fetch(
    replica: &Arc<PartialReplica>,
    remote_blobs: &Arc<RemoteBlobIndex>,
) -> Result<()> {
    let (Some(own), Some(origin)) = (remote_blobs.own(), remote_blobs.origin(&replica.name)) else {
        return Ok(());
    };
    if replica.len < MIN_SHARED_BYTES {
        return Ok(());
    }
    let Some(remote) = remote_blobs.open(&replica.name) else { return Ok(()) };
    let (name, len) = (replica.name.clone(), replica.len);
    let pieces = run_blocking(move || {
        let failed = |error| Error::from_format(&name, error);
        let archive = Archive::from_blob(Arc::new(remote)).map_err(failed)?;
        Ok(Pieces::of(&archive, len))
    });
    let pieces = match pieces.await {
        Ok(Some(pieces)) => Arc::new(pieces),
        Ok(None) => return Ok(()),
        Err(error) => {
            // Another holder may have the archive, which a plain fetch finds.
            tracing::debug!(name = replica.name, %error, "the archive is not fetched together");
            return Ok(());
        }
    };
    let missing: Vec<PieceNumber> =
        pieces.numbers().filter(|number| !replica.has(&pieces.range(*number))).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let count = pieces.numbers().end;
    let plan = FetchPlan::new(fetcher_id(&replica.name, own), count, missing);
    let fetch = SharedFetch {
        replica: replica.clone(),
        remote_blobs: remote_blobs.clone(),
        pieces,
        plan,
        origin,
        fetchers: Vec::new(),
        started: Instant::now(),
    };
    fetch.run().await
}

/// Returns the number of a daemon in the plans of an archive. It differs between archives, so that owners differ.
fn fetcher_id(name: &str, endpoint: &Endpoint) -> FetcherId {
    let hash = blake3::hash(format!("{name}\0{endpoint}").as_bytes());
    FetcherId::from_le_bytes(*hash.as_bytes().first_chunk().expect("a hash has 32 bytes"))
}

/// The chunks of an archive, in pieces.
struct Pieces {
    /// Offsets of the pieces in the archive, and the end of the last one.
    bounds: Vec<u64>,
    /// The chunks in the order of their offsets, each with its CRC-32.
    chunks: Vec<(Range<u64>, u32)>,
}

impl Pieces {
    /// Returns the pieces of an archive of `len` bytes. `None` if a piece does not fit into a request.
    fn of(archive: &Archive, len: u64) -> Option<Self> {
        let mut chunks = Vec::new();
        for number in 0..archive.storage_count() {
            let storage = archive.storage(number);
            let numbers = storage.chunks(&(0..storage.len));
            let found = numbers.zip(&storage.crcs);
            chunks.extend(found.map(|(chunk, crc)| (storage.stored_chunk(chunk), *crc)));
        }
        chunks.retain(|(range, _)| range.start < range.end);
        chunks.sort_unstable_by_key(|(range, _)| range.start);
        let piece_bytes = (len / TARGET_PIECES).clamp(MIN_PIECE_BYTES, MAX_READ_BYTES / 2);
        let mut bounds: Vec<u64> = Vec::new();
        for (range, _) in &chunks {
            if bounds.last().is_none_or(|start| range.start - start >= piece_bytes) {
                bounds.push(range.start);
            }
        }
        bounds.extend(chunks.last().map(|(range, _)| range.end));
        let fits = bounds.windows(2).all(|bounds| bounds[1] - bounds[0] <= MAX_READ_BYTES);
        fits.then_some(Self { bounds, chunks })
    }

    fn numbers(&self) -> Range<PieceNumber> {
        0..PieceNumber::try_from(self.bounds.len().saturating_sub(1)).unwrap_or(0)
    }

    /// Returns the range of a piece in the archive, with the padding before the next piece.
    fn range(&self, number: PieceNumber) -> Range<u64> {
        let number = to_usize(number.into());
        self.bounds[number]..self.bounds[number + 1]
    }

    fn wire_range(&self, number: PieceNumber) -> wire::Range {
        let range = self.range(number);
        wire::Range::contiguous(range.start, range.end - range.start)
    }

    /// Returns whether all chunks of a piece have their checksums, and the bytes between them are zero.
    fn verify(&self, number: PieceNumber, data: &[u8]) -> bool {
        let piece = self.range(number);
        let part = |range: Range<u64>| {
            &data[to_usize(range.start - piece.start)..to_usize(range.end - piece.start)]
        };
        let first = self.chunks.partition_point(|(range, _)| range.start < piece.start);
        let mut at = piece.start;
        for (range, crc) in &self.chunks[first..] {
            if range.end > piece.end {
                break;
            }
            let is_padded = part(at..range.start.max(at)).iter().all(|byte| *byte == 0);
            if !is_padded || checksum(part(range.clone())) != *crc {
                return false;
            }
            at = range.end;
        }
        part(at..piece.end).iter().all(|byte| *byte == 0)
    }
}

/// A fetch of one archive.
struct SharedFetch {
    replica: Arc<PartialReplica>,
    remote_blobs: Arc<RemoteBlobIndex>,
    pieces: Arc<Pieces>,
    plan: FetchPlan,
    /// The daemon where the archive was put.
    origin: Endpoint,
    /// The addresses of the other fetchers.
    fetchers: Vec<(FetcherId, Endpoint)>,
    started: Instant,
}

impl SharedFetch {
    async fn run(mut self) -> Result<()> {
        let mut requests: JoinSet<(PieceRequest, Result<()>)> = JoinSet::new();
        let mut announcements = JoinSet::new();
        let mut delays = ANNOUNCE_DELAYS.into_iter();
        let first = self.announce(Duration::ZERO);
        if let Ok(found) = tokio::time::timeout(FIRST_ANNOUNCE_TIMEOUT, first).await {
            self.set_fetchers(found);
        }
        while !self.plan.is_complete() {
            if announcements.is_empty() {
                announcements.spawn(self.announce(delays.next().unwrap_or(LAST_ANNOUNCE_DELAY)));
            }
            while let Some(request) = self.plan.next_request(self.started.elapsed()) {
                requests.spawn(self.fetch_piece(request));
            }
            let failed = |error| Error::io(&self.replica.name, std::io::Error::other(error));
            tokio::select! {
                Some(ended) = requests.join_next() => {
                    let (request, fetched) = ended.map_err(failed)?;
                    self.finish(request, fetched)?;
                }
                Some(found) = announcements.join_next() => {
                    let found = found.map_err(failed)?;
                    self.set_fetchers(found);
                }
                () = tokio::time::sleep(POLL_INTERVAL) => {}
            }
        }
        Ok(())
    }

    /// Asks the origin after a delay for the other daemons that fetch the archive. `None` without an answer.
    fn announce(
        &self,
        delay: Duration,
    ) -> impl Future<Output = Option<Vec<(Endpoint, bool)>>> + 'static {
        let (remote_blobs, origin) = (self.remote_blobs.clone(), self.origin.clone());
        let name = self.replica.name.clone();
        async move {
            tokio::time::sleep(delay).await;
            let found = remote_blobs.announce(&origin, &name, false).await;
            found
                .inspect_err(|error| tracing::debug!(name, %error, "the origin names no fetchers"))
                .ok()
        }
    }

    /// Sets the other daemons that fetch the archive. Without an answer of the origin, the known ones stay.
    fn set_fetchers(&mut self, found: Option<Vec<(Endpoint, bool)>>) {
        let Some(found) = found else { return };
        let id = |endpoint: &Endpoint| fetcher_id(&self.replica.name, endpoint);
        let fetchers = found
            .iter()
            .map(|(endpoint, is_complete)| Fetcher { id: id(endpoint), is_complete: *is_complete });
        self.plan.set_fetchers(fetchers);
        self.fetchers = found.into_iter().map(|(endpoint, _)| (id(&endpoint), endpoint)).collect();
    }

    fn finish(&mut self, request: PieceRequest, fetched: Result<()>) -> Result<()> {
        match (request.source, fetched) {
            (_, Ok(())) => self.plan.complete(request, self.started.elapsed()),
            (Source::Holder, Err(error)) => return Err(error),
            (Source::Fetcher(fetcher), Err(error)) => {
                let (name, endpoint) = (&self.replica.name, self.endpoint(fetcher));
                tracing::warn!(
                    name,
                    fetcher = endpoint.map(ToString::to_string),
                    %error,
                    "the fetcher is avoided"
                );
                self.plan.fail(request);
            }
        }
        Ok(())
    }

    fn endpoint(&self, fetcher: FetcherId) -> Option<&Endpoint> {
        self.fetchers.iter().find(|(id, _)| *id == fetcher).map(|(_, endpoint)| endpoint)
    }

    /// Fetches a piece into the replica.
    fn fetch_piece(
        &self,
        request: PieceRequest,
    ) -> impl Future<Output = (PieceRequest, Result<()>)> + 'static {
        let endpoint = match request.source {
            Source::Holder => None,
            Source::Fetcher(fetcher) => self.endpoint(fetcher).cloned(),
        };
        let (replica, remote_blobs) = (self.replica.clone(), self.remote_blobs.clone());
        let pieces = self.pieces.clone();
        async move {
            let fetched = match endpoint {
                None => {
                    let range = pieces.wire_range(request.piece);
                    replica.fetch_missing(&remote_blobs, &[range], false).await.map(drop)
                }
                Some(endpoint) => {
                    replica.fetch_from(endpoint, &remote_blobs, pieces, request.piece).await
                }
            };
            (request, fetched)
        }
    }
}

impl PartialReplica {
    /// Fetches a piece from a fetcher, and verifies it.
    async fn fetch_from(
        self: Arc<Self>,
        endpoint: Endpoint,
        remote_blobs: &RemoteBlobIndex,
        pieces: Arc<Pieces>,
        number: PieceNumber,
    ) -> Result<()> {
        let range = pieces.wire_range(number);
        let read = remote_blobs.read_from_fetcher(&endpoint, &self.name, range.clone());
        let data = read.await?;
        let store = move || {
            if !pieces.verify(number, &data) {
                let text = format_args!("`{}`: `{endpoint}` sent damaged bytes", self.name);
                return Err(Error::new(ErrorKind::Corrupt, text));
            }
            self.store(&[range], &data, false);
            Ok(())
        };
        run_blocking(store).await
    }

    /// Returns whether all bytes of a range are present.
    fn has(&self, range: &Range<u64>) -> bool {
        self.state().present.gaps(range).next().is_none()
    }
}
