//! Handles of files of which parts are read.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyIterator, PyList, PyTuple};
use tssd_format::{
    Archive, ContentKind, Error, ErrorKind, FILES_KEY, MapKey, Node, PACKED_FILES_ATTR, Step,
    TensorReference, Value,
};
use tssd_store::file;

use super::{Backend, VerifyMode, decompress_range, open};
use crate::builder::{Framework, ObjectBuilder, StorageSource, decode_str, storage_spans};
use crate::error::{BindingError, Failure, Result};
use crate::index::BasicIndex;
use crate::interrupt::InterruptCheck;
use crate::memory::{MemoryBlock, PrivateMapping};
use crate::metadata;
use crate::numpy::Numpy;
use crate::torch::Torch;

/// Minimum length of a mapped range, in bytes.
///
/// Shorter ranges are read, because the system limits the number of mappings of a process.
const MMAP_MIN_BYTES: u64 = 64 << 10;

/// Opens a file to read some of its tensors.
///
/// Opening reads only the index. The object is a context manager; tensors stay valid after it exits. It is a
/// `Mapping` from fqns to tensors. A tensor is read when it is asked for.
///
/// The object can be pickled, as for the workers of a data loader. Unpickling opens the file at the same path with the
/// same options. It raises a TssdValueError if the path leads to another file by then.
///
/// Args:
///     filename: the path of the file.
///     framework: "torch" (or "pt"), or "numpy" (or "np").
///     device: the device of the tensors, as torch names it.
///     backend: "mmap": each tensor is a copy-on-write mapping of its part of the file; "pread": each
///         tensor is read into new memory.
///     verify: when checksums are verified. "eager": every byte of the file on opening; "lazy": the bytes
///         of a tensor when it is first read; "off": only the index.
///
/// Raises:
///     TssdCorruptError: the file is damaged, or is not an archive.
///     TssdOSError: the operating system reported an error.
#[pyclass(frozen, name = "safe_open", module = "tssd")]
pub(crate) struct SafeOpen {
    open_file: Mutex<Option<Arc<OpenFile>>>,
    framework: Framework,
    device: Option<Py<PyAny>>,
}

struct OpenFile {
    archive: Archive,
    file: Arc<File>,
    filename: PathBuf,
    /// The path for other processes, whose current directory may be another.
    absolute_path: PathBuf,
    backend: Backend,
    verify_mode: VerifyMode,
    /// Chunks that were verified: storage number and chunk number.
    verified_chunks: Mutex<BTreeSet<(u32, u64)>>,
}

