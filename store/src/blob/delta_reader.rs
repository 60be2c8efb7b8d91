//! Reads archives that are stored as deltas. Their readers see the whole archives.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use tssd_format::{ChunkDecoder, DeltaDecoder, Runs};

use crate::blob::requests::{Request, RequestPlan};
use crate::blob::{OpenArchive, RangeCopy, RangeJob, RangeReader, RemoteArchive, VerifyMode};
use crate::convert::{to_u64, to_usize};
use crate::delta::parts::Form;
use crate::delta::runs::{self, PartDelta, Run};
use crate::delta::stored::{StoredDelta, StoredPart};
use crate::error::{Error, ErrorKind, Result};
use crate::io::cancel::CancelToken;
use crate::io::parallel;
use crate::io::sync::Lock;

/// Maximum bytes of an element.
const MAX_WIDTH: u64 = 4;

/// Requests for bytes of archives that are made at the same time.
const WINDOW: usize = 16;

/// Maximum bytes of the parts of all deltas of a version that are kept for later reads (256 MiB).
const MAX_KEPT_BYTES: usize = 256 << 20;

/// Opens archives. Those that are stored as deltas read as whole archives. Returns `None` if one of them does not exist.
///
/// `open` opens blobs as they are stored. It returns `None` for each blob that does not exist.
///
/// # Errors
///
/// `Overtaken` if an archive was deleted from which another one is computed; `Corrupt` if a delta is damaged; the errors
/// of `open`.
pub(crate) fn open_resolved(
    names: &[String],
    open: impl Fn(&[String]) -> Result<Vec<Option<OpenArchive>>>,
) -> Result<Option<Vec<OpenArchive>>> {
    let stored: Option<Vec<OpenArchive>> = open(names)?.into_iter().collect();
    stored.map(|stored| resolve(names, stored, open)).transpose()
}

/// Replaces archives that are stored as deltas by readers of the whole archives.
fn resolve(
    names: &[String],
    stored: Vec<OpenArchive>,
    open: impl Fn(&[String]) -> Result<Vec<Option<OpenArchive>>>,
) -> Result<Vec<OpenArchive>> {
    let mut deltas = BTreeMap::new();
    for (name, archive) in names.iter().zip(&stored) {
        if let Some(delta) = StoredDelta::read(name, archive.blob())? {
            deltas.insert(name.clone(), delta);
        }
    }
    if deltas.is_empty() {
        return Ok(stored);
    }
    let bases: BTreeSet<String> = deltas.values().flat_map(|it| it.bases.clone()).collect();
    let bases: Vec<String> = bases.into_iter().collect();
    let bases: BTreeMap<String, Option<OpenArchive>> =
        bases.iter().cloned().zip(open(&bases)?).collect();
    let (mut chains, kept_bytes) = (BTreeMap::new(), Arc::default());
    for (name, archive) in names.iter().zip(&stored) {
        if let Some(delta) = deltas.remove(name) {
            let find = |base: &str| bases.get(base).and_then(Clone::clone);
            let chain = Chain::new(name, archive.clone(), delta, &find, &kept_bytes)?;
            chains.insert(Arc::from(name.as_str()), chain);
        }
    }
    let inner = stored.iter().chain(bases.values().flatten()).find_map(OpenArchive::remote);
    let inner = inner.map(|remote| remote.reader.clone());
    let lens: Vec<Option<u64>> =
        names.iter().map(|name| Some(chains.get(name.as_str())?.len)).collect();
    let reader: Arc<dyn RangeReader> = Arc::new(DeltaReader { inner, chains });
    let resolved = names.iter().zip(stored).zip(lens).map(|((name, archive), len)| {
        match (archive, len) {
            (_, Some(len)) => {
                let (reader, blob) = (reader.clone(), name.as_str().into());
                OpenArchive::Remote(RemoteArchive { reader, blob, len, tail: None })
            }
            // All remote archives of a version have one reader.
            (OpenArchive::Remote(archive), None) => {
                OpenArchive::Remote(RemoteArchive { reader: reader.clone(), ..archive })
            }
            (local, None) => local,
        }
    });
    Ok(resolved.collect())
}

