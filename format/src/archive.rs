//! Read access to archives: open, validate, look up.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;

use crate::blob::Blob;
use crate::checksum::checksum;
use crate::chunk_codec::ChunkCodec;
use crate::content_digest::{content_digest, content_order};
use crate::convert::index_to_usize;
use crate::delta::ChangeCount;
use crate::digest::{self, ChunkHasher, Digest};
use crate::dtype::OtherDtype;
use crate::encode::Attrs;
use crate::error::{Error, ErrorKind, Result};
use crate::frame::{FRAME_LEN, MAGIC, check_len, parse_head, parse_trailer};
use crate::index::Index;
use crate::key::ObjectPath;
use crate::lookup::{find, find_fqn};
use crate::memory::zeroed;
use crate::record::kind;
use crate::reference::TensorReference;
use crate::shard_file::{CrcTable, ShardFile};
use crate::state_dict::{StateDict, Value};
use crate::storage::{RangeDecoder, StorageDecoder, StorageReference};
use crate::structure::Node;
use crate::table_views::TableViews;
use crate::tensor::Tensor;
use crate::write_job::{RawBytes, Segment, length};

/// Block size in bytes for reading file ranges that are only checksummed (256 KiB).
const READ_BLOCK_BYTES: usize = 256 << 10;

thread_local! {
    /// Read buffer of the thread, reused because allocating one per chunk took 10 % of the time.
    static READ_BUFFER: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// An archive with a validated index.
///
/// Every constructor validates the index, so an `Archive` is always well-formed. [`Archive::verify`]
/// verifies the payload.
///
/// Opening an archive does not copy the blob. It copies the index, unless [`Blob::read_stable`] returns a view.
/// Cloning an archive is cheap.
#[derive(Clone)]
pub struct Archive {
    index: Arc<Index>,
    /// The blobs by shard number: this file, or the archives that the manifest names. Empty for a
    /// manifest that was opened without them.
    blobs: Arc<[Arc<dyn Blob>]>,
    file_len: u64,
    /// The base, if this is a delta that was opened with it.
    base: Option<Arc<Base>>,
}

/// The base of a delta.
struct Base {
    archive: Archive,
    /// The storages of the base in the order of its content digest.
    storages: Vec<u32>,
}

impl Archive {
    /// Opens an archive that is completely in memory.
    ///
    /// Its tensors, strings and bytes are views of that memory, and keep it alive.
    ///
    /// # Errors
    ///
    /// One [`ErrorKind`] for each rule of the spec from F-001 to F-082, with the location of the violation.
    pub fn from_bytes(bytes: impl Into<Bytes>) -> Result<Self> {
        Self::from_blob(Arc::new(bytes.into()))
    }

    /// Opens a file.
    ///
    /// Only the head, the index and the trailer are read now. Each tensor is read on request, into memory of
    /// its own. The file is not mapped: if it is truncated while the archive is open, reads fail with an
    /// error and never crash the process.
    ///
    /// # Errors
    ///
    /// As [`Archive::from_bytes`]; `Io` if the file cannot be read.
    pub fn open(path: impl AsRef<std::path::Path>) -> Result<Self> {
        let path = path.as_ref();
        let with_path = |error: Error| error.with_path(path.display());
        let file = std::fs::File::open(path).map_err(Error::io).map_err(with_path)?;
        Self::from_blob(Arc::new(file)).map_err(with_path)
    }

    /// Opens the archive in a blob.
    ///
    /// If the blob is in memory, tensors are views of it. Otherwise each tensor is read on request, as with
    /// [`Archive::open`].
    ///
    /// # Errors
    ///
    /// As [`Archive::from_bytes`]; `Io` if the blob cannot be read.
    pub fn from_blob(blob: Arc<dyn Blob>) -> Result<Self> {
        let (index, file_len) = read_index(&*blob)?;
        let is_manifest = !index.views().shards.is_empty();
        let blobs = if is_manifest { Vec::new() } else { vec![blob] };
        Ok(Self { index: Arc::new(index), blobs: blobs.into(), file_len, base: None })
    }

    /// Sets the blobs of the shards of a manifest.
    pub(crate) fn with_blobs(self, blobs: Vec<Arc<dyn Blob>>) -> Self {
        Self { blobs: blobs.into(), ..self }
    }

    /// Returns this archive with the index of another one.
    pub(crate) fn with_index_of(&self, other: Self) -> Self {
        Self { index: other.index, ..self.clone() }
    }

    /// Whether this is a manifest with distributed leaves that was opened alone.
    pub fn has_distributed_leaves(&self) -> bool {
        self.index.views().nodes.iter().any(|node| node.kind == kind::DISTRIBUTED)
    }

    /// Returns whether this is a manifest that was opened without the archives that it names.
    ///
    /// The storages of such a manifest cannot be read.
    pub fn is_manifest_only(&self) -> bool {
        self.blobs.is_empty()
    }

    /// Opens a delta with its base, so that its delta storages can be read.
    ///
    /// The content digest of the base is taken from its index, or computed if the index has no digests. Reads verify the
    /// blocks that change. As with any archive, [`Archive::verify_deep`] verifies everything else.
    ///
    /// # Errors
    ///
    /// - `NotADelta` if this is no delta.
    /// - `WrongBase` (F-112) if the archive is not its base.
    /// - `BlobElsewhere` for a manifest that was opened without its shards, `BaseMissing` for a delta that was opened without
    ///   its own base.
    /// - The errors of [`Archive::compute_content_digest`].
    pub fn with_base(self, base: Self) -> Result<Self> {
        let digest = base.digest_of_readable()?;
        self.with_checked_base(base, digest)
    }

    /// Returns the result of a delta, given its base: the delta with its base, or the base itself if that has the content
    /// of the result already (F-114).
    ///
    /// # Errors
    ///
    /// As [`Archive::with_base`].
    pub fn result_from(self, base: Self) -> Result<Self> {
        let digest = base.digest_of_readable()?;
        if self.base_digest().is_some_and(|expected| expected != digest)
            && self.content_digest() == Some(digest)
        {
            return Ok(base);
        }
        self.with_checked_base(base, digest)
    }

    /// Returns the content digest of an archive whose bytes can be read.
    pub(crate) fn digest_of_readable(&self) -> Result<Digest> {
        self.require_readable()?;
        self.content_digest().map_or_else(|| self.compute_content_digest(), Ok)
    }

    /// Checks that the bytes of all storages can be read.
    ///
    /// # Errors
    ///
    /// `BlobElsewhere` for a manifest that was opened without its shards, `BaseMissing` for a delta without its base.
    pub(crate) fn require_readable(&self) -> Result<()> {
        if self.is_manifest_only() {
            return Err(Error::new(ErrorKind::BlobElsewhere));
        }
        if self.lacks_base() {
            return Err(Error::new(ErrorKind::BaseMissing));
        }
        Ok(())
    }

    /// Returns the number of raw bytes of a storage.
    pub(crate) fn storage_len(&self, number: u32) -> u64 {
        self.index.storage_len(number)
    }

    /// Opens a delta with a base of this content digest. The bytes of the base need not be readable.
    pub(crate) fn with_checked_base(mut self, base: Self, digest: Digest) -> Result<Self> {
        let wrong_base =
            |detail: &dyn fmt::Display| Error::new(ErrorKind::WrongBase).with_detail(detail);
        let expected = self.base_digest().ok_or_else(|| Error::new(ErrorKind::NotADelta))?;
        if digest != expected {
            if self.content_digest() == Some(digest) {
                return Err(wrong_base(&"it has the content of the result already"));
            }
            let [digest, expected] = [digest, expected].map(blake3::Hash::from);
            return Err(wrong_base(&format_args!("its content is {digest}, not {expected}")));
        }
        let storages = content_order(&base.index.views());
        for number in 0..self.storage_count() {
            let storage = self.storage(number);
            let Some(position) = storage.base else { continue };
            let base_storage = storages.get(index_to_usize(position));
            let len = base_storage.map(|number| base.index.storage_len(*number));
            if len != Some(storage.len) {
                let len = len.map_or("no such storage".to_owned(), |len| format!("{len} bytes"));
                let detail = format_args!("{} bytes, the base storage: {len}", storage.len);
                return Err(wrong_base(&detail).with_path(self.storage_fqn(number)));
            }
        }
        self.base = Some(Arc::new(Base { archive: base, storages }));
        Ok(self)
    }

    /// Reads all raw bytes of a storage and verifies their CRC-32.
    ///
    /// # Errors
    ///
    /// As [`Archive::storage_bytes`]; `StorageCorrupt` if the CRC-32 differs from the recorded one.
    pub(crate) fn verify_storage(&self, number: u32) -> Result<()> {
        let storage = self.storage(number);
        let mut crc = crc32fast::Hasher::new();
        self.for_each_chunk(&storage, |_, raw| crc.update(raw))
            .and_then(|()| storage.verify_crc32(crc.finalize()))
            .map_err(|error| self.at_storage(error, number))
    }

    /// Adds to an error the first leaf of a storage, and the offset of the storage unless the error has one.
    pub(crate) fn at_storage(&self, error: Error, number: u32) -> Error {
        let offset = error.offset().unwrap_or_else(|| self.storage(number).offset);
        error.with_path(self.storage_fqn(number)).with_offset(offset)
    }

    /// Returns the content digest of the base that a delta needs; `None` if the archive is no delta.
    pub fn base_digest(&self) -> Option<Digest> {
        self.index.base()
    }

    /// Returns the base that a delta was opened with.
    pub fn base(&self) -> Option<&Self> {
        self.base.as_deref().map(|base| &base.archive)
    }

    /// Returns whether this is a delta that was opened without its base.
    ///
    /// Its delta storages cannot be read.
    pub fn lacks_base(&self) -> bool {
        self.base.is_none() && self.base_digest().is_some()
    }

    /// Returns whether the bytes of a storage can be read.
    ///
    /// They cannot if the manifest was opened without the archive that holds them, or the delta without its base.
    ///
    /// # Panics
    ///
    /// Panics if the number is not below [`Archive::storage_count`].
    pub fn can_read(&self, storage: u32) -> bool {
        !self.is_manifest_only() && (self.base.is_some() || !self.index.is_delta_storage(storage))
    }

    /// Returns the tables of the index.
    pub(crate) fn index_views(&self) -> TableViews<'_> {
        self.index.views()
    }

    /// Returns the raw bytes of a storage. Those of an uncompressed storage that is not in memory are read later.
    ///
    /// # Errors
    ///
    /// As [`Archive::storage_bytes`].
    pub(crate) fn raw_storage(&self, number: u32) -> Result<RawBytes> {
        if let Some((shard, offset)) = self.index.raw_location(number)
            && let blob = self.shard_blob(shard)?
            && blob.bytes().is_none()
        {
            let range = offset..offset + self.index.storage_len(number);
            return Ok(Segment::from_blob(blob.clone(), range).into());
        }
        self.storage_bytes(number).map(RawBytes::from)
    }

    /// Returns a stored chunk whose CRC-32 is verified.
    ///
    /// # Errors
    ///
    /// `ChunkCorrupt` (F-090); `Io` if the file cannot be read.
    pub(crate) fn stored_chunk(&self, storage: &StorageReference, chunk: u64) -> Result<Bytes> {
        let range = storage.stored_chunk(chunk);
        let stored = self.read(storage.shard, range.clone())?;
        let verified = storage.verify_chunk(chunk, checksum(&stored));
        verified.map(|()| stored).map_err(|error| error.with_offset(range.start))
    }

    /// Returns the chunk of the base storage that a delta chunk changes; `None` for any other chunk.
    fn base_chunk(&self, storage: &StorageReference, chunk: u64) -> Result<Option<Bytes>> {
        if storage.chunk_codec(chunk).codec != ChunkCodec::Delta {
            return Ok(None);
        }
        let (Some(base), Some(position)) = (&self.base, storage.base) else {
            return Err(Error::new(ErrorKind::BaseMissing));
        };
        let number = base.storages[index_to_usize(position)];
        base.archive.storage_range(number, storage.chunk(chunk)).map(Some)
    }

    /// Returns the blob of a shard. In a file without shards, number 0 is the file itself.
    ///
    /// # Panics
    ///
    /// Panics if there is no such shard, or if the manifest was opened without its shards.
    pub fn blob(&self, shard: u32) -> &Arc<dyn Blob> {
        &self.blobs[index_to_usize(shard)]
    }

    /// Returns the content digest, or `None` if a storage has no digest (spec: section 8).
    ///
    /// A manifest with distributed leaves that is opened alone has none: the digests are in its archives.
    ///
    /// It names the content of the archive. Codec, alignment, chunks and the order of storages do not change it. A
    /// detached signature signs this digest. Only the index is read. The result depends on the digests in the index:
    /// [`Archive::verify_deep`] proves them.
    pub fn content_digest(&self) -> Option<Digest> {
        let views = self.index.views();
        if views.digests.len() != views.storages.len() || self.has_distributed_leaves() {
            return None;
        }
        let recorded = |number: u32| Ok(views.digests[index_to_usize(number)]);
        content_digest(&views, recorded).ok()
    }

    /// Computes the content digest of any archive from the raw bytes of its storages.
    ///
    /// # Errors
    ///
    /// As [`Archive::storage_bytes`]; `StorageCorrupt` if the bytes of a storage do not match its checksum.
    ///
    /// # Examples
    ///
    /// ```
    /// use tssd_format::{Archive, Layout, Options, StateDict, Tensor};
    /// let mut dict = StateDict::new();
    /// dict.insert("weight", Tensor::from_slice(&[1.0_f32; 1000], &[10, 100])?);
    /// let archive = |options: &Options| {
    ///     let mut file = Vec::new();
    ///     Layout::plan(&dict, options)?.write_to(&mut file)?;
    ///     Archive::from_bytes(file)
    /// };
    ///
    /// let plain = archive(&Options::new())?;
    /// let with_digests = archive(&Options::new().digests())?;
    /// assert_eq!(plain.content_digest(), None);
    /// assert_eq!(with_digests.content_digest(), Some(plain.compute_content_digest()?));
    /// # Ok::<(), tssd_format::Error>(())
    /// ```
    pub fn compute_content_digest(&self) -> Result<Digest> {
        content_digest(&self.index.views(), |number| {
            let storage = self.storage(number);
            let chunks = self.hash_chunks(&storage);
            let chunks = chunks.map_err(|error| self.at_storage(error, number))?;
            Ok(digest::merge(storage.len, storage.chunk_size, &chunks))
        })
    }

    /// Reads all raw bytes of a storage, verifies their CRC-32, and returns the chaining values of the chunks.
    ///
    /// # Errors
    ///
    /// As [`Archive::storage_bytes`]; `StorageCorrupt` if the CRC-32 differs from the recorded one.
    pub(crate) fn hash_chunks(&self, storage: &StorageReference) -> Result<Vec<Digest>> {
        let mut crc = crc32fast::Hasher::new();
        let mut chunks = Vec::new();
        self.for_each_chunk(storage, |chunk, raw| {
            crc.update(raw);
            let mut hasher = ChunkHasher::new(chunk, storage.len, storage.chunk_size);
            hasher.update(raw);
            chunks.push(hasher.finish());
        })?;
        storage.verify_crc32(crc.finalize())?;
        Ok(chunks)
    }

    /// Returns the chaining values of the chunks of a storage; none if it has one chunk or no digest.
    pub(crate) fn subtrees(&self, number: u32) -> &[Digest] {
        self.index.subtrees(number)
    }

    /// Returns the length of the file in bytes.
    pub fn file_len(&self) -> u64 {
        self.file_len
    }

    /// Returns the byte range of the index in the file. The blob lies between byte 4096 and its start.
    pub fn index_range(&self) -> Range<u64> {
        let place = self.index.location();
        place.index_off..place.index_off + place.index_len
    }

    /// Returns the CRC-32 of the index. The index holds the layout and all checksums of the archive.
    pub fn index_crc32(&self) -> u32 {
        self.index.location().index_crc32
    }

    /// Returns location and checksum of the checksum table in the index.
    pub fn crc_table(&self) -> CrcTable {
        self.index.crc_table()
    }

    /// Returns the record of a manifest about this archive.
    ///
    /// `name` is the base name of the file. The record has no other storages.
    pub fn shard_file(&self, name: impl Into<String>, writer: u32) -> ShardFile {
        ShardFile {
            name: name.into(),
            file_len: self.file_len,
            index_off: self.index_range().start,
            index_crc32: self.index_crc32(),
            writer,
            digest: self.content_digest(),
            crcs: self.crc_table(),
            others: None,
        }
    }

    /// Decodes the subtree of a node of this index.
    pub(crate) fn decode_node(&self, number: usize) -> Node {
        self.index.node(&self.index.views(), number)
    }

    /// Returns the bytes of the index.
    pub fn index_bytes(&self) -> &[u8] {
        self.index.bytes()
    }

    /// Returns the attributes of the archive.
    pub fn attrs(&self) -> Attrs {
        self.index.attrs()
    }

    /// Returns the files that hold the storages of a manifest; none for any other archive.
    pub fn shards(&self) -> Vec<ShardFile> {
        self.index.shards()
    }

    /// Returns the tree of the archive, with references in place of tensor bytes.
    pub fn structure(&self) -> Node {
        self.index.structure()
    }

    /// Returns the dtypes that the archive describes because the format does not list them, by number.
    pub fn other_dtypes(&self) -> Vec<OtherDtype> {
        let views = self.index.views();
        let dtypes = views.dtypes.iter().map(|record| views.other_dtype(record));
        dtypes.map(|dtype| dtype.expect("the validator has proven the record")).collect()
    }

    /// Returns the number of storages.
    pub fn storage_count(&self) -> u32 {
        self.index.storage_count()
    }

    /// Returns a storage by its number.
    ///
    /// # Panics
    ///
    /// Panics if the number is not below [`Archive::storage_count`].
    pub fn storage(&self, number: u32) -> StorageReference {
        self.index.storage(number)
    }

    /// Returns all leaves with their paths, in insertion order, depth first.
    pub fn leaves(&self) -> Vec<(ObjectPath, Node)> {
        self.structure().into_leaves()
    }

    /// Reads the whole state dict. Tied tensors share memory.
    ///
    /// # Errors
    ///
    /// - `BlobElsewhere` for a manifest that was opened without its shards.
    /// - `Io` if the file cannot be read.
    /// - `ContentNotText` if the storage of a long `str` is not text.
    /// - For compressed storages, as [`Archive::storage_bytes`].
    pub fn to_state_dict(&self) -> Result<StateDict> {
        StateDict::from_value(self.load(&self.index.views(), 0)?)
    }

    /// Reads the value at an exact path.
    ///
    /// # Errors
    ///
    /// `NotFound`; else as [`Archive::to_state_dict`].
    pub fn value(&self, path: &ObjectPath) -> Result<Value> {
        let views = self.index.views();
        self.load(&views, find(&views, path)?)
    }

    /// Reads the leaf with an fqn.
    ///
    /// # Errors
    ///
    /// `NotFound`; `AmbiguousFqn` if two leaves have the fqn; else as [`Archive::to_state_dict`].
    pub fn leaf(&self, fqn: &str) -> Result<Value> {
        let views = self.index.views();
        self.load(&views, find_fqn(&views, fqn)?).map_err(|error| error.with_path(fqn))
    }

    /// Returns the leaf with an fqn, with references in place of tensor bytes.
    ///
    /// # Errors
    ///
    /// `NotFound`; `AmbiguousFqn` if two leaves have the fqn.
    pub fn node(&self, fqn: &str) -> Result<Node> {
        let views = self.index.views();
        Ok(self.index.node(&views, find_fqn(&views, fqn)?))
    }

    /// Reads the plain tensor with an fqn.
    ///
    /// # Errors
    ///
    /// `NotATensor` if the leaf is a shard or not a tensor; else as [`Archive::leaf`].
    pub fn tensor(&self, fqn: &str) -> Result<Tensor> {
        match self.leaf(fqn)? {
            Value::Tensor(tensor) => Ok(tensor),
            _ => Err(Error::new(ErrorKind::NotATensor).with_path(fqn)),
        }
    }

    /// Reads the tensor of a reference from this archive's structure.
    ///
    /// Reads only the range of the storage that the tensor spans, as [`Archive::storage_range`] does.
    ///
    /// # Errors
    ///
    /// As [`Archive::to_state_dict`].
    pub fn read_tensor(&self, reference: &TensorReference) -> Result<Tensor> {
        let span = reference.byte_offset..reference.byte_offset + reference.meta.span_bytes();
        let bytes = reference.storage.map(|number| self.storage_range(number, span)).transpose()?;
        Tensor::new(reference.meta.clone(), bytes.unwrap_or_default().into(), 0)
    }

    /// Reads the value of a node; `views` are the tables of this index.
    fn load(&self, views: &TableViews<'_>, node: usize) -> Result<Value> {
        if views.nodes[node].kind == kind::TENSOR
            && let Node::Tensors(run) = self.index.node(views, node)
            && let [reference @ TensorReference { shard_spec: None, .. }] = run.as_slice()
        {
            return self.read_tensor(reference).map(Value::Tensor);
        }
        // Tensors that share a storage share its memory, so each storage is read once.
        let mut loaded = BTreeMap::new();
        self.index.value(views, node, &mut |number| {
            if let Some(bytes) = self.memory_view(views, number) {
                return Ok(bytes);
            }
            if let Some(bytes) = loaded.get(&number) {
                return Ok(Bytes::clone(bytes));
            }
            let bytes = self.storage_bytes(number)?;
            loaded.insert(number, bytes.clone());
            Ok(bytes)
        })
    }

    /// Returns a view of a raw storage, if its blob is in memory.
    fn memory_view(&self, views: &TableViews<'_>, number: u32) -> Option<Bytes> {
        let storage = &views.storages[index_to_usize(number)];
        let blob = self.blobs.get(index_to_usize(storage.shard.to_native()))?.bytes()?;
        let offset = storage.offset.to_native();
        let index = |offset: u64| usize::try_from(offset).expect("it is in memory");
        let range = index(offset)..index(offset + storage.stored_len.to_native());
        (storage.codec == 0).then(|| blob.slice(range))
    }

    /// Returns the raw bytes of a storage.
    ///
    /// The result is a view if the storage is raw and its blob is in memory. Otherwise the bytes are read
    /// and, if they are compressed, decoded.
    ///
    /// # Errors
    ///
    /// - `BlobElsewhere` for a manifest that was opened without its shards.
    /// - `Io` if the file cannot be read.
    /// - `ChunkCorrupt`, `FrameCorrupt`, `PlaneLengths` or `FeatureMissing` for a compressed storage.
    /// - `DeltaChunk`, `DeltaMismatch` or `BaseMissing` for a delta storage.
    pub fn storage_bytes(&self, number: u32) -> Result<Bytes> {
        self.storage_range(number, 0..self.index.storage_len(number))
    }

    /// Returns a range of the raw bytes of a storage.
    ///
    /// Of a compressed storage, only the chunks that the range touches are read and decoded.
    ///
    /// # Errors
    ///
    /// As [`Archive::storage_bytes`].
    ///
    /// # Panics
    ///
    /// Panics if the range does not lie in the storage.
    pub fn storage_range(&self, number: u32, range: Range<u64>) -> Result<Bytes> {
        let len = self.index.storage_len(number);
        assert!(range.start <= range.end && range.end <= len, "a range of the storage");
        match self.index.raw_location(number) {
            Some((shard, offset)) => self.read(shard, offset + range.start..offset + range.end),
            None => self.decode_range(number, &self.storage(number), range),
        }
    }

    fn decode_range(
        &self,
        number: u32,
        storage: &StorageReference,
        range: Range<u64>,
    ) -> Result<Bytes> {
        let decode = || {
            let mut decoder = RangeDecoder::new(storage, range.clone())?;
            for chunk in storage.chunks(&range) {
                let base = self.base_chunk(storage, chunk)?;
                self.with_verified_chunk(storage, chunk, |stored| {
                    decoder.add_chunk_of(chunk, stored, base.as_deref())
                })?;
            }
            Ok(decoder.finish())
        };
        decode().map_err(|error: Error| error.with_path(self.storage_fqn(number)))
    }

    /// Calls `on_chunk` with the number and the raw bytes of each chunk of a storage, in order.
    ///
    /// The CRC-32 of a stored chunk is verified only if the storage is compressed, before the chunk is decoded.
    pub(crate) fn for_each_chunk(
        &self,
        storage: &StorageReference,
        mut on_chunk: impl FnMut(u64, &[u8]),
    ) -> Result<()> {
        let mut reader = StorageDecoder::new(storage)?;
        storage.chunks(&(0..storage.len)).try_for_each(|chunk| {
            if storage.compressed_layout.is_none() {
                on_chunk(chunk, &self.read(storage.shard, storage.stored_chunk(chunk))?);
                return Ok(());
            }
            let base = self.base_chunk(storage, chunk)?;
            self.with_verified_chunk(storage, chunk, |stored| {
                on_chunk(chunk, reader.decode(chunk, stored, base.as_deref())?);
                Ok(())
            })
        })
    }

    /// Checks the chunks of a delta storage without the base, and counts the elements that they change.
    ///
    /// Chunks that need no base are decoded.
    ///
    /// # Errors
    ///
    /// `ChunkCorrupt`, `FrameCorrupt`, `PlaneLengths`, `DeltaChunk` or `FeatureMissing`; `Io` if the file cannot be read.
    pub fn count_changes(&self, storage: &StorageReference) -> Result<ChangeCount> {
        let mut total = ChangeCount::default();
        let mut reader = StorageDecoder::new(storage)?;
        for chunk in storage.chunks(&(0..storage.len)) {
            self.with_verified_chunk(storage, chunk, |stored| {
                total += reader.check(chunk, stored)?;
                Ok(())
            })?;
        }
        Ok(total)
    }

    /// Reads a stored chunk, verifies its CRC-32, and passes its bytes to `decode`.
    fn with_verified_chunk(
        &self,
        storage: &StorageReference,
        chunk: u64,
        mut decode: impl FnMut(&[u8]) -> Result<()>,
    ) -> Result<()> {
        let stored = self.stored_chunk(storage, chunk)?;
        decode(&stored).map_err(|error| error.with_offset(storage.stored_chunk(chunk).start))
    }

    fn shard_blob(&self, shard: u32) -> Result<&Arc<dyn Blob>> {
        self.blobs.get(index_to_usize(shard)).ok_or_else(|| Error::new(ErrorKind::BlobElsewhere))
    }

    /// Reads a range of the stored bytes of a shard, without verifying them.
    pub(crate) fn read(&self, shard: u32, range: Range<u64>) -> Result<Bytes> {
        let blob = self.shard_blob(shard)?;
        let size = |bytes: u64| usize::try_from(bytes).map_err(|_| Error::new(ErrorKind::TooLarge));
        if let Some(bytes) = blob.bytes() {
            return Ok(bytes.slice(size(range.start)?..size(range.end)?));
        }
        let mut bytes = zeroed(size(range.end - range.start)?)?;
        blob.read_exact_at(&mut bytes, range.start)?;
        Ok(bytes.into())
    }

    /// Returns the CRC-32 of a range of the stored bytes of a shard.
    ///
    /// Bytes outside memory are read block by block into a buffer that stays in the CPU cache.
    pub(crate) fn range_crc32(&self, shard: u32, range: Range<u64>) -> Result<u32> {
        let blob = self.shard_blob(shard)?;
        if blob.bytes().is_some() {
            return Ok(checksum(&self.read(shard, range)?));
        }
        let mut crc = crc32fast::Hasher::new();
        let mut block = READ_BUFFER.take();
        block.resize(READ_BLOCK_BYTES, 0);
        let mut offset = range.start;
        while offset < range.end {
            let len = usize::try_from(range.end - offset)
                .unwrap_or(READ_BLOCK_BYTES)
                .min(READ_BLOCK_BYTES);
            blob.read_exact_at(&mut block[..len], offset)?;
            crc.update(&block[..len]);
            offset += length(&block[..len]);
        }
        READ_BUFFER.set(block);
        Ok(crc.finalize())
    }

    /// Returns the storages that hold a `str`: the compressed ones, or the raw ones.
    pub(crate) fn str_storages(&self, compressed: bool) -> Vec<u32> {
        let mut texts = self.index.str_storages();
        texts.retain(|number| self.index.raw_location(*number).is_none() == compressed);
        texts
    }

    /// Returns the fqn of the first leaf that lies in a storage, for error messages.
    pub fn storage_fqn(&self, storage: u32) -> String {
        self.index.first_leaves()[index_to_usize(storage)].fqn()
    }
}

