//! Archives that are read: opened, proven, looked up.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;

use crate::blob::Blob;
use crate::checksum::checksum;
use crate::digest::{self, Digest};
use crate::encode::{Attrs, ShardFile};
use crate::error::{Error, ErrorKind, Result};
use crate::fill::length;
use crate::frame::{FRAME_LEN, MAGIC, check_len, parse_head, parse_trailer};
use crate::index::Index;
use crate::key::ObjectPath;
use crate::lookup::{find, find_fqn};
use crate::memory::zeroed;
use crate::record::kind;
use crate::state_dict::{StateDict, Value};
use crate::storage::{ChunkReader, StorageReference, Unpack};
use crate::structure::{Node, TensorReference};
use crate::tensor::Tensor;
use crate::views::{Views, native};

/// What is only looked at is read from files in blocks of this many bytes.
const READ_BLOCK: usize = 256 << 10;

thread_local! {
    /// Such a block: to have new memory for each chunk took a tenth of the time.
    static READ: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// An archive whose index is proven: an `Archive` that exists is valid. Its payload is proven by
/// [`Archive::verify`].
///
/// The blob stays where it is. So does the index in memory that nothing can change; else it is copied.
/// Cloning an archive is cheap.
#[derive(Clone)]
pub struct Archive {
    index: Arc<Index>,
    /// The head, which the root digest needs.
    head: [u8; FRAME_LEN],
    /// Where storages are, by shard: this file, or the archives that a manifest names; none of a
    /// manifest that is opened alone.
    blobs: Arc<[Arc<dyn Blob>]>,
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
        let (index, head, file_len) = read_index(&*blob)?;
        let is_manifest = !index.views().shards.is_empty();
        let blobs = if is_manifest { Vec::new() } else { vec![blob] };
        Ok(Self { index: Arc::new(index), head, blobs: blobs.into(), file_len })
    }

    /// Opens a shard set: a manifest and the archives that it names, read as one. `open` finds an
    /// archive, which is then proven to be the one that the manifest means; it must look beside the
    /// manifest, and follow no links. [`open_shard_set`](crate::open_shard_set) does so.
    ///
    /// A file without shards opens as [`Archive::from_blob`] opens it.
    ///
    /// # Errors
    ///
    /// As [`Archive::from_bytes`]; `ShardMismatch` (F-083); what `open` returns.
    pub fn from_shard_set<E: From<Error>>(
        manifest: Arc<dyn Blob>,
        mut open: impl FnMut(&ShardFile) -> Result<Arc<dyn Blob>, E>,
    ) -> Result<Self, E> {
        let mut archive = Self::from_blob(manifest)?;
        let shards = archive.shards();
        if shards.is_empty() {
            return Ok(archive);
        }
        let mut blobs = Vec::with_capacity(shards.len());
        for shard in &shards {
            let blob = open(shard)?;
            shard.prove(&blob).map_err(|error| error.at(&shard.name))?;
            blobs.push(blob);
        }
        archive.blobs = blobs.into();
        Ok(archive)
    }

    /// Whether this is a manifest that was opened without the archives that it names, so that its
    /// storages cannot be read.
    pub fn is_manifest_alone(&self) -> bool {
        self.blobs.is_empty()
    }

    /// The bytes of a shard, or of this file if it has none and the number is 0.
    ///
    /// # Panics
    ///
    /// If there is no such shard, or the manifest was opened alone.
    pub fn blob(&self, shard: u32) -> &Arc<dyn Blob> {
        &self.blobs[native(shard)]
    }

    /// The digest that names everything that the file means, if each of its storages has one (spec:
    /// section 8). It is what a detached signature signs.
    pub fn root_digest(&self) -> Option<Digest> {
        let views = self.index.views();
        if views.digests.len() != views.storages.len() {
            return None;
        }
        let trailer = self.index.place().trailer();
        Some(digest::hash(&[&self.head, self.index.bytes(), &trailer[..52], &trailer[56..]]))
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
        StateDict::from_value(self.load(&self.index.views(), 0)?)
    }

    /// The value at an exact path.
    ///
    /// # Errors
    ///
    /// `NotFound`; else as [`Archive::to_state_dict`].
    pub fn value(&self, path: &ObjectPath) -> Result<Value> {
        let views = self.index.views();
        self.load(&views, find(&views, path)?)
    }

    /// The leaf with an fqn.
    ///
    /// # Errors
    ///
    /// `NotFound`; `AmbiguousFqn` if two leaves have it; else as [`Archive::to_state_dict`].
    pub fn leaf(&self, fqn: &str) -> Result<Value> {
        let views = self.index.views();
        self.load(&views, find_fqn(&views, fqn)?).map_err(|error| error.at(fqn))
    }

    /// The leaf with an fqn, with references in place of bytes.
    ///
    /// # Errors
    ///
    /// `NotFound`; `AmbiguousFqn` if two leaves have it.
    pub fn node(&self, fqn: &str) -> Result<Node> {
        let views = self.index.views();
        Ok(self.index.node(&views, find_fqn(&views, fqn)?))
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

    /// The tensor of a reference from this archive's structure. No more of its storage is read than
    /// it spans.
    ///
    /// # Errors
    ///
    /// As [`Archive::to_state_dict`].
    pub fn tensor_of(&self, reference: &TensorReference) -> Result<Tensor> {
        let span = reference.byte_offset..reference.byte_offset + reference.meta.span_bytes();
        let bytes = reference.storage.map(|number| self.storage_range(number, span)).transpose()?;
        Tensor::new(reference.meta.clone(), bytes.unwrap_or_default().into(), 0)
    }

    /// The value of a node; `views` are the tables of this index.
    fn load(&self, views: &Views<'_>, node: usize) -> Result<Value> {
        if views.nodes[node].kind == kind::TENSOR
            && let Node::Tensors(run) = self.index.node(views, node)
            && let [reference @ TensorReference { place: None, .. }] = run.as_slice()
        {
            return self.tensor_of(reference).map(Value::Tensor);
        }
        // Tensors that share a storage share its memory, so it is read once.
        let mut read = BTreeMap::new();
        self.index.value(views, node, &mut |number| {
            if let Some(bytes) = self.view(views, number) {
                return Ok(bytes);
            }
            if let Some(bytes) = read.get(&number) {
                return Ok(Bytes::clone(bytes));
            }
            let bytes = self.storage_bytes(number)?;
            read.insert(number, bytes.clone());
            Ok(bytes)
        })
    }

    /// The bytes of a storage that are in memory as they are.
    fn view(&self, views: &Views<'_>, number: u32) -> Option<Bytes> {
        let storage = &views.storages[native(number)];
        let blob = self.blobs.get(native(storage.shard.to_native()))?.bytes()?;
        let offset = storage.offset.to_native();
        let place = |at: u64| usize::try_from(at).expect("it is in memory");
        let range = place(offset)..place(offset + storage.stored_len.to_native());
        (storage.codec == 0).then(|| blob.slice(range))
    }

    /// The raw bytes of a storage: a view if they are in memory as they are, else read and decoded.
    ///
    /// # Errors
    ///
    /// `BlobElsewhere` for a manifest that was opened alone; `Io` if the file cannot be read;
    /// `ChunkCorrupt`, `FrameCorrupt`, `FeatureMissing` if it is compressed.
    pub fn storage_bytes(&self, number: u32) -> Result<Bytes> {
        self.storage_range(number, 0..self.index.storage_len(number))
    }

    /// A range of the raw bytes of a storage. Of a compressed one, only the chunks that the range
    /// touches are read and decoded.
    ///
    /// # Errors
    ///
    /// As [`Archive::storage_bytes`].
    ///
    /// # Panics
    ///
    /// If the range does not lie in the storage.
    pub fn storage_range(&self, number: u32, range: Range<u64>) -> Result<Bytes> {
        let len = self.index.storage_len(number);
        assert!(range.start <= range.end && range.end <= len, "a range of the storage");
        match self.index.raw_place(number) {
            Some((shard, offset)) => self.read(shard, offset + range.start..offset + range.end),
            None => self.unpack(number, &self.storage(number), range),
        }
    }

    fn unpack(&self, number: u32, storage: &StorageReference, range: Range<u64>) -> Result<Bytes> {
        let decode = || {
            let mut unpack = Unpack::new(storage, range.clone())?;
            for chunk in storage.chunks(&range) {
                self.proven(storage, chunk, |stored| unpack.add(chunk, stored))?;
            }
            Ok(unpack.finish())
        };
        decode().map_err(|error: Error| error.at(self.leaf_in(number)))
    }

    /// Shows the raw bytes of each chunk of a storage, in order. Stored bytes are proven where they are decoded.
    pub(crate) fn each_chunk(
        &self,
        storage: &StorageReference,
        mut see: impl FnMut(u64, &[u8]),
    ) -> Result<()> {
        let mut reader = ChunkReader::new(storage)?;
        storage.chunks(&(0..storage.len)).try_for_each(|chunk| {
            if storage.packing.is_none() {
                see(chunk, &self.read(storage.shard, storage.stored_chunk(chunk))?);
                return Ok(());
            }
            self.proven(storage, chunk, |stored| {
                see(chunk, reader.read(chunk, stored)?);
                Ok(())
            })
        })
    }

    /// Gives the stored bytes of a chunk to whoever decodes them, which must be what was written.
    fn proven(
        &self,
        storage: &StorageReference,
        chunk: u64,
        mut take: impl FnMut(&[u8]) -> Result<()>,
    ) -> Result<()> {
        let place = storage.stored_chunk(chunk);
        let stored = self.read(storage.shard, place.clone())?;
        let proven = storage.prove_chunk(chunk, checksum(&stored));
        proven.and_then(|()| take(&stored)).map_err(|error| error.byte(place.start))
    }

    fn blob_of(&self, shard: u32) -> Result<&Arc<dyn Blob>> {
        self.blobs.get(native(shard)).ok_or_else(|| Error::new(ErrorKind::BlobElsewhere))
    }

    /// Stored bytes of a file.
    pub(crate) fn read(&self, shard: u32, range: Range<u64>) -> Result<Bytes> {
        let blob = self.blob_of(shard)?;
        let size = |bytes: u64| usize::try_from(bytes).map_err(|_| Error::new(ErrorKind::TooLarge));
        if let Some(bytes) = blob.bytes() {
            return Ok(bytes.slice(size(range.start)?..size(range.end)?));
        }
        let mut bytes = zeroed(size(range.end - range.start)?)?;
        blob.read_exact_at(&mut bytes, range.start)?;
        Ok(bytes.into())
    }

    /// The CRC-32 of stored bytes. Those of a file are read block by block, into memory that stays in the
    /// cache.
    pub(crate) fn crc_of(&self, shard: u32, range: Range<u64>) -> Result<u32> {
        let blob = self.blob_of(shard)?;
        if blob.bytes().is_some() {
            return Ok(checksum(&self.read(shard, range)?));
        }
        let mut crc = crc32fast::Hasher::new();
        let mut block = READ.take();
        block.resize(READ_BLOCK, 0);
        let mut at = range.start;
        while at < range.end {
            let len = usize::try_from(range.end - at).unwrap_or(READ_BLOCK).min(READ_BLOCK);
            blob.read_exact_at(&mut block[..len], at)?;
            crc.update(&block[..len]);
            at += length(&block[..len]);
        }
        READ.set(block);
        Ok(crc.finalize())
    }

    /// The storages that are strs, compressed ones or others.
    pub(crate) fn stored_texts(&self, packed: bool) -> Vec<u32> {
        let mut texts = self.index.stored_texts();
        texts.retain(|number| self.index.raw_place(*number).is_none() == packed);
        texts
    }

    /// The fqn of a leaf that lies in a storage, for errors.
    pub fn leaf_in(&self, storage: u32) -> String {
        self.index.first_leaves()[native(storage)].fqn()
    }
}

impl fmt::Debug for Archive {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Archive({} bytes, {} storages)", self.file_len, self.storage_count())
    }
}

