//! Memory of devices as it is wherever it is mapped: a file that has no path, which other processes can be given.
#![expect(unsafe_code, reason = "memory is mapped here")]

use std::ffi::c_int;
use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::path::Path;
use std::sync::{Arc, Mutex, Weak};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};

use crate::result::Code;
use crate::{devices, held};

/// Allocations are multiples of this.
pub(crate) const GRANULE: usize = 2 << 20;

/// What the names of such files begin with; the device and a serial number follow.
const PREFIX: &str = "tssd-fake-gpu-";

/// Nobody can make a file of this driver that is shorter than it was.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

/// Memory that has a descriptor, and a map that the driver alone knows.
pub(crate) struct Pages {
    memory: OwnedFd,
    pub(crate) start: usize,
    pub(crate) len: usize,
    pub(crate) device: c_int,
    /// No other memory has it, of no process and at no time, and it cannot be guessed.
    pub(crate) serial: String,
    /// Whether this process has made it.
    is_own: bool,
}

/// All that this process has made or imported: each is here once, however often it was imported.
static ALL: Mutex<Vec<Weak<Pages>>> = Mutex::new(Vec::new());

/// How many bytes a process may have made.
fn limit() -> usize {
    let limit = std::env::var("TSSD_FAKE_CUDA_MEMORY").ok();
    limit.and_then(|limit| limit.parse().ok()).unwrap_or(usize::MAX)
}

/// How many bytes are left of a limit, and the limit.
pub(crate) fn left() -> (usize, usize) {
    let limit = limit();
    (limit.saturating_sub(own(&held(&ALL))), limit)
}

/// How many bytes this process has made.
fn own(all: &[Weak<Pages>]) -> usize {
    let living = all.iter().filter_map(Weak::upgrade);
    living.filter(|pages| pages.is_own).map(|pages| pages.len).sum()
}

/// The device and the serial number of a file, if it is one of this driver's.
fn name(path: &Path) -> Option<(c_int, String)> {
    let link = std::fs::read_link(path).ok()?;
    let name = link.to_str()?.strip_prefix("/memfd:")?.strip_suffix(" (deleted)")?;
    let (device, serial) = name.strip_prefix(PREFIX)?.split_once('-')?;
    Some((device.parse().ok()?, serial.to_owned()))
}

impl Pages {
    /// New memory of a device.
    pub(crate) fn new(device: c_int, len: usize) -> Result<Arc<Self>, Code> {
        let mut all = held(&ALL);
        if own(&all).checked_add(len).is_none_or(|sum| sum > limit()) {
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

    /// Memory that has a descriptor, here or in another process: `/proc/<process>/fd/<descriptor>`.
    pub(crate) fn open(path: &Path) -> Result<Arc<Self>, Code> {
        // What is something else is not even opened: that might do something.
        name(path).ok_or(Code::InvalidValue)?;
        let file = File::options().read(true).write(true).open(path);
        let file = file.map_err(|_| Code::InvalidValue)?;
        // It may have become something else meanwhile.
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let (device, serial) = name(path.as_ref()).ok_or(Code::InvalidValue)?;
        let seals = rustix::fs::fcntl_get_seals(&file).map_err(|_| Code::InvalidValue)?;
        let len = file.metadata().map_err(|_| Code::InvalidValue)?.len();
        let len = usize::try_from(len).map_err(|_| Code::InvalidValue)?;
        if !seals.contains(SEALS) || len == 0 || !len.is_multiple_of(GRANULE) {
            return Err(Code::InvalidValue);
        }
        if !(0..devices()).contains(&device) {
            return Err(Code::InvalidDevice);
        }
        let mut all = held(&ALL);
        let mut living = all.iter().filter_map(Weak::upgrade);
        if let Some(known) = living.find(|pages| pages.serial == serial) {
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
        // SAFETY: no address is asked for, so no other map is touched.
        let start = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), len, protection, MapFlags::SHARED, &memory, 0)
        };
        let start = start.map_err(|_| Code::OutOfMemory)?.expose_provenance();
        Ok(Self { memory, start, len, device, serial, is_own })
    }

    /// One more descriptor of it, for whoever is to have the memory too.
    pub(crate) fn export(&self) -> Result<OwnedFd, Code> {
        self.memory.try_clone().map_err(|_| Code::OutOfMemory)
    }

    /// The number of the driver's own descriptor, which is open as long as this process has the memory.
    pub(crate) fn number(&self) -> RawFd {
        self.memory.as_raw_fd()
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        let start = std::ptr::without_provenance_mut(self.start);
        // SAFETY: it was mapped here, and nobody has it any more.
        let _ = unsafe { rustix::mm::munmap(start, self.len) };
    }
}

/// How many bytes of a device this process has.
pub(crate) fn count(device: c_int) -> u64 {
    let all = held(&ALL);
    let living = all.iter().filter_map(Weak::upgrade);
    living.filter(|pages| pages.device == device).map(|pages| pages.len as u64).sum()
}
