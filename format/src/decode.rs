//! Decoding of validated index tables into a structure or a value.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;

use crate::class_tag::ClassTag;
use crate::convert::index_to_usize;
use crate::distributed::{DistributedTensor, parse_distribution};
use crate::dtype::CompactDtype;
use crate::error::{Error, ErrorKind, Result};
use crate::key::{self, MapKey, Step};
use crate::mesh::DeviceMesh;
use crate::number::{Float, Int};
use crate::placement::Placement;
use crate::record::{self, NONE, STORED_FLAG, kind, split_heap_range};
use crate::reference::TensorReference;
use crate::shard::{Shard, ShardSpec};
use crate::slice::TensorSlice;
use crate::state_dict::{Dict, Value};
use crate::structure::{Container, ContentKind, Node};
use crate::table_views::TableViews;
use crate::tensor::{Tensor, TensorFlags, TensorMeta};
use crate::text::Text;

/// Decodes the subtree at a node of validated tables.
///
/// `heap` is the heap of these tables. Strings and bytes of the result are slices of it.
pub(crate) fn decode_node(views: &TableViews<'_>, heap: Bytes, node: usize) -> Node {
    TableReader::new(views, heap).node(node)
}

/// Decodes the value at a node, with bytes in place of references to storages.
///
/// Otherwise as [`decode_node`]. `storage` returns the raw bytes of a storage by its number.
///
/// # Errors
///
/// The errors of `storage`; `ContentNotText` if the storage of a `str` is not text; `BlobElsewhere` for a distributed
/// leaf.
pub(crate) fn decode_value(
    views: &TableViews<'_>,
    heap: Bytes,
    node: usize,
    storage: &mut impl FnMut(u32) -> Result<Bytes>,
) -> Result<Value> {
    TableReader::new(views, heap).value(node, storage)
}

/// Reader of validated tables into owned values.
struct TableReader<'a> {
    views: &'a TableViews<'a>,
    /// Cache by slice number: many tensors share a slice.
    shard_places: BTreeMap<u32, ShardSpec>,
    /// Cache by start of the mesh and of its names in dims: many slices share a mesh.
    meshes: BTreeMap<(u32, u32), Arc<DeviceMesh>>,
    heap: Bytes,
}

impl<'a> TableReader<'a> {
    fn new(views: &'a TableViews<'a>, heap: Bytes) -> Self {
        Self { views, shard_places: BTreeMap::new(), meshes: BTreeMap::new(), heap }
    }

    /// Reads the subtree at a node. The recursion has at most 64 levels: the validator checks the depth.
    fn node(&mut self, number: usize) -> Node {
        let record = &self.views.nodes[number];
        if let Some(storage) = content_storage(record) {
            let kind = match record.kind {
                kind::STR => ContentKind::Str,
                kind::BYTES => ContentKind::Bytes,
                _ => ContentKind::Opaque(self.text(record.b.to_native())),
            };
            return Node::StoredLeaf(kind, storage);
        }
        match record.kind {
            kind::TENSOR => Node::Tensors(
                self.tensor_run(record).iter().map(|tensor| self.reference(tensor)).collect(),
            ),
            kind::DISTRIBUTED => Node::Distributed(self.distributed(record)),
            kind if kind::is_container(kind) => {
                let container = self.container(record);
                let children = self.views.children(number).enumerate();
                let child = |(index, child)| (self.step(kind, child, index), self.node(child));
                Node::Container(container, children.map(child).collect())
            }
            _ => Node::Leaf(self.leaf(record)),
        }
    }

    fn value(
        &mut self,
        number: usize,
        storage: &mut impl FnMut(u32) -> Result<Bytes>,
    ) -> Result<Value> {
        let record = &self.views.nodes[number];
        if let Some(number) = content_storage(record) {
            let bytes = storage(number)?;
            return Ok(match record.kind {
                kind::STR => Value::Str(Text::from_storage(bytes)?),
                kind::BYTES => Value::Bytes(bytes),
                _ => Value::Opaque { media: self.text(record.b.to_native()), bytes },
            });
        }
        Ok(match record.kind {
            kind::TENSOR => match self.tensor_run(record) {
                [record] if record.slice == NONE => Value::Tensor(self.tensor(record, storage)?),
                run => Value::Shards(
                    run.iter()
                        .map(|record| {
                            let tensor = self.tensor(record, storage)?;
                            let place =
                                self.shard_place(record.slice.to_native(), tensor.meta().shape());
                            Shard::new(tensor, place)
                        })
                        .collect::<Result<_>>()?,
                ),
            },
            // The shards of a distributed leaf are in other files.
            kind::DISTRIBUTED => return Err(Error::new(ErrorKind::BlobElsewhere)),
            kind if kind::is_container(kind) => {
                let children = self.views.children(number);
                let mut entries = Vec::new();
                let mut values = Vec::new();
                if kind::is_keyed(kind) {
                    entries.reserve_exact(children.len());
                    for child in children {
                        entries.push((self.key(child), self.value(child, storage)?));
                    }
                } else {
                    values.reserve_exact(children.len());
                    for child in children {
                        values.push(self.value(child, storage)?);
                    }
                }
                self.container(record).value(Dict::from_unique_entries(entries), values)
            }
            _ => self.leaf(record),
        })
    }

