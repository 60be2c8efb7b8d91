//! Inputs that hold a state dict: archives, shard sets and models in safetensors files, with one interface.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use tssd_format::safetensors::{FILE_NAME, HEADER_ATTR, Header, INDEX_ATTR, INDEX_NAME};
use tssd_format::{
    Archive, Attrs, Blob, MANIFEST_NAME, Node, STORE_ATTR_PREFIX, StateDict, Storage, Tensor,
    TensorReference, ZSTD_LEVEL_ATTR,
};

use crate::console::Console;
use crate::exit::Exit;
use crate::failure::{Failure, Result};
use crate::input::{
    OpenError, directory_failure, display_input_path, is_directory, is_shard_set, open,
    open_shard_set,
};
use crate::model::{Links, Model, is_model_directory};
use crate::output::Scratch;

/// An open input whose structure has been verified. Each tensor is read on demand.
pub(crate) struct Document {
    path: PathBuf,
    source: Source,
}

/// The content of a document.
pub(crate) enum Source {
    /// An archive, and its file if it was opened from one file. A manifest does not have the bytes of its file.
    Archive(Archive, Option<Arc<dyn Blob>>),
    Model(Model),
}

/// The archive of a document.
pub(crate) struct DocumentArchive {
    pub(crate) archive: Archive,
    // Dropped after the archive, which is a file in it.
    _scratch: Option<Scratch>,
}

impl Document {
    /// Opens an input as [`open_with`](Self::open_with) does, without the option `--follow-links`.
    pub(crate) fn open(path: &Path) -> Result<Self, OpenError> {
        Self::open_with(path, Links::default(), None)
    }

    /// Opens a file, and detects its format from the first bytes, or the shard set or model of a directory.
    ///
    /// The file `output` is left out of a model directory, because it is not part of the model.
    pub(crate) fn open_with(
        path: &Path,
        links: Links,
        output: Option<&Path>,
    ) -> Result<Self, OpenError> {
        if is_shard_set(path) {
            return Self::open_shard_set(path);
        }
        let source = if is_directory(path)? {
            if !is_model_directory(path) {
                let lacking = format!("neither {MANIFEST_NAME}, {INDEX_NAME} nor {FILE_NAME}");
                let help = "name a file, or the directory of a model or of a shard set";
                return Err(directory_failure(path, &lacking, help).into());
            }
            Source::Model(Model::open_directory(path, links, output)?)
        } else {
            Self::source_of(display_input_path(path), open(path)?)?
        };
        Ok(Self { path: display_input_path(path).to_owned(), source })
    }

    /// Detects the format of a file.
    fn source_of(path: &Path, file: Arc<dyn Blob>) -> Result<Source, OpenError> {
        if looks_like_torch(&*file) {
            let message = format_args!("{} is a file of torch.save", path.display());
            let help = "`tssd convert FILE -o OUT.tssd` makes an archive of it; it takes no stdin";
            return Err(Failure::new(Exit::Refused, message).help(help).into());
        }
        if looks_like_safetensors(&*file) {
            return Ok(Source::Model(Model::from_blob(path, file)?));
        }
        let archive = Archive::from_blob(file.clone());
        let archive = archive.map_err(|error| OpenError::defect(path, error))?;
        Ok(Source::Archive(archive, Some(file)))
    }

    /// Opens the shard set of a directory.
    pub(crate) fn open_shard_set(directory: &Path) -> Result<Self, OpenError> {
        Ok(Self::from_archive(directory, open_shard_set(directory)?))
    }

    /// Wraps an archive that is already open.
    pub(crate) fn from_archive(path: &Path, archive: Archive) -> Self {
        Self { path: path.to_owned(), source: Source::Archive(archive, None) }
    }

    /// Joins a delta with its base.
    ///
    /// # Errors
    ///
    /// Refuses a document that is no delta, and a base with another content.
    pub(crate) fn with_base(self, base: &Self, console: Console) -> Result<Self> {
        let delta = self.delta("leave out the base")?.clone();
        let DocumentArchive { archive, .. } = base.to_archive(None, console)?;
        let joined = delta.with_base(archive);
        let archive = joined.map_err(|error| Failure::format(base.path(), &error))?;
        Ok(Self::from_archive(&self.path, archive))
    }

    /// Returns the archive of a delta. Refuses any other document.
    pub(crate) fn delta(&self, help: &str) -> Result<&Archive> {
        self.archive().filter(|archive| archive.base_digest().is_some()).ok_or_else(|| {
            let message = format_args!("{} is no delta", self.path.display());
            Failure::new(Exit::Refused, message).help(help)
        })
    }

    /// Returns the content.
    pub(crate) fn source(&self) -> &Source {
        &self.source
    }

    /// Returns the archive, or `None` for a model.
    pub(crate) fn archive(&self) -> Option<&Archive> {
        match &self.source {
            Source::Archive(archive, _) => Some(archive),
            Source::Model(_) => None,
        }
    }

    /// Returns the model, or `None` for an archive.
    pub(crate) fn model(&self) -> Option<&Model> {
        match &self.source {
            Source::Archive(..) => None,
            Source::Model(model) => Some(model),
        }
    }

