//! The merge of a commit: verifies that the archives of all writers form one state dict, and builds its manifest.
//!
//! Merging is a pure function. Spec: `spec/reshard.md`, section 2.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicUsize, Ordering};

use indexmap::IndexMap;
use serde_json::Value as Json;
use serde_json::map::Entry;
use tssd_format::{
    Archive, AttrValue, Attrs, Container, ManifestContent, MapKey, Node, ObjectPath, Region,
    ShardFile, Step, StorageReference, TaggedClass, TensorMeta, TensorReference, TensorSlice,
    ZSTD_LEVEL_ATTR,
};

use crate::ledger::{ArchiveDigest, WriterSet};
use crate::plan::fingerprint;

/// The attribute for the `_metadata` of state dicts of modules. Spec: `spec/format.md`, section 7.
const MODULE_METADATA_ATTR: &str = "tssd.module_metadata";

/// The attribute of an archive that selects how divergent leaves are merged: see [`DivergencePolicy`].
pub(crate) const DIVERGENT_ATTR: &str = "tssd.store.divergent";

/// An archive that a writer has committed.
pub(crate) struct WriterArchive {
    pub(crate) writer: u32,
    /// The base name of the archive file.
    pub(crate) file: String,
    pub(crate) archive: Archive,
    /// Whether the bytes of the archive can be read here.
    pub(crate) is_readable: bool,
}

/// How to merge a divergent leaf: several writers hold different values, which are not slices of a global tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum DivergencePolicy {
    /// Reject the version.
    #[default]
    Error,
    /// Keep the value of the lowest writer.
    Lowest,
    /// Keep the value of each writer. A get then selects a writer.
    Keep,
}

/// How archives are merged.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MergeOptions {
    pub(crate) divergent: DivergencePolicy,
    /// Minimum number of slices for distributed leaves: see [`ManifestContent::distribute`].
    pub(crate) min_distributed_slices: usize,
}

impl Default for MergeOptions {
    fn default() -> Self {
        Self {
            divergent: DivergencePolicy::default(),
            min_distributed_slices: MIN_DISTRIBUTED_SLICES.load(Ordering::Relaxed),
        }
    }
}

/// Minimum number of slices for distributed leaves.
///
/// Fewer slices take less than 1 MiB in the manifest, with their checksums. A reader then reads nothing else.
static MIN_DISTRIBUTED_SLICES: AtomicUsize = AtomicUsize::new(4096);

/// Sets the minimum number of slices for distributed leaves, for tests with few writers.
pub fn set_min_distributed_slices(slices: usize) {
    MIN_DISTRIBUTED_SLICES.store(slices, Ordering::Relaxed);
}

/// The description of a version in the attributes of its manifest.
pub(crate) struct VersionAttrs {
    pub(crate) id: u128,
    pub(crate) epoch: u32,
    pub(crate) number: u64,
    pub(crate) writers: WriterSet,
    pub(crate) digest: ArchiveDigest,
}

