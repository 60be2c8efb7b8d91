//! Saving, loading and verifying files.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyBytes, PyDict, PyMemoryView, PySlice};
use tssd_format::{
    Archive, Compression, Error, ErrorKind, Layout, MANIFEST_NAME, Mmap, Node, Options,
    to_json_without_elements,
};
use tssd_store::{Replacement, file};

use crate::builder::{Framework, MODULE_METADATA_ATTR, ObjectBuilder, StorageSource};
use crate::error::{Failure, Result, type_error, value_error};
use crate::importer::{ImportedStateDict, import_state_dict};
use crate::interrupt::InterruptCheck;
use crate::memory::{MemoryBlock, PrivateMapping};
use crate::metadata;

/// Handles of files of which parts are read.
mod safe_open;

pub(crate) use self::safe_open::{SafeOpen, SafeSlice};

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
