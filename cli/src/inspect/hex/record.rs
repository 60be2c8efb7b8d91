//! Records of a file, with the layouts that `tssd-format` exports.

use tssd_format::record_tables;

/// Value of a reference field that refers to nothing.
pub(super) const NONE: u64 = 0xFFFF_FFFF;

/// Layout of the records of one kind.
#[derive(Clone, Copy)]
pub(super) struct RecordLayout {
    pub(super) name: &'static str,
    /// Name, offset and size of each field. Offset and size are in bytes.
    pub(super) fields: &'static [(&'static str, usize, usize)],
}

impl RecordLayout {
    /// Returns the layout of a kind of record.
    pub(super) fn for_record(name: &str) -> Self {
        let layout = record_tables().into_iter().find(|(kind, _)| *kind == name);
        let (name, fields) = layout.expect("a name of the format");
        Self { name, fields }
    }

    /// Returns the layout of the records of an index table such as `nodes`.
    ///
    /// Returns `None` for a table without records.
    pub(super) fn for_table(table: &str) -> Option<Self> {
        let matches_table =
            |name: &str| table.strip_suffix('s').is_some_and(|one| one.eq_ignore_ascii_case(name));
        let layout = record_tables().into_iter().find(|(name, _)| matches_table(name));
        layout.map(|(name, fields)| Self { name, fields })
    }

    /// Returns the size of a record in bytes.
    pub(super) fn size(&self) -> usize {
        self.fields.last().map_or(0, |(_, offset, size)| offset + size)
    }

    /// Returns the alignment of a record in bytes, which is the size of its largest number.
    pub(super) fn align(&self) -> usize {
        let numbers = self.fields.iter().map(|(.., size)| *size).filter(|size| *size <= 8);
        numbers.filter(|size| size.is_power_of_two()).max().unwrap_or(1)
    }
}

/// A record of the file.
#[derive(Clone, Copy)]
pub(super) struct Record<'a> {
    pub(super) layout: RecordLayout,
    /// Offset in the file, in bytes.
    pub(super) offset: u64,
    pub(super) bytes: &'a [u8],
}

impl Record<'_> {
    /// Returns a field as a number. Only the first eight bytes of a longer field are used.
    pub(super) fn get(&self, field: &str) -> u64 {
        let entry = self.layout.fields.iter().find(|(name, ..)| *name == field);
        let (_, offset, size) = entry.expect("a field of the record");
        decode_le(&self.bytes[*offset..offset + size])
    }
}

/// Decodes a little-endian number from at most eight bytes.
pub(super) fn decode_le(bytes: &[u8]) -> u64 {
    let mut buffer = [0; 8];
    let len = bytes.len().min(8);
    buffer[..len].copy_from_slice(&bytes[..len]);
    u64::from_le_bytes(buffer)
}

/// Returns the offset and the length of a heap range, in bytes.
pub(super) fn heap_range(range: u64) -> (u64, u64) {
    (range & NONE, range >> 32)
}
