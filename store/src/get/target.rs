//! The caller's memory: what may be written.

use tssd_format::{Error, ErrorKind, Result, TensorMeta};

use super::{Target, wide};

/// Proves that a target's memory holds its tensor.
pub(super) fn expect_room(target: &Target<'_>) -> Result<()> {
    let needed = span(&target.meta);
    if needed <= wide(target.bytes.len()) {
        return Ok(());
    }
    let found = target.bytes.len();
    let note = format_args!("{found} bytes, needed {needed}");
    Err(Error::new(ErrorKind::TargetSize).at(&target.fqn).note(note))
}

/// Proves that each element of a tensor has a place of its own.
pub(super) fn expect_apart(fqn: &str, meta: &TensorMeta) -> Result<()> {
    if meta.is_contiguous() {
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
            let strides = meta.strides();
            let note = format_args!("elements of the target overlap: strides {strides:?}");
            return Err(Error::new(ErrorKind::Overlap).at(fqn).note(note));
        }
        reach += stride * (size - 1);
    }
    Ok(())
}

/// How many bytes a tensor spans.
pub(super) fn span(meta: &TensorMeta) -> u64 {
    if meta.numel() == 0 { 0 } else { meta.span_bytes() }
}
