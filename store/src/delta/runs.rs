//! Changes of a part of an archive, applied to runs of its bytes.

use std::ops::Range;

use tssd_format::{Change, DeltaDecoder, ElementWidth, Error as FormatError};

use crate::convert::{to_u64, to_usize};

/// A part of an archive as the difference from another archive.
pub(crate) struct PartDelta<'a> {
    /// Where the part is in both archives.
    pub(crate) bytes: &'a Range<u64>,
    pub(crate) width: ElementWidth,
    /// A delta chunk of one class.
    pub(crate) chunk: &'a [u8],
}

/// Bytes of an archive, and where they are in a buffer.
pub(crate) struct Run {
    pub(crate) bytes: Range<u64>,
    pub(crate) at: usize,
}

/// Sorts runs. Returns false if some overlap.
pub(crate) fn sort_runs(runs: &mut [Run]) -> bool {
    runs.sort_unstable_by_key(|run| run.bytes.start);
    runs.windows(2).all(|pair| pair[0].bytes.end <= pair[1].bytes.start)
}

/// Returns the runs that contain bytes of a range. They are in ascending order.
fn overlapping<'r>(runs: &'r [Run], range: &Range<u64>) -> &'r [Run] {
    let first = runs.partition_point(|run| run.bytes.end <= range.start);
    let end = runs.partition_point(|run| run.bytes.start < range.end);
    &runs[first.min(end)..end]
}

/// Applies the difference of a part of an archive to those of its bytes that are in runs.
///
/// The runs are in ascending order. Returns false if only a part of a changed element is in a run: some bytes may be
/// changed then.
///
/// # Errors
///
/// As [`DeltaDecoder::for_each_change`].
pub(crate) fn apply(
    decoder: &mut DeltaDecoder,
    part: &PartDelta<'_>,
    runs: &[Run],
    buffer: &mut [u8],
) -> Result<bool, FormatError> {
    let PartDelta { bytes, width, chunk } = *part;
    let mut runs = overlapping(runs, bytes);
    if runs.is_empty() {
        return Ok(true);
    }
    let mut are_whole = true;
    decoder.for_each_change(chunk, width, to_usize(bytes.end - bytes.start), |change| {
        are_whole &= apply_change(change, bytes.start, width.bytes(), &mut runs, buffer);
    })?;
    Ok(are_whole)
}

/// Makes a change in the bytes of runs. Returns false if only a part of an element is in a run.
///
/// Removes the runs before the change.
fn apply_change(
    change: Change<'_>,
    part_start: u64,
    width: usize,
    runs: &mut &[Run],
    buffer: &mut [u8],
) -> bool {
    let (position, len) = match change {
        Change::Listed { position, .. } => (position, width),
        Change::Dense { position, bytes } => (position, bytes.len()),
    };
    let start = part_start + to_u64(position * width);
    let changed = start..start + to_u64(len);
    while let [first, rest @ ..] = runs
        && first.bytes.end <= changed.start
    {
        *runs = rest;
    }
    for run in runs.iter().take_while(|run| run.bytes.start < changed.end) {
        let common = changed.start.max(run.bytes.start)..changed.end.min(run.bytes.end);
        let at = run.at + to_usize(common.start - run.bytes.start);
        let target = &mut buffer[at..at + to_usize(common.end - common.start)];
        match change {
            Change::Dense { bytes, .. } => {
                let from = to_usize(common.start - changed.start);
                target.copy_from_slice(&bytes[from..from + target.len()]);
            }
            Change::Listed { .. } if target.len() != width => return false,
            Change::Listed { difference, .. } => {
                let mut element = [0; 4];
                element[..width].copy_from_slice(target);
                let result = u32::from_le_bytes(element).wrapping_add(difference);
                target.copy_from_slice(&result.to_le_bytes()[..width]);
            }
        }
    }
    true
}
