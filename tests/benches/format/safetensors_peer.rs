//! The models in the format of safetensors.

use std::collections::BTreeMap;

use safetensors::tensor::TensorView;
use tssd_format::{Dtype, Tensor};
use tssd_tests::bench::Model;

/// Returns the tensors as input for safetensors.
pub(crate) fn views(model: &Model) -> BTreeMap<String, TensorView<'_>> {
    fn view((name, tensor): (String, &Tensor)) -> (String, TensorView<'_>) {
        let dtype = match tensor.meta().dtype() {
            Dtype::Bfloat16 => safetensors::Dtype::BF16,
            Dtype::Float32 => safetensors::Dtype::F32,
            Dtype::Uint8 => safetensors::Dtype::U8,
            other => panic!("the benches have no {other}"),
        };
        let shape = tensor.meta().shape().iter();
        let shape = shape.map(|size| usize::try_from(*size).unwrap()).collect();
        let bytes = tensor.view().contiguous_bytes().unwrap();
        (name, TensorView::new(dtype, shape, bytes).unwrap())
    }
    model.tensors().into_iter().map(view).collect()
}

/// Returns the model as a safetensors file.
pub(crate) fn encoded(model: &Model) -> Vec<u8> {
    safetensors::serialize(views(model), None).unwrap()
}
