//! State dicts: nested containers with typed leaves.

use std::fmt;
use std::hash::BuildHasher;
use std::sync::OnceLock;

use bytes::Bytes;
use hashbrown::HashTable;

use crate::dtype::Dtype;
use crate::error::{Error, ErrorKind, Result};
use crate::key::{Key, ObjectPath, Step};
use crate::number::{Float, Int};
use crate::shard::Shard;
use crate::tensor::Tensor;
use crate::text::Text;

/// How many containers a value may lie in, the state dict itself included.
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
    /// A `float`, bit for bit.
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
    /// The boxes of one global tensor that this dict holds: one for most `DTensor`s.
    Shards(Vec<Shard>),
    /// An object that is no typed leaf, as bytes that some other library made. Refused unless
    /// [`Options::allow_opaque`](crate::Options::allow_opaque) is set.
    Opaque {
        /// What the bytes are, such as `application/x-python-pickle`.
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
    /// A `collections.namedtuple` instance: the name of its type, and its fields.
    NamedTuple(Text, Dict),
    /// What several writers hold for one leaf, keyed by writer; only in merged versions.
    Divergent(Dict),
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
    entries: Vec<(Key, Value)>,
    /// Made when a key is looked up for the first time: who goes through all entries needs none.
    places: OnceLock<Places>,
}

/// Where the entry of each key is.
///
/// Keys come from foreign files: the hash has a seed of its own in each process.
#[derive(Clone, Default)]
struct Places {
    table: HashTable<usize>,
    hasher: foldhash::fast::RandomState,
}

impl Places {
    fn of(entries: &[(Key, Value)]) -> Self {
        let table = HashTable::with_capacity(entries.len());
        let mut places = Self { table, ..Self::default() };
        for place in 0..entries.len() {
            places.add(entries, place);
        }
        places
    }

    fn find(&self, entries: &[(Key, Value)], key: &Key) -> Option<usize> {
        self.table.find(self.hasher.hash_one(key), |place| entries[*place].0 == *key).copied()
    }

    /// Adds an entry whose key no other entry has.
    fn add(&mut self, entries: &[(Key, Value)], place: usize) {
        let hash = |place: &usize| self.hasher.hash_one(&entries[*place].0);
        self.table.insert_unique(hash(&place), place, hash);
    }
}

impl Dict {
    /// A dict without entries.
    pub fn new() -> Self {
        Self::default()
    }

    /// A dict of entries whose keys are proven to differ.
    pub(crate) fn from_proven(entries: Vec<(Key, Value)>) -> Self {
        Self { entries, places: OnceLock::new() }
    }

    fn find(&self, key: &Key) -> Option<usize> {
        self.places.get_or_init(|| Places::of(&self.entries)).find(&self.entries, key)
    }

    /// Sets an entry; a key that is there keeps its place. Returns the value that was there.
    pub fn insert(&mut self, key: impl Into<Key>, value: impl Into<Value>) -> Option<Value> {
        let (key, value) = (key.into(), value.into());
        if let Some(place) = self.find(&key) {
            return Some(std::mem::replace(&mut self.entries[place].1, value));
        }
        self.entries.push((key, value));
        let places = self.places.get_mut().expect("just looked at");
        places.add(&self.entries, self.entries.len() - 1);
        None
    }

    /// The value of a key.
    pub fn get(&self, key: impl Into<Key>) -> Option<&Value> {
        self.at(&key.into())
    }

    fn at(&self, key: &Key) -> Option<&Value> {
        self.find(key).map(|place| &self.entries[place].1)
    }

    /// The value of a key, to be changed.
    pub fn get_mut(&mut self, key: impl Into<Key>) -> Option<&mut Value> {
        self.find(&key.into()).map(|place| &mut self.entries[place].1)
    }

    /// The entries in insertion order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&Key, &Value)> + Clone {
        self.entries.iter().map(|(key, value)| (key, value))
    }

    /// How many entries.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// True if there are none.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }
}

impl<K: Into<Key>, V: Into<Value>> FromIterator<(K, V)> for Dict {
    fn from_iter<I: IntoIterator<Item = (K, V)>>(entries: I) -> Self {
        let mut dict = Self::new();
        for (key, value) in entries {
            dict.insert(key, value);
        }
        dict
    }
}

impl IntoIterator for Dict {
    type Item = (Key, Value);
    type IntoIter = std::vec::IntoIter<(Key, Value)>;

