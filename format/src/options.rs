//! Options of writers.

use std::fmt;
use std::sync::Arc;

use crate::archive::Archive;
use crate::chunk::ChunkPolicy;
use crate::chunk_codec::{ChunkCodec, StorageCodec};
use crate::codec::is_shuffle_width;
use crate::content_digest::STORE_ATTR_PREFIX;
use crate::convert::index_to_usize;
use crate::dtype::{Dtype, DtypeClass};
use crate::encode::{AttrValue, Attrs};
use crate::error::{Error, ErrorKind, Result};
use crate::frame::default_align_log2;
use crate::key::ObjectPath;
use crate::planes::is_plane_width;
use crate::structure::PathCursor;
use crate::tensor::TensorMeta;

/// Name of the attribute that records the zstd level of all frames.
///
/// It describes how an archive is compressed, and does not affect its meaning.
pub const ZSTD_LEVEL_ATTR: &str = "tssd.file.zstd_level";

/// The key of the dict that maps the names of auxiliary files, such as `config.json`, to bytes.
pub const FILES_KEY: &str = ".files";

/// The attribute of an archive whose [`FILES_KEY`] is what packing a directory added. Its value is the int 1.
///
/// Without it, the key is one of the user's.
pub const PACKED_FILES_ATTR: &str = "tssd.file.packed_files";

/// The compression levels that zstd supports.
const ZSTD_LEVELS: std::ops::RangeInclusive<i32> = -(1 << 17)..=22;

/// Options of a writer: attributes, compression, digests, alignment, chunks.
///
/// # Examples
///
/// Compresses the optimizer state, and stores the weights uncompressed, so that they can be memory-mapped:
///
/// ```
/// # #[cfg(feature = "zstd")] {
/// use tssd_format::{Compression, Options, StateDict, Tensor, TorchStoreStateDict, Value};
/// let mut optimizer = tssd_format::Dict::new();
/// optimizer.insert("exp_avg", Tensor::from_slice(&[0.5_f32; 100_000], &[100_000])?);
/// let mut dict = StateDict::new();
/// dict.insert("weight", Tensor::from_slice(&[0.5_f32; 100_000], &[100_000])?);
/// dict.insert("optimizer", Value::Dict(optimizer));
///
/// let options = Options::new().digests().compress_leaves(|path, _| {
///     let is_optimizer = path.fqn().starts_with("optimizer.");
///     if is_optimizer { Compression::ShuffledZstd } else { Compression::None }
/// });
/// let encoded = TorchStoreStateDict::with_options(&dict, &options)?;
/// let [weight, exp_avg] = [0, 1].map(|number| encoded.archive().storage(number));
/// assert_eq!(weight.stored_len(), 400_000);
/// assert!(exp_avg.stored_len() < 1000);
/// assert_eq!(weight.digest, exp_avg.digest); // the same bytes
/// assert_eq!(encoded.to_state_dict()?, dict);
/// # }
/// # Ok::<(), tssd_format::Error>(())
/// ```
#[derive(Clone)]
pub struct Options {
    pub(crate) attrs: Attrs,
    pub(crate) allow_opaque: bool,
    pub(crate) digests: bool,
    pub(crate) align_log2: Option<u8>,
    pub(crate) chunks: ChunkPolicy,
    pub(crate) zstd_level: i32,
    compression: CompressionPolicy,
}

/// The compression of a storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Compression {
    /// Uncompressed: the bytes can be memory-mapped, and copied without decoding.
    #[default]
    None,
    /// One zstd frame for each 1 MiB of raw bytes.
    Zstd,
    /// As [`Compression::Zstd`], after a byte shuffle by the element size, which suits floats with repeats.
    ShuffledZstd,
    /// Byte planes of the elements, of which those with exponents are coded. It suits weights, and is two to three
    /// times as fast as zstd. Bytes and strings are compressed as with [`Compression::Zstd`].
    Planes,
    /// Byte planes of the elements, of which the last one is in codes of fixed widths. It decodes at half the speed of a
    /// copy in memory, and is a little larger than [`Compression::Planes`]: it suits links that are faster than other codecs.
    /// Bytes and strings are compressed as with [`Compression::Zstd`].
    Tiers,
    /// [`Compression::Planes`], [`Compression::ShuffledZstd`] or none, by what makes samples of the storage smallest.
    /// Bytes and strings are compressed as with [`Compression::Zstd`].
    Auto,
}

/// The codec of the chunks of a storage, as the options ask for it. Widths of elements are in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RequestedCodec {
    Fixed(StorageCodec),
    /// The codec, or none, that makes samples of the storage smallest.
    Auto {
        shuffle_width: u8,
        plane_width: u8,
    },
}

impl Compression {
    /// Returns the codec for a tensor, or for bytes; `None` if the storage stays raw.
    #[inline]
    pub(crate) fn codec(self, meta: Option<&TensorMeta>) -> Option<RequestedCodec> {
        if self == Self::None { None } else { self.codec_of_dtype(meta.map(TensorMeta::dtype)) }
    }

