//! Header of a delta chunk.

use super::error::invalid;
use crate::chunk::DELTA_CHUNK_BYTES;
use crate::convert::{index_to_usize, to_u64};
use crate::element::{ElementWidth, load, magnitude_mask};
use crate::error::{Error, ErrorKind, Result};

/// Elements of each block but the last. A block is the unit of checksums.
pub(super) const BLOCK_ELEMENTS: usize = 1 << 16;

/// Largest number of classes of a delta chunk.
pub(super) const MAX_CLASSES: usize = 4;

/// Bit of a stored length: the column is a zstd frame.
const FRAME_BIT: u32 = 1 << 31;

/// First count of a dense block.
const DENSE: u16 = u16::MAX;

/// Largest number of bytes of a sparse block in a position column.
pub(super) const MAX_COUNT: usize = DENSE as usize - 1;

/// Header of a delta chunk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) width: ElementWidth,
    pub(super) elements: usize,
    pub(super) classes: usize,
    /// Whether the positions of each class are a bitmap.
    pub(super) bitmaps: [bool; MAX_CLASSES],
    /// Smallest pattern without sign of each class but the first. Unused entries are above all patterns.
    pub(super) thresholds: [u32; MAX_CLASSES - 1],
    pub(super) blocks: Vec<Block>,
}

/// Header of a block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Block {
    /// CRC-32 of the result.
    pub(super) crc: u32,
    /// Whether the chunk holds all elements of the block.
    pub(super) dense: bool,
    /// Bytes of the block in the position column of each class.
    pub(super) counts: [u16; MAX_CLASSES],
}

/// How a column is stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct StoredColumn {
    pub(super) len: usize,
    pub(super) is_frame: bool,
}

impl Header {
    /// Returns the number of columns: positions and values of each class, wide values, and exceptions.
    pub(super) fn columns(&self) -> usize {
        2 * self.classes + 2
    }

    /// Returns the number of elements of a block.
    pub(super) fn block_len(&self, block: usize) -> usize {
        (self.elements - block * BLOCK_ELEMENTS).min(BLOCK_ELEMENTS)
    }

    /// Returns the number of bytes of the dense blocks.
    pub(super) fn dense_len(&self) -> usize {
        let blocks = self.blocks.iter().enumerate().filter(|(_, block)| block.dense);
        blocks.map(|(number, _)| self.block_len(number) * self.width.bytes()).sum()
    }

    /// Returns the CRC-32 of all blocks of the result.
    pub(super) fn crc32(&self) -> u32 {
        let mut crc = crc32fast::Hasher::new();
        for (number, block) in self.blocks.iter().enumerate() {
            let len = to_u64(self.block_len(number) * self.width.bytes());
            crc.combine(&crc32fast::Hasher::new_with_initial_len(block.crc, len));
        }
        crc.finalize()
    }

    /// Appends the header to `chunk`. `columns` has [`Self::columns`] entries.
    pub(super) fn write(&self, columns: &[StoredColumn], chunk: &mut Vec<u8>) {
        let bitmaps =
            self.bitmaps.iter().rev().fold(0, |bits, bitmap| bits << 1 | u8::from(*bitmap));
        let classes = u8::try_from(self.classes).expect("at most 4");
        chunk.extend([classes, bitmaps]);
        for threshold in &self.thresholds[..self.classes - 1] {
            chunk.extend(&threshold.to_le_bytes()[..self.width.bytes()]);
        }
        self.blocks.iter().for_each(|block| chunk.extend(block.crc.to_le_bytes()));
        for block in &self.blocks {
            let counts = if block.dense { &[DENSE] } else { &block.counts[..self.classes] };
            for count in counts {
                chunk.extend(count.to_le_bytes());
            }
        }
        for column in columns {
            let len = u32::try_from(column.len).expect("a column is smaller than 2^31 bytes");
            chunk.extend((len | if column.is_frame { FRAME_BIT } else { 0 }).to_le_bytes());
        }
    }

