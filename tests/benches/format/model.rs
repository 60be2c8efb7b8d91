//! State dicts to measure with, and the same as safetensors has them.

use std::collections::BTreeMap;

use bytes::Bytes;
use safetensors::tensor::TensorView;
use tssd_format::{Dtype, StateDict, Tensor, TorchStoreStateDict, Value};

/// The name of a tensor of a mixture of experts.
pub(crate) fn name(number: usize) -> String {
    let projection = ["down", "gate", "up"][number % 3];
    let (layer, expert) = (number / 768, number / 3 % 256);
    format!("model.layers.{layer}.mlp.experts.{expert}.{projection}_proj.weight")
}

/// This many `uint8` tensors of that many bytes.
pub(crate) fn model(tensors: usize, bytes: usize) -> StateDict {
    let mut dict = StateDict::new();
    for number in 0..tensors {
        let seed = number.to_string().len();
        let elements: Vec<u8> =
            (0..bytes).map(|at| u8::try_from((at * 31 + seed) % 251).unwrap()).collect();
        let len = u64::try_from(bytes).unwrap();
        dict.insert(name(number), Tensor::from_slice(&elements, &[len]).unwrap());
    }
    dict
}

/// The leaves by fqn.
pub(crate) fn tensors(dict: &StateDict) -> Vec<(String, &Tensor)> {
    let leaves = dict.leaves().into_iter();
    leaves
        .map(|(path, leaf)| match leaf {
            Value::Tensor(tensor) => (path.fqn(), tensor),
            _ => unreachable!("all leaves are tensors"),
        })
        .collect()
}

/// Its archive.
pub(crate) fn encoded(dict: &StateDict) -> Bytes {
    TorchStoreStateDict::from_state_dict(dict).unwrap().as_bytes().clone()
}

/// What safetensors takes.
pub(crate) fn views(dict: &StateDict) -> BTreeMap<String, TensorView<'_>> {
    tensors(dict)
        .into_iter()
        .map(|(name, tensor)| {
            let dtype = match tensor.meta().dtype() {
                Dtype::Float32 => safetensors::Dtype::F32,
                _ => safetensors::Dtype::U8,
            };
            let shape = tensor.meta().shape().iter();
            let shape = shape.map(|size| usize::try_from(*size).unwrap()).collect();
            (name, TensorView::new(dtype, shape, tensor.storage().bytes()).unwrap())
        })
        .collect()
}

/// Its file of safetensors.
pub(crate) fn safetensors_file(dict: &StateDict) -> Vec<u8> {
    safetensors::serialize(views(dict), None).unwrap()
}
