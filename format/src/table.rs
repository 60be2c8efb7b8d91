//! The order of the tables in the index, and the root that locates them. Spec: section 3.
//!
//! The position of every table follows from the record counts, so each index has exactly one valid
//! layout. The reader rejects any other layout, then validates the index with rkyv and checks that
//! rkyv finds the same tables. A build without rkyv omits only that last check.

use std::ops::Range;

use bytemuck::{Pod, Zeroable};
use rend::{u32_le, u64_le};

use crate::digest::Digest;
use crate::error::{Error, ErrorKind, Result};
use crate::record::{self, Fields};

/// The largest index, in bytes.
pub(crate) const MAX_INDEX_BYTES: u64 = 1 << 30;

/// The length of the root in this version of the format, in bytes.
pub(crate) const ROOT_LEN: usize = 152;

const ROOT_ALIGN: usize = 4;

macro_rules! tables {
    ($($name:ident: $ty:ty,)*) => {
        /// All tables, owned, as a writer builds them.
        #[derive(Clone, Debug, Default)]
        pub(crate) struct Tables { $(pub(crate) $name: Vec<$ty>,)* }

        /// All tables, borrowed from the bytes of an index.
        #[derive(Clone, Copy, Debug)]
        pub(crate) struct TableViews<'a> { $(pub(crate) $name: &'a [$ty],)* }

        /// The root: one field for each table.
        #[derive(Clone, Copy, Pod, Zeroable)]
        #[repr(C)]
        struct Root { $($name: TableRef,)* }

        const _: () = assert!(size_of::<Root>() == ROOT_LEN);

        /// The root as an rkyv type.
        #[cfg(feature = "rkyv")]
        #[derive(rkyv::Portable, rkyv::bytecheck::CheckBytes)]
        #[bytecheck(crate = rkyv::bytecheck)]
        #[repr(C)]
        struct ArchivedRoot { $($name: rkyv::vec::ArchivedVec<$ty>,)* }

        #[cfg(feature = "rkyv")]
        const _: () = assert!(size_of::<ArchivedRoot>() == ROOT_LEN);

        #[cfg(feature = "rkyv")]
        impl ArchivedRoot {
            /// Returns true if the root locates exactly these tables.
            fn has_tables(&self, views: &TableViews<'_>) -> bool {
                $(std::ptr::eq(self.$name.as_slice(), views.$name) &&)* true
            }
        }

        impl Tables {
            const NAMES: &[&str] = &[$(stringify!($name),)*];
            const RECORDS: &[(usize, usize)] = &[$((size_of::<$ty>(), align_of::<$ty>()),)*];

            pub(crate) fn views(&self) -> TableViews<'_> {
                TableViews { $($name: &self.$name,)* }
            }
        }

        impl TableViews<'_> {
            fn parts(&self) -> [(usize, &[u8]); TABLES] {
                [$((self.$name.len(), bytemuck::cast_slice(self.$name)),)*]
            }
        }

        impl Root {
            /// Name, offset and size of each field of the root.
            const FIELDS: Fields = &[
                $((stringify!($name), std::mem::offset_of!(Root, $name), size_of::<TableRef>()),)*
            ];
        }

        /// The validated byte ranges of the tables of an index: in bounds and aligned.
        #[derive(Clone, Debug)]
        pub(crate) struct TableMap { $(pub(crate) $name: Range<usize>,)* }

        impl TableMap {
            fn new(ranges: [Range<usize>; TABLES]) -> Self {
                let [$($name,)*] = ranges;
                Self { $($name,)* }
            }

            /// Returns the tables of the index that this map was validated for.
            pub(crate) fn views<'a>(&self, index: &'a [u8]) -> TableViews<'a> {
                TableViews { $($name: records(index, &self.$name),)* }
            }
        }
    };
}

const TABLES: usize = ROOT_LEN / 8;

tables! {
    heap: u8,
    dims: u64_le,
    nodes: record::Node,
    by_key: u32_le,
    tensors: record::Tensor,
    storages: record::Storage,
    chunks: record::Chunk,
    crcs: u32_le,
    crc_pages: u32_le,
    slices: record::Slice,
    placements: record::Placement,
    attrs: record::Attr,
    digests: Digest,
    shards: record::Shard,
    others: record::Other,
    dtypes: record::Dtype,
    subtrees: Digest,
    base: Digest,
    base_storages: u32_le,
}

