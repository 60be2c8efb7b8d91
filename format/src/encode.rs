//! A structure to the tables of an index. Spec: sections 3 to 7.

use std::borrow::Cow;

use indexmap::IndexMap;
use indexmap::map::Entry;
use rend::{u32_le, u64_le};

use crate::digest::Digest;
use crate::error::{Error, ErrorKind, Result};
use crate::key::{Content, FileKey, Key, ObjectPath, python_twins};
use crate::mesh::DeviceMesh;
use crate::placement::Placement;
use crate::record::{self, NONE, STORED, heap_range, kind};
use crate::shape::MAX_RANK;
use crate::shard::ShardPlace;
use crate::state_dict::Value;
use crate::structure::{Branch, Container, Placed, Stored, Tree};
use crate::table::{Tables, number};
use crate::text::Text;
use crate::views::native;

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
    let tensors = encoder.nodes(root)?;
    encoder.tables.tensors.reserve(tensors.len());
    for reference in tensors {
        encoder.tensor(reference)?;
    }
    encoder.slices()?;
    encoder.attrs(attrs)?;
    encoder.shards(shards)?;
    Ok(encoder.tables)
}

#[derive(Default)]
struct Encoder<'a> {
    tables: Tables,
    heap: Numbers<Cow<'a, [u8]>>,
    dims: Numbers<Box<[u64]>>,
    slices: Numbers<&'a ShardPlace>,
    placements: Numbers<&'a [Placement]>,
}

/// What is in a table already, and where. No bytes depend on the hash.
type Numbers<T> = IndexMap<T, u32, foldhash::fast::RandomState>;

/// A node that waits for its turn: breadth first, so the queue is the node table.
struct Queued<'a> {
    node: &'a Tree<'a>,
    /// The number of its container; of no use for the root.
    parent: usize,
    step: Option<Branch<'a>>,
}

impl<'a> Queued<'a> {
    fn key(&self) -> Result<FileKey<'a>> {
        match self.step {
            Some(Branch::Key(key)) => FileKey::of(key),
            Some(Branch::Index(_)) | None => Ok(FileKey::word(crate::key::kind::INDEX, 0)),
        }
    }
}