/// Reads archives, some of which are stored as deltas.
struct DeltaReader {
    /// Reads blobs as they are stored. `None` if all are local.
    inner: Option<Arc<dyn RangeReader>>,
    /// The archives that are stored as deltas, by name.
    chains: BTreeMap<Arc<str>, Chain>,
}

/// An archive that is stored as a delta, and those from which it is computed.
struct Chain {
    name: String,
    /// Length of the archive in bytes.
    len: u64,
    /// The deltas, the newest first.
    links: Vec<Link>,
    /// The archive that is stored whole.
    anchor: OpenArchive,
}

/// A delta of a chain.
struct Link {
    archive: OpenArchive,
    delta: StoredDelta,
    /// Parts that were read, and their bytes: neighbouring reads need the same parts.
    kept: Lock<BTreeMap<usize, Bytes>>,
    /// Bytes of the kept parts of all links of the version.
    kept_bytes: Arc<AtomicUsize>,
}

/// Stored bytes to read.
struct StoredRange<'c> {
    archive: &'c OpenArchive,
    range: Range<u64>,
}

/// The stored bytes of a range of an archive, and how to compute it.
struct ChainRead<'c> {
    chain: &'c Chain,
    range: Range<u64>,
    /// Whether bytes of the anchor are needed.
    needs_anchor: bool,
    /// For each needed link, the newest first, the parts and their bytes.
    links: Vec<(&'c Link, BTreeMap<usize, Bytes>)>,
}

impl Chain {
    fn new(
        name: &str,
        archive: OpenArchive,
        delta: StoredDelta,
        open: &dyn Fn(&str) -> Option<OpenArchive>,
        kept_bytes: &Arc<AtomicUsize>,
    ) -> Result<Self> {
        let corrupt = |base: &str| {
            let text = format_args!("`{name}` is stored as a delta: `{base}` is not its base");
            Error::new(ErrorKind::Corrupt, text)
        };
        let (names, len) = (delta.bases.clone(), delta.raw_len);
        let mut links = vec![Link::new(archive, delta, kept_bytes)];
        for (number, base) in names.iter().enumerate() {
            let archive = open(base).ok_or_else(|| {
                let text = format_args!(
                    "`{name}` is stored as a delta, and its base `{base}` was deleted: read the newest version"
                );
                Error::new(ErrorKind::Overtaken, text)
            })?;
            let rest = &names[number + 1..];
            match StoredDelta::read(base, archive.blob())? {
                None if rest.is_empty() => {
                    let size = archive.blob().size().map_err(|error| Error::io(base, error))?;
                    if size != len {
                        return Err(corrupt(base));
                    }
                    return Ok(Self { name: name.to_owned(), len, links, anchor: archive });
                }
                Some(delta) if delta.bases == rest && delta.raw_len == len => {
                    links.push(Link::new(archive, delta, kept_bytes));
                }
                _ => return Err(corrupt(base)),
            }
        }
        Err(corrupt(names.last().map_or("", String::as_str)))
    }

    /// Returns a range with whole elements that contains another one.
    ///
    /// The offsets of all elements of several bytes are multiples of their width.
    fn align(&self, range: &Range<u64>) -> Range<u64> {
        let start = range.start - range.start % MAX_WIDTH;
        start..range.end.next_multiple_of(MAX_WIDTH).min(self.len)
    }
}

impl Link {
    fn new(archive: OpenArchive, delta: StoredDelta, kept_bytes: &Arc<AtomicUsize>) -> Self {
        Self { archive, delta, kept: Lock::default(), kept_bytes: kept_bytes.clone() }
    }

