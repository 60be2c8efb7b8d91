use tssd_format::{DeviceMesh, Placement, ShardPlace, TensorMeta, TensorReference, TensorSlice};
use tssd_store::plan::{Copy, Wanted, plan};

use crate::sharding::meta_of;

/// A model whose tensors so many ranks hold by rows (FSDP), and of which so many others want their part (TP).
pub struct Fsdp {
    stored: Vec<Vec<TensorReference>>,
    tensors: Vec<TensorMeta>,
    dims: Vec<Option<u32>>,
    readers: DeviceMesh,
}

impl Fsdp {
    /// Of tensors with these names, by which it is known how TP cuts them.
    pub fn new(tensors: &[(String, TensorMeta)], writers: u32, readers: u64) -> Self {
        let mesh = DeviceMesh::from_shape(&[u64::from(writers)]).unwrap();
        let mut stored = Vec::new();
        for (number, (_, meta)) in (0..).zip(tensors) {
            let of_rank = |rank: u32| {
                let place = place(meta, &mesh, rank, Placement::Shard { dim: 0 });
                TensorReference {
                    meta: meta_of(meta.dtype(), &place),
                    storage: Some(rank * count(tensors) + number),
                    byte_offset: 0,
                    place: Some(place),
                }
            };
            let is_some = |slice: &TensorReference| slice.meta.numel() > 0;
            stored.push((0..writers).map(of_rank).filter(is_some).collect());
        }
        Self {
            stored,
            tensors: tensors.iter().map(|(_, meta)| meta.clone()).collect(),
            dims: tensors.iter().map(|(name, meta)| dim(name, meta)).collect(),
            readers: DeviceMesh::from_shape(&[readers]).unwrap(),
        }
    }

    /// How many tensors there are.
    pub fn tensors(&self) -> usize {
        self.tensors.len()
    }

    /// All that one reader copies.
    pub fn plan(&self, reader: u32) -> Vec<Copy> {
        let mut copies = Vec::new();
        for ((stored, meta), dim) in self.stored.iter().zip(&self.tensors).zip(&self.dims) {
            let place = self.wanted(meta, *dim, reader);
            let wanted = Wanted {
                region: place.slice().region(),
                global_shape: meta.shape().into(),
                meta: meta_of(meta.dtype(), &place),
            };
            copies.extend(plan(stored, &wanted).unwrap());
        }
        copies
    }

    /// What one reader wants of a tensor.
    fn wanted(&self, meta: &TensorMeta, dim: Option<u32>, reader: u32) -> ShardPlace {
        let placement = dim.map_or(Placement::Replicate, |dim| Placement::Shard { dim });
        place(meta, &self.readers, reader, placement)
    }

    /// Compares what one reader copies with what it wants: as many bytes of each tensor.
    ///
    /// # Panics
    ///
    /// If it is not the same.
    pub fn expect_whole(&self, reader: u32, copies: &[Copy]) {
        let mut found = vec![0; self.tensors()];
        for copy in copies {
            let number = usize::try_from(copy.storage).unwrap() % self.tensors();
            found[number] += copy.runs.total_bytes();
        }
        for (number, (meta, dim)) in self.tensors.iter().zip(&self.dims).enumerate() {
            let place = self.wanted(meta, *dim, reader);
            assert_eq!(found[number], meta_of(meta.dtype(), &place).nbytes(), "tensor {number}");
        }
    }
}

fn count(tensors: &[(String, TensorMeta)]) -> u32 {
    u32::try_from(tensors.len()).unwrap()
}

/// What TP cuts: rows of what widens, columns of what narrows again, experts within; vectors stay whole.
fn dim(name: &str, meta: &TensorMeta) -> Option<u32> {
    let matrix = u32::try_from(meta.shape().len().checked_sub(2)?).unwrap();
    let is_narrow = name.contains("down_proj") || name.contains("o_proj");
    Some(if is_narrow { matrix + 1 } else { matrix })
}

fn place(meta: &TensorMeta, mesh: &DeviceMesh, rank: u32, placement: Placement) -> ShardPlace {
    let slices = TensorSlice::from_placements(meta.shape(), mesh, rank, &[placement]);
    ShardPlace::new(slices.unwrap().remove(0))
}
