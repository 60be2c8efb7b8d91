//! Damage with valid checksums, which reaches the checks behind the checksums.

/// Updates the checksums of head, index and trailer, if the file has them.
pub fn repair_checksums(file: &mut [u8]) {
    let Some(trailer) = file.len().checked_sub(64).filter(|trailer| *trailer >= 64) else { return };
    let index_off = u64::from_le_bytes(eight_bytes(file, trailer));
    let index = usize::try_from(index_off).ok().and_then(|start| file.get(start..trailer));
    if let Some(crc) = index.map(crc32fast::hash) {
        file[trailer + 24..][..4].copy_from_slice(&crc.to_le_bytes());
    }
    let (front, back) = (&file[trailer..trailer + 52], &file[trailer + 56..]);
    let crc = crc32fast::hash(&[front, back].concat());
    file[trailer + 52..][..4].copy_from_slice(&crc.to_le_bytes());
    let crc = crc32fast::hash(&file[..60]);
    file[60..64].copy_from_slice(&crc.to_le_bytes());
}

/// Returns eight bytes of a file.
fn eight_bytes(file: &[u8], at: usize) -> [u8; 8] {
    file[at..at + 8].try_into().expect("eight bytes")
}

/// Returns the offset of the index, as the trailer says. `usize::MAX` if it does not fit in a `usize`.
///
/// # Panics
///
/// If the file is shorter than a trailer.
pub fn index_offset(file: &[u8]) -> usize {
    usize::try_from(u64::from_le_bytes(eight_bytes(file, file.len() - 64))).unwrap_or(usize::MAX)
}
