//! Fan-out: from which daemon to fetch each piece of an archive that several daemons fetch (pure).
//!
//! The daemons that fetch an archive at the same time are *fetchers*. Each piece has one *owner* among them, by a hash
//! of the piece and the fetcher (rendezvous hashing), and all fetchers own equally many pieces. The owner fetches the
//! piece from a *holder*, a daemon that has the whole archive. The others fetch it from the owner. So a holder sends
//! each piece once, and each fetcher passes on its share.
//!
//! Daemons may know different fetchers for a moment. A daemon that is asked for a piece which it does not own fetches
//! it from a holder, so requests never go in a circle. Spec: `spec/protocol.md`, rule P-082.

#[cfg(test)]
mod simulation;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

/// Number of pieces that a daemon requests from the holders at the same time.
///
/// With more, the last pieces come to their fetchers late and at once.
const HOLDER_WINDOW: usize = 2;

/// From this number of fetchers on, the requests of all of them keep the holder busy with one piece each.
const MANY_FETCHERS: usize = 8;

/// Number of pieces that a daemon without fetchers requests from the holders at the same time.
const ALONE_WINDOW: usize = 8;

/// Number of pieces that a daemon requests from one fetcher at the same time.
const FETCHER_WINDOW: usize = 3;

/// Number of pieces that a daemon requests at the same time.
const WINDOW: usize = 48;

/// A fetcher is slow if it has not sent a piece after this multiple of the mean time of a piece.
const SLOW_FACTOR: u32 = 6;

/// A fetcher is not slow before this time.
const MIN_SLOW: Duration = Duration::from_millis(500);

/// Number that identifies a fetcher of an archive.
pub(crate) type FetcherId = u64;

/// Number of a piece in its archive.
pub(crate) type PieceNumber = u32;

/// Another daemon that fetches the archive, or has fetched it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fetcher {
    pub(crate) id: FetcherId,
    /// Whether it has the whole archive.
    pub(crate) is_complete: bool,
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
    fetchers: Vec<Fetcher>,
    /// Fetchers that have failed or are slow. They are no source any more.
    avoided: BTreeSet<FetcherId>,
    /// Pieces that are not requested, by source.
    queues: BTreeMap<Source, VecDeque<PieceNumber>>,
    /// Requests, with the times at which they were made.
    in_flight: BTreeMap<PieceRequest, Duration>,
    /// Number of requests in flight, by source.
    load: BTreeMap<Source, usize>,
    missing: BTreeSet<PieceNumber>,
    /// Number of pieces that have come, and the sum of their times.
    fetched: (u32, Duration),
}

impl FetchPlan {
    /// Creates the plan to fetch the missing ones of all pieces, with no fetchers. `own` identifies this daemon.
    pub(crate) fn new(
        own: FetcherId,
        pieces: PieceNumber,
        missing: impl IntoIterator<Item = PieceNumber>,
    ) -> Self {
        let mut plan = Self {
            own,
            pieces,
            fetchers: Vec::new(),
            avoided: BTreeSet::new(),
            queues: BTreeMap::new(),
            in_flight: BTreeMap::new(),
            load: BTreeMap::new(),
            missing: missing.into_iter().collect(),
            fetched: (0, Duration::ZERO),
        };
        plan.assign();
        plan
    }

    /// Sets the other fetchers. Pieces that are not requested get their sources anew.
    pub(crate) fn set_fetchers(&mut self, fetchers: impl IntoIterator<Item = Fetcher>) {
        let fetchers: Vec<Fetcher> =
            fetchers.into_iter().filter(|fetcher| fetcher.id != self.own).collect();
        if fetchers != self.fetchers {
            self.fetchers = fetchers;
            self.assign();
        }
    }

    /// Whether all pieces have come.
    pub(crate) fn is_complete(&self) -> bool {
        self.missing.is_empty()
    }

