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
use crate::fanout::{FetchPlan, Peer, PeerId, PieceNumber, PieceRequest, Source};
use crate::io::exec::run_blocking;
use crate::net::tls::Endpoint;
use crate::net::wire::{self, MAX_READ_BYTES};

/// Smallest archive that daemons fetch together.
const MIN_SHARED_BYTES: u64 = 4 << 20;

/// Smallest piece, in bytes. It has whole chunks.
const MIN_PIECE_BYTES: u64 = 1 << 20;

/// Number of pieces that an archive has, unless they would be too small or too large.
const TARGET_PIECES: u64 = 512;

/// Times after which a daemon asks for the other daemons again. The last one repeats.
const ANNOUNCE_INTERVALS: [Duration; 5] = [
    Duration::from_millis(10),
    Duration::from_millis(20),
    Duration::from_millis(40),
    Duration::from_millis(100),
    Duration::from_millis(200),
];

/// Fetches the chunks of an archive that are missing. The rest, such as the index, stays missing.
///
/// Does nothing for a small archive, or if other daemons do not reach this one.
///
/// # Errors
///
/// As [`RemoteBlobIndex::read`]. A peer that fails is replaced.
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
    let pieces = Arc::new(pieces.await?);
    let missing: Vec<PieceNumber> =
        pieces.numbers().filter(|number| !replica.has(&pieces.range(*number))).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let count = pieces.numbers().end;
    let plan = FetchPlan::new(peer_id(&replica.name, own), count, missing);
    let fetch = SharedFetch {
        replica: replica.clone(),
        remote_blobs: remote_blobs.clone(),
        pieces,
        plan,
        origin,
        peers: Vec::new(),
        started: Instant::now(),
    };
    fetch.run().await
}

/// Returns the number of a daemon in the plans of an archive. It differs between archives, so that owners differ.
fn peer_id(name: &str, endpoint: &Endpoint) -> PeerId {
    let hash = blake3::hash(format!("{name}\0{endpoint}").as_bytes());
    PeerId::from_le_bytes(*hash.as_bytes().first_chunk().expect("a hash has 32 bytes"))
}

/// The chunks of an archive, in pieces.
struct Pieces {
    /// Offsets of the pieces in the archive, and the end of the last one.
    bounds: Vec<u64>,
    /// The chunks in the order of their offsets, each with its CRC-32.
    chunks: Vec<(Range<u64>, u32)>,
}

impl Pieces {
    fn of(archive: &Archive, len: u64) -> Self {
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
        let mut bounds: Vec<u64> = chunks.iter().take(1).map(|(range, _)| range.start).collect();
        let mut end = 0;
        for (range, _) in &chunks {
            // A piece ends before a chunk that does not fit, so that one request reads it.
            if range.end - bounds.last().expect("the first chunk begins a piece")
                > MAX_READ_BYTES.min(2 * piece_bytes)
                || end - bounds.last().expect("as above").min(&end) >= piece_bytes
            {
                bounds.push(range.start);
            }
            end = range.end;
        }
        bounds.extend((!chunks.is_empty()).then_some(end));
        bounds.dedup();
        Self { bounds, chunks }
    }

    fn numbers(&self) -> Range<PieceNumber> {
        0..PieceNumber::try_from(self.bounds.len().saturating_sub(1)).unwrap_or(0)
    }

