//! Options of writers: compression, digests, chunk sizes and alignment never change the state dict.

use std::io;
use std::sync::{Arc, LazyLock};

use bytes::Bytes;
use proptest::prelude::*;
use tssd_format::safetensors::Export;
use tssd_format::{
    Archive, ArchiveWriter, AttrValue, Attrs, Blob, ChunkPolicy, ChunkSize, CompressJob,
    Compression, Draft, Dtype, ErrorKind, Layout, MAX_CHUNK_BYTES, Options, StateDict, Storage,
    Tensor, TensorMeta, TorchStoreStateDict, Value,
};
use tssd_tests::generate;

fn compression() -> impl Strategy<Value = Compression> {
    prop_oneof![
        Just(Compression::None),
        Just(Compression::Zstd),
        Just(Compression::ShuffledZstd),
        Just(Compression::Planes),
        Just(Compression::Tiers),
        Just(Compression::Auto),
    ]
}

fn chunks() -> impl Strategy<Value = ChunkPolicy> {
    let size = (12_u8..21).prop_map(|log2| ChunkPolicy::Fixed(ChunkSize::from_log2(log2).unwrap()));
    prop_oneof![Just(ChunkPolicy::Fine), size]
}

/// Generates options of every kind. The length of a leaf's path selects its compression.
fn options() -> impl Strategy<Value = Options> {
    let align = prop::option::of((6_u32..15).prop_map(|log2| 1_u64 << log2));
    (compression(), compression(), any::<bool>(), chunks(), align, -3_i32..6).prop_map(
        |(even, odd, digests, chunks, align, level)| {
            let mut options = Options::new()
                .zstd_level(level)
                .chunks(chunks)
                .compress_leaves(move |path, _| if path.fqn().len() % 2 == 0 { even } else { odd });
            if digests {
                options = options.digests();
            }
            match align {
                Some(bytes) => options.align(bytes).unwrap(),
                None => options,
            }
        },
    )
}

fn encode(dict: &StateDict, options: &Options) -> TorchStoreStateDict {
    TorchStoreStateDict::with_options(dict, options).unwrap()
}

/// Bytes without a pattern. Generated once, since generating them per case would take most of its time.
static NOISE: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let noise = |at: u64| {
        let mixed = at.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        (mixed ^ mixed >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9).to_le_bytes()[7]
    };
    (0..1_000_000).map(noise).collect()
});

