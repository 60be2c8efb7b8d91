//! A shared fetch: fetches the chunks that readers of this host want, together with other daemons that fetch them.
//!
//! Each piece comes from a holder of the archive or from a fetcher, and its chunks are verified when it comes.

use std::collections::BTreeSet;
use std::ops::Range;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::task::JoinSet;
use tssd_format::{Archive, checksum};

use super::pieces::{MIN_PIECE_BYTES, Pieces, clipped, encode_wants, to_ranges};
use super::{
    FetchClaim, MAX_RANGES, MissingRanges, PartialReplica, SharedFetchState, State, Waiting,
};
use crate::daemon::remote_blobs::{Announced, RemoteBlobIndex, RemoteRead};
use crate::error::{Error, ErrorKind, Result};
use crate::fanout::{
    FetchPlan, Fetcher, FetcherId, Holder, Part, PieceNumber, PieceRequest, PresentPieces, Source,
    Wants,
};
use crate::io::exec::run_blocking;
use crate::io::sync::MutexGuard;
use crate::net::client::Announcement;
use crate::net::tls::Endpoint;
use crate::net::wire;

/// Smallest archive that is fetched together, in bytes.
pub(crate) const MIN_SHARED_BYTES: u64 = 2 * MIN_PIECE_BYTES;

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

/// Time that the first request to a bucket waits for other daemons that restore the archive at the same time.
const BUCKET_DELAY: Duration = Duration::from_millis(100);

/// Interval at which the plan looks for slow daemons.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// Time that a fetcher may take to say which pieces it has.
const PRESENT_TIMEOUT: Duration = Duration::from_secs(2);

/// Fetches what readers want of the chunks of an archive, until they want no more.
///
/// If it fails, the readers fetch what they miss themselves. They also fetch all that is in no chunk.
pub(super) async fn run(replica: Arc<PartialReplica>, remote_blobs: Arc<RemoteBlobIndex>) {
    let mut claims = SharedClaims { replica: &replica, is_released: false };
    if let Err(error) = fetch(&mut claims, &replica, &remote_blobs).await {
        tracing::debug!(name = replica.name, %error, "the archive is not fetched together");
    }
}

async fn fetch(
    claims: &mut SharedClaims<'_>,
    replica: &Arc<PartialReplica>,
    remote_blobs: &Arc<RemoteBlobIndex>,
) -> Result<()> {
    let (own, registries) = (remote_blobs.own(), remote_blobs.registries(&replica.name));
    let Some(own) = own.filter(|_| !registries.is_empty()) else { return Ok(()) };
    let Some(pieces) = replica.pieces(remote_blobs).await? else { return Ok(()) };
    let is_in_bucket = remote_blobs.bucket(&replica.name).is_some();
    let holder = if is_in_bucket { Holder::Bucket } else { Holder::Daemons };
    replica.progress.begin(Instant::now());
    let fetch = SharedFetch {
        replica: replica.clone(),
        remote_blobs: remote_blobs.clone(),
        plan: FetchPlan::new(fetcher_id(&replica.name, own), pieces.count(), holder),
        pieces,
        holder,
        wants: Wants::Archive,
        registries,
        fetchers: Vec::new(),
        without_base: BTreeSet::new(),
        tables: (Vec::new(), 0),
        started: Instant::now(),
        fetched: [0; 2],
        is_slow: false,
    };
    fetch.run(claims).await
}

/// Returns the number of a daemon in the plans of an archive. It differs between archives, so that owners differ.
fn fetcher_id(name: &str, endpoint: &Endpoint) -> FetcherId {
    let hash = blake3::hash(format!("{name}\0{endpoint}").as_bytes());
    FetcherId::from_le_bytes(*hash.as_bytes().first_chunk().expect("a hash has 32 bytes"))
}

/// The bytes that a shared fetch has claimed. After the drop, readers fetch them themselves.
struct SharedClaims<'a> {
    replica: &'a PartialReplica,
    is_released: bool,
}

