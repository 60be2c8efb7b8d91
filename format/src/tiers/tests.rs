use super::*;
use crate::error::{Error, ErrorKind};
use crate::test_bytes::{join_planes, noise, special_floats};

const WIDTHS: [u8; 4] = [1, 2, 4, 8];

impl TiersEncoder {
    fn portable() -> Self {
        Self { isa: Isa::portable(), ..Self::new() }
    }
}

impl TiersDecoder {
    fn portable() -> Self {
        Self { isa: Isa::portable(), ..Self::new() }
    }
}

/// Takes `len` bytes from the start of `bytes`.
fn take(bytes: &mut &[u8], len: usize) -> Vec<u8> {
    let taken;
    (taken, *bytes) = bytes.split_at(len);
    taken.to_vec()
}

/// Reads codes, as the specification reads.
fn read_codes(stored: &mut &[u8], count: usize, bits: usize) -> Vec<usize> {
    let per_group = 256 / bits;
    let groups = take(stored, count.div_ceil(per_group) * 32);
    let code = |i: usize| {
        let at = i % per_group;
        usize::from(groups[i / per_group * 32 + at % 32]) >> (bits * (at / 32)) & ((1 << bits) - 1)
    };
    (0..count).map(code).collect()
}

/// Decodes a chunk code by code, as the specification reads.
fn decode_naively(mut stored: &[u8], width: usize, len: usize) -> Vec<u8> {
    let count = len / width;
    let mut planes: Vec<Vec<u8>> = (1..width).map(|_| take(&mut stored, count)).collect();
    let symbols = take(&mut stored, 21);
    let mut last = Vec::new();
    while last.len() < count {
        let size = (count - last.len()).min(32_768);
        let counts = take(&mut stored, 6);
        let [a, b, c] =
            [0, 2, 4].map(|at| usize::from(u16::from_le_bytes([counts[at], counts[at + 1]])));
        let first = read_codes(&mut stored, size, 2);
        let mut second = read_codes(&mut stored, a, 2).into_iter();
        let mut third = read_codes(&mut stored, b, 4).into_iter();
        let mut bytes = take(&mut stored, c).into_iter();
        for code in first {
            last.push(match code {
                3 => match second.next().unwrap() {
                    3 => match third.next().unwrap() {
                        15 => bytes.next().unwrap(),
                        code => symbols[6 + code],
                    },
                    code => symbols[3 + code],
                },
                code => symbols[code],
            });
        }
        assert_eq!((second.next(), third.next(), bytes.next()), (None, None, None));
    }
    planes.push(last);
    let mut raw = join_planes(&planes);
    assert_eq!(stored.len(), len % width);
    raw.extend_from_slice(stored);
    raw
}

fn decode(stored: &[u8], width: u8, len: usize) -> Result<Vec<u8>> {
    let [mut target, mut portable] = [vec![0xA5; len], vec![0x5A; len]];
    let result = TiersDecoder::new().decode(stored, width, &mut target);
    let portable_result = TiersDecoder::portable().decode(stored, width, &mut portable);
    let text = |result: &Result<()>| result.as_ref().map_err(ToString::to_string).err();
    assert_eq!(text(&result), text(&portable_result), "both instruction sets agree");
    result?;
    assert_eq!(target, portable);
    Ok(target)
}

fn check_roundtrip(raw: &[u8], width: u8) -> Option<Vec<u8>> {
    let stored = TiersEncoder::new().encode(raw, width);
    assert_eq!(TiersEncoder::portable().encode(raw, width), stored, "both instruction sets agree");
    let stored = stored?;
    assert!(stored.len() < raw.len());
    assert_eq!(decode_naively(&stored, width.into(), raw.len()), raw);
    assert_eq!(decode(&stored, width, raw.len()).unwrap(), raw);
    Some(stored)
}

/// Elements of `width` bytes: noise, but exponents are the more frequent the higher they are. All tiers have some.
fn weights(len: usize, width: u8) -> Vec<u8> {
    let mut bytes = noise(len);
    let exponents = noise(2 * len).into_iter().skip(len);
    for (element, noise) in bytes.chunks_mut(width.into()).zip(exponents) {
        // The number of trailing zeros halves in frequency with each step.
        let exponent = u8::try_from((u32::from(noise) << 8 | 0x4000).trailing_zeros()).unwrap();
        let last = element.last_mut().unwrap();
        *last = if noise == 77 { *last } else { (*last & 0x80) | (0x30 + exponent) };
    }
    bytes
}

#[test]
fn chunks_of_all_lengths_are_restored() {
    for width in WIDTHS {
        let bytes = usize::from(width);
        let edges = [64, 128, 32_768, 65_536].map(|edge| edge * bytes);
        let lens = edges.into_iter().flat_map(|edge| edge - bytes - 1..=edge + bytes + 1);
        let mut are_shorter = 0;
        for len in (0..40).chain(lens).chain([1 << 20, (1 << 20) - 1, 100_003]) {
            are_shorter += u32::from(check_roundtrip(&weights(len, width), width).is_some());
            check_roundtrip(&vec![0x3F; len], width);
        }
        assert!(are_shorter > 10, "width {width}: {are_shorter}");
    }
}

