//! The pieces of an archive: parts of its chunks, which daemons that fetch it exchange.

use std::ops::Range;
use std::sync::Arc;

use rangemap::RangeSet;
use tssd_format::{Archive, checksum};

use crate::convert::to_usize;
use crate::fanout::{Part, PieceNumber, Wants};
use crate::net::wire::{self, MAX_READ_BYTES};

/// Smallest piece in bytes. It is at least a chunk.
pub(super) const MIN_PIECE_BYTES: u64 = 1 << 20;

/// Number of pieces that an archive has, unless they would be too small or too large.
const TARGET_PIECES: u64 = 512;

/// Bytes of a part in an announcement.
const PART_BYTES: usize = 4;

/// The chunks of an archive, in pieces.
pub(super) struct Pieces {
    /// Where each piece begins, and the end of the last one. Pieces begin and end where chunks do.
    bounds: Vec<u64>,
    /// The stored chunks, in the order of the file.
    chunks: Vec<StoredChunk>,
}

/// A chunk as it is in the archive.
struct StoredChunk {
    range: Range<u64>,
    crc32: u32,
    /// Whether it is not compressed. Then parts of it have a meaning, and a holder verifies them.
    is_raw: bool,
}

impl Pieces {
    /// Returns the pieces of an archive of `len` bytes. `None` if a piece does not fit into a request.
    pub(super) fn of(archive: &Archive, len: u64) -> Option<Self> {
        let mut chunks = Vec::new();
        for number in 0..archive.storage_count() {
            let storage = archive.storage(number);
            let is_raw = storage.compressed_layout.is_none();
            for (chunk, crc32) in (0_u64..).zip(storage.crcs.iter().copied()) {
                chunks.push(StoredChunk { range: storage.stored_chunk(chunk), crc32, is_raw });
            }
        }
        chunks.retain(|chunk| !chunk.range.is_empty());
        chunks.sort_unstable_by_key(|chunk| chunk.range.start);
        let piece_bytes = (len / TARGET_PIECES).clamp(MIN_PIECE_BYTES, MAX_READ_BYTES / 2);
        let mut bounds: Vec<u64> = Vec::new();
        for StoredChunk { range, .. } in &chunks {
            if bounds.last().is_none_or(|start| range.start - start >= piece_bytes) {
                bounds.push(range.start);
            }
        }
        bounds.extend(chunks.last().map(|chunk| chunk.range.end));
        let fits = bounds.windows(2).all(|bounds| bounds[1] - bounds[0] <= MAX_READ_BYTES);
        fits.then_some(Self { bounds, chunks })
    }

    /// Returns the number of pieces.
    pub(super) fn count(&self) -> PieceNumber {
        let count = self.bounds.len().saturating_sub(1);
        PieceNumber::try_from(count).expect("pieces have at least a megabyte")
    }

    /// Returns the bytes of a piece.
    pub(super) fn range(&self, number: PieceNumber) -> Range<u64> {
        let number = to_usize(u64::from(number));
        self.bounds[number]..self.bounds[number + 1]
    }

    /// Returns the piece that contains a range.
    pub(super) fn containing(&self, range: &Range<u64>) -> Option<PieceNumber> {
        let next = self.bounds.partition_point(|start| *start <= range.start);
        let number = PieceNumber::try_from(next.checked_sub(1)?).ok()?;
        (number < self.count() && range.end <= self.range(number).end).then_some(number)
    }

    /// Returns the bytes of a range that are in no chunk, or in a compressed one.
    pub(super) fn outside_raw_chunks(&self, range: &Range<u64>) -> Vec<Range<u64>> {
        let (mut outside, mut at) = (Vec::new(), range.start);
        let first = self.chunks.partition_point(|chunk| chunk.range.end <= range.start);
        for chunk in self.chunks[first..].iter().filter(|chunk| chunk.is_raw) {
            let start = chunk.range.start.min(range.end);
            outside.extend((at < start).then_some(at..start));
            at = at.max(chunk.range.end);
            if at >= range.end {
                break;
            }
        }
        outside.extend((at < range.end).then_some(at..range.end));
        outside
    }

