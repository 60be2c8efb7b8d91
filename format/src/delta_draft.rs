//! Deltas as archives: made from two versions, or folded from two deltas. Spec: section 6, "Deltas".

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;

use crate::archive::Archive;
use crate::checksum::checksum;
use crate::checksum::combine_crcs;
use crate::chunk::ChunkSize;
use crate::chunk_codec::ChunkCodec;
use crate::compress::{CompressJob, CompressedChunks};
use crate::content_digest::content_order;
use crate::convert::{index_to_usize, to_u64, to_usize};
use crate::delta::{ChangeCount, DeltaClasses, DeltaEncoder, DeltaFolder, DeltaOptions};
use crate::digest::{self, ChunkHasher, Digest};
use crate::element::ElementWidth;
use crate::encode::encode;
use crate::error::{Error, ErrorKind, Result};
use crate::key::ObjectPath;
use crate::layout::Layout;
use crate::options::{Compression, Options, RequestedCodec, plane_width};
use crate::planes::PlanesEncoder;
use crate::reference::TensorReference;
use crate::storage::{ChunkLocation, CompressedLayout, StorageDecoder, StorageReference};
use crate::storage_allocator::StorageAllocator;
use crate::structure::Node;
use crate::tensor::TensorMeta;
use crate::write_job::RawBytes;

/// Raw bytes of a job, at least (8 MiB), unless fewer are left. Small storages share a job.
const JOB_BYTES: u64 = ChunkSize::DELTA.bytes();

/// A delta whose storages are not encoded yet.
///
/// # Examples
///
/// ```
/// # #[cfg(feature = "zstd")] {
/// use tssd_format::{Archive, DeltaClasses, DeltaDraft, Layout, Options, StateDict, Tensor};
/// let version = |changed: f32| {
///     let mut weights = vec![0.5_f32; 100_000];
///     weights[7] = changed;
///     let mut dict = StateDict::new();
///     dict.insert("weight", Tensor::from_slice(&weights, &[100, 1000])?);
///     let mut file = Vec::new();
///     Layout::plan(&dict, &Options::new())?.write_to(&mut file)?;
///     Archive::from_bytes(file)
/// };
/// let (base, result) = (version(1.0)?, version(2.0)?);
///
/// let mut file = Vec::new();
/// DeltaDraft::between(&base, &result, DeltaClasses::One)?.plan()?.write_to(&mut file)?;
/// assert!(file.len() < 6_000);
///
/// let delta = Archive::from_bytes(file)?.with_base(base)?;
/// assert_eq!(delta.to_state_dict()?, result.to_state_dict()?);
/// # }
/// # Ok::<(), tssd_format::Error>(())
/// ```
#[derive(Debug)]
pub struct DeltaDraft {
    sources: Arc<Sources>,
    /// The content digest of the base.
    base: Digest,
    plans: Vec<Plan>,
    jobs: Vec<DeltaJob>,
    options: Options,
}

/// How a storage of the result becomes one of the delta.
#[derive(Debug)]
enum Plan {
    /// Stored whole: its bytes, and the codec of its chunks, if it is compressed.
    Whole(RawBytes, Option<RequestedCodec>),
    /// Stored as a delta storage of elements of this width. The storage itself is encoded by jobs.
    Delta { base: u32, width: ElementWidth },
}

/// A job that encodes some chunks of a [`DeltaDraft`]. Jobs run in any order and on any thread.
#[derive(Clone, Debug)]
pub struct DeltaJob {
    work: Work,
    len: u64,
}

#[derive(Clone, Debug)]
enum Work {
    /// Chunks of a storage that is stored whole, by the number of the storage.
    Compress(u32, CompressJob),
    /// The check of a storage of an archive that is stored whole.
    Verify(Archive, u32),
    /// Delta chunks, of versions or of deltas.
    Encode(Arc<Sources>, Vec<ChunkWork>),
}