/// Returns the encoded manifest of a version. `contributions` are ordered by writer.
///
/// # Errors
///
/// Returns a text with the error and its place: fqn, region, writers.
pub(crate) fn merge(
    contributions: &[WriterArchive],
    options: MergeOptions,
    label: &VersionAttrs,
) -> Result<Vec<u8>, String> {
    if let Some(delta) = contributions.iter().find(|each| each.archive.base_digest().is_some()) {
        return Err(format!("the archive of writer {} is a delta", delta.writer));
    }
    let ids = StorageIds::new(contributions)?;
    let roots: Vec<Node> = (0..contributions.len()).map(|index| ids.tree(index)).collect();
    let nodes: Vec<WriterNode<'_>> =
        contributions.iter().map(|each| each.writer).zip(&roots).collect();
    let divergent = options.divergent;
    let mut merger =
        Merger { storages: &ids, divergent, is_in_wrapper: false, ties: BTreeMap::new() };
    let mut root = merger.merge_node(&ObjectPath::root(), &nodes)?;
    let storages = ids.compact(&mut root);
    let shards: Vec<ShardFile> = contributions.iter().map(WriterArchive::shard_file).collect();
    let archives: Vec<&Archive> = contributions.iter().map(|each| &each.archive).collect();
    let mut content = ManifestContent { root, storages, shards };
    content.distribute(&archives, options.min_distributed_slices);
    let ManifestContent { root, storages, shards } = content;
    let mut attrs = common_attrs(contributions)?;
    attrs.extend([
        ("tssd.store.digest".to_owned(), AttrValue::Text(label.digest.to_string().into())),
        ("tssd.store.epoch".to_owned(), AttrValue::Int(i64::from(label.epoch))),
        ("tssd.store.id".to_owned(), AttrValue::Text(format!("{:032x}", label.id).into())),
        (
            "tssd.store.layout_fingerprint".to_owned(),
            AttrValue::Bytes(fingerprint(&root, &storages).into()),
        ),
        ("tssd.store.version".to_owned(), AttrValue::Int(label.number.cast_signed())),
        ("tssd.store.writers".to_owned(), AttrValue::Text(label.writers.to_string().into())),
    ]);
    tssd_format::encode_manifest(&root, &storages, &attrs, &shards)
        .map_err(|error| error.to_string())
}

/// Returns the attributes of all archives together. Writers that share an attribute must agree on its value.
fn common_attrs(contributions: &[WriterArchive]) -> Result<Attrs, String> {
    let mut common = Attrs::new();
    for contribution in contributions {
        // The compression level is a property of an archive, not of the version.
        let attrs = contribution.archive.attrs().into_iter();
        for (name, value) in attrs.filter(|(name, _)| name != ZSTD_LEVEL_ATTR) {
            let merged = match common.remove(&name) {
                Some(other) if name == MODULE_METADATA_ATTR => {
                    merge_module_metadata(&other, &value)
                }
                Some(other) => Some(other).filter(|other| *other == value),
                None => Some(value),
            };
            let Some(merged) = merged else {
                let writer = contribution.writer;
                return Err(format!("writer {writer} gives the attribute `{name}` another value"));
            };
            common.insert(name, merged);
        }
    }
    Ok(common)
}

/// Merges the module metadata of two writers. Returns `None` if they differ for a module that both have.
///
/// Each stage of a pipeline has the metadata of its own modules.
fn merge_module_metadata(one: &AttrValue, other: &AttrValue) -> Option<AttrValue> {
    if one == other {
        return Some(one.clone());
    }
    let parse = |value: &AttrValue| match value {
        AttrValue::Text(text) => serde_json::from_slice(text.as_bytes()).ok(),
        _ => None,
    };
    let mut merged: Json = parse(one)?;
    merge_json(&mut merged, parse(other)?)?;
    Some(AttrValue::Text(merged.to_string().into()))
}

/// Merges a JSON object into another, recursively. Returns `None` if both have different values under one name.
fn merge_json(one: &mut Json, other: Json) -> Option<()> {
    match (one, other) {
        (Json::Object(one), Json::Object(other)) => {
            for (name, value) in other {
                match one.entry(name) {
                    Entry::Occupied(mut own) => merge_json(own.get_mut(), value)?,
                    Entry::Vacant(vacant) => drop(vacant.insert(value)),
                }
            }
            Some(())
        }
        (one, other) => (*one == other).then_some(()),
    }
}

impl WriterArchive {
    fn shard_file(&self) -> ShardFile {
        self.archive.shard_file(&self.file, self.writer)
    }
}

/// A writer and its node at a path.
type WriterNode<'a> = (u32, &'a Node);

/// Ids of the storages of all writers, consecutive over all archives.
struct StorageIds<'a> {
    contributions: &'a [WriterArchive],
    /// The id of the first storage of each contribution.
    first_ids: Vec<u32>,
}

