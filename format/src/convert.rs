//! Conversions between integer types that cannot fail on values that were validated, or that measure memory.

/// A number of bytes or elements that are in memory.
pub(crate) fn to_usize(number: u64) -> usize {
    usize::try_from(number).expect("what is in memory fits usize")
}

/// An index of a table.
pub(crate) fn index_to_usize(index: u32) -> usize {
    usize::try_from(index).expect("usize has at least 32 bits")
}

pub(crate) fn to_u64(number: usize) -> u64 {
    u64::try_from(number).expect("usize has at most 64 bits")
}
