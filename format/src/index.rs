//! The index of an archive: proven tables, and what they say.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use rend::u64_le;

use crate::dtype::Dtype;
use crate::encode::{AttrValue, Attrs, ShardFile};
use crate::error::{Error, ErrorKind, Result};
use crate::frame::IndexPlace;
use crate::key::{self, FileKey, Key, ObjectPath, Step};
use crate::mesh::DeviceMesh;
use crate::number::{Float, Int};
use crate::placement::Placement;
use crate::record::{self, NONE, STORED, kind, split_heap_range};
use crate::slice::TensorSlice;
use crate::state_dict::Value;
use crate::structure::{CHUNK_BYTES, Container, Node, StorageReference, Stored, TensorReference};
use crate::table::{self, IndexBytes, TableMap, Views};
use crate::tensor::{ShardPlace, TensorFlags, TensorMeta};
use crate::text::Text;
use crate::validate::validate;

/// The tables of one archive, owned and proven: every rule of the spec up to F-082 holds.
#[derive(Debug)]
pub(crate) struct Index {
    bytes: IndexBytes,
    map: TableMap,
    place: IndexPlace,
}

impl Index {
    /// Proves an index, given where the trailer says that it is.
    pub(crate) fn parse(bytes: IndexBytes, place: IndexPlace) -> Result<Self> {
        if crc32fast::hash(&bytes) != place.index_crc32 {
            return Err(Error::new(ErrorKind::IndexCorrupt).byte(place.index_off));
        }
        let size = |len: u32| usize::try_from(len).unwrap_or(usize::MAX);
        let root = size(place.root_off)..size(place.root_off).saturating_add(size(place.root_len));
        let map = table::map(&bytes, root)?;
        validate(&map.views(&bytes), place.index_off)?;
        Ok(Self { bytes, map, place })
    }

    pub(crate) fn views(&self) -> Views<'_> {
        self.map.views(&self.bytes)
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    pub(crate) fn place(&self) -> IndexPlace {
        self.place
    }

    /// The whole tree.
    pub(crate) fn structure(&self) -> Node {
        let views = self.views();
        Reader::new(&views).node(0)
    }

    /// Everything below one node.
    pub(crate) fn node(&self, number: usize) -> Node {
        let views = self.views();
        Reader::new(&views).node(number)
    }

    pub(crate) fn storage_count(&self) -> u32 {
        u32::try_from(self.views().storages.len()).expect("tables have fewer than 2^32 records")
    }

    /// A storage by number.
    pub(crate) fn storage(&self, number: u32) -> StorageReference {
        let views = self.views();
        let storage = &views.storages[native(number)];
        let first = native(storage.crcs.to_native());
        let len = storage.stored_len.to_native();
        let count = usize::try_from(len.div_ceil(CHUNK_BYTES)).expect("proven to be in crcs");
        StorageReference {
            offset: storage.offset.to_native(),
            len,
            crc32: storage.crc32.to_native(),
            crcs: views.crcs[first..first + count].iter().map(|crc| crc.to_native()).collect(),
            align_log2: storage.align_log2,
            shard: storage.shard.to_native(),
        }
    }

    /// The storages that are strs.
    pub(crate) fn stored_texts(&self) -> Vec<u32> {
        let nodes = self.views().nodes.iter();
        let texts = nodes.filter(|node| node.kind == kind::STR && node.flags == STORED);
        texts
            .map(|node| u32::try_from(node.a.to_native()).expect("proven to be in storages"))
            .collect()
    }

    pub(crate) fn attrs(&self) -> Attrs {
        let views = self.views();
        let attr = |attr: &record::Attr| {
            let value = attr.value.to_native();
            let value = match attr.kind {
                kind::INT => AttrValue::Int(value.cast_signed()),
                kind::STR => AttrValue::Text(views.text(value)),
                _ => AttrValue::Bytes(views.heap_proven(value).into()),
            };
            (views.text(attr.name.to_native()).to_string(), value)
        };
        views.attrs.iter().map(attr).collect()
    }

