//! One visible version, open for reading.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use tssd_format::{
    Archive, AttrValue, Attrs, CHUNK_BYTES, Container, Error as FormatError,
    ErrorKind as FormatKind, Key, MANIFEST, Node, ObjectPath, Step, StorageReference,
    TensorReference, Unpack, ZSTD_LEVEL_ATTR,
};

use crate::error::{Error, ErrorKind, Result};
use crate::ledger::VersionId;
use crate::volume::Volume;

/// A version whose files are open: it stays readable whatever the ledger does.
pub(crate) struct OpenVersion {
    pub(crate) id: VersionId,
    pub(crate) epoch: u32,
    pub(crate) number: u64,
    /// The name of its layout, under which plans are cached.
    pub(crate) layout: [u8; 16],
    pub(crate) root: Node,
    /// What its writers say of it as a whole.
    pub(crate) attrs: Attrs,
    folder: String,
    storages: Vec<Stored>,
    archive: Archive,
    /// The tensor leaves by fqn, as each writer that was asked for has them.
    tensors: Mutex<BTreeMap<Option<u32>, Arc<TensorsByFqn>>>,
    verified: AtomicU64,
}

/// Tensor leaves by fqn.
type TensorsByFqn = BTreeMap<String, Entry>;

/// What an fqn names.
enum Entry {
    /// A tensor leaf.
    Tensor(Vec<TensorReference>),
    /// Two leaves.
    Twice,
    /// What these writers hold each their own of.
    Divergent(Vec<String>),
}

/// Why a version could not be opened.
enum Unopened {
    /// A file of it is gone, because the version is.
    Gone,
    Store(Error),
    Format(FormatError),
}

impl From<FormatError> for Unopened {
    fn from(error: FormatError) -> Self {
        Self::Format(error)
    }
}

struct Stored {
    reference: StorageReference,
    /// Which chunks are known to be whole.
    verified: Box<[AtomicBool]>,
}

impl OpenVersion {
    /// Opens a version and all files of it; none if one is gone, because the version is.
    pub(crate) fn open(volume: &dyn Volume, folder: &str, id: VersionId) -> Result<Option<Self>> {
        let path = format!("{folder}/{MANIFEST}");
        let Some(blob) = volume.open(&path)? else { return Ok(None) };
        let opened = Archive::from_shard_set(blob, |shard| {
            let found = volume.open(&format!("{folder}/{}", shard.name));
            found.map_err(Unopened::Store)?.ok_or(Unopened::Gone)
        });
        let archive = match opened {
            Ok(archive) => archive,
            Err(Unopened::Gone) => return Ok(None),
            Err(Unopened::Store(error)) => return Err(error),
            Err(Unopened::Format(error)) => return Err(Error::format(&path, error)),
        };
        let Some(label) = Label::of(&archive) else {
            return Err(Error::new(ErrorKind::Corrupt, format_args!("`{path}` names no version")));
        };
        // Another version may have taken the folder since the look at the ledger.
        if label.id != id {
            return Ok(None);
        }
        let root = archive.structure();
        let storages =
            (0..archive.storage_count()).map(|number| Stored::new(archive.storage(number)));
        Ok(Some(Self {
            id,
            epoch: label.epoch,
            number: label.number,
            layout: label.layout,
            tensors: Mutex::default(),
            root,
            attrs: user_attrs(&archive),
            folder: folder.to_owned(),
            storages: storages.collect(),
            archive,
            verified: AtomicU64::new(0),
        }))
    }

