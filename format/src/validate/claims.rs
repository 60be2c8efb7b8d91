//! The claimed parts of tables. Spec: section 3.

use crate::convert::to_usize;
use crate::record::INLINE_MAX_BYTES;

/// The claimed prefix of a table, and the length of the table, in entries.
pub(super) struct Claims {
    pub(super) claimed: u64,
    pub(super) len: u64,
}

impl Claims {
    pub(super) fn new(len: usize) -> Self {
        Self { claimed: 0, len: u64::try_from(len).unwrap_or(u64::MAX) }
    }

    /// Claims a range in order: it extends the claimed part or lies in it; an empty range starts at 0.
    ///
    /// Returns false if the range breaks the discipline *claimed in order*.
    #[inline]
    pub(super) fn claim_in_order(&mut self, start: u64, len: u64) -> bool {
        if len == 0 {
            return start == 0;
        }
        let end = start.saturating_add(len);
        if start == self.claimed && end <= self.len {
            self.claimed = end;
        }
        end <= self.claimed
    }

    /// Claims a range once: it starts at the end of the claimed part.
    ///
    /// Returns false if the range breaks the discipline *claimed once*.
    #[inline]
    pub(super) fn claim_once(&mut self, start: u64, len: u64) -> bool {
        let extends = start == self.claimed && len <= self.len - self.claimed;
        if extends {
            self.claimed += len;
        }
        extends
    }

    pub(super) fn is_complete(&self) -> bool {
        self.claimed == self.len
    }
}

/// The claimed part of the heap, and the ranges that it consists of.
///
/// Ranges are adjacent, so each one ends at the start of the next. Their starts take one bit for each
/// byte of the heap, regardless of the number of ranges.
pub(super) struct HeapClaims {
    pub(super) claims: Claims,
    starts: BitSet,
    /// Starts of ranges that are known to be text; `None` if the whole heap is ASCII, the common case.
    texts: Option<BitSet>,
}

impl HeapClaims {
    pub(super) fn new(heap: &[u8]) -> Self {
        let len = heap.len();
        let texts = (!heap.is_ascii()).then(|| BitSet::new(len));
        Self { claims: Claims::new(len), starts: BitSet::new(len), texts }
    }

    /// Claims a range that is not empty and is either new or equal to an earlier one.
    ///
    /// Returns false for any other range.
    #[expect(clippy::inline_always, reason = "for each name; a hint alone is taken by chance")]
    #[inline(always)]
    pub(super) fn claim(&mut self, start: u64, len: u64) -> bool {
        if len == 0 {
            return false;
        }
        if start == self.claims.claimed {
            let is_new = self.claims.claim_in_order(start, len);
            if is_new {
                self.starts.set(to_usize(start));
            }
            return is_new;
        }
        self.is_shareable(start, len)
    }

    /// Returns true if the range equals an earlier one and may be shared.
    fn is_shareable(&self, start: u64, len: u64) -> bool {
        // Long ranges must not be shared: a short file could otherwise describe far more data (F-030).
        let end = start.saturating_add(len);
        if len > INLINE_MAX_BYTES || end > self.claims.claimed {
            return false;
        }
        let is_start = |at: u64| at == self.claims.claimed || self.starts.get(to_usize(at));
        is_start(start) && is_start(end) && !self.starts.any(to_usize(start) + 1..to_usize(end))
    }

    /// Returns true if the claimed range that starts at `start` is text.
    ///
    /// Calls `validate` until it has returned true once for the range. Does not call it if the heap is ASCII.
    #[expect(clippy::inline_always, reason = "for each name; a hint alone is taken by chance")]
    #[inline(always)]
    pub(super) fn is_text(&mut self, start: usize, validate: impl FnOnce() -> bool) -> bool {
        let Some(texts) = &mut self.texts else { return true };
        if !texts.get(start) && validate() {
            texts.set(start);
        }
        texts.get(start)
    }
}

/// A bit set of the numbers below a fixed length.
struct BitSet(Vec<u64>);

impl BitSet {
    fn new(len: usize) -> Self {
        Self(vec![0; len.div_ceil(64)])
    }

    fn get(&self, at: usize) -> bool {
        self.0[at / 64] >> (at % 64) & 1 == 1
    }

    fn set(&mut self, at: usize) {
        self.0[at / 64] |= 1 << (at % 64);
    }

    /// Returns true if the set contains a number of the range.
    fn any(&self, range: std::ops::Range<usize>) -> bool {
        let mask_below = |end: usize| (1_u64 << (end % 64)) - 1;
        let (first, last) = (range.start / 64, range.end / 64);
        (first..=last).any(|word| {
            let mut bits = self.0.get(word).copied().unwrap_or(0);
            if word == first {
                bits &= !mask_below(range.start);
            }
            if word == last {
                bits &= mask_below(range.end);
            }
            bits != 0
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Compares claims with a list of ranges, for all ranges of a heap that spans several bit words.
    #[test]
    fn heap_claims_accept_only_equal_or_disjoint_ranges() {
        const LEN: u64 = 200;
        let ends = [0, 1, 3, 62, 63, 64, 65, 128, 191, 192, LEN];
        for claimed in 1..ends.len() {
            let mut heap = HeapClaims::new(&[0; 200]);
            let ranges: Vec<_> =
                ends[..=claimed].windows(2).map(|pair| (pair[0], pair[1])).collect();
            for (start, end) in &ranges {
                assert!(heap.claim(*start, end - start));
            }
            for start in 0..ends[claimed] {
                for end in start..=LEN {
                    let is_claimed = ranges.contains(&(start, end));
                    assert_eq!(heap.claim(start, end - start), is_claimed, "{start}..{end}");
                }
            }
            assert!(!heap.claim(ends[claimed], LEN + 1), "outside the heap");
            assert_eq!(heap.claims.is_complete(), ends[claimed] == LEN);
        }
    }
}