impl fmt::Debug for Archive {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Archive({} bytes, {} storages)", self.file_len, self.storage_count())
    }
}

/// Reads and validates head, trailer and index.
///
/// Checks each length against the length of the file before it allocates memory of that length.
fn read_index(file: &dyn Blob) -> Result<(Index, u64)> {
    let file_len = file.size()?;
    let mut head = [0; 4096];
    let start = usize::try_from(file_len).unwrap_or(head.len()).min(head.len());
    file.read_exact_at(&mut head[..start], 0)?;
    // A foreign file is reported as `NotTssd`, even if it is too short for an archive.
    let has_magic = head.starts_with(&MAGIC);
    check_len(file_len).map_err(|error| {
        if start >= 8 && !has_magic { Error::new(ErrorKind::NotTssd) } else { error }
    })?;
    let (frame, zeros) = head.split_first_chunk::<FRAME_LEN>().expect("4096 is more than 64");
    parse_head(frame)?;
    if let Some(index) = zeros.iter().position(|byte| *byte != 0) {
        return Err(
            Error::new(ErrorKind::ReservedNotZero).with_offset(64 + length(&zeros[..index]))
        );
    }
    let mut trailer = [0; FRAME_LEN];
    file.read_exact_at(&mut trailer, file_len - 64)?;
    let location = parse_trailer(&trailer, file_len)?;
    let index = file.read_stable(location.index_off..location.index_off + location.index_len)?;
    Ok((Index::parse(index, location)?, file_len))
}