impl ShardFile {
    /// Proves that an archive is the one that a manifest names.
    ///
    /// # Errors
    ///
    /// `ShardMismatch` (F-083); what opening it gives, if the manifest names its digest; `Io`.
    pub fn prove(&self, blob: &Arc<dyn Blob>) -> Result<()> {
        let wrong = |note: &dyn fmt::Display| Error::new(ErrorKind::ShardMismatch).note(note);
        let len = blob.size()?;
        if len != self.file_len {
            return Err(wrong(&format_args!("{len} bytes, the manifest says {}", self.file_len)));
        }
        if self.digest.is_some() {
            let archive = Archive::from_blob(blob.clone())?;
            if archive.root_digest() != self.digest {
                return Err(wrong(&"another root digest"));
            }
        }
        let mut trailer = [0; FRAME_LEN];
        blob.read_exact_at(&mut trailer, len - 64)?;
        let place = parse_trailer(&trailer, len)?;
        if (place.index_off, place.index_crc32) != (self.index_off, self.index_crc32) {
            return Err(wrong(&"another index"));
        }
        Ok(())
    }
}

/// Reads and proves head, trailer and index; nothing is allocated before its length is proven
/// against that of the file.
fn read_index(file: &dyn Blob) -> Result<(Index, [u8; FRAME_LEN], u64)> {
    let file_len = file.size()?;
    let mut head = [0; 4096];
    let start = usize::try_from(file_len).unwrap_or(head.len()).min(head.len());
    file.read_exact_at(&mut head[..start], 0)?;
    // A foreign file is named as such, however short it is.
    let looks_like_tssd = head.starts_with(&MAGIC);
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
    Ok((Index::parse(index, place)?, *frame, file_len))
}
