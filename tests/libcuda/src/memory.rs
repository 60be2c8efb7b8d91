//! Memory of devices.
#![expect(unsafe_code, reason = "memory is mapped here")]

use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard};

use rustix::fs::MemfdFlags;
use rustix::mm::{MapFlags, ProtFlags};

use crate::result::Code;

/// Allocations are multiples of this.
const GRANULE: usize = 2 << 20;

/// One end of a copy.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Side {
    Host(usize),
    Device(u64),
}

/// Memory that has a descriptor, and a map that the driver alone knows.
struct Pages {
    _memory: OwnedFd,
    start: usize,
    len: usize,
}

/// Addresses that are a device's.
struct Range {
    device: c_int,
    len: usize,
    pages: Arc<Pages>,
}

static RANGES: Mutex<BTreeMap<usize, Range>> = Mutex::new(BTreeMap::new());
static REGISTERED: Mutex<BTreeMap<usize, usize>> = Mutex::new(BTreeMap::new());

fn held<T>(all: &Mutex<T>) -> MutexGuard<'_, T> {
    all.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Addresses at which nothing can be read or written.
fn reserve(len: usize) -> Result<usize, Code> {
    // SAFETY: no address is asked for, so no other map is touched.
    let start = unsafe {
        rustix::mm::mmap_anonymous(std::ptr::null_mut(), len, ProtFlags::empty(), MapFlags::PRIVATE)
    };
    Ok(start.map_err(|_| Code::OutOfMemory)?.addr())
}

fn unmap(start: usize, len: usize) {
    // SAFETY: it was mapped here, and nobody has it any more.
    let _ = unsafe { rustix::mm::munmap(std::ptr::without_provenance_mut(start), len) };
}

impl Pages {
    fn new(len: usize) -> Result<Arc<Self>, Code> {
        let memory = rustix::fs::memfd_create("fake GPU", MemfdFlags::CLOEXEC);
        let memory = memory.map_err(|_| Code::OutOfMemory)?;
        rustix::fs::ftruncate(&memory, len as u64).map_err(|_| Code::OutOfMemory)?;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: no address is asked for, so no other map is touched.
        let start = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), len, protection, MapFlags::SHARED, &memory, 0)
        };
        let start = start.map_err(|_| Code::OutOfMemory)?.expose_provenance();
        Ok(Arc::new(Self { _memory: memory, start, len }))
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        unmap(self.start, self.len);
    }
}

pub(crate) fn allocate(device: c_int, len: usize) -> Result<u64, Code> {
    if len == 0 {
        return Err(Code::InvalidValue);
    }
    let len = len.next_multiple_of(GRANULE);
    let pages = Pages::new(len)?;
    let start = reserve(len)?;
    held(&RANGES).insert(start, Range { device, len, pages });
    Ok(start as u64)
}

pub(crate) fn free(pointer: u64) -> Result<(), Code> {
    let start = usize::try_from(pointer).map_err(|_| Code::InvalidValue)?;
    let range = held(&RANGES).remove(&start).ok_or(Code::InvalidValue)?;
    unmap(start, range.len);
    Ok(())
}

/// The range that so many bytes lie in, and where its pages are in the driver's own map.
fn find<T>(pointer: u64, len: usize, take: impl FnOnce(usize, &Range) -> T) -> Result<T, Code> {
    let start = usize::try_from(pointer).map_err(|_| Code::InvalidValue)?;
    let end = start.checked_add(len).ok_or(Code::InvalidValue)?;
    let ranges = held(&RANGES);
    let found = ranges.range(..=start).next_back();
    let found =
        found.filter(|(first, range)| end <= **first + range.len && start < **first + range.len);
    found.map(|(first, range)| take(*first, range)).ok_or(Code::InvalidValue)
}

/// Beginning and length of the allocation that an address is of.
pub(crate) fn allocation(pointer: u64) -> Result<(u64, usize), Code> {
    find(pointer, 0, |start, range| (start as u64, range.len))
}

pub(crate) fn device(pointer: u64) -> Result<c_int, Code> {
    find(pointer, 0, |_, range| range.device)
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

/// Where something is in memory that the driver sees, kept for as long as the copy is on its way.
pub(crate) struct Place {
    address: usize,
    _pages: Option<Arc<Pages>>,
}

impl Side {
    pub(crate) fn place(self, len: usize) -> Result<Place, Code> {
        match self {
            Self::Host(address) => Ok(Place { address, _pages: None }),
            Self::Device(pointer) => find(pointer, len, |first, range| {
                let offset = usize::try_from(pointer).unwrap_or(first) - first;
                Place { address: range.pages.start + offset, _pages: Some(range.pages.clone()) }
            }),
        }
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