    /// Returns the next request to make now. `None`: wait until a piece comes, or for [`MIN_SLOW`].
    pub(crate) fn next_request(&mut self, now: Duration) -> Option<PieceRequest> {
        self.avoid_slow_fetchers(now);
        if self.in_flight.len() >= WINDOW {
            return None;
        }
        let has_room = |source: &Source| {
            let window = match source {
                Source::Holder if self.fetchers.is_empty() => self.alone_window(),
                Source::Holder if self.fetchers.len() < MANY_FETCHERS => HOLDER_WINDOW,
                Source::Holder => 1,
                Source::Fetcher(_) => FETCHER_WINDOW,
            };
            self.load.get(source).copied().unwrap_or(0) < window
        };
        // What this daemon fetches from holders, others wait for. All fetch in the order of the pieces: so the
        // fetchers have, or get next, what this daemon asks them for.
        let with_room = self.queues.iter().filter(|(source, _)| has_room(source));
        let (source, _) = with_room
            .min_by_key(|(source, queue)| (**source != Source::Holder, queue.front().copied()))?;
        let source = *source;
        let queue = self.queues.get_mut(&source)?;
        let piece = queue.pop_front()?;
        if queue.is_empty() {
            self.queues.remove(&source);
        }
        let request = PieceRequest { piece, source };
        self.in_flight.insert(request, now);
        *self.load.entry(source).or_default() += 1;
        Some(request)
    }

    /// Returns the window for holders without fetchers.
    ///
    /// At first it is one piece: daemons that begin at the same time do not know each other yet, and ask for the same
    /// pieces.
    fn alone_window(&self) -> usize {
        usize::try_from(self.fetched.0)
            .map_or(ALONE_WINDOW, |fetched| ALONE_WINDOW.min(1 + fetched))
    }

    /// Records that a piece has come.
    pub(crate) fn complete(&mut self, request: PieceRequest, now: Duration) {
        if let Some(since) = self.end(request) {
            self.fetched.0 += 1;
            self.fetched.1 += now.saturating_sub(since);
        }
        self.missing.remove(&request.piece);
    }

    /// Records that a fetcher did not send a piece, or a damaged one. It is no source any more.
    pub(crate) fn fail(&mut self, request: PieceRequest) {
        self.end(request);
        if let Source::Fetcher(fetcher) = request.source {
            self.avoided.insert(fetcher);
        }
        self.assign();
    }

    fn end(&mut self, request: PieceRequest) -> Option<Duration> {
        let since = self.in_flight.remove(&request)?;
        if let Some(load) = self.load.get_mut(&request.source) {
            *load -= 1;
        }
        Some(since)
    }

    /// Avoids the fetchers with a request that takes much longer than others. Its pieces get other sources.
    fn avoid_slow_fetchers(&mut self, now: Duration) {
        let (count, sum) = self.fetched;
        let mean = sum.checked_div(count).unwrap_or(MIN_SLOW);
        let limit = (mean * SLOW_FACTOR).max(MIN_SLOW);
        let avoided = self.avoided.len();
        for (request, since) in &self.in_flight {
            if let Source::Fetcher(fetcher) = request.source
                && now.saturating_sub(*since) > limit
            {
                self.avoided.insert(fetcher);
            }
        }
        if self.avoided.len() > avoided {
            self.assign();
        }
    }

