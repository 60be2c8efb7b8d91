//! Files: saved, loaded, opened, proven.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyMemoryView, PySlice, PyTuple};
use tssd_format::{
    Archive, Compression, Error, ErrorKind, Layout, MANIFEST, Map, Node, Options, TensorReference,
    to_json_without_elements,
};
use tssd_store::{Replacement, file};

use crate::error::{Failure, Refusal, Result};
use crate::index::Index;
use crate::interrupt::Interrupt;
use crate::memory::{Block, Memory};
use crate::metadata;
use crate::numpy::Numpy;
use crate::object::{Framework, METADATA_ATTR, Maker, Source, spans};
use crate::torch::Torch;
use crate::value::{Taken, take};

/// Shorter ranges are read rather than mapped: a system has only so many maps for a process.
const MAPPED_MIN: u64 = 64 << 10;

/// How bytes of a file come to memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Backend {
    Mmap,
    Pread,
}

/// How many bytes are taken at once of what Python lends.
const PIECE: usize = 4 << 20;

/// When bytes are proven.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Proof {
    Eager,
    Lazy,
    Off,
}

impl Backend {
    fn of(name: &str) -> Result<Self> {
        match name {
            "mmap" => Ok(Self::Mmap),
            "pread" => Ok(Self::Pread),
            other => Err(choice("backend", other, "\"mmap\" or \"pread\"")),
        }
    }
}

impl Proof {
    fn of(name: &str) -> Result<Self> {
        match name {
            "eager" => Ok(Self::Eager),
            "lazy" => Ok(Self::Lazy),
            "off" => Ok(Self::Off),
            other => Err(choice("verify", other, "\"eager\", \"lazy\" or \"off\"")),
        }
    }
}

fn choice(argument: &str, found: &str, choices: &str) -> Failure {
    PyValueError::new_err(format!("{argument} is {choices}, not {found:?}")).into()
}

fn options(
    metadata: Option<&Bound<'_, PyDict>>,
    compression: Option<&str>,
    level: i32,
    digest: Option<&str>,
) -> Result<Options> {
    let mut options = Options::new().allow_opaque().zstd_level(level);
    options = match compression {
        None => options,
        Some("zstd") => options.compress(Compression::ShuffledZstd),
        Some("zstd-plain") => options.compress(Compression::Zstd),
        Some(other) => {
            return Err(choice("compression", other, "None, \"zstd\" or \"zstd-plain\""));
        }
    };
    options = match digest {
        None => options,
        Some("blake3") => options.digests(),
        Some(other) => return Err(choice("digest", other, "None or \"blake3\"")),
    };
    for (name, value) in metadata::attrs(metadata)? {
        options = options.attr(name, value);
    }
    Ok(options)
}

/// A state dict, planned: what is kept of it shares its tensors.
pub(crate) struct Planned {
    pub(crate) layout: Layout,
    pub(crate) interrupt: Interrupt,
    pub(crate) taken: Taken,
}

pub(crate) fn planned(
    state_dict: &Bound<'_, PyAny>,
    mut options: Options,
    allow_pickle: bool,
) -> Result<Planned> {
    let taken = take(state_dict, allow_pickle, None)?;
    if let Some(modules) = taken.modules() {
        options = options.attr(METADATA_ATTR, modules);
    }
    let interrupt = Interrupt::new();
    let layout =
        state_dict.py().detach(|| file::plan(&taken.dict, &options, || interrupt.check()))?;
    Ok(Planned { layout, interrupt, taken })
}

