//! The extension module of the Python package `tssd`.
//!
//! It converts between Python objects and the types of the format. It makes no decision about bytes: the format crate
//! lays out and verifies archives, and the `file` module of the store crate runs that work on several threads. The GIL
//! is released around both.

#![expect(clippy::doc_markdown, reason = "docstrings are Python's")]

use pyo3::prelude::*;

/// Construction of Python objects from the nodes of an archive.
mod builder;
/// The rule by which a put casts floating tensors.
mod cast_rule;
mod classes;
/// Deltas between files.
mod delta;
/// GPU memory that holds the elements of Python tensors.
mod device;
/// DLPack: the protocol by which frameworks share tensor memory.
mod dlpack;
/// Conversion of torch DTensors.
mod dtensor;
/// State dicts encoded in memory.
mod encoded;
/// Errors, and their conversion to Python exceptions.
mod error;
/// Saving, loading, opening and verifying files.
mod file;
/// Tensors whose memory a framework owns.
mod foreign_memory;
/// A pause of Python's garbage collector.
mod gc_pause;
/// Import of Python objects as values of the format.
mod importer;
/// Basic indices: ints, slices and `...`.
mod index;
/// Interruption of long calls by signals and cancelled tasks.
mod interrupt;
/// Import of plain tensors and arrays, to be stored or to be filled.
mod leaf_import;
/// Mappings between the tensors of a process and the stored ones.
mod mapping;
/// Private memory that holds the elements of Python tensors.
mod memory;
/// Metadata of a state dict.
mod metadata;
/// Conversion between numpy arrays and tensors.
mod numpy;
/// Tensor slices and shards.
mod slice;
/// A store of state dicts.
mod store;
/// Conversion between torch tensors and tensors.
mod torch;

#[pymodule]
mod _tssd {
    #[pymodule_export]
    use crate::delta::{_delta_apply, _delta_fold, _delta_make};
    #[pymodule_export]
    use crate::encoded::TorchStoreStateDict;
    #[pymodule_export]
    use crate::error::{_abridge, _abridge_name, kinds};
    #[pymodule_export]
    use crate::file::{SafeOpen, SafeSlice, inspect, load, load_file, save, save_file, verify};
    #[pymodule_export]
    use crate::interrupt::{_check_cancelled, CancelToken};
    #[pymodule_export]
    use crate::memory::Buffer;
    #[pymodule_export]
    use crate::slice::{TensorShard, TensorSlice};
    #[pymodule_export]
    use crate::store::{
        OpenVersion, PyPendingPut, PyPin, PyPublisher, PyReceiver, PySubscription, StagedVersion,
        Store, VersionItems, VersionSlice,
    };
    use pyo3::prelude::*;
    #[cfg(unix)]
    use pyo3::types::PyDict;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        tssd_gpu::register();
        let mapping = module.py().import("collections.abc")?.getattr("Mapping")?;
        mapping.call_method1("register", (module.py().get_type::<SafeOpen>(),))?;
        mapping.call_method1("register", (module.py().get_type::<OpenVersion>(),))?;
        #[cfg(unix)]
        {
            // A forked child would inherit the files and mappings whose drop is deferred, and keep them open.
            let hooks = PyDict::new(module.py());
            hooks.set_item(
                "before",
                wrap_pyfunction!(crate::file::wait_for_deferred_drops, module)?,
            )?;
            module.py().import("os")?.call_method("register_at_fork", (), Some(&hooks))?;
        }
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
