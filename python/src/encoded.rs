//! State dicts encoded in memory.

use std::io;

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyTuple, PyType};
use tssd_format::{
    AttrValue, FlatLeaf, Node, Options, TensorReference, TorchStoreStateDict as Encoded, Value,
};
use tssd_store::file;

use crate::builder::{Framework, MODULE_METADATA_ATTR, ObjectBuilder, StorageSource};
use crate::device::DeviceRegions;
use crate::error::{BindingError, Result};
use crate::file::{InMemoryArchive, PlannedStateDict, copy_buffer, plan_state_dict};
use crate::importer::ImportedStateDict;
use crate::interrupt::InterruptCheck;
use crate::memory::{MemoryBlock, PrivateMapping};
use crate::numpy::Numpy;
use crate::slice::TensorSlice;
use crate::torch::Torch;

/// A state dict as one value: a flattened dict of references, and the tensor blob that they refer to.
///
/// It is the content of a file, in memory. Create one with `from_state_dict` or `from_bytes`.
#[pyclass(frozen, module = "tssd")]
pub(crate) struct TorchStoreStateDict {
    encoded: Encoded,
    memory: PrivateMapping,
    /// As in [`ImportedStateDict`]. The encoded bytes do not record it.
    omits_tensors: bool,
}

#[pymethods]
impl TorchStoreStateDict {
    /// Encodes a state dict. The tensors are copied once.
    ///
    /// Args:
    ///     state_dict: as for `save_file`.
    ///     allow_pickle: as for `save_file`.
    ///
    /// Raises:
    ///     TssdTypeError, TssdValueError: as `save_file`.
    #[classmethod]
    #[pyo3(signature = (state_dict, *, allow_pickle=false))]
    fn from_state_dict(
        _class: &Bound<'_, PyType>,
        state_dict: &Bound<'_, PyAny>,
        allow_pickle: bool,
    ) -> Result<Self> {
        let options = Options::new().allow_opaque();
        let PlannedStateDict { layout, interrupt, imported } =
            &plan_state_dict(state_dict, options, allow_pickle)?;
        let (len, omits_tensors) = (layout.file_len(), imported.omits_tensors);
        let len = usize::try_from(len).map_err(io::Error::other)?;
        state_dict.py().detach(|| {
            let memory = PrivateMapping::allocate_with(len, |target| {
                file::write_into(layout, target, || interrupt.check())
            })?;
            Ok(Self { omits_tensors, ..Self::from_memory(memory)? })
        })
    }

    /// Decodes bytes that `to_bytes`, `save` or another writer made. The bytes are copied, and every byte
    /// is verified.
    ///
    /// Raises:
    ///     TssdCorruptError: the bytes are not an archive, or are damaged.
    #[classmethod]
    fn from_bytes(_class: &Bound<'_, PyType>, data: &Bound<'_, PyAny>) -> Result<Self> {
        let interrupt = InterruptCheck::new();
        let state_dict = Self::from_memory(copy_buffer(data, &interrupt)?)?;
        let jobs = state_dict.encoded.archive().verify_jobs();
        data.py().detach(|| file::verify(jobs, || interrupt.check()))?;
        Ok(state_dict)
    }

