//! Encoding of a structure into the tables of an index. Spec: sections 3 to 7.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::BuildHasher;
use std::ops::RangeInclusive;

use bytemuck::Pod;
use hashbrown::HashTable;
use indexmap::IndexMap;
use rend::u32_le;

use crate::class_tag::check_tagged_nodes;
use crate::convert::index_to_usize;
use crate::dtype::{CompactDtype, Dtype, OtherDtype};
use crate::error::{Error, ErrorKind, Result};
use crate::key::{EncodedKey, KeyContent, MapKey, ObjectPath, SortKey};
use crate::mesh::DeviceMesh;
use crate::number::MAX_BIGINT_BYTES;
use crate::placement::Placement;
use crate::record::{
    self, MAX_ATTR_NAME_BYTES, MAX_NAME_BYTES, NONE, STORED_FLAG, heap_range, kind,
};
use crate::shape::MAX_RANK;
use crate::shard::ShardSpec;
use crate::shard_file::{OtherStorage, ShardFile};
use crate::state_dict::Value;
use crate::structure::{BorrowedNode, BorrowedStep, BorrowedTensor, Container, ContentKind};
use crate::table::{Tables, record_number};
use crate::table_views::TableViews;
use crate::text::{Text, check_name_len};

/// Value of an attribute of an archive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AttrValue {
    /// A 64-bit integer.
    Int(i64),
    /// Text.
    Text(Text),
    /// Bytes.
    Bytes(Box<[u8]>),
}

/// Attributes of an archive by name.
pub type Attrs = BTreeMap<String, AttrValue>;

/// Encodes a structure into tables.
///
/// # Errors
///
/// Any violation that a reader would reject, such as duplicate keys, keys that are equal in Python, NaN keys,
/// and tables that are too large.
pub(crate) fn encode(
    root: &BorrowedNode<'_>,
    attrs: &Attrs,
    shards: &[ShardFile],
) -> Result<Tables> {
    let mut encoder = TableEncoder::default();
    encoder.encode_nodes(root)?;
    if encoder.has_tags {
        check_tagged_nodes(&encoder.tables.views())?;
    }
    let tensors = std::mem::take(&mut encoder.tensors);
    encoder.tables.tensors.reserve(tensors.len());
    for tensor in tensors {
        encoder.encode_tensor(tensor)?;
    }
    encoder.encode_slices()?;
    encoder.encode_attrs(attrs)?;
    encoder.encode_shards(shards)?;
    encoder.encode_dtypes()?;
    Ok(encoder.tables)
}

/// Encoder of a structure into tables.
#[derive(Default)]
struct TableEncoder<'a> {
    tables: Tables,
    heap: Interner,
    dims: Interner,
    others: Interner,
    slices: RecordNumbers<&'a ShardSpec>,
    placements: RecordNumbers<&'a [Placement]>,
    /// The dtypes that the format does not list, by number.
    dtypes: BTreeMap<u16, OtherDtype>,
    /// Whether a node has a class tag.
    has_tags: bool,
    /// The tensors of all encoded nodes, in the order of their records.
    tensors: Vec<&'a BorrowedTensor<'a>>,
}

/// Record numbers of the entries of a table. The encoded bytes do not depend on the hash.
type RecordNumbers<T> = IndexMap<T, u32, foldhash::fast::RandomState>;

/// Interner of runs of elements in a table: stores each run once.
#[derive(Default)]
struct Interner {
    /// Start and length of each run.
    runs: HashTable<(u32, u32)>,
    /// The most recent result. Adjacent tensors often have the same shape.
    last: (u32, u32),
    hasher: foldhash::fast::RandomState,
}

impl Interner {
    /// Reserves memory for `runs` more runs.
    fn reserve<T: Pod>(&mut self, runs: usize, table: &[T]) {
        self.runs.reserve(runs, |range| self.hasher.hash_one(run_bytes(table, *range)));
    }