/// Records and their fields, by the names that the spec uses.
pub(crate) const RECORDS: &[(&str, Fields)] = &[
    ("Root", Root::FIELDS),
    ("Node", record::Node::FIELDS),
    ("Tensor", record::Tensor::FIELDS),
    ("Storage", record::Storage::FIELDS),
    ("Chunk", record::Chunk::FIELDS),
    ("Slice", record::Slice::FIELDS),
    ("Placement", record::Placement::FIELDS),
    ("Attr", record::Attr::FIELDS),
    ("Shard", record::Shard::FIELDS),
    ("Other", record::Other::FIELDS),
    ("Dtype", record::Dtype::FIELDS),
];

/// One field of the root: the position and length of a table.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct TableRef {
    rel: rend::i32_le,
    len: u32_le,
}

impl TableViews<'_> {
    /// Returns the length of the index in bytes.
    ///
    /// # Errors
    ///
    /// `TooLarge` if it exceeds [`MAX_INDEX_BYTES`].
    pub(crate) fn index_len(&self) -> Result<u64> {
        let counts = self.parts().map(|(count, _)| count);
        // The root begins at the next multiple of its alignment.
        let len =
            table_starts(&counts).and_then(|(_, end)| end.checked_next_multiple_of(ROOT_ALIGN));
        len.and_then(|root| u64::try_from(root + ROOT_LEN).ok())
            .filter(|len| *len <= MAX_INDEX_BYTES)
            .ok_or_else(|| {
                Error::new(ErrorKind::TooLarge).with_detail("the index would exceed 1 GiB")
            })
    }

    /// Calls `put` with the bytes of the index in order: the tables, then the root.
    ///
    /// # Errors
    ///
    /// `TooLarge` if an offset or a count does not fit into the root; the errors of `put`.
    pub(crate) fn for_each_part(&self, mut put: impl FnMut(&[u8]) -> Result<()>) -> Result<()> {
        let too_large = || Error::new(ErrorKind::TooLarge);
        let parts = self.parts();
        let counts = parts.map(|(count, _)| count);
        let (starts, tables_end) = table_starts(&counts).ok_or_else(too_large)?;
        let root = tables_end.checked_next_multiple_of(ROOT_ALIGN).ok_or_else(too_large)?;
        let mut end = 0;
        let mut fields = [TableRef::zeroed(); TABLES];
        for ((number, field), ((count, bytes), start)) in
            fields.iter_mut().enumerate().zip(parts.into_iter().zip(starts))
        {
            put(zero_gap(end..start))?;
            put(bytes)?;
            end = start + bytes.len();
            let field_off = i32::try_from(root + number * size_of::<TableRef>());
            let field_off = field_off.map_err(|_| too_large())?;
            let start = i32::try_from(start).map_err(|_| too_large())?;
            let len = u32::try_from(count).map_err(|_| too_large())?;
            *field = TableRef { rel: (start - field_off).into(), len: len.into() };
        }
        put(zero_gap(end..root))?;
        put(bytemuck::cast_slice(&fields))
    }
}

/// Returns the zero bytes between two tables.
fn zero_gap(range: Range<usize>) -> &'static [u8] {
    // Tables are aligned to at most 8 bytes, so a gap has at most 7.
    &[0; 8][..range.len()]
}

/// Converts a count to the number of a record or entry.
///
/// # Errors
///
/// `TooLarge` if the count does not fit into 32 bits, or equals [`record::NONE`].
#[inline]
pub(crate) fn record_number(count: usize) -> Result<u32> {
    u32::try_from(count).ok().filter(|number| *number != record::NONE).ok_or_else(|| {
        Error::new(ErrorKind::TooLarge).with_detail("a table would exceed 2^32 - 1 entries")
    })
}

/// Returns the start of each table and the end of the last one; `None` if an offset overflows.
fn table_starts(counts: &[usize; TABLES]) -> Option<([usize; TABLES], usize)> {
    let mut end = 0_usize;
    let mut starts = [0; TABLES];
    for ((start, count), (size, align)) in starts.iter_mut().zip(counts).zip(Tables::RECORDS) {
        *start = end.checked_next_multiple_of(*align)?;
        end = start.checked_add(count.checked_mul(*size)?)?;
    }
    Some((starts, end))
}

