//! The proof of a commit: the archives of all writers merged into one manifest, or what keeps them
//! from being one state dict. Pure. Spec: `spec/reshard.md`, section 2.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value as Json;
use serde_json::map::Entry;
use tssd_format::{
    Archive, AttrValue, Attrs, Container, MapKey, Node, ObjectPath, Region, ShardFile, Step,
    StorageReference, TensorMeta, TensorReference, ZSTD_LEVEL_ATTR,
};

use crate::ledger::{Digest, WriterSet};
use crate::plan::fingerprint;

/// What torch has hung on state dicts of modules: spec, format.md, section 7.
const MODULE_METADATA_ATTR: &str = "tssd.module_metadata";

/// The attribute of an archive that says how its writer wants divergent leaves to be merged.
pub(crate) const DIVERGENT_ATTR: &str = "tssd.divergent";

/// What one writer has committed.
pub(crate) struct Contribution {
    pub(crate) writer: u32,
    /// The base name of its file.
    pub(crate) file: String,
    pub(crate) archive: Archive,
    /// Whether its bytes can be looked at here.
    pub(crate) is_seen: bool,
}

/// What to do with a leaf that several writers hold differently and that is no slice of a global
/// tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Divergent {
    /// Reject the version.
    #[default]
    Error,
    /// Keep that of the lowest writer.
    Lowest,
    /// Keep each writer's own; a get then says whose it wants.
    Keep,
}

/// What the manifest says of its version.
pub(crate) struct Label {
    pub(crate) id: u128,
    pub(crate) epoch: u32,
    pub(crate) number: u64,
    pub(crate) writers: WriterSet,
    pub(crate) digest: Digest,
}

/// The manifest of a version, given its contributions in the order of their writers; or what is
/// wrong and where: fqn, region, writers.
pub(crate) fn merge(
    contributions: &[Contribution],
    divergent: Divergent,
    label: &Label,
) -> Result<Vec<u8>, String> {
    let stored = Stored::of(contributions)?;
    let roots: Vec<Node> = (0..contributions.len()).map(|place| stored.structure(place)).collect();
    let copies: Vec<Held<'_>> = contributions.iter().map(|each| each.writer).zip(&roots).collect();
    let mut merger = Merger { stored: &stored, divergent, ties: BTreeMap::new() };
    let mut root = merger.node(&ObjectPath::root(), &copies)?;
    let storages = stored.compact(&mut root);
    let shards: Vec<ShardFile> = contributions.iter().map(Contribution::shard_file).collect();
    let mut attrs = common_attrs(contributions)?;
    attrs.extend([
        ("tssd.digest".to_owned(), AttrValue::Text(label.digest.to_string().into())),
        ("tssd.epoch".to_owned(), AttrValue::Int(i64::from(label.epoch))),
        ("tssd.id".to_owned(), AttrValue::Text(format!("{:032x}", label.id).into())),
        ("tssd.layout".to_owned(), AttrValue::Bytes(fingerprint(&root, &storages).into())),
        ("tssd.version".to_owned(), AttrValue::Int(label.number.cast_signed())),
        ("tssd.writers".to_owned(), AttrValue::Text(label.writers.to_string().into())),
    ]);
    tssd_format::encode_manifest(&root, &storages, &attrs, &shards)
        .map_err(|error| error.to_string())
}

/// What the writers say of the state dict as a whole, together.
fn common_attrs(contributions: &[Contribution]) -> Result<Attrs, String> {
    let mut common = Attrs::new();
    for contribution in contributions {
        // How an archive was compressed says nothing of the version.
        let attrs = contribution.archive.attrs().into_iter();
        for (name, value) in attrs.filter(|(name, _)| name != ZSTD_LEVEL_ATTR) {
            let both = match common.remove(&name) {
                Some(other) if name == MODULE_METADATA_ATTR => modules(&other, &value),
                Some(other) => Some(other).filter(|other| *other == value),
                None => Some(value),
            };
            let Some(both) = both else {
                let writer = contribution.writer;
                return Err(format!("writer {writer} gives the attribute `{name}` another value"));
            };
            common.insert(name, both);
        }
    }
    Ok(common)
}

/// What is said of modules here and there; none if that differs for one that is in both. Stages of a pipeline have each
/// their own.
fn modules(one: &AttrValue, other: &AttrValue) -> Option<AttrValue> {
    if one == other {
        return Some(one.clone());
    }
    let read = |value: &AttrValue| match value {
        AttrValue::Text(text) => serde_json::from_slice(text.as_bytes()).ok(),
        _ => None,
    };
    let mut united: Json = read(one)?;
    unite(&mut united, read(other)?)?;
    Some(AttrValue::Text(united.to_string().into()))
}