    /// Returns the start of a run in the table, and adds the run if the table does not have it.
    fn intern<T: Pod>(&mut self, new: &[T], table: &mut Vec<T>) -> Result<u32> {
        let bytes: &[u8] = bytemuck::cast_slice(new);
        if run_bytes(table, self.last) == bytes {
            return Ok(self.last.0);
        }
        let hash = |bytes| self.hasher.hash_one(bytes);
        let is_same = |range: &(u32, u32)| run_bytes(table, *range) == bytes;
        if let Some(range) = self.runs.find(hash(bytes), is_same) {
            self.last = *range;
            return Ok(range.0);
        }
        let range = (record_number(table.len())?, record_number(new.len())?);
        table.extend_from_slice(new);
        self.runs.insert_unique(hash(bytes), range, |range| hash(run_bytes(table, *range)));
        self.last = range;
        Ok(range.0)
    }
}

/// Returns the bytes of a run of elements of a table.
fn run_bytes<T: Pod>(table: &[T], (start, len): (u32, u32)) -> &[u8] {
    bytemuck::cast_slice(&table[index_to_usize(start)..][..index_to_usize(len)])
}

/// A container of the breadth-first queue.
struct QueuedContainer<'a> {
    children: &'a [(BorrowedStep<'a>, BorrowedNode<'a>)],
    /// The position of its parent in the queue, and the step from the parent; `None` for the root.
    parent: Option<(usize, BorrowedStep<'a>)>,
}

/// The breadth-first queue of containers. The records of their children lie in the order of the queue.
struct Queue<'a> {
    containers: Vec<QueuedContainer<'a>>,
    /// Number of nodes queued so far: the root and the children of all queued containers.
    node_count: usize,
}

impl<'a> Queue<'a> {
    /// Adds a node to the queue if it is a container.
    fn push(&mut self, node: &'a BorrowedNode<'a>, parent: Option<(usize, BorrowedStep<'a>)>) {
        if let BorrowedNode::Container(_, children) = node {
            self.containers.push(QueuedContainer { children, parent });
            self.node_count += children.len();
        }
    }

    /// Returns the path of a queued container, for error messages.
    fn path_of(&self, mut container: usize) -> ObjectPath {
        let mut steps = Vec::new();
        while let Some((parent, step)) = self.containers[container].parent {
            steps.push(step.to_step());
            container = parent;
        }
        steps.into_iter().rev().collect()
    }
}

impl<'a> TableEncoder<'a> {
    /// Encodes the tables `nodes` and `by_key`, and collects all tensors.
    fn encode_nodes(&mut self, root: &'a BorrowedNode<'a>) -> Result<()> {
        let mut queue = Queue { containers: Vec::new(), node_count: 1 };
        if let BorrowedNode::Container(Container::Tagged(_), _) = root {
            return Err(Error::new(ErrorKind::ClassTag).with_detail("the root has one"));
        }
        let record = self.node_record(root, queue.node_count)?;
        self.tables.nodes.push(record);
        self.tables.by_key.push(0.into());
        queue.push(root, None);
        let mut next = 0;
        while next < queue.containers.len() {
            self.encode_children(&mut queue, next)?;
            next += 1;
        }
        Ok(())
    }

    /// Encodes the records of the children of a container, and their key order.
    fn encode_children(&mut self, queue: &mut Queue<'a>, container: usize) -> Result<()> {
        let children = queue.containers[container].children;
        self.tables.nodes.reserve(children.len());
        self.tables.by_key.reserve(children.len());
        self.heap.reserve(children.len(), &self.tables.heap);
        let first = self.tables.nodes.len();
        for (branch, child) in children {
            let record =
                self.keyed_node_record(*branch, child, queue.node_count).map_err(|error| {
                    error.with_path(queue.path_of(container).step(branch.to_step()))
                })?;
            self.tables.nodes.push(record);
            queue.push(child, Some((container, *branch)));
        }
        let range = record_number(first)?..record_number(self.tables.nodes.len())?;
        let Some((BorrowedStep::Key(_), _)) = children.first() else {
            self.tables.by_key.extend(range.map(u32_le::from_native));
            return Ok(());
        };
        let path = |child: u32| {
            let (branch, _) = &children[index_to_usize(child) - first];
            queue.path_of(container).step(branch.to_step())
        };
        let order = sort_by_key(&self.tables.views(), range, path)?;
        self.tables.by_key.extend(order);
        Ok(())
    }