    /// Returns whether all bytes of ranges are in chunks that are not compressed.
    pub(super) fn are_in_raw_chunks(&self, ranges: &[wire::Range]) -> bool {
        let mut are_in_chunks = true;
        for range in ranges {
            range.for_each_run(|at| {
                are_in_chunks &= self.outside_raw_chunks(&(at..at + range.1)).is_empty();
            });
        }
        are_in_chunks
    }

    /// Returns whether all chunks of a piece have their checksums, and the bytes between them are zero.
    pub(super) fn verify(&self, number: PieceNumber, data: &[u8]) -> bool {
        let piece = self.range(number);
        let first = self.chunks.partition_point(|chunk| chunk.range.start < piece.start);
        let mut end = piece.start;
        for StoredChunk { range: chunk, crc32, .. } in &self.chunks[first..] {
            if chunk.start >= piece.end {
                break;
            }
            let at = |offset: u64| to_usize(offset - piece.start);
            let Some(bytes) = data.get(at(chunk.start)..at(chunk.end)) else { return false };
            let padding = &data[at(end.min(chunk.start))..at(chunk.start)];
            if checksum(bytes) != *crc32 || padding.iter().any(|byte| *byte != 0) {
                return false;
            }
            end = end.max(chunk.end);
        }
        end == piece.end
    }

    /// Returns which part of a piece a set of bytes has.
    pub(super) fn part(&self, number: PieceNumber, bytes: &RangeSet<u64>) -> Part {
        let piece = self.range(number);
        let mut runs = clipped(bytes, &piece);
        let Some(first) = runs.next() else { return Part::NOTHING };
        if first == piece {
            return Part::WHOLE;
        }
        let mut hasher = crc32fast::Hasher::new();
        for run in [first].into_iter().chain(runs) {
            hasher.update(&run.start.to_le_bytes());
            hasher.update(&run.end.to_le_bytes());
        }
        Part::of_ranges(hasher.finalize())
    }

    /// Returns which parts of the pieces a set of bytes has.
    pub(super) fn wants(&self, bytes: &RangeSet<u64>) -> Wants {
        let part = |number| self.part(number, bytes);
        let parts: Arc<[Part]> = (0..self.count()).map(part).collect();
        if parts.iter().all(|part| *part == Part::WHOLE) {
            Wants::Archive
        } else {
            Wants::Parts(parts)
        }
    }

    /// Returns the tables of an announcement. Empty if they are not those of this archive.
    pub(super) fn decode_tables(&self, tables: u32, data: &[u8]) -> Vec<Wants> {
        let table_bytes = to_usize(u64::from(self.count())) * PART_BYTES;
        if table_bytes == 0 || data.len() != to_usize(u64::from(tables)) * table_bytes {
            return Vec::new();
        }
        let part = |bytes: &[u8; PART_BYTES]| Part(u32::from_le_bytes(*bytes));
        let table = |bytes: &[u8]| Wants::Parts(bytes.as_chunks().0.iter().map(part).collect());
        data.chunks_exact(table_bytes).map(table).collect()
    }
}

/// Returns wants as they are announced: a table of the parts, or nothing for the whole archive.
pub(super) fn encode_wants(wants: &Wants) -> Arc<[u8]> {
    match wants {
        Wants::Archive => Arc::new([]),
        Wants::Parts(parts) => parts.iter().flat_map(|part| part.0.to_le_bytes()).collect(),
    }
}

/// Returns the runs of a set within a range.
pub(super) fn clipped<'a>(
    set: &'a RangeSet<u64>,
    range: &'a Range<u64>,
) -> impl Iterator<Item = Range<u64>> + 'a {
    set.overlapping(range).map(|run| run.start.max(range.start)..run.end.min(range.end))
}

