//! State dicts: nested containers with typed leaves.

use std::fmt;
use std::hash::BuildHasher;
use std::sync::OnceLock;

use bytes::Bytes;
use hashbrown::HashTable;

use crate::class_tag::{ClassTag, TaggedClass};
use crate::dtype::Dtype;
use crate::error::{Error, ErrorKind, Result};
use crate::key::{EncodedKey, MapKey, ObjectPath, Step};
use crate::number::{Float, Int};
use crate::shard::Shard;
use crate::tensor::Tensor;
use crate::text::Text;

/// The maximum number of nested containers, the state dict itself included.
pub const MAX_DEPTH: usize = 64;

/// Any value of a state dict.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Value {
    /// `None`.
    None,
    /// A `bool`.
    Bool(bool),
    /// An `int` of any size.
    Int(Int),
    /// A `float`; its bits are preserved.
    Float(Float),
    /// A `complex`: real and imaginary part.
    Complex(Float, Float),
    /// A `str`.
    Str(Text),
    /// A `bytes`.
    Bytes(Bytes),
    /// A `torch.dtype`.
    Dtype(Dtype),
    /// A `torch.Size`.
    Size(Box<[i64]>),
    /// A `torch.device`, as its string: `cuda:0`.
    Device(Text),
    /// A tensor.
    Tensor(Tensor),
    /// The shards of one global tensor that this dict holds; most `DTensor`s have one.
    Shards(Vec<Shard>),
    /// An object of any other type, serialized to bytes by another library.
    ///
    /// Writers reject it unless [`Options::allow_opaque`](crate::Options::allow_opaque) is set.
    Opaque {
        /// The media type of the bytes, such as `application/x-python-pickle`.
        media: Text,
        /// The bytes.
        bytes: Bytes,
    },
    /// A `dict`.
    Dict(Dict),
    /// A `collections.OrderedDict`.
    OrderedDict(Dict),
    /// A `list`.
    List(Vec<Value>),
    /// A `tuple`.
    Tuple(Vec<Value>),
    /// A `collections.namedtuple` instance: its type name and its fields.
    NamedTuple(Text, Dict),
    /// The differing values of several writers for one leaf, keyed by writer; only in merged versions.
    Divergent(Dict),
    /// A value of a class that is stored as a plain `dict`, `list`, `tuple` or `str`, such as a `deque`.
    ///
    /// Writers reject a plain value that does not fit the class (F-077, F-078).
    Tagged(ClassTag, Box<Self>),
}

impl Value {
    /// Creates a Python `set` of keys.
    ///
    /// # Errors
    ///
    /// `KeyKind` for a key that a file cannot hold, such as NaN.
    ///
    /// # Examples
    ///
    /// ```
    /// use tssd_format::{MapKey, StateDict, Value};
    /// let mut dict = StateDict::new();
    /// dict.insert("frozen layers", Value::set([MapKey::from(3_i64), MapKey::from(1_i64)])?);
    /// assert_eq!(dict.leaf("frozen layers.1")?, &Value::None);
    /// # Ok::<(), tssd_format::Error>(())
    /// ```
    pub fn set(elements: impl IntoIterator<Item = MapKey>) -> Result<Self> {
        Self::tagged_set(TaggedClass::Set, elements)
    }

    /// Creates a Python `frozenset` of keys.
    ///
    /// # Errors
    ///
    /// As [`Value::set`].
    pub fn frozenset(elements: impl IntoIterator<Item = MapKey>) -> Result<Self> {
        Self::tagged_set(TaggedClass::FrozenSet, elements)
    }

    /// Creates a set, whose elements are in the order of their keys in files.
    fn tagged_set(class: TaggedClass, elements: impl IntoIterator<Item = MapKey>) -> Result<Self> {
        let elements: Vec<MapKey> = elements.into_iter().collect();
        let encoded = elements.iter().map(|key| Ok((EncodedKey::encode(key)?, key)));
        let mut encoded = encoded.collect::<Result<Vec<_>>>()?;
        encoded.sort_by(|(left, _), (right, _)| left.cmp(right));
        let entries = encoded.into_iter().map(|(_, key)| (key.clone(), Self::None));
        Ok(Self::Tagged(ClassTag::new(class, 0)?, Self::Dict(entries.collect()).into()))
    }
}

macro_rules! from {
    ($($from:ty => $variant:ident,)*) => {
        $(impl From<$from> for Value {
            fn from(value: $from) -> Self { Self::$variant(value.into()) }
        })*
    };
}

from! {
    bool => Bool, i64 => Int, Int => Int, f64 => Float, Float => Float, &str => Str,
    String => Str, Text => Str, Bytes => Bytes, Dtype => Dtype, Tensor => Tensor, Vec<Value> => List,
    Dict => Dict,
}

