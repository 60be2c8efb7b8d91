//! The indices of one tensor dimension that a device holds, and how a mesh dimension divides them.

use std::ops::Range;

use crate::error::{Error, ErrorKind, Result};

/// Maximum number of boxes of a rank, and of pieces of a dimension.
///
/// A split factor normally is a number of devices. The limit bounds the memory that other values would take.
pub(crate) const MAX_PIECES: u64 = 1 << 16;

/// The indices of one tensor dimension that a device holds.
///
/// The runs are increasing, not empty and not adjacent. The position of an index is its number among the held indices.
pub(crate) struct HeldIndices {
    size: u64,
    runs: Vec<HeldRun>,
}

/// A run of consecutive held indices.
#[derive(Clone, Copy)]
pub(crate) struct HeldRun {
    pub(crate) start: u64,
    pub(crate) len: u64,
    /// Position of the first index.
    pub(crate) position: u64,
}

impl HeldIndices {
    /// Creates the indices of a whole dimension.
    pub(crate) fn all(size: u64) -> Self {
        let mut all = Self::none(size);
        if size > 0 {
            all.push(0..size);
        }
        all
    }

    /// Creates an empty set of indices of a dimension of `size`.
    pub(crate) fn none(size: u64) -> Self {
        Self { size, runs: Vec::new() }
    }

    /// Appends a run, which is not empty and lies after the other runs.
    pub(crate) fn push(&mut self, run: Range<u64>) {
        let position = self.len();
        self.runs.push(HeldRun { start: run.start, len: run.end - run.start, position });
    }

    /// Returns the size of the dimension.
    pub(crate) fn size(&self) -> u64 {
        self.size
    }

    /// Returns the number of held indices.
    pub(crate) fn len(&self) -> u64 {
        self.runs.last().map_or(0, |run| run.position + run.len)
    }

    pub(crate) fn runs(&self) -> &[HeldRun] {
        &self.runs
    }

    /// Keeps the indices that coordinate `part` of a mesh dimension of `parts` devices holds.
    pub(crate) fn split(&mut self, split_factor: u64, parts: u64, part: u64) -> Result<()> {
        let Some(division) = Division::new(self.len(), split_factor, parts)? else {
            if part > 0 {
                self.runs.clear();
            }
            return Ok(());
        };
        let mut kept = Self::none(self.size);
        for piece in 0..division.piece_count {
            self.slice(division.chunk(piece, part)).for_each(|(_, run)| kept.push(run));
        }
        *self = kept;
        Ok(())
    }

    /// Returns the runs of the indices at `positions`, each with the index of the run that contains it.
    pub(crate) fn slice(
        &self,
        positions: Range<u64>,
    ) -> impl Iterator<Item = (usize, Range<u64>)> + '_ {
        let first = self.runs.partition_point(|run| run.position + run.len <= positions.start);
        let runs = self.runs.iter().enumerate().skip(first);
        runs.take_while(move |(_, run)| run.position < positions.end).filter_map(
            move |(index, run)| {
                let from = positions.start.max(run.position) - run.position;
                let to = (positions.end - run.position).min(run.len);
                (from < to).then(|| (index, run.start + from..run.start + to))
            },
        )
    }
}

/// How one mesh dimension divides the held indices of a tensor dimension, by their positions.
///
/// There are pieces of equal length, the last of which may be shorter. Each piece has one chunk per coordinate. Pieces
/// and chunks have the sizes that `torch.chunk` gives them. With one piece this is `Shard`.
pub(crate) struct Division {
    len: u64,
    /// Number of pieces, at least 1.
    pub(crate) piece_count: u64,
    /// Length of each piece but the last.
    piece_len: u64,
    chunk_len: u64,
    last_chunk_len: u64,
}

impl Division {
    /// Divides `len` positions by a mesh dimension of `parts` devices. `split_factor` and `parts` are at least 1.
    ///
    /// Returns `None` if coordinate 0 keeps all positions, and the other coordinates keep none.
    ///
    /// # Errors
    ///
    /// `NotABox` if there are more than [`MAX_PIECES`] pieces.
    pub(crate) fn new(len: u64, split_factor: u64, parts: u64) -> Result<Option<Self>> {
        let piece_len = len.div_ceil(split_factor);
        let chunk_len = piece_len.div_ceil(parts);
        // The first chunk of each piece is the whole piece: there is one part, or each piece has one index.
        // Otherwise no chunk is adjacent to the chunk of the next piece.
        if chunk_len == piece_len {
            return Ok(None);
        }
        let piece_count = len.div_ceil(piece_len);
        if piece_count > MAX_PIECES {
            return Err(not_a_box(format!("a dimension of {len} in {piece_count} pieces")));
        }
        let last_chunk_len = (len - (piece_count - 1) * piece_len).div_ceil(parts);
        Ok(Some(Self { len, piece_count, piece_len, chunk_len, last_chunk_len }))
    }

    /// Returns the number of positions that coordinate `part` keeps.
    pub(crate) fn kept_len(&self, part: u64) -> u64 {
        let last = self.piece_count - 1;
        let [first, last_chunk] = [0, last].map(|piece| self.chunk(piece, part));
        (first.end - first.start) * last + (last_chunk.end - last_chunk.start)
    }

    /// Returns the positions that coordinate `part` keeps of a piece.
    pub(crate) fn chunk(&self, piece: u64, part: u64) -> Range<u64> {
        let Range { start, end } = self.piece(piece);
        let chunk_len = self.chunk_len(piece);
        let from = chunk_len.saturating_mul(part).min(end - start);
        let to = from.saturating_add(chunk_len).min(end - start);
        start + from..start + to
    }

    /// Returns the length of the chunks of a piece, except those that end early because the piece ends.
    pub(crate) fn chunk_len(&self, piece: u64) -> u64 {
        if piece + 1 == self.piece_count { self.last_chunk_len } else { self.chunk_len }
    }

    /// Returns the positions of a piece.
    pub(crate) fn piece(&self, piece: u64) -> Range<u64> {
        let start = piece * self.piece_len;
        start..start + self.piece_len.min(self.len - start)
    }

    /// Returns the piece that contains `position`.
    pub(crate) fn piece_at(&self, position: u64) -> u64 {
        position / self.piece_len
    }
}

/// Checks the number of boxes that these numbers of runs, one per tensor dimension, span.
///
/// # Errors
///
/// `NotABox` if there are more than [`MAX_PIECES`].
pub(crate) fn check_box_count(run_counts: impl Iterator<Item = usize>) -> Result<()> {
    let mut run_counts = run_counts.map(|count| u64::try_from(count).unwrap_or(u64::MAX));
    let count = run_counts.try_fold(1_u64, |product, count| {
        product.checked_mul(count).filter(|&product| product <= MAX_PIECES)
    });
    count.map(drop).ok_or_else(|| not_a_box(format!("more than {MAX_PIECES} boxes")))
}

pub(crate) fn not_a_box(note: String) -> Error {
    Error::new(ErrorKind::NotABox).with_detail(note)
}
