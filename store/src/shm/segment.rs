//! A segment: an anonymous file and its maps.
//!
//! The file is sealed: only the map that its writer has can write.
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
use crate::io::cow_map::CowMapPool;
use crate::io::local_archive::LocalArchive;
use crate::io::parallel;

/// Bytes of a slab: a segment of the daemon that contains small blobs.
///
/// Its pages are allocated when they are written. To allocate all pages of a new slab takes 3 ms, for which the put of
/// the first small tensor would wait.
pub(super) const SLAB_BYTES: u64 = 4 << 20;

/// Seals of a segment that others read: no new map can write, and the length is fixed.
const SEALS: SealFlags =
    SealFlags::FUTURE_WRITE.union(SealFlags::SHRINK).union(SealFlags::GROW).union(SealFlags::SEAL);

/// Seals that fix the length, added when the segment is created.
const LEN_SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);

/// Creates anonymous memory of `capacity` bytes. Only its owner may open it again.
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
    // A process that receives the memory could truncate it. A read behind the end would kill this process.
    rustix::fs::fcntl_add_seals(&memory, LEN_SEALS)?;
    rustix::fs::fchmod(&memory, Mode::RUSR)?;
    Ok(memory)
}

/// Seals memory: from now on only existing maps can write.
pub(super) fn seal(memory: &OwnedFd) -> io::Result<()> {
    // The kernel seals against execution by itself, which changes nothing here.
    match rustix::fs::fcntl_add_seals(memory, SEALS) {
        // The memory is sealed already: the last seal forbids further seals.
        Err(rustix::io::Errno::PERM) if is_sealed(memory)? => Ok(()),
        result => Ok(result?),
    }
}

fn is_sealed(memory: &impl AsFd) -> io::Result<bool> {
    Ok(rustix::fs::fcntl_get_seals(memory)?.contains(SEALS))
}

/// Opens the same memory for reading only.
pub(super) fn read_only(memory: &OwnedFd) -> io::Result<OwnedFd> {
    let path = format!("/proc/self/fd/{}", memory.as_raw_fd());
    Ok(rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?)
}

/// Checks that a descriptor from a peer is anonymous memory of this length, and seals its length.
pub(crate) fn check_writable(memory: &OwnedFd, capacity: u64) -> io::Result<()> {
    if rustix::fs::fcntl_get_seals(memory).is_err() || has_name(memory)? {
        return Err(io::Error::other("it is no anonymous memory"));
    }
    // The peer could truncate the memory. A write behind the end would kill this process.
    rustix::fs::fcntl_add_seals(memory, LEN_SEALS)?;
    check_len(memory, capacity)
}

/// Checks that a descriptor from a peer is read-only memory of this length.
///
/// The memory must be sealed, so that only the existing map of its writer can write. A file of a directory store is
/// accepted too, because it is never written again.
pub(crate) fn check_readable(memory: &OwnedFd, capacity: u64) -> io::Result<()> {
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

/// Whether the descriptor is a file with a name: files in tmpfs have seals too.
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

/// A shared map of a segment.
#[derive(Debug)]
struct Map {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: a map is memory of the process, not of a thread.
unsafe impl Send for Map {}
// SAFETY: as above; shared references only read.
unsafe impl Sync for Map {}

/// Bytes that one thread populates: for less, starting another thread takes longer.
const POPULATE_BYTES: usize = 32 << 20;

/// Size of a huge page on processors with pages of 4 KiB.
const HUGE_PAGE: usize = 2 << 20;

impl Map {
    fn new(memory: &OwnedFd, capacity: u64, protection: ProtFlags) -> io::Result<Self> {
        let len = usize::try_from(capacity).map_err(io::Error::other)?;
        // SAFETY: no address is requested, so no other map changes.
        let start = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), len, protection, MapFlags::SHARED, memory, 0)?
        };
        let start = NonNull::new(start.cast()).ok_or_else(|| io::Error::other("mapped at 0"))?;
        host_maps::add(start.addr().get(), len, protection.contains(ProtFlags::WRITE));
        Ok(Self { start, len })
    }

    /// Allocates all pages now, on all cores: page faults would take several times as long.
    fn populate_all(self) -> Self {
        let parts = (0..self.len).step_by(POPULATE_BYTES).collect();
        let Ok(_) = parallel::map(parts, |at| {
            self.populate(at);
            Ok::<(), Infallible>(())
        });
        self
    }

    /// Asks for huge pages in the part of the map that whole huge pages cover.
    ///
    /// The rest of another huge page would be memory that no limit counts. Systems without huge pages for anonymous
    /// files, which is the default of most, ignore the advice.
    fn advise_huge_pages(self) -> Self {
        let len = self.len - self.len % HUGE_PAGE;
        // SAFETY: the part lies in the map, and the advice changes no byte.
        let _ =
            unsafe { rustix::mm::madvise(self.start.as_ptr().cast(), len, Advice::LinuxHugepage) };
        self
    }

    /// Allocates the pages of the part that begins at offset `at`.
    ///
    /// The call fails on a system that does not know the advice or lacks memory. The pages are then allocated when they
    /// are touched.
    fn populate(&self, at: usize) {
        let len = POPULATE_BYTES.min(self.len.saturating_sub(at));
        // SAFETY: the part begins in the map, or is empty at its end.
        let start = unsafe { self.start.add(at.min(self.len)) };
        // SAFETY: as above, and the advice changes no byte.
        let _ =
            unsafe { rustix::mm::madvise(start.as_ptr().cast(), len, Advice::LinuxPopulateWrite) };
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        host_maps::remove(self.start.addr().get());
        // SAFETY: the range belongs to this map, and no borrow of it exists any more.
        let unmapped = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.len) };
        debug_assert!(unmapped.is_ok(), "a map can be unmapped");
    }
}

