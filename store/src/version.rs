//! One visible version, open for reading.

use std::any::Any;
use std::collections::BTreeSet;
use std::collections::btree_map::{self, BTreeMap};
use std::fmt;
use std::ops::{Deref, Range};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use bytes::Bytes;
use tssd_format::{
    Archive, AttrValue, Attrs, CHUNK_BYTES, Container, Error as FormatError,
    ErrorKind as FormatKind, Key, Node, ObjectPath, Runs, Step, StorageReference, TensorReference,
    Unpack, ZSTD_LEVEL_ATTR, copy, copy_and_checksum,
};

use crate::controller::Located;
use crate::error::{Error, ErrorKind, Result};
use crate::get::choose_writer;
use crate::ledger::{Digest, VersionId};
use crate::plan::Copy;
use crate::private::{Held, Private};
use crate::route::Route;
use crate::volume::{Archived, Boxed, Far, Holder, Near, Proof};

/// Archives of fewer bytes are sooner copied than mapped.
const PRIVATE_MIN: u64 = 256 << 10;

/// What is known of a version, without its bytes: it stays true whoever has them.
pub(crate) struct Contents {
    pub(crate) id: VersionId,
    /// What it contains.
    pub(crate) digest: Digest,
    pub(crate) epoch: u32,
    pub(crate) number: u64,
    /// The name of its layout, under which plans are cached.
    pub(crate) layout: [u8; 16],
    root: Arc<Node>,
    /// Whether writers hold leaves of it each their own.
    is_divergent: bool,
    /// What its writers say of it as a whole.
    pub(crate) attrs: Attrs,
    manifest: Archive,
    storages: Vec<Stored>,
    /// The tensor leaves by fqn, as each writer that was asked for has them.
    tensors: Mutex<BTreeMap<Option<u32>, Arc<TensorsByFqn>>>,
    verified: AtomicU64,
    received: AtomicU64,
}

/// What has been done for those who read a version, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    /// Those that were checksummed.
    pub(crate) verified: u64,
    /// Those that came from elsewhere.
    pub(crate) received: u64,
}

impl Tally {
    pub(crate) fn since(self, before: Self) -> Self {
        Self {
            verified: self.verified - before.verified,
            received: self.received - before.received,
        }
    }
}

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

/// Tensor leaves by fqn.
type TensorsByFqn = BTreeMap<String, Entry>;

/// What an fqn names.
enum Entry {
    /// A tensor leaf.
    Tensor(Arc<[TensorReference]>),
    /// Two leaves.
    Twice,
    /// What these writers hold each their own of.
    Divergent(Vec<String>),
}

struct Stored {
    reference: Arc<StorageReference>,
    /// Which chunks are known to be whole.
    verified: Box<[AtomicBool]>,
}

impl Contents {
    fn read(located: &Located) -> Result<Self> {
        let corrupt = |text: &dyn fmt::Display| Error::new(ErrorKind::Corrupt, text);
        let manifest = Archive::from_blob(located.manifest.clone())
            .map_err(|error| Error::format("manifest", error))?;
        let Some(label) = Label::of(&manifest) else {
            return Err(corrupt(&"the manifest names no version"));
        };
        if label.id != located.id {
            let (found, wanted) = (label.id, located.id);
            return Err(corrupt(&format_args!(
                "the manifest is that of version {found}, not {wanted}"
            )));
        }
        let storages =
            (0..manifest.storage_count()).map(|number| Stored::new(manifest.storage(number)));
        let root = manifest.structure();
        Ok(Self {
            id: label.id,
            digest: label.digest,
            epoch: label.epoch,
            number: label.number,
            layout: label.layout,
            is_divergent: is_divergent(&root),
            root: Arc::new(root),
            attrs: user_attrs(&manifest),
            storages: storages.collect(),
            tensors: Mutex::default(),
            verified: AtomicU64::new(0),
            received: AtomicU64::new(0),
            manifest,
        })
    }

    /// The tree, as a writer has it.
    pub(crate) fn tree(&self, writer: Option<u32>) -> Result<Arc<Node>> {
        if !self.is_divergent {
            return Ok(self.root.clone());
        }
        let mut root = Node::clone(&self.root);
        choose_writer(&ObjectPath::root(), &mut root, writer)?;
        Ok(Arc::new(root))
    }