impl<'a> StorageIds<'a> {
    fn new(contributions: &'a [WriterArchive]) -> Result<Self, String> {
        let mut first_ids = Vec::with_capacity(contributions.len());
        let mut next = 0_u32;
        for contribution in contributions {
            first_ids.push(next);
            next = next
                .checked_add(contribution.archive.storage_count())
                .ok_or("the writers hold more storages together than a manifest can name")?;
        }
        Ok(Self { contributions, first_ids })
    }

    /// Returns the tree of one contribution, with storage ids in place of its storage numbers.
    fn tree(&self, index: usize) -> Node {
        let mut root = self.contributions[index].archive.structure();
        let first = self.first_ids[index];
        for_each_storage(&mut root, &mut |storage| *storage += first);
        root
    }

    /// Returns the index of the contribution that has a storage, and the number of the storage in its archive.
    fn locate(&self, storage: u32) -> (usize, u32) {
        let index = self.first_ids.partition_point(|first| *first <= storage) - 1;
        (index, storage - self.first_ids[index])
    }

    fn storage(&self, storage: u32) -> StorageReference {
        let (index, number) = self.locate(storage);
        let shard = u32::try_from(index).expect("there are fewer writers than 2^32");
        StorageReference { shard, ..self.contributions[index].archive.storage(number) }
    }

    /// Renumbers the storages of a tree from 0 and returns them. Their order, by writer and offset, stays the same.
    fn compact(&self, root: &mut Node) -> Vec<StorageReference> {
        let mut used = BTreeSet::new();
        for_each_storage(root, &mut |storage| used.extend([*storage]));
        let numbers: BTreeMap<u32, u32> = used.iter().copied().zip(0..).collect();
        for_each_storage(root, &mut |storage| *storage = numbers[storage]);
        used.into_iter().map(|storage| self.storage(storage)).collect()
    }

    /// Whether two storages hold the same bytes: equal lengths, and equal digests or stored chunk checksums.
    fn has_same_bytes(&self, one: u32, other: u32) -> bool {
        let (one, other) = (self.storage(one), self.storage(other));
        one.len == other.len
            && match (one.digest, other.digest) {
                (Some(one), Some(other)) => one == other,
                _ => one.compressed_layout == other.compressed_layout && one.crcs == other.crcs,
            }
    }

    /// Whether two plain tensors have the same elements.
    fn is_same_tensor(
        &self,
        one: &TensorReference,
        other: &TensorReference,
    ) -> Result<bool, String> {
        if one.meta != other.meta {
            return Ok(false);
        }
        let (Some(first), Some(second)) = (one.storage, other.storage) else { return Ok(true) };
        if one.byte_offset == other.byte_offset && self.has_same_bytes(first, second) {
            return Ok(true);
        }
        // The same elements may be in storages with other contents. Compare them if the archives can be read.
        let is_readable = |storage| self.contributions[self.locate(storage).0].is_readable;
        if !is_readable(first) || !is_readable(second) {
            return Ok(false);
        }
        let tensor = |reference: &TensorReference, storage| {
            let (index, number) = self.locate(storage);
            let reference = TensorReference { storage: Some(number), ..reference.clone() };
            self.contributions[index]
                .archive
                .read_tensor(&reference)
                .map_err(|error| error.to_string())
        };
        let (one, other) = (tensor(one, first)?, tensor(other, second)?);
        let (one, other) = (one.view(), other.view());
        Ok(if has_overlapping_elements(one.meta()) {
            one.span() == other.span()
        } else {
            one.elements_equal(&other)
        })
    }

    fn is_same_leaf(&self, one: &Node, other: &Node) -> bool {
        match (one, other) {
            (Node::StoredLeaf(kind, first), Node::StoredLeaf(other, second)) => {
                kind == other && self.has_same_bytes(*first, *second)
            }
            _ => one == other,
        }
    }
}

