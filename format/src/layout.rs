//! Archive layout: planned from metadata, optionally compressed, then written by independent jobs.

use std::io::Write;
use std::sync::{Arc, LazyLock};

use bytes::Bytes;

use crate::blob::Blob;
use crate::compress::{CompressJob, CompressedChunks};
use crate::encode::{Attrs, encode};
use crate::error::{Error, ErrorKind, Result};
use crate::frame::{self, DATA_START, FRAME_LEN, IndexLocation};
use crate::key::ObjectPath;
use crate::options::Options;
use crate::shard_file::ShardFile;
use crate::state_dict::StateDict;
use crate::storage::StorageReference;
use crate::storage_allocator::StorageAllocator;
use crate::storage_tables::StorageTables;
use crate::structure::Node;
use crate::table::{ROOT_LEN, TableViews, Tables};
use crate::write_job::{JobChecksums, Source, WriteJob, jobs, length, parts};

/// A planned archive whose storages have no offsets yet, because they may still be compressed.
///
/// [`Layout::plan`] does the same in one step, on one thread.
///
/// # Examples
///
/// ```
/// # #[cfg(feature = "zstd")] {
/// use tssd_format::{Archive, Compression, Draft, Options, StateDict, Tensor};
/// let mut dict = StateDict::new();
/// dict.insert("zeros", Tensor::from_slice(&[0_i64; 1 << 20], &[1 << 20])?);
///
/// let draft = Draft::new(&dict, &Options::new().compress(Compression::Zstd))?;
/// let jobs = draft.jobs();
/// let compressed = std::thread::scope(|scope| {
///     let threads: Vec<_> = jobs.iter().map(|job| scope.spawn(|| job.run())).collect();
///     threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Result<Vec<_>, _>>()
/// })?;
/// let layout = draft.into_layout(compressed)?;
/// assert!(layout.file_len() < 10_000);
/// # let mut file = Vec::new();
/// # layout.write_to(&mut file)?;
/// # assert_eq!(Archive::from_bytes(file)?.to_state_dict()?, dict);
/// # }
/// # Ok::<(), tssd_format::Error>(())
/// ```
#[derive(Debug)]
pub struct Draft {
    allocator: StorageAllocator,
    /// All tables except those of the storages.
    tables: Tables,
    options: Options,
}

impl Draft {
    /// Assigns the leaves of a state dict to storages, without reading any tensor byte.
    ///
    /// # Errors
    ///
    /// As [`Layout::plan`].
    pub fn new(dict: &StateDict, options: &Options) -> Result<Self> {
        let mut allocator = StorageAllocator::new();
        let root = allocator.allocate(dict.as_value(), &ObjectPath::root(), options)?;
        let tables = encode(&root, &allocator.attrs(options), &[])?;
        Ok(Self { allocator, tables, options: options.clone() })
    }

    /// Returns the jobs that compress storages; none if the options ask for no compression.
    pub fn jobs(&self) -> Vec<CompressJob> {
        self.allocator.compress_jobs(&self.options)
    }

    /// Assigns an offset to each storage and returns the layout, given the results of all jobs.
    ///
    /// # Errors
    ///
    /// `Unfilled` if the result of a job is missing; otherwise as [`Layout::plan`].
    pub fn into_layout(
        self,
        compressed: impl IntoIterator<Item = CompressedChunks>,
    ) -> Result<Layout> {
        let Self { mut allocator, tables, options } = self;
        allocator.place_pending(compressed, &options)?;
        Layout::new(allocator, tables)
    }
}

/// The position of every byte of an archive, known before any byte is copied.
///
/// # Examples
///
/// ```
/// use tssd_format::{Archive, Layout, Options, StateDict, Tensor};
/// let mut dict = StateDict::new();
/// dict.insert("weight", Tensor::from_slice(&[1.0_f32; 1000], &[10, 100])?);
///
/// let layout = Layout::plan(&dict, &Options::new())?;
/// let mut file = vec![0xFF; usize::try_from(layout.file_len())?]; // or shared memory, or a memory map
/// layout.write_into(&mut file)?;
/// assert_eq!(Archive::from_bytes(file)?.to_state_dict()?, dict);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Layout {
    /// All tables except those of the storages.
    tables: Tables,
    storages: StorageTables,
    sources: Arc<Vec<Source>>,
    index_off: u64,
    index_len: u64,
}

impl Layout {
    /// Creates the layout of storages that have offsets; `tables` are all other tables.
    pub(crate) fn new(allocator: StorageAllocator, tables: Tables) -> Result<Self> {
        let index_len = allocator.storages.views(&tables).index_len()?;
        let index_off = allocator.index_off()?;
        let end = index_off.checked_add(index_len).and_then(|end| end.checked_add(64));
        end.ok_or_else(|| Error::new(ErrorKind::TooLarge))?;
        let StorageAllocator { sources, storages, .. } = allocator;
        Ok(Self { tables, storages, sources: Arc::new(sources), index_off, index_len })
    }

    /// Plans the archive of a state dict.
    ///
    /// The result depends only on the state dict, the options and, if they ask for compression, the version of zstd.
    /// Without compression, no tensor byte is read.
    ///
    /// # Errors
    ///
    /// If a value cannot be stored, the error names its path: `TooDeep`, `UntypedLeaf`, `DuplicateKey`, `KeysCollide`,
    /// `KeyKind`, `PartialPlacement`, `TensorRun`, `TooLarge`; `Misaligned` if tensors overlap in memory and no common
    /// offset aligns them all.
    pub fn plan(dict: &StateDict, options: &Options) -> Result<Self> {
        let draft = Draft::new(dict, options)?;
        let compressed: Vec<CompressedChunks> =
            draft.jobs().iter().map(CompressJob::run).collect::<Result<_>>()?;
        draft.into_layout(compressed)
    }

