//! One chunk as it is stored: shuffled, then one zstd frame. Spec: section 6 and F-093.

use crate::chunk::CHUNK_BYTES;
use crate::error::{Error, ErrorKind, Result};

/// A chunk that would not lose this part of its length, in percent, stays raw.
#[cfg(feature = "zstd")]
const MIN_GAIN_PERCENT: usize = 3;

/// Whether elements of this many bytes can be shuffled.
pub(crate) fn is_width(bytes: u8) -> bool {
    matches!(bytes, 2 | 4 | 8 | 16)
}

/// Compresses chunks; keeps its working memory from one to the next.
#[cfg(feature = "zstd")]
pub(crate) struct Encoder {
    zstd: zstd::bulk::Compressor<'static>,
    shuffled: Vec<u8>,
}

#[cfg(feature = "zstd")]
impl Encoder {
    pub(crate) fn new(level: i32) -> Result<Self> {
        Ok(Self { zstd: zstd::bulk::Compressor::new(level)?, shuffled: Vec::new() })
    }

    /// The frame of a chunk; `None` if it is not worth it.
    pub(crate) fn encode(&mut self, raw: &[u8], shuffle: u8) -> Result<Option<Vec<u8>>> {
        let source = if shuffle == 0 {
            raw
        } else {
            self.shuffled.resize(raw.len(), 0);
            shuffle_bytes(raw, shuffle, &mut self.shuffled);
            &self.shuffled
        };
        let mut frame = self.zstd.compress(source)?;
        let gain = raw.len().saturating_sub(frame.len());
        frame.shrink_to_fit();
        Ok((gain * 100 >= raw.len() * MIN_GAIN_PERCENT).then_some(frame))
    }
}

/// Stands in for it in a build without zstd, where there is none.
#[cfg(not(feature = "zstd"))]
pub(crate) enum Encoder {}

#[cfg(not(feature = "zstd"))]
impl Encoder {
    pub(crate) fn new(_: i32) -> Result<Self> {
        Err(Error::new(ErrorKind::FeatureMissing).note("zstd"))
    }

    pub(crate) fn encode(&mut self, _: &[u8], _: u8) -> Result<Option<Vec<u8>>> {
        match *self {}
    }
}

/// Decodes chunks; keeps its working memory from one to the next.
pub(crate) struct Decoder {
    #[cfg(feature = "zstd")]
    zstd: zstd::bulk::Decompressor<'static>,
    #[cfg(feature = "zstd")]
    shuffled: Vec<u8>,
}

impl Decoder {
    #[cfg(feature = "zstd")]
    pub(crate) fn new() -> Result<Self> {
        Ok(Self { zstd: zstd::bulk::Decompressor::new()?, shuffled: Vec::new() })
    }

    #[cfg(not(feature = "zstd"))]
    #[expect(clippy::unnecessary_wraps, reason = "as with the feature")]
    pub(crate) fn new() -> Result<Self> {
        Ok(Self {})
    }

    /// Fills `target` with the chunk of this frame; nothing is written that the header of the frame
    /// does not promise.
    ///
    /// # Errors
    ///
    /// `FrameCorrupt` (F-093); `FeatureMissing` in a build without zstd.
    pub(crate) fn decode(&mut self, frame: &[u8], shuffle: u8, target: &mut [u8]) -> Result<()> {
        check_header(frame, target.len())?;
        self.decode_proven(frame, shuffle, target)
    }

    #[cfg(feature = "zstd")]
    fn decode_proven(&mut self, frame: &[u8], shuffle: u8, target: &mut [u8]) -> Result<()> {
        let whole = zstd::zstd_safe::find_frame_compressed_size(frame);
        if whole != Ok(frame.len()) {
            return Err(corrupt("not one whole frame"));
        }
        let plain = if shuffle == 0 {
            &mut *target
        } else {
            self.shuffled.resize(target.len(), 0);
            &mut self.shuffled
        };
        let decoded = self.zstd.decompress_to_buffer(frame, plain).map_err(corrupt)?;
        if decoded != plain.len() {
            return Err(corrupt(format_args!("{decoded} bytes, not {}", plain.len())));
        }
        if shuffle != 0 {
            unshuffle_bytes(&self.shuffled, shuffle, target);
        }
        Ok(())
    }

