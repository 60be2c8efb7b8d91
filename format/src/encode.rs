//! A structure to the tables of an index. Spec: sections 3 to 7.

use std::hash::BuildHasher;

use bytemuck::Pod;
use hashbrown::HashTable;
use indexmap::IndexMap;
use rend::u32_le;

use crate::digest::Digest;
use crate::error::{Error, ErrorKind, Result};
use crate::key::{Content, FileKey, Key, KeyOrder, ObjectPath, python_twins};
use crate::mesh::DeviceMesh;
use crate::placement::Placement;
use crate::record::{self, NONE, STORED, heap_range, kind};
use crate::shape::MAX_RANK;
use crate::shard::ShardPlace;
use crate::state_dict::Value;
use crate::structure::{Branch, Container, Placed, Stored, Tree};
use crate::table::{Tables, number};
use crate::text::Text;
use crate::views::{Views, native};

/// Something said of an archive as a whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AttrValue {
    /// An int.
    Int(i64),
    /// Text.
    Text(Text),
    /// Bytes.
    Bytes(Box<[u8]>),
}

/// Attributes by name.
pub type Attrs = std::collections::BTreeMap<String, AttrValue>;

/// An archive that holds storages of a manifest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardFile {
    /// Base name of the file.
    pub name: String,
    /// Its length in bytes.
    pub file_len: u64,
    /// Where its index begins.
    pub index_off: u64,
    /// The CRC-32 of its index.
    pub index_crc32: u32,
    /// The writer that wrote it.
    pub writer: u32,
    /// Its root digest, if it has one.
    pub digest: Option<Digest>,
}

impl ShardFile {
    /// How many bytes its index has.
    pub(crate) fn index_len(&self) -> u64 {
        self.file_len.saturating_sub(self.index_off + 64)
    }
}

/// Encodes a structure.
///
/// # Errors
///
/// Whatever a reader would refuse: duplicate keys, keys that are equal in Python, NaN keys,
/// tables that grow too large.
pub(crate) fn encode(root: &Tree<'_>, attrs: &Attrs, shards: &[ShardFile]) -> Result<Tables> {
    let mut encoder = Encoder::default();
    encoder.nodes(root)?;
    let tensors = std::mem::take(&mut encoder.tensors);
    encoder.tables.tensors.reserve(tensors.len());
    for tensor in tensors {
        encoder.tensor(tensor)?;
    }
    encoder.slices()?;
    encoder.attrs(attrs)?;
    encoder.shards(shards)?;
    Ok(encoder.tables)
}

#[derive(Default)]
struct Encoder<'a> {
    tables: Tables,
    heap: Known,
    dims: Known,
    slices: Numbers<&'a ShardPlace>,
    placements: Numbers<&'a [Placement]>,
    /// The tensors of all nodes that have their records, in order.
    tensors: Vec<&'a Placed<'a>>,
}

/// What is in a table already, and where. No bytes depend on the hash.
type Numbers<T> = IndexMap<T, u32, foldhash::fast::RandomState>;

/// Where the runs of a table are that are in it once: start and length of each.
#[derive(Default)]
struct Known {
    runs: HashTable<(u32, u32)>,
    /// The one that was asked for last: tensors next to each other often have one shape.
    last: (u32, u32),
    hasher: foldhash::fast::RandomState,
}

impl Known {
    fn reserve<T: Pod>(&mut self, runs: usize, table: &[T]) {
        self.runs.reserve(runs, |known| self.hasher.hash_one(run(table, *known)));
    }

    /// Where a run is in the table, to which it is added if it is not there.
    fn place<T: Pod>(&mut self, new: &[T], table: &mut Vec<T>) -> Result<u32> {
        let bytes: &[u8] = bytemuck::cast_slice(new);
        if run(table, self.last) == bytes {
            return Ok(self.last.0);
        }
        let hash = |bytes| self.hasher.hash_one(bytes);
        let is_same = |known: &(u32, u32)| run(table, *known) == bytes;
        if let Some(known) = self.runs.find(hash(bytes), is_same) {
            self.last = *known;
            return Ok(known.0);
        }
        let place = (number(table.len())?, number(new.len())?);
        table.extend_from_slice(new);
        self.runs.insert_unique(hash(bytes), place, |known| hash(run(table, *known)));
        self.last = place;
        Ok(place.0)
    }
}

