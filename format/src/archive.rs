//! Archives that are read: opened, proven, looked up, verified.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;

use crate::blob::Blob;
use crate::encode::{Attrs, ShardFile};
use crate::error::{Error, ErrorKind, Result};
use crate::fill::length;
use crate::frame::{DATA_START, FRAME_LEN, check_len, parse_head, parse_trailer};
use crate::index::Index;
use crate::key::ObjectPath;
use crate::layout::combine;

use crate::state_dict::{StateDict, Value};
use crate::structure::{CHUNK_BYTES, Node, StorageReference, TensorReference, tensor_of};
use crate::tensor::Tensor;
use crate::text::is_text;
use crate::views::{Views, native};

/// An archive whose index is proven: an `Archive` that exists is valid. Its payload is proven by
/// [`Archive::verify`].
///
/// The blob stays where it is. So does the index in memory that nothing can change; else it is copied.
/// Cloning an archive is cheap.
#[derive(Clone)]
pub struct Archive {
    index: Arc<Index>,
    blob: Arc<dyn Blob>,
    file_len: u64,
}

impl Archive {
    /// Opens an archive that is in memory, all of it. Its tensors, strings and bytes are views of that
    /// memory, and keep it.
    ///
    /// # Errors
    ///
    /// One kind for each rule of the spec from F-001 to F-082, with the place.
    pub fn from_bytes(bytes: impl Into<Bytes>) -> Result<Self> {
        Self::from_blob(Arc::new(bytes.into()))
    }

    /// Opens a file. Only its head and index are read now; each tensor is read when it is asked for,
    /// into memory of its own. Whatever happens to the file meanwhile is an error, never a crash.
    ///
    /// # Errors
    ///
    /// As [`Archive::from_bytes`]; `Io` if the file cannot be read.
    pub fn open(path: impl AsRef<std::path::Path>) -> Result<Self> {
        let path = path.as_ref();
        let at = |error: Error| error.at(path.display());
        let file = std::fs::File::open(path).map_err(Error::io).map_err(at)?;
        Self::from_blob(Arc::new(file)).map_err(at)
    }

    /// Opens bytes wherever they are. Tensors are views of those that are in memory; others are read
    /// when they are asked for, as [`Archive::open`] does.
    ///
    /// # Errors
    ///
    /// As [`Archive::from_bytes`]; `Io` if they cannot be read.
    pub fn from_blob(blob: Arc<dyn Blob>) -> Result<Self> {
        let (index, file_len) = read_index(&*blob)?;
        Ok(Self { index: Arc::new(index), blob, file_len })
    }

    /// Length of the file in bytes.
    pub fn file_len(&self) -> u64 {
        self.file_len
    }

    /// Where the index lies in the file, in bytes. The blob is what lies between 4096 and it.
    pub fn index_range(&self) -> Range<u64> {
        let place = self.index.place();
        place.index_off..place.index_off + place.index_len
    }

    /// The CRC-32 of the index, which names the layout and the checksums of everything.
    pub fn index_crc32(&self) -> u32 {
        self.index.place().index_crc32
    }

    /// The bytes of the index.
    pub fn index_bytes(&self) -> &[u8] {
        self.index.bytes()
    }

    /// What is said of the archive as a whole.
    pub fn attrs(&self) -> Attrs {
        self.index.attrs()
    }

    /// The other files that hold its storages; none unless it is a manifest.
    pub fn shards(&self) -> Vec<ShardFile> {
        self.index.shards()
    }

    /// Its tree, with references in place of bytes.
    pub fn structure(&self) -> Node {
        self.index.structure()
    }

    /// How many storages it has.
    pub fn storage_count(&self) -> u32 {
        self.index.storage_count()
    }

    /// A storage by its number, which must be below [`Archive::storage_count`].
    ///
    /// # Panics
    ///
    /// If it is not.
    pub fn storage(&self, number: u32) -> StorageReference {
        self.index.storage(number)
    }

    /// All leaves with their paths, in insertion order, depth first.
    pub fn leaves(&self) -> Vec<(ObjectPath, Node)> {
        self.structure().into_leaves()
    }

    /// The state dict. Tensors that are tied share their memory.
    ///
    /// # Errors
    ///
    /// `BlobElsewhere` for a manifest; `Io` if the file cannot be read; `NotText` for a long str that
    /// is none.
    pub fn to_state_dict(&self) -> Result<StateDict> {
        StateDict::from_value(self.load(0)?)
    }

    /// The value at an exact path.
    ///
    /// # Errors
    ///
    /// `NotFound`; else as [`Archive::to_state_dict`].
    pub fn value(&self, path: &ObjectPath) -> Result<Value> {
        self.load(self.index.find(path)?)
    }

