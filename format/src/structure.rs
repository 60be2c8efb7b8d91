//! The structure of an archive: its tree, with references in place of tensor bytes.
//!
//! It is what the index says, as owned values. A writer makes one from a state dict and encodes it; a
//! reader decodes one; a store merges those of several writers.

use bytes::Bytes;

use crate::error::{Error, ErrorKind, Result};
use crate::key::{Key, ObjectPath, Step};
use crate::record::is_inline;
use crate::shard::{Shard, ShardPlace};
use crate::state_dict::{Dict, MAX_DEPTH, Value};
use crate::tensor::{Tensor, TensorMeta};
use crate::text::Text;

/// One tensor leaf, or one slice of one: what it is, and which bytes it has.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct TensorReference {
    /// Dtype, shape, strides and flags.
    pub meta: TensorMeta,
    /// The number of its storage; `None` if it has no elements.
    pub storage: Option<u32>,
    /// Where its element 0 is in the raw bytes of the storage, in bytes.
    pub byte_offset: u64,
    /// Where it belongs in a global tensor; `None` for a plain tensor.
    pub place: Option<ShardPlace>,
}

/// A node of the tree.
#[derive(Clone, Debug, PartialEq)]
pub enum Node {
    /// A leaf that lies in the index: any [`Value`] but containers, tensors and shards.
    Leaf(Value),
    /// A leaf whose content is a storage.
    Stored(Stored, u32),
    /// A tensor (one reference without place) or the shards of one (each with its place).
    Tensors(Vec<TensorReference>),
    /// A container and its children, in insertion order.
    Container(Container, Vec<(Step, Node)>),
}

impl Node {
    /// Every node that is no container with its path, in insertion order, depth first.
    pub fn into_leaves(self) -> Vec<(ObjectPath, Self)> {
        let mut leaves = Vec::new();
        self.collect(&mut ObjectPath::root(), &mut leaves);
        leaves
    }

