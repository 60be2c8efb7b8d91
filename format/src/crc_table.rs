//! Entries of the checksum table of a shard, without the rest of its index. Spec: F-067, and section 7, Shard.

use std::collections::BTreeSet;
use std::ops::Range;

use rend::u32_le;

use crate::blob::Blob;
use crate::checksum::{CRCS_PER_PAGE, checksum};
use crate::convert::{to_u64, to_usize};
use crate::error::{Error, ErrorKind, Result};
use crate::memory::zeroed;
use crate::shard_file::ShardFile;

/// Pages with at most this many pages between them are read at once.
const MAX_GAP_PAGES: usize = 4;

/// A table of at most this many pages is read as a whole (16 KiB), with the checksums of its pages: one read is faster.
const WHOLE_MAX_PAGES: usize = 4;

const ENTRY_BYTES: usize = size_of::<u32_le>();

impl ShardFile {
    /// Reads entries of the checksum table of the shard, and proves them with this record.
    ///
    /// Each range is one of entries. Reads the checksums of the pages (4 bytes for 4 KiB of the table), and the pages
    /// with these entries.
    ///
    /// # Errors
    ///
    /// - `CrcPages` (F-067) if the checksum of a page does not match.
    /// - `DistributedMismatch` (F-084) if a range is not in the table, or the page checksums do not match the record.
    /// - `Io` if the file cannot be read.
    pub fn read_crcs(&self, blob: &dyn Blob, ranges: &[Range<u64>]) -> Result<Vec<Vec<u32>>> {
        let len = u64::from(self.crcs.len);
        if ranges.iter().any(|range| range.start > range.end || range.end > len) {
            return Err(Error::new(ErrorKind::DistributedMismatch)
                .with_detail(format_args!("{}: a storage is not in `crcs`", self.name)));
        }
        let table = CrcPages::read(self, blob, ranges)?;
        Ok(ranges.iter().map(|range| table.entries(range)).collect())
    }
}

/// The pages of a checksum table that have been read. The others are empty.
struct CrcPages(Vec<Vec<u32_le>>);

impl CrcPages {
    fn read(shard: &ShardFile, blob: &dyn Blob, ranges: &[Range<u64>]) -> Result<Self> {
        let len = usize::try_from(shard.crcs.len).unwrap_or(usize::MAX);
        let count = len.div_ceil(CRCS_PER_PAGE);
        let start = shard.index_off + u64::from(shard.crcs.offset);
        let read = |entries: Range<usize>| -> Result<Vec<u32_le>> {
            let mut bytes = zeroed(entries.len() * ENTRY_BYTES)?;
            blob.read_exact_at(&mut bytes, start + to_u64(entries.start * ENTRY_BYTES))?;
            let (entries, _) = bytes.as_chunks::<ENTRY_BYTES>();
            Ok(entries.iter().map(|entry| u32::from_le_bytes(*entry).into()).collect())
        };
        let mut pages = vec![Vec::new(); count];
        let sums = if count <= WHOLE_MAX_PAGES {
            let mut all = read(0..len + count)?;
            let sums = all.split_off(len);
            for (page, entries) in pages.iter_mut().zip(all.chunks(CRCS_PER_PAGE)) {
                *page = entries.to_vec();
            }
            sums
        } else {
            for batch in batches(ranges) {
                let entries = batch.start * CRCS_PER_PAGE..(batch.end * CRCS_PER_PAGE).min(len);
                let entries = read(entries)?;
                for (page, entries) in pages[batch].iter_mut().zip(entries.chunks(CRCS_PER_PAGE)) {
                    *page = entries.to_vec();
                }
            }
            read(len..len + count)?
        };
        if checksum(bytemuck::cast_slice(&sums)) != shard.crcs.pages_crc32 {
            return Err(Error::new(ErrorKind::DistributedMismatch).with_detail(format_args!(
                "{}: `crc_pages` does not match the manifest",
                shard.name
            )));
        }
        let is_damaged = |(page, sum): (&Vec<u32_le>, &u32_le)| {
            !page.is_empty() && checksum(bytemuck::cast_slice(page)) != sum.to_native()
        };
        if pages.iter().zip(&sums).any(is_damaged) {
            return Err(Error::new(ErrorKind::CrcPages).with_path(&shard.name));
        }
        Ok(Self(pages))
    }

    fn entries(&self, range: &Range<u64>) -> Vec<u32> {
        let entry = |number: usize| self.0[number / CRCS_PER_PAGE][number % CRCS_PER_PAGE];
        let range = to_usize(range.start)..to_usize(range.end);
        range.map(|number| entry(number).to_native()).collect()
    }
}

/// Returns the pages with these entries, as ranges to read at once.
fn batches(ranges: &[Range<u64>]) -> Vec<Range<usize>> {
    let pages = ranges.iter().filter(|range| !range.is_empty()).flat_map(|range| {
        to_usize(range.start) / CRCS_PER_PAGE..to_usize(range.end).div_ceil(CRCS_PER_PAGE)
    });
    let pages: BTreeSet<usize> = pages.collect();
    let mut batches: Vec<Range<usize>> = Vec::new();
    for page in pages {
        match batches.last_mut() {
            Some(last) if page <= last.end + MAX_GAP_PAGES => last.end = page + 1,
            _ => batches.push(page..page + 1),
        }
    }
    batches
}