    fn keep(&self, number: usize, bytes: &Bytes) {
        if self.archive.local().is_some() {
            return;
        }
        let mut parts = self.kept.lock();
        if self.kept_bytes.load(Ordering::Relaxed) + bytes.len() > MAX_KEPT_BYTES {
            let freed: usize = parts.values().map(Bytes::len).sum();
            parts.clear();
            self.kept_bytes.fetch_sub(freed, Ordering::Relaxed);
        }
        if parts.insert(number, bytes.clone()).is_none() {
            self.kept_bytes.fetch_add(bytes.len(), Ordering::Relaxed);
        }
    }
}

impl<'c> ChainRead<'c> {
    /// Finds what is needed for a range, and what of it is kept already.
    fn plan(chain: &'c Chain, range: Range<u64>) -> Self {
        let (mut links, mut needs_anchor) = (Vec::new(), true);
        for link in &chain.links {
            let numbers = link.delta.parts_in(&range);
            let kept = link.kept.lock();
            let found =
                numbers.clone().filter_map(|number| Some((number, kept.get(&number)?.clone())));
            links.push((link, found.collect()));
            let is_difference = |part: &StoredPart| part.entry.form == Form::Difference;
            if !link.delta.parts[numbers].iter().any(is_difference) {
                // The delta has all bytes itself.
                needs_anchor = false;
                break;
            }
        }
        Self { chain, range, needs_anchor, links }
    }

    /// Returns the stored bytes to read: of the anchor, then of each link the parts that are not kept.
    fn missing(&self) -> Vec<StoredRange<'c>> {
        let anchor = StoredRange { archive: &self.chain.anchor, range: self.range.clone() };
        let mut missing = Vec::from_iter(Some(anchor).filter(|_| self.needs_anchor));
        for (link, parts) in &self.links {
            let numbers = link.delta.parts_in(&self.range);
            let numbers = numbers.filter(|number| !parts.contains_key(number));
            for number in numbers {
                let stored = link.delta.parts[number].stored.clone();
                match missing.last_mut() {
                    Some(last)
                        if std::ptr::eq(last.archive, &raw const link.archive)
                            && last.range.end == stored.start =>
                    {
                        last.range.end = stored.end;
                    }
                    _ => missing.push(StoredRange { archive: &link.archive, range: stored }),
                }
            }
        }
        missing
    }

    /// Computes the bytes of the range from those that [`ChainRead::missing`] has returned.
    fn compute(mut self, read: Vec<Bytes>) -> Result<Vec<u8>> {
        let (mut read, mut rest) = (read.into_iter(), Bytes::new());
        let mut buffer = match read.next() {
            Some(anchor) if self.needs_anchor => anchor.to_vec(),
            first => {
                rest = first.unwrap_or_default();
                vec![0; to_usize(self.range.end - self.range.start)]
            }
        };
        for (link, parts) in &mut self.links {
            for number in link.delta.parts_in(&self.range) {
                if parts.contains_key(&number) {
                    continue;
                }
                let part = &link.delta.parts[number];
                if rest.is_empty() {
                    rest = read.next().expect("as many as were requested");
                }
                let bytes = rest.split_to(to_usize(part.stored.end - part.stored.start));
                link.keep(number, &bytes);
                parts.insert(number, bytes);
            }
        }
        let failed = |error: tssd_format::Error| {
            let text = format_args!("`{}` is stored as a delta: {error}", self.chain.name);
            Error::new(ErrorKind::Corrupt, text)
        };
        let mut deltas = DeltaDecoder::new().map_err(failed)?;
        let mut chunks = ChunkDecoder::new().map_err(failed)?;
        for (link, parts) in self.links.iter().rev() {
            for (number, stored) in parts {
                let StoredPart { raw, entry, .. } = &link.delta.parts[*number];
                let common = raw.start.max(self.range.start)..raw.end.min(self.range.end);
                let within = |range: &Range<u64>, start: u64| {
                    to_usize(range.start - start)..to_usize(range.end - start)
                };
                let target = within(&common, self.range.start);
                if entry.form != Form::Difference {
                    let mut part = vec![0; entry.raw_len];
                    chunks.decode(entry.codec(), stored, None, &mut part).map_err(failed)?;
                    buffer[target].copy_from_slice(&part[within(&common, raw.start)]);
                } else if common == *raw {
                    deltas.apply(stored, entry.width, &mut buffer[target]).map_err(failed)?;
                } else {
                    let run = Run { bytes: self.range.clone(), at: 0 };
                    let part = PartDelta { bytes: raw, width: entry.width, chunk: stored };
                    let applied = runs::apply(&mut deltas, &part, &[run], &mut buffer);
                    if !applied.map_err(failed)? {
                        let text =
                            format_args!("`{}`: a read of a part of an element", self.chain.name);
                        return Err(Error::new(ErrorKind::Invalid, text));
                    }
                }
            }
        }
        Ok(buffer)
    }
}

