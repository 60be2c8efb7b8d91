//! What parts of a table are claimed. Spec: section 3.

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
    pub(super) fn once(&mut self, start: u64, len: u64) -> bool {
        let extends = start == self.claimed && len <= self.len.saturating_sub(start);
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
pub(super) struct HeapClaims {
    pub(super) claims: Claims,
    /// In order of their starts, which is the order of their claims.
    ranges: Vec<HeapClaim>,
}

pub(super) struct HeapClaim {
    start: u64,
    len: u64,
    pub(super) is_text: bool,
}

impl HeapClaims {
    pub(super) fn new(len: usize) -> Self {
        Self { claims: Claims::new(len), ranges: Vec::new() }
    }

    /// The claim of this range, if it is new or the same as an earlier one.
    pub(super) fn claim(&mut self, start: u64, len: u64) -> Option<&mut HeapClaim> {
        if len > 0 && start == self.claims.claimed && self.claims.in_order(start, len) {
            self.ranges.push(HeapClaim { start, len, is_text: false });
            return self.ranges.last_mut();
        }
        // What is long is named once: else a short file could mean very much.
        if len > INLINE_MAX {
            return None;
        }
        let found = self.ranges.binary_search_by_key(&start, |claim| claim.start).ok()?;
        self.ranges.get_mut(found).filter(|claim| claim.len == len)
    }
}
