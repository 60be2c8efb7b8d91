//! Distributed leaves of manifests mean the slices that they stand for.

use std::collections::BTreeSet;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use proptest::collection::vec;
use proptest::prelude::*;
use serde_json::Value as Json;
use tssd_format::{
    Archive, Blob, ChunkPolicy, ChunkSize, Compression, CrcTable, DeviceMesh, Dict, Dtype,
    ErrorKind, Node, Options, Placement, Shard, ShardFile, ShardSpec, StateDict, Tensor,
    TensorMeta, TensorReference, TensorSlice, TorchStoreStateDict, Value, to_json,
};
use tssd_store::blocking::Store;
use tssd_store::plan::{TensorLeaf, plan};
use tssd_store::{Error, GetOptions, JobId, Key, PutOptions, Target};
use tssd_tests::command::memory_tempdir;
use tssd_tests::distributed::{GlobalTensor, LargeModel, WrittenSet, dict_with, eighth};

fn open(set: &WrittenSet, manifest: Vec<u8>) -> tssd_format::Result<Archive> {
    let open_shard = |shard: &ShardFile| -> tssd_format::Result<Arc<dyn Blob>> {
        let (_, bytes) = set.files.iter().find(|(name, _)| *name == shard.name).unwrap();
        Ok(Arc::new(Bytes::from(bytes.clone())))
    };
    Archive::from_shard_set(Arc::new(Bytes::from(manifest)), open_shard)
}

/// Returns the JSON view of a manifest that is opened alone.
fn view_alone(manifest: Vec<u8>) -> Json {
    to_json(&Archive::from_bytes(manifest).unwrap()).unwrap()
}

fn count_distributed(manifest: &[u8]) -> usize {
    let leaves = Archive::from_bytes(manifest.to_vec()).unwrap().leaves();
    leaves.iter().filter(|(_, node)| matches!(node, Node::Distributed(_))).count()
}

/// A tensor of up to 3 dimensions on a mesh of up to 6 devices, with placements that fit.
fn tensors() -> impl Strategy<Value = GlobalTensor> {
    let mesh = prop_oneof![
        (1..=6_u64).prop_map(|size| vec![size]),
        (1..=3_u64, 1..=2_u64).prop_map(|(one, other)| vec![one, other]),
    ];
    (mesh, vec(0..=9_u64, 0..=3)).prop_flat_map(|(mesh, shape)| {
        let dims = u32::try_from(shape.len()).unwrap();
        let placement = if dims == 0 {
            Just(Placement::Replicate).boxed()
        } else {
            prop_oneof![
                1 => Just(Placement::Replicate),
                3 => (0..dims).prop_map(|dim| Placement::Shard { dim }),
                1 => (0..dims, 1..=3_u64).prop_map(|(dim, split_factor)| {
                    Placement::StridedShard { dim, split_factor }
                }),
            ]
            .boxed()
        };
        let count = usize::try_from(mesh.iter().product::<u64>()).unwrap();
        let ranks = Just((0..6_u32).collect::<Vec<_>>()).prop_shuffle();
        (vec(placement, mesh.len()), ranks).prop_map(move |(placements, ranks)| GlobalTensor {
            shape: shape.clone(),
            mesh: DeviceMesh::new(&mesh, &ranks[..count]).unwrap(),
            placements,
        })
    })
}

fn options() -> impl Strategy<Value = Options> {
    let compression = prop_oneof![
        2 => Just(Compression::None),
        1 => Just(Compression::Zstd),
    ];
    let chunks = prop_oneof![Just(ChunkPolicy::default()), Just(ChunkPolicy::Fine)];
    (compression, chunks, any::<bool>()).prop_map(|(compression, chunks, has_digests)| {
        let options = Options::new().compress(compression).chunks(chunks);
        if has_digests { options.digests() } else { options }
    })
}

/// Returns the state dicts of six writers: two divided tensors, the first one tied, between other leaves.
fn dicts(first: &GlobalTensor, second: &GlobalTensor, is_tied: bool) -> Vec<Dict> {
    let dict = |rank: u32| {
        let own = first.shards_of(rank);
        let tied = own.clone().filter(|_| is_tied);
        let text = (rank == 1).then(|| "text ".repeat(1000).into());
        let bytes = (rank == 1).then(|| Value::Bytes(vec![7_u8; 70_000].into()));
        let entries =
            [("text", text), ("first", own), ("bytes", bytes), ("second", second.shards_of(rank))];
        dict_with(entries.into_iter().chain([("tied", tied)]))
    };
    (0..6).map(dict).collect()
}