    /// Returns the record of a node with its key.
    fn keyed_node_record(
        &mut self,
        branch: BorrowedStep<'a>,
        node: &'a BorrowedNode<'a>,
        first_child: usize,
    ) -> Result<record::Node> {
        let (key_kind, key) = match branch {
            BorrowedStep::Index(_) => (crate::key::kind::INDEX, 0),
            BorrowedStep::Key(key) => {
                let EncodedKey { kind, content } = EncodedKey::encode(key)?;
                let word = match content {
                    KeyContent::Word(word) => word,
                    KeyContent::Heap(bytes) => self.intern(&bytes)?,
                };
                (kind, word)
            }
        };
        let record = self.node_record(node, first_child)?;
        Ok(record::Node { key_kind, key: key.into(), ..record })
    }

    /// Returns the record of a node without its key.
    fn node_record(
        &mut self,
        node: &'a BorrowedNode<'a>,
        first_child: usize,
    ) -> Result<record::Node> {
        let mut record: record::Node = bytemuck::Zeroable::zeroed();
        let (kind, count, a, b) = match node {
            BorrowedNode::Leaf(value) => self.leaf_fields(value)?,
            BorrowedNode::StoredLeaf(stored, storage) => {
                record.flags = STORED_FLAG.into();
                let (kind, b) = match stored {
                    ContentKind::Str => (kind::STR, 0),
                    ContentKind::Bytes => (kind::BYTES, 0),
                    ContentKind::Opaque(media) => {
                        (kind::OPAQUE, self.intern_name(media.as_bytes())?)
                    }
                };
                (kind, 0, u64::from(*storage), b)
            }
            BorrowedNode::Tensor(placed) => {
                self.tensors.push(placed);
                (kind::TENSOR, 1, to_word(self.tensors.len() - 1)?, 0)
            }
            BorrowedNode::Shards(run) => {
                let first = self.tensors.len();
                self.tensors.extend(run);
                (kind::TENSOR, run.len(), to_word(first)?, 0)
            }
            BorrowedNode::Distributed(tensor, leaf) => {
                self.tensors.push(tensor);
                (kind::DISTRIBUTED, 1, to_word(self.tensors.len() - 1)?, leaf.to_word())
            }
            BorrowedNode::Container(container, children) => {
                let (kind, b) = match container {
                    Container::Dict => (kind::DICT, 0),
                    Container::OrderedDict => (kind::ORDERED_DICT, 0),
                    Container::List => (kind::LIST, 0),
                    Container::Tuple => (kind::TUPLE, 0),
                    Container::NamedTuple(name) => {
                        (kind::NAMEDTUPLE, self.intern_name(name.as_bytes())?)
                    }
                    Container::Divergent if children.len() < 2 => {
                        return Err(Error::new(ErrorKind::DivergentNode)
                            .with_detail("it has fewer than two children"));
                    }
                    Container::Divergent => (kind::DIVERGENT, 0),
                    Container::Tagged(tag) => {
                        self.has_tags = true;
                        (tag.class().kind(), tag.to_word())
                    }
                };
                (kind, children.len(), to_word(first_child)?, b)
            }
        };
        record.kind = kind;
        record.count = record_number(count)?.into();
        record.a = a.into();
        record.b = b.into();
        Ok(record)
    }

