//! The model of the demo: the state dict of a training job, of any size and version.

use std::fmt;
use std::path::Path;

use tssd_format::{Dict, Dtype, StateDict, Storage, Tensor, TensorMeta, Value};

use crate::document::Document;
use crate::exit::Exit;
use crate::failure::{Failure, Result};
use crate::input::display_input_path;
use crate::size::{Size, pluralize};

/// Value of `head_dim` in all Qwen3 models, in elements.
const HEAD_DIM: u64 = 128;

/// Number of experts, small enough for uneven shards: 4 trainers get 3, 3, 3 and 1.
const EXPERTS: u64 = 10;

/// Number of parameters with optimizer state. The state of all would be four times the model.
const OPTIMIZED_PARAMETERS: usize = 4;

/// Parameters by name, with the source of their elements.
#[derive(Debug)]
pub(super) struct Model {
    title: String,
    parameters: Vec<Parameter>,
}

#[derive(Debug)]
struct Parameter {
    name: String,
    meta: TensorMeta,
    content: Content,
}

#[derive(Debug)]
enum Content {
    /// Pseudorandom elements.
    Generated,
    /// A storage of a file, and the byte offset of the tensor in it.
    FromFile(Storage, u64),
    /// The same tensor as the parameter with this index.
    TiedTo(usize),
}

impl Model {
    /// Creates a model with the shapes of Qwen3 and about this size.
    ///
    /// The hidden size is a power of two, the number of layers follows from it, and the size of the
    /// vocabulary makes up the rest.
    pub(super) fn of_size(size: Size) -> Result<Self> {
        let parameters = size.0 / 2;
        // Attention has 6 h^2 parameters and the MLP 9 h^2, as in Qwen3-0.6B.
        let layer = |hidden: u64| 15 * hidden * hidden;
        let fits = |hidden: &u64| 10 * layer(*hidden) <= parameters;
        let hidden = (6..14).map(|log2| 1_u64 << log2).rev().find(fits).unwrap_or(64);
        let layers = (parameters * 4 / 5 / layer(hidden)).clamp(1, 64);
        let rest = parameters.saturating_sub(layers * layer(hidden));
        // Odd, so that an even number of ranks does not divide it.
        let vocab = (rest / hidden) | 1;
        if vocab < 16 || size.0 > 1 << 40 {
            let message = format_args!("a model of {size} makes no demo");
            return Err(Failure::new(Exit::Usage, message).help("--size is from 300kB to 1TiB"));
        }
        let mut model = Self {
            title: format!("Qwen3-shaped model: {layers} layers, hidden {hidden}, vocab {vocab}"),
            parameters: Vec::new(),
        };
        let bf16 = Dtype::Bfloat16;
        model.add("model.embed_tokens.weight", bf16, &[vocab, hidden])?;
        for layer in 0..layers {
            model.add_layer(&format!("model.layers.{layer}"), hidden)?;
        }
        model.add("model.norm.weight", bf16, &[hidden])?;
        model.add("model.rotary_emb.inv_freq", Dtype::Float32, &[HEAD_DIM / 2])?;
        model.add("lm_head.weight", bf16, &[vocab, hidden])?;
        if let Some(head) = model.parameters.last_mut() {
            head.content = Content::TiedTo(0);
        }
        Ok(model)
    }

    fn add_layer(&mut self, layer: &str, hidden: u64) -> Result<()> {
        let (bf16, inner) = (Dtype::Bfloat16, 3 * hidden);
        let (queries, keys) = (2 * hidden, hidden);
        for (name, shape) in [
            ("input_layernorm", &[hidden][..]),
            ("self_attn.q_proj", &[queries, hidden]),
            ("self_attn.k_proj", &[keys, hidden]),
            ("self_attn.v_proj", &[keys, hidden]),
            ("self_attn.o_proj", &[hidden, queries]),
            ("self_attn.q_norm", &[HEAD_DIM]),
            ("self_attn.k_norm", &[HEAD_DIM]),
            ("post_attention_layernorm", &[hidden]),
            ("mlp.gate_proj", &[inner, hidden]),
            ("mlp.up_proj", &[inner, hidden]),
            ("mlp.down_proj", &[hidden, inner]),
        ] {
            self.add(&format!("{layer}.{name}.weight"), bf16, shape)?;
        }
        // The router is fp32 while all other parameters are bf16: mixed dtypes break packed buckets.
        self.add(&format!("{layer}.mlp.gate.weight"), Dtype::Float32, &[EXPERTS, hidden])
    }

