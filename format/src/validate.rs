//! The one validator: proves that the tables of an index mean something. Spec: sections 4 to 7.
//!
//! The work is linear in the size of the index, whatever it holds: ranges that could be long are the
//! same or disjoint, so each byte of them is looked at once, and all others have at most 64 entries
//! or 4096 bytes.

use rend::u64_le;

use crate::dtype::Dtype;
use crate::error::{Error, ErrorKind, Result};
use crate::frame::{DATA_START, INDEX_ALIGN};
use crate::index::path_of;
use crate::key::{self, FileKey, python_twins};
use crate::number::is_shortest_big;
use crate::record::{self, INLINE_MAX, NONE, STORED, kind, split_heap_range};
use crate::shape::{MAX_RANK, SIZE_LIMIT, check_shape, span_bytes};
use crate::state_dict::MAX_DEPTH;
use crate::structure::CHUNK_BYTES;
use crate::table::Views;
use crate::tensor::TensorFlags;
use crate::text::is_text;

/// Proves the tables of a file whose index begins at `index_off`.
///
/// # Errors
///
/// One kind for each rule from F-030 to F-082.
pub(crate) fn validate(views: &Views<'_>, index_off: u64) -> Result<()> {
    let mut validator = Validator {
        views,
        heap: HeapClaims::new(views.heap.len()),
        meshes: std::collections::BTreeMap::new(),
        dims: Claims::new(views.dims.len()),
        divergent: Vec::new(),
        uses: vec![Use::None; views.storages.len()],
    };
    validator.nodes()?;
    validator.tensors()?;
    validator.slices()?;
    validator.storages(index_off)?;
    validator.attrs()?;
    validator.shards()?;
    if !validator.heap.claims.is_complete() {
        return Err(Error::new(ErrorKind::HeapUnclaimed).at("heap"));
    }
    if !validator.dims.is_complete() {
        return Err(Error::new(ErrorKind::HeapUnclaimed).at("dims"));
    }
    Ok(())
}

struct Validator<'a> {
    views: &'a Views<'a>,
    heap: HeapClaims,
    dims: Claims,
    /// Meshes with ranks: the start of each, and its length.
    meshes: std::collections::BTreeMap<u64, u64>,
    /// Nodes inside divergent nodes, as ranges of children in table order.
    divergent: Vec<std::ops::Range<usize>>,
    uses: Vec<Use>,
}

/// What names a storage.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Use {
    None,
    Tensor,
    Content,
}

/// How much of a table is claimed (section 3).
struct Claims {
    claimed: u64,
    len: u64,
}

impl Claims {
    fn new(len: usize) -> Self {
        Self { claimed: 0, len: u64::try_from(len).unwrap_or(u64::MAX) }
    }

    /// *Claimed in order*: the range extends the claimed part, or lies in it; an empty one is at 0.
    fn in_order(&mut self, start: u64, len: u64) -> bool {
        if len == 0 {
            return start == 0;
        }
        let end = start.saturating_add(len);
        if start == self.claimed && end <= self.len {
            self.claimed = end;
        }
        end <= self.claimed
    }

    /// *Claimed once*: the range starts where the one before it ended.
    fn once(&mut self, start: u64, len: u64) -> bool {
        let extends = start == self.claimed && len <= self.len.saturating_sub(start);
        if extends {
            self.claimed += len;
        }
        extends
    }

    fn is_complete(&self) -> bool {
        self.claimed == self.len
    }
}

/// The claimed part of the heap, and the ranges that it is made of.
struct HeapClaims {
    claims: Claims,
    /// In order of their starts, which is the order of their claims.
    ranges: Vec<HeapClaim>,
}

struct HeapClaim {
    start: u64,
    len: u64,
    is_text: bool,
}

impl HeapClaims {
    fn new(len: usize) -> Self {
        Self { claims: Claims::new(len), ranges: Vec::new() }
    }

