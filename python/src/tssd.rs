//! State dicts that are encoded in memory.

use std::io;

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyTuple, PyType};
use tssd_format::{
    AttrValue, FlatLeaf, Node, Options, TensorReference, TorchStoreStateDict as Encoded, Value,
};
use tssd_store::file;

use crate::device::Devices;
use crate::error::{Refusal, Result};
use crate::file::{Planned, Whole, copied, planned};
use crate::interrupt::Interrupt;
use crate::memory::{Block, Memory};
use crate::numpy::Numpy;
use crate::object::{Framework, METADATA_ATTR, Maker, Source};
use crate::slice::TensorSlice;
use crate::torch::Torch;
use crate::value::Taken;

/// A state dict as one value: a flattened dict of references, and the tensor blob that they refer to.
///
/// It is what a file holds, in memory. Make one with `from_state_dict` or `from_bytes`.
#[pyclass(frozen, module = "tssd")]
pub(crate) struct TorchStoreStateDict {
    encoded: Encoded,
    memory: Memory,
    /// As `Taken` has it: bytes do not say so.
    lacks: bool,
}

#[pymethods]
impl TorchStoreStateDict {
    /// Encodes a state dict: its tensors are copied once.
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
        let Planned { layout, interrupt, taken } = &planned(state_dict, options, allow_pickle)?;
        let (len, lacks) = (layout.file_len(), taken.lacks);
        let len = usize::try_from(len).map_err(io::Error::other)?;
        state_dict.py().detach(|| {
            let memory =
                Memory::filled(len, |target| file::fill(layout, target, || interrupt.check()))?;
            Ok(Self { lacks, ..Self::of(memory)? })
        })
    }

    /// Takes bytes that `to_bytes`, `save` or another writer made. They are copied, and every byte is proven.
    ///
    /// Raises:
    ///     TssdCorruptError: they are no archive, or damaged.
    #[classmethod]
    fn from_bytes(_class: &Bound<'_, PyType>, data: &Bound<'_, PyAny>) -> Result<Self> {
        let interrupt = Interrupt::new();
        let taken = Self::of(copied(data, &interrupt)?)?;
        let jobs = taken.encoded.archive().verify_jobs();
        data.py().detach(|| file::verify(jobs, || interrupt.check()))?;
        Ok(taken)
    }

    /// The state dict, as `load` gives it: tensors of torch in memory of their own, or read-only arrays of
    /// numpy where torch is not installed.
    ///
    /// Args:
    ///     device_mesh: if it is given, shards whose placements are known become DTensors on it. What is not all
    ///         that its rank has, as a version has shards in parts and one replica of each, stays a `TensorShard`.
    ///     allow_pickle: as for `load_file`.
    ///
    /// Raises:
    ///     TssdValueError: the mesh has another shape than the one that the shards are of, or this rank
    ///         stands elsewhere in it.
    #[pyo3(signature = (device_mesh=None, *, allow_pickle=false))]
    fn to_state_dict<'py>(
        &self,
        py: Python<'py>,
        device_mesh: Option<Bound<'py, PyAny>>,
        allow_pickle: bool,
    ) -> Result<Bound<'py, PyAny>> {
        let framework = Framework::of(py, None)?;
        let make = |source: &dyn Source| {
            Maker::new(py, self.encoded.archive(), source, framework)
                .on_mesh(device_mesh)
                .allow_pickle(allow_pickle)
                .state_dict()
        };
        if framework == Framework::Numpy {
            return make(self);
        }
        // A tensor of torch can be written to, and these bytes stay as they are.
        let interrupt = Interrupt::new();
        let whole = py.detach(|| {
            let bytes = self.encoded.as_bytes();
            let copy = Memory::filled(bytes.len(), |target| {
                file::read(bytes, 0, target, || interrupt.check())
            })?;
            Whole::proven(copy)
        })?;
        make(&whole)
    }

    /// The leaves by fqn: a `TensorReference` for a tensor, a list of them for shards in several boxes,
    /// and every other leaf as it is.
    ///
    /// Raises:
    ///     TssdValueError: two leaves have the same fqn.
    #[getter]
    fn flattened_state_dict<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyDict>> {
        let class = py.import("tssd._reference")?.getattr("TensorReference")?;
        let reference = |reference: &TensorReference| -> Result<Bound<'py, PyAny>> {
            let meta = &reference.meta;
            let offset = self.offset_of(reference);
            let slice = reference.place.as_ref().map(|place| TensorSlice(place.slice().clone()));
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
        let maker = Maker::new(py, archive, self, Framework::of(py, None)?);
        let object = |leaf: &Value| match leaf {
            // It is shown, and not unpickled.
            Value::Opaque { bytes, .. } => Ok(PyBytes::new(py, bytes).into_any()),
            leaf => maker.value(leaf),
        };
        let flattened = PyDict::new(py);
        for (path, leaf) in self.encoded.flattened_state_dict() {
            let fqn = path.fqn();
            let leaf = match leaf {
                FlatLeaf::Tensor(run) => match run.as_slice() {
                    [only] => reference(only)?,
                    run => {
                        let run = run.iter().map(reference).collect::<Result<Vec<_>>>()?;
                        run.into_pyobject(py)?.into_any()
                    }
                },
                FlatLeaf::Object(Node::Leaf(leaf)) => object(&leaf)?,
                FlatLeaf::Object(_) => object(&archive.value(&path)?)?,
            };
            if flattened.contains(&fqn)? {
                return Err(Refusal::new(
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

    /// The stored bytes of all tensors, as a tensor of uint8 (an array where torch is not installed). It
    /// is no copy: it must not be written to.
    #[getter]
    fn tensor_blob<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyAny>> {
        let start = self.encoded.as_bytes().as_ptr().addr();
        let blob = self.encoded.tensor_blob();
        let at = if blob.is_empty() { 0 } else { blob.as_ptr().addr() - start };
        let block = self.memory.view(at..at + blob.len());
        match Framework::of(py, None)? {
            Framework::Torch => Torch::import(py)?.bytes(block),
            Framework::Numpy => Numpy::import(py)?.bytes(block),
        }
    }

    /// How many bytes it is, exactly.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.encoded.archive().file_len()
    }

    /// The encoded bytes: what `save_file` writes.
    fn to_bytes<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyBytes>> {
        let bytes = self.encoded.as_bytes();
        let interrupt = Interrupt::new();
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
    fn of(memory: Memory) -> Result<Self> {
        Ok(Self { encoded: Encoded::from_bytes(memory.bytes())?, memory, lacks: false })
    }

    /// The state dict that it was made of: its tensors share the memory.
    pub(crate) fn taken(&self) -> Result<Taken> {
        let metadata = match self.encoded.archive().attrs().remove(METADATA_ATTR) {
            Some(AttrValue::Text(text)) => serde_json::from_slice(text.as_bytes()),
            _ => Ok(serde_json::Map::new()),
        };
        // As when it is read: what is no object says nothing.
        let metadata = metadata.unwrap_or_default();
        let (devices, lacks) = (Devices::default(), self.lacks);
        Ok(Taken { dict: self.encoded.to_state_dict()?, metadata, devices, lacks })
    }

    /// Where element 0 of a tensor is in the tensor blob; none if it has no elements, or its storage is
    /// compressed.
    fn offset_of(&self, reference: &TensorReference) -> Option<u64> {
        let storage = self.encoded.archive().storage(reference.storage?);
        let is_raw = storage.packing.is_none();
        is_raw.then(|| storage.offset - tssd_format::DATA_START + reference.byte_offset)
    }
}

impl Source for TorchStoreStateDict {
    fn block(&self, number: u32) -> Result<(Block, u64)> {
        let archive = self.encoded.archive();
        let storage = archive.storage(number);
        let place = |at: u64| usize::try_from(at).map_err(io::Error::other);
        if storage.packing.is_some() {
            let raw = archive.storage_bytes(number)?;
            let memory = Memory::filled(raw.len(), |target| {
                target.copy_from_slice(&raw);
                Ok::<_, io::Error>(())
            })?;
            return Ok((memory.block(0..raw.len()), 0));
        }
        let range = storage.stored_range();
        Ok((self.memory.view(place(range.start)?..place(range.end)?), 0))
    }
}
