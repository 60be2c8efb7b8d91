//! The extension module of the Python package `tssd`: Python's types to the format's and back.
//!
//! It decides nothing about bytes. The format lays out and proves, the store's `file` module brings the
//! threads; the GIL is released around both.

#![expect(clippy::doc_markdown, reason = "docstrings are Python's")]

use pyo3::prelude::*;

/// DLPack: how torch takes memory that is not its own.
mod dlpack;
/// DTensors of torch, taken apart.
mod dtensor;
/// What goes wrong, as Python's exceptions.
mod error;
/// Files: saved, loaded, opened, proven.
mod file;
/// Ctrl-C in long work.
mod interrupt;
/// The caller's own tensors, which a get fills.
mod into;
/// Memory that Python's tensors lie in.
mod memory;
/// numpy's arrays to tensors and back.
mod numpy;
/// What an archive holds, as Python's objects.
mod object;
/// Tensor slices and shards.
mod slice;
/// A store of state dicts.
mod store;
/// Versions tensor by tensor.
mod stream;
/// Tensors of either framework.
mod tensor;
/// torch's tensors to tensors and back.
mod torch;
/// State dicts that are encoded in memory.
mod tssd;
/// Python's objects as values of the format.
mod value;

#[pymodule]
mod _tssd {
    #[pymodule_export]
    use crate::error::kinds;
    #[pymodule_export]
    use crate::file::{SafeOpen, SafeSlice, inspect, load, load_file, save, save_file, verify};
    #[pymodule_export]
    use crate::memory::Buffer;
    #[pymodule_export]
    use crate::slice::{TensorShard, TensorSlice};
    #[pymodule_export]
    use crate::store::{Pending, Store};
    #[pymodule_export]
    use crate::stream::{Items, Publishing, Reading, Subscribed};
    #[pymodule_export]
    use crate::tssd::TorchStoreStateDict;
    use pyo3::prelude::*;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
