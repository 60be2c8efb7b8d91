use std::collections::BTreeMap;
use std::fmt::Display;
use std::hint::black_box;
use std::path::Path;

use bytes::Bytes;
use half::bf16;
use tssd_format::{Dtype, StateDict, Storage, Tensor, TensorMeta, Value};

use super::options::{Options, exit_with_error};
use super::shapes::shapes;
use crate::bench::truncate::truncate_model;

/// A state dict for measurements.
pub struct Model {
    /// Name in tables, next to the number of tensors.
    pub name: String,
    /// The state dict.
    pub dict: StateDict,
    /// Size of the tensors in bytes.
    pub bytes: u64,
    /// Number of tensors.
    pub tensors: usize,
}

impl Model {
    /// Creates the model of the command line: shapes of a published model, or tensors from files.
    ///
    /// On failure prints an error and ends the process.
    pub fn from_options(options: &Options) -> Self {
        let model = match options.model.strip_prefix("shape:") {
            Some(name) => Self::from_shapes(name, options.size),
            None => Self::read_folder(Path::new(&options.model), options.size),
        };
        model.unwrap_or_else(|error| exit_with_error(&error))
    }

    fn from_shapes(name: &str, size: Option<u64>) -> Result<Self, String> {
        let shapes = truncate_model(shapes(name)?, size, |meta| meta)?;
        Ok(Self::new(name, shapes.into_iter().enumerate().map(distinct_tensor)))
    }

    /// Creates 400 bfloat16 tensors with 0.5 GB in total, as large as the matrices of a small model.
    pub fn four_hundred() -> Self {
        let meta = |number: u64| {
            let rows = 320 + 32 * (number % 21);
            let meta = TensorMeta::new(Dtype::Bfloat16, &[rows, 1049]).unwrap();
            (format!("layers.{number}.weight"), meta)
        };
        Self::new("like a small model", (0..400).map(meta).enumerate().map(distinct_tensor))
    }

    /// Creates tensors of equal size, with this number of bytes in total.
    pub fn uniform(tensors: usize, bytes: u64) -> Self {
        let elements = bytes / 2 / u64::try_from(tensors).unwrap();
        let meta = |number| {
            let meta = TensorMeta::new(Dtype::Bfloat16, &[elements]).unwrap();
            (format!("layers.{number}.weight"), meta)
        };
        Self::new("of one size", (0..tensors).map(meta).enumerate().map(distinct_tensor))
    }

    /// Creates tensors of one element.
    pub fn tiny(tensors: usize) -> Self {
        let tensor = |number| (expert_name(number), Tensor::from_slice(&[1.5_f32], &[1]).unwrap());
        Self::new("tiny", (0..tensors).map(tensor))
    }

    /// Creates tensors of `bytes` bytes each, with the names of experts.
    pub fn experts(tensors: usize, bytes: usize) -> Self {
        let tensor = |number: usize| {
            let seed = number.to_string().len();
            let elements: Vec<u8> =
                (0..bytes).map(|at| u8::try_from((at * 31 + seed) % 251).unwrap()).collect();
            let len = u64::try_from(bytes).unwrap();
            (expert_name(number), Tensor::from_slice(&elements, &[len]).unwrap())
        };
        Self::new("experts", (0..tensors).map(tensor))
    }

    /// Reads the tensors of all safetensors files in a directory.
    fn read_folder(folder: &Path, size: Option<u64>) -> Result<Self, String> {
        let failed = |path: &Path, error: &dyn Display| format!("{}: {error}", path.display());
        let entries = folder.read_dir().map_err(|error| failed(folder, &error))?;
        let mut paths: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
        paths.retain(|path| path.extension().is_some_and(|extension| extension == "safetensors"));
        paths.sort();
        let mut tensors = Vec::new();
        for path in &paths {
            let file = std::fs::read(path).map_err(|error| failed(path, &error))?;
            let imported = tssd_format::safetensors::import(file);
            let (dict, _) = imported.map_err(|error| failed(path, &error))?;
            for (path, leaf) in dict.leaves() {
                let Value::Tensor(tensor) = leaf else { continue };
                tensors.push((path.fqn(), tensor.clone()));
            }
        }
        if tensors.is_empty() {
            return Err(failed(folder, &"no tensors in *.safetensors"));
        }
        let tensors = truncate_model(tensors, size, Tensor::meta)?;
        Ok(Self::new(&folder.display().to_string(), tensors.into_iter()))
    }