/// Saves a state dict as a file.
///
/// The same nested dict comes back: its order, the types of its keys and containers, ties between
/// tensors, strides, Parameters. The file appears under its name once it is complete; whatever had the
/// name before is there until then, and after an error or Ctrl-C. Tensors must not be written to
/// meanwhile.
///
/// Args:
///     state_dict: a dict or OrderedDict of tensors, numpy arrays, numbers, strs, and nested containers.
///     filename: where to save it.
///     metadata: a dict of strs to what JSON has, or bytes, which `safe_open(...).metadata()` gives back.
///     compression: None; "zstd": zstd after a byte shuffle; "zstd-plain": without it.
///     level: of zstd, from -131072 to 22.
///     digest: None; "blake3": one for each storage, so that the file can be signed.
///     fsync: whether the file is on the disk once this returns.
///     allow_pickle: whether objects that are no typed leaves are pickled, with cloudpickle if it is
///         installed. They are loaded only with `allow_pickle=True`.
///
/// Raises:
///     TssdTypeError: an object is no typed leaf; `fqn` says where it is.
///     TssdValueError: the state dict breaks a rule of the format, such as containers 64 deep.
///     TssdOSError: the system failed.
#[pyfunction]
#[pyo3(signature = (state_dict, filename, metadata=None, *, compression=None, level=1, digest=None, fsync=true, allow_pickle=false))]
#[expect(clippy::too_many_arguments, reason = "they are the arguments of the Python function")]
#[expect(clippy::needless_pass_by_value, reason = "what Python gives is owned")]
pub(crate) fn save_file(
    state_dict: &Bound<'_, PyAny>,
    filename: PathBuf,
    metadata: Option<&Bound<'_, PyDict>>,
    compression: Option<&str>,
    level: i32,
    digest: Option<&str>,
    fsync: bool,
    allow_pickle: bool,
) -> Result<()> {
    let options = options(metadata, compression, level, digest)?;
    let Planned { layout, interrupt, .. } = &planned(state_dict, options, allow_pickle)?;
    state_dict.py().detach(|| {
        let write = || {
            let replacement = Replacement::create(&filename, fsync)?;
            file::write(layout, &replacement, || interrupt.check())?;
            Ok(replacement.commit()?)
        };
        write().map_err(|error: Failure| error.in_file(&filename))
    })
}

/// As [`file::settle`].
#[cfg(unix)]
#[pyfunction]
pub(crate) fn settle(py: Python<'_>) {
    py.detach(file::settle);
}

/// Saves a state dict as bytes: those that `save_file` would write.
///
/// Args and errors are those of `save_file`.
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
    let options = options(metadata, compression, level, digest)?;
    let Planned { layout, interrupt, .. } = &planned(state_dict, options, allow_pickle)?;
    let len = usize::try_from(layout.file_len()).map_err(io::Error::other)?;
    Ok(PyBytes::new_with(py, len, |target| {
        py.detach(|| file::fill(layout, target, || interrupt.check())).map_err(PyErr::from)
    })?)
}

/// Loads what `save_file` has written.
///
/// With "mmap", tensors are views of a private map of the file: pages are read when they are touched, and
/// a write into a tensor changes this process's memory alone. The map ends with the last tensor. Nobody
/// may truncate or change the file while it is mapped; replacing it, as `save_file` does, is fine. Use
/// "pread" for files that others write to, or that lie on a network.
///
/// Args:
///     filename: the file.
///     device: where the tensors shall be, as torch names it.
///     framework: "torch" or "numpy"; None: torch, or numpy where torch is not installed. What was an
///         array of numpy is one again. Arrays of a mapped file are read-only.
///     backend: "mmap", or "pread" into memory of its own.
///     verify: "eager": every byte of the file is proven before this returns; "lazy": each tensor is
///         when it is handed out, which for this function is the same; "off": only the index is proven.
///     allow_pickle: whether objects that were pickled are unpickled, which executes code that the file
///         holds.
///
/// Returns:
///     The state dict. Shards of DTensors come as `TensorShard`. Of what `tssd pack` made of a model's
///     directory, ".files" is a dict of the files without tensors, bytes by name: `state_dict.pop(".files")`
///     leaves what `load_state_dict` takes.
///
/// Raises:
///     TssdCorruptError: the file is damaged, or no archive.
///     TssdTypeError: the file holds a pickled object, and `allow_pickle` is False.
///     TssdOSError: the system failed.
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
    let (backend, proof) = (Backend::of(backend)?, Proof::of(verify)?);
    let framework = Framework::of(py, framework)?;
    let interrupt = Interrupt::new();
    let load = || {
        let file = open(&filename)?;
        let len = file.metadata()?.len();
        let memory = match backend {
            Backend::Mmap => Memory::of_file(&file, 0..len)?.0,
            Backend::Pread => {
                let file: Arc<File> = Arc::new(file);
                // What is no archive is not read.
                Archive::from_blob(file.clone())?;
                let len = usize::try_from(len).map_err(io::Error::other)?;
                Memory::filled(len, |target| file::read(&*file, 0, target, || interrupt.check()))?
            }
        };
        Whole::new(memory, proof, &interrupt)
    };
    let whole = py.detach(|| load().map_err(|error| error.in_file(&filename)))?;
    Maker::new(py, &whole.archive, &whole, framework)
        .on_device(device)?
        .allow_pickle(allow_pickle)
        .state_dict()
        .map_err(|error| error.in_file(&filename))
}

