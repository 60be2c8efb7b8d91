//! Differences between successive versions of archives in memory.
//!
//! A host that has a version which this daemon no longer stores gets the newest one as a difference all the same: the
//! daemon computes the bytes of the earlier version from those of a later one.

use std::collections::BTreeMap;
use std::ops;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tssd_format::{DeltaDecoder, DeltaEncoder, DeltaOptions, ElementWidth};

use crate::control::layout::ArchiveName;
use crate::convert::{to_u64, to_usize};
use crate::daemon::delta_base::{DeltaBase, HeldArchive};
use crate::delta::layout::ElementLayout;
use crate::delta::parts::MAX_PART_BYTES;
use crate::delta::runs::{self, PartDelta, Run};
use crate::error::{Error, Result};
use crate::io::sync::{Lock, MutexGuard};
use crate::net::wire::Range;
use crate::shm::Pool;

/// The differences of all versions of an archive have at most 1/`SHARE_DIVISOR` of its length.
const SHARE_DIVISOR: u64 = 8;

/// Time after the last request for a difference of a key, after which its differences are forgotten.
const UNUSED_TIMEOUT: Duration = Duration::from_hours(1);

/// Differences between successive versions of archives.
pub(crate) struct DeltaHistory {
    pool: Arc<Pool>,
    inner: Lock<Inner>,
}

#[derive(Default)]
struct Inner {
    /// By the name of the earlier archive.
    deltas: BTreeMap<String, Arc<ArchiveDelta>>,
    /// Prefixes of the archives of keys of which differences are requested, and the time of the last request.
    requested: BTreeMap<String, Instant>,
}

/// The difference from a later archive to an earlier one of the same length.
struct ArchiveDelta {
    /// The name of the later archive.
    later: String,
    /// The parts that differ, in ascending order.
    parts: Vec<OwnedPart>,
    /// Bytes of memory.
    cost: u64,
}

/// The difference of a part of an archive.
struct OwnedPart {
    /// Where the part is in both archives.
    bytes: ops::Range<u64>,
    width: ElementWidth,
    /// A delta chunk whose base is the later archive.
    chunk: Box<[u8]>,
}

impl DeltaHistory {
    pub(crate) fn new(pool: Arc<Pool>) -> Self {
        Self { pool, inner: Lock::default() }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock()
    }

    /// Records that differences of a key are requested. `prefix` is the beginning of the names of its archives.
    pub(crate) fn record_request(&self, prefix: String) {
        self.inner().requested.insert(prefix, Instant::now());
    }

    /// Returns whether other daemons request differences of the key of an archive.
    pub(crate) fn is_requested(&self, archive: &str) -> bool {
        let prefix = ArchiveName::parse(archive).map(|archive| archive.prefix());
        prefix.is_some_and(|prefix| self.inner().requested.contains_key(&prefix))
    }

    /// Returns the beginnings of the names of the archives of all keys that have differences.
    pub(crate) fn prefixes(&self) -> Vec<String> {
        self.inner().requested.keys().cloned().collect()
    }

    /// Returns the bytes of memory of all differences.
    pub(crate) fn bytes(&self) -> u64 {
        self.inner().deltas.values().map(|delta| delta.cost).sum()
    }

    /// Forgets the differences of keys that no other daemon has requested for a time.
    pub(crate) fn forget_unused(&self) {
        let mut inner = self.inner();
        inner.requested.retain(|_, last| last.elapsed() < UNUSED_TIMEOUT);
        let Inner { deltas, requested } = &mut *inner;
        deltas.retain(|name, _| {
            ArchiveName::parse(name).is_some_and(|name| requested.contains_key(&name.prefix()))
        });
    }

    /// Forgets the differences of a key. `prefix` is the beginning of the names of its archives.
    pub(crate) fn forget(&self, prefix: &str) {
        let mut inner = self.inner();
        inner.requested.remove(prefix);
        inner.deltas.retain(|name, _| !name.starts_with(prefix));
    }

    /// Derives the difference from an archive in memory to an earlier one of the same length, and keeps it if it is short.
    ///
    /// # Errors
    ///
    /// `Io` without memory for the encoder.
    pub(crate) fn derive(
        &self,
        layout: &ElementLayout,
        later: &HeldArchive,
        earlier: &HeldArchive,
    ) -> Result<()> {
        let (Some(new), Some(old)) = (later.bytes(), earlier.bytes()) else { return Ok(()) };
        if new.len() != old.len() {
            return Ok(());
        }
        let max_cost = to_u64(new.len()) / SHARE_DIVISOR;
        let delta = ArchiveDelta::derive(layout, later.name(), [new, old], max_cost)?;
        if let Some(delta) = delta {
            self.inner().insert(earlier.name(), delta, max_cost);
        }
        Ok(())
    }

    /// Returns whether differences lead from an archive in memory to an earlier one.
    pub(crate) fn leads_to(&self, archive: &str, earlier: &str) -> bool {
        let inner = self.inner();
        let mut name = earlier;
        while let Some(delta) = inner.deltas.get(name) {
            name = &delta.later;
            if name == archive || self.pool.span(name).is_some() {
                return true;
            }
        }
        false
    }