    fn new(name: &str, tensors: impl Iterator<Item = (String, Tensor)>) -> Self {
        let (mut dict, mut bytes, mut count) = (StateDict::new(), 0, 0);
        for (name, tensor) in tensors {
            bytes += tensor.meta().nbytes();
            count += 1;
            dict.insert(name, tensor);
        }
        Self { name: name.into(), dict, bytes, tensors: count }
    }

    /// Returns the tensors with their fqns.
    pub fn tensors(&self) -> Vec<(String, &Tensor)> {
        let leaves = self.dict.leaves().into_iter();
        leaves
            .map(|(path, leaf)| match leaf {
                Value::Tensor(tensor) => (path.fqn(), tensor),
                _ => unreachable!("all leaves are tensors"),
            })
            .collect()
    }

    /// Compares a state dict with this model.
    ///
    /// # Panics
    ///
    /// If they differ.
    pub fn assert_equals(&self, found: &StateDict) {
        let leaves = found.leaves();
        assert_eq!(leaves.len(), self.tensors);
        let leaves: BTreeMap<String, &Value> =
            leaves.into_iter().map(|(path, leaf)| (path.fqn(), leaf)).collect();
        for (name, tensor) in self.tensors() {
            let Some(Value::Tensor(read)) = leaves.get(&name) else {
                panic!("{name} is not there")
            };
            assert!(
                read.view().elements_equal(&tensor.view()),
                "{name} differs from the put tensor"
            );
        }
    }

    /// Compares contiguous bytes of all tensors with this model.
    ///
    /// # Panics
    ///
    /// If they differ.
    pub fn assert_bytes_equal(&self, mut found: &[u8]) {
        for (name, tensor) in self.tensors() {
            let wanted = tensor.view().contiguous_bytes().unwrap();
            let (read, rest) = found.split_at(wanted.len());
            assert!(read == wanted, "{name} differs from the put tensor");
            found = rest;
        }
    }
}

/// Creates a tensor whose words all differ.
fn distinct_tensor((number, (name, meta)): (usize, (String, TensorMeta))) -> (String, Tensor) {
    let len = usize::try_from(meta.nbytes()).unwrap();
    // Aligned to 64 bytes, as torch does.
    let mut memory = vec![0_u8; len + 64];
    let start = memory.as_ptr().align_offset(64);
    let seed = (number as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    for (at, word) in memory[start..start + len].chunks_mut(8).enumerate() {
        let bytes =
            seed.wrapping_add((at as u64).wrapping_mul(0xD134_2543_DE82_EF95)).to_le_bytes();
        word.copy_from_slice(&bytes[..word.len()]);
    }
    let bytes = Bytes::from(memory).slice(start..start + len);
    (name, Tensor::new(meta, Storage::from(bytes), 0).unwrap())
}

/// Returns the name of a tensor of a mixture of experts.
pub fn expert_name(number: usize) -> String {
    let projection = ["down", "gate", "up"][number % 3];
    let (layer, expert) = (number / 768, number / 3 % 256);
    format!("model.layers.{layer}.mlp.experts.{expert}.{projection}_proj.weight")
}

/// Returns targets for reading the tensors into memory, one after another.
pub fn targets<'a>(model: &Model, mut memory: &'a mut [u8]) -> Vec<tssd_store::Target<'a>> {
    let mut targets = Vec::new();
    for (fqn, tensor) in model.tensors() {
        let meta = tensor.meta().clone();
        let (bytes, rest) = memory.split_at_mut(usize::try_from(meta.nbytes()).unwrap());
        memory = rest;
        targets.push(tssd_store::Target { fqn, shard_spec: None, meta, memory: bytes.into() });
    }
    targets
}

/// Reads every word.
pub fn sum_words(bytes: &[u8]) {
    let (words, _) = bytes.as_chunks::<8>();
    black_box(words.iter().fold(0_u64, |sum, word| sum.wrapping_add(u64::from_le_bytes(*word))));
}

/// Returns normally distributed numbers of deviation 0.02, as weights have.
///
/// The Box-Muller transform makes two of two uniform numbers.
pub fn normal_bf16(count: usize) -> Vec<bf16> {
    let mut state = 1_u64;
    let mut uniform = || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        // In (0, 1].
        let upper = u32::try_from(state >> 32).unwrap();
        (f64::from(upper) + 1.0) / 4_294_967_296.0
    };
    let mut numbers = Vec::with_capacity(count);
    while numbers.len() < count {
        let (radius, angle) =
            (0.02 * (-2.0 * uniform().ln()).sqrt(), std::f64::consts::TAU * uniform());
        numbers.extend([angle.cos(), angle.sin()].map(|part| bf16::from_f64(radius * part)));
    }
    numbers.truncate(count);
    numbers
}
