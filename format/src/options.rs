//! What a writer may choose.

use std::fmt;
use std::sync::Arc;

use crate::archive::Archive;
use crate::chunk::Chunks;
use crate::codec::is_width;
use crate::encode::{AttrValue, Attrs};
use crate::error::{Error, ErrorKind, Result};
use crate::key::ObjectPath;
use crate::structure::Trail;
use crate::tensor::TensorMeta;

/// The attribute with the level of all frames: it says how an archive is compressed, and nothing of what it
/// means.
pub const ZSTD_LEVEL_ATTR: &str = "tssd.zstd_level";

/// The levels that zstd has.
const LEVELS: std::ops::RangeInclusive<i32> = -(1 << 17)..=22;

/// What a writer may choose: attributes, compression, digests, alignment, chunks.
///
/// # Examples
///
/// Optimizer state is kept small, weights stay as they are, so that they can be mapped:
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
    pub(crate) chunks: Chunks,
    pub(crate) zstd_level: i32,
    compression: Choice,
}

/// How the storage of a leaf is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Compression {
    /// As it is, so that it can be mapped and copied from in one step.
    #[default]
    None,
    /// In zstd frames of 1 MiB of raw bytes each.
    Zstd,
    /// The same after a byte shuffle by the element size, which suits floats.
    ShuffledZstd,
}

impl Compression {
    /// The width of the byte shuffle for elements of this many bytes; 0 for none.
    pub(crate) fn shuffle(self, itemsize: u64) -> u8 {
        let width = u8::try_from(itemsize).ok().filter(|width| is_width(*width));
        width.filter(|_| self == Self::ShuffledZstd).unwrap_or(0)
    }
}

#[derive(Clone)]
enum Choice {
    All(Compression),
    Each(Arc<ChooseLeaf>),
}

/// The compression of a leaf, given its path and, if it is a tensor, what it is.
type ChooseLeaf = dyn Fn(&ObjectPath, Option<&TensorMeta>) -> Compression + Send + Sync;

impl Default for Options {
    fn default() -> Self {
        Self::new()
    }
}

impl Options {
    /// No attributes, no opaque leaves, no compression, no digests.
    pub fn new() -> Self {
        Self {
            attrs: Attrs::new(),
            allow_opaque: false,
            digests: false,
            align_log2: None,
            chunks: Chunks::default(),
            zstd_level: 1,
            compression: Choice::All(Compression::None),
        }
    }

    /// The options that an archive records: with them, its state dict becomes the same bytes again,
    /// if this writer wrote it with this version of zstd. How storages were cut that are compressed, had they been raw,
    /// nothing says: the chunks of those that are raw are taken for them too.
    pub fn recorded(archive: &Archive) -> Self {
        let mut options = Self::new().allow_opaque();
        options.attrs = archive.attrs();
        // The attribute stays, also if nothing was worth compressing.
        if let Some(AttrValue::Int(level)) = options.attrs.get(ZSTD_LEVEL_ATTR) {
            let level = i32::try_from(*level).unwrap_or(options.zstd_level);
            options = options.zstd_level(level);
        }
        let storages: Vec<_> =
            (0..archive.storage_count()).map(|number| archive.storage(number)).collect();
        options.digests = storages.first().is_some_and(|storage| storage.digest.is_some());
        // One alignment for all that is not the usual one was asked for.
        let is_unusual = |storage: &&crate::storage::StorageReference| {
            storage.align_log2 != usual_align_log2(storage.stored_len())
        };
        options.align_log2 = storages.iter().find(is_unusual).map(|storage| storage.align_log2);
        let raw = storages.iter().filter(|storage| storage.packing.is_none());
        let cut: Vec<_> = raw.map(|storage| (storage.len, storage.chunk_size)).collect();
        options.chunks = Chunks::recorded(&cut);
        let mut choices = std::collections::BTreeMap::new();
        for (path, node) in archive.leaves() {
            let Some(number) = node.storages().next() else { continue };
            let storage = &storages[crate::views::native(number)];
            let choice = match &storage.packing {
                None => continue,
                Some(packing) if packing.shuffle == 0 => Compression::Zstd,
                Some(_) => Compression::ShuffledZstd,
            };
            choices.insert(path, choice);
        }
        options.compress_leaves(move |path, _| choices.get(path).copied().unwrap_or_default())
    }