    /// The claim of this range, if it is new or the same as an earlier one.
    fn claim(&mut self, start: u64, len: u64) -> Option<&mut HeapClaim> {
        if len > 0 && start == self.claims.claimed && self.claims.in_order(start, len) {
            self.ranges.push(HeapClaim { start, len, is_text: false });
            return self.ranges.last_mut();
        }
        let found = self.ranges.binary_search_by_key(&start, |claim| claim.start).ok()?;
        self.ranges.get_mut(found).filter(|claim| claim.len == len)
    }
}

impl<'a> Validator<'a> {
    fn nodes(&mut self) -> Result<()> {
        let Views { nodes, by_key, tensors, .. } = self.views;
        let Some(root) = nodes.first() else {
            return Err(Error::new(ErrorKind::RootKind).note("there is no root"));
        };
        let is_dict = matches!(root.kind, kind::DICT | kind::ORDERED_DICT);
        if !is_dict || root.key_kind != key::kind::INDEX || root.key != 0 {
            return Err(Error::new(ErrorKind::RootKind));
        }
        if by_key.len() != nodes.len() || by_key[0] != 0 {
            return Err(Error::new(ErrorKind::ChildRange).at("by_key"));
        }
        let mut children = Claims { claimed: 1, ..Claims::new(nodes.len()) };
        let mut runs = Claims::new(tensors.len());
        let (mut level, mut level_end) = (1, 1);
        for (number, node) in nodes.iter().enumerate() {
            if wide(number) == level_end {
                level += 1;
                level_end = children.claimed;
            }
            let proven = if wide(number) >= level_end {
                Err(Error::new(ErrorKind::ChildRange).note("node of no container"))
            } else if kind::is_container(node.kind) && level > MAX_DEPTH {
                Err(Error::new(ErrorKind::TooDeep))
            } else {
                self.node(number, node, &mut children, &mut runs)
            };
            proven.map_err(|error| error.at(path_of(self.views, number)))?;
        }
        if !children.is_complete() {
            return Err(Error::new(ErrorKind::ChildRange).note("nodes of no container"));
        }
        if !runs.is_complete() {
            return Err(Error::new(ErrorKind::TensorRun).note("tensors of no leaf"));
        }
        Ok(())
    }

    fn node(
        &mut self,
        number: usize,
        node: &record::Node,
        children: &mut Claims,
        runs: &mut Claims,
    ) -> Result<()> {
        self.key(node)?;
        if kind::is_container(node.kind) {
            self.container(number, node, children)
        } else {
            self.leaf(node, runs)
        }
    }

    /// The key of a node by itself; whether it fits its container is for the container to say.
    fn key(&mut self, node: &record::Node) -> Result<()> {
        if node.key_kind == key::kind::INDEX {
            return if node.key == 0 { Ok(()) } else { Err(Error::new(ErrorKind::KeyKind)) };
        }
        let file_key = self.views.file_key(node)?;
        if let key::Content::Heap(bytes) = &file_key.content {
            if bytes.len() > key::MAX_KEY_BYTES {
                return Err(Error::new(ErrorKind::KeyKind)
                    .note(format_args!("key of {} bytes", bytes.len())));
            }
            self.claim_heap(node.key.to_native())?;
        }
        file_key.check()
    }