    /// The references of the tensor leaf with an fqn, as a writer has it.
    pub(crate) fn tensor(&self, fqn: &str, writer: Option<u32>) -> Result<Arc<[TensorReference]>> {
        let tensors = self.tensors_of(writer);
        let kind = match tensors.get(fqn) {
            Some(Entry::Tensor(references)) => return Ok(references.clone()),
            Some(Entry::Divergent(writers)) => return Err(say_writer(fqn, writers)),
            Some(Entry::Twice) => FormatKind::AmbiguousFqn,
            None => FormatKind::NotFound,
        };
        Err(Error::format(self.name(), FormatError::new(kind).at(fqn)))
    }

    /// How errors name it.
    fn name(&self) -> String {
        format!("version {}", self.number)
    }

    fn tensors_of(&self, writer: Option<u32>) -> Arc<TensorsByFqn> {
        let mut known = self.tensors.lock().expect("nobody panics while holding the names");
        let by_fqn = || {
            let mut tensors = TensorsByFqn::new();
            collect(&ObjectPath::root(), &self.root, writer, &mut tensors);
            Arc::new(tensors)
        };
        known.entry(writer).or_insert_with(by_fqn).clone()
    }

    fn stored(&self, storage: u32) -> &Stored {
        &self.storages[native(u64::from(storage))]
    }

    /// How many bytes of a storage there are.
    pub(crate) fn storage_len(&self, storage: u32) -> u64 {
        self.stored(storage).reference.len
    }

    /// How many bytes each storage has; none if there are not so many storages.
    pub(crate) fn storage_lens(&self) -> impl Fn(u32) -> Option<u64> {
        |storage| Some(self.storages.get(native(u64::from(storage)))?.reference.len)
    }

    /// What has been done since the version was opened.
    pub(crate) fn tally(&self) -> Tally {
        Tally {
            verified: self.verified.load(Ordering::Relaxed),
            received: self.received.load(Ordering::Relaxed),
        }
    }

    fn prove(&self, storage: u32, chunk: u64, bytes: &[u8]) -> Result<()> {
        self.check(storage, chunk, crc32fast::hash(bytes), wide(bytes.len()))
    }

    /// Compares the checksum of the stored bytes of a chunk.
    fn check(&self, storage: u32, chunk: u64, crc: u32, len: u64) -> Result<()> {
        self.verified.fetch_add(len, Ordering::Relaxed);
        let reference = &self.stored(storage).reference;
        if crc == reference.crcs[native(chunk)] {
            return Ok(());
        }
        let error = FormatError::new(FormatKind::ChunkCorrupt)
            .byte(reference.stored_chunk(chunk).start)
            .note(format_args!("{len} bytes of shard {}", reference.shard))
            .at(self.manifest.leaf_in(storage));
        Err(Error::format(self.name(), error))
    }
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
                    .prove(&archive.to_blob())
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

    /// Whoever holds a storage elsewhere, if it is raw: then boxes of it can be had alone.
    pub(crate) fn far(&self, storage: u32) -> Option<&Far> {
        let reference = &self.stored(storage).reference;
        self.archive(reference).far().filter(|_| reference.packing.is_none())
    }

    /// The boxes of raw bytes that a copy from a storage elsewhere is made of: whole chunks are proven by
    /// whoever gets them, parts of chunks by the holder.
    pub(crate) fn boxes(&self, far: &Far, copy: &Copy, unverified: bool, boxes: &mut Vec<Boxed>) {
        let reference = &self.stored(copy.storage).reference;
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
        for chunk in reference.chunks(&range) {
            let whole = reference.chunk(chunk);
            let wanted = whole.start.max(range.start)..whole.end.min(range.end);
            let proof =
                if wanted == whole { Proof::Chunk(reference.crcs[native(chunk)]) } else { part() };
            let target = copy.target + (wanted.start - range.start);
            boxes.push(boxed(wanted.start, target, Runs::run(wanted.end - wanted.start), proof));
        }
    }

