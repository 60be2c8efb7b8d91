//! Address ranges of device memory, and registered ranges of host memory.
#![expect(unsafe_code, reason = "memory is mapped here")]

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{c_int, c_void};
use std::sync::{Arc, Mutex, MutexGuard};

use rustix::mm::{MapFlags, ProtFlags};

use crate::device_memory::{DeviceMemory, GRANULE};
use crate::lock;
use crate::result::Code;

/// Address of one end of a copy.
#[derive(Clone, Copy, Debug)]
pub(crate) enum CopyAddress {
    Host(usize),
    Device(u64),
}

/// How device memory was mapped.
pub(crate) enum MappingKind {
    /// By `cuMemAlloc`.
    Allocated,
    /// By `cuMemMap`. These devices have access.
    Mapped(BTreeSet<c_int>),
    /// By `cuIpcOpenMemHandle`, this many times.
    Opened(usize),
}

/// An address range of device memory.
pub(crate) struct Range {
    pub(crate) len: usize,
    pub(crate) pages: Arc<DeviceMemory>,
    pub(crate) kind: MappingKind,
}

/// Ranges of device memory, by first address.
static RANGES: Mutex<BTreeMap<usize, Range>> = Mutex::new(BTreeMap::new());

/// Lengths of registered ranges of host memory, by first address.
static REGISTERED: Mutex<BTreeMap<usize, usize>> = Mutex::new(BTreeMap::new());

/// Locks the ranges of device memory, by first address.
pub(crate) fn ranges() -> MutexGuard<'static, BTreeMap<usize, Range>> {
    lock(&RANGES)
}

/// Reserves addresses without access.
///
/// A gap of [`GRANULE`] bytes follows them, so that an access beyond their end is in no other range.
pub(crate) fn reserve(len: usize, alignment: usize) -> Result<usize, Code> {
    let total = len.checked_add(GRANULE).and_then(|len| len.checked_add(alignment));
    let total = total.ok_or(Code::OutOfMemory)?;
    // SAFETY: without an address hint, the kernel chooses unused addresses, so no existing mapping changes.
    let first = unsafe {
        rustix::mm::mmap_anonymous(
            std::ptr::null_mut(),
            total,
            ProtFlags::empty(),
            MapFlags::PRIVATE,
        )
    };
    let first = first.map_err(|_| Code::OutOfMemory)?.addr();
    let start = first.next_multiple_of(alignment);
    let end = start + len + GRANULE;
    unmap(first, start - first);
    unmap(end, first + total - end);
    Ok(start)
}

/// Releases addresses that were reserved by [`reserve`].
pub(crate) fn unreserve(start: usize, len: usize) {
    unmap(start, len + GRANULE);
}

fn unmap(start: usize, len: usize) {
    // SAFETY: `reserve` mapped these addresses without access, so no reference points to them. They are released once.
    let _ = unsafe { rustix::mm::munmap(std::ptr::without_provenance_mut(start), len) };
}

pub(crate) fn allocate(device: c_int, len: usize) -> Result<u64, Code> {
    if len == 0 {
        return Err(Code::InvalidValue);
    }
    let len = len.checked_next_multiple_of(GRANULE).ok_or(Code::OutOfMemory)?;
    let pages = DeviceMemory::new(device, len)?;
    let start = reserve(len, GRANULE)?;
    ranges().insert(start, Range { len, pages, kind: MappingKind::Allocated });
    Ok(start as u64)
}

pub(crate) fn free(pointer: u64) -> Result<(), Code> {
    let start = usize::try_from(pointer).map_err(|_| Code::InvalidValue)?;
    let mut ranges = ranges();
    let Entry::Occupied(found) = ranges.entry(start) else { return Err(Code::InvalidValue) };
    if !matches!(found.get().kind, MappingKind::Allocated) {
        return Err(Code::InvalidValue);
    }
    unreserve(start, found.remove().len);
    Ok(())
}

/// Calls `read` with the range that contains an address, and with the offset of the address in it.
pub(crate) fn with_range<T>(
    pointer: u64,
    read: impl FnOnce(&Range, usize) -> Result<T, Code>,
) -> Result<T, Code> {
    let address = usize::try_from(pointer).map_err(|_| Code::InvalidValue)?;
    let ranges = ranges();
    let (first, range) = ranges.range(..=address).next_back().ok_or(Code::InvalidValue)?;
    let offset = address - first;
    if offset < range.len { read(range, offset) } else { Err(Code::InvalidValue) }
}

