//! Plain leaves as Python would print them.

use tssd_format::{AttrValue, Value};

use crate::size::Size;

/// Longer text is cut.
const TEXT_MAX: usize = 60;

/// The type of a leaf, and its value on one line.
pub(crate) fn repr(value: &Value) -> (&'static str, String) {
    match value {
        Value::None => ("None", String::new()),
        Value::Bool(true) => ("bool", "True".into()),
        Value::Bool(false) => ("bool", "False".into()),
        Value::Int(int) => ("int", cut(&int.to_string())),
        Value::Float(float) => ("float", float.to_string()),
        Value::Complex(re, im) => ("complex", format!("({re}, {im}j)")),
        Value::Str(text) => ("str", cut(&format!("{text:?}"))),
        Value::Bytes(bytes) => ("bytes", sized(bytes)),
        Value::Dtype(dtype) => ("dtype", format!("torch.{dtype}")),
        Value::Size(sizes) => ("size", format!("torch.Size({sizes:?})")),
        Value::Device(name) => ("device", name.to_string()),
        Value::Opaque { media, bytes } => ("opaque", format!("{media}, {}", sized(bytes))),
        Value::Tensor(tensor) => ("tensor", tensor.meta().dtype().to_string()),
        Value::Shards(shards) => ("shards", shards.len().to_string()),
        _ => ("container", String::new()),
    }
}

/// An attribute on one line.
pub(crate) fn of_attr(value: &AttrValue) -> String {
    match value {
        AttrValue::Int(int) => int.to_string(),
        AttrValue::Text(text) => cut(&format!("{text:?}")),
        AttrValue::Bytes(bytes) => sized(bytes),
    }
}

/// Text in quotes on one line.
pub(crate) fn quoted(text: &str) -> String {
    cut(&format!("{text:?}"))
}

fn sized(bytes: &[u8]) -> String {
    Size(u64::try_from(bytes.len()).unwrap_or(u64::MAX)).to_string()
}

fn cut(text: &str) -> String {
    match text.char_indices().nth(TEXT_MAX) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}
