//! Files that hold a state dict: archives, and safetensors files seen as such.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use tssd_format::{
    Archive, AttrValue, Attrs, Blob, Container, ErrorKind, Key, MANIFEST, Node, StateDict, Step,
    Storage, Tensor, TensorReference, Value,
};
use tssd_store::VERSION_ATTRS;

use crate::exit::Exit;
use crate::failure::{Failure, Result};
use crate::header::{Entry, HEADER_ATTR, Header};

/// The attribute that says how an archive is compressed, and nothing of what it means.
pub(crate) const ZSTD_LEVEL_ATTR: &str = "tssd.zstd_level";

/// An opened file. Its structure is proven; its tensors are read one by one, when they are asked for.
#[derive(Debug)]
pub(crate) struct Document {
    path: PathBuf,
    source: Source,
}

#[derive(Debug)]
enum Source {
    Archive(Archive),
    Safetensors(File, Header),
}

impl Document {
    /// Opens a file, whatever it is: its first bytes tell. A directory with a manifest is a shard set.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        if is_shard_set(path) {
            return Ok(Self::of(path, open_set(path)?));
        }
        let file = open_file(path)?;
        let source = if looks_like_safetensors(&file) {
            let header = Header::read(&file).map_err(|reject| reject.into_failure(path))?;
            Source::Safetensors(file, header)
        } else {
            Source::Archive(open_archive(path, file)?)
        };
        Ok(Self { path: path.to_owned(), source })
    }

    /// An archive that is open already.
    pub(crate) fn of(path: &Path, archive: Archive) -> Self {
        Self { path: path.to_owned(), source: Source::Archive(archive) }
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

    /// Its length in bytes; of a shard set that of all of its files.
    pub(crate) fn file_len(&self) -> u64 {
        match &self.source {
            Source::Archive(archive) if archive.is_manifest_alone() => archive.file_len(),
            Source::Archive(archive) => {
                let shards = archive.shards().into_iter().map(|shard| shard.file_len);
                shards.fold(archive.file_len(), u64::saturating_add)
            }
            Source::Safetensors(file, _) => file.size().unwrap_or_default(),
        }
    }

    /// What is said of it as a whole; without what is there for `unpack` or for zstd alone.
    pub(crate) fn attrs(&self) -> Attrs {
        let mut attrs = match &self.source {
            Source::Archive(archive) => archive.attrs(),
            Source::Safetensors(_, header) => {
                let metadata = header.metadata.iter().flatten();
                let text = |value: &String| AttrValue::Text(value.as_str().into());
                metadata.map(|(name, value)| (name.clone(), text(value))).collect()
            }
        };
        attrs.remove(HEADER_ATTR);
        attrs.remove(ZSTD_LEVEL_ATTR);
        attrs
    }

    /// Whether it is a shard set, or the manifest of one.
    pub(crate) fn is_set(&self) -> bool {
        self.archive().is_some_and(|archive| !archive.shards().is_empty())
    }

    /// The same without what a store says of a version.
    pub(crate) fn own_attrs(&self) -> Attrs {
        let mut attrs = self.attrs();
        attrs.retain(|name, _| !VERSION_ATTRS.contains(&name.as_str()));
        attrs
    }

    /// Its tree. The storages of a safetensors file are its tensors, in the order of the header.
    pub(crate) fn structure(&self) -> Node {
        match &self.source {
            Source::Archive(archive) => archive.structure(),
            Source::Safetensors(_, header) => {
                let child = |(number, entry): (u32, &Entry)| {
                    let reference = TensorReference {
                        meta: entry.meta.clone(),
                        storage: (entry.meta.numel() > 0).then_some(number),
                        byte_offset: 0,
                        place: None,
                    };
                    (Step::Key(Key::from(&*entry.name)), Node::Tensors(vec![reference]))
                };
                Node::Container(Container::Dict, (0..).zip(&header.tensors).map(child).collect())
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
                load(file, &header.tensors[index])
                    .map_err(|error| Failure::io("read", &self.path, error))
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
            Source::Safetensors(_, header) => {
                let mut dict = StateDict::new();
                let references = self.structure().into_leaves().into_iter();
                for (entry, (_, node)) in header.tensors.iter().zip(references) {
                    let Node::Tensors(run) = node else { continue };
                    for reference in run {
                        dict.insert(&*entry.name, Value::from(self.tensor(&reference)?));
                    }
                }
                Ok(dict)
            }
        }
    }
}

/// Opens a file for reading; a directory is none.
pub(crate) fn open_file(path: &Path) -> Result<File> {
    let file = File::open(path).map_err(|error| Failure::io("read", path, error))?;
    if file.metadata().is_ok_and(|metadata| metadata.is_dir()) {
        return Err(Failure::new(Exit::Refused, format_args!("{} is a directory", path.display()))
            .help("name a file, or a directory with a manifest.tssd"));
    }
    Ok(file)
}

/// Whether a path is a directory with a manifest.
pub(crate) fn is_shard_set(path: &Path) -> bool {
    path.is_dir() && path.join(MANIFEST).symlink_metadata().is_ok()
}

/// Opens the shard set of a directory as one archive.
pub(crate) fn open_set(directory: &Path) -> Result<Archive> {
    tssd_format::open_shard_set(directory).map_err(|error| {
        // The file of the set that the system refuses is more to the point.
        let file = error.path().filter(|_| error.kind() == ErrorKind::Io).map(Path::new);
        Failure::format(file.unwrap_or(directory), &error)
    })
}

/// Opens a file as an archive.
pub(crate) fn open_archive(path: &Path, file: File) -> Result<Archive> {
    Archive::from_blob(Arc::new(file)).map_err(|error| Failure::format(path, &error))
}

/// A tensor of a safetensors file, in memory of its own.
pub(crate) fn load(file: &File, entry: &Entry) -> std::io::Result<Bytes> {
    let len = entry.range.end - entry.range.start;
    let mut bytes = vec![0; usize::try_from(len).map_err(std::io::Error::other)?];
    file.read_exact_at(&mut bytes, entry.range.start)?;
    Ok(bytes.into())
}

/// Safetensors files have no magic: they begin with the length of a JSON object.
pub(crate) fn looks_like_safetensors(file: &File) -> bool {
    let mut start = [0; 9];
    let Ok(()) = file.read_exact_at(&mut start, 0) else { return false };
    let [len @ .., brace] = start;
    brace == b'{' && file.size().is_ok_and(|size| u64::from_le_bytes(len) <= size)
}
