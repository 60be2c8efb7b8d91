//! Storage allocation: which leaves share a storage, and where each storage lies in the blob.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;

use crate::blob::Blob;
use crate::checksum::combine_crcs;
use crate::chunk::ChunkSize;
use crate::chunk_codec::{ChunkCodec, StorageCodec};
use crate::compress::{CompressJob, CompressedChunks, StoredChunk};
use crate::convert::index_to_usize;
use crate::digest::{self, Digest};
use crate::encode::{AttrValue, Attrs};
use crate::error::{Error, ErrorKind, Result};
use crate::frame::{DATA_START, INDEX_ALIGN};
use crate::key::ObjectPath;
use crate::options::{Options, RequestedCodec, ZSTD_LEVEL_ATTR};
use crate::record::NONE;
use crate::state_dict::Value;
use crate::storage::{ChunkLocation, CompressedLayout, StorageReference};
use crate::storage_tables::StorageTables;
use crate::structure::{BorrowedNode, PathCursor, PayloadItem, structure_of, walk};
use crate::table::record_number;
use crate::tensor::TensorMeta;
use crate::write_job::{Body, RawBytes, Segment, Segments, Source, length};

/// Smallest storage that is compressed, in bytes. Below it, the chunk records outweigh the gain.
const COMPRESS_MIN_BYTES: u64 = 512;

/// Allocator of storages: assigns leaves to storages, and storages to offsets in the file.
#[derive(Debug)]
pub(crate) struct StorageAllocator {
    /// End of the allocated part of the blob, as a file offset in bytes.
    cursor: u64,
    /// Storages that have a number but no offset yet.
    pending: Vec<PendingStorage>,
    /// Whether any storage is a candidate for codec 1, which has levels.
    uses_zstd_level: bool,
    pub(crate) sources: Vec<Source>,
    pub(crate) storages: StorageTables,
}

/// A storage without an offset: offsets depend on the results of compression.
#[derive(Debug)]
struct PendingStorage {
    raw: RawBytes,
    /// The requested codec; `None` if the storage stays raw.
    codec: Option<RequestedCodec>,
}

/// The bytes of one leaf: their address range, owner and alignment.
struct Span<'a> {
    start: u64,
    end: u64,
    owner: Owner<'a>,
    /// Required alignment of the first byte in the storage, in bytes.
    align: u16,
    /// Whether this is the content of a str, bytes or opaque leaf.
    is_content: bool,
    /// The requested codec; `None` if the leaf stays raw.
    codec: Option<RequestedCodec>,
    /// Number of its component; `NONE` until one is assigned, and always for an empty span.
    component: u32,
}

