//! Text of plain leaves, as Python prints them.

use tssd_format::{AttrValue, Dtype, Value};

use crate::size::Size;

/// Longest text of a value, in characters. Longer text is truncated.
const TEXT_MAX_CHARS: usize = 60;

/// Returns the type of a leaf, and its value on one line.
pub(crate) fn repr(value: &Value) -> (&'static str, String) {
    match value {
        Value::None => ("None", String::new()),
        Value::Bool(true) => ("bool", "True".into()),
        Value::Bool(false) => ("bool", "False".into()),
        Value::Int(int) => ("int", truncate(&int.to_string())),
        Value::Float(float) => ("float", float.to_string()),
        Value::Complex(re, im) => ("complex", format!("({re}, {im}j)")),
        Value::Str(text) => ("str", truncate(&format!("{text:?}"))),
        Value::Bytes(bytes) => ("bytes", size_text(bytes)),
        Value::Dtype(Dtype::Other(dtype)) => ("dtype", dtype.name().to_owned()),
        Value::Dtype(dtype) => ("dtype", format!("torch.{dtype}")),
        Value::Size(sizes) => ("size", format!("torch.Size({sizes:?})")),
        Value::Device(name) => ("device", name.to_string()),
        Value::Opaque { media, bytes } => ("opaque", format!("{media}, {}", size_text(bytes))),
        Value::Tagged(tag, plain) => (tag.class().name(), repr(plain).1),
        Value::Tensor(tensor) => ("tensor", tensor.meta().dtype().to_string()),
        Value::Shards(shards) => ("shards", shards.len().to_string()),
        _ => ("container", String::new()),
    }
}

/// Returns an attribute as text on one line.
pub(crate) fn attr_repr(value: &AttrValue) -> String {
    match value {
        AttrValue::Int(int) => int.to_string(),
        AttrValue::Text(text) => truncate(&format!("{text:?}")),
        AttrValue::Bytes(bytes) => size_text(bytes),
    }
}

/// Returns text in quotes on one line, truncated like other values.
pub(crate) fn quote(text: &str) -> String {
    truncate(&format!("{text:?}"))
}

fn size_text(bytes: &[u8]) -> String {
    Size(u64::try_from(bytes.len()).unwrap_or(u64::MAX)).to_string()
}

fn truncate(text: &str) -> String {
    match text.char_indices().nth(TEXT_MAX_CHARS) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}