    pub(crate) fn shards(&self) -> Vec<ShardFile> {
        let views = self.views();
        let shard = |shard: &record::Shard| ShardFile {
            name: views.text(shard.name.to_native()).to_string(),
            file_len: shard.file_len.to_native(),
            index_off: shard.index_off.to_native(),
            index_crc32: shard.index_crc32.to_native(),
            writer: shard.writer.to_native(),
        };
        views.shards.iter().map(shard).collect()
    }

    /// The number of the node at an exact path, by one binary search per level.
    pub(crate) fn find(&self, path: &ObjectPath) -> Result<usize> {
        let views = self.views();
        let mut node = 0;
        for step in path.steps() {
            node =
                views.child(node, step)?.ok_or_else(|| Error::new(ErrorKind::NotFound).at(path))?;
        }
        Ok(node)
    }

    /// The number of the leaf with an fqn.
    pub(crate) fn find_fqn(&self, fqn: &str) -> Result<usize> {
        let views = self.views();
        let mut search = FqnSearch { views: &views, fqn, seen: BTreeSet::new(), found: vec![] };
        search.descend(0, 0)?;
        match search.found.as_slice() {
            [] => Err(Error::new(ErrorKind::NotFound).at(fqn)),
            [leaf] => Ok(*leaf),
            [one, other, ..] => Err(Error::new(ErrorKind::AmbiguousFqn)
                .at(fqn)
                .note(format_args!("{} and {}", path_of(&views, *one), path_of(&views, *other)))),
        }
    }
}

/// All ways to split an fqn into keys. Each pair of node and position is tried once, so the work is
/// bounded by nodes times dots, whatever the file holds.
struct FqnSearch<'a> {
    views: &'a Views<'a>,
    fqn: &'a str,
    seen: BTreeSet<(usize, usize)>,
    found: Vec<usize>,
}

impl FqnSearch<'_> {
    fn descend(&mut self, node: usize, from: usize) -> Result<()> {
        if !kind::is_container(self.views.nodes[node].kind) || !self.seen.insert((node, from)) {
            return Ok(());
        }
        let rest = &self.fqn[from..];
        let ends = rest.match_indices('.').map(|(dot, _)| dot).chain([rest.len()]);
        for end in ends {
            for step in spellings(&rest[..end]) {
                let Some(child) = self.views.child(node, &step)? else { continue };
                if end < rest.len() {
                    self.descend(child, from + end + 1)?;
                } else if !kind::is_container(self.views.nodes[child].kind) {
                    self.found.push(child);
                }
                if self.found.len() > 1 {
                    return Ok(());
                }
            }
        }
        Ok(())
    }
}

/// The steps that a part of an fqn may stand for.
fn spellings(part: &str) -> Vec<Step> {
    let mut steps = vec![Step::Key(Key::from(part))];
    if let Ok(int) = part.parse::<Int>()
        && int.to_string() == part
    {
        if let Some(index) = int.as_i64().and_then(|int| u32::try_from(int).ok()) {
            steps.push(Step::Index(index));
        }
        steps.push(Step::Key(Key::Int(int)));
    }
    match part {
        "True" => steps.push(Step::Key(Key::Bool(true))),
        "False" => steps.push(Step::Key(Key::Bool(false))),
        "None" => steps.push(Step::Key(Key::None)),
        _ => {}
    }
    steps
}

