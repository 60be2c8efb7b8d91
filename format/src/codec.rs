//! Chunk codec 1: byte shuffle, then one zstd frame. Spec: section 6 and F-093.

use crate::error::{Error, ErrorKind, Result};

/// Smallest saving of a compressed chunk, in percent of its length. Below it, the chunk stays raw.
const MIN_GAIN_PERCENT: usize = 3;

/// Largest window of a frame in bytes (1 MiB): what a decoder keeps of the decoded bytes (F-093).
const MAX_WINDOW_BYTES: u64 = 1 << 20;

/// Returns whether `stored` bytes instead of `raw` save at least [`MIN_GAIN_PERCENT`].
pub(crate) fn saves_enough(raw: usize, stored: usize) -> bool {
    stored < raw && (raw - stored) * 100 >= raw * MIN_GAIN_PERCENT
}

/// Returns whether the byte shuffle supports elements of this many bytes. One of width 1 changes nothing.
pub(crate) fn is_shuffle_width(bytes: u8) -> bool {
    matches!(bytes, 1 | 2 | 4 | 8 | 16)
}

/// Creates a compressor for bytes without repeats: it codes them by their frequencies, and searches for no matches.
#[cfg(feature = "zstd")]
pub(crate) fn literal_compressor() -> Result<zstd::bulk::Compressor<'static>> {
    use zstd::zstd_safe::{CParameter, ParamSwitch};
    let mut zstd = zstd::bulk::Compressor::new(1)?;
    // A target length of a whole block skips all positions. zstd would leave literals raw at such a length, so their
    // compression is asked for.
    zstd.set_parameter(CParameter::HashLog(6))?;
    zstd.set_parameter(CParameter::MinMatch(7))?;
    zstd.set_parameter(CParameter::WindowLog(20))?;
    zstd.set_parameter(CParameter::TargetLength(131_072))?;
    zstd.set_parameter(CParameter::LiteralCompressionMode(ParamSwitch::Enable))?;
    Ok(zstd)
}

/// Encoder of chunks. Reuses its working memory for every chunk.
#[cfg(feature = "zstd")]
pub(crate) struct ZstdEncoder {
    zstd: zstd::bulk::Compressor<'static>,
    shuffled: Vec<u8>,
}

#[cfg(feature = "zstd")]
impl ZstdEncoder {
    pub(crate) fn new(level: i32) -> Result<Self> {
        Ok(Self { zstd: zstd::bulk::Compressor::new(level)?, shuffled: Vec::new() })
    }

    /// Compresses a chunk into a frame; `None` if that saves less than `MIN_GAIN_PERCENT`.
    ///
    /// `width` is the width of the byte shuffle in bytes.
    pub(crate) fn encode(&mut self, raw: &[u8], width: u8) -> Result<Option<Vec<u8>>> {
        let source = if width == 1 {
            raw
        } else {
            self.shuffled.resize(raw.len(), 0);
            shuffle_bytes(raw, width, &mut self.shuffled);
            &self.shuffled
        };
        let mut frame = self.zstd.compress(source)?;
        frame.shrink_to_fit();
        Ok(saves_enough(raw.len(), frame.len()).then_some(frame))
    }
}

/// Placeholder in a build without zstd. It has no values.
#[cfg(not(feature = "zstd"))]
pub(crate) enum ZstdEncoder {}

#[cfg(not(feature = "zstd"))]
impl ZstdEncoder {
    pub(crate) fn new(_: i32) -> Result<Self> {
        Err(Error::new(ErrorKind::FeatureMissing).with_detail("zstd"))
    }

    pub(crate) fn encode(&mut self, _: &[u8], _: u8) -> Result<Option<Vec<u8>>> {
        match *self {}
    }
}

/// Decoder of chunks. Reuses its working memory for every chunk.
pub(crate) struct ZstdDecoder {
    #[cfg(feature = "zstd")]
    zstd: zstd::bulk::Decompressor<'static>,
    #[cfg(feature = "zstd")]
    shuffled: Vec<u8>,
}