    fn codec_of_dtype(self, dtype: Option<Dtype>) -> Option<RequestedCodec> {
        let itemsize = u8::try_from(dtype.map_or(1, Dtype::itemsize)).unwrap_or(1);
        let shuffle_width = if is_shuffle_width(itemsize) { itemsize } else { 1 };
        let plane_width = plane_width(dtype);
        let fixed = |codec, width| Some(RequestedCodec::Fixed(StorageCodec { codec, width }));
        match self {
            Self::None => None,
            Self::Zstd => fixed(ChunkCodec::Zstd, 1),
            Self::ShuffledZstd => fixed(ChunkCodec::Zstd, shuffle_width),
            Self::Planes | Self::Tiers | Self::Auto if dtype.is_none() => {
                fixed(ChunkCodec::Zstd, 1)
            }
            Self::Planes => fixed(ChunkCodec::Planes, plane_width),
            Self::Tiers => fixed(ChunkCodec::Tiers, plane_width),
            Self::Auto => Some(RequestedCodec::Auto { shuffle_width, plane_width }),
        }
    }
}

/// Returns the width of the elements of a dtype for byte planes, in bytes. That of a complex dtype is one component.
pub(crate) fn plane_width(dtype: Option<Dtype>) -> u8 {
    let itemsize = u8::try_from(dtype.map_or(1, Dtype::itemsize)).unwrap_or(1);
    let is_complex = dtype.is_some_and(|dtype| dtype.class() == DtypeClass::Complex);
    let component = if is_complex { itemsize / 2 } else { itemsize };
    if is_plane_width(component) { component } else { 1 }
}

impl RequestedCodec {
    /// Returns whether codec 1 is used or tried, which has levels.
    pub(crate) fn has_levels(self) -> bool {
        let Self::Fixed(StorageCodec { codec, .. }) = self else { return true };
        codec == ChunkCodec::Zstd
    }
}

#[derive(Clone)]
enum CompressionPolicy {
    Uniform(Compression),
    PerLeaf(Arc<CompressionFn>),
}

/// Returns the compression of a leaf, given its path and, for a tensor, its metadata.
type CompressionFn = dyn Fn(&ObjectPath, Option<&TensorMeta>) -> Compression + Send + Sync;

impl Default for Options {
    fn default() -> Self {
        Self::new()
    }
}

impl Options {
    /// Creates options without attributes, opaque leaves, compression or digests.
    pub fn new() -> Self {
        Self {
            attrs: Attrs::new(),
            allow_opaque: false,
            digests: false,
            align_log2: None,
            chunks: ChunkPolicy::default(),
            zstd_level: 1,
            compression: CompressionPolicy::Uniform(Compression::None),
        }
    }

    /// Returns the options that an archive was written with, as far as it records them.
    ///
    /// With these options, its state dict encodes to the same bytes, if this writer wrote the archive with this version
    /// of zstd. The archive does not record the chunk size that its compressed storages would have uncompressed: the
    /// chunk sizes of the raw storages are taken instead.
    pub fn from_archive(archive: &Archive) -> Self {
        let mut options = Self::new().allow_opaque();
        options.attrs = archive.attrs();
        // The writer sets the attribute even if no chunk was worth compressing.
        if let Some(AttrValue::Int(level)) = options.attrs.get(ZSTD_LEVEL_ATTR) {
            let level = i32::try_from(*level).unwrap_or(options.zstd_level);
            options = options.zstd_level(level);
        }
        let storages: Vec<_> =
            (0..archive.storage_count()).map(|number| archive.storage(number)).collect();
        options.digests = storages.first().is_some_and(|storage| storage.digest.is_some());
        // A storage without the default alignment shows that the options set one alignment for all storages.
        let is_non_default = |storage: &&crate::storage::StorageReference| {
            storage.align_log2 != default_align_log2(storage.stored_len())
        };
        options.align_log2 = storages.iter().find(is_non_default).map(|storage| storage.align_log2);
        let raw = storages.iter().filter(|storage| storage.compressed_layout.is_none());
        let chunk_sizes: Vec<_> = raw.map(|storage| (storage.len, storage.chunk_size)).collect();
        options.chunks = ChunkPolicy::infer(&chunk_sizes);
        let mut choices = std::collections::BTreeMap::new();
        for (path, node) in archive.leaves() {
            // A delta does not record how its result is compressed.
            let own = node.storages().map(|number| &storages[index_to_usize(number)]);
            let own = own.filter(|storage| storage.base.is_none());
            let mut layouts = own.filter_map(|storage| storage.compressed_layout.as_ref());
            // Shards of one leaf are in one codec, unless a shard does not compress.
            let Some(layout) = layouts.next() else { continue };
            let choice = match layout.codec() {
                ChunkCodec::Planes => Compression::Planes,
                ChunkCodec::Tiers => Compression::Tiers,
                _ if layout.width == 1 => Compression::Zstd,
                _ => Compression::ShuffledZstd,
            };
            choices.insert(path, choice);
        }
        options.compress_leaves(move |path, _| choices.get(path).copied().unwrap_or_default())
    }

