//! Export of tensors in place: the allocations that contain them, and their ranges.

use tssd_format::{Layout, Piece};

use crate::convert::to_u64;
use crate::ipc;
use crate::memory::{DeviceMemory, device_memory};
use tssd_store::device::{ExportedAllocation, ExportedRange, IpcExport};
use tssd_store::{Error, Result};

/// Exports the allocations that contain the tensors of an archive.
///
/// It waits for all work that the tensors wait for. If the export is impossible, it returns the reason. All tensors
/// must be on one device.
pub(crate) fn export(layout: &Layout) -> Result<Result<IpcExport, String>> {
    if let Err(reason) = ipc::check_support() {
        return Ok(Err(reason));
    }
    let mut builder = ExportBuilder::default();
    for job in layout.jobs() {
        let mut reason = Ok(());
        let added = job.for_each_piece(|at, piece| {
            if let (Piece::Blob { blob, offset, len }, Ok(())) = (piece, &reason) {
                reason = match device_memory(blob) {
                    Some(memory) => builder.add(at, memory, offset, len),
                    None => Err("not all of its tensors are on a GPU".to_owned()),
                };
            }
            Ok(())
        });
        let _ = added.map_err(|error| Error::from_request("the memory of a GPU", error))?;
        if let Err(reason) = reason {
            return Ok(Err(reason));
        }
    }
    wait_for_tensors(layout)?;
    let ExportBuilder { allocations, ranges } = builder;
    Ok(Ok(IpcExport { process: ipc::process_id(), allocations, ranges }))
}

/// Waits for the work that the tensors of an archive wait for.
fn wait_for_tensors(layout: &Layout) -> Result<()> {
    let memories: Vec<&DeviceMemory> = layout.blobs().filter_map(device_memory).collect();
    let Some(first) = memories.first() else { return Ok(()) };
    let stream = first.device().stream()?;
    memories.iter().try_for_each(|memory| memory.wait_until_ready(&stream))?;
    stream.finish()
}

#[derive(Default)]
struct ExportBuilder {
    allocations: Vec<ExportedAllocation>,
    ranges: Vec<ExportedRange>,
}

impl ExportBuilder {
    fn add(&mut self, at: u64, memory: &DeviceMemory, offset: u64, len: u64) -> Result<(), String> {
        if len == 0 {
            return Ok(());
        }
        let pointer = memory.device_address(offset, len).map_err(|error| error.to_string())?;
        let context = memory.device().context().map_err(|error| error.to_string())?;
        let _entered = context.enter().map_err(|error| error.to_string())?;
        let (base, size) = ipc::allocation_of(pointer)?;
        if pointer + len > base + size {
            return Err("a tensor lies in more than one allocation".to_owned());
        }
        let index = self.allocations.iter().position(|allocation| allocation.base == base);
        let index = if let Some(index) = index {
            index
        } else {
            self.allocations.push(ExportedAllocation { handle: ipc::handle_of(base)?, base });
            self.allocations.len() - 1
        };
        let range = ExportedRange {
            archive_offset: at,
            len,
            allocation: to_u64(index),
            offset: pointer - base,
        };
        match self.ranges.last_mut() {
            Some(last) if is_adjacent(last, &range) => last.len += len,
            _ => self.ranges.push(range),
        }
        Ok(())
    }
}

/// Whether two ranges are adjacent in the archive and in their allocation.
fn is_adjacent(range: &ExportedRange, next: &ExportedRange) -> bool {
    (range.allocation, range.archive_offset + range.len, range.offset + range.len)
        == (next.allocation, next.archive_offset, next.offset)
}
