//! Damaged and foreign bytes: every change is found, and nothing panics.

use std::io::Write;
use std::sync::Arc;

use bytes::Bytes;
use proptest::prelude::*;
use tssd_format::{
    Archive, Attrs, Blob, Chunks, Compression, Error, ErrorKind, Options, Result, ShardFile,
    StateDict, StorageReference, Tensor, TorchStoreStateDict, Value, Verify,
};
use tssd_tests::damage::{index_off, repair};
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

/// The small vectors: each kind of table, storage and chunk is in one of them.
fn small_vectors() -> Vec<(&'static str, Vec<u8>)> {
    let of = |vector: tssd_tests::vectors::Vector| match vector.content {
        Content::File(bytes) if bytes.len() <= 16_000 => Some((vector.name, bytes)),
        _ => None,
    };
    tssd_tests::vectors::vectors().into_iter().filter_map(of).collect()
}

/// Counts damaged files, and proves that each is refused.
fn find(what: &str, damaged: impl IntoIterator<Item = Vec<u8>>) -> u64 {
    let mut count = 0;
    for file in damaged {
        let verified = Archive::from_bytes(file).and_then(|archive| archive.verify());
        assert!(verified.is_err(), "{what}: damaged file {count} is taken for a good one");
        count += 1;
    }
    count
}

/// Every bit of every byte; every value of every byte of head, index and trailer; every truncation; 1 to
/// 4096 bytes behind the end; chunks that are zeros, or another chunk: all of it is found.
#[test]
fn damage_of_small_files_is_found_without_exception() {
    let changed = |good: &[u8], at: usize, change: u8| {
        let mut bad = good.to_vec();
        bad[at] ^= change;
        bad
    };
    let mut counts = [0_u64; 5];
    for (name, good) in small_vectors() {
        let archive = Archive::from_bytes(good.clone()).unwrap();
        archive.verify_deep().unwrap();
        let len = good.len();
        let places = || 0..len;
        let flips = places().flat_map(|at| (0..8).map(move |bit| (at, 1_u8 << bit)));
        counts[0] += find(name, flips.map(|(at, bit)| changed(&good, at, bit)));
        // Of the zeros between head and blob, some.
        let framing = (0..72).chain(index_off(&good)..len);
        let values = framing.flat_map(|at| (1..=255).map(move |change| (at, change)));
        counts[1] += find(name, values.map(|(at, change)| changed(&good, at, change)));
        counts[2] += find(name, places().map(|len| good[..len].to_vec()));
        let fillers = [0_u8, 0xFF, 0x89];
        let tails = (1..=4096).map(|more| [&good[..], &vec![fillers[more % 3]; more]].concat());
        counts[3] += find(name, tails);
        // The chunks of a manifest lie in other files.
        if !archive.is_manifest_alone() {
            counts[4] += find(name, chunk_damage(&archive, &good));
        }
    }
    let [flips, values, truncations, tails, chunks] = counts;
    // Past the harness, which keeps what a test that passes has printed.
    writeln!(
        std::io::stderr(),
        "{} damaged files, all found: {flips} flipped bits, {values} other values of framing bytes, \
         {truncations} truncations, {tails} tails, {chunks} zeroed or swapped chunks",
        counts.iter().sum::<u64>()
    )
    .unwrap();
    assert!(counts.iter().all(|count| *count > 0));
}

/// A file with a hole where its payload was: each leaf is named, in the time of one look at the tree.
#[test]
fn all_that_is_hurt_is_named() {
    let name = |number: u32| format!("layers.{number}.weight");
    let mut dict = StateDict::new();
    (0..20_000_u32).for_each(|number| {
        dict.insert(name(number), Tensor::from_slice(&[number + 1], &[1]).unwrap());
    });
    let mut file = TorchStoreStateDict::from_state_dict(&dict).unwrap().as_bytes().to_vec();
    let blob = 4096..index_off(&file);
    file[blob].fill(0);
    let archive = Archive::from_bytes(file).unwrap();
    let jobs = archive.verify_jobs();
    let errors: Vec<Error> = jobs.iter().map(Verify::run).filter_map(Result::err).collect();
    assert_eq!(errors.len(), 20_000);
    for (number, error) in (0..).zip(&errors) {
        assert_eq!((error.kind(), error.path()), (ErrorKind::ChunkCorrupt, Some(&*name(number))));
    }
}

/// A manifest may leave out digests that its archives have: they are proven all the same.
#[test]
fn digests_that_a_manifest_leaves_out_are_proven() {
    let mut dict = StateDict::new();
    dict.insert("weight", Tensor::from_slice(&[1.0_f32; 100], &[100]).unwrap());
    for compression in [Compression::None, Compression::Zstd] {
        let options = Options::new().digests().compress(compression);
        let good = TorchStoreStateDict::with_options(&dict, &options).unwrap().as_bytes().to_vec();
        let digest = Archive::from_bytes(good.clone()).unwrap().storage(0).digest.unwrap();
        let mut lie = good.clone();
        let at = lie.windows(32).position(|bytes| *bytes == digest).unwrap();
        lie[at] ^= 1;
        repair(&mut lie);
        for (file, verdict) in [(good, None), (lie, Some(ErrorKind::DigestMismatch))] {
            let file = Bytes::from(file);
            let own = Archive::from_bytes(file.clone()).unwrap();
            let storage = StorageReference { digest: None, ..own.storage(0) };
            let shard = ShardFile {
                name: "0.tssd".into(),
                file_len: own.file_len(),
                index_off: own.index_range().start,
                index_crc32: own.index_crc32(),
                writer: 0,
                digest: None,
            };
            let manifest =
                tssd_format::manifest(&own.structure(), &[storage], &Attrs::new(), &[shard]);
            let manifest: Arc<dyn Blob> = Arc::new(Bytes::from(manifest.unwrap()));
            let open = |_: &ShardFile| -> Result<Arc<dyn Blob>> { Ok(Arc::new(file.clone())) };
            let set = Archive::from_shard_set(manifest, open).unwrap();
            set.verify().unwrap();
            assert_eq!(set.verify_deep().err().map(|error| error.kind()), verdict);
        }
    }
}

