//! Resharding: N writers put a tensor in one sharding, and M readers get it in another.
//!
//! The tests compare every element.

use std::collections::BTreeMap;
use std::path::Path;

use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use tssd_format::{
    Archive, AttrValue, Compression, DeviceMesh, Dtype, MANIFEST_NAME, Placement, Region,
    ShardSpec, StateDict, TensorMeta, TensorReference, TensorSlice, Value,
};
use tssd_store::blocking::Store;
use tssd_store::plan::{RegionRequest, TensorLeaf, plan};
use tssd_store::{GetOptions, JobId, Key, PutOptions, Target};
use tssd_tests::command::memory_tempdir;
use tssd_tests::sharding::{
    counting_elements, local_meta, local_places, local_shards, region_elements, strided_meta,
    to_u32s,
};
use tssd_tests::test_daemon::TestDaemon;

/// A mesh, and the placements of a tensor on it.
#[derive(Clone, Debug)]
struct Sharding {
    mesh: DeviceMesh,
    placements: Vec<Placement>,
}

/// Generates a sharding over a mesh of at most `max` dimensions, each of at most `max` devices.
fn sharding(rank: usize, max: u64) -> impl Strategy<Value = Sharding> {
    let dim = 0..u32::try_from(rank).expect("small");
    let placement = prop_oneof![
        2 => dim.clone().prop_map(|dim| Placement::Shard { dim }),
        1 => Just(Placement::Replicate),
        1 => (dim, 1_u64..4).prop_map(|(dim, split_factor)| {
            Placement::StridedShard { dim, split_factor }
        }),
    ];
    proptest::collection::vec((1..=max, placement), 1..=max as usize).prop_map(|dims| {
        let (shape, placements): (Vec<u64>, Vec<Placement>) = dims.into_iter().unzip();
        Sharding { mesh: DeviceMesh::from_shape(&shape).expect("small"), placements }
    })
}

/// Generates a global shape, a sharding of the writers and one of the readers.
fn case(max: u64) -> impl Strategy<Value = (Vec<u64>, Sharding, Sharding)> {
    proptest::collection::vec(0_u64..9, 1..4).prop_flat_map(move |shape| {
        let sharding = || sharding(shape.len(), max);
        (Just(shape.clone()), sharding(), sharding())
    })
}

/// Returns the references of a manifest to a tensor: all boxes of all ranks, each replica once.
fn stored_references(shape: &[u64], sharding: &Sharding) -> Vec<TensorReference> {
    let mut boxes: BTreeMap<Region, TensorReference> = BTreeMap::new();
    for rank in sharding.mesh.ranks() {
        let slices =
            TensorSlice::from_placements(shape, &sharding.mesh, *rank, &sharding.placements);
        for slice in slices.unwrap() {
            let next = u32::try_from(boxes.len()).unwrap();
            let is_empty = slice.region().is_empty();
            boxes.entry(slice.region().clone()).or_insert_with(|| TensorReference {
                meta: TensorMeta::new(Dtype::Uint32, slice.local_shape()).unwrap(),
                storage: (!is_empty).then_some(next),
                byte_offset: 0,
                shard_spec: Some(ShardSpec::new(slice)),
            });
        }
    }
    boxes.into_values().collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    /// The plan copies every element of the target once, from its position in a stored box.
    #[test]
    fn plan_copies_every_element_once((shape, put, get) in case(3)) {
        let stored = stored_references(&shape, &put);
        let global = counting_elements(&shape, 1);
        let mut memories: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
        for reference in &stored {
            let region = reference.shard_spec.as_ref().unwrap().slice().region();
            if let Some(storage) = reference.storage {
                memories.insert(storage, region_elements(&global, &shape, region));
            }
        }
        for rank in get.mesh.ranks() {
            for place in local_places(&shape, &get.mesh, *rank, &get.placements) {
                let region = place.slice().region();
                let wanted = RegionRequest {
                    meta: strided_meta(region.shape()),
                    region: region.clone(),
                    global_shape: shape.clone().into(),
                };
                let copies = plan(TensorLeaf::Run(&stored), &wanted).unwrap();
                let mut target = vec![None; usize::try_from(wanted.meta.span_bytes()).unwrap() / 4];
                let mut moved = 0;
                for copy in &copies {
                    moved += copy.runs.total_bytes();
                    copy.runs.for_each(|from, to, bytes| {
                        for offset in 0..bytes / 4 {
                            let from = usize::try_from(copy.source_offset + from).unwrap() / 4;
                            let to = usize::try_from(copy.target_offset + to).unwrap() / 4;
                            let offset = usize::try_from(offset).unwrap();
                            let slot = &mut target[to + offset];
                            assert!(slot.is_none(), "an element is written twice");
                            *slot = Some(memories[&copy.storage.own().unwrap()][from + offset]);
                        }
                    });
                }
                prop_assert_eq!(moved, region.numel() * 4);
                let mut found = Vec::new();
                let strides = wanted.meta.strides();
                tssd_format::Runs::to_row_major(1, region.shape(), &strides).for_each(|from, _, run| {
                    for offset in 0..run {
                        found.push(target[usize::try_from(from + offset).unwrap()].unwrap());
                    }
                });
                prop_assert_eq!(found, region_elements(&global, &shape, region));
            }
        }
    }

    /// The error of a plan over a missing box has a region inside that box.
    #[test]
    fn plan_reports_missing_box((shape, put, _) in case(3), index in any::<prop::sample::Index>()) {
        let mut stored = stored_references(&shape, &put);
        let missing = stored.remove(index.index(stored.len()));
        let region = missing.shard_spec.unwrap().slice().region().clone();
        prop_assume!(!region.is_empty());
        let wanted = RegionRequest {
            meta: TensorMeta::new(Dtype::Uint32, &shape).unwrap(),
            region: Region::whole(&shape),
            global_shape: shape.into(),
        };
        let error = plan(TensorLeaf::Run(&stored), &wanted).unwrap_err();
        prop_assert_eq!(error.kind(), tssd_format::ErrorKind::Uncovered);
        let (offsets, shape) = error.region().unwrap();
        prop_assert!(region.contains(&Region::new(offsets, shape).unwrap()));
    }
}