    /// Returns kind, count, `a` and `b` of a leaf that lies in the index.
    fn leaf_fields(&mut self, value: &'a Value) -> Result<(u8, usize, u64, u64)> {
        Ok(match value {
            Value::None => (kind::NONE, 0, 0, 0),
            Value::Bool(bool) => (kind::BOOL, 0, u64::from(*bool), 0),
            Value::Int(int) => match (int.as_i64(), int.to_bigint_bytes().unwrap_or_default()) {
                (Some(small), _) => (kind::INT, 0, small.cast_unsigned(), 0),
                (None, bytes) if bytes.len() > MAX_BIGINT_BYTES => {
                    return Err(Error::new(ErrorKind::TooLarge).with_detail(format_args!(
                        "int of {} bytes, at most {MAX_BIGINT_BYTES}",
                        bytes.len()
                    )));
                }
                (None, bytes) => (kind::BIGINT, 0, self.intern(&bytes)?, 0),
            },
            Value::Float(float) => (kind::FLOAT, 0, float.to_bits(), 0),
            Value::Complex(re, im) => (kind::COMPLEX, 0, re.to_bits(), im.to_bits()),
            Value::Str(text) => (kind::STR, 0, self.intern(text.as_bytes())?, 0),
            Value::Bytes(bytes) => (kind::BYTES, 0, self.intern(bytes)?, 0),
            Value::Dtype(dtype) => {
                if let Dtype::Other(other) = dtype {
                    self.add_dtype(*other)?;
                }
                (kind::DTYPE, 0, u64::from(dtype.number()), 0)
            }
            Value::Size(sizes) if sizes.len() > MAX_RANK => {
                return Err(Error::new(ErrorKind::RankTooLarge)
                    .with_detail(format_args!("a size of {} entries", sizes.len())));
            }
            Value::Size(sizes) => {
                let words: Vec<u64> = sizes.iter().map(|size| size.cast_unsigned()).collect();
                (kind::SIZE, sizes.len(), u64::from(self.intern_dims(&words)?), 0)
            }
            Value::Device(name) => (kind::DEVICE, 0, self.intern_name(name.as_bytes())?, 0),
            Value::Opaque { media, bytes } => {
                let a = self.intern(bytes)?;
                (kind::OPAQUE, 0, a, self.intern_name(media.as_bytes())?)
            }
            Value::Tagged(tag, plain) if matches!(**plain, Value::Str(_)) => {
                self.has_tags = true;
                let (kind, count, a, _) = self.leaf_fields(plain)?;
                (kind, count, a, tag.to_word())
            }
            Value::Tensor(_)
            | Value::Tagged(..)
            | Value::Shards(_)
            | Value::Dict(_)
            | Value::OrderedDict(_)
            | Value::List(_)
            | Value::Tuple(_)
            | Value::NamedTuple(..)
            | Value::Divergent(_) => {
                return Err(
                    Error::new(ErrorKind::UntypedLeaf).with_detail("a leaf that is no plain value")
                );
            }
        })
    }