/// Looks at tables that are in bounds, or says what is not.
impl<'a> Views<'a> {
    pub(crate) fn heap_at(&self, range: u64) -> Result<&'a [u8]> {
        let (offset, len) = split_heap_range(range);
        let (offset, len) = (native(offset), native(len));
        offset.checked_add(len).and_then(|end| self.heap.get(offset..end)).ok_or_else(|| {
            Error::new(ErrorKind::HeapRange).note(format_args!("{len} bytes at {offset}"))
        })
    }

    pub(crate) fn dims_at(&self, start: u32, len: u64) -> Result<&'a [u64_le]> {
        let start = native(start);
        usize::try_from(len)
            .ok()
            .and_then(|len| self.dims.get(start..start.checked_add(len)?))
            .ok_or_else(|| {
                Error::new(ErrorKind::DimsRange).note(format_args!("{len} entries at {start}"))
            })
    }

    /// The key of a node that has one.
    pub(crate) fn file_key(&self, node: &record::Node) -> Result<FileKey<'a>> {
        let key = node.key.to_native();
        Ok(match node.key_kind {
            key::kind::STR | key::kind::BIGINT | key::kind::BYTES | key::kind::TUPLE => {
                FileKey::heap(node.key_kind, self.heap_at(key)?)
            }
            _ => FileKey::word(node.key_kind, key),
        })
    }

    /// The child of a container, if it has it.
    fn child(&self, container: usize, step: &Step) -> Result<Option<usize>> {
        let node = &self.nodes[container];
        let children = self.children(container);
        match step {
            Step::Index(index) if !kind::is_keyed(node.kind) => {
                Ok(children.clone().nth(native(*index)))
            }
            Step::Key(key) if kind::is_keyed(node.kind) => {
                let wanted = FileKey::of(key)?;
                let order = &self.by_key[children];
                let found = order.binary_search_by(|child| {
                    let child = &self.nodes[native(child.to_native())];
                    self.file_key(child).map_or(std::cmp::Ordering::Less, |key| key.cmp(&wanted))
                });
                Ok(found.ok().map(|place| native(order[place].to_native())))
            }
            _ => Ok(None),
        }
    }

    fn children(&self, container: usize) -> Range<usize> {
        let node = &self.nodes[container];
        if !kind::is_container(node.kind) {
            return 0..0;
        }
        let first = usize::try_from(node.a.to_native()).unwrap_or(usize::MAX);
        first..first.saturating_add(native(node.count.to_native()))
    }

    fn heap_proven(&self, range: u64) -> &'a [u8] {
        self.heap_at(range).expect("the validator has proven the range")
    }

    fn text(&self, range: u64) -> Text {
        Text::from_generalized_utf8(self.heap_proven(range).to_vec())
            .expect("the validator has proven the text")
    }

    fn dims_proven(&self, start: u32, len: usize) -> Vec<u64> {
        let len = u64::try_from(len).expect("usize is at most 64 bits");
        let words = self.dims_at(start, len).expect("the validator has proven the range");
        words.iter().map(|word| word.to_native()).collect()
    }
}

/// The path of a node, for errors; works on tables that are not proven yet, as far as they make
/// sense.
pub(crate) fn path_of(views: &Views<'_>, mut node: usize) -> ObjectPath {
    let mut steps = Vec::new();
    while node > 0 {
        let parent = (0..node).find(|parent| views.children(*parent).contains(&node));
        let Some(parent) = parent else { break };
        let place = node - views.children(parent).start;
        let step = if kind::is_keyed(views.nodes[parent].kind) {
            match views.file_key(&views.nodes[node]).and_then(|key| key.to_key()) {
                Ok(key) => Step::Key(key),
                Err(_) => Step::Index(u32::try_from(place).unwrap_or(NONE)),
            }
        } else {
            Step::Index(u32::try_from(place).unwrap_or(NONE))
        };
        steps.push(step);
        node = parent;
    }
    steps.into_iter().rev().collect()
}

/// Reads proven tables into owned values.
struct Reader<'a> {
    views: &'a Views<'a>,
    /// Slices are shared by many tensors; so are their meshes.
    places: BTreeMap<u32, ShardPlace>,
    meshes: BTreeMap<u32, Arc<DeviceMesh>>,
    /// All strings and bytes are slices of one copy of the heap.
    heap: Bytes,
}

impl<'a> Reader<'a> {
    fn new(views: &'a Views<'a>) -> Self {
        Self {
            views,
            places: BTreeMap::new(),
            meshes: BTreeMap::new(),
            heap: Bytes::copy_from_slice(views.heap),
        }
    }

