//! What parts of a table are claimed. Spec: section 3.

use super::narrow;
use crate::record::INLINE_MAX;

/// How much of a table is claimed (section 3).
pub(super) struct Claims {
    pub(super) claimed: u64,
    pub(super) len: u64,
}

impl Claims {
    pub(super) fn new(len: usize) -> Self {
        Self { claimed: 0, len: u64::try_from(len).unwrap_or(u64::MAX) }
    }

    /// *Claimed in order*: the range extends the claimed part, or lies in it; an empty one is at 0.
    #[inline]
    pub(super) fn in_order(&mut self, start: u64, len: u64) -> bool {
        if len == 0 {
            return start == 0;
        }
        let end = start.saturating_add(len);
        if start == self.claimed && end <= self.len {
            self.claimed = end;
        }
        end <= self.claimed
    }

    /// *Claimed once*: the range starts where the one before it ended.
    #[inline]
    pub(super) fn once(&mut self, start: u64, len: u64) -> bool {
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

/// The claimed part of the heap, and the ranges that it is made of.
///
/// Ranges lie side by side, so their starts say where each ends. One bit for each byte of the heap
/// makes this an eighth of the heap, however many ranges there are.
pub(super) struct HeapClaims {
    pub(super) claims: Claims,
    starts: Bits,
    /// Starts of ranges that are proven to be text; none if the whole heap is ASCII, as it mostly is.
    texts: Option<Bits>,
}

impl HeapClaims {
    pub(super) fn new(heap: &[u8]) -> Self {
        let len = heap.len();
        let texts = (!heap.is_ascii()).then(|| Bits::new(len));
        Self { claims: Claims::new(len), starts: Bits::new(len), texts }
    }

    /// Claims a range that is not empty: one that is new, or the same as an earlier one.
    #[expect(clippy::inline_always, reason = "for each name; a hint alone is taken by chance")]
    #[inline(always)]
    pub(super) fn claim(&mut self, start: u64, len: u64) -> bool {
        if len == 0 {
            return false;
        }
        if start == self.claims.claimed {
            let is_new = self.claims.in_order(start, len);
            if is_new {
                self.starts.set(narrow(start));
            }
            return is_new;
        }
        self.is_known(start, len)
    }

    /// Whether the range is the same as an earlier one.
    fn is_known(&self, start: u64, len: u64) -> bool {
        // What is long is named once: else a short file could mean very much.
        let end = start.saturating_add(len);
        if len > INLINE_MAX || end > self.claims.claimed {
            return false;
        }
        let is_start = |at: u64| at == self.claims.claimed || self.starts.get(narrow(at));
        is_start(start) && is_start(end) && !self.starts.any(narrow(start) + 1..narrow(end))
    }

    /// Whether the claimed range that begins here is text; asks once for each range.
    #[expect(clippy::inline_always, reason = "for each name; a hint alone is taken by chance")]
    #[inline(always)]
    pub(super) fn is_text(&mut self, start: usize, ask: impl FnOnce() -> bool) -> bool {
        let Some(texts) = &mut self.texts else { return true };
        if !texts.get(start) && ask() {
            texts.set(start);
        }
        texts.get(start)
    }
}

/// A set of small numbers.
struct Bits(Vec<u64>);

impl Bits {
    fn new(len: usize) -> Self {
        Self(vec![0; len.div_ceil(64)])
    }

    fn get(&self, at: usize) -> bool {
        self.0[at / 64] >> (at % 64) & 1 == 1
    }

    fn set(&mut self, at: usize) {
        self.0[at / 64] |= 1 << (at % 64);
    }

    /// True if one of these numbers is in the set.
    fn any(&self, range: std::ops::Range<usize>) -> bool {
        let below = |end: usize| (1_u64 << (end % 64)) - 1;
        let (first, last) = (range.start / 64, range.end / 64);
        (first..=last).any(|word| {
            let mut bits = self.0.get(word).copied().unwrap_or(0);
            if word == first {
                bits &= !below(range.start);
            }
            if word == last {
                bits &= below(range.end);
            }
            bits != 0
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Against a list of ranges, for all ranges of a heap that spans several words of bits.
    #[test]
    fn ranges_are_the_same_or_disjoint() {
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
                    let is_known = ranges.contains(&(start, end));
                    assert_eq!(heap.claim(start, end - start), is_known, "{start}..{end}");
                }
            }
            assert!(!heap.claim(ends[claimed], LEN + 1), "outside the heap");
            assert_eq!(heap.claims.is_complete(), ends[claimed] == LEN);
        }
    }
}