#[test]
fn encoder_and_decoder_can_be_used_for_chunks_of_any_lengths_and_widths() {
    let (mut encoder, mut decoder) = (TiersEncoder::new(), TiersDecoder::new());
    for (len, width) in [(200_000, 2), (1001, 4), (100_000, 2), (70_000, 8), (0, 2), (9, 1)] {
        let raw = vec![0x3F; len];
        let Some(stored) = encoder.encode(&raw, width) else { continue };
        assert_eq!(stored, TiersEncoder::new().encode(&raw, width).unwrap());
        let mut target = vec![0; len];
        decoder.decode(&stored, width, &mut target).unwrap();
        assert_eq!(target, raw);
    }
}

#[test]
fn plane_of_one_byte_takes_two_bits_for_each() {
    let stored = check_roundtrip(&vec![0; 1 << 20], 2).unwrap();
    assert_eq!(stored.len(), (1 << 19) + 21 + 16 * (6 + 8192));
}

#[test]
fn noise_stays_raw() {
    for width in WIDTHS {
        for len in [0, 1, usize::from(width), 5000, 1 << 20] {
            assert_eq!(check_roundtrip(&noise(len), width), None, "{len} bytes, width {width}");
        }
    }
}

#[test]
fn special_floats_are_restored_bit_by_bit() {
    let [wide, half] = special_floats();
    assert!(check_roundtrip(&wide, 4).is_some());
    assert!(check_roundtrip(&half, 2).is_some());
}

#[test]
fn decoder_survives_any_bytes_and_any_changed_byte() {
    let is_refusal = |error: &Error| error.kind() == ErrorKind::TiersChunk;
    let noise = noise(4000);
    for width in WIDTHS {
        for (start, len) in (0..3000).step_by(7).zip(0..) {
            let decoded = decode(&noise[start..start + len % 200], width, len / 3);
            assert!(decoded.err().as_ref().is_none_or(is_refusal));
        }
        let stored = check_roundtrip(&weights(5003, width), width).unwrap();
        let tiers = 5003 / usize::from(width) * (usize::from(width) - 1);
        for at in (0..20).chain(tiers..tiers + 60).chain((60..stored.len()).step_by(23)) {
            let mut changed = stored.clone();
            changed[at] ^= 1 << (at % 8);
            let decoded = decode(&changed, width, 5003);
            assert!(decoded.err().as_ref().is_none_or(is_refusal));
        }
    }
}

/// The parts of a stored chunk of one block of 5 bytes of width 1, the example of the specification.
struct Example {
    symbols: Vec<u8>,
    counts: [u16; 3],
    tiers: [Vec<u8>; 3],
    bytes: Vec<u8>,
    tail: Vec<u8>,
}

impl Example {
    fn new() -> Self {
        let mut symbols = vec![0; 21];
        symbols[..4].copy_from_slice(&[0x7E, 0x7D, 0, 5]);
        let tier = |codes: &[u8]| [codes, &vec![0; 32 - codes.len()]].concat();
        let tiers = [tier(&[0, 1, 0, 3, 3]), tier(&[0, 3]), tier(&[15])];
        Self { symbols, counts: [2, 1, 1], tiers, bytes: vec![9], tail: vec![] }
    }

    fn stored(&self) -> Vec<u8> {
        let counts: Vec<u8> = self.counts.iter().flat_map(|count| count.to_le_bytes()).collect();
        [&self.symbols, &counts, &self.tiers.concat(), &self.bytes, &self.tail]
            .map(Vec::as_slice)
            .concat()
    }
}

#[test]
fn example_of_the_specification_decodes() {
    assert_eq!(decode(&Example::new().stored(), 1, 5).unwrap(), [0x7E, 0x7D, 0x7E, 5, 9]);
}

#[test]
fn damaged_chunks_have_a_typed_error() {
    type Change = fn(&mut Example);
    let changes: [(&str, Change); 16] = [
        ("symbols cut off", |it| it.symbols.truncate(20)),
        ("an additional byte", |it| it.tail.push(0)),
        ("a byte missing", |it| it.bytes.clear()),
        ("a code of tier 2 too many", |it| it.counts[0] = 3),
        ("a code of tier 2 too few", |it| it.counts[0] = 1),
        ("more codes in tier 2 than bytes", |it| it.counts[0] = 6),
        ("a code of tier 3 too many", |it| it.counts[1] = 2),
        ("a code of tier 3 too few", |it| (it.counts, it.tiers[2]) = ([2, 0, 0], vec![])),
        ("a byte of tier 4 too many", |it| it.counts[2] = 2),
        ("a byte of tier 4 too few", |it| (it.counts[2], it.bytes) = (0, vec![])),
        ("an escape too many in tier 1", |it| it.tiers[0][0] = 3),
        ("an escape too few in tier 1", |it| it.tiers[0][3] = 0),
        ("an escape too many in tier 2", |it| it.tiers[1][0] = 3),
        ("an unused code of tier 1", |it| it.tiers[0][5] = 1),
        ("an unused code of tier 2", |it| it.tiers[1][1] = 0x43),
        ("an unused code of tier 3", |it| it.tiers[2][31] = 0x10),
    ];
    for (what, change) in changes {
        let mut example = Example::new();
        change(&mut example);
        let error = decode(&example.stored(), 1, 5).expect_err(what);
        assert_eq!(error.kind(), ErrorKind::TiersChunk, "{what}");
    }
    let stored = Example::new().stored();
    for len in 0..stored.len() {
        assert!(decode(&stored[..len], 1, 5).is_err(), "{len} bytes");
    }
}