proptest! {
    /// A manifest with distributed leaves, opened with its archives, is equal to one without.
    #[test]
    fn distributed_manifest_equals_explicit_manifest(
        first in tensors(),
        second in tensors(),
        options in options(),
        is_tied: bool,
    ) {
        let set = WrittenSet::new(&dicts(&first, &second, is_tied), &options);
        let (explicit, distributed) = (set.explicit_manifest(), set.distributed_manifest());
        let expected = open(&set, explicit).unwrap();
        let found = open(&set, distributed).unwrap();
        found.verify_deep().unwrap();
        prop_assert_eq!(to_json(&found).unwrap(), to_json(&expected).unwrap());
        prop_assert_eq!(found.content_digest(), expected.content_digest());
    }

    /// A tensor with several slices becomes a distributed leaf if each device has one storage.
    ///
    /// A device with several regions can have one storage for each of them.
    #[test]
    fn divided_tensors_become_distributed_leaves(tensor in tensors(), options in options()) {
        let dict = |rank| dict_with([("weight", tensor.shards_of(rank))]);
        let set = WrittenSet::new(&(0..6).map(dict).collect::<Vec<_>>(), &options);
        let explicit = Archive::from_bytes(set.explicit_manifest()).unwrap();
        let [(_, Node::Tensors(run))] = &explicit.leaves()[..] else { panic!("a leaf") };
        let shard = |reference: &TensorReference| {
            reference.storage.map(|number| explicit.storage(number).shard)
        };
        let storages: BTreeSet<_> = run.iter().map(|each| each.storage).collect();
        let devices: BTreeSet<_> = run.iter().map(shard).collect();
        let is_distributed = run.len() > 1 && storages.len() == devices.len();
        let count = count_distributed(&set.distributed_manifest());
        prop_assert_eq!(count, usize::from(is_distributed));
    }
}

fn rows(shape: &[u64], devices: u64) -> GlobalTensor {
    GlobalTensor {
        shape: shape.to_vec(),
        mesh: DeviceMesh::from_shape(&[devices]).unwrap(),
        placements: vec![Placement::Shard { dim: 0 }],
    }
}

/// The size of a manifest grows with the number of tensors plus the number of writers, not with their product. So does a
/// plan.
#[test]
fn manifest_of_many_writers_is_small() {
    const TENSORS: u32 = 60;
    let mesh = Arc::new(DeviceMesh::from_shape(&[256, 8]).unwrap());
    let model = LargeModel::new(TENSORS, &mesh);
    let manifest = model.manifest(|_| CrcTable::default());
    // Node and tensor, slice, name and shape of a tensor. Shard and name of a writer, and its rank in the mesh.
    let expected = 4096 + 250 * u64::from(TENSORS) + 160 * 2048;
    assert!(u64::try_from(manifest.len()).unwrap() < expected, "{} bytes", manifest.len());
    let archive = Archive::from_bytes(manifest).unwrap();
    for dim in 0..2 {
        let (mut copies, mut bytes, mut needed) = (0, 0, 0);
        for (_, node) in archive.leaves() {
            let leaf = TensorLeaf::of(&node).unwrap();
            let wanted = eighth(leaf, dim, 3);
            needed += wanted.meta.nbytes();
            for copy in plan(leaf, &wanted).unwrap() {
                copies += 1;
                bytes += copy.total_bytes();
            }
        }
        assert_eq!(bytes, needed);
        assert!(copies <= 8 * TENSORS, "{copies} series of copies of {TENSORS} tensors");
    }
}

/// The places of storages are in the manifest only if they can be computed.
#[test]
fn manifest_has_other_storages_of_uncompressed_archives() {
    let tensor = rows(&[4000, 3], 6);
    for (options, has_places) in
        [(Options::new(), true), (Options::new().compress(Compression::Zstd), false)]
    {
        let set = WrittenSet::new(&dicts(&tensor, &tensor, false), &options);
        let view = view_alone(set.distributed_manifest());
        for (number, shard) in view["shards"].as_array().unwrap().iter().enumerate() {
            let others = shard.get("others").map(|others| others.as_array().unwrap().len());
            assert_eq!(others, has_places.then_some(if number == 1 { 2 } else { 0 }));
        }
    }
}