    /// The references of the tensor leaf with an fqn, as a writer has it.
    pub(crate) fn tensor(&self, fqn: &str, writer: Option<u32>) -> Result<Vec<TensorReference>> {
        let tensors = self.tensors_of(writer);
        let kind = match tensors.get(fqn) {
            Some(Entry::Tensor(references)) => return Ok(references.clone()),
            Some(Entry::Divergent(writers)) => return Err(say_writer(fqn, writers)),
            Some(Entry::Twice) => FormatKind::AmbiguousFqn,
            None => FormatKind::NotFound,
        };
        Err(Error::format(&self.folder, FormatError::new(kind).at(fqn)))
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

    /// Raw bytes of a storage, proven: a view where they are in memory as they are.
    pub(crate) fn bytes(&self, storage: u32, range: Range<u64>) -> Result<Bytes> {
        let reference = &self.stored(storage).reference;
        let blob = &**self.archive.blob(reference.shard);
        let chunks = reference.chunks(&range);
        if reference.packing.is_some() {
            let failed = |error: FormatError| Error::format(&self.folder, error);
            let mut unpack = Unpack::new(reference, range).map_err(failed)?;
            for chunk in chunks {
                let stored = self.proven(storage, chunk)?;
                let added = unpack.add(chunk, &stored);
                added.map_err(|error| failed(error.at(self.archive.leaf_in(storage))))?;
            }
            return Ok(unpack.finish());
        }
        if let Some(mapped) = blob.bytes() {
            for chunk in chunks {
                self.proven(storage, chunk)?;
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
            .map_err(|error| Error::io(&self.folder, error))?;
        for (chunk, bytes) in chunks.zip(read.chunks(native(CHUNK_BYTES))) {
            self.prove(storage, chunk, bytes)?;
        }
        Ok(Bytes::from(read).slice(native(range.start - first)..native(range.end - first)))
    }

    /// The stored bytes of a chunk. Those that are in memory are proven once.
    fn proven(&self, storage: u32, chunk: u64) -> Result<Bytes> {
        let Stored { reference, verified } = self.stored(storage);
        let blob = &**self.archive.blob(reference.shard);
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
            .map_err(|error| Error::io(&self.folder, error))?;
        self.prove(storage, chunk, &stored)?;
        Ok(stored.into())
    }

    fn stored(&self, storage: u32) -> &Stored {
        &self.storages[native(u64::from(storage))]
    }

    /// How many bytes of a storage there are.
    pub(crate) fn storage_len(&self, storage: u32) -> u64 {
        self.stored(storage).reference.len
    }

    /// How many bytes were checksummed since the version was opened.
    pub(crate) fn bytes_verified(&self) -> u64 {
        self.verified.load(Ordering::Relaxed)
    }

    fn prove(&self, storage: u32, chunk: u64, bytes: &[u8]) -> Result<()> {
        self.verified.fetch_add(wide(bytes.len()), Ordering::Relaxed);
        let reference = &self.stored(storage).reference;
        if crc32fast::hash(bytes) == reference.crcs[native(chunk)] {
            return Ok(());
        }
        let error = FormatError::new(FormatKind::ChunkCorrupt)
            .byte(reference.stored_chunk(chunk).start)
            .note(format_args!("{} bytes of shard {}", bytes.len(), reference.shard))
            .at(self.archive.leaf_in(storage));
        Err(Error::format(&self.folder, error))
    }
}

impl Stored {
    fn new(reference: StorageReference) -> Self {
        let verified = reference.crcs.iter().map(|_| AtomicBool::new(false)).collect();
        Self { reference, verified }
    }
}

/// What the attributes of a manifest say of its version.
struct Label {
    id: VersionId,
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
        let AttrValue::Bytes(layout) = attrs.get("tssd.layout")? else { return None };
        Some(Self {
            id: id.as_str()?.parse().ok()?,
            epoch: u32::try_from(int("tssd.epoch")?).ok()?,
            number: int("tssd.version")?.cast_unsigned(),
            layout: (**layout).try_into().ok()?,
        })
    }
}

/// The attributes that say something of a version in a store, and nothing of its state dict.
pub const VERSION_ATTRS: [&str; 6] =
    ["tssd.divergent", "tssd.epoch", "tssd.id", "tssd.layout", "tssd.version", "tssd.writers"];

/// The attributes of a manifest but those that the store and its compression have added.
fn user_attrs(manifest: &Archive) -> Attrs {
    let mut attrs = manifest.attrs();
    for own in VERSION_ATTRS.into_iter().chain([ZSTD_LEVEL_ATTR]) {
        attrs.remove(own);
    }
    attrs
}

/// Finds the tensor leaves of a tree, with one writer's own in the place of divergent nodes.
fn collect(path: &ObjectPath, node: &Node, writer: Option<u32>, tensors: &mut TensorsByFqn) {
    match node {
        Node::Tensors(references) => {
            let entry = tensors.entry(path.fqn());
            entry
                .and_modify(|twice| *twice = Entry::Twice)
                .or_insert_with(|| Entry::Tensor(references.clone()));
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
