//! Tests of delta chunks against a naive oracle.
#![expect(
    clippy::cast_possible_truncation,
    clippy::unwrap_used,
    reason = "tests use small numbers, and fail by panicking"
)]

mod damage;

use super::column::ColumnEncoder;
use super::layout::{BLOCK_ELEMENTS, Header};
use super::*;
use crate::element::ElementWidth;
use crate::error::{ErrorKind, Result};
use crate::isa::Isa;

const WIDTHS: [ElementWidth; 3] = [ElementWidth::One, ElementWidth::Two, ElementWidth::Four];
const CLASSES: [DeltaClasses; 4] =
    [DeltaClasses::One, DeltaClasses::Two, DeltaClasses::Four, DeltaClasses::Auto];

fn options(classes: DeltaClasses) -> DeltaOptions<'static> {
    DeltaOptions { classes, ..DeltaOptions::default() }
}

fn make(width: ElementWidth, old: &[u8], new: &[u8], classes: DeltaClasses) -> Vec<u8> {
    make_with(&mut DeltaEncoder::new().unwrap(), width, [old, new], classes)
}

fn make_with(
    encoder: &mut DeltaEncoder,
    width: ElementWidth,
    versions: [&[u8]; 2],
    classes: DeltaClasses,
) -> Vec<u8> {
    let mut chunk = Vec::new();
    encoder.encode(versions, width, &options(classes), &mut chunk).unwrap();
    chunk
}

fn apply(width: ElementWidth, chunk: &[u8], base: &[u8]) -> Result<Vec<u8>> {
    let mut target = base.to_vec();
    DeltaDecoder::new().unwrap().apply(chunk, width, &mut target)?;
    Ok(target)
}

fn fold(width: ElementWidth, len: usize, chunks: [&[u8]; 2]) -> Result<Vec<u8>> {
    let mut chunk = Vec::new();
    DeltaFolder::new().unwrap().fold(chunks, width, len, &mut chunk)?;
    Ok(chunk)
}

fn header(width: ElementWidth, len: usize, chunk: &[u8]) -> Header {
    Header::read(chunk, width, len / width.bytes()).unwrap().0
}

/// Counts the elements that differ, one after the other.
fn count_changes(width: ElementWidth, old: &[u8], new: &[u8]) -> u64 {
    let mut elements = old.chunks(width.bytes()).zip(new.chunks(width.bytes()));
    elements.by_ref().filter(|(old, new)| old != new).count().try_into().unwrap()
}

/// Checks everything that must hold for a pair of versions.
fn check(width: ElementWidth, old: &[u8], new: &[u8]) {
    for classes in CLASSES {
        let chunk = make(width, old, new, classes);
        let mut encoder = DeltaEncoder::with_isa(Isa::portable()).unwrap();
        let portable = make_with(&mut encoder, width, [old, new], classes);
        assert!(chunk == portable, "{width:?} {classes:?}: chunks differ by instruction set");
        for isa in [Isa::detect(), Isa::portable()] {
            let mut decoder = DeltaDecoder::with_isa(isa).unwrap();
            let mut target = old.to_vec();
            decoder.apply(&chunk, width, &mut target).unwrap();
            assert!(target == new, "{width:?} {classes:?}: apply in place");
            target.fill(0xA5);
            decoder.apply_to(&chunk, width, old, &mut target).unwrap();
            assert!(target == new, "{width:?} {classes:?}: apply to another buffer");
            let count = decoder.count(&chunk, width, old.len()).unwrap();
            let changes = count_changes(width, old, new);
            let bounds = count.listed..=count.listed + count.dense;
            assert!(bounds.contains(&changes), "{width:?} {classes:?}: {changes} of {count:?}");
            if count.dense == 0 {
                assert_eq!(count.listed, changes);
            }
            let done = decoder_blocks(width, new) / 2;
            let end = (done * BLOCK_ELEMENTS * width.bytes()).min(new.len());
            let mut target = [&new[..end], &old[end..]].concat();
            decoder.resume(&chunk, width, &mut target, done).unwrap();
            assert!(target == new, "{width:?} {classes:?}: resume after {done} blocks");
        }
    }
}

fn decoder_blocks(width: ElementWidth, bytes: &[u8]) -> usize {
    bytes.len().div_ceil(BLOCK_ELEMENTS * width.bytes())
}

