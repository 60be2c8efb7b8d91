//! Whether the parts of all writers fit together, element by element.

use std::collections::BTreeMap;

use super::words::{Array, Dict, Extent, Part};

/// The parts of all writers as one state dict, by writer and then by insertion, if they fit together.
pub(crate) fn merged(parts: &BTreeMap<u32, Option<Part>>) -> Option<Dict> {
    let parts: Vec<&Part> = parts.values().flatten().collect();
    let lowest = parts.first()?.lowest;
    if parts.iter().any(|part| part.lowest != lowest) {
        return None;
    }
    let leaves = || parts.iter().flat_map(|part| &part.leaves);
    let mut dict = Dict::new();
    for (name, ..) in leaves() {
        if dict.iter().all(|(other, _)| other != name) {
            let held: Vec<_> = leaves().filter(|(other, ..)| other == name).collect();
            let arrays: Vec<&Array> = held.iter().map(|(_, array, _)| array).collect();
            let whole = held.iter().filter(|(.., extent)| *extent == Extent::Whole).count();
            let array = match whole {
                0 => tiled(&arrays)?,
                _ if whole < held.len() => return None,
                _ if lowest || arrays.iter().all(|array| *array == arrays[0]) => arrays[0].clone(),
                _ => return None,
            };
            dict.push((name.clone(), array));
        }
    }
    Some(dict)
}

/// Slices of one array put together: equal ones are replicas, others have no element in common, and no
/// element is missing.
fn tiled(slices: &[&Array]) -> Option<Array> {
    let mut whole = Array { elements: BTreeMap::new(), ..slices[0].clone() };
    for (at, slice) in slices.iter().enumerate() {
        let is_same = |other: &&&Array| other.elements.keys().eq(slice.elements.keys());
        if (slice.kind, slice.shape) != (whole.kind, whole.shape) {
            return None;
        }
        if slices[..at].iter().any(|other| is_same(&other)) {
            continue;
        }
        if slice.elements.keys().any(|place| whole.elements.contains_key(place)) {
            return None;
        }
        whole.elements.extend(&slice.elements);
    }
    let all = usize::try_from(whole.shape.0 * whole.shape.1).expect("small");
    (whole.elements.len() == all).then_some(whole)
}
