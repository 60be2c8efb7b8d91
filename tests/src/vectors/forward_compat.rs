//! Files of later or other writers that a reader of this version must read.

use tssd_format::{AttrValue, Options, Shard, ShardSpec, TensorSlice};

use super::{Vector, dict_of, encode, encode_plain, f32_tensor, file_vector, single_value};

pub(super) fn vectors() -> Vec<Vector> {
    let current_file = || encode_plain(&single_value(f32_tensor(&[1.0, 2.0], &[2])));
    let vendor = Options::new().attr("x-example.run", AttrValue::Text("a1b2".into()));
    vec![
        file_vector(
            "090-minor",
            "a later minor version",
            with_head(current_file(), 10, &7_u16.to_le_bytes()),
        ),
        file_vector(
            "091-compat",
            "unknown compat bits",
            with_head(current_file(), 32, &0x8001_u64.to_le_bytes()),
        ),
        file_vector(
            "092-ro-compat",
            "unknown ro_compat bits",
            with_head(current_file(), 24, &3_u64.to_le_bytes()),
        ),
        file_vector(
            "093-longer-root",
            "a root with a table of a later version",
            with_longer_root(&current_file(), 8),
        ),
        file_vector(
            "094-much-longer-root",
            "a later root, with data in front of it",
            with_longer_root(&current_file(), 4096),
        ),
        file_vector(
            "095-vendor-attr",
            "an attribute of a vendor",
            encode(&single_value(1_i64), &vendor),
        ),
        file_vector(
            "096-slice-of-two-shapes",
            "one slice of two tensors, which differ in shape",
            slice_of_two_shapes(),
        ),
    ]
}

/// Encodes a slice that two tensors of different shapes share.
///
/// A slice gives the offsets of a tensor, so tensors of two shapes can share it. This writer makes
/// one slice for each. The shape of the last tensor is then replaced by that of the first.
fn slice_of_two_shapes() -> Vec<u8> {
    let shard = || {
        let slice = TensorSlice::new(&[1], &[2], &[4]).expect("a legal slice");
        Shard::new(f32_tensor(&[1.0, 2.0], &[2]), ShardSpec::new(slice)).expect("two elements")
    };
    let mut file = encode_plain(&dict_of(vec![
        ("shape".into(), f32_tensor(&[0.0], &[1]).into()),
        ("two".into(), shard().into()),
        ("one".into(), shard().into()),
    ]));
    let shape = tensors_offset(&file) + 2 * 32 + 8;
    file[shape..shape + 4].fill(0);
    crate::checksums::repair_checksums(&mut file);
    file
}

/// Returns the offset of the tensor records. The fifth field of the root is relative to itself.
fn tensors_offset(file: &[u8]) -> usize {
    let trailer = file.len() - 64;
    let word = |at: usize| u32::from_le_bytes(file[at..at + 4].try_into().expect("four bytes"));
    let field = word(trailer) + word(trailer + 16) + 4 * 8;
    let to_usize = |place: u32| usize::try_from(place).expect("usize has 32 bits at least");
    to_usize(field.wrapping_add(word(to_usize(field))))
}

/// Replaces bytes in the head of a file, and updates the checksum.
fn with_head(mut file: Vec<u8>, offset: usize, bytes: &[u8]) -> Vec<u8> {
    file[offset..offset + bytes.len()].copy_from_slice(bytes);
    let crc = crc32fast::hash(&file[..60]);
    file[60..64].copy_from_slice(&crc.to_le_bytes());
    file
}

/// Appends `extra` bytes to the root of a file, and adds a table for them in front of it.
fn with_longer_root(file: &[u8], extra: usize) -> Vec<u8> {
    let trailer = file.len() - 64;
    let word = |at: usize| u32::from_le_bytes(file[at..at + 4].try_into().expect("four bytes"));
    let to_usize = |number: u32| usize::try_from(number).expect("usize has 32 bits at least");
    let start = to_usize(word(trailer));
    let root_off = to_usize(word(trailer + 16));
    let index = &file[start..trailer];
    let (tables, root) = index.split_at(root_off);
    // A later version may put data between the tables of this version and the root.
    let mut longer = [tables, &[0xEE; 32]].concat();
    let moved = i32::try_from(longer.len() - root_off).expect("a short table");
    let new_root_off = longer.len();
    for field in root.chunks_exact(8) {
        let (rel, len) = field.split_at(4);
        let rel = i32::from_le_bytes(rel.try_into().expect("four bytes")) - moved;
        longer.extend(rel.to_le_bytes());
        longer.extend(len);
    }
    longer.extend(vec![0xDD; extra]);
    let wide = |len: usize| u64::try_from(len).expect("usize is at most 64 bits");
    let narrow = |len: usize| u32::try_from(len).expect("a short table");
    let mut new_trailer = file[trailer..].to_vec();
    let mut put =
        |at: usize, bytes: &[u8]| new_trailer[at..at + bytes.len()].copy_from_slice(bytes);
    put(8, &wide(longer.len()).to_le_bytes());
    put(16, &narrow(new_root_off).to_le_bytes());
    put(20, &narrow(longer.len() - new_root_off).to_le_bytes());
    put(24, &crc32fast::hash(&longer).to_le_bytes());
    put(40, &wide(start + longer.len() + 64).to_le_bytes());
    let crc = crc32fast::hash(&[&new_trailer[..52], &new_trailer[56..]].concat());
    new_trailer[52..56].copy_from_slice(&crc.to_le_bytes());
    [&file[..start], &longer, &new_trailer].concat()
}