impl SharedClaims<'_> {
    /// Ends the fetch if it has all that it has claimed, or if the replica is evicted. Returns whether it has ended.
    fn release_if_done(&mut self) -> bool {
        let state = self.replica.state();
        if state.claimed.is_empty() || state.is_evicted {
            self.replica.end_shared_fetch(state);
            self.is_released = true;
        }
        self.is_released
    }
}

impl Drop for SharedClaims<'_> {
    fn drop(&mut self) {
        if !self.is_released {
            self.replica.end_shared_fetch(self.replica.state());
        }
    }
}

/// A piece was not fetched.
enum FetchError {
    /// A holder failed.
    Holder(Error),
    /// The fetcher failed, or sent damaged bytes.
    Fetcher(Error),
    /// The fetcher lacks the base, and a holder may have it.
    NoBase,
}

/// A request, and whether the piece has come.
type PieceResult = (PieceRequest, std::result::Result<(), FetchError>);

struct SharedFetch {
    replica: Arc<PartialReplica>,
    remote_blobs: Arc<RemoteBlobIndex>,
    pieces: Arc<Pieces>,
    plan: FetchPlan,
    holder: Holder,
    /// What readers of this host want.
    wants: Wants,
    /// The daemons that list the fetchers.
    registries: Vec<Endpoint>,
    /// The addresses of the other fetchers.
    fetchers: Vec<(FetcherId, Endpoint)>,
    /// Fetchers that are avoided because they lack the base.
    without_base: BTreeSet<FetcherId>,
    /// What other fetchers want, and the CRC-32 of these tables.
    tables: (Vec<Wants>, u32),
    started: Instant,
    /// Pieces that have come from holders, and from fetchers.
    fetched: [u64; 2],
    /// Whether the fetch was slow when that was last checked.
    is_slow: bool,
}

