//! Virtual memory management: allocations with handles, and their mapping at reserved addresses.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{c_int, c_uint, c_void};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use crate::device_memory::{DeviceMemory, GRANULE};
use crate::memory::{self, MappingKind, Range};
use crate::result::Code;
use crate::{device_count, lock};

/// Kind of shareable handles: a POSIX file descriptor. No other kind is supported.
const DESCRIPTOR: c_uint = 1;

/// A device that holds memory, or has access to it.
#[repr(C)]
struct CUmemLocation {
    kind: c_uint,
    id: c_int,
}

/// Properties of an allocation.
#[repr(C)]
pub struct CUmemAllocationProp {
    kind: c_uint,
    shared: c_uint,
    location: CUmemLocation,
    _windows: *const c_void,
    _flags: [u8; 8],
}

/// Access of a device to memory.
#[repr(C)]
pub struct CUmemAccessDesc {
    location: CUmemLocation,
    flags: c_uint,
}

/// An allocation that a handle refers to.
struct Handle {
    pages: Arc<DeviceMemory>,
    /// Whether it can be exported.
    is_shareable: bool,
}

static HANDLES: Mutex<BTreeMap<u64, Handle>> = Mutex::new(BTreeMap::new());

/// Lengths of reserved address ranges, by first address. Lock order: this before [`memory::ranges`].
static RESERVED: Mutex<BTreeMap<usize, usize>> = Mutex::new(BTreeMap::new());

pub(crate) fn is_supported() -> bool {
    std::env::var_os("TSSD_FAKE_CUDA_NO_VMM").is_none()
}

fn check_supported() -> Result<(), Code> {
    if is_supported() { Ok(()) } else { Err(Code::NotSupported) }
}

/// Returns the start and end of an address range that is not empty and aligned to [`GRANULE`].
///
/// # Errors
///
/// [`Code::InvalidValue`] for other ranges.
fn check(pointer: u64, len: usize) -> Result<(usize, usize), Code> {
    let start = usize::try_from(pointer).map_err(|_| Code::InvalidValue)?;
    let end = start.checked_add(len).ok_or(Code::InvalidValue)?;
    let is_aligned = start.is_multiple_of(GRANULE) && len.is_multiple_of(GRANULE) && len > 0;
    if is_aligned { Ok((start, end)) } else { Err(Code::InvalidValue) }
}

impl CUmemLocation {
    fn device(&self) -> Result<c_int, Code> {
        const DEVICE: c_uint = 1;
        match self.kind {
            DEVICE if (0..device_count()).contains(&self.id) => Ok(self.id),
            DEVICE => Err(Code::InvalidDevice),
            _ => Err(Code::InvalidValue),
        }
    }
}

impl CUmemAllocationProp {
    /// Returns the device, if it supports such allocations.
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
    // 0 is the minimum granularity, 1 the recommended one.
    if option > 1 { Err(Code::InvalidValue) } else { Ok(GRANULE) }
}

/// Creates a handle for memory.
fn new_handle(pages: Arc<DeviceMemory>, is_shareable: bool) -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0xFA4E_0000_0001);
    let handle = NEXT.fetch_add(1, Ordering::Relaxed);
    lock(&HANDLES).insert(handle, Handle { pages, is_shareable });
    handle
}

pub(crate) fn create(len: usize, wanted: &CUmemAllocationProp, flags: u64) -> Result<u64, Code> {
    let device = wanted.device()?;
    check(0, len)?;
    if flags != 0 {
        return Err(Code::InvalidValue);
    }
    Ok(new_handle(DeviceMemory::new(device, len)?, wanted.shared == DESCRIPTOR))
}

/// Releases a handle. Mappings of its memory stay.
pub(crate) fn release(handle: u64) -> Result<(), Code> {
    lock(&HANDLES).remove(&handle).map(drop).ok_or(Code::InvalidValue)
}

pub(crate) fn export(handle: u64, kind: c_uint, flags: u64) -> Result<OwnedFd, Code> {
    let handles = lock(&HANDLES);
    let found = handles.get(&handle).ok_or(Code::InvalidValue)?;
    match (kind, flags) {
        (DESCRIPTOR, 0) if found.is_shareable => found.pages.export(),
        (DESCRIPTOR, _) => Err(Code::InvalidValue),
        _ => Err(Code::NotSupported),
    }
}

/// Imports memory from a descriptor, which the caller still owns.
pub(crate) fn import(descriptor: usize, kind: c_uint) -> Result<u64, Code> {
    check_supported()?;
    if kind != DESCRIPTOR {
        return Err(Code::NotSupported);
    }
    let pages = DeviceMemory::open(format!("/proc/self/fd/{descriptor}").as_ref())?;
    Ok(new_handle(pages, true))
}

