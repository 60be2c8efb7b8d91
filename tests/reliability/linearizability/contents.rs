//! State dicts in which each element identifies its key, put and tensor.
//!
//! So the contents of a version identify its put, and a mixture of two puts is detected.

use tssd_format::{StateDict, Tensor, Value};

/// Number of tensors of one writer.
const TENSORS: u64 = 4;

/// Returns the number of elements of a tensor.
///
/// Most tensors fit in a message. Every 32nd put needs a segment.
fn element_count(put: u32) -> usize {
    if put.is_multiple_of(32) { 10_000 } else { 48 }
}

fn element_value(key: u8, put: u32, tensor: u64) -> i64 {
    let word = u64::from(put) << 16 | u64::from(key) << 8 | tensor;
    word.wrapping_mul(0x9E37_79B9_7F4A_7C15).cast_signed()
}

fn tensor_name(tensor: u64) -> String {
    format!("layer.{tensor}")
}

/// Returns the state dict of a put.
pub(crate) fn dict(key: u8, put: u32) -> StateDict {
    part(key, put, 0)
}

/// Returns the state dict of one of several writers.
pub(crate) fn part(key: u8, put: u32, writer: u32) -> StateDict {
    let mut dict = StateDict::new();
    dict.insert("put", i64::from(put));
    let first = u64::from(writer) * TENSORS;
    for tensor in first..first + TENSORS {
        let elements = vec![element_value(key, put, tensor); element_count(put)];
        let shape = [elements.len() as u64];
        dict.insert(tensor_name(tensor), Tensor::from_slice(&elements, &shape).unwrap());
    }
    dict
}

/// Returns which put a state dict is. `None` if it is not one complete put of this key.
pub(crate) fn identify_put(key: u8, of: u32, dict: &StateDict) -> Option<u32> {
    let Ok(Value::Int(put)) = dict.leaf("put") else { return None };
    let put = u32::try_from(put.as_i64()?).ok()?;
    let is_whole = |tensor| {
        let Ok(Value::Tensor(stored)) = dict.leaf(&tensor_name(tensor)) else { return false };
        let (bytes, word) = (stored.view().span(), element_value(key, put, tensor).to_le_bytes());
        // The first element is right, and each other element equals the one before it.
        bytes.len() == 8 * element_count(put)
            && bytes[..8] == word
            && bytes[8..] == bytes[..bytes.len() - 8]
    };
    (0..u64::from(of) * TENSORS).all(is_whole).then_some(put)
}