    /// The leaf with an fqn.
    ///
    /// # Errors
    ///
    /// `NotFound`; `AmbiguousFqn` if two leaves have it; else as [`Archive::to_state_dict`].
    pub fn leaf(&self, fqn: &str) -> Result<Value> {
        self.load(self.index.find_fqn(fqn)?).map_err(|error| error.at(fqn))
    }

    /// The plain tensor with an fqn.
    ///
    /// # Errors
    ///
    /// `NotATensor` for another leaf, a shard among them; else as [`Archive::leaf`].
    pub fn tensor(&self, fqn: &str) -> Result<Tensor> {
        match self.leaf(fqn)? {
            Value::Tensor(tensor) => Ok(tensor),
            _ => Err(Error::new(ErrorKind::NotATensor).at(fqn)),
        }
    }

    /// The tensor of a reference from this archive's structure.
    ///
    /// # Errors
    ///
    /// As [`Archive::to_state_dict`].
    pub fn tensor_of(&self, reference: &TensorReference) -> Result<Tensor> {
        tensor_of(reference.clone(), &mut |number| self.storage_bytes(number))
    }

    fn load(&self, node: usize) -> Result<Value> {
        let views = self.index.views();
        // Tensors that share a storage share its memory, so it is read once.
        let mut read = BTreeMap::new();
        self.index.value(node, &mut |number| {
            if self.blob.bytes().is_some() {
                return self.bytes_of(&views, number);
            }
            if let Some(bytes) = read.get(&number) {
                return Ok(Bytes::clone(bytes));
            }
            let bytes = self.bytes_of(&views, number)?;
            read.insert(number, bytes.clone());
            Ok(bytes)
        })
    }

    /// The bytes of a storage: a view if the archive is in memory, else read.
    ///
    /// # Errors
    ///
    /// `BlobElsewhere` for a manifest; `Io` if the file cannot be read.
    pub fn storage_bytes(&self, number: u32) -> Result<Bytes> {
        self.bytes_of(&self.index.views(), number)
    }

    fn bytes_of(&self, views: &Views<'_>, number: u32) -> Result<Bytes> {
        if !views.shards.is_empty() {
            return Err(Error::new(ErrorKind::BlobElsewhere).at(format_args!("storage {number}")));
        }
        let storage = &views.storages[native(number)];
        let offset = storage.offset.to_native();
        self.read(offset..offset + storage.stored_len.to_native())
    }

    fn read(&self, range: Range<u64>) -> Result<Bytes> {
        let size = |bytes: u64| usize::try_from(bytes).map_err(|_| Error::new(ErrorKind::TooLarge));
        if let Some(bytes) = self.blob.bytes() {
            return Ok(bytes.slice(size(range.start)?..size(range.end)?));
        }
        let mut bytes = vec![0; size(range.end - range.start)?];
        self.blob.read_exact_at(&mut bytes, range.start)?;
        Ok(bytes.into())
    }

    /// Proves the payload: every stored byte and every byte of padding.
    ///
    /// # Errors
    ///
    /// `ChunkCorrupt`, `StorageCorrupt`, `PaddingNotZero` with the byte offset and a leaf that is
    /// hurt; `Io` if the file cannot be read.
    pub fn verify(&self) -> Result<()> {
        self.verify_jobs().iter().try_for_each(Verify::run)
    }

    /// The jobs that together are [`Archive::verify`], independent of each other. Those of
    /// a manifest read nothing: its payload lies in other archives.
    pub fn verify_jobs(&self) -> Vec<Verify<'_>> {
        let mut jobs = Vec::new();
        if !self.index.views().shards.is_empty() {
            let storages = (0..self.storage_count()).map(|number| (number, self.storage(number)));
            jobs.extend(storages.map(|(number, storage)| Verify {
                archive: self,
                number,
                part: Part::Whole(storage),
            }));
            return jobs;
        }
        for number in self.index.stored_texts() {
            let part = Part::Text(self.storage(number));
            jobs.push(Verify { archive: self, number, part });
        }
        let mut end = DATA_START;
        for number in 0..self.storage_count() {
            let storage = self.storage(number);
            jobs.push(Verify { archive: self, number, part: Part::Padding(end..storage.offset) });
            end = storage.offset + storage.len;
            jobs.push(Verify { archive: self, number, part: Part::Whole(storage.clone()) });
            let mut start = storage.offset;
            for crc in storage.crcs {
                let next = (start + CHUNK_BYTES).min(end);
                jobs.push(Verify { archive: self, number, part: Part::Chunk(start..next, crc) });
                start = next;
            }
        }
        let index_off = self.index_range().start;
        jobs.push(Verify { archive: self, number: 0, part: Part::Padding(end..index_off) });
        jobs
    }

    /// A leaf that lies in a storage, for errors.
    fn leaf_in(&self, storage: u32) -> String {
        let lies_in_it = |node: &Node| match node {
            Node::Stored(_, number) => *number == storage,
            Node::Tensors(run) => run.iter().any(|each| each.storage == Some(storage)),
            Node::Leaf(_) | Node::Container(..) => false,
        };
        let hurt = self.leaves().into_iter().find(|(_, node)| lies_in_it(node));
        hurt.map_or_else(|| format!("storage {storage}"), |(path, _)| path.fqn())
    }
}