impl DeltaReader {
    /// Reads ranges of archives that are stored as deltas. Returns their bytes, and how many bytes were received.
    fn read<'c>(
        &self,
        ranges: &[(&'c Chain, Range<u64>)],
        stop: &CancelToken,
    ) -> Result<(Vec<Bytes>, u64)> {
        let plan =
            |(chain, range): &(&'c Chain, Range<u64>)| ChainRead::plan(chain, chain.align(range));
        let plans: Vec<ChainRead<'_>> = ranges.iter().map(plan).collect();
        let missing: Vec<Vec<StoredRange<'_>>> = plans.iter().map(ChainRead::missing).collect();
        let (mut read, received) = self.read_stored(missing.iter().flatten(), stop)?;
        let mut results = Vec::with_capacity(plans.len());
        for ((plan, missing), (_, range)) in plans.into_iter().zip(&missing).zip(ranges) {
            let rest = read.split_off(missing.len());
            let start = plan.range.start;
            let computed = Bytes::from(plan.compute(std::mem::replace(&mut read, rest))?);
            results
                .push(computed.slice(to_usize(range.start - start)..to_usize(range.end - start)));
        }
        Ok((results, received))
    }

    /// Reads stored bytes of archives. Returns how many bytes were received too.
    fn read_stored<'c>(
        &self,
        ranges: impl Iterator<Item = &'c StoredRange<'c>>,
        stop: &CancelToken,
    ) -> Result<(Vec<Bytes>, u64)> {
        let (mut read, mut remote) = (Vec::new(), Vec::new());
        for (number, StoredRange { archive, range }) in ranges.enumerate() {
            let len = to_usize(range.end - range.start);
            let bytes = match archive {
                OpenArchive::Local(local) => {
                    if let Some(bytes) = local.blob.bytes() {
                        bytes.slice(to_usize(range.start)..to_usize(range.end))
                    } else {
                        let mut bytes = vec![0; len];
                        let read = local.blob.read_exact_at(&mut bytes, range.start);
                        read.map_err(|error| Error::io("archive", error))?;
                        bytes.into()
                    }
                }
                OpenArchive::Remote(archive) => {
                    archive.tail(len, range.start).unwrap_or_else(|| {
                        remote.push((number, archive.blob.clone(), range.start, vec![0; len]));
                        Bytes::new()
                    })
                }
            };
            read.push(bytes);
        }
        let Some(inner) = self.inner.as_ref().filter(|_| !remote.is_empty()) else {
            return Ok((read, 0));
        };
        let jobs = remote.iter_mut().map(|(_, blob, source, bytes)| {
            let (runs, verify) = (Runs::contiguous(to_u64(bytes.len())), VerifyMode::Skip);
            let copy = RangeCopy { blob: blob.clone(), source: *source, target: 0, runs, verify };
            RangeJob { target: bytes, copies: vec![copy] }
        });
        let received = inner.read_ranges(jobs.collect(), stop)?;
        for (number, _, _, bytes) in remote {
            read[number] = bytes.into();
        }
        Ok((read, received))
    }

    fn chain(&self, blob: &str) -> Option<&Chain> {
        self.chains.get(blob)
    }
}

impl RangeReader for DeltaReader {
    fn read_ranges(&self, jobs: Vec<RangeJob<'_>>, stop: &CancelToken) -> Result<u64> {
        let mut jobs = jobs;
        let mut whole = Vec::new();
        for job in &mut jobs {
            let copies = std::mem::take(&mut job.copies).into_iter();
            let (stored_as_delta, copies) =
                copies.partition(|copy| self.chain(&copy.blob).is_some());
            job.copies = stored_as_delta;
            whole.push(RangeJob { target: &mut *job.target, copies });
        }
        whole.retain(|job| !job.copies.is_empty());
        let received = match &self.inner {
            Some(inner) if !whole.is_empty() => inner.read_ranges(whole, stop)?,
            _ => 0,
        };
        let plan = RequestPlan::new(jobs);
        let links = self.chains.values().map(|chain| chain.links.len()).max().unwrap_or(0);
        let batches = plan.requests.chunks((WINDOW / (1 + links)).max(1)).collect();
        let read = |batch: &[Request]| {
            stop.check()?;
            let ranges = batch.iter().map(|request| {
                let chain = self.chain(&request.blob).expect("others are read whole");
                (chain, request.range.clone())
            });
            let (read, received) = self.read(&ranges.collect::<Vec<_>>(), stop)?;
            for (request, bytes) in batch.iter().zip(&read) {
                plan.scatter(request, bytes, str::to_owned)?;
            }
            Ok::<_, Error>(received)
        };
        let read = parallel::map(batches, read)?;
        Ok(read.into_iter().fold(received, u64::saturating_add))
    }

