//! Memory that its owner has allocated by itself (`cuMemAlloc`): other processes open it by a handle.
#![expect(unsafe_code, reason = "the driver is a library of C")]

use std::collections::BTreeMap;
use std::ffi::c_char;
use std::sync::{Arc, Mutex, OnceLock, Weak};

use cudarc::driver::sys;
use tssd_format::{Layout, Piece};

use super::device::Device;
use super::driver::{self, Context, failed};
use super::filling::device_memory;
use super::memory::DeviceMemory;
use crate::error::{Error, ErrorKind, Result};
use crate::ring::{Allocation, HANDLE_BYTES, Lent, Loan};

/// What is called here, beside what is always.
const SYMBOLS: [&str; 4] = [
    "cuIpcCloseMemHandle",
    "cuIpcGetMemHandle",
    "cuIpcOpenMemHandle_v2",
    "cuMemGetAddressRange_v2",
];

/// This process, in other words than its number, which others may have in other namespaces.
fn this_process() -> [u8; 16] {
    static THIS: OnceLock<[u8; 16]> = OnceLock::new();
    *THIS.get_or_init(|| {
        let mut bytes = [0; 16];
        getrandom::fill(&mut bytes).expect("the system has randomness");
        bytes
    })
}

/// Lends what the tensors of an archive are in, once all that they wait for is done; or says why it cannot be lent. All of
/// them must be on one device.
pub(crate) fn lend(layout: &Layout) -> Result<std::result::Result<Loan, String>> {
    if let Err(why) =
        driver::load().map_err(|error| error.to_string()).and_then(|()| driver::has(&SYMBOLS))
    {
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
    Ok(Ok(Loan { process: this_process(), allocations, pieces }))
}

/// Waits for what the tensors of an archive wait for.
fn settle(layout: &Layout) -> Result<()> {
    let memories: Vec<&DeviceMemory> = layout.elsewhere().filter_map(device_memory).collect();
    let Some(first) = memories.first() else { return Ok(()) };
    first.device().with_lane(|lane| {
        memories.iter().try_for_each(|memory| memory.settle(lane))?;
        lane.finish()
    })
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
    ) -> std::result::Result<(), String> {
        if len == 0 {
            return Ok(());
        }
        let pointer = memory.begins(offset, len).map_err(|error| error.to_string())?;
        let context = memory.device().context().map_err(|error| error.to_string())?;
        let _entered = context.enter().map_err(|error| error.to_string())?;
        let (base, size) = allocation_of(pointer)?;
        if pointer + len > base + size {
            return Err("a tensor lies in more than one allocation".to_owned());
        }
        let known = self.allocations.iter().position(|allocation| allocation.base == base);
        let number = if let Some(number) = known {
            number
        } else {
            self.allocations.push(Allocation { handle: handle_of(base)?, base });
            self.allocations.len() - 1
        };
        let piece = Lent { at, len, allocation: wide(number), offset: pointer - base };
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

/// Where the allocation of a pointer begins, and how many bytes it has. A context is this thread's.
fn allocation_of(pointer: u64) -> std::result::Result<(u64, u64), String> {
    let (mut base, mut size) = (0, 0);
    // SAFETY: there is room for both; any pointer may be asked about.
    let asked = unsafe { sys::cuMemGetAddressRange_v2(&raw mut base, &raw mut size, pointer) };
    asked.result().map_err(|error| format!("its allocation is not known: {error}"))?;
    Ok((base, wide(size)))
}

/// What others open an allocation by. A context is this thread's.
fn handle_of(base: u64) -> std::result::Result<[u8; HANDLE_BYTES], String> {
    let mut handle = sys::CUipcMemHandle { reserved: [0; HANDLE_BYTES] };
    // SAFETY: there is room for a handle; what has none is refused.
    let asked = unsafe { sys::cuIpcGetMemHandle(&raw mut handle, base) };
    asked.result().map_err(|error| {
        format!("its memory has no handle (cuMemAlloc gives such memory, expandable segments do not): {error}")
    })?;
    Ok(handle.reserved.map(|byte| byte.to_le_bytes()[0]))
}

/// What was opened by a handle, until nobody uses it any more.
struct Opened {
    context: Context,
    pointer: u64,
    size: u64,
}

impl Drop for Opened {
    fn drop(&mut self) {
        let Ok(_entered) = self.context.enter() else { return };
        // SAFETY: it was opened here, once, and whoever begins something with it has waited for that.
        let _ = unsafe { sys::cuIpcCloseMemHandle(self.pointer) };
    }
}

/// By device and handle: each is opened once, and closed once.
type OpenedBy = BTreeMap<(String, [u8; HANDLE_BYTES]), Weak<Opened>>;

static OPENED: Mutex<OpenedBy> = Mutex::new(BTreeMap::new());

fn open(device: &Device, handle: [u8; HANDLE_BYTES]) -> Result<Arc<Opened>> {
    let mut opened = OPENED.lock().expect("nobody panics while opening");
    let name = (device.uuid(), handle);
    if let Some(known) = opened.get(&name).and_then(Weak::upgrade) {
        return Ok(known);
    }
    let context = device.context()?;
    let entered = context.enter()?;
    let (mut pointer, raw) =
        (0, sys::CUipcMemHandle { reserved: handle.map(|byte| c_char::from_le_bytes([byte])) });
    let flags = sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
    // SAFETY: there is room for a pointer; the driver refuses what is no handle, or no longer one.
    let asked = unsafe { sys::cuIpcOpenMemHandle_v2(&raw mut pointer, raw, flags) };
    asked.result().map_err(|error| {
        failed("memory that another process lends (it may have ended, or be one of another PID namespace)", error)
    })?;
    // Closed by its drop from here on.
    let mut memory = Opened { context, pointer, size: 0 };
    let found = allocation_of(pointer);
    (_, memory.size) = found.map_err(|why| Error::new(ErrorKind::Unsupported, why))?;
    drop(entered);
    let memory = Arc::new(memory);
    opened.retain(|_, known| known.strong_count() > 0);
    opened.insert(name, Arc::downgrade(&memory));
    Ok(memory)
}

/// An allocation of this process, by where it begins.
fn own(device: &Device, base: u64) -> Result<(u64, u64)> {
    let _entered = device.context()?.enter()?;
    let found = allocation_of(base).ok().filter(|(start, _)| *start == base);
    found.ok_or_else(|| {
        Error::new(ErrorKind::Corrupt, format_args!("nothing is allocated at {base:#x} of a GPU"))
    })
}

/// Memory that another process lends, as the file that it is of.
pub(super) struct Borrowed {
    _opened: Vec<Arc<Opened>>,
    /// Where each piece begins in the file, how many bytes it has, and where it is.
    pieces: Vec<(u64, u64, u64)>,
}

impl Borrowed {
    pub(super) fn new(device: &Device, loan: &Loan) -> Result<Self> {
        let is_own = loan.process == this_process();
        let mut opened = Vec::new();
        let mut places = Vec::with_capacity(loan.allocations.len());
        for Allocation { handle, base } in &loan.allocations {
            if is_own {
                // What this process lends to itself it has; foreign bytes have said so.
                places.push(own(device, *base)?);
                continue;
            }
            let memory = open(device, *handle)?;
            places.push((memory.pointer, memory.size));
            opened.push(memory);
        }
        let place = |lent: &Lent| {
            let number = usize::try_from(lent.allocation).ok()?;
            let (pointer, size) = *places.get(number)?;
            let end = lent.offset.checked_add(lent.len)?;
            lent.at.checked_add(lent.len)?;
            (end <= size).then(|| (lent.at, lent.len, pointer + lent.offset))
        };
        let pieces: Option<Vec<_>> = loan.pieces.iter().map(place).collect();
        let is_sorted = |pieces: &Vec<(u64, u64, u64)>| {
            pieces.is_sorted_by(|(at, len, _), (next, ..)| at + len <= *next)
        };
        let pieces = pieces.filter(is_sorted).ok_or_else(|| {
            Error::new(ErrorKind::Corrupt, "memory that is lent, and not as it is said to be")
        })?;
        Ok(Self { _opened: opened, pieces })
    }

    /// Where so many bytes from an offset of the file on are, if they are in one piece.
    pub(super) fn place(&self, offset: u64, len: u64) -> Option<u64> {
        let before = self.pieces.partition_point(|(at, ..)| *at <= offset);
        let (at, all, pointer) = *self.pieces.get(before.checked_sub(1)?)?;
        let start = offset - at;
        (start.checked_add(len)? <= all).then(|| pointer + start)
    }
}

fn wide(number: usize) -> u64 {
    u64::try_from(number).expect("usize is at most 64 bits")
}
