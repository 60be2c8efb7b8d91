//! One visible version, open for reading.

mod contents;

use std::any::Any;
use std::collections::BTreeSet;
use std::collections::btree_map::{self, BTreeMap};
use std::ops::{Deref, Range};
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use tssd_format::{Blob, Error as FormatError, RangeDecoder, Runs, StorageReference, copy, zeroed};

use crate::blob::{Archived, Boxed, Far, Holder, Proof, Proving};
use crate::control::Located;
use crate::error::{Error, ErrorKind, Result};
use crate::io::cow_map::{Held, Private};
use crate::io::local_archive::Near;
use crate::plan::Copy;
use crate::route::Route;

pub use self::contents::VERSION_ATTRS;
pub(crate) use self::contents::{Contents, Tally};

/// Archives of fewer bytes are sooner copied than mapped.
const PRIVATE_MIN: u64 = 256 << 10;

/// A version whose bytes are there: it stays readable whatever the ledger does.
#[derive(Clone)]
pub(crate) struct OpenVersion {
    contents: Arc<Contents>,
    /// Its archives, in the order of the manifest.
    archives: Arc<[Archived]>,
    /// Those that are in memory as they are, with the lease: what its views are parts of.
    leased: Arc<[OnceLock<Option<Bytes>>]>,
    lease: Arc<dyn Any + Send + Sync>,
    route: Route,
    /// Of the get that it is opened for.
    span: tracing::Span,
}

impl OpenVersion {
    /// Opens a version that was located. What is known of it already is not read again.
    pub(crate) fn open(located: Located, known: Option<Arc<Contents>>) -> Result<Self> {
        let known = known.filter(|known| known.id == located.id);
        let is_known = known.is_some();
        let contents = match known {
            Some(known) => known,
            None => Arc::new(Contents::read(&located)?),
        };
        let mut archives = Vec::with_capacity(located.archives.len());
        for shard in contents.manifest.shards() {
            let archive = located.archives.get(&shard.name).ok_or_else(|| {
                let name = &shard.name;
                Error::new(
                    ErrorKind::Corrupt,
                    format_args!("{}: `{name}` is gone", contents.name()),
                )
            })?;
            if !is_known {
                shard
                    .verify(&archive.to_blob())
                    .map_err(|error| Error::format(contents.name(), error))?;
            }
            archives.push(archive.clone());
        }
        let span = tracing::Span::current();
        Ok(Self {
            contents,
            leased: archives.iter().map(|_| OnceLock::new()).collect(),
            archives: archives.into(),
            lease: located.lease,
            route: located.route,
            span,
        })
    }

    /// What is said of reads from it is said in this.
    pub(crate) fn span(&self) -> &tracing::Span {
        &self.span
    }

    /// How its bytes come.
    pub(crate) fn route(&self) -> &Route {
        &self.route
    }

    /// What is known of it.
    pub(crate) fn contents(&self) -> &Arc<Contents> {
        &self.contents
    }

    /// Whoever holds its archives, as far as they are elsewhere.
    pub(crate) fn holder(&self) -> Option<&Arc<dyn Holder>> {
        self.archives.iter().find_map(|archive| archive.far().map(|far| &far.holder))
    }

    fn archive(&self, reference: &StorageReference) -> &Archived {
        &self.archives[native(u64::from(reference.shard))]
    }

    /// The archive that has the raw bytes of a storage, and where in it they begin; none if they are compressed.
    pub(crate) fn raw(&self, storage: u32) -> Option<(&dyn Blob, u64)> {
        let reference = self.stored(storage);
        let is_raw = reference.compressed_layout.is_none();
        is_raw.then(|| (self.archive(reference).blob(), reference.offset))
    }

    /// Whoever holds a storage elsewhere, if it is raw: then boxes of it can be had alone.
    pub(crate) fn far(&self, storage: u32) -> Option<&Far> {
        let reference = self.stored(storage);
        self.archive(reference).far().filter(|_| reference.compressed_layout.is_none())
    }

