//! The caller's memory: what may be written, and by how many threads.

use tssd_format::{Error as FormatError, ErrorKind as FormatKind, Region, TensorMeta};

use super::{PART_BYTES, Request, Target, native, wide};
use crate::plan::Wanted;

/// Proves that a target's memory holds its tensor, each element at a place of its own.
pub(super) fn check(target: &Target<'_>) -> tssd_format::Result<()> {
    let meta = &target.meta;
    if meta.numel() > 0 && meta.span_bytes() > wide(target.bytes.len()) {
        return Err(FormatError::new(FormatKind::TargetSize).at(&target.fqn).note(format_args!(
            "{} bytes, needed {}",
            target.bytes.len(),
            meta.span_bytes()
        )));
    }
    if meta.numel() == 0 {
        return Ok(());
    }
    let strides = meta.strides();
    let mut dims: Vec<(u64, u64)> = strides
        .into_iter()
        .zip(meta.shape().iter().copied())
        .filter(|(_, size)| *size > 1)
        .collect();
    dims.sort_unstable();
    let mut reach = 1;
    for (stride, size) in dims {
        if stride < reach {
            return Err(FormatError::new(FormatKind::Overlap).at(&target.fqn).note(format_args!(
                "elements of the target overlap: strides {:?}",
                meta.strides()
            )));
        }
        reach += stride * (size - 1);
    }
    Ok(())
}

/// Cuts a large contiguous request into rows, so that several threads can fill it.
pub(super) fn split<'a, 't>(
    request: Request<'a>,
    target: &'t mut [u8],
    requests: &mut Vec<Request<'a>>,
    targets: &mut Vec<&'t mut [u8]>,
) {
    let wanted = &request.wanted;
    let rows = wanted.meta.shape().first().copied().unwrap_or(1);
    let row_bytes = wanted.meta.nbytes().checked_div(rows).unwrap_or(0);
    if wanted.meta.nbytes() < 2 * PART_BYTES || !wanted.meta.is_contiguous() || rows < 2 {
        requests.push(request);
        targets.push(target);
        return;
    }
    let step = PART_BYTES.div_ceil(row_bytes);
    let mut rest = target;
    let mut row = 0;
    while row < rows {
        let count = step.min(rows - row);
        let mut offsets = wanted.region.offsets().to_vec();
        let mut shape = wanted.region.shape().to_vec();
        offsets[0] += row;
        shape[0] = count;
        let region = Region::new(&offsets, &shape).expect("a part of a region");
        let meta = TensorMeta::new(wanted.meta.dtype(), &shape).expect("a part of a tensor");
        let wanted = Wanted { region, global_shape: wanted.global_shape.clone(), meta };
        requests.push(Request { fqn: request.fqn.clone(), references: request.references, wanted });
        let (part, tail) = std::mem::take(&mut rest).split_at_mut(native(count * row_bytes));
        targets.push(part);
        rest = tail;
        row += count;
    }
}
