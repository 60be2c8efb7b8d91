//! Codecs of chunks: raw, shuffled zstd, byte planes, delta, and tiers. Spec: section 6.

use crate::codec::ZstdEncoder;
use crate::delta::{ChangeCount, DeltaDecoder};
use crate::element::ElementWidth;
use crate::error::{Error, ErrorKind, Result};
use crate::planes::{PlanesDecoder, PlanesEncoder};
use crate::tiers::{TiersDecoder, TiersEncoder};

/// How a stored chunk encodes the bytes of the chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum ChunkCodec {
    /// Codec 0: the bytes as they are.
    Raw,
    /// Codec 1: one zstd frame, after a byte shuffle.
    Zstd,
    /// Codec 2: byte planes, each raw or one zstd frame.
    Planes,
    /// Codec 3: the difference from the same chunk of the base storage; without bytes, this chunk itself.
    Delta,
    /// Codec 4: byte planes, the last one in codes of fixed widths.
    Tiers,
}

impl ChunkCodec {
    /// Returns the number in a Chunk record.
    pub const fn number(self) -> u32 {
        match self {
            Self::Raw => 0,
            Self::Zstd => 1,
            Self::Planes => 2,
            Self::Delta => 3,
            Self::Tiers => 4,
        }
    }

    /// Returns the codec with this number in a Chunk record, if there is one.
    pub(crate) const fn from_number(number: u32) -> Option<Self> {
        match number {
            0 => Some(Self::Raw),
            1 => Some(Self::Zstd),
            2 => Some(Self::Planes),
            3 => Some(Self::Delta),
            4 => Some(Self::Tiers),
            _ => None,
        }
    }
}

/// The codec of the chunks of a storage that are not raw, and the width of an element in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StorageCodec {
    /// The codec.
    pub codec: ChunkCodec,
    /// Width of an element in bytes: 1, 2, 4 or 8; in delta chunks at most 4.
    pub width: u8,
}

/// Encoder of the chunks of a storage. Reuses its working memory for every chunk.
pub(crate) enum ChunkEncoder {
    Raw,
    Zstd(ZstdEncoder),
    Planes(PlanesEncoder),
    Tiers(TiersEncoder),
}

impl ChunkEncoder {
    /// Creates an encoder; `level` is the level of zstd for codec 1.
    ///
    /// # Errors
    ///
    /// `Io` if zstd cannot allocate memory; `FeatureMissing` in a build without zstd.
    ///
    /// # Panics
    ///
    /// Panics for [`ChunkCodec::Delta`], which needs two versions: see [`DeltaEncoder`](crate::DeltaEncoder).
    pub(crate) fn new(codec: ChunkCodec, level: i32) -> Result<Self> {
        Ok(match codec {
            ChunkCodec::Raw => Self::Raw,
            ChunkCodec::Delta => unreachable!("options ask for no delta"),
            ChunkCodec::Zstd => Self::Zstd(ZstdEncoder::new(level)?),
            ChunkCodec::Planes => Self::Planes(PlanesEncoder::new()?),
            ChunkCodec::Tiers => Self::Tiers(TiersEncoder::new()),
        })
    }

    /// Encodes a chunk of elements of `width` bytes; `None` if the chunk stays raw, because that saves too little.
    ///
    /// # Errors
    ///
    /// `Io` if zstd cannot allocate memory.
    pub(crate) fn encode(&mut self, raw: &[u8], width: u8) -> Result<Option<Vec<u8>>> {
        match self {
            Self::Raw => Ok(None),
            Self::Zstd(zstd) => zstd.encode(raw, width),
            Self::Planes(planes) => planes.encode(raw, width),
            Self::Tiers(tiers) => Ok(tiers.encode(raw, width)),
        }
    }
}

/// Decoder of chunks of all codecs. Reuses its working memory for every chunk.
///
/// ```
/// # #[cfg(feature = "zstd")] {
/// use tssd_format::{ChunkCodec, ChunkDecoder, PlanesEncoder, StorageCodec};
///
/// let raw: Vec<u8> = (0..30_000_u16).flat_map(|at| f32::from(at).to_le_bytes()).collect();
/// let stored = PlanesEncoder::new()?.encode(&raw, 4)?.expect("the exponents are alike");
///
/// let mut decoded = vec![0; raw.len()];
/// let codec = StorageCodec { codec: ChunkCodec::Planes, width: 4 };
/// ChunkDecoder::new()?.decode(codec, &stored, None, &mut decoded)?;
/// assert_eq!(decoded, raw);
/// # }
/// # Ok::<(), tssd_format::Error>(())
/// ```
pub struct ChunkDecoder {
    planes: PlanesDecoder,
    /// Created for the first chunk of codec 4.
    tiers: Option<TiersDecoder>,
    /// Created for the first delta chunk.
    delta: Option<DeltaDecoder>,
}

impl ChunkDecoder {
    /// Creates a decoder.
    ///
    /// # Errors
    ///
    /// `Io` if zstd cannot allocate memory.
    pub fn new() -> Result<Self> {
        Ok(Self { planes: PlanesDecoder::new()?, tiers: None, delta: None })
    }

    /// Decodes a stored chunk into `target`, which must have the length of the chunk.
    ///
    /// `base` is the same chunk of the base storage, which a delta chunk needs. After an error, the bytes of `target`
    /// are unspecified.
    ///
    /// # Errors
    ///
    /// `FrameCorrupt` (F-093); `PlaneLengths` (F-097); `DeltaChunk` (F-098); `DeltaMismatch` (F-099); `TiersChunk`
    /// (F-100); `BaseMissing`; `FeatureMissing` in a build without zstd.
    ///
    /// # Panics
    ///
    /// Panics if the codec has no elements of this width, or if a raw chunk has another length than `target`.
    pub fn decode(
        &mut self,
        StorageCodec { codec, width }: StorageCodec,
        stored: &[u8],
        base: Option<&[u8]>,
        target: &mut [u8],
    ) -> Result<()> {
        match codec {
            ChunkCodec::Raw => target.copy_from_slice(stored),
            ChunkCodec::Zstd => self.planes.frames.decode(stored, width, target)?,
            ChunkCodec::Planes => self.planes.decode(stored, width, target)?,
            ChunkCodec::Tiers => {
                let tiers = self.tiers.get_or_insert_with(TiersDecoder::new);
                tiers.decode(stored, width, target)?;
            }
            ChunkCodec::Delta => {
                let base = base.ok_or_else(|| Error::new(ErrorKind::BaseMissing))?;
                if stored.is_empty() {
                    target.copy_from_slice(base);
                } else {
                    self.delta()?.apply_to(stored, delta_width(width), base, target)?;
                }
            }
        }
        Ok(())
    }

    /// Checks a delta chunk without its base. `len` is the number of raw bytes.
    ///
    /// # Errors
    ///
    /// `DeltaChunk` (F-098); `FeatureMissing` in a build without zstd.
    pub(crate) fn count_changes(
        &mut self,
        stored: &[u8],
        width: u8,
        len: usize,
    ) -> Result<ChangeCount> {
        if stored.is_empty() {
            return Ok(ChangeCount::default());
        }
        self.delta()?.count(stored, delta_width(width), len)
    }

    fn delta(&mut self) -> Result<&mut DeltaDecoder> {
        match &mut self.delta {
            Some(delta) => Ok(delta),
            none => Ok(none.insert(DeltaDecoder::new()?)),
        }
    }
}

/// Returns the width of the elements of a delta storage.
pub(crate) fn delta_width(bytes: u8) -> ElementWidth {
    ElementWidth::from_bytes(bytes).expect("the validator has proven the width of delta storages")
}
