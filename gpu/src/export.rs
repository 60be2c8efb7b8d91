//! Tensors that are lent where they are: in which allocations, and where in these.

use tssd_format::{Layout, Piece};

use crate::ipc;
use crate::memory::{DeviceMemory, device_memory};
use tssd_store::device::{ExportedAllocation, ExportedRange, IpcExport};
use tssd_store::{Error, Result};

/// Lends what the tensors of an archive are in, once all that they wait for is done; or says why it cannot be lent. All of
/// them must be on one device.
pub(crate) fn export(layout: &Layout) -> Result<Result<IpcExport, String>> {
    if let Err(why) = ipc::is_there() {
        return Ok(Err(why));
    }
    let mut builder = ExportBuilder::default();
    for job in layout.jobs() {
        let mut why = Ok(());
        let added = job.for_each_piece(|at, piece| {
            if let (Piece::Blob { blob, offset, len }, Ok(())) = (piece, &why) {
                why = match device_memory(blob) {
                    Some(memory) => builder.add(at, memory, (offset, len)),
                    None => Err("not all of its tensors are on a GPU".to_owned()),
                };
            }
            Ok(())
        });
        let _ = added.map_err(|error| Error::request("the memory of a GPU", error))?;
        if let Err(why) = why {
            return Ok(Err(why));
        }
    }
    settle(layout)?;
    let ExportBuilder { allocations, ranges } = builder;
    Ok(Ok(IpcExport { process: ipc::this_process(), allocations, ranges }))
}

/// Waits for what the tensors of an archive wait for.
fn settle(layout: &Layout) -> Result<()> {
    let memories: Vec<&DeviceMemory> = layout.blobs().filter_map(device_memory).collect();
    let Some(first) = memories.first() else { return Ok(()) };
    let lane = first.device().lane()?;
    memories.iter().try_for_each(|memory| memory.settle(&lane))?;
    lane.finish()
}

#[derive(Default)]
struct ExportBuilder {
    allocations: Vec<ExportedAllocation>,
    ranges: Vec<ExportedRange>,
}

impl ExportBuilder {
    fn add(
        &mut self,
        at: u64,
        memory: &DeviceMemory,
        (offset, len): (u64, u64),
    ) -> Result<(), String> {
        if len == 0 {
            return Ok(());
        }
        let pointer = memory.begins(offset, len).map_err(|error| error.to_string())?;
        let context = memory.device().context().map_err(|error| error.to_string())?;
        let _entered = context.enter().map_err(|error| error.to_string())?;
        let (base, size) = ipc::allocation_of(pointer)?;
        if pointer + len > base + size {
            return Err("a tensor lies in more than one allocation".to_owned());
        }
        let known = self.allocations.iter().position(|allocation| allocation.base == base);
        let number = if let Some(number) = known {
            number
        } else {
            self.allocations.push(ExportedAllocation { handle: ipc::handle_of(base)?, base });
            self.allocations.len() - 1
        };
        let range = ExportedRange {
            archive_offset: at,
            len,
            allocation: u64::try_from(number).expect("usize is at most 64 bits"),
            offset: pointer - base,
        };
        match self.ranges.last_mut() {
            Some(last) if is_adjacent(last, &range) => last.len += len,
            _ => self.ranges.push(range),
        }
        Ok(())
    }
}

/// Whether two ranges are one in the archive and in their allocation.
fn is_adjacent(range: &ExportedRange, next: &ExportedRange) -> bool {
    (range.allocation, range.archive_offset + range.len, range.offset + range.len)
        == (next.allocation, next.archive_offset, next.offset)
}
