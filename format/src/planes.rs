//! Chunk codec 2, "planes": each byte plane of the elements of a chunk is raw or one zstd frame. Spec: section 6 and F-097.
//!
//! The exponents of weights are much alike; their signs and mantissas are nearly random. Rotated left by one bit, a bf16
//! or fp32 has its exponent, and nothing else, in the last byte. Weights hold no repeats. So the encoder codes this
//! plane alone, by its byte frequencies, without match search.

#[cfg(feature = "zstd")]
use zstd::bulk::Compressor;
#[cfg(feature = "zstd")]
use zstd::zstd_safe::compress_bound;

use crate::codec::ZstdDecoder;
#[cfg(feature = "zstd")]
use crate::codec::{literal_compressor, saves_enough};
use crate::error::{Error, ErrorKind, Result};
#[cfg(feature = "zstd")]
use crate::plane_blocks::split_planes;
use crate::plane_blocks::{
    BLOCK_ELEMENTS, Block, PlaneSource, add_plane, merge_planes, with_plane_width,
};

/// Bytes of each entry of the plane table.
const ENTRY_BYTES: usize = 4;

/// Bit of an entry of the plane table: the plane is stored raw. The other bits are its stored length.
const RAW: u32 = 1 << 31;

/// Bytes of the sample that decides whether the encoder tries to code a plane.
#[cfg(feature = "zstd")]
const SAMPLE_BYTES: usize = 4096;

/// Runs of consecutive bytes in the sample, spread evenly over the plane.
#[cfg(feature = "zstd")]
const SAMPLE_RUNS: usize = 16;

/// Order-0 entropy of the sample, in bits for each byte, from which the encoder stores a plane raw.
#[cfg(feature = "zstd")]
const MAX_SAMPLE_ENTROPY: f32 = 7.75;

/// Returns whether the codec supports elements of this many bytes.
pub(crate) fn is_plane_width(bytes: u8) -> bool {
    matches!(bytes, 1 | 2 | 4 | 8)
}

/// Encoder of chunks of codec 2. Reuses its working memory for every chunk.
///
/// Its chunks are decoded by [`ChunkDecoder`](crate::ChunkDecoder), which has an example.
#[cfg(feature = "zstd")]
pub struct PlanesEncoder {
    zstd: Compressor<'static>,
    /// The table, then the planes.
    chunk: Vec<u8>,
    frame: Vec<u8>,
}

#[cfg(feature = "zstd")]
impl PlanesEncoder {
    /// Creates an encoder.
    ///
    /// # Errors
    ///
    /// `Io` if zstd cannot allocate memory; `FeatureMissing` in a build without zstd.
    pub fn new() -> Result<Self> {
        let zstd = literal_compressor()?;
        Ok(Self { zstd, chunk: Vec::new(), frame: Vec::new() })
    }

    /// Encodes a chunk of elements of `width` bytes; `None` if that saves too little.
    ///
    /// # Errors
    ///
    /// `Io` if zstd cannot allocate memory.
    ///
    /// # Panics
    ///
    /// Panics if `width` is not 1, 2, 4 or 8, or if the chunk is longer than [`MAX_CHUNK_BYTES`](crate::MAX_CHUNK_BYTES).
    pub fn encode(&mut self, raw: &[u8], width: u8) -> Result<Option<Vec<u8>>> {
        with_plane_width!(width, W => self.encode_planes::<W>(raw))
    }

    fn encode_planes<const W: usize>(&mut self, raw: &[u8]) -> Result<Option<Vec<u8>>>
    where
        [[u8; W]; BLOCK_ELEMENTS]: Block<W>,
    {
        let (elements, tail) = raw.as_chunks::<W>();
        let count = elements.len();
        if count == 0 {
            return Ok(None);
        }
        let table_len = ENTRY_BYTES * W;
        grow(&mut self.chunk, table_len + count * W);
        grow(&mut self.frame, compress_bound(count));
        split_planes(elements, &mut self.chunk[table_len..][..count * W]);
        // Each plane moves to the end of the ones before it, coded or raw.
        let mut end = table_len;
        for number in 0..W {
            let plane = table_len + count * number..table_len + count * (number + 1);
            let bytes = &self.chunk[plane.clone()];
            let mut coded_len = count;
            if number + 1 == W || is_compressible(bytes) {
                coded_len = self.zstd.compress_to_buffer(bytes, &mut self.frame[..])?;
            }
            let is_raw = !saves_enough(count, coded_len);
            let len = if is_raw { count } else { coded_len };
            if !is_raw {
                self.chunk[end..][..len].copy_from_slice(&self.frame[..len]);
            } else if plane.start != end {
                self.chunk.copy_within(plane, end);
            }
            end += len;
            let len = u32::try_from(len).expect("a chunk has at most 1 MiB");
            let entry = if is_raw { RAW | len } else { len };
            self.chunk[number * ENTRY_BYTES..][..ENTRY_BYTES].copy_from_slice(&entry.to_le_bytes());
        }
        let stored_len = end + tail.len();
        Ok(saves_enough(raw.len(), stored_len).then(|| [&self.chunk[..end], tail].concat()))
    }
}

