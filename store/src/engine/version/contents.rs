//! The index of a version, without its bytes.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tssd_format::{
    Archive, AttrValue, Attrs, Container, Error as FormatError, ErrorKind as FormatKind, MapKey,
    Node, ObjectPath, STORE_ATTR_PREFIX, Step, StorageReference, ZSTD_LEVEL_ATTR, checksum,
};

use crate::blob::VerifiedChunks;
use crate::control::LocatedVersion;
use crate::convert::{to_u64, to_usize};
use crate::engine::version::held::{HeldStorages, StorageChunks};
use crate::error::{Error, ErrorKind, Result};
use crate::io::sync::Lock;
use crate::ledger::{ArchiveDigest, VersionId};
use crate::plan::StorageId;

/// The index of a version, and the state of its verification.
///
/// It does not depend on where the archives are.
pub(crate) struct Contents {
    pub(crate) id: VersionId,
    /// Digest of the contents.
    pub(crate) digest: ArchiveDigest,
    pub(crate) epoch: u32,
    pub(crate) number: u64,
    /// Fingerprint of the layout. Plans are cached by it.
    pub(crate) layout: [u8; 16],
    /// The storages of distributed leaves.
    pub(super) held: HeldStorages,
    /// The archives with storages that the manifest describes.
    own_shards: BTreeSet<usize>,
    root: Arc<Node>,
    /// Whether the tree has divergent nodes, which contain a value for each writer.
    is_divergent: bool,
    /// The attributes of the whole state dict.
    pub(crate) attrs: Attrs,
    pub(super) manifest: Archive,
    /// The storages of the manifest.
    chunks: VerifiedChunks,
    /// Length of each storage in bytes. Contiguous, because a plan is compared with all of them.
    lens: Box<[u64]>,
    /// The tensor leaves by fqn, for each requested writer.
    tensors: Lock<BTreeMap<Option<u32>, Arc<TensorsByFqn>>>,
    verified: AtomicU64,
    received: AtomicU64,
}

/// Counters of the reads of a version.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ReadCounters {
    /// Bytes that were checksummed.
    pub(crate) verified: u64,
    /// Bytes that were received over a connection.
    pub(crate) received: u64,
}

impl ReadCounters {
    pub(crate) fn since(self, before: Self) -> Self {
        Self {
            verified: self.verified - before.verified,
            received: self.received - before.received,
        }
    }
}

/// Tensor leaves by fqn.
type TensorsByFqn = BTreeMap<String, Entry>;

/// The leaf or leaves of an fqn.
enum Entry {
    /// A tensor leaf.
    Tensor(Arc<Node>),
    /// Several leaves.
    Ambiguous,
    /// A divergent leaf, with a value of each of these writers.
    Divergent(Vec<String>),
}

impl Contents {
    pub(super) fn read(located: &LocatedVersion) -> Result<Self> {
        let corrupt = |text: &dyn fmt::Display| Error::new(ErrorKind::Corrupt, text);
        let manifest = Archive::from_blob(located.manifest.clone())
            .map_err(|error| Error::from_format("manifest", error))?;
        let Some(attrs) = ManifestAttrs::of(&manifest) else {
            return Err(corrupt(&"the manifest names no version"));
        };
        if attrs.id != located.id {
            let (found, wanted) = (attrs.id, located.id);
            return Err(corrupt(&format_args!(
                "the manifest is that of version {found}, not {wanted}"
            )));
        }
        let storages =
            (0..manifest.storage_count()).map(|number| Arc::new(manifest.storage(number)));
        let storages: Vec<Arc<StorageReference>> = storages.collect();
        let root = manifest.structure();
        Ok(Self {
            id: attrs.id,
            digest: attrs.digest,
            epoch: located.position.epoch,
            number: located.position.number,
            layout: attrs.layout,
            held: HeldStorages::new(&root, manifest.shards())
                .map_err(|error| Error::from_format("manifest", error))?,
            own_shards: storages.iter().map(|storage| to_usize(storage.shard.into())).collect(),
            is_divergent: is_divergent(&root),
            root: Arc::new(root),
            attrs: writer_attrs(&manifest),
            lens: storages.iter().map(|stored| stored.len).collect(),
            chunks: VerifiedChunks::new(storages),
            tensors: Lock::default(),
            verified: AtomicU64::new(0),
            received: AtomicU64::new(0),
            manifest,
        })
    }

