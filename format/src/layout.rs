//! Where everything goes: an archive planned from metadata alone, then filled.

use std::io::Write;
use std::ops::Range;

use bytes::Bytes;
use crc32fast::Hasher;
use rend::u32_le;

use crate::encode::{AttrValue, Attrs, ShardFile, encode};
use crate::error::{Error, ErrorKind, Result};
use crate::fill::{Fill, Filled, Source, jobs, length};
use crate::frame::{self, DATA_START, FRAME_LEN, INDEX_ALIGN, IndexPlace};
use crate::key::ObjectPath;
use crate::state_dict::{StateDict, Value};
use crate::structure::{
    CHUNK_BYTES, Item, Node, StorageReference, Trail, Tree, structure_of, walk,
};
use crate::table::{ROOT_LEN, Tables, Views};

/// What a writer may choose.
#[derive(Clone, Debug)]
pub struct Options {
    pub(crate) attrs: Attrs,
    pub(crate) allow_opaque: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self::new()
    }
}

impl Options {
    /// No attributes, no opaque leaves.
    pub fn new() -> Self {
        Self { attrs: Attrs::new(), allow_opaque: false }
    }

    /// Says something of the archive as a whole.
    #[must_use]
    pub fn attr(mut self, name: impl Into<String>, value: AttrValue) -> Self {
        self.attrs.insert(name.into(), value);
        self
    }

    /// Allows leaves that are no typed values ([`Value::Opaque`]).
    #[must_use]
    pub fn allow_opaque(mut self) -> Self {
        self.allow_opaque = true;
        self
    }
}

/// log2 of the alignment of a storage of this many bytes: pages for large ones, so that they can be
/// mapped and read directly; what GPUs and vector units like for the others.
fn align_log2(len: u64) -> u8 {
    if len >= 64 << 10 { 12 } else { 8 }
}

/// The place of every byte of an archive, before any tensor byte has been touched.
///
/// # Examples
///
/// ```
/// use tssd_format::{Archive, Layout, Options, StateDict, Tensor};
/// let mut dict = StateDict::new();
/// dict.insert("weight", Tensor::from_slice(&[1.0_f32; 1000], &[10, 100])?);
///
/// let layout = Layout::plan(&dict, &Options::new())?;
/// let mut file = vec![0xFF; usize::try_from(layout.file_len())?]; // or shared memory, or a map
/// layout.write_into(&mut file)?;
/// assert_eq!(Archive::from_bytes(file)?.to_state_dict()?, dict);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Layout {
    tables: Tables,
    sources: Vec<Source>,
    index_off: u64,
    index_len: u64,
}

impl Layout {
    /// Plans the archive of a state dict. The result depends on the state dict and the options alone.
    ///
    /// # Errors
    ///
    /// What cannot be stored, with its path: `TooDeep`, `UntypedLeaf`, `DuplicateKey`, `KeysCollide`,
    /// `KeyKind`, `PartialPlacement`, `TensorRun`, `TooLarge`; `Misaligned` for tensors that overlap
    /// in memory at offsets that no alignment fits.
    pub fn plan(dict: &StateDict, options: &Options) -> Result<Self> {
        let mut planner = Planner::new();
        let root = planner.place(dict.as_value(), &ObjectPath::root(), options)?;
        planner.finish(&root, &options.attrs)
    }

    /// The exact length of the file in bytes.
    pub fn file_len(&self) -> u64 {
        self.index_off + self.index_len + 64
    }

    /// The jobs that write everything in front of the index. They are independent of each other, and
    /// together they write every byte up to [`Layout::index_off`].
    pub fn jobs(&self) -> Vec<Fill> {
        jobs(0..self.index_off, Some(head()), &self.sources)
    }

    /// Where the bytes that [`Layout::seal`] returns belong.
    pub fn index_off(&self) -> u64 {
        self.index_off
    }

    /// The index and the trailer, once all jobs have run.
    ///
    /// # Errors
    ///
    /// `Unfilled` if a job has not.
    pub fn seal(&self, filled: impl IntoIterator<Item = Filled>) -> Result<Vec<u8>> {
        let len = usize::try_from(self.file_len() - self.index_off).expect("at most 1 GiB");
        let mut tail = vec![0; len];
        self.seal_into(filled, &mut tail)?;
        Ok(tail)
    }