    /// The boxes of raw bytes that a copy from a storage elsewhere is made of: whole chunks are proven by
    /// whoever gets them, parts of chunks by the holder.
    pub(crate) fn boxes(&self, far: &Far, copy: &Copy, unverified: bool, boxes: &mut Vec<Boxed>) {
        let reference = self.stored(copy.storage);
        let boxed = |source: u64, target: u64, runs: Runs, proof: Proof| Boxed {
            blob: far.blob.clone(),
            source: reference.offset + source,
            target,
            runs,
            proof: if unverified { Proof::None } else { proof },
        };
        let part = || Proof::Part(reference.clone());
        if !copy.runs.loops().is_empty() {
            boxes.push(boxed(copy.source, copy.target, copy.runs.clone(), part()));
            return;
        }
        let range = copy.source..copy.source + copy.runs.run_bytes();
        let whole = reference.whole_chunks(&range);
        for (wanted, proof) in [
            (range.start..whole.start, part()),
            (whole.clone(), Proof::Whole(reference.clone())),
            (whole.end..range.end, part()),
        ] {
            let (target, len) =
                (copy.target + (wanted.start - range.start), wanted.end - wanted.start);
            if len > 0 {
                boxes.push(boxed(wanted.start, target, Runs::contiguous(len), proof));
            }
        }
    }

    /// The archives that storages are in, by the names that the manifest gives them.
    pub(crate) fn archives_of(&self, storages: impl Iterator<Item = u32>) -> BTreeSet<String> {
        let shards: BTreeSet<u32> = storages.map(|storage| self.stored(storage).shard).collect();
        let files = self.manifest.shards();
        shards.into_iter().map(|shard| files[native(u64::from(shard))].name.clone()).collect()
    }

    /// As [`OpenVersion::bytes`]; they hold the version's lease as long as they are there.
    pub(crate) fn view(&self, storage: u32, range: Range<u64>, unverified: bool) -> Result<Bytes> {
        let reference = self.stored(storage);
        let leased = self.leased(reference).filter(|_| reference.compressed_layout.is_none());
        let Some(leased) = leased else {
            let bytes = self.bytes(storage, range, unverified)?;
            // What came from the memory of a GPU is a copy, which needs no lease.
            let is_copy = !self.archive(reference).is_summed();
            return Ok(if is_copy { bytes } else { self.with_lease(bytes) });
        };
        if !unverified {
            self.prove_chunks(storage, reference.chunks(&range))?;
        }
        let (start, end) = (reference.offset + range.start, reference.offset + range.end);
        Ok(leased.slice(native(start)..native(end)))
    }

    fn leased(&self, reference: &StorageReference) -> Option<&Bytes> {
        let leased =
            || self.archive(reference).blob().bytes().cloned().map(|all| self.with_lease(all));
        self.leased[native(u64::from(reference.shard))].get_or_init(leased).as_ref()
    }

    fn with_lease(&self, bytes: Bytes) -> Bytes {
        Bytes::from_owner(View { bytes, _lease: self.lease.clone() })
    }

    /// Storages in memory of one reader alone; none for those that are compressed, elsewhere, or in no file.
    pub(crate) fn private(&self, storages: &[u32]) -> Result<Vec<Option<Private>>> {
        let mut maps: BTreeMap<u32, Option<(Arc<Held>, u64)>> = BTreeMap::new();
        let mut private = Vec::with_capacity(storages.len());
        for storage in storages {
            let reference = self.stored(*storage);
            let map = match maps.entry(reference.shard) {
                btree_map::Entry::Occupied(known) => known.into_mut(),
                btree_map::Entry::Vacant(unknown) => unknown.insert(self.lent(reference.shard)?),
            };
            private.push(map.as_ref().filter(|_| reference.compressed_layout.is_none()).and_then(
                |(map, start)| {
                    let range = reference.offset..reference.offset + reference.len;
                    map.range(native(start + range.start)..native(start + range.end))
                },
            ));
        }
        Ok(private)
    }