#[pymethods]
impl SafeOpen {
    #[new]
    #[pyo3(
        signature = (filename, framework, device=None, *, backend="mmap", verify="lazy"),
        text_signature = "(filename, framework, device='cpu', *, backend='mmap', verify='lazy')"
    )]
    fn new(
        py: Python<'_>,
        filename: PathBuf,
        framework: &str,
        device: Option<Py<PyAny>>,
        backend: &str,
        verify: &str,
    ) -> Result<Self> {
        let (backend, verify_mode) = (Backend::parse(backend)?, VerifyMode::parse(verify)?);
        let framework = Framework::parse(py, Some(framework))?;
        let interrupt = InterruptCheck::new();
        let open = || {
            let file = Arc::new(open(&filename)?);
            let archive = Archive::from_blob(file.clone())?;
            if archive.is_manifest_only() {
                return Err(Error::new(ErrorKind::BlobElsewhere).into());
            }
            if verify_mode == VerifyMode::Eager {
                file::verify(archive.verify_jobs(), || interrupt.check())?;
            }
            Ok((archive, file))
        };
        let (archive, file) =
            py.detach(|| open().map_err(|error: Failure| error.with_file(&filename)))?;
        let verified_chunks = Mutex::default();
        let absolute_path = std::path::absolute(&filename)?;
        let open_file = OpenFile {
            archive,
            file,
            filename,
            absolute_path,
            backend,
            verify_mode,
            verified_chunks,
        };
        Ok(Self { open_file: Mutex::new(Some(Arc::new(open_file))), framework, device })
    }

    fn __enter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, _exception: &Bound<'_, PyTuple>) {
        self.open_file.lock().unwrap_or_else(PoisonError::into_inner).take();
    }

    /// Returns the fqns of all tensors, in the order of the state dict.
    fn keys(&self) -> Result<Vec<String>> {
        let open_file = self.open_file()?;
        Ok(tensor_references(&open_file.archive).into_iter().map(|(fqn, _)| fqn).collect())
    }

    /// Returns a view of all fqns and tensors. A tensor is read when an iterator over the view reaches it.
    fn items<'py>(slf: &Bound<'py, Self>) -> Result<Bound<'py, PyAny>> {
        Ok(slf.py().import("collections.abc")?.call_method1("ItemsView", (slf,))?)
    }

    /// Returns a view of all tensors. A tensor is read when an iterator over the view reaches it.
    fn values<'py>(slf: &Bound<'py, Self>) -> Result<Bound<'py, PyAny>> {
        Ok(slf.py().import("collections.abc")?.call_method1("ValuesView", (slf,))?)
    }

    fn __len__(&self) -> Result<usize> {
        Ok(tensor_references(&self.open_file()?.archive).len())
    }

    fn __iter__<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyIterator>> {
        Ok(PyList::new(py, self.keys()?)?.try_iter()?)
    }

    fn __contains__(&self, name: &Bound<'_, PyAny>) -> Result<bool> {
        let open_file = self.open_file()?;
        Ok(name.extract::<String>().is_ok_and(|name| match open_file.archive.node(&name) {
            Ok(node) => matches!(node, Node::Tensors(_)),
            // `keys` lists it, and reading it is an error.
            Err(error) => error.kind() == ErrorKind::AmbiguousFqn,
        }))
    }

    /// Returns a tensor as `get_tensor`. A `KeyError` for an object that is not the fqn of a tensor.
    fn __getitem__<'py>(&self, name: &Bound<'py, PyAny>) -> Result<Bound<'py, PyAny>> {
        if let Some(tensor) = self.get(name, None)? {
            return Ok(tensor);
        }
        let text = format!("`{}` is not the fqn of a tensor", name.str()?);
        Err(BindingError::new("NotFound", text).into())
    }

    /// Returns a tensor as `get_tensor`. `default` for an object that is not the fqn of a tensor.
    #[pyo3(signature = (name, default=None))]
    fn get<'py>(
        &self,
        name: &Bound<'py, PyAny>,
        default: Option<Bound<'py, PyAny>>,
    ) -> Result<Option<Bound<'py, PyAny>>> {
        if !self.__contains__(name)? {
            return Ok(default);
        }
        self.get_tensor(name.py(), &name.extract::<String>()?).map(Some)
    }

    fn __reduce__<'py>(&self, py: Python<'py>) -> Result<(Bound<'py, PyAny>, Bound<'py, PyTuple>)> {
        let arguments =
            self.open_file()?.reopen_arguments(py, self.framework, self.device.as_ref());
        Ok((py.import("tssd._handles")?.getattr("reopen")?, arguments?))
    }

    /// Returns bytes that differ between files of different content.
    fn _fingerprint<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyAny>> {
        self.open_file()?.fingerprint(py)
    }

    /// Returns the fqns of all tensors, in the order of their bytes in the file.
    fn offset_keys(&self) -> Result<Vec<String>> {
        let open_file = self.open_file()?;
        let mut tensors = tensor_references(&open_file.archive);
        tensors.sort_by_key(|(_, references)| {
            let first = references.first();
            first.map(|reference| (reference.storage, reference.byte_offset))
        });
        Ok(tensors.into_iter().map(|(fqn, _)| fqn).collect())
    }

    /// Returns the `metadata` that the file was saved with; None if there was none.
    fn metadata<'py>(&self, py: Python<'py>) -> Result<Option<Bound<'py, PyDict>>> {
        metadata::from_attrs(py, &self.open_file()?.archive.attrs())
    }

    /// Returns the files without tensors that `tssd pack` added from a model directory, such as
    /// `config.json`: a dict from their names to their bytes. It is empty for any other archive.
    ///
    /// Raises:
    ///     TssdCorruptError: the bytes of a file are damaged.
    fn files<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyDict>> {
        let open_file = self.open_file()?;
        let files = PyDict::new(py);
        let archive = &open_file.archive;
        if !archive.attrs().contains_key(PACKED_FILES_ATTR) {
            return Ok(files);
        }
        let interrupt = InterruptCheck::new();
        for (path, node) in archive.leaves() {
            let [Step::Key(MapKey::Str(first)), Step::Key(MapKey::Str(name))] = path.steps() else {
                continue;
            };
            if first.as_bytes() != FILES_KEY.as_bytes() {
                continue;
            }
            let read = || match &node {
                Node::StoredLeaf(ContentKind::Bytes, number) => {
                    let len = archive.storage(*number).len;
                    open_file.read(*number, &(0..len), &interrupt)?;
                    Ok(Some(archive.storage_bytes(*number)?))
                }
                Node::Leaf(Value::Bytes(bytes)) => Ok(Some(bytes.clone())),
                _ => Ok(None),
            };
            let bytes =
                py.detach(read).map_err(|error: Failure| error.with_file(&open_file.filename))?;
            if let Some(bytes) = bytes {
                files.set_item(decode_str(py, name.as_bytes())?, PyBytes::new(py, &bytes))?;
            }
        }
        Ok(files)
    }

    /// Returns the tensor with this fqn, in separate memory: a write to it changes no other tensor. A
    /// shard of a DTensor is returned as a `TensorShard`.
    ///
    /// Raises:
    ///     TssdKeyError: there is no tensor with this fqn.
    ///     TssdTypeError: the leaf is not a tensor.
    ///     TssdCorruptError: the bytes of the tensor are damaged.
    fn get_tensor<'py>(&self, py: Python<'py>, name: &str) -> Result<Bound<'py, PyAny>> {
        let open_file = self.open_file()?;
        let references = open_file.references(name)?;
        let source = open_file.span_source(py, storage_spans(&references));
        self.builder(py, &open_file, &source)?
            .build_tensors(&references)
            .map_err(|error| error.with_file(&open_file.filename))
    }

    /// Returns all tensors: a dict from their fqns, in the order of their bytes in the file. Each is as from
    /// `get_tensor`.
    ///
    /// Raises:
    ///     TssdCorruptError: the bytes of a tensor are damaged.
    fn get_tensors<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyDict>> {
        let tensors = PyDict::new(py);
        for name in self.offset_keys()? {
            tensors.set_item(&name, self.get_tensor(py, &name)?)?;
        }
        Ok(tensors)
    }

    /// Returns a handle that reads parts of the tensor with this fqn: `get_slice(name)[0:2, 5]`.
    ///
    /// Raises:
    ///     TssdKeyError: there is no tensor with this fqn.
    ///     TssdTypeError: the leaf is not a tensor, or is a shard.
    fn get_slice(&self, name: &str) -> Result<SafeSlice> {
        let open_file = self.open_file()?;
        let references = open_file.references(name)?;
        match references.as_slice() {
            [reference] if reference.shard_spec.is_none() => Ok(SafeSlice {
                open_file: open_file.clone(),
                name: name.to_owned(),
                reference: reference.clone(),
                framework: self.framework,
                device: self
                    .device
                    .as_ref()
                    .map(|device| Python::attach(|py| device.clone_ref(py))),
            }),
            _ => Err(BindingError::new("NotATensor", format!("`{name}` is a shard"))
                .advice("get it with get_tensor")
                .into()),
        }
    }
}