    fn add(&mut self, name: &str, dtype: Dtype, shape: &[u64]) -> Result<()> {
        let meta = new_meta(dtype, shape)?;
        self.parameters.push(Parameter {
            name: name.to_owned(),
            meta,
            content: Content::Generated,
        });
        Ok(())
    }

    /// Creates a model from the contiguous tensors of a file.
    pub(super) fn from_file(path: &Path) -> Result<Self> {
        let dict = Document::open(path)?.to_state_dict()?;
        let mut parameters: Vec<Parameter> = Vec::new();
        for (path, leaf) in dict.leaves() {
            let Value::Tensor(tensor) = leaf else { continue };
            if !tensor.meta().is_contiguous() {
                continue;
            }
            let content = Content::FromFile(tensor.storage().clone(), tensor.byte_offset());
            parameters.push(Parameter { name: path.fqn(), meta: tensor.meta().clone(), content });
        }
        if parameters.is_empty() {
            let message = format_args!("{} holds no tensors", path.display());
            return Err(Failure::new(Exit::Refused, message).help("name a file with a model"));
        }
        Ok(Self { title: display_input_path(path).display().to_string(), parameters })
    }

    /// Returns the size of all parameters in bytes. Tied parameters count once.
    pub(super) fn bytes(&self) -> u64 {
        let untied =
            self.parameters.iter().filter(|each| !matches!(each.content, Content::TiedTo(_)));
        untied.map(|each| each.meta.nbytes()).sum()
    }

    /// Returns the state dict of a version: the model, the optimizer and the step.
    ///
    /// No tensor is the same in two versions.
    pub(super) fn version(&self, version: u64) -> Result<StateDict> {
        let mut tensors: Vec<Tensor> = Vec::with_capacity(self.parameters.len());
        for (seed, each) in (0..).zip(&self.parameters) {
            let tensor = match &each.content {
                Content::TiedTo(number) => tensors[*number].clone(),
                Content::Generated => generate_tensor(each.meta.clone(), seed, version)?,
                Content::FromFile(storage, offset) => {
                    file_tensor_version(&each.meta, storage, *offset, version)?
                }
            };
            tensors.push(tensor);
        }
        let mut model = Dict::new();
        for (each, tensor) in self.parameters.iter().zip(&tensors) {
            model.insert(&*each.name, tensor.clone());
        }
        let mut dict = StateDict::new();
        dict.insert("model", Value::OrderedDict(model));
        dict.insert("optimizer", self.optimizer(version)?);
        dict.insert("step", i64::try_from(version).unwrap_or(i64::MAX));
        Ok(dict)
    }

