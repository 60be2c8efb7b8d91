//! Damaged and foreign files: verification detects every change, and no reader panics.

use std::io::Write;
use std::sync::Arc;

use bytes::Bytes;
use proptest::prelude::*;
use tssd_format::{
    Archive, Attrs, Blob, ChunkPolicy, Compression, Error, ErrorKind, Options, Result, ShardFile,
    StateDict, StorageReference, Tensor, TorchStoreStateDict, Value, VerifyJob,
};
use tssd_tests::checksums::{index_offset, repair_checksums};
use tssd_tests::generate;
use tssd_tests::vectors::Content;

fn read(bytes: Vec<u8>) -> Result<StateDict> {
    let archive = Archive::from_bytes(bytes)?;
    archive.verify()?;
    archive.to_state_dict()
}

fn sample() -> Vec<u8> {
    let tensor = Tensor::from_slice(&[1.5_f32, -2.0, 0.25, 8.0], &[2, 2]).unwrap();
    let mut dict = StateDict::new();
    dict.insert("weight", tensor.clone());
    dict.insert("tied", tensor);
    dict.insert("steps", Value::List(vec![Value::from(1_i64), Value::None]));
    dict.insert("bias", Tensor::from_slice(&[1_u8, 2, 3], &[3]).unwrap());
    TorchStoreStateDict::from_state_dict(&dict).unwrap().as_bytes().to_vec()
}

/// The test vectors of at most 16,000 bytes. Together they contain each kind of table, storage and chunk.
fn small_vectors() -> Vec<(&'static str, Vec<u8>)> {
    let small_file = |vector: tssd_tests::vectors::Vector| match vector.content {
        Content::File(bytes) if bytes.len() <= 16_000 => Some((vector.name, bytes)),
        _ => None,
    };
    tssd_tests::vectors::vectors().into_iter().filter_map(small_file).collect()
}

/// Asserts that verification refuses each damaged file. Returns the number of files.
fn assert_all_refused(name: &str, damaged: impl IntoIterator<Item = Vec<u8>>) -> u64 {
    let mut count = 0;
    for file in damaged {
        let verified = Archive::from_bytes(file).and_then(|archive| archive.verify());
        assert!(verified.is_err(), "{name}: damaged file {count} passed verification");
        count += 1;
    }
    count
}

/// Verification detects each of these changes of a small file:
///
/// - a flip of any bit;
/// - any other value of any byte of head, index and trailer;
/// - any truncation;
/// - 1 to 4096 bytes after the end;
/// - a chunk that is zeroed or swapped with another chunk.
#[test]
fn damage_of_small_files_is_always_found() {
    let changed = |good: &[u8], offset: usize, mask: u8| {
        let mut bad = good.to_vec();
        bad[offset] ^= mask;
        bad
    };
    let mut counts = [0_u64; 5];
    for (name, good) in small_vectors() {
        let archive = Archive::from_bytes(good.clone()).unwrap();
        archive.verify_deep().unwrap();
        let len = good.len();
        let offsets = || 0..len;
        let flips = offsets().flat_map(|offset| (0..8).map(move |bit| (offset, 1_u8 << bit)));
        counts[0] +=
            assert_all_refused(name, flips.map(|(offset, bit)| changed(&good, offset, bit)));
        // The first 8 of the zero bytes after the head are included.
        let framing = (0..72).chain(index_offset(&good)..len);
        let values = framing.flat_map(|offset| (1..=255).map(move |mask| (offset, mask)));
        counts[1] +=
            assert_all_refused(name, values.map(|(offset, mask)| changed(&good, offset, mask)));
        counts[2] += assert_all_refused(name, offsets().map(|len| good[..len].to_vec()));
        let fillers = [0_u8, 0xFF, 0x89];
        let tails = (1..=4096).map(|extra| [&good[..], &vec![fillers[extra % 3]; extra]].concat());
        counts[3] += assert_all_refused(name, tails);
        // The chunks of a manifest are in other files.
        if !archive.is_manifest_only() {
            counts[4] += assert_all_refused(name, chunk_damage(&archive, &good));
        }
    }
    let [flips, values, truncations, tails, chunks] = counts;
    // Written directly to stderr, because the test harness captures the output of passing tests.
    writeln!(
        std::io::stderr(),
        "{} damaged files, all found: {flips} flipped bits, {values} other values of framing bytes, \
         {truncations} truncations, {tails} tails, {chunks} zeroed or swapped chunks",
        counts.iter().sum::<u64>()
    )
    .unwrap();
    assert!(counts.iter().all(|count| *count > 0));
}