impl From<Shard> for Value {
    fn from(shard: Shard) -> Self {
        Self::Shards(vec![shard])
    }
}

/// The entries of a dict, in insertion order.
#[derive(Clone, Default)]
pub struct Dict {
    entries: Vec<(MapKey, Value)>,
    /// Built at the first lookup of a key, because iteration does not need it.
    index: OnceLock<KeyIndex>,
}

/// A hash index from each key to the position of its entry.
///
/// The hash has a random seed per process, because untrusted files choose the keys.
#[derive(Clone, Default)]
struct KeyIndex {
    table: HashTable<usize>,
    hasher: foldhash::fast::RandomState,
}

impl KeyIndex {
    fn new(entries: &[(MapKey, Value)]) -> Self {
        let table = HashTable::with_capacity(entries.len());
        let mut index = Self { table, ..Self::default() };
        for position in 0..entries.len() {
            index.insert(entries, position);
        }
        index
    }

    fn find(&self, entries: &[(MapKey, Value)], key: &MapKey) -> Option<usize> {
        self.table.find(self.hasher.hash_one(key), |position| entries[*position].0 == *key).copied()
    }

    /// Adds the entry at `position`, whose key must not be in the index yet.
    fn insert(&mut self, entries: &[(MapKey, Value)], position: usize) {
        let hash = |position: &usize| self.hasher.hash_one(&entries[*position].0);
        self.table.insert_unique(hash(&position), position, hash);
    }
}

impl Dict {
    /// Creates a dict without entries.
    pub fn new() -> Self {
        Self::default()
    }

    /// Creates a dict from entries. The caller guarantees that all keys differ.
    pub(crate) fn from_unique_entries(entries: Vec<(MapKey, Value)>) -> Self {
        Self { entries, index: OnceLock::new() }
    }

    fn find(&self, key: &MapKey) -> Option<usize> {
        self.index.get_or_init(|| KeyIndex::new(&self.entries)).find(&self.entries, key)
    }

    /// Sets an entry and returns the previous value. An existing key keeps its position.
    pub fn insert(&mut self, key: impl Into<MapKey>, value: impl Into<Value>) -> Option<Value> {
        let (key, value) = (key.into(), value.into());
        if let Some(position) = self.find(&key) {
            return Some(std::mem::replace(&mut self.entries[position].1, value));
        }
        self.entries.push((key, value));
        let index = self.index.get_mut().expect("just looked at");
        index.insert(&self.entries, self.entries.len() - 1);
        None
    }

    /// Returns the value of a key.
    pub fn get(&self, key: impl Into<MapKey>) -> Option<&Value> {
        self.get_by_key(&key.into())
    }

    fn get_by_key(&self, key: &MapKey) -> Option<&Value> {
        self.find(key).map(|position| &self.entries[position].1)
    }

    /// Returns the value of a key as a mutable reference.
    pub fn get_mut(&mut self, key: impl Into<MapKey>) -> Option<&mut Value> {
        self.find(&key.into()).map(|position| &mut self.entries[position].1)
    }

    /// Iterates over the entries in insertion order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&MapKey, &Value)> + Clone {
        self.entries.iter().map(|(key, value)| (key, value))
    }

    /// Returns the number of entries.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns true if there are no entries.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }
}

impl<K: Into<MapKey>, V: Into<Value>> FromIterator<(K, V)> for Dict {
    fn from_iter<I: IntoIterator<Item = (K, V)>>(entries: I) -> Self {
        let mut dict = Self::new();
        for (key, value) in entries {
            dict.insert(key, value);
        }
        dict
    }
}

impl IntoIterator for Dict {
    type Item = (MapKey, Value);
    type IntoIter = std::vec::IntoIter<(MapKey, Value)>;

    fn into_iter(self) -> Self::IntoIter {
        self.entries.into_iter()
    }
}

/// Two dicts are equal if they have equal entries in the same order.
impl PartialEq for Dict {
    fn eq(&self, other: &Self) -> bool {
        self.iter().eq(other.iter())
    }
}

impl fmt::Debug for Dict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.iter()).finish()
    }
}

/// A state dict, as `module.state_dict()` and `optimizer.state_dict()` return, or any nesting of them.
///
/// # Examples
///
/// ```
/// use tssd_format::{Dict, StateDict, Tensor, Value};
/// let mut dict = StateDict::new();
/// dict.insert("weight", Tensor::from_slice(&[1.0_f32, 2.0], &[2])?);
/// dict.insert("state", Dict::from_iter([(0_i64, Value::from("per-parameter state"))]));
/// assert_eq!(dict.leaf("state.0")?, &Value::from("per-parameter state"));
/// # Ok::<(), tssd_format::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct StateDict(Value);

impl Default for StateDict {
    fn default() -> Self {
        Self::new()
    }
}