/// The memory or blob that a span is a part of.
#[derive(Clone, Copy)]
enum Owner<'a> {
    Memory(&'a Bytes),
    /// A blob outside memory, and the address assigned to its first byte.
    Blob(&'a Arc<dyn Blob>, u64),
}

/// Address ranges for blobs outside this process's memory, disjoint from memory and from each other.
struct BlobAddresses {
    next: u64,
    blobs: BTreeMap<usize, u64>,
}

impl BlobAddresses {
    fn new() -> Self {
        // The memory of a process lies in the lower half of the address space.
        Self { next: 1 << 63, blobs: BTreeMap::new() }
    }

    /// Returns the start address of a blob of `len` bytes; the same address for the same blob.
    fn start_of(&mut self, blob: &Arc<dyn Blob>, len: u64) -> Result<u64> {
        let identity = Arc::as_ptr(blob).cast::<()>().addr();
        if let Some(start) = self.blobs.get(&identity) {
            return Ok(*start);
        }
        let start = self.next;
        self.next = start.checked_add(len).ok_or_else(too_large)?;
        self.blobs.insert(identity, start);
        Ok(start)
    }
}

fn address_of(bytes: &Bytes) -> u64 {
    u64::try_from(bytes.as_ptr().addr()).expect("usize is at most 64 bits")
}

/// Spans that overlap, directly or transitively, and so share one storage.
struct Component {
    start: u64,
    end: u64,
    /// Its spans: a range of the order that [`find_components`] returns.
    spans: Range<u32>,
    /// Number of zero bytes before the first span that align every tensor; `None` until computed.
    ///
    /// A component of one span needs none.
    leading_zeros: Option<u8>,
    /// The number of its storage, once one is added.
    storage: Option<u32>,
}

impl StorageAllocator {
    pub(crate) fn new() -> Self {
        Self {
            cursor: DATA_START,
            pending: Vec::new(),
            uses_zstd_level: false,
            sources: Vec::new(),
            storages: StorageTables::default(),
        }
    }

    /// Returns the end of the allocated part of the blob, as a file offset in bytes.
    pub(crate) fn blob_end(&self) -> u64 {
        self.cursor
    }

    /// Allocates storages for everything in `value` after the existing ones, and returns its structure.
    ///
    /// Tensors whose bytes overlap share a storage. Values of earlier calls are not considered.
    pub(crate) fn allocate<'a>(
        &mut self,
        value: &'a Value,
        path: &ObjectPath,
        options: &Options,
    ) -> Result<BorrowedNode<'a>> {
        let mut spans = Vec::new();
        let mut addresses = BlobAddresses::new();
        walk(value, &PathCursor::Start(path), options.allow_opaque, &mut |path, item| {
            spans.push(Span::from_item(&item, path, options, &mut addresses)?);
            Ok(())
        })?;
        let (order, mut components) = find_components(&mut spans)?;
        // Reject misaligned tensors before any storage is added.
        for (ordinal, span) in spans.iter().enumerate() {
            let Some(component) = components.get_mut(index_to_usize(span.component)) else {
                continue;
            };
            if component.leading_zeros.is_none() {
                let zeros = leading_zeros_for(&component.spans(&order, &spans));
                component.leading_zeros =
                    Some(zeros.map_err(|error| {
                        error.with_path(item_path(value, path, options, ordinal))
                    })?);
            }
        }
        self.pending.reserve(components.len());
        for (ordinal, span) in spans.iter().enumerate() {
            let Some(component) = components.get_mut(index_to_usize(span.component)) else {
                continue;
            };
            if component.storage.is_none() {
                let storage = self
                    .add_storage(component, component.spans(&order, &spans), span.codec)
                    .map_err(|error| error.with_path(item_path(value, path, options, ordinal)))?;
                component.storage = Some(storage);
            }
        }
        let mut locations = spans.iter().map(|span| {
            let Some(component) = components.get(index_to_usize(span.component)) else {
                return (None, 0);
            };
            let zeros = u64::from(component.leading_zeros.expect("found above"));
            (component.storage, span.start - component.start + zeros)
        });
        Ok(structure_of(value, &mut locations))
    }

    /// Adds a pending storage for the spans of a component, and returns its number.
    fn add_storage<'s>(
        &mut self,
        component: &Component,
        spans: impl Iterator<Item = &'s Span<'s>>,
        codec: Option<RequestedCodec>,
    ) -> Result<u32> {
        let number = record_number(self.storages.len() + self.pending.len())?;
        let padding = component.leading_zeros.expect("found above").into();
        let raw = RawBytes { padding, segments: component_segments(spans) };
        let codec = Self::codec(&raw, codec);
        self.uses_zstd_level |= codec.is_some_and(RequestedCodec::has_levels);
        self.pending.push(PendingStorage { raw, codec });
        Ok(number)
    }

    /// Returns the requested codec of a storage; `None` for one that is too small to compress.
    pub(crate) fn codec(
        raw: &RawBytes,
        requested: Option<RequestedCodec>,
    ) -> Option<RequestedCodec> {
        requested.filter(|_| raw.len() >= COMPRESS_MIN_BYTES)
    }

    /// Returns the jobs that compress the pending storages.
    pub(crate) fn compress_jobs(&self, options: &Options) -> Vec<CompressJob> {
        let mut jobs = Vec::new();
        for (number, PendingStorage { raw, codec }) in self.pending.iter().enumerate() {
            let Some(codec) = *codec else { continue };
            jobs.extend(CompressJob::jobs(number, raw, codec, options.zstd_level, options.digests));
        }
        jobs
    }

    /// Appends the pending storages to the blob, given the results of all compression jobs.
    ///
    /// # Errors
    ///
    /// `Unfilled` if the result of a job is missing; `TooLarge` if offsets or tables overflow.
    pub(crate) fn place_pending(
        &mut self,
        compression_results: impl IntoIterator<Item = CompressedChunks>,
        options: &Options,
    ) -> Result<()> {
        let mut results: Vec<CompressedChunks> = compression_results.into_iter().collect();
        results.sort_by_key(|result| result.first_chunk);
        let mut results = results.into_iter().peekable();
        self.sources.reserve(self.pending.len());
        self.storages.reserve(self.pending.len());
        let pending = std::mem::take(&mut self.pending).into_iter();
        for (number, PendingStorage { raw, codec }) in pending.enumerate() {
            let mut storage_results = Vec::new();
            while let Some(result) = results.next_if(|result| result.first_chunk.0 == number) {
                storage_results.push(result);
            }
            self.place(raw, codec, storage_results, options)?;
        }
        Ok(())
    }

    /// Appends a storage to the blob, given the results of all of its compression jobs.
    ///
    /// # Errors
    ///
    /// As [`StorageAllocator::place_pending`].
    pub(crate) fn place(
        &mut self,
        raw: RawBytes,
        codec: Option<RequestedCodec>,
        results: Vec<CompressedChunks>,
        options: &Options,
    ) -> Result<()> {
        match codec {
            Some(_) => self.append_compressed(raw, results, options),
            None => self.append_raw(raw, options),
        }
    }

    /// Appends a storage whose stored chunks are known.
    ///
    /// # Errors
    ///
    /// `TooLarge` if offsets or tables overflow.
    pub(crate) fn append_encoded(
        &mut self,
        storage: StorageReference,
        chunks: Vec<Bytes>,
    ) -> Result<()> {
        let parts = chunks.into_iter().map(RawBytes::from).collect();
        self.append(storage, Body::Compressed(parts), &[])
    }

    fn append_raw(&mut self, raw: RawBytes, options: &Options) -> Result<()> {
        let len = raw.len();
        // The write jobs compute the checksums.
        let storage = StorageReference {
            len,
            chunk_size: options.chunks.chunk_size(len),
            align_log2: options.align_log2(len),
            digest: options.digests.then_some([0; 32]),
            ..StorageReference::default()
        };
        let body =
            Body::Raw { bytes: raw, chunk_size: storage.chunk_size, digest: options.digests };
        self.append(storage, body, &[])
    }

    fn append_compressed(
        &mut self,
        raw: RawBytes,
        results: Vec<CompressedChunks>,
        options: &Options,
    ) -> Result<()> {
        let (len, chunk_size) = (raw.len(), ChunkSize::default());
        let codec = results.first().map(|result| result.codec);
        let chunks: Vec<StoredChunk> =
            results.into_iter().flat_map(|result| result.chunks).collect();
        let Some(StorageCodec { codec, width }) =
            codec.filter(|_| u64::try_from(chunks.len()) == Ok(chunk_size.count(len)))
        else {
            return Err(Error::new(ErrorKind::Unfilled));
        };
        if chunks.iter().all(|chunk| chunk.encoded.is_none()) {
            return self.append_raw(raw, options);
        }
        let crc32 = combine_crcs(len, chunk_size, chunks.iter().map(|chunk| chunk.crc));
        let subtrees: Option<Vec<Digest>> = chunks.iter().map(|chunk| chunk.digest).collect();
        let digest = subtrees.as_ref().map(|subtrees| digest::merge(len, chunk_size, subtrees));
        let mut layout = CompressedLayout { width, chunks: Vec::with_capacity(chunks.len()) };
        let mut parts = Vec::with_capacity(chunks.len());
        let mut offset = 0;
        for (number, chunk) in (0..).zip(chunks) {
            let codec = if chunk.encoded.is_some() { codec } else { ChunkCodec::Raw };
            let raw = || raw.slice(&chunk_size.range(number, len));
            let part = chunk.encoded.map_or_else(raw, RawBytes::from);
            let len = u32::try_from(part.len()).expect("at most 1 MiB");
            layout.chunks.push(ChunkLocation { offset, len, codec });
            offset += u64::from(len);
            parts.push(part);
        }
        let storage = StorageReference {
            len,
            crc32,
            align_log2: options.align_log2(offset),
            compressed_layout: Some(layout),
            digest,
            ..StorageReference::default()
        };
        self.append(storage, Body::Compressed(parts), &subtrees.unwrap_or_default())
    }

    /// Appends a storage to the blob at the next offset of its alignment.
    fn append(
        &mut self,
        mut storage: StorageReference,
        body: Body,
        subtrees: &[Digest],
    ) -> Result<()> {
        let offset = self.cursor.checked_next_multiple_of(1 << storage.align_log2);
        storage.offset = offset.ok_or_else(too_large)?;
        let end = storage.offset.checked_add(storage.stored_len());
        self.cursor = end.ok_or_else(too_large)?;
        let first_crc = self.storages.crc_count();
        self.sources.push(Source { offset: storage.offset, first_crc, body });
        self.storages.push(&storage, subtrees)
    }

    /// Returns the file offset of the index, once all storages are placed.
    pub(crate) fn index_off(&self) -> Result<u64> {
        self.cursor.checked_next_multiple_of(INDEX_ALIGN).ok_or_else(too_large)
    }

    /// Returns the attributes of the options, and the zstd level if codec 1 was tried for any storage.
    pub(crate) fn attrs(&self, options: &Options) -> Attrs {
        let mut attrs = options.attrs.clone();
        if self.uses_zstd_level {
            attrs.insert(ZSTD_LEVEL_ATTR.to_owned(), AttrValue::Int(options.zstd_level.into()));
        }
        attrs
    }
}