/// Whether elements of a tensor share bytes other than by a stride of 0.
///
/// Such a tensor can have any number of elements on a few bytes, so its bytes are compared and not its elements.
fn has_overlapping_elements(meta: &TensorMeta) -> bool {
    let strides = meta.strides();
    let dimensions = meta.shape().iter().zip(&strides).filter(|(_, stride)| **stride > 0);
    let elements = dimensions.fold(1_u64, |product, (size, _)| product.saturating_mul(*size));
    elements.saturating_mul(meta.dtype().itemsize()) > meta.span_bytes()
}

struct Merger<'a> {
    storages: &'a StorageIds<'a>,
    divergent: DivergencePolicy,
    /// Whether the nodes are inside a tensor wrapper, which is merged as a whole.
    is_in_wrapper: bool,
    /// For each storage of a merged plain tensor, the storages of its leaves in all writers that hold them.
    ties: BTreeMap<u32, Vec<StorageByWriter>>,
}

/// The storage id of one leaf, by writer that holds it.
type StorageByWriter = BTreeMap<u32, u32>;

impl Merger<'_> {
    fn merge_node(&mut self, path: &ObjectPath, nodes: &[WriterNode<'_>]) -> Result<Node, String> {
        let containers = nodes.iter().filter(|(_, node)| matches!(node, Node::Container(..)));
        match (containers.count(), nodes) {
            (0, _) => self.merge_leaf(path, nodes),
            (count, [(_, Node::Container(container, _)), ..]) if count == nodes.len() => {
                self.merge_container(path, container, nodes)
            }
            _ => Err(disagreement(path, nodes, "some hold a container and some a leaf")),
        }
    }

    fn merge_container(
        &mut self,
        path: &ObjectPath,
        container: &Container,
        nodes: &[WriterNode<'_>],
    ) -> Result<Node, String> {
        // A container of one writer stays as it is, except that its slices are verified.
        if let [(writer, Node::Container(_, entries))] = nodes {
            let child = |(step, child): &(Step, Node)| {
                let path = path.clone().step(step.clone());
                Ok((step.clone(), self.merge_node(&path, &[(*writer, child)])?))
            };
            let merged = entries.iter().map(child).collect::<Result<_, String>>()?;
            return Ok(Node::Container(container.clone(), merged));
        }
        if matches!(container, Container::Tagged(tag) if tag.is_atomic()) {
            let is_same = nodes.iter().all(|(_, node)| *node == nodes[0].1);
            return if is_same {
                Ok(Node::clone(nodes[0].1))
            } else {
                self.merge_divergent(path, nodes)
            };
        }
        if nodes.iter().all(|(_, node)| is_wrapper(node)) {
            return self.merge_wrapper(path, container, nodes);
        }
        self.merge_entries(path, container, nodes)
    }

    /// Merges a tensor wrapper. All writers must have the same one, apart from the slices that they hold.
    ///
    /// Different wrappers without slices are a divergent leaf.
    fn merge_wrapper(
        &mut self,
        path: &ObjectPath,
        container: &Container,
        nodes: &[WriterNode<'_>],
    ) -> Result<Node, String> {
        let is_inner = std::mem::replace(&mut self.is_in_wrapper, true);
        let merged = self.merge_entries(path, container, nodes);
        self.is_in_wrapper = is_inner;
        match merged {
            Err(_) if !is_inner && !nodes.iter().any(|(_, node)| has_slices(node)) => {
                self.merge_divergent(path, nodes)
            }
            merged => merged,
        }
    }

    /// Merges the entries of containers of one kind.
    fn merge_entries(
        &mut self,
        path: &ObjectPath,
        container: &Container,
        nodes: &[WriterNode<'_>],
    ) -> Result<Node, String> {
        // Ordered by writer, then by insertion.
        let mut children: IndexMap<&Step, Vec<WriterNode<'_>>> = IndexMap::new();
        for (writer, node) in nodes {
            let Node::Container(other, entries) = node else { continue };
            if other != container {
                return Err(disagreement(path, nodes, "containers of different kinds"));
            }
            for (step, child) in entries {
                children.entry(step).or_default().push((*writer, child));
            }
        }
        let is_dict = match container {
            Container::Dict | Container::OrderedDict => true,
            Container::Tagged(tag) => tag.is_open_dict(),
            _ => false,
        };
        let is_open = is_dict && !self.is_in_wrapper;
        if !is_open && children.values().any(|holders| holders.len() < nodes.len()) {
            return Err(disagreement(path, nodes, "different numbers of elements"));
        }
        let mut merged = Vec::with_capacity(children.len());
        for (step, child_nodes) in children {
            let path = path.clone().step(step.clone());
            merged.push((step.clone(), self.merge_node(&path, &child_nodes)?));
        }
        Ok(Node::Container(container.clone(), merged))
    }

    fn merge_leaf(&mut self, path: &ObjectPath, nodes: &[WriterNode<'_>]) -> Result<Node, String> {
        let mut slices = Vec::new();
        let mut tensors = Vec::new();
        let mut sharded = 0;
        for (writer, node) in nodes {
            if let Node::Tensors(references) = node {
                match references.as_slice() {
                    [plain @ TensorReference { shard_spec: None, .. }] => {
                        tensors.push((*writer, plain));
                    }
                    references => {
                        sharded += 1;
                        slices.extend(references.iter().map(|slice| (*writer, slice)));
                    }
                }
            }
        }
        if !slices.is_empty() {
            return if sharded == nodes.len() {
                Self::merge_slices(path, &slices)
            } else {
                Err(disagreement(path, nodes, "some hold slices and some a whole leaf"))
            };
        }
        if tensors.len() == nodes.len() {
            return self.merge_tensors(path, nodes, &tensors);
        }
        let [(_, first), others @ ..] = nodes else { unreachable!("somebody holds the leaf") };
        if others.iter().all(|(_, other)| self.storages.is_same_leaf(first, other)) {
            return Ok(Node::clone(first));
        }
        self.merge_divergent(path, nodes)
    }

    /// Merges the slices of a global tensor.
    ///
    /// Slices with equal regions are replicas; the first is kept. The remaining regions must tile the global tensor.
    fn merge_slices(path: &ObjectPath, slices: &[(u32, &TensorReference)]) -> Result<Node, String> {
        let [(first_writer, first), ..] = slices else { unreachable!("there is a slice") };
        let global_shape = tensor_slice(first).global_shape();
        let mut regions: IndexMap<&Region, &TensorReference> = IndexMap::new();
        for (writer, slice) in slices {
            let own = tensor_slice(slice);
            if slice.meta.dtype() != first.meta.dtype() {
                let (one, other) = (first.meta.dtype(), slice.meta.dtype());
                return Err(format!(
                    "`{}` is {one} at writer {first_writer} and {other} at writer {writer}",
                    path.fqn()
                ));
            }
            if own.global_shape() != global_shape {
                return Err(format!(
                    "`{}` has the global shape {global_shape:?} at writer {first_writer} and {:?} \
                     at writer {writer}",
                    path.fqn(),
                    own.global_shape()
                ));
            }
            if !own.region().is_empty() {
                regions.entry(own.region()).or_insert(slice);
            }
        }
        Region::whole(global_shape).verify_tiling(regions.keys().copied()).map_err(|error| {
            let writers: WriterSet = slices.iter().map(|(writer, _)| *writer).collect();
            format!("`{}`: {error}; writers {writers} hold it", path.fqn())
        })?;
        let mut kept: Vec<TensorReference> = regions.into_values().cloned().collect();
        if kept.is_empty() {
            kept.push(TensorReference::clone(first));
        }
        Ok(Node::Tensors(kept))
    }

    /// Merges a plain tensor. It is stored once if all writers hold equal tensors.
    fn merge_tensors(
        &mut self,
        path: &ObjectPath,
        nodes: &[WriterNode<'_>],
        tensors: &[(u32, &TensorReference)],
    ) -> Result<Node, String> {
        let [(_, first), others @ ..] = tensors else { unreachable!("somebody holds the leaf") };
        if self.storages.contributions.len() == 1 {
            // With one writer, all ties survive.
            return Ok(Node::Tensors(vec![TensorReference::clone(first)]));
        }
        for (_, other) in others {
            if !self.storages.is_same_tensor(first, other)? {
                return self.merge_divergent(path, nodes);
            }
        }
        let holders: StorageByWriter = tensors
            .iter()
            .filter_map(|(writer, reference)| Some((*writer, reference.storage?)))
            .collect();
        // A tie survives only if every writer that holds both leaves ties them. So the tensor is taken from the first
        // writer whose storage creates no other tie. If there is none, it is taken from the first writer.
        let breaks_tie = |storage: u32| {
            self.ties.get(&storage).into_iter().flatten().any(|tied| {
                holders
                    .iter()
                    .any(|(writer, own)| tied.get(writer).is_some_and(|other| other != own))
            })
        };
        let chosen = tensors.iter().find(|(_, each)| !each.storage.is_some_and(breaks_tie));
        let (_, chosen) = chosen.unwrap_or(&tensors[0]);
        if let Some(storage) = chosen.storage {
            self.ties.entry(storage).or_default().push(holders);
        }
        Ok(Node::Tensors(vec![TensorReference::clone(chosen)]))
    }

    fn merge_divergent(&self, path: &ObjectPath, nodes: &[WriterNode<'_>]) -> Result<Node, String> {
        if self.is_in_wrapper {
            // One writer's value would not belong to the slices of another writer.
            return Err(disagreement(
                path,
                nodes,
                "different values in a tensor that wraps tensors",
            ));
        }
        match self.divergent {
            DivergencePolicy::Error => Err(disagreement(
                path,
                nodes,
                "different values; shard it, or put with on_divergence=\"lowest\" or \"keep\"",
            )),
            DivergencePolicy::Lowest => Ok(Node::clone(nodes[0].1)),
            DivergencePolicy::Keep => {
                let own = nodes.iter().map(|(writer, node)| {
                    (Step::Key(MapKey::from_writer(*writer)), Node::clone(node))
                });
                Ok(Node::Container(Container::Divergent, own.collect()))
            }
        }
    }
}

/// Returns the slice of a global tensor that a reference holds.
fn tensor_slice(reference: &TensorReference) -> &TensorSlice {
    reference.shard_spec.as_ref().expect("the reference is a slice").slice()
}

/// Returns whether a node is a tensor wrapper.
fn is_wrapper(node: &Node) -> bool {
    let Node::Container(Container::Tagged(tag), _) = node else { return false };
    tag.class() == TaggedClass::Wrapper
}

/// Returns whether a tree has a slice of a global tensor.
fn has_slices(node: &Node) -> bool {
    match node {
        Node::Container(_, children) => children.iter().any(|(_, child)| has_slices(child)),
        Node::Tensors(references) => references.iter().any(|each| each.shard_spec.is_some()),
        Node::Distributed(_) => true,
        Node::Leaf(_) | Node::StoredLeaf(..) => false,
    }
}

/// Calls `visit` for every storage number in a tree.
fn for_each_storage(node: &mut Node, visit: &mut impl FnMut(&mut u32)) {
    match node {
        Node::Leaf(_) | Node::Distributed(_) => {}
        Node::StoredLeaf(_, number) => visit(number),
        Node::Tensors(references) => {
            references.iter_mut().filter_map(|each| each.storage.as_mut()).for_each(visit);
        }
        Node::Container(_, children) => {
            for (_, child) in children {
                for_each_storage(child, visit);
            }
        }
    }
}

fn disagreement(path: &ObjectPath, nodes: &[WriterNode<'_>], what: &str) -> String {
    let writers: WriterSet = nodes.iter().map(|(writer, _)| *writer).collect();
    format!("writers {writers} disagree on `{}`: {what}", path.fqn())
}

#[cfg(test)]
mod tests;
