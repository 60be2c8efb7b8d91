//! The option `--codec`.

use tssd_format::Compression;

/// How storages are compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Codec {
    /// No compression: storages can be mapped into memory
    None,
    /// Byte planes of the elements: for weights; at least twice as fast as zstd
    Planes,
    /// Byte planes in codes of fixed widths: decoded at half the speed of a copy in memory, a little larger than planes
    Tiers,
    /// zstd after a byte shuffle: for values with repeats
    Zstd,
    /// zstd without the shuffle
    ZstdPlain,
    /// Chosen for each storage: the one of planes, zstd and none that makes its samples smallest
    Auto,
}

impl Codec {
    /// Returns the option of the format.
    pub(crate) fn compression(self) -> Compression {
        match self {
            Self::None => Compression::None,
            Self::Planes => Compression::Planes,
            Self::Tiers => Compression::Tiers,
            Self::Zstd => Compression::ShuffledZstd,
            Self::ZstdPlain => Compression::Zstd,
            Self::Auto => Compression::Auto,
        }
    }
}