    fn encode_tensor(&mut self, tensor: &BorrowedTensor<'a>) -> Result<()> {
        let BorrowedTensor { meta, storage, byte_offset, shard_spec } = *tensor;
        meta.check_flags()?;
        if let CompactDtype::Other(other) = meta.compact_dtype() {
            self.add_dtype(**other)?;
        }
        let shape = self.intern_dims(meta.shape())?;
        let strides =
            meta.explicit_strides().map(|strides| self.intern_dims(strides)).transpose()?;
        let slice = shard_spec.map(|spec| {
            let next = self.slices.len();
            record_number(next).map(|next| *self.slices.entry(spec).or_insert(next))
        });
        self.tables.tensors.push(record::Tensor {
            storage: storage.unwrap_or(NONE).into(),
            dtype: meta.compact_dtype().number().into(),
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

    fn encode_slices(&mut self) -> Result<()> {
        let places: Vec<&ShardSpec> = self.slices.keys().copied().collect();
        for place in places {
            let slice = place.slice();
            let mesh_shape = slice.mesh_shape();
            let offsets = self.intern_dims(slice.offsets())?;
            let global_shape = self.intern_dims(slice.global_shape())?;
            let has_mesh = !mesh_shape.is_empty();
            let ranked_mesh = place.mesh().filter(|_| has_mesh);
            // Shape and ranks form one vector, so that dims holds each mesh once.
            let ranks = ranked_mesh.into_iter().flat_map(|mesh| mesh.ranks().iter().copied());
            let mesh: Vec<u64> = mesh_shape.iter().copied().chain(ranks.map(u64::from)).collect();
            let mesh = if has_mesh { self.intern_dims(&mesh)? } else { NONE };
            let mesh_rank = rank(mesh_shape)?;
            let ranks = ranked_mesh.map_or(NONE, |_| mesh + u32::from(mesh_rank));
            let coordinates = match slice.coordinates() {
                Some(coordinates) if has_mesh => self.intern_dims(coordinates)?,
                _ => NONE,
            };
            let names =
                ranked_mesh.and_then(DeviceMesh::dim_names).map(|names| self.intern_names(names));
            let names = names.transpose()?.unwrap_or(NONE);
            let placements = place.placements().filter(|_| has_mesh);
            let placements =
                placements.map(|placements| self.intern_placements(placements)).transpose()?;
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

    /// Interns the names of mesh dimensions as a vector of heap ranges, and returns its start in dims.
    fn intern_names(&mut self, names: &'a [String]) -> Result<u32> {
        let ranges = names.iter().map(|name| self.intern(name.as_bytes()));
        let ranges: Vec<u64> = ranges.collect::<Result<_>>()?;
        self.intern_dims(&ranges)
    }

    /// Interns the placements of a slice, and returns the number of the first.
    fn intern_placements(&mut self, placements: &'a [Placement]) -> Result<u32> {
        if let Some(first) = self.placements.get(placements) {
            return Ok(*first);
        }
        let first = record_number(self.tables.placements.len())?;
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

    fn encode_attrs(&mut self, attrs: &'a Attrs) -> Result<()> {
        for (name, value) in attrs {
            check_name(name.as_bytes(), 0..=MAX_ATTR_NAME_BYTES)?;
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

    fn encode_shards(&mut self, shards: &'a [ShardFile]) -> Result<()> {
        for shard in shards {
            let name = self.intern(shard.name.as_bytes())?;
            let others = shard.others.as_deref();
            let first = others.map(|others| self.intern_others(others)).transpose()?;
            self.tables.shards.push(record::Shard {
                name: name.into(),
                file_len: shard.file_len.into(),
                index_off: shard.index_off.into(),
                index_crc32: shard.index_crc32.into(),
                writer: shard.writer.into(),
                digest: shard.digest.unwrap_or_default(),
                crcs_off: shard.crcs.offset.into(),
                crcs_len: shard.crcs.len.into(),
                pages_crc32: shard.crcs.pages_crc32.into(),
                others: first.unwrap_or(NONE).into(),
                other_count: record_number(others.map_or(0, <[_]>::len))?.into(),
                reserved: 0.into(),
            });
        }
        Ok(())
    }

    /// Interns the other storages of a shard, and returns the number of the first record.
    fn intern_others(&mut self, others: &[OtherStorage]) -> Result<u32> {
        let record = |other: &OtherStorage| record::Other {
            stored_len: other.stored_len.into(),
            position: other.position.into(),
            crcs: other.crcs.into(),
        };
        let records: Vec<record::Other> = others.iter().map(record).collect();
        if records.is_empty() {
            return Ok(0);
        }
        self.others.intern(&records, &mut self.tables.others)
    }

    /// Collects a dtype that the file must describe.
    ///
    /// # Errors
    ///
    /// `DtypeTable` if another dtype has the same number.
    #[cold]
    fn add_dtype(&mut self, other: OtherDtype) -> Result<()> {
        let described = *self.dtypes.entry(other.number()).or_insert(other);
        if described == other {
            return Ok(());
        }
        Err(Error::new(ErrorKind::DtypeTable)
            .with_detail(format_args!("{other:?} and {described:?} have the same number")))
    }

    fn encode_dtypes(&mut self) -> Result<()> {
        let mut names = BTreeSet::new();
        for dtype in std::mem::take(&mut self.dtypes).into_values() {
            let name = self.intern(dtype.name().as_bytes())?;
            if !names.insert(name) {
                return Err(Error::new(ErrorKind::DtypeTable)
                    .with_detail(format_args!("two dtypes have the name {}", dtype.name())));
            }
            self.tables.dtypes.push(dtype.to_record(name));
        }
        Ok(())
    }

    /// Interns the name of a device, a media tag or a type in the heap, and returns its heap range.
    fn intern_name(&mut self, name: &[u8]) -> Result<u64> {
        check_name(name, 1..=MAX_NAME_BYTES)?;
        self.intern(name)
    }

    /// Interns bytes in the heap, and returns their heap range.
    fn intern(&mut self, bytes: &[u8]) -> Result<u64> {
        if bytes.is_empty() {
            return Ok(0);
        }
        let len = record_number(bytes.len())?;
        // Long content must not be shared (F-030).
        if record::is_inline(bytes.len()) {
            return Ok(heap_range(self.heap.intern(bytes, &mut self.tables.heap)?, len));
        }
        let start = record_number(self.tables.heap.len())?;
        self.tables.heap.extend_from_slice(bytes);
        Ok(heap_range(start, len))
    }

    /// Interns a vector of words in dims, and returns its start.
    fn intern_dims(&mut self, words: &[u64]) -> Result<u32> {
        if words.is_empty() {
            return Ok(0);
        }
        // This crate compiles for little-endian hosts only.
        self.dims.intern(bytemuck::cast_slice(words), &mut self.tables.dims)
    }
}

/// Checks that a name is UTF-8 without surrogates (F-032), and that its length is allowed (F-034).
fn check_name(name: &[u8], lengths: RangeInclusive<usize>) -> Result<()> {
    check_name_len(name, lengths)?;
    std::str::from_utf8(name)
        .map(drop)
        .map_err(|_| Error::new(ErrorKind::NotText).with_detail("a name with surrogates"))
}

/// Returns the children of a keyed container in the order of their keys.
///
/// # Errors
///
/// `DuplicateKey` if two keys are the same; `KeysCollide` if two keys are equal in Python.
fn sort_by_key(
    views: &TableViews<'_>,
    children: std::ops::Range<u32>,
    path: impl Fn(u32) -> ObjectPath,
) -> Result<Vec<u32_le>> {
    let key = |child: u32| views.validated_key(index_to_usize(child));
    let prefix_len = common_prefix_len(children.clone().map(key));
    let mut order: Vec<_> =
        children.clone().map(|child| (abbreviate(key(child), prefix_len), child)).collect();
    order.sort_by(|(left_key, left), (right_key, right)| {
        left_key.cmp(right_key).then_with(|| key(*left).cmp(&key(*right)))
    });
    let is_same = |pair: &&[(AbbreviatedKey, u32)]| {
        pair[0].0 == pair[1].0 && key(pair[0].1) == key(pair[1].1)
    };
    if let Some(pair) = order.windows(2).find(is_same) {
        return Err(Error::new(ErrorKind::DuplicateKey).with_path(path(pair[1].1)));
    }
    let order: Vec<u32_le> = order.into_iter().map(|(_, child)| child.into()).collect();
    match views.find_equal_keys(&order) {
        Some([first, second]) => {
            let path = |child: usize| record_number(child).map(&path);
            Err(Error::new(ErrorKind::KeysCollide)
                .with_path(path(first)?)
                .with_detail(path(second)?))
        }
        None => Ok(order),
    }
}

/// Returns the length of the longest common prefix of the keys, in bytes.
fn common_prefix_len<'a>(mut keys: impl Iterator<Item = SortKey<'a>>) -> usize {
    let (_, mut prefix, _) = keys.next().unwrap_or_default();
    for (_, bytes, _) in keys {
        if !bytes.starts_with(prefix) {
            let len = prefix.iter().zip(bytes).take_while(|(left, right)| left == right).count();
            prefix = &prefix[..len];
        }
    }
    prefix.len()
}

/// Kind of a key and its first 24 bytes after the common prefix, as words that sort as the bytes do.
///
/// A key that is a word is represented by the first word.
type AbbreviatedKey = (u8, [u64; 3]);

/// Abbreviates a key for sorting. Different names rarely have the same abbreviation.
fn abbreviate((kind, bytes, word): SortKey<'_>, prefix_len: usize) -> AbbreviatedKey {
    if !crate::key::kind::is_heap(kind) {
        return (kind, [word, 0, 0]);
    }
    let mut words = [[0; 8]; 3];
    let rest = &bytes[prefix_len..];
    let len = rest.len().min(24);
    words.as_flattened_mut()[..len].copy_from_slice(&rest[..len]);
    (kind, words.map(u64::from_be_bytes))
}

fn to_word(count: usize) -> Result<u64> {
    record_number(count).map(u64::from)
}

fn rank(shape: &[u64]) -> Result<u8> {
    u8::try_from(shape.len())
        .map_err(|_| Error::new(ErrorKind::RankTooLarge).with_detail(shape.len()))
}

impl MapKey {
    /// Returns the key of a writer's value in a divergent node.
    pub fn from_writer(writer: u32) -> Self {
        Self::Int(i64::from(writer).into())
    }
}