    /// Returns the tree, with the values of a writer in the place of divergent nodes.
    pub(crate) fn tree(&self, writer: Option<u32>) -> Result<Arc<Node>> {
        if !self.is_divergent {
            return Ok(self.root.clone());
        }
        let mut root = Node::clone(&self.root);
        choose_writer(&ObjectPath::root(), &mut root, writer)?;
        Ok(Arc::new(root))
    }

    /// Returns the tensor leaf with an fqn.
    ///
    /// `writer` selects the value of a divergent leaf.
    pub(crate) fn tensor(&self, fqn: &str, writer: Option<u32>) -> Result<Arc<Node>> {
        let tensors = self.tensors_of(writer);
        let kind = match tensors.get(fqn) {
            Some(Entry::Tensor(node)) => return Ok(node.clone()),
            Some(Entry::Divergent(writers)) => return Err(writer_required(fqn, writers)),
            Some(Entry::Ambiguous) => FormatKind::AmbiguousFqn,
            None => FormatKind::NotFound,
        };
        Err(Error::from_format(self.name(), FormatError::new(kind).with_path(fqn)))
    }

    /// Returns the name of the version for errors.
    pub(super) fn name(&self) -> String {
        format!("version {}", self.number)
    }

    fn tensors_of(&self, writer: Option<u32>) -> Arc<TensorsByFqn> {
        let mut cached = self.tensors.lock();
        let by_fqn = || {
            let mut tensors = TensorsByFqn::new();
            collect(&ObjectPath::root(), &self.root, writer, &mut tensors);
            Arc::new(tensors)
        };
        cached.entry(writer).or_insert_with(by_fqn).clone()
    }

    /// Returns the chunks of a storage and the index of the storage among them.
    ///
    /// Storages of groups have been loaded by [`OpenVersion::load_held`](super::OpenVersion::load_held).
    pub(super) fn chunks(&self, storage: StorageId) -> StorageChunks<'_> {
        match storage {
            StorageId::Own(number) => StorageChunks::Own(&self.chunks, to_usize(u64::from(number))),
            StorageId::Held { group, device } => {
                StorageChunks::Held(self.held.get(group, device).expect("it has been loaded"))
            }
        }
    }

    /// Whether an archive is verified when the version is opened.
    ///
    /// It is unless all its storages belong to distributed leaves.
    pub(super) fn is_verified_at_open(&self, shard: usize) -> bool {
        self.held.is_empty() || self.own_shards.contains(&shard)
    }

    /// Returns the fingerprint of the groups of distributed leaves.
    pub(crate) fn group_fingerprint(&self) -> [u8; 16] {
        self.held.fingerprint()
    }

    /// Returns the length of a storage of the manifest in bytes.
    pub(crate) fn storage_len(&self, storage: u32) -> u64 {
        self.lens[to_usize(u64::from(storage))]
    }

    /// Returns a function from storages of the manifest to their lengths in bytes, or `None` for an unknown storage.
    pub(crate) fn storage_lens(&self) -> impl Fn(u32) -> Option<u64> {
        |storage| self.lens.get(to_usize(u64::from(storage))).copied()
    }

    /// Returns the counters since the index was read.
    pub(crate) fn counters(&self) -> ReadCounters {
        ReadCounters {
            verified: self.verified.load(Ordering::Relaxed),
            received: self.received.load(Ordering::Relaxed),
        }
    }

    /// Adds bytes that were verified or received elsewhere.
    pub(crate) fn count(&self, more: ReadCounters) {
        self.verified.fetch_add(more.verified, Ordering::Relaxed);
        self.received.fetch_add(more.received, Ordering::Relaxed);
    }

    /// Verifies the checksum of the stored bytes of a chunk.
    pub(super) fn verify_chunk(&self, storage: StorageId, chunk: u64, bytes: &[u8]) -> Result<()> {
        self.verified.fetch_add(to_u64(bytes.len()), Ordering::Relaxed);
        let verified = self.chunks(storage).reference().verify_chunk(chunk, checksum(bytes));
        verified.map_err(|_| self.corrupt(storage, chunk))
    }

    /// Returns the fqn of the first leaf that lies in a storage.
    pub(super) fn storage_fqn(&self, storage: StorageId) -> String {
        match storage {
            StorageId::Own(number) => self.manifest.storage_fqn(number),
            StorageId::Held { group, .. } => self.held.path(group).fqn(),
        }
    }

    /// Returns the error for a chunk with a wrong checksum.
    pub(super) fn corrupt(&self, storage: StorageId, chunk: u64) -> Error {
        let chunks = self.chunks(storage);
        let reference = chunks.reference();
        let place = reference.stored_chunk(chunk);
        let error = FormatError::new(FormatKind::ChunkCorrupt)
            .with_offset(place.start)
            .with_detail(format_args!(
                "{} bytes of shard {}",
                place.end - place.start,
                reference.shard
            ))
            .with_path(self.storage_fqn(storage));
        Error::from_format(self.name(), error)
    }
}

