//! The fixed-size head and trailer of a file, around blob and index. Spec: section 2.

use bytemuck::{Pod, Zeroable};
use rend::{u16_le, u32_le, u64_le};

use crate::error::{Error, ErrorKind, Result};
use crate::record::Fields;
use crate::table::{MAX_INDEX_BYTES, ROOT_LEN};

/// Offset in the file of the blob, in bytes.
pub const DATA_START: u64 = 4096;

/// Length of the head, and of the trailer, in bytes.
pub(crate) const FRAME_LEN: usize = 64;

/// Alignment of the index in the file, in bytes.
pub(crate) const INDEX_ALIGN: u64 = 64;

pub(crate) const MAGIC: [u8; 8] = *b"\x89TSD\r\n\x1a\n";
const END_MAGIC: [u8; 8] = *b"\n\x1a\n\rDST\x89";
const MAJOR: u16 = 1;
const INDEX_CODEC: u16 = 1;
const MIN_FILE_LEN: u64 = DATA_START + (ROOT_LEN + FRAME_LEN) as u64;

/// Feature bit of files written before version 1 of the format is declared.
pub(crate) const DRAFT: u64 = 1 << 63;

/// Fields of the head and of the trailer, under the names that the spec uses.
pub(crate) const FRAMES: &[(&str, Fields)] =
    &[("Head", Head::FIELDS), ("Trailer", Trailer::FIELDS)];

macro_rules! frame {
    ($(#[$meta:meta])* $name:ident { $($field:ident: $ty:ty,)* }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, Pod, Zeroable)]
        #[repr(C)]
        struct $name { $($field: $ty,)* }

        impl $name {
            const FIELDS: Fields = &[
                $((stringify!($field), std::mem::offset_of!($name, $field), size_of::<$ty>()),)*
            ];
        }

        const _: () = assert!(size_of::<$name>() == FRAME_LEN);
    };
}

frame! {
    Head {
        magic: [u8; 8],
        major: u16_le,
        minor: u16_le,
        data_start: u32_le,
        incompat: u64_le,
        ro_compat: u64_le,
        compat: u64_le,
        index_off: u64_le,
        index_len: u64_le,
        flags: u32_le,
        crc32: u32_le,
    }
}

frame! {
    Trailer {
        index_off: u64_le,
        index_len: u64_le,
        root_off: u32_le,
        root_len: u32_le,
        index_crc32: u32_le,
        index_codec: u16_le,
        flags: u16_le,
        prev_trailer_off: u64_le,
        file_len: u64_le,
        generation: u32_le,
        crc32: u32_le,
        end_magic: [u8; 8],
    }
}

impl Head {
    fn crc(&self) -> u32 {
        crc32fast::hash(&bytemuck::bytes_of(self)[..60])
    }
}

impl Trailer {
    fn crc(&self) -> u32 {
        let bytes = bytemuck::bytes_of(self);
        let mut crc = crc32fast::Hasher::new();
        crc.update(&bytes[..52]);
        crc.update(&bytes[56..]);
        crc.finalize()
    }
}

/// Returns the head that this crate writes: it is the same for every file.
pub(crate) fn head() -> [u8; FRAME_LEN] {
    let mut head = Head {
        magic: MAGIC,
        major: MAJOR.into(),
        data_start: 4096.into(),
        incompat: DRAFT.into(),
        ..Head::zeroed()
    };
    head.crc32 = head.crc().into();
    bytemuck::cast(head)
}

/// The location of the index in a file, as the trailer records it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct IndexLocation {
    pub(crate) index_off: u64,
    pub(crate) index_len: u64,
    pub(crate) root_off: u32,
    pub(crate) root_len: u32,
    pub(crate) index_crc32: u32,
}

impl IndexLocation {
    pub(crate) fn file_len(&self) -> u64 {
        self.index_off + self.index_len + 64
    }

    /// Returns the trailer that records this location.
    pub(crate) fn trailer(&self) -> [u8; FRAME_LEN] {
        let mut trailer = Trailer {
            index_off: self.index_off.into(),
            index_len: self.index_len.into(),
            root_off: self.root_off.into(),
            root_len: self.root_len.into(),
            index_crc32: self.index_crc32.into(),
            index_codec: INDEX_CODEC.into(),
            file_len: self.file_len().into(),
            end_magic: END_MAGIC,
            ..Trailer::zeroed()
        };
        trailer.crc32 = trailer.crc().into();
        bytemuck::cast(trailer)
    }
}

