//! Files that hold a state dict: archives and safetensors files, with one interface.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use tssd_format::safetensors::{Entry, HEADER_ATTR, Header, INDEX_ATTR};
use tssd_format::{
    Archive, AttrValue, Attrs, Blob, Container, MapKey, Node, STORE_ATTR_PREFIX, StateDict, Step,
    Storage, Tensor, TensorReference, Value, ZSTD_LEVEL_ATTR,
};

use crate::delta::with_base;
use crate::exit::Exit;
use crate::failure::{Failure, Result};
use crate::input::{display_input_path, is_shard_set, open, open_archive};

/// An open file whose structure has been verified. Each tensor is read on demand.
pub(crate) struct Document {
    path: PathBuf,
    source: Source,
}

enum Source {
    Archive(Archive),
    Safetensors(Arc<dyn Blob>, Header),
}

impl Document {
    /// Opens a file, and detects its format from the first bytes.
    ///
    /// A directory with a manifest is opened as a shard set.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        if is_shard_set(path) {
            return Ok(Self::from_archive(path, open_archive(path)?));
        }
        let file = open(path)?;
        let path = display_input_path(path);
        let format_failure = |error| Failure::format(path, &error);
        if looks_like_torch(&*file) {
            let message = format_args!("{} is a file of torch.save", path.display());
            return Err(Failure::new(Exit::Refused, message).help(
                "`tssd convert FILE -o OUT.tssd` makes an archive of it; it takes no stdin",
            ));
        }
        let source = if looks_like_safetensors(&*file) {
            let header = Header::read(&*file).map_err(format_failure)?;
            Source::Safetensors(file, header)
        } else {
            Source::Archive(Archive::from_blob(file).map_err(format_failure)?)
        };
        Ok(Self { path: path.to_owned(), source })
    }

    /// Opens a file, with its base if it is a delta and a base is given.
    pub(crate) fn open_with_base(path: &Path, base: Option<&Path>) -> Result<Self> {
        let document = Self::open(path)?;
        match (base, document.source) {
            (Some(base), Source::Archive(archive)) => {
                Ok(Self::from_archive(path, with_base(archive, path, base)?))
            }
            (Some(_), Source::Safetensors(..)) => {
                let message = format_args!("{} is no delta", document.path.display());
                Err(Failure::new(Exit::Refused, message).help("leave out the base"))
            }
            (None, source) => Ok(Self { path: document.path, source }),
        }
    }

    /// Wraps an archive that is already open.
    pub(crate) fn from_archive(path: &Path, archive: Archive) -> Self {
        Self { path: path.to_owned(), source: Source::Archive(archive) }
    }

    /// Returns the archive, or `None` for a safetensors file.
    pub(crate) fn archive(&self) -> Option<&Archive> {
        match &self.source {
            Source::Archive(archive) => Some(archive),
            Source::Safetensors(..) => None,
        }
    }

    /// Returns the path, for messages.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the length of the file in bytes, or of all files of a shard set.
    pub(crate) fn file_len(&self) -> u64 {
        match &self.source {
            Source::Archive(archive) if archive.is_manifest_only() => archive.file_len(),
            Source::Archive(archive) => {
                let shards = archive.shards().into_iter().map(|shard| shard.file_len);
                shards.fold(archive.file_len(), u64::saturating_add)
            }
            Source::Safetensors(_, header) => header.file_len(),
        }
    }

    /// Returns the attributes of the file, except those that only `unpack` or zstd uses.
    pub(crate) fn attrs(&self) -> Attrs {
        let mut attrs = match &self.source {
            Source::Archive(archive) => archive.attrs(),
            Source::Safetensors(_, header) => {
                let text = |value: &String| AttrValue::Text(value.as_str().into());
                let metadata = header.metadata().iter();
                metadata.map(|(name, value)| (name.clone(), text(value))).collect()
            }
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
    ///
    /// The storages of a safetensors file are its tensors, in the order of the header.
    pub(crate) fn structure(&self) -> Node {
        match &self.source {
            Source::Archive(archive) => archive.structure(),
            Source::Safetensors(_, header) => {
                let child = |(number, entry): (u32, &Entry)| {
                    let reference = TensorReference {
                        meta: entry.meta().clone(),
                        storage: (entry.meta().numel() > 0).then_some(number),
                        byte_offset: 0,
                        shard_spec: None,
                    };
                    (Step::Key(MapKey::from(entry.name())), Node::Tensors(vec![reference]))
                };
                Node::Container(Container::Dict, (0..).zip(header.tensors()).map(child).collect())
            }
        }
    }

    /// Reads the bytes of a storage of the structure.
    pub(crate) fn storage(&self, number: u32) -> Result<Bytes> {
        match &self.source {
            Source::Archive(archive) => {
                archive.storage_bytes(number).map_err(|error| Failure::format(&self.path, &error))
            }
            Source::Safetensors(file, header) => {
                let index = usize::try_from(number).expect("a number of this structure");
                let tensor = header.tensors()[index].tensor(&**file);
                tensor
                    .map(|tensor| tensor.storage().bytes().cloned().unwrap_or_default())
                    .map_err(|error| Failure::format(&self.path, &error))
            }
        }
    }

    /// Reads a tensor of the structure. Of its storage, only the bytes that the tensor spans are read.
    pub(crate) fn tensor(&self, reference: &TensorReference) -> Result<Tensor> {
        let tensor = match &self.source {
            Source::Archive(archive) => archive.read_tensor(reference),
            Source::Safetensors(..) => {
                let bytes = reference.storage.map(|at| self.storage(at)).transpose()?;
                let storage = Storage::from(bytes.unwrap_or_default());
                Tensor::new(reference.meta.clone(), storage, reference.byte_offset)
            }
        };
        tensor.map_err(|error| Failure::format(&self.path, &error))
    }

    /// Reads the whole state dict into memory.
    pub(crate) fn to_state_dict(&self) -> Result<StateDict> {
        match &self.source {
            Source::Archive(archive) => {
                archive.to_state_dict().map_err(|error| Failure::format(&self.path, &error))
            }
            Source::Safetensors(file, header) => {
                let mut dict = StateDict::new();
                for entry in header.tensors() {
                    let tensor = entry.tensor(&**file);
                    let tensor = tensor.map_err(|error| Failure::format(&self.path, &error))?;
                    dict.insert(entry.name(), Value::from(tensor));
                }
                Ok(dict)
            }
        }
    }
}

/// Returns whether a file looks like safetensors: the length of a JSON object, then the object.
///
/// Safetensors files have no magic number.
pub(crate) fn looks_like_safetensors(file: &dyn Blob) -> bool {
    let mut start = [0; 9];
    let Ok(()) = file.read_exact_at(&mut start, 0) else { return false };
    let [len @ .., brace] = start;
    brace == b'{' && file.size().is_ok_and(|size| u64::from_le_bytes(len) <= size)
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
