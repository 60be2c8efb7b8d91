//! Which bytes share a storage, and where each storage goes.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;

use crate::blob::Blob;
use crate::chunk::ChunkSize;
use crate::digest::{self, Digest};
use crate::encode::{AttrValue, Attrs};
use crate::error::{Error, ErrorKind, Result};
use crate::fill::{Body, RawBytes, Segment, Segments, Source, length};
use crate::frame::{DATA_START, INDEX_ALIGN};
use crate::key::ObjectPath;
use crate::options::{Compression, Options, ZSTD_LEVEL_ATTR};
use crate::pack::{Pack, Packed, StoredChunk};
use crate::record::NONE;
use crate::seal::{StorageTables, combine};
use crate::state_dict::Value;
use crate::storage::{PackedChunk, Packing, StorageReference};
use crate::structure::{Item, Trail, Tree, structure_of, walk};
use crate::table::number;
use crate::views::native;

/// Storages of fewer bytes than this are not compressed: their records would take what is won.
const MIN_PACKED: u64 = 512;

/// Arranges leaves in storages, and storages in the blob; remembers how far the blob reaches.
#[derive(Debug)]
pub(crate) struct Arranger {
    cursor: u64,
    /// Storages that have numbers but no places yet.
    pending: Vec<Pending>,
    /// Whether a storage is to be compressed.
    compresses: bool,
    pub(crate) sources: Vec<Source>,
    pub(crate) storages: StorageTables,
}

/// A storage that waits for its place, which depends on how much it can be compressed.
#[derive(Debug)]
struct Pending {
    raw: RawBytes,
    /// The width of the byte shuffle, if it is to be compressed.
    shuffle: Option<u8>,
}

/// Bytes of one leaf: their addresses, and what their first byte must be aligned to.
struct Span<'a> {
    start: u64,
    end: u64,
    owner: Owner<'a>,
    align: u8,
    is_content: bool,
    /// The width of the byte shuffle, if it is to be compressed.
    shuffle: Option<u8>,
    /// Its component; `NONE` as long as it has none, and always if it has no bytes.
    component: u32,
}

