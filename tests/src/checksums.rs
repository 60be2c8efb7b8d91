//! Damage with valid checksums, which reaches the checks behind the checksums.

/// Updates the checksums of head, index and trailer, and those of the pages of `crcs`, if the file has them.
pub fn repair_checksums(file: &mut [u8]) {
    let Some(trailer) = file.len().checked_sub(64).filter(|trailer| *trailer >= 64) else { return };
    let _ = repair_crc_pages(file, trailer);
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

/// Updates the checksums of the pages of `crcs`. `None` if the root does not locate such tables.
fn repair_crc_pages(file: &mut [u8], trailer: usize) -> Option<()> {
    const CRCS_FIELD: usize = 56;
    const PAGE_BYTES: usize = 4096;
    let start = usize::try_from(u64::from_le_bytes(eight_bytes(file, trailer))).ok()?;
    let root = usize::try_from(
        eight_bytes(file, trailer + 16)[..4].try_into().map(u32::from_le_bytes).ok()?,
    )
    .ok()?;
    let index = file.get_mut(start..trailer)?;
    index.get(root..root.checked_add(152)?)?;
    let word = |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|byte| index[at + byte]));
    let table = |field: usize| {
        let distance = isize::try_from(word(root + field).cast_signed()).ok()?;
        let table = (root + field).checked_add_signed(distance)?;
        let len = usize::try_from(word(root + field + 4)).ok()?.checked_mul(4)?;
        Some(table..table.checked_add(len)?)
    };
    let (crcs, pages) = (table(CRCS_FIELD)?, table(CRCS_FIELD + 8)?);
    let sums: Vec<u32> = index.get(crcs)?.chunks(PAGE_BYTES).map(crc32fast::hash).collect();
    for (entry, sum) in index.get_mut(pages)?.chunks_exact_mut(4).zip(sums) {
        entry.copy_from_slice(&sum.to_le_bytes());
    }
    Some(())
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