/// Returns the start and the length of the allocation that contains an address.
pub(crate) fn allocation(pointer: u64) -> Result<(u64, usize), Code> {
    with_range(pointer, |range, offset| Ok((pointer - offset as u64, range.len)))
}

/// Returns the device whose memory an address belongs to.
pub(crate) fn device(pointer: u64) -> Result<c_int, Code> {
    with_range(pointer, |range, _| Ok(range.pages.device))
}

/// Returns whether the mapping that contains an address is writable, or `None` if there is no mapping.
fn is_writable(start: usize) -> Option<bool> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    maps.lines().find_map(|line| {
        let (range, rest) = line.split_once(' ')?;
        let (first, end) = range.split_once('-')?;
        let number = |text| usize::from_str_radix(text, 16).ok();
        (number(first)?..number(end)?)
            .contains(&start)
            .then(|| rest.as_bytes().get(1) == Some(&b'w'))
    })
}

pub(crate) fn register(start: usize, len: usize, flags: u32) -> Result<(), Code> {
    const READ_ONLY: u32 = 8;
    if !is_writable(start).ok_or(Code::InvalidValue)? && flags & READ_ONLY == 0 {
        return Err(Code::InvalidValue);
    }
    let mut registered = lock(&REGISTERED);
    let overlaps =
        |(other, other_len): (&usize, &usize)| *other < start + len && start < other + other_len;
    if registered.iter().any(overlaps) {
        return Err(Code::AlreadyRegistered);
    }
    registered.insert(start, len);
    Ok(())
}

/// Returns whether a range of host memory is completely registered.
pub(crate) fn is_registered(start: usize, len: usize) -> bool {
    let registered = lock(&REGISTERED);
    let found = registered.range(..=start).next_back();
    found.is_some_and(|(first, registered_len)| start + len <= first + registered_len)
}

pub(crate) fn unregister(start: usize) -> Result<(), Code> {
    lock(&REGISTERED).remove(&start).map(drop).ok_or(Code::NotRegistered)
}

/// An address that the driver can access. Keeps device memory alive while work uses it.
pub(crate) struct ResolvedAddress {
    address: usize,
    _pages: Option<Arc<DeviceMemory>>,
}

impl CopyAddress {
    /// Returns the driver's address of `len` bytes, and the number of them that are contiguous there.
    ///
    /// Fewer than `len` bytes are contiguous if they continue in another range.
    ///
    /// # Errors
    ///
    /// [`Code::InvalidValue`] if the address is in no range, or the device has no access to it.
    pub(crate) fn resolve(
        self,
        device: c_int,
        len: usize,
    ) -> Result<(ResolvedAddress, usize), Code> {
        match self {
            Self::Host(address) => Ok((ResolvedAddress { address, _pages: None }, len)),
            Self::Device(pointer) => with_range(pointer, |range, offset| {
                if let MappingKind::Mapped(devices) = &range.kind
                    && !devices.contains(&device)
                {
                    return Err(Code::InvalidValue);
                }
                let address = range.pages.start + offset;
                let place = ResolvedAddress { address, _pages: Some(range.pages.clone()) };
                Ok((place, len.min(range.len - offset)))
            }),
        }
    }

    /// Returns the address that is `len` bytes greater.
    pub(crate) fn offset_by(self, len: usize) -> Result<Self, Code> {
        let moved = match self {
            Self::Host(address) => address.checked_add(len).map(Self::Host),
            Self::Device(pointer) => pointer.checked_add(len as u64).map(Self::Device),
        };
        moved.ok_or(Code::InvalidValue)
    }
}

/// Copies `len` bytes.
pub(crate) fn copy(target: &ResolvedAddress, source: &ResolvedAddress, len: usize) {
    let source = std::ptr::with_exposed_provenance::<c_void>(source.address);
    let target = std::ptr::with_exposed_provenance_mut::<c_void>(target.address);
    // SAFETY: `Side::place` has checked the bounds of device memory, and `Place` keeps it mapped. Host memory is valid
    // until the stream has executed the work, as the driver API requires of the caller.
    unsafe { target.cast::<u8>().copy_from(source.cast(), len) };
}

/// Sets `len` bytes to a value.
pub(crate) fn fill(target: &ResolvedAddress, byte: u8, len: usize) {
    let target = std::ptr::with_exposed_provenance_mut::<u8>(target.address);
    // SAFETY: as in `copy`.
    unsafe { target.write_bytes(byte, len) };
}
