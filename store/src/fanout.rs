//! Fan-out: from which daemon to fetch each piece of an archive that several daemons fetch (pure).
//!
//! The daemons that fetch an archive at the same time are *fetchers*. Each piece has one *owner* among them, by a hash
//! of the piece and the fetcher (rendezvous hashing), and all fetchers own equally many pieces. The owner fetches the
//! piece from a *holder*, a daemon that has the whole archive, or the bucket. The others fetch it from the owner. So a holder sends
//! each piece once, and each fetcher passes on its share.
//!
//! A fetcher can want parts of pieces: columns of a tensor are parts of all its pieces. Fetchers that want the same
//! part of a piece share it as they would share the whole piece. Its owner fetches it from the owner of the whole piece,
//! if there is one.
//!
//! Fetchers say which pieces they have. A piece can then come from any of them that has it, if its owner is busy and the
//! other one is not: owners that get their pieces late do not keep all others waiting.
//!
//! Daemons may know different fetchers for a moment. A daemon that is asked for a piece which it does not own fetches
//! it from a holder, so requests never go in a circle. One that owns it fetches it next. Spec: `spec/protocol.md`, rules P-082 to P-085.

#[cfg(test)]
mod simulation;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

/// Number of pieces that a daemon requests from the holders at the same time.
///
/// With more, the last pieces come to their fetchers late and at once.
const HOLDER_WINDOW: usize = 2;

/// From this number of fetchers on, the requests of all of them keep the holder busy with one piece each.
const MANY_FETCHERS: usize = 8;

/// Number of pieces that a daemon without fetchers requests from the holders at the same time.
const ALONE_WINDOW: usize = 8;

/// Number of pieces that a daemon requests from the bucket at the same time.
const BUCKET_WINDOW: usize = 8;

/// Number of pieces after which a daemon without fetchers requests one more at the same time.
const PIECES_PER_STEP: usize = 4;

/// Number of pieces that a daemon requests from one fetcher at the same time.
const FETCHER_WINDOW: usize = 3;

/// Number of pieces that a daemon requests at the same time. Most of the requests wait at a fetcher.
const WINDOW: usize = 128;

/// Number of pieces of each queue for which a fetcher is looked for that is not busy.
const RELIEVED_PIECES: usize = 64;

/// A fetcher is slow if it has sent no piece for this multiple of the mean time between two pieces of a fetcher.
const SLOW_FACTOR: u32 = 6;

/// A fetcher is not slow before this time.
const MIN_SLOW: Duration = Duration::from_millis(500);

/// A fetcher is slow after this time if no fetcher has sent a piece yet, or after [`SLOW_HOLDER_FACTOR`] times the time that
/// a holder took for a piece.
const FIRST_SLOW: Duration = Duration::from_secs(2);

/// See [`FIRST_SLOW`]. Before it has sent a piece, a fetcher waits for it, and for those that were requested before.
const SLOW_HOLDER_FACTOR: u32 = 4;

/// Time for which a slow fetcher is avoided. Its requests in flight count after it too.
const SLOW_PAUSE: Duration = Duration::from_secs(2);

/// Number that identifies a fetcher of an archive.
pub(crate) type FetcherId = u64;

/// Number of a piece in its archive.
pub(crate) type PieceNumber = u32;

/// A part of a piece: nothing, all of it, or a hash of the byte ranges.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Part(pub(crate) u32);

impl Part {
    pub(crate) const NOTHING: Self = Self(0);
    pub(crate) const WHOLE: Self = Self(u32::MAX);

    /// Returns the part with these byte ranges, of which there are some, but not all.
    pub(crate) fn of_ranges(hash: u32) -> Self {
        Self(hash.clamp(1, u32::MAX - 1))
    }
}

/// The parts that a fetcher wants of an archive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Wants {
    /// All pieces.
    Archive,
    /// A part of each piece.
    Parts(Arc<[Part]>),
}

impl Wants {
    /// Returns the part of a piece. It is nothing for a piece that does not exist.
    pub(crate) fn part(&self, piece: PieceNumber) -> Part {
        match self {
            Self::Archive => Part::WHOLE,
            Self::Parts(parts) => {
                let part = usize::try_from(piece).ok().and_then(|piece| parts.get(piece));
                part.copied().unwrap_or(Part::NOTHING)
            }
        }
    }
}