/// The bytes of a part of a table.
fn run<T: Pod>(table: &[T], (start, len): (u32, u32)) -> &[u8] {
    bytemuck::cast_slice(&table[native(start)..][..native(len)])
}

/// A container whose children wait for their turn: breadth first, so that their records follow each
/// other in the order of the queue.
struct Queued<'a> {
    children: &'a [(Branch<'a>, Tree<'a>)],
    /// The number of the container above it in the queue, and the step from there; none for the root.
    above: Option<(usize, Branch<'a>)>,
}

/// The queue, and how many nodes have been queued with it.
struct Queue<'a> {
    containers: Vec<Queued<'a>>,
    nodes: usize,
}

impl<'a> Queue<'a> {
    fn push(&mut self, node: &'a Tree<'a>, above: Option<(usize, Branch<'a>)>) {
        if let Tree::Container(_, children) = node {
            self.containers.push(Queued { children, above });
            self.nodes += children.len();
        }
    }

    /// The path of a queued container, for errors.
    fn path_of(&self, mut container: usize) -> ObjectPath {
        let mut steps = Vec::new();
        while let Some((above, step)) = self.containers[container].above {
            steps.push(step.to_step());
            container = above;
        }
        steps.into_iter().rev().collect()
    }
}

impl<'a> Encoder<'a> {
    /// Fills `nodes` and `by_key`, and finds all tensors.
    fn nodes(&mut self, root: &'a Tree<'a>) -> Result<()> {
        let mut queue = Queue { containers: Vec::new(), nodes: 1 };
        let record = self.node(root, queue.nodes)?;
        self.tables.nodes.push(record);
        self.tables.by_key.push(0.into());
        queue.push(root, None);
        let mut next = 0;
        while next < queue.containers.len() {
            self.children(&mut queue, next)?;
            next += 1;
        }
        Ok(())
    }

    /// The records of the children of a container, and their order.
    fn children(&mut self, queue: &mut Queue<'a>, container: usize) -> Result<()> {
        let children = queue.containers[container].children;
        self.tables.nodes.reserve(children.len());
        self.tables.by_key.reserve(children.len());
        self.heap.reserve(children.len(), &self.tables.heap);
        let first = self.tables.nodes.len();
        for (branch, child) in children {
            let record = self
                .keyed(*branch, child, queue.nodes)
                .map_err(|error| error.at(queue.path_of(container).step(branch.to_step())))?;
            self.tables.nodes.push(record);
            queue.push(child, Some((container, *branch)));
        }
        let range = number(first)?..number(self.tables.nodes.len())?;
        let Some((Branch::Key(_), _)) = children.first() else {
            self.tables.by_key.extend(range.map(u32_le::from_native));
            return Ok(());
        };
        let path = |child: u32| {
            let (branch, _) = &children[native(child) - first];
            queue.path_of(container).step(branch.to_step())
        };
        let order = by_key(&self.tables.views(), range, path)?;
        self.tables.by_key.extend(order);
        Ok(())
    }

    /// The record of a node with its key.
    fn keyed(
        &mut self,
        branch: Branch<'a>,
        node: &'a Tree<'a>,
        first_child: usize,
    ) -> Result<record::Node> {
        let (key_kind, key) = match branch {
            Branch::Index(_) => (crate::key::kind::INDEX, 0),
            Branch::Key(key) => {
                let FileKey { kind, content } = FileKey::of(key)?;
                let word = match content {
                    Content::Word(word) => word,
                    Content::Heap(bytes) => self.intern(&bytes)?,
                };
                (kind, word)
            }
        };
        let record = self.node(node, first_child)?;
        Ok(record::Node { key_kind, key: key.into(), ..record })
    }