fn too_large() -> Error {
    Error::new(ErrorKind::TooLarge)
}

impl<'a> Span<'a> {
    fn from_item(
        item: &PayloadItem<'a>,
        path: &PathCursor<'_>,
        options: &Options,
        addresses: &mut BlobAddresses,
    ) -> Result<Self> {
        let codec = |meta: Option<&TensorMeta>| options.compression(path, meta).codec(meta);
        Ok(match item {
            PayloadItem::Tensor(tensor) => {
                let meta = tensor.meta();
                let codec = codec(Some(meta));
                let storage = tensor.storage();
                let (base, owner) = match (storage.bytes(), storage.blob()) {
                    (Some(bytes), _) => (address_of(bytes), Owner::Memory(bytes)),
                    (None, blob) => {
                        let blob = blob.expect("what is not in memory is elsewhere");
                        let base = addresses.start_of(blob, storage.len())?;
                        (base, Owner::Blob(blob, base))
                    }
                };
                let start = base + tensor.byte_offset();
                let end = start + meta.span_bytes();
                let align = u16::try_from(meta.itemsize()).expect("at most 256 bytes");
                Self { start, end, owner, align, is_content: false, codec, component: NONE }
            }
            PayloadItem::Content(bytes) => {
                let start = address_of(bytes);
                let (end, codec) = (start + length(bytes), codec(None));
                let owner = Owner::Memory(bytes);
                Self { start, end, owner, align: 1, is_content: true, codec, component: NONE }
            }
        })
    }
}