/// Generates a tensor of several chunks, of runs of one byte and of noise, with its bytes.
fn large_tensor() -> impl Strategy<Value = (Tensor, Vec<u8>)> {
    let parts = proptest::collection::vec((any::<u8>(), any::<bool>(), 1_usize..900_000), 1..5);
    let dtypes = prop::sample::select(vec![Dtype::Uint8, Dtype::Bfloat16, Dtype::Float32]);
    (parts, dtypes).prop_map(|(parts, dtype)| {
        let mut bytes = Vec::new();
        for (byte, is_noise, len) in parts {
            if is_noise {
                bytes.extend(&NOISE[byte.into()..][..len]);
            } else {
                bytes.resize(bytes.len() + len, byte);
            }
        }
        let numel = bytes.len() as u64 / dtype.itemsize();
        bytes.truncate((numel * dtype.itemsize()) as usize);
        let meta = TensorMeta::new(dtype, &[numel]).unwrap();
        (Tensor::new(meta, Storage::from(bytes.clone()), 0).unwrap(), bytes)
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    /// The state dict roundtrips, and the options that the archive records write the same bytes again.
    #[test]
    fn options_preserve_state_dict(dict in generate::state_dict(), options in options()) {
        let encoded = encode(&dict, &options);
        encoded.archive().verify_deep().unwrap();
        prop_assert_eq!(&encoded.to_state_dict().unwrap(), &dict);
        let again = encode(&dict, &Options::from_archive(encoded.archive()));
        prop_assert_eq!(again.as_bytes(), encoded.as_bytes());
    }

    /// The parts in order, with checksums from separate jobs, make the same file as the write jobs.
    #[test]
    fn parts_and_checksums_make_same_file(dict in generate::state_dict(), options in options()) {
        let layout = Layout::plan(&dict, &options).unwrap();
        let mut file = layout.parts().unwrap().concat();
        let jobs = layout.jobs();
        file.extend(layout.seal(jobs.iter().map(|job| job.checksum().unwrap())).unwrap());
        let encoded = encode(&dict, &options);
        prop_assert_eq!(encoded.as_bytes(), &file);
    }

    /// An archive that is written entry by entry holds the same state dict.
    #[test]
    fn streaming_writer_preserves_state_dict(dict in generate::state_dict(), options in options()) {
        let mut writer = ArchiveWriter::new(Vec::new(), options).unwrap();
        let mut expected = StateDict::new();
        for (key, value) in dict.entries().iter() {
            writer.insert(key.clone(), value.clone()).unwrap();
            expected.insert(key.clone(), value.clone());
        }
        let archive = Archive::from_bytes(writer.finish().unwrap()).unwrap();
        archive.verify_deep().unwrap();
        prop_assert_eq!(archive.to_state_dict().unwrap(), expected);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    /// A range read of a storage of several chunks returns that slice.
    ///
    /// The digest of the storage is the BLAKE3 of all its bytes.
    #[test]
    fn range_reads_return_slices_of_storage(
        (tensor, bytes) in large_tensor(),
        compression in compression(),
        cuts in proptest::collection::vec((any::<prop::sample::Index>(), any::<prop::sample::Index>()), 8),
    ) {
        let mut dict = StateDict::new();
        dict.insert("value", tensor);
        let encoded = encode(&dict, &Options::new().compress(compression).digests());
        let archive = encoded.archive();
        archive.verify_deep().unwrap();
        if bytes.is_empty() {
            return Ok(());
        }
        prop_assert_eq!(archive.storage(0).digest.unwrap(), *blake3::hash(&bytes).as_bytes());
        prop_assert_eq!(archive.storage(0).crc32, crc32fast::hash(&bytes));
        for (one, other) in cuts {
            let (one, other) = (one.index(bytes.len() + 1), other.index(bytes.len() + 1));
            let range = one.min(other)..one.max(other);
            let read = archive.storage_range(0, range.start as u64..range.end as u64).unwrap();
            prop_assert_eq!(&read[..], &bytes[range]);
        }
    }
}

/// A blob whose bytes are not in memory: its content, or its length if every read fails.
struct TestBlob(Result<Vec<u8>, u64>);

impl Blob for TestBlob {
    fn size(&self) -> io::Result<u64> {
        Ok(self.0.as_ref().map_or_else(|len| *len, |bytes| bytes.len() as u64))
    }

    fn read_exact_at(&self, target: &mut [u8], offset: u64) -> io::Result<()> {
        let bytes = self.0.as_ref().map_err(|_| io::Error::other("the device is lost"))?;
        target.copy_from_slice(&bytes[offset as usize..][..target.len()]);
        Ok(())
    }

    fn bytes(&self) -> Option<&Bytes> {
        None
    }
}

/// Position of a tensor: index of its storage, first byte, end byte.
type Extent = (usize, usize, usize);

/// Generates the bytes of three storages, and the positions of tensors in them, which may overlap.
fn shared_storages() -> impl Strategy<Value = (Vec<Vec<u8>>, Vec<Extent>)> {
    let storage =
        (any::<u8>(), 1_usize..3_000_000, any::<bool>()).prop_map(|(seed, len, is_noise)| {
            if is_noise {
                NOISE.iter().cycle().skip(seed.into()).take(len).copied().collect()
            } else {
                vec![seed; len]
            }
        });
    let bounds = (any::<prop::sample::Index>(), any::<prop::sample::Index>());
    let tensors = proptest::collection::vec((0_usize..3, bounds), 1..8);
    (proptest::collection::vec(storage, 3), tensors).prop_map(|(storages, tensors)| {
        let extent = |(at, (one, other)): (usize, (prop::sample::Index, prop::sample::Index))| {
            let len = storages[at].len() + 1;
            let (one, other) = (one.index(len), other.index(len));
            (at, one.min(other), one.max(other))
        };
        let tensors = tensors.into_iter().map(extent).collect();
        (storages, tensors)
    })
}

fn dict_of(storages: &[Storage], tensors: &[Extent]) -> StateDict {
    let mut dict = StateDict::new();
    for (number, (at, start, end)) in tensors.iter().enumerate() {
        let meta = TensorMeta::new(Dtype::Uint8, &[(end - start) as u64]).unwrap();
        let tensor = Tensor::new(meta, storages[*at].clone(), *start as u64).unwrap();
        dict.insert(format!("tensor.{number}"), tensor);
    }
    dict
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Every way to write makes the same file from storages in a blob as from storages in memory.
    #[test]
    fn storages_in_blobs_make_same_file_as_storages_in_memory(
        (storages, tensors) in shared_storages(),
        options in options(),
    ) {
        let in_memory: Vec<Storage> = storages.iter().map(|bytes| Storage::from(bytes.clone())).collect();
        let from_blob = |bytes: &Vec<u8>| Storage::from_blob(Arc::new(TestBlob(Ok(bytes.clone())))).unwrap();
        let in_blobs: Vec<Storage> = storages.iter().map(from_blob).collect();
        let (in_memory, in_blobs) = (dict_of(&in_memory, &tensors), dict_of(&in_blobs, &tensors));
        let expected = encode(&in_memory, &options);
        let layout = Layout::plan(&in_blobs, &options).unwrap();
        // `None` if raw bytes are in a blob. Compressed storages were read into memory by the plan.
        if let Some(parts) = layout.parts() {
            prop_assert!(expected.as_bytes().starts_with(&parts.concat()));
        }
        let mut memory = vec![7; layout.file_len() as usize];
        layout.write_into(&mut memory).unwrap();
        prop_assert!(memory == *expected.as_bytes());
        let mut stream = Vec::new();
        layout.write_to(&mut stream).unwrap();
        prop_assert!(stream == *expected.as_bytes());
        let sums = layout.jobs().iter().map(|job| job.checksum().unwrap()).collect::<Vec<_>>();
        prop_assert!(expected.as_bytes().ends_with(&layout.seal(sums).unwrap()));
        let Value::Tensor(tensor) = in_blobs.leaf("tensor.0").unwrap() else { panic!("a tensor") };
        prop_assert_eq!(&Value::Tensor(tensor.to_memory().unwrap()), in_memory.leaf("tensor.0").unwrap());
    }
}

/// A blob that cannot be read fails every way to write it. Earlier steps succeed.
#[test]
fn unreadable_blob_fails_every_way_to_write() {
    for compression in [Compression::None, Compression::Zstd] {
        let unreadable = Storage::from_blob(Arc::new(TestBlob(Err(5_000_000)))).unwrap();
        let dict = dict_of(&[unreadable], &[(0, 0, 5_000_000)]);
        let options = Options::new().compress(compression);
        let draft = Draft::new(&dict, &options).unwrap();
        if compression != Compression::None {
            let error = draft.jobs()[0].run().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Io, "{error}");
            continue;
        }
        let layout = draft.into_layout([]).unwrap();
        let mut memory = vec![0; layout.file_len() as usize];
        let errors = [
            layout.write_into(&mut memory).unwrap_err(),
            layout.write_to(&mut Vec::new()).unwrap_err(),
            layout.jobs()[0].checksum().unwrap_err(),
            Export::from_state_dict(&dict, &Attrs::new()).err().unwrap(),
        ];
        for error in errors {
            assert_eq!(error.kind(), ErrorKind::Io, "{error}");
            assert!(format!("{error:?}").contains("the device is lost"), "{error:?}");
        }
    }
}

/// Returns a dict with one tensor: two chunks of zeros.
fn zeros() -> StateDict {
    let mut dict = StateDict::new();
    let len = MAX_CHUNK_BYTES + 1000;
    dict.insert("zeros", Tensor::from_slice(&vec![0_u8; len as usize], &[len]).unwrap());
    dict
}

#[test]
fn compress_jobs_finish_in_any_order_and_none_may_be_missing() {
    let options = Options::new().compress(Compression::Zstd);
    let mut dict = zeros();
    let large = Tensor::from_slice(&vec![1_u64; 1 << 20], &[1 << 20]).unwrap();
    dict.insert("large", large);
    let draft = || Draft::new(&dict, &options).unwrap();
    let mut packed: Vec<_> = draft().jobs().iter().map(|job| job.run().unwrap()).collect();
    assert_eq!(packed.len(), 3, "one job for two chunks, two jobs for eight");
    packed.reverse();
    let mut file = Vec::new();
    draft().into_layout(packed).unwrap().write_to(&mut file).unwrap();
    assert_eq!(&file[..], encode(&dict, &options).as_bytes());
    let some: Vec<_> = draft().jobs().iter().skip(1).map(|job| job.run().unwrap()).collect();
    assert_eq!(draft().into_layout(some).unwrap_err().kind(), ErrorKind::Unfilled);
    let bytes = draft().jobs().iter().map(CompressJob::len).sum::<u64>();
    assert_eq!(bytes, MAX_CHUNK_BYTES + 1000 + (8 << 20));
}

#[test]
fn frame_is_verified_before_decoding() {
    let encoded = encode(&zeros(), &Options::new().compress(Compression::Zstd));
    let storage = encoded.archive().storage(0);
    for chunk in 0..2 {
        let frame = storage.stored_chunk(chunk);
        for at in frame.start..frame.end {
            let mut bad = encoded.as_bytes().to_vec();
            bad[at as usize] ^= 4;
            let archive = Archive::from_bytes(bad).unwrap();
            let error = archive.to_state_dict().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::ChunkCorrupt);
            assert_eq!((error.path(), error.offset()), (Some("zeros"), Some(frame.start)));
            // The other chunk stays readable.
            let other = storage.chunk(1 - chunk);
            archive.storage_range(0, other).unwrap();
            archive.storage_range(0, storage.chunk(chunk)).unwrap_err();
        }
    }
}

#[test]
fn digest_depends_on_content_and_not_on_codec() {
    let mut dict = zeros();
    dict.insert("again", Tensor::from_slice(&vec![0_u8; 1_049_576], &[1_049_576]).unwrap());
    let digest = |options: Options| {
        let encoded = encode(&dict, &options.digests());
        let archive = encoded.archive();
        let storages = [0, 1].map(|number| archive.storage(number).digest.unwrap());
        assert_eq!(storages[0], storages[1], "the same bytes");
        (storages[0], archive.content_digest().unwrap())
    };
    let raw = digest(Options::new());
    assert_eq!(digest(Options::new().compress(Compression::Zstd)), raw);
    assert_eq!(digest(Options::new().align(1 << 14).unwrap()), raw);
    assert_eq!(digest(Options::new().chunks(ChunkPolicy::Fine)), raw);
    let encoded = encode(&dict, &Options::new());
    assert_eq!(encoded.archive().content_digest(), None);
    assert_eq!(encoded.archive().compute_content_digest().unwrap(), raw.1);
    // An attribute is content, unless it describes the file or a version in a store.
    let attr = |name: &str| digest(Options::new().attr(name, AttrValue::Int(1))).1;
    assert_ne!(attr("step"), raw.1);
    assert_eq!(attr("tssd.file.step"), raw.1);
    assert_eq!(attr("tssd.store.step"), raw.1);
}

#[test]
fn alignment_is_validated_and_level_is_clamped() {
    for bytes in [0, 1, 32, 63, 65, 3 << 10, 4 << 20, 1 << 63] {
        assert_eq!(
            Options::new().align(bytes).unwrap_err().kind(),
            ErrorKind::Alignment,
            "{bytes}"
        );
    }
    let dict = zeros();
    for level in [i32::MIN, -5, 0, 22, i32::MAX] {
        let options = Options::new().compress(Compression::Zstd).zstd_level(level);
        let encoded = encode(&dict, &options);
        assert_eq!(encoded.to_state_dict().unwrap(), dict, "level {level}");
        let recorded = encoded.archive().attrs()["tssd.file.zstd_level"].clone();
        assert_eq!(recorded, AttrValue::Int(i64::from(level.clamp(-131_072, 22))));
    }
}

#[test]
fn leaf_read_decodes_only_its_own_chunks() {
    let mut dict = StateDict::new();
    let storage = Storage::from(vec![3_u8; 5 << 20]);
    let row = |number: u64| {
        let meta = TensorMeta::new(Dtype::Uint8, &[1 << 10]).unwrap();
        Tensor::new(meta, storage.clone(), number << 20).unwrap()
    };
    dict.insert(
        "whole",
        Tensor::new(TensorMeta::new(Dtype::Uint8, &[5 << 20]).unwrap(), storage.clone(), 0)
            .unwrap(),
    );
    dict.insert("row", row(4));
    let encoded = encode(&dict, &Options::new().compress(Compression::Zstd));
    assert_eq!(encoded.archive().storage_count(), 1);
    // Corrupts the first chunk. The row is in the last one.
    let mut bad = encoded.as_bytes().to_vec();
    bad[encoded.archive().storage(0).stored_chunk(0).start as usize] ^= 1;
    let archive = Archive::from_bytes(bad).unwrap();
    assert_eq!(archive.tensor("row").unwrap().view().contiguous_bytes().unwrap(), [3; 1 << 10]);
    assert_eq!(archive.tensor("whole").unwrap_err().kind(), ErrorKind::ChunkCorrupt);
    assert!(matches!(archive.leaf("row"), Ok(Value::Tensor(_))));
}