impl ZstdDecoder {
    #[cfg(feature = "zstd")]
    pub(crate) fn new() -> Result<Self> {
        Ok(Self { zstd: zstd::bulk::Decompressor::new()?, shuffled: Vec::new() })
    }

    #[cfg(not(feature = "zstd"))]
    #[expect(clippy::unnecessary_wraps, reason = "as with the feature")]
    pub(crate) fn new() -> Result<Self> {
        Ok(Self {})
    }

    /// Decodes a frame into `target`, which must have the length of the chunk.
    ///
    /// The header of the frame is checked first, so that decoding never writes more bytes than the chunk has.
    ///
    /// # Errors
    ///
    /// `FrameCorrupt` (F-093); `FeatureMissing` in a build without zstd.
    pub(crate) fn decode(&mut self, frame: &[u8], width: u8, target: &mut [u8]) -> Result<()> {
        check_header(frame, target.len())?;
        self.decode_frame(frame, width, target)
    }

    /// Decodes a frame whose header has been checked.
    #[cfg(feature = "zstd")]
    fn decode_frame(&mut self, frame: &[u8], width: u8, target: &mut [u8]) -> Result<()> {
        let frame_len = zstd::zstd_safe::find_frame_compressed_size(frame);
        if frame_len != Ok(frame.len()) {
            return Err(corrupt("not one whole frame"));
        }
        let plain = if width == 1 {
            &mut *target
        } else {
            self.shuffled.resize(target.len(), 0);
            &mut self.shuffled
        };
        let decoded = self.zstd.decompress_to_buffer(frame, plain).map_err(corrupt)?;
        if decoded != plain.len() {
            return Err(corrupt(format_args!("{decoded} bytes, not {}", plain.len())));
        }
        if width != 1 {
            unshuffle_bytes(&self.shuffled, width, target);
        }
        Ok(())
    }

    #[cfg(not(feature = "zstd"))]
    #[expect(clippy::unused_self, reason = "as with the feature")]
    fn decode_frame(&mut self, _: &[u8], _: u8, _: &mut [u8]) -> Result<()> {
        Err(Error::new(ErrorKind::FeatureMissing).with_detail("zstd"))
    }
}

fn corrupt(note: impl std::fmt::Display) -> Error {
    Error::new(ErrorKind::FrameCorrupt).with_detail(note)
}

/// Checks the header of a frame that must decode to `len` bytes (RFC 8878, section 3.1.1.1).
fn check_header(frame: &[u8], len: usize) -> Result<()> {
    let mut rest = frame;
    let mut take = |count: usize| {
        let (field, after) = rest.split_at_checked(count).ok_or_else(|| corrupt("header"))?;
        rest = after;
        let mut wide = [0; 8];
        wide[..count].copy_from_slice(field);
        Ok::<u64, Error>(u64::from_le_bytes(wide))
    };
    if take(4)? != 0xFD2F_B528 {
        return Err(corrupt("no zstd frame"));
    }
    let descriptor = take(1)?;
    let single_segment = descriptor & 0x20 != 0;
    if descriptor & 0x0B != 0 {
        return Err(corrupt("a dictionary or a reserved bit"));
    }
    let mut window = 0;
    if !single_segment {
        let descriptor = take(1)?;
        let base = 1_u64 << (10 + (descriptor >> 3));
        window = base + base / 8 * (descriptor & 7);
    }
    let content = match descriptor >> 6 {
        0 if single_segment => take(1)?,
        0 => return Err(corrupt("no content size")),
        1 => take(2)? + 256,
        2 => take(4)?,
        _ => take(8)?,
    };
    if single_segment {
        window = content;
    }
    if window > MAX_WINDOW_BYTES {
        return Err(corrupt(format_args!("a window of {window} bytes")));
    }
    if usize::try_from(content) != Ok(len) {
        return Err(corrupt(format_args!("a frame of {content} bytes, not {len}")));
    }
    Ok(())
}