    fn read_exact_at(&self, blob: &str, target: &mut [u8], offset: u64) -> io::Result<()> {
        let Some(chain) = self.chain(blob) else {
            let inner = self.inner.as_ref().ok_or(io::ErrorKind::NotFound)?;
            return inner.read_exact_at(blob, target, offset);
        };
        let end = offset.checked_add(to_u64(target.len())).filter(|end| *end <= chain.len);
        end.ok_or(io::ErrorKind::UnexpectedEof)?;
        let runs = Runs::contiguous(to_u64(target.len()));
        let (blob, verify) = (blob.into(), VerifyMode::Skip);
        let copies = vec![RangeCopy { blob, source: offset, target: 0, runs, verify }];
        let read = self.read_ranges(vec![RangeJob { target, copies }], &CancelToken::default());
        read.map(drop).map_err(io::Error::other)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::delta::layout::tests::layout;
    use crate::io::local_archive::LocalArchive;

    const LEN: usize = 10_000;

    fn local(bytes: Vec<u8>) -> OpenArchive {
        OpenArchive::Local(LocalArchive::new(Bytes::from(bytes)))
    }

    /// Returns the archives of versions as they are stored: the first one whole, the others as deltas.
    fn stored(versions: &[Vec<u8>]) -> Vec<(String, Vec<u8>)> {
        let mut stored = vec![("0".to_owned(), versions[0].clone())];
        for (number, pair) in versions.windows(2).enumerate() {
            let names: Vec<String> = (0..=number).rev().map(|base| base.to_string()).collect();
            let base = |range: Range<u64>| {
                Some(Bytes::copy_from_slice(&pair[0][to_usize(range.start)..to_usize(range.end)]))
            };
            let delta = StoredDelta::encode(&layout(), &pair[1], base, &names, u64::MAX);
            stored.push(((number + 1).to_string(), delta.unwrap().unwrap()));
        }
        stored
    }

    /// Opens the last one of stored archives.
    fn open_last(stored: &[(String, Vec<u8>)]) -> Result<OpenArchive> {
        let (name, _) = stored.last().unwrap();
        let open = |names: &[String]| {
            let open = |name: &String| {
                let found = stored.iter().find(|(stored, _)| stored == name);
                found.map(|(_, bytes)| local(bytes.clone()))
            };
            Ok(names.iter().map(open).collect())
        };
        let names = [name.clone()];
        Ok(open_resolved(&names, open)?.unwrap().remove(0))
    }

    fn read(archive: &OpenArchive, range: Range<usize>) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; range.len()];
        archive.blob().read_exact_at(&mut bytes, to_u64(range.start))?;
        Ok(bytes)
    }