pub(crate) fn reserve(len: usize, alignment: usize, flags: u64) -> Result<u64, Code> {
    check_supported()?;
    check(0, len)?;
    if flags != 0 || !(alignment == 0 || alignment.is_power_of_two()) {
        return Err(Code::InvalidValue);
    }
    let start = memory::reserve(len, alignment.max(GRANULE))?;
    lock(&RESERVED).insert(start, len);
    Ok(start as u64)
}

pub(crate) fn free(pointer: u64, len: usize) -> Result<(), Code> {
    let (start, end) = check(pointer, len)?;
    let mut reserved = lock(&RESERVED);
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
    // The real driver requires an offset of 0, too.
    if offset != 0 || flags != 0 {
        return Err(Code::InvalidValue);
    }
    let pages = lock(&HANDLES).get(&handle).map(|handle| handle.pages.clone());
    let pages = pages.filter(|pages| len <= pages.len).ok_or(Code::InvalidValue)?;
    let reserved = lock(&RESERVED);
    let (first, first_len) = reserved.range(..=start).next_back().ok_or(Code::InvalidValue)?;
    let mut ranges = memory::ranges();
    let before = ranges.range(..end).next_back();
    let overlaps = before.is_some_and(|(other, range)| start < other + range.len);
    if overlaps || first + first_len < end {
        return Err(Code::InvalidValue);
    }
    ranges.insert(start, Range { len, pages, kind: MappingKind::Mapped(BTreeSet::new()) });
    Ok(())
}

