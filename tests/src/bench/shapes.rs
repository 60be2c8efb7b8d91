use std::path::Path;

use serde::Deserialize;
use tssd_format::{Dtype, TensorMeta};

/// The names and shapes of all tensors of a model that people have: `tests/shapes.json`.
pub struct Shapes {
    /// In the order of the layers.
    pub tensors: Vec<(String, TensorMeta)>,
}

#[derive(Deserialize)]
struct Table {
    dtype: String,
    layers: u64,
    experts: u64,
    tensors: Vec<Row>,
}

/// A name, a shape, and the layers that have it: from one to before another.
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

    fn is_in(&self, layer: u64) -> bool {
        match self {
            Self::Everywhere(..) => true,
            Self::Layers(.., [first, end]) => (*first..*end).contains(&layer),
        }
    }
}

impl Shapes {
    /// Those of the model of this name, each expert a tensor of its own. Of a model with more bytes than
    /// `size`, the last layers are left out.
    pub fn of(name: &str, size: Option<u64>) -> Self {
        let table = Table::of(name);
        let experts = table.experts;
        Self::of_table(&table, size, |name, shape| {
            if !name.contains("{expert}") {
                return vec![(name, shape)];
            }
            (0..experts)
                .map(|expert| (name.replace("{expert}", &expert.to_string()), shape.clone()))
                .collect()
        })
    }

    /// The same with all experts of a layer as one tensor, as who trains them has them.
    pub fn stacked(name: &str) -> Self {
        let table = Table::of(name);
        let experts = table.experts;
        Self::of_table(&table, None, |name, mut shape| {
            if name.contains("{expert}.") {
                shape.insert(0, experts);
            }
            vec![(name.replace("{expert}.", ""), shape)]
        })
    }

    fn of_table(
        table: &Table,
        size: Option<u64>,
        expand: impl Fn(String, Vec<u64>) -> Vec<(String, Vec<u64>)>,
    ) -> Self {
        let dtype = Dtype::from_name(&table.dtype).unwrap();
        let meta =
            |(name, shape): (String, Vec<u64>)| (name, TensorMeta::new(dtype, &shape).unwrap());
        let is_layer = |row: &&Row| row.name().contains("{layer}");
        let first = table.tensors.iter().take_while(|row| !is_layer(row));
        let last =
            table.tensors.iter().skip_while(|row| !is_layer(row)).filter(|row| !is_layer(row));
        let outer = |row: &Row| meta((row.name().to_owned(), row.shape().to_vec()));
        let mut tensors: Vec<_> = first.map(outer).collect();
        let last: Vec<_> = last.map(outer).collect();
        let mut bytes = nbytes(&tensors) + nbytes(&last);
        for layer in 0..table.layers {
            let rows = table.tensors.iter().filter(is_layer).filter(|row| row.is_in(layer));
            let of_layer: Vec<_> = rows
                .flat_map(|row| {
                    let name = row.name().replace("{layer}", &layer.to_string());
                    expand(name, row.shape().to_vec())
                })
                .map(meta)
                .collect();
            bytes += nbytes(&of_layer);
            if size.is_some_and(|size| bytes > size) {
                break;
            }
            tensors.extend(of_layer);
        }
        tensors.extend(last);
        Self { tensors }
    }
}

fn nbytes(tensors: &[(String, TensorMeta)]) -> u64 {
    tensors.iter().map(|(_, meta)| meta.nbytes()).sum()
}

impl Table {
    fn of(name: &str) -> Self {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("shapes.json");
        let text = std::fs::read_to_string(path).unwrap();
        let mut tables: serde_json::Map<String, serde_json::Value> =
            serde_json::from_str(&text).unwrap();
        let Some(table) = tables.remove(name) else {
            panic!("tests/shapes.json has no {name:?}");
        };
        serde_json::from_value(table).unwrap()
    }
}

#[cfg(test)]
mod tests {
    use super::{Shapes, nbytes};

    /// The numbers of tensors and parameters that the models are published with.
    #[test]
    fn models_are_as_large_as_they_are() {
        for (name, tensors, parameters) in [
            ("qwen3-0.6b", 310, 596_049_920),
            ("qwen3-4b", 398, 4_022_468_096),
            ("qwen3-30b", 18_867, 30_532_122_624),
        ] {
            let shapes = Shapes::of(name, None);
            assert_eq!(shapes.tensors.len(), tensors, "{name}");
            assert_eq!(nbytes(&shapes.tensors), 2 * parameters, "{name}");
        }
        let whole = nbytes(&Shapes::of("kimi-k2", None).tensors);
        assert_eq!(whole, nbytes(&Shapes::stacked("kimi-k2").tensors));
        assert!((2_040_000_000_000..2_070_000_000_000).contains(&whole), "{whole}");
    }

    #[test]
    fn a_size_leaves_out_layers() {
        let cut = Shapes::of("qwen3-0.6b", Some(600_000_000));
        assert!((400_000_000..=600_000_000).contains(&nbytes(&cut.tensors)));
        assert_eq!(cut.tensors.last().unwrap().0, "model.norm.weight");
    }
}