    /// Returns the exact length of the file in bytes.
    pub fn file_len(&self) -> u64 {
        self.index_off + self.index_len + 64
    }

    /// Returns the jobs that write all bytes before the index, up to [`Layout::index_off`].
    ///
    /// The jobs are independent of each other.
    pub fn jobs(&self) -> Vec<WriteJob> {
        jobs(0..self.index_off, Some(head()), &self.sources)
    }

    /// Returns all bytes before the index in order, as slices of the memory that contains them.
    ///
    /// For a caller that writes them sequentially and gets the checksums from [`WriteJob::checksum`]. Returns `None` if some of
    /// the bytes are not in the memory of this process.
    pub fn parts(&self) -> Option<Vec<&[u8]>> {
        static HEAD: LazyLock<[u8; FRAME_LEN]> = LazyLock::new(frame::head);
        parts(self.index_off, &*HEAD, &self.sources)
    }

    /// Returns the blobs that contain bytes outside the memory of this process, once for each segment.
    pub fn blobs(&self) -> impl Iterator<Item = &dyn Blob> {
        self.sources.iter().flat_map(Source::blobs)
    }

    /// Returns the offset of the index in the file, in bytes: where the result of [`Layout::seal`] belongs.
    pub fn index_off(&self) -> u64 {
        self.index_off
    }

    /// Returns the index and the trailer, given the checksums of all jobs.
    ///
    /// # Errors
    ///
    /// `Unfilled` if the checksums of a job are missing.
    pub fn seal(&self, checksums: impl IntoIterator<Item = JobChecksums>) -> Result<Vec<u8>> {
        let len = usize::try_from(self.file_len() - self.index_off).expect("at most 1 GiB");
        let mut tail = Vec::with_capacity(len);
        self.seal_to(checksums, &mut tail)?;
        Ok(tail)
    }

    fn seal_to(
        &self,
        checksums: impl IntoIterator<Item = JobChecksums>,
        writer: &mut impl Write,
    ) -> Result<()> {
        let mut checksums: Vec<JobChecksums> = checksums.into_iter().collect();
        checksums.sort_by_key(|job| job.first);
        let mut sums = Vec::with_capacity(self.storages.crc_count());
        for job in checksums {
            // A job may have run twice: both runs computed the same checksums.
            if job.first == sums.len() {
                sums.extend(job.checksums);
            }
        }
        if sums.len() != self.storages.crc_count() {
            return Err(Error::new(ErrorKind::Unfilled));
        }
        let mut storages = self.storages.clone();
        storages.set_checksums(&sums);
        write_tail(&storages.views(&self.tables), self.index_off, writer)
    }

    /// Writes the archive to `target`.
    ///
    /// # Errors
    ///
    /// `TargetSize` if `target` does not have the length of the file; `Io` if a blob cannot be read.
    pub fn write_into(&self, target: &mut [u8]) -> Result<()> {
        if length(target) != self.file_len() {
            return Err(Error::new(ErrorKind::TargetSize).with_detail(format_args!(
                "{} bytes, needed {}",
                target.len(),
                self.file_len()
            )));
        }
        let mut rest = target;
        let mut checksums = Vec::new();
        for job in self.jobs() {
            let len = usize::try_from(job.range().end - job.range().start).unwrap_or(rest.len());
            let (part, tail) = rest.split_at_mut(len);
            checksums.push(job.run(part)?);
            rest = tail;
        }
        self.seal_to(checksums, &mut rest)
    }

    /// Writes the archive to a stream.
    ///
    /// # Errors
    ///
    /// `Io` if the stream fails or a blob cannot be read.
    pub fn write_to(&self, writer: &mut impl Write) -> Result<()> {
        let checksums: Vec<JobChecksums> =
            self.jobs().iter().map(|job| job.write_to(writer)).collect::<Result<_>>()?;
        self.seal_to(checksums, writer)
    }
}

/// Returns the bytes of a manifest: an archive without a blob, whose storages are in other files.
///
/// `shards` names these files, which must be beside the manifest. `storages` must be sorted by (shard, offset).
///
/// # Errors
///
/// As [`Layout::plan`] for the keys of the tree; `TooLarge`.
pub fn encode_manifest(
    root: &Node,
    storages: &[StorageReference],
    attrs: &Attrs,
    shards: &[ShardFile],
) -> Result<Vec<u8>> {
    let tables = encode(&root.as_borrowed(), attrs, shards)?;
    let storages = StorageTables::from_storages(storages)?;
    let mut file = head().to_vec();
    file.resize(usize::try_from(DATA_START).expect("4096"), 0);
    write_tail(&storages.views(&tables), DATA_START, &mut file)?;
    Ok(file)
}

fn head() -> Bytes {
    Bytes::copy_from_slice(&frame::head())
}

/// Writes the index and the trailer.
///
/// # Errors
///
/// `TooLarge` if the index would exceed 1 GiB; `Io` if the stream fails.
pub(crate) fn write_tail(
    views: &TableViews<'_>,
    index_off: u64,
    writer: &mut impl Write,
) -> Result<()> {
    let root_len = u32::try_from(ROOT_LEN).expect("a small constant");
    let index_len = views.index_len()?;
    let mut crc = crc32fast::Hasher::new();
    views.for_each_part(|bytes| {
        crc.update(bytes);
        Ok(writer.write_all(bytes)?)
    })?;
    let location = IndexLocation {
        index_off,
        index_len,
        root_off: u32::try_from(index_len).expect("at most 1 GiB") - root_len,
        root_len,
        index_crc32: crc.finalize(),
    };
    Ok(writer.write_all(&location.trailer())?)
}