/// The archives that the jobs read.
#[derive(Debug)]
enum Sources {
    Versions { base: Archive, result: Archive, classes: DeltaClasses },
    Deltas { first: Archive, second: Archive },
}

/// One chunk of a delta storage.
#[derive(Clone, Copy, Debug)]
struct ChunkWork {
    /// Number of the storage in the base, or in the first delta.
    base: u32,
    /// Number of the storage in the result, or in the second delta.
    result: u32,
    chunk: u64,
    width: ElementWidth,
}

/// The chunks that a [`DeltaJob`] encoded, for [`DeltaDraft::into_layout`].
#[derive(Debug)]
#[must_use = "the layout needs the chunks of all jobs"]
pub struct DeltaChunks(Chunks);

#[derive(Debug)]
enum Chunks {
    Compressed(u32, CompressedChunks),
    Verified,
    Encoded(Vec<EncodedChunk>),
}

/// One encoded chunk of a delta storage.
#[derive(Debug)]
struct EncodedChunk {
    work: ChunkWork,
    codec: ChunkCodec,
    stored: Bytes,
    /// CRC-32 of the chunk in the base and in the result. Folding knows none.
    crcs: Option<[u32; 2]>,
    /// The chunk's part of the digest of the result, unless the result records that.
    digest: Option<Digest>,
    changes: ChangeCount,
}

impl DeltaChunks {
    /// Returns how many elements the delta chunks change. Chunks of folded deltas are not counted.
    pub fn changes(&self) -> ChangeCount {
        let mut total = ChangeCount::default();
        if let Chunks::Encoded(chunks) = &self.0 {
            for chunk in chunks {
                total += chunk.changes;
            }
        }
        total
    }
}

impl DeltaDraft {
    /// Plans the delta from one version to another.
    ///
    /// Tensors that are in both versions, with the same path, dtype, shape, strides and slice, become differences. All
    /// others are stored whole, in byte planes. Jobs verify the checksums of both versions.
    ///
    /// # Errors
    ///
    /// - The errors of [`Archive::compute_content_digest`], if the base has no digests.
    /// - `BlobElsewhere` or `BaseMissing` if the bytes of an archive are not open; `Io` if they cannot be read.
    pub fn between(base: &Archive, result: &Archive, classes: DeltaClasses) -> Result<Self> {
        result.require_readable().map_err(|error| of_version(error, "result"))?;
        let digest = base.digest_of_readable().map_err(|error| of_version(error, "base"))?;
        let sources = Sources::Versions { base: base.clone(), result: result.clone(), classes };
        let mut positions = vec![0; index_to_usize(base.storage_count())];
        for (position, number) in (0..).zip(content_order(&base.index_views())) {
            positions[index_to_usize(number)] = position;
        }
        let base_leaves: BTreeMap<ObjectPath, Node> = base.leaves().into_iter().collect();
        let mut draft = Self::new(sources, digest);
        let mut chunks = Vec::new();
        let mut matches = first_tensors(result);
        for number in 0..result.storage_count() {
            let (reference, len) = (matches.remove(&number), result.storage_len(number));
            let matched = reference.as_ref().and_then(|(path, reference)| {
                let base_number = matching_storage(base_leaves.get(path)?, reference)?;
                let width = delta_width(&reference.meta, len);
                (base.storage_len(base_number) == len).then_some((base_number, width))
            });
            if let Some((base_number, width)) = matched {
                chunks.extend(ChunkWork::all([base_number, number], width, len));
                let base = positions[index_to_usize(base_number)];
                draft.plans.push(Plan::Delta { base, width });
            } else {
                let meta = reference.map(|(_, reference)| reference.meta);
                draft.push_whole(result, meta.as_ref())?;
            }
        }
        draft.push_jobs(chunks);
        Ok(draft)
    }

