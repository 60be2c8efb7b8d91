//! Archives that are stored as the difference from another one (pure). Spec: `spec/reshard.md`, section 10.

use std::collections::BTreeSet;
use std::ops::Range;

use bytes::Bytes;
use tssd_format::{Blob, ElementWidth, checksum};

use crate::convert::{to_u64, to_usize};
use crate::delta::layout::ElementLayout;
use crate::delta::parts::{ENTRY_BYTES, Entry, MAX_PART_BYTES, PartEncoder};
use crate::error::{Error, ErrorKind, Result};

/// The last bytes of an archive that is stored as a delta.
const MAGIC: [u8; 8] = *b"TSSDDLT1";

/// Length in bytes of the trailer: raw length, number of parts, length of the names, CRC-32 of the rest, and [`MAGIC`].
const TRAILER_BYTES: usize = 28;

/// Maximum bytes of the names of the bases.
const MAX_NAMES_BYTES: u64 = 1 << 20;

/// Maximum number of bases.
pub(crate) const MAX_BASES: usize = 1024;

/// The index of an archive that is stored as a delta.
#[derive(Debug)]
pub(crate) struct StoredDelta {
    /// Length of the archive in bytes.
    pub(crate) raw_len: u64,
    /// The parts of the archive, in order.
    pub(crate) parts: Vec<StoredPart>,
    /// Names of the archives from which it is computed, the nearest first. The last one is stored whole.
    pub(crate) bases: Vec<String>,
}

/// A part of an archive.
#[derive(Debug)]
pub(crate) struct StoredPart {
    /// Its bytes in the archive.
    pub(crate) raw: Range<u64>,
    /// Its bytes in the delta.
    pub(crate) stored: Range<u64>,
    pub(crate) entry: Entry,
}

impl StoredDelta {
    /// Reads the index of a delta. Returns `None` for an archive that is stored whole.
    ///
    /// # Errors
    ///
    /// `Io` if the blob cannot be read; `Corrupt` if the index is damaged.
    pub(crate) fn read(name: &str, blob: &dyn Blob) -> Result<Option<Self>> {
        let failed = |error| Error::io(name, error);
        let corrupt = |text: &str| Error::new(ErrorKind::Corrupt, format_args!("`{name}`: {text}"));
        let len = blob.size().map_err(failed)?;
        let Some(end) = len.checked_sub(to_u64(TRAILER_BYTES)) else { return Ok(None) };
        let mut trailer = [0; TRAILER_BYTES];
        blob.read_exact_at(&mut trailer, end).map_err(failed)?;
        let (fields, magic) = trailer.split_at(TRAILER_BYTES - MAGIC.len());
        if magic != MAGIC {
            return Ok(None);
        }
        let word = |at: usize| u32::from_le_bytes(fields[at..at + 4].try_into().expect("4 bytes"));
        let raw_len = u64::from_le_bytes(fields[..8].try_into().expect("8 bytes"));
        let (parts, names_len) = (u64::from(word(8)), u64::from(word(12)));
        let table_len = parts * to_u64(ENTRY_BYTES);
        let start = end.checked_sub(table_len + names_len).filter(|_| names_len <= MAX_NAMES_BYTES);
        let start =
            start.ok_or_else(|| corrupt("the table of a delta is longer than the delta"))?;
        let mut index = vec![0; to_usize(table_len + names_len)];
        blob.read_exact_at(&mut index, start).map_err(failed)?;
        let mut crc = crc32fast::Hasher::new();
        crc.update(&index);
        crc.update(&fields[..16]);
        if crc.finalize() != word(16) {
            return Err(corrupt("the checksum of the table of a delta differs"));
        }
        let (table, names) = index.split_at(to_usize(table_len));
        let bases: Vec<String> = serde_json::from_slice(names)
            .map_err(|error| corrupt(&format!("the names of the bases: {error}")))?;
        let distinct: BTreeSet<&String> = bases.iter().collect();
        if !(1..=MAX_BASES).contains(&bases.len()) || distinct.len() < bases.len() {
            return Err(corrupt("a delta has no bases, too many, or one of them twice"));
        }
        let (mut raw, mut stored, mut list) = (0, 0, Vec::new());
        for entry in table.as_chunks::<ENTRY_BYTES>().0 {
            let entry =
                Entry::parse(entry).ok_or_else(|| corrupt("an entry of a delta is invalid"))?;
            let (raw_end, stored_end) =
                (raw + to_u64(entry.raw_len), stored + to_u64(entry.stored_len));
            list.push(StoredPart { raw: raw..raw_end, stored: stored..stored_end, entry });
            (raw, stored) = (raw_end, stored_end);
        }
        if raw != raw_len || stored != start {
            return Err(corrupt("the table of a delta does not describe its bytes"));
        }
        Ok(Some(Self { raw_len, parts: list, bases }))
    }

