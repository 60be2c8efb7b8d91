//! Saving, loading, opening and verifying files.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{
    IntoPyDict, PyBytes, PyDict, PyIterator, PyList, PyMemoryView, PySlice, PyTuple,
};
use tssd_format::{
    Archive, Compression, ContentKind, Error, ErrorKind, FILES_KEY, Layout, MANIFEST_NAME, MapKey,
    Mmap, Node, Options, PACKED_FILES_ATTR, Step, TensorReference, Value, to_json_without_elements,
};
use tssd_store::{Replacement, file};

use crate::builder::{
    Framework, MODULE_METADATA_ATTR, ObjectBuilder, StorageSource, decode_str, storage_spans,
};
use crate::error::{BindingError, Failure, Result, type_error, value_error};
use crate::importer::{ImportedStateDict, import_state_dict};
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

/// How the bytes of a file get into memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Backend {
    Mmap,
    Pread,
}

/// Bytes that one step copies from a Python buffer.
const COPY_CHUNK_BYTES: usize = 4 << 20;

/// When checksums are verified.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum VerifyMode {
    Eager,
    Lazy,
    Off,
}

impl Backend {
    fn parse(name: &str) -> Result<Self> {
        match name {
            "mmap" => Ok(Self::Mmap),
            "pread" => Ok(Self::Pread),
            other => Err(invalid_choice("backend", other, "\"mmap\" or \"pread\"")),
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Mmap => "mmap",
            Self::Pread => "pread",
        }
    }
}

impl VerifyMode {
    fn parse(name: &str) -> Result<Self> {
        match name {
            "eager" => Ok(Self::Eager),
            "lazy" => Ok(Self::Lazy),
            "off" => Ok(Self::Off),
            other => Err(invalid_choice("verify", other, "\"eager\", \"lazy\" or \"off\"")),
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Eager => "eager",
            Self::Lazy => "lazy",
            Self::Off => "off",
        }
    }
}

fn invalid_choice(argument: &str, found: &str, choices: &str) -> Failure {
    value_error(format!("{argument} is {choices}, not {found:?}")).into()
}

/// Returns the compression that an argument `compression` asks for.
pub(crate) fn compression(argument: Option<&str>) -> Result<Compression> {
    match argument {
        None | Some("none") => Ok(Compression::None),
        Some("auto") => Ok(Compression::Auto),
        Some("planes") => Ok(Compression::Planes),
        Some("tiers") => Ok(Compression::Tiers),
        Some("zstd") => Ok(Compression::ShuffledZstd),
        Some("zstd-plain") => Ok(Compression::Zstd),
        Some(other) => {
            let choices = r#"None, "none", "auto", "planes", "tiers", "zstd" or "zstd-plain""#;
            Err(invalid_choice("compression", other, choices))
        }
    }
}

fn save_options(
    metadata: Option<&Bound<'_, PyDict>>,
    compression: Option<&str>,
    level: i32,
    digest: Option<&str>,
) -> Result<Options> {
    let mut options = Options::new().allow_opaque().zstd_level(level);
    options = options.compress(self::compression(compression)?);
    options = match digest {
        None => options,
        Some("blake3") => options.digests(),
        Some(other) => return Err(invalid_choice("digest", other, "None or \"blake3\"")),
    };
    for (name, value) in metadata::to_attrs(metadata)? {
        options = options.attr(name, value);
    }
    Ok(options)
}

/// A state dict with the layout of its archive. Its tensors share the memory of the Python tensors.
pub(crate) struct PlannedStateDict {
    pub(crate) layout: Layout,
    pub(crate) interrupt: InterruptCheck,
    pub(crate) imported: ImportedStateDict,
}

pub(crate) fn plan_state_dict(
    state_dict: &Bound<'_, PyAny>,
    mut options: Options,
    allow_pickle: bool,
) -> Result<PlannedStateDict> {
    let imported = import_state_dict(state_dict, allow_pickle, None)?;
    if let Some(modules) = imported.module_metadata_attr() {
        options = options.attr(MODULE_METADATA_ATTR, modules);
    }
    let interrupt = InterruptCheck::new();
    let layout =
        state_dict.py().detach(|| file::plan(&imported.dict, &options, || interrupt.check()))?;
    Ok(PlannedStateDict { layout, interrupt, imported })
}

