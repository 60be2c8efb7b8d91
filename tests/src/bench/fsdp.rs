use tssd_format::{DeviceMesh, Placement, ShardSpec, TensorMeta, TensorReference, TensorSlice};
use tssd_store::plan::{RegionCopy, RegionRequest, TensorLeaf, plan};

use crate::sharding::local_meta;

/// A model that writers hold sharded by rows (FSDP), and that tensor-parallel ranks (TP) read.
pub struct Fsdp {
    stored: Vec<Vec<TensorReference>>,
    tensors: Vec<TensorMeta>,
    dims: Vec<Option<u32>>,
    readers: DeviceMesh,
}

impl Fsdp {
    /// Shards tensors over writers. Their names determine how TP shards them over readers.
    pub fn new(tensors: &[(String, TensorMeta)], writers: u32, readers: u64) -> Self {
        let mesh = DeviceMesh::from_shape(&[u64::from(writers)]).unwrap();
        let mut stored = Vec::new();
        for (number, (_, meta)) in (0..).zip(tensors) {
            let of_rank = |rank: u32| {
                let place = shard_place(meta, &mesh, rank, Placement::Shard { dim: 0 });
                TensorReference {
                    meta: local_meta(meta.dtype(), &place),
                    storage: Some(rank * tensor_count(tensors) + number),
                    byte_offset: 0,
                    shard_spec: Some(place),
                }
            };
            let is_nonempty = |slice: &TensorReference| slice.meta.numel() > 0;
            stored.push((0..writers).map(of_rank).filter(is_nonempty).collect());
        }
        Self {
            stored,
            tensors: tensors.iter().map(|(_, meta)| meta.clone()).collect(),
            dims: tensors.iter().map(|(name, meta)| tp_dim(name, meta)).collect(),
            readers: DeviceMesh::from_shape(&[readers]).unwrap(),
        }
    }

    /// Returns the number of tensors.
    pub fn tensors(&self) -> usize {
        self.tensors.len()
    }

    /// Plans all copies of one reader.
    pub fn plan(&self, reader: u32) -> Vec<RegionCopy> {
        let mut copies = Vec::new();
        for ((stored, meta), dim) in self.stored.iter().zip(&self.tensors).zip(&self.dims) {
            let place = self.wanted(meta, *dim, reader);
            let wanted = RegionRequest {
                region: place.slice().region().clone(),
                global_shape: meta.shape().into(),
                meta: local_meta(meta.dtype(), &place),
            };
            copies.extend(plan(TensorLeaf::Run(stored), &wanted).unwrap());
        }
        copies
    }

    /// Returns the slice of a tensor that one reader needs.
    fn wanted(&self, meta: &TensorMeta, dim: Option<u32>, reader: u32) -> ShardSpec {
        let placement = dim.map_or(Placement::Replicate, |dim| Placement::Shard { dim });
        shard_place(meta, &self.readers, reader, placement)
    }

    /// Checks that the copies of a reader have as many bytes of each tensor as the reader needs.
    ///
    /// # Panics
    ///
    /// If they do not.
    pub fn assert_complete(&self, reader: u32, copies: &[RegionCopy]) {
        let mut found = vec![0; self.tensors()];
        for copy in copies {
            let storage = copy.storage.own().unwrap();
            let number = usize::try_from(storage).unwrap() % self.tensors();
            found[number] += copy.runs.total_bytes();
        }
        for (number, (meta, dim)) in self.tensors.iter().zip(&self.dims).enumerate() {
            let place = self.wanted(meta, *dim, reader);
            assert_eq!(found[number], local_meta(meta.dtype(), &place).nbytes(), "tensor {number}");
        }
    }
}

fn tensor_count(tensors: &[(String, TensorMeta)]) -> u32 {
    u32::try_from(tensors.len()).unwrap()
}

/// Returns the dimension that TP shards: columns of matrices that project back, rows of others.
///
/// Experts are sharded within each expert. Vectors are replicated.
fn tp_dim(name: &str, meta: &TensorMeta) -> Option<u32> {
    let matrix = u32::try_from(meta.shape().len().checked_sub(2)?).unwrap();
    let is_narrow = name.contains("down_proj") || name.contains("o_proj");
    Some(if is_narrow { matrix + 1 } else { matrix })
}

fn shard_place(meta: &TensorMeta, mesh: &DeviceMesh, rank: u32, placement: Placement) -> ShardSpec {
    let slices = TensorSlice::from_placements(meta.shape(), mesh, rank, &[placement]);
    ShardSpec::new(slices.unwrap().remove(0))
}
