//! CUDA IPC: other processes open memory that its owner has allocated (`cuMemAlloc`) by a handle.
#![expect(unsafe_code, reason = "the driver is a library of C")]

use std::collections::BTreeMap;
use std::ffi::c_char;
use std::sync::{Arc, Mutex, OnceLock, Weak};

use cudarc::driver::sys;

use crate::convert::to_u64;
use crate::device::Device;
use crate::driver::{self, Context, driver_error};
use tssd_store::device::{ExportedAllocation, ExportedRange, HANDLE_BYTES, IpcExport};
use tssd_store::{Error, ErrorKind, Result};

/// Functions that CUDA IPC needs in addition.
const SYMBOLS: [&str; 4] = [
    "cuIpcCloseMemHandle",
    "cuIpcGetMemHandle",
    "cuIpcOpenMemHandle_v2",
    "cuMemGetAddressRange_v2",
];

/// Returns a random ID of this process. Unlike its PID, it is unique across PID namespaces.
pub(crate) fn process_id() -> [u8; 16] {
    static PROCESS: OnceLock<[u8; 16]> = OnceLock::new();
    *PROCESS.get_or_init(|| {
        let mut id = [0; 16];
        getrandom::fill(&mut id).expect("the system has randomness");
        id
    })
}

/// Checks that the driver supports CUDA IPC. The error is the reason why not.
pub(crate) fn check_support() -> Result<(), String> {
    driver::load().map_err(|error| error.to_string())?;
    driver::check_symbols(&SYMBOLS)
}

/// Returns the start and the length of the allocation of a pointer.
///
/// A context must be current on this thread.
pub(crate) fn allocation_of(pointer: u64) -> Result<(u64, u64), String> {
    let (mut base, mut size) = (0, 0);
    // SAFETY: the pointers are valid for both results. Any device pointer may be queried.
    let status = unsafe { sys::cuMemGetAddressRange_v2(&raw mut base, &raw mut size, pointer) };
    status.result().map_err(|error| format!("its allocation is not known: {error}"))?;
    Ok((base, to_u64(size)))
}

/// Returns the handle of an allocation. A context must be current on this thread.
pub(crate) fn handle_of(base: u64) -> Result<[u8; HANDLE_BYTES], String> {
    let mut handle = sys::CUipcMemHandle { reserved: [0; HANDLE_BYTES] };
    // SAFETY: the pointer is valid for a handle. The call fails for memory that has none.
    let status = unsafe { sys::cuIpcGetMemHandle(&raw mut handle, base) };
    status.result().map_err(|error| {
        format!("its memory has no handle (cuMemAlloc gives such memory, expandable segments do not): {error}")
    })?;
    Ok(handle.reserved.map(|byte| byte.to_le_bytes()[0]))
}

/// An allocation of another process, opened by its handle. Dropping it closes it.
struct OpenAllocation {
    context: Context,
    pointer: u64,
    size: u64,
}

impl Drop for OpenAllocation {
    fn drop(&mut self) {
        let Ok(_entered) = self.context.enter() else { return };
        // SAFETY: it was opened here, once, and every user has waited for its own copies.
        let _ = unsafe { sys::cuIpcCloseMemHandle(self.pointer) };
    }
}

/// Open allocations by device and handle: each is opened once and closed once.
type OpenAllocations = BTreeMap<(String, [u8; HANDLE_BYTES]), Weak<OpenAllocation>>;

static OPEN_ALLOCATIONS: Mutex<OpenAllocations> = Mutex::new(BTreeMap::new());

fn open_handle(device: &Device, handle: [u8; HANDLE_BYTES]) -> Result<Arc<OpenAllocation>> {
    let mut allocations = OPEN_ALLOCATIONS.lock().expect("nobody panics while opening");
    let key = (device.uuid(), handle);
    if let Some(known) = allocations.get(&key).and_then(Weak::upgrade) {
        return Ok(known);
    }
    let context = device.context()?;
    let entered = context.enter()?;
    let (mut pointer, raw) =
        (0, sys::CUipcMemHandle { reserved: handle.map(|byte| c_char::from_le_bytes([byte])) });
    let flags = sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
    // SAFETY: the pointer is valid for a result. The driver rejects an invalid or closed handle.
    let status = unsafe { sys::cuIpcOpenMemHandle_v2(&raw mut pointer, raw, flags) };
    status.result().map_err(|error| {
        driver_error("memory that another process lends (it may have ended, or be one of another PID namespace)", error)
    })?;
    // From here on, its drop closes it.
    let mut memory = OpenAllocation { context, pointer, size: 0 };
    let found = allocation_of(pointer);
    (_, memory.size) = found.map_err(|reason| Error::new(ErrorKind::Unsupported, reason))?;
    drop(entered);
    let memory = Arc::new(memory);
    allocations.retain(|_, known| known.strong_count() > 0);
    allocations.insert(key, Arc::downgrade(&memory));
    Ok(memory)
}

/// Returns the start and the length of an allocation of this process that starts at `base`.
fn own_allocation(device: &Device, base: u64) -> Result<(u64, u64)> {
    let _entered = device.context()?.enter()?;
    let found = allocation_of(base).ok().filter(|(start, _)| *start == base);
    found.ok_or_else(|| {
        Error::new(ErrorKind::Corrupt, format_args!("nothing is allocated at {base:#x} of a GPU"))
    })
}

/// Memory that another process exports, addressed by the offsets of the archive.
pub(crate) struct OpenExport {
    _opened: Vec<Arc<OpenAllocation>>,
    /// Offset in the archive, length and device address of each range, in ascending order.
    ranges: Vec<(u64, u64, u64)>,
}

impl OpenExport {
    pub(crate) fn new(device: &Device, export: &IpcExport) -> Result<Self> {
        let is_own = export.process == process_id();
        let mut opened = Vec::new();
        let mut memories = Vec::with_capacity(export.allocations.len());
        for ExportedAllocation { handle, base } in &export.allocations {
            if is_own {
                // This process cannot open its own handles. Forged exports are rejected: `own_allocation` checks the
                // base.
                memories.push(own_allocation(device, *base)?);
                continue;
            }
            let memory = open_handle(device, *handle)?;
            memories.push((memory.pointer, memory.size));
            opened.push(memory);
        }
        let to_range = |range: &ExportedRange| {
            let number = usize::try_from(range.allocation).ok()?;
            let (pointer, size) = *memories.get(number)?;
            let end = range.offset.checked_add(range.len)?;
            range.archive_offset.checked_add(range.len)?;
            (end <= size).then(|| (range.archive_offset, range.len, pointer + range.offset))
        };
        let ranges: Option<Vec<_>> = export.ranges.iter().map(to_range).collect();
        let is_sorted = |ranges: &Vec<(u64, u64, u64)>| {
            ranges.is_sorted_by(|(start, len, _), (next, ..)| start + len <= *next)
        };
        let ranges = ranges.filter(is_sorted).ok_or_else(|| {
            Error::new(ErrorKind::Corrupt, "exported ranges overlap or exceed their allocations")
        })?;
        Ok(Self { _opened: opened, ranges })
    }

    /// Returns the device address of `len` bytes at an offset of the archive, if one range contains them.
    pub(crate) fn device_address(&self, offset: u64, len: u64) -> Option<u64> {
        let before = self.ranges.partition_point(|(start, ..)| *start <= offset);
        let (start, size, pointer) = *self.ranges.get(before.checked_sub(1)?)?;
        let within = offset - start;
        (within.checked_add(len)? <= size).then(|| pointer + within)
    }
}