impl fmt::Debug for Archive {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Archive({} bytes, {} storages)", self.file_len, self.storage_count())
    }
}

/// One job of [`Archive::verify_jobs`].
#[derive(Debug)]
pub struct Verify<'a> {
    archive: &'a Archive,
    number: u32,
    part: Part,
}

#[derive(Debug)]
enum Part {
    /// Bytes of the file that must be zero.
    Padding(Range<u64>),
    /// Bytes of the file with this CRC-32.
    Chunk(Range<u64>, u32),
    /// The checksum of a storage against those of its chunks: no payload at all.
    Whole(StorageReference),
    /// A str that lies in this storage.
    Text(StorageReference),
}

impl Verify<'_> {
    /// How many bytes of the file the job reads.
    pub fn len(&self) -> u64 {
        match &self.part {
            Part::Padding(range) | Part::Chunk(range, _) => range.end - range.start,
            Part::Whole(_) => 0,
            Part::Text(storage) => storage.len,
        }
    }

    /// True if the job reads nothing.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Proves its part.
    ///
    /// # Errors
    ///
    /// As [`Archive::verify`].
    pub fn run(&self) -> Result<()> {
        let (kind, range) = match &self.part {
            Part::Padding(range) => {
                let bytes = self.archive.read(range.clone())?;
                let Some(at) = bytes.iter().position(|byte| *byte != 0) else { return Ok(()) };
                let at = range.start + length(&bytes[..at]);
                return Err(Error::new(ErrorKind::PaddingNotZero).byte(at));
            }
            Part::Chunk(range, crc) => {
                if crc32fast::hash(&self.archive.read(range.clone())?) == *crc {
                    return Ok(());
                }
                (ErrorKind::ChunkCorrupt, range.clone())
            }
            Part::Whole(storage) => {
                if combine(storage.len, &storage.crcs) == storage.crc32 {
                    return Ok(());
                }
                (ErrorKind::StorageCorrupt, storage.offset..storage.offset + storage.len)
            }
            Part::Text(storage) => {
                let range = storage.offset..storage.offset + storage.len;
                if is_text(&self.archive.read(range.clone())?) {
                    return Ok(());
                }
                (ErrorKind::NotText, range)
            }
        };
        Err(Error::new(kind)
            .at(self.archive.leaf_in(self.number))
            .byte(range.start)
            .note(format_args!("{} bytes", range.end - range.start)))
    }
}

/// Reads and proves head, trailer and index; nothing is allocated before its length is proven
/// against that of the file.
fn read_index(file: &dyn Blob) -> Result<(Index, u64)> {
    let file_len = file.size()?;
    let mut head = [0; 4096];
    let start = usize::try_from(file_len).unwrap_or(head.len()).min(head.len());
    file.read_exact_at(&mut head[..start], 0)?;
    // A foreign file is named as such, however short it is.
    let looks_like_tssd = head.starts_with(b"\x89TSD\r\n\x1a\n");
    check_len(file_len).map_err(|error| {
        if start >= 8 && !looks_like_tssd { Error::new(ErrorKind::NotTssd) } else { error }
    })?;
    let (frame, zeros) = head.split_first_chunk::<FRAME_LEN>().expect("4096 is more than 64");
    parse_head(frame)?;
    if let Some(at) = zeros.iter().position(|byte| *byte != 0) {
        return Err(Error::new(ErrorKind::ReservedNotZero).byte(64 + length(&zeros[..at])));
    }
    let mut trailer = [0; FRAME_LEN];
    file.read_exact_at(&mut trailer, file_len - 64)?;
    let place = parse_trailer(&trailer, file_len)?;
    let index = file.stable(place.index_off..place.index_off + place.index_len)?;
    Ok((Index::parse(index, place)?, file_len))
}