/// Loads what `save` has returned.
///
/// Tensors of torch lie in memory of their own, arrays of numpy are read-only views of `data`. Args and
/// errors are those of `load_file`.
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
    let framework = Framework::of(py, framework)?;
    let (proof, interrupt) = (Proof::of(verify)?, Interrupt::new());
    let memory = copied(data, &interrupt)?;
    let whole = py.detach(|| Whole::new(memory, proof, &interrupt))?;
    Maker::new(py, &whole.archive, &whole, framework)
        .on_device(device)?
        .allow_pickle(allow_pickle)
        .state_dict()
}

/// A copy of bytes, or of what another object lends as bytes.
pub(crate) fn copied(data: &Bound<'_, PyAny>, interrupt: &Interrupt) -> Result<Memory> {
    let py = data.py();
    if let Ok(bytes) = data.cast::<PyBytes>() {
        let bytes = bytes.as_bytes();
        return py.detach(|| {
            Memory::filled(bytes.len(), |target| {
                file::read(&Slice(bytes), 0, target, || interrupt.check())
            })
        });
    }
    let class = data.get_type();
    let no_bytes = |error: PyErr| {
        let message = format!("data is bytes, or another object with a buffer, not {class}");
        if error.is_instance_of::<PyTypeError>(py) { PyTypeError::new_err(message) } else { error }
    };
    let view = PyMemoryView::from(data).map_err(no_bytes)?;
    let Ok(view) = view.call_method1("cast", ("B",)) else {
        // What has gaps is put together first.
        return copied(&view.call_method0("tobytes")?, interrupt);
    };
    let len = view.len()?;
    Memory::filled(len, |target| {
        for (at, part) in (0..len).step_by(PIECE).zip(target.chunks_mut(PIECE)) {
            // The bytes of others are looked at with the GIL alone, which others get between two pieces: whoever computes
            // all the time gives it back after 5 ms.
            let slice = PySlice::new(py, at.cast_signed(), (at + part.len()).cast_signed(), 1);
            let piece = view.get_item(slice)?.call_method0("tobytes")?.cast_into::<PyBytes>()?;
            let bytes = piece.as_bytes();
            py.detach(|| interrupt.check().map(|()| tssd_format::copy(bytes, part)))?;
        }
        Ok(())
    })
}

/// Borrowed bytes as a blob.
struct Slice<'a>(&'a [u8]);

impl tssd_format::Blob for Slice<'_> {
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
        if filename.join(MANIFEST).exists() {
            return Err(Error::new(ErrorKind::BlobElsewhere).into());
        }
        return Err(io::Error::from_raw_os_error(EISDIR).into());
    }
    Ok(file)
}

/// What Linux and all BSDs call it.
const EISDIR: i32 = 21;

/// An archive that lies in memory as a whole, proven as far as it was asked for.
pub(crate) struct Whole {
    pub(crate) archive: Archive,
    memory: Memory,
    /// Storages that are compressed, raw.
    unpacked: Mutex<BTreeMap<u32, Block>>,
}

