//! Encodings of the bytes of a read: as they are, in byte planes, or as the difference from a base (pure).
//! Spec: `spec/protocol.md`, rule P-086.

use std::ops;

use bytes::Bytes;
use tssd_format::{
    Archive, ChunkCodec, ChunkDecoder, DeltaEncoder, DeltaOptions, ElementWidth, PlanesEncoder,
    StorageCodec,
};

use crate::convert::{to_u64, to_usize};
use crate::error::{Error, ErrorKind, Result};
use crate::net::wire::{Encodings, Range};

/// Maximum number of raw bytes of a part.
pub(crate) const MAX_PART_BYTES: usize = 8 << 20;

/// Maximum number of raw bytes of a part in byte planes.
const MAX_PLANES_BYTES: usize = 1 << 20;

/// Maximum number of runs of a range whose elements have several widths. Else they count as bytes.
const MAX_RUNS: u64 = 4096;

/// Length in bytes of the entry of a part in the table.
const ENTRY_BYTES: usize = 12;

/// Bytes are encoded if that saves at least 1/`SAVING_DIVISOR` of them.
const SAVING_DIVISOR: usize = 16;

/// A difference is not tried against byte planes if it has at most 1/`SPARSE_DIVISOR` of the bytes.
const SPARSE_DIVISOR: usize = 2;

/// Where the elements of an archive are, and their widths. Everything else counts as bytes.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ElementLayout(Vec<ElementRun>);

/// Consecutive elements of one width.
#[derive(Clone, Debug, PartialEq, Eq)]
struct ElementRun {
    range: ops::Range<u64>,
    width: ElementWidth,
}

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

/// How a part is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    Raw,
    Planes,
    Difference,
}

/// Entry of a part in the table.
struct Entry {
    raw_len: usize,
    stored_len: usize,
    form: Form,
    width: ElementWidth,
}

impl Entry {
    fn write(&self, table: &mut Vec<u8>) {
        let form = match self.form {
            Form::Raw => 0,
            Form::Planes => 1,
            Form::Difference => 2,
        };
        table.extend(to_word(self.raw_len));
        table.extend(to_word(self.stored_len));
        table.extend([form, self.width.to_u8(), 0, 0]);
    }

    fn parse(entry: &[u8; ENTRY_BYTES]) -> Option<Self> {
        let word = |at: usize| {
            let bytes = [entry[at], entry[at + 1], entry[at + 2], entry[at + 3]];
            to_usize(u64::from(u32::from_le_bytes(bytes)))
        };
        let form = match entry[8] {
            0 => Form::Raw,
            1 => Form::Planes,
            2 => Form::Difference,
            _ => return None,
        };
        let max = if form == Form::Planes { MAX_PLANES_BYTES } else { MAX_PART_BYTES };
        let (raw_len, stored_len) = (word(0), word(4));
        // A raw part has its own length. No other part is empty.
        let has_bytes = if form == Form::Raw { stored_len == raw_len } else { stored_len > 0 };
        let is_valid = (1..=max).contains(&raw_len) && has_bytes && entry[10..] == [0; 2];
        let width = ElementWidth::from_bytes(entry[9]).filter(|_| is_valid)?;
        Some(Self { raw_len, stored_len, form, width })
    }

    fn codec(&self) -> StorageCodec {
        let codec = match self.form {
            Form::Raw => ChunkCodec::Raw,
            Form::Planes => ChunkCodec::Planes,
            Form::Difference => ChunkCodec::Delta,
        };
        StorageCodec { codec, width: self.width.to_u8() }
    }
}

fn to_word(len: usize) -> [u8; 4] {
    u32::try_from(len).expect("a reply is shorter").to_le_bytes()
}

impl ElementLayout {
    /// Returns the layout of an archive.
    pub(crate) fn of(archive: &Archive) -> Self {
        let mut runs = Vec::new();
        for (number, width) in (0..).zip(archive.element_widths()) {
            let storage = archive.storage(number);
            if storage.compressed_layout.is_none() && storage.len > 0 {
                let range = storage.offset..storage.offset + storage.len;
                runs.push(ElementRun { range, width });
            }
        }
        runs.sort_unstable_by_key(|run| run.range.start);
        Self::new(runs)
    }

