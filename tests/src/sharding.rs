//! Global tensors that are split into shards and merged, one element at a time.
//!
//! This is the oracle of all resharding.

use tssd_format::{
    DeviceMesh, Dtype, Placement, Region, Shard, ShardSpec, Tensor, TensorMeta, TensorSlice,
};

/// Returns the elements of a global `u32` tensor, which identify their positions.
pub fn counting_elements(shape: &[u64], seed: u32) -> Vec<u32> {
    let numel: u64 = shape.iter().product();
    (0..numel).map(|at| seed.wrapping_mul(0x9E37_79B9).wrapping_add(low_32_bits(at))).collect()
}

fn low_32_bits(value: u64) -> u32 {
    u32::try_from(value & 0xFFFF_FFFF).expect("32 bits")
}

/// Returns the elements of a box of a global tensor, one by one.
pub fn region_elements(global: &[u32], shape: &[u64], region: &Region) -> Vec<u32> {
    let mut elements = Vec::new();
    let mut index = vec![0_u64; shape.len()];
    if region.is_empty() {
        return elements;
    }
    loop {
        let at = index
            .iter()
            .zip(region.offsets())
            .zip(shape)
            .fold(0, |at, ((index, offset), size)| at * size + index + offset);
        elements.push(global[usize::try_from(at).expect("in memory")]);
        let mut dim = shape.len();
        loop {
            if dim == 0 {
                return elements;
            }
            dim -= 1;
            index[dim] += 1;
            if index[dim] < region.shape()[dim] {
                break;
            }
            index[dim] = 0;
        }
    }
}

/// Returns a box of a global tensor as a tensor.
pub fn region_tensor(global: &[u32], shape: &[u64], region: &Region) -> Tensor {
    Tensor::from_slice(&region_elements(global, shape, region), region.shape()).expect("as many")
}

/// Returns dtype and shape of the local tensor of a shard.
///
/// # Panics
///
/// If there is no such tensor.
pub fn local_meta(dtype: Dtype, place: &ShardSpec) -> TensorMeta {
    TensorMeta::new(dtype, place.slice().local_shape()).expect("a shape of the dtype")
}

/// Returns the shards of a global tensor that a rank holds.
///
/// # Panics
///
/// If the placements do not fit.
pub fn local_shards(
    global: &[u32],
    shape: &[u64],
    mesh: &DeviceMesh,
    rank: u32,
    placements: &[Placement],
) -> Vec<Shard> {
    let slices = TensorSlice::from_placements(shape, mesh, rank, placements).expect("they fit");
    let shard = |slice: TensorSlice| {
        let tensor = region_tensor(global, shape, slice.region());
        let place = ShardSpec::new(slice).with_mesh(mesh.clone()).expect("the same mesh");
        Shard::new(tensor, place.with_placements(placements).expect("they fit"))
            .expect("the same shape")
    };
    slices.into_iter().map(shard).collect()
}

/// Returns the places of the shards of a global tensor that a rank wants.
///
/// # Panics
///
/// If the placements do not fit.
pub fn local_places(
    shape: &[u64],
    mesh: &DeviceMesh,
    rank: u32,
    placements: &[Placement],
) -> Vec<ShardSpec> {
    let slices = TensorSlice::from_placements(shape, mesh, rank, placements).expect("they fit");
    slices.into_iter().map(ShardSpec::new).collect()
}

/// Returns the elements of a `u32` tensor in row-major order.
///
/// # Panics
///
/// If the tensor has another dtype.
pub fn to_u32s(tensor: &Tensor) -> Vec<u32> {
    assert_eq!(tensor.meta().dtype(), Dtype::Uint32);
    let bytes = tensor.view().to_contiguous(1 << 30).expect("small");
    bytes.chunks(4).map(|each| u32::from_le_bytes(each.try_into().expect("4 bytes"))).collect()
}

/// Returns metadata of a `u32` tensor with gaps in memory: each stride is twice the contiguous one.
///
/// # Panics
///
/// If the shape is too large.
pub fn strided_meta(shape: &[u64]) -> TensorMeta {
    let strides: Vec<u64> =
        tssd_format::row_major_strides(shape).into_iter().map(|stride| stride * 2).collect();
    let meta = TensorMeta::new(Dtype::Uint32, shape).expect("small");
    meta.with_strides(&strides).expect("one for each dimension")
}
