use indexmap::IndexMap;
use tssd_format::TensorMeta;

/// Selects tensors of a model, in order, that have at most `size` bytes in total.
///
/// A layer is selected completely or not at all. After a layer or tensor that does not fit, later
/// ones may still fit.
///
/// # Errors
///
/// If no layer fits. The error names the size of the smallest one.
pub(crate) fn truncate_model<T>(
    tensors: Vec<(String, T)>,
    size: Option<u64>,
    meta: impl Fn(&T) -> &TensorMeta,
) -> Result<Vec<(String, T)>, String> {
    let Some(size) = size else { return Ok(tensors) };
    let has_layers = tensors.iter().any(|(name, _)| layer_number(name).is_some());
    let (mut remaining, mut smallest) = (size, None);
    let (mut kept, mut has_layer) = (Vec::new(), false);
    for group in group_by_layer(tensors) {
        let wanted = group.iter().map(|(_, tensor)| meta(tensor).nbytes()).sum();
        let is_layer = !has_layers || layer_number(&group[0].0).is_some();
        if is_layer {
            smallest = Some(smallest.map_or(wanted, |smallest: u64| smallest.min(wanted)));
        }
        if wanted <= remaining {
            remaining -= wanted;
            has_layer |= is_layer;
            kept.extend(group);
        }
    }
    let smallest = smallest.unwrap_or(0);
    let refusal = || format!("nothing fits in {size} bytes: the smallest layer has {smallest}");
    has_layer.then_some(kept).ok_or_else(refusal)
}

/// Groups the tensors of each layer, at the position of its first one. Each other tensor is a group.
fn group_by_layer<T>(tensors: Vec<(String, T)>) -> Vec<Vec<(String, T)>> {
    let mut groups: IndexMap<Result<u64, String>, Vec<(String, T)>> = IndexMap::new();
    for (name, tensor) in tensors {
        let key = layer_number(&name).ok_or_else(|| name.clone());
        groups.entry(key).or_default().push((name, tensor));
    }
    groups.into_values().collect()
}

/// Returns the number of the layer that a name belongs to.
fn layer_number(name: &str) -> Option<u64> {
    let mut words = name.split('.');
    words.find(|word| *word == "layers")?;
    let number = words.next()?.parse().ok()?;
    words.next().map(|_| number)
}

#[cfg(test)]
mod tests {
    use tssd_format::Dtype;

    use super::*;

    fn cut_names(size: u64, names: &[(&str, u64)]) -> Result<Vec<String>, String> {
        let meta = |bytes: u64| TensorMeta::new(Dtype::Uint8, &[bytes]).unwrap();
        let tensors =
            names.iter().map(|(name, bytes)| ((*name).to_owned(), meta(*bytes))).collect();
        let kept = truncate_model(tensors, Some(size), |meta| meta)?;
        Ok(kept.into_iter().map(|(name, _)| name).collect())
    }

    const MODEL: [(&str, u64); 5] =
        [("embed", 10), ("layers.0.a", 5), ("layers.1.a", 20), ("layers.0.b", 5), ("norm", 1)];

    #[test]
    fn cut_keeps_layers_whole() {
        for (size, kept) in [
            (41, vec!["embed", "layers.0.a", "layers.0.b", "layers.1.a", "norm"]),
            (40, vec!["embed", "layers.0.a", "layers.0.b", "layers.1.a"]),
            (39, vec!["embed", "layers.0.a", "layers.0.b", "norm"]),
        ] {
            assert_eq!(cut_names(size, &MODEL).unwrap(), kept, "{size}");
        }
        assert_eq!(cut_names(1, &[("a", 2), ("b", 1)]).unwrap(), ["b"]);
    }

    #[test]
    fn cut_rejects_a_size_below_the_smallest_layer() {
        let refusal = cut_names(19, &MODEL).unwrap_err();
        assert_eq!(refusal, "nothing fits in 19 bytes: the smallest layer has 10");
    }
}
