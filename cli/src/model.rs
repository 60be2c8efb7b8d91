//! Safetensors files, and model directories in the layout of Hugging Face.
//!
//! A model has the structure of the archive that `tssd pack` makes of it.

mod directory;
mod folder;

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use tssd_format::safetensors::{FILES_KEY, Header, Index};
use tssd_format::{
    Archive, ArchiveWriter, Attrs, Blob, Container, ContentKind, Dict, MapKey, Node, Options,
    StateDict, Step, TensorReference, Value,
};

use crate::console::Console;
use crate::failure::{Failure, Result};
use crate::input::OpenError;
use crate::output::Scratch;

pub(crate) use directory::is_model_directory;
pub(crate) use folder::{Links, OtherFile};

/// An open safetensors file, or an open model directory. Its headers have been verified.
pub(crate) struct Model {
    pub(crate) path: PathBuf,
    /// Attributes of the archive that `tssd pack` makes.
    pub(crate) attrs: Attrs,
    /// The files with tensors: one, or those of a directory.
    pub(crate) files: Vec<TensorFile>,
    /// `None` for a file.
    pub(crate) directory: Option<Directory>,
}

/// The parts of a model directory that hold no tensors.
#[derive(Default)]
pub(crate) struct Directory {
    /// `None` if the directory has one file with tensors, and no index.
    pub(crate) index: Option<Index>,
    /// The files that are packed unchanged, sorted by name.
    pub(crate) other_files: Vec<OtherFile>,
    /// Names of the entries that are not packed.
    pub(crate) skipped: Vec<String>,
}

/// A file with tensors.
pub(crate) struct TensorFile {
    pub(crate) path: PathBuf,
    pub(crate) header: Header,
    pub(crate) blob: Arc<dyn Blob>,
}

