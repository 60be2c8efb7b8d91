//! Conversions between integer types that cannot fail, because the values count what is in memory.

/// Converts a number of bytes, or an offset, in memory.
pub(crate) fn to_usize(number: u64) -> usize {
    usize::try_from(number).expect("what is in memory fits usize")
}

pub(crate) fn to_u64(number: usize) -> u64 {
    u64::try_from(number).expect("usize has at most 64 bits")
}
