//! What is known of a version, without its bytes.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use tssd_format::{
    Archive, AttrValue, Attrs, Container, Error as FormatError, ErrorKind as FormatKind, MapKey,
    Node, ObjectPath, Step, StorageReference, TensorReference, ZSTD_LEVEL_ATTR, checksum,
};

use crate::control::Located;
use crate::error::{Error, ErrorKind, Result};
use crate::io::sync::Lock;
use crate::ledger::{Digest, VersionId};

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
    pub(super) manifest: Archive,
    storages: Vec<Arc<StorageReference>>,
    /// Which chunks are known to be whole, of all storages; and where those of each begin.
    proven: Box<[AtomicBool]>,
    chunks_before: Box<[usize]>,
    /// How many bytes each has, side by side: a plan is compared with all of them.
    lens: Box<[u64]>,
    /// The tensor leaves by fqn, as each writer that was asked for has them.
    tensors: Lock<BTreeMap<Option<u32>, Arc<TensorsByFqn>>>,
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

impl Contents {
    pub(super) fn read(located: &Located) -> Result<Self> {
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
            (0..manifest.storage_count()).map(|number| Arc::new(manifest.storage(number)));
        let storages: Vec<Arc<StorageReference>> = storages.collect();
        let mut chunks = 0;
        let count = |reference: &Arc<StorageReference>| {
            chunks += reference.crcs.len();
            chunks - reference.crcs.len()
        };
        let chunks_before = storages.iter().map(count).collect();
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
            lens: storages.iter().map(|stored| stored.len).collect(),
            storages,
            proven: (0..chunks).map(|_| AtomicBool::new(false)).collect(),
            chunks_before,
            tensors: Lock::default(),
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
        Err(Error::format(self.name(), FormatError::new(kind).with_path(fqn)))
    }

    /// How errors name it.
    pub(super) fn name(&self) -> String {
        format!("version {}", self.number)
    }

    fn tensors_of(&self, writer: Option<u32>) -> Arc<TensorsByFqn> {
        let mut known = self.tensors.lock();
        let by_fqn = || {
            let mut tensors = TensorsByFqn::new();
            collect(&ObjectPath::root(), &self.root, writer, &mut tensors);
            Arc::new(tensors)
        };
        known.entry(writer).or_insert_with(by_fqn).clone()
    }

    pub(super) fn stored(&self, storage: u32) -> &Arc<StorageReference> {
        &self.storages[native(u64::from(storage))]
    }

    /// Which chunks of a storage are known to be whole.
    pub(super) fn proven_chunks(&self, storage: u32) -> &[AtomicBool] {
        let start = self.chunks_before[native(u64::from(storage))];
        &self.proven[start..start + self.stored(storage).crcs.len()]
    }

    /// How many bytes of a storage there are.
    pub(crate) fn storage_len(&self, storage: u32) -> u64 {
        self.stored(storage).len
    }

    /// How many bytes each storage has; none if there are not so many storages.
    pub(crate) fn storage_lens(&self) -> impl Fn(u32) -> Option<u64> {
        |storage| self.lens.get(native(u64::from(storage))).copied()
    }

    /// What has been done since the version was opened.
    pub(crate) fn tally(&self) -> Tally {
        Tally {
            verified: self.verified.load(Ordering::Relaxed),
            received: self.received.load(Ordering::Relaxed),
        }
    }

    /// What was proven elsewhere, or came from there, is counted too.
    pub(crate) fn count(&self, more: Tally) {
        self.verified.fetch_add(more.verified, Ordering::Relaxed);
        self.received.fetch_add(more.received, Ordering::Relaxed);
    }

    /// Compares the checksum of the stored bytes of a chunk.
    pub(super) fn prove(&self, storage: u32, chunk: u64, bytes: &[u8]) -> Result<()> {
        self.verified.fetch_add(wide(bytes.len()), Ordering::Relaxed);
        let proven = self.stored(storage).verify_chunk(chunk, checksum(bytes));
        proven.map_err(|_| self.corrupt(storage, chunk))
    }

    /// A chunk is not what was put.
    pub(super) fn corrupt(&self, storage: u32, chunk: u64) -> Error {
        let reference = self.stored(storage);
        let place = reference.stored_chunk(chunk);
        let error = FormatError::new(FormatKind::ChunkCorrupt)
            .with_offset(place.start)
            .with_detail(format_args!(
                "{} bytes of shard {}",
                place.end - place.start,
                reference.shard
            ))
            .with_path(self.manifest.storage_fqn(storage));
        Error::format(self.name(), error)
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

/// Replaces divergent nodes by the values of one writer.
fn choose_writer(path: &ObjectPath, node: &mut Node, writer: Option<u32>) -> Result<()> {
    let Node::Container(container, children) = node else { return Ok(()) };
    if *container != Container::Divergent {
        return children.iter_mut().try_for_each(|(step, child)| {
            choose_writer(&path.clone().step(step.clone()), child, writer)
        });
    }
    let key = writer.map(|writer| Step::Key(MapKey::from_writer(writer)));
    let Some((_, own)) = children.iter().find(|(step, _)| Some(step) == key.as_ref()) else {
        let held: Vec<String> = children.iter().map(|(step, _)| step.to_string()).collect();
        return Err(say_writer(&path.fqn(), &held));
    };
    *node = own.clone();
    Ok(())
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
            let key = writer.map(|writer| Step::Key(MapKey::from_writer(writer)));
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
        Node::Leaf(_) | Node::StoredLeaf(..) => {}
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