/// Writes byte 0 of every element, then byte 1 of every element, and so on.
///
/// The bytes after the last whole element are copied unchanged.
#[cfg(feature = "zstd")]
fn shuffle_bytes(plain: &[u8], width: u8, shuffled: &mut [u8]) {
    match width {
        2 => split_planes::<2>(plain, shuffled),
        4 => split_planes::<4>(plain, shuffled),
        8 => split_planes::<8>(plain, shuffled),
        16 => split_planes::<16>(plain, shuffled),
        _ => unreachable!("`is_shuffle_width` knows no other"),
    }
}

/// Inverts [`shuffle_bytes`].
#[cfg(feature = "zstd")]
fn unshuffle_bytes(shuffled: &[u8], width: u8, plain: &mut [u8]) {
    match width {
        2 => join_planes::<2>(shuffled, plain),
        4 => join_planes::<4>(shuffled, plain),
        8 => join_planes::<8>(shuffled, plain),
        16 => join_planes::<16>(shuffled, plain),
        _ => unreachable!("`is_shuffle_width` knows no other"),
    }
}

/// Elements that are unshuffled at a time, few enough that their planes stay in the L1 cache.
#[cfg(feature = "zstd")]
const BLOCK_ELEMENTS: usize = 256;

#[cfg(feature = "zstd")]
fn split_planes<const W: usize>(plain: &[u8], shuffled: &mut [u8]) {
    let (elements, rest) = plain.as_chunks::<W>();
    let (planes, tail) = shuffled.split_at_mut(elements.len() * W);
    tail.copy_from_slice(rest);
    if elements.is_empty() {
        return;
    }
    for (byte, plane) in planes.chunks_exact_mut(elements.len()).enumerate() {
        for (to, element) in plane.iter_mut().zip(elements) {
            *to = element[byte];
        }
    }
}

#[cfg(feature = "zstd")]
fn join_planes<const W: usize>(shuffled: &[u8], plain: &mut [u8]) {
    let (elements, rest) = plain.as_chunks_mut::<W>();
    let (planes, tail) = shuffled.split_at(elements.len() * W);
    rest.copy_from_slice(tail);
    let count = elements.len();
    for (number, block) in elements.chunks_mut(BLOCK_ELEMENTS).enumerate() {
        let start = number * BLOCK_ELEMENTS;
        // Slicing all planes to the length of the block lets the compiler omit bounds checks.
        let planes: [&[u8]; W] =
            std::array::from_fn(|byte| &planes[byte * count + start..][..block.len()]);
        for (at, element) in block.iter_mut().enumerate() {
            *element = std::array::from_fn(|byte| planes[byte][at]);
        }
    }
}

#[cfg(all(test, feature = "zstd"))]
mod tests {
    use super::*;
    use crate::test_bytes::noise;

    #[test]
    fn shuffle_matches_its_definition_and_is_inverted() {
        let plain: Vec<u8> = (0..4099_u32).map(|i| i.wrapping_mul(37).to_le_bytes()[0]).collect();
        for width in [2_u8, 4, 8, 16] {
            for len in [0, 1, 15, 16, 17, 255, 4096, 4099] {
                let (plain, w) = (&plain[..len], usize::from(width));
                let count = len / w;
                let mut expected = Vec::new();
                for byte in 0..w {
                    expected.extend((0..count).map(|element| plain[element * w + byte]));
                }
                expected.extend(&plain[count * w..]);
                let mut shuffled = vec![0; len];
                shuffle_bytes(plain, width, &mut shuffled);
                assert_eq!(shuffled, expected);
                let mut back = vec![0; len];
                unshuffle_bytes(&shuffled, width, &mut back);
                assert_eq!(back, plain);
            }
        }
    }

    #[test]
    fn encoder_leaves_a_chunk_raw_if_it_saves_too_little() {
        let mut encoder = ZstdEncoder::new(1).unwrap();
        let noise = noise(10_000);
        assert_eq!(encoder.encode(&noise, 1).unwrap(), None);
        // 2.5 % of zeros save just too little, 4.5 % just enough.
        for (zeros, shrinks) in [(250, false), (450, true)] {
            let mut mixed = noise.clone();
            mixed[..zeros].fill(0);
            assert_eq!(encoder.encode(&mixed, 1).unwrap().is_some(), shrinks, "{zeros} zeros");
        }
    }
}
