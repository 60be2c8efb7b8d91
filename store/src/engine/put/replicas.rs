//! Removes the bytes of replicas that another writer stores.

use tssd_format::{Region, Result, Shard, StateDict, Storage, Tensor, TensorMeta, Value};

use super::leaves;

/// Replaces each shard whose first replica another writer stores by an empty one.
///
/// The empty shard keeps the dtype, the global shape and the mesh, which the merge compares.
pub(super) fn without_replicas(dict: &StateDict) -> Result<StateDict> {
    leaves::map(dict, |leaf| match leaf {
        Value::Shards(shards) => {
            Ok(Value::Shards(shards.iter().map(primary_shard).collect::<Result<_>>()?))
        }
        other => Ok(other.clone()),
    })
}

fn primary_shard(shard: &Shard) -> Result<Shard> {
    let (place, slice) = (shard.spec(), shard.slice());
    // A tensor without dimensions has no empty region: all writers store its few bytes.
    if place.is_first_replica() || slice.global_shape().is_empty() {
        return Ok(shard.clone());
    }
    let nothing = vec![0; slice.global_shape().len()];
    let meta = shard.tensor().meta();
    let meta = TensorMeta::new(meta.dtype(), &nothing)?.with_flags(meta.flags());
    let empty = place.subregion(&Region::new(&nothing, &nothing)?)?;
    Shard::new(Tensor::new(meta, Storage::default(), 0)?, empty)
}
