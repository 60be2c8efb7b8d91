use indexmap::IndexMap;
use tssd_format::TensorMeta;

/// Of tensors in the order of their model, those that together have at most so many bytes. A layer stays whole
/// or is left out. What does not fit any more is left out, and what comes after it may still fit.
///
/// # Errors
///
/// If no layer fits, with the size of the smallest one.
pub(crate) fn cut<T>(
    tensors: Vec<(String, T)>,
    size: Option<u64>,
    meta: impl Fn(&T) -> &TensorMeta,
) -> Result<Vec<(String, T)>, String> {
    let Some(size) = size else { return Ok(tensors) };
    let has_layers = tensors.iter().any(|(name, _)| layer(name).is_some());
    let (mut left, mut smallest) = (size, None);
    let (mut kept, mut is_enough) = (Vec::new(), false);
    for unit in units(tensors) {
        let wanted = unit.iter().map(|(_, tensor)| meta(tensor).nbytes()).sum();
        let counts = !has_layers || layer(&unit[0].0).is_some();
        if counts {
            smallest = Some(smallest.map_or(wanted, |smallest: u64| smallest.min(wanted)));
        }
        if wanted <= left {
            left -= wanted;
            is_enough |= counts;
            kept.extend(unit);
        }
    }
    let smallest = smallest.unwrap_or(0);
    let refusal = || format!("nothing fits in {size} bytes: the smallest layer has {smallest}");
    is_enough.then_some(kept).ok_or_else(refusal)
}

/// The tensors of each layer, at the place of its first one, and each other tensor alone.
fn units<T>(tensors: Vec<(String, T)>) -> Vec<Vec<(String, T)>> {
    let mut units: IndexMap<Result<u64, String>, Vec<(String, T)>> = IndexMap::new();
    for (name, tensor) in tensors {
        let unit = layer(&name).ok_or_else(|| name.clone());
        units.entry(unit).or_default().push((name, tensor));
    }
    units.into_values().collect()
}

/// The number of the layer that a name is in.
fn layer(name: &str) -> Option<u64> {
    let mut words = name.split('.');
    words.find(|word| *word == "layers")?;
    let number = words.next()?.parse().ok()?;
    words.next().map(|_| number)
}

#[cfg(test)]
mod tests {
    use tssd_format::Dtype;

    use super::*;

    fn cut_to(size: u64, names: &[(&str, u64)]) -> Result<Vec<String>, String> {
        let meta = |bytes: u64| TensorMeta::new(Dtype::Uint8, &[bytes]).unwrap();
        let tensors =
            names.iter().map(|(name, bytes)| ((*name).to_owned(), meta(*bytes))).collect();
        let kept = cut(tensors, Some(size), |meta| meta)?;
        Ok(kept.into_iter().map(|(name, _)| name).collect())
    }

    const MODEL: [(&str, u64); 5] =
        [("embed", 10), ("layers.0.a", 5), ("layers.1.a", 20), ("layers.0.b", 5), ("norm", 1)];

    #[test]
    fn layers_stay_whole() {
        for (size, kept) in [
            (41, vec!["embed", "layers.0.a", "layers.0.b", "layers.1.a", "norm"]),
            (40, vec!["embed", "layers.0.a", "layers.0.b", "layers.1.a"]),
            (39, vec!["embed", "layers.0.a", "layers.0.b", "norm"]),
        ] {
            assert_eq!(cut_to(size, &MODEL).unwrap(), kept, "{size}");
        }
        assert_eq!(cut_to(1, &[("a", 2), ("b", 1)]).unwrap(), ["b"]);
    }

    #[test]
    fn a_layer_at_least_must_fit() {
        let refusal = cut_to(19, &MODEL).unwrap_err();
        assert_eq!(refusal, "nothing fits in 19 bytes: the smallest layer has 10");
    }
}