impl SharedFetch {
    async fn run(mut self, claims: &mut SharedClaims<'_>) -> Result<()> {
        let mut requests: JoinSet<PieceResult> = JoinSet::new();
        let (mut announcements, mut polls) = (JoinSet::new(), JoinSet::new());
        let mut delays = ANNOUNCE_DELAYS.into_iter();
        self.update_wants();
        let first_delays: &[Duration] = match self.holder {
            Holder::Daemons => &[Duration::ZERO],
            Holder::Bucket => &[Duration::ZERO, BUCKET_DELAY],
        };
        for delay in first_delays {
            let announcement = self.announce(*delay, false);
            let found = tokio::time::timeout(FIRST_ANNOUNCE_TIMEOUT, announcement).await;
            self.set_fetchers(found.unwrap_or_default());
        }
        loop {
            if self.plan.is_complete() || self.replica.state().is_evicted {
                if claims.release_if_done() {
                    break;
                }
                self.update_wants();
            }
            if announcements.is_empty() {
                let delay = delays.next().unwrap_or(LAST_ANNOUNCE_DELAY);
                announcements.spawn(self.announce(delay, false));
            }
            if self.replica.holders_lack_base() {
                self.plan.readmit(&std::mem::take(&mut self.without_base));
            }
            self.check_rate();
            self.publish_owned();
            self.take_demands();
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
                    if polls.is_empty() {
                        self.poll_fetchers(&mut polls);
                    }
                }
                Some(polled) = polls.join_next() => {
                    if let (fetcher, Some(present)) = polled.map_err(failed)? {
                        self.plan.set_present(fetcher, present);
                    }
                }
                () = self.replica.wants_changed.notified() => {
                    if self.replica.state().shared_fetch == SharedFetchState::Outdated {
                        self.update_wants();
                    }
                }
                () = tokio::time::sleep(POLL_INTERVAL) => {}
            }
        }
        let [from_holders, from_fetchers] = self.fetched;
        tracing::debug!(
            name = self.replica.name,
            from_holders,
            from_fetchers,
            fetchers = self.fetchers.len(),
            avoided = self.plan.avoided_count(),
            seconds = self.started.elapsed().as_secs_f64(),
            "fetched together"
        );
        if !self.replica.state().is_evicted {
            // Daemons that come later fetch it from here too.
            self.announce(Duration::ZERO, true).await;
        }
        Ok(())
    }

    /// Logs a warning when the fetch becomes slower than this daemon expects.
    fn check_rate(&mut self) {
        let Some(floor) = self.remote_blobs.min_fetch_rate() else { return };
        let (progress, now) = (&self.replica.progress, Instant::now());
        let was_slow = std::mem::replace(&mut self.is_slow, progress.is_below(floor, now));
        if self.is_slow && !was_slow {
            let (name, bytes_per_second) = (&self.replica.name, progress.rate(now));
            tracing::warn!(name, bytes_per_second, floor, "the fetch is slow");
        }
    }

    /// Sets the bytes that come from a holder. Reads of other daemons wait for these.
    fn publish_owned(&mut self) {
        let Some(pieces) = self.plan.new_holder_pieces() else { return };
        let mut state = self.replica.state();
        let State { claimed, owned, .. } = &mut *state;
        let runs = pieces.into_iter().map(|piece| self.pieces.range(piece));
        owned.clear();
        owned.extend(runs.flat_map(|run| clipped(claimed, &run).collect::<Vec<_>>()));
    }

    /// Has the pieces requested next that other daemons wait for.
    fn take_demands(&mut self) {
        let demanded = std::mem::take(&mut self.replica.state().demanded);
        for offset in demanded {
            if let Some(piece) = self.pieces.containing(&(offset..offset + 1)) {
                self.plan.prioritize(piece);
            }
        }
    }

    /// Sets what readers of this host want, and what they miss of it.
    fn update_wants(&mut self) {
        let (wants, missing) = self.replica.wants(&self.pieces);
        self.plan.set_wants(wants.clone(), missing);
        self.wants = wants;
    }

    /// Asks the registries after a delay for the other daemons that fetch the archive. `None` without an answer.
    fn announce(
        &self,
        delay: Duration,
        is_complete: bool,
    ) -> impl Future<Output = Option<Announced>> + 'static {
        let (remote_blobs, registries) = (self.remote_blobs.clone(), self.registries.clone());
        let name = self.replica.name.clone();
        let announcement = Announcement {
            parts: encode_wants(&self.wants),
            is_complete,
            present_bytes: self.replica.present_bytes(),
            known: self.tables.1,
        };
        async move {
            tokio::time::sleep(delay).await;
            let mut announcements = JoinSet::new();
            for registry in registries {
                let (remote_blobs, name) = (remote_blobs.clone(), name.clone());
                let announcement = announcement.clone();
                announcements.spawn(async move {
                    let found = remote_blobs.announce(&registry, &name, announcement);
                    let failed = |error: &Error| {
                        tracing::debug!(name, %error, "the registry names no fetchers");
                    };
                    found.await.inspect_err(failed).ok()
                });
            }
            let mut found: Option<Announced> = None;
            while let Some(announced) = announcements.join_next().await {
                match (&mut found, announced.ok().flatten()) {
                    (Some(found), Some(more)) => found.merge(more),
                    (found, announced) => *found = found.take().or(announced),
                }
            }
            found
        }
    }

    /// Sets the other daemons that fetch the archive. Without an answer of the registry, the known ones stay.
    fn set_fetchers(&mut self, found: Option<Announced>) {
        let Some(Announced { fetchers, tables, crc32, data }) = found else { return };
        if self.tables.1 != crc32 {
            let decoded = self.pieces.decode_tables(tables, &data);
            // Tables of another length are not those of this archive. They are asked for again.
            let known = if decoded.len() == to_index(tables) { crc32 } else { 0 };
            self.tables = (decoded, known);
        }
        let (mut planned, mut endpoints) = (Vec::new(), Vec::new());
        for (endpoint, fetcher) in fetchers {
            let wants = match fetcher.table {
                None => Some(Wants::Archive),
                Some(table) => self.tables.0.get(to_index(table)).cloned(),
            };
            // A fetcher whose wants are not known is no source.
            let Some(wants) = wants else { continue };
            let id = fetcher_id(&self.replica.name, &endpoint);
            planned.push(Fetcher { id, wants, is_complete: fetcher.is_complete });
            endpoints.push((id, endpoint));
        }
        self.plan.set_fetchers(planned);
        self.fetchers = endpoints;
    }

    /// Asks the other fetchers which pieces they have.
    fn poll_fetchers(&self, polls: &mut JoinSet<(FetcherId, Option<PresentPieces>)>) {
        for (id, endpoint) in self.fetchers.iter().cloned() {
            let (remote_blobs, replica) = (self.remote_blobs.clone(), self.replica.clone());
            polls.spawn(async move {
                let present = remote_blobs.present_pieces(&endpoint, &replica.name);
                let answer = tokio::time::timeout(PRESENT_TIMEOUT, present).await;
                let bits = answer.ok().and_then(Result::ok);
                (id, bits.map(|bits| bits.map_or(PresentPieces::All, PresentPieces::Bits)))
            });
        }
    }

    fn finish(
        &mut self,
        request: PieceRequest,
        fetched: std::result::Result<(), FetchError>,
    ) -> Result<()> {
        match (request.source, fetched) {
            (_, Ok(())) => {
                self.plan.complete(request, self.started.elapsed());
                self.fetched[usize::from(request.source != Source::Holder)] += 1;
                // Readers may want more of it meanwhile.
                if self.replica.has_claimed(&self.pieces.range(request.piece)) {
                    self.update_wants();
                }
            }
            (source, Err(FetchError::NoBase)) => {
                if let Source::Fetcher(fetcher) = source {
                    self.without_base.insert(fetcher);
                }
                self.plan.fail(request);
            }
            (_, Err(FetchError::Holder(error)))
            | (Source::Holder, Err(FetchError::Fetcher(error))) => return Err(error),
            (Source::Fetcher(fetcher), Err(FetchError::Fetcher(error))) => {
                let (name, endpoint) = (&self.replica.name, self.endpoint(fetcher));
                tracing::warn!(
                    name,
                    fetcher = endpoint.map(ToString::to_string),
                    %error,
                    "the fetcher is avoided"
                );
                self.remote_blobs.count_avoided_fetcher();
                self.plan.fail(request);
            }
        }
        Ok(())
    }

    fn endpoint(&self, fetcher: FetcherId) -> Option<&Endpoint> {
        self.fetchers.iter().find(|(id, _)| *id == fetcher).map(|(_, endpoint)| endpoint)
    }

    /// Fetches what is missing of a piece into the replica.
    fn fetch_piece(&self, request: PieceRequest) -> impl Future<Output = PieceResult> + 'static {
        let endpoint = match request.source {
            Source::Holder => None,
            Source::Fetcher(fetcher) => self.endpoint(fetcher).cloned(),
        };
        let (replica, remote_blobs) = (self.replica.clone(), self.remote_blobs.clone());
        let pieces = self.pieces.clone();
        async move {
            let fetched = match endpoint {
                None => {
                    let fetched = replica.fetch_from_holder(&remote_blobs, &pieces, request.piece);
                    fetched.await.map_err(FetchError::Holder)
                }
                Some(endpoint) => {
                    replica.fetch_from(endpoint, &remote_blobs, &pieces, request.piece).await
                }
            };
            (request, fetched)
        }
    }
}

