//! Columns: bytes that are stored raw, or as one zstd frame that holds a Huffman code only.

use super::error::invalid;
use super::layout::StoredColumn;
use crate::codec::ZstdDecoder;
#[cfg(feature = "zstd")]
use crate::codec::{literal_compressor, saves_enough};
use crate::error::{Error, ErrorKind, Result};

/// Columns shorter than this stay raw: the header of a frame and its Huffman table are not smaller.
#[cfg(feature = "zstd")]
const MIN_CODED_BYTES: usize = 48;

/// Compressor of columns. It searches for no matches: position and value columns have none.
#[cfg(feature = "zstd")]
pub(super) struct ColumnEncoder(zstd::bulk::Compressor<'static>);

#[cfg(feature = "zstd")]
impl ColumnEncoder {
    pub(super) fn new() -> Result<Self> {
        Ok(Self(literal_compressor()?))
    }

    /// Appends a column to `chunk`.
    pub(super) fn push(&mut self, column: &[u8], chunk: &mut Vec<u8>) -> Result<StoredColumn> {
        let start = chunk.len();
        if column.len() >= MIN_CODED_BYTES {
            chunk.resize(start + zstd::zstd_safe::compress_bound(column.len()), 0);
            let len = self.0.compress_to_buffer(column, &mut chunk[start..])?;
            chunk.truncate(start + len);
            // Raw columns decode faster.
            if saves_enough(column.len(), len) {
                return Ok(StoredColumn { len, is_frame: true });
            }
        }
        chunk.truncate(start);
        chunk.extend_from_slice(column);
        Ok(StoredColumn { len: column.len(), is_frame: false })
    }
}

/// Placeholder in a build without zstd. It has no values.
#[cfg(not(feature = "zstd"))]
pub(super) enum ColumnEncoder {}

#[cfg(not(feature = "zstd"))]
impl ColumnEncoder {
    pub(super) fn new() -> Result<Self> {
        Err(Error::new(ErrorKind::FeatureMissing).with_detail("zstd"))
    }

    pub(super) fn push(&mut self, _: &[u8], _: &mut Vec<u8>) -> Result<StoredColumn> {
        match *self {}
    }
}

/// Decompressor of columns.
pub(super) struct ColumnDecoder(ZstdDecoder);

impl ColumnDecoder {
    pub(super) fn new() -> Result<Self> {
        ZstdDecoder::new().map(Self)
    }

    /// Removes a column from the front of `rest` and decodes it. The column must have exactly `len` bytes.
    ///
    /// A frame states its content size, which is checked first: decoding never allocates more than `len` bytes.
    pub(super) fn take(
        &mut self,
        stored: StoredColumn,
        rest: &mut &[u8],
        len: usize,
        column: &mut Vec<u8>,
    ) -> Result<()> {
        let (bytes, after) = rest
            .split_at_checked(stored.len)
            .expect("the header has proven the sum of the stored lengths");
        *rest = after;
        if stored.is_frame {
            column.resize(len, 0);
            return self.0.decode(bytes, 1, column).map_err(frame_error);
        }
        if bytes.len() != len {
            return Err(invalid(format_args!("a raw column of {} bytes, not {len}", bytes.len())));
        }
        column.clear();
        column.extend_from_slice(bytes);
        Ok(())
    }
}

/// Turns a violation of F-093 into one of F-098, which the frames of columns are part of.
fn frame_error(error: Error) -> Error {
    if error.kind() == ErrorKind::FrameCorrupt {
        invalid(format_args!("column: {error}"))
    } else {
        error
    }
}