impl SafeOpen {
    fn open_file(&self) -> Result<Arc<OpenFile>> {
        let open_file = self.open_file.lock().unwrap_or_else(PoisonError::into_inner);
        open_file.clone().ok_or_else(|| PyValueError::new_err("the file is closed").into())
    }

    fn builder<'py, 'a>(
        &self,
        py: Python<'py>,
        open_file: &'a OpenFile,
        source: &'a SpanSource<'py, 'a>,
    ) -> Result<ObjectBuilder<'py, 'a>> {
        let device = self.device.as_ref().map(|device| device.bind(py).clone());
        ObjectBuilder::new(py, &open_file.archive, source, self.framework).on_device(device)
    }
}

/// Returns the fqn and the references of each tensor of an archive.
fn tensor_references(archive: &Archive) -> Vec<(String, Vec<TensorReference>)> {
    let leaves = archive.leaves().into_iter();
    leaves
        .filter_map(|(path, node)| match node {
            Node::Tensors(references) => Some((path.fqn(), references)),
            _ => None,
        })
        .collect()
}

impl OpenFile {
    fn references(&self, fqn: &str) -> Result<Vec<TensorReference>> {
        match self.archive.node(fqn)? {
            Node::Tensors(references) => Ok(references),
            Node::Distributed(_) => Err(Error::new(ErrorKind::BlobElsewhere).with_path(fqn).into()),
            _ => Err(Error::new(ErrorKind::NotATensor).with_path(fqn).into()),
        }
    }