impl Whole {
    fn new(memory: Memory, proof: Proof, interrupt: &Interrupt) -> Result<Self> {
        // The index is copied: what was proven stays, whoever writes into the file.
        let archive = Archive::from_blob(Arc::new(Map::from(memory.bytes())))?;
        if archive.is_manifest_alone() {
            return Err(Error::new(ErrorKind::BlobElsewhere).into());
        }
        if proof != Proof::Off {
            file::verify(archive.verify_jobs(), || interrupt.check())?;
        }
        let unpacked = Mutex::new(unpack(&archive, interrupt)?);
        Ok(Self { archive, memory, unpacked })
    }

    /// The same of memory that was proven before.
    pub(crate) fn proven(memory: Memory) -> Result<Self> {
        Self::new(memory, Proof::Off, &Interrupt::new())
    }
}

impl Source for Whole {
    fn block(&self, number: u32) -> Result<(Block, u64)> {
        let mut unpacked = self.unpacked.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(block) = unpacked.remove(&number) {
            return Ok((block, 0));
        }
        let range = self.archive.storage(number).stored_range();
        let place = |at: u64| usize::try_from(at).map_err(io::Error::other);
        Ok((self.memory.block(place(range.start)?..place(range.end)?), 0))
    }
}

/// The raw bytes of all storages of tensors that are compressed.
fn unpack(archive: &Archive, interrupt: &Interrupt) -> Result<BTreeMap<u32, Block>> {
    let packed = |number: &u32| archive.storage(*number).packing.is_some();
    if !(0..archive.storage_count()).any(|number| packed(&number)) {
        return Ok(BTreeMap::new());
    }
    let tensors: BTreeSet<u32> = archive
        .leaves()
        .iter()
        .filter(|(_, node)| matches!(node, Node::Tensors(_)))
        .flat_map(|(_, node)| node.storages().collect::<Vec<_>>())
        .filter(packed)
        .collect();
    let mut blocks = BTreeMap::new();
    for number in tensors {
        let len = archive.storage(number).len;
        let memory = unpacked(archive, number, 0..len, interrupt)?;
        blocks.insert(number, memory.block(0..usize::try_from(len).map_err(io::Error::other)?));
    }
    Ok(blocks)
}

/// A range of the raw bytes of a storage, in memory of its own.
fn unpacked(
    archive: &Archive,
    number: u32,
    range: Range<u64>,
    interrupt: &Interrupt,
) -> Result<Memory> {
    let len = usize::try_from(range.end - range.start).map_err(io::Error::other)?;
    Memory::filled(len, |target| {
        file::raw(archive, number, range.start, target, || interrupt.check())
    })
}

/// Opens a file to read some of its tensors.
///
/// Only the index is read now. It is a context manager; tensors stay valid after it.
///
/// Args:
///     filename: the file.
///     framework: "torch" (or "pt"), or "numpy" (or "np").
///     device: where tensors shall be, as torch names it.
///     backend: "mmap": each tensor is a private map of its part of the file; "pread": it is read into
///         memory of its own.
///     verify: "eager": every byte of the file is proven now; "lazy": what a tensor touches is, when it
///         is first asked for; "off": only the index is proven.
///
/// Raises:
///     TssdCorruptError: the file is damaged, or no archive.
///     TssdOSError: the system failed.
#[pyclass(frozen, name = "safe_open", module = "tssd")]
pub(crate) struct SafeOpen {
    opened: Mutex<Option<Arc<Opened>>>,
    framework: Framework,
    device: Option<Py<PyAny>>,
}

