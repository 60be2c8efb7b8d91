//! Resharding: what N writers put in one sharding, M readers get in another, element by element.

use std::collections::BTreeMap;
use std::path::Path;

use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use tssd_format::{
    Archive, AttrValue, Compression, DeviceMesh, Dtype, MANIFEST, Placement, Region, ShardPlace,
    StateDict, TensorMeta, TensorReference, TensorSlice, Value,
};
use tssd_store::blocking::Store;
use tssd_store::plan::{Wanted, plan};
use tssd_store::{GetOptions, JobId, Key, PutOptions, Target};
use tssd_tests::command::quick_folder;
use tssd_tests::served::Served;
use tssd_tests::sharding::{counting, elements_of, meta_of, numbers, places_of, shards_of, spread};

/// A mesh, and how a tensor lies on it.
#[derive(Clone, Debug)]
struct Sharding {
    mesh: DeviceMesh,
    placements: Vec<Placement>,
}

/// A mesh of up to so many dimensions of up to so many devices.
fn sharding(rank: usize, most: u64) -> impl Strategy<Value = Sharding> {
    let dim = 0..u32::try_from(rank).expect("small");
    let placement = prop_oneof![
        2 => dim.clone().prop_map(|dim| Placement::Shard { dim }),
        1 => Just(Placement::Replicate),
        1 => (dim, 1_u64..4).prop_map(|(dim, split_factor)| {
            Placement::StridedShard { dim, split_factor }
        }),
    ];
    proptest::collection::vec((1..=most, placement), 1..=most as usize).prop_map(|dims| {
        let (shape, placements): (Vec<u64>, Vec<Placement>) = dims.into_iter().unzip();
        Sharding { mesh: DeviceMesh::from_shape(&shape).expect("small"), placements }
    })
}

/// A global shape with a sharding to put it in and one to get it in.
fn case(most: u64) -> impl Strategy<Value = (Vec<u64>, Sharding, Sharding)> {
    proptest::collection::vec(0_u64..9, 1..4).prop_flat_map(move |shape| {
        let sharding = || sharding(shape.len(), most);
        (Just(shape.clone()), sharding(), sharding())
    })
}

/// The references that a manifest has for a tensor: all boxes of all ranks, replicas once.
fn stored(shape: &[u64], sharding: &Sharding) -> Vec<TensorReference> {
    let mut boxes: BTreeMap<Region, TensorReference> = BTreeMap::new();
    for rank in sharding.mesh.ranks() {
        let slices =
            TensorSlice::from_placements(shape, &sharding.mesh, *rank, &sharding.placements);
        for slice in slices.unwrap() {
            let next = u32::try_from(boxes.len()).unwrap();
            let is_empty = slice.region().is_empty();
            boxes.entry(slice.region()).or_insert_with(|| TensorReference {
                meta: TensorMeta::new(Dtype::Uint32, slice.local_shape()).unwrap(),
                storage: (!is_empty).then_some(next),
                byte_offset: 0,
                place: Some(ShardPlace::new(slice)),
            });
        }
    }
    boxes.into_values().collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    /// Every element of the target comes from its own place in some stored box, once.
    #[test]
    fn plans_are_exact((shape, put, get) in case(3)) {
        let stored = stored(&shape, &put);
        let global = counting(&shape, 1);
        let mut memories: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
        for reference in &stored {
            let region = reference.place.as_ref().unwrap().slice().region();
            if let Some(storage) = reference.storage {
                memories.insert(storage, elements_of(&global, &shape, &region));
            }
        }
        for rank in get.mesh.ranks() {
            for place in places_of(&shape, &get.mesh, *rank, &get.placements) {
                let region = place.slice().region();
                let wanted = Wanted {
                    meta: spread(region.shape()),
                    region: region.clone(),
                    global_shape: shape.clone().into(),
                };
                let copies = plan(&stored, &wanted).unwrap();
                let mut target = vec![None; usize::try_from(wanted.meta.span_bytes()).unwrap() / 4];
                let mut moved = 0;
                for copy in &copies {
                    moved += copy.runs.total_bytes();
                    copy.runs.for_each(|from, to, bytes| {
                        for each in 0..bytes / 4 {
                            let from = usize::try_from(copy.source + from).unwrap() / 4;
                            let to = usize::try_from(copy.target + to).unwrap() / 4;
                            let each = usize::try_from(each).unwrap();
                            let slot = &mut target[to + each];
                            assert!(slot.is_none(), "an element is written twice");
                            *slot = Some(memories[&copy.storage][from + each]);
                        }
                    });
                }
                prop_assert_eq!(moved, region.numel() * 4);
                let mut found = Vec::new();
                let strides = wanted.meta.strides();
                tssd_format::Runs::to_row_major(1, region.shape(), &strides).for_each(|from, _, run| {
                    for each in 0..run {
                        found.push(target[usize::try_from(from + each).unwrap()].unwrap());
                    }
                });
                prop_assert_eq!(found, elements_of(&global, &shape, &region));
            }
        }
    }

    /// A box that is missing is named, whatever is wanted of it.
    #[test]
    fn holes_are_named((shape, put, _) in case(3), lost in any::<prop::sample::Index>()) {
        let mut stored = stored(&shape, &put);
        let lost = stored.remove(lost.index(stored.len()));
        let region = lost.place.unwrap().slice().region();
        prop_assume!(!region.is_empty());
        let wanted = Wanted {
            meta: TensorMeta::new(Dtype::Uint32, &shape).unwrap(),
            region: Region::whole(&shape),
            global_shape: shape.into(),
        };
        let error = plan(&stored, &wanted).unwrap_err();
        prop_assert_eq!(error.kind(), tssd_format::ErrorKind::Uncovered);
        prop_assert!(region.contains(error.region().unwrap()));
    }
}