/// Leaves that cannot be computed stay runs of slices: all other leaves can still be distributed.
#[test]
fn leaf_with_foreign_slice_stays_a_run() {
    let (one, other) = (rows(&[9, 2], 6), rows(&[8, 2], 6));
    let mut dicts: Vec<Dict> =
        (0..6).map(|rank| dict_with([("one", one.shards_of(rank))])).collect();
    for (rank, dict) in (0..).zip(&mut dicts) {
        // A slice of another division: rank 0 holds all rows that ranks 0 and 1 hold.
        let shards = match rank {
            0 => rows(&[8, 2], 2).shards_of(0),
            1 => None,
            _ => other.shards_of(rank),
        };
        if let Some(shards) = shards {
            dict.insert("other", shards);
        }
    }
    let set = WrittenSet::new(&dicts, &Options::new());
    assert_eq!(count_distributed(&set.distributed_manifest()), 1);
    let (found, expected) =
        (open(&set, set.distributed_manifest()), open(&set, set.explicit_manifest()));
    assert_eq!(to_json(&found.unwrap()).unwrap(), to_json(&expected.unwrap()).unwrap());
}

/// An archive may have regions that the merge leaves out: replicas, and empty ones. Then its leaf stays a run.
#[test]
fn leaf_with_region_that_is_left_out_stays_a_run() {
    let tensor = rows(&[8, 2], 4);
    for compression in [Compression::None, Compression::Zstd] {
        let mut dicts: Vec<Dict> = (0..4)
            .map(|rank| {
                dict_with([("one", tensor.shards_of(rank)), ("other", tensor.shards_of(rank))])
            })
            .collect();
        let Some(Value::Shards(mut shards)) = tensor.shards_of(2) else { panic!("shards") };
        let slice = TensorSlice::new(&[0, 0], &[0, 0], &[8, 2]).unwrap();
        let empty = Tensor::from_slice::<i32>(&[], &[0, 0]).unwrap();
        shards.push(Shard::new(empty, ShardSpec::new(slice)).unwrap());
        dicts[2].insert("other", Value::Shards(shards));
        let set = WrittenSet::new(&dicts, &Options::new().compress(compression));
        assert_eq!(count_distributed(&set.distributed_manifest()), 1);
        let found = open(&set, set.distributed_manifest()).unwrap();
        let expected = open(&set, set.explicit_manifest()).unwrap();
        assert_eq!(to_json(&found).unwrap(), to_json(&expected).unwrap());
    }
}

/// A manifest that is opened alone has no bytes of distributed leaves.
#[test]
fn distributed_leaf_cannot_be_read_from_manifest_alone() {
    let tensor = rows(&[9, 2], 6);
    let dict = |rank| dict_with([("weight", tensor.shards_of(rank))]);
    let set = WrittenSet::new(&(0..6).map(dict).collect::<Vec<_>>(), &Options::new());
    let alone = Archive::from_bytes(set.distributed_manifest()).unwrap();
    alone.verify().unwrap();
    assert!(alone.has_distributed_leaves());
    let error = alone.leaf("weight").unwrap_err();
    assert_eq!((error.kind(), error.path()), (ErrorKind::BlobElsewhere, Some("weight")));
}