    /// An archive in memory of one reader alone, and the byte of the memory that it begins at.
    fn lent(&self, shard: u32) -> Result<Option<(Arc<Held>, u64)>> {
        let archive = &self.archives[native(u64::from(shard))];
        let is_worth_it =
            |near: &&Near| near.blob.bytes().is_some_and(|bytes| wide(bytes.len()) >= PRIVATE_MIN);
        let near = archive.near().filter(is_worth_it);
        let Some((near, (maps, start))) = near.and_then(|near| Some((near, near.maps.as_ref()?)))
        else {
            return Ok(None);
        };
        let lent = maps.lend().map_err(|error| Error::io(self.name(), error))?;
        let lease = (near.blob.clone(), self.lease.clone());
        Ok(Some((Held::new(lent, lease), *start)))
    }

    /// Raw bytes of a storage, proven unless `unverified`: a view where they are in memory as they are.
    pub(crate) fn bytes(&self, storage: u32, range: Range<u64>, unverified: bool) -> Result<Bytes> {
        let reference = self.stored(storage);
        let blob = self.archive(reference).blob();
        let chunks = reference.chunks(&range);
        let failed = |error: FormatError| Error::format(self.name(), error);
        if reference.compressed_layout.is_some() {
            let mut unpack = RangeDecoder::new(reference, range).map_err(failed)?;
            for chunk in chunks {
                let stored = self.proven(storage, chunk)?;
                let added = unpack.add_chunk(chunk, &stored);
                added
                    .map_err(|error| failed(error.with_path(self.manifest.storage_fqn(storage))))?;
            }
            return Ok(unpack.finish());
        }
        if let Some(mapped) = blob.bytes() {
            if !unverified {
                self.prove_chunks(storage, chunks)?;
            }
            return Ok(mapped.slice(
                native(reference.offset + range.start)..native(reference.offset + range.end),
            ));
        }
        // Whole chunks are read, because only they can be proven.
        let (first, last) =
            (reference.chunk(chunks.start).start, reference.chunk(chunks.end).start);
        let mut read = zeroed(native(last - first)).map_err(failed)?;
        blob.read_exact_at(&mut read, reference.offset + first)
            .map_err(|error| Error::io(self.name(), error))?;
        if self.archive(reference).is_summed() {
            for (chunk, bytes) in chunks.zip(read.chunks(native(reference.chunk_size.bytes()))) {
                self.prove(storage, chunk, bytes)?;
            }
        }
        Ok(Bytes::from(read).slice(native(range.start - first)..native(range.end - first)))
    }

