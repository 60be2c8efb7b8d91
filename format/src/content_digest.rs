//! The content digest: names the content of an archive, not its encoding. Spec: section 8.

use std::collections::BTreeMap;

use rend::u32_le;

use crate::class_tag::class_word;
use crate::convert::{index_to_usize, to_u64};
use crate::digest::{self, Digest};
use crate::error::Result;
use crate::key;
use crate::record::{self, NONE, STORED_FLAG, kind};
use crate::table_views::TableViews;

const LAYOUT_CONTEXT: &str = "tssd 2026-11-28 layout digest v1";
const STORAGES_CONTEXT: &str = "tssd 2026-11-28 storages digest v1";
const CONTENT_CONTEXT: &str = "tssd 2026-11-28 content digest v1";

/// Prefix of the attributes that describe a version in a store, not a state dict. Spec: `reshard.md`, R-054.
pub const STORE_ATTR_PREFIX: &str = "tssd.store.";

/// Attributes with these prefixes describe a file, or a version in a store. They are no content.
const EXCLUDED_ATTRS: [&str; 2] = ["tssd.file.", STORE_ATTR_PREFIX];

/// Precedes the class tag of a node. No node has this kind.
const CLASS_MARK: u8 = 255;

/// Computes the content digest of an archive.
///
/// `storage` returns the digest of the raw bytes of a storage by its number. It is called once for each storage, in the
/// order in which the tree names them.
///
/// # Errors
///
/// The errors of `storage`.
pub(crate) fn content_digest(
    views: &TableViews<'_>,
    mut storage: impl FnMut(u32) -> Result<Digest>,
) -> Result<Digest> {
    let mut layout = LayoutHasher::new(views);
    layout.add_nodes();
    layout.add_attrs();
    let mut storages = blake3::Hasher::new_derive_key(STORAGES_CONTEXT);
    for number in &layout.storages {
        storages.update(&storage(*number)?);
    }
    let mut content = blake3::Hasher::new_derive_key(CONTENT_CONTEXT);
    content.update(layout.hasher.finalize().as_bytes());
    content.update(storages.finalize().as_bytes());
    Ok(*content.finalize().as_bytes())
}

/// Returns the numbers of the storages in the order in which the tree names them: `s_0, s_1, …`.
pub(crate) fn content_order(views: &TableViews<'_>) -> Vec<u32> {
    let mut layout = LayoutHasher::new(views);
    layout.add_nodes();
    layout.storages
}

/// Hasher of the layout: the tree, the metadata of its tensors, and their places in storages.
///
/// All numbers are hashed as little-endian integers.
struct LayoutHasher<'a> {
    views: &'a TableViews<'a>,
    hasher: blake3::Hasher,
    /// The storages in the order in which the layout names them.
    storages: Vec<u32>,
    /// The position of each storage in `storages`; `NONE` if it is not named yet.
    positions: Vec<u32>,
    /// The digest of each list of ranks by its start in dims, because many slices share a mesh.
    ranks: BTreeMap<u32, Digest>,
}

impl<'a> LayoutHasher<'a> {
    fn new(views: &'a TableViews<'a>) -> Self {
        Self {
            views,
            hasher: blake3::Hasher::new_derive_key(LAYOUT_CONTEXT),
            storages: Vec::with_capacity(views.storages.len()),
            positions: vec![NONE; views.storages.len()],
            ranks: BTreeMap::new(),
        }
    }

    fn add_u8(&mut self, value: u8) {
        self.hasher.update(&[value]);
    }

    fn add_u32(&mut self, value: u32) {
        self.hasher.update(&value.to_le_bytes());
    }

    fn add_u64(&mut self, value: u64) {
        self.hasher.update(&value.to_le_bytes());
    }

    /// Adds bytes after their length.
    fn add_str(&mut self, bytes: &[u8]) {
        self.add_u64(to_u64(bytes.len()));
        self.hasher.update(bytes);
    }

    fn add_heap(&mut self, range: u64) {
        self.add_str(self.views.validated_heap(range));
    }

    /// Adds words after their count.
    fn add_vec(&mut self, start: u32_le, len: usize) {
        self.add_u32(u32::try_from(len).expect("at most 64 words"));
        for word in self.views.validated_dims(start.to_native(), len) {
            self.add_u64(*word);
        }
    }

    /// Adds whether an optional field is present, and the field through `add` if it is.
    fn add_optional(&mut self, start: u32_le, add: impl FnOnce(&mut Self, u32_le)) {
        let is_present = start != NONE;
        self.add_u8(is_present.into());
        if is_present {
            add(self, start);
        }
    }

    fn add_nodes(&mut self) {
        for node in self.views.nodes {
            let class = class_word(node);
            if class != 0 {
                self.add_u8(CLASS_MARK);
                self.add_u64(class);
            }
            self.add_u8(node.kind);
            self.add_key(node);
            self.add_body(node);
        }
    }

    fn add_key(&mut self, node: &record::Node) {
        let key = node.key.to_native();
        self.add_u8(node.key_kind);
        match node.key_kind {
            key::kind::INT | key::kind::FLOAT => self.add_u64(key),
            key::kind::BOOL => self.add_u8(u8::from(key != 0)),
            kind if key::kind::is_heap(kind) => self.add_heap(key),
            _ => {}
        }
    }

