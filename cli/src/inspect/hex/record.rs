//! Records of a file, whose fields are known by the tables of the format.

use tssd_format::record_tables;

/// In place of a reference that is not there.
pub(super) const NONE: u64 = 0xFFFF_FFFF;

/// What records of one kind are made of.
#[derive(Clone, Copy)]
pub(super) struct Shape {
    pub(super) name: &'static str,
    /// Name, offset and size of each field.
    pub(super) fields: &'static [(&'static str, usize, usize)],
}

impl Shape {
    /// The kind with this name.
    pub(super) fn named(name: &str) -> Self {
        let known = record_tables().into_iter().find(|(known, _)| *known == name);
        let (name, fields) = known.expect("a name of the format");
        Self { name, fields }
    }

    /// The kind of the records of an index table, such as `nodes`; others hold plain numbers.
    pub(super) fn of_table(table: &str) -> Option<Self> {
        let is_of_it =
            |name: &str| table.strip_suffix('s').is_some_and(|one| one.eq_ignore_ascii_case(name));
        let known = record_tables().into_iter().find(|(name, _)| is_of_it(name));
        known.map(|(name, fields)| Self { name, fields })
    }

    /// How many bytes a record takes.
    pub(super) fn size(&self) -> usize {
        self.fields.last().map_or(0, |(_, offset, size)| offset + size)
    }

    /// What a record is aligned to: its largest number.
    pub(super) fn align(&self) -> usize {
        let numbers = self.fields.iter().map(|(.., size)| *size).filter(|size| *size <= 8);
        numbers.filter(|size| size.is_power_of_two()).max().unwrap_or(1)
    }
}

/// One record.
#[derive(Clone, Copy)]
pub(super) struct Record<'a> {
    pub(super) shape: Shape,
    /// Where it is in the file.
    pub(super) at: u64,
    pub(super) bytes: &'a [u8],
}

impl Record<'_> {
    /// A field as a number; the first eight bytes of a longer one.
    pub(super) fn get(&self, field: &str) -> u64 {
        let known = self.shape.fields.iter().find(|(name, ..)| *name == field);
        let (_, offset, size) = known.expect("a field of the record");
        number(&self.bytes[*offset..offset + size])
    }
}

/// Little-endian, at most eight bytes of it.
pub(super) fn number(bytes: &[u8]) -> u64 {
    let mut wide = [0; 8];
    let len = bytes.len().min(8);
    wide[..len].copy_from_slice(&bytes[..len]);
    u64::from_le_bytes(wide)
}

/// Offset and length of a heap range.
pub(super) fn heap_range(range: u64) -> (u64, u64) {
    (range & NONE, range >> 32)
}