/// Returns runs as ranges of a request. Runs of one length at a regular stride are one range.
pub(super) fn to_ranges(runs: impl Iterator<Item = Range<u64>>) -> Vec<wire::Range> {
    let mut ranges: Vec<wire::Range> = Vec::new();
    for run in runs {
        let len = run.end - run.start;
        if let Some(wire::Range(start, run_len, loops)) = ranges.last_mut()
            && *run_len == len
        {
            match loops.last_mut() {
                None => {
                    loops.push((2, run.start - *start));
                    continue;
                }
                Some((count, stride)) if *start + *count * *stride == run.start => {
                    *count += 1;
                    continue;
                }
                Some(_) => {}
            }
        }
        ranges.push(wire::Range::contiguous(run.start, len));
    }
    ranges
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn pieces() -> Pieces {
        Pieces { bounds: vec![100, 200, 320, 400], chunks: Vec::new() }
    }

    proptest! {
        #[test]
        fn ranges_have_exactly_the_runs(gaps in prop::collection::vec((1..4_u64, 1..4_u64), 0..40)) {
            let mut end = 0;
            let run = |(gap, len): &(u64, u64)| {
                let start = end + gap;
                end = start + len;
                start..end
            };
            let runs: Vec<Range<u64>> = gaps.iter().map(run).collect();
            let ranges = to_ranges(runs.iter().cloned());
            let mut found = Vec::new();
            for range in &ranges {
                prop_assert!(range.total_bytes(end).is_some());
                range.for_each_run(|at| found.push(at..at + range.1));
            }
            prop_assert_eq!(found, runs);
        }

        #[test]
        fn wants_survive_an_announcement(parts in prop::collection::vec(any::<u32>(), 3..4)) {
            let wants = Wants::Parts(parts.into_iter().map(Part).collect());
            let data = encode_wants(&wants);
            prop_assert_eq!(pieces().decode_tables(1, &data), vec![wants]);
            prop_assert_eq!(pieces().decode_tables(2, &data), vec![]);
            prop_assert_eq!(pieces().decode_tables(1, &data[1..]), vec![]);
        }
    }

    #[test]
    fn parts_are_verified_in_raw_chunks_only() {
        let chunk = |range, is_raw| StoredChunk { range, crc32: 0, is_raw };
        let chunks = vec![
            chunk(100..140, true),
            chunk(140..200, true),
            chunk(210..250, false),
            chunk(250..300, true),
        ];
        let pieces = Pieces { bounds: vec![100, 300], chunks };
        assert_eq!(pieces.outside_raw_chunks(&(0..320)), [0..100, 200..250, 300..320]);
        let from_middle = pieces.outside_raw_chunks(&(195..255));
        assert_eq!((from_middle.len(), &from_middle[0]), (1, &(200..250)));
        let are_in_chunks =
            |start, len| pieces.are_in_raw_chunks(&[wire::Range::contiguous(start, len)]);
        assert!(are_in_chunks(100, 100) && are_in_chunks(139, 2) && are_in_chunks(299, 1));
        for (start, len) in [(99, 2), (199, 2), (205, 1), (190, 30), (220, 4), (300, 1), (0, 320)] {
            assert!(!are_in_chunks(start, len), "{start} {len}");
        }
        assert!(!pieces.are_in_raw_chunks(&[wire::Range(120, 4, vec![(3, 40)])]));
        assert_eq!(pieces.containing(&(200..210)), Some(0));
        assert_eq!(pieces.containing(&(90..110)), None);
        assert_eq!(pieces.containing(&(300..310)), None);
    }

    #[test]
    fn regular_runs_are_one_range() {
        let runs = (0..100).map(|row| 7 + row * 64..7 + row * 64 + 16);
        assert_eq!(to_ranges(runs), [wire::Range(7, 16, vec![(100, 64)])]);
    }

    #[test]
    fn parts_are_equal_if_and_only_if_the_bytes_are() {
        let wants = |runs: &[(u64, u64)]| {
            pieces().wants(&runs.iter().map(|(start, end)| *start..*end).collect())
        };
        let parts = |runs: &[(u64, u64)]| {
            let wants = wants(runs);
            (0..3).map(|piece| wants.part(piece)).collect::<Vec<_>>()
        };
        let whole = parts(&[(0, 500)]);
        assert_eq!(whole, [Part::WHOLE; 3]);
        assert_eq!(wants(&[(100, 400)]), Wants::Archive);
        let columns = parts(&[(150, 160), (170, 180), (200, 320)]);
        assert_eq!(columns[1..], [Part::WHOLE, Part::NOTHING]);
        assert_eq!(columns, parts(&[(150, 155), (155, 160), (170, 180), (200, 320)]));
        assert_ne!(columns[0], parts(&[(150, 160), (170, 181)])[0]);
        assert_ne!(columns[0], parts(&[(150, 160)])[0]);
    }
}