    fn add_body(&mut self, node: &record::Node) {
        let (a, b, count) = (node.a.to_native(), node.b.to_native(), node.count.to_native());
        match node.kind {
            kind::BOOL => self.add_u8(u8::from(a != 0)),
            kind::INT | kind::FLOAT => self.add_u64(a),
            kind::COMPLEX => {
                self.add_u64(a);
                self.add_u64(b);
            }
            kind::BIGINT | kind::DEVICE => self.add_heap(a),
            kind::STR | kind::BYTES => self.add_content(node),
            kind::OPAQUE => {
                self.add_heap(b);
                self.add_content(node);
            }
            kind::DTYPE => self.add_dtype(u16::try_from(a).expect("proven to be a dtype")),
            kind::SIZE => {
                let start = u32::try_from(a).expect("proven to be in dims");
                self.add_vec(start.into(), index_to_usize(count));
            }
            kind::TENSOR => {
                self.add_u32(count);
                let first = usize::try_from(a).expect("proven to be in tensors");
                for tensor in &self.views.tensors[first..first + index_to_usize(count)] {
                    self.add_tensor(tensor);
                }
            }
            kind::NAMEDTUPLE => {
                self.add_heap(b);
                self.add_u32(count);
            }
            kind if kind::is_container(kind) => self.add_u32(count),
            _ => {}
        }
    }

    /// Adds the content of a leaf, or a reference to the storage that holds it.
    fn add_content(&mut self, node: &record::Node) {
        let a = node.a.to_native();
        let is_stored = node.flags == STORED_FLAG;
        self.add_u8(is_stored.into());
        if is_stored {
            self.add_storage(u32::try_from(a).expect("proven to be in storages"));
        } else {
            self.add_heap(a);
        }
    }

    fn add_dtype(&mut self, number: u16) {
        let dtype = self.views.dtype(number).expect("proven to be listed or described").to_dtype();
        self.add_str(dtype.name().as_bytes());
        let size = u16::try_from(dtype.itemsize()).expect("at most 256 bytes");
        self.hasher.update(&size.to_le_bytes());
        self.hasher.update(&dtype.bits().to_le_bytes());
        self.add_u8(dtype.values());
        self.add_u8(dtype.class().number());
    }

    fn add_tensor(&mut self, tensor: &record::Tensor) {
        let rank = usize::from(tensor.rank);
        self.add_dtype(tensor.dtype.to_native());
        self.add_u8(tensor.flags);
        self.add_vec(tensor.shape, rank);
        self.add_optional(tensor.strides, |it, start| it.add_vec(start, rank));
        self.add_optional(tensor.storage, |it, storage| {
            it.add_storage(storage.to_native());
            it.add_u64(tensor.byte_offset.to_native());
        });
        self.add_optional(tensor.slice, |it, slice| {
            it.add_slice(&it.views.slices[index_to_usize(slice.to_native())]);
        });
    }

    /// Adds a reference to a storage: its position in the layout, and at its first use its length in bytes.
    fn add_storage(&mut self, number: u32) {
        let position = self.positions[index_to_usize(number)];
        if position != NONE {
            self.add_u32(position);
            return;
        }
        let next = u32::try_from(self.storages.len()).expect("fewer than 2^32 records");
        self.positions[index_to_usize(number)] = next;
        self.storages.push(number);
        self.add_u32(next);
        self.add_u64(self.views.storages[index_to_usize(number)].raw_len.to_native());
    }

    fn add_slice(&mut self, slice: &'a record::Slice) {
        let (rank, mesh_rank) = (usize::from(slice.rank), usize::from(slice.mesh_rank));
        self.add_vec(slice.offsets, rank);
        self.add_vec(slice.global_shape, rank);
        self.add_optional(slice.mesh, |it, mesh| {
            it.add_vec(mesh, mesh_rank);
            it.add_optional(slice.coordinates, |it, start| it.add_vec(start, mesh_rank));
            it.add_optional(slice.ranks, |it, _| it.add_ranks(slice));
            it.add_optional(slice.placements, |it, first| {
                let first = index_to_usize(first.to_native());
                for placement in &it.views.placements[first..first + mesh_rank] {
                    it.add_u8(placement.kind);
                    it.add_u32(placement.dim.to_native());
                    it.add_u64(placement.split_factor.to_native());
                }
            });
            it.add_optional(slice.names, |it, names| {
                for name in it.views.validated_dims(names.to_native(), mesh_rank) {
                    it.add_heap(*name);
                }
            });
        });
    }

    /// Adds the digest of the ranks of a mesh.
    fn add_ranks(&mut self, slice: &record::Slice) {
        let views = self.views;
        let digest = *self.ranks.entry(slice.ranks.to_native()).or_insert_with(|| {
            let mesh_rank = usize::from(slice.mesh_rank);
            let shape = views.validated_dims(slice.mesh.to_native(), mesh_rank);
            let count = usize::try_from(shape.iter().product::<u64>()).expect("below 2^32");
            let ranks = views.validated_dims(slice.ranks.to_native(), count);
            // This crate compiles for little-endian hosts only.
            digest::hash(bytemuck::cast_slice(ranks))
        });
        self.hasher.update(&digest);
    }

    fn add_attrs(&mut self) {
        let views = self.views;
        let name = |attr: &record::Attr| views.validated_heap(attr.name.to_native());
        let is_content = |attr: &&record::Attr| {
            !EXCLUDED_ATTRS.iter().any(|prefix| name(attr).starts_with(prefix.as_bytes()))
        };
        let count = views.attrs.iter().filter(is_content).count();
        self.add_u32(u32::try_from(count).expect("fewer than 2^32 records"));
        for attr in views.attrs.iter().filter(is_content) {
            let value = attr.value.to_native();
            self.add_str(name(attr));
            self.add_u8(attr.kind);
            if attr.kind == kind::INT {
                self.add_u64(value);
            } else {
                self.add_heap(value);
            }
        }
    }
}
