//! The structure of an archive: its tree, with references in place of tensor bytes.
//!
//! The structure is the content of the index as owned values. A writer builds it from a state dict
//! and encodes it, a reader decodes it, and a store merges the structures of several writers.

use bytes::Bytes;

use crate::class_tag::ClassTag;
use crate::distributed::DistributedTensor;
use crate::error::{Error, ErrorKind, Result};
use crate::key::{MapKey, ObjectPath, Step};
use crate::record::{is_inline, kind};
use crate::reference::TensorReference;
use crate::shard::{Shard, ShardSpec};
use crate::state_dict::{Dict, MAX_DEPTH, Value};
use crate::tensor::{Tensor, TensorMeta};
use crate::text::Text;

/// A node of the tree.
#[derive(Clone, Debug, PartialEq)]
pub enum Node {
    /// A leaf that is stored in the index: any [`Value`] except containers, tensors and shards.
    Leaf(Value),
    /// A leaf whose content is a storage, with the number of the storage.
    StoredLeaf(ContentKind, u32),
    /// A plain tensor (one reference without shard spec) or the shards of one global tensor.
    Tensors(Vec<TensorReference>),
    /// The tensor of a manifest whose shards follow from its mesh and placements.
    Distributed(DistributedTensor),
    /// A container with its children in insertion order.
    Container(Container, Vec<(Step, Node)>),
}

impl Node {
    /// Returns all nodes except containers with their paths, in insertion order, depth first.
    pub fn into_leaves(self) -> Vec<(ObjectPath, Self)> {
        let mut leaves = Vec::new();
        self.collect(&mut ObjectPath::root(), &mut leaves);
        leaves
    }

    /// Returns the numbers of the storages that hold the content or the tensors of a leaf.
    ///
    /// A distributed leaf names no storage.
    pub fn storages(&self) -> impl Iterator<Item = u32> {
        let (content, run) = match self {
            Self::StoredLeaf(_, storage) => (Some(*storage), [].as_slice()),
            Self::Tensors(run) => (None, run.as_slice()),
            Self::Leaf(_) | Self::Distributed(_) | Self::Container(..) => (None, [].as_slice()),
        };
        content.into_iter().chain(run.iter().filter_map(|each| each.storage))
    }

    fn collect(self, path: &mut ObjectPath, leaves: &mut Vec<(ObjectPath, Self)>) {
        match self {
            Self::Container(_, children) => {
                for (step, child) in children {
                    path.push(step);
                    child.collect(path, leaves);
                    path.pop();
                }
            }
            leaf => leaves.push((path.clone(), leaf)),
        }
    }
}

/// The kind of a leaf whose content is a storage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ContentKind {
    /// A `str`.
    Str,
    /// A `bytes`.
    Bytes,
    /// An opaque object with its media tag.
    Opaque(Text),
}

/// The kinds of containers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Container {
    /// A `dict`.
    Dict,
    /// A `collections.OrderedDict`.
    OrderedDict,
    /// A `list`.
    List,
    /// A `tuple`.
    Tuple,
    /// A namedtuple, with its type name.
    NamedTuple(Text),
    /// The differing values of several writers for one leaf, keyed by writer.
    Divergent,
    /// A dict, list or tuple with a class tag.
    Tagged(ClassTag),
}

impl Container {
    /// Builds a container of this kind from `values` for lists and tuples, otherwise from `entries`.
    pub fn value(&self, entries: Dict, values: Vec<Value>) -> Value {
        match self {
            Self::Dict => Value::Dict(entries),
            Self::OrderedDict => Value::OrderedDict(entries),
            Self::List => Value::List(values),
            Self::Tuple => Value::Tuple(values),
            Self::NamedTuple(name) => Value::NamedTuple(name.clone(), entries),
            Self::Divergent => Value::Divergent(entries),
            Self::Tagged(tag) => Value::Tagged(*tag, self.to_plain().value(entries, values).into()),
        }
    }

    /// Returns the container without its class tag.
    #[must_use]
    pub fn to_plain(&self) -> Self {
        match self {
            Self::Tagged(tag) => match tag.class().kind() {
                kind::LIST => Self::List,
                kind::TUPLE => Self::Tuple,
                _ => Self::Dict,
            },
            plain => plain.clone(),
        }
    }
}