/// Groups spans into components.
///
/// Returns the numbers of the non-empty spans, sorted by start address with content last, and the components.
/// The content of a leaf always has a component of its own.
fn find_components(spans: &mut [Span<'_>]) -> Result<(Vec<u32>, Vec<Component>)> {
    let mut order = Vec::with_capacity(spans.len());
    let count = record_number(spans.len())?;
    order.extend((0..count).filter(|index| spans[index_to_usize(*index)].len() > 0));
    order.sort_by_key(|index| {
        (spans[index_to_usize(*index)].is_content, spans[index_to_usize(*index)].start, *index)
    });
    let mut components: Vec<Component> = Vec::with_capacity(order.len());
    for (position, index) in (0..).zip(&order) {
        let span = &mut spans[index_to_usize(*index)];
        match components.last_mut() {
            Some(last) if !span.is_content && span.start < last.end => {
                last.end = last.end.max(span.end);
                last.spans.end = position + 1;
                last.leading_zeros = None;
            }
            _ => components.push(Component {
                start: span.start,
                end: span.end,
                spans: position..position + 1,
                leading_zeros: Some(0),
                storage: None,
            }),
        }
        span.component = record_number(components.len() - 1)?;
    }
    Ok((order, components))
}

impl Component {
    /// Returns its spans, sorted by start address.
    fn spans<'s, 'a>(
        &self,
        order: &'s [u32],
        spans: &'s [Span<'a>],
    ) -> impl Iterator<Item = &'s Span<'a>> + Clone {
        order[index_to_usize(self.spans.start)..index_to_usize(self.spans.end)]
            .iter()
            .map(|index| &spans[index_to_usize(*index)])
    }
}