/// Entries of the checksum table are proven with the manifest alone, page by page.
#[test]
fn damaged_checksum_pages_are_detected() {
    let len = 3 * (1 << 20) + 5;
    let mut dict = Dict::new();
    // Chunks of 4 KiB: 769 entries for each storage, which fill several pages.
    for number in 0..11 {
        let bytes = Value::Bytes(vec![number; len].into());
        dict.insert(format!("bytes {number}").as_str(), bytes);
    }
    let dict = StateDict::from_value(Value::Dict(dict)).unwrap();
    let size = ChunkSize::from_log2(12).unwrap();
    let options = Options::new().chunks(ChunkPolicy::Fixed(size));
    let encoded = TorchStoreStateDict::with_options(&dict, &options).unwrap();
    let bytes = encoded.as_bytes().to_vec();
    let archive = Archive::from_bytes(bytes.clone()).unwrap();
    let shard = archive.shard_file("0.tssd", 0);
    let all: Vec<u32> =
        (0..archive.storage_count()).flat_map(|number| archive.storage(number).crcs).collect();
    let read = |bytes: &[u8], range: Range<u64>| {
        shard.read_crcs(&Bytes::from(bytes.to_vec()), &[range]).map(|mut found| found.remove(0))
    };
    let count = u64::try_from(all.len()).unwrap();
    assert!(count > 8 * 1024);
    for range in [0..1, 5..5, 1023..1025, 2000..5000, count - 1..count, 0..count] {
        let expected = &all[range.start as usize..range.end as usize];
        assert_eq!(read(&bytes, range.clone()).unwrap(), expected, "{range:?}");
    }
    let crcs = usize::try_from(shard.index_off).unwrap() + shard.crcs.offset as usize;
    let damaged = |at: usize| {
        let mut damaged = bytes.clone();
        damaged[at] ^= 4;
        damaged
    };
    let error = read(&damaged(crcs + 4 * 1024), 1024..1025).unwrap_err();
    assert_eq!((error.kind(), error.path()), (ErrorKind::CrcPages, Some("0.tssd")));
    let error = read(&damaged(crcs + 4 * all.len()), 1024..1025).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DistributedMismatch);
    let error = read(&bytes, count..count + 1).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DistributedMismatch);
}

/// Writers and tensors of a version whose manifest has distributed leaves.
const WRITERS: u32 = 64;
const MATRICES: u32 = 65;

/// Puts a version of 65 matrices whose rows 64 writers hold.
fn put_matrices(store: &Store, key: &Key) {
    for rank in 0..WRITERS {
        let matrix = rows(&[127, 3], u64::from(WRITERS));
        let mut dict = StateDict::new();
        for number in 0..MATRICES {
            dict.insert(format!("layers.{number}"), matrix.shards_of(rank).unwrap());
        }
        if rank == 7 {
            dict.insert("step", 12);
            dict.insert("bias", Tensor::from_slice(&[0.5_f32; 9], &[9]).unwrap());
        }
        let (writer, job) = (Some(rank), Some(JobId("job".into())));
        let writers = Some((0..WRITERS).collect());
        let options = PutOptions { writer, writers, job, ..PutOptions::default() };
        store.put_state_dict(key, &dict, &options).unwrap();
    }
}

/// Returns the paths of the files of the only version below a folder.
fn version_files(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() { folders.push(path) } else { files.push(path) }
        }
    }
    files
}

fn find_file(folder: &Path, prefix: &str) -> PathBuf {
    let is_found = |path: &PathBuf| path.file_name().unwrap().to_str().unwrap().starts_with(prefix);
    version_files(folder).into_iter().find(is_found).unwrap()
}

/// Gets rows of the last matrix, whose elements are their own indices.
fn get_rows(store: &Store, key: &Key, rows: Range<u64>) -> Result<(), Error> {
    let slice = TensorSlice::new(&[rows.start, 0], &[rows.end - rows.start, 3], &[127, 3]).unwrap();
    let meta = TensorMeta::new(Dtype::Int32, slice.local_shape()).unwrap();
    let mut memory = vec![0; usize::try_from(meta.nbytes()).unwrap()];
    let target = Target {
        fqn: "layers.64".to_owned(),
        shard_spec: Some(ShardSpec::new(slice)),
        meta,
        memory: (&mut memory).into(),
    };
    store.get_state_dict_into(key, &mut [target], &GetOptions::default())?;
    let expected: Vec<u8> = (rows.start * 3..rows.end * 3)
        .flat_map(|index| i32::try_from(index).unwrap().to_le_bytes())
        .collect();
    assert_eq!(memory, expected, "rows {rows:?}");
    Ok(())
}