/// A part of a value whose bytes are stored in the blob, as [`walk`] visits it.
pub(crate) enum PayloadItem<'a> {
    /// A plain tensor, or the local tensor of a shard.
    Tensor(&'a Tensor),
    /// The content of a str, bytes or opaque leaf that is too long for the index.
    Content(&'a Bytes),
}

/// The path of the value that [`walk`] visits, as a linked list of borrowed steps.
///
/// Most paths are never read, so `walk` allocates none.
pub(crate) enum PathCursor<'a> {
    Start(&'a ObjectPath),
    Key(&'a Self, &'a MapKey),
    Index(&'a Self, u32),
}

impl PathCursor<'_> {
    pub(crate) fn to_path(&self) -> ObjectPath {
        match self {
            Self::Start(path) => ObjectPath::clone(path),
            Self::Key(parent, key) => parent.to_path().key(MapKey::clone(key)),
            Self::Index(parent, index) => parent.to_path().index(*index),
        }
    }

    /// Returns the number of steps.
    fn len(&self) -> usize {
        match self {
            Self::Start(path) => path.steps().len(),
            Self::Key(parent, _) | Self::Index(parent, _) => parent.len() + 1,
        }
    }
}

/// Calls `item` for each part of `value` that has bytes in the blob, and validates the value.
///
/// Visits depth first in insertion order. Validates depth, leaf types and shards.
///
/// # Errors
///
/// - `TooDeep` for containers nested deeper than [`MAX_DEPTH`].
/// - `UntypedLeaf` for an opaque leaf unless `allow_opaque` is set.
/// - `TensorRun` and `MixedRun` for shards that are empty or disagree on dtype or global shape.
/// - `TensorFlags` for flags that the dtype or the shape of a tensor excludes.
/// - `DivergentNode` for a divergent value, `KeyKind` for a namedtuple field that is no str.
/// - `ClassTag` for a value of another kind than its class tag allows.
/// - The errors of `item`.
pub(crate) fn walk<'a>(
    value: &'a Value,
    path: &PathCursor<'_>,
    allow_opaque: bool,
    item: &mut impl FnMut(&PathCursor<'_>, PayloadItem<'a>) -> Result<()>,
) -> Result<()> {
    let mut tensor_item = |tensor: &'a Tensor| {
        tensor.meta().check_flags().map_err(|error| error.with_path(path.to_path()))?;
        item(path, PayloadItem::Tensor(tensor))
    };
    match value {
        Value::Tensor(tensor) => tensor_item(tensor),
        Value::Shards(shards) => {
            if shards.is_empty() {
                return Err(Error::new(ErrorKind::TensorRun)
                    .with_path(path.to_path())
                    .with_detail("no shard at all"));
            }
            let dtype_and_shape = |shard: &Shard| {
                (shard.tensor().meta().dtype(), shard.slice().global_shape().to_vec())
            };
            if shards.iter().any(|shard| dtype_and_shape(shard) != dtype_and_shape(&shards[0])) {
                return Err(Error::new(ErrorKind::MixedRun).with_path(path.to_path()));
            }
            shards.iter().try_for_each(|shard| tensor_item(shard.tensor()))
        }
        Value::Opaque { .. } if !allow_opaque => {
            Err(Error::new(ErrorKind::UntypedLeaf).with_path(path.to_path()))
        }
        Value::Bytes(bytes) | Value::Opaque { bytes, .. } => {
            if is_inline(bytes.len()) {
                Ok(())
            } else {
                item(path, PayloadItem::Content(bytes))
            }
        }
        Value::Str(text) => match text.non_inline_bytes() {
            Some(bytes) => item(path, PayloadItem::Content(bytes)),
            None => Ok(()),
        },
        Value::Divergent(_) => Err(Error::new(ErrorKind::DivergentNode)
            .with_path(path.to_path())
            .with_detail("only the merge of several writers makes one")),
        Value::NamedTuple(_, dict)
            if !dict.iter().all(|(key, _)| matches!(key, MapKey::Str(_))) =>
        {
            Err(Error::new(ErrorKind::KeyKind)
                .with_path(path.to_path())
                .with_detail("a field whose name is no str"))
        }
        Value::Dict(dict) | Value::OrderedDict(dict) | Value::NamedTuple(_, dict) => {
            check_depth(path)?;
            for (key, value) in dict.iter() {
                walk(value, &PathCursor::Key(path, key), allow_opaque, item)?;
            }
            Ok(())
        }
        Value::Tagged(tag, plain) => {
            check_tagged(*tag, plain).map_err(|error| error.with_path(path.to_path()))?;
            walk(plain, path, allow_opaque, item)
        }
        Value::List(values) | Value::Tuple(values) => {
            check_depth(path)?;
            for (index, value) in (0..).zip(values) {
                walk(value, &PathCursor::Index(path, index), allow_opaque, item)?;
            }
            Ok(())
        }
        _ => Ok(()),
    }
}