    /// Returns the archive, or that which `tssd pack` makes of the model.
    ///
    /// A model is packed into a scratch directory next to `output`, or into memory if the command has no output.
    pub(crate) fn to_archive(
        &self,
        output: Option<&Path>,
        console: Console,
    ) -> Result<DocumentArchive> {
        let (archive, scratch) = match (&self.source, output) {
            (Source::Archive(archive, _), _) => (archive.clone(), None),
            (Source::Model(model), None) => (model.pack_in_memory(console)?, None),
            (Source::Model(model), Some(output)) => {
                let (archive, scratch) = model.pack_next_to(output, console)?;
                (archive, Some(scratch))
            }
        };
        Ok(DocumentArchive { archive, _scratch: scratch })
    }

    /// Returns the path, for messages.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the length of the file in bytes, or of all files of a shard set or model.
    pub(crate) fn file_len(&self) -> u64 {
        match &self.source {
            Source::Archive(archive, _) if archive.is_manifest_only() => archive.file_len(),
            Source::Archive(archive, _) => {
                let shards = archive.shards().into_iter().map(|shard| shard.file_len);
                shards.fold(archive.file_len(), u64::saturating_add)
            }
            Source::Model(model) => model.file_len(),
        }
    }

    /// Returns the length of all storages in bytes, after decompression.
    pub(crate) fn raw_len(&self) -> u64 {
        match &self.source {
            Source::Archive(archive, _) => {
                (0..archive.storage_count()).map(|number| archive.storage(number).len).sum()
            }
            Source::Model(model) => model.raw_len(),
        }
    }

    /// Returns the attributes of the file, except those that only `unpack` or zstd uses.
    pub(crate) fn attrs(&self) -> Attrs {
        let mut attrs = match &self.source {
            Source::Archive(archive, _) => archive.attrs(),
            Source::Model(model) => model.attrs.clone(),
        };
        attrs
            .retain(|name, _| ![HEADER_ATTR, INDEX_ATTR, ZSTD_LEVEL_ATTR].contains(&name.as_str()));
        attrs
    }

    /// Returns whether the file is a shard set, or the manifest of one.
    pub(crate) fn is_shard_set(&self) -> bool {
        self.archive().is_some_and(|archive| !archive.shards().is_empty())
    }

    /// Returns [`attrs`](Self::attrs) without those that a store adds to a version.
    pub(crate) fn attrs_without_version(&self) -> Attrs {
        let mut attrs = self.attrs();
        attrs.retain(|name, _| !name.starts_with(STORE_ATTR_PREFIX));
        attrs
    }

    /// Returns the tree of nodes.
    pub(crate) fn structure(&self) -> Node {
        match &self.source {
            Source::Archive(archive, _) => archive.structure(),
            Source::Model(model) => model.structure(),
        }
    }

    /// Reads the bytes of a storage of the structure.
    pub(crate) fn storage(&self, number: u32) -> Result<Bytes> {
        match &self.source {
            Source::Archive(archive, _) => {
                archive.storage_bytes(number).map_err(|error| Failure::format(&self.path, &error))
            }
            Source::Model(model) => model.storage(number),
        }
    }

    /// Returns the length of a storage of the structure in bytes, after decompression.
    pub(crate) fn storage_len(&self, number: u32) -> u64 {
        match &self.source {
            Source::Archive(archive, _) => archive.storage(number).len,
            Source::Model(model) => model.storage_len(number),
        }
    }

    /// Reads a tensor of the structure. Of its storage, only the bytes that the tensor spans are read.
    pub(crate) fn tensor(&self, reference: &TensorReference) -> Result<Tensor> {
        let tensor = match &self.source {
            Source::Archive(archive, _) => archive.read_tensor(reference),
            Source::Model(model) => {
                let bytes = reference.storage.map(|at| model.storage(at)).transpose()?;
                let storage = Storage::from(bytes.unwrap_or_default());
                Tensor::new(reference.meta.clone(), storage, reference.byte_offset)
            }
        };
        tensor.map_err(|error| Failure::format(&self.path, &error))
    }

    /// Reads the whole state dict into memory.
    pub(crate) fn to_state_dict(&self) -> Result<StateDict> {
        match &self.source {
            Source::Archive(archive, _) => {
                archive.to_state_dict().map_err(|error| Failure::format(&self.path, &error))
            }
            Source::Model(model) => model.to_state_dict(),
        }
    }
}

/// Returns whether a file looks like safetensors: the length of a JSON object, then the object.
///
/// Safetensors files have no magic number. A file that ends within its header looks like safetensors too, so that the
/// message names the defect.
fn looks_like_safetensors(file: &dyn Blob) -> bool {
    let mut start = [0; 9];
    let Ok(()) = file.read_exact_at(&mut start, 0) else { return false };
    let [len @ .., brace] = start;
    brace == b'{' && u64::from_le_bytes(len) <= Header::MAX_BYTES
}

/// Returns whether a file looks like the output of torch.save.
///
/// These files are zip files, or begin with a magic number, pickled with protocol 2 or later.
pub(crate) fn looks_like_torch(file: &dyn Blob) -> bool {
    const MAGIC: [u8; 10] = [0x6c, 0xfc, 0x9c, 0x46, 0xf9, 0x20, 0x6a, 0xa8, 0x50, 0x19];
    let mut start = [0; 32];
    let Ok(()) = file.read_exact_at(&mut start, 0) else { return false };
    start.starts_with(b"PK\x03\x04")
        || start[0] == 0x80 && start.windows(MAGIC.len()).any(|window| window == MAGIC)
}