/// Adds what another object has; none if both have something under one name that is no object and differs.
fn unite(one: &mut Json, other: Json) -> Option<()> {
    match (one, other) {
        (Json::Object(one), Json::Object(other)) => {
            for (name, value) in other {
                match one.entry(name) {
                    Entry::Occupied(mut own) => unite(own.get_mut(), value)?,
                    Entry::Vacant(vacant) => drop(vacant.insert(value)),
                }
            }
            Some(())
        }
        (one, other) => (*one == other).then_some(()),
    }
}

impl Contribution {
    fn shard_file(&self) -> ShardFile {
        ShardFile {
            name: self.file.clone(),
            file_len: self.archive.file_len(),
            index_off: self.archive.index_range().start,
            index_crc32: self.archive.index_crc32(),
            writer: self.writer,
            digest: self.archive.root_digest(),
        }
    }
}

/// A writer, and what it holds at one path.
type Held<'a> = (u32, &'a Node);

/// The storages of all writers, numbered through.
struct Stored<'a> {
    contributions: &'a [Contribution],
    /// The number of the first storage of each writer.
    firsts: Vec<u32>,
}

impl<'a> Stored<'a> {
    fn of(contributions: &'a [Contribution]) -> Result<Self, String> {
        let mut firsts = Vec::with_capacity(contributions.len());
        let mut next = 0_u32;
        for contribution in contributions {
            firsts.push(next);
            next = next
                .checked_add(contribution.archive.storage_count())
                .ok_or("the writers hold more storages together than a manifest can name")?;
        }
        Ok(Self { contributions, firsts })
    }

    /// The tree of one writer, with storages as they are numbered here.
    fn structure(&self, place: usize) -> Node {
        let mut root = self.contributions[place].archive.structure();
        let first = self.firsts[place];
        each_storage(&mut root, &mut |storage| *storage += first);
        root
    }

    /// The place of the writer that has a storage, and the number that the storage has there.
    fn local(&self, storage: u32) -> (usize, u32) {
        let place = self.firsts.partition_point(|first| *first <= storage) - 1;
        (place, storage - self.firsts[place])
    }

    fn storage(&self, storage: u32) -> StorageReference {
        let (place, local) = self.local(storage);
        let shard = u32::try_from(place).expect("there are fewer writers than 2^32");
        StorageReference { shard, ..self.contributions[place].archive.storage(local) }
    }

    /// Numbers the storages that a tree names from 0 on, and returns them. Their order stays, which
    /// is that of writers and of offsets.
    fn compact(&self, root: &mut Node) -> Vec<StorageReference> {
        let mut named = BTreeSet::new();
        each_storage(root, &mut |storage| named.extend([*storage]));
        let numbers: BTreeMap<u32, u32> = named.iter().copied().zip(0..).collect();
        each_storage(root, &mut |storage| *storage = numbers[storage]);
        named.into_iter().map(|storage| self.storage(storage)).collect()
    }

    /// Whether two storages hold the same bytes, by length and by their digests or the checksum of
    /// every chunk, as it is stored.
    fn same_content(&self, one: u32, other: u32) -> bool {
        let (one, other) = (self.storage(one), self.storage(other));
        one.len == other.len
            && match (one.digest, other.digest) {
                (Some(one), Some(other)) => one == other,
                _ => one.compressed_layout == other.compressed_layout && one.crcs == other.crcs,
            }
    }

    /// Whether two plain tensors have the same elements.
    fn same_tensor(&self, one: &TensorReference, other: &TensorReference) -> Result<bool, String> {
        if one.meta != other.meta {
            return Ok(false);
        }
        let (Some(first), Some(second)) = (one.storage, other.storage) else { return Ok(true) };
        if one.byte_offset == other.byte_offset && self.same_content(first, second) {
            return Ok(true);
        }
        // The same elements may lie in other company, where they can be looked at.
        let is_seen = |storage| self.contributions[self.local(storage).0].is_seen;
        if !is_seen(first) || !is_seen(second) {
            return Ok(false);
        }
        let tensor = |reference: &TensorReference, storage| {
            let (place, local) = self.local(storage);
            let local = TensorReference { storage: Some(local), ..reference.clone() };
            self.contributions[place].archive.read_tensor(&local).map_err(|error| error.to_string())
        };
        let (one, other) = (tensor(one, first)?, tensor(other, second)?);
        let (one, other) = (one.view(), other.view());
        Ok(if overlaps(one.meta()) {
            one.span() == other.span()
        } else {
            one.elements_equal(&other)
        })
    }