/// Returns the start addresses of the mappings that exactly cover an address range.
fn maps(ranges: &BTreeMap<usize, Range>, start: usize, end: usize) -> Result<Vec<usize>, Code> {
    let mut found = Vec::new();
    let mut at = start;
    while at < end {
        match ranges.get(&at) {
            Some(Range { len, kind: MappingKind::Mapped(_), .. }) => {
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
    let mut access = Vec::new();
    for entry in wanted {
        let has_access = match entry.flags {
            NONE => false,
            READ_WRITE => true,
            READ => return Err(Code::NotSupported),
            _ => return Err(Code::InvalidValue),
        };
        access.push((entry.location.device()?, has_access));
    }
    let mut ranges = memory::ranges();
    for found in maps(&ranges, start, end)? {
        let kind = ranges.get_mut(&found).map(|range| &mut range.kind);
        let Some(MappingKind::Mapped(devices)) = kind else { return Err(Code::InvalidValue) };
        for (device, has_access) in &access {
            if *has_access {
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

    fn device_location(id: c_int) -> CUmemLocation {
        CUmemLocation { kind: 1, id }
    }

    fn create(len: usize, shared: c_uint) -> Result<u64, u32> {
        let location = device_location(0);
        let wanted = CUmemAllocationProp {
            kind: 1,
            shared,
            location,
            _windows: std::ptr::null(),
            _flags: [0; 8],
        };
        let mut handle = 0;
        // SAFETY: the pointers are valid.
        match unsafe { cuMemCreate(&raw mut handle, len, &raw const wanted, 0) } {
            0 => Ok(handle),
            code => Err(code),
        }
    }

    fn reserve(len: usize) -> u64 {
        let mut pointer = 0;
        // SAFETY: the pointer is valid for writing.
        assert_eq!(unsafe { cuMemAddressReserve(&raw mut pointer, len, 0, 0, 0) }, 0);
        pointer
    }

    fn import(descriptor: c_int) -> Result<u64, u32> {
        let descriptor = usize::try_from(descriptor).unwrap();
        let (mut handle, shared) = (0, std::ptr::without_provenance_mut(descriptor));
        // SAFETY: the pointer is valid for writing.
        match unsafe { cuMemImportFromShareableHandle(&raw mut handle, shared, 1) } {
            0 => Ok(handle),
            code => Err(code),
        }
    }

    fn set_flags(pointer: u64, len: usize, flags: c_uint) -> u32 {
        let wanted = CUmemAccessDesc { location: device_location(0), flags };
        // SAFETY: the pointer points to one descriptor.
        unsafe { cuMemSetAccess(pointer, len, &raw const wanted, 1) }
    }

    #[test]
    fn layouts_match_the_driver() {
        assert_eq!(size_of::<CUmemAllocationProp>(), 32);
        assert_eq!(size_of::<CUmemAccessDesc>(), 12);
    }

    #[test]
    fn exported_memory_is_shared_with_its_import() {
        const LEN: usize = 2 * GRANULE;
        let _lock = lock(&crate::TESTS);
        assert_eq!(cuCtxSetCurrent(crate::context::primary(0).unwrap()), 0);
        assert_eq!(tssd_fake_cuda_memory(0), 0);
        let handle = create(LEN, 1).unwrap();
        let mut descriptor: c_int = -1;
        let target = (&raw mut descriptor).cast();
        // SAFETY: the pointer is valid for writing a descriptor.
        assert_eq!(unsafe { cuMemExportToShareableHandle(target, handle, 1, 0) }, 0);
        // SAFETY: the call above has returned the descriptor, which this test owns.
        let descriptor = unsafe { OwnedFd::from_raw_fd(descriptor) };
        let other = import(descriptor.as_raw_fd()).unwrap();
        assert_eq!(tssd_fake_cuda_memory(0), LEN as u64);

        // Map the memory three times: twice in succession, and once in another range.
        let (twice, once) = (reserve(2 * LEN), reserve(LEN));
        let second = twice + LEN as u64;
        for (pointer, handle) in [(twice, handle), (second, other), (once, other)] {
            assert_eq!(cuMemMap(pointer, LEN, 0, handle, 0), 0);
        }
        let from: Vec<u8> = (0..=255).collect();
        let mut to = vec![0; 256];
        let write = || cuMemcpyHtoDAsync_v2(once + 300, from.as_ptr().cast(), 256, STREAM);
        assert_eq!(write(), 1, "nobody may use it yet");
        assert_eq!(set_flags(twice, 2 * LEN, 3), 0);
        assert_eq!(write(), 1, "that was elsewhere");
        assert_eq!(set_flags(once, LEN, 3), 0);
        assert_eq!(write(), 0);
        // Across the boundary of two mappings.
        assert_eq!(cuMemcpyDtoDAsync_v2(second - 100, once + 300, 256, STREAM), 0);
        assert_eq!(cuMemsetD8Async(once + 160, 7, 1, STREAM), 0);
        assert_eq!(cuMemcpyDtoHAsync_v2(to.as_mut_ptr().cast(), once, 256, STREAM), 0);
        assert_eq!(cuStreamSynchronize(STREAM), 0);
        assert_eq!((&to[..156], to[160], to[161]), (&from[100..], 7, 0));
        let mut device = 5;
        // SAFETY: the pointer is valid for writing an `int`.
        let code = unsafe { cuPointerGetAttribute((&raw mut device).cast(), 9, second + 1) };
        assert_eq!((code, device), (0, 0));

        // Invalid calls.
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
        let target = (&raw mut device).cast();
        // SAFETY: the calls fail, so nothing is written.
        let exported = [(small, 1), (handle, 8)]
            .map(|(handle, kind)| unsafe { cuMemExportToShareableHandle(target, handle, kind, 0) });
        assert_eq!(exported, [1, 801]);
        let no_memory = std::fs::File::open("/dev/null").unwrap();
        assert_eq!([import(no_memory.as_raw_fd()), import(12345)], [Err(1); 2]);
        assert_eq!(cuMemFree_v2(once), 1);
        // SAFETY: the call fails, so nothing is written.
        assert_eq!(unsafe { cuIpcGetMemHandle(std::ptr::null_mut(), once) }, 1);
        assert_eq!([cuMemAddressFree(once, LEN), cuMemUnmap(once, GRANULE)], [1; 2]);

        // Release everything.
        assert_eq!([handle, other, small].map(|handle| cuMemRelease(handle)), [0; 3]);
        assert_eq!(cuMemRelease(handle), 1);
        assert_eq!(tssd_fake_cuda_memory(0), LEN as u64);
        assert_eq!(set_flags(once, LEN, 0), 0);
        assert_eq!(write(), 1, "nobody may use it any more");
        assert_eq!([cuMemUnmap(once, LEN), cuMemUnmap(twice, 2 * LEN)], [0; 2]);
        for (pointer, len) in [(once, LEN), (twice, 2 * LEN), (free, LEN)] {
            assert_eq!([(); 2].map(|()| cuMemAddressFree(pointer, len)), [0, 1]);
        }
        assert_eq!(tssd_fake_cuda_memory(0), 0);
        // The descriptor still keeps the memory alive.
        let handle = import(descriptor.as_raw_fd()).unwrap();
        assert_eq!(tssd_fake_cuda_memory(0), LEN as u64);
        assert_eq!(cuMemRelease(handle), 0);
    }
}