    /// Joins neighbours of one width. Padding between them counts as elements.
    fn new(runs: Vec<ElementRun>) -> Self {
        let mut joined: Vec<ElementRun> = Vec::new();
        for run in runs {
            match joined.last_mut() {
                Some(last) if last.width == run.width && is_aligned(last, run.range.start) => {
                    last.range.end = run.range.end;
                }
                _ => joined.push(run),
            }
        }
        Self(joined)
    }

    /// Returns the widths of the bytes of ranges, in their order: lengths in bytes, and the width of their elements.
    pub(crate) fn widths(&self, ranges: &[Range]) -> Vec<(usize, ElementWidth)> {
        let mut widths = Vec::new();
        for range in ranges {
            if let Some(width) = self.width_of(range) {
                push_width(&mut widths, range.total_bytes(u64::MAX).unwrap_or(0), width);
            } else if range.total_bytes(u64::MAX).unwrap_or(0) / range.1 > MAX_RUNS {
                push_width(
                    &mut widths,
                    range.total_bytes(u64::MAX).unwrap_or(0),
                    ElementWidth::One,
                );
            } else {
                range.for_each_run(|at| self.push_run(&mut widths, at..at + range.1));
            }
        }
        widths
    }

    /// Returns the width of all elements of a range, if it has whole elements of one width only.
    fn width_of(&self, range: &Range) -> Option<ElementWidth> {
        let Range(start, len, loops) = range;
        let run = self.run_at(*start)?;
        let is_whole = |bytes: &u64| bytes.is_multiple_of(to_u64(run.width.bytes()));
        let are_whole = is_aligned(run, *start)
            && [len].into_iter().chain(loops.iter().map(|(_, stride)| stride)).all(is_whole);
        (are_whole && start + range.span() <= run.range.end).then_some(run.width)
    }

    fn run_at(&self, offset: u64) -> Option<&ElementRun> {
        let next = self.0.partition_point(|run| run.range.end <= offset);
        self.0.get(next).filter(|run| run.range.start <= offset)
    }

    fn push_run(&self, widths: &mut Vec<(usize, ElementWidth)>, bytes: ops::Range<u64>) {
        let mut at = bytes.start;
        while at < bytes.end {
            let next = self.0.partition_point(|run| run.range.end <= at);
            let Some(run) = self.0.get(next).filter(|run| run.range.start < bytes.end) else {
                push_width(widths, bytes.end - at, ElementWidth::One);
                return;
            };
            let start = run.range.start.max(at);
            if start > at {
                push_width(widths, start - at, ElementWidth::One);
            }
            let end = run.range.end.min(bytes.end);
            let is_whole =
                is_aligned(run, start) && (end - start).is_multiple_of(to_u64(run.width.bytes()));
            push_width(widths, end - start, if is_whole { run.width } else { ElementWidth::One });
            at = end;
        }
    }
}

/// Returns whether an element of a run, or of its continuation, begins at an offset.
fn is_aligned(run: &ElementRun, offset: u64) -> bool {
    (offset - run.range.start).is_multiple_of(to_u64(run.width.bytes()))
}

fn push_width(widths: &mut Vec<(usize, ElementWidth)>, bytes: u64, width: ElementWidth) {
    match widths.last_mut() {
        Some((last, known)) if *known == width => *last += to_usize(bytes),
        _ => widths.push((to_usize(bytes), width)),
    }
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
    let mut encoder = Encoder::new(accepted.planes)?;
    let mut at = 0;
    for (len, width) in layout.widths(ranges) {
        let end = at + len;
        while at < end {
            let part = at..end.min(at + MAX_PART_BYTES);
            let base = accepted.base.map(|base| &base[part.clone()]);
            encoder.push(&raw[part.clone()], base, width)?;
            at = part.end;
        }
    }
    let (encoded, forms) = encoder.finish();
    Ok(saves_enough(raw.len(), encoded.len()).then(|| (encoded.into(), forms)))
}

struct Encoder {
    delta: DeltaEncoder,
    planes: Option<PlanesEncoder>,
    entries: Vec<Entry>,
    stored: Vec<u8>,
}