    /// The numbers of the storages that the content or the tensors of a leaf lie in.
    pub fn storages(&self) -> impl Iterator<Item = u32> {
        let (stored, run) = match self {
            Self::Stored(_, storage) => (Some(*storage), [].as_slice()),
            Self::Tensors(run) => (None, run.as_slice()),
            Self::Leaf(_) | Self::Container(..) => (None, [].as_slice()),
        };
        stored.into_iter().chain(run.iter().filter_map(|each| each.storage))
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

/// What kind of leaf a storage is the content of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stored {
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
    /// A namedtuple of a type with this name.
    NamedTuple(Text),
    /// What several writers hold for one leaf, keyed by writer.
    Divergent,
}

impl Container {
    /// The value of a container of this kind: with these entries, or, for lists and tuples, these
    /// values.
    pub fn value(&self, entries: Dict, values: Vec<Value>) -> Value {
        match self {
            Self::Dict => Value::Dict(entries),
            Self::OrderedDict => Value::OrderedDict(entries),
            Self::List => Value::List(values),
            Self::Tuple => Value::Tuple(values),
            Self::NamedTuple(name) => Value::NamedTuple(name.clone(), entries),
            Self::Divergent => Value::Divergent(entries),
        }
    }
}

/// A leaf of a value, as [`walk`] meets it.
pub(crate) enum Item<'a> {
    /// A tensor, plain or the local one of a shard.
    Tensor(&'a Tensor),
    /// Content too long for the index.
    Content(&'a Bytes),
}

/// The path of a value that [`walk`] is at: steps that are borrowed, for it is seldom asked for.
pub(crate) enum Trail<'a> {
    Start(&'a ObjectPath),
    Key(&'a Self, &'a Key),
    Index(&'a Self, u32),
}

impl Trail<'_> {
    pub(crate) fn to_path(&self) -> ObjectPath {
        match self {
            Self::Start(path) => ObjectPath::clone(path),
            Self::Key(above, key) => above.to_path().key(Key::clone(key)),
            Self::Index(above, index) => above.to_path().index(*index),
        }
    }

    /// How many steps it has.
    fn len(&self) -> usize {
        match self {
            Self::Start(path) => path.steps().len(),
            Self::Key(above, _) | Self::Index(above, _) => above.len() + 1,
        }
    }
}

/// Calls `item` for everything of `value` that has bytes in the blob, depth first in insertion
/// order, and proves depth and leaf types.
///
/// # Errors
///
/// `TooDeep`, `UntypedLeaf`; whatever `item` refuses.
pub(crate) fn walk<'a>(
    value: &'a Value,
    path: &Trail<'_>,
    allow_opaque: bool,
    item: &mut impl FnMut(&Trail<'_>, Item<'a>) -> Result<()>,
) -> Result<()> {
    match value {
        Value::Tensor(tensor) => item(path, Item::Tensor(tensor)),
        Value::Shards(shards) => {
            if shards.is_empty() {
                return Err(Error::new(ErrorKind::TensorRun)
                    .at(path.to_path())
                    .note("no shard at all"));
            }
            let what = |shard: &Shard| {
                (shard.tensor().meta().dtype(), shard.slice().global_shape().to_vec())
            };
            if shards.iter().any(|shard| what(shard) != what(&shards[0])) {
                return Err(Error::new(ErrorKind::MixedRun).at(path.to_path()));
            }
            shards.iter().try_for_each(|shard| item(path, Item::Tensor(shard.tensor())))
        }
        Value::Opaque { .. } if !allow_opaque => {
            Err(Error::new(ErrorKind::UntypedLeaf).at(path.to_path()))
        }
        Value::Bytes(bytes) | Value::Opaque { bytes, .. } => {
            if is_inline(bytes.len()) {
                Ok(())
            } else {
                item(path, Item::Content(bytes))
            }
        }
        Value::Str(text) => match text.long_bytes() {
            Some(bytes) => item(path, Item::Content(bytes)),
            None => Ok(()),
        },
        Value::Divergent(_) => Err(Error::new(ErrorKind::ShardTable)
            .at(path.to_path())
            .note("what writers hold each their own of is for a store to write")),
        Value::NamedTuple(_, dict) if !dict.iter().all(|(key, _)| matches!(key, Key::Str(_))) => {
            Err(Error::new(ErrorKind::KeyKind)
                .at(path.to_path())
                .note("a field whose name is no str"))
        }
        Value::Dict(dict) | Value::OrderedDict(dict) | Value::NamedTuple(_, dict) => {
            check_depth(path)?;
            for (key, value) in dict.iter() {
                walk(value, &Trail::Key(path, key), allow_opaque, item)?;
            }
            Ok(())
        }
        Value::List(values) | Value::Tuple(values) => {
            check_depth(path)?;
            for (index, value) in (0..).zip(values) {
                walk(value, &Trail::Index(path, index), allow_opaque, item)?;
            }
            Ok(())
        }
        _ => Ok(()),
    }
}

/// A container at this path would be the 65th level.
fn check_depth(path: &Trail<'_>) -> Result<()> {
    if path.len() >= MAX_DEPTH {
        return Err(Error::new(ErrorKind::TooDeep).at(path.to_path()));
    }
    Ok(())
}

/// Where the bytes of an item of [`walk`] went: storage and byte offset in it.
type Place = (Option<u32>, u64);

/// A [`Node`] that borrows: what is encoded. A state dict of many tensors makes one for each plan, and
/// most of what it would own would be copied again.
pub(crate) enum Tree<'a> {
    Leaf(&'a Value),
    Stored(Stored, u32),
    Tensor(Placed<'a>),
    Shards(Vec<Placed<'a>>),
    Container(Container, Vec<(Branch<'a>, Tree<'a>)>),
}

/// A [`TensorReference`] that borrows.
#[derive(Clone, Copy)]
pub(crate) struct Placed<'a> {
    pub(crate) meta: &'a TensorMeta,
    pub(crate) storage: Option<u32>,
    pub(crate) byte_offset: u64,
    pub(crate) place: Option<&'a ShardPlace>,
}

/// A [`Step`] that borrows.
#[derive(Clone, Copy)]
pub(crate) enum Branch<'a> {
    Index(u32),
    Key(&'a Key),
}

impl Branch<'_> {
    pub(crate) fn to_step(self) -> Step {
        match self {
            Self::Index(index) => Step::Index(index),
            Self::Key(key) => Step::Key(key.clone()),
        }
    }
}

impl Node {
    pub(crate) fn as_tree(&self) -> Tree<'_> {
        match self {
            Self::Leaf(value) => Tree::Leaf(value),
            Self::Stored(stored, storage) => Tree::Stored(stored.clone(), *storage),
            Self::Tensors(references) => Tree::Shards(
                references
                    .iter()
                    .map(|reference| Placed {
                        meta: &reference.meta,
                        storage: reference.storage,
                        byte_offset: reference.byte_offset,
                        place: reference.place.as_ref(),
                    })
                    .collect(),
            ),
            Self::Container(container, children) => {
                let children = children.iter();
                let children = children.map(|(step, child)| (branch(step), child.as_tree()));
                Tree::Container(container.clone(), children.collect())
            }
        }
    }
}