/// Calls `test` with versions and their successors, of elements of 8, 16 or 32 bits.
fn for_random_versions(mut test: impl FnMut(&mut Random, ElementWidth, &[u8], &[u8])) {
    for seed in 0..60 {
        let mut random = Random(seed);
        let width = WIDTHS[random.below(3)];
        let lens =
            [random.below(200), 63, 64, 65_530 + random.below(15), 130_000 + random.below(10_000)];
        let len = lens[random.below(lens.len())];
        let old = random.weights(width, len);
        let density = u32::try_from(random.below(1000)).unwrap();
        let size = u32::try_from(random.below(5)).unwrap();
        let new = random.change(width, &old, density * density / 1000, size);
        test(&mut random, width, &old, &new);
    }
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> u32 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        u32::try_from(self.0 >> 32).unwrap()
    }

    fn below(&mut self, end: usize) -> usize {
        usize::try_from(self.next()).unwrap() % end
    }

    /// Patterns whose magnitudes differ as those of weights do.
    fn weights(&mut self, width: ElementWidth, len: usize) -> Vec<u8> {
        let mut bytes = Vec::new();
        for _ in 0..len {
            let (sign, exponent, mantissa) =
                (self.next() & 1, 120 - self.next().leading_zeros(), self.next());
            let pattern = sign << 31 | exponent << 23 | mantissa >> 9;
            bytes.extend(&pattern.to_le_bytes()[4 - width.bytes()..]);
        }
        bytes
    }

    /// Changes `density` of 1,000 elements, by up to `2^(8 * size)` bit patterns.
    fn change(&mut self, width: ElementWidth, old: &[u8], density: u32, size: u32) -> Vec<u8> {
        let mut new = old.to_vec();
        for element in new.chunks_mut(width.bytes()) {
            if self.next() % 1000 < density {
                let step = if size == 0 { 1 } else { self.next() >> (32 - 8 * size.min(4)) };
                let step = if self.next() & 1 == 0 { step } else { step.wrapping_neg() };
                let mut wide = [0; 4];
                wide[..element.len()].copy_from_slice(element);
                let pattern = u32::from_le_bytes(wide).wrapping_add(step);
                element.copy_from_slice(&pattern.to_le_bytes()[..width.bytes()]);
            }
        }
        new
    }
}

#[test]
fn chunk_turns_base_into_result() {
    for_random_versions(|_, width, old, new| check(width, old, new));
}

#[test]
fn folded_chunk_has_the_effect_of_both() {
    for_random_versions(|random, width, old, new| {
        let density = u32::try_from(random.below(100)).unwrap();
        let last = random.change(width, new, density, 0);
        let [first, second] =
            [(old, new), (new, &last)].map(|(old, new)| make(width, old, new, DeltaClasses::One));
        let folded = fold(width, old.len(), [&first, &second]).unwrap();
        assert!(apply(width, &folded, old).unwrap() == last);
    });
}

#[test]
fn decoder_survives_damage() {
    for_random_versions(|random, width, old, new| {
        let chunk = make(width, old, new, CLASSES[random.below(4)]);
        let mut decoder = DeltaDecoder::new().unwrap();
        for _ in 0..40 {
            let mut damaged = chunk.clone();
            for _ in 0..=random.below(3) {
                let at = random.below(damaged.len());
                // The header decides most, so that it is damaged more often than its length says.
                let at = if random.below(2) == 0 { at } else { at % 200.min(damaged.len()) };
                damaged[at] ^= 1 << random.below(8);
            }
            if random.below(8) == 0 {
                damaged.truncate(random.below(chunk.len()));
            }
            let mut target = old.to_vec();
            match decoder.apply(&damaged, width, &mut target) {
                Ok(()) => assert!(target == new, "wrong in spite of the checksums"),
                Err(error) if error.kind() == ErrorKind::DeltaMismatch => {}
                Err(_) => assert!(target == old, "changed in spite of an error"),
            }
            let _ = decoder.count(&damaged, width, old.len());
            let _ = fold(width, old.len(), [&damaged, &chunk]);
        }
    });
}

fn bytes16(elements: &[u16]) -> Vec<u8> {
    elements.iter().flat_map(|element| element.to_le_bytes()).collect()
}

#[test]
fn bits_are_compared_and_not_values() {
    // -0.0 and 0.0, NaN payloads, a NaN with sign, infinity.
    let old = bytes16(&[0x8000, 0x0000, 0x7FC0, 0x7FC1, 0xFFC0, 0x7F80, 0x3F80]);
    let new = bytes16(&[0x0000, 0x8000, 0x7FC1, 0x7FC1, 0x7FC0, 0xFF80, 0x3F81]);
    check(ElementWidth::Two, &old, &new);
}