/// Saves a state dict to a file.
///
/// Loading the file restores the nested dict: its order, the types of its keys and containers, ties
/// between tensors, strides, and Parameters. The file is replaced atomically: it appears under its name
/// once it is complete. Until then, and after an error or Ctrl-C, a previous file of that name remains
/// unchanged. The tensors must not be written to during the call.
///
/// Args:
///     state_dict: a dict or OrderedDict of tensors, numpy arrays, numbers, strs, and nested containers.
///     filename: the path of the file.
///     metadata: a dict from strs to JSON values or bytes. `safe_open(...).metadata()` returns it.
///     compression: None or "none"; "planes": byte planes, which suit weights and are fast; "tiers": byte planes that
///         decode at half the speed of a copy in memory, a little larger than "planes"; "zstd": zstd after a byte shuffle;
///         "zstd-plain": zstd without the shuffle; "auto": planes, zstd or none for each storage, by samples.
///     level: the zstd level, from -131072 to 22.
///     digest: None; "blake3": a BLAKE3 digest of each storage, so that the file can be signed.
///     fsync: whether the file is flushed to the disk before this function returns.
///     allow_pickle: whether objects that are not typed leaves are pickled, with cloudpickle if it is
///         installed. They are loaded only with `allow_pickle=True`.
///
/// Returns:
///     A SaveReport. Its `stored_as_base` names the values of subclasses of builtin classes, such as an
///     `IntEnum` or a class derived from `dict`: they are stored as an object of the builtin class.
///
/// Raises:
///     TssdTypeError: an object is not a typed leaf; `fqn` names the leaf.
///     TssdValueError: the state dict violates a rule of the format, such as containers 64 deep.
///     TssdOSError: the operating system reported an error.
#[pyfunction]
#[pyo3(signature = (state_dict, filename, metadata=None, *, compression=None, level=1, digest=None, fsync=true, allow_pickle=false))]
#[expect(clippy::too_many_arguments, reason = "they are the arguments of the Python function")]
#[expect(clippy::needless_pass_by_value, reason = "what Python gives is owned")]
pub(crate) fn save_file<'py>(
    state_dict: &Bound<'py, PyAny>,
    filename: PathBuf,
    metadata: Option<&Bound<'py, PyDict>>,
    compression: Option<&str>,
    level: i32,
    digest: Option<&str>,
    fsync: bool,
    allow_pickle: bool,
) -> Result<Bound<'py, PyAny>> {
    let py = state_dict.py();
    let options = save_options(metadata, compression, level, digest)?;
    let PlannedStateDict { layout, interrupt, imported } =
        &plan_state_dict(state_dict, options, allow_pickle)?;
    py.detach(|| write_file(layout, &filename, fsync, interrupt))?;
    let class = py.import("tssd._reports")?.getattr("SaveReport")?;
    let stored_as_base = imported.stored_as_base.iter().cloned().into_py_dict(py)?;
    Ok(class.call1((layout.file_len(), stored_as_base))?)
}

/// Writes an archive to a file, which appears under its name once it is complete.
pub(crate) fn write_file(
    layout: &Layout,
    filename: &Path,
    fsync: bool,
    interrupt: &InterruptCheck,
) -> Result<()> {
    let write = || {
        let replacement = Replacement::create(filename, fsync)?;
        file::write(layout, &replacement, || interrupt.check())?;
        Ok(replacement.commit()?)
    };
    write().map_err(|error: Failure| error.with_file(filename))
}

/// Waits for the deferred drops of files and mappings: see [`file::wait_for_deferred_drops`].
#[cfg(unix)]
#[pyfunction]
pub(crate) fn wait_for_deferred_drops(py: Python<'_>) {
    py.detach(file::wait_for_deferred_drops);
}

/// Saves a state dict as bytes: the content of the file that `save_file` would write.
///
/// The arguments and errors are those of `save_file`.
#[pyfunction]
#[pyo3(signature = (state_dict, metadata=None, *, compression=None, level=1, digest=None, allow_pickle=false))]
pub(crate) fn save<'py>(
    state_dict: &Bound<'py, PyAny>,
    metadata: Option<&Bound<'py, PyDict>>,
    compression: Option<&str>,
    level: i32,
    digest: Option<&str>,
    allow_pickle: bool,
) -> Result<Bound<'py, PyBytes>> {
    let py = state_dict.py();
    let options = save_options(metadata, compression, level, digest)?;
    let PlannedStateDict { layout, interrupt, .. } =
        &plan_state_dict(state_dict, options, allow_pickle)?;
    let len = usize::try_from(layout.file_len()).map_err(io::Error::other)?;
    Ok(PyBytes::new_with(py, len, |target| {
        py.detach(|| file::write_into(layout, target, || interrupt.check())).map_err(PyErr::from)
    })?)
}

