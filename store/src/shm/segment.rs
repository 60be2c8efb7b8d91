//! One segment: an anonymous file, sealed so that only the map that its writer has still writes, and
//! maps of it.
#![expect(unsafe_code, reason = "maps are as safe as the rules that who has them keep: see each")]

use std::convert::Infallible;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use bytes::Bytes;
use rustix::fs::{FileType, MemfdFlags, Mode, OFlags, SealFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags};
use tssd_format::Mmap as BytesMap;

use crate::device::host_maps;
use crate::io::cow_map::PrivateMaps;
use crate::io::local_archive::Near;
use crate::io::parallel;

/// Small blobs share segments of this many bytes, which the daemon writes.
///
/// Their pages come one by one, as they are written: all at once, those of a new slab took 3 ms, for which whoever put
/// the first small tensor into it had to wait.
pub(super) const SLAB_BYTES: u64 = 4 << 20;

/// What a segment that others read is sealed with: no new map writes, no byte goes.
const SEALS: SealFlags =
    SealFlags::FUTURE_WRITE.union(SealFlags::SHRINK).union(SealFlags::GROW).union(SealFlags::SEAL);

/// What keeps its length, from the first moment.
const LEN_SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);

/// New memory of this many bytes, which its owner alone may open again.
pub(crate) fn create(capacity: u64) -> io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | MemfdFlags::NOEXEC_SEAL;
    let memory = match rustix::fs::memfd_create("tssd", flags) {
        // Kernels before 6.3 do not know that flag.
        Err(rustix::io::Errno::INVAL) => {
            let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
            rustix::fs::memfd_create("tssd", flags)?
        }
        memory => memory?,
    };
    rustix::fs::ftruncate(&memory, capacity)?;
    // Whoever it is lent to could cut it, and reading behind its end would kill this process.
    rustix::fs::fcntl_add_seals(&memory, LEN_SEALS)?;
    rustix::fs::fchmod(&memory, Mode::RUSR)?;
    Ok(memory)
}

/// From now on only the maps that are there write.
pub(super) fn seal(memory: &OwnedFd) -> io::Result<()> {
    // The kernel seals against execution by itself, which changes nothing here.
    match rustix::fs::fcntl_add_seals(memory, SEALS) {
        // It is sealed: what is sealed may not be sealed again.
        Err(rustix::io::Errno::PERM) if is_sealed(memory)? => Ok(()),
        done => Ok(done?),
    }
}

fn is_sealed(memory: &impl AsFd) -> io::Result<bool> {
    Ok(rustix::fs::fcntl_get_seals(memory)?.contains(SEALS))
}

/// The same memory, open for reading only.
pub(super) fn read_only(memory: &OwnedFd) -> io::Result<OwnedFd> {
    let path = format!("/proc/self/fd/{}", memory.as_raw_fd());
    Ok(rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?)
}

/// Proves that what somebody says is memory to write is such, of this length.
pub(crate) fn check_lent(memory: &OwnedFd, capacity: u64) -> io::Result<()> {
    if rustix::fs::fcntl_get_seals(memory).is_err() || has_name(memory)? {
        return Err(io::Error::other("it is no anonymous memory"));
    }
    // Whoever has it too could cut it, and to write behind its end kills the process.
    rustix::fs::fcntl_add_seals(memory, LEN_SEALS)?;
    check_len(memory, capacity)
}

/// Proves that what somebody says is memory to read can no longer be written by others than the map of
/// its writer, and has this length. A file of a store in a directory is never written again either.
pub(crate) fn check_shared(memory: &OwnedFd, capacity: u64) -> io::Result<()> {
    let flags = rustix::fs::fcntl_getfl(memory)?;
    if flags.intersects(OFlags::WRONLY | OFlags::RDWR) {
        return Err(io::Error::other("it is open for writing"));
    }
    match rustix::fs::fcntl_get_seals(memory) {
        Ok(seals) if seals.contains(SEALS) => {}
        Ok(_) if !has_name(memory)? => return Err(io::Error::other("it is not sealed")),
        _ => {
            let status = rustix::fs::fstat(memory)?;
            if FileType::from_raw_mode(status.st_mode) != FileType::RegularFile {
                return Err(io::Error::other("it is neither memory nor a file"));
            }
        }
    }
    check_len(memory, capacity)
}