    /// Plans the delta that has the effect of two deltas, the second of which continues the first.
    ///
    /// Neither base is needed. The result is as small as the delta between the two versions, where all blocks are sparse.
    ///
    /// # Errors
    ///
    /// - `NotADelta` if an archive is no delta; `WrongBase` (F-115) if the second does not continue the first.
    /// - `Io` if an archive cannot be read. Jobs fail with `NotFoldable` if a chunk has more than one class.
    pub fn fold(first: &Archive, second: &Archive) -> Result<Self> {
        let not_a_delta = || Error::new(ErrorKind::NotADelta);
        let base = first.base_digest().ok_or_else(not_a_delta)?;
        let continued = second.base_digest().ok_or_else(not_a_delta)?;
        if first.content_digest() != Some(continued) {
            return Err(Error::new(ErrorKind::WrongBase)
                .with_detail("the second delta does not continue the first one"));
        }
        // Its storages can be read that the first delta has whole.
        let applied = second.clone().with_checked_base(first.clone(), continued)?;
        let first_storages = content_order(&first.index_views());
        let sources = Sources::Deltas { first: first.clone(), second: second.clone() };
        let mut draft = Self::new(sources, base);
        let mut chunks = Vec::new();
        let mut matches = first_tensors(second);
        for number in 0..second.storage_count() {
            let storage = second.storage(number);
            let meta = matches.remove(&number).map(|(_, reference)| reference.meta);
            let Some(position) = storage.base else {
                draft.push_whole(second, meta.as_ref())?;
                continue;
            };
            let first_number = first_storages[index_to_usize(position)];
            let first_storage = first.storage(first_number);
            let Some(base) = first_storage.base else {
                draft.push_whole(&applied, meta.as_ref())?;
                continue;
            };
            let [width, first_width] =
                [&storage, &first_storage].map(StorageReference::delta_width);
            if width != first_width {
                return Err(Error::new(ErrorKind::NotFoldable)
                    .with_path(second.storage_fqn(number))
                    .with_detail("the deltas have elements of different widths"));
            }
            chunks.extend(ChunkWork::all([first_number, number], width, storage.len));
            draft.plans.push(Plan::Delta { base, width });
        }
        draft.push_jobs(chunks);
        Ok(draft)
    }

    fn new(sources: Sources, base: Digest) -> Self {
        let options = Options::new().attrs_of(sources.result()).digests();
        Self { sources: sources.into(), base, plans: Vec::new(), jobs: Vec::new(), options }
    }

    /// Plans the next storage as one that is stored whole; `meta` is that of the first tensor in it.
    fn push_whole(&mut self, archive: &Archive, meta: Option<&TensorMeta>) -> Result<()> {
        let number =
            u32::try_from(self.plans.len()).map_err(|_| Error::new(ErrorKind::TooLarge))?;
        let raw = archive.raw_storage(number)?;
        let len = raw.len();
        self.jobs.push(DeltaJob { work: Work::Verify(archive.clone(), number), len });
        let codec = StorageAllocator::codec(&raw, Compression::Planes.codec(meta));
        if let Some(codec) = codec {
            let jobs = CompressJob::jobs(0, &raw, codec, self.options.zstd_level, true);
            self.jobs.extend(
                jobs.map(|job| DeltaJob { len: job.len(), work: Work::Compress(number, job) }),
            );
        }
        self.plans.push(Plan::Whole(raw, codec));
        Ok(())
    }

    fn push_jobs(&mut self, chunks: Vec<ChunkWork>) {
        let (mut job, mut len) = (Vec::new(), 0);
        let mut chunks = chunks.into_iter().peekable();
        while let Some(chunk) = chunks.next() {
            let storage_len = self.sources.result().storage_len(chunk.result);
            let range = ChunkSize::DELTA.range(chunk.chunk, storage_len);
            len += range.end - range.start;
            job.push(chunk);
            if len >= JOB_BYTES || chunks.peek().is_none() {
                let work = Work::Encode(self.sources.clone(), std::mem::take(&mut job));
                self.jobs.push(DeltaJob { work, len: std::mem::take(&mut len) });
            }
        }
    }

    /// Returns the jobs that encode the storages.
    pub fn jobs(&self) -> &[DeltaJob] {
        &self.jobs
    }