impl StateDict {
    /// Creates an empty `dict`.
    pub fn new() -> Self {
        Self(Value::Dict(Dict::new()))
    }

    /// Creates an empty `OrderedDict`, the type that torch modules return.
    pub fn ordered() -> Self {
        Self(Value::OrderedDict(Dict::new()))
    }

    /// Creates a state dict from a value.
    ///
    /// # Errors
    ///
    /// `RootKind` if the value is no dict or ordered dict.
    pub fn from_value(value: Value) -> Result<Self> {
        match value {
            Value::Dict(_) | Value::OrderedDict(_) => Ok(Self(value)),
            _ => Err(Error::new(ErrorKind::RootKind)),
        }
    }

    /// Returns the underlying dict or ordered dict.
    pub fn as_value(&self) -> &Value {
        &self.0
    }

    /// Converts into the underlying dict or ordered dict.
    pub fn into_value(self) -> Value {
        self.0
    }

    /// Returns the entries.
    pub fn entries(&self) -> &Dict {
        match &self.0 {
            Value::Dict(dict) | Value::OrderedDict(dict) => dict,
            _ => unreachable!("a state dict is a dict, by construction"),
        }
    }

    /// Returns the entries as a mutable reference.
    pub fn entries_mut(&mut self) -> &mut Dict {
        match &mut self.0 {
            Value::Dict(dict) | Value::OrderedDict(dict) => dict,
            _ => unreachable!("a state dict is a dict, by construction"),
        }
    }

    /// Sets an entry and returns the previous value. An existing key keeps its position.
    pub fn insert(&mut self, key: impl Into<MapKey>, value: impl Into<Value>) -> Option<Value> {
        self.entries_mut().insert(key, value)
    }

    /// Returns all leaves with their paths, in insertion order, depth first.
    ///
    /// Containers are not leaves, so an empty container does not appear.
    pub fn leaves(&self) -> Vec<(ObjectPath, &Value)> {
        let mut leaves = Vec::new();
        visit_leaves(&mut ObjectPath::root(), &self.0, &mut |path, value| {
            leaves.push((path.clone(), value));
        });
        leaves
    }

    /// Returns the value at a path.
    ///
    /// # Errors
    ///
    /// `NotFound` if there is no such value.
    pub fn at(&self, path: &ObjectPath) -> Result<&Value> {
        let mut value = &self.0;
        for step in path.steps() {
            value = child(value, step)
                .ok_or_else(|| Error::new(ErrorKind::NotFound).with_path(path))?;
        }
        Ok(value)
    }

    /// Returns the leaf with an fqn.
    ///
    /// Each call visits all leaves. To find many leaves, use [`StateDict::leaves`].
    ///
    /// # Errors
    ///
    /// `NotFound` if no leaf has the fqn; `AmbiguousFqn` if two leaves have it.
    pub fn leaf(&self, fqn: &str) -> Result<&Value> {
        let mut found = self.leaves().into_iter().filter(|(path, _)| path.fqn() == fqn);
        match (found.next(), found.next()) {
            (None, _) => Err(Error::new(ErrorKind::NotFound).with_path(fqn)),
            (Some((_, leaf)), None) => Ok(leaf),
            (Some((one, _)), Some((other, _))) => Err(Error::new(ErrorKind::AmbiguousFqn)
                .with_path(fqn)
                .with_detail(format_args!("{one} and {other}"))),
        }
    }
}

fn visit_leaves<'a>(
    path: &mut ObjectPath,
    value: &'a Value,
    leaf: &mut impl FnMut(&ObjectPath, &'a Value),
) {
    match plain(value) {
        Value::Dict(dict)
        | Value::OrderedDict(dict)
        | Value::NamedTuple(_, dict)
        | Value::Divergent(dict) => {
            for (key, value) in dict.iter() {
                path.push(Step::Key(key.clone()));
                visit_leaves(path, value, leaf);
                path.pop();
            }
        }
        Value::List(values) | Value::Tuple(values) => {
            for (index, value) in (0..).zip(values) {
                path.push(Step::Index(index));
                visit_leaves(path, value, leaf);
                path.pop();
            }
        }
        _ => leaf(path, value),
    }
}

/// Returns the plain value of a value with a class tag; any other value as it is.
fn plain(value: &Value) -> &Value {
    match value {
        Value::Tagged(_, plain) => plain,
        value => value,
    }
}

fn child<'a>(value: &'a Value, step: &Step) -> Option<&'a Value> {
    match (plain(value), step) {
        (
            Value::Dict(dict)
            | Value::OrderedDict(dict)
            | Value::NamedTuple(_, dict)
            | Value::Divergent(dict),
            Step::Key(key),
        ) => dict.get_by_key(key),
        (Value::List(values) | Value::Tuple(values), Step::Index(index)) => {
            values.get(usize::try_from(*index).ok()?)
        }
        _ => None,
    }
}