/// Whose bytes a span is of, and the address that they begin at.
#[derive(Clone, Copy)]
enum Owner<'a> {
    Memory(&'a Bytes),
    Elsewhere(&'a Arc<dyn Blob>, u64),
}

/// Addresses for what is not in this process's memory: no memory has them, and no two blobs the same.
struct Addresses {
    next: u64,
    blobs: BTreeMap<usize, u64>,
}

impl Addresses {
    fn new() -> Self {
        // Memory of a process is in the lower half.
        Self { next: 1 << 63, blobs: BTreeMap::new() }
    }

    /// Where a blob of so many bytes begins.
    fn of(&mut self, blob: &Arc<dyn Blob>, len: u64) -> Result<u64> {
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

fn address(bytes: &Bytes) -> u64 {
    u64::try_from(bytes.as_ptr().addr()).expect("usize is at most 64 bits")
}

/// Spans that overlap, directly or through others: one storage.
struct Component {
    start: u64,
    end: u64,
    /// Its spans: a range of the order that [`components`] returns.
    spans: Range<u32>,
    /// Zeros in front that bring every tensor to its alignment, once they are known. One alone needs none.
    lead: Option<u8>,
    /// Its number, once it has a place.
    storage: Option<u32>,
}

impl Arranger {
    pub(crate) fn new() -> Self {
        Self {
            cursor: DATA_START,
            pending: Vec::new(),
            compresses: false,
            sources: Vec::new(),
            storages: StorageTables::default(),
        }
    }

    /// How far the blob reaches.
    pub(crate) fn cursor(&self) -> u64 {
        self.cursor
    }

    /// Gives everything in `value` a storage behind what is placed already, and returns its structure.
    /// Tensors are tied if their bytes overlap now; earlier calls are not looked at.
    pub(crate) fn arrange<'a>(
        &mut self,
        value: &'a Value,
        path: &ObjectPath,
        options: &Options,
    ) -> Result<Tree<'a>> {
        let mut spans = Vec::new();
        let mut addresses = Addresses::new();
        walk(value, &Trail::Start(path), options.allow_opaque, &mut |path, item| {
            spans.push(Span::of(&item, path, options, &mut addresses)?);
            Ok(())
        })?;
        let (order, mut components) = components(&mut spans)?;
        // All that can be refused is refused before anything has its place.
        for (ordinal, span) in spans.iter().enumerate() {
            let Some(component) = components.get_mut(native(span.component)) else { continue };
            if component.lead.is_none() {
                let lead = lead_of(&component.spans(&order, &spans));
                component.lead =
                    Some(lead.map_err(|error| error.at(path_of(value, path, options, ordinal)))?);
            }
        }
        self.pending.reserve(components.len());
        for (ordinal, span) in spans.iter().enumerate() {
            let Some(component) = components.get_mut(native(span.component)) else { continue };
            if component.storage.is_none() {
                let storage = self
                    .store(component, component.spans(&order, &spans), span.shuffle)
                    .map_err(|error| error.at(path_of(value, path, options, ordinal)))?;
                component.storage = Some(storage);
            }
        }
        let mut places = spans.iter().map(|span| {
            let Some(component) = components.get(native(span.component)) else { return (None, 0) };
            let lead = u64::from(component.lead.expect("found above"));
            (component.storage, span.start - component.start + lead)
        });
        Ok(structure_of(value, &mut places))
    }

    /// Makes a storage of the spans of a component, and returns its number.
    fn store<'s>(
        &mut self,
        component: &Component,
        spans: impl Iterator<Item = &'s Span<'s>>,
        shuffle: Option<u8>,
    ) -> Result<u32> {
        let number = number(self.storages.len() + self.pending.len())?;
        let lead = component.lead.expect("found above").into();
        let raw = RawBytes { lead, segments: segments(spans) };
        let shuffle = shuffle.filter(|_| raw.len() >= MIN_PACKED);
        self.compresses |= shuffle.is_some();
        self.pending.push(Pending { raw, shuffle });
        Ok(number)
    }

    /// The jobs that compress what has no place yet.
    pub(crate) fn jobs(&self, options: &Options) -> Vec<Pack> {
        let mut jobs = Vec::new();
        for (number, Pending { raw, shuffle }) in self.pending.iter().enumerate() {
            let Some(shuffle) = *shuffle else { continue };
            jobs.extend(Pack::jobs(number, raw, shuffle, options.zstd_level, options.digests));
        }
        jobs
    }

    /// Appends what has no place yet to the blob, given what its jobs have made.
    pub(crate) fn place(
        &mut self,
        packed: impl IntoIterator<Item = Packed>,
        options: &Options,
    ) -> Result<()> {
        let mut packed: Vec<Packed> = packed.into_iter().collect();
        packed.sort_by_key(|packed| packed.place);
        let mut packed = packed.into_iter().peekable();
        self.sources.reserve(self.pending.len());
        self.storages.reserve(self.pending.len());
        let pending = std::mem::take(&mut self.pending).into_iter();
        for (number, Pending { raw, shuffle }) in pending.enumerate() {
            let mut chunks = Vec::new();
            while let Some(part) = packed.next_if(|part| part.place.0 == number) {
                chunks.extend(part.chunks);
            }
            match shuffle {
                Some(shuffle) => self.append_packed(raw, shuffle, chunks, options)?,
                None => self.append_raw(raw, options)?,
            }
        }
        Ok(())
    }

    fn append_raw(&mut self, raw: RawBytes, options: &Options) -> Result<()> {
        let len = raw.len();
        // Sums are found out on the way into the file.
        let storage = StorageReference {
            len,
            chunk_size: options.chunks.size(len),
            align_log2: options.align_log2(len),
            digest: options.digests.then_some([0; 32]),
            ..StorageReference::default()
        };
        let body =
            Body::Raw { bytes: raw, chunk_size: storage.chunk_size, digest: options.digests };
        self.append(storage, body)
    }

    fn append_packed(
        &mut self,
        raw: RawBytes,
        shuffle: u8,
        chunks: Vec<StoredChunk>,
        options: &Options,
    ) -> Result<()> {
        let (len, chunk_size) = (raw.len(), ChunkSize::default());
        if u64::try_from(chunks.len()) != Ok(chunk_size.count(len)) {
            return Err(Error::new(ErrorKind::Unfilled));
        }
        if chunks.iter().all(|chunk| chunk.frame.is_none()) {
            return self.append_raw(raw, options);
        }
        let crc32 = combine((len, chunk_size), chunks.iter().map(|chunk| chunk.crc));
        let digests: Option<Vec<Digest>> = chunks.iter().map(|chunk| chunk.digest).collect();
        let digest = digests.map(|digests| digest::merge((len, chunk_size), &digests));
        let mut packing = Packing { shuffle, chunks: Vec::with_capacity(chunks.len()) };
        let mut parts = Vec::with_capacity(chunks.len());
        let mut offset = 0;
        for (number, chunk) in (0..).zip(chunks) {
            let is_zstd = chunk.frame.is_some();
            let raw = || raw.part(&chunk_size.range(number, len));
            let part = chunk.frame.map_or_else(raw, RawBytes::from);
            let len = u32::try_from(part.len()).expect("at most 1 MiB");
            packing.chunks.push(PackedChunk { offset, len, is_zstd });
            offset += u64::from(len);
            parts.push(part);
        }
        let storage = StorageReference {
            len,
            crc32,
            align_log2: options.align_log2(offset),
            packing: Some(packing),
            digest,
            ..StorageReference::default()
        };
        self.append(storage, Body::Packed(parts))
    }

    /// Appends a storage to the blob.
    fn append(&mut self, mut storage: StorageReference, body: Body) -> Result<()> {
        let offset = self.cursor.checked_next_multiple_of(1 << storage.align_log2);
        storage.offset = offset.ok_or_else(too_large)?;
        let end = storage.offset.checked_add(storage.stored_len());
        self.cursor = end.ok_or_else(too_large)?;
        let first_crc = self.storages.crc_count();
        self.sources.push(Source { offset: storage.offset, first_crc, body });
        self.storages.push(&storage)
    }

    /// Where the index begins, once all storages have their places.
    pub(crate) fn index_off(&self) -> Result<u64> {
        self.cursor.checked_next_multiple_of(INDEX_ALIGN).ok_or_else(too_large)
    }

    /// The attributes of the options, and what of these the tables do not tell.
    pub(crate) fn attrs(&self, options: &Options) -> Attrs {
        let mut attrs = options.attrs.clone();
        if self.compresses {
            attrs.insert(ZSTD_LEVEL_ATTR.to_owned(), AttrValue::Int(options.zstd_level.into()));
        }
        attrs
    }
}