    /// Sets an attribute of the archive.
    #[must_use]
    pub fn attr(mut self, name: impl Into<String>, value: AttrValue) -> Self {
        self.attrs.insert(name.into(), value);
        self
    }

    /// Removes an attribute.
    #[must_use]
    pub fn without_attr(mut self, name: &str) -> Self {
        self.attrs.remove(name);
        self
    }

    /// Removes the attributes that describe a version in a store ([`STORE_ATTR_PREFIX`]).
    #[must_use]
    pub fn without_store_attrs(mut self) -> Self {
        self.attrs.retain(|name, _| !name.starts_with(STORE_ATTR_PREFIX));
        self
    }

    /// Takes the attributes of an archive, but not those about a version in a store or about its compression.
    #[must_use]
    pub fn attrs_of(mut self, archive: &Archive) -> Self {
        self.attrs = archive.attrs();
        self.without_store_attrs().without_attr(ZSTD_LEVEL_ATTR)
    }

    /// Allows opaque leaves ([`Value::Opaque`](crate::Value::Opaque)).
    #[must_use]
    pub fn allow_opaque(mut self) -> Self {
        self.allow_opaque = true;
        self
    }

    /// Writes a BLAKE3 digest for each storage.
    ///
    /// The digests give the archive a [content digest](Archive::content_digest) that can be read from the index.
    #[must_use]
    pub fn digests(mut self) -> Self {
        self.digests = true;
        self
    }

    /// Writes no digests.
    #[must_use]
    pub fn without_digests(mut self) -> Self {
        self.digests = false;
        self
    }

    /// Aligns all storages to `bytes`.
    ///
    /// The default is 4096 bytes for storages of at least 64 KiB, and 256 bytes for the others.
    ///
    /// # Errors
    ///
    /// `Alignment` if `bytes` is not a power of two from 64 to 2 MiB.
    pub fn align(mut self, bytes: u64) -> Result<Self> {
        let log2 = u8::try_from(bytes.trailing_zeros()).unwrap_or(u8::MAX);
        if !bytes.is_power_of_two() || !(6..=21).contains(&log2) {
            return Err(Error::new(ErrorKind::Alignment)
                .with_detail(format_args!("{bytes} is no power of two from 64 to 2097152")));
        }
        self.align_log2 = Some(log2);
        Ok(self)
    }

    /// Sets how uncompressed storages are divided into chunks; the default is chunks of 1 MiB.
    ///
    /// Each chunk has its own CRC. Chunks of compressed storages always have 1 MiB.
    #[must_use]
    pub fn chunks(mut self, chunks: ChunkPolicy) -> Self {
        self.chunks = chunks;
        self
    }

    /// Compresses the storages of all leaves. A chunk that shrinks by less than 3 % stays uncompressed.
    #[must_use]
    pub fn compress(mut self, compression: Compression) -> Self {
        self.compression = CompressionPolicy::Uniform(compression);
        self
    }

    /// Chooses the compression of each leaf. Tied leaves get the compression of the first of them.
    #[must_use]
    pub fn compress_leaves(
        mut self,
        choose: impl Fn(&ObjectPath, Option<&TensorMeta>) -> Compression + Send + Sync + 'static,
    ) -> Self {
        self.compression = CompressionPolicy::PerLeaf(Arc::new(choose));
        self
    }

    /// Sets the zstd level; the default is 1.
    ///
    /// Higher levels take longer, and rarely compress shuffled floats much better. The highest level is 22. Levels
    /// below 0 are the fast levels of zstd.
    #[must_use]
    pub fn zstd_level(mut self, level: i32) -> Self {
        self.zstd_level = level.clamp(*ZSTD_LEVELS.start(), *ZSTD_LEVELS.end());
        self
    }

    pub(crate) fn compression(
        &self,
        path: &PathCursor<'_>,
        meta: Option<&TensorMeta>,
    ) -> Compression {
        match &self.compression {
            CompressionPolicy::Uniform(compression) => *compression,
            CompressionPolicy::PerLeaf(choose) => choose(&path.to_path(), meta),
        }
    }

    /// Returns log2 of the alignment of a storage of `len` stored bytes.
    pub(crate) fn align_log2(&self, len: u64) -> u8 {
        self.align_log2.unwrap_or_else(|| default_align_log2(len))
    }
}

impl fmt::Debug for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let compression: &dyn fmt::Debug = match &self.compression {
            CompressionPolicy::Uniform(compression) => compression,
            CompressionPolicy::PerLeaf(_) => &"each leaf its own",
        };
        f.debug_struct("Options")
            .field("attrs", &self.attrs)
            .field("allow_opaque", &self.allow_opaque)
            .field("digests", &self.digests)
            .field("align_log2", &self.align_log2)
            .field("chunks", &self.chunks)
            .field("zstd_level", &self.zstd_level)
            .field("compression", compression)
            .finish()
    }
}
