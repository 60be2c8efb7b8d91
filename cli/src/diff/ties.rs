//! Groups of tensors that share bytes.

use tssd_format::TensorReference;

/// Returns for each tensor the first tensor of its group, and its byte distance from that tensor.
///
/// A group consists of tensors that share bytes, directly or through other tensors of the group. The
/// distance is negative if the tensor begins before the first one. A tensor that shares no bytes is
/// a group of its own.
pub(super) fn groups(tensors: &[&TensorReference]) -> Vec<(usize, i128)> {
    let mut groups: Vec<(usize, i128)> = (0..tensors.len()).map(|at| (at, 0)).collect();
    let mut order: Vec<usize> =
        (0..tensors.len()).filter(|at| tensors[*at].storage.is_some()).collect();
    order.sort_by_key(|at| (tensors[*at].storage, tensors[*at].byte_offset));
    let mut remaining = order.as_slice();
    while let Some(&start) = remaining.first() {
        let mut end = 0;
        let overlaps = |at: &&usize| {
            let each = tensors[**at];
            let is_in_range = **at == start || each.byte_offset < end;
            end = end.max(each.byte_offset + each.meta.span_bytes());
            is_in_range && each.storage == tensors[start].storage
        };
        let len = remaining.iter().take_while(overlaps).count();
        let (group, after_group) = remaining.split_at(len);
        let first = group.iter().copied().min().unwrap_or(start);
        for &at in group {
            let distance =
                i128::from(tensors[at].byte_offset) - i128::from(tensors[first].byte_offset);
            groups[at] = (first, distance);
        }
        remaining = after_group;
    }
    groups
}