    /// Reads the header of a chunk of `elements` elements. Returns it, its columns, and the bytes after it.
    pub(super) fn read(
        chunk: &[u8],
        width: ElementWidth,
        elements: usize,
    ) -> Result<(Self, Vec<StoredColumn>, &[u8])> {
        let mut rest = chunk;
        let [classes, bitmaps] = take(&mut rest)?;
        let classes = usize::from(classes);
        if !(1..=MAX_CLASSES).contains(&classes) {
            return Err(invalid(format_args!("{classes} classes")));
        }
        if bitmaps >> classes != 0 {
            return Err(invalid(format_args!("bitmap flags {bitmaps:#x} of {classes} classes")));
        }
        let thresholds = read_thresholds(width, classes, &mut rest)?;
        let mut blocks = vec![Block::default(); elements.div_ceil(BLOCK_ELEMENTS)];
        for block in &mut blocks {
            block.crc = u32::from_le_bytes(take(&mut rest)?);
        }
        for block in &mut blocks {
            let first = u16::from_le_bytes(take(&mut rest)?);
            block.dense = first == DENSE;
            if block.dense {
                continue;
            }
            block.counts[0] = first;
            for count in &mut block.counts[1..classes] {
                *count = u16::from_le_bytes(take(&mut rest)?);
            }
        }
        let bitmaps = std::array::from_fn(|class| bitmaps >> class & 1 != 0);
        let header = Self { width, elements, classes, bitmaps, thresholds, blocks };
        let mut columns = Vec::with_capacity(header.columns());
        for _ in 0..header.columns() {
            let stored = u32::from_le_bytes(take(&mut rest)?);
            let len = index_to_usize(stored & !FRAME_BIT);
            columns.push(StoredColumn { len, is_frame: stored & FRAME_BIT != 0 });
        }
        header.check_len(&columns, rest.len())?;
        Ok((header, columns, rest))
    }

    /// Checks that `len` bytes after the header are the columns and the dense blocks.
    fn check_len(&self, columns: &[StoredColumn], len: usize) -> Result<()> {
        let lens = columns.iter().map(|column| column.len).chain([self.dense_len()]);
        let expected: u64 = lens.map(to_u64).sum();
        if expected != to_u64(len) {
            return Err(invalid(format_args!("{len} bytes after the lengths, not {expected}")));
        }
        Ok(())
    }
}

/// Returns the thresholds of a chunk without classes by threshold.
pub(super) const NO_THRESHOLDS: [u32; MAX_CLASSES - 1] = [u32::MAX; MAX_CLASSES - 1];

fn read_thresholds(
    width: ElementWidth,
    classes: usize,
    rest: &mut &[u8],
) -> Result<[u32; MAX_CLASSES - 1]> {
    let (mut thresholds, mut previous) = (NO_THRESHOLDS, 0);
    for threshold in &mut thresholds[..classes - 1] {
        let (value, max) = match width {
            ElementWidth::One => (load(&take::<1>(rest)?), magnitude_mask::<1>()),
            ElementWidth::Two => (load(&take::<2>(rest)?), magnitude_mask::<2>()),
            ElementWidth::Four => (load(&take::<4>(rest)?), magnitude_mask::<4>()),
        };
        if value <= previous || value > max {
            let detail = format_args!("threshold {value} after {previous}, at most {max}");
            return Err(invalid(detail));
        }
        (*threshold, previous) = (value, value);
    }
    Ok(thresholds)
}

fn take<const N: usize>(rest: &mut &[u8]) -> Result<[u8; N]> {
    let (field, after) = rest.split_first_chunk().ok_or_else(|| {
        invalid(format_args!("the header ends {} bytes too early", N - rest.len()))
    })?;
    *rest = after;
    Ok(*field)
}

/// Returns the number of elements of a chunk of `len` bytes.
///
/// # Errors
///
/// `TargetSize` if that is more than a chunk has, or no whole number of elements.
pub(super) fn chunk_elements(len: usize, width: ElementWidth) -> Result<usize> {
    if to_u64(len) > DELTA_CHUNK_BYTES || !len.is_multiple_of(width.bytes()) {
        return Err(Error::new(ErrorKind::TargetSize).with_detail(format_args!(
            "{len} bytes, not whole elements of {} bytes up to {DELTA_CHUNK_BYTES}",
            width.bytes()
        )));
    }
    Ok(len / width.bytes())
}

/// Splits the memory of a chunk into elements.
///
/// # Errors
///
/// `TargetSize` if the memory is longer than a chunk, or is no whole number of elements.
pub(super) fn elements<const W: usize>(bytes: &[u8], width: ElementWidth) -> Result<&[[u8; W]]> {
    chunk_elements(bytes.len(), width)?;
    Ok(bytes.as_chunks().0)
}