    /// Returns the arguments of `_handles.reopen`.
    fn reopen_arguments<'py>(
        &self,
        py: Python<'py>,
        framework: Framework,
        device: Option<&Py<PyAny>>,
    ) -> Result<Bound<'py, PyTuple>> {
        let (backend, verify) = (self.backend.name(), self.verify_mode.name());
        let fingerprint = self.fingerprint(py)?;
        let path = self.absolute_path.as_os_str();
        let arguments = (path, framework.name(), device, backend, verify, fingerprint);
        Ok(arguments.into_pyobject(py)?)
    }

    /// Returns a digest of the index, which has a checksum of all other bytes.
    fn fingerprint<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyAny>> {
        let index = PyBytes::new(py, self.archive.index_bytes());
        let digest = py.import("hashlib")?.call_method1("blake2b", (index,))?;
        Ok(digest.call_method0("digest")?)
    }

    fn span_source<'py, 'a>(
        &'a self,
        py: Python<'py>,
        spans: BTreeMap<u32, Range<u64>>,
    ) -> SpanSource<'py, 'a> {
        SpanSource { py, open_file: self, spans }
    }

    /// Reads a range of the raw bytes of a storage.
    ///
    /// Verifies the chunks that were not verified before, unless the mode is [`VerifyMode::Off`]. Decompression
    /// always verifies.
    fn read(
        &self,
        number: u32,
        span: &Range<u64>,
        interrupt: &InterruptCheck,
    ) -> Result<MemoryBlock> {
        let storage = self.archive.storage(number);
        let size = |bytes: u64| usize::try_from(bytes).map_err(io::Error::other);
        let len = size(span.end - span.start)?;
        if storage.compressed_layout.is_some() {
            // Decompression verifies each chunk.
            let memory = decompress_range(&self.archive, number, span.clone(), interrupt)?;
            return Ok(memory.exclusive_block(0..len));
        }
        let chunks = storage.chunks(span);
        let unverified: Vec<u64> = {
            let verified_chunks =
                self.verified_chunks.lock().unwrap_or_else(PoisonError::into_inner);
            let is_unverified = |chunk: &u64| !verified_chunks.contains(&(number, *chunk));
            chunks
                .clone()
                // `Eager` has verified all on opening.
                .filter(|_| self.verify_mode == VerifyMode::Lazy)
                .filter(is_unverified)
                .collect()
        };
        // A checksum covers a whole chunk.
        let mut chunk_span = span.clone();
        if let (Some(first), Some(last)) = (unverified.first(), unverified.last()) {
            chunk_span.start = chunk_span.start.min(storage.chunk(*first).start);
            chunk_span.end = chunk_span.end.max(storage.chunk(*last).end);
        }
        let file_range = storage.offset + chunk_span.start..storage.offset + chunk_span.end;
        let mapping = if self.backend == Backend::Mmap && span.end - span.start >= MMAP_MIN_BYTES {
            // If mapping fails, as at the limit of mappings of a process, the range is read.
            PrivateMapping::map_file(&self.file, file_range.clone()).ok()
        } else {
            None
        };
        let (memory, offset) = if let Some(mapping) = mapping {
            mapping
        } else {
            let buffer = PrivateMapping::allocate_with(
                size(chunk_span.end - chunk_span.start)?,
                |target| file::read(&*self.file, file_range.start, target, || interrupt.check()),
            )?;
            (buffer, 0)
        };
        let bytes = &memory.as_ref()[offset..];
        file::verify_chunks(&storage, &unverified, chunk_span.start, bytes, || interrupt.check()).map_err(
            |error: Failure| error.with_fqn_if_missing(|| self.archive.storage_fqn(number)),
        )?;
        self.verified_chunks
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .extend(unverified.into_iter().map(|chunk| (number, chunk)));
        let start = offset + size(span.start - chunk_span.start)?;
        Ok(memory.exclusive_block(start..start + len))
    }
}

/// Source of the bytes that some tensors span, by storage number.
struct SpanSource<'py, 'a> {
    py: Python<'py>,
    open_file: &'a OpenFile,
    spans: BTreeMap<u32, Range<u64>>,
}