    /// Says something of the archive as a whole.
    #[must_use]
    pub fn attr(mut self, name: impl Into<String>, value: AttrValue) -> Self {
        self.attrs.insert(name.into(), value);
        self
    }

    /// Says no longer what an attribute of this name said.
    #[must_use]
    pub fn without_attr(mut self, name: &str) -> Self {
        self.attrs.remove(name);
        self
    }

    /// Allows leaves that are no typed values ([`Value::Opaque`](crate::Value::Opaque)).
    #[must_use]
    pub fn allow_opaque(mut self) -> Self {
        self.allow_opaque = true;
        self
    }

    /// Writes a BLAKE3 for each storage, and so gives the archive a
    /// [root digest](Archive::root_digest).
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

    /// Aligns all storages to this many bytes, in place of 4096 for those of at least 64 KiB and 256
    /// for the others.
    ///
    /// # Errors
    ///
    /// `Alignment` if it is no power of two from 64 to 2 MiB.
    pub fn align(mut self, bytes: u64) -> Result<Self> {
        let log2 = u8::try_from(bytes.trailing_zeros()).unwrap_or(u8::MAX);
        if !bytes.is_power_of_two() || !(6..=21).contains(&log2) {
            return Err(Error::new(ErrorKind::Alignment)
                .note(format_args!("{bytes} is no power of two from 64 to 2097152")));
        }
        self.align_log2 = Some(log2);
        Ok(self)
    }

    /// Cuts storages that are not compressed into such chunks, in place of those of 1 MiB. Each is proven by a CRC of its
    /// own; those of compressed storages have 1 MiB always.
    #[must_use]
    pub fn chunks(mut self, chunks: Chunks) -> Self {
        self.chunks = chunks;
        self
    }

    /// Compresses the storages of all leaves. Where it does not shrink a chunk by 3 %, the chunk
    /// stays as it is.
    #[must_use]
    pub fn compress(mut self, compression: Compression) -> Self {
        self.compression = Choice::All(compression);
        self
    }

    /// Compresses storages leaf by leaf. Leaves that are tied share the choice of the first.
    #[must_use]
    pub fn compress_leaves(
        mut self,
        choose: impl Fn(&ObjectPath, Option<&TensorMeta>) -> Compression + Send + Sync + 'static,
    ) -> Self {
        self.compression = Choice::Each(Arc::new(choose));
        self
    }

    /// The level of zstd, 1 if it is not given: higher ones take longer, and seldom gain much on
    /// shuffled floats. The levels of zstd end at 22; the ones below 0 are its fast ones.
    #[must_use]
    pub fn zstd_level(mut self, level: i32) -> Self {
        self.zstd_level = level.clamp(*LEVELS.start(), *LEVELS.end());
        self
    }

    pub(crate) fn compression(&self, path: &Trail<'_>, meta: Option<&TensorMeta>) -> Compression {
        match &self.compression {
            Choice::All(compression) => *compression,
            Choice::Each(choose) => choose(&path.to_path(), meta),
        }
    }

    /// log2 of the alignment of a storage of this many stored bytes.
    pub(crate) fn align_log2(&self, len: u64) -> u8 {
        self.align_log2.unwrap_or_else(|| usual_align_log2(len))
    }
}

/// Pages for large storages, so that they can be mapped and read directly; what GPUs and vector units
/// like for the others.
fn usual_align_log2(len: u64) -> u8 {
    if len >= 64 << 10 { 12 } else { 8 }
}

impl fmt::Debug for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let compression: &dyn fmt::Debug = match &self.compression {
            Choice::All(compression) => compression,
            Choice::Each(_) => &"each leaf its own",
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
