//! Files that hold a state dict: archives, and safetensors files seen as such.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use tssd_format::safetensors::{Entry, HEADER_ATTR, Header, INDEX_ATTR};
use tssd_format::{
    Archive, AttrValue, Attrs, Blob, Container, Key, Node, StateDict, Step, Storage, Tensor,
    TensorReference, Value,
};

use crate::failure::{Failure, Result};
use crate::input::{open, shown};

/// An opened file. Its structure is proven; its tensors are read one by one, when they are asked for.
pub(crate) struct Document {
    path: PathBuf,
    source: Source,
}

enum Source {
    Archive(Archive),
    Safetensors(Arc<dyn Blob>, Header),
}

impl Document {
    /// Opens a file, whatever it is: its first bytes tell.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let file = open(path)?;
        let path = shown(path);
        let refused = |error| Failure::format(path, &error);
        let source = if looks_like_safetensors(&*file) {
            let header = Header::read(&*file).map_err(refused)?;
            Source::Safetensors(file, header)
        } else {
            Source::Archive(Archive::from_blob(file).map_err(refused)?)
        };
        Ok(Self { path: path.to_owned(), source })
    }

    /// The archive, unless it is a safetensors file.
    pub(crate) fn archive(&self) -> Option<&Archive> {
        match &self.source {
            Source::Archive(archive) => Some(archive),
            Source::Safetensors(..) => None,
        }
    }

    /// Where it is.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Its length in bytes.
    pub(crate) fn file_len(&self) -> u64 {
        match &self.source {
            Source::Archive(archive) => archive.file_len(),
            Source::Safetensors(_, header) => header.file_len(),
        }
    }

    /// What is said of it as a whole; without what is there for `unpack` alone.
    pub(crate) fn attrs(&self) -> Attrs {
        let mut attrs = match &self.source {
            Source::Archive(archive) => archive.attrs(),
            Source::Safetensors(_, header) => {
                let text = |value: &String| AttrValue::Text(value.as_str().into());
                let metadata = header.metadata().iter();
                metadata.map(|(name, value)| (name.clone(), text(value))).collect()
            }
        };
        attrs.retain(|name, _| name != HEADER_ATTR && name != INDEX_ATTR);
        attrs
    }

    /// Its tree. The storages of a safetensors file are its tensors, in the order of the header.
    pub(crate) fn structure(&self) -> Node {
        match &self.source {
            Source::Archive(archive) => archive.structure(),
            Source::Safetensors(_, header) => {
                let child = |(number, entry): (u32, &Entry)| {
                    let reference = TensorReference {
                        meta: entry.meta().clone(),
                        storage: (entry.meta().numel() > 0).then_some(number),
                        byte_offset: 0,
                        place: None,
                    };
                    (Step::Key(Key::from(entry.name())), Node::Tensors(vec![reference]))
                };
                Node::Container(Container::Dict, (0..).zip(header.tensors()).map(child).collect())
            }
        }
    }

    /// The bytes of a storage of its structure.
    pub(crate) fn storage(&self, number: u32) -> Result<Bytes> {
        match &self.source {
            Source::Archive(archive) => {
                archive.storage_bytes(number).map_err(|error| Failure::format(&self.path, &error))
            }
            Source::Safetensors(file, header) => {
                let index = usize::try_from(number).expect("a number of this structure");
                let tensor = header.tensors()[index].tensor(&**file);
                tensor
                    .map(|tensor| tensor.storage().bytes().clone())
                    .map_err(|error| Failure::format(&self.path, &error))
            }
        }
    }

    /// A tensor of its structure.
    pub(crate) fn tensor(&self, reference: &TensorReference) -> Result<Tensor> {
        let bytes = reference.storage.map_or_else(|| Ok(Bytes::new()), |at| self.storage(at))?;
        Tensor::new(reference.meta.clone(), Storage::from(bytes), reference.byte_offset)
            .map_err(|error| Failure::format(&self.path, &error))
    }

    /// All of it, in memory.
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

/// Safetensors files have no magic: they begin with the length of a JSON object.
fn looks_like_safetensors(file: &dyn Blob) -> bool {
    let mut start = [0; 9];
    let Ok(()) = file.read_exact_at(&mut start, 0) else { return false };
    let [len @ .., brace] = start;
    brace == b'{' && file.size().is_ok_and(|size| u64::from_le_bytes(len) <= size)
}
