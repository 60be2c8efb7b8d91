//! Damage with good checksums: what lies behind them is reached.

/// Repairs the checksums of head, index and trailer, where the file has them.
pub fn repair(file: &mut [u8]) {
    let Some(trailer) = file.len().checked_sub(64).filter(|trailer| *trailer >= 64) else { return };
    let index_off = u64::from_le_bytes(field(file, trailer));
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

/// Eight bytes of a file.
fn field(file: &[u8], at: usize) -> [u8; 8] {
    file[at..at + 8].try_into().expect("eight bytes")
}

/// Where the index of a file begins, as its trailer says, or farther than any memory reaches.
///
/// # Panics
///
/// If the file has no room for a trailer.
pub fn index_off(file: &[u8]) -> usize {
    usize::try_from(u64::from_le_bytes(field(file, file.len() - 64))).unwrap_or(usize::MAX)
}