    fn versions() -> impl Strategy<Value = Vec<Vec<u8>>> {
        let change = (0..LEN, 1..40_usize, any::<u8>());
        let steps = prop::collection::vec(prop::collection::vec(change, 0..20), 1..5);
        steps.prop_map(|steps| {
            let first: Vec<u8> = (0..LEN).map(|at| u8::try_from(at / 7 % 256).unwrap()).collect();
            let mut versions = vec![first];
            for step in steps {
                let mut next = versions[versions.len() - 1].clone();
                for (at, len, byte) in step {
                    for target in &mut next[at..LEN.min(at + len)] {
                        *target = target.wrapping_mul(5).wrapping_add(byte);
                    }
                }
                versions.push(next);
            }
            versions
        })
    }

    proptest! {
        #[test]
        fn deltas_read_as_whole_archives(
            versions in versions(),
            ranges in prop::collection::vec((0..LEN, 1..3000_usize), 1..8),
        ) {
            let stored = stored(&versions);
            let last = &versions[versions.len() - 1];
            let archive = open_last(&stored).unwrap();
            prop_assert_eq!(archive.blob().size().unwrap(), to_u64(LEN));
            for (start, len) in ranges {
                let range = start..LEN.min(start + len);
                prop_assert_eq!(&read(&archive, range.clone()).unwrap(), &last[range]);
            }
            prop_assert_eq!(&read(&archive, 0..LEN).unwrap(), last);
            prop_assert!(read(&archive, LEN - 1..LEN + 1).is_err());
        }

        /// Bytes from a bucket never panic, and no damage of the index is overlooked.
        #[test]
        fn damaged_deltas_never_panic(
            versions in versions(),
            at in any::<prop::sample::Index>(),
            byte in 1..255_u8,
            cut in any::<prop::sample::Index>(),
        ) {
            let mut stored = stored(&versions);
            let intact = stored.last().unwrap().1.clone();
            let mut damaged = intact.clone();
            let at = at.index(damaged.len());
            damaged[at] ^= byte;
            stored.last_mut().unwrap().1 = damaged;
            if let Ok(archive) = open_last(&stored) {
                drop(read(&archive, 0..LEN));
            }
            stored.last_mut().unwrap().1 = intact[..cut.index(intact.len())].to_vec();
            // It does not end with the magic, so it is no delta.
            let archive = open_last(&stored).unwrap();
            prop_assert!(archive.local().is_some());
        }
    }

    #[test]
    fn chains_with_other_archives_are_refused() {
        let versions: Vec<Vec<u8>> = (0..4).map(|seed| vec![seed; LEN]).collect();
        let intact = stored(&versions);
        let kind = |stored: &[(String, Vec<u8>)]| open_last(stored).err().map(|error| error.kind());
        assert_eq!(kind(&intact), None);
        for (base, other) in [(0, 1), (1, 0), (1, 3), (2, 1), (2, 3)] {
            let mut stored = intact.clone();
            stored[base].1 = intact[other].1.clone();
            assert_eq!(kind(&stored), Some(ErrorKind::Corrupt), "{other} in the place of {base}");
        }
        let mut shorter = intact.clone();
        shorter[0].1.pop();
        assert_eq!(kind(&shorter), Some(ErrorKind::Corrupt));
        let mut missing = intact.clone();
        missing.remove(1);
        assert_eq!(kind(&missing), Some(ErrorKind::Overtaken));
    }
}