/// Loads a state dict from a file that `save_file` wrote.
///
/// With "mmap", tensors are views of a copy-on-write mapping of the file. Pages are read on first access.
/// A write to a tensor changes only the memory of this process. The mapping lives as long as the last
/// tensor. The file must not be truncated or changed while it is mapped; replacing it, as `save_file`
/// does, is safe. Use "pread" for files that other processes write to, or on a network file system.
///
/// Args:
///     filename: the path of the file.
///     device: the device of the tensors, as torch names it.
///     framework: "torch" or "numpy"; None: torch, or numpy if torch is not installed. A numpy array that
///         was saved is loaded as a numpy array. Arrays of a mapped file are read-only.
///     backend: "mmap", or "pread" into new memory.
///     verify: when checksums are verified. "eager": every byte of the file before this function returns;
///         "lazy": each tensor when it is returned, which is the same for this function; "off": only the
///         index.
///     allow_pickle: whether pickled objects are unpickled, which executes code from the file.
///
/// Returns:
///     The state dict. Shards of DTensors are returned as `TensorShard`. The files without tensors that
///     `tssd pack` adds to the weights of a model directory are not in it: `safe_open(...).files()`
///     returns them.
///
/// Raises:
///     TssdCorruptError: the file is damaged, or is not an archive.
///     TssdTypeError: the file contains a pickled object, and `allow_pickle` is False.
///     TssdOSError: the operating system reported an error.
#[pyfunction]
#[pyo3(
    signature = (filename, device=None, *, framework=None, backend="mmap", verify="eager", allow_pickle=false),
    text_signature = "(filename, device='cpu', *, framework=None, backend='mmap', verify='eager', allow_pickle=False)"
)]
#[expect(clippy::needless_pass_by_value, reason = "what Python gives is owned")]
pub(crate) fn load_file<'py>(
    py: Python<'py>,
    filename: PathBuf,
    device: Option<Bound<'py, PyAny>>,
    framework: Option<&str>,
    backend: &str,
    verify: &str,
    allow_pickle: bool,
) -> Result<Bound<'py, PyAny>> {
    let (backend, verify_mode) = (Backend::parse(backend)?, VerifyMode::parse(verify)?);
    let framework = Framework::parse(py, framework)?;
    let interrupt = InterruptCheck::new();
    let load = || {
        let file = open(&filename)?;
        let len = file.metadata()?.len();
        let memory = match backend {
            Backend::Mmap => PrivateMapping::map_file(&file, 0..len)?.0,
            Backend::Pread => {
                let file: Arc<File> = Arc::new(file);
                // Rejects a file that is not an archive before reading it.
                Archive::from_blob(file.clone())?;
                let len = usize::try_from(len).map_err(io::Error::other)?;
                PrivateMapping::allocate_with(len, |target| {
                    file::read(&*file, 0, target, || interrupt.check())
                })?
            }
        };
        InMemoryArchive::new(memory, verify_mode, &interrupt)
    };
    let whole = py.detach(|| load().map_err(|error| error.with_file(&filename)))?;
    ObjectBuilder::new(py, &whole.archive, &whole, framework)
        .on_device(device)?
        .allow_pickle(allow_pickle)
        .build_state_dict()
        .map_err(|error| error.with_file(&filename))
}

/// Loads a state dict from bytes that `save` returned.
///
/// The bytes are copied: torch tensors can be written to, numpy arrays are read-only views of the copy.
/// The arguments and errors are those of `load_file`.
#[pyfunction]
#[pyo3(
    signature = (data, device=None, *, framework=None, verify="eager", allow_pickle=false),
    text_signature = "(data, device='cpu', *, framework=None, verify='eager', allow_pickle=False)"
)]
pub(crate) fn load<'py>(
    data: &Bound<'py, PyAny>,
    device: Option<Bound<'py, PyAny>>,
    framework: Option<&str>,
    verify: &str,
    allow_pickle: bool,
) -> Result<Bound<'py, PyAny>> {
    let py = data.py();
    let framework = Framework::parse(py, framework)?;
    let (verify_mode, interrupt) = (VerifyMode::parse(verify)?, InterruptCheck::new());
    let memory = copy_buffer(data, &interrupt)?;
    let whole = py.detach(|| InMemoryArchive::new(memory, verify_mode, &interrupt))?;
    ObjectBuilder::new(py, &whole.archive, &whole, framework)
        .on_device(device)?
        .allow_pickle(allow_pickle)
        .build_state_dict()
}