    fn seal_into(&self, filled: impl IntoIterator<Item = Filled>, target: &mut [u8]) -> Result<()> {
        let mut crcs = vec![None; self.tables.crcs.len()];
        for (entry, crc) in filled.into_iter().flat_map(|filled| filled.crcs) {
            if let Some(slot) = crcs.get_mut(entry) {
                *slot = Some(crc);
            }
        }
        let crcs: Option<Vec<u32>> = crcs.into_iter().collect();
        let crcs = crcs.ok_or_else(|| Error::new(ErrorKind::Unfilled))?;
        let mut storages = self.tables.storages.clone();
        let mut rest = crcs.as_slice();
        for storage in &mut storages {
            let len = storage.stored_len.to_native();
            let count = usize::try_from(len.div_ceil(CHUNK_BYTES)).unwrap_or(rest.len());
            let (own, others) = rest.split_at(count);
            storage.crc32 = combine(len, own).into();
            rest = others;
        }
        let crcs: Vec<u32_le> = crcs.into_iter().map(Into::into).collect();
        let views = Views { storages: &storages, crcs: &crcs, ..self.tables.views() };
        write_tail(&views, self.index_off, target)
    }

    /// Writes the archive into memory of its exact length.
    ///
    /// # Errors
    ///
    /// `TargetSize` if the memory has another length.
    pub fn write_into(&self, target: &mut [u8]) -> Result<()> {
        if length(target) != self.file_len() {
            return Err(Error::new(ErrorKind::TargetSize).note(format_args!(
                "{} bytes, needed {}",
                target.len(),
                self.file_len()
            )));
        }
        let mut rest = target;
        let mut filled = Vec::new();
        for job in self.jobs() {
            let len = usize::try_from(job.range().end - job.range().start).unwrap_or(rest.len());
            let (part, tail) = rest.split_at_mut(len);
            filled.push(job.run(part)?);
            rest = tail;
        }
        self.seal_into(filled, rest)
    }

    /// Writes the archive to a stream.
    ///
    /// # Errors
    ///
    /// `Io` if the stream fails.
    pub fn write_to(&self, writer: &mut impl Write) -> Result<()> {
        let filled: Vec<Filled> =
            self.jobs().iter().map(|job| job.write_to(writer)).collect::<Result<_>>()?;
        writer.write_all(&self.seal(filled)?)?;
        Ok(())
    }
}

/// The bytes of a manifest: an archive without a blob, whose storages lie in the given files beside
/// it. Storages must be in the order of (shard, offset).
///
/// # Errors
///
/// What the keys of the tree can break, as in [`Layout::plan`]; `TooLarge`.
pub fn manifest(
    root: &Node,
    storages: &[StorageReference],
    attrs: &Attrs,
    shards: &[ShardFile],
) -> Result<Vec<u8>> {
    let tables = encode(&root.as_tree(), storages, attrs, shards)?;
    let mut file = head().to_vec();
    file.resize(usize::try_from(DATA_START).expect("4096"), 0);
    file.extend(tail(&tables.views(), DATA_START)?);
    Ok(file)
}

fn head() -> Bytes {
    Bytes::copy_from_slice(&frame::head())
}

/// Index and trailer.
pub(crate) fn tail(views: &Views<'_>, index_off: u64) -> Result<Vec<u8>> {
    let len = usize::try_from(views.index_len()?).expect("at most 1 GiB");
    let mut tail = vec![0; len + FRAME_LEN];
    write_tail(views, index_off, &mut tail)?;
    Ok(tail)
}

/// As [`tail`], into memory of that length.
fn write_tail(views: &Views<'_>, index_off: u64, target: &mut [u8]) -> Result<()> {
    let (index, trailer) = target.split_at_mut(target.len() - FRAME_LEN);
    views.write_into(index)?;
    let root_len = u32::try_from(ROOT_LEN).expect("104");
    let index_len = u32::try_from(index.len()).map_err(|_| Error::new(ErrorKind::TooLarge))?;
    let place = IndexPlace {
        index_off,
        index_len: index_len.into(),
        root_off: index_len - root_len,
        root_len,
        index_crc32: crc32fast::hash(index),
    };
    trailer.copy_from_slice(&place.trailer());
    Ok(())
}