    /// Returns the range of a piece in the archive, with the padding before the next piece.
    fn range(&self, number: PieceNumber) -> Range<u64> {
        let number = to_usize(number.into());
        self.bounds[number]..self.bounds[number + 1]
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
    /// The addresses of the peers.
    peers: Vec<(PeerId, Endpoint)>,
    started: Instant,
}

impl SharedFetch {
    async fn run(mut self) -> Result<()> {
        let mut requests: JoinSet<(PieceRequest, Result<()>)> = JoinSet::new();
        let mut intervals = ANNOUNCE_INTERVALS.into_iter();
        let mut next_announcement = Instant::now();
        while !self.plan.is_complete() {
            if Instant::now() >= next_announcement {
                self.find_peers().await;
                let last = ANNOUNCE_INTERVALS[ANNOUNCE_INTERVALS.len() - 1];
                next_announcement = Instant::now() + intervals.next().unwrap_or(last);
            }
            while let Some(request) = self.plan.next_request(self.started.elapsed()) {
                requests.spawn(self.fetch_piece(request));
            }
            tokio::select! {
                Some(ended) = requests.join_next() => {
                    let failed = |error| Error::io(&self.replica.name, std::io::Error::other(error));
                    let (request, fetched) = ended.map_err(failed)?;
                    self.finish(request, fetched)?;
                }
                () = tokio::time::sleep_until(next_announcement) => {}
            }
        }
        Ok(())
    }

    /// Asks the origin for the other daemons that fetch the archive. Without an answer, the known ones stay.
    async fn find_peers(&mut self) {
        let name = &self.replica.name;
        let found = match self.remote_blobs.announce(&self.origin, name, false).await {
            Ok(found) => found,
            Err(error) => {
                tracing::debug!(name, %error, "the origin names no peers");
                return;
            }
        };
        let id = |endpoint: &Endpoint| peer_id(name, endpoint);
        let peers = found
            .iter()
            .map(|(endpoint, is_complete)| Peer { id: id(endpoint), is_complete: *is_complete });
        self.plan.set_peers(peers);
        self.peers = found.into_iter().map(|(endpoint, _)| (id(&endpoint), endpoint)).collect();
    }

    fn finish(&mut self, request: PieceRequest, fetched: Result<()>) -> Result<()> {
        match (request.source, fetched) {
            (_, Ok(())) => {
                self.plan.complete(request, self.started.elapsed());
            }
            (Source::Holder, Err(error)) => return Err(error),
            (Source::Peer(peer), Err(error)) => {
                let (name, endpoint) = (&self.replica.name, self.endpoint(peer));
                tracing::warn!(
                    name,
                    peer = endpoint.map(ToString::to_string),
                    %error,
                    "the peer is avoided"
                );
                self.plan.fail(request);
            }
        }
        Ok(())
    }

    fn endpoint(&self, peer: PeerId) -> Option<&Endpoint> {
        self.peers.iter().find(|(id, _)| *id == peer).map(|(_, endpoint)| endpoint)
    }

    /// Fetches a piece into the replica.
    fn fetch_piece(
        &self,
        request: PieceRequest,
    ) -> impl Future<Output = (PieceRequest, Result<()>)> + 'static {
        let (replica, remote_blobs) = (self.replica.clone(), self.remote_blobs.clone());
        let (pieces, endpoint) = (
            self.pieces.clone(),
            match request.source {
                Source::Holder => None,
                Source::Peer(peer) => self.endpoint(peer).cloned(),
            },
        );
        async move {
            let range = pieces.range(request.piece);
            let whole = wire::Range::contiguous(range.start, range.end - range.start);
            let fetched = match endpoint {
                None => {
                    let ranges = [whole];
                    replica.fetch_missing(&remote_blobs, &ranges, false).await.map(drop)
                }
                Some(endpoint) => {
                    async {
                        let data = remote_blobs
                            .read_from_peer(&endpoint, &replica.name, whole.clone())
                            .await?;
                        let name = replica.name.clone();
                        run_blocking(move || {
                            if !pieces.verify(request.piece, &data) {
                                let text =
                                    format_args!("`{name}`: `{endpoint}` has sent damaged bytes");
                                return Err(Error::new(ErrorKind::Corrupt, text));
                            }
                            replica.store(&[whole], &data, false);
                            Ok(())
                        })
                        .await
                    }
                    .await
                }
            };
            (request, fetched)
        }
    }
}

impl PartialReplica {
    /// Returns whether all bytes of a range are present.
    fn has(&self, range: &Range<u64>) -> bool {
        self.state().present.gaps(range).next().is_none()
    }
}