    fn same_leaf(&self, one: &Node, other: &Node) -> bool {
        match (one, other) {
            (Node::StoredLeaf(kind, first), Node::StoredLeaf(other, second)) => {
                kind == other && self.same_content(*first, *second)
            }
            _ => one == other,
        }
    }
}

/// Whether elements share bytes, but for those that a stride of 0 repeats: a few bytes can make any number of them, and
/// are compared in their place.
fn overlaps(meta: &TensorMeta) -> bool {
    let strides = meta.strides();
    let apart = meta.shape().iter().zip(&strides).filter(|(_, stride)| **stride > 0);
    let elements = apart.fold(1_u64, |product, (size, _)| product.saturating_mul(*size));
    elements.saturating_mul(meta.dtype().itemsize()) > meta.span_bytes()
}

struct Merger<'a> {
    stored: &'a Stored<'a>,
    divergent: Divergent,
    /// For each storage that plain tensors were taken from: what all writers hold in their place.
    ties: BTreeMap<u32, Vec<Holders>>,
}

/// The storage of one leaf in each writer that holds it.
type Holders = BTreeMap<u32, u32>;

impl Merger<'_> {
    fn node(&mut self, path: &ObjectPath, copies: &[Held<'_>]) -> Result<Node, String> {
        let containers = copies.iter().filter(|(_, node)| matches!(node, Node::Container(..)));
        match (containers.count(), copies) {
            (0, _) => self.leaf(path, copies),
            (count, [(_, Node::Container(container, _)), ..]) if count == copies.len() => {
                self.container(path, container, copies)
            }
            _ => Err(disagree(path, copies, "some hold a container and some a leaf")),
        }
    }

    fn container(
        &mut self,
        path: &ObjectPath,
        container: &Container,
        copies: &[Held<'_>],
    ) -> Result<Node, String> {
        // What one alone holds is as it is, once its slices are proven.
        if let [(writer, Node::Container(_, entries))] = copies {
            let child = |(step, child): &(Step, Node)| {
                let path = path.clone().step(step.clone());
                Ok((step.clone(), self.node(&path, &[(*writer, child)])?))
            };
            let merged = entries.iter().map(child).collect::<Result<_, String>>()?;
            return Ok(Node::Container(container.clone(), merged));
        }
        // By writer, then by insertion.
        let mut children: indexmap::IndexMap<&Step, Vec<Held<'_>>> = indexmap::IndexMap::new();
        for (writer, node) in copies {
            let Node::Container(other, entries) = node else { continue };
            if other != container {
                return Err(disagree(path, copies, "containers of different kinds"));
            }
            for (step, child) in entries {
                children.entry(step).or_default().push((*writer, child));
            }
        }
        let is_dict = matches!(container, Container::Dict | Container::OrderedDict);
        if !is_dict && children.values().any(|held| held.len() < copies.len()) {
            return Err(disagree(path, copies, "different numbers of elements"));
        }
        let mut merged = Vec::with_capacity(children.len());
        for (step, held) in children {
            let path = path.clone().step(step.clone());
            merged.push((step.clone(), self.node(&path, &held)?));
        }
        Ok(Node::Container(container.clone(), merged))
    }

    fn leaf(&mut self, path: &ObjectPath, copies: &[Held<'_>]) -> Result<Node, String> {
        let mut slices = Vec::new();
        let mut tensors = Vec::new();
        let mut sliced = 0;
        for (writer, node) in copies {
            if let Node::Tensors(references) = node {
                match references.as_slice() {
                    [plain @ TensorReference { shard_spec: None, .. }] => {
                        tensors.push((*writer, plain));
                    }
                    run => {
                        sliced += 1;
                        slices.extend(run.iter().map(|slice| (*writer, slice)));
                    }
                }
            }
        }
        if !slices.is_empty() {
            return if sliced == copies.len() {
                Self::slices(path, &slices)
            } else {
                Err(disagree(path, copies, "some hold slices and some a whole leaf"))
            };
        }
        if tensors.len() == copies.len() {
            return self.tensors(path, copies, &tensors);
        }
        let [(_, first), others @ ..] = copies else { unreachable!("somebody holds the leaf") };
        if others.iter().all(|(_, other)| self.stored.same_leaf(first, other)) {
            return Ok(Node::clone(first));
        }
        self.diverge(path, copies)
    }

    /// The slices of one global tensor: equal boxes are replicas, of which the first is kept; all
    /// others must tile it.
    fn slices(path: &ObjectPath, slices: &[(u32, &TensorReference)]) -> Result<Node, String> {
        let place = |slice: &TensorReference| slice.shard_spec.clone().expect("slices have places");
        let [(first_writer, first), ..] = slices else { unreachable!("there is a slice") };
        let global_shape = place(first).slice().global_shape().to_vec();
        let mut boxes: indexmap::IndexMap<Region, &TensorReference> = indexmap::IndexMap::new();
        for (writer, slice) in slices {
            let own = place(slice);
            if slice.meta.dtype() != first.meta.dtype() {
                let (one, other) = (first.meta.dtype(), slice.meta.dtype());
                return Err(format!(
                    "`{}` is {one} at writer {first_writer} and {other} at writer {writer}",
                    path.fqn()
                ));
            }
            if own.slice().global_shape() != global_shape {
                return Err(format!(
                    "`{}` has the global shape {global_shape:?} at writer {first_writer} and {:?} \
                     at writer {writer}",
                    path.fqn(),
                    own.slice().global_shape()
                ));
            }
            let region = own.slice().region();
            if !region.is_empty() {
                boxes.entry(region).or_insert(slice);
            }
        }
        Region::whole(&global_shape).verify_tiling(boxes.keys()).map_err(|error| {
            let writers: WriterSet = slices.iter().map(|(writer, _)| *writer).collect();
            format!("`{}`: {error}; writers {writers} hold it", path.fqn())
        })?;
        let mut kept: Vec<TensorReference> = boxes.into_values().cloned().collect();
        if kept.is_empty() {
            kept.push(TensorReference::clone(first));
        }
        Ok(Node::Tensors(kept))
    }

    /// A plain tensor: kept once if all writers hold the same.
    fn tensors(
        &mut self,
        path: &ObjectPath,
        copies: &[Held<'_>],
        tensors: &[(u32, &TensorReference)],
    ) -> Result<Node, String> {
        let [(_, first), others @ ..] = tensors else { unreachable!("somebody holds the leaf") };
        if self.stored.contributions.len() == 1 {
            // Its ties are its own.
            return Ok(Node::Tensors(vec![TensorReference::clone(first)]));
        }
        for (_, other) in others {
            if !self.stored.same_tensor(first, other)? {
                return self.diverge(path, copies);
            }
        }
        let holders: Holders = tensors
            .iter()
            .filter_map(|(writer, reference)| Some((*writer, reference.storage?)))
            .collect();
        // A tie survives only if every writer that holds both leaves ties them; where one does not,
        // its own storage is taken, which nothing else lies in.
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

    fn diverge(&self, path: &ObjectPath, copies: &[Held<'_>]) -> Result<Node, String> {
        match self.divergent {
            Divergent::Error => Err(disagree(
                path,
                copies,
                "different values; shard it, or put with divergent=\"lowest\" or \"keep\"",
            )),
            Divergent::Lowest => Ok(Node::clone(copies[0].1)),
            Divergent::Keep => {
                let own = copies.iter().map(|(writer, node)| {
                    (Step::Key(MapKey::from_writer(*writer)), Node::clone(node))
                });
                Ok(Node::Container(Container::Divergent, own.collect()))
            }
        }
    }
}

/// Calls `storage` with every storage number in a tree.
fn each_storage(node: &mut Node, storage: &mut impl FnMut(&mut u32)) {
    match node {
        Node::Leaf(_) => {}
        Node::StoredLeaf(_, number) => storage(number),
        Node::Tensors(references) => {
            references.iter_mut().filter_map(|each| each.storage.as_mut()).for_each(storage);
        }
        Node::Container(_, children) => {
            for (_, child) in children {
                each_storage(child, storage);
            }
        }
    }
}

fn disagree(path: &ObjectPath, copies: &[Held<'_>], what: &str) -> String {
    let writers: WriterSet = copies.iter().map(|(writer, _)| *writer).collect();
    format!("writers {writers} disagree on `{}`: {what}", path.fqn())
}

#[cfg(test)]
mod tests;
