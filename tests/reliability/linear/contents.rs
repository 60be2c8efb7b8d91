//! What is put: every element says of which key, put and tensor it is, so that contents tell which put they
//! are, and a mixture of two shows.

use tssd_format::{StateDict, Tensor, Value};

/// How many tensors a state dict has.
const TENSORS: u64 = 4;

/// Elements of a tensor: a few, so that it travels in a message; or so many that it needs a segment.
fn elements(put: u32) -> usize {
    if put.is_multiple_of(32) { 10_000 } else { 48 }
}

fn word(key: u8, put: u32, tensor: u64) -> i64 {
    let word = u64::from(put) << 16 | u64::from(key) << 8 | tensor;
    word.wrapping_mul(0x9E37_79B9_7F4A_7C15).cast_signed()
}

fn name(tensor: u64) -> String {
    format!("layer.{tensor}")
}

/// The state dict of a put.
pub(crate) fn dict(key: u8, put: u32) -> StateDict {
    part(key, put, 0)
}

/// What one of several writers puts.
pub(crate) fn part(key: u8, put: u32, writer: u32) -> StateDict {
    let mut dict = StateDict::new();
    dict.insert("put", i64::from(put));
    let first = u64::from(writer) * TENSORS;
    for tensor in first..first + TENSORS {
        let elements = vec![word(key, put, tensor); elements(put)];
        let shape = [elements.len() as u64];
        dict.insert(name(tensor), Tensor::from_slice(&elements, &shape).unwrap());
    }
    dict
}

/// Which put of a key a state dict is; none if it is not one whole put of that key, by so many writers.
pub(crate) fn put_of(key: u8, of: u32, dict: &StateDict) -> Option<u32> {
    let Ok(Value::Int(put)) = dict.leaf("put") else { return None };
    let put = u32::try_from(put.as_i64()?).ok()?;
    let is_whole = |tensor| {
        let Ok(Value::Tensor(stored)) = dict.leaf(&name(tensor)) else { return false };
        let (bytes, word) = (stored.view().span(), word(key, put, tensor).to_le_bytes());
        // The first element, and each other one as the one before it.
        bytes.len() == 8 * elements(put)
            && bytes[..8] == word
            && bytes[8..] == bytes[..bytes.len() - 8]
    };
    (0..u64::from(of) * TENSORS).all(is_whole).then_some(put)
}
