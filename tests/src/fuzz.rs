//! Fuzz targets as plain functions.
//!
//! `fuzz/` runs them on new inputs, the suite on the inputs of the corpora.

mod compact;
mod delta;
mod dict;
mod plan;
mod readers;
mod set;

use bytes::Bytes;
use tssd_format::{
    Archive, ChunkCodec, ChunkLocation, ChunkSize, CompressedLayout, Compression, Layout, Options,
    RangeDecoder, StateDict, StorageReference,
};

pub use self::compact::{compact, expand};
pub use self::delta::delta;
pub use self::readers::{Verdict, assert_readers_agree, python_difference};

/// A fuzz target: its name, which is that of its corpus, and its function.
pub type Target = (&'static str, fn(&[u8]));

/// All targets.
pub const TARGETS: &[Target] = &[
    ("parse", parse),
    ("index", index),
    ("roundtrip", roundtrip),
    ("readers", readers),
    ("chunk", chunk),
    ("delta", delta),
    ("shard_set", shard_set),
    ("reshard_plan", reshard_plan),
];

/// Reads the input as an archive.
pub fn parse(data: &[u8]) {
    read(data.to_vec());
}

/// Reads an archive with valid checksums whose blob and index come from the input.
pub fn index(data: &[u8]) {
    read(expand(data));
}

/// Opens a file, and uses everything in it if it is an archive.
fn read(file: Vec<u8>) {
    let Ok(archive) = Archive::from_bytes(file) else { return };
    let _ = archive.verify_deep();
    let _ = archive.content_digest();
    for (path, _) in archive.leaves() {
        let _ = archive.leaf(&path.fqn());
    }
    let is_manifest = !archive.shards().is_empty();
    if let Some(dict) = archive.to_state_dict().ok().filter(|_| !is_manifest) {
        // An archive that was read can be written again, with the same meaning.
        let encoded =
            encode(&dict, &Options::from_archive(&archive)).expect("what was read is legal");
        let reread = Archive::from_bytes(encoded).expect("what is written is legal");
        assert_eq!(reread.to_state_dict().expect("it lies in memory"), dict);
    }
    let _ = tssd_format::to_json(&archive);
}

/// Writes a state dict, and reads it.
///
/// # Panics
///
/// If it changes, or if the recorded options lead to other bytes.
pub fn roundtrip(data: &[u8]) {
    let Some((dict, options)) = dict::generate(data) else { return };
    let Ok(file) = encode(&dict, &options) else { return };
    let archive = Archive::from_bytes(file.clone()).expect("what is written is legal");
    archive.verify_deep().expect("what is written is whole");
    assert_eq!(archive.to_state_dict().expect("it lies in memory"), dict);
    let encoded = encode(&dict, &Options::from_archive(&archive)).expect("it was written before");
    assert_eq!(encoded, file, "the recorded options lead to other bytes");
}

fn encode(dict: &StateDict, options: &Options) -> tssd_format::Result<Vec<u8>> {
    let mut file = Vec::new();
    Layout::plan(dict, options)?.write_to(&mut file)?;
    Ok(file)
}

/// Reads an archive with valid checksums with all readers.
///
/// # Panics
///
/// If they differ.
pub fn readers(data: &[u8]) {
    readers::compare(&expand(data));
}

/// Decodes the input as a compressed frame, and compresses the input.
///
/// # Panics
///
/// If decompression changes the bytes, or a range differs from that range of the whole.
pub fn chunk(data: &[u8]) {
    let Some(([choice, short, long], bytes)) = data.split_first_chunk::<3>() else { return };
    let width = [1, 2, 4, 8, 16][usize::from(choice % 5)];
    let codec = match (choice >> 3) % 4 {
        1 if width < 16 => ChunkCodec::Planes,
        3 if width < 16 => ChunkCodec::Tiers,
        _ => ChunkCodec::Zstd,
    };
    let len = u64::from(u16::from_le_bytes([*short, *long])) + 1;
    let storage = StorageReference {
        offset: 0,
        len,
        crc32: 0,
        chunk_size: ChunkSize::default(),
        crcs: vec![0],
        align_log2: 8,
        shard: 0,
        base: None,
        compressed_layout: Some(CompressedLayout {
            width,
            chunks: vec![ChunkLocation {
                offset: 0,
                len: u32::try_from(bytes.len()).unwrap_or(u32::MAX),
                codec,
            }],
        }),
        digest: None,
    };
    let decode = |range| -> tssd_format::Result<Bytes> {
        let mut unpack = RangeDecoder::new(&storage, range)?;
        unpack.add_chunk(0, bytes)?;
        Ok(unpack.finish())
    };
    if let Ok(whole) = decode(0..len) {
        assert_eq!(u64::try_from(whole.len()), Ok(len));
        let part = decode(len / 3..len / 2).expect("the whole was decoded");
        let place = |at: u64| usize::try_from(at).expect("at most 1 MiB");
        assert_eq!(part, whole[place(len / 3)..place(len / 2)]);
    }
    // Compression is slow, so only some inputs run it.
    if choice & 0x70 == 0 {
        compress(bytes, *choice);
    }
}

/// Compresses repeated bytes as a tensor, whose element size determines the shuffle.
fn compress(bytes: &[u8], choice: u8) {
    use tssd_format::{Dtype, Storage, Tensor, TensorMeta};
    let repeated = bytes.repeat(usize::from(choice) + 1);
    let dtypes = [Dtype::Uint8, Dtype::Bfloat16, Dtype::Float32, Dtype::Int64, Dtype::Complex128];
    let dtype = dtypes[usize::from(choice) % dtypes.len()];
    let numel = u64::try_from(repeated.len()).unwrap_or_default() / dtype.itemsize();
    let meta = TensorMeta::new(dtype, &[numel]).expect("it is in memory");
    let tensor = Tensor::new(meta, Storage::from(repeated), 0).expect("it has enough bytes");
    let mut dict = StateDict::new();
    dict.insert("value", tensor);
    let options = Options::new().compress(Compression::ShuffledZstd).digests();
    let archive = Archive::from_bytes(encode(&dict, &options).expect("it is legal"));
    let archive = archive.expect("what is written is legal");
    archive.verify_deep().expect("what is written is whole");
    assert_eq!(archive.to_state_dict().expect("it lies in memory"), dict);
}

/// Opens shard sets with some bytes changed, and valid checksums.
///
/// # Panics
///
/// If readers differ.
pub fn shard_set(data: &[u8]) {
    set::open_modified_set(data);
}

/// Plans the read of a box of a tensor that is stored as arbitrary boxes.
///
/// # Panics
///
/// If an element is copied from the wrong place, twice or never, or a gap is not reported.
pub fn reshard_plan(data: &[u8]) {
    plan::check(data);
}