    /// Returns the bytes of ranges of an earlier archive, concatenated. `raw` is those of `archive`.
    ///
    /// Returns `None` if no differences lead there.
    pub(crate) fn read(
        &self,
        archive: &str,
        earlier: &str,
        ranges: &[Range],
        raw: &[u8],
    ) -> Option<Vec<u8>> {
        let runs = sorted_runs(ranges)?;
        let (mut chain, mut name) = (Vec::new(), earlier.to_owned());
        // Each archive is later than the one before, so this ends.
        let mut bytes = loop {
            let delta = self.inner().deltas.get(&name)?.clone();
            name.clone_from(&delta.later);
            chain.push(delta);
            if name == archive {
                break raw.to_vec();
            }
            if let Some(held) = HeldArchive::open(&self.pool, &name) {
                break held.read(ranges)?.to_vec();
            }
        };
        let mut decoder = DeltaDecoder::new().ok()?;
        for delta in chain.iter().rev() {
            delta.apply(&mut decoder, &runs, &mut bytes)?;
        }
        Some(bytes)
    }
}

impl Inner {
    /// Keeps a difference, and forgets the oldest ones of the same archive if all of them have more than `max_cost` bytes.
    fn insert(&mut self, earlier: &str, delta: ArchiveDelta, max_cost: u64) {
        let Some(name) = ArchiveName::parse(earlier) else { return };
        self.deltas.insert(earlier.to_owned(), Arc::new(delta));
        let mut alike: Vec<((u32, u64), String, u64)> = Vec::new();
        for (other, delta) in self.deltas.range(name.prefix()..) {
            let Some(parsed) = ArchiveName::parse(other) else { continue };
            if parsed.prefix() != name.prefix() {
                break;
            }
            if parsed.role() == name.role() {
                alike.push((parsed.position, other.clone(), delta.cost));
            }
        }
        alike.sort_unstable_by(|one, other| other.cmp(one));
        let mut cost = 0;
        for (_, name, each) in alike {
            cost += each;
            if cost > max_cost {
                self.deltas.remove(&name);
            }
        }
    }
}

impl ArchiveDelta {
    /// Derives the difference from the first archive to the second one. `None` if it has more than `max_cost` bytes.
    fn derive(
        layout: &ElementLayout,
        later: &str,
        [new, old]: [&[u8]; 2],
        max_cost: u64,
    ) -> Result<Option<Self>> {
        let failed = |error| Error::from_format(later, error);
        let mut encoder = DeltaEncoder::new().map_err(failed)?;
        let (mut parts, mut cost, mut chunk) = (Vec::new(), 0, Vec::new());
        let mut at = 0;
        for (len, width) in layout.widths(to_u64(new.len())) {
            let end = at + len;
            while at < end {
                let part = at..end.min(at + MAX_PART_BYTES);
                at = part.end;
                chunk.clear();
                let versions = [&new[part.clone()], &old[part.clone()]];
                let options = DeltaOptions::default();
                let encoded = encoder.encode(versions, width, &options, &mut chunk);
                let changes = encoded.map_err(failed)?.changes;
                if changes.listed + changes.dense == 0 {
                    continue;
                }
                let part = OwnedPart {
                    bytes: to_u64(part.start)..to_u64(part.end),
                    width,
                    chunk: Box::from(&chunk[..]),
                };
                cost += to_u64(size_of::<OwnedPart>() + chunk.len());
                if cost > max_cost {
                    return Ok(None);
                }
                parts.push(part);
            }
        }
        Ok(Some(Self { later: later.to_owned(), parts, cost }))
    }

    /// Changes bytes of the later archive to those of the earlier one. `None` if runs do not have whole elements.
    fn apply(&self, decoder: &mut DeltaDecoder, runs: &[Run], bytes: &mut [u8]) -> Option<()> {
        self.parts.iter().try_for_each(|part| {
            let OwnedPart { bytes: place, width, chunk } = part;
            let part = PartDelta { bytes: place, width: *width, chunk };
            let are_whole = runs::apply(decoder, &part, runs, bytes);
            are_whole.unwrap_or(false).then_some(())
        })
    }
}