    /// Runs all jobs on this thread and returns the layout.
    ///
    /// # Errors
    ///
    /// As [`DeltaJob::run`] and [`DeltaDraft::into_layout`].
    pub fn plan(self) -> Result<Layout> {
        let chunks: Vec<DeltaChunks> =
            self.jobs.iter().map(DeltaJob::run).collect::<Result<_>>()?;
        self.into_layout(chunks)
    }

    /// Assigns an offset to each storage and returns the layout of the delta, given the results of all jobs.
    ///
    /// # Errors
    ///
    /// - `Unfilled` if the result of a job is missing.
    /// - `StorageCorrupt` if the bytes of a version do not match their checksum.
    /// - `TooLarge` if offsets or tables overflow.
    pub fn into_layout(self, chunks: impl IntoIterator<Item = DeltaChunks>) -> Result<Layout> {
        let mut compressed = BTreeMap::<u32, Vec<CompressedChunks>>::new();
        let mut encoded = BTreeMap::<u32, Vec<EncodedChunk>>::new();
        for DeltaChunks(chunks) in chunks {
            match chunks {
                Chunks::Compressed(number, chunks) => {
                    compressed.entry(number).or_default().push(chunks);
                }
                Chunks::Verified => {}
                Chunks::Encoded(chunks) => chunks.into_iter().for_each(|chunk| {
                    encoded.entry(chunk.work.result).or_default().push(chunk);
                }),
            }
        }
        let result = self.sources.result();
        let mut allocator = StorageAllocator::new();
        allocator.storages.set_base(self.base);
        for (number, plan) in (0..).zip(self.plans) {
            match plan {
                Plan::Whole(raw, codec) => {
                    let chunks = compressed.remove(&number).unwrap_or_default();
                    allocator.place(raw, codec, chunks, &self.options)?;
                }
                Plan::Delta { base, width } => {
                    let mut chunks = encoded.remove(&number).unwrap_or_default();
                    chunks.sort_by_key(|chunk| chunk.work.chunk);
                    let storage = result.storage(number);
                    let numbers = chunks.iter().map(|chunk| chunk.work.chunk);
                    if !numbers.eq(0..ChunkSize::DELTA.count(storage.len)) {
                        return Err(Error::new(ErrorKind::Unfilled));
                    }
                    self.sources.verify(&storage, &chunks)?;
                    let digest =
                        storage.digest.map_or_else(|| merged_digest(&storage, &chunks), Some);
                    let digest = digest.ok_or_else(|| Error::new(ErrorKind::Unfilled))?;
                    let parts = chunks.iter().map(|chunk| chunk.stored.clone());
                    if chunks.iter().all(|chunk| chunk.codec == ChunkCodec::Raw) {
                        let raw = RawBytes::from_parts(parts);
                        allocator.place(raw, None, Vec::new(), &self.options)?;
                        continue;
                    }
                    let mut delta = delta_storage(&storage, width, &chunks);
                    (delta.base, delta.digest) = (Some(base), Some(digest));
                    delta.align_log2 = self.options.align_log2(delta.stored_len());
                    allocator.append_encoded(delta, parts.collect())?;
                }
            }
        }
        let root = result.structure();
        let tables = encode(&root.as_borrowed(), &allocator.attrs(&self.options), &[])?;
        Layout::new(allocator, tables)
    }
}

/// Returns for each storage whose first leaf is a tensor the path and the first reference of this leaf to the storage.
fn first_tensors(archive: &Archive) -> BTreeMap<u32, (ObjectPath, TensorReference)> {
    let mut first = BTreeMap::new();
    for (path, node) in archive.leaves() {
        let Node::Tensors(run) = node else { continue };
        for reference in run {
            if let Some(number) = reference.storage {
                first.entry(number).or_insert_with(|| (path.clone(), reference));
            }
        }
    }
    first
}