    /// The record of a node, without its key.
    fn node(&mut self, node: &'a Tree<'a>, first_child: usize) -> Result<record::Node> {
        let mut record: record::Node = bytemuck::Zeroable::zeroed();
        let (kind, count, a, b) = match node {
            Tree::Leaf(value) => self.leaf(value)?,
            Tree::Stored(stored, storage) => {
                record.flags = STORED.into();
                let (kind, b) = match stored {
                    Stored::Str => (kind::STR, 0),
                    Stored::Bytes => (kind::BYTES, 0),
                    Stored::Opaque(media) => (kind::OPAQUE, self.intern(media.as_bytes())?),
                };
                (kind, 0, u64::from(*storage), b)
            }
            Tree::Tensor(placed) => {
                self.tensors.push(placed);
                (kind::TENSOR, 1, word(self.tensors.len() - 1)?, 0)
            }
            Tree::Shards(run) => {
                let first = self.tensors.len();
                self.tensors.extend(run);
                (kind::TENSOR, run.len(), word(first)?, 0)
            }
            Tree::Container(container, children) => {
                let (kind, b) = match container {
                    Container::Dict => (kind::DICT, 0),
                    Container::OrderedDict => (kind::ORDERED_DICT, 0),
                    Container::List => (kind::LIST, 0),
                    Container::Tuple => (kind::TUPLE, 0),
                    Container::NamedTuple(name) => {
                        (kind::NAMEDTUPLE, self.intern(name.as_bytes())?)
                    }
                    Container::Divergent => (kind::DIVERGENT, 0),
                };
                (kind, children.len(), word(first_child)?, b)
            }
        };
        record.kind = kind;
        record.count = number(count)?.into();
        record.a = a.into();
        record.b = b.into();
        Ok(record)
    }

    /// Kind, count, `a` and `b` of a leaf that lies in the index.
    fn leaf(&mut self, value: &'a Value) -> Result<(u8, usize, u64, u64)> {
        Ok(match value {
            Value::None => (kind::NONE, 0, 0, 0),
            Value::Bool(bool) => (kind::BOOL, 0, u64::from(*bool), 0),
            Value::Int(int) => match int.as_i64() {
                Some(small) => (kind::INT, 0, small.cast_unsigned(), 0),
                None => (kind::BIGINT, 0, self.intern(&int.big_bytes().unwrap_or_default())?, 0),
            },
            Value::Float(float) => (kind::FLOAT, 0, float.to_bits(), 0),
            Value::Complex(re, im) => (kind::COMPLEX, 0, re.to_bits(), im.to_bits()),
            Value::Str(text) => (kind::STR, 0, self.intern(text.as_bytes())?, 0),
            Value::Bytes(bytes) => (kind::BYTES, 0, self.intern(bytes)?, 0),
            Value::Dtype(dtype) => (kind::DTYPE, 0, u64::from(dtype.code()), 0),
            Value::Size(sizes) if sizes.len() > MAX_RANK => {
                return Err(Error::new(ErrorKind::RankTooLarge)
                    .note(format_args!("a size of {} entries", sizes.len())));
            }
            Value::Size(sizes) => {
                let words: Vec<u64> = sizes.iter().map(|size| size.cast_unsigned()).collect();
                (kind::SIZE, sizes.len(), u64::from(self.vector(&words)?), 0)
            }
            Value::Device(name) => (kind::DEVICE, 0, self.intern(name.as_bytes())?, 0),
            Value::Opaque { media, bytes } => {
                let a = self.intern(bytes)?;
                (kind::OPAQUE, 0, a, self.intern(media.as_bytes())?)
            }
            Value::Tensor(_)
            | Value::Shards(_)
            | Value::Dict(_)
            | Value::OrderedDict(_)
            | Value::List(_)
            | Value::Tuple(_)
            | Value::NamedTuple(..)
            | Value::Divergent(_) => {
                return Err(
                    Error::new(ErrorKind::UntypedLeaf).note("a leaf that is no plain value")
                );
            }
        })
    }

    fn tensor(&mut self, tensor: &Placed<'a>) -> Result<()> {
        let Placed { meta, storage, byte_offset, place } = *tensor;
        let shape = self.vector(meta.shape())?;
        let strides = meta.explicit_strides().map(|strides| self.vector(strides)).transpose()?;
        let slice = place.map(|place| {
            let next = self.slices.len();
            number(next).map(|next| *self.slices.entry(place).or_insert(next))
        });
        self.tables.tensors.push(record::Tensor {
            storage: storage.unwrap_or(NONE).into(),
            dtype: meta.dtype().code().into(),
            rank: rank(meta.shape())?,
            flags: meta.flags().bits(),
            shape: shape.into(),
            strides: strides.unwrap_or(NONE).into(),
            slice: slice.transpose()?.unwrap_or(NONE).into(),
            reserved: 0.into(),
            byte_offset: byte_offset.into(),
        });
        Ok(())
    }