impl PartialReplica {
    /// Ends the shared fetch. Readers fetch the bytes that it has claimed.
    fn end_shared_fetch(&self, mut state: MutexGuard<'_, State>) {
        self.progress.end(Instant::now());
        state.end_shared_fetch();
        drop(state);
        self.changed.notify_waiters();
    }

    /// Returns the pieces of the archive. `None` if it cannot be shared.
    async fn pieces(
        self: &Arc<Self>,
        remote_blobs: &RemoteBlobIndex,
    ) -> Result<Option<Arc<Pieces>>> {
        if let Some(pieces) = self.pieces.get() {
            return Ok(Some(pieces.clone()));
        }
        let Some(blob) = remote_blobs.open_source(&self.name) else { return Ok(None) };
        let replica = self.clone();
        run_blocking(move || {
            let failed = |error| Error::from_format(&replica.name, error);
            let archive = Archive::from_blob(blob).map_err(failed)?;
            replica.encoder.insert_layout(&replica.name, &archive);
            let pieces = Pieces::of(&archive, replica.len).map(Arc::new);
            Ok(pieces.map(|pieces| replica.pieces.get_or_init(|| pieces).clone()))
        })
        .await
    }

    /// Returns what readers want of the pieces, and the parts that they miss.
    ///
    /// They fetch bytes that no holder verifies themselves, unless these come with a whole piece.
    fn wants(&self, pieces: &Pieces) -> (Wants, Vec<(PieceNumber, Part)>) {
        let mut state = self.state();
        state.shared_fetch = SharedFetchState::Running;
        for outside in pieces.outside_raw_chunks(&(0..self.len)) {
            let is_in_whole_piece = pieces
                .containing(&outside)
                .is_some_and(|piece| pieces.part(piece, &state.claimed) == Part::WHOLE);
            if !is_in_whole_piece {
                state.claimed.remove(outside);
            }
        }
        let wants = pieces.wants(&state.wanted);
        let missing = (0..pieces.count()).map(|piece| (piece, pieces.part(piece, &state.claimed)));
        let missing = missing.filter(|(_, part)| *part != Part::NOTHING).collect();
        drop(state);
        self.changed.notify_waiters();
        (wants, missing)
    }