impl Encoder {
    fn new(has_planes: bool) -> Result<Self> {
        let failed = |error| Error::from_format("encoder", error);
        let planes = if has_planes { Some(PlanesEncoder::new().map_err(failed)?) } else { None };
        let delta = DeltaEncoder::new().map_err(failed)?;
        Ok(Self { delta, planes, entries: Vec::new(), stored: Vec::new() })
    }

    /// Adds a part of at most [`MAX_PART_BYTES`].
    fn push(&mut self, raw: &[u8], base: Option<&[u8]>, width: ElementWidth) -> Result<()> {
        let failed = |error| Error::from_format("encoder", error);
        let start = self.stored.len();
        if let Some(base) = base {
            let options = DeltaOptions::default();
            let versions = [base, raw];
            self.delta.encode(versions, width, &options, &mut self.stored).map_err(failed)?;
            let stored_len = self.stored.len() - start;
            let is_sparse = stored_len <= raw.len() / SPARSE_DIVISOR;
            if is_sparse || (self.planes.is_none() && saves_enough(raw.len(), stored_len)) {
                self.add(raw.len(), stored_len, Form::Difference, width);
                return Ok(());
            }
            self.stored.truncate(start);
        }
        for chunk in raw.chunks(MAX_PLANES_BYTES) {
            let planes = self.planes.as_mut().map(|planes| planes.encode(chunk, width.to_u8()));
            if let Some(planes) = planes.transpose().map_err(failed)?.flatten() {
                self.stored.extend_from_slice(&planes);
                self.add(chunk.len(), planes.len(), Form::Planes, width);
            } else {
                self.stored.extend_from_slice(chunk);
                self.add(chunk.len(), chunk.len(), Form::Raw, width);
            }
        }
        Ok(())
    }

    fn add(&mut self, raw_len: usize, stored_len: usize, form: Form, width: ElementWidth) {
        self.entries.push(Entry { raw_len, stored_len, form, width });
    }

    fn finish(self) -> (Vec<u8>, Forms) {
        let table_len = 4 + self.entries.len() * ENTRY_BYTES;
        let mut encoded = Vec::with_capacity(table_len + self.stored.len());
        let mut forms = Forms::default();
        encoded.extend(to_word(self.entries.len()));
        for entry in self.entries {
            entry.write(&mut encoded);
            forms.add(entry.form);
        }
        encoded.extend(self.stored);
        (encoded, forms)
    }
}

fn saves_enough(raw_len: usize, stored_len: usize) -> bool {
    stored_len <= raw_len - raw_len / SAVING_DIVISOR
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

    fn noise(at: u32) -> u8 {
        at.wrapping_mul(0x9e37_79b9).to_le_bytes()[3]
    }

    /// A layout with elements of all widths.
    pub(crate) fn layout() -> ElementLayout {
        let run = |start, end, width| ElementRun { range: start..end, width };
        ElementLayout::new(vec![
            run(64, 164, ElementWidth::Two),
            run(192, 1192, ElementWidth::Two),
            run(1200, 9200, ElementWidth::Four),
            run(9203, 9205, ElementWidth::One),
        ])
    }

    fn ranges() -> impl Strategy<Value = Vec<Range>> {
        let loops = prop::collection::vec((1..4_u64, 1..300_u64), 0..3);
        let range = (0..4000_u64, 1..500_u64, loops);
        prop::collection::vec(range.prop_map(|(base, len, loops)| Range(base, len, loops)), 1..4)
    }

    fn bytes_of(file: &[u8], ranges: &[Range]) -> Vec<u8> {
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
            let total: usize = layout().widths(&ranges).iter().map(|(len, _)| len).sum();
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
        let widths = layout().widths(&[Range::contiguous(0, 9210)]);
        let expected = [
            (64, ElementWidth::One),
            (1128, ElementWidth::Two),
            (8, ElementWidth::One),
            (8000, ElementWidth::Four),
            (10, ElementWidth::One),
        ];
        assert_eq!(widths, expected);
        let columns = Range(1204, 8, vec![(100, 40)]);
        assert_eq!(layout().widths(&[columns]), [(800, ElementWidth::Four)]);
        let shifted = Range(1205, 8, vec![(2, 40)]);
        assert_eq!(layout().widths(&[shifted]), [(16, ElementWidth::One)]);
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