    /// At most 64 levels deep, as the validator has proven.
    fn node(&mut self, number: usize) -> Node {
        let views = self.views;
        let record = &views.nodes[number];
        let (a, b) = (record.a.to_native(), record.b.to_native());
        if record.flags == STORED {
            let stored = match record.kind {
                kind::STR => Stored::Str,
                kind::BYTES => Stored::Bytes,
                _ => Stored::Opaque(self.text(b)),
            };
            return Node::Stored(stored, u32::try_from(a).expect("proven to be in storages"));
        }
        Node::Leaf(match record.kind {
            kind::NONE => Value::None,
            kind::BOOL => Value::Bool(a == 1),
            kind::INT => Value::Int(a.cast_signed().into()),
            kind::BIGINT => Value::Int(
                Int::from_big_bytes(views.heap_proven(a)).expect("proven to be shortest"),
            ),
            kind::FLOAT => Value::Float(Float::from_bits(a)),
            kind::COMPLEX => Value::Complex(Float::from_bits(a), Float::from_bits(b)),
            kind::STR => Value::Str(self.text(a)),
            kind::BYTES => Value::Bytes(self.bytes(a)),
            kind::DTYPE => Value::Dtype(dtype(a)),
            kind::SIZE => {
                let start = u32::try_from(a).expect("proven to be in dims");
                let sizes = views.dims_proven(start, native(record.count.to_native()));
                Value::Size(sizes.into_iter().map(u64::cast_signed).collect())
            }
            kind::DEVICE => Value::Device(self.text(a)),
            kind::OPAQUE => Value::Opaque { media: self.text(b), bytes: self.bytes(a) },
            kind::TENSOR => {
                let first = usize::try_from(a).expect("proven to be in tensors");
                let run = &views.tensors[first..first + native(record.count.to_native())];
                return Node::Tensors(run.iter().map(|tensor| self.tensor(tensor)).collect());
            }
            container => return self.container(container, number),
        })
    }

    fn container(&mut self, kind: u8, number: usize) -> Node {
        let views = self.views;
        let container = match kind {
            kind::DICT => Container::Dict,
            kind::ORDERED_DICT => Container::OrderedDict,
            kind::LIST => Container::List,
            kind::TUPLE => Container::Tuple,
            kind::NAMEDTUPLE => Container::NamedTuple(self.text(views.nodes[number].b.to_native())),
            _ => Container::Divergent,
        };
        let children = views.children(number).enumerate();
        let child = |(place, child): (usize, usize)| {
            (self.step(kind, &views.nodes[child], place), self.node(child))
        };
        Node::Container(container, children.map(child).collect())
    }

    fn tensor(&mut self, tensor: &record::Tensor) -> TensorReference {
        let views = self.views;
        let rank = usize::from(tensor.rank);
        let shape = views.dims_proven(tensor.shape.to_native(), rank);
        let mut meta = TensorMeta::new(dtype(u64::from(tensor.dtype.to_native())), &shape)
            .expect("proven to be in limits")
            .with_flags(TensorFlags::from_bits(tensor.flags).expect("proven to be known"));
        if tensor.strides != NONE {
            let strides = views.dims_proven(tensor.strides.to_native(), rank);
            meta = meta.with_strides(&strides).expect("proven to be in limits");
        }
        TensorReference {
            meta,
            storage: (tensor.storage != NONE).then(|| tensor.storage.to_native()),
            byte_offset: tensor.byte_offset.to_native(),
            place: (tensor.slice != NONE).then(|| self.place(tensor.slice.to_native(), &shape)),
        }
    }

    fn place(&mut self, number: u32, local_shape: &[u64]) -> ShardPlace {
        let cached = self.places.get(&number);
        if let Some(place) = cached.filter(|place| place.slice().local_shape() == local_shape) {
            return place.clone();
        }
        let place = self.read_place(&self.views.slices[native(number)], local_shape);
        self.places.insert(number, place.clone());
        place
    }