#[test]
fn empty_and_unchanged_versions_round_trip() {
    for width in WIDTHS {
        check(width, &[], &[]);
        for len in [1, 63, 64, 65, 65_535, 65_536, 65_537, 200_000] {
            let old = Random(7).weights(width, len);
            check(width, &old, &old);
        }
    }
}

#[test]
fn fully_changed_blocks_round_trip() {
    for width in WIDTHS {
        for len in [5, 65_536, 70_000] {
            let (zeros, weights) = (vec![0; len * width.bytes()], Random(3).weights(width, len));
            let steps = Random(4).change(width, &weights, 1000, 0);
            check(width, &zeros, &weights);
            check(width, &weights, &zeros);
            check(width, &weights, &steps);
        }
    }
    // One changed block among unchanged ones, whose positions are gaps: more than a count can hold.
    let old = Random(5).weights(ElementWidth::Two, 16 * BLOCK_ELEMENTS);
    let mut new = old.clone();
    new[2 * BLOCK_ELEMENTS..4 * BLOCK_ELEMENTS].iter_mut().step_by(2).for_each(|byte| *byte ^= 1);
    check(ElementWidth::Two, &old, &new);
}

#[test]
fn dense_block_is_no_larger_than_its_elements() {
    let zeros = vec![0; 2 * BLOCK_ELEMENTS];
    let mut random = Random(9);
    let noise: Vec<u8> =
        std::iter::repeat_with(|| random.next().to_le_bytes()[2]).take(zeros.len()).collect();
    for classes in CLASSES {
        let chunk = make(ElementWidth::Two, &zeros, &noise, classes);
        assert!(chunk.len() < noise.len() + 200, "{classes:?}: {} bytes", chunk.len());
    }
}

#[test]
fn patterns_at_thresholds_belong_to_the_upper_class() {
    let mut random = Random(11);
    let old: Vec<u16> = (0..70_000)
        .map(|_| (random.next() as u16 & 0x8000) | (0x3F80 + 0x80 * (random.next() as u16 % 8)))
        .collect();
    let likely = |element: u16| (element & 0x380) >> 7;
    let new: Vec<u16> = old
        .iter()
        .map(|element| element + u16::from(random.next() % 256 < 2 << likely(*element) >> 1))
        .collect();
    check(ElementWidth::Two, &bytes16(&old), &bytes16(&new));
    let chunk = make(ElementWidth::Two, &bytes16(&old), &bytes16(&new), DeltaClasses::Four);
    assert!(header(ElementWidth::Two, 140_000, &chunk).classes > 2);
}

#[test]
fn eight_deltas_fold_to_the_direct_delta() {
    let mut random = Random(21);
    for width in WIDTHS {
        let mut versions = vec![random.weights(width, 150_000)];
        for _ in 0..8 {
            let next = random.change(width, versions.last().unwrap(), 8, 0);
            versions.push(next);
        }
        let deltas: Vec<Vec<u8>> = versions
            .windows(2)
            .map(|pair| make(width, &pair[0], &pair[1], DeltaClasses::One))
            .collect();
        let folded = deltas[1..].iter().fold(deltas[0].clone(), |folded, next| {
            fold(width, versions[0].len(), [&folded, next]).unwrap()
        });
        assert!(folded == make(width, &versions[0], &versions[8], DeltaClasses::One), "{width:?}");
    }
}

#[test]
fn fold_drops_changes_that_cancel() {
    let old = Random(1).weights(ElementWidth::Two, 70_000);
    let new = Random(2).change(ElementWidth::Two, &old, 5, 1);
    let [there, back] = [(&old, &new), (&new, &old)]
        .map(|(old, new)| make(ElementWidth::Two, old, new, DeltaClasses::One));
    let folded = fold(ElementWidth::Two, old.len(), [&there, &back]).unwrap();
    assert_eq!(folded, make(ElementWidth::Two, &old, &old, DeltaClasses::One));
}