struct Opened {
    archive: Archive,
    file: Arc<File>,
    filename: PathBuf,
    backend: Backend,
    proof: Proof,
    /// Chunks by storage and number.
    proven: Mutex<BTreeSet<(u32, u64)>>,
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
        let (backend, proof) = (Backend::of(backend)?, Proof::of(verify)?);
        let framework = Framework::of(py, Some(framework))?;
        let interrupt = Interrupt::new();
        let open = || {
            let file = Arc::new(open(&filename)?);
            let archive = Archive::from_blob(file.clone())?;
            if archive.is_manifest_alone() {
                return Err(Error::new(ErrorKind::BlobElsewhere).into());
            }
            if proof == Proof::Eager {
                file::verify(archive.verify_jobs(), || interrupt.check())?;
            }
            Ok((archive, file))
        };
        let (archive, file) =
            py.detach(|| open().map_err(|error: Failure| error.in_file(&filename)))?;
        let proof = if proof == Proof::Eager { Proof::Off } else { proof };
        let proven = Mutex::default();
        let opened = Opened { archive, file, filename, backend, proof, proven };
        Ok(Self { opened: Mutex::new(Some(Arc::new(opened))), framework, device })
    }

    fn __enter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, _exception: &Bound<'_, PyTuple>) {
        self.opened.lock().unwrap_or_else(PoisonError::into_inner).take();
    }

    /// The fqns of all tensors, in the order of the state dict.
    fn keys(&self) -> Result<Vec<String>> {
        let opened = self.opened()?;
        Ok(tensors(&opened.archive).into_iter().map(|(fqn, _)| fqn).collect())
    }

    /// The fqns of all tensors, in the order of their bytes in the file.
    fn offset_keys(&self) -> Result<Vec<String>> {
        let opened = self.opened()?;
        let mut tensors = tensors(&opened.archive);
        tensors.sort_by_key(|(_, run)| {
            let first = run.first();
            first.map(|reference| (reference.storage, reference.byte_offset))
        });
        Ok(tensors.into_iter().map(|(fqn, _)| fqn).collect())
    }

    /// What was given as `metadata` when the file was saved; None if nothing was.
    fn metadata<'py>(&self, py: Python<'py>) -> Result<Option<Bound<'py, PyDict>>> {
        metadata::given(py, &self.opened()?.archive.attrs())
    }

    /// The tensor with an fqn, in memory of its own: a write into it changes no other tensor. A shard of
    /// a DTensor comes as a `TensorShard`.
    ///
    /// Raises:
    ///     TssdKeyError: there is no such tensor.
    ///     TssdTypeError: the leaf is none.
    ///     TssdCorruptError: its bytes are damaged.
    fn get_tensor<'py>(&self, py: Python<'py>, name: &str) -> Result<Bound<'py, PyAny>> {
        let opened = self.opened()?;
        let run = opened.tensor(name)?;
        let source = opened.part(py, spans(&run));
        self.maker(py, &opened, &source)?
            .tensors(&run)
            .map_err(|error| error.in_file(&opened.filename))
    }

    /// The tensor with an fqn, to be read in parts: `get_slice(name)[0:2, 5]`.
    ///
    /// Raises:
    ///     TssdKeyError: there is no such tensor.
    ///     TssdTypeError: the leaf is none, or a shard.
    fn get_slice(&self, name: &str) -> Result<SafeSlice> {
        let opened = self.opened()?;
        let run = opened.tensor(name)?;
        match run.as_slice() {
            [reference] if reference.place.is_none() => Ok(SafeSlice {
                opened: opened.clone(),
                reference: reference.clone(),
                framework: self.framework,
                device: self
                    .device
                    .as_ref()
                    .map(|device| Python::attach(|py| device.clone_ref(py))),
            }),
            _ => Err(Refusal::new("NotATensor", format!("`{name}` is a shard"))
                .advice("get it with get_tensor")
                .into()),
        }
    }
}

impl SafeOpen {
    fn opened(&self) -> Result<Arc<Opened>> {
        let opened = self.opened.lock().unwrap_or_else(PoisonError::into_inner);
        opened.clone().ok_or_else(|| PyValueError::new_err("the file is closed").into())
    }