/// Whether it is a file with a name: those of a folder in memory (tmpfs) have seals as well.
fn has_name(memory: &OwnedFd) -> io::Result<bool> {
    Ok(rustix::fs::fstat(memory)?.st_nlink > 0)
}

fn check_len(memory: &OwnedFd, capacity: u64) -> io::Result<()> {
    let len = u64::try_from(rustix::fs::fstat(memory)?.st_size).map_err(io::Error::other)?;
    if len == capacity {
        return Ok(());
    }
    Err(io::Error::other(format!("it has {len} bytes in place of {capacity}")))
}

/// Mapped memory.
#[derive(Debug)]
struct Map {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: a map is memory of the process, not of a thread.
unsafe impl Send for Map {}
// SAFETY: as above; shared references only read.
unsafe impl Sync for Map {}

/// To map less than this is sooner done than another thread started.
const POPULATE_BYTES: usize = 32 << 20;

/// A huge page of processors with pages of 4 KiB.
const HUGE_PAGE: usize = 2 << 20;

impl Map {
    fn new(memory: &OwnedFd, capacity: u64, protection: ProtFlags) -> io::Result<Self> {
        let len = usize::try_from(capacity).map_err(io::Error::other)?;
        // SAFETY: no address is asked for, so no other map is touched.
        let start = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), len, protection, MapFlags::SHARED, memory, 0)?
        };
        let start = NonNull::new(start.cast()).ok_or_else(|| io::Error::other("mapped at 0"))?;
        host_maps::add(start.addr().get(), len, protection.contains(ProtFlags::WRITE));
        Ok(Self { start, len })
    }

    /// Lets the system give all pages now, on all cores: one at a time, when it is touched, takes it several times as
    /// long.
    fn populated(self) -> Self {
        let parts = (0..self.len).step_by(POPULATE_BYTES).collect();
        let Ok(_) = parallel::map(parts, |at| {
            self.populate(at);
            Ok::<(), Infallible>(())
        });
        self
    }

    /// Asks for memory in huge pages, where they fit in as a whole: the rest of one would be memory that nobody counts.
    /// Systems that give anonymous files none, as most do by default, take no notice.
    fn in_huge_pages(self) -> Self {
        let len = self.len - self.len % HUGE_PAGE;
        // SAFETY: the part lies in the map, and the advice changes no byte.
        let _ =
            unsafe { rustix::mm::madvise(self.start.as_ptr().cast(), len, Advice::LinuxHugepage) };
        self
    }

    /// Of the part that begins at a byte of it. A system that does not know the advice, or lacks the memory,
    /// says so: then pages come when they are touched.
    fn populate(&self, at: usize) {
        let len = POPULATE_BYTES.min(self.len.saturating_sub(at));
        // SAFETY: the part lies in the map: it begins in it, or it is empty.
        let start = unsafe { self.start.add(at.min(self.len)) };
        // SAFETY: as above, and the advice changes no byte.
        let _ =
            unsafe { rustix::mm::madvise(start.as_ptr().cast(), len, Advice::LinuxPopulateWrite) };
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        host_maps::remove(self.start.addr().get());
        // SAFETY: the range is this map's, and nothing borrows from it any more.
        let unmapped = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.len) };
        debug_assert!(unmapped.is_ok(), "a map can be unmapped");
    }
}

/// A segment to write, by the one process that does.
///
/// It stays writable while others read it, though nothing here writes it then. To protect and unprotect
/// 512 MiB of pages of 4 KiB took 28 ms, as long as to fill them.
#[derive(Debug)]
pub(crate) struct WriteMap(Map);