/// Rejects a plain value that its class tag does not allow. The encoder checks the content.
fn check_tagged(tag: ClassTag, plain: &Value) -> Result<()> {
    let kind = match plain {
        Value::Dict(_) => kind::DICT,
        Value::List(_) => kind::LIST,
        Value::Tuple(_) => kind::TUPLE,
        Value::Str(text) if text.non_inline_bytes().is_some() => {
            return Err(Error::new(ErrorKind::ClassContent)
                .with_detail(format_args!("{tag}: more than 4096 bytes")));
        }
        Value::Str(_) => kind::STR,
        _ => return Err(Error::new(ErrorKind::ClassTag).with_detail(tag)),
    };
    ClassTag::from_word(tag.to_word(), kind).map(drop)
}

/// Rejects a container at this path if it would exceed [`MAX_DEPTH`] levels.
fn check_depth(path: &PathCursor<'_>) -> Result<()> {
    if path.len() >= MAX_DEPTH {
        return Err(Error::new(ErrorKind::TooDeep).with_path(path.to_path()));
    }
    Ok(())
}

/// The location of the bytes of an item of [`walk`]: storage number and byte offset in the storage.
type StorageLocation = (Option<u32>, u64);

/// A borrowed [`Node`], the input of the encoder.
///
/// Each plan builds one. Borrowing avoids copies that the encoder would make again.
pub(crate) enum BorrowedNode<'a> {
    Leaf(&'a Value),
    StoredLeaf(ContentKind, u32),
    Tensor(BorrowedTensor<'a>),
    Shards(Vec<BorrowedTensor<'a>>),
    Distributed(BorrowedTensor<'a>, &'a DistributedTensor),
    Container(Container, Vec<(BorrowedStep<'a>, BorrowedNode<'a>)>),
}

/// A borrowed [`TensorReference`].
#[derive(Clone, Copy)]
pub(crate) struct BorrowedTensor<'a> {
    pub(crate) meta: &'a TensorMeta,
    pub(crate) storage: Option<u32>,
    pub(crate) byte_offset: u64,
    pub(crate) shard_spec: Option<&'a ShardSpec>,
}

/// A borrowed [`Step`].
#[derive(Clone, Copy)]
pub(crate) enum BorrowedStep<'a> {
    Index(u32),
    Key(&'a MapKey),
}

impl BorrowedStep<'_> {
    pub(crate) fn to_step(self) -> Step {
        match self {
            Self::Index(index) => Step::Index(index),
            Self::Key(key) => Step::Key(key.clone()),
        }
    }
}

impl Node {
    pub(crate) fn as_borrowed(&self) -> BorrowedNode<'_> {
        match self {
            Self::Leaf(value) => BorrowedNode::Leaf(value),
            Self::StoredLeaf(kind, storage) => BorrowedNode::StoredLeaf(kind.clone(), *storage),
            Self::Tensors(references) => BorrowedNode::Shards(
                references
                    .iter()
                    .map(|reference| BorrowedTensor {
                        meta: &reference.meta,
                        storage: reference.storage,
                        byte_offset: reference.byte_offset,
                        shard_spec: reference.shard_spec.as_ref(),
                    })
                    .collect(),
            ),
            Self::Distributed(leaf) => {
                let DistributedTensor { meta, shard_spec, .. } = leaf;
                let shard_spec = Some(shard_spec);
                let tensor = BorrowedTensor { meta, storage: None, byte_offset: 0, shard_spec };
                BorrowedNode::Distributed(tensor, leaf)
            }
            Self::Container(container, children) => {
                let children = children.iter();
                let children =
                    children.map(|(step, child)| (borrow_step(step), child.as_borrowed()));
                BorrowedNode::Container(container.clone(), children.collect())
            }
        }
    }
}

pub(crate) fn borrow_step(step: &Step) -> BorrowedStep<'_> {
    match step {
        Step::Index(index) => BorrowedStep::Index(*index),
        Step::Key(key) => BorrowedStep::Key(key),
    }
}