    fn container(
        &mut self,
        number: usize,
        node: &record::Node,
        children: &mut Claims,
    ) -> Result<()> {
        // Ranges of children are in order, so the one that could hold the node is found at once.
        let before = self.divergent.partition_point(|range| range.start <= number);
        let inside_divergent =
            before.checked_sub(1).is_some_and(|last| self.divergent[last].contains(&number));
        let (first, count) = (node.a.to_native(), u64::from(node.count.to_native()));
        if !children.once(first, count) {
            return Err(Error::new(ErrorKind::ChildRange)
                .note(format_args!("{count} children from node {first}")));
        }
        if node.flags != 0 {
            return Err(Error::new(ErrorKind::LeafValue).note("flags of a container"));
        }
        if node.kind == kind::NAMEDTUPLE {
            self.claim_text(node.b.to_native())?;
        } else if node.b != 0 {
            return Err(Error::new(ErrorKind::LeafValue).note("b of a container"));
        }
        let range = narrow(first)..narrow(first + count);
        let records = &self.views.nodes[range.clone()];
        if let Some(odd) = records.iter().find(|child| !key_fits(node.kind, child)) {
            return Err(Error::new(ErrorKind::KeyKind)
                .note(format_args!("key kind {} in node kind {}", odd.key_kind, node.kind)));
        }
        if node.kind == kind::DIVERGENT && (inside_divergent || self.views.shards.is_empty()) {
            return Err(Error::new(ErrorKind::ShardTable)
                .note("a divergent node stands in a manifest, and in no other one"));
        }
        if node.kind == kind::DIVERGENT || inside_divergent {
            self.divergent.push(range.clone());
        }
        let order = &self.views.by_key[range.clone()];
        if kind::is_keyed(node.kind) {
            self.keys(order, &range)
        } else if range.map(wide).eq(order.iter().map(|child| u64::from(child.to_native()))) {
            Ok(())
        } else {
            Err(Error::new(ErrorKind::ChildRange).note("by_key of a list is not in order"))
        }
    }

    /// Strictly increasing keys: no key twice, no child twice.
    fn keys(&self, order: &[rend::u32_le], children: &std::ops::Range<usize>) -> Result<()> {
        let child_key = |child: &rend::u32_le| {
            let child = narrow(u64::from(child.to_native()));
            if !children.contains(&child) {
                return Err(Error::new(ErrorKind::DuplicateKey).note("by_key names no child"));
            }
            self.views.file_key(&self.views.nodes[child])
        };
        let mut last: Option<FileKey<'_>> = None;
        for child in order {
            let next = child_key(child)?;
            if last.as_ref().is_some_and(|last| *last >= next) {
                let child = narrow(u64::from(child.to_native()));
                return Err(Error::new(ErrorKind::DuplicateKey).at(path_of(self.views, child)));
            }
            last = Some(next);
        }
        for child in order {
            let FileKey { kind, content: key::Content::Word(word) } = child_key(child)? else {
                continue;
            };
            for twin in python_twins(kind, word) {
                let found = order.binary_search_by(|other| {
                    child_key(other).map_or(std::cmp::Ordering::Less, |key| key.cmp(&twin))
                });
                if found.is_ok() {
                    let child = narrow(u64::from(child.to_native()));
                    return Err(Error::new(ErrorKind::KeysCollide).at(path_of(self.views, child)));
                }
            }
        }
        Ok(())
    }

    fn leaf(&mut self, node: &record::Node, runs: &mut Claims) -> Result<()> {
        let wrong = |what: &str| Err(Error::new(ErrorKind::LeafValue).note(what));
        let (a, b, count) = (node.a.to_native(), node.b.to_native(), node.count.to_native());
        let is_content = matches!(node.kind, kind::STR | kind::BYTES | kind::OPAQUE);
        if node.flags != 0 && !(is_content && node.flags == STORED) {
            return wrong("flags");
        }
        if node.kind > kind::OPAQUE {
            return Err(Error::new(ErrorKind::UnknownKind).note(node.kind));
        }
        if count != 0 && !matches!(node.kind, kind::SIZE | kind::TENSOR) {
            return wrong("count");
        }
        if b != 0 && !matches!(node.kind, kind::COMPLEX | kind::OPAQUE) {
            return wrong("b");
        }
        match node.kind {
            kind::NONE if a != 0 => return wrong("a"),
            kind::BOOL if a > 1 => return wrong("bool"),
            kind::DTYPE if dtype(a).is_none() => return wrong("dtype"),
            kind::BIGINT if !is_shortest_big(self.claim_heap(a)?) => {
                return Err(Error::new(ErrorKind::NonCanonicalInt));
            }
            kind::STR | kind::BYTES | kind::OPAQUE => {
                self.content(node)?;
                if node.kind == kind::OPAQUE {
                    self.claim_text(b)?;
                }
            }
            kind::SIZE => drop(self.claim_dims(a, u64::from(count))?),
            kind::DEVICE => self.claim_text(a)?,
            kind::TENSOR if count == 0 || !runs.once(a, u64::from(count)) => {
                return Err(
                    Error::new(ErrorKind::TensorRun).note(format_args!("{count} tensors from {a}"))
                );
            }
            kind::TENSOR => self.run(a, count)?,
            _ => {}
        }
        Ok(())
    }