/// Puts a sharded tensor and a step from every rank, on one thread each. Returns the version.
fn put_all(store: &Store, key: &Key, shape: &[u64], put: &Sharding, seed: u32, job: &str) -> u64 {
    configure_manifests();
    let report = std::thread::scope(|scope| {
        let ranks: Vec<_> = put
            .mesh
            .ranks()
            .iter()
            .map(|rank| {
                scope.spawn(move || {
                    let global = counting_elements(shape, seed);
                    let mut dict = StateDict::new();
                    let shards = local_shards(&global, shape, &put.mesh, *rank, &put.placements);
                    dict.insert("sharded", Value::Shards(shards));
                    dict.insert("step", i64::from(seed));
                    let options = PutOptions {
                        writer: Some(*rank),
                        job: Some(JobId(job.to_owned())),
                        // Readers must get the same from every way to store a version.
                        compression: if seed.is_multiple_of(2) {
                            Compression::ShuffledZstd
                        } else {
                            Compression::None
                        },
                        digests: rank.is_multiple_of(2),
                        ..PutOptions::default()
                    };
                    store.put_state_dict(key, &dict, &options).unwrap()
                })
            })
            .collect();
        let reports: Vec<_> = ranks.into_iter().map(|rank| rank.join().unwrap()).collect();
        let visible = reports.iter().filter(|report| report.visible).count();
        assert!(visible >= 1, "the last put makes the version visible");
        reports.into_iter().next().unwrap()
    });
    report.version
}

/// Checks what every rank of a mesh gets, as new tensors and in place.
fn check_get(store: &Store, key: &Key, shape: &[u64], get: &Sharding, seed: u32) {
    let global = counting_elements(shape, seed);
    for rank in get.mesh.ranks() {
        let places = local_places(shape, &get.mesh, *rank, &get.placements);
        let slices = BTreeMap::from([("sharded".to_owned(), places.clone())]);
        let options = GetOptions { slices, ..GetOptions::default() };
        let (dict, report) = store.get_state_dict(key, &options).unwrap();
        assert_eq!(dict.leaf("step").unwrap(), &Value::from(i64::from(seed)));
        let Value::Shards(shards) = dict.leaf("sharded").unwrap() else { panic!("shards") };
        for (shard, place) in shards.iter().zip(&places) {
            let expected = region_elements(&global, shape, place.slice().region());
            assert_eq!(to_u32s(shard.tensor()), expected);
        }
        assert_eq!(report.bytes_transferred, report.bytes_needed);
        for place in places {
            let meta = strided_meta(place.slice().local_shape());
            let mut memory = vec![0xEE_u8; usize::try_from(meta.span_bytes()).unwrap()];
            let target = Target {
                fqn: "sharded".to_owned(),
                shard_spec: Some(place.clone()),
                meta: meta.clone(),
                memory: (&mut memory).into(),
            };
            let report =
                store.get_state_dict_into(key, &mut [target], &GetOptions::default()).unwrap();
            assert_eq!(report.bytes_transferred, report.bytes_needed);
            assert_eq!(report.bytes_needed, place.slice().region().numel() * 4);
            let received = tssd_format::Tensor::new(meta, memory.into(), 0).unwrap();
            let expected = region_elements(&global, shape, place.slice().region());
            assert_eq!(to_u32s(&received), expected);
        }
    }
    let whole = store.get(key, "sharded", &GetOptions::default()).unwrap();
    assert_eq!(to_u32s(&whole), global);
}

