//! Archives without the parts that a fuzzer cannot guess: head, trailer, checksums.

/// Indexes of tables in the root, in the order of the spec.
const STORAGES: usize = 5;
const CHUNKS: usize = 6;
const CRCS: usize = 7;

/// Length of the root of version 1, in bytes.
const ROOT_LEN: usize = 120;

/// Expands an input to an archive with its blob and its index.
///
/// The input has two bytes with the length of the blob in units of 64 bytes, one byte with the
/// additional length of the root in units of 8 bytes, then blob and index. All checksums are set to
/// valid values, including those of the payload.
pub fn expand(data: &[u8]) -> Vec<u8> {
    let Some(([low, high, longer], rest)) = data.split_first_chunk::<3>() else {
        return data.to_vec();
    };
    let blob_len = (usize::from(u16::from_le_bytes([*low, *high])) * 64).min(rest.len() / 64 * 64);
    let (blob, index) = rest.split_at(blob_len);
    let root_len = ROOT_LEN + usize::from(*longer) * 8;
    let wide = |len: usize| u64::try_from(len).expect("usize is at most 64 bits");
    let narrow = |len: usize| u32::try_from(len).unwrap_or(u32::MAX);
    let mut file = vec![0; 4096];
    file[..8].copy_from_slice(b"\x89TSD\r\n\x1a\n");
    file[8] = 1;
    file[13] = 0x10;
    file[23] = 0x80;
    file.extend(blob);
    file.extend(index);
    let mut trailer = [0; 64];
    let mut put = |at: usize, bytes: &[u8]| trailer[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, &wide(4096 + blob.len()).to_le_bytes());
    put(8, &wide(index.len()).to_le_bytes());
    put(16, &narrow(index.len().saturating_sub(root_len)).to_le_bytes());
    put(20, &narrow(root_len).to_le_bytes());
    put(28, &[1, 0]);
    put(40, &wide(4096 + blob.len() + index.len() + 64).to_le_bytes());
    put(56, b"\n\x1a\n\rDST\x89");
    file.extend(trailer);
    let index_off = 4096 + blob.len();
    repair_payload(&mut file, index_off, index.len().saturating_sub(root_len));
    crate::checksums::repair_checksums(&mut file);
    file
}

/// Returns the input that expands to this archive, if there is one.
pub fn compact(file: &[u8]) -> Option<Vec<u8>> {
    let index_off = crate::checksums::index_offset(file);
    let units = u16::try_from(index_off.checked_sub(4096)? / 64).ok()?;
    let root_len = u32::from_le_bytes(file[file.len() - 44..][..4].try_into().ok()?);
    let longer = usize::try_from(root_len).ok()?.checked_sub(ROOT_LEN)? / 8;
    let longer = u8::try_from(longer).ok()?;
    let [low, high] = units.to_le_bytes();
    let data = [&[low, high, longer], &file[4096..file.len() - 64]].concat();
    (expand(&data) == file).then_some(data)
}

/// Returns offset and number of records of a table, if the root has plausible values.
fn table(file: &[u8], index_off: usize, root_off: usize, table: usize) -> Option<(usize, usize)> {
    let field = index_off.checked_add(root_off)? + table * 8;
    let word = |at: usize| Some(u32::from_le_bytes(file.get(at..at + 4)?.try_into().ok()?));
    let rel = i64::from(word(field)?.cast_signed());
    let start = usize::try_from(i64::try_from(field).ok()? + rel).ok()?;
    Some((start, usize::try_from(word(field + 4)?).ok()?))
}

/// Writes the checksums of the payload, as far as the tables have room for them.
fn repair_payload(file: &mut [u8], index_off: usize, root_off: usize) {
    let at = |number| table(file, index_off, root_off, number);
    let (Some((storages, count)), Some((chunks, _)), Some((crcs, _))) =
        (at(STORAGES), at(CHUNKS), at(CRCS))
    else {
        return;
    };
    for number in 0..count.min(64) {
        let _ = repair_storage(file, storages.saturating_add(number * 48), chunks, crcs);
    }
}

fn repair_storage(file: &mut [u8], record: usize, chunks: usize, crcs: usize) -> Option<()> {
    let bytes = file.get(record..record.checked_add(48)?)?.to_vec();
    let wide =
        |at: usize| usize::try_from(u64::from_le_bytes(bytes[at..at + 8].try_into().ok()?)).ok();
    let narrow =
        |at: usize| usize::try_from(u32::from_le_bytes(bytes[at..at + 4].try_into().ok()?)).ok();
    let (offset, stored_len, raw_len) = (wide(0)?, wide(8)?, wide(16)?);
    let (first_chunk, first_crc, is_raw) = (narrow(28)?, narrow(32)?, bytes[40] == 0);
    let log2 = if is_raw { bytes[42].clamp(12, 20) } else { 20 };
    for number in 0..raw_len.div_ceil(1 << log2).min(512) {
        let (start, len) = if is_raw {
            (number << log2, stored_len.checked_sub(number << log2)?.min(1 << log2))
        } else {
            let chunk = chunks.checked_add(first_chunk.checked_add(number)?.checked_mul(16)?)?;
            let chunk = file.get(chunk..chunk.checked_add(12)?)?;
            let start = u64::from_le_bytes(chunk[..8].try_into().ok()?);
            let len = u32::from_le_bytes(chunk[8..].try_into().ok()?);
            (usize::try_from(start).ok()?, usize::try_from(len).ok()?)
        };
        let start = offset.checked_add(start)?;
        let crc = crc32fast::hash(file.get(start..start.checked_add(len)?)?).to_le_bytes();
        let entry = crcs.checked_add(first_crc.checked_add(number)?.checked_mul(4)?)?;
        file.get_mut(entry..entry.checked_add(4)?)?.copy_from_slice(&crc);
    }
    if is_raw {
        let crc = crc32fast::hash(file.get(offset..offset.checked_add(stored_len)?)?);
        file.get_mut(record + 36..record + 40)?.copy_from_slice(&crc.to_le_bytes());
    }
    Some(())
}