/// Returns the number of leading zeros that aligns every tensor of a component.
///
/// # Errors
///
/// `Misaligned` if no number of zeros aligns all of them.
fn leading_zeros_for<'s, 'a: 's>(
    spans: &(impl Iterator<Item = &'s Span<'a>> + Clone),
) -> Result<u8> {
    let start = spans.clone().next().map_or(0, |span| span.start);
    let aligns_all = |zeros: &u8| {
        spans
            .clone()
            .all(|span| (span.start - start + u64::from(*zeros)).is_multiple_of(span.align.into()))
    };
    // Elements have at most 256 bytes.
    (0..=u8::MAX).find(aligns_all).ok_or_else(|| {
        Error::new(ErrorKind::Misaligned)
            .with_detail("it overlaps other tensors at odd offsets: copy it first")
    })
}

impl Span<'_> {
    fn len(&self) -> u64 {
        self.end - self.start
    }
}

/// Returns the bytes of a component as segments: one if one owner has all bytes, else several in order.
fn component_segments<'s, 'a: 's>(mut spans: impl Iterator<Item = &'s Span<'a>>) -> Segments {
    let slice = |owner: &Bytes, start: u64, end: u64| {
        let base = address_of(owner);
        let index = |address: u64| usize::try_from(address - base).expect("it is in memory");
        owner.slice(index(start)..index(end))
    };
    let first = spans.next().expect("a component has a span");
    let (mut start, mut end) = (first.start, first.end);
    let mut owner = match first.owner {
        Owner::Memory(bytes) => bytes,
        Owner::Blob(blob, base) => {
            let end = spans.fold(end, |end, span| end.max(span.end));
            return Segments::One(Segment::from_blob(blob.clone(), start - base..end - base));
        }
    };
    let mut segments = Vec::new();
    for span in spans {
        if let Owner::Memory(bytes) = span.owner
            && span.end > address_of(owner) + length(owner)
        {
            segments.push(Segment::from(slice(owner, start, end)));
            (owner, start) = (bytes, end);
        }
        end = end.max(span.end);
    }
    let last = Segment::from(slice(owner, start, end));
    if segments.is_empty() {
        return Segments::One(last);
    }
    segments.push(last);
    Segments::Many(segments)
}

/// Returns the path of item number `ordinal` of a value, for error messages.
fn item_path(value: &Value, path: &ObjectPath, options: &Options, ordinal: usize) -> ObjectPath {
    let mut item_path = ObjectPath::root();
    let mut next = 0;
    let walked = walk(value, &PathCursor::Start(path), options.allow_opaque, &mut |path, _| {
        if next == ordinal {
            item_path = path.to_path();
        }
        next += 1;
        Ok(())
    });
    walked.expect("it was walked before");
    item_path
}
