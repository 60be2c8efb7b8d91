//! Encodings of the bytes of a read: as they are, in byte planes, or as the difference from a base (pure).
//! Spec: `spec/protocol.md`, rule P-086.

use bytes::Bytes;
use tssd_format::{ChunkDecoder, ElementWidth};

use crate::convert::{to_u64, to_usize};
use crate::delta::layout::{ElementLayout, is_aligned, push_width};
use crate::delta::parts::{
    ENTRY_BYTES, Entry, Form, MAX_PART_BYTES, PartEncoder, saves_enough, to_word,
};
use crate::error::{Error, ErrorKind, Result};
use crate::net::wire::{Encodings, Range};

/// Maximum number of runs of a range whose elements have several widths. Else they count as bytes.
const MAX_RUNS: u64 = 4096;

/// Which encodings the receiver of bytes can decode.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Accepted<'a> {
    /// Bytes of another archive at the same ranges, which the receiver has.
    pub(crate) base: Option<&'a [u8]>,
    pub(crate) planes: bool,
}

/// The forms of the parts of encoded bytes that need something of the receiver.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Forms {
    /// Whether a part is a difference from a base.
    pub(crate) differences: bool,
    /// Whether a part is in byte planes.
    pub(crate) planes: bool,
}

impl Forms {
    fn add(&mut self, form: Form) {
        self.differences |= form == Form::Difference;
        self.planes |= form == Form::Planes;
    }

    /// Returns what a receiver must accept of what it does accept, to decode the bytes.
    pub(crate) fn narrow(self, accept: &Encodings) -> Encodings {
        let base = accept.base.clone().filter(|_| self.differences);
        Encodings { base, planes: self.planes, base_only: false }
    }
}

/// Returns the widths of the bytes of ranges, in their order: lengths in bytes, and the width of their elements.
fn widths(layout: &ElementLayout, ranges: &[Range]) -> Vec<(usize, ElementWidth)> {
    let mut widths = Vec::new();
    for range in ranges {
        let total = range.total_bytes(u64::MAX).unwrap_or(0);
        if let Some(width) = width_of(layout, range) {
            push_width(&mut widths, total, width);
        } else if total / range.1 > MAX_RUNS {
            push_width(&mut widths, total, ElementWidth::One);
        } else {
            range.for_each_run(|at| layout.push_run(&mut widths, at..at + range.1));
        }
    }
    widths
}

/// Returns the width of all elements of a range, if it has whole elements of one width only.
fn width_of(layout: &ElementLayout, range: &Range) -> Option<ElementWidth> {
    let Range(start, len, loops) = range;
    let run = layout.run_at(*start)?;
    let is_whole = |bytes: &u64| bytes.is_multiple_of(to_u64(run.width.bytes()));
    let are_whole = is_aligned(run, *start)
        && [len].into_iter().chain(loops.iter().map(|(_, stride)| stride)).all(is_whole);
    (are_whole && start + range.span() <= run.range.end).then_some(run.width)
}

/// Encodes the bytes of ranges. Returns the encoded bytes and their forms, or `None` if that saves too little.
///
/// # Errors
///
/// `Invalid` if the base has another length than the bytes; `Io` without memory for the encoder.
pub(crate) fn encode(
    layout: &ElementLayout,
    ranges: &[Range],
    raw: &[u8],
    accepted: Accepted<'_>,
) -> Result<Option<(Bytes, Forms)>> {
    if accepted.base.is_some_and(|base| base.len() != raw.len()) {
        return Err(Error::new(ErrorKind::Invalid, "the base has another length"));
    }
    let mut encoder = PartEncoder::new(accepted.planes)?;
    let mut at = 0;
    for (len, width) in widths(layout, ranges) {
        let end = at + len;
        while at < end {
            let part = at..end.min(at + MAX_PART_BYTES);
            let base = accepted.base.map(|base| &base[part.clone()]);
            encoder.push(&raw[part.clone()], base, width)?;
            at = part.end;
        }
    }
    let (encoded, forms) = assemble(encoder);
    Ok(saves_enough(raw.len(), encoded.len()).then(|| (encoded.into(), forms)))
}

