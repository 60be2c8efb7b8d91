//! A matrix of 32-bit words that ranks put in one layout, and get in another one.

use tssd_format::{DeviceMesh, Dtype, Placement, StateDict, TensorMeta};
use tssd_store::blocking::Store;
use tssd_store::{GetOptions, GetReport, JobId, Key, PutOptions, Target};
use tssd_tests::sharding::{counting_elements, local_meta, local_places, local_shards};

/// A version with one tensor, whose elements are consecutive numbers.
pub(crate) struct ShardedMatrix {
    key: Key,
    shape: [u64; 2],
    global: Vec<u32>,
}

impl ShardedMatrix {
    pub(crate) fn new(key: &str, shape: [u64; 2]) -> Self {
        Self { key: Key::new(key).unwrap(), shape, global: counting_elements(&shape, 1) }
    }

    /// Puts the shards of all ranks of a mesh.
    pub(crate) fn put(&self, store: &Store, mesh: &DeviceMesh, placements: &[Placement]) {
        for rank in ranks(mesh) {
            let mut dict = StateDict::new();
            for shard in local_shards(&self.global, &self.shape, mesh, rank, placements) {
                dict.insert("weight", shard);
            }
            let options = PutOptions {
                version: Some(1),
                writer: Some(rank),
                job: Some(JobId("bench".into())),
                ..PutOptions::default()
            };
            store.put_state_dict(&self.key, &dict, &options).unwrap();
        }
    }

    /// Gets the shards of one rank of a mesh, and compares them.
    pub(crate) fn get(
        &self,
        store: &Store,
        mesh: &DeviceMesh,
        rank: u32,
        placements: &[Placement],
        options: &GetOptions,
    ) -> GetReport {
        let places = local_places(&self.shape, mesh, rank, placements);
        let metas: Vec<TensorMeta> =
            places.iter().map(|place| local_meta(Dtype::Uint32, place)).collect();
        let mut memory: Vec<Vec<u8>> =
            metas.iter().map(|meta| vec![0; usize::try_from(meta.nbytes()).unwrap()]).collect();
        let mut targets: Vec<Target<'_>> = places
            .into_iter()
            .zip(metas)
            .zip(&mut memory)
            .map(|((place, meta), bytes)| Target {
                fqn: "weight".into(),
                shard_spec: Some(place),
                meta,
                memory: bytes.into(),
            })
            .collect();
        let report = store.get_state_dict_into(&self.key, &mut targets, options).unwrap();
        let shards = local_shards(&self.global, &self.shape, mesh, rank, placements);
        for (shard, bytes) in shards.iter().zip(&memory) {
            assert!(
                shard.tensor().view().contiguous_bytes().unwrap() == bytes,
                "rank {rank} of {mesh:?}"
            );
        }
        report
    }
}

/// Returns the ranks of a mesh.
pub(crate) fn ranks(mesh: &DeviceMesh) -> std::ops::Range<u32> {
    0..u32::try_from(mesh.shape().iter().product::<u64>()).unwrap()
}
