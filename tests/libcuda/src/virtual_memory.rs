//! Virtual memory: allocations that have handles, and reserved addresses at which they are mapped.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{c_int, c_uint, c_void};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use crate::memory::{self, Kind, Range};
use crate::pages::{GRANULE, Pages};
use crate::result::Code;
use crate::{devices, held};

/// The kind of what is shared that is a descriptor of a file: the only one.
const DESCRIPTOR: c_uint = 1;

/// Where memory is, or who uses it.
#[repr(C)]
struct CUmemLocation {
    kind: c_uint,
    id: c_int,
}

/// What memory is to be.
#[repr(C)]
pub struct CUmemAllocationProp {
    kind: c_uint,
    shared: c_uint,
    location: CUmemLocation,
    _windows: *const c_void,
    _flags: [u8; 8],
}

/// Who may use memory.
#[repr(C)]
pub struct CUmemAccessDesc {
    location: CUmemLocation,
    flags: c_uint,
}

struct Handle {
    pages: Arc<Pages>,
    is_shared: bool,
}

static HANDLES: Mutex<BTreeMap<u64, Handle>> = Mutex::new(BTreeMap::new());

/// Reserved addresses: where they begin, and how many they are. Who locks this and the ranges locks this first.
static RESERVED: Mutex<BTreeMap<usize, usize>> = Mutex::new(BTreeMap::new());

pub(crate) fn is_supported() -> bool {
    std::env::var_os("TSSD_FAKE_CUDA_NO_VMM").is_none()
}

fn check_supported() -> Result<(), Code> {
    if is_supported() { Ok(()) } else { Err(Code::NotSupported) }
}

/// Makes an address and lengths numbers of the system, if they are multiples of what they are to be multiples of.
fn check(pointer: u64, len: usize) -> Result<(usize, usize), Code> {
    let start = usize::try_from(pointer).map_err(|_| Code::InvalidValue)?;
    let end = start.checked_add(len).ok_or(Code::InvalidValue)?;
    let is_whole = start.is_multiple_of(GRANULE) && len.is_multiple_of(GRANULE) && len > 0;
    if is_whole { Ok((start, end)) } else { Err(Code::InvalidValue) }
}

impl CUmemLocation {
    fn device(&self) -> Result<c_int, Code> {
        const DEVICE: c_uint = 1;
        match self.kind {
            DEVICE if (0..devices()).contains(&self.id) => Ok(self.id),
            DEVICE => Err(Code::InvalidDevice),
            _ => Err(Code::InvalidValue),
        }
    }
}

impl CUmemAllocationProp {
    /// The device, if it can have such memory.
    fn device(&self) -> Result<c_int, Code> {
        const PINNED: c_uint = 1;
        check_supported()?;
        match (self.kind, self.shared) {
            (PINNED, 0 | DESCRIPTOR) => self.location.device(),
            (PINNED, _) => Err(Code::NotSupported),
            _ => Err(Code::InvalidValue),
        }
    }
}

pub(crate) fn granularity(wanted: &CUmemAllocationProp, option: c_uint) -> Result<usize, Code> {
    wanted.device()?;
    // What is possible, or what is recommended.
    if option > 1 { Err(Code::InvalidValue) } else { Ok(GRANULE) }
}

fn give_handle(pages: Arc<Pages>, is_shared: bool) -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0xFA4E_0000_0001);
    let handle = NEXT.fetch_add(1, Ordering::Relaxed);
    held(&HANDLES).insert(handle, Handle { pages, is_shared });
    handle
}

pub(crate) fn create(len: usize, wanted: &CUmemAllocationProp, flags: u64) -> Result<u64, Code> {
    let device = wanted.device()?;
    check(0, len)?;
    if flags != 0 {
        return Err(Code::InvalidValue);
    }
    Ok(give_handle(Pages::new(device, len)?, wanted.shared == DESCRIPTOR))
}

/// What is mapped stays.
pub(crate) fn release(handle: u64) -> Result<(), Code> {
    held(&HANDLES).remove(&handle).map(drop).ok_or(Code::InvalidValue)
}