    fn into_iter(self) -> Self::IntoIter {
        self.entries.into_iter()
    }
}

/// Equal only in the same order.
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

/// A state dict: what `module.state_dict()` and `optimizer.state_dict()` return, and any dict of
/// such things.
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
    /// An empty `dict`.
    pub fn new() -> Self {
        Self(Value::Dict(Dict::new()))
    }

    /// An empty `OrderedDict`, which is what torch's modules return.
    pub fn ordered() -> Self {
        Self(Value::OrderedDict(Dict::new()))
    }

    /// A state dict from a value.
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

    /// The dict or ordered dict that it is.
    pub fn as_value(&self) -> &Value {
        &self.0
    }

    /// The dict or ordered dict that it is.
    pub fn into_value(self) -> Value {
        self.0
    }

    /// Its entries.
    pub fn entries(&self) -> &Dict {
        match &self.0 {
            Value::Dict(dict) | Value::OrderedDict(dict) => dict,
            _ => unreachable!("a state dict is a dict, by construction"),
        }
    }

    /// Its entries, to be changed.
    pub fn entries_mut(&mut self) -> &mut Dict {
        match &mut self.0 {
            Value::Dict(dict) | Value::OrderedDict(dict) => dict,
            _ => unreachable!("a state dict is a dict, by construction"),
        }
    }

    /// Sets an entry; a key that is there keeps its place. Returns the value that was there.
    pub fn insert(&mut self, key: impl Into<Key>, value: impl Into<Value>) -> Option<Value> {
        self.entries_mut().insert(key, value)
    }

    /// All leaves with their paths, in insertion order, depth first. Containers are no leaves, so
    /// an empty one is not listed.
    pub fn leaves(&self) -> Vec<(ObjectPath, &Value)> {
        let mut leaves = Vec::new();
        visit(&mut ObjectPath::root(), &self.0, &mut |path, value| {
            leaves.push((path.clone(), value));
        });
        leaves
    }

    /// The value at a path.
    ///
    /// # Errors
    ///
    /// `NotFound`.
    pub fn at(&self, path: &ObjectPath) -> Result<&Value> {
        let mut value = &self.0;
        for step in path.steps() {
            value = child(value, step).ok_or_else(|| Error::new(ErrorKind::NotFound).at(path))?;
        }
        Ok(value)
    }

    /// The leaf with an fqn. All leaves are looked at: who wants many goes through [`StateDict::leaves`].
    ///
    /// # Errors
    ///
    /// `NotFound`; `AmbiguousFqn` if two leaves have it.
    pub fn leaf(&self, fqn: &str) -> Result<&Value> {
        let mut found = self.leaves().into_iter().filter(|(path, _)| path.fqn() == fqn);
        match (found.next(), found.next()) {
            (None, _) => Err(Error::new(ErrorKind::NotFound).at(fqn)),
            (Some((_, leaf)), None) => Ok(leaf),
            (Some((one, _)), Some((other, _))) => Err(Error::new(ErrorKind::AmbiguousFqn)
                .at(fqn)
                .note(format_args!("{one} and {other}"))),
        }
    }
}

fn visit<'a>(
    path: &mut ObjectPath,
    value: &'a Value,
    leaf: &mut impl FnMut(&ObjectPath, &'a Value),
) {
    match value {
        Value::Dict(dict)
        | Value::OrderedDict(dict)
        | Value::NamedTuple(_, dict)
        | Value::Divergent(dict) => {
            for (key, value) in dict.iter() {
                path.push(Step::Key(key.clone()));
                visit(path, value, leaf);
                path.pop();
            }
        }
        Value::List(values) | Value::Tuple(values) => {
            for (index, value) in (0..).zip(values) {
                path.push(Step::Index(index));
                visit(path, value, leaf);
                path.pop();
            }
        }
        _ => leaf(path, value),
    }
}

fn child<'a>(value: &'a Value, step: &Step) -> Option<&'a Value> {
    match (value, step) {
        (
            Value::Dict(dict)
            | Value::OrderedDict(dict)
            | Value::NamedTuple(_, dict)
            | Value::Divergent(dict),
            Step::Key(key),
        ) => dict.at(key),
        (Value::List(values) | Value::Tuple(values), Step::Index(index)) => {
            values.get(usize::try_from(*index).ok()?)
        }
        _ => None,
    }
}
