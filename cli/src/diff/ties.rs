//! Which tensors share bytes.

use tssd_format::TensorReference;

/// For each tensor the first one that it is tied to, directly or through others, which may be itself;
/// and how many bytes behind or before that one it begins.
pub(super) fn groups(tensors: &[&TensorReference]) -> Vec<(usize, i128)> {
    let mut groups: Vec<(usize, i128)> = (0..tensors.len()).map(|at| (at, 0)).collect();
    let mut order: Vec<usize> =
        (0..tensors.len()).filter(|at| tensors[*at].storage.is_some()).collect();
    order.sort_by_key(|at| (tensors[*at].storage, tensors[*at].byte_offset));
    let mut rest = order.as_slice();
    while let Some(&start) = rest.first() {
        let mut end = 0;
        let overlaps = |at: &&usize| {
            let each = tensors[**at];
            let reached = **at == start || each.byte_offset < end;
            end = end.max(each.byte_offset + each.meta.span_bytes());
            reached && each.storage == tensors[start].storage
        };
        let len = rest.iter().take_while(overlaps).count();
        let (group, others) = rest.split_at(len);
        let first = group.iter().copied().min().unwrap_or(start);
        for &at in group {
            let apart =
                i128::from(tensors[at].byte_offset) - i128::from(tensors[first].byte_offset);
            groups[at] = (first, apart);
        }
        rest = others;
    }
    groups
}