impl BorrowedNode<'_> {
    pub(crate) fn to_node(&self) -> Node {
        match self {
            Self::Leaf(value) => Node::Leaf(Value::clone(value)),
            Self::StoredLeaf(kind, storage) => Node::StoredLeaf(kind.clone(), *storage),
            Self::Tensor(tensor) => Node::Tensors(vec![tensor.to_reference()]),
            Self::Shards(run) => {
                Node::Tensors(run.iter().map(|tensor| tensor.to_reference()).collect())
            }
            Self::Distributed(_, leaf) => Node::Distributed(DistributedTensor::clone(leaf)),
            Self::Container(container, children) => {
                let child =
                    |(step, child): &(BorrowedStep<'_>, Self)| (step.to_step(), child.to_node());
                Node::Container(container.clone(), children.iter().map(child).collect())
            }
        }
    }
}

impl BorrowedTensor<'_> {
    fn to_reference(self) -> TensorReference {
        TensorReference {
            meta: self.meta.clone(),
            storage: self.storage,
            byte_offset: self.byte_offset,
            shard_spec: self.shard_spec.cloned(),
        }
    }
}

/// Returns the structure of a value that [`walk`] has visited, given the location of each item.
pub(crate) fn structure_of<'a>(
    value: &'a Value,
    locations: &mut impl Iterator<Item = StorageLocation>,
) -> BorrowedNode<'a> {
    let mut next_location = || locations.next().expect("walk and structure_of meet the same items");
    match value {
        Value::Tensor(tensor) => BorrowedNode::Tensor(tensor_leaf(tensor, None, next_location())),
        Value::Shards(shards) => BorrowedNode::Shards(
            shards
                .iter()
                .map(|shard| tensor_leaf(shard.tensor(), Some(shard.spec()), next_location()))
                .collect(),
        ),
        Value::Bytes(bytes) if !is_inline(bytes.len()) => {
            content_leaf(ContentKind::Bytes, next_location())
        }
        Value::Opaque { media, bytes } if !is_inline(bytes.len()) => {
            content_leaf(ContentKind::Opaque(media.clone()), next_location())
        }
        Value::Str(text) if text.non_inline_bytes().is_some() => {
            content_leaf(ContentKind::Str, next_location())
        }
        Value::Dict(dict) => keyed_container(Container::Dict, dict, locations),
        Value::OrderedDict(dict) => keyed_container(Container::OrderedDict, dict, locations),
        Value::NamedTuple(name, dict) => {
            keyed_container(Container::NamedTuple(name.clone()), dict, locations)
        }
        Value::Divergent(dict) => keyed_container(Container::Divergent, dict, locations),
        Value::List(values) => indexed_container(Container::List, values, locations),
        Value::Tuple(values) => indexed_container(Container::Tuple, values, locations),
        Value::Tagged(tag, plain) if !matches!(**plain, Value::Str(_)) => {
            match structure_of(plain, locations) {
                BorrowedNode::Container(_, children) => {
                    BorrowedNode::Container(Container::Tagged(*tag), children)
                }
                other => other,
            }
        }
        leaf => BorrowedNode::Leaf(leaf),
    }
}

fn tensor_leaf<'a>(
    tensor: &'a Tensor,
    shard_spec: Option<&'a ShardSpec>,
    (storage, byte_offset): StorageLocation,
) -> BorrowedTensor<'a> {
    BorrowedTensor { meta: tensor.meta(), storage, byte_offset, shard_spec }
}

fn content_leaf(kind: ContentKind, (storage, _): StorageLocation) -> BorrowedNode<'static> {
    BorrowedNode::StoredLeaf(kind, storage.expect("content that is not inline is not empty"))
}

fn keyed_container<'a>(
    container: Container,
    dict: &'a Dict,
    locations: &mut impl Iterator<Item = StorageLocation>,
) -> BorrowedNode<'a> {
    let child = |(key, value)| (BorrowedStep::Key(key), structure_of(value, locations));
    BorrowedNode::Container(container, dict.iter().map(child).collect())
}

fn indexed_container<'a>(
    container: Container,
    values: &'a [Value],
    locations: &mut impl Iterator<Item = StorageLocation>,
) -> BorrowedNode<'a> {
    let child = |(index, value)| (BorrowedStep::Index(index), structure_of(value, locations));
    BorrowedNode::Container(container, (0..).zip(values).map(child).collect())
}