/// Copies bytes, or the buffer of another object, to new memory.
pub(crate) fn copy_buffer(
    data: &Bound<'_, PyAny>,
    interrupt: &InterruptCheck,
) -> Result<PrivateMapping> {
    let py = data.py();
    if let Ok(bytes) = data.cast::<PyBytes>() {
        let bytes = bytes.as_bytes();
        return py.detach(|| {
            PrivateMapping::allocate_with(bytes.len(), |target| {
                file::read(&SliceBlob(bytes), 0, target, || interrupt.check())
            })
        });
    }
    let class = data.get_type();
    let buffer_error = |error: PyErr| {
        let message = format!("data is bytes, or another object with a buffer, not {class}");
        if error.is_instance_of::<PyTypeError>(py) { type_error(message) } else { error }
    };
    let view = PyMemoryView::from(data).map_err(buffer_error)?;
    let Ok(view) = view.call_method1("cast", ("B",)) else {
        // A buffer with gaps is made contiguous first.
        return copy_buffer(&view.call_method0("tobytes")?, interrupt);
    };
    let len = view.len()?;
    PrivateMapping::allocate_with(len, |target| {
        for (start, part) in
            (0..len).step_by(COPY_CHUNK_BYTES).zip(target.chunks_mut(COPY_CHUNK_BYTES))
        {
            // A foreign buffer is read only with the GIL held. Other threads can take it between two chunks; a busy
            // thread returns it after 5 ms.
            let slice =
                PySlice::new(py, start.cast_signed(), (start + part.len()).cast_signed(), 1);
            let chunk = view.get_item(slice)?.call_method0("tobytes")?.cast_into::<PyBytes>()?;
            let bytes = chunk.as_bytes();
            py.detach(|| interrupt.check().map(|()| tssd_format::copy(bytes, part)))?;
        }
        Ok(())
    })
}

/// Borrowed bytes as a blob.
struct SliceBlob<'a>(&'a [u8]);

impl tssd_format::Blob for SliceBlob<'_> {
    fn size(&self) -> io::Result<u64> {
        u64::try_from(self.0.len()).map_err(io::Error::other)
    }

    fn read_exact_at(&self, target: &mut [u8], offset: u64) -> io::Result<()> {
        let start = usize::try_from(offset).map_err(io::Error::other)?;
        let bytes = self.0.get(start..start + target.len());
        tssd_format::copy(bytes.ok_or(io::ErrorKind::UnexpectedEof)?, target);
        Ok(())
    }

    fn bytes(&self) -> Option<&bytes::Bytes> {
        None
    }
}

fn open(filename: &PathBuf) -> Result<File> {
    let file = File::open(filename)?;
    if file.metadata()?.is_dir() {
        if filename.join(MANIFEST_NAME).exists() {
            return Err(Error::new(ErrorKind::BlobElsewhere).into());
        }
        return Err(io::Error::from_raw_os_error(EISDIR).into());
    }
    Ok(file)
}

/// `EISDIR` on Linux and all BSDs.
const EISDIR: i32 = 21;

/// An archive whose bytes are all in memory, verified according to the [`VerifyMode`].
pub(crate) struct InMemoryArchive {
    pub(crate) archive: Archive,
    memory: PrivateMapping,
    /// Decompressed bytes of compressed storages, by storage number.
    decompressed: Mutex<BTreeMap<u32, MemoryBlock>>,
}

