//! Sharding of the model in the demo: FSDP for trainers, tensor parallel for generators.

use std::sync::Arc;

use tssd_format::{
    DeviceMesh, Dict, ObjectPath, Placement, Region, Result, Shard, ShardSpec, StateDict, Step,
    Storage, Tensor, TensorMeta, TensorSlice, Value,
};

/// Number of ranks that train.
pub(super) const TRAINERS: u32 = 4;
/// Number of ranks that generate.
pub(super) const GENERATORS: u32 = 2;

/// Returns the shards of one trainer: a part of the first dimension of every tensor, as in FSDP.
///
/// The shards are views of the source, which span only their part.
pub(super) fn trainer_shards(whole: &StateDict, rank: u32) -> Result<StateDict> {
    let mesh = mesh_1d(TRAINERS, "fsdp")?;
    StateDict::from_value(shard_value(whole.as_value(), &ObjectPath::root(), &mesh, rank)?)
}

fn shard_value(
    value: &Value,
    path: &ObjectPath,
    mesh: &Arc<DeviceMesh>,
    rank: u32,
) -> Result<Value> {
    let dict = |dict: &Dict| -> Result<Dict> {
        let entry = |(key, value): (&_, &_)| {
            let path = path.clone().step(Step::Key(Clone::clone(key)));
            Ok((Clone::clone(key), shard_value(value, &path, mesh, rank)?))
        };
        dict.iter().map(entry).collect()
    };
    Ok(match value {
        Value::Dict(entries) => Value::Dict(dict(entries)?),
        Value::OrderedDict(entries) => Value::OrderedDict(dict(entries)?),
        Value::Tensor(tensor) if !tensor.meta().shape().is_empty() => {
            // Buffers are replicated on every rank.
            let is_buffer = path.fqn().ends_with("inv_freq");
            let placement =
                if is_buffer { Placement::Replicate } else { Placement::Shard { dim: 0 } };
            let place = shard_place(tensor.meta().shape(), mesh, rank, placement)?;
            let local = slice_tensor(tensor, place.slice().region())?;
            Value::from(Shard::new(local, place)?)
        }
        // Lists and plain values are the same on every rank.
        leaf => leaf.clone(),
    })
}

/// Returns the part of a parameter that one generator reads, as in Megatron and vLLM.
///
/// Returns `None` if the generator reads the whole parameter.
pub(super) fn generator_place(fqn: &str, shape: &[u64], rank: u32) -> Result<Option<ShardSpec>> {
    const COLUMNS: [&str; 7] =
        ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head"];
    const ROWS: [&str; 2] = ["o_proj", "down_proj"];
    let has_suffix =
        |names: &[&str]| names.iter().any(|name| fqn.ends_with(&format!("{name}.weight")));
    let dim = match shape.len() {
        2 if has_suffix(&COLUMNS) => 0,
        2 if has_suffix(&ROWS) => 1,
        _ => return Ok(None),
    };
    shard_place(shape, &mesh_1d(GENERATORS, "tp")?, rank, Placement::Shard { dim }).map(Some)
}

fn mesh_1d(ranks: u32, name: &str) -> Result<Arc<DeviceMesh>> {
    let mesh = DeviceMesh::from_shape(&[ranks.into()])?;
    Ok(Arc::new(mesh.with_dim_names(vec![name.to_owned()])?))
}

fn shard_place(
    shape: &[u64],
    mesh: &Arc<DeviceMesh>,
    rank: u32,
    placement: Placement,
) -> Result<ShardSpec> {
    let placements = [placement];
    let mut slices = TensorSlice::from_placements(shape, mesh, rank, &placements)?;
    let slice = slices.pop().expect("one mesh dimension cuts one box");
    ShardSpec::new(slice).with_mesh(mesh.clone())?.with_placements(placements)
}

/// Returns a region of a tensor, as a view.
pub(super) fn slice_tensor(tensor: &Tensor, region: &Region) -> Result<Tensor> {
    let meta = tensor.meta();
    let local = TensorMeta::new(meta.dtype(), region.shape())?.with_flags(meta.flags());
    if region.is_empty() {
        return Tensor::new(local, Storage::default(), 0);
    }
    let strides = meta.strides();
    let first: u64 = region.offsets().iter().zip(&strides).map(|(at, stride)| at * stride).sum();
    let offset = tensor.byte_offset() + first * meta.dtype().itemsize();
    Tensor::new(local.with_strides(&strides)?, tensor.storage().clone(), offset)
}