fn too_large() -> Error {
    Error::new(ErrorKind::TooLarge)
}

impl<'a> Span<'a> {
    fn of(
        item: &Item<'a>,
        path: &Trail<'_>,
        options: &Options,
        addresses: &mut Addresses,
    ) -> Result<Self> {
        let shuffle = |meta, itemsize| match options.compression(path, meta) {
            Compression::None => None,
            compression => Some(compression.shuffle(itemsize)),
        };
        Ok(match item {
            Item::Tensor(tensor) => {
                let meta = tensor.meta();
                let shuffle = shuffle(Some(meta), meta.dtype().itemsize());
                let storage = tensor.storage();
                let (base, owner) = match (storage.bytes(), storage.blob()) {
                    (Some(bytes), _) => (address(bytes), Owner::Memory(bytes)),
                    (None, blob) => {
                        let blob = blob.expect("what is not in memory is elsewhere");
                        let base = addresses.of(blob, storage.len())?;
                        (base, Owner::Elsewhere(blob, base))
                    }
                };
                let start = base + tensor.byte_offset();
                let end = start + meta.span_bytes();
                let align = meta.dtype().itemsize().to_le_bytes()[0];
                Self { start, end, owner, align, is_content: false, shuffle, component: NONE }
            }
            Item::Content(bytes) => {
                let start = address(bytes);
                let (end, shuffle) = (start + length(bytes), shuffle(None, 1));
                let owner = Owner::Memory(bytes);
                Self { start, end, owner, align: 1, is_content: true, shuffle, component: NONE }
            }
        })
    }
}