/// Placeholder in a build without zstd. It has no values.
#[cfg(not(feature = "zstd"))]
#[expect(missing_debug_implementations, reason = "it has no values")]
pub enum PlanesEncoder {}

#[cfg(not(feature = "zstd"))]
impl PlanesEncoder {
    /// Fails.
    ///
    /// # Errors
    ///
    /// `FeatureMissing`.
    pub fn new() -> Result<Self> {
        Err(Error::new(ErrorKind::FeatureMissing).with_detail("zstd"))
    }

    /// Cannot be called.
    ///
    /// # Errors
    ///
    /// None.
    pub fn encode(&mut self, _: &[u8], _: u8) -> Result<Option<Vec<u8>>> {
        match *self {}
    }
}

/// Decoder of chunks. Reuses its working memory, which is at most one plane, for every chunk.
pub(crate) struct PlanesDecoder {
    /// Decoder of coded planes, and of chunks of codec 1.
    pub(crate) frames: ZstdDecoder,
    plane: Vec<u8>,
}

impl PlanesDecoder {
    /// Creates a decoder.
    ///
    /// # Errors
    ///
    /// `Io` if zstd cannot allocate memory.
    pub(crate) fn new() -> Result<Self> {
        Ok(Self { frames: ZstdDecoder::new()?, plane: Vec::new() })
    }

    /// Decodes a stored chunk into `target`, which must have the length of the chunk.
    ///
    /// After an error, the bytes of `target` are unspecified.
    ///
    /// # Errors
    ///
    /// `PlaneLengths` (F-097) before any byte is decoded; `FrameCorrupt` (F-093).
    pub(crate) fn decode(&mut self, stored: &[u8], width: u8, target: &mut [u8]) -> Result<()> {
        with_plane_width!(width, W => self.decode_planes::<W>(stored, target))
    }

    fn decode_planes<const W: usize>(&mut self, stored: &[u8], target: &mut [u8]) -> Result<()>
    where
        [[u8; W]; BLOCK_ELEMENTS]: Block<W>,
    {
        let (elements, tail) = target.as_chunks_mut::<W>();
        let (planes, rest) = read_planes::<W>(stored, elements.len(), tail.len())?;
        tail.copy_from_slice(rest);
        if let (1, StoredPlane::Coded(frame)) = (W, planes[0]) {
            return self.frames.decode(frame, 1, elements.as_flattened_mut());
        }
        // One coded plane is decoded into the end of the target, and one into working memory: that is enough to merge
        // the planes of weights in one pass. Each further one, which moments of optimizers and integers have, takes a
        // pass of its own.
        let mut sources = planes.map(|plane| match plane {
            StoredPlane::Raw(bytes) => PlaneSource::Bytes(bytes),
            StoredPlane::Coded(_) => PlaneSource::Missing,
        });
        let mut coded = planes.iter().enumerate().rev().filter_map(|(number, plane)| match plane {
            StoredPlane::Raw(_) => None,
            StoredPlane::Coded(frame) => Some((number, *frame)),
        });
        let count = elements.len();
        if let Some((number, frame)) = coded.next() {
            self.frames.decode(frame, 1, &mut elements.as_flattened_mut()[count * (W - 1)..])?;
            sources[number] = PlaneSource::EndOfTarget;
        }
        if let Some((number, frame)) = coded.next() {
            sources[number] = PlaneSource::Bytes(self.decode_plane(frame, count)?);
        }
        merge_planes(sources, elements);
        for (number, frame) in coded {
            add_plane(number, self.decode_plane(frame, count)?, elements);
        }
        Ok(())
    }

    /// Decodes a plane into working memory.
    fn decode_plane(&mut self, frame: &[u8], len: usize) -> Result<&[u8]> {
        grow(&mut self.plane, len);
        let plane = &mut self.plane[..len];
        self.frames.decode(frame, 1, plane)?;
        Ok(plane)
    }
}

