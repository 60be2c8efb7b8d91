//! The check that no stored element is NaN or infinite.

use tssd_format::{ObjectPath, Result as FormatResult, StateDict, Tensor, Value};

use crate::error::{Error, ErrorKind, Result};
use crate::io::exec::run_blocking;
use crate::io::parallel;

/// Largest number of tensors that the error names.
const MAX_NAMED: usize = 3;

/// Checks all tensors of a dict, on all cores.
///
/// # Errors
///
/// `Invalid` if an element is NaN or infinite in the dtype in which it is stored. The error names the tensors.
pub(super) async fn check(dict: &StateDict) -> Result<()> {
    let dict = dict.clone();
    run_blocking(move || {
        let mut tensors: Vec<(ObjectPath, &[u64], &Tensor)> = Vec::new();
        for (path, leaf) in dict.leaves() {
            match leaf {
                Value::Tensor(tensor) => tensors.push((path, &[], tensor)),
                Value::Shards(shards) => tensors.extend(
                    shards
                        .iter()
                        .map(|shard| (path.clone(), shard.slice().offsets(), shard.tensor())),
                ),
                _ => {}
            }
        }
        let find = |(path, offsets, tensor): (ObjectPath, &[u64], &Tensor)| {
            let Some(index) = tensor.first_non_finite()? else { return Ok(None) };
            let mut indices = indices(tensor.meta().shape(), index);
            for (index, offset) in indices.iter_mut().zip(offsets) {
                *index += offset;
            }
            FormatResult::Ok(Some(format!("`{}` at {indices:?}", path.fqn())))
        };
        let found = parallel::map(tensors, find);
        let found = found.map_err(|error| Error::from_request("state dict", error))?;
        let found: Vec<String> = found.into_iter().flatten().collect();
        if found.is_empty() {
            return Ok(());
        }
        let others = match found.len().saturating_sub(MAX_NAMED) {
            0 => String::new(),
            others => format!(", and in {others} more tensors"),
        };
        let named = found.iter().take(MAX_NAMED).cloned().collect::<Vec<_>>().join(", ");
        let text = format!("elements are NaN or infinite: the first is in {named}{others}");
        Err(Error::new(ErrorKind::Invalid, text)
            .with_help("look at the step that made them, or put without check_finite"))
    })
    .await
}

/// Returns the indices of an element, one for each dimension, from its row-major index.
fn indices(shape: &[u64], mut index: u64) -> Vec<u64> {
    let mut indices = vec![0; shape.len()];
    for (at, size) in indices.iter_mut().zip(shape).rev() {
        (*at, index) = (index % size, index / size);
    }
    indices
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn indices_are_those_of_row_major_order() {
        assert_eq!(indices(&[2, 3, 4], 23), [1, 2, 3]);
        assert_eq!(indices(&[2, 3, 4], 5), [0, 1, 1]);
        assert_eq!(indices(&[], 0), [0_u64; 0]);
    }
}