/// Returns the table of the parts, the parts, and their forms.
fn assemble(encoder: PartEncoder) -> (Vec<u8>, Forms) {
    let table_len = 4 + encoder.entries.len() * ENTRY_BYTES;
    let mut encoded = Vec::with_capacity(table_len + encoder.stored.len());
    let mut forms = Forms::default();
    encoded.extend(to_word(encoder.entries.len()));
    for entry in encoder.entries {
        entry.write(&mut encoded);
        forms.add(entry.form);
    }
    encoded.extend(encoder.stored);
    (encoded, forms)
}

/// Decodes bytes into `target`, which has their length. Returns their forms.
///
/// `base` is what the receiver has at the same ranges. After an error, the bytes of `target` are unspecified.
///
/// # Errors
///
/// `Corrupt` if the encoding is invalid, or if the base is another one.
pub(crate) fn decode(encoded: &[u8], base: Option<&[u8]>, target: &mut [u8]) -> Result<Forms> {
    let invalid = || Error::new(ErrorKind::Corrupt, "encoded bytes are invalid");
    let corrupt = |error: tssd_format::Error| Error::new(ErrorKind::Corrupt, error);
    let (count, rest) = encoded.split_first_chunk().ok_or_else(invalid)?;
    let count = to_usize(u64::from(u32::from_le_bytes(*count)));
    let table_len = count.checked_mul(ENTRY_BYTES).ok_or_else(invalid)?;
    let (table, mut stored) = rest.split_at_checked(table_len).ok_or_else(invalid)?;
    let mut decoder = ChunkDecoder::new().map_err(corrupt)?;
    let (mut at, mut forms) = (0_usize, Forms::default());
    for entry in table.as_chunks::<ENTRY_BYTES>().0 {
        let entry = Entry::parse(entry).ok_or_else(invalid)?;
        let (bytes, rest) = stored.split_at_checked(entry.stored_len).ok_or_else(invalid)?;
        let raw = at..at.checked_add(entry.raw_len).ok_or_else(invalid)?;
        let part = target.get_mut(raw.clone()).ok_or_else(invalid)?;
        let base = base.and_then(|base| base.get(raw.clone()));
        if entry.form == Form::Difference && base.is_none() {
            return Err(Error::new(ErrorKind::Corrupt, "a difference has no base"));
        }
        decoder.decode(entry.codec(), bytes, base, part).map_err(corrupt)?;
        forms.add(entry.form);
        (stored, at) = (rest, raw.end);
    }
    if at == target.len() && stored.is_empty() { Ok(forms) } else { Err(invalid()) }
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::delta::layout::tests::layout;

    fn noise(at: u32) -> u8 {
        at.wrapping_mul(0x9e37_79b9).to_le_bytes()[3]
    }

    fn ranges() -> impl Strategy<Value = Vec<Range>> {
        let loops = prop::collection::vec((1..4_u64, 1..300_u64), 0..3);
        let range = (0..4000_u64, 1..500_u64, loops);
        prop::collection::vec(range.prop_map(|(base, len, loops)| Range(base, len, loops)), 1..4)
    }

    /// Returns the bytes of ranges of a file, concatenated.
    pub(crate) fn bytes_of(file: &[u8], ranges: &[Range]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for range in ranges {
            let len = to_usize(range.1);
            range.for_each_run(|at| bytes.extend_from_slice(&file[to_usize(at)..][..len]));
        }
        bytes
    }

    proptest! {
        #[test]
        fn encoded_bytes_decode(
            ranges in ranges(),
            changes in prop::collection::vec((0..10_000_usize, any::<u8>()), 0..40),
            has_base in any::<bool>(),
            planes in any::<bool>(),
        ) {
            let file: Vec<u8> = (0..10_000).map(|at| noise(at) / 8).collect();
            let mut base = file.clone();
            for (at, byte) in changes {
                base[at] = byte;
            }
            let (raw, base) = (bytes_of(&file, &ranges), bytes_of(&base, &ranges));
            let total: usize = widths(&layout(), &ranges).iter().map(|(len, _)| len).sum();
            prop_assert_eq!(total, raw.len());
            let base = has_base.then_some(&base[..]);
            let encoded = encode(&layout(), &ranges, &raw, Accepted { base, planes }).unwrap();
            if let Some((encoded, forms)) = encoded {
                let mut target = vec![0; raw.len()];
                prop_assert_eq!(decode(&encoded, base, &mut target).unwrap(), forms);
                prop_assert_eq!(target, raw);
            }
        }

        /// Bytes from another process never panic.
        #[test]
        fn damaged_encodings_are_rejected(
            at in any::<prop::sample::Index>(),
            byte in any::<u8>(),
            cut in any::<prop::sample::Index>(),
        ) {
            let raw: Vec<u8> = (0..4000).map(noise).collect();
            let mut base = raw.clone();
            base[17] ^= 1;
            let ranges = [Range::contiguous(1200, 4000)];
            let accepted = Accepted { base: Some(&base), planes: false };
            let (encoded, _) = encode(&layout(), &ranges, &raw, accepted).unwrap().unwrap();
            let encoded = encoded.to_vec();
            let mut damaged = encoded.clone();
            let at = at.index(damaged.len());
            damaged[at] ^= byte;
            let mut target = vec![0; raw.len()];
            if decode(&damaged, Some(&base), &mut target).is_ok() {
                prop_assert_eq!(&target, &raw);
            }
            let cut = &encoded[..cut.index(encoded.len())];
            prop_assert!(decode(cut, Some(&base), &mut target).is_err());
        }
    }

    #[test]
    fn neighbours_of_one_width_are_joined() {
        let found = widths(&layout(), &[Range::contiguous(0, 9210)]);
        let expected = [
            (64, ElementWidth::One),
            (1128, ElementWidth::Two),
            (8, ElementWidth::One),
            (8000, ElementWidth::Four),
            (10, ElementWidth::One),
        ];
        assert_eq!(found, expected);
        let columns = Range(1204, 8, vec![(100, 40)]);
        assert_eq!(widths(&layout(), &[columns]), [(800, ElementWidth::Four)]);
        let shifted = Range(1205, 8, vec![(2, 40)]);
        assert_eq!(widths(&layout(), &[shifted]), [(16, ElementWidth::One)]);
    }

    #[test]
    fn few_changes_take_few_bytes() {
        let raw: Vec<u8> = (0..1000).map(noise).collect();
        let mut base = raw.clone();
        base[400] ^= 1;
        base[800] ^= 1;
        let ranges = [Range::contiguous(192, 1000)];
        let layout = layout();
        let accepted = Accepted { base: Some(&base), planes: true };
        let (encoded, forms) = encode(&layout, &ranges, &raw, accepted).unwrap().unwrap();
        assert!(encoded.len() < 100, "{}", encoded.len());
        assert_eq!(forms, Forms { differences: true, planes: false });
        let accepted = Accepted { base: None, planes: true };
        assert!(encode(&layout, &ranges, &raw, accepted).unwrap().is_none());
        let wrong = Accepted { base: Some(&base[..999]), planes: true };
        assert!(encode(&layout, &ranges, &raw, wrong).is_err());
    }

    /// A receiver with another base notices it.
    #[test]
    fn wrong_base_is_found() {
        let raw: Vec<u8> = (0..4000).map(noise).collect();
        let mut base = raw.clone();
        base[17] ^= 1;
        let ranges = [Range::contiguous(1200, 4000)];
        let accepted = Accepted { base: Some(&base), planes: false };
        let (encoded, _) = encode(&layout(), &ranges, &raw, accepted).unwrap().unwrap();
        let mut target = vec![0; raw.len()];
        base[3000] ^= 4;
        let error = decode(&encoded, Some(&base), &mut target).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt);
        let error = decode(&encoded, None, &mut target).unwrap_err();
        assert!(error.to_string().contains("no base"), "{error}");
    }
}