    /// Content of a str, bytes or opaque leaf: in the heap or a storage of its own.
    fn content(&mut self, node: &record::Node) -> Result<()> {
        let a = node.a.to_native();
        let misplaced = || Error::new(ErrorKind::TextPlace);
        if node.flags == STORED {
            let storage = usize::try_from(a).ok().and_then(|a| self.views.storages.get(a));
            let storage = storage.ok_or_else(misplaced)?;
            let uses = &mut self.uses[narrow(a)];
            if storage.raw_len <= INLINE_MAX || *uses != Use::None {
                return Err(misplaced());
            }
            *uses = Use::Content;
            return Ok(());
        }
        if u64::from(split_heap_range(a).1) > INLINE_MAX {
            return Err(misplaced());
        }
        if node.kind == kind::STR { self.claim_text(a) } else { self.claim_heap(a).map(drop) }
    }

    /// The records of one tensor leaf, against each other.
    fn run(&self, first: u64, count: u32) -> Result<()> {
        let run = &self.views.tensors[narrow(first)..narrow(first + u64::from(count))];
        if count > 1 && run.iter().any(|tensor| tensor.slice == NONE) {
            return Err(Error::new(ErrorKind::TensorRun).note("a whole tensor among slices"));
        }
        let [one, others @ ..] = run else { return Ok(()) };
        for other in others {
            let equal = one.dtype == other.dtype && self.global(one)? == self.global(other)?;
            if !equal {
                return Err(Error::new(ErrorKind::MixedRun));
            }
        }
        Ok(())
    }

    fn global(&self, tensor: &record::Tensor) -> Result<&[u64_le]> {
        let slice = self.slice_of(tensor)?;
        self.views.dims_at(slice.global_shape.to_native(), u64::from(slice.rank))
    }

