//! The head and the trailer: the fixed bytes around blob and index. Spec: section 2.

use bytemuck::{Pod, Zeroable};
use rend::{u16_le, u32_le, u64_le};

use crate::error::{Error, ErrorKind, Result};
use crate::record::Fields;
use crate::table::MAX_INDEX_BYTES;

/// Where the blob begins, in bytes.
pub const DATA_START: u64 = 4096;

/// Length of head and trailer, in bytes.
pub(crate) const FRAME_LEN: usize = 64;

/// The index begins at a multiple of this.
pub(crate) const INDEX_ALIGN: u64 = 64;

pub(crate) const MAGIC: [u8; 8] = *b"\x89TSD\r\n\x1a\n";
const END_MAGIC: [u8; 8] = *b"\n\x1a\n\rDST\x89";
const MAJOR: u16 = 1;
const INDEX_CODEC: u16 = 1;
const MIN_FILE_LEN: u64 = DATA_START + 104 + 64;

/// The feature bit of files from before version 1 was declared.
pub(crate) const DRAFT: u64 = 1 << 63;

/// The head and the trailer by the names that the spec has for them.
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

/// The head of every file that this crate writes.
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

/// Where the index of a file is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct IndexPlace {
    pub(crate) index_off: u64,
    pub(crate) index_len: u64,
    pub(crate) root_off: u32,
    pub(crate) root_len: u32,
    pub(crate) index_crc32: u32,
}

impl IndexPlace {
    pub(crate) fn file_len(&self) -> u64 {
        self.index_off + self.index_len + 64
    }

    /// The trailer that says so.
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

/// Proves that a file is long enough to have head and trailer.
pub(crate) fn check_len(file_len: u64) -> Result<()> {
    if file_len < MIN_FILE_LEN {
        return Err(Error::new(ErrorKind::TooShort)
            .note(format_args!("{file_len} bytes, at least {MIN_FILE_LEN}")));
    }
    Ok(())
}

/// Proves a head.
pub(crate) fn parse_head(bytes: &[u8; FRAME_LEN]) -> Result<()> {
    let head: Head = bytemuck::pod_read_unaligned(bytes);
    let wrong = |kind, offset| Err(Error::new(kind).byte(offset));
    if head.magic != MAGIC {
        return wrong(ErrorKind::NotTssd, 0);
    }
    if head.crc32 != head.crc() {
        return wrong(ErrorKind::HeadCorrupt, 60);
    }
    if head.major != MAJOR {
        return Err(Error::new(ErrorKind::UnsupportedVersion)
            .note(format_args!("version {}.{}, this reader knows 1", head.major, head.minor))
            .byte(8));
    }
    let unknown = head.incompat.to_native() & !DRAFT;
    if unknown != 0 {
        return Err(Error::new(ErrorKind::UnknownIncompat)
            .note(format_args!("bit {}", unknown.trailing_zeros()))
            .byte(16));
    }
    if u64::from(head.data_start.to_native()) != DATA_START {
        return wrong(ErrorKind::DataStart, 12);
    }
    if head.index_off != 0 || head.index_len != 0 || head.flags != 0 {
        return wrong(ErrorKind::ReservedNotZero, 40);
    }
    Ok(())
}

/// Proves a trailer, given the length of its file.
pub(crate) fn parse_trailer(bytes: &[u8; FRAME_LEN], file_len: u64) -> Result<IndexPlace> {
    let trailer: Trailer = bytemuck::pod_read_unaligned(bytes);
    let at = file_len - 64;
    let wrong = |kind, field: u64| Error::new(kind).byte(at + field);
    if trailer.end_magic != END_MAGIC {
        return Err(wrong(ErrorKind::NoTrailer, 56));
    }
    if trailer.crc32 != trailer.crc() {
        return Err(wrong(ErrorKind::TrailerCorrupt, 52));
    }
    if trailer.file_len != file_len {
        return Err(wrong(ErrorKind::LengthMismatch, 40)
            .note(format_args!("{file_len} bytes, recorded {}", trailer.file_len)));
    }
    if trailer.flags != 0 || trailer.prev_trailer_off != 0 || trailer.generation != 0 {
        return Err(wrong(ErrorKind::ReservedNotZero, 30));
    }
    if trailer.index_codec != INDEX_CODEC {
        return Err(wrong(ErrorKind::IndexCodec, 28).note(trailer.index_codec));
    }
    let place = IndexPlace {
        index_off: trailer.index_off.to_native(),
        index_len: trailer.index_len.to_native(),
        root_off: trailer.root_off.to_native(),
        root_len: trailer.root_len.to_native(),
        index_crc32: trailer.index_crc32.to_native(),
    };
    if place.index_len > MAX_INDEX_BYTES {
        return Err(wrong(ErrorKind::IndexTooLarge, 8).note(place.index_len));
    }
    let end = place.index_off.checked_add(place.index_len).and_then(|end| end.checked_add(64));
    if place.index_off < DATA_START
        || !place.index_off.is_multiple_of(INDEX_ALIGN)
        || end != Some(file_len)
    {
        return Err(wrong(ErrorKind::IndexRange, 0)
            .note(format_args!("{} bytes at {}", place.index_len, place.index_off)));
    }
    Ok(place)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_index_may_be_as_large_as_the_limit() {
        let parse = |index_len| {
            let (root_off, root_len, index_crc32) = (0, 104, 0);
            let place =
                IndexPlace { index_off: DATA_START, index_len, root_off, root_len, index_crc32 };
            let parsed = parse_trailer(&place.trailer(), place.file_len());
            parsed.map(|parsed| assert_eq!(parsed, place)).map_err(|error| error.kind())
        };
        assert_eq!(parse(MAX_INDEX_BYTES), Ok(()));
        assert_eq!(parse(MAX_INDEX_BYTES + 1), Err(ErrorKind::IndexTooLarge));
    }
}