/// The numbers of the spans that have bytes, in order of their starts; their components.
fn components(spans: &mut [Span<'_>]) -> Result<(Vec<u32>, Vec<Component>)> {
    let mut order = Vec::with_capacity(spans.len());
    let count = number(spans.len())?;
    order.extend((0..count).filter(|at| spans[native(*at)].len() > 0));
    order.sort_by_key(|at| (spans[native(*at)].is_content, spans[native(*at)].start, *at));
    let mut components: Vec<Component> = Vec::with_capacity(order.len());
    for (place, at) in (0..).zip(&order) {
        let span = &mut spans[native(*at)];
        match components.last_mut() {
            Some(last) if !span.is_content && span.start < last.end => {
                last.end = last.end.max(span.end);
                last.spans.end = place + 1;
                last.lead = None;
            }
            _ => components.push(Component {
                start: span.start,
                end: span.end,
                spans: place..place + 1,
                lead: Some(0),
                storage: None,
            }),
        }
        span.component = number(components.len() - 1)?;
    }
    Ok((order, components))
}

impl Component {
    /// Its spans, in order of their starts.
    fn spans<'s, 'a>(
        &self,
        order: &'s [u32],
        spans: &'s [Span<'a>],
    ) -> impl Iterator<Item = &'s Span<'a>> + Clone {
        order[native(self.spans.start)..native(self.spans.end)].iter().map(|at| &spans[native(*at)])
    }
}

/// How many zeros in front bring every tensor of a component to its alignment.
fn lead_of<'s, 'a: 's>(spans: &(impl Iterator<Item = &'s Span<'a>> + Clone)) -> Result<u8> {
    let start = spans.clone().next().map_or(0, |span| span.start);
    let fits = |lead: &u8| {
        spans
            .clone()
            .all(|span| (span.start - start + u64::from(*lead)).is_multiple_of(span.align.into()))
    };
    // Elements have at most 16 bytes.
    (0..16).find(fits).ok_or_else(|| {
        Error::new(ErrorKind::Misaligned)
            .note("it overlaps other tensors at odd offsets: copy it first")
    })
}

impl Span<'_> {
    fn len(&self) -> u64 {
        self.end - self.start
    }
}

/// The bytes of a component: from one owner where one has them all, else from several in turn.
fn segments<'s, 'a: 's>(mut spans: impl Iterator<Item = &'s Span<'a>>) -> Segments {
    let slice = |owner: &Bytes, start: u64, end: u64| {
        let base = address(owner);
        let index = |at: u64| usize::try_from(at - base).expect("it is in memory");
        owner.slice(index(start)..index(end))
    };
    let first = spans.next().expect("a component has a span");
    let (mut start, mut end) = (first.start, first.end);
    let mut owner = match first.owner {
        Owner::Memory(bytes) => bytes,
        Owner::Elsewhere(blob, base) => {
            let end = spans.fold(end, |end, span| end.max(span.end));
            return Segments::One(Segment::elsewhere(blob.clone(), start - base..end - base));
        }
    };
    let mut before = Vec::new();
    for span in spans {
        if let Owner::Memory(bytes) = span.owner
            && span.end > address(owner) + length(owner)
        {
            before.push(Segment::from(slice(owner, start, end)));
            (owner, start) = (bytes, end);
        }
        end = end.max(span.end);
    }
    let last = Segment::from(slice(owner, start, end));
    if before.is_empty() {
        return Segments::One(last);
    }
    before.push(last);
    Segments::Many(before)
}

/// The path of the item with this number, for errors.
fn path_of(value: &Value, path: &ObjectPath, options: &Options, ordinal: usize) -> ObjectPath {
    let mut found = ObjectPath::root();
    let mut next = 0;
    let walked = walk(value, &Trail::Start(path), options.allow_opaque, &mut |path, _| {
        if next == ordinal {
            found = path.to_path();
        }
        next += 1;
        Ok(())
    });
    walked.expect("it was walked before");
    found
}
