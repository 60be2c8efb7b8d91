//! Addresses: those of devices' memory, and those of the host's that are registered.
#![expect(unsafe_code, reason = "memory is mapped here")]

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{c_int, c_void};
use std::sync::{Arc, Mutex, MutexGuard};

use rustix::mm::{MapFlags, ProtFlags};

use crate::held;
use crate::pages::{GRANULE, Pages};
use crate::result::Code;

/// One end of a copy.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Side {
    Host(usize),
    Device(u64),
}

/// How addresses became a device's.
pub(crate) enum Kind {
    /// By `cuMemAlloc`.
    Allocated,
    /// By `cuMemMap`. These devices may use them.
    Mapped(BTreeSet<c_int>),
    /// By `cuIpcOpenMemHandle`, so often.
    Opened(usize),
}

/// Addresses that are a device's.
pub(crate) struct Range {
    pub(crate) len: usize,
    pub(crate) pages: Arc<Pages>,
    pub(crate) kind: Kind,
}

static RANGES: Mutex<BTreeMap<usize, Range>> = Mutex::new(BTreeMap::new());
static REGISTERED: Mutex<BTreeMap<usize, usize>> = Mutex::new(BTreeMap::new());

/// All ranges, by their first addresses.
pub(crate) fn ranges() -> MutexGuard<'static, BTreeMap<usize, Range>> {
    held(&RANGES)
}

/// Addresses at which nothing can be read or written. After them there is a gap, so that who goes beyond their end is
/// in no other range.
pub(crate) fn reserve(len: usize, alignment: usize) -> Result<usize, Code> {
    let all = len.checked_add(GRANULE).and_then(|len| len.checked_add(alignment));
    let all = all.ok_or(Code::OutOfMemory)?;
    // SAFETY: no address is asked for, so no other map is touched.
    let first = unsafe {
        rustix::mm::mmap_anonymous(std::ptr::null_mut(), all, ProtFlags::empty(), MapFlags::PRIVATE)
    };
    let first = first.map_err(|_| Code::OutOfMemory)?.addr();
    let start = first.next_multiple_of(alignment);
    let end = start + len + GRANULE;
    unmap(first, start - first);
    unmap(end, first + all - end);
    Ok(start)
}

/// Gives back what was reserved.
pub(crate) fn unreserve(start: usize, len: usize) {
    unmap(start, len + GRANULE);
}

fn unmap(start: usize, len: usize) {
    // SAFETY: it was mapped here, and nobody has it any more.
    let _ = unsafe { rustix::mm::munmap(std::ptr::without_provenance_mut(start), len) };
}

pub(crate) fn allocate(device: c_int, len: usize) -> Result<u64, Code> {
    if len == 0 {
        return Err(Code::InvalidValue);
    }
    let len = len.checked_next_multiple_of(GRANULE).ok_or(Code::OutOfMemory)?;
    let pages = Pages::new(device, len)?;
    let start = reserve(len, GRANULE)?;
    ranges().insert(start, Range { len, pages, kind: Kind::Allocated });
    Ok(start as u64)
}

pub(crate) fn free(pointer: u64) -> Result<(), Code> {
    let start = usize::try_from(pointer).map_err(|_| Code::InvalidValue)?;
    let mut ranges = ranges();
    let Entry::Occupied(found) = ranges.entry(start) else { return Err(Code::InvalidValue) };
    if !matches!(found.get().kind, Kind::Allocated) {
        return Err(Code::InvalidValue);
    }
    unreserve(start, found.remove().len);
    Ok(())
}

/// Looks at the range that an address is in, and at how far behind its beginning that is.
pub(crate) fn find<T>(
    pointer: u64,
    look: impl FnOnce(&Range, usize) -> Result<T, Code>,
) -> Result<T, Code> {
    let address = usize::try_from(pointer).map_err(|_| Code::InvalidValue)?;
    let ranges = ranges();
    let (first, range) = ranges.range(..=address).next_back().ok_or(Code::InvalidValue)?;
    let offset = address - first;
    if offset < range.len { look(range, offset) } else { Err(Code::InvalidValue) }
}

/// Beginning and length of the allocation that an address is of.
pub(crate) fn allocation(pointer: u64) -> Result<(u64, usize), Code> {
    find(pointer, |range, offset| Ok((pointer - offset as u64, range.len)))
}

pub(crate) fn device(pointer: u64) -> Result<c_int, Code> {
    find(pointer, |range, _| Ok(range.pages.device))
}

/// Whether memory may be written, as the system has it.
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
    let mut registered = held(&REGISTERED);
    let overlaps =
        |(other, others): (&usize, &usize)| *other < start + len && start < other + others;
    if registered.iter().any(overlaps) {
        return Err(Code::AlreadyRegistered);
    }
    registered.insert(start, len);
    Ok(())
}

/// Whether all of it is registered.
pub(crate) fn is_registered(start: usize, len: usize) -> bool {
    let registered = held(&REGISTERED);
    let found = registered.range(..=start).next_back();
    found.is_some_and(|(first, all)| start + len <= first + all)
}

pub(crate) fn unregister(start: usize) -> Result<(), Code> {
    held(&REGISTERED).remove(&start).map(drop).ok_or(Code::NotRegistered)
}

/// Where something is in memory that the driver sees, kept for as long as the work is on its way.
pub(crate) struct Place {
    address: usize,
    _pages: Option<Arc<Pages>>,
}

impl Side {
    /// The place of so many bytes, for a device that may use them, and how many of them are there in one piece: one range
    /// may follow another.
    pub(crate) fn place(self, device: c_int, len: usize) -> Result<(Place, usize), Code> {
        match self {
            Self::Host(address) => Ok((Place { address, _pages: None }, len)),
            Self::Device(pointer) => find(pointer, |range, offset| {
                if let Kind::Mapped(devices) = &range.kind
                    && !devices.contains(&device)
                {
                    return Err(Code::InvalidValue);
                }
                let address = range.pages.start + offset;
                let place = Place { address, _pages: Some(range.pages.clone()) };
                Ok((place, len.min(range.len - offset)))
            }),
        }
    }

    /// So many bytes further on.
    pub(crate) fn after(self, len: usize) -> Result<Self, Code> {
        let moved = match self {
            Self::Host(address) => address.checked_add(len).map(Self::Host),
            Self::Device(pointer) => pointer.checked_add(len as u64).map(Self::Device),
        };
        moved.ok_or(Code::InvalidValue)
    }
}

/// Copies so many bytes.
pub(crate) fn copy(target: &Place, source: &Place, len: usize) {
    let source = std::ptr::with_exposed_provenance::<c_void>(source.address);
    let target = std::ptr::with_exposed_provenance_mut::<c_void>(target.address);
    // SAFETY: pages of devices were proven to be there, and are kept; memory of the host is there until the stream has
    // done with it, as the driver demands of its callers.
    unsafe { target.cast::<u8>().copy_from(source.cast(), len) };
}

/// Makes so many bytes the same.
pub(crate) fn fill(target: &Place, byte: u8, len: usize) {
    let target = std::ptr::with_exposed_provenance_mut::<u8>(target.address);
    // SAFETY: as above.
    unsafe { target.write_bytes(byte, len) };
}