/// If the whole payload is zeroed, verification names every leaf, in one pass over the tree.
#[test]
fn verify_names_every_damaged_leaf() {
    let name = |number: u32| format!("layers.{number}.weight");
    let mut dict = StateDict::new();
    (0..20_000_u32).for_each(|number| {
        dict.insert(name(number), Tensor::from_slice(&[number + 1], &[1]).unwrap());
    });
    let mut file = TorchStoreStateDict::from_state_dict(&dict).unwrap().as_bytes().to_vec();
    let blob = 4096..index_offset(&file);
    file[blob].fill(0);
    let archive = Archive::from_bytes(file).unwrap();
    let jobs = archive.verify_jobs();
    let errors: Vec<Error> = jobs.iter().map(VerifyJob::run).filter_map(Result::err).collect();
    assert_eq!(errors.len(), 20_000);
    for (number, error) in (0..).zip(&errors) {
        assert_eq!((error.kind(), error.path()), (ErrorKind::ChunkCorrupt, Some(&*name(number))));
    }
}

/// A manifest may omit digests that its archives have. Verification checks them nevertheless.
#[test]
fn digests_omitted_by_manifest_are_verified() {
    let mut dict = StateDict::new();
    dict.insert("weight", Tensor::from_slice(&[1.0_f32; 100], &[100]).unwrap());
    for compression in [Compression::None, Compression::Zstd] {
        let options = Options::new().digests().compress(compression);
        let good = TorchStoreStateDict::with_options(&dict, &options).unwrap().as_bytes().to_vec();
        let digest = Archive::from_bytes(good.clone()).unwrap().storage(0).digest.unwrap();
        let mut corrupt = good.clone();
        let offset = corrupt.windows(32).position(|bytes| *bytes == digest).unwrap();
        corrupt[offset] ^= 1;
        repair_checksums(&mut corrupt);
        for (file, expected) in [(good, None), (corrupt, Some(ErrorKind::DigestMismatch))] {
            let file = Bytes::from(file);
            let archive = Archive::from_bytes(file.clone()).unwrap();
            let storage = StorageReference { digest: None, ..archive.storage(0) };
            let shard = ShardFile { digest: None, ..archive.shard_file("0.tssd", 0) };
            let manifest = tssd_format::encode_manifest(
                &archive.structure(),
                &[storage],
                &Attrs::new(),
                &[shard],
            );
            let manifest: Arc<dyn Blob> = Arc::new(Bytes::from(manifest.unwrap()));
            let open = |_: &ShardFile| -> Result<Arc<dyn Blob>> { Ok(Arc::new(file.clone())) };
            let set = Archive::from_shard_set(manifest, open).unwrap();
            set.verify().unwrap();
            assert_eq!(set.verify_deep().err().map(|error| error.kind()), expected);
        }
    }
}

/// Returns copies of a file with one chunk zeroed, or two chunks of equal length swapped, that differ from it.
fn chunk_damage(archive: &Archive, good: &[u8]) -> Vec<Vec<u8>> {
    let to_usize = |offset: u64| usize::try_from(offset).unwrap();
    let mut chunks = Vec::new();
    for number in 0..archive.storage_count() {
        let storage = archive.storage(number);
        let ranges = storage.chunks(&(0..storage.len)).map(|chunk| storage.stored_chunk(chunk));
        chunks.extend(ranges.map(|range| to_usize(range.start)..to_usize(range.end)));
    }
    let mut damaged = Vec::new();
    for (index, chunk) in chunks.iter().enumerate() {
        let mut zeroed = good.to_vec();
        zeroed[chunk.clone()].fill(0);
        damaged.push(zeroed);
        for other in chunks[..index].iter().filter(|other| other.len() == chunk.len()) {
            let mut swapped = good.to_vec();
            swapped[chunk.clone()].copy_from_slice(&good[other.clone()]);
            swapped[other.clone()].copy_from_slice(&good[chunk.clone()]);
            damaged.push(swapped);
        }
    }
    damaged.retain(|file| file != good);
    damaged
}

#[test]
fn swapped_chunks_of_large_storage_are_found() {
    for (chunk_bytes, options) in [
        (1_u32 << 20, Options::new()),
        (1 << 20, Options::new().compress(Compression::Zstd)),
        (4 << 10, Options::new().chunks(ChunkPolicy::Fine)),
    ] {
        let noise = |chunk: u8| {
            (0..chunk_bytes).map(move |offset| offset.wrapping_mul(77).to_le_bytes()[1] ^ chunk)
        };
        let bytes: Vec<u8> = (0..3).flat_map(noise).collect();
        let mut dict = StateDict::new();
        dict.insert("value", Tensor::from_slice(&bytes, &[3 * u64::from(chunk_bytes)]).unwrap());
        let encoded = TorchStoreStateDict::with_options(&dict, &options).unwrap();
        let damaged = chunk_damage(encoded.archive(), encoded.as_bytes());
        assert_eq!(damaged.len(), 6, "three zeroed chunks, three swapped pairs");
        assert_eq!(assert_all_refused("large", damaged), 6);
    }
}