/// Returns the storage of the tensor of the base that is like `reference`, if the leaf of the base has one.
fn matching_storage(base: &Node, reference: &TensorReference) -> Option<u32> {
    let Node::Tensors(run) = base else { return None };
    let is_alike = |other: &&TensorReference| {
        other.meta.dtype() == reference.meta.dtype()
            && other.meta.shape() == reference.meta.shape()
            && other.meta.strides() == reference.meta.strides()
            && other.byte_offset == reference.byte_offset
            && other.shard_spec == reference.shard_spec
    };
    run.iter().find(is_alike)?.storage
}

impl Archive {
    /// Returns the width of the elements of each storage, as deltas have it: that of its first tensor.
    ///
    /// A storage without a tensor, such as a text, has elements of one byte. Elements of 8 and 16 bytes count as several of 4.
    pub fn element_widths(&self) -> Vec<ElementWidth> {
        let first = first_tensors(self);
        let width = |number| {
            let reference = first.get(&number).map(|(_, reference)| reference);
            reference.map_or(ElementWidth::One, |reference| {
                delta_width(&reference.meta, self.storage_len(number))
            })
        };
        (0..self.storage_count()).map(width).collect()
    }
}

/// Returns the width of the elements of a delta storage whose first tensor has this metadata.
fn delta_width(meta: &TensorMeta, storage_len: u64) -> ElementWidth {
    let component = plane_width(Some(meta.dtype())).min(4);
    let width = ElementWidth::from_bytes(component).unwrap_or(ElementWidth::One);
    if storage_len.is_multiple_of(to_u64(width.bytes())) { width } else { ElementWidth::One }
}

/// Adds to the message of an error which of the two versions it is about.
fn of_version(error: Error, version: &str) -> Error {
    let detail = match error.detail() {
        Some(detail) => format!("{detail}, in the {version}"),
        None => format!("in the {version}"),
    };
    error.with_detail(detail)
}

fn merged_digest(storage: &StorageReference, chunks: &[EncodedChunk]) -> Option<Digest> {
    let parts: Option<Vec<Digest>> = chunks.iter().map(|chunk| chunk.digest).collect();
    parts.map(|parts| digest::merge(storage.len, ChunkSize::DELTA, &parts))
}

/// Returns a delta storage of these chunks, without offset, base and digest.
fn delta_storage(
    result: &StorageReference,
    width: ElementWidth,
    chunks: &[EncodedChunk],
) -> StorageReference {
    let mut offset = 0;
    let chunks = chunks.iter().map(|chunk| {
        let len = u32::try_from(chunk.stored.len()).expect("at most 8 MiB");
        let location = ChunkLocation { offset, len, codec: chunk.codec };
        offset += u64::from(len);
        location
    });
    let layout = CompressedLayout { width: width.to_u8(), chunks: chunks.collect() };
    StorageReference {
        len: result.len,
        crc32: result.crc32,
        chunk_size: ChunkSize::DELTA,
        compressed_layout: Some(layout),
        ..StorageReference::default()
    }
}

impl ChunkWork {
    /// Returns all chunks of a storage of `len` raw bytes, given its numbers in both archives.
    fn all([base, result]: [u32; 2], width: ElementWidth, len: u64) -> impl Iterator<Item = Self> {
        (0..ChunkSize::DELTA.count(len)).map(move |chunk| Self { base, result, chunk, width })
    }
}

impl Sources {
    /// Returns the version that the delta leads to, or the delta that leads to it.
    fn result(&self) -> &Archive {
        match self {
            Self::Versions { result, .. } => result,
            Self::Deltas { second, .. } => second,
        }
    }

    /// Checks the CRC-32s of both versions of a storage, as the jobs have computed them.
    fn verify(&self, storage: &StorageReference, chunks: &[EncodedChunk]) -> Result<()> {
        let Self::Versions { base, result, .. } = self else { return Ok(()) };
        let Some(first) = chunks.first() else { return Ok(()) };
        let sides = [(base, first.work.base, "base"), (result, first.work.result, "result")];
        for (side, (archive, number, name)) in sides.into_iter().enumerate() {
            let crcs = chunks.iter().filter_map(|chunk| Some(chunk.crcs?[side]));
            let crc = combine_crcs(storage.len, ChunkSize::DELTA, crcs);
            archive
                .storage(number)
                .verify_crc32(crc)
                .map_err(|error| of_version(archive.at_storage(error, number), name))?;
        }
        Ok(())
    }
}