impl StorageSource for SpanSource<'_, '_> {
    fn block(&self, number: u32) -> Result<(MemoryBlock, u64)> {
        let span = &self.spans[&number];
        let interrupt = InterruptCheck::new();
        let block = self.py.detach(|| self.open_file.read(number, span, &interrupt))?;
        Ok((block, span.start))
    }
}

/// A tensor of a file that can be read in parts. It can be pickled, like `safe_open`.
#[pyclass(frozen, module = "tssd")]
pub(crate) struct SafeSlice {
    open_file: Arc<OpenFile>,
    name: String,
    reference: TensorReference,
    framework: Framework,
    device: Option<Py<PyAny>>,
}

#[pymethods]
impl SafeSlice {
    /// Returns the shape of the whole tensor, in elements.
    fn get_shape(&self) -> Vec<u64> {
        self.reference.meta.shape().into()
    }

    /// Returns the name of the dtype in torch: "bfloat16".
    fn get_dtype(&self) -> String {
        self.reference.meta.dtype().to_string()
    }

    /// The shape of the whole tensor, in elements.
    #[getter(shape)]
    fn shape_tuple<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyTuple>> {
        Ok(PyTuple::new(py, self.reference.meta.shape())?)
    }

    /// The dtype, as the framework has it: `torch.bfloat16`.
    #[getter(dtype)]
    fn dtype_object<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyAny>> {
        self.framework.py_dtype(py, self.reference.meta.dtype())
    }

    fn __reduce__<'py>(&self, py: Python<'py>) -> Result<(Bound<'py, PyAny>, Bound<'py, PyTuple>)> {
        let arguments =
            self.open_file.reopen_arguments(py, self.framework, self.device.as_ref())?;
        let arguments = (&self.name,).into_pyobject(py)?.add(arguments)?.cast_into()?;
        Ok((py.import("tssd._handles")?.getattr("reopen_slice")?, arguments))
    }

    /// Reads a part of the tensor. An index is all that the framework takes for the whole tensor: ints, slices, `...`,
    /// None, bools, lists, and arrays or tensors of ints or bools.
    ///
    /// Reads only the bytes from the first selected element to the last one. A mask reads all of its dimensions.
    ///
    /// Raises:
    ///     IndexError: an index is out of range.
    ///     TypeError: a part of the index is no index.
    ///     TssdCorruptError: the bytes are damaged.
    fn __getitem__<'py>(&self, index: &Bound<'py, PyAny>) -> Result<Bound<'py, PyAny>> {
        let py = index.py();
        let (basic, rest) = BasicIndex::split(index, self.reference.meta.shape())?;
        let part = self.read(py, &basic)?;
        Ok(match rest {
            Some(rest) => part.get_item(rest)?,
            None => part,
        })
    }
}

impl SafeSlice {
    fn read<'py>(&self, py: Python<'py>, index: &BasicIndex<'py>) -> Result<Bound<'py, PyAny>> {
        let meta = &self.reference.meta;
        let (shape, strides, first) = match self.framework {
            Framework::Torch => Torch::import(py)?.apply_index(meta, index.as_tuple())?,
            Framework::Numpy => Numpy::import(py)?.apply_index(meta, index.as_tuple())?,
        };
        // Offsets in elements from element 0 of the tensor.
        let (mut low, mut high) = (first, first);
        for (size, stride) in shape.iter().zip(&strides) {
            let reach = i64::try_from(*size).map_err(io::Error::other)?.saturating_sub(1) * stride;
            (low, high) = (low + reach.min(0), high + reach.max(0));
        }
        let itemsize = meta.dtype().itemsize();
        let byte_position = |element: i64| {
            let element = u64::try_from(element).map_err(io::Error::other)?;
            Ok::<_, Failure>(self.reference.byte_offset + element * itemsize)
        };
        let mut reference = self.reference.clone();
        let mut spans = BTreeMap::new();
        match reference.storage {
            Some(number) if !shape.contains(&0) => {
                spans.insert(number, byte_position(low)?..byte_position(high)? + itemsize);
            }
            _ => reference.storage = None,
        }
        let first = if reference.storage.is_some() { byte_position(first)? } else { 0 };
        let source = self.open_file.span_source(py, spans);
        let device = self.device.as_ref().map(|device| device.bind(py).clone());
        ObjectBuilder::new(py, &self.open_file.archive, &source, self.framework)
            .on_device(device)?
            .build_view(&reference, &shape, &strides, first)
            .map_err(|error| error.with_file(&self.open_file.filename))
    }
}