    /// Returns whether a blob ends as a delta does. Returns false if it cannot be read.
    pub(crate) fn has_magic(blob: &dyn Blob) -> bool {
        let mut magic = [0; MAGIC.len()];
        let end = blob.size().ok().and_then(|len| len.checked_sub(to_u64(MAGIC.len())));
        end.is_some_and(|end| blob.read_exact_at(&mut magic, end).is_ok()) && magic == MAGIC
    }

    /// Encodes an archive as the difference from its base. Returns `None` if that takes more than `max_len` bytes.
    ///
    /// `read_base` returns bytes of the base, which has the same length, or `None` if they are not in memory any more. `bases`
    /// are the names of the base and of its own bases.
    ///
    /// # Errors
    ///
    /// `Io` without memory for the encoder.
    pub(crate) fn encode(
        layout: &ElementLayout,
        raw: &[u8],
        read_base: impl Fn(Range<u64>) -> Option<Bytes>,
        bases: &[String],
        max_len: u64,
    ) -> Result<Option<Vec<u8>>> {
        // On one thread: the upload goes on in the background, and takes longer than this.
        let mut encoder = PartEncoder::new(true)?;
        for (part, width) in parts_of(layout, raw.len()) {
            let base = read_base(to_u64(part.start)..to_u64(part.end));
            let Some(base) = base.filter(|base| base.len() == part.len()) else { return Ok(None) };
            encoder.push(&raw[part], Some(&base), width)?;
            if to_u64(encoder.stored.len()) > max_len {
                return Ok(None);
            }
        }
        let PartEncoder { entries, stored: mut file, .. } = encoder;
        let (mut index, parts) = (Vec::new(), u32::try_from(entries.len()));
        let Ok(parts) = parts else { return Ok(None) };
        for entry in &entries {
            entry.write(&mut index);
        }
        let names = serde_json::to_vec(bases).expect("strings are JSON");
        if bases.len() > MAX_BASES || to_u64(names.len()) > MAX_NAMES_BYTES {
            return Ok(None);
        }
        index.extend_from_slice(&names);
        let mut fields = Vec::with_capacity(TRAILER_BYTES);
        fields.extend(to_u64(raw.len()).to_le_bytes());
        fields.extend(parts.to_le_bytes());
        fields.extend(u32::try_from(names.len()).expect("names are short").to_le_bytes());
        let crc = checksum(&[&index[..], &fields].concat());
        fields.extend(crc.to_le_bytes());
        fields.extend(MAGIC);
        file.extend(index);
        file.extend(fields);
        Ok((to_u64(file.len()) <= max_len).then_some(file))
    }

    /// Returns the numbers of the parts that contain bytes of a range.
    pub(crate) fn parts_in(&self, range: &Range<u64>) -> Range<usize> {
        let first = self.parts.partition_point(|part| part.raw.end <= range.start);
        let end = self.parts.partition_point(|part| part.raw.start < range.end);
        first.min(end)..end
    }
}

/// Divides an archive into parts.
fn parts_of(
    layout: &ElementLayout,
    len: usize,
) -> impl Iterator<Item = (Range<usize>, ElementWidth)> {
    let mut at = 0;
    let runs = layout.widths(to_u64(len)).into_iter().map(move |(len, width)| {
        at += len;
        (at - len..at, width)
    });
    runs.flat_map(|(run, width)| {
        let end = run.end;
        let starts = run.step_by(MAX_PART_BYTES);
        starts.map(move |start| (start..end.min(start + MAX_PART_BYTES), width))
    })
}