/// The CRC-32 of `len` bytes, given that of each of their chunks.
pub(crate) fn combine(len: u64, crcs: &[u32]) -> u32 {
    if let [only] = crcs {
        return *only;
    }
    let mut whole = Hasher::new();
    let mut rest = len;
    for crc in crcs {
        let chunk = rest.min(CHUNK_BYTES);
        whole.combine(&Hasher::new_with_initial_len(*crc, chunk));
        rest -= chunk;
    }
    whole.finalize()
}

/// Gives every tensor its place; remembers how far the blob reaches.
#[derive(Debug)]
pub(crate) struct Planner {
    cursor: u64,
    crc_count: usize,
    pub(crate) sources: Vec<Source>,
    pub(crate) storages: Vec<StorageReference>,
}

/// Bytes of one leaf: their addresses, and what their first byte must be aligned to.
struct Span<'a> {
    start: usize,
    end: usize,
    align: usize,
    bytes: &'a Bytes,
    is_content: bool,
}

/// Spans that overlap, directly or through others: one storage.
struct Component {
    start: usize,
    end: usize,
    /// Its spans, in order of their starts: a range of what [`components`] returns.
    spans: Range<usize>,
    /// Zeros in front that bring every tensor to its alignment, once they are known.
    lead: Option<usize>,
    /// Its number, once it has a place.
    storage: Option<u32>,
}

impl Planner {
    pub(crate) fn new() -> Self {
        Self { cursor: DATA_START, crc_count: 0, sources: Vec::new(), storages: Vec::new() }
    }

    pub(crate) fn cursor(&self) -> u64 {
        self.cursor
    }

    /// Gives everything in `value` a place behind what is placed already, and returns its structure.
    /// Tensors are tied if their bytes overlap now; earlier calls are not looked at.
    pub(crate) fn place<'a>(
        &mut self,
        value: &'a Value,
        path: &ObjectPath,
        options: &Options,
    ) -> Result<Tree<'a>> {
        let mut spans = Vec::new();
        walk(value, &Trail::Start(path), options.allow_opaque, &mut |_, item| {
            spans.push(Span::of(&item));
            Ok(())
        })?;
        let (ordered, mut components, of_span) = components(&spans);
        // All that can be refused is refused before anything has its place.
        for (ordinal, component) in of_span.iter().enumerate() {
            let Some(component) = component.map(|at| &mut components[at]) else { continue };
            if component.lead.is_none() {
                let lead = lead_of(&ordered[component.spans.clone()]);
                component.lead =
                    Some(lead.map_err(|error| error.at(path_of(value, path, options, ordinal)))?);
            }
        }
        let mut places = Vec::with_capacity(spans.len());
        for (ordinal, (span, component)) in spans.iter().zip(of_span).enumerate() {
            let Some(component) = component else {
                places.push((None, 0));
                continue;
            };
            let component = &mut components[component];
            let lead = component.lead.expect("found above");
            let storage = match component.storage {
                Some(storage) => storage,
                None => self
                    .store(component, lead, &ordered[component.spans.clone()])
                    .map_err(|error| error.at(path_of(value, path, options, ordinal)))?,
            };
            component.storage = Some(storage);
            let byte_offset = u64::try_from(span.start - component.start + lead);
            places.push((Some(storage), byte_offset.expect("usize is at most 64 bits")));
        }
        Ok(structure_of(value, &mut places.into_iter()))
    }

    /// Appends a storage to the blob.
    fn store(&mut self, component: &Component, lead: usize, spans: &[&Span<'_>]) -> Result<u32> {
        let segments = segments(spans);
        let wide = |len: usize| u64::try_from(len).expect("usize is at most 64 bits");
        let len = wide(component.end - component.start + lead);
        let align_log2 = align_log2(len);
        let too_large = || Error::new(ErrorKind::TooLarge);
        let offset = self.cursor.checked_next_multiple_of(1 << align_log2);
        let offset = offset.ok_or_else(too_large)?;
        let number = u32::try_from(self.storages.len()).map_err(|_| too_large())?;
        let chunks = usize::try_from(len.div_ceil(CHUNK_BYTES)).map_err(|_| too_large())?;
        self.sources.push(Source {
            offset,
            len,
            lead: wide(lead),
            segments,
            first_crc: self.crc_count,
        });
        self.storages.push(StorageReference {
            offset,
            len,
            crc32: 0,
            crcs: vec![0; chunks],
            align_log2,
            shard: 0,
        });
        self.crc_count += chunks;
        self.cursor = offset.checked_add(len).ok_or_else(too_large)?;
        Ok(number)
    }

    pub(crate) fn finish(self, root: &Tree<'_>, attrs: &Attrs) -> Result<Layout> {
        let tables = encode(root, &self.storages, attrs, &[])?;
        let index_len = tables.views().index_len()?;
        let index_off = self.cursor.checked_next_multiple_of(INDEX_ALIGN);
        let index_off = index_off
            .filter(|off| off.checked_add(index_len + 64).is_some())
            .ok_or_else(|| Error::new(ErrorKind::TooLarge))?;
        Ok(Layout { tables, sources: self.sources, index_off, index_len })
    }
}