/// Each stored chunk zeroed, and each pair of equal length swapped, where that changes anything.
fn chunk_damage(archive: &Archive, good: &[u8]) -> Vec<Vec<u8>> {
    let size = |place: u64| usize::try_from(place).unwrap();
    let mut chunks = Vec::new();
    for number in 0..archive.storage_count() {
        let storage = archive.storage(number);
        let places = storage.chunks(&(0..storage.len)).map(|chunk| storage.stored_chunk(chunk));
        chunks.extend(places.map(|place| size(place.start)..size(place.end)));
    }
    let mut damaged = Vec::new();
    for (at, one) in chunks.iter().enumerate() {
        let mut zeroed = good.to_vec();
        zeroed[one.clone()].fill(0);
        damaged.push(zeroed);
        for other in chunks[..at].iter().filter(|other| other.len() == one.len()) {
            let mut swapped = good.to_vec();
            swapped[one.clone()].copy_from_slice(&good[other.clone()]);
            swapped[other.clone()].copy_from_slice(&good[one.clone()]);
            damaged.push(swapped);
        }
    }
    damaged.retain(|file| file != good);
    damaged
}

#[test]
fn chunks_of_a_large_storage_cannot_be_swapped() {
    for (chunk_bytes, options) in [
        (1_u32 << 20, Options::new()),
        (1 << 20, Options::new().compress(Compression::Zstd)),
        (4 << 10, Options::new().chunks(Chunks::Fine)),
    ] {
        let noise = |chunk: u8| {
            (0..chunk_bytes).map(move |at| at.wrapping_mul(77).to_le_bytes()[1] ^ chunk)
        };
        let bytes: Vec<u8> = (0..3).flat_map(noise).collect();
        let mut dict = StateDict::new();
        dict.insert("value", Tensor::from_slice(&bytes, &[3 * u64::from(chunk_bytes)]).unwrap());
        let encoded = TorchStoreStateDict::with_options(&dict, &options).unwrap();
        let damaged = chunk_damage(encoded.archive(), encoded.as_bytes());
        assert_eq!(damaged.len(), 6, "three zeroed, three pairs");
        assert_eq!(find("large", damaged), 6);
    }
}

#[test]
fn two_files_in_one_are_none() {
    let good = sample();
    let twice = [good.as_slice(), &good].concat();
    assert_eq!(read(twice).unwrap_err().kind(), ErrorKind::LengthMismatch);
}

#[test]
fn foreign_files_are_named_as_such() {
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
    let flipped = |at: usize| {
        let mut bad = good.clone();
        bad[at] ^= 1;
        bad
    };
    let mut longer = flipped(trailer + 40);
    repair(&mut longer);
    for (bad, kind, at) in [
        (flipped(trailer + 57), ErrorKind::NoTrailer, trailer + 56),
        (flipped(trailer + 16), ErrorKind::TrailerCorrupt, trailer + 52),
        (longer, ErrorKind::LengthMismatch, trailer + 40),
        // Behind the 16 bytes of the first storage.
        (flipped(4096 + 21), ErrorKind::PaddingNotZero, 4096 + 21),
    ] {
        let error = read(bad).unwrap_err();
        assert_eq!((error.kind(), error.offset()), (kind, Some(at as u64)));
    }
}

/// What a progress bar counts: all of the blob, each byte once.
#[test]
fn jobs_of_a_verification_know_what_they_read() {
    let archive = Archive::from_bytes(sample()).unwrap();
    let jobs = archive.verify_jobs();
    assert_eq!(jobs.iter().map(Verify::len).sum::<u64>(), archive.index_range().start - 4096);
    let empty = jobs.iter().filter(|job| job.is_empty()).count();
    // The checksums of two storages against those of their chunks, and no padding before the first.
    assert_eq!(empty, 3);
    assert!(jobs.iter().all(|job| job.is_empty() == matches!(job.len(), 0)));
}

#[test]
fn a_file_that_shrinks_under_its_reader_is_an_error() {
    let path = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(path.path(), sample()).unwrap();
    let archive = Archive::open(path.path()).unwrap();
    path.as_file().set_len(4000).unwrap();
    assert_eq!(archive.verify().unwrap_err().kind(), ErrorKind::Io);
    assert_eq!(archive.to_state_dict().unwrap_err().kind(), ErrorKind::Io);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// With checksums repaired, a change of the index is refused or means something: never a panic.
    #[test]
    fn lies_behind_good_checksums_do_not_panic(
        dict in generate::state_dict(),
        changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let mut file = TorchStoreStateDict::from_state_dict(&dict).unwrap().as_bytes().to_vec();
        let len = file.len();
        let index_off = index_off(&file);
        for (at, byte) in changes {
            let at = index_off + at.index(len - 64 - index_off);
            file[at] = byte;
        }
        repair(&mut file);
        if let Ok(archive) = Archive::from_bytes(file) {
            let _ = archive.verify();
            let _ = archive.to_state_dict();
            let _ = tssd_format::to_json(&archive);
        }
    }
}
