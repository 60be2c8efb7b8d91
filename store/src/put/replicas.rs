//! Leaving out what another writer stores.

use tssd_format::{
    Placement, Result, Shard, ShardPlace, StateDict, Storage, Tensor, TensorMeta, TensorSlice,
    Value,
};

use super::leaves;

/// The dict with an empty box in place of every shard whose first replica another writer holds: the
/// leaf stays, with its dtype, global shape and mesh, so that the proof can compare them.
pub(super) fn without_replicas(dict: &StateDict) -> Result<StateDict> {
    leaves::map(dict, |leaf| match leaf {
        Value::Shards(shards) => {
            Ok(Value::Shards(shards.iter().map(primary_shard).collect::<Result<_>>()?))
        }
        other => Ok(other.clone()),
    })
}

fn primary_shard(shard: &Shard) -> Result<Shard> {
    let (place, slice) = (shard.place(), shard.slice());
    let is_replica = match (slice.coordinates(), place.placements()) {
        (Some(coordinates), Some(placements)) => {
            !Placement::is_first_replica(coordinates, placements)
        }
        _ => false,
    };
    // A tensor without dimensions has no empty box; its few bytes are stored by all.
    if !is_replica || slice.global_shape().is_empty() {
        return Ok(shard.clone());
    }
    let shape = vec![0; slice.global_shape().len()];
    let empty = TensorSlice::new(slice.offsets(), &shape, slice.global_shape())?
        .on_mesh(slice.mesh_shape(), slice.coordinates())?;
    let mut empty = ShardPlace::new(empty);
    if let Some(mesh) = place.mesh() {
        empty = empty.on_mesh(mesh.clone())?;
    }
    if let Some(placements) = place.placements() {
        empty = empty.placed(placements)?;
    }
    let meta = shard.tensor().meta();
    let meta = TensorMeta::new(meta.dtype(), &shape)?.with_flags(meta.flags());
    Shard::new(Tensor::new(meta, Storage::default(), 0)?, empty)
}