    fn slice_of(&self, tensor: &record::Tensor) -> Result<&'a record::Slice> {
        usize::try_from(tensor.slice.to_native())
            .ok()
            .and_then(|slice| self.views.slices.get(slice))
            .ok_or_else(|| {
                Error::new(ErrorKind::MeshMismatch).note("slices are not claimed in order")
            })
    }

    fn tensors(&mut self) -> Result<()> {
        let views = self.views;
        let mut slices = Claims::new(views.slices.len());
        let leaves = views.nodes.iter().enumerate().filter(|(_, node)| node.kind == kind::TENSOR);
        for (number, node) in leaves {
            let first = narrow(node.a.to_native());
            let count = narrow(u64::from(node.count.to_native()));
            for tensor in &views.tensors[first..first + count] {
                self.tensor(tensor, &mut slices)
                    .map_err(|error| error.at(path_of(views, number)))?;
            }
        }
        if !slices.is_complete() {
            return Err(Error::new(ErrorKind::MeshMismatch).note("slices of no tensor"));
        }
        Ok(())
    }

    fn tensor(&mut self, tensor: &record::Tensor, slices: &mut Claims) -> Result<()> {
        let Some(dtype) = Dtype::from_code(tensor.dtype.to_native()) else {
            return Err(Error::new(ErrorKind::UnknownDtype).note(tensor.dtype));
        };
        if usize::from(tensor.rank) > MAX_RANK {
            return Err(Error::new(ErrorKind::RankTooLarge).note(tensor.rank));
        }
        if TensorFlags::from_bits(tensor.flags).is_none() || tensor.reserved != 0 {
            return Err(Error::new(ErrorKind::TensorFlags));
        }
        let rank = u64::from(tensor.rank);
        let shape = natives(self.claim_dims(u64::from(tensor.shape.to_native()), rank)?);
        let strides = match tensor.strides.to_native() {
            NONE => None,
            start => Some(natives(self.claim_dims(u64::from(start), rank)?)),
        };
        check_shape(dtype.itemsize(), &shape)?;
        if strides.iter().flatten().any(|stride| *stride >= SIZE_LIMIT) {
            return Err(Error::new(ErrorKind::ShapeOverflow));
        }
        let span = span_bytes(dtype.itemsize(), &shape, strides.as_deref())?;
        let byte_offset = tensor.byte_offset.to_native();
        let end = byte_offset.checked_add(span).filter(|end| *end < SIZE_LIMIT);
        let end = end.ok_or_else(|| Error::new(ErrorKind::ShapeOverflow))?;
        self.bytes_of(tensor, span, end)?;
        if !byte_offset.is_multiple_of(dtype.itemsize()) {
            return Err(Error::new(ErrorKind::Misaligned).note(byte_offset));
        }
        if tensor.slice == NONE {
            return Ok(());
        }
        let slice = self.slice_of(tensor)?;
        if !slices.in_order(u64::from(tensor.slice.to_native()), 1) {
            return Err(Error::new(ErrorKind::MeshMismatch).note("slices are out of order"));
        }
        self.shard(slice, dtype, &shape)
    }

    /// Whether the tensor's span lies in its storage.
    fn bytes_of(&mut self, tensor: &record::Tensor, span: u64, end: u64) -> Result<()> {
        let outside = |note: &str| Err(Error::new(ErrorKind::TensorRange).note(note));
        let number = tensor.storage.to_native();
        if span == 0 {
            return if number == NONE && tensor.byte_offset == 0 {
                Ok(())
            } else {
                outside("a tensor without elements has a storage")
            };
        }
        let number = usize::try_from(number).unwrap_or(usize::MAX);
        let Some(storage) = self.views.storages.get(number) else {
            return outside("there is no such storage");
        };
        if end > storage.raw_len.to_native() {
            return Err(Error::new(ErrorKind::TensorRange).note(format_args!(
                "bytes {}..{end} of a storage of {}",
                tensor.byte_offset, storage.raw_len
            )));
        }
        if self.uses[number] == Use::Content {
            return Err(Error::new(ErrorKind::TextPlace).note("a tensor lies in a leaf's content"));
        }
        self.uses[number] = Use::Tensor;
        Ok(())
    }

    fn shard(&self, slice: &record::Slice, dtype: Dtype, shape: &[u64]) -> Result<()> {
        let outside = |note: String| Error::new(ErrorKind::OutsideGlobal).note(note);
        let rank = u64::from(slice.rank);
        if usize::from(slice.rank) != shape.len() {
            return Err(outside(format!("slice of rank {rank}, tensor of rank {}", shape.len())));
        }
        let offsets = natives(self.views.dims_at(slice.offsets.to_native(), rank)?);
        let global = natives(self.views.dims_at(slice.global_shape.to_native(), rank)?);
        check_shape(dtype.itemsize(), &global).map_err(|error| outside(error.to_string()))?;
        for ((offset, size), global) in offsets.iter().zip(shape).zip(&global) {
            if offset.checked_add(*size).is_none_or(|end| end > *global) {
                return Err(outside(format!("{shape:?} at {offsets:?} of {global}")));
            }
        }
        Ok(())
    }

    fn slices(&mut self) -> Result<()> {
        let views = self.views;
        let mut placements = Claims::new(views.placements.len());
        for slice in views.slices {
            self.slice(slice, &mut placements)?;
        }
        if !placements.is_complete() {
            return Err(Error::new(ErrorKind::UnknownPlacement).note("placements of no slice"));
        }
        Ok(())
    }

    fn slice(&mut self, slice: &record::Slice, placements: &mut Claims) -> Result<()> {
        let wrong = |note: &str| Error::new(ErrorKind::MeshMismatch).note(note);
        let (rank, mesh_rank) = (u64::from(slice.rank), u64::from(slice.mesh_rank));
        let start = |field: rend::u32_le| u64::from(field.to_native());
        self.claim_dims(start(slice.offsets), rank)?;
        self.claim_dims(start(slice.global_shape), rank)?;
        let fields = [slice.mesh, slice.coordinates, slice.ranks, slice.placements, slice.names];
        if slice.flags != 0 {
            return Err(wrong("flags"));
        }
        if mesh_rank == 0 {
            let none = fields.iter().all(|field| *field == NONE);
            return if none { Ok(()) } else { Err(wrong("a part of no mesh")) };
        }
        if usize::from(slice.mesh_rank) > MAX_RANK || slice.mesh == NONE {
            return Err(wrong("mesh"));
        }
        let mesh = natives(self.views.dims_at(slice.mesh.to_native(), mesh_rank)?);
        let size = mesh.iter().try_fold(1_u64, |size, dim| size.checked_mul(*dim));
        let size = size.filter(|size| (1..1 << 32).contains(size)).ok_or_else(|| wrong("size"))?;
        if slice.ranks == NONE {
            self.claim_dims(start(slice.mesh), mesh_rank)?;
        } else {
            self.mesh_with_ranks(slice, size)?;
        }
        if slice.coordinates != NONE {
            let coordinates = natives(self.claim_dims(start(slice.coordinates), mesh_rank)?);
            if coordinates.iter().zip(&mesh).any(|(coordinate, size)| coordinate >= size) {
                return Err(wrong("coordinates outside the mesh"));
            }
        }
        if slice.placements != NONE {
            self.placements(slice, placements)?;
        }
        if slice.names != NONE {
            if slice.ranks == NONE {
                return Err(wrong("names without ranks"));
            }
            let mut seen = std::collections::BTreeSet::new();
            for name in self.claim_dims(start(slice.names), mesh_rank)? {
                self.claim_heap(name.to_native())?;
                let name = std::str::from_utf8(self.views.heap_at(name.to_native())?);
                if !seen.insert(name.map_err(|_| wrong("name is not UTF-8"))?) {
                    return Err(wrong("two dimensions have one name"));
                }
            }
        }
        Ok(())
    }

    /// A mesh whose ranks follow its shape. Each is looked at once, however many slices name it.
    fn mesh_with_ranks(&mut self, slice: &record::Slice, size: u64) -> Result<()> {
        let wrong = |note: &str| Error::new(ErrorKind::MeshMismatch).note(note);
        let start = u64::from(slice.mesh.to_native());
        let (first, len) = (start + u64::from(slice.mesh_rank), u64::from(slice.mesh_rank) + size);
        if u64::from(slice.ranks.to_native()) != first {
            return Err(wrong("ranks do not follow the mesh"));
        }
        if self.meshes.get(&start) == Some(&len) {
            return Ok(());
        }
        let (_, ranks) = self.claim_dims(start, len)?.split_at(usize::from(slice.mesh_rank));
        let before = self.meshes.range(..=start).next_back();
        let after = self.meshes.range(start..).next();
        if before.is_some_and(|(other, len)| other + len > start)
            || after.is_some_and(|(other, _)| start + len > *other)
        {
            return Err(wrong("meshes overlap"));
        }
        self.meshes.insert(start, len);
        let mut sorted = natives(ranks);
        sorted.sort_unstable();
        if sorted.last().is_some_and(|last| *last >= 1 << 32) {
            return Err(wrong("rank"));
        }
        if sorted.windows(2).any(|pair| pair[0] == pair[1]) {
            return Err(wrong("a rank is there twice"));
        }
        Ok(())
    }

    fn placements(&self, slice: &record::Slice, claims: &mut Claims) -> Result<()> {
        let wrong = |note: &str| Error::new(ErrorKind::UnknownPlacement).note(note);
        let first = u64::from(slice.placements.to_native());
        if !claims.in_order(first, u64::from(slice.mesh_rank)) {
            return Err(wrong("placements are out of order"));
        }
        let first = narrow(first);
        for placement in &self.views.placements[first..first + usize::from(slice.mesh_rank)] {
            let (dim, factor) = (placement.dim.to_native(), placement.split_factor.to_native());
            let fits = match placement.kind {
                0 => dim == 0 && factor == 0,
                1 => dim < u32::from(slice.rank) && factor == 0,
                2 => dim < u32::from(slice.rank) && factor > 0,
                _ => false,
            };
            if !fits || placement.reserved != [0; 3] {
                return Err(wrong("kind, dim or split_factor"));
            }
        }
        Ok(())
    }

    fn storages(&self, index_off: u64) -> Result<()> {
        let Views { storages, crcs, chunks, digests, shards, .. } = self.views;
        let is_manifest = !shards.is_empty();
        let mut checksums = Claims::new(crcs.len());
        let mut end = DATA_START;
        let mut last_shard = 0;
        for (number, storage) in storages.iter().enumerate() {
            let check = || -> Result<u64> {
                let wrong = |kind| Err(Error::new(kind).byte(storage.offset.to_native()));
                let align = match storage.align_log2 {
                    log2 @ 6..=21 => 1_u64 << log2,
                    _ => return wrong(ErrorKind::Alignment),
                };
                let plain = storage.codec == 0
                    && storage.chunk_log2 == 20
                    && storage.shuffle == 0
                    && storage.reserved == 0
                    && storage.chunks == NONE
                    && storage.stored_len == storage.raw_len;
                if !plain {
                    return wrong(ErrorKind::UnknownCodec);
                }
                let (offset, len) = (storage.offset.to_native(), storage.stored_len.to_native());
                let from = if storage.shard == last_shard { end } else { DATA_START };
                let next = offset.checked_add(len).filter(|_| len > 0);
                let tiles = if is_manifest {
                    offset >= from
                        && offset.is_multiple_of(align)
                        && storage.shard >= last_shard
                        && self.shard_end(storage).is_some_and(|end| next <= Some(end))
                } else {
                    from.checked_next_multiple_of(align) == Some(offset) && storage.shard == 0
                };
                next.filter(|_| tiles).map_or_else(|| wrong(ErrorKind::StorageLayout), Ok)
            };
            end = check().map_err(|error| error.at(format_args!("storage {number}")))?;
            last_shard = storage.shard.to_native();
            let count = storage.stored_len.to_native().div_ceil(CHUNK_BYTES);
            if !checksums.once(u64::from(storage.crcs.to_native()), count) {
                return Err(Error::new(ErrorKind::CrcTable).at(format_args!("storage {number}")));
            }
        }
        let blob_end = if is_manifest { DATA_START } else { end };
        if blob_end.checked_next_multiple_of(INDEX_ALIGN) != Some(index_off) {
            return Err(Error::new(ErrorKind::StorageLayout).byte(index_off).note("index"));
        }
        if !checksums.is_complete() || !chunks.is_empty() {
            return Err(Error::new(ErrorKind::CrcTable));
        }
        if !digests.is_empty() && digests.len() != storages.len() {
            return Err(Error::new(ErrorKind::DigestTable));
        }
        match self.uses.iter().position(|uses| *uses == Use::None) {
            Some(unused) => Err(Error::new(ErrorKind::UnusedStorage)
                .at(format_args!("storage {unused}"))
                .byte(storages[unused].offset.to_native())),
            None => Ok(()),
        }
    }

    /// Where the blob of the shard that holds this storage ends at the latest.
    fn shard_end(&self, storage: &record::Storage) -> Option<u64> {
        let shard = usize::try_from(storage.shard.to_native()).ok()?;
        self.views.shards.get(shard).map(|shard| shard.index_off.to_native())
    }

    fn attrs(&mut self) -> Result<()> {
        let mut last: Option<&[u8]> = None;
        for attr in self.views.attrs {
            let wrong = || Error::new(ErrorKind::AttrTable);
            let name = self.views.heap_at(attr.name.to_native())?;
            self.claim_heap(attr.name.to_native())?;
            let is_utf8 = std::str::from_utf8(name).is_ok();
            if !is_utf8 || last.is_some_and(|last| last >= name) || attr.reserved != [0; 7] {
                return Err(wrong().at(name.escape_ascii()));
            }
            last = Some(name);
            match attr.kind {
                kind::INT => {}
                kind::STR => self.claim_text(attr.value.to_native())?,
                kind::BYTES => drop(self.claim_heap(attr.value.to_native())?),
                _ => return Err(wrong().at(name.escape_ascii())),
            }
        }
        Ok(())
    }

    fn shards(&mut self) -> Result<()> {
        let mut names = std::collections::BTreeSet::new();
        for shard in self.views.shards {
            let name = self.views.heap_at(shard.name.to_native())?;
            self.claim_heap(shard.name.to_native())?;
            let index_off = shard.index_off.to_native();
            let end = index_off.checked_add(SMALLEST_TAIL);
            let fits = index_off >= DATA_START
                && index_off.is_multiple_of(INDEX_ALIGN)
                && end.is_some_and(|end| end <= shard.file_len.to_native());
            let fits = fits && is_base_name(name);
            if !fits || !names.insert(name.to_ascii_lowercase()) {
                return Err(Error::new(ErrorKind::ShardTable).at(name.escape_ascii()));
            }
        }
        Ok(())
    }

    fn claim_heap(&mut self, range: u64) -> Result<&'a [u8]> {
        let bytes = self.views.heap_at(range)?;
        self.claim_range(range).map(|_| bytes)
    }

    fn claim_text(&mut self, range: u64) -> Result<()> {
        let bytes = self.views.heap_at(range)?;
        if let Some(claim) = self.claim_range(range)?
            && !claim.is_text
        {
            if !is_text(bytes) {
                return Err(Error::new(ErrorKind::NotText));
            }
            claim.is_text = true;
        }
        Ok(())
    }

    /// The claim of a range that is not empty.
    fn claim_range(&mut self, range: u64) -> Result<Option<&mut HeapClaim>> {
        let (offset, len) = split_heap_range(range);
        if len == 0 && offset == 0 {
            return Ok(None);
        }
        let claim = self.heap.claim(u64::from(offset), u64::from(len));
        claim.map(Some).ok_or_else(|| {
            Error::new(ErrorKind::HeapRange).note(format_args!("{len} bytes at {offset}"))
        })
    }

    fn claim_dims(&mut self, start: u64, len: u64) -> Result<&'a [u64_le]> {
        let outside =
            || Error::new(ErrorKind::DimsRange).note(format_args!("{len} entries at {start}"));
        if !self.dims.in_order(start, len) {
            return Err(outside());
        }
        let start = u32::try_from(start).map_err(|_| outside())?;
        self.views.dims_at(start, len)
    }
}