    /// Returns an optimizer state like that of `torch.optim.AdamW.state_dict()`, with ints as keys.
    fn optimizer(&self, version: u64) -> Result<Dict> {
        let mut state = Dict::new();
        let limit = self.bytes() / 64;
        let candidates = self.parameters.iter().enumerate().filter(|(_, each)| {
            let is_float = matches!(each.meta.dtype(), Dtype::Bfloat16 | Dtype::Float32);
            is_float && each.meta.nbytes() <= limit && !each.name.ends_with("inv_freq")
        });
        let mut indices = Vec::new();
        for (index, each) in candidates.take(OPTIMIZED_PARAMETERS) {
            let index = i64::try_from(index).unwrap_or(i64::MAX);
            let seed = index.unsigned_abs().wrapping_mul(1 << 20);
            let moment = new_meta(Dtype::Float32, each.meta.shape())?;
            let mut entry = Dict::new();
            entry.insert("step", generate_tensor(new_meta(Dtype::Float32, &[])?, 0, version)?);
            entry.insert("exp_avg", generate_tensor(moment.clone(), seed + 1, version)?);
            entry.insert("exp_avg_sq", generate_tensor(moment, seed + 2, version)?);
            state.insert(index, entry);
            indices.push(Value::from(index));
        }
        let mut group = Dict::new();
        group.insert("lr", 3e-4);
        group.insert("betas", Value::Tuple(vec![0.9.into(), 0.95.into()]));
        group.insert("eps", 1e-8);
        group.insert("weight_decay", 0.1);
        group.insert("amsgrad", false);
        group.insert("foreach", Value::None);
        group.insert("params", indices);
        let mut optimizer = Dict::new();
        optimizer.insert("state", state);
        optimizer.insert("param_groups", vec![Value::from(group)]);
        Ok(optimizer)
    }
}

impl fmt::Display for Model {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tied = self.parameters.iter().filter(|each| matches!(each.content, Content::TiedTo(_)));
        let tied = match tied.count() {
            0 => String::new(),
            tied => format!(" ({tied} tied)"),
        };
        let tensors = pluralize(self.parameters.len(), "tensor");
        write!(f, "{}, {tensors}{tied}, {}, and AdamW state", self.title, Size(self.bytes()))
    }
}

fn new_meta(dtype: Dtype, shape: &[u64]) -> Result<TensorMeta> {
    TensorMeta::new(dtype, shape)
        .map_err(|error| Failure::new(Exit::Usage, format_args!("--size is too large: {error}")))
}

/// Allocates memory for a tensor.
///
/// # Errors
///
/// Fails if there is not enough memory.
fn allocate(meta: &TensorMeta) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let len = usize::try_from(meta.nbytes()).unwrap_or(usize::MAX);
    bytes.try_reserve_exact(len).map_err(|_| {
        Failure::new(Exit::Refused, "there is not enough memory for this model")
            .help("a smaller --size needs less: about six times its size in all")
    })?;
    Ok(bytes)
}

fn new_tensor(meta: TensorMeta, bytes: Vec<u8>) -> Result<Tensor> {
    Tensor::new(meta, bytes.into(), 0)
        .map_err(|error| Failure::new(Exit::Refused, format_args!("the model: {error}")))
}

/// Generates a tensor of pseudorandom bits (`SplitMix64`), which are the same in every run.
fn generate_tensor(meta: TensorMeta, seed: u64, version: u64) -> Result<Tensor> {
    let mut bytes = allocate(&meta)?;
    let len = bytes.capacity();
    let mut state = (seed << 8 | version).wrapping_mul(0xD129_0ED9_5B35_4F1B);
    for _ in 0..len.div_ceil(8) {
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut word = state;
        word = (word ^ word >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        word = (word ^ word >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        let word = (word ^ word >> 31).to_le_bytes();
        bytes.extend_from_slice(&word[..(len - bytes.len()).min(8)]);
    }
    new_tensor(meta, bytes)
}

/// Returns the tensor of a file in a version.
///
/// Version 1 has the bytes of the file. In later versions, every byte differs from the file.
fn file_tensor_version(
    meta: &TensorMeta,
    storage: &Storage,
    offset: u64,
    version: u64,
) -> Result<Tensor> {
    let mut bytes = allocate(meta)?;
    let start = usize::try_from(offset).expect("it is in memory");
    let mask = u8::try_from(version - 1).expect("there are few versions");
    let source = storage.bytes().expect("it is in memory");
    let source = source.iter().skip(start).take(bytes.capacity());
    bytes.extend(source.map(|byte| byte ^ mask));
    new_tensor(meta.clone(), bytes)
}