    fn slices(&mut self) -> Result<()> {
        let places: Vec<&ShardPlace> = self.slices.keys().copied().collect();
        for place in places {
            let slice = place.slice();
            let mesh_shape = slice.mesh_shape();
            let offsets = self.vector(slice.offsets())?;
            let global_shape = self.vector(slice.global_shape())?;
            let has_mesh = !mesh_shape.is_empty();
            let known = place.mesh().filter(|_| has_mesh);
            // Shape and ranks are one vector, so that a mesh is in dims once.
            let ranks = known.into_iter().flat_map(|mesh| mesh.ranks().iter().copied());
            let mesh: Vec<u64> = mesh_shape.iter().copied().chain(ranks.map(u64::from)).collect();
            let mesh = if has_mesh { self.vector(&mesh)? } else { NONE };
            let mesh_rank = rank(mesh_shape)?;
            let ranks = known.map_or(NONE, |_| mesh + u32::from(mesh_rank));
            let coordinates = match slice.coordinates() {
                Some(coordinates) if has_mesh => self.vector(coordinates)?,
                _ => NONE,
            };
            let names = known.and_then(DeviceMesh::dim_names).map(|names| self.names(names));
            let names = names.transpose()?.unwrap_or(NONE);
            let placements = place.placements().filter(|_| has_mesh);
            let placements = placements.map(|placements| self.placed(placements)).transpose()?;
            self.tables.slices.push(record::Slice {
                offsets: offsets.into(),
                global_shape: global_shape.into(),
                mesh: mesh.into(),
                coordinates: coordinates.into(),
                ranks: ranks.into(),
                placements: placements.unwrap_or(NONE).into(),
                names: names.into(),
                rank: rank(slice.global_shape())?,
                mesh_rank,
                flags: 0.into(),
            });
        }
        Ok(())
    }

    /// Mesh dimension names are a vector of heap ranges.
    fn names(&mut self, names: &'a [String]) -> Result<u32> {
        let ranges = names.iter().map(|name| self.intern(name.as_bytes()));
        let ranges: Vec<u64> = ranges.collect::<Result<_>>()?;
        self.vector(&ranges)
    }

    fn placed(&mut self, placements: &'a [Placement]) -> Result<u32> {
        if let Some(first) = self.placements.get(placements) {
            return Ok(*first);
        }
        let first = number(self.tables.placements.len())?;
        for placement in placements {
            let (kind, dim, split_factor) = match placement {
                Placement::Replicate => (0, 0, 0),
                Placement::Shard { dim } => (1, *dim, 0),
                Placement::StridedShard { dim, split_factor } => (2, *dim, *split_factor),
                Placement::Partial { .. } => {
                    return Err(Error::new(ErrorKind::PartialPlacement));
                }
            };
            self.tables.placements.push(record::Placement {
                kind,
                reserved: [0; 3],
                dim: dim.into(),
                split_factor: split_factor.into(),
            });
        }
        self.placements.insert(placements, first);
        Ok(first)
    }

    fn attrs(&mut self, attrs: &'a Attrs) -> Result<()> {
        for (name, value) in attrs {
            let name = self.intern(name.as_bytes())?;
            let (kind, value) = match value {
                AttrValue::Int(int) => (kind::INT, int.cast_unsigned()),
                AttrValue::Text(text) => (kind::STR, self.intern(text.as_bytes())?),
                AttrValue::Bytes(bytes) => (kind::BYTES, self.intern(bytes)?),
            };
            self.tables.attrs.push(record::Attr {
                name: name.into(),
                value: value.into(),
                kind,
                reserved: [0; 7],
            });
        }
        Ok(())
    }

    fn shards(&mut self, shards: &'a [ShardFile]) -> Result<()> {
        for shard in shards {
            let name = self.intern(shard.name.as_bytes())?;
            self.tables.shards.push(record::Shard {
                name: name.into(),
                file_len: shard.file_len.into(),
                index_off: shard.index_off.into(),
                index_crc32: shard.index_crc32.into(),
                writer: shard.writer.into(),
                digest: shard.digest.unwrap_or_default(),
            });
        }
        Ok(())
    }

