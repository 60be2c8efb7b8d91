//! One archive on its way here: its bytes come as readers ask for them, each byte once for all of them.

use std::ops;
use std::pin::pin;
use std::sync::{Arc, RwLock};

use bytes::Bytes;
use rangemap::RangeSet;
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tssd_format::checksum;

use crate::daemon::elsewhere::Elsewhere;
use crate::daemon::reading::{collect, place, total};
use crate::error::{Error, Result};
use crate::io::exec::run_blocking;
use crate::io::sync::{Lock, MutexGuard};
use crate::net::wire::{MAX_READ, Range, Sum};
use crate::shm::Writing;

/// How many ranges go into a request: as many as surely fit, whatever they are.
const MAX_RANGES: usize = 250;

/// How many requests for the rest of an archive are under way at once.
const FETCHERS: usize = 4;

/// What is missing of an archive is brought without being asked for, as soon as it is no more than one in so many
/// bytes, or than so many bytes in all: alignment, index, what nobody has wanted yet.
const REST_PART: u64 = 16;
const REST_BYTES: u64 = 256 << 10;

/// Where an archive is put together.
pub(crate) enum Memory {
    /// What is small is copied into a slab in the end.
    Small(Vec<u8>),
    Segment(Writing),
}

impl Memory {
    pub(crate) fn bytes(&self) -> &[u8] {
        match self {
            Self::Small(bytes) => bytes,
            Self::Segment(writing) => writing.bytes(),
        }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            Self::Small(bytes) => bytes,
            Self::Segment(writing) => writing.bytes_mut(),
        }
    }
}

pub(crate) struct Coming {
    pub(crate) name: String,
    len: u64,
    /// None as soon as all of it has come.
    memory: RwLock<Option<Memory>>,
    state: Lock<State>,
    /// Rung whenever something has come, or will not.
    changed: Notify,
}

/// Bytes of the archive.
#[derive(Default)]
struct State {
    here: RangeSet<u64>,
    /// How many bytes that is.
    bytes: u64,
    /// What of that whoever sent it has proven.
    proven: RangeSet<u64>,
    /// What somebody fetches.
    asked: RangeSet<u64>,
    is_rest_asked: bool,
}

impl State {
    fn add(&mut self, run: ops::Range<u64>, is_proven: bool) {
        self.bytes += self.here.gaps(&run).map(|gap| gap.end - gap.start).sum::<u64>();
        if is_proven {
            self.proven.insert(run.clone());
        }
        self.here.insert(run);
    }

    /// What is there for somebody who wants proven bytes, or for one who proves them himself.
    fn there(&self, prove: bool) -> &RangeSet<u64> {
        if prove { &self.proven } else { &self.here }
    }
}

/// What is not here of what somebody wants.
enum Lacking<'a> {
    Nothing,
    /// What he is to fetch.
    Own(Asked<'a>),
    /// What others fetch.
    Awaited,
}

/// What one reader fetches. Dropped, somebody else may.
struct Asked<'a> {
    coming: &'a Coming,
    ranges: Vec<Range>,
}

impl Drop for Asked<'_> {
    fn drop(&mut self) {
        let mut state = self.coming.state();
        for range in &self.ranges {
            range.for_each(|at| state.asked.remove(at..at + range.1));
        }
        drop(state);
        self.coming.changed.notify_waiters();
    }
}