    fn maker<'py, 'a>(
        &self,
        py: Python<'py>,
        opened: &'a Opened,
        source: &'a Part<'py, 'a>,
    ) -> Result<Maker<'py, 'a>> {
        let device = self.device.as_ref().map(|device| device.bind(py).clone());
        Maker::new(py, &opened.archive, source, self.framework).on_device(device)
    }
}

/// The tensors of an archive: fqns and references.
fn tensors(archive: &Archive) -> Vec<(String, Vec<TensorReference>)> {
    let leaves = archive.leaves().into_iter();
    leaves
        .filter_map(|(path, node)| match node {
            Node::Tensors(run) => Some((path.fqn(), run)),
            _ => None,
        })
        .collect()
}

impl Opened {
    fn tensor(&self, fqn: &str) -> Result<Vec<TensorReference>> {
        match self.archive.node(fqn)? {
            Node::Tensors(run) => Ok(run),
            _ => Err(Error::new(ErrorKind::NotATensor).at(fqn).into()),
        }
    }

    fn part<'py, 'a>(&'a self, py: Python<'py>, spans: BTreeMap<u32, Range<u64>>) -> Part<'py, 'a> {
        Part { py, opened: self, spans }
    }

    /// A range of the raw bytes of a storage, proven if it is to be.
    fn read(&self, number: u32, span: &Range<u64>, interrupt: &Interrupt) -> Result<Block> {
        let storage = self.archive.storage(number);
        let size = |bytes: u64| usize::try_from(bytes).map_err(io::Error::other);
        let len = size(span.end - span.start)?;
        if storage.packing.is_some() {
            // Decoding proves each chunk.
            let memory = unpacked(&self.archive, number, span.clone(), interrupt)?;
            return Ok(memory.block(0..len));
        }
        let chunks = storage.chunks(span);
        let unproven: Vec<u64> = {
            let proven = self.proven.lock().unwrap_or_else(PoisonError::into_inner);
            let is_unproven = |chunk: &u64| !proven.contains(&(number, *chunk));
            chunks.clone().filter(|_| self.proof != Proof::Off).filter(is_unproven).collect()
        };
        // Only whole chunks can be proven.
        let mut cover = span.clone();
        if let (Some(first), Some(last)) = (unproven.first(), unproven.last()) {
            cover.start = cover.start.min(storage.chunk(*first).start);
            cover.end = cover.end.max(storage.chunk(*last).end);
        }
        let stored = storage.offset + cover.start..storage.offset + cover.end;
        let mapped = if self.backend == Backend::Mmap && span.end - span.start >= MAPPED_MIN {
            // A process that has too many maps reads.
            Memory::of_file(&self.file, stored.clone()).ok()
        } else {
            None
        };
        let (memory, lead) = if let Some(mapped) = mapped {
            mapped
        } else {
            let read = Memory::filled(size(cover.end - cover.start)?, |target| {
                file::read(&*self.file, stored.start, target, || interrupt.check())
            })?;
            (read, 0)
        };
        let bytes = &memory.as_ref()[lead..];
        file::prove(&storage, &unproven, cover.start, bytes, || interrupt.check())
            .map_err(|error: Failure| error.at_leaf(|| self.archive.leaf_in(number)))?;
        self.proven
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .extend(unproven.into_iter().map(|chunk| (number, chunk)));
        let start = lead + size(span.start - cover.start)?;
        Ok(memory.block(start..start + len))
    }
}

/// The bytes that some tensors span.
struct Part<'py, 'a> {
    py: Python<'py>,
    opened: &'a Opened,
    spans: BTreeMap<u32, Range<u64>>,
}

impl Source for Part<'_, '_> {
    fn block(&self, number: u32) -> Result<(Block, u64)> {
        let span = &self.spans[&number];
        let interrupt = Interrupt::new();
        let block = self.py.detach(|| self.opened.read(number, span, &interrupt))?;
        Ok((block, span.start))
    }
}

/// A tensor of a file that is read in parts.
#[pyclass(frozen, module = "tssd")]
pub(crate) struct SafeSlice {
    opened: Arc<Opened>,
    reference: TensorReference,
    framework: Framework,
    device: Option<Py<PyAny>>,
}

