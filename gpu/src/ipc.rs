//! Memory that its owner has allocated by itself (`cuMemAlloc`): other processes open it by a handle.
#![expect(unsafe_code, reason = "the driver is a library of C")]

use std::collections::BTreeMap;
use std::ffi::c_char;
use std::sync::{Arc, Mutex, OnceLock, Weak};

use cudarc::driver::sys;

use crate::device::Device;
use crate::driver::{self, Context, failed};
use tssd_store::device::{ExportedAllocation, ExportedRange, HANDLE_BYTES, IpcExport};
use tssd_store::{Error, ErrorKind, Result};

/// What is called here, beside what is always.
const SYMBOLS: [&str; 4] = [
    "cuIpcCloseMemHandle",
    "cuIpcGetMemHandle",
    "cuIpcOpenMemHandle_v2",
    "cuMemGetAddressRange_v2",
];

/// This process, in other words than its number, which others may have in other namespaces.
pub(crate) fn this_process() -> [u8; 16] {
    static THIS: OnceLock<[u8; 16]> = OnceLock::new();
    *THIS.get_or_init(|| {
        let mut id = [0; 16];
        getrandom::fill(&mut id).expect("the system has randomness");
        id
    })
}

/// Whether the driver has this; or why not.
pub(crate) fn is_there() -> Result<(), String> {
    driver::load().map_err(|error| error.to_string())?;
    driver::has(&SYMBOLS)
}

/// Where the allocation of a pointer begins, and how many bytes it has. A context is this thread's.
pub(crate) fn allocation_of(pointer: u64) -> Result<(u64, u64), String> {
    let (mut base, mut size) = (0, 0);
    // SAFETY: there is room for both; any pointer may be asked about.
    let asked = unsafe { sys::cuMemGetAddressRange_v2(&raw mut base, &raw mut size, pointer) };
    asked.result().map_err(|error| format!("its allocation is not known: {error}"))?;
    Ok((base, wide(size)))
}

/// What others open an allocation by. A context is this thread's.
pub(crate) fn handle_of(base: u64) -> Result<[u8; HANDLE_BYTES], String> {
    let mut handle = sys::CUipcMemHandle { reserved: [0; HANDLE_BYTES] };
    // SAFETY: there is room for a handle; what has none is refused.
    let asked = unsafe { sys::cuIpcGetMemHandle(&raw mut handle, base) };
    asked.result().map_err(|error| {
        format!("its memory has no handle (cuMemAlloc gives such memory, expandable segments do not): {error}")
    })?;
    Ok(handle.reserved.map(|byte| byte.to_le_bytes()[0]))
}

/// What was opened by a handle, until nobody uses it any more.
struct OpenAllocation {
    context: Context,
    pointer: u64,
    size: u64,
}

impl Drop for OpenAllocation {
    fn drop(&mut self) {
        let Ok(_entered) = self.context.enter() else { return };
        // SAFETY: it was opened here, once, and whoever begins something with it has waited for that.
        let _ = unsafe { sys::cuIpcCloseMemHandle(self.pointer) };
    }
}

/// By device and handle: each is opened once, and closed once.
type OpenedBy = BTreeMap<(String, [u8; HANDLE_BYTES]), Weak<OpenAllocation>>;

static OPENED: Mutex<OpenedBy> = Mutex::new(BTreeMap::new());

fn open(device: &Device, handle: [u8; HANDLE_BYTES]) -> Result<Arc<OpenAllocation>> {
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
    let mut memory = OpenAllocation { context, pointer, size: 0 };
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
pub(crate) struct OpenExport {
    _opened: Vec<Arc<OpenAllocation>>,
    /// Where each piece begins in the file, how many bytes it has, and where it is.
    pieces: Vec<(u64, u64, u64)>,
}

impl OpenExport {
    pub(crate) fn new(device: &Device, export: &IpcExport) -> Result<Self> {
        let is_own = export.process == this_process();
        let mut opened = Vec::new();
        let mut places = Vec::with_capacity(export.allocations.len());
        for ExportedAllocation { handle, base } in &export.allocations {
            if is_own {
                // What this process lends to itself it has; foreign bytes have said so.
                places.push(own(device, *base)?);
                continue;
            }
            let memory = open(device, *handle)?;
            places.push((memory.pointer, memory.size));
            opened.push(memory);
        }
        let place = |range: &ExportedRange| {
            let number = usize::try_from(range.allocation).ok()?;
            let (pointer, size) = *places.get(number)?;
            let end = range.offset.checked_add(range.len)?;
            range.archive_offset.checked_add(range.len)?;
            (end <= size).then(|| (range.archive_offset, range.len, pointer + range.offset))
        };
        let pieces: Option<Vec<_>> = export.ranges.iter().map(place).collect();
        let is_sorted = |pieces: &Vec<(u64, u64, u64)>| {
            pieces.is_sorted_by(|(at, len, _), (next, ..)| at + len <= *next)
        };
        let pieces = pieces.filter(is_sorted).ok_or_else(|| {
            Error::new(ErrorKind::Corrupt, "memory that is lent, and not as it is said to be")
        })?;
        Ok(Self { _opened: opened, pieces })
    }

    /// Where so many bytes from an offset of the file on are, if they are in one piece.
    pub(crate) fn place(&self, offset: u64, len: u64) -> Option<u64> {
        let before = self.pieces.partition_point(|(at, ..)| *at <= offset);
        let (at, all, pointer) = *self.pieces.get(before.checked_sub(1)?)?;
        let start = offset - at;
        (start.checked_add(len)? <= all).then(|| pointer + start)
    }
}

fn wide(number: usize) -> u64 {
    u64::try_from(number).expect("usize is at most 64 bits")
}