    #[cfg(not(feature = "zstd"))]
    #[expect(clippy::unused_self, reason = "as with the feature")]
    fn decode_proven(&mut self, _: &[u8], _: u8, _: &mut [u8]) -> Result<()> {
        Err(Error::new(ErrorKind::FeatureMissing).note("zstd"))
    }
}

fn corrupt(note: impl std::fmt::Display) -> Error {
    Error::new(ErrorKind::FrameCorrupt).note(note)
}

/// Proves the header of a frame that must decode to `len` bytes (RFC 8878, section 3.1.1.1).
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
    if !single_segment {
        let window = take(1)?;
        let base = 1_u64 << (10 + (window >> 3));
        if base + base / 8 * (window & 7) > CHUNK_BYTES {
            return Err(corrupt("window"));
        }
    }
    let content = match descriptor >> 6 {
        0 if single_segment => take(1)?,
        0 => return Err(corrupt("no content size")),
        1 => take(2)? + 256,
        2 => take(4)?,
        _ => take(8)?,
    };
    if usize::try_from(content) != Ok(len) {
        return Err(corrupt(format_args!("a frame of {content} bytes, not {len}")));
    }
    Ok(())
}

/// Byte 0 of every element, then byte 1 of every element, and so on; the rest as it is.
#[cfg(feature = "zstd")]
fn shuffle_bytes(plain: &[u8], width: u8, shuffled: &mut [u8]) {
    match width {
        2 => split::<2>(plain, shuffled),
        4 => split::<4>(plain, shuffled),
        8 => split::<8>(plain, shuffled),
        16 => split::<16>(plain, shuffled),
        _ => unreachable!("`is_width` knows no other"),
    }
}

/// The inverse.
#[cfg(feature = "zstd")]
fn unshuffle_bytes(shuffled: &[u8], width: u8, plain: &mut [u8]) {
    match width {
        2 => join::<2>(shuffled, plain),
        4 => join::<4>(shuffled, plain),
        8 => join::<8>(shuffled, plain),
        16 => join::<16>(shuffled, plain),
        _ => unreachable!("`is_width` knows no other"),
    }
}

/// Elements that are shuffled at a time: few enough that their planes stay in the nearest cache.
#[cfg(feature = "zstd")]
const BLOCK: usize = 256;

#[cfg(feature = "zstd")]
fn split<const W: usize>(plain: &[u8], shuffled: &mut [u8]) {
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
fn join<const W: usize>(shuffled: &[u8], plain: &mut [u8]) {
    let (elements, rest) = plain.as_chunks_mut::<W>();
    let (planes, tail) = shuffled.split_at(elements.len() * W);
    rest.copy_from_slice(tail);
    let count = elements.len();
    for (number, block) in elements.chunks_mut(BLOCK).enumerate() {
        let start = number * BLOCK;
        // All planes have the length of the block, which the compiler then knows as well.
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

    #[test]
    fn the_shuffle_is_its_definition_and_back() {
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
    fn a_chunk_that_does_not_shrink_stays_raw() {
        let mut encoder = Encoder::new(1).unwrap();
        let noise: Vec<u8> = (0..10_000_u64)
            .scan(1_u64, |state, _| {
                *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                Some(state.to_le_bytes()[7])
            })
            .collect();
        assert_eq!(encoder.encode(&noise, 0).unwrap(), None);
        // All but 3 % of it noise: just too little, and with some more just enough.
        for (zeros, shrinks) in [(250, false), (450, true)] {
            let mut mixed = noise.clone();
            mixed[..zeros].fill(0);
            assert_eq!(encoder.encode(&mixed, 0).unwrap().is_some(), shrinks, "{zeros} zeros");
        }
    }
}