#[test]
fn version_of_many_slices_is_read_through_distributed_leaves() {
    let folder = memory_tempdir();
    let key = Key::new("policy").unwrap();
    put_matrices(&Store::directory(folder.path()).unwrap(), &key);
    let manifest = Archive::open(find_file(folder.path(), "manifest")).unwrap();
    assert!(manifest.has_distributed_leaves());
    assert!(manifest.index_range().end < 40_000, "{:?}", manifest.index_range());
    let store = Store::directory(folder.path()).unwrap();
    for rows in [0..127, 0..1, 126..127, 13..14, 13..15, 3..126] {
        get_rows(&store, &key, rows).unwrap();
    }
    let (dict, report) = store.get_state_dict(&key, &GetOptions::default()).unwrap();
    assert_eq!(report.bytes_needed, u64::from(MATRICES) * 127 * 3 * 4 + 36);
    assert_eq!(dict.leaf("step").unwrap(), &Value::from(12));
    // The folder is a shard set, which other readers open.
    let set = tssd_format::open_shard_set(manifest_folder(folder.path())).unwrap();
    set.verify_deep().unwrap();
    assert_eq!(set.storage_count(), MATRICES * WRITERS + 1);
}

fn manifest_folder(folder: &Path) -> PathBuf {
    find_file(folder, "manifest").parent().unwrap().to_owned()
}

/// Damage of one archive is reported by the gets that read from it, and by no other.
#[test]
fn damaged_archive_of_distributed_leaf_is_reported() {
    let folder = memory_tempdir();
    let key = Key::new("policy").unwrap();
    put_matrices(&Store::directory(folder.path()).unwrap(), &key);
    let path = find_file(folder.path(), "5-");
    let good = std::fs::read(&path).unwrap();
    let archive = Archive::from_bytes(good.clone()).unwrap();
    let crcs = archive.index_range().start + u64::from(archive.crc_table().offset);
    let [crcs, page, data] =
        [crcs, crcs + 4 * u64::from(archive.crc_table().len), archive.storage(64).offset]
            .map(|offset| usize::try_from(offset).unwrap());
    let flipped = |at: usize| {
        let mut bytes = good.clone();
        bytes[at] ^= 1;
        Some(bytes)
    };
    let cases = [
        ("a checksum", flipped(crcs), "page of the checksum table"),
        ("a checksum of a page", flipped(page), "`crc_pages` does not match"),
        ("an element", flipped(data), "stored bytes do not match"),
        ("the trailer", flipped(good.len() - 30), "trailer checksum"),
        (
            "a cut archive",
            Some(good[..good.len() - 64].to_vec()),
            "not the one that its manifest names",
        ),
        ("no archive", None, "lacks files"),
    ];
    for (what, bytes, expected) in cases {
        match bytes {
            Some(bytes) => std::fs::write(&path, bytes).unwrap(),
            None => std::fs::remove_file(&path).unwrap(),
        }
        let store = Store::directory(folder.path()).unwrap();
        let error = get_rows(&store, &key, 8..13).unwrap_err();
        assert_eq!(error.kind(), tssd_store::ErrorKind::Corrupt, "{what}: {error}");
        assert!(error.to_string().contains(expected), "{what}: {error}");
        if expected != "lacks files" {
            get_rows(&store, &key, 12..127).unwrap();
        }
    }
}

/// Archives with storages that the manifest itself describes are verified when the version is opened.
#[test]
fn damaged_archive_of_own_storage_is_reported() {
    let folder = memory_tempdir();
    let key = Key::new("policy").unwrap();
    put_matrices(&Store::directory(folder.path()).unwrap(), &key);
    let path = find_file(folder.path(), "7-");
    let good = std::fs::read(&path).unwrap();
    let mut damaged = good.clone();
    damaged[good.len() - 30] ^= 1;
    for (bytes, expected) in [
        (&good[..5000], "not the one that its manifest names"),
        (&good[..good.len() - 64], "not the one that its manifest names"),
        (&damaged[..], "trailer checksum"),
    ] {
        std::fs::write(&path, bytes).unwrap();
        for unverified in [false, true] {
            let store = Store::directory(folder.path()).unwrap();
            let options = GetOptions { unverified, ..GetOptions::default() };
            let error = store.get(&key, "bias", &options).unwrap_err();
            assert_eq!(error.kind(), tssd_store::ErrorKind::Corrupt, "{error}");
            assert!(error.to_string().contains(expected), "{error}");
        }
    }
}