/// Checks that a file is long enough for a head, a trailer and the smallest index.
pub(crate) fn check_len(file_len: u64) -> Result<()> {
    if file_len < MIN_FILE_LEN {
        return Err(Error::new(ErrorKind::TooShort)
            .with_detail(format_args!("{file_len} bytes, at least {MIN_FILE_LEN}")));
    }
    Ok(())
}

/// Validates a head.
pub(crate) fn parse_head(bytes: &[u8; FRAME_LEN]) -> Result<()> {
    let head: Head = bytemuck::pod_read_unaligned(bytes);
    let fail = |kind, offset| Err(Error::new(kind).with_offset(offset));
    if head.magic != MAGIC {
        return fail(ErrorKind::NotTssd, 0);
    }
    if head.crc32 != head.crc() {
        return fail(ErrorKind::HeadCorrupt, 60);
    }
    if head.major != MAJOR {
        return Err(Error::new(ErrorKind::UnsupportedVersion)
            .with_detail(format_args!("version {}.{}, this reader knows 1", head.major, head.minor))
            .with_offset(8));
    }
    let unknown = head.incompat.to_native() & !DRAFT;
    if unknown != 0 {
        return Err(Error::new(ErrorKind::UnknownIncompat)
            .with_detail(format_args!("bit {}", unknown.trailing_zeros()))
            .with_offset(16));
    }
    if u64::from(head.data_start.to_native()) != DATA_START {
        return fail(ErrorKind::DataStart, 12);
    }
    if head.index_off != 0 || head.index_len != 0 || head.flags != 0 {
        return fail(ErrorKind::ReservedNotZero, 40);
    }
    Ok(())
}

/// Validates a trailer, given the length of its file in bytes, and returns the location of the index.
pub(crate) fn parse_trailer(bytes: &[u8; FRAME_LEN], file_len: u64) -> Result<IndexLocation> {
    let trailer: Trailer = bytemuck::pod_read_unaligned(bytes);
    let at = file_len - 64;
    let error_at = |kind, field: u64| Error::new(kind).with_offset(at + field);
    if trailer.end_magic != END_MAGIC {
        return Err(error_at(ErrorKind::NoTrailer, 56));
    }
    if trailer.crc32 != trailer.crc() {
        return Err(error_at(ErrorKind::TrailerCorrupt, 52));
    }
    if trailer.file_len != file_len {
        return Err(error_at(ErrorKind::LengthMismatch, 40)
            .with_detail(format_args!("{file_len} bytes, recorded {}", trailer.file_len)));
    }
    if trailer.flags != 0 || trailer.prev_trailer_off != 0 || trailer.generation != 0 {
        return Err(error_at(ErrorKind::ReservedNotZero, 30));
    }
    if trailer.index_codec != INDEX_CODEC {
        return Err(error_at(ErrorKind::IndexCodec, 28).with_detail(trailer.index_codec));
    }
    let location = IndexLocation {
        index_off: trailer.index_off.to_native(),
        index_len: trailer.index_len.to_native(),
        root_off: trailer.root_off.to_native(),
        root_len: trailer.root_len.to_native(),
        index_crc32: trailer.index_crc32.to_native(),
    };
    if location.index_len > MAX_INDEX_BYTES {
        return Err(error_at(ErrorKind::IndexTooLarge, 8).with_detail(location.index_len));
    }
    let end =
        location.index_off.checked_add(location.index_len).and_then(|end| end.checked_add(64));
    if location.index_off < DATA_START
        || !location.index_off.is_multiple_of(INDEX_ALIGN)
        || end != Some(file_len)
    {
        return Err(error_at(ErrorKind::IndexRange, 0)
            .with_detail(format_args!("{} bytes at {}", location.index_len, location.index_off)));
    }
    Ok(location)
}

/// Returns log2 of the default alignment of a storage of `len` stored bytes.
///
/// Large storages are aligned to pages, so that they can be mapped and read directly. Others get the alignment that
/// suits GPUs and vector units.
pub(crate) fn default_align_log2(len: u64) -> u8 {
    if len >= 64 << 10 { 12 } else { 8 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse_trailer_accepts_indexes_up_to_the_size_limit() {
        let parse = |index_len| {
            let (root_off, root_len, index_crc32) = (0, 120, 0);
            let location =
                IndexLocation { index_off: DATA_START, index_len, root_off, root_len, index_crc32 };
            let parsed = parse_trailer(&location.trailer(), location.file_len());
            parsed.map(|parsed| assert_eq!(parsed, location)).map_err(|error| error.kind())
        };
        assert_eq!(parse(MAX_INDEX_BYTES), Ok(()));
        assert_eq!(parse(MAX_INDEX_BYTES + 1), Err(ErrorKind::IndexTooLarge));
    }
}