pub(crate) fn export(handle: u64, kind: c_uint, flags: u64) -> Result<OwnedFd, Code> {
    let handles = held(&HANDLES);
    let found = handles.get(&handle).ok_or(Code::InvalidValue)?;
    match (kind, flags) {
        (DESCRIPTOR, 0) if found.is_shared => found.pages.export(),
        (DESCRIPTOR, _) => Err(Code::InvalidValue),
        _ => Err(Code::NotSupported),
    }
}

/// The descriptor stays the caller's.
pub(crate) fn import(descriptor: usize, kind: c_uint) -> Result<u64, Code> {
    check_supported()?;
    if kind != DESCRIPTOR {
        return Err(Code::NotSupported);
    }
    let pages = Pages::open(format!("/proc/self/fd/{descriptor}").as_ref())?;
    Ok(give_handle(pages, true))
}

pub(crate) fn reserve(len: usize, alignment: usize, flags: u64) -> Result<u64, Code> {
    check_supported()?;
    check(0, len)?;
    if flags != 0 || !(alignment == 0 || alignment.is_power_of_two()) {
        return Err(Code::InvalidValue);
    }
    let start = memory::reserve(len, alignment.max(GRANULE))?;
    held(&RESERVED).insert(start, len);
    Ok(start as u64)
}

pub(crate) fn free(pointer: u64, len: usize) -> Result<(), Code> {
    let (start, end) = check(pointer, len)?;
    let mut reserved = held(&RESERVED);
    let is_mapped = memory::ranges().range(start..end).next().is_some();
    if is_mapped || reserved.get(&start) != Some(&len) {
        return Err(Code::InvalidValue);
    }
    reserved.remove(&start);
    memory::unreserve(start, len);
    Ok(())
}

pub(crate) fn map(
    pointer: u64,
    len: usize,
    offset: usize,
    handle: u64,
    flags: u64,
) -> Result<(), Code> {
    let (start, end) = check(pointer, len)?;
    // The real one maps allocations from their beginning on, too.
    if offset != 0 || flags != 0 {
        return Err(Code::InvalidValue);
    }
    let pages = held(&HANDLES).get(&handle).map(|handle| handle.pages.clone());
    let pages = pages.filter(|pages| len <= pages.len).ok_or(Code::InvalidValue)?;
    let reserved = held(&RESERVED);
    let (first, all) = reserved.range(..=start).next_back().ok_or(Code::InvalidValue)?;
    let mut ranges = memory::ranges();
    let before = ranges.range(..end).next_back();
    let overlaps = before.is_some_and(|(other, range)| start < other + range.len);
    if overlaps || first + all < end {
        return Err(Code::InvalidValue);
    }
    ranges.insert(start, Range { len, pages, kind: Kind::Mapped(BTreeSet::new()) });
    Ok(())
}

/// The beginnings of maps that are these addresses, all of them and no others.
fn maps(ranges: &BTreeMap<usize, Range>, start: usize, end: usize) -> Result<Vec<usize>, Code> {
    let mut found = Vec::new();
    let mut at = start;
    while at < end {
        match ranges.get(&at) {
            Some(Range { len, kind: Kind::Mapped(_), .. }) => {
                found.push(at);
                at += len;
            }
            _ => return Err(Code::InvalidValue),
        }
    }
    if at == end { Ok(found) } else { Err(Code::InvalidValue) }
}

pub(crate) fn unmap(pointer: u64, len: usize) -> Result<(), Code> {
    let (start, end) = check(pointer, len)?;
    let mut ranges = memory::ranges();
    for found in maps(&ranges, start, end)? {
        ranges.remove(&found);
    }
    Ok(())
}