#[test]
fn fold_keeps_dense_blocks() {
    let zeros = vec![0; 140_000];
    let weights = Random(1).weights(ElementWidth::Two, 70_000);
    let steps = Random(2).change(ElementWidth::Two, &weights, 5, 0);
    for (a, b, c) in
        [(&zeros, &weights, &steps), (&weights, &steps, &zeros), (&zeros, &weights, &zeros)]
    {
        let [first, second] =
            [(a, b), (b, c)].map(|(old, new)| make(ElementWidth::Two, old, new, DeltaClasses::One));
        let folded = fold(ElementWidth::Two, a.len(), [&first, &second]).unwrap();
        assert!(apply(ElementWidth::Two, &folded, a).unwrap() == *c);
    }
}

#[test]
fn fold_refuses_chunks_of_several_classes() {
    let old = Random(1).weights(ElementWidth::Two, 70_000);
    let new = naively_trained(&old);
    let one = make(ElementWidth::Two, &old, &new, DeltaClasses::One);
    let four = make(ElementWidth::Two, &old, &new, DeltaClasses::Four);
    assert!(header(ElementWidth::Two, old.len(), &four).classes > 1);
    for chunks in [[&one[..], &four[..]], [&four, &one]] {
        let error = fold(ElementWidth::Two, old.len(), chunks).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFoldable);
    }
}

/// Changes small weights often and large ones rarely, by 1 unit in the last place.
fn naively_trained(old: &[u8]) -> Vec<u8> {
    let mut random = Random(77);
    let mut new = old.to_vec();
    for element in new.chunks_mut(2) {
        let exponent = u32::from(element[1] & 0x7F) * 2;
        if random.next() >> 1 < 1 << (31 - exponent.saturating_sub(112).min(31)) {
            let pattern = u16::from_le_bytes([element[0], element[1]]).wrapping_add(1);
            element.copy_from_slice(&pattern.to_le_bytes());
        }
    }
    new
}

#[test]
fn wrong_base_is_detected() {
    let old = Random(1).weights(ElementWidth::Two, 70_000);
    let new = naively_trained(&old);
    let mut wrong = old.clone();
    wrong[100_000] ^= 1;
    for classes in CLASSES {
        let chunk = make(ElementWidth::Two, &old, &new, classes);
        // The result itself is a wrong base too: the differences would be added twice.
        for base in [&wrong, &new] {
            let error = apply(ElementWidth::Two, &chunk, base).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::DeltaMismatch);
        }
    }
}

#[test]
fn resume_refuses_blocks_that_are_not_the_result() {
    let old = Random(1).weights(ElementWidth::Two, 200_000);
    let new = naively_trained(&old);
    for classes in CLASSES {
        let chunk = make(ElementWidth::Two, &old, &new, classes);
        let block = 2 * BLOCK_ELEMENTS;
        let half = [&new[..block], &old[block..]].concat();
        for done in [0, 2, 3, 4, 100] {
            let mut target = half.clone();
            let mut decoder = DeltaDecoder::new().unwrap();
            let error = decoder.resume(&chunk, ElementWidth::Two, &mut target, done).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::DeltaMismatch);
            assert!(done == 0 || target == half, "{done} blocks: changed");
        }
    }
}

#[test]
fn encoder_takes_checksums_of_the_caller() {
    let old = Random(1).weights(ElementWidth::Two, 70_000);
    let new = naively_trained(&old);
    let checksums: Vec<u32> = new.chunks(2 * BLOCK_ELEMENTS).map(crc32fast::hash).collect();
    let mut encoder = DeltaEncoder::new().unwrap();
    let mut encode = |checksums| {
        let mut chunk = Vec::new();
        let options = DeltaOptions { checksums: Some(checksums), ..DeltaOptions::default() };
        let encoded = encoder.encode([&old, &new], ElementWidth::Two, &options, &mut chunk);
        encoded.map(|_| chunk)
    };
    let expected = make(ElementWidth::Two, &old, &new, DeltaClasses::One);
    assert_eq!(encode(&checksums).unwrap(), expected);
    assert_eq!(encode(&checksums[1..]).unwrap_err().kind(), ErrorKind::TargetSize);
}

#[test]
fn columns_without_gain_stay_raw() {
    let mut encoder = ColumnEncoder::new().unwrap();
    let mut random = Random(1);
    let noise: Vec<u8> = (0..10_000).map(|_| random.next().to_le_bytes()[3]).collect();
    for (column, is_frame) in [(&noise[..], false), (&[1; 10], false), (&[1; 1000], true)] {
        let mut chunk = vec![9];
        let stored = encoder.push(column, &mut chunk).unwrap();
        assert_eq!((stored.is_frame, stored.len + 1), (is_frame, chunk.len()));
    }
}