    /// Decodes the state dict, as `load` does: to torch tensors in new memory, or to read-only numpy arrays
    /// if torch is not installed.
    ///
    /// Args:
    ///     device_mesh: the mesh on which shards with known placements become DTensors. Shards that are
    ///         not all that their rank has stay a `TensorShard`: a version can have the shards in parts,
    ///         and has one replica of each.
    ///     allow_pickle: as for `load_file`.
    ///
    /// Raises:
    ///     TssdValueError: the shape of the mesh differs from that of the mesh of the shards, or this rank
    ///         has other coordinates in it.
    #[pyo3(signature = (device_mesh=None, *, allow_pickle=false))]
    fn to_state_dict<'py>(
        &self,
        py: Python<'py>,
        device_mesh: Option<Bound<'py, PyAny>>,
        allow_pickle: bool,
    ) -> Result<Bound<'py, PyAny>> {
        let framework = Framework::parse(py, None)?;
        let build = |source: &dyn StorageSource| {
            ObjectBuilder::new(py, self.encoded.archive(), source, framework)
                .on_mesh(device_mesh)
                .allow_pickle(allow_pickle)
                .build_state_dict()
        };
        if framework == Framework::Numpy {
            return build(self);
        }
        // A torch tensor can be written to, and the encoded bytes must not change.
        let interrupt = InterruptCheck::new();
        let whole = py.detach(|| {
            let bytes = self.encoded.as_bytes();
            let copy = PrivateMapping::allocate_with(bytes.len(), |target| {
                file::read(bytes, 0, target, || interrupt.check())
            })?;
            InMemoryArchive::from_verified(copy)
        })?;
        build(&whole)
    }

    /// The leaves by fqn: a `TensorReference` for a tensor, a list of them for shards in several boxes,
    /// and the value of any other leaf. A pickled object is given as bytes.
    ///
    /// Raises:
    ///     TssdValueError: two leaves have the same fqn.
    #[getter]
    fn flattened_state_dict<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyDict>> {
        let class = py.import("tssd._reference")?.getattr("TensorReference")?;
        let reference = |reference: &TensorReference| -> Result<Bound<'py, PyAny>> {
            let meta = &reference.meta;
            let offset = self.blob_offset(reference);
            let slice =
                reference.shard_spec.as_ref().map(|place| TensorSlice(place.slice().clone()));
            Ok(class.call1((
                meta.dtype().name(),
                PyTuple::new(py, meta.shape())?,
                PyTuple::new(py, meta.strides())?,
                offset,
                meta.span_bytes(),
                slice,
            ))?)
        };
        let archive = self.encoded.archive();
        let builder = ObjectBuilder::new(py, archive, self, Framework::parse(py, None)?);
        let object = |leaf: &Value| match leaf {
            // A pickled object is returned as bytes.
            Value::Opaque { bytes, .. } => Ok(PyBytes::new(py, bytes).into_any()),
            leaf => builder.build_value(leaf),
        };
        let flattened = PyDict::new(py);
        for (path, leaf) in self.encoded.flattened_state_dict() {
            let fqn = path.fqn();
            let leaf = match leaf {
                FlatLeaf::Tensor(references) => match references.as_slice() {
                    [single] => reference(single)?,
                    references => {
                        let references =
                            references.iter().map(reference).collect::<Result<Vec<_>>>()?;
                        references.into_pyobject(py)?.into_any()
                    }
                },
                FlatLeaf::Object(Node::Leaf(leaf)) => object(&leaf)?,
                FlatLeaf::Object(_) => object(&archive.value(&path)?)?,
            };
            if flattened.contains(&fqn)? {
                return Err(BindingError::new(
                    "AmbiguousFqn",
                    format!("two leaves have the fqn `{fqn}`"),
                )
                .advice("rename one of them")
                .into());
            }
            flattened.set_item(fqn, leaf)?;
        }
        Ok(flattened)
    }

    /// The stored bytes of all tensors, as a uint8 tensor (an array if torch is not installed). It shares
    /// memory with this object, and must not be written to.
    #[getter]
    fn tensor_blob<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyAny>> {
        let start = self.encoded.as_bytes().as_ptr().addr();
        let blob = self.encoded.tensor_blob();
        let offset = if blob.is_empty() { 0 } else { blob.as_ptr().addr() - start };
        let block = self.memory.shared_block(offset..offset + blob.len());
        match Framework::parse(py, None)? {
            Framework::Torch => Torch::import(py)?.bytes_tensor(block),
            Framework::Numpy => Numpy::import(py)?.bytes_array(block),
        }
    }

    /// The exact size in bytes.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.encoded.archive().file_len()
    }

    /// Returns the encoded bytes: the content of the file that `save_file` writes.
    fn to_bytes<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyBytes>> {
        let bytes = self.encoded.as_bytes();
        let interrupt = InterruptCheck::new();
        Ok(PyBytes::new_with(py, bytes.len(), |target| {
            py.detach(|| file::read(bytes, 0, target, || interrupt.check())).map_err(PyErr::from)
        })?)
    }

    fn __reduce__<'py>(
        slf: &Bound<'py, Self>,
    ) -> Result<(Bound<'py, PyAny>, (Bound<'py, PyBytes>,))> {
        let from_bytes = slf.get_type().getattr("from_bytes")?;
        Ok((from_bytes, (slf.get().to_bytes(slf.py())?,)))
    }

    fn __repr__(&self) -> String {
        let leaves = self.encoded.archive().leaves().len();
        format!("TorchStoreStateDict({leaves} leaves, {} bytes)", self.nbytes())
    }
}

impl TorchStoreStateDict {
    fn from_memory(memory: PrivateMapping) -> Result<Self> {
        Ok(Self { encoded: Encoded::from_bytes(memory.bytes())?, memory, omits_tensors: false })
    }

    /// Returns the state dict that was encoded. Its tensors share the memory.
    pub(crate) fn to_imported(&self) -> Result<ImportedStateDict> {
        let module_metadata = match self.encoded.archive().attrs().remove(MODULE_METADATA_ATTR) {
            Some(AttrValue::Text(text)) => serde_json::from_slice(text.as_bytes()),
            _ => Ok(serde_json::Map::new()),
        };
        // As on loading, an attribute that is not a JSON object is ignored.
        let module_metadata = module_metadata.unwrap_or_default();
        let (devices, omits_tensors) = (DeviceRegions::default(), self.omits_tensors);
        Ok(ImportedStateDict {
            dict: self.encoded.to_state_dict()?,
            module_metadata,
            devices,
            omits_tensors,
            stored_as_base: Vec::new(),
        })
    }

    /// Returns the offset of element 0 of a tensor in the tensor blob, in bytes.
    ///
    /// Returns `None` if the tensor has no elements, or its storage is compressed.
    fn blob_offset(&self, reference: &TensorReference) -> Option<u64> {
        let storage = self.encoded.archive().storage(reference.storage?);
        let is_raw = storage.compressed_layout.is_none();
        is_raw.then(|| storage.offset - tssd_format::DATA_START + reference.byte_offset)
    }
}

impl StorageSource for TorchStoreStateDict {
    fn block(&self, number: u32) -> Result<(MemoryBlock, u64)> {
        let archive = self.encoded.archive();
        let storage = archive.storage(number);
        let to_usize = |at: u64| usize::try_from(at).map_err(io::Error::other);
        if storage.compressed_layout.is_some() {
            let raw = archive.storage_bytes(number)?;
            let memory = PrivateMapping::allocate_with(raw.len(), |target| {
                target.copy_from_slice(&raw);
                Ok::<_, io::Error>(())
            })?;
            return Ok((memory.exclusive_block(0..raw.len()), 0));
        }
        let range = storage.stored_range();
        Ok((self.memory.shared_block(to_usize(range.start)?..to_usize(range.end)?), 0))
    }
}