impl Coming {
    pub(crate) fn new(name: String, len: u64, memory: Memory) -> Self {
        let (state, changed) = (Lock::default(), Notify::new());
        Self { name, len, memory: RwLock::new(Some(memory)), state, changed }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Bytes of it, with their checksum if they are to be proven; none if it is here altogether.
    ///
    /// # Errors
    ///
    /// As [`Elsewhere::read`]; `Invalid` as [`total`].
    pub(crate) async fn read(
        self: &Arc<Self>,
        elsewhere: &Elsewhere,
        ranges: &[Range],
        prove: bool,
    ) -> Result<Option<(Bytes, Sum)>> {
        let bytes = total(ranges, self.len)?;
        if let Some(fetched) = self.bring(elsewhere, ranges, prove).await? {
            return Ok(Some(fetched));
        }
        let (coming, ranges) = (self.clone(), ranges.to_vec());
        run_blocking(move || {
            let memory = coming.memory.read().expect("nobody panics while writing");
            let Some(memory) = &*memory else { return Ok(None) };
            let data = collect(memory.bytes(), &ranges, bytes);
            let crc32 = prove.then(|| checksum(&data));
            Ok(Some((data, Sum { crc32 })))
        })
        .await
    }

    /// Brings all of it.
    pub(crate) async fn complete(self: &Arc<Self>, elsewhere: &Arc<Elsewhere>) -> Result<()> {
        let parts = Arc::new(Lock::new(self.rest().into_iter()));
        let mut fetchers: JoinSet<Result<()>> = JoinSet::new();
        for _ in 0..FETCHERS {
            let (coming, elsewhere, parts) = (self.clone(), elsewhere.clone(), parts.clone());
            fetchers.spawn(async move {
                loop {
                    let next = parts.lock().next();
                    let Some(part) = next else { return Ok(()) };
                    coming.bring(&elsewhere, &part, false).await?;
                }
            });
        }
        while let Some(fetched) = fetchers.join_next().await {
            let ended = |error| Error::io(&self.name, std::io::Error::other(error));
            fetched.map_err(ended)??;
        }
        Ok(())
    }

    /// Whether so little is missing that it is to be brought, which is said once.
    pub(crate) fn wants_its_rest(&self) -> bool {
        let mut state = self.state();
        let rest = self.len - state.bytes;
        let is_little = rest <= (self.len / REST_PART).max(REST_BYTES);
        is_little && !std::mem::replace(&mut state.is_rest_asked, true)
    }

    /// All of it is to come.
    pub(crate) fn ask_for_rest(&self) {
        self.state().is_rest_asked = true;
    }

    /// Whether all of it is to come.
    pub(crate) fn is_rest_asked(&self) -> bool {
        self.state().is_rest_asked
    }

    /// The rest will not come now.
    pub(crate) fn give_up_rest(&self) {
        self.state().is_rest_asked = false;
    }

    /// Its memory, once all of it has come; none if somebody else has taken that.
    pub(crate) fn take(&self) -> Option<Memory> {
        self.memory.write().expect("nobody panics while writing").take()
    }

    /// What is missing, in parts for one request each.
    fn rest(&self) -> Vec<Vec<Range>> {
        if self.len == 0 {
            return Vec::new();
        }
        let gaps: Vec<_> = self.state().here.gaps(&(0..self.len)).collect();
        let mut parts: Vec<Vec<Range>> = Vec::new();
        let mut room = 0;
        for gap in gaps {
            let mut at = gap.start;
            while at < gap.end {
                if room == 0 || parts.last().is_none_or(|part| part.len() >= MAX_RANGES) {
                    parts.push(Vec::new());
                    room = MAX_READ;
                }
                let len = room.min(gap.end - at);
                parts.last_mut().expect("there is one").push(Range::plain(at, len));
                (at, room) = (at + len, room - len);
            }
        }
        parts
    }

    /// Brings what of these ranges is not here. Returns it, if that is all of them in one piece.
    async fn bring(
        self: &Arc<Self>,
        elsewhere: &Elsewhere,
        ranges: &[Range],
        prove: bool,
    ) -> Result<Option<(Bytes, Sum)>> {
        loop {
            // What comes while it is looked at counts too.
            let mut changed = pin!(self.changed.notified());
            changed.as_mut().enable();
            let asked = match self.lacking(ranges, prove) {
                Lacking::Nothing => return Ok(None),
                Lacking::Awaited => {
                    changed.await;
                    continue;
                }
                Lacking::Own(asked) => asked,
            };
            for part in asked.ranges.chunks(MAX_RANGES) {
                let fetched = elsewhere.read(&self.name, part, prove).await?;
                let (coming, part) = (self.clone(), part.to_vec());
                let (fetched, part) = run_blocking(move || {
                    coming.keep(&part, &fetched.0, prove);
                    Ok((fetched, part))
                })
                .await?;
                if part == ranges {
                    return Ok(Some(fetched));
                }
            }
        }
    }

    /// What of these ranges somebody has to fetch, and does from now on.
    fn lacking(&self, ranges: &[Range], prove: bool) -> Lacking<'_> {
        let mut state = self.state();
        let (mut own, mut is_awaited) = (Vec::new(), false);
        for range in ranges {
            let mut is_free = true;
            range.for_each(|at| {
                let run = at..at + range.1;
                is_free &= !state.there(prove).overlaps(&run) && !state.asked.overlaps(&run);
            });
            if is_free {
                own.push(range.clone());
                range.for_each(|at| state.asked.insert(at..at + range.1));
                continue;
            }
            range.for_each(|at| {
                let gaps: Vec<_> = state.there(prove).gaps(&(at..at + range.1)).collect();
                for gap in gaps {
                    is_awaited |= state.asked.overlaps(&gap);
                    let free: Vec<_> = state.asked.gaps(&gap).collect();
                    for part in free {
                        own.push(Range::plain(part.start, part.end - part.start));
                        state.asked.insert(part);
                    }
                }
            });
        }
        match (own.is_empty(), is_awaited) {
            (false, _) => Lacking::Own(Asked { coming: self, ranges: own }),
            (true, true) => Lacking::Awaited,
            (true, false) => Lacking::Nothing,
        }
    }

    /// Puts what has come where it belongs.
    fn keep(&self, ranges: &[Range], data: &Bytes, prove: bool) {
        {
            let mut memory = self.memory.write().expect("nobody panics while writing");
            // None if the rest has come meanwhile: then these bytes are here without their proof.
            if let Some(memory) = &mut *memory {
                let (target, mut rest) = (memory.bytes_mut(), &data[..]);
                for range in ranges {
                    let len = place(range.1);
                    range.for_each(|at| {
                        let (run, after) = rest.split_at(len);
                        target[place(at)..][..len].copy_from_slice(run);
                        rest = after;
                    });
                }
            }
        }
        let mut state = self.state();
        for range in ranges {
            range.for_each(|at| state.add(at..at + range.1, prove));
        }
    }
}