/// Returns the runs of ranges in ascending order. `None` if they overlap.
fn sorted_runs(ranges: &[Range]) -> Option<Vec<Run>> {
    let (mut runs, mut at) = (Vec::new(), 0);
    for range in ranges {
        range.for_each_run(|start| {
            runs.push(Run { bytes: start..start + range.1, at });
            at += to_usize(range.1);
        });
    }
    runs::sort_runs(&mut runs).then_some(runs)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::delta::layout::tests::layout;
    use crate::net::encoding::tests::bytes_of;

    const LEN: usize = 10_000;
    const KEY: &str = "key";

    fn low_byte(number: usize) -> u8 {
        u8::try_from(number % 256).unwrap()
    }

    fn name(version: u64) -> String {
        format!("{KEY}/1-{version}-0123456789abcdef/0-00112233445566778899aabbccddeeff.tssd")
    }

    fn store(pool: &Arc<Pool>, version: u64, bytes: &[u8]) {
        let mut blob = pool.begin_blob(to_u64(bytes.len())).unwrap().unwrap();
        blob.bytes_mut().copy_from_slice(bytes);
        blob.publish(&name(version)).unwrap();
    }

    /// Stores versions one after the other, of which only the last one stays in memory.
    fn history_of(versions: &[Vec<u8>]) -> DeltaHistory {
        let pool = Arc::new(Pool::new(1 << 30));
        let history = DeltaHistory::new(pool.clone());
        history.record_request(format!("{KEY}/"));
        for (number, bytes) in (0..).zip(versions) {
            store(&pool, number, bytes);
            if number > 0 {
                let open = |number| HeldArchive::open(&pool, &name(number)).unwrap();
                history.derive(&layout(), &open(number), &open(number - 1)).unwrap();
                pool.delete(&name(number - 1));
            }
        }
        history
    }

    /// Ranges of whole elements of 4 bytes, in any order.
    fn ranges() -> impl Strategy<Value = Vec<Range>> {
        let first = (0..250_u64, 1..30_u64, 1..20_u64, 0..40_u64);
        let range = first.prop_map(|(base, len, count, gap)| {
            Range(1200 + 4 * base, 4 * len, vec![(count, 4 * (len + gap))])
        });
        prop::collection::vec(range, 1..4)
    }

    proptest! {
        #[test]
        fn earlier_bytes_are_read(
            ranges in ranges(),
            steps in prop::collection::vec(prop::collection::vec((0..LEN, any::<u8>()), 0..20), 1..5),
            dense in any::<bool>(),
        ) {
            let mut versions = vec![(0..LEN).map(|at| low_byte(at / 7)).collect::<Vec<u8>>()];
            for (number, step) in steps.into_iter().enumerate() {
                let mut next = versions[number].clone();
                for (at, byte) in step {
                    next[at] = byte;
                }
                if dense && number == 1 {
                    next[9203..9205].fill(low_byte(number));
                }
                versions.push(next);
            }
            let history = history_of(&versions);
            let last = to_u64(versions.len()) - 1;
            let raw = bytes_of(versions.last().unwrap(), &ranges);
            for (number, version) in (0..last).zip(&versions) {
                let found = history.read(&name(last), &name(number), &ranges, &raw);
                if sorted_runs(&ranges).is_some() {
                    prop_assert_eq!(found, Some(bytes_of(version, &ranges)));
                } else {
                    prop_assert_eq!(found, None);
                }
            }
        }
    }

    /// A later archive that is still in memory may be in the middle of the chain.
    #[test]
    fn stored_versions_shorten_the_chain() {
        let mut versions = vec![vec![7_u8; LEN]; 3];
        versions[1][2000] = 8;
        versions[2][2004] = 9;
        let history = history_of(&versions[..2]);
        store(&history.pool, 2, &versions[2]);
        let ranges = [Range::contiguous(1200, 8000)];
        let raw = bytes_of(&versions[2], &ranges);
        let found = history.read(&name(2), &name(0), &ranges, &raw).unwrap();
        assert_eq!(found, bytes_of(&versions[0], &ranges));
        assert_eq!(history.read(&name(2), &name(7), &ranges, &raw), None);
        // A range that begins or ends in the middle of a changed element is not read.
        let ranges = [Range::contiguous(1200, 802)];
        let raw = bytes_of(&versions[2], &ranges);
        assert_eq!(history.read(&name(2), &name(0), &ranges, &raw), None);
    }

    #[test]
    fn oldest_differences_are_forgotten_first() {
        let noise = |seed: usize| (0..LEN).map(move |at| low_byte((at * seed) >> 3)).collect();
        let mut versions: Vec<Vec<u8>> = vec![noise(3)];
        for number in 1..8 {
            let mut next = versions[number - 1].clone();
            for byte in next.iter_mut().skip(1200).step_by(100) {
                *byte = byte.wrapping_mul(7).wrapping_add(3);
            }
            versions.push(next);
        }
        let history = history_of(&versions);
        assert!(
            (1..=to_u64(LEN) / SHARE_DIVISOR).contains(&history.bytes()),
            "{}",
            history.bytes()
        );
        let ranges = [Range::contiguous(1200, 8000)];
        let raw = bytes_of(&versions[7], &ranges);
        let read = |number| history.read(&name(7), &name(number), &ranges, &raw);
        assert_eq!(read(6), Some(bytes_of(&versions[6], &ranges)));
        assert_eq!(read(0), None);
        // Too much has changed: nothing is kept.
        let history = history_of(&[noise(3), noise(5)]);
        assert_eq!(history.bytes(), 0);
        history.forget(&format!("{KEY}/"));
        assert!(!history.is_requested(&name(0)));
    }
}