/// Another daemon that fetches the archive, or parts of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Fetcher {
    pub(crate) id: FetcherId,
    pub(crate) wants: Wants,
    /// Whether it has all that it wants.
    pub(crate) is_complete: bool,
}

/// The pieces of which a fetcher has what it wants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum PresentPieces {
    All,
    /// A bit for each piece, the lowest bit of a byte first. Missing bits are not set.
    Bits(Vec<u8>),
}

impl PresentPieces {
    fn contains(&self, piece: PieceNumber) -> bool {
        match self {
            Self::All => true,
            Self::Bits(bits) => {
                let byte = usize::try_from(piece / 8).ok().and_then(|at| bits.get(at));
                byte.is_some_and(|byte| byte >> (piece % 8) & 1 == 1)
            }
        }
    }
}

/// The kind of the holders of an archive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Holder {
    /// Daemons. Their uplinks limit the fetchers together.
    Daemons,
    /// A bucket. It answers many requests at once, each after a while.
    Bucket,
}

/// Where to fetch a piece from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Source {
    /// A holder of the archive.
    Holder,
    Fetcher(FetcherId),
}

/// A piece to fetch, and its source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct PieceRequest {
    pub(crate) piece: PieceNumber,
    pub(crate) source: Source,
}

/// Returns the rank of a fetcher for a piece.
///
/// The fetcher with the highest rank owns the piece, unless it owns its share already.
fn rank(piece: PieceNumber, fetcher: FetcherId) -> u64 {
    // The finalizer of SplitMix64.
    let mut bits = fetcher ^ (u64::from(piece) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    bits = (bits ^ bits >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ bits >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ bits >> 31
}

/// The plan of one daemon to fetch an archive. Times are those since any moment.
pub(crate) struct FetchPlan {
    own: FetcherId,
    /// Number of all pieces of the archive.
    pieces: PieceNumber,
    holder: Holder,
    wants: Wants,
    fetchers: Vec<Fetcher>,
    /// Fetchers that are no source: until a time if they were slow, else always.
    avoided: BTreeMap<FetcherId, Option<Duration>>,
    /// Pieces of which each fetcher has what it wants.
    present: BTreeMap<FetcherId, PresentPieces>,
    /// Pieces that are not requested, by source.
    queues: BTreeMap<Source, BTreeSet<PieceNumber>>,
    /// Requests, with the times at which they were made.
    in_flight: BTreeMap<PieceRequest, Duration>,
    /// Number of requests in flight, by source.
    load: BTreeMap<Source, usize>,
    /// The pieces of which this daemon misses a part, and that part.
    missing: BTreeMap<PieceNumber, Part>,
    /// Missing pieces that other daemons wait for.
    demanded: BTreeSet<PieceNumber>,
    /// Number of pieces that have come.
    fetched: usize,
    /// Number of pieces that fetchers have sent, and the sum of the times that they took since the piece before.
    intervals: (u32, Duration),
    /// The longest time that a holder took for a piece.
    holder_time: Duration,
    /// When each fetcher has sent its last piece.
    last_sent: BTreeMap<FetcherId, Duration>,
    /// Whether pieces have got sources anew since [`FetchPlan::new_holder_pieces`] was called.
    has_new_sources: bool,
}

impl FetchPlan {
    /// Creates the plan to fetch pieces of an archive that has `pieces`, with no fetchers. It fetches nothing yet.
    ///
    /// `own` identifies this daemon.
    pub(crate) fn new(own: FetcherId, pieces: PieceNumber, holder: Holder) -> Self {
        Self {
            own,
            pieces,
            holder,
            wants: Wants::Parts(Arc::new([])),
            fetchers: Vec::new(),
            avoided: BTreeMap::new(),
            present: BTreeMap::new(),
            has_new_sources: false,
            queues: BTreeMap::new(),
            in_flight: BTreeMap::new(),
            load: BTreeMap::new(),
            missing: BTreeMap::new(),
            demanded: BTreeSet::new(),
            fetched: 0,
            intervals: (0, Duration::ZERO),
            holder_time: Duration::ZERO,
            last_sent: BTreeMap::new(),
        }
    }

    /// Sets what this daemon wants, and the parts of pieces that it misses.
    pub(crate) fn set_wants(
        &mut self,
        wants: Wants,
        missing: impl IntoIterator<Item = (PieceNumber, Part)>,
    ) {
        self.wants = wants;
        self.missing = missing.into_iter().collect();
        self.assign();
    }

    /// Sets the other fetchers. Pieces that are not requested get their sources anew.
    pub(crate) fn set_fetchers(&mut self, fetchers: impl IntoIterator<Item = Fetcher>) {
        let own = self.own;
        let fetchers: Vec<Fetcher> =
            fetchers.into_iter().filter(|fetcher| fetcher.id != own).collect();
        if fetchers != self.fetchers {
            self.fetchers = fetchers;
            self.assign();
        }
    }

    /// Sets the pieces of which a fetcher has what it wants.
    pub(crate) fn set_present(&mut self, fetcher: FetcherId, present: PresentPieces) {
        self.present.insert(fetcher, present);
    }

    /// Whether all pieces have come.
    pub(crate) fn is_complete(&self) -> bool {
        self.missing.is_empty()
    }

    /// Returns the pieces that come from a holder, if some have got their sources anew since the last call.
    pub(crate) fn new_holder_pieces(&mut self) -> Option<Vec<PieceNumber>> {
        std::mem::take(&mut self.has_new_sources).then(|| {
            let in_flight = self.in_flight.keys().filter(|it| it.source == Source::Holder);
            let queued = self.queues.get(&Source::Holder).into_iter().flatten().copied();
            queued.chain(in_flight.map(|request| request.piece)).collect()
        })
    }

    /// Has a piece requested next, if it comes from a holder: another daemon waits for it.
    pub(crate) fn prioritize(&mut self, piece: PieceNumber) {
        if self.missing.contains_key(&piece) {
            self.demanded.insert(piece);
        }
    }

    /// Returns the number of fetchers that have failed or are slow.
    pub(crate) fn avoided_count(&self) -> usize {
        self.avoided.len()
    }

    /// Returns the next request to make now. `None`: wait until a piece comes, or for [`MIN_SLOW`].
    pub(crate) fn next_request(&mut self, now: Duration) -> Option<PieceRequest> {
        self.avoid_slow_fetchers(now);
        // Requests to fetchers that are avoided may take long to fail.
        let is_usable = |request: &&PieceRequest| !self.is_avoided(request.source);
        if self.in_flight.keys().filter(is_usable).count() >= WINDOW {
            return None;
        }
        let next = self.find_demanded().or_else(|| self.find_first());
        let next = next.map(|(source, piece)| (source, piece, source));
        let (queue, piece, source) = next.or_else(|| self.find_relief())?;
        self.demanded.remove(&piece);
        if let Some(pieces) = self.queues.get_mut(&queue) {
            pieces.remove(&piece);
            if pieces.is_empty() {
                self.queues.remove(&queue);
            }
        }
        let request = PieceRequest { piece, source };
        self.in_flight.insert(request, now);
        *self.load.entry(source).or_default() += 1;
        Some(request)
    }

    /// Returns the first piece from a holder that another daemon waits for.
    fn find_demanded(&self) -> Option<(Source, PieceNumber)> {
        let queue = self.queues.get(&Source::Holder).filter(|_| self.has_room(Source::Holder))?;
        let piece = self.demanded.iter().find(|piece| queue.contains(piece))?;
        Some((Source::Holder, *piece))
    }

    /// Returns the first piece from a holder, or else from a fetcher, that has room.
    ///
    /// Pieces from holders come first, because other daemons wait for them. Among fetchers, the one with the fewest requests
    /// comes first, so that each has something to send. Pieces are requested in their order: all daemons fetch them in this
    /// order, so a fetcher has the piece already, or gets it next.
    fn find_first(&self) -> Option<(Source, PieceNumber)> {
        let with_room = self.queues.iter().filter(|(source, _)| self.has_room(**source));
        let firsts = with_room.filter_map(|(source, queue)| Some((*source, *queue.first()?)));
        firsts.min_by_key(|(source, piece)| {
            (*source != Source::Holder, self.load.get(source).copied().unwrap_or(0), *piece)
        })
    }

    fn is_avoided(&self, source: Source) -> bool {
        matches!(source, Source::Fetcher(fetcher) if self.avoided.contains_key(&fetcher))
    }

    /// Returns whether a source can be asked for one more piece.
    fn has_room(&self, source: Source) -> bool {
        let window = match source {
            Source::Holder if self.holder == Holder::Bucket => BUCKET_WINDOW,
            Source::Holder if self.fetchers.is_empty() => self.alone_window(),
            Source::Holder if self.fetchers.len() < MANY_FETCHERS => HOLDER_WINDOW,
            Source::Holder => 1,
            Source::Fetcher(_) => FETCHER_WINDOW,
        };
        self.load.get(&source).copied().unwrap_or(0) < window
    }

    /// Returns a piece that waits for a busy fetcher, its queue, and a fetcher that has it and is not busy.
    ///
    /// It is one of the first ones of the longest queue.
    fn find_relief(&self) -> Option<(Source, PieceNumber, Source)> {
        // Other daemons wait for the pieces that this one fetches from holders.
        let queues = self.queues.iter().filter(|(source, _)| **source != Source::Holder);
        let mut queues: Vec<(&Source, &BTreeSet<PieceNumber>)> = queues.collect();
        queues.sort_by_key(|(_, queue)| Reverse(queue.len()));
        let mut free: Vec<&Fetcher> = self
            .fetchers
            .iter()
            .filter(|fetcher| {
                !self.avoided.contains_key(&fetcher.id)
                    && self.has_room(Source::Fetcher(fetcher.id))
            })
            .collect();
        free.sort_by_key(|fetcher| self.load.get(&Source::Fetcher(fetcher.id)).copied());
        for (source, queue) in queues {
            for piece in queue.iter().take(RELIEVED_PIECES).copied() {
                let parts = [Some(Part::WHOLE), self.missing.get(&piece).copied()];
                let has_it = |fetcher: &&&Fetcher| {
                    let present = self.present.get(&fetcher.id);
                    present.is_some_and(|present| present.contains(piece))
                        && parts.contains(&Some(fetcher.wants.part(piece)))
                };
                if let Some(fetcher) = free.iter().find(has_it) {
                    return Some((*source, piece, Source::Fetcher(fetcher.id)));
                }
            }
        }
        None
    }

    /// Returns the window for holders without fetchers.
    ///
    /// It grows slowly from one piece: daemons that begin at the same time do not know each other yet, and ask for the same
    /// pieces.
    fn alone_window(&self) -> usize {
        ALONE_WINDOW.min(1 + self.fetched / PIECES_PER_STEP)
    }

    /// Records that the wanted part of a piece has come.
    pub(crate) fn complete(&mut self, request: PieceRequest, now: Duration) {
        if let Some(since) = self.end(request) {
            self.fetched += 1;
            match request.source {
                Source::Holder => {
                    self.holder_time = self.holder_time.max(now.saturating_sub(since));
                }
                Source::Fetcher(fetcher) => {
                    self.intervals.0 += 1;
                    self.intervals.1 += now.saturating_sub(self.waiting_since(fetcher, since));
                    self.last_sent.insert(fetcher, now);
                }
            }
        }
        self.missing.remove(&request.piece);
        self.demanded.remove(&request.piece);
    }

    /// Records that a fetcher did not send a piece, or a damaged one. It is no source any more.
    pub(crate) fn fail(&mut self, request: PieceRequest) {
        self.end(request);
        if let Source::Fetcher(fetcher) = request.source {
            self.avoided.insert(fetcher, None);
        }
        self.assign();
    }

    /// Makes fetchers sources again that have failed.
    pub(crate) fn readmit(&mut self, fetchers: &BTreeSet<FetcherId>) {
        if !fetchers.is_empty() {
            self.avoided.retain(|fetcher, _| !fetchers.contains(fetcher));
            self.assign();
        }
    }

    fn end(&mut self, request: PieceRequest) -> Option<Duration> {
        let since = self.in_flight.remove(&request)?;
        if let Some(load) = self.load.get_mut(&request.source) {
            *load -= 1;
        }
        Some(since)
    }

    /// Returns since when this daemon waits for a piece of a fetcher that it has requested at a time.
    fn waiting_since(&self, fetcher: FetcherId, requested: Duration) -> Duration {
        self.last_sent.get(&fetcher).map_or(requested, |sent| requested.max(*sent))
    }

    /// Avoids the fetchers that send pieces much slower than others. Its pieces get other sources.
    fn avoid_slow_fetchers(&mut self, now: Duration) {
        let (count, sum) = self.intervals;
        let mean = sum.checked_div(count);
        let limit = match (mean, self.holder) {
            (Some(mean), Holder::Daemons) => (mean * SLOW_FACTOR).max(MIN_SLOW),
            // A slow bucket delays all fetchers. More requests would make it slower.
            (Some(mean), Holder::Bucket) => (mean * SLOW_FACTOR).max(self.first_slow(now)),
            (None, _) => self.first_slow(now),
        };
        let before = self.avoided.clone();
        self.avoided.retain(|_, until| until.is_none_or(|until| until > now));
        for (request, requested) in &self.in_flight {
            if let Source::Fetcher(fetcher) = request.source
                && now.saturating_sub(self.waiting_since(fetcher, *requested)) > limit
            {
                self.avoided.entry(fetcher).or_insert(Some(now + SLOW_PAUSE));
            }
        }
        if !self.avoided.keys().eq(before.keys()) {
            self.assign();
        }
    }

    /// Returns the time after which a fetcher is slow if no fetcher has sent a piece yet.
    fn first_slow(&self, now: Duration) -> Duration {
        let from_holder = self.in_flight.iter().filter(|(it, _)| it.source == Source::Holder);
        let waiting = from_holder.map(|(_, requested)| now.saturating_sub(*requested)).max();
        let holder_time = self.holder_time.max(waiting.unwrap_or_default());
        (holder_time * SLOW_HOLDER_FACTOR).max(FIRST_SLOW)
    }

    /// Queues the missing pieces that no usable source was asked for.
    fn assign(&mut self) {
        self.queues.clear();
        self.has_new_sources = true;
        let requested: BTreeSet<PieceNumber> = self
            .in_flight
            .keys()
            .filter(|request| match request.source {
                Source::Holder => true,
                Source::Fetcher(fetcher) => !self.avoided.contains_key(&fetcher),
            })
            .map(|request| request.piece)
            .collect();
        let usable: Vec<&Fetcher> = self
            .fetchers
            .iter()
            .filter(|fetcher| !self.avoided.contains_key(&fetcher.id))
            .collect();
        let mut members: Vec<(FetcherId, &Wants)> =
            usable.iter().map(|fetcher| (fetcher.id, &fetcher.wants)).collect();
        members.push((self.own, &self.wants));
        let whole = owners(self.pieces, &members, |_| Part::WHOLE);
        let own = match &self.wants {
            Wants::Archive => whole.clone(),
            Wants::Parts(_) => owners(self.pieces, &members, |piece| self.wants.part(piece)),
        };
        // A daemon that joins late asks those that have everything, and not the holder.
        let complete = |piece, missing| {
            let parts = [missing, self.wants.part(piece), Part::WHOLE];
            let has_it = |fetcher: &&&Fetcher| {
                fetcher.is_complete && parts.contains(&fetcher.wants.part(piece))
            };
            let ids = usable.iter().filter(has_it).map(|fetcher| fetcher.id);
            ids.max_by_key(|fetcher| rank(piece, *fetcher))
        };
        let others = |owner: Option<FetcherId>| owner.filter(|owner| *owner != self.own);
        for (&piece, missing) in &self.missing {
            if requested.contains(&piece) {
                continue;
            }
            let at = usize::try_from(piece).expect("usize has at least 32 bits");
            let fetcher =
                others(own[at]).or_else(|| complete(piece, *missing)).or_else(|| others(whole[at]));
            let source = fetcher.map_or(Source::Holder, Source::Fetcher);
            self.queues.entry(source).or_default().insert(piece);
        }
    }
}

/// Returns the owner of a part of each piece among the fetchers that want this part. `None`: no fetcher wants it.
///
/// No fetcher owns more than its share of the pieces that the same fetchers want.
fn owners(
    pieces: PieceNumber,
    members: &[(FetcherId, &Wants)],
    part: impl Fn(PieceNumber) -> Part,
) -> Vec<Option<FetcherId>> {
    let index = |piece| usize::try_from(piece).expect("usize has at least 32 bits");
    // Few fetchers differ in what they want.
    let mut classes: Vec<(&Wants, Vec<FetcherId>)> = Vec::new();
    for (id, wants) in members {
        match classes.iter_mut().find(|(known, _)| known == wants) {
            Some((_, ids)) => ids.push(*id),
            None => classes.push((wants, vec![*id])),
        }
    }
    // The pieces that fetchers of the same classes want: whole, or the same part of each.
    let mut groups: BTreeMap<(bool, Vec<usize>), Vec<PieceNumber>> = BTreeMap::new();
    for piece in 0..pieces {
        let wanted = part(piece);
        let wanting = classes
            .iter()
            .enumerate()
            .filter(|(_, (wants, _))| wanted != Part::NOTHING && wants.part(piece) == wanted);
        let group = (wanted == Part::WHOLE, wanting.map(|(class, _)| class).collect());
        groups.entry(group).or_default().push(piece);
    }
    let mut owners = vec![None; index(pieces)];
    for ((_, group), pieces) in groups {
        let ids = || group.iter().flat_map(|class| &classes[*class].1);
        let share = pieces.len().div_ceil(ids().count().max(1));
        let mut shares: BTreeMap<FetcherId, usize> = ids().map(|id| (*id, share)).collect();
        for piece in pieces {
            let owner = shares.keys().copied().max_by_key(|fetcher| rank(piece, *fetcher));
            owners[index(piece)] = owner;
            let share = owner.and_then(|owner| shares.get_mut(&owner));
            let Some(share) = share else { continue };
            *share -= 1;
            shares.retain(|_, share| *share > 0);
        }
    }
    owners
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fetchers(ids: &[FetcherId]) -> Vec<Fetcher> {
        let fetcher =
            |id: &FetcherId| Fetcher { id: *id, wants: Wants::Archive, is_complete: false };
        ids.iter().map(fetcher).collect()
    }

    /// Returns the plan of a daemon that wants and misses all of an archive.
    fn plan(own: FetcherId, pieces: PieceNumber) -> FetchPlan {
        let mut plan = FetchPlan::new(own, pieces, Holder::Daemons);
        plan.set_wants(Wants::Archive, (0..pieces).map(|piece| (piece, Part::WHOLE)));
        plan
    }

    fn sources(plan: &FetchPlan) -> BTreeMap<PieceNumber, Source> {
        let queues = plan.queues.iter();
        queues.flat_map(|(source, queue)| queue.iter().map(|piece| (*piece, *source))).collect()
    }

    #[test]
    fn each_piece_comes_from_the_holder_to_one_fetcher() {
        let ids: Vec<FetcherId> = (1..=8).map(|id| id * 0x1234_5678_9abc_def1).collect();
        let plans = ids.iter().map(|own| {
            let mut plan = plan(*own, 4000);
            plan.set_fetchers(fetchers(&ids));
            (*own, sources(&plan))
        });
        let plans: BTreeMap<FetcherId, _> = plans.collect();
        let mut shares: BTreeMap<FetcherId, u32> = BTreeMap::new();
        for piece in 0..4000 {
            let from_holder: Vec<FetcherId> = plans
                .iter()
                .filter(|(_, sources)| sources[&piece] == Source::Holder)
                .map(|(own, _)| *own)
                .collect();
            let [owner] = from_holder[..] else { panic!("{piece}: {from_holder:?}") };
            *shares.entry(owner).or_default() += 1;
            for (own, sources) in &plans {
                assert!(*own == owner || sources[&piece] == Source::Fetcher(owner));
            }
        }
        assert!(shares.values().all(|share| *share == 500), "{shares:?}");
    }

    /// Fetchers that want the same part of a piece get it from the holder once. Those that want the whole piece come first.
    #[test]
    fn each_part_comes_from_the_holder_to_one_fetcher() {
        let whole = Part::WHOLE;
        let parts = [Part::NOTHING, whole, Part::of_ranges(3), Part::of_ranges(u32::MAX)];
        let wants = |fetcher: u64| {
            let part = |piece: PieceNumber| match (piece % 5, fetcher) {
                (0, _) => whole,
                // A mesh of two columns.
                (1 | 2, _) => parts[usize::try_from(2 + fetcher % 2).unwrap()],
                _ => parts[usize::try_from(rank(piece / 9, fetcher) % 4).unwrap()],
            };
            Wants::Parts((0..500_u32).map(part).collect())
        };
        let all: Vec<Fetcher> =
            (1..=8).map(|id| Fetcher { id, wants: wants(id), is_complete: false }).collect();
        let plans: BTreeMap<FetcherId, _> = all
            .iter()
            .map(|fetcher| {
                let mut plan = FetchPlan::new(fetcher.id, 500, Holder::Daemons);
                let missing = (0..500).map(|piece| (piece, fetcher.wants.part(piece)));
                let missing = missing.filter(|(_, part)| *part != Part::NOTHING);
                plan.set_wants(fetcher.wants.clone(), missing);
                plan.set_fetchers(all.clone());
                (fetcher.id, sources(&plan))
            })
            .collect();
        for piece in 0..500 {
            let wanting = |part| all.iter().filter(move |it| it.wants.part(piece) == part);
            assert!(wanting(Part::NOTHING).all(|it| !plans[&it.id].contains_key(&piece)));
            for part in &parts[1..] {
                let found: Vec<Source> = wanting(*part).map(|it| plans[&it.id][&piece]).collect();
                let owners = found.iter().filter(|source| match source {
                    Source::Holder => true,
                    Source::Fetcher(id) => !wanting(*part).any(|it| it.id == *id),
                });
                let owners: Vec<&Source> = owners.collect();
                assert_eq!(owners.len(), found.len().min(1), "{piece} {part:?}: {found:?}");
                let from_holder = owners.iter().all(|source| **source == Source::Holder);
                let has_whole = *part != whole && wanting(whole).next().is_some();
                assert_eq!(
                    from_holder,
                    !has_whole || found.is_empty(),
                    "{piece} {part:?}: {found:?}"
                );
            }
        }
    }

    /// A fetcher more takes its share from the others. Few other pieces change their owner.
    #[test]
    fn owners_change_little_with_one_fetcher_more() {
        let ids: Vec<FetcherId> = (1..=9).map(|id| id * 0x1234_5678_9abc_def1).collect();
        let owners = |ids: &[FetcherId]| {
            let members: Vec<_> = ids.iter().map(|id| (*id, &Wants::Archive)).collect();
            owners(3600, &members, |_| Part::WHOLE)
        };
        let (before, after) = (owners(&ids[..8]), owners(&ids));
        let changed = before.iter().zip(&after).filter(|(before, after)| before != after).count();
        assert!(changed < 3600 / 4, "{changed}");
    }

    #[test]
    fn late_fetcher_asks_complete_ones_and_not_the_holder() {
        let mut plan = plan(7, 300);
        let complete = |id| Fetcher { id, wants: Wants::Archive, is_complete: true };
        plan.set_fetchers([complete(1), complete(2), complete(3)]);
        let found = sources(&plan);
        for id in [1, 2, 3] {
            let share = found.values().filter(|source| **source == Source::Fetcher(id)).count();
            assert!((60..140).contains(&share), "{share}");
        }
        assert!(!found.values().any(|source| *source == Source::Holder));
    }

    #[test]
    fn busy_owner_is_relieved_by_a_fetcher_that_has_the_piece() {
        let mut plan = plan(7, 400);
        plan.set_fetchers(fetchers(&[1, 2]));
        plan.set_present(2, PresentPieces::Bits(vec![0xff; 50]));
        let mut from: BTreeMap<Source, u32> = BTreeMap::new();
        let mut now = Duration::ZERO;
        while !plan.is_complete() {
            let mut requests = Vec::new();
            while let Some(request) = plan.next_request(now) {
                requests.push(request);
            }
            now += Duration::from_millis(1);
            for request in requests {
                // The first fetcher is ten times as slow as the second one.
                if request.source != Source::Fetcher(1) || rank(request.piece, 0).is_multiple_of(10)
                {
                    plan.complete(request, now);
                    *from.entry(request.source).or_default() += 1;
                }
            }
            for request in plan.in_flight.keys().copied().collect::<Vec<_>>() {
                if now.subsec_millis().is_multiple_of(10) {
                    plan.complete(request, now);
                    *from.entry(request.source).or_default() += 1;
                }
            }
        }
        assert!(from[&Source::Fetcher(2)] > 170, "{from:?}");
        assert!(from[&Source::Fetcher(1)] < 110, "{from:?}");
    }

    #[test]
    fn bits_are_pieces() {
        let present = |pieces: &PresentPieces| {
            (0..20).filter(|piece| pieces.contains(*piece)).collect::<Vec<_>>()
        };
        assert_eq!(present(&PresentPieces::All).len(), 20);
        assert_eq!(present(&PresentPieces::Bits(vec![0b1000_0101, 1])), [0, 2, 7, 8]);
    }

    #[test]
    fn silent_fetchers_do_not_fill_the_window() {
        let mut plan = plan(7, 2000);
        let silent: Vec<FetcherId> = (100..120).collect();
        plan.set_fetchers(fetchers(&silent));
        let mut now = Duration::ZERO;
        while !plan.is_complete() {
            let mut requests = Vec::new();
            while let Some(request) = plan.next_request(now) {
                requests.push(request);
            }
            now += Duration::from_millis(10);
            for request in requests.into_iter().filter(|it| it.source == Source::Holder) {
                plan.complete(request, now);
            }
            assert!(now < Duration::from_secs(30));
        }
    }

    /// On slow links the first pieces come late, from all sources.
    #[test]
    fn fetchers_are_not_slow_if_the_holder_is() {
        let mut plan = plan(7, 40);
        plan.set_fetchers(fetchers(&[1]));
        let requests: Vec<PieceRequest> =
            std::iter::from_fn(|| plan.next_request(Duration::ZERO)).collect();
        let now = Duration::from_secs(5);
        assert!(plan.next_request(now).is_none() && plan.avoided_count() == 0);
        for request in requests.iter().filter(|it| it.source == Source::Holder) {
            plan.complete(*request, now);
        }
        while plan.next_request(now * 4).is_some() {}
        assert_eq!(plan.avoided_count(), 0);
        while plan.next_request(now * 5).is_some() {}
        assert_eq!(plan.avoided_count(), 1);
    }

    #[test]
    fn failed_and_slow_fetchers_are_replaced() {
        let mut plan = plan(7, 40);
        plan.set_fetchers(fetchers(&[1, 2]));
        let mut now = Duration::ZERO;
        let mut from_slow = 0;
        while !plan.is_complete() {
            let mut requests = Vec::new();
            while let Some(request) = plan.next_request(now) {
                requests.push(request);
            }
            now += Duration::from_millis(100);
            for request in requests {
                match request.source {
                    Source::Fetcher(1) => plan.fail(request),
                    // It never answers.
                    Source::Fetcher(2) => from_slow += 1,
                    _ => plan.complete(request, now),
                }
            }
            assert!(now < Duration::from_secs(10));
        }
        assert!((1..=FETCHER_WINDOW).contains(&from_slow), "{from_slow}");
        assert_eq!(plan.avoided.keys().copied().collect::<Vec<_>>(), [1, 2]);
        // A late answer changes nothing.
        let late = plan.in_flight.keys().next().copied().expect("the slow one has requests");
        plan.complete(late, now);
        assert!(plan.is_complete() && plan.next_request(now).is_none());
    }
}