    /// Returns whether the shared fetch has to fetch bytes of a range.
    fn has_claimed(&self, range: &Range<u64>) -> bool {
        self.state().claimed.overlaps(range)
    }

    /// Returns what the shared fetch has to fetch of a piece, by request.
    ///
    /// If that is no longer the whole piece, it leaves bytes that no holder verifies to the readers.
    fn claimed_ranges(&self, pieces: &Pieces, number: PieceNumber) -> Vec<Vec<wire::Range>> {
        let mut state = self.state();
        if pieces.part(number, &state.claimed) != Part::WHOLE {
            for outside in pieces.outside_raw_chunks(&pieces.range(number)) {
                if state.claimed.overlaps(&outside) {
                    state.claimed.remove(outside.clone());
                    state.owned.remove(outside);
                    self.changed.notify_waiters();
                }
            }
        }
        let ranges = to_ranges(clipped(&state.claimed, &pieces.range(number)));
        ranges.chunks(MAX_RANGES).map(<[_]>::to_vec).collect()
    }

    /// Fetches what is missing of a piece from a holder.
    async fn fetch_from_holder(
        self: Arc<Self>,
        remote_blobs: &RemoteBlobIndex,
        pieces: &Arc<Pieces>,
        number: PieceNumber,
    ) -> Result<()> {
        loop {
            let mut changed = pin!(self.changed.notified());
            changed.as_mut().enable();
            let ranges = self.claimed_ranges(pieces, number);
            let Some(ranges) = ranges.first() else { return Ok(()) };
            match self.claim_missing(ranges, false, Waiting::Requests) {
                // Another task has fetched them meanwhile.
                MissingRanges::Empty => {}
                // A fetcher has asked for them before.
                MissingRanges::InFlight => changed.await,
                MissingRanges::Claimed(claim) => {
                    self.fetch_claim(claim, remote_blobs, pieces, number).await?;
                }
            }
        }
    }