impl InMemoryArchive {
    fn new(
        memory: PrivateMapping,
        verify_mode: VerifyMode,
        interrupt: &InterruptCheck,
    ) -> Result<Self> {
        // `Map` makes the archive copy the index: a later write to the file cannot change the verified bytes.
        let archive = Archive::from_blob(Arc::new(Mmap::from(memory.bytes())))?;
        if archive.is_manifest_only() {
            return Err(Error::new(ErrorKind::BlobElsewhere).into());
        }
        if verify_mode != VerifyMode::Off {
            file::verify(archive.verify_jobs(), || interrupt.check())?;
        }
        let decompressed = Mutex::new(decompress_tensor_storages(&archive, interrupt)?);
        Ok(Self { archive, memory, decompressed })
    }

    /// Opens an archive in memory that was verified before.
    pub(crate) fn from_verified(memory: PrivateMapping) -> Result<Self> {
        Self::new(memory, VerifyMode::Off, &InterruptCheck::new())
    }
}

impl StorageSource for InMemoryArchive {
    fn block(&self, number: u32) -> Result<(MemoryBlock, u64)> {
        let mut decompressed = self.decompressed.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(block) = decompressed.remove(&number) {
            return Ok((block, 0));
        }
        let range = self.archive.storage(number).stored_range();
        let to_usize = |at: u64| usize::try_from(at).map_err(io::Error::other);
        Ok((self.memory.exclusive_block(to_usize(range.start)?..to_usize(range.end)?), 0))
    }
}

/// Decompresses all compressed storages of tensors. Returns their bytes by storage number.
fn decompress_tensor_storages(
    archive: &Archive,
    interrupt: &InterruptCheck,
) -> Result<BTreeMap<u32, MemoryBlock>> {
    let is_compressed = |number: &u32| archive.storage(*number).compressed_layout.is_some();
    if !(0..archive.storage_count()).any(|number| is_compressed(&number)) {
        return Ok(BTreeMap::new());
    }
    let numbers: BTreeSet<u32> = archive
        .leaves()
        .iter()
        .filter(|(_, node)| matches!(node, Node::Tensors(_)))
        .flat_map(|(_, node)| node.storages().collect::<Vec<_>>())
        .filter(is_compressed)
        .collect();
    let mut blocks = BTreeMap::new();
    for number in numbers {
        let len = archive.storage(number).len;
        let memory = decompress_range(archive, number, 0..len, interrupt)?;
        blocks.insert(
            number,
            memory.exclusive_block(0..usize::try_from(len).map_err(io::Error::other)?),
        );
    }
    Ok(blocks)
}

/// Copies a range of the raw bytes of a storage to new memory, decompressed if necessary.
fn decompress_range(
    archive: &Archive,
    number: u32,
    range: Range<u64>,
    interrupt: &InterruptCheck,
) -> Result<PrivateMapping> {
    let len = usize::try_from(range.end - range.start).map_err(io::Error::other)?;
    PrivateMapping::allocate_with(len, |target| {
        file::read_storage(archive, number, range.start, target, || interrupt.check())
    })
}

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

/// Verifies a file: every stored byte, and the decompressed content of compressed storages.
///
/// Args:
///     filename: the path of the file.
///
/// Raises:
///     TssdCorruptError: the file is damaged, or is not an archive; `kind` names the violated rule.
///     TssdOSError: the operating system reported an error.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "what Python gives is owned")]
pub(crate) fn verify(py: Python<'_>, filename: PathBuf) -> Result<()> {
    let interrupt = InterruptCheck::new();
    let verify = || {
        let archive = Archive::from_blob(Arc::new(open(&filename)?))?;
        file::verify(archive.verify_jobs(), || interrupt.check())?;
        file::verify(archive.deep_verify_jobs(), || interrupt.check())
    };
    py.detach(|| verify().map_err(|error: Failure| error.with_file(&filename)))
}

/// Describes the content of a file, without the elements of its tensors.
///
/// Args:
///     filename: the path of the file.
///
/// Returns:
///     The JSON view of section 9 of the specification, as Python objects.
///
/// Raises:
///     TssdCorruptError: the file is damaged, or is not an archive.
///     TssdOSError: the operating system reported an error.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "what Python gives is owned")]
pub(crate) fn inspect(py: Python<'_>, filename: PathBuf) -> Result<Bound<'_, PyAny>> {
    let view = || {
        let archive = Archive::from_blob(Arc::new(open(&filename)?))?;
        Ok(to_json_without_elements(&archive)?.to_string())
    };
    let view = py.detach(|| view().map_err(|error: Failure| error.with_file(&filename)))?;
    Ok(py.import("json")?.call_method1("loads", (view,))?)
}
