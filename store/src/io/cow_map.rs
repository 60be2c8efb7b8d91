//! Copy-on-write maps of stored bytes: a reader that writes gets private pages.
//!
//! torch has no read-only tensors. Bytes that other readers share are therefore mapped once more, copy-on-write. To
//! build new page tables for 512 MiB takes 35 ms, and to read 512 MiB only 15 ms. A dropped map is therefore kept for
//! the next reader, after its written pages are discarded.
#![expect(unsafe_code, reason = "maps are as safe as the rules that who has them keep: see each")]

use std::any::Any;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use memmap2::{MmapOptions, MmapRaw};

use crate::io::deferred_drop::spawn_restore;
use crate::io::sync::{Lock, MutexGuard};

/// Maximum number of idle maps of one file.
const MAX_IDLE: usize = 4;

/// A pool of copy-on-write maps of one file.
#[derive(Debug)]
pub(crate) struct CowMapPool {
    file: File,
    len: usize,
    /// Restored maps without a user, each with the number of its pages that are mapped.
    idle: Lock<Vec<(usize, MmapRaw)>>,
}

impl CowMapPool {
    /// Creates a pool for a file whose length never changes.
    ///
    /// The bytes may change only while no map is in use.
    pub(crate) fn new(file: File, len: usize) -> Arc<Self> {
        Arc::new(Self { file, len, idle: Lock::default() })
    }

    /// Returns a map for exclusive use: the idle one with the most mapped pages, else a new one.
    pub(crate) fn acquire(self: &Arc<Self>) -> io::Result<CowMap> {
        let best = {
            let mut idle = self.idle();
            let best = (0..idle.len()).max_by_key(|place| idle[*place].0);
            best.map(|place| idle.swap_remove(place).1)
        };
        let map = best.map_or_else(|| self.map(), Ok)?;
        Ok(CowMap { map: Some(map), pool: self.clone() })
    }

    fn idle(&self) -> MutexGuard<'_, Vec<(usize, MmapRaw)>> {
        self.idle.lock()
    }

    fn map(&self) -> io::Result<MmapRaw> {
        let mut options = MmapOptions::new();
        // Reserve no swap: only written pages take memory.
        options.len(self.len).no_reserve_swap();
        // SAFETY: this code reads nothing through the map. The users of a map read it while the bytes of the file do
        // not change, as `new` requires.
        Ok(unsafe { options.map_copy(&self.file)? }.into())
    }
}

/// A copy-on-write map in use. Dropping it returns the map to the pool.
#[derive(Debug)]
pub(crate) struct CowMap {
    map: Option<MmapRaw>,
    pool: Arc<CowMapPool>,
}

impl Drop for CowMap {
    /// Restores the map on a background thread: it is too slow for the thread that drops a tensor.
    fn drop(&mut self) {
        let Some(map) = self.map.take() else { return };
        if Arc::strong_count(&self.pool) == 1 {
            return;
        }
        let pool = self.pool.clone();
        let restore = move || {
            let Ok(mapped) = discard_written_pages(&map) else { return };
            let mut idle = pool.idle();
            idle.push((mapped, map));
            if idle.len() > MAX_IDLE {
                let worst = (0..idle.len()).min_by_key(|place| idle[*place].0);
                let worst = worst.map(|place| idle.swap_remove(place));
                drop(idle);
                drop(worst);
            }
        };
        spawn_restore(restore);
    }
}

/// A storage in copy-on-write memory, for exclusive use by its owner.
///
/// Writes are invisible to other readers, in this process and others, and to later reads. The buffer retains the
/// version that its bytes belong to.
pub struct CowBuffer {
    map: Arc<LeasedCowMap>,
    range: Range<usize>,
}

/// A copy-on-write map and the lease that keeps its bytes unchanged.
pub(crate) struct LeasedCowMap {
    map: CowMap,
    _lease: Box<dyn Any + Send + Sync>,
}

impl LeasedCowMap {
    pub(crate) fn new(map: CowMap, lease: impl Any + Send + Sync) -> Arc<Self> {
        Arc::new(Self { map, _lease: Box::new(lease) })
    }

    /// Returns a range of the map. Returns none if the range exceeds the map.
    pub(crate) fn range(self: &Arc<Self>, range: Range<usize>) -> Option<CowBuffer> {
        let is_inside = range.start <= range.end && range.end <= self.map.pool.len;
        is_inside.then(|| CowBuffer { map: self.clone(), range })
    }
}

impl CowBuffer {
    /// Returns the address of the first byte.
    ///
    /// All bytes are initialized, and stay mapped as long as the buffer exists.
    pub fn as_mut_ptr(&self) -> *mut u8 {
        let map = self.map.map.map.as_ref().expect("it is taken when it is dropped");
        map.as_mut_ptr().wrapping_add(self.range.start)
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        self.range.len()
    }

    /// Whether the length is 0.
    pub fn is_empty(&self) -> bool {
        self.range.is_empty()
    }
}

impl std::fmt::Debug for CowBuffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Private").field("range", &self.range).finish_non_exhaustive()
    }
}