    /// The heap range of these bytes, which are in the heap once.
    fn intern(&mut self, bytes: &[u8]) -> Result<u64> {
        if bytes.is_empty() {
            return Ok(0);
        }
        let len = number(bytes.len())?;
        // What is long may not be shared.
        if record::is_inline(bytes.len()) {
            return Ok(heap_range(self.heap.place(bytes, &mut self.tables.heap)?, len));
        }
        let start = number(self.tables.heap.len())?;
        self.tables.heap.extend_from_slice(bytes);
        Ok(heap_range(start, len))
    }

    /// Where these words are in dims, once.
    fn vector(&mut self, words: &[u64]) -> Result<u32> {
        if words.is_empty() {
            return Ok(0);
        }
        // This crate compiles for little-endian hosts only.
        self.dims.place(bytemuck::cast_slice(words), &mut self.tables.dims)
    }
}

/// The children of a keyed container in the order of their keys, which are proven to differ, in Python
/// as well.
fn by_key(
    views: &Views<'_>,
    children: std::ops::Range<u32>,
    path: impl Fn(u32) -> ObjectPath,
) -> Result<Vec<u32_le>> {
    let key = |child: u32| views.key_proven(native(child));
    let shared = shared_prefix(children.clone().map(key));
    let mut order: Vec<_> =
        children.clone().map(|child| (abbreviated(key(child), shared), child)).collect();
    order.sort_by(|(one, left), (other, right)| {
        one.cmp(other).then_with(|| key(*left).cmp(&key(*right)))
    });
    let is_same =
        |pair: &&[(Abbreviated, u32)]| pair[0].0 == pair[1].0 && key(pair[0].1) == key(pair[1].1);
    if let Some(pair) = order.windows(2).find(is_same) {
        return Err(Error::new(ErrorKind::DuplicateKey).at(path(pair[1].1)));
    }
    let highest = order.last().map_or(0, |((kind, _), _)| *kind);
    let order: Vec<u32_le> = order.into_iter().map(|(_, child)| child.into()).collect();
    // Only bools and floats have twins, and what comes last in key order is of the highest kind.
    if highest < crate::key::kind::BOOL {
        return Ok(order);
    }
    for child in order.iter().map(|child| child.to_native()) {
        let (kind, _, word) = key(child);
        for twin in python_twins(kind, word) {
            if let Ok(at) = views.search(&order, twin.order()) {
                return Err(Error::new(ErrorKind::KeysCollide)
                    .at(path(child))
                    .note(path(order[at].to_native())));
            }
        }
    }
    Ok(order)
}

/// How many bytes all keys begin with alike.
fn shared_prefix<'a>(mut keys: impl Iterator<Item = KeyOrder<'a>>) -> usize {
    let (_, mut shared, _) = keys.next().unwrap_or_default();
    for (_, bytes, _) in keys {
        if !bytes.starts_with(shared) {
            let same = shared.iter().zip(bytes).take_while(|(one, other)| one == other).count();
            shared = &shared[..same];
        }
    }
    shared.len()
}

/// The kind of a key and three words, ordered as the key is as far as they tell it from others.
type Abbreviated = (u8, [u64; 3]);

/// A key without the bytes that all keys begin with: of names that differ, few have the same one.
fn abbreviated((kind, bytes, word): KeyOrder<'_>, shared: usize) -> Abbreviated {
    if !crate::key::kind::is_heap(kind) {
        return (kind, [word, 0, 0]);
    }
    let mut first = [[0; 8]; 3];
    let rest = &bytes[shared..];
    let len = rest.len().min(24);
    first.as_flattened_mut()[..len].copy_from_slice(&rest[..len]);
    (kind, first.map(u64::from_be_bytes))
}

fn word(count: usize) -> Result<u64> {
    number(count).map(u64::from)
}

fn rank(shape: &[u64]) -> Result<u8> {
    u8::try_from(shape.len()).map_err(|_| Error::new(ErrorKind::RankTooLarge).note(shape.len()))
}

impl Key {
    /// The key of a writer's value in a divergent node.
    pub fn writer(writer: u32) -> Self {
        Self::Int(i64::from(writer).into())
    }
}