/// A segment mapped for writing, by its only writer.
///
/// It stays writable while others read the segment, but the writer does not write then. To protect and unprotect 512
/// MiB in pages of 4 KiB would take 28 ms, as long as to fill them.
#[derive(Debug)]
pub(crate) struct WriteMap(Map);

impl WriteMap {
    /// Maps new memory and allocates all its pages.
    pub(crate) fn new(memory: &OwnedFd, capacity: u64) -> io::Result<Self> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let map = Map::new(memory, capacity, protection)?;
        Ok(Self(map.advise_huge_pages().populate_all()))
    }

    /// Maps new memory that may stay mostly unwritten. Its pages are allocated when they are written.
    pub(crate) fn sparse(memory: &OwnedFd, capacity: u64) -> io::Result<Self> {
        Ok(Self(Map::new(memory, capacity, ProtFlags::READ | ProtFlags::WRITE)?))
    }

    /// Returns the length in bytes.
    pub(crate) fn len(&self) -> usize {
        self.0.len
    }

    /// Returns a range of the segment for writing.
    ///
    /// # Panics
    ///
    /// If the range exceeds the segment.
    pub(crate) fn range_mut(&mut self, range: Range<usize>) -> &mut [u8] {
        assert!(range.start <= range.end && range.end <= self.0.len, "a range of the segment");
        // SAFETY: the range lies in the map, as asserted.
        let start = unsafe { self.0.start.add(range.start) };
        // SAFETY: the memory is mapped and initialized (new pages are zero), and this borrows the only writable map.
        // Others map the memory read-only, and read committed blobs only: the owner of this map hands it to the pool
        // before it commits, and gets it back when no reader is left.
        unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), range.len()) }
    }

    /// Returns the first `len` bytes.
    ///
    /// # Panics
    ///
    /// If the segment is shorter.
    pub(crate) fn prefix(&self, len: usize) -> &[u8] {
        assert!(len <= self.0.len, "a part of the segment");
        // SAFETY: the bytes are mapped and initialized, as asserted, and this borrows the only writable map.
        unsafe { std::slice::from_raw_parts(self.0.start.as_ptr(), len) }
    }
}

/// A segment mapped for reading.
#[derive(Debug)]
pub(crate) struct ReadMap {
    map: Map,
    /// Copy-on-write maps for readers that may write. None if no reader gets such maps.
    cow_maps: Option<Arc<CowMapPool>>,
}

impl ReadMap {
    /// Maps memory that was checked.
    pub(crate) fn new(memory: OwnedFd, capacity: u64) -> io::Result<Arc<Self>> {
        let map = Map::new(&memory, capacity, ProtFlags::READ)?;
        let cow_maps = Some(CowMapPool::new(memory.into(), map.len));
        Ok(Arc::new(Self { map, cow_maps }))
    }

    /// As [`ReadMap::new`], without copy-on-write maps.
    pub(crate) fn without_cow_maps(memory: &OwnedFd, capacity: u64) -> io::Result<Arc<Self>> {
        let map = Map::new(memory, capacity, ProtFlags::READ)?;
        Ok(Arc::new(Self { map, cow_maps: None }))
    }

    /// Returns the bytes of one archive. Returns none if the range exceeds the segment.
    ///
    /// The archive must be committed and held by a lease. Its bytes then do not change.
    pub(crate) fn bytes(self: &Arc<Self>, offset: u64, len: u64) -> Option<Bytes> {
        let (start, len) = (usize::try_from(offset).ok()?, usize::try_from(len).ok()?);
        start.checked_add(len).filter(|end| *end <= self.map.len)?;
        Some(Bytes::from_owner(CommittedRange { map: self.clone(), range: start..start + len }))
    }

    /// As [`bytes`](Self::bytes), as an open archive.
    pub(crate) fn archive(self: &Arc<Self>, offset: u64, len: u64) -> Option<LocalArchive> {
        let archive = LocalArchive::new(BytesMap::from(self.bytes(offset, len)?));
        Some(match &self.cow_maps {
            Some(maps) => archive.with_maps(maps.clone(), offset),
            None => archive,
        })
    }
}

/// Committed bytes of a segment, which do not change.
struct CommittedRange {
    map: Arc<ReadMap>,
    range: Range<usize>,
}

impl AsRef<[u8]> for CommittedRange {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: `ReadMap::bytes` has compared the range with the length of the map.
        let start = unsafe { self.map.map.start.add(self.range.start) };
        // SAFETY: the memory is mapped as long as this lives. Its writer stopped writing before the commit. The seals
        // keep all other processes from writing or truncating it, and the pool recycles the segment only after the
        // lease on it is returned.
        unsafe { std::slice::from_raw_parts(start.as_ptr(), self.range.len()) }
    }
}
