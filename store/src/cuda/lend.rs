//! Tensors that are lent where they are: in which allocations, and where in these.

use tssd_format::{Layout, Piece};

use super::filling::device_memory;
use super::legacy;
use super::memory::DeviceMemory;
use crate::error::{Error, Result};
use crate::ring::{Allocation, Lent, Loan};

/// Lends what the tensors of an archive are in, once all that they wait for is done; or says why it cannot be lent. All of
/// them must be on one device.
pub(crate) fn lend(layout: &Layout) -> Result<Result<Loan, String>> {
    if let Err(why) = legacy::is_there() {
        return Ok(Err(why));
    }
    let mut lending = Lending::default();
    for job in layout.jobs() {
        let mut why = Ok(());
        let added = job.pieces(|at, piece| {
            if let (Piece::Elsewhere { blob, offset, len }, Ok(())) = (piece, &why) {
                why = match device_memory(blob) {
                    Some(memory) => lending.add(at, memory, (offset, len)),
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
    let Lending { allocations, pieces } = lending;
    Ok(Ok(Loan { process: legacy::this_process(), allocations, pieces }))
}

/// Waits for what the tensors of an archive wait for.
fn settle(layout: &Layout) -> Result<()> {
    let memories: Vec<&DeviceMemory> = layout.elsewhere().filter_map(device_memory).collect();
    let Some(first) = memories.first() else { return Ok(()) };
    let lane = first.device().lane()?;
    memories.iter().try_for_each(|memory| memory.settle(&lane))?;
    lane.finish()
}

#[derive(Default)]
struct Lending {
    allocations: Vec<Allocation>,
    pieces: Vec<Lent>,
}

impl Lending {
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
        let (base, size) = legacy::allocation_of(pointer)?;
        if pointer + len > base + size {
            return Err("a tensor lies in more than one allocation".to_owned());
        }
        let known = self.allocations.iter().position(|allocation| allocation.base == base);
        let number = if let Some(number) = known {
            number
        } else {
            self.allocations.push(Allocation { handle: legacy::handle_of(base)?, base });
            self.allocations.len() - 1
        };
        let piece = Lent {
            at,
            len,
            allocation: u64::try_from(number).expect("usize is at most 64 bits"),
            offset: pointer - base,
        };
        match self.pieces.last_mut() {
            Some(last) if last.goes_on_with(&piece) => last.len += len,
            _ => self.pieces.push(piece),
        }
        Ok(())
    }
}

impl Lent {
    fn goes_on_with(&self, next: &Self) -> bool {
        (self.allocation, self.at + self.len, self.offset + self.len)
            == (next.allocation, next.at, next.offset)
    }
}