pub(crate) fn set_access(pointer: u64, len: usize, wanted: &[CUmemAccessDesc]) -> Result<(), Code> {
    const NONE: c_uint = 0;
    const READ: c_uint = 1;
    const READ_WRITE: c_uint = 3;
    let (start, end) = check(pointer, len)?;
    let mut all = Vec::new();
    for one in wanted {
        let may_use = match one.flags {
            NONE => false,
            READ_WRITE => true,
            READ => return Err(Code::NotSupported),
            _ => return Err(Code::InvalidValue),
        };
        all.push((one.location.device()?, may_use));
    }
    let mut ranges = memory::ranges();
    for found in maps(&ranges, start, end)? {
        let kind = ranges.get_mut(&found).map(|range| &mut range.kind);
        let Some(Kind::Mapped(devices)) = kind else { return Err(Code::InvalidValue) };
        for (device, may_use) in &all {
            if *may_use {
                devices.insert(*device);
            } else {
                devices.remove(device);
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsRawFd, FromRawFd};

    use super::*;
    use crate::{
        cuCtxSetCurrent, cuIpcGetMemHandle, cuMemAddressFree, cuMemAddressReserve, cuMemCreate,
        cuMemExportToShareableHandle, cuMemFree_v2, cuMemImportFromShareableHandle, cuMemMap,
        cuMemRelease, cuMemSetAccess, cuMemUnmap, cuMemcpyDtoDAsync_v2, cuMemcpyDtoHAsync_v2,
        cuMemcpyHtoDAsync_v2, cuMemsetD8Async, cuPointerGetAttribute, cuStreamSynchronize,
        tssd_fake_cuda_memory,
    };

    /// The default stream.
    const STREAM: *mut c_void = std::ptr::null_mut();

    fn place(id: c_int) -> CUmemLocation {
        CUmemLocation { kind: 1, id }
    }

    fn create(len: usize, shared: c_uint) -> Result<u64, u32> {
        let location = place(0);
        let wanted = CUmemAllocationProp {
            kind: 1,
            shared,
            location,
            _windows: std::ptr::null(),
            _flags: [0; 8],
        };
        let mut handle = 0;
        // SAFETY: there is room for a handle.
        match unsafe { cuMemCreate(&raw mut handle, len, &raw const wanted, 0) } {
            0 => Ok(handle),
            code => Err(code),
        }
    }

    fn reserve(len: usize) -> u64 {
        let mut pointer = 0;
        // SAFETY: there is room for a pointer.
        assert_eq!(unsafe { cuMemAddressReserve(&raw mut pointer, len, 0, 0, 0) }, 0);
        pointer
    }

    fn import(descriptor: c_int) -> Result<u64, u32> {
        let descriptor = usize::try_from(descriptor).unwrap();
        let (mut handle, shared) = (0, std::ptr::without_provenance_mut(descriptor));
        // SAFETY: there is room for a handle.
        match unsafe { cuMemImportFromShareableHandle(&raw mut handle, shared, 1) } {
            0 => Ok(handle),
            code => Err(code),
        }
    }

    fn allow(pointer: u64, len: usize, flags: c_uint) -> u32 {
        let wanted = CUmemAccessDesc { location: place(0), flags };
        // SAFETY: there is one.
        unsafe { cuMemSetAccess(pointer, len, &raw const wanted, 1) }
    }

    #[test]
    fn layouts_are_those_of_the_driver() {
        assert_eq!(size_of::<CUmemAllocationProp>(), 32);
        assert_eq!(size_of::<CUmemAccessDesc>(), 12);
    }

    #[test]
    fn what_is_exported_is_imported_and_mapped_and_is_the_same_memory() {
        const LEN: usize = 2 * GRANULE;
        let _turn = held(&crate::TESTS);
        assert_eq!(cuCtxSetCurrent(crate::context::of(0).unwrap()), 0);
        assert_eq!(tssd_fake_cuda_memory(0), 0);
        let handle = create(LEN, 1).unwrap();
        let mut descriptor: c_int = -1;
        let room = (&raw mut descriptor).cast();
        // SAFETY: there is room for a descriptor.
        assert_eq!(unsafe { cuMemExportToShareableHandle(room, handle, 1, 0) }, 0);
        // SAFETY: it was given to this test.
        let descriptor = unsafe { OwnedFd::from_raw_fd(descriptor) };
        let other = import(descriptor.as_raw_fd()).unwrap();
        assert_eq!(tssd_fake_cuda_memory(0), LEN as u64);

        // Twice the same, one after the other, and once elsewhere.
        let (twice, once) = (reserve(2 * LEN), reserve(LEN));
        let second = twice + LEN as u64;
        for (pointer, handle) in [(twice, handle), (second, other), (once, other)] {
            assert_eq!(cuMemMap(pointer, LEN, 0, handle, 0), 0);
        }
        let from: Vec<u8> = (0..=255).collect();
        let mut to = vec![0; 256];
        let write = || cuMemcpyHtoDAsync_v2(once + 300, from.as_ptr().cast(), 256, STREAM);
        assert_eq!(write(), 1, "nobody may use it yet");
        assert_eq!(allow(twice, 2 * LEN, 3), 0);
        assert_eq!(write(), 1, "that was elsewhere");
        assert_eq!(allow(once, LEN, 3), 0);
        assert_eq!(write(), 0);
        // Over the border between two maps.
        assert_eq!(cuMemcpyDtoDAsync_v2(second - 100, once + 300, 256, STREAM), 0);
        assert_eq!(cuMemsetD8Async(once + 160, 7, 1, STREAM), 0);
        assert_eq!(cuMemcpyDtoHAsync_v2(to.as_mut_ptr().cast(), once, 256, STREAM), 0);
        assert_eq!(cuStreamSynchronize(STREAM), 0);
        assert_eq!((&to[..156], to[160], to[161]), (&from[100..], 7, 0));
        let mut device = 5;
        // SAFETY: there is room for a number.
        let asked = unsafe { cuPointerGetAttribute((&raw mut device).cast(), 9, second + 1) };
        assert_eq!((asked, device), (0, 0));

        // What is wrong.
        let small = create(GRANULE, 0).unwrap();
        let free = reserve(LEN);
        let granule = GRANULE as u64;
        for (pointer, len, offset, handle) in [
            (free, LEN, 0, small),
            (free, GRANULE, GRANULE, small),
            (free + 4096, GRANULE, 0, small),
            (free, 4096, 0, small),
            (free + granule, LEN, 0, handle),
            (free - granule, GRANULE, 0, small),
            (once + granule, GRANULE, 0, small),
            (free, GRANULE, 0, small + 1),
        ] {
            assert_eq!(cuMemMap(pointer, len, offset, handle, 0), 1);
        }
        assert_eq!(create(4096, 0), Err(1));
        assert_eq!(create(GRANULE, 8), Err(801));
        let room = (&raw mut device).cast();
        // SAFETY: nothing is written.
        let exported = [(small, 1), (handle, 8)]
            .map(|(handle, kind)| unsafe { cuMemExportToShareableHandle(room, handle, kind, 0) });
        assert_eq!(exported, [1, 801]);
        let no_memory = std::fs::File::open("/dev/null").unwrap();
        assert_eq!([import(no_memory.as_raw_fd()), import(12345)], [Err(1); 2]);
        assert_eq!(cuMemFree_v2(once), 1);
        // SAFETY: nothing is written.
        assert_eq!(unsafe { cuIpcGetMemHandle(std::ptr::null_mut(), once) }, 1);
        assert_eq!([cuMemAddressFree(once, LEN), cuMemUnmap(once, GRANULE)], [1; 2]);

        // What is let go of.
        assert_eq!([handle, other, small].map(|handle| cuMemRelease(handle)), [0; 3]);
        assert_eq!(cuMemRelease(handle), 1);
        assert_eq!(tssd_fake_cuda_memory(0), LEN as u64);
        assert_eq!(allow(once, LEN, 0), 0);
        assert_eq!(write(), 1, "nobody may use it any more");
        assert_eq!([cuMemUnmap(once, LEN), cuMemUnmap(twice, 2 * LEN)], [0; 2]);
        for (pointer, len) in [(once, LEN), (twice, 2 * LEN), (free, LEN)] {
            assert_eq!([(); 2].map(|()| cuMemAddressFree(pointer, len)), [0, 1]);
        }
        assert_eq!(tssd_fake_cuda_memory(0), 0);
        // There still is a descriptor of it.
        let handle = import(descriptor.as_raw_fd()).unwrap();
        assert_eq!(tssd_fake_cuda_memory(0), LEN as u64);
        assert_eq!(cuMemRelease(handle), 0);
    }
}