    /// Queues the missing pieces that no usable source was asked for.
    fn assign(&mut self) {
        self.queues.clear();
        let requested: BTreeSet<PieceNumber> = self
            .in_flight
            .keys()
            .filter(|request| match request.source {
                Source::Holder => true,
                Source::Fetcher(fetcher) => !self.avoided.contains(&fetcher),
            })
            .map(|request| request.piece)
            .collect();
        let fetchers: Vec<Fetcher> = self
            .fetchers
            .iter()
            .filter(|fetcher| !self.avoided.contains(&fetcher.id))
            .copied()
            .collect();
        let complete: Vec<FetcherId> = fetchers
            .iter()
            .filter(|fetcher| fetcher.is_complete)
            .map(|fetcher| fetcher.id)
            .collect();
        let candidates: Vec<FetcherId> =
            fetchers.iter().map(|fetcher| fetcher.id).chain([self.own]).collect();
        let owners = owners(self.pieces, &candidates);
        for piece in self.missing.difference(&requested).copied() {
            let owner = owners[usize::try_from(piece).expect("usize has at least 32 bits")];
            let source = if owner == self.own {
                // A daemon that joins late asks those that have everything, and not the holder.
                let best = complete.iter().max_by_key(|fetcher| rank(piece, **fetcher));
                best.map_or(Source::Holder, |fetcher| Source::Fetcher(*fetcher))
            } else {
                Source::Fetcher(owner)
            };
            self.queues.entry(source).or_default().push_back(piece);
        }
    }
}

/// Returns the owner of each piece. All own the same number of pieces, or one less.
fn owners(pieces: PieceNumber, candidates: &[FetcherId]) -> Vec<FetcherId> {
    let count = u32::try_from(candidates.len()).expect("a daemon knows few fetchers");
    let mut shares: BTreeMap<FetcherId, u32> =
        candidates.iter().map(|fetcher| (*fetcher, pieces.div_ceil(count))).collect();
    let owner = |piece| {
        let (owner, share) = shares
            .iter_mut()
            .filter(|(_, share)| **share > 0)
            .max_by_key(|(fetcher, _)| rank(piece, **fetcher))
            .expect("the shares cover all pieces");
        *share -= 1;
        *owner
    };
    (0..pieces).map(owner).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fetchers(ids: &[FetcherId]) -> Vec<Fetcher> {
        ids.iter().map(|id| Fetcher { id: *id, is_complete: false }).collect()
    }

    fn sources(plan: &FetchPlan) -> BTreeMap<PieceNumber, Source> {
        let queues = plan.queues.iter();
        queues.flat_map(|(source, queue)| queue.iter().map(|piece| (*piece, *source))).collect()
    }

    #[test]
    fn each_piece_comes_from_the_holder_to_one_fetcher() {
        let ids: Vec<FetcherId> = (1..=8).map(|id| id * 0x1234_5678_9abc_def1).collect();
        let plans = ids.iter().map(|own| {
            let mut plan = FetchPlan::new(*own, 4000, 0..4000);
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

    /// A fetcher more takes its share from the others. Few other pieces change their owner.
    #[test]
    fn owners_change_little_with_one_fetcher_more() {
        let ids: Vec<FetcherId> = (1..=9).map(|id| id * 0x1234_5678_9abc_def1).collect();
        let (before, after) = (owners(3600, &ids[..8]), owners(3600, &ids));
        let changed = before.iter().zip(&after).filter(|(before, after)| before != after).count();
        assert!(changed < 3600 / 4, "{changed}");
    }

    #[test]
    fn late_fetcher_asks_complete_ones_and_not_the_holder() {
        let mut plan = FetchPlan::new(7, 300, 0..300);
        let complete = |id| Fetcher { id, is_complete: true };
        plan.set_fetchers([complete(1), complete(2), complete(3)]);
        let found = sources(&plan);
        for id in [1, 2, 3] {
            let share = found.values().filter(|source| **source == Source::Fetcher(id)).count();
            assert!((60..140).contains(&share), "{share}");
        }
        assert!(!found.values().any(|source| *source == Source::Holder));
    }

    #[test]
    fn failed_and_slow_fetchers_are_replaced() {
        let mut plan = FetchPlan::new(7, 40, 0..40);
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
        assert_eq!(plan.avoided, BTreeSet::from([1, 2]));
        // A late answer changes nothing.
        let late = plan.in_flight.keys().next().copied().expect("the slow one has requests");
        plan.complete(late, now);
        assert!(plan.is_complete() && plan.next_request(now).is_none());
    }
}