/// Puts two tensors from all ranks, one thread each.
fn put_all(store: &Store, key: &Key, shape: &[u64], put: &Sharding, seed: u32, job: &str) -> u64 {
    let report = std::thread::scope(|scope| {
        let ranks: Vec<_> = put
            .mesh
            .ranks()
            .iter()
            .map(|rank| {
                scope.spawn(move || {
                    let global = counting(shape, seed);
                    let mut dict = StateDict::new();
                    let shards = shards_of(&global, shape, &put.mesh, *rank, &put.placements);
                    dict.insert("sharded", Value::Shards(shards));
                    dict.insert("step", i64::from(seed));
                    let options = PutOptions {
                        writer: Some(*rank),
                        job: Some(JobId(job.to_owned())),
                        // How a version is stored is no matter to its readers.
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
        assert!(visible >= 1, "the last of them makes the version visible");
        reports.into_iter().next().unwrap()
    });
    report.version
}

/// Everything about what the ranks of a mesh get: as new tensors, and in place.
fn check_get(store: &Store, key: &Key, shape: &[u64], get: &Sharding, seed: u32) {
    let global = counting(shape, seed);
    for rank in get.mesh.ranks() {
        let places = places_of(shape, &get.mesh, *rank, &get.placements);
        let slices = BTreeMap::from([("sharded".to_owned(), places.clone())]);
        let options = GetOptions { slices, ..GetOptions::default() };
        let (dict, report) = store.get_state_dict(key, &options).unwrap();
        assert_eq!(dict.leaf("step").unwrap(), &Value::from(i64::from(seed)));
        let Value::Shards(shards) = dict.leaf("sharded").unwrap() else { panic!("shards") };
        for (shard, place) in shards.iter().zip(&places) {
            let expected = elements_of(&global, shape, &place.slice().region());
            assert_eq!(numbers(shard.tensor()), expected);
        }
        assert_eq!(report.bytes_transferred, report.bytes_needed);
        for place in places {
            let meta = spread(place.slice().local_shape());
            let mut memory = vec![0xEE_u8; usize::try_from(meta.span_bytes()).unwrap()];
            let target = Target {
                fqn: "sharded".to_owned(),
                place: Some(place.clone()),
                meta: meta.clone(),
                memory: (&mut memory).into(),
            };
            let report =
                store.get_state_dict_into(key, &mut [target], &GetOptions::default()).unwrap();
            assert_eq!(report.bytes_transferred, report.bytes_needed);
            assert_eq!(report.bytes_needed, place.slice().region().numel() * 4);
            let filled = tssd_format::Tensor::new(meta, memory.into(), 0).unwrap();
            let expected = elements_of(&global, shape, &place.slice().region());
            assert_eq!(numbers(&filled), expected);
        }
    }
    let whole = store.get(key, "sharded", &GetOptions::default()).unwrap();
    assert_eq!(numbers(&whole), global);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn what_is_put_in_one_sharding_is_got_in_another((shape, put, get) in case(3)) {
        let store = Store::memory().unwrap();
        let key = Key::new("policy").unwrap();
        for seed in 1..3 {
            put_all(&store, &key, &shape, &put, seed, "job");
            check_get(&store, &key, &shape, &get, seed);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn a_directory_does_the_same((shape, put, get) in case(2)) {
        let folder = quick_folder();
        let store = Store::directory(folder.path()).unwrap();
        let key = Key::new("policy").unwrap();
        for seed in 1..3 {
            put_all(&store, &key, &shape, &put, seed, "job");
            // Another process sees what is in the directory and nothing else.
            check_get(&Store::directory(folder.path()).unwrap(), &key, &shape, &get, seed);
        }
    }
}

/// Those of many keys in daemons of their own: what is got in the open is got in ranges.
#[test]
fn daemons_of_other_hosts_do_the_same() {
    let controller = Served::new(1 << 30);
    let keeper = Served::under(&controller);
    let (far, near) = (controller.connect_far(), keeper.connect());
    let mut runner = TestRunner::new(ProptestConfig::with_cases(1000));
    let counted = std::cell::Cell::new(0);
    runner
        .run(&case(3), |(shape, put, get)| {
            counted.set(counted.get() + 1);
            let key = Key::new(format!("policy-{}", counted.get())).unwrap();
            // Every other version is put on the host that does not decide.
            let stores = if counted.get() % 2 == 0 { [&far, &near] } else { [&near, &far] };
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

/// The `tssd.layout` of the one version that a store keeps.
fn recorded_layout(folder: &Path) -> AttrValue {
    let versions = folder.join("policy").read_dir().unwrap();
    let manifests = versions.map(|version| version.unwrap().path().join(MANIFEST));
    let manifests: Vec<_> = manifests.filter(|manifest| manifest.is_file()).collect();
    let [manifest] = &*manifests else { panic!("{manifests:?}") };
    Archive::open(manifest).unwrap().attrs().remove("tssd.layout").unwrap()
}

#[test]
fn an_unchanged_layout_is_planned_once() {
    let shape = [64, 33];
    let folder = quick_folder();
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
    // Another layout under the same key is planned anew, even for those who want the same.
    assert!(layouts[0] == layouts[1] && layouts[1] == layouts[2] && layouts[2] != layouts[3]);
}

/// Each of 20 readers takes a twentieth of what four writers have put, by rows: of matrices as models have them, and of
/// tensors so small that they hardly count. What proves their bytes comes along.
#[cfg(feature = "object")]
#[test]
fn a_slice_out_of_a_bucket_is_little_more_than_its_bytes() {
    let bucket = std::sync::Arc::new(object_store::memory::InMemory::new());
    let store = Store::in_bucket(bucket, "").unwrap();
    let [writers, readers] = [4, 20].map(|ranks| DeviceMesh::from_shape(&[ranks]).unwrap());
    let (rows, key) = ([Placement::Shard { dim: 0 }], Key::new("model").unwrap());
    let shapes =
        [("down", [1020, 1024]), ("up", [3071, 512]), ("embed", [8003, 1024]), ("bias", [77, 1])];
    let global = |[rows, columns]: [u64; 2]| counting(&[rows, columns], 1);
    for rank in 0..4 {
        let mut dict = StateDict::new();
        for (name, shape) in shapes {
            for shard in shards_of(&global(shape), &shape, &writers, rank, &rows) {
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
            let places = places_of(shape, &readers, rank, &rows).into_iter();
            places.map(move |place| (*name, meta_of(Dtype::Uint32, &place), place))
        });
        let wanted: Vec<_> = wanted.collect();
        let mut memory: Vec<Vec<u8>> =
            wanted.iter().map(|(_, meta, _)| vec![0; meta.nbytes() as usize]).collect();
        let mut targets: Vec<Target<'_>> = wanted
            .iter()
            .zip(&mut memory)
            .map(|((name, meta, place), bytes)| Target {
                fqn: (*name).into(),
                place: Some(place.clone()),
                meta: meta.clone(),
                memory: bytes.into(),
            })
            .collect();
        let report = store.get_state_dict_into(&key, &mut targets, &GetOptions::default()).unwrap();
        let expected = shapes
            .iter()
            .flat_map(|(_, shape)| shards_of(&global(*shape), shape, &readers, rank, &rows));
        for (shard, bytes) in expected.zip(&memory) {
            assert!(shard.tensor().view().contiguous().unwrap() == bytes, "rank {rank}");
        }
        let (received, needed) = (report.bytes_received, report.bytes_needed);
        assert!(received * 10 <= needed * 11, "rank {rank}: {received} bytes for {needed}");
    }
}