    /// Raw bytes of a storage of which runs are to be copied.
    pub(crate) fn window(
        &self,
        storage: u32,
        range: Range<u64>,
        unverified: bool,
    ) -> Result<Window<'_>> {
        let reference = self.stored(storage);
        let start = range.start;
        let mapped = self.archive(reference).blob().bytes();
        let in_place = reference.compressed_layout.is_none() && mapped.is_some();
        let bytes = self.bytes(storage, range.clone(), unverified || in_place)?;
        // What was read or decoded is proven.
        let proven = if in_place && !unverified { 0..0 } else { range };
        Ok(Window { version: self, storage, start, bytes, proven })
    }

    /// Copies raw bytes of a storage, proven unless `unverified`. Chunks that lie in memory, and in the
    /// range as a whole, are proven on the way: what is in `target` after an error is not proven.
    pub(crate) fn copy(
        &self,
        storage: u32,
        range: Range<u64>,
        target: &mut [u8],
        unverified: bool,
    ) -> Result<()> {
        let (reference, verified) = (self.stored(storage), self.proven_chunks(storage));
        let blob = self.archive(reference).blob();
        let mapped = blob.bytes().filter(|_| reference.compressed_layout.is_none());
        let Some(mapped) = mapped else {
            target.copy_from_slice(&self.bytes(storage, range, unverified)?);
            return Ok(());
        };
        let place = |at: u64| native(reference.offset + at);
        if unverified {
            copy(&mapped[place(range.start)..place(range.end)], target);
            return Ok(());
        }
        let chunks = reference.chunks(&range);
        let whole = reference.whole_chunks(&range);
        // What is proven on the way: not what is proven already, or of which the range has a part.
        let is_open = |chunk: u64| {
            let place = reference.chunk(chunk);
            let is_whole = whole.start <= place.start && place.end <= whole.end;
            is_whole && !verified[native(chunk)].load(Ordering::Relaxed)
        };
        let (mut rest, mut next) = (target, chunks.start);
        while next < chunks.end {
            let (first, is_open_first) = (next, is_open(next));
            next = (first + 1..chunks.end)
                .find(|it| is_open(*it) != is_open_first)
                .unwrap_or(chunks.end);
            let [start, end] = [reference.chunk(first).start, reference.chunk(next - 1).end]
                .map(|at| at.clamp(range.start, range.end));
            let (target, tail) = rest.split_at_mut(native(end - start));
            rest = tail;
            let source = &mapped[place(start)..place(end)];
            if !is_open_first {
                self.prove_chunks(storage, first..next)?;
                copy(source, target);
                continue;
            }
            let mut proving = Proving::new(reference, start);
            proving.copy(source, target);
            self.count(Tally { verified: end - start, received: 0 });
            proving.finish().map_err(|chunk| self.corrupt(storage, chunk))?;
            verified[native(first)..native(next)]
                .iter()
                .for_each(|known| known.store(true, Ordering::Relaxed));
        }
        Ok(())
    }

    fn prove_chunks(&self, storage: u32, mut chunks: Range<u64>) -> Result<()> {
        chunks.try_for_each(|chunk| self.proven(storage, chunk).map(drop))
    }

    /// The stored bytes of a chunk. Those that are in memory are proven once.
    fn proven(&self, storage: u32, chunk: u64) -> Result<Bytes> {
        let (reference, verified) = (self.stored(storage), self.proven_chunks(storage));
        let blob = self.archive(reference).blob();
        let place = reference.stored_chunk(chunk);
        if let Some(mapped) = blob.bytes() {
            let stored = mapped.slice(native(place.start)..native(place.end));
            let known = &verified[native(chunk)];
            if !known.load(Ordering::Relaxed) {
                self.prove(storage, chunk, &stored)?;
                known.store(true, Ordering::Relaxed);
            }
            return Ok(stored);
        }
        let mut stored = vec![0; native(place.end - place.start)];
        blob.read_exact_at(&mut stored, place.start)
            .map_err(|error| Error::io(self.name(), error))?;
        if self.archive(reference).is_summed() {
            self.prove(storage, chunk, &stored)?;
        }
        Ok(stored.into())
    }
}

/// Bytes of a storage, each chunk proven before a run first touches it: the cache has it then, for the copy.
pub(crate) struct Window<'a> {
    version: &'a OpenVersion,
    storage: u32,
    /// Where the bytes begin in the storage.
    start: u64,
    pub(crate) bytes: Bytes,
    /// What needs no proof any more, of the storage.
    proven: Range<u64>,
}

impl Window<'_> {
    /// Proves the chunks that a range of its bytes lies in.
    pub(crate) fn prove(&mut self, range: &Range<u64>) -> Result<()> {
        let wanted = self.start + range.start..self.start + range.end;
        if wanted.start >= self.proven.start && wanted.end <= self.proven.end {
            return Ok(());
        }
        let reference = self.version.stored(self.storage);
        let chunks = reference.chunks(&wanted);
        self.version.prove_chunks(self.storage, chunks.clone())?;
        if !chunks.is_empty() {
            self.proven = reference.chunk(chunks.start).start..reference.chunk(chunks.end - 1).end;
        }
        Ok(())
    }
}

/// Bytes that a reader sees, and what holds them.
struct View {
    bytes: Bytes,
    _lease: Arc<dyn Any + Send + Sync>,
}

impl AsRef<[u8]> for View {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Deref for OpenVersion {
    type Target = Contents;

    fn deref(&self) -> &Contents {
        &self.contents
    }
}

/// Places in what is in memory, or within the length of a file that was compared.
fn native(place: u64) -> usize {
    usize::try_from(place).expect("a place in memory fits usize")
}

fn wide(len: usize) -> u64 {
    u64::try_from(len).expect("usize is at most 64 bits")
}
