//! Read plans compared with element-wise copying.

use arbitrary::Unstructured;
use tssd_format::{
    Dtype, ErrorKind, Region, ShardSpec, TensorMeta, TensorReference, TensorSlice, numel,
};
use tssd_store::plan::{RegionRequest, TensorLeaf, plan};

/// Checks a plan that the input describes.
///
/// The input gives a shape, its split into boxes, missing boxes, strides of the stored tensors and
/// of the wanted one, and a wanted box.
pub(super) fn check(data: &[u8]) {
    let _ = try_check(&mut Unstructured::new(data));
}

fn try_check(u: &mut Unstructured<'_>) -> arbitrary::Result<()> {
    let rank = u.int_in_range(0..=3)?;
    let shape: Vec<u64> =
        (0..rank).map(|_| u.int_in_range(0..=6)).collect::<arbitrary::Result<_>>()?;
    let mut boxes = vec![Region::whole(&shape)];
    for _ in 0..u.int_in_range(0..=6)? {
        split_box(u, &mut boxes)?;
    }
    let mut stored = Vec::new();
    let mut regions = Vec::new();
    for region in boxes {
        if u.ratio(1, 8)? {
            continue;
        }
        let meta = strided_meta(u, region.shape())?;
        let storage_index = u32::try_from(stored.len()).expect("a few");
        let is_empty = region.is_empty();
        let offset = if is_empty { 0 } else { u64::from(u.int_in_range(0..=3_u8)?) * 4 };
        let slice =
            TensorSlice::new(region.offsets(), region.shape(), &shape).expect("it is inside");
        stored.push(TensorReference {
            meta,
            storage: (!is_empty).then_some(storage_index),
            byte_offset: offset,
            shard_spec: Some(ShardSpec::new(slice)),
        });
        regions.push(region);
    }
    let wanted = sub_box(u, &Region::whole(&shape))?;
    let target = strided_meta(u, wanted.shape())?;
    compare(&shape, &stored, &regions, &wanted, &target);
    Ok(())
}

/// Splits one of the boxes in two.
fn split_box(u: &mut Unstructured<'_>, boxes: &mut Vec<Region>) -> arbitrary::Result<()> {
    let which = u.choose_index(boxes.len())?;
    let whole = boxes[which].clone();
    if whole.shape().is_empty() {
        return Ok(());
    }
    let dim = u.choose_index(whole.shape().len())?;
    let at = u.int_in_range(0..=whole.shape()[dim])?;
    let part = |from: u64, len: u64| {
        let (mut offsets, mut shape) = (whole.offsets().to_vec(), whole.shape().to_vec());
        offsets[dim] += from;
        shape[dim] = len;
        Region::new(&offsets, &shape)
    };
    let (left, right) = (part(0, at), part(at, whole.shape()[dim] - at));
    boxes[which] = left.expect("it is inside");
    boxes.push(right.expect("it is inside"));
    Ok(())
}

fn sub_box(u: &mut Unstructured<'_>, whole: &Region) -> arbitrary::Result<Region> {
    let mut offsets = Vec::new();
    let mut shape = Vec::new();
    for size in whole.shape() {
        let from = u.int_in_range(0..=*size)?;
        offsets.push(from);
        shape.push(u.int_in_range(0..=size - from)?);
    }
    Ok(Region::new(&offsets, &shape).expect("it is inside"))
}

/// Generates a tensor of this shape, with any order of dimensions in memory, and gaps.
fn strided_meta(u: &mut Unstructured<'_>, shape: &[u64]) -> arbitrary::Result<TensorMeta> {
    let meta = TensorMeta::new(Dtype::Uint32, shape).expect("it is small");
    if u.ratio(1, 2)? {
        return Ok(meta);
    }
    let mut dims: Vec<usize> = (0..shape.len()).collect();
    let mut strides = vec![1; shape.len()];
    let mut stride = 1;
    while !dims.is_empty() {
        let dim = dims.swap_remove(u.choose_index(dims.len())?);
        strides[dim] = stride;
        stride *= shape[dim].max(1) + u.int_in_range(0..=1)?;
    }
    Ok(meta.with_strides(&strides).expect("it is small"))
}

/// Returns the value of an element of the global tensor.
fn element_value(shape: &[u64], index: &[u64]) -> u32 {
    let number = shape.iter().zip(index).fold(0, |number, (size, at)| number * size + at);
    u32::try_from(number + 1).expect("it is small")
}

/// Returns all indexes of a box.
fn indexes(region: &Region) -> Vec<Vec<u64>> {
    let mut all = vec![Vec::new()];
    for (offset, size) in region.offsets().iter().zip(region.shape()) {
        let longer = |index: &Vec<u64>| {
            let index = index.clone();
            (*offset..offset + size).map(move |at| [&index[..], &[at]].concat())
        };
        all = all.iter().flat_map(longer).collect();
    }
    all
}

/// Returns the offset of an element in the memory of its tensor, in elements.
fn element_offset(region: &Region, meta: &TensorMeta, index: &[u64]) -> usize {
    let local = index.iter().zip(region.offsets()).map(|(at, offset)| at - offset);
    let place: u64 = local.zip(meta.strides()).map(|(at, stride)| at * stride).sum();
    usize::try_from(place).expect("it is small")
}

fn zeroed_memory(meta: &TensorMeta) -> Vec<u32> {
    vec![0; usize::try_from(meta.span_bytes() / 4).expect("it is small")]
}

fn compare(
    shape: &[u64],
    stored: &[TensorReference],
    regions: &[Region],
    wanted: &Region,
    target: &TensorMeta,
) {
    let memories: Vec<Vec<u32>> = stored
        .iter()
        .zip(regions)
        .map(|(reference, region)| {
            let mut memory = zeroed_memory(&reference.meta);
            for index in indexes(region) {
                memory[element_offset(region, &reference.meta, &index)] =
                    element_value(shape, &index);
            }
            memory
        })
        .collect();
    let covered = indexes(wanted).iter().all(|index| {
        regions.iter().any(|region| {
            let inside = index.iter().zip(region.offsets()).zip(region.shape());
            inside.into_iter().all(|((at, offset), size)| (*offset..offset + size).contains(at))
        })
    });
    let request =
        RegionRequest { region: wanted.clone(), global_shape: shape.into(), meta: target.clone() };
    let copies = match plan(TensorLeaf::Run(stored), &request) {
        Ok(copies) => copies,
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::Uncovered);
            assert!(!covered || stored.is_empty(), "the stored boxes cover the wanted box");
            return;
        }
    };
    assert!(covered, "the stored boxes do not cover the wanted box");
    let mut filled = zeroed_memory(target);
    let mut moved = 0;
    for copy in copies {
        let storage = copy.storage.own().expect("the leaf is a run");
        let storage_index = usize::try_from(storage).expect("a few");
        let start = copy.source_offset - stored[storage_index].byte_offset;
        copy.runs.for_each(|from, to, bytes| {
            let words = |byte: u64| usize::try_from(byte / 4).expect("it is small");
            let from = words(start + from);
            let to = words(copy.target_offset + to);
            filled[to..to + words(bytes)]
                .copy_from_slice(&memories[storage_index][from..from + words(bytes)]);
            moved += bytes;
        });
    }
    assert_eq!(moved, numel(wanted.shape()) * 4, "each byte is copied once");
    for index in indexes(wanted) {
        assert_eq!(
            filled[element_offset(wanted, target, &index)],
            element_value(shape, &index),
            "{index:?}"
        );
    }
}