/// A plane as it is stored.
#[derive(Clone, Copy)]
enum StoredPlane<'a> {
    Raw(&'a [u8]),
    Coded(&'a [u8]),
}

/// Splits a stored chunk of `count` elements into its planes and its tail.
fn read_planes<const W: usize>(
    stored: &[u8],
    count: usize,
    tail: usize,
) -> Result<([StoredPlane<'_>; W], &[u8])> {
    let invalid = |note| Error::new(ErrorKind::PlaneLengths).with_detail(note);
    let (table, mut rest) = stored
        .split_at_checked(ENTRY_BYTES * W)
        .ok_or_else(|| invalid(format!("a chunk of {} bytes, no table", stored.len())))?;
    let mut planes = [StoredPlane::Raw(&[]); W];
    for (number, (plane, entry)) in planes.iter_mut().zip(table.as_chunks().0).enumerate() {
        let entry = u32::from_le_bytes(*entry);
        let is_raw = entry & RAW != 0;
        let len = usize::try_from(entry & !RAW).expect("usize has 32 bits or more");
        if is_raw && len != count || !is_raw && len >= count {
            return Err(invalid(format!("plane {number}: {len} bytes for {count} elements")));
        }
        let (bytes, after) = rest
            .split_at_checked(len)
            .ok_or_else(|| invalid(format!("plane {number}: {len} bytes of {}", rest.len())))?;
        *plane = if is_raw { StoredPlane::Raw(bytes) } else { StoredPlane::Coded(bytes) };
        rest = after;
    }
    if rest.len() != tail {
        return Err(invalid(format!("a tail of {} bytes, not {tail}", rest.len())));
    }
    Ok((planes, rest))
}

/// Returns whether a sample of the plane has an entropy that promises a saving.
#[cfg(feature = "zstd")]
fn is_compressible(plane: &[u8]) -> bool {
    let run = SAMPLE_BYTES / SAMPLE_RUNS;
    let step = (plane.len() / SAMPLE_RUNS).max(run);
    let mut counts = [0_u16; 256];
    for start in (0..plane.len()).step_by(step).take(SAMPLE_RUNS) {
        for byte in plane[start..].iter().take(run) {
            counts[usize::from(*byte)] += 1;
        }
    }
    let present = counts.into_iter().filter(|count| *count != 0).map(f32::from);
    let total: f32 = present.clone().sum();
    present.map(|count| count / total * (total / count).log2()).sum::<f32>() < MAX_SAMPLE_ENTROPY
}

/// Makes working memory at least `len` bytes long.
fn grow(memory: &mut Vec<u8>, len: usize) {
    if memory.len() < len {
        memory.resize(len, 0);
    }
}

#[cfg(test)]
#[cfg(feature = "zstd")]
mod tests {
    use super::*;
    use crate::test_bytes::{join_planes, noise, special_floats};

    const WIDTHS: [u8; 4] = [1, 2, 4, 8];

    /// Decodes a chunk byte by byte, as the specification reads. Frames are decoded by the streaming decoder of zstd.
    fn decode_naively(stored: &[u8], width: usize, len: usize) -> Vec<u8> {
        let count = len / width;
        let mut at = 4 * width;
        let mut planes = Vec::new();
        for plane in 0..width {
            let entry = u32::from_le_bytes(stored[4 * plane..4 * plane + 4].try_into().unwrap());
            let bytes = &stored[at..at + (entry & 0x7FFF_FFFF) as usize];
            at += bytes.len();
            planes.push(if entry >> 31 == 1 {
                bytes.to_vec()
            } else {
                zstd::decode_all(bytes).unwrap()
            });
            assert_eq!(planes[plane].len(), count);
        }
        let mut raw = join_planes(&planes);
        raw.extend_from_slice(&stored[at..]);
        raw
    }

    fn check_roundtrip(raw: &[u8], width: u8) -> Option<Vec<u8>> {
        let stored = PlanesEncoder::new().unwrap().encode(raw, width).unwrap()?;
        assert!(stored.len() < raw.len());
        assert_eq!(decode_naively(&stored, width.into(), raw.len()), raw);
        let mut target = vec![0xA5; raw.len()];
        PlanesDecoder::new().unwrap().decode(&stored, width, &mut target).unwrap();
        assert_eq!(target, raw);
        Some(stored)
    }

    /// Elements of `width` bytes: noise, but the exponent of each has only 4 values.
    fn weights(len: usize, width: u8) -> Vec<u8> {
        let mut bytes = noise(len);
        for element in bytes.chunks_mut(width.into()) {
            *element.last_mut().unwrap() &= 0x83;
        }
        bytes
    }

    /// Builds a chunk from its table and the bytes after it.
    fn stored(table: &[u32], bytes: &[&[u8]]) -> Vec<u8> {
        let table = table.iter().flat_map(|entry| entry.to_le_bytes());
        table.chain(bytes.concat()).collect()
    }

    #[test]
    fn roundtrip_of_special_floats() {
        let [wide, half] = special_floats();
        for width in WIDTHS {
            for tail in 0..8 {
                check_roundtrip(&[&wide[..], &vec![7; tail]].concat(), width);
                check_roundtrip(&[&half[..], &vec![7; tail]].concat(), width);
            }
        }
    }

    #[test]
    fn decoder_survives_any_bytes_and_any_changed_byte() {
        let is_refusal = |error: &Error| {
            matches!(error.kind(), ErrorKind::PlaneLengths | ErrorKind::FrameCorrupt)
        };
        let noise = noise(4000);
        for width in WIDTHS {
            let mut decoder = PlanesDecoder::new().unwrap();
            for (start, len) in (0..3000).step_by(7).zip(0..) {
                let stored = &noise[start..start + len % 200];
                let decoded = decoder.decode(stored, width, &mut vec![0; len / 3]);
                assert!(decoded.err().as_ref().is_none_or(is_refusal));
            }
            let stored = check_roundtrip(&weights(5003, width), width).unwrap();
            for at in (0..60).chain((60..stored.len()).step_by(23)) {
                let mut changed = stored.clone();
                changed[at] ^= 1 << (at % 8);
                let decoded = decoder.decode(&changed, width, &mut [0; 5003]);
                assert!(decoded.err().as_ref().is_none_or(is_refusal));
            }
        }
    }

    #[test]
    fn roundtrip_of_all_lengths_around_a_block() {
        for width in WIDTHS {
            for len in (0..40)
                .chain(0..=3)
                .chain(64 * usize::from(width) - 9..=64 * usize::from(width) + 9)
            {
                check_roundtrip(&vec![0x3F; len], width);
                check_roundtrip(&weights(len, width), width);
            }
            for len in [1 << 20, (1 << 20) - 1, 100_003] {
                assert!(check_roundtrip(&weights(len, width), width).is_some());
                assert!(check_roundtrip(&vec![0; len], width).unwrap().len() < 500);
            }
        }
    }

    #[test]
    fn encoder_leaves_noise_and_chunks_shorter_than_an_element_raw() {
        for width in WIDTHS {
            for len in [0, 1, usize::from(width) - 1, usize::from(width), 5000, 1 << 20] {
                assert_eq!(check_roundtrip(&noise(len), width), None, "{len} bytes, width {width}");
            }
        }
    }

    #[test]
    fn decoder_merges_any_mix_of_raw_and_coded_planes() {
        for width in WIDTHS {
            let len = 1000 * usize::from(width) + usize::from(width) - 1;
            for mask in 0..1_u32 << width {
                let (mut table, mut bytes) = (Vec::new(), Vec::new());
                for plane in 0..width {
                    let plane_bytes = vec![plane.wrapping_mul(37) ^ 0x81; 1000];
                    let is_coded = mask >> plane & 1 == 1;
                    let part = if is_coded {
                        zstd::bulk::compress(&plane_bytes, 1).unwrap()
                    } else {
                        plane_bytes
                    };
                    let entry = u32::try_from(part.len()).unwrap();
                    table.push(if is_coded { entry } else { entry | RAW });
                    bytes.push(part);
                }
                bytes.push(vec![9; usize::from(width) - 1]);
                let bytes: Vec<&[u8]> = bytes.iter().map(Vec::as_slice).collect();
                let stored = stored(&table, &bytes);
                let mut target = vec![0xA5; len];
                PlanesDecoder::new().unwrap().decode(&stored, width, &mut target).unwrap();
                assert_eq!(target, decode_naively(&stored, width.into(), len), "mask {mask:b}");
            }
        }
    }

    #[test]
    fn damaged_chunks_have_a_typed_error() {
        let frame = |bytes: &[u8]| zstd::bulk::compress(bytes, 1).unwrap();
        let (low, high) = ([5; 100], frame(&[9; 100]));
        let len = u32::try_from(high.len()).unwrap();
        let decode = |stored: &[u8], target_len: usize| {
            let result = PlanesDecoder::new().unwrap().decode(stored, 2, &mut vec![0; target_len]);
            result.map_err(|error| error.kind())
        };
        let whole = stored(&[RAW + 100, len], &[&low, &high, &[1]]);
        assert_eq!(decode(&whole, 201), Ok(()));
        let mut without_size = Vec::new();
        let mut encoder = zstd::stream::Encoder::new(&mut without_size, 1).unwrap();
        std::io::Write::write_all(&mut encoder, &[9; 100]).unwrap();
        encoder.finish().unwrap();
        let two_frames = [frame(&[9; 50]), frame(&[9; 50])].concat();
        let mut bad_block = high.clone();
        *bad_block.last_mut().unwrap() = 0;
        let last = bad_block.len() - 4;
        bad_block[last] |= 6;
        let coded = |frame: &[u8]| {
            stored(&[RAW + 100, u32::try_from(frame.len()).unwrap()], &[&low, frame, &[1]])
        };
        let skippable = [0x50, 0x2A, 0x4D, 0x18, 0, 0, 0, 0];
        for (what, chunk, kind) in [
            ("empty", vec![], ErrorKind::PlaneLengths),
            ("part of a table", whole[..7].to_vec(), ErrorKind::PlaneLengths),
            ("table alone", whole[..8].to_vec(), ErrorKind::PlaneLengths),
            ("last byte missing", whole[..whole.len() - 1].to_vec(), ErrorKind::PlaneLengths),
            ("additional byte", [&whole[..], &[0]].concat(), ErrorKind::PlaneLengths),
            (
                "raw plane too short",
                stored(&[RAW + 99, len], &[&low, &high]),
                ErrorKind::PlaneLengths,
            ),
            (
                "raw plane too long",
                stored(&[RAW + 101, len], &[&low, &high, &[1]]),
                ErrorKind::PlaneLengths,
            ),
            (
                "coded plane of its own length",
                stored(&[RAW + 100, 100], &[&low, &low, &[1]]),
                ErrorKind::PlaneLengths,
            ),
            (
                "length beyond the chunk",
                stored(&[99, 0x7FFF_FFFF], &[&low, &high]),
                ErrorKind::PlaneLengths,
            ),
            (
                "coded plane of 0 bytes",
                stored(&[RAW + 100, 0], &[&low, &[1]]),
                ErrorKind::FrameCorrupt,
            ),
            (
                "no frame",
                stored(&[RAW + 100, len], &[&low, &vec![0; high.len()], &[1]]),
                ErrorKind::FrameCorrupt,
            ),
            (
                "frame cut",
                stored(&[RAW + 100, len - 1], &[&low, &high[1..], &[1]]),
                ErrorKind::FrameCorrupt,
            ),
            ("frame without its end", coded(&high[..high.len() - 1]), ErrorKind::FrameCorrupt),
            ("byte after the frame", coded(&[&high[..], &[0]].concat()), ErrorKind::FrameCorrupt),
            ("content too short", coded(&frame(&[9; 99])), ErrorKind::FrameCorrupt),
            ("content too long", coded(&frame(&[9; 101])), ErrorKind::FrameCorrupt),
            ("no content size", coded(&without_size), ErrorKind::FrameCorrupt),
            ("two frames", coded(&two_frames), ErrorKind::FrameCorrupt),
            (
                "skippable frame before",
                coded(&[&skippable[..], &high].concat()),
                ErrorKind::FrameCorrupt,
            ),
            ("reserved block type", coded(&bad_block), ErrorKind::FrameCorrupt),
        ] {
            assert_eq!(decode(&chunk, 201), Err(kind), "{what}");
        }
        assert_eq!(decode(&whole, 200), Err(ErrorKind::PlaneLengths), "another tail");
        assert_eq!(decode(&whole, 203), Err(ErrorKind::PlaneLengths), "more elements");
    }

    #[test]
    fn decoder_needs_no_memory_for_one_coded_plane_and_one_plane_for_more() {
        let mut decoder = PlanesDecoder::new().unwrap();
        let raw = weights(100_000, 2);
        let stored = check_roundtrip(&raw, 2).unwrap();
        decoder.decode(&stored, 2, &mut vec![0; raw.len()]).unwrap();
        assert_eq!(decoder.plane.capacity(), 0);
        let zeros = check_roundtrip(&vec![0; 100_000], 8).unwrap();
        decoder.decode(&zeros, 8, &mut vec![0; 100_000]).unwrap();
        assert_eq!(decoder.plane.capacity(), 12_500);
    }
}