    async fn fetch_claim(
        self: &Arc<Self>,
        claim: FetchClaim<'_>,
        remote_blobs: &RemoteBlobIndex,
        pieces: &Arc<Pieces>,
        number: PieceNumber,
    ) -> Result<()> {
        for ranges in claim.ranges.chunks(MAX_RANGES) {
            if is_whole(ranges, &pieces.range(number)) {
                let RemoteRead { data, encoded, .. } =
                    self.read_from_holder(remote_blobs, ranges, false).await?;
                if self.store_verified(ranges, data, pieces, number, None).await? {
                    self.remember_encoded(ranges, encoded);
                    continue;
                }
            }
            // The holder verifies the chunks. If its own are damaged, the next holder is asked.
            let RemoteRead { data, encoded, .. } =
                self.read_from_holder(remote_blobs, ranges, true).await?;
            self.remember_encoded(ranges, encoded);
            let (replica, ranges) = (self.clone(), ranges.to_vec());
            run_blocking(move || {
                replica.store(&ranges, &data, true);
                Ok(())
            })
            .await?;
        }
        Ok(())
    }

    /// Fetches what is missing of a piece from a fetcher, and verifies it.
    ///
    /// The checksum of a part of a chunk comes from a holder.
    async fn fetch_from(
        self: Arc<Self>,
        endpoint: Endpoint,
        remote_blobs: &RemoteBlobIndex,
        pieces: &Arc<Pieces>,
        number: PieceNumber,
    ) -> std::result::Result<(), FetchError> {
        for ranges in self.claimed_ranges(pieces, number) {
            let read = self.read_from(Some(&endpoint), remote_blobs, &ranges, false);
            let (data, crc32) = if is_whole(&ranges, &pieces.range(number)) {
                (read.await, None)
            } else {
                let (data, crc32) = tokio::join!(read, remote_blobs.checksum(&self.name, &ranges));
                (data, Some(crc32.map_err(FetchError::Holder)?))
            };
            let data = data.map_err(FetchError::Fetcher)?;
            let RemoteRead { data, encoded, .. } = data.ok_or(FetchError::NoBase)?;
            let stored = self.store_verified(&ranges, data, pieces, number, crc32).await;
            if !stored.map_err(FetchError::Holder)? {
                let text = format_args!("`{}`: `{endpoint}` sent damaged bytes", self.name);
                return Err(FetchError::Fetcher(Error::new(ErrorKind::Corrupt, text)));
            }
            self.remember_encoded(&ranges, encoded);
        }
        Ok(())
    }

    /// Stores bytes of a piece if they have their checksum: a given one, or those of the chunks of the whole piece.
    ///
    /// Returns false if they are damaged.
    async fn store_verified(
        self: &Arc<Self>,
        ranges: &[wire::Range],
        data: Bytes,
        pieces: &Arc<Pieces>,
        number: PieceNumber,
        crc32: Option<u32>,
    ) -> Result<bool> {
        let (replica, pieces, ranges) = (self.clone(), pieces.clone(), ranges.to_vec());
        run_blocking(move || {
            let is_intact = match crc32 {
                Some(crc32) => checksum(&data) == crc32,
                None => pieces.verify(number, &data),
            };
            if is_intact {
                replica.store(&ranges, &data, true);
                replica.changed.notify_waiters();
            }
            Ok(is_intact)
        })
        .await
    }
}

/// Returns whether ranges are a whole piece.
fn is_whole(ranges: &[wire::Range], piece: &Range<u64>) -> bool {
    *ranges == [wire::Range::contiguous(piece.start, piece.end - piece.start)]
}

fn to_index(table: u32) -> usize {
    usize::try_from(table).expect("usize has at least 32 bits")
}