#[test]
fn concatenated_files_are_refused() {
    let good = sample();
    let concatenated = [good.as_slice(), &good].concat();
    assert_eq!(read(concatenated).unwrap_err().kind(), ErrorKind::LengthMismatch);
}

#[test]
fn foreign_files_are_reported_as_not_tssd() {
    let zip = [b"PK\x03\x04".as_slice(), &[0; 8192]].concat();
    let mut safetensors = 80_u64.to_le_bytes().to_vec();
    safetensors.extend(br#"{"weight":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#);
    safetensors.resize(9000, b' ');
    for foreign in [zip, safetensors, vec![0; 8192], b"hello, world".to_vec()] {
        assert_eq!(read(foreign).unwrap_err().kind(), ErrorKind::NotTssd);
    }
    assert_eq!(read(Vec::new()).unwrap_err().kind(), ErrorKind::TooShort);
}

#[test]
fn damage_is_reported_with_the_leaf_and_the_byte() {
    let mut bad = sample();
    bad[4096 + 2] ^= 4;
    let error = read(bad).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ChunkCorrupt);
    assert_eq!((error.path(), error.offset()), (Some("weight"), Some(4096)));
    assert_eq!(
        error.to_string(),
        "stored bytes do not match their checksum: 16 bytes (in `weight`, at byte 4096)"
    );
}

#[test]
fn damage_of_trailer_and_padding_is_reported_with_its_byte() {
    let good = sample();
    let trailer = good.len() - 64;
    let flipped = |offset: usize| {
        let mut bad = good.clone();
        bad[offset] ^= 1;
        bad
    };
    let mut longer = flipped(trailer + 40);
    repair_checksums(&mut longer);
    for (bad, kind, offset) in [
        (flipped(trailer + 57), ErrorKind::NoTrailer, trailer + 56),
        (flipped(trailer + 16), ErrorKind::TrailerCorrupt, trailer + 52),
        (longer, ErrorKind::LengthMismatch, trailer + 40),
        // Padding after the 16 bytes of the first storage.
        (flipped(4096 + 21), ErrorKind::PaddingNotZero, 4096 + 21),
    ] {
        let error = read(bad).unwrap_err();
        assert_eq!((error.kind(), error.offset()), (kind, Some(offset as u64)));
    }
}

/// The lengths of all jobs add up to the payload, as a progress bar needs.
#[test]
fn verify_jobs_report_bytes_they_read() {
    let archive = Archive::from_bytes(sample()).unwrap();
    let jobs = archive.verify_jobs();
    assert_eq!(jobs.iter().map(VerifyJob::len).sum::<u64>(), archive.index_range().start - 4096);
    let empty = jobs.iter().filter(|job| job.is_empty()).count();
    // Two jobs compare a storage checksum with its chunk checksums, and the padding before the first storage is empty.
    assert_eq!(empty, 3);
    assert!(jobs.iter().all(|job| job.is_empty() == matches!(job.len(), 0)));
}

#[test]
fn file_truncated_while_open_is_an_error() {
    let path = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(path.path(), sample()).unwrap();
    let archive = Archive::open(path.path()).unwrap();
    path.as_file().set_len(4000).unwrap();
    assert_eq!(archive.verify().unwrap_err().kind(), ErrorKind::Io);
    assert_eq!(archive.to_state_dict().unwrap_err().kind(), ErrorKind::Io);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// An index that is changed and gets valid checksums is refused or decoded. It never causes a panic.
    #[test]
    fn corrupt_index_with_valid_checksums_does_not_panic(
        dict in generate::state_dict(),
        changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let mut file = TorchStoreStateDict::from_state_dict(&dict).unwrap().as_bytes().to_vec();
        let len = file.len();
        let index_off = index_offset(&file);
        for (position, byte) in changes {
            let offset = index_off + position.index(len - 64 - index_off);
            file[offset] = byte;
        }
        repair_checksums(&mut file);
        if let Ok(archive) = Archive::from_bytes(file) {
            let _ = archive.verify();
            let _ = archive.to_state_dict();
            let _ = tssd_format::to_json(&archive);
        }
    }
}