impl DeltaJob {
    /// Returns the number of raw bytes of the result that the job encodes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Returns whether the job encodes no bytes, which is never the case.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Encodes the chunks of the job.
    ///
    /// # Errors
    ///
    /// - `Io` if bytes cannot be read, or zstd cannot allocate memory; `FeatureMissing` in a build without zstd.
    /// - `ChunkCorrupt` and other errors of [`Archive::verify_deep`] for chunks that do not decode.
    /// - `NotFoldable` if a chunk of a delta that is folded has more than one class.
    pub fn run(&self) -> Result<DeltaChunks> {
        Ok(DeltaChunks(match &self.work {
            Work::Compress(number, job) => Chunks::Compressed(*number, job.run()?),
            Work::Verify(archive, number) => {
                archive.verify_storage(*number)?;
                Chunks::Verified
            }
            Work::Encode(sources, chunks) => Chunks::Encoded(match &**sources {
                Sources::Versions { base, result, classes } => {
                    let mut encoder = VersionEncoder::new(base, result, *classes)?;
                    chunks.iter().map(|chunk| encoder.encode(*chunk)).collect::<Result<_>>()?
                }
                Sources::Deltas { first, second } => {
                    let mut encoder = FoldEncoder::new(first, second)?;
                    chunks.iter().map(|chunk| encoder.encode(*chunk)).collect::<Result<_>>()?
                }
            }),
        }))
    }
}

/// Encoder of chunks, given both versions.
struct VersionEncoder<'a> {
    base: &'a Archive,
    result: &'a Archive,
    options: DeltaOptions<'static>,
    encoder: DeltaEncoder,
    planes: PlanesEncoder,
    chunk: Vec<u8>,
}

impl<'a> VersionEncoder<'a> {
    fn new(base: &'a Archive, result: &'a Archive, classes: DeltaClasses) -> Result<Self> {
        Ok(Self {
            base,
            result,
            options: DeltaOptions { classes, ..DeltaOptions::default() },
            encoder: DeltaEncoder::new()?,
            planes: PlanesEncoder::new()?,
            chunk: Vec::new(),
        })
    }

    fn encode(&mut self, work: ChunkWork) -> Result<EncodedChunk> {
        let len = self.result.storage_len(work.result);
        let range = ChunkSize::DELTA.range(work.chunk, len);
        let old = self.base.storage_range(work.base, range.clone());
        let old = old.map_err(|error| of_version(error, "base"))?;
        let new = self.result.storage_range(work.result, range);
        let new = new.map_err(|error| of_version(error, "result"))?;
        let has_digests = !self.result.index_views().digests.is_empty();
        let digest = (!has_digests).then(|| {
            let mut hasher = ChunkHasher::new(work.chunk, len, ChunkSize::DELTA);
            hasher.update(&new);
            hasher.finish()
        });
        let old_crc = checksum(&old);
        self.chunk.clear();
        let encoded =
            self.encoder.encode([&old, &new], work.width, &self.options, &mut self.chunk)?;
        let (codec, stored) = if encoded.changes.listed == 0 && encoded.changes.dense == 0 {
            (ChunkCodec::Delta, Bytes::new())
        } else {
            smallest(&mut self.planes, &self.chunk, &new, work.width)?
        };
        let crcs = Some([old_crc, encoded.crc32]);
        let changes = match codec {
            ChunkCodec::Delta => encoded.changes,
            _ => ChangeCount { listed: 0, dense: to_u64(new.len() / work.width.bytes()) },
        };
        Ok(EncodedChunk { work, codec, stored, crcs, digest, changes })
    }
}