impl WriteMap {
    /// Maps new memory; the system gives all its pages now.
    pub(crate) fn new(memory: &OwnedFd, capacity: u64) -> io::Result<Self> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let map = Map::new(memory, capacity, protection)?;
        Ok(Self(map.in_huge_pages().populated()))
    }

    /// The same for memory of which perhaps little is written: the system gives its pages as they are.
    pub(crate) fn sparse(memory: &OwnedFd, capacity: u64) -> io::Result<Self> {
        Ok(Self(Map::new(memory, capacity, ProtFlags::READ | ProtFlags::WRITE)?))
    }

    /// How many bytes it has.
    pub(crate) fn len(&self) -> usize {
        self.0.len
    }

    /// A part of it, to write.
    ///
    /// # Panics
    ///
    /// If it does not lie in the segment.
    pub(crate) fn range_mut(&mut self, range: Range<usize>) -> &mut [u8] {
        assert!(range.start <= range.end && range.end <= self.0.len, "a range of the segment");
        // SAFETY: the range lies in the map, as asserted.
        let start = unsafe { self.0.start.add(range.start) };
        // SAFETY: the memory is mapped and initialised (new pages are zero), and this borrows the only
        // map that writes. Others map it to read only, and read what is committed: who has this map
        // gives it away to be kept before it commits, and gets it back when nobody reads any more.
        unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), range.len()) }
    }

    /// Its first bytes, as they were written.
    ///
    /// # Panics
    ///
    /// If it has not so many.
    pub(crate) fn first(&self, len: usize) -> &[u8] {
        assert!(len <= self.0.len, "a part of the segment");
        // SAFETY: so many bytes are mapped and initialised, as asserted, and this borrows the only map that writes.
        unsafe { std::slice::from_raw_parts(self.0.start.as_ptr(), len) }
    }
}

/// A segment to read.
#[derive(Debug)]
pub(crate) struct ReadMap {
    map: Map,
    /// The same for readers who must be free to write; none for who gives them to nobody.
    private: Option<Arc<PrivateMaps>>,
}

impl ReadMap {
    /// Maps memory that was checked.
    pub(crate) fn new(memory: OwnedFd, capacity: u64) -> io::Result<Arc<Self>> {
        let map = Map::new(&memory, capacity, ProtFlags::READ)?;
        let private = Some(PrivateMaps::new(memory.into(), map.len));
        Ok(Arc::new(Self { map, private }))
    }

    /// As [`ReadMap::new`], for one who gives nobody a private map.
    pub(crate) fn bare(memory: &OwnedFd, capacity: u64) -> io::Result<Arc<Self>> {
        let map = Map::new(memory, capacity, ProtFlags::READ)?;
        Ok(Arc::new(Self { map, private: None }))
    }

    /// The bytes of one archive in it; none if there are not so many. They must be committed, and a
    /// lease must keep them: then nobody writes them.
    pub(crate) fn bytes(self: &Arc<Self>, offset: u64, len: u64) -> Option<Bytes> {
        let (start, len) = (usize::try_from(offset).ok()?, usize::try_from(len).ok()?);
        start.checked_add(len).filter(|end| *end <= self.map.len)?;
        Some(Bytes::from_owner(Committed { map: self.clone(), range: start..start + len }))
    }

    /// The same as a blob.
    pub(crate) fn archive(self: &Arc<Self>, offset: u64, len: u64) -> Option<Near> {
        let near = Near::new(BytesMap::from(self.bytes(offset, len)?));
        Some(match &self.private {
            Some(maps) => near.mapped(maps.clone(), offset),
            None => near,
        })
    }
}

/// A part of a segment that nobody writes.
struct Committed {
    map: Arc<ReadMap>,
    range: Range<usize>,
}

impl AsRef<[u8]> for Committed {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: `ReadMap::bytes` has compared the range with the length of the map.
        let start = unsafe { self.map.map.start.add(self.range.start) };
        // SAFETY: the memory is mapped as long as this lives. Its writer has done with it before it
        // committed, the seals keep everybody else from writing or cutting it, and the pool gives it to
        // its writer again only when the lease that holds it is handed back.
        unsafe { std::slice::from_raw_parts(start.as_ptr(), self.range.len()) }
    }
}
