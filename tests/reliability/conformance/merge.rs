//! Merge of the contributions of all writers, element by element.

use std::collections::BTreeMap;

use crate::conformance::types::{Array, Contribution, Dict, Extent};

/// Merges the contributions of all writers into one state dict, if they are compatible.
///
/// Leaves are ordered by writer, then by insertion.
pub(crate) fn merge(parts: &BTreeMap<u32, Option<Contribution>>) -> Option<Dict> {
    let parts: Vec<&Contribution> = parts.values().flatten().collect();
    let lowest = parts.first()?.takes_lowest;
    let leaves = || parts.iter().flat_map(|part| &part.leaves);
    let mut dict = Dict::new();
    for (name, first, extent) in leaves() {
        if dict.iter().all(|(other, _)| other != name) {
            let same_leaf: Vec<_> = leaves().filter(|(other, ..)| other == name).collect();
            let all_equal = same_leaf.iter().all(|(_, array, _)| array == first);
            let array = match extent {
                _ if same_leaf.iter().any(|(.., other)| other != extent) => return None,
                Extent::Slice => merge_slices(&same_leaf)?,
                Extent::Whole if lowest || all_equal => first.clone(),
                Extent::Whole => return None,
            };
            dict.push((name.clone(), array));
        }
    }
    parts.iter().all(|part| part.takes_lowest == lowest).then_some(dict)
}

/// Merges the slices of one array, if they cover it exactly once.
///
/// Slices of the same box are replicas. Slices of different boxes must not overlap, and no element
/// may be missing.
fn merge_slices(slices: &[&(String, Array, Extent)]) -> Option<Array> {
    let first = &slices[0].1;
    let mut boxes: Vec<&BTreeMap<_, _>> = Vec::new();
    for (_, Array { kind, shape, elements }, _) in slices {
        if (*kind, *shape) != (first.kind, first.shape) {
            return None;
        }
        if boxes.iter().all(|other| !other.keys().eq(elements.keys())) {
            boxes.push(elements);
        }
    }
    let count: usize = boxes.iter().map(|elements| elements.len()).sum();
    let elements: BTreeMap<_, _> = boxes.into_iter().flatten().map(|(at, it)| (*at, *it)).collect();
    let all = usize::try_from(first.shape.0 * first.shape.1).expect("small");
    (count == all && elements.len() == all).then_some(Array { elements, ..first.clone() })
}