impl<'a> Encoder<'a> {
    /// Fills `nodes` and `by_key`; returns the tensor references in the order of the nodes.
    fn nodes(&mut self, root: &'a Tree<'a>) -> Result<Vec<Placed<'a>>> {
        let mut tensors = Vec::new();
        let mut queue = vec![Queued { node: root, parent: 0, step: None }];
        self.tables.by_key.push(0.into());
        let mut next = 0;
        while let Some(queued) = queue.get(next) {
            let node = queued.node;
            let FileKey { kind: key_kind, content } = queued.key()?;
            let key = self.content(content)?;
            let first_child = queue.len();
            let mut record = self
                .node(node, &mut tensors, first_child)
                .map_err(|error| error.at(path_of(&queue, next)))?;
            record.key_kind = key_kind;
            record.key = key.into();
            if let Tree::Container(_, children) = node {
                queue.reserve(children.len());
                self.heap.reserve(children.len());
                self.tables.nodes.reserve(children.len() + 1);
                self.tables.by_key.reserve(children.len());
                queue.extend(children.iter().map(|(step, child)| Queued {
                    node: child,
                    parent: next,
                    step: Some(*step),
                }));
                self.by_key(&queue, first_child)?;
            }
            self.tables.nodes.push(record);
            next += 1;
        }
        Ok(tensors)
    }

    /// The record of a node, without its key.
    fn node(
        &mut self,
        node: &'a Tree<'a>,
        tensors: &mut Vec<Placed<'a>>,
        first_child: usize,
    ) -> Result<record::Node> {
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
                tensors.push(*placed);
                (kind::TENSOR, 1, word(tensors.len() - 1)?, 0)
            }
            Tree::Shards(run) => {
                let first = tensors.len();
                tensors.extend(run);
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
                None => (kind::BIGINT, 0, self.intern(int.big_bytes().unwrap_or_default())?, 0),
            },
            Value::Float(float) => (kind::FLOAT, 0, float.to_bits(), 0),
            Value::Complex(re, im) => (kind::COMPLEX, 0, re.to_bits(), im.to_bits()),
            Value::Str(text) => (kind::STR, 0, self.intern(text.as_bytes())?, 0),
            Value::Bytes(bytes) => (kind::BYTES, 0, self.intern(&**bytes)?, 0),
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
                let a = self.intern(&**bytes)?;
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

    /// Sorts the keys of the container whose children begin at `first`, the last ones queued.
    fn by_key(&mut self, queue: &[Queued<'_>], first: usize) -> Result<()> {
        let path = |child: u32| path_of(queue, native(child));
        let children = number(first)?..number(queue.len())?;
        if let Some(Queued { step: Some(Branch::Index(_)), .. }) = queue.get(first) {
            self.tables.by_key.extend(children.map(u32_le::from_native));
            return Ok(());
        }
        let mut order = Vec::with_capacity(queue.len() - first);
        for (queued, child) in queue[first..].iter().zip(children) {
            order.push((queued.key().map_err(|error| error.at(path(child)))?, child));
        }
        order.sort();
        if let Some(pair) = order.windows(2).find(|pair| pair[0].0 == pair[1].0) {
            return Err(Error::new(ErrorKind::DuplicateKey).at(path(pair[1].1)));
        }
        // Only bools and floats have twins, and what comes last in key order is of the highest kind.
        let highest = order.last().map_or(0, |(key, _)| key.kind);
        for (key, child) in order.iter().filter(|_| highest >= crate::key::kind::BOOL) {
            let FileKey { kind, content: Content::Word(word) } = key else { continue };
            for twin in python_twins(*kind, *word) {
                if let Ok(at) = order.binary_search_by(|(other, _)| other.cmp(&twin)) {
                    return Err(Error::new(ErrorKind::KeysCollide)
                        .at(path(*child))
                        .note(path(order[at].1)));
                }
            }
        }
        self.tables.by_key.extend(order.iter().map(|(_, child)| u32_le::from_native(*child)));
        Ok(())
    }

    fn tensor(&mut self, tensor: Placed<'a>) -> Result<()> {
        let Placed { meta, storage, byte_offset, place } = tensor;
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
                AttrValue::Bytes(bytes) => (kind::BYTES, self.intern(&**bytes)?),
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

    fn content(&mut self, content: Content<'a>) -> Result<u64> {
        match content {
            Content::Word(word) => Ok(word),
            Content::Heap(bytes) => self.intern(bytes),
        }
    }

    /// The heap range of these bytes, which are in the heap once.
    fn intern(&mut self, bytes: impl Into<Cow<'a, [u8]>>) -> Result<u64> {
        let bytes = bytes.into();
        if bytes.is_empty() {
            return Ok(0);
        }
        let len = number(bytes.len())?;
        let next = number(self.tables.heap.len())?;
        // What is long may not be shared.
        if record::is_inline(bytes.len()) {
            match self.heap.entry(bytes) {
                Entry::Occupied(known) => return Ok(heap_range(*known.get(), len)),
                Entry::Vacant(new) => {
                    self.tables.heap.extend_from_slice(new.key());
                    new.insert(next);
                }
            }
        } else {
            self.tables.heap.extend_from_slice(&bytes);
        }
        Ok(heap_range(next, len))
    }

    /// The dims range of these words, which are in dims once.
    fn vector(&mut self, words: &[u64]) -> Result<u32> {
        if words.is_empty() {
            return Ok(0);
        }
        if let Some(offset) = self.dims.get(words) {
            return Ok(*offset);
        }
        let offset = number(self.tables.dims.len())?;
        self.tables.dims.extend(words.iter().map(|word| u64_le::from_native(*word)));
        self.dims.insert(words.into(), offset);
        Ok(offset)
    }
}

/// The path of a queued node, for errors.
fn path_of(queue: &[Queued<'_>], mut node: usize) -> ObjectPath {
    let mut steps = Vec::new();
    while let Some(step) = queue[node].step {
        steps.push(step.to_step());
        node = queue[node].parent;
    }
    steps.into_iter().rev().collect()
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