/// Discards the written pages of an unused map, so that it shows the file again.
///
/// Returns the number of pages that are still mapped.
#[cfg(target_os = "linux")]
fn discard_written_pages(map: &MmapRaw) -> io::Result<usize> {
    use std::os::unix::fs::FileExt;

    use memmap2::UncheckedAdvice;

    /// Bytes per page in `/proc/self/pagemap`, and the tested bits. See `proc_pid_pagemap(5)`.
    const ENTRY: usize = 8;
    const PRESENT: u64 = 1 << 63;
    const SWAPPED: u64 = 1 << 62;
    const OF_FILE: u64 = 1 << 61;
    /// Entries per read. The read holds the lock of the address space, so calls of `mmap` wait meanwhile.
    const ENTRIES: usize = 256;

    let page = rustix::param::page_size();
    let pagemap = File::open("/proc/self/pagemap")?;
    let pages = map.len().div_ceil(page);
    let first = map.as_ptr().addr() / page;
    let mut entries = vec![0; ENTRIES * ENTRY];
    let (mut position, mut mapped) = (0, 0);
    while position < pages {
        let count = ENTRIES.min(pages - position);
        let entries = &mut entries[..count * ENTRY];
        let offset = u64::try_from((first + position) * ENTRY).map_err(io::Error::other)?;
        pagemap.read_exact_at(entries, offset)?;
        for (index, entry) in entries.chunks_exact(ENTRY).enumerate() {
            let entry = u64::from_le_bytes(entry.try_into().expect("an entry has 8 bytes"));
            if entry & (PRESENT | SWAPPED) == 0 {
                continue;
            }
            if entry & OF_FILE != 0 {
                mapped += 1;
                continue;
            }
            let start = (position + index) * page;
            let len = page.min(map.len() - start);
            // SAFETY: no user has the map, so no reference to the discarded pages exists.
            unsafe { map.unchecked_advise_range(UncheckedAdvice::DontNeed, start, len)? };
        }
        position += count;
    }
    Ok(mapped)
}

/// Other systems do not tell which pages were written.
#[cfg(not(target_os = "linux"))]
fn discard_written_pages(_map: &MmapRaw) -> io::Result<usize> {
    Err(io::ErrorKind::Unsupported.into())
}

#[cfg(test)]
#[cfg(target_os = "linux")]
mod tests {
    use std::os::unix::fs::FileExt;
    use std::thread;
    use std::time::{Duration, Instant};

    use tssd_format::{StateDict, Tensor};

    use super::*;
    use crate::{GetOptions, Key, PutOptions, Store};

    const LEN: usize = 16 << 10;

    fn bytes(private: &mut CowBuffer) -> &mut [u8] {
        // SAFETY: `Private` is exclusive memory, and no test creates a second reference to it.
        unsafe { std::slice::from_raw_parts_mut(private.as_mut_ptr(), private.len()) }
    }

    fn map_all(maps: &Arc<CowMapPool>) -> CowBuffer {
        LeasedCowMap::new(maps.acquire().unwrap(), ()).range(0..LEN).unwrap()
    }

    /// Waits until `count` maps are back in the pool.
    fn wait_for_idle(maps: &CowMapPool, count: usize) {
        let deadline = Instant::now() + Duration::from_mins(1);
        while maps.idle().len() < count {
            assert!(Instant::now() < deadline, "a map has not come home");
            thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn dropped_map_is_restored_and_reused() {
        let file = tempfile();
        file.write_all_at(&[1; LEN], 0).unwrap();
        let maps = CowMapPool::new(file.try_clone().unwrap(), LEN);
        let (mut first, mut second) = (map_all(&maps), map_all(&maps));
        bytes(&mut first)[5000..9000].fill(7);
        assert!(bytes(&mut second).iter().all(|byte| *byte == 1), "nobody else sees it");
        let address = first.as_mut_ptr();
        drop((first, second));
        wait_for_idle(&maps, 2);
        // The file has other bytes now, like a recycled segment.
        file.write_all_at(&[2; LEN], 0).unwrap();
        let mut reused = [map_all(&maps), map_all(&maps)];
        assert!(reused.iter().any(|map| map.as_mut_ptr() == address), "maps are kept");
        assert!(reused.iter_mut().all(|map| bytes(map).iter().all(|byte| *byte == 2)));
    }

    #[test]
    fn range_keeps_its_map_alive() {
        let file = tempfile();
        file.write_all_at(&[3; LEN], 0).unwrap();
        let maps = CowMapPool::new(file, LEN);
        let leased = LeasedCowMap::new(maps.acquire().unwrap(), ());
        assert!(leased.range(1..LEN + 1).is_none());
        let (mut part, empty) = (leased.range(LEN - 2..LEN).unwrap(), leased.range(7..7).unwrap());
        drop((leased, maps));
        assert_eq!((bytes(&mut part), empty.is_empty()), (&mut [3, 3][..], true));
    }

    /// A large storage in a file is mapped too. Writes do not change the stored version.
    #[tokio::test(flavor = "multi_thread")]
    async fn file_storage_is_mapped_copy_on_write() {
        let folder = tempfile::tempdir().unwrap();
        let key = Key::new("policy").unwrap();
        let mut dict = StateDict::new();
        let large = vec![7_u8; 1 << 20];
        dict.insert("large", Tensor::from_slice(&large, &[1 << 20]).unwrap());
        let directory = Store::directory(folder.path()).unwrap();
        for (store, is_in_file) in [(directory, true), (Store::memory(), false)] {
            store.put_state_dict(&key, &dict, &PutOptions::default()).await.unwrap();
            let opened = store.open(&key, &GetOptions::default()).await.unwrap();
            let mut private = opened.cow_buffers(&[0]).await.unwrap().remove(0);
            assert_eq!(private.is_some(), is_in_file);
            if let Some(private) = &mut private {
                assert!(bytes(private) == large);
                bytes(private).fill(8);
            }
            let stored = opened.read_storages(&[0]).await.unwrap().remove(0);
            assert!(stored == large, "nobody else sees it");
        }
    }

    fn tempfile() -> File {
        let flags = rustix::fs::MemfdFlags::CLOEXEC;
        let file = File::from(rustix::fs::memfd_create("test", flags).unwrap());
        file.set_len(u64::try_from(LEN).unwrap()).unwrap();
        file
    }
}