    /// Reads the value of a leaf that is neither a tensor nor in a storage.
    fn leaf(&self, record: &record::Node) -> Value {
        let views = self.views;
        let (a, b) = (record.a.to_native(), record.b.to_native());
        match record.kind {
            kind::NONE => Value::None,
            kind::BOOL => Value::Bool(a == 1),
            kind::INT => Value::Int(a.cast_signed().into()),
            kind::BIGINT => Value::Int(
                Int::from_bigint_bytes(views.validated_heap(a)).expect("proven to be shortest"),
            ),
            kind::FLOAT => Value::Float(Float::from_bits(a)),
            kind::COMPLEX => Value::Complex(Float::from_bits(a), Float::from_bits(b)),
            kind::STR if b == 0 => Value::Str(self.text(a)),
            kind::STR => Value::Tagged(class_tag(record), Value::Str(self.text(a)).into()),
            kind::BYTES => Value::Bytes(self.bytes(a)),
            kind::DTYPE => {
                let number = u16::try_from(a).expect("proven to be a dtype");
                Value::Dtype(self.dtype(number).to_dtype())
            }
            kind::SIZE => {
                let start = u32::try_from(a).expect("proven to be in dims");
                let sizes = views.validated_dims(start, index_to_usize(record.count.to_native()));
                Value::Size(sizes.iter().map(|size| size.cast_signed()).collect())
            }
            kind::DEVICE => Value::Device(self.text(a)),
            _ => Value::Opaque { media: self.text(b), bytes: self.bytes(a) },
        }
    }

    fn container(&self, record: &record::Node) -> Container {
        match record.kind {
            kind::DICT | kind::LIST | kind::TUPLE if record.b != 0 => {
                Container::Tagged(class_tag(record))
            }
            kind::DICT => Container::Dict,
            kind::ORDERED_DICT => Container::OrderedDict,
            kind::LIST => Container::List,
            kind::TUPLE => Container::Tuple,
            kind::NAMEDTUPLE => Container::NamedTuple(self.text(record.b.to_native())),
            _ => Container::Divergent,
        }
    }

