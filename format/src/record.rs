//! Records of the index tables, byte for byte as `spec/format.md` defines them.
//!
//! Records consist of little-endian integers without padding. The writer, the rkyv reader and readers that cast bytes
//! therefore use the same types.

use bytemuck::{Pod, Zeroable};
use rend::{u16_le, u32_le, u64_le};

/// Codec of delta storages (spec: section 6).
pub(crate) const DELTA_STORAGE: u8 = 2;

/// Marks an absent reference.
pub(crate) const NONE: u32 = u32::MAX;

/// Name, offset and size in bytes of each field, for the test that compares them with the spec.
pub(crate) type Fields = &'static [(&'static str, usize, usize)];

macro_rules! record {
    ($(#[$meta:meta])* $name:ident $size:literal { $($field:ident: $ty:ty,)* }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
        #[cfg_attr(feature = "rkyv", derive(rkyv::Portable, rkyv::bytecheck::CheckBytes))]
        #[cfg_attr(feature = "rkyv", bytecheck(crate = rkyv::bytecheck))]
        #[repr(C)]
        pub(crate) struct $name { $(pub(crate) $field: $ty,)* }

        impl $name {
            pub(crate) const FIELDS: Fields = &[
                $((stringify!($field), std::mem::offset_of!($name, $field), size_of::<$ty>()),)*
            ];
        }

        const _: () = assert!(size_of::<$name>() == $size);
    };
}

record! {
    /// A node of the tree. Spec: section 5.
    Node 32 {
        kind: u8,
        key_kind: u8,
        flags: u16_le,
        count: u32_le,
        key: u64_le,
        a: u64_le,
        b: u64_le,
    }
}

record! {
    /// A tensor, or one slice of a tensor. Spec: section 6.
    Tensor 32 {
        storage: u32_le,
        dtype: u16_le,
        rank: u8,
        flags: u8,
        shape: u32_le,
        strides: u32_le,
        slice: u32_le,
        reserved: u32_le,
        byte_offset: u64_le,
    }
}

record! {
    /// A range of bytes that contains tensors. Spec: section 6.
    Storage 48 {
        offset: u64_le,
        stored_len: u64_le,
        raw_len: u64_le,
        shard: u32_le,
        chunks: u32_le,
        crcs: u32_le,
        crc32: u32_le,
        codec: u8,
        align_log2: u8,
        chunk_log2: u8,
        width: u8,
        subtrees: u32_le,
    }
}

record! {
    /// A chunk of a compressed storage. Spec: section 6.
    Chunk 16 {
        offset: u64_le,
        stored_len: u32_le,
        codec: u32_le,
    }
}

record! {
    /// The position of a tensor in a global tensor. Spec: section 7.
    Slice 32 {
        offsets: u32_le,
        global_shape: u32_le,
        mesh: u32_le,
        coordinates: u32_le,
        ranks: u32_le,
        placements: u32_le,
        names: u32_le,
        rank: u8,
        mesh_rank: u8,
        flags: u16_le,
    }
}

record! {
    /// How one mesh dimension divides a tensor. Spec: section 7.
    Placement 16 {
        kind: u8,
        reserved: [u8; 3],
        dim: u32_le,
        split_factor: u64_le,
    }
}

record! {
    /// An attribute of the archive. Spec: section 7.
    Attr 24 {
        name: u64_le,
        value: u64_le,
        kind: u8,
        reserved: [u8; 7],
    }
}

record! {
    /// Another archive that contains storages of this one. Spec: section 7.
    Shard 88 {
        name: u64_le,
        file_len: u64_le,
        index_off: u64_le,
        index_crc32: u32_le,
        writer: u32_le,
        digest: [u8; 32],
        crcs_off: u32_le,
        crcs_len: u32_le,
        pages_crc32: u32_le,
        others: u32_le,
        other_count: u32_le,
        reserved: u32_le,
    }
}

record! {
    /// A storage of a shard that no distributed leaf names. Spec: section 7, "Distributed leaves".
    Other 16 {
        stored_len: u64_le,
        position: u32_le,
        crcs: u32_le,
    }
}

record! {
    /// A dtype that the format does not list. Spec: section 6.
    Dtype 16 {
        name: u64_le,
        number: u16_le,
        size: u16_le,
        bits: u16_le,
        values: u8,
        class: u8,
    }
}

/// Node kinds. Spec: section 5.
pub(crate) mod kind {
    pub(crate) const NONE: u8 = 0;
    pub(crate) const BOOL: u8 = 1;
    pub(crate) const INT: u8 = 2;
    pub(crate) const BIGINT: u8 = 3;
    pub(crate) const FLOAT: u8 = 4;
    pub(crate) const COMPLEX: u8 = 5;
    pub(crate) const STR: u8 = 6;
    pub(crate) const BYTES: u8 = 7;
    pub(crate) const DTYPE: u8 = 8;
    pub(crate) const SIZE: u8 = 9;
    pub(crate) const DEVICE: u8 = 10;
    pub(crate) const TENSOR: u8 = 11;
    pub(crate) const OPAQUE: u8 = 12;
    pub(crate) const DISTRIBUTED: u8 = 13;
    pub(crate) const DICT: u8 = 32;
    pub(crate) const ORDERED_DICT: u8 = 33;
    pub(crate) const LIST: u8 = 34;
    pub(crate) const TUPLE: u8 = 35;
    pub(crate) const NAMEDTUPLE: u8 = 36;
    pub(crate) const DIVERGENT: u8 = 37;

    /// Returns whether nodes of this kind have children.
    pub(crate) const fn is_container(kind: u8) -> bool {
        matches!(kind, DICT..=DIVERGENT)
    }

    /// Returns whether the children of a container of this kind have keys.
    pub(crate) const fn is_keyed(kind: u8) -> bool {
        matches!(kind, DICT | ORDERED_DICT | NAMEDTUPLE | DIVERGENT)
    }
}

/// Node flag: the content of a `str`, `bytes` or opaque leaf is in a storage.
pub(crate) const STORED_FLAG: u16 = 1;

/// Maximum length in bytes of the content of a leaf in the index. Longer content is in a storage.
pub const INLINE_MAX_BYTES: u64 = 4096;

/// Maximum length in bytes of a device, a media tag, a type name and the name of a mesh dimension (F-034).
pub(crate) const MAX_NAME_BYTES: usize = 256;

/// Maximum length in bytes of the name of an attribute (F-034).
pub(crate) const MAX_ATTR_NAME_BYTES: usize = 4096;

/// Returns whether content of `len` bytes is in the index.
pub(crate) fn is_inline(len: usize) -> bool {
    u64::try_from(len).is_ok_and(|len| len <= INLINE_MAX_BYTES)
}

/// Encodes a range of the heap: offset in the low 32 bits, length in the high 32 bits, both in bytes.
pub(crate) fn heap_range(offset: u32, len: u32) -> u64 {
    u64::from(len) << 32 | u64::from(offset)
}

/// Decodes a heap range into offset and length, both in bytes.
pub(crate) fn split_heap_range(range: u64) -> (u32, u32) {
    let [o0, o1, o2, o3, l0, l1, l2, l3] = range.to_le_bytes();
    (u32::from_le_bytes([o0, o1, o2, o3]), u32::from_le_bytes([l0, l1, l2, l3]))
}