/// A storage of the structure of a model.
enum Storage<'a> {
    /// A tensor, by its file and its position in the header.
    Tensor(&'a TensorFile, usize),
    Other(&'a OtherFile),
}

impl Model {
    /// Opens a safetensors file. `path` names it in messages.
    pub(crate) fn from_blob(path: &Path, blob: Arc<dyn Blob>) -> Result<Self, OpenError> {
        let path = path.to_owned();
        let defect = |error| OpenError::defect(&path, error);
        let header = Header::read(&*blob).map_err(defect)?;
        let attrs = header.attrs().map_err(defect)?;
        let files = vec![TensorFile { path: path.clone(), header, blob }];
        Ok(Self { path, attrs, files, directory: None })
    }

    /// Opens a model directory. The file `output` is left out, because it is not part of the model.
    pub(crate) fn open_directory(
        path: &Path,
        links: Links,
        output: Option<&Path>,
    ) -> Result<Self, OpenError> {
        directory::open(path, links, output)
    }

    /// Returns the files that are packed unchanged, sorted by name.
    pub(crate) fn other_files(&self) -> &[OtherFile] {
        self.directory.as_ref().map_or(&[], |directory| &directory.other_files)
    }

    /// Returns the names of the entries of the directory that are not packed.
    pub(crate) fn skipped(&self) -> &[String] {
        self.directory.as_ref().map_or(&[], |directory| &directory.skipped)
    }

    /// Returns the number of tensors.
    pub(crate) fn tensor_count(&self) -> usize {
        self.files.iter().map(|file| file.header.tensors().len()).sum()
    }

    /// Returns the size of all tensors in bytes.
    pub(crate) fn tensor_bytes(&self) -> u64 {
        let entries = self.files.iter().flat_map(|file| file.header.tensors());
        entries.map(|entry| entry.meta().nbytes()).fold(0, u64::saturating_add)
    }

    /// Returns the size of all other files in bytes.
    pub(crate) fn other_bytes(&self) -> u64 {
        self.other_files().iter().map(OtherFile::len).fold(0, u64::saturating_add)
    }

    /// Returns the length of all storages of the archive in bytes.
    pub(crate) fn raw_len(&self) -> u64 {
        let stored = self.other_files().iter().filter(|other| other.inline_content().is_none());
        stored.map(OtherFile::len).fold(self.tensor_bytes(), u64::saturating_add)
    }

    /// Returns the length in bytes of all files, with those that hold no tensors.
    pub(crate) fn file_len(&self) -> u64 {
        let index = self.directory.as_ref().and_then(|directory| directory.index.as_ref());
        let index = index.map_or(0, |index| u64::try_from(index.text().len()).unwrap_or(u64::MAX));
        let files = self.files.iter().map(|file| file.header.file_len());
        files.fold(index, u64::saturating_add).saturating_add(self.other_bytes())
    }

    /// Returns the tree of nodes. The storages are the tensors in the order of the files, then the other files.
    pub(crate) fn structure(&self) -> Node {
        let mut numbers = 0..;
        let entries = self.files.iter().flat_map(|file| file.header.tensors());
        let mut children: Vec<(Step, Node)> = entries
            .map(|entry| {
                let number = numbers.next();
                let reference = TensorReference {
                    meta: entry.meta().clone(),
                    storage: number.filter(|_| entry.meta().numel() > 0),
                    byte_offset: 0,
                    shard_spec: None,
                };
                (Step::Key(MapKey::from(entry.name())), Node::Tensors(vec![reference]))
            })
            .collect();
        let other_files = self.other_files().iter().zip(numbers).map(|(other, number)| {
            let node = match other.inline_content() {
                Some(bytes) => Node::Leaf(Value::Bytes(bytes.clone())),
                None => Node::StoredLeaf(ContentKind::Bytes, number),
            };
            (Step::Key(MapKey::from(other.name())), node)
        });
        let other_files: Vec<(Step, Node)> = other_files.collect();
        if !other_files.is_empty() {
            let node = Node::Container(Container::Dict, other_files);
            children.push((Step::Key(MapKey::from(FILES_KEY)), node));
        }
        Node::Container(Container::Dict, children)
    }

    /// Returns a storage of the structure.
    fn locate(&self, number: u32) -> Storage<'_> {
        let mut position = usize::try_from(number).expect("a number of this structure");
        for file in &self.files {
            let count = file.header.tensors().len();
            if position < count {
                return Storage::Tensor(file, position);
            }
            position -= count;
        }
        Storage::Other(&self.other_files()[position])
    }

    /// Reads the bytes of a storage of the structure.
    pub(crate) fn storage(&self, number: u32) -> Result<Bytes> {
        match self.locate(number) {
            Storage::Tensor(file, position) => {
                let tensor = file.header.tensors()[position].tensor(&*file.blob);
                let tensor = tensor.map_err(|error| Failure::format(&file.path, &error))?;
                Ok(tensor.storage().bytes().cloned().unwrap_or_default())
            }
            Storage::Other(other) => other.read(),
        }
    }

    /// Returns the length of a storage of the structure in bytes.
    pub(crate) fn storage_len(&self, number: u32) -> u64 {
        match self.locate(number) {
            Storage::Tensor(file, position) => file.header.tensors()[position].meta().nbytes(),
            Storage::Other(other) => other.len(),
        }
    }

    /// Returns the name of the file of a tensor in a directory with several.
    pub(crate) fn shard_name(&self, number: u32) -> Option<String> {
        match self.locate(number) {
            Storage::Tensor(file, _) if self.files.len() > 1 => {
                Some(file.path.file_name()?.to_string_lossy().into_owned())
            }
            _ => None,
        }
    }

    /// Reads the whole model into memory.
    pub(crate) fn to_state_dict(&self) -> Result<StateDict> {
        let mut dict = StateDict::new();
        for file in &self.files {
            for entry in file.header.tensors() {
                let tensor = entry.tensor(&*file.blob);
                let tensor = tensor.map_err(|error| Failure::format(&file.path, &error))?;
                dict.insert(entry.name(), tensor);
            }
        }
        let mut other_files = Dict::new();
        for other in self.other_files() {
            other_files.insert(other.name(), Value::Bytes(other.read()?));
        }
        if !other_files.is_empty() {
            dict.insert(FILES_KEY, other_files);
        }
        Ok(dict)
    }

    /// Writes an archive of the model: tensor by tensor, then file by file. `target` names it in messages.
    ///
    /// Memory holds one tensor or file at a time.
    pub(crate) fn write_archive<W: Write>(
        &self,
        output: W,
        options: Options,
        target: &Path,
    ) -> Result<W> {
        let format_failure = |error| Failure::format(target, &error);
        let options = with_attrs(options, &self.attrs);
        let mut writer = ArchiveWriter::new(output, options).map_err(format_failure)?;
        for file in &self.files {
            for entry in file.header.tensors() {
                let tensor = entry.tensor(&*file.blob);
                let tensor = tensor.map_err(|error| Failure::format(&file.path, &error))?;
                writer.insert(entry.name(), tensor).map_err(format_failure)?;
            }
        }
        for other in self.other_files() {
            let content = other.read()?;
            writer.insert_into(FILES_KEY, other.name(), content).map_err(format_failure)?;
        }
        writer.finish().map_err(format_failure)
    }

    /// Packs the model into an archive in memory.
    pub(crate) fn pack_in_memory(&self, console: Console) -> Result<Archive> {
        let bar = console.bytes_bar("packing", self.file_len());
        let mut bytes = Vec::new();
        self.write_archive(bar.wrap_write(&mut bytes), Options::new(), &self.path)?;
        bar.finish_and_clear();
        Archive::from_bytes(bytes).map_err(|error| Failure::format(&self.path, &error))
    }

    /// Packs the model into an archive in a scratch directory next to `output`.
    pub(crate) fn pack_next_to(
        &self,
        output: &Path,
        console: Console,
    ) -> Result<(Archive, Scratch)> {
        let scratch = Scratch::create_for(output)?;
        let target = scratch.file("packed.tssd");
        let io_failure = |error| Failure::io("write", output, error);
        let bar = console.bytes_bar("packing", self.file_len());
        let mut stream = BufWriter::new(File::create_new(&target).map_err(io_failure)?);
        self.write_archive(bar.wrap_write(&mut stream), Options::new(), output)?;
        stream.flush().map_err(io_failure)?;
        bar.finish_and_clear();
        let file = File::open(&target).map_err(io_failure)?;
        let archive = Archive::from_blob(Arc::new(file));
        Ok((archive.map_err(|error| Failure::format(&self.path, &error))?, scratch))
    }
}

/// Adds the attributes of a model to options.
pub(crate) fn with_attrs(options: Options, attrs: &Attrs) -> Options {
    let attrs = attrs.iter();
    attrs.fold(options, |options, (name, value)| options.attr(name.as_str(), value.clone()))
}
