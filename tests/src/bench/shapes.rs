use serde::Deserialize;
use tssd_format::{Dtype, TensorMeta};

use super::options::{Options, exit_with_error};
use crate::bench::truncate::truncate_model;

#[derive(Deserialize)]
struct Table {
    dtype: String,
    layers: u64,
    experts: u64,
    tensors: Vec<Row>,
}

/// A tensor name, its shape, and the range of layers that have it.
#[derive(Clone, Deserialize)]
#[serde(untagged)]
enum Row {
    Everywhere(String, Vec<u64>),
    Layers(String, Vec<u64>, [u64; 2]),
}

impl Row {
    fn name(&self) -> &str {
        let (Self::Everywhere(name, _) | Self::Layers(name, ..)) = self;
        name
    }

    fn shape(&self) -> &[u64] {
        let (Self::Everywhere(_, shape) | Self::Layers(_, shape, _)) = self;
        shape
    }

    fn is_per_layer(&self) -> bool {
        self.name().contains("{layer}")
    }

    fn applies_to(&self, layer: u64) -> bool {
        match self {
            Self::Everywhere(..) => true,
            Self::Layers(.., [first, end]) => (*first..*end).contains(&layer),
        }
    }
}

/// Returns names and shapes of all tensors of a model in `tests/shapes.json`, by layer.
///
/// Each expert is a tensor of its own.
///
/// # Errors
///
/// If no model has this name. The error lists all names.
pub(crate) fn shapes(name: &str) -> Result<Vec<(String, TensorMeta)>, String> {
    let table = Table::load(name)?;
    let experts = |(name, shape): (String, Vec<u64>)| {
        if !name.contains("{expert}") {
            return vec![(name, shape)];
        }
        (0..table.experts)
            .map(|expert| (name.replace("{expert}", &expert.to_string()), shape.clone()))
            .collect()
    };
    Ok(table.metas(table.rows().into_iter().flat_map(experts)))
}

/// Returns the name of the model of the command line, and the names and shapes of its tensors.
pub fn shapes_of(options: &Options) -> (String, Vec<(String, TensorMeta)>) {
    let Some(name) = options.model.strip_prefix("shape:") else {
        exit_with_error("this suite takes shapes: --model shape:NAME")
    };
    let shapes = shapes(name).and_then(|shapes| truncate_model(shapes, options.size, |meta| meta));
    (name.to_owned(), shapes.unwrap_or_else(|error| exit_with_error(&error)))
}

/// Returns names and shapes with all experts of a layer as one tensor, as in training.
///
/// # Panics
///
/// If no model has this name.
pub fn stacked_shapes(name: &str) -> Vec<(String, TensorMeta)> {
    let table = Table::load(name).unwrap();
    let stack = |(name, mut shape): (String, Vec<u64>)| {
        if name.contains("{expert}.") {
            shape.insert(0, table.experts);
        }
        (name.replace("{expert}.", ""), shape)
    };
    table.metas(table.rows().into_iter().map(stack))
}

impl Table {
    fn load(name: &str) -> Result<Self, String> {
        let text = include_str!("../../shapes.json");
        let mut tables: serde_json::Map<String, serde_json::Value> =
            serde_json::from_str(text).unwrap();
        let Some(table) = tables.remove(name) else {
            let names: Vec<&str> = tables.keys().map(String::as_str).collect();
            return Err(format!("there is no shape {name:?}, only {}", names.join(", ")));
        };
        Ok(serde_json::from_value(table).unwrap())
    }

    /// Returns all rows. At the first row of a layer, the rows of all layers are inserted.
    fn rows(&self) -> Vec<(String, Vec<u64>)> {
        let mut rows = Vec::new();
        let mut layers = 0..self.layers;
        for row in &self.tensors {
            if !row.is_per_layer() {
                rows.push((row.name().to_owned(), row.shape().to_vec()));
                continue;
            }
            for layer in layers.by_ref() {
                for row in
                    self.tensors.iter().filter(|row| row.is_per_layer() && row.applies_to(layer))
                {
                    let name = row.name().replace("{layer}", &layer.to_string());
                    rows.push((name, row.shape().to_vec()));
                }
            }
        }
        rows
    }

    fn metas(&self, rows: impl Iterator<Item = (String, Vec<u64>)>) -> Vec<(String, TensorMeta)> {
        let dtype = Dtype::from_name(&self.dtype).unwrap();
        rows.map(|(name, shape)| (name, TensorMeta::new(dtype, &shape).unwrap())).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::{TensorMeta, shapes, stacked_shapes};

    fn nbytes(tensors: &[(String, TensorMeta)]) -> u64 {
        tensors.iter().map(|(_, meta)| meta.nbytes()).sum()
    }

    /// The numbers of tensors and parameters are those of the published models.
    #[test]
    fn shapes_match_published_model_sizes() {
        for (name, tensors, parameters) in [
            ("qwen3-0.6b", 310, 596_049_920),
            ("qwen3-4b", 398, 4_022_468_096),
            ("qwen3-8b", 399, 8_190_735_360),
            ("qwen3-30b", 18_867, 30_532_122_624),
        ] {
            let shapes = shapes(name).unwrap();
            assert_eq!(shapes.len(), tensors, "{name}");
            assert_eq!(nbytes(&shapes), 2 * parameters, "{name}");
        }
        let whole = nbytes(&shapes("kimi-k2").unwrap());
        assert_eq!(whole, nbytes(&stacked_shapes("kimi-k2")));
        assert!((2_040_000_000_000..2_070_000_000_000).contains(&whole), "{whole}");
    }
}