/// Returns the smallest form of a chunk: `delta`, byte planes, or raw.
///
/// Planes are tried only if the delta saves so little that they may be smaller.
fn smallest(
    planes: &mut PlanesEncoder,
    delta: &[u8],
    raw: &Bytes,
    width: ElementWidth,
) -> Result<(ChunkCodec, Bytes)> {
    if delta.len() < raw.len() / 2 {
        return Ok((ChunkCodec::Delta, Bytes::copy_from_slice(delta)));
    }
    let planes = planes.encode(raw, width.to_u8())?;
    Ok(match planes {
        Some(planes) if planes.len() <= delta.len() => (ChunkCodec::Planes, planes.into()),
        _ if delta.len() < raw.len() => (ChunkCodec::Delta, Bytes::copy_from_slice(delta)),
        _ => (ChunkCodec::Raw, raw.clone()),
    })
}

/// Encoder of chunks, given two deltas.
struct FoldEncoder<'a> {
    first: &'a Archive,
    second: &'a Archive,
    folder: DeltaFolder,
    planes: PlanesEncoder,
}

impl<'a> FoldEncoder<'a> {
    fn new(first: &'a Archive, second: &'a Archive) -> Result<Self> {
        Ok(Self { first, second, folder: DeltaFolder::new()?, planes: PlanesEncoder::new()? })
    }

    fn encode(&mut self, work: ChunkWork) -> Result<EncodedChunk> {
        let (codec, stored) = self
            .fold(work)
            .map_err(|error| error.with_path(self.second.storage_fqn(work.result)))?;
        let changes = ChangeCount::default();
        Ok(EncodedChunk { work, codec, stored, crcs: None, digest: None, changes })
    }

    fn fold(&mut self, work: ChunkWork) -> Result<(ChunkCodec, Bytes)> {
        let [first, second] = [(self.first, work.base), (self.second, work.result)]
            .map(|(archive, number)| (archive, archive.storage(number)));
        let [codec, next_codec] =
            [&first.1, &second.1].map(|storage| storage.chunk_codec(work.chunk).codec);
        let stored = |(archive, storage): &(&Archive, StorageReference)| {
            archive.stored_chunk(storage, work.chunk)
        };
        let next = stored(&second)?;
        if next_codec != ChunkCodec::Delta {
            return Ok((next_codec, next));
        }
        let current = stored(&first)?;
        if next.is_empty() {
            return Ok((codec, current));
        }
        if codec == ChunkCodec::Delta && current.is_empty() {
            return Ok((ChunkCodec::Delta, next));
        }
        let range = second.1.chunk(work.chunk);
        let len = to_usize(range.end - range.start);
        if codec == ChunkCodec::Delta {
            let mut chunk = Vec::new();
            let changes = self.folder.fold([&current, &next], work.width, len, &mut chunk)?;
            if changes.listed > 0 || changes.dense < to_u64(len / work.width.bytes()) {
                return Ok((ChunkCodec::Delta, chunk.into()));
            }
            // All blocks are dense, and lie at the end.
            return self
                .whole_chunk(Bytes::copy_from_slice(&chunk[chunk.len() - len..]), work.width);
        }
        // The first delta has the chunk whole, so that the folded one has it whole too.
        let mut decoder = StorageDecoder::new(&first.1)?;
        let base = Bytes::copy_from_slice(decoder.decode(work.chunk, &current, None)?);
        let mut decoder = StorageDecoder::new(&second.1)?;
        let raw = Bytes::copy_from_slice(decoder.decode(work.chunk, &next, Some(&base))?);
        self.whole_chunk(raw, work.width)
    }

    /// Returns the stored form of a chunk that needs no base.
    fn whole_chunk(&mut self, raw: Bytes, width: ElementWidth) -> Result<(ChunkCodec, Bytes)> {
        let planes = self.planes.encode(&raw, width.to_u8())?;
        Ok(planes.map_or((ChunkCodec::Raw, raw), |planes| (ChunkCodec::Planes, planes.into())))
    }
}
