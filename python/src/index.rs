//! Indices of Python, and their part that is read: ints, slices and `...`.

use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyEllipsis, PyInt, PySlice, PyTuple};
use tssd_format::Region;

use crate::error::Result;

/// An index of ints, slices and `...`.
///
/// If it has no `...`, one is appended, so that the result is never a scalar.
pub(crate) struct BasicIndex<'py>(Bound<'py, PyTuple>);

impl<'py> BasicIndex<'py> {
    /// Splits an index into a basic index to read, and the index that is applied to what was read.
    ///
    /// The second is `None` if the first is the whole index. `shape` is the shape of the tensor, in elements. See
    /// `_index.split`.
    ///
    /// # Errors
    ///
    /// `IndexError` and `TypeError` of Python.
    pub(crate) fn split(
        index: &Bound<'py, PyAny>,
        shape: &[u64],
    ) -> Result<(Self, Option<Bound<'py, PyAny>>)> {
        let py = index.py();
        let parts: Vec<Bound<'py, PyAny>> = match index.cast::<PyTuple>() {
            Ok(tuple) => tuple.iter().collect(),
            Err(_) => vec![index.clone()],
        };
        if parts.iter().all(is_basic) {
            return Ok((Self::new(py, parts)?, None));
        }
        let arguments = (index, PyTuple::new(py, shape)?);
        let split = py.import("tssd._index")?.call_method1("split", arguments)?;
        let (parts, rest): (Vec<Bound<'py, PyAny>>, _) = split.extract()?;
        Ok((Self::new(py, parts)?, rest))
    }

    fn new(py: Python<'py>, mut parts: Vec<Bound<'py, PyAny>>) -> Result<Self> {
        if !parts.iter().any(is_ellipsis) {
            parts.push(PyEllipsis::get(py).to_owned().into_any());
        }
        Ok(Self(PyTuple::new(py, parts)?))
    }

    pub(crate) fn as_tuple(&self) -> &Bound<'py, PyTuple> {
        &self.0
    }

    /// Returns the smallest box that contains the selection, and the selection as an index into the box.
    ///
    /// `shape` is the shape of the tensor, in elements.
    pub(crate) fn bounding_region(&self, shape: &[u64]) -> Result<(Region, Bound<'py, PyTuple>)> {
        let py = self.0.py();
        let index_count = self.0.len() - 1;
        let ellipses = self.0.iter().filter(is_ellipsis).count();
        if index_count > shape.len() || ellipses > 1 {
            let text = format!("too many indices for a tensor of {} dimensions", shape.len());
            return Err(PyIndexError::new_err(text).into());
        }
        let (mut offsets, mut sizes, mut relative) = (Vec::new(), Vec::new(), Vec::new());
        for part in self.0.iter() {
            let dim = sizes.len();
            if is_ellipsis(&part) {
                let skipped_sizes = &shape[dim..dim + shape.len() - index_count];
                offsets.extend(skipped_sizes.iter().map(|_| 0));
                sizes.extend(skipped_sizes);
                relative.push(part);
            } else if let Ok(slice) = part.cast::<PySlice>() {
                let size = isize::try_from(shape[dim]).map_err(std::io::Error::other)?;
                let bounds = slice.indices(size)?;
                let last = bounds.start + bounds.step * (isize::try_from(bounds.slicelength)? - 1);
                let (low, high) = if bounds.slicelength == 0 {
                    (0, 0)
                } else {
                    (bounds.start.min(last), bounds.start.max(last) + 1)
                };
                offsets.push(u64::try_from(low)?);
                sizes.push(u64::try_from(high - low)?);
                let step = (py.None(), py.None(), bounds.step);
                relative.push(py.get_type::<PySlice>().call1(step)?);
            } else {
                let at: i64 = part.extract()?;
                let size = i64::try_from(shape[dim])?;
                let from_start = if at < 0 { at + size } else { at };
                if !(0..size).contains(&from_start) {
                    let text = format!("index {at} is out of range for dimension {dim} of {size}");
                    return Err(PyIndexError::new_err(text).into());
                }
                offsets.push(u64::try_from(from_start)?);
                sizes.push(1);
                relative.push(0_u8.into_pyobject(py).map_err(PyErr::from)?.into_any());
            }
        }
        Ok((Region::new(&offsets, &sizes)?, PyTuple::new(py, relative)?))
    }
}

fn is_basic(part: &Bound<'_, PyAny>) -> bool {
    let is_int = part.is_instance_of::<PyInt>() && !part.is_instance_of::<PyBool>();
    is_int || part.is_instance_of::<PySlice>() || is_ellipsis(part)
}

fn is_ellipsis(part: &Bound<'_, PyAny>) -> bool {
    part.is_exact_instance_of::<PyEllipsis>()
}