/// Environment variable: all tensors of several slices become distributed leaves.
const DISTRIBUTED: &str = "TSSD_TEST_DISTRIBUTED";

/// Makes manifests with distributed leaves, if the environment says so.
fn configure_manifests() {
    if std::env::var_os(DISTRIBUTED).is_some() {
        tssd_store::set_min_distributed_slices(2);
    }
}

/// A manifest has distributed leaves if the environment says so: the test below relies on it.
#[test]
fn environment_selects_form_of_manifests() {
    let folder = memory_tempdir();
    let store = Store::directory(folder.path()).unwrap();
    let mesh = DeviceMesh::from_shape(&[2]).unwrap();
    let rows = Sharding { mesh, placements: vec![Placement::Shard { dim: 0 }] };
    put_all(&store, &Key::new("policy").unwrap(), &[4], &rows, 1, "job");
    let key = folder.path().join("policy");
    let folders = std::fs::read_dir(key).unwrap().map(|entry| entry.unwrap().path());
    let manifest = folders.map(|folder| folder.join("manifest.tssd")).find(|path| path.exists());
    let manifest = Archive::open(manifest.unwrap()).unwrap();
    assert_eq!(manifest.has_distributed_leaves(), std::env::var_os(DISTRIBUTED).is_some());
}

/// The tests of this file that read what several writers put pass with distributed leaves too.
///
/// They run in a process of their own, because the form of manifests is a setting of the process.
#[test]
fn distributed_leaves_reshard_like_slices() {
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    command.args(["reshard::", "--skip", "distributed_leaves_reshard_like_slices"]);
    let output = command.env(DISTRIBUTED, "1").output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}");
    assert!(!text.contains(" 0 passed"), "{text}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn readers_get_any_sharding_of_what_writers_put((shape, put, get) in case(3)) {
        let store = Store::memory().unwrap();
        let key = Key::new("policy").unwrap();
        for seed in 1..3 {
            put_all(&store, &key, &shape, &put, seed, "job");
            check_get(&store, &key, &shape, &get, seed);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn directory_store_reshards_like_memory((shape, put, get) in case(2)) {
        let folder = memory_tempdir();
        let store = Store::directory(folder.path()).unwrap();
        let key = Key::new("policy").unwrap();
        for seed in 1..3 {
            put_all(&store, &key, &shape, &put, seed, "job");
            // Like another process, a new store sees only what is in the directory.
            check_get(&Store::directory(folder.path()).unwrap(), &key, &shape, &get, seed);
        }
    }
}

/// Puts to two daemons and reads from both. A store without shared memory reads ranges.
#[test]
fn daemons_of_two_hosts_reshard_like_memory() {
    let controller = TestDaemon::new(1 << 30);
    let member = TestDaemon::with_controller(&controller);
    let (remote, local) = (controller.connect_tcp(), member.connect());
    let mut runner = TestRunner::new(ProptestConfig::with_cases(200));
    let counted = std::cell::Cell::new(0);
    runner
        .run(&case(3), |(shape, put, get)| {
            counted.set(counted.get() + 1);
            let key = Key::new(format!("policy-{}", counted.get())).unwrap();
            // Every second key is put to the daemon without the controller.
            let stores = if counted.get() % 2 == 0 { [&remote, &local] } else { [&local, &remote] };
            for seed in 1..3 {
                put_all(stores[0], &key, &shape, &put, seed, "job");
                for store in stores {
                    check_get(store, &key, &shape, &get, seed);
                }
            }
            stores[0].delete(&key, None).unwrap();
            Ok(())
        })
        .unwrap();
}

/// Returns the `tssd.store.layout_fingerprint` attribute of the only version of a store.
fn recorded_layout(folder: &Path) -> AttrValue {
    let versions = folder.join("policy").read_dir().unwrap();
    let manifests = versions.map(|version| version.unwrap().path().join(MANIFEST_NAME));
    let manifests: Vec<_> = manifests.filter(|manifest| manifest.is_file()).collect();
    let [manifest] = &*manifests else { panic!("{manifests:?}") };
    Archive::open(manifest).unwrap().attrs().remove("tssd.store.layout_fingerprint").unwrap()
}

#[test]
fn layout_attribute_changes_only_with_sharding() {
    let shape = [64, 33];
    let folder = memory_tempdir();
    let store = Store::directory(folder.path()).unwrap();
    let key = Key::new("policy").unwrap();
    let sharding = |dim| Sharding {
        mesh: DeviceMesh::from_shape(&[4]).unwrap(),
        placements: vec![Placement::Shard { dim }],
    };
    let mut layouts = Vec::new();
    for (seed, dim, job) in [(1, 0, "job"), (3, 0, "job"), (5, 0, "job"), (7, 1, "next job")] {
        put_all(&store, &key, &shape, &sharding(dim), seed, job);
        check_get(&store, &key, &shape, &sharding(1), seed);
        layouts.push(recorded_layout(folder.path()));
    }
    // A version with another layout needs a new plan, although the readers ask for the same boxes.
    assert!(layouts[0] == layouts[1] && layouts[1] == layouts[2] && layouts[2] != layouts[3]);
}

/// Four writers put large matrices and a small bias; each of 20 readers gets a twentieth of the rows.
///
/// The bytes received include the checksums that verify the rows: at most 10 % more than the bytes needed.
#[cfg(feature = "object")]
#[test]
fn bucket_slice_transfers_little_more_than_its_bytes() {
    let bucket = std::sync::Arc::new(object_store::memory::InMemory::new());
    let store = Store::in_bucket(bucket, "").unwrap();
    let [writers, readers] = [4, 20].map(|ranks| DeviceMesh::from_shape(&[ranks]).unwrap());
    let (rows, key) = ([Placement::Shard { dim: 0 }], Key::new("model").unwrap());
    let shapes =
        [("down", [1020, 1024]), ("up", [3071, 512]), ("embed", [8003, 1024]), ("bias", [77, 1])];
    let global = |[rows, columns]: [u64; 2]| counting_elements(&[rows, columns], 1);
    for rank in 0..4 {
        let mut dict = StateDict::new();
        for (name, shape) in shapes {
            for shard in local_shards(&global(shape), &shape, &writers, rank, &rows) {
                dict.insert(name, shard);
            }
        }
        let options = PutOptions {
            version: Some(1),
            writer: Some(rank),
            job: Some(JobId("training".into())),
            ..PutOptions::default()
        };
        store.put_state_dict(&key, &dict, &options).unwrap();
    }
    for rank in 0..20 {
        let wanted = shapes.iter().flat_map(|(name, shape)| {
            let places = local_places(shape, &readers, rank, &rows).into_iter();
            places.map(move |place| (*name, local_meta(Dtype::Uint32, &place), place))
        });
        let wanted: Vec<_> = wanted.collect();
        let mut memory: Vec<Vec<u8>> =
            wanted.iter().map(|(_, meta, _)| vec![0; meta.nbytes() as usize]).collect();
        let mut targets: Vec<Target<'_>> = wanted
            .iter()
            .zip(&mut memory)
            .map(|((name, meta, place), bytes)| Target {
                fqn: (*name).into(),
                shard_spec: Some(place.clone()),
                meta: meta.clone(),
                memory: bytes.into(),
            })
            .collect();
        let report = store.get_state_dict_into(&key, &mut targets, &GetOptions::default()).unwrap();
        let expected = shapes
            .iter()
            .flat_map(|(_, shape)| local_shards(&global(*shape), shape, &readers, rank, &rows));
        for (shard, bytes) in expected.zip(&memory) {
            assert!(shard.tensor().view().contiguous_bytes().unwrap() == bytes, "rank {rank}");
        }
        let (received, needed) = (report.bytes_received, report.bytes_needed);
        assert!(received * 10 <= needed * 11, "rank {rank}: {received} bytes for {needed}");
    }
}