/// The attributes of a manifest that describe its version.
struct ManifestAttrs {
    id: VersionId,
    digest: ArchiveDigest,
    layout: [u8; 16],
}

impl ManifestAttrs {
    fn of(manifest: &Archive) -> Option<Self> {
        let attrs = manifest.attrs();
        let int = |name: &str| match attrs.get(name)? {
            AttrValue::Int(int) => Some(*int),
            _ => None,
        };
        let AttrValue::Text(id) = attrs.get("tssd.store.id")? else { return None };
        let AttrValue::Text(digest) = attrs.get("tssd.store.digest")? else { return None };
        let AttrValue::Bytes(layout) = attrs.get("tssd.store.layout_fingerprint")? else {
            return None;
        };
        // The position at which the version was put. After a rollback it has another one.
        u32::try_from(int("tssd.store.epoch")?).ok()?;
        int("tssd.store.version")?;
        Some(Self {
            id: id.as_str()?.parse().ok()?,
            digest: digest.as_str()?.parse().ok()?,
            layout: (**layout).try_into().ok()?,
        })
    }
}

/// The attribute of a bucket of a ring that contains its header. Spec: `protocol.md`, P-103.
pub(crate) const RING_ATTR: &str = "tssd.store.ring";

/// Returns the attributes of a manifest without those that the merge and the compression have added.
fn writer_attrs(manifest: &Archive) -> Attrs {
    let mut attrs = manifest.attrs();
    attrs.retain(|name, _| {
        name == RING_ATTR || !name.starts_with(STORE_ATTR_PREFIX) && name != ZSTD_LEVEL_ATTR
    });
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
        let writers: Vec<String> = children.iter().map(|(step, _)| step.to_string()).collect();
        return Err(writer_required(&path.fqn(), &writers));
    };
    *node = own.clone();
    Ok(())
}

/// Returns whether a tree has divergent nodes.
fn is_divergent(node: &Node) -> bool {
    let Node::Container(container, children) = node else { return false };
    *container == Container::Divergent || children.iter().any(|(_, child)| is_divergent(child))
}

/// Collects the tensor leaves of a tree, with the values of one writer in the place of divergent nodes.
fn collect(path: &ObjectPath, node: &Node, writer: Option<u32>, tensors: &mut TensorsByFqn) {
    match node {
        Node::Tensors(_) | Node::Distributed(_) => {
            let entry = tensors.entry(path.fqn());
            entry
                .and_modify(|existing| *existing = Entry::Ambiguous)
                .or_insert_with(|| Entry::Tensor(node.clone().into()));
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

/// Returns the error for a divergent leaf that is requested without a writer.
pub(crate) fn writer_required(fqn: &str, writers: &[String]) -> Error {
    let writers = writers.join(", ");
    Error::new(
        ErrorKind::Invalid,
        format_args!("writers {writers} hold `{fqn}` each their own; say writer="),
    )
}
