//! Where everything goes: an archive planned from metadata alone, compressed if that is wanted, then filled.

use std::io::Write;
use std::sync::{Arc, LazyLock};

use bytes::Bytes;

use crate::arrange::Arranger;
use crate::blob::Blob;
use crate::encode::{Attrs, ShardFile, encode};
use crate::error::{Error, ErrorKind, Result};
use crate::fill::{Fill, Filled, Source, jobs, length, parts};
use crate::frame::{self, DATA_START, FRAME_LEN, IndexPlace};
use crate::key::ObjectPath;
use crate::options::Options;
use crate::pack::{Pack, Packed};
use crate::seal::StorageTables;
use crate::state_dict::StateDict;
use crate::storage::StorageReference;
use crate::structure::Node;
use crate::table::{ROOT_LEN, Tables, Views};

/// An archive in the making, whose storages are yet to be compressed.
///
/// [`Layout::plan`] does the same in one step on one thread.
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
/// let packed = std::thread::scope(|scope| {
///     let threads: Vec<_> = jobs.iter().map(|job| scope.spawn(|| job.run())).collect();
///     threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Result<Vec<_>, _>>()
/// })?;
/// let layout = draft.place(packed)?;
/// assert!(layout.file_len() < 10_000);
/// # let mut file = Vec::new();
/// # layout.write_to(&mut file)?;
/// # assert_eq!(Archive::from_bytes(file)?.to_state_dict()?, dict);
/// # }
/// # Ok::<(), tssd_format::Error>(())
/// ```
#[derive(Debug)]
pub struct Draft {
    arranger: Arranger,
    /// All but those of storages.
    tables: Tables,
    options: Options,
}

impl Draft {
    /// Arranges a state dict; touches none of its tensors.
    ///
    /// # Errors
    ///
    /// As [`Layout::plan`].
    pub fn new(dict: &StateDict, options: &Options) -> Result<Self> {
        let mut arranger = Arranger::new();
        let root = arranger.arrange(dict.as_value(), &ObjectPath::root(), options)?;
        let tables = encode(&root, &arranger.attrs(options), &[])?;
        Ok(Self { arranger, tables, options: options.clone() })
    }

    /// The jobs that compress what is to be compressed; none without compression.
    pub fn jobs(&self) -> Vec<Pack> {
        self.arranger.jobs(&self.options)
    }

    /// The layout, once all jobs have run.
    ///
    /// # Errors
    ///
    /// `Unfilled` if a job has not; else as [`Layout::plan`].
    pub fn place(self, packed: impl IntoIterator<Item = Packed>) -> Result<Layout> {
        let Self { mut arranger, tables, options } = self;
        arranger.place(packed, &options)?;
        let index_len = arranger.storages.views(&tables).index_len()?;
        let index_off = arranger.index_off()?;
        let end = index_off.checked_add(index_len).and_then(|end| end.checked_add(64));
        end.ok_or_else(|| Error::new(ErrorKind::TooLarge))?;
        let Arranger { sources, storages, .. } = arranger;
        Ok(Layout { tables, storages, sources: Arc::new(sources), index_off, index_len })
    }
}

/// The place of every byte of an archive, before any of them is copied.
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
    /// All but those of storages.
    tables: Tables,
    storages: StorageTables,
    sources: Arc<Vec<Source>>,
    index_off: u64,
    index_len: u64,
}

impl Layout {
    /// Plans the archive of a state dict. The result depends on the state dict and the options alone,
    /// and on the version of zstd if it compresses. Without compression, no tensor byte is touched.
    ///
    /// # Errors
    ///
    /// What cannot be stored, with its path: `TooDeep`, `UntypedLeaf`, `DuplicateKey`, `KeysCollide`,
    /// `KeyKind`, `PartialPlacement`, `TensorRun`, `TooLarge`; `Misaligned` for tensors that overlap
    /// in memory at offsets that no alignment fits.
    pub fn plan(dict: &StateDict, options: &Options) -> Result<Self> {
        let draft = Draft::new(dict, options)?;
        let packed: Vec<Packed> = draft.jobs().iter().map(Pack::run).collect::<Result<_>>()?;
        draft.place(packed)
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

    /// Everything in front of the index in order, where it lies, in pieces as large as can be: for a
    /// caller who writes it in one go, and takes the checksums from [`Fill::sum`]. None if some of it is not in this
    /// process's memory.
    pub fn parts(&self) -> Option<Vec<&[u8]>> {
        static HEAD: LazyLock<[u8; FRAME_LEN]> = LazyLock::new(frame::head);
        parts(self.index_off, &*HEAD, &self.sources)
    }

    /// What of it is not in this process's memory: the blobs of its storages, once for each piece of them.
    pub fn elsewhere(&self) -> impl Iterator<Item = &dyn Blob> {
        self.sources.iter().flat_map(Source::elsewhere)
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
        let mut tail = Vec::with_capacity(len);
        self.seal_to(filled, &mut tail)?;
        Ok(tail)
    }

    fn seal_to(
        &self,
        filled: impl IntoIterator<Item = Filled>,
        writer: &mut impl Write,
    ) -> Result<()> {
        let mut filled: Vec<Filled> = filled.into_iter().collect();
        filled.sort_by_key(|filled| filled.first);
        let mut sums = Vec::with_capacity(self.storages.crc_count());
        for filled in filled {
            // A job that has run twice has found the same twice.
            if filled.first == sums.len() {
                sums.extend(filled.sums);
            }
        }
        if sums.len() != self.storages.crc_count() {
            return Err(Error::new(ErrorKind::Unfilled));
        }
        let mut storages = self.storages.clone();
        storages.seal(&sums);
        write_tail(&storages.views(&self.tables), self.index_off, writer)
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
        self.seal_to(filled, &mut rest)
    }

    /// Writes the archive to a stream.
    ///
    /// # Errors
    ///
    /// `Io` if the stream fails.
    pub fn write_to(&self, writer: &mut impl Write) -> Result<()> {
        let filled: Vec<Filled> =
            self.jobs().iter().map(|job| job.write_to(writer)).collect::<Result<_>>()?;
        self.seal_to(filled, writer)
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
    let tables = encode(&root.as_tree(), attrs, shards)?;
    let storages = StorageTables::of(storages)?;
    let mut file = head().to_vec();
    file.resize(usize::try_from(DATA_START).expect("4096"), 0);
    write_tail(&storages.views(&tables), DATA_START, &mut file)?;
    Ok(file)
}

fn head() -> Bytes {
    Bytes::copy_from_slice(&frame::head())
}

/// Writes index and trailer.
///
/// # Errors
///
/// `TooLarge` if the index would exceed the limit; `Io` if the stream fails.
pub(crate) fn write_tail(views: &Views<'_>, index_off: u64, writer: &mut impl Write) -> Result<()> {
    let root_len = u32::try_from(ROOT_LEN).expect("104");
    let index_len = views.index_len()?;
    let mut crc = crc32fast::Hasher::new();
    views.each_part(|bytes| {
        crc.update(bytes);
        Ok(writer.write_all(bytes)?)
    })?;
    let place = IndexPlace {
        index_off,
        index_len,
        root_off: u32::try_from(index_len).expect("at most 1 GiB") - root_len,
        root_len,
        index_crc32: crc.finalize(),
    };
    Ok(writer.write_all(&place.trailer())?)
}