/// Returns one table of an index, given its validated range. Cheaper than viewing all tables.
pub(crate) fn records<'a, T: Pod>(index: &'a [u8], range: &Range<usize>) -> &'a [T] {
    bytemuck::cast_slice(&index[range.clone()])
}

/// Validates the layout of root and tables (F-020, F-021), and the index as an rkyv archive (F-022).
///
/// # Errors
///
/// `RootRange`, `TableLayout` and `IndexEncoding`, one for each of these rules.
pub(crate) fn map(index: &[u8], root: Range<usize>) -> Result<TableMap> {
    let root_range = || Error::new(ErrorKind::RootRange).with_detail(format_args!("{root:?}"));
    if root.end != index.len()
        || root.end.saturating_sub(root.start) < ROOT_LEN
        || !root.start.is_multiple_of(ROOT_ALIGN)
    {
        return Err(root_range());
    }
    let fields = index.get(root.start..root.start + ROOT_LEN).ok_or_else(root_range)?;
    let fields: &[TableRef] = bytemuck::try_cast_slice(fields)
        .map_err(|error| Error::new(ErrorKind::RootRange).with_detail(error))?;
    let layout_error = |table: &str| Error::new(ErrorKind::TableLayout).with_path(table);

    let mut counts = [0; TABLES];
    for (count, field) in counts.iter_mut().zip(fields) {
        *count = usize::try_from(field.len.to_native()).unwrap_or(usize::MAX);
    }
    let (starts, end) = table_starts(&counts).ok_or_else(|| layout_error("root"))?;
    for (number, (field, start)) in fields.iter().zip(starts).enumerate() {
        let field_off = i64::try_from(root.start + number * size_of::<TableRef>()).ok();
        let rel = i64::from(field.rel.to_native());
        if field_off.map(|field_off| field_off + rel) != i64::try_from(start).ok() {
            return Err(layout_error(Tables::NAMES[number]));
        }
    }
    let gaps_end = end.checked_next_multiple_of(ROOT_ALIGN).ok_or_else(|| layout_error("root"))?;
    let is_current_version = root.len() == ROOT_LEN;
    if gaps_end > root.start || (is_current_version && gaps_end != root.start) {
        return Err(layout_error("root"));
    }
    let mut table_end = 0;
    for ((start, count), (size, _)) in starts.iter().zip(counts).zip(Tables::RECORDS) {
        check_gap(index, table_end..*start)?;
        table_end = start + count * size;
    }
    if is_current_version {
        check_gap(index, table_end..root.start)?;
    }
    let ends = starts.iter().zip(counts).zip(Tables::RECORDS);
    let mut ranges = ends.map(|((start, count), (size, _))| *start..start + count * size);
    let map = TableMap::new(std::array::from_fn(|_| ranges.next().expect("one range for each")));
    #[cfg(feature = "rkyv")]
    validate_rkyv(index, root.start, &map.views(index))?;
    Ok(map)
}

fn check_gap(index: &[u8], gap: Range<usize>) -> Result<()> {
    match index.get(gap.clone()) {
        Some(bytes) if bytes.iter().all(|byte| *byte == 0) => Ok(()),
        _ => Err(Error::new(ErrorKind::TableLayout)
            .with_detail(format_args!("gap {gap:?} of the index is not zero"))),
    }
}

/// Validates the index with rkyv (F-022) and checks that rkyv finds the same tables.
///
/// All records have a fixed size, so the time is independent of their number.
#[cfg(feature = "rkyv")]
fn validate_rkyv(index: &[u8], root_off: usize, views: &TableViews<'_>) -> Result<()> {
    use rkyv::validation::Validator;
    use rkyv::validation::archive::ArchiveValidator;

    let mut validator = Validator::new(ArchiveValidator::new(index), ());
    let root = rkyv::api::access_pos_with_context::<ArchivedRoot, _, rkyv::rancor::Failure>(
        index,
        root_off,
        &mut validator,
    )
    .map_err(|error| Error::new(ErrorKind::IndexEncoding).with_detail(error))?;
    if root.has_tables(views) {
        return Ok(());
    }
    Err(Error::new(ErrorKind::IndexEncoding).with_detail("rkyv finds other tables"))
}