/// Whether a child's key kind is one that its container allows.
fn key_fits(container: u8, child: &record::Node) -> bool {
    match container {
        kind::DICT | kind::ORDERED_DICT => {
            (key::kind::STR..=key::kind::TUPLE).contains(&child.key_kind)
        }
        kind::NAMEDTUPLE => child.key_kind == key::kind::STR,
        kind::DIVERGENT => {
            child.key_kind == key::kind::INT && u32::try_from(child.key.to_native()).is_ok()
        }
        _ => child.key_kind == key::kind::INDEX,
    }
}

/// A root and a trailer, in bytes.
const SMALLEST_TAIL: u64 = 168;

/// The names that a manifest may open beside itself.
pub(crate) fn is_base_name(name: &[u8]) -> bool {
    let is_word = |byte: &u8| byte.is_ascii_alphanumeric() || *byte == b'_';
    (1..=255).contains(&name.len())
        && name.first().is_some_and(is_word)
        && name.iter().all(|byte| is_word(byte) || matches!(byte, b'.' | b'-'))
        && !name.eq_ignore_ascii_case(b"manifest.tssd")
}

fn dtype(code: u64) -> Option<Dtype> {
    u16::try_from(code).ok().and_then(Dtype::from_code)
}

fn natives(words: &[u64_le]) -> Vec<u64> {
    words.iter().map(|word| word.to_native()).collect()
}

/// Indexes that were compared with the length of a table in memory.
fn narrow(index: u64) -> usize {
    usize::try_from(index).expect("the index lies in a table in memory")
}

fn wide(index: usize) -> u64 {
    u64::try_from(index).expect("usize is at most 64 bits")
}
