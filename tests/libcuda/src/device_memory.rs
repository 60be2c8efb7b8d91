//! Device memory: a memfd, which can be passed to other processes.
#![expect(unsafe_code, reason = "memory is mapped here")]

use std::ffi::c_int;
use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::path::Path;
use std::sync::{Arc, Mutex, Weak};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};

use crate::result::Code;
use crate::{device_count, lock};

/// Granularity of allocations in bytes: 2 MiB.
pub(crate) const GRANULE: usize = 2 << 20;

/// Prefix of the names of the memfds. The device and the serial number follow.
const PREFIX: &str = "tssd-fake-gpu-";

/// Seals of the memfds: no process can change their size.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

/// Device memory: a memfd, and a mapping that only the driver knows.
pub(crate) struct DeviceMemory {
    memory: OwnedFd,
    pub(crate) start: usize,
    pub(crate) len: usize,
    pub(crate) device: c_int,
    /// A random UUID, which no other memory of any process has.
    pub(crate) serial: String,
    /// Whether this process has allocated it.
    is_own: bool,
}

/// All memory that this process has allocated or imported. Repeated imports share one entry.
static ALL: Mutex<Vec<Weak<DeviceMemory>>> = Mutex::new(Vec::new());

/// Returns the maximum number of bytes that a process may allocate.
fn limit() -> usize {
    let limit = std::env::var("TSSD_FAKE_CUDA_MEMORY").ok();
    limit.and_then(|limit| limit.parse().ok()).unwrap_or(usize::MAX)
}

/// Returns the number of bytes that this process may still allocate, and its limit.
pub(crate) fn available_and_total() -> (usize, usize) {
    let limit = limit();
    (limit.saturating_sub(allocated_bytes(&lock(&ALL))), limit)
}

/// Returns the number of bytes that this process has allocated.
fn allocated_bytes(all: &[Weak<DeviceMemory>]) -> usize {
    let live = all.iter().filter_map(Weak::upgrade);
    live.filter(|pages| pages.is_own).map(|pages| pages.len).sum()
}

/// Returns the device and the serial number of a memfd of this driver, or `None` for other files.
fn parse_name(path: &Path) -> Option<(c_int, String)> {
    let link = std::fs::read_link(path).ok()?;
    let name = link.to_str()?.strip_prefix("/memfd:")?.strip_suffix(" (deleted)")?;
    let (device, serial) = name.strip_prefix(PREFIX)?.split_once('-')?;
    Some((device.parse().ok()?, serial.to_owned()))
}

impl DeviceMemory {
    /// Allocates memory of a device.
    pub(crate) fn new(device: c_int, len: usize) -> Result<Arc<Self>, Code> {
        let mut all = lock(&ALL);
        if allocated_bytes(&all).checked_add(len).is_none_or(|sum| sum > limit()) {
            return Err(Code::OutOfMemory);
        }
        let serial = std::fs::read_to_string("/proc/sys/kernel/random/uuid");
        let serial = serial.map_err(|_| Code::OutOfMemory)?.trim().to_owned();
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let memory = rustix::fs::memfd_create(format!("{PREFIX}{device}-{serial}"), flags);
        let memory = memory.map_err(|_| Code::OutOfMemory)?;
        rustix::fs::ftruncate(&memory, len as u64).map_err(|_| Code::OutOfMemory)?;
        rustix::fs::fcntl_add_seals(&memory, SEALS).map_err(|_| Code::OutOfMemory)?;
        let pages = Arc::new(Self::map(memory, len, device, serial, true)?);
        all.retain(|pages| pages.strong_count() > 0);
        all.push(Arc::downgrade(&pages));
        Ok(pages)
    }

    /// Opens memory by its descriptor in this or another process: `/proc/<process>/fd/<descriptor>`.
    pub(crate) fn open(path: &Path) -> Result<Arc<Self>, Code> {
        // Check the name first: to open another kind of file can have side effects.
        parse_name(path).ok_or(Code::InvalidValue)?;
        let file = File::options().read(true).write(true).open(path);
        let file = file.map_err(|_| Code::InvalidValue)?;
        // The descriptor may have been reused between the check and the open, so check again.
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let (device, serial) = parse_name(path.as_ref()).ok_or(Code::InvalidValue)?;
        let seals = rustix::fs::fcntl_get_seals(&file).map_err(|_| Code::InvalidValue)?;
        let len = file.metadata().map_err(|_| Code::InvalidValue)?.len();
        let len = usize::try_from(len).map_err(|_| Code::InvalidValue)?;
        if !seals.contains(SEALS) || len == 0 || !len.is_multiple_of(GRANULE) {
            return Err(Code::InvalidValue);
        }
        if !(0..device_count()).contains(&device) {
            return Err(Code::InvalidDevice);
        }
        let mut all = lock(&ALL);
        let mut live = all.iter().filter_map(Weak::upgrade);
        if let Some(known) = live.find(|pages| pages.serial == serial) {
            return Ok(known);
        }
        let pages = Arc::new(Self::map(file.into(), len, device, serial, false)?);
        all.retain(|pages| pages.strong_count() > 0);
        all.push(Arc::downgrade(&pages));
        Ok(pages)
    }

    fn map(
        memory: OwnedFd,
        len: usize,
        device: c_int,
        serial: String,
        is_own: bool,
    ) -> Result<Self, Code> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: without an address hint, the kernel chooses unused addresses, so no existing mapping changes.
        let start = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), len, protection, MapFlags::SHARED, &memory, 0)
        };
        let start = start.map_err(|_| Code::OutOfMemory)?.expose_provenance();
        Ok(Self { memory, start, len, device, serial, is_own })
    }

    /// Returns a new descriptor of the memory, for another process.
    pub(crate) fn export(&self) -> Result<OwnedFd, Code> {
        self.memory.try_clone().map_err(|_| Code::OutOfMemory)
    }

    /// Returns the driver's descriptor, which is open as long as this process holds the memory.
    pub(crate) fn descriptor(&self) -> RawFd {
        self.memory.as_raw_fd()
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        let start = std::ptr::without_provenance_mut(self.start);
        // SAFETY: `map` created this mapping. Each `Place` that points into it holds an `Arc` of this value, so no
        // pointer into it is used after the drop.
        let _ = unsafe { rustix::mm::munmap(start, self.len) };
    }
}

/// Returns the number of bytes of a device that this process has allocated or imported.
pub(crate) fn device_bytes(device: c_int) -> u64 {
    let all = lock(&ALL);
    let live = all.iter().filter_map(Weak::upgrade);
    live.filter(|pages| pages.device == device).map(|pages| pages.len as u64).sum()
}
