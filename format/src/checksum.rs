//! CRC-32 of bytes that lie in memory, as fast as memory gives them.

use crc32fast::Hasher;

use crate::fetch::{Line, fetch, helps};

/// What is summed at a time: shorter steps take longer, because the sum of each is put together at its end.
const STEP: usize = (2 << 10) / size_of::<Line>();

/// So many steps ahead of the one that is summed lies the one that the core is told to fetch.
const AHEAD: usize = 4;

/// The CRC-32 of bytes, of the polynomial of zlib, PNG and Ethernet.
///
/// # Examples
///
/// ```
/// assert_eq!(tssd_format::checksum(b"123456789"), 0xCBF4_3926);
/// ```
pub fn checksum(bytes: &[u8]) -> u32 {
    let is_long = bytes.len() / size_of::<Line>() > AHEAD * STEP;
    if is_long && helps() { told(bytes) } else { crc32fast::hash(bytes) }
}

/// The same where the core is told what comes.
fn told(bytes: &[u8]) -> u32 {
    let (lines, tail) = bytes.as_chunks();
    let (steps, lines) = lines.as_chunks::<STEP>();
    let mut crc = Hasher::new();
    for (number, step) in steps.iter().enumerate() {
        if let Some(later) = steps.get(number + AHEAD) {
            later.iter().for_each(fetch_one);
        }
        crc.update(step.as_flattened());
    }
    crc.update(lines.as_flattened());
    crc.update(tail);
    crc.finalize()
}

/// Not inlined: a core that is told of many lines at once does nothing else until most of them have come. The
/// calls between give it something to do.
#[inline(never)]
fn fetch_one(line: &Line) {
    fetch(line);
}

/// The CRC-32 of what `crc` is of, followed by bytes. Nothing has the CRC-32 0.
pub(crate) fn checksum_after(crc: u32, bytes: &[u8]) -> u32 {
    let mut crc = Hasher::new_with_initial(crc);
    crc.update(bytes);
    crc.finalize()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_of_any_length_and_place_are_summed() {
        let bytes: Vec<u8> =
            (0..100_000_u32).map(|at| at.wrapping_mul(31).to_le_bytes()[1]).collect();
        for len in
            [0, 1, 63, 64, 2048, 8191, 10_239, 10_240, 10_304, 10_305, 12_345, 65_536, 99_999]
        {
            for shift in [0, 1] {
                let bytes = &bytes[shift..shift + len];
                let sum = crc32fast::hash(bytes);
                assert_eq!((checksum(bytes), told(bytes)), (sum, sum), "{len} bytes");
            }
        }
    }
}