    /// The archives that storages are in, by the names that the manifest gives them.
    pub(crate) fn archives_of(&self, storages: impl Iterator<Item = u32>) -> BTreeSet<String> {
        let shards: BTreeSet<u32> =
            storages.map(|storage| self.stored(storage).reference.shard).collect();
        let files = self.manifest.shards();
        shards.into_iter().map(|shard| files[native(u64::from(shard))].name.clone()).collect()
    }

    /// What was proven elsewhere, or came from there, is counted too.
    pub(crate) fn count(&self, more: Tally) {
        self.verified.fetch_add(more.verified, Ordering::Relaxed);
        self.received.fetch_add(more.received, Ordering::Relaxed);
    }

    /// As [`OpenVersion::bytes`]; they hold the version's lease as long as they are there.
    pub(crate) fn view(&self, storage: u32, range: Range<u64>, unverified: bool) -> Result<Bytes> {
        let reference = &self.stored(storage).reference;
        let leased = self.leased(reference).filter(|_| reference.packing.is_none());
        let Some(leased) = leased else {
            return Ok(self.with_lease(self.bytes(storage, range, unverified)?));
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
            let reference = &self.stored(*storage).reference;
            let map = match maps.entry(reference.shard) {
                btree_map::Entry::Occupied(known) => known.into_mut(),
                btree_map::Entry::Vacant(unknown) => unknown.insert(self.lent(reference.shard)?),
            };
            private.push(map.as_ref().filter(|_| reference.packing.is_none()).and_then(
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
        let reference = &self.stored(storage).reference;
        let blob = self.archive(reference).blob();
        let chunks = reference.chunks(&range);
        if reference.packing.is_some() {
            let failed = |error: FormatError| Error::format(self.name(), error);
            let mut unpack = Unpack::new(reference, range).map_err(failed)?;
            for chunk in chunks {
                let stored = self.proven(storage, chunk)?;
                let added = unpack.add(chunk, &stored);
                added.map_err(|error| failed(error.at(self.manifest.leaf_in(storage))))?;
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
        let first = chunks.start * CHUNK_BYTES;
        let last = (chunks.end * CHUNK_BYTES).min(reference.len);
        let mut read = vec![0; native(last - first)];
        blob.read_exact_at(&mut read, reference.offset + first)
            .map_err(|error| Error::io(self.name(), error))?;
        for (chunk, bytes) in chunks.zip(read.chunks(native(CHUNK_BYTES))) {
            self.prove(storage, chunk, bytes)?;
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
        let reference = &self.stored(storage).reference;
        let start = range.start;
        let mapped = self.archive(reference).blob().bytes();
        let in_place = reference.packing.is_none() && mapped.is_some();
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
        let Stored { reference, verified } = self.stored(storage);
        let blob = self.archive(reference).blob();
        let mapped = blob.bytes().filter(|_| reference.packing.is_none());
        let Some(mapped) = mapped else {
            target.copy_from_slice(&self.bytes(storage, range, unverified)?);
            return Ok(());
        };
        let place = |at: u64| native(reference.offset + at);
        if unverified {
            copy(&mapped[place(range.start)..place(range.end)], target);
            return Ok(());
        }
        let mut rest = target;
        for chunk in reference.chunks(&range) {
            let whole = reference.chunk(chunk);
            let part = whole.start.max(range.start)..whole.end.min(range.end);
            let (target, tail) = rest.split_at_mut(native(part.end - part.start));
            rest = tail;
            let source = &mapped[place(part.start)..place(part.end)];
            let known = &verified[native(chunk)];
            if part == whole && !known.load(Ordering::Relaxed) {
                let mut crc = crc32fast::Hasher::new();
                copy_and_checksum(source, target, &mut crc);
                self.check(storage, chunk, crc.finalize(), part.end - part.start)?;
                known.store(true, Ordering::Relaxed);
            } else {
                self.proven(storage, chunk)?;
                copy(source, target);
            }
        }
        Ok(())
    }

    fn prove_chunks(&self, storage: u32, mut chunks: Range<u64>) -> Result<()> {
        chunks.try_for_each(|chunk| self.proven(storage, chunk).map(drop))
    }

    /// The stored bytes of a chunk. Those that are in memory are proven once.
    fn proven(&self, storage: u32, chunk: u64) -> Result<Bytes> {
        let Stored { reference, verified } = self.stored(storage);
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
        self.prove(storage, chunk, &stored)?;
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
        let reference = &self.version.stored(self.storage).reference;
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

impl Stored {
    fn new(reference: StorageReference) -> Self {
        let verified = reference.crcs.iter().map(|_| AtomicBool::new(false)).collect();
        Self { reference: Arc::new(reference), verified }
    }
}

/// What the attributes of a manifest say of its version.
struct Label {
    id: VersionId,
    digest: Digest,
    epoch: u32,
    number: u64,
    layout: [u8; 16],
}

impl Label {
    fn of(manifest: &Archive) -> Option<Self> {
        let attrs = manifest.attrs();
        let int = |name: &str| match attrs.get(name)? {
            AttrValue::Int(int) => Some(*int),
            _ => None,
        };
        let AttrValue::Text(id) = attrs.get("tssd.id")? else { return None };
        let AttrValue::Text(digest) = attrs.get("tssd.digest")? else { return None };
        let AttrValue::Bytes(layout) = attrs.get("tssd.layout")? else { return None };
        Some(Self {
            id: id.as_str()?.parse().ok()?,
            digest: digest.as_str()?.parse().ok()?,
            epoch: u32::try_from(int("tssd.epoch")?).ok()?,
            number: int("tssd.version")?.cast_unsigned(),
            layout: (**layout).try_into().ok()?,
        })
    }
}

/// The attributes that say something of a version in a store, and nothing of its state dict.
pub const VERSION_ATTRS: [&str; 7] = [
    "tssd.digest",
    "tssd.divergent",
    "tssd.epoch",
    "tssd.id",
    "tssd.layout",
    "tssd.version",
    "tssd.writers",
];

/// The attributes of a manifest but those that the store and its compression have added.
fn user_attrs(manifest: &Archive) -> Attrs {
    let mut attrs = manifest.attrs();
    for own in VERSION_ATTRS.into_iter().chain([ZSTD_LEVEL_ATTR]) {
        attrs.remove(own);
    }
    attrs
}

/// Whether writers hold leaves of a tree each their own.
fn is_divergent(node: &Node) -> bool {
    let Node::Container(container, children) = node else { return false };
    *container == Container::Divergent || children.iter().any(|(_, child)| is_divergent(child))
}

/// Finds the tensor leaves of a tree, with one writer's own in the place of divergent nodes.
fn collect(path: &ObjectPath, node: &Node, writer: Option<u32>, tensors: &mut TensorsByFqn) {
    match node {
        Node::Tensors(references) => {
            let entry = tensors.entry(path.fqn());
            entry
                .and_modify(|twice| *twice = Entry::Twice)
                .or_insert_with(|| Entry::Tensor(references.as_slice().into()));
        }
        Node::Container(Container::Divergent, children) => {
            let key = writer.map(|writer| Step::Key(Key::writer(writer)));
            if let Some((_, own)) = children.iter().find(|(step, _)| Some(step) == key.as_ref()) {
                return collect(path, own, writer, tensors);
            }
            let writers = children.iter().map(|(step, _)| step.to_string()).collect();
            tensors.insert(path.fqn(), Entry::Divergent(writers));
        }
        Node::Container(_, children) => {
            for (step, child) in children {
                collect(&path.clone().step(step.clone()), child, writer, tensors);
            }
        }
        Node::Leaf(_) | Node::Stored(..) => {}
    }
}

/// A leaf that writers hold each their own of, asked for without saying whose.
pub(crate) fn say_writer(fqn: &str, writers: &[String]) -> Error {
    let writers = writers.join(", ");
    Error::new(
        ErrorKind::Invalid,
        format_args!("writers {writers} hold `{fqn}` each their own; say writer="),
    )
}

/// Places in what is in memory, or within the length of a file that was compared.
fn native(place: u64) -> usize {
    usize::try_from(place).expect("a place in memory fits usize")
}

fn wide(len: usize) -> u64 {
    u64::try_from(len).expect("usize is at most 64 bits")
}