impl<'a> Span<'a> {
    fn of(item: &Item<'a>) -> Self {
        match item {
            Item::Tensor(tensor) => {
                let meta = tensor.meta();
                let size = |bytes: u64| usize::try_from(bytes).expect("it is in memory");
                let bytes = tensor.storage().bytes();
                let start = bytes.as_ptr().addr() + size(tensor.byte_offset());
                let end = start + size(meta.span_bytes());
                let align = size(meta.dtype().itemsize());
                Self { start, end, align, bytes, is_content: false }
            }
            Item::Content(bytes) => {
                let start = bytes.as_ptr().addr();
                Self { start, end: start + bytes.len(), align: 1, bytes, is_content: true }
            }
        }
    }
}

/// The spans that have bytes, in order of their starts; their components; for each span the number of
/// its own.
fn components<'s, 'a>(
    spans: &'s [Span<'a>],
) -> (Vec<&'s Span<'a>>, Vec<Component>, Vec<Option<usize>>) {
    let mut components: Vec<Component> = Vec::new();
    let mut of_span = vec![None; spans.len()];
    let mut order: Vec<usize> = (0..spans.len()).filter(|at| spans[*at].len() > 0).collect();
    order.sort_by_key(|at| (spans[*at].is_content, spans[*at].start, *at));
    for (place, &at) in order.iter().enumerate() {
        let span = &spans[at];
        match components.last_mut() {
            Some(last) if !span.is_content && span.start < last.end => {
                last.end = last.end.max(span.end);
                last.spans.end = place + 1;
            }
            _ => components.push(Component {
                start: span.start,
                end: span.end,
                spans: place..place + 1,
                lead: None,
                storage: None,
            }),
        }
        of_span[at] = Some(components.len() - 1);
    }
    (order.into_iter().map(|at| &spans[at]).collect(), components, of_span)
}

/// How many zeros in front bring every tensor of a component to its alignment.
fn lead_of(spans: &[&Span<'_>]) -> Result<usize> {
    let fits = |lead: &usize| {
        spans.iter().all(|span| (span.start - spans[0].start + lead).is_multiple_of(span.align))
    };
    // Elements have at most 16 bytes.
    (0..16).find(fits).ok_or_else(|| {
        Error::new(ErrorKind::Misaligned)
            .note("it overlaps other tensors at odd offsets: copy it first")
    })
}

impl Span<'_> {
    fn len(&self) -> usize {
        self.end - self.start
    }
}

/// The bytes of a component: from one owner where one has them all, else from several in turn.
fn segments(spans: &[&Span<'_>]) -> Vec<Bytes> {
    let slice = |owner: &Bytes, start: usize, end: usize| {
        let base = owner.as_ptr().addr();
        owner.slice(start - base..end - base)
    };
    let mut segments = Vec::with_capacity(1);
    let (mut owner, mut start, mut end) = (spans[0].bytes, spans[0].start, spans[0].end);
    for span in spans {
        if span.end > owner.as_ptr().addr() + owner.len() {
            segments.push(slice(owner, start, end));
            (owner, start) = (span.bytes, end);
        }
        end = end.max(span.end);
    }
    segments.push(slice(owner, start, end));
    segments
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