    fn read_place(&mut self, record: &record::Slice, local_shape: &[u64]) -> ShardPlace {
        let views = self.views;
        let (rank, mesh_rank) = (usize::from(record.rank), usize::from(record.mesh_rank));
        let vector = |start: rend::u32_le, len| {
            (start != NONE).then(|| views.dims_proven(start.to_native(), len))
        };
        let offsets = views.dims_proven(record.offsets.to_native(), rank);
        let global_shape = views.dims_proven(record.global_shape.to_native(), rank);
        let mut slice =
            TensorSlice::new(&offsets, local_shape, &global_shape).expect("proven to be inside");
        let Some(mesh_shape) = vector(record.mesh, mesh_rank) else {
            return ShardPlace::new(slice);
        };
        slice = slice
            .on_mesh(&mesh_shape, vector(record.coordinates, mesh_rank).as_deref())
            .expect("proven to be inside the mesh");
        let mut place = ShardPlace::new(slice);
        if record.ranks != NONE {
            let mut mesh = self.mesh(record, &mesh_shape);
            if let Some(names) = vector(record.names, mesh_rank) {
                let names = names.into_iter().map(|name| self.text(name).to_string()).collect();
                let named = DeviceMesh::clone(&mesh).with_dim_names(names);
                mesh = named.expect("one name per dimension").into();
            }
            place = place.on_mesh(mesh).expect("the same shape");
        }
        if record.placements != NONE {
            let first = native(record.placements.to_native());
            let placements = views.placements[first..first + mesh_rank].iter().map(placement);
            place = place.placed(placements.collect::<Vec<_>>()).expect("proven to fit");
        }
        place
    }

    /// A mesh with its ranks; one object for all slices on it.
    fn mesh(&mut self, record: &record::Slice, shape: &[u64]) -> Arc<DeviceMesh> {
        let views = self.views;
        let mesh = self.meshes.entry(record.mesh.to_native()).or_insert_with(|| {
            let size = usize::try_from(shape.iter().product::<u64>());
            let ranks = views.dims_proven(record.ranks.to_native(), size.expect("below 2^32"));
            let rank = |rank| u32::try_from(rank).expect("proven to be below 2^32");
            let ranks: Vec<u32> = ranks.into_iter().map(rank).collect();
            DeviceMesh::new(shape, &ranks).expect("proven to have one rank per place").into()
        });
        mesh.clone()
    }

    /// A string of the heap, without a copy of its own.
    fn text(&self, range: u64) -> Text {
        Text::from_generalized_utf8(self.bytes(range)).expect("the validator has proven the text")
    }

    fn bytes(&self, range: u64) -> Bytes {
        let (offset, len) = split_heap_range(range);
        if len == 0 { Bytes::new() } else { self.heap.slice(native(offset)..native(offset + len)) }
    }

    fn step(&self, container: u8, child: &record::Node, place: usize) -> Step {
        if !kind::is_keyed(container) {
            return Step::Index(u32::try_from(place).expect("fewer than 2^32 records"));
        }
        // The common kinds of keys share the heap; the others are read as they are checked.
        let range = child.key.to_native();
        Step::Key(match child.key_kind {
            key::kind::STR => Key::Str(self.text(range)),
            key::kind::BYTES => Key::Bytes(self.bytes(range)),
            _ => {
                let key = self.views.file_key(child).and_then(|key| key.to_key());
                key.expect("the validator has proven the key")
            }
        })
    }
}

fn placement(record: &record::Placement) -> Placement {
    let dim = record.dim.to_native();
    match record.kind {
        0 => Placement::Replicate,
        1 => Placement::Shard { dim },
        _ => Placement::StridedShard { dim, split_factor: record.split_factor.to_native() },
    }
}

fn dtype(code: u64) -> Dtype {
    u16::try_from(code).ok().and_then(Dtype::from_code).expect("proven to be known")
}

/// Numbers of records, on machines where `usize` has 32 bits at least.
fn native(number: u32) -> usize {
    usize::try_from(number).expect("usize has at least 32 bits")
}
