//! Choice of the codec of a storage, by trying the codecs on samples of it.

use std::ops::Range;

use crate::chunk_codec::{ChunkCodec, StorageCodec};
use crate::codec::{ZstdEncoder, saves_enough};
use crate::error::Result;
use crate::planes::PlanesEncoder;

/// Samples of a storage: at its start, in its middle and at its end.
const SAMPLES: u64 = 3;

/// Bytes of each sample. Shorter ones miss repeats that zstd finds in a chunk.
const SAMPLE_BYTES: u64 = 1 << 18;

/// Parts in a thousand by which codec 1 must be smaller to be chosen: codec 2 is twice as fast or more.
const MIN_ZSTD_GAIN_PERMILLE: usize = 2;

/// Returns the ranges of a storage of `len` bytes that a [`CodecChooser`] needs.
///
/// They begin at multiples of 16 bytes, so elements of all widths are whole.
pub(crate) fn sample_ranges(len: u64) -> impl Iterator<Item = Range<u64>> {
    let (samples, bytes) =
        if len <= SAMPLES * SAMPLE_BYTES { (1, len) } else { (SAMPLES, SAMPLE_BYTES) };
    let gap = (len - bytes).checked_div(samples - 1).unwrap_or(0);
    (0..samples).map(move |number| {
        let start = gap * number / 16 * 16;
        start..start + bytes
    })
}

/// Chooser of the codec of a storage.
pub(crate) struct CodecChooser {
    zstd: ZstdEncoder,
    planes: PlanesEncoder,
    /// Width of an element in bytes under codec 1, and under codec 2.
    shuffle_width: u8,
    plane_width: u8,
    /// Lengths of the samples in bytes, as they are and under both codecs.
    raw_len: usize,
    zstd_len: usize,
    planes_len: usize,
}

impl CodecChooser {
    /// Creates a chooser between codec 1 of this zstd level, codec 2 and none.
    ///
    /// # Errors
    ///
    /// `Io` if zstd cannot allocate memory; `FeatureMissing` in a build without zstd.
    pub(crate) fn new(level: i32, shuffle_width: u8, plane_width: u8) -> Result<Self> {
        let (zstd, planes) = (ZstdEncoder::new(level)?, PlanesEncoder::new()?);
        let (raw_len, zstd_len, planes_len) = (0, 0, 0);
        Ok(Self { zstd, planes, shuffle_width, plane_width, raw_len, zstd_len, planes_len })
    }

    /// Encodes a sample of the storage with both codecs.
    ///
    /// # Errors
    ///
    /// `Io` if zstd cannot allocate memory.
    pub(crate) fn add_sample(&mut self, sample: &[u8]) -> Result<()> {
        let len = |stored: Option<Vec<u8>>| stored.map_or(sample.len(), |stored| stored.len());
        self.raw_len += sample.len();
        self.zstd_len += len(self.zstd.encode(sample, self.shuffle_width)?);
        self.planes_len += len(self.planes.encode(sample, self.plane_width)?);
        Ok(())
    }

    /// Returns the codec that makes the samples smallest, but the faster one of two that are nearly equal.
    pub(crate) fn choose(&self) -> StorageCodec {
        let is_planes = self.planes_len * (1000 - MIN_ZSTD_GAIN_PERMILLE) <= self.zstd_len * 1000;
        let (codec, width, len) = if is_planes {
            (ChunkCodec::Planes, self.plane_width, self.planes_len)
        } else {
            (ChunkCodec::Zstd, self.shuffle_width, self.zstd_len)
        };
        let codec = if saves_enough(self.raw_len, len) { codec } else { ChunkCodec::Raw };
        StorageCodec { codec, width }
    }
}

#[cfg(test)]
#[cfg(feature = "zstd")]
mod tests {
    use super::*;
    use crate::test_bytes::noise;

    #[test]
    fn sample_ranges_are_within_the_storage_and_aligned() {
        for len in [0, 1, 7, SAMPLE_BYTES, 3 * SAMPLE_BYTES, 3 * SAMPLE_BYTES + 1, 1 << 40] {
            let ranges: Vec<_> = sample_ranges(len).collect();
            assert!(
                ranges.iter().all(|range| range.start % 16 == 0 && range.end <= len),
                "{ranges:?}"
            );
            assert!(ranges.is_sorted_by(|one, next| one.end <= next.start), "{ranges:?}");
            assert_eq!(ranges.len(), if len <= 3 * SAMPLE_BYTES { 1 } else { 3 });
        }
    }

    #[test]
    fn chooser_prefers_what_is_smallest() {
        let noise = noise(1 << 17);
        let mut weights = noise.clone();
        weights.chunks_mut(2).for_each(|element| element[1] = 0x3C | element[1] & 3);
        let repeats: Vec<u8> = noise.chunks(512).flat_map(|row| row.repeat(2)).collect();
        for (bytes, width, expected) in [
            (&noise, 2, ChunkCodec::Raw),
            (&Vec::new(), 2, ChunkCodec::Raw),
            (&weights, 2, ChunkCodec::Planes),
            (&repeats, 2, ChunkCodec::Zstd),
        ] {
            let mut chooser = CodecChooser::new(1, width, width).unwrap();
            chooser.add_sample(bytes).unwrap();
            assert_eq!(chooser.choose().codec, expected, "width {width}");
        }
    }
}