#[pymethods]
impl SafeSlice {
    /// The shape of the whole tensor, in elements.
    fn get_shape(&self) -> Vec<u64> {
        self.reference.meta.shape().into()
    }

    /// The dtype, as torch calls it: "bfloat16".
    fn get_dtype(&self) -> &'static str {
        self.reference.meta.dtype().name()
    }

    /// Part of the tensor, by ints, slices and `...`. Only what lies between its first and its last
    /// element is read.
    ///
    /// Raises:
    ///     IndexError: an index is out of range.
    ///     TypeError: an index is an array or a tensor.
    ///     TssdCorruptError: the bytes are damaged.
    fn __getitem__<'py>(&self, index: &Bound<'py, PyAny>) -> Result<Bound<'py, PyAny>> {
        let py = index.py();
        let meta = &self.reference.meta;
        let index = Index::of(index)?;
        let (shape, strides, first) = match self.framework {
            Framework::Torch => Torch::import(py)?.index(meta, index.whole())?,
            Framework::Numpy => Numpy::import(py)?.index(meta, index.whole())?,
        };
        // In elements from the first of the tensor on.
        let (mut low, mut high) = (first, first);
        for (size, stride) in shape.iter().zip(&strides) {
            let reach = i64::try_from(*size).map_err(io::Error::other)?.saturating_sub(1) * stride;
            (low, high) = (low + reach.min(0), high + reach.max(0));
        }
        let itemsize = meta.dtype().itemsize();
        let place = |element: i64| {
            let element = u64::try_from(element).map_err(io::Error::other)?;
            Ok::<_, Failure>(self.reference.byte_offset + element * itemsize)
        };
        let mut reference = self.reference.clone();
        let mut spans = BTreeMap::new();
        match reference.storage {
            Some(number) if !shape.contains(&0) => {
                spans.insert(number, place(low)?..place(high)? + itemsize);
            }
            _ => reference.storage = None,
        }
        let first = if reference.storage.is_some() { place(first)? } else { 0 };
        let source = self.opened.part(py, spans);
        let device = self.device.as_ref().map(|device| device.bind(py).clone());
        Maker::new(py, &self.opened.archive, &source, self.framework)
            .on_device(device)?
            .view(&reference, &shape, &strides, first)
            .map_err(|error| error.in_file(&self.opened.filename))
    }
}

/// Proves a file: every stored byte, and what compressed bytes decode to.
///
/// Args:
///     filename: the file.
///
/// Raises:
///     TssdCorruptError: it is damaged, or no archive; `kind` names the rule.
///     TssdOSError: the system failed.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "what Python gives is owned")]
pub(crate) fn verify(py: Python<'_>, filename: PathBuf) -> Result<()> {
    let interrupt = Interrupt::new();
    let verify = || {
        let archive = Archive::from_blob(Arc::new(open(&filename)?))?;
        file::verify(archive.verify_jobs(), || interrupt.check())?;
        file::verify(archive.decode_jobs(), || interrupt.check())
    };
    py.detach(|| verify().map_err(|error: Failure| error.in_file(&filename)))
}

/// What is in a file, without its elements.
///
/// Args:
///     filename: the file.
///
/// Returns:
///     The JSON view of section 9 of the specification, as Python's objects.
///
/// Raises:
///     TssdCorruptError: the file is damaged, or no archive.
///     TssdOSError: the system failed.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "what Python gives is owned")]
pub(crate) fn inspect(py: Python<'_>, filename: PathBuf) -> Result<Bound<'_, PyAny>> {
    let view = || {
        let archive = Archive::from_blob(Arc::new(open(&filename)?))?;
        Ok(to_json_without_elements(&archive)?.to_string())
    };
    let view = py.detach(|| view().map_err(|error: Failure| error.in_file(&filename)))?;
    Ok(py.import("json")?.call_method1("loads", (view,))?)
}