pub(crate) fn branch(step: &Step) -> Branch<'_> {
    match step {
        Step::Index(index) => Branch::Index(*index),
        Step::Key(key) => Branch::Key(key),
    }
}

impl Tree<'_> {
    pub(crate) fn to_node(&self) -> Node {
        match self {
            Self::Leaf(value) => Node::Leaf(Value::clone(value)),
            Self::Stored(stored, storage) => Node::Stored(stored.clone(), *storage),
            Self::Tensor(placed) => Node::Tensors(vec![placed.to_reference()]),
            Self::Shards(run) => {
                Node::Tensors(run.iter().map(|placed| placed.to_reference()).collect())
            }
            Self::Container(container, children) => {
                let child = |(step, child): &(Branch<'_>, Self)| (step.to_step(), child.to_node());
                Node::Container(container.clone(), children.iter().map(child).collect())
            }
        }
    }
}

impl Placed<'_> {
    fn to_reference(self) -> TensorReference {
        TensorReference {
            meta: self.meta.clone(),
            storage: self.storage,
            byte_offset: self.byte_offset,
            place: self.place.cloned(),
        }
    }
}

/// The structure of a value that [`walk`] has been through, given where its items went.
pub(crate) fn structure_of<'a>(
    value: &'a Value,
    places: &mut impl Iterator<Item = Place>,
) -> Tree<'a> {
    let mut place = || places.next().expect("walk and structure_of meet the same items");
    match value {
        Value::Tensor(tensor) => Tree::Tensor(placed(tensor, None, place())),
        Value::Shards(shards) => Tree::Shards(
            shards
                .iter()
                .map(|shard| placed(shard.tensor(), Some(shard.place()), place()))
                .collect(),
        ),
        Value::Bytes(bytes) if !is_inline(bytes.len()) => stored(Stored::Bytes, place()),
        Value::Opaque { media, bytes } if !is_inline(bytes.len()) => {
            stored(Stored::Opaque(media.clone()), place())
        }
        Value::Str(text) if text.long_bytes().is_some() => stored(Stored::Str, place()),
        Value::Dict(dict) => keyed(Container::Dict, dict, places),
        Value::OrderedDict(dict) => keyed(Container::OrderedDict, dict, places),
        Value::NamedTuple(name, dict) => keyed(Container::NamedTuple(name.clone()), dict, places),
        Value::Divergent(dict) => keyed(Container::Divergent, dict, places),
        Value::List(values) => listed(Container::List, values, places),
        Value::Tuple(values) => listed(Container::Tuple, values, places),
        leaf => Tree::Leaf(leaf),
    }
}

fn placed<'a>(
    tensor: &'a Tensor,
    place: Option<&'a ShardPlace>,
    (storage, byte_offset): Place,
) -> Placed<'a> {
    Placed { meta: tensor.meta(), storage, byte_offset, place }
}

fn stored(kind: Stored, (storage, _): Place) -> Tree<'static> {
    Tree::Stored(kind, storage.expect("content that is not inline is not empty"))
}

fn keyed<'a>(
    container: Container,
    dict: &'a Dict,
    places: &mut impl Iterator<Item = Place>,
) -> Tree<'a> {
    let child = |(key, value)| (Branch::Key(key), structure_of(value, places));
    Tree::Container(container, dict.iter().map(child).collect())
}

fn listed<'a>(
    container: Container,
    values: &'a [Value],
    places: &mut impl Iterator<Item = Place>,
) -> Tree<'a> {
    let child = |(index, value)| (Branch::Index(index), structure_of(value, places));
    Tree::Container(container, (0..).zip(values).map(child).collect())
}
