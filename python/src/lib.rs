//! The extension module of the Python package `tssd`: Python's types to the format's and back.
//!
//! It decides nothing about bytes. The format lays out and proves, the store's `file` module brings the
//! threads; the GIL is released around both.

#![expect(clippy::doc_markdown, reason = "docstrings are Python's")]

use pyo3::prelude::*;

/// Memory of GPUs that Python's objects lie in.
mod device;
/// DLPack: how frameworks take each other's memory.
mod dlpack;
/// DTensors of torch, taken apart.
mod dtensor;
/// What goes wrong, as Python's exceptions.
mod error;
/// Files: saved, loaded, opened, proven.
mod file;
/// Indices that make a view.
mod index;
/// Ctrl-C, and cancelled tasks, in long work.
mod interrupt;
/// Plain tensors and arrays on their way into a store, or when they are filled.
mod local;
/// Memory that Python's tensors lie in.
mod memory;
/// What a caller says of a state dict as a whole.
mod metadata;
/// numpy's arrays to tensors and back.
mod numpy;
/// What an archive holds, as Python's objects.
mod object;
/// Python's garbage collector, at rest.
mod pause;
/// Tensor slices and shards.
mod slice;
/// A store of state dicts.
mod store;
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
    use crate::interrupt::{_interrupted, Cancel};
    #[pymodule_export]
    use crate::memory::Buffer;
    #[pymodule_export]
    use crate::slice::{TensorShard, TensorSlice};
    #[pymodule_export]
    use crate::store::{
        Items, LeaseSlice, OpenVersion, Pending, Pinned, Publishing, Receiving, Store, Subscribed,
    };
    #[pymodule_export]
    use crate::tssd::TorchStoreStateDict;
    use pyo3::prelude::*;
    #[cfg(unix)]
    use pyo3::types::PyDict;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        #[cfg(unix)]
        {
            // What is forked would have open what is being let go.
            let hooks = PyDict::new(module.py());
            hooks.set_item("before", wrap_pyfunction!(crate::file::settle, module)?)?;
            module.py().import("os")?.call_method("register_at_fork", (), Some(&hooks))?;
        }
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