    /// Returns the tensor records of a tensor leaf.
    fn tensor_run(&self, record: &record::Node) -> &'a [record::Tensor] {
        let first = usize::try_from(record.a.to_native()).expect("proven to be in tensors");
        &self.views.tensors[first..first + index_to_usize(record.count.to_native())]
    }

    fn distributed(&mut self, node: &record::Node) -> DistributedTensor {
        let tensor = &self.tensor_run(node)[0];
        let meta = self.meta(tensor);
        let shard_spec = self.shard_place(tensor.slice.to_native(), meta.shape());
        let (group, chunks) = parse_distribution(node.b.to_native()).expect("proven to be one");
        DistributedTensor { meta, shard_spec, group, chunks }
    }

    fn reference(&mut self, tensor: &record::Tensor) -> TensorReference {
        let meta = self.meta(tensor);
        let shard_spec = (tensor.slice != NONE)
            .then(|| self.shard_place(tensor.slice.to_native(), meta.shape()));
        let byte_offset = tensor.byte_offset.to_native();
        TensorReference { meta, storage: tensor_storage(tensor), byte_offset, shard_spec }
    }

    /// Reads a tensor, which shares the bytes of its storage.
    fn tensor(
        &self,
        tensor: &record::Tensor,
        storage: &mut impl FnMut(u32) -> Result<Bytes>,
    ) -> Result<Tensor> {
        let bytes = tensor_storage(tensor).map(storage).transpose()?.unwrap_or_default();
        Tensor::new(self.meta(tensor), bytes.into(), tensor.byte_offset.to_native())
    }

    #[inline]
    fn meta(&self, tensor: &record::Tensor) -> TensorMeta {
        let views = self.views;
        let rank = usize::from(tensor.rank);
        let shape = views.validated_dims(tensor.shape.to_native(), rank);
        let dtype = self.dtype(tensor.dtype.to_native());
        let flags = TensorFlags::from_bits(tensor.flags).expect("proven to be known");
        let meta =
            TensorMeta::with_compact_dtype(dtype, shape, flags).expect("proven to be in limits");
        if tensor.strides == NONE {
            return meta;
        }
        let strides = views.validated_dims(tensor.strides.to_native(), rank);
        meta.with_strides(strides).expect("proven to be in limits")
    }

    #[inline]
    fn dtype(&self, number: u16) -> CompactDtype {
        self.views.dtype(number).expect("proven to be listed or described")
    }

    fn shard_place(&mut self, number: u32, local_shape: &[u64]) -> ShardSpec {
        let cached = self.shard_places.get(&number);
        if let Some(place) = cached.filter(|place| place.slice().local_shape() == local_shape) {
            return place.clone();
        }
        let place = self.read_shard_place(&self.views.slices[index_to_usize(number)], local_shape);
        self.shard_places.insert(number, place.clone());
        place
    }

    fn read_shard_place(&mut self, record: &record::Slice, local_shape: &[u64]) -> ShardSpec {
        let views = self.views;
        let (rank, mesh_rank) = (usize::from(record.rank), usize::from(record.mesh_rank));
        let dims_range = |start: rend::u32_le, len| {
            (start != NONE).then(|| views.validated_dims(start.to_native(), len))
        };
        let offsets = views.validated_dims(record.offsets.to_native(), rank);
        let global_shape = views.validated_dims(record.global_shape.to_native(), rank);
        let mut slice =
            TensorSlice::new(offsets, local_shape, global_shape).expect("proven to be inside");
        let Some(mesh_shape) = dims_range(record.mesh, mesh_rank) else {
            return ShardSpec::new(slice);
        };
        slice = slice
            .with_mesh(mesh_shape, dims_range(record.coordinates, mesh_rank))
            .expect("proven to be inside the mesh");
        let mut place = ShardSpec::new(slice);
        if record.ranks != NONE {
            let mesh = self.mesh(record, mesh_shape);
            place = place.with_mesh(mesh).expect("the same shape");
        }
        if record.placements != NONE {
            let first = index_to_usize(record.placements.to_native());
            let placements = views.placements[first..first + mesh_rank].iter().map(placement);
            place = place.with_placements(placements.collect::<Vec<_>>()).expect("proven to fit");
        }
        place
    }

    /// Returns the mesh of a slice with its ranks; all slices on a mesh share one object.
    fn mesh(&mut self, record: &record::Slice, shape: &[u64]) -> Arc<DeviceMesh> {
        let views = self.views;
        let key = (record.mesh.to_native(), record.names.to_native());
        if let Some(mesh) = self.meshes.get(&key) {
            return mesh.clone();
        }
        let unnamed = self.meshes.entry((key.0, NONE)).or_insert_with(|| {
            let size = usize::try_from(shape.iter().product::<u64>());
            let ranks = views.validated_dims(record.ranks.to_native(), size.expect("below 2^32"));
            let rank = |rank: &u64| u32::try_from(*rank).expect("proven to be below 2^32");
            let ranks: Vec<u32> = ranks.iter().map(rank).collect();
            DeviceMesh::new(shape, &ranks).expect("proven to have one rank per place").into()
        });
        let unnamed = unnamed.clone();
        if record.names == NONE {
            return unnamed;
        }
        let names = views.validated_dims(record.names.to_native(), shape.len());
        let names = names.iter().map(|name| self.text(*name).to_string()).collect();
        let named = DeviceMesh::clone(&unnamed).with_dim_names(names);
        let named: Arc<DeviceMesh> = named.expect("one name per dimension").into();
        self.meshes.insert(key, named.clone());
        named
    }

    /// Returns a string of the heap without copying it.
    fn text(&self, range: u64) -> Text {
        Text::from_validated(self.bytes(range))
    }

    fn bytes(&self, range: u64) -> Bytes {
        let (offset, len) = split_heap_range(range);
        if len == 0 {
            Bytes::new()
        } else {
            self.heap.slice(index_to_usize(offset)..index_to_usize(offset + len))
        }
    }

    /// Returns the step from a container of this kind to its child number `index`.
    fn step(&self, container: u8, child: usize, index: usize) -> Step {
        if kind::is_keyed(container) {
            return Step::Key(self.key(child));
        }
        Step::Index(u32::try_from(index).expect("fewer than 2^32 records"))
    }

    /// Reads the key of a node. Keys of the common kinds are slices of the heap; the others are copied.
    #[inline]
    fn key(&self, node: usize) -> MapKey {
        let node = &self.views.nodes[node];
        let range = node.key.to_native();
        match node.key_kind {
            key::kind::STR => MapKey::Str(self.text(range)),
            key::kind::BYTES => MapKey::Bytes(self.bytes(range)),
            _ => {
                let key = self.views.file_key(node).and_then(|key| key.decode());
                key.expect("the validator has proven the key")
            }
        }
    }
}

/// Returns the storage of a tensor; `None` if the tensor has no elements.
fn tensor_storage(tensor: &record::Tensor) -> Option<u32> {
    (tensor.storage != NONE).then(|| tensor.storage.to_native())
}

/// Returns the storage that holds the content of a leaf, if the content is not in the index.
fn content_storage(record: &record::Node) -> Option<u32> {
    let number = || u32::try_from(record.a.to_native()).expect("proven to be in storages");
    (record.flags == STORED_FLAG).then(number)
}

/// Returns the class tag of a node that has one.
fn class_tag(record: &record::Node) -> ClassTag {
    ClassTag::from_word(record.b.to_native(), record.kind).expect("proven to be in the table")
}

fn placement(record: &record::Placement) -> Placement {
    let dim = record.dim.to_native();
    match record.kind {
        0 => Placement::Replicate,
        1 => Placement::Shard { dim },
        _ => Placement::StridedShard { dim, split_factor: record.split_factor.to_native() },
    }
}
