//! Stored bytes in memory of one reader alone: whoever writes there gets pages of his own.
//!
//! torch has no tensors that may not be written to, so what lies in memory that others read too is mapped
//! once more, copy-on-write. New page tables for 512 MiB take the system 35 ms, and to read as much 15: so a
//! map that its reader has done with is kept for the next one, once the pages that were written are gone.
#![expect(unsafe_code, reason = "maps are as safe as the rules that who has them keep: see each")]

use std::any::Any;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use memmap2::{MmapOptions, MmapRaw};

use crate::io::deferred_drop::restoring;
use crate::io::sync::{Lock, MutexGuard};

/// So many maps of a file wait at most for a reader.
const MAX_IDLE: usize = 4;

/// Private maps of one file.
#[derive(Debug)]
pub(crate) struct PrivateMaps {
    file: File,
    len: usize,
    /// Those that nobody has, as new; and how many of their pages are mapped.
    idle: Lock<Vec<(usize, MmapRaw)>>,
}

impl PrivateMaps {
    /// Of a file whose bytes change only when nobody has a map of it, and whose length never does.
    pub(crate) fn new(file: File, len: usize) -> Arc<Self> {
        Arc::new(Self { file, len, idle: Lock::default() })
    }

    /// A map that nobody else has.
    pub(crate) fn lend(self: &Arc<Self>) -> io::Result<Lent> {
        let warmest = {
            let mut idle = self.idle();
            let warmest = (0..idle.len()).max_by_key(|place| idle[*place].0);
            warmest.map(|place| idle.swap_remove(place).1)
        };
        let map = warmest.map_or_else(|| self.map(), Ok)?;
        Ok(Lent { map: Some(map), home: self.clone() })
    }

    fn idle(&self) -> MutexGuard<'_, Vec<(usize, MmapRaw)>> {
        self.idle.lock()
    }

    fn map(&self) -> io::Result<MmapRaw> {
        let mut options = MmapOptions::new();
        // What nobody writes to takes no memory.
        options.len(self.len).no_reserve_swap();
        // SAFETY: nothing here reads it; whoever does has the file's bytes at rest, as `new` asks for.
        Ok(unsafe { options.map_copy(&self.file)? }.into())
    }
}

/// A private map in use.
#[derive(Debug)]
pub(crate) struct Lent {
    map: Option<MmapRaw>,
    home: Arc<PrivateMaps>,
}

impl Drop for Lent {
    /// The map goes home. What it takes to restore it is no work for whoever drops a tensor.
    fn drop(&mut self) {
        let Some(map) = self.map.take() else { return };
        if Arc::strong_count(&self.home) == 1 {
            return;
        }
        let home = self.home.clone();
        let restore = move || {
            let Ok(pages) = restore(&map) else { return };
            let mut idle = home.idle();
            idle.push((pages, map));
            if idle.len() > MAX_IDLE {
                let coldest = (0..idle.len()).min_by_key(|place| idle[*place].0);
                let coldest = coldest.map(|place| idle.swap_remove(place));
                drop(idle);
                drop(coldest);
            }
        };
        restoring(restore);
    }
}

/// A storage in memory that its owner alone sees, and may write to: nobody else sees what he writes, in this
/// process or another, and no later read does. It holds the version that it is of.
pub struct Private {
    map: Arc<Held>,
    range: Range<usize>,
}

/// A map, and what keeps its bytes at rest.
pub(crate) struct Held {
    map: Lent,
    _lease: Box<dyn Any + Send + Sync>,
}

impl Held {
    pub(crate) fn new(map: Lent, lease: impl Any + Send + Sync) -> Arc<Self> {
        Arc::new(Self { map, _lease: Box::new(lease) })
    }

    /// A range of it; none if it does not reach so far.
    pub(crate) fn range(self: &Arc<Self>, range: Range<usize>) -> Option<Private> {
        let is_inside = range.start <= range.end && range.end <= self.map.home.len;
        is_inside.then(|| Private { map: self.clone(), range })
    }
}

impl Private {
    /// Its first byte. All of them are initialised, and stay there as long as this does.
    pub fn as_mut_ptr(&self) -> *mut u8 {
        let map = self.map.map.map.as_ref().expect("it is taken when it is dropped");
        map.as_mut_ptr().wrapping_add(self.range.start)
    }

    /// How many bytes it has.
    pub fn len(&self) -> usize {
        self.range.len()
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.range.is_empty()
    }
}

impl std::fmt::Debug for Private {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Private").field("range", &self.range).finish_non_exhaustive()
    }
}

/// Makes a map that nobody has show its file again: pages that were written go back to the system. Gives the
/// number of pages that are still mapped.
#[cfg(target_os = "linux")]
fn restore(map: &MmapRaw) -> io::Result<usize> {
    use std::os::unix::fs::FileExt;

    use memmap2::UncheckedAdvice;

    /// Bytes of `/proc/self/pagemap` for each page, and the bits that are looked at: see `proc_pid_pagemap(5)`.
    const ENTRY: usize = 8;
    const PRESENT: u64 = 1 << 63;
    const SWAPPED: u64 = 1 << 62;
    const OF_FILE: u64 = 1 << 61;
    /// So many at a time: whoever maps something waits meanwhile.
    const ENTRIES: usize = 256;

    let page = rustix::param::page_size();
    let pagemap = File::open("/proc/self/pagemap")?;
    let pages = map.len().div_ceil(page);
    let first = map.as_ptr().addr() / page;
    let mut entries = vec![0; ENTRIES * ENTRY];
    let (mut at, mut mapped) = (0, 0);
    while at < pages {
        let count = ENTRIES.min(pages - at);
        let entries = &mut entries[..count * ENTRY];
        let place = u64::try_from((first + at) * ENTRY).map_err(io::Error::other)?;
        pagemap.read_exact_at(entries, place)?;
        for (index, entry) in entries.chunks_exact(ENTRY).enumerate() {
            let entry = u64::from_le_bytes(entry.try_into().expect("an entry has 8 bytes"));
            if entry & (PRESENT | SWAPPED) == 0 {
                continue;
            }
            if entry & OF_FILE != 0 {
                mapped += 1;
                continue;
            }
            let start = (at + index) * page;
            let len = page.min(map.len() - start);
            // SAFETY: nobody has the map, so nobody looks at what is lost.
            unsafe { map.unchecked_advise_range(UncheckedAdvice::DontNeed, start, len)? };
        }
        at += count;
    }
    Ok(mapped)
}

/// Elsewhere nobody says which pages were written.
#[cfg(not(target_os = "linux"))]
fn restore(_map: &MmapRaw) -> io::Result<usize> {
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

    fn bytes(private: &mut Private) -> &mut [u8] {
        // SAFETY: nobody else has the memory, as `Private` says, and no test clones it.
        unsafe { std::slice::from_raw_parts_mut(private.as_mut_ptr(), private.len()) }
    }

    fn whole(maps: &Arc<PrivateMaps>) -> Private {
        Held::new(maps.lend().unwrap(), ()).range(0..LEN).unwrap()
    }

    /// Waits until so many maps are at home.
    fn at_home(maps: &PrivateMaps, count: usize) {
        let deadline = Instant::now() + Duration::from_mins(1);
        while maps.idle().len() < count {
            assert!(Instant::now() < deadline, "a map has not come home");
            thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn a_map_comes_home_as_new() {
        let file = tempfile();
        file.write_all_at(&[1; LEN], 0).unwrap();
        let maps = PrivateMaps::new(file.try_clone().unwrap(), LEN);
        let (mut first, mut second) = (whole(&maps), whole(&maps));
        bytes(&mut first)[5000..9000].fill(7);
        assert!(bytes(&mut second).iter().all(|byte| *byte == 1), "nobody else sees it");
        let place = first.as_mut_ptr();
        drop((first, second));
        at_home(&maps, 2);
        // The file has other bytes now, as a segment that is recycled has.
        file.write_all_at(&[2; LEN], 0).unwrap();
        let mut again = [whole(&maps), whole(&maps)];
        assert!(again.iter().any(|map| map.as_mut_ptr() == place), "maps are kept");
        assert!(again.iter_mut().all(|map| bytes(map).iter().all(|byte| *byte == 2)));
    }

    #[test]
    fn a_part_keeps_the_map() {
        let file = tempfile();
        file.write_all_at(&[3; LEN], 0).unwrap();
        let maps = PrivateMaps::new(file, LEN);
        let held = Held::new(maps.lend().unwrap(), ());
        assert!(held.range(1..LEN + 1).is_none());
        let (mut part, empty) = (held.range(LEN - 2..LEN).unwrap(), held.range(7..7).unwrap());
        drop((held, maps));
        assert_eq!((bytes(&mut part), empty.is_empty()), (&mut [3, 3][..], true));
    }

    /// So is what is large and in a file; the version stays what it is.
    #[tokio::test(flavor = "multi_thread")]
    async fn a_storage_of_a_directory_can_be_written_to() {
        let folder = tempfile::tempdir().unwrap();
        let key = Key::new("policy").unwrap();
        let mut dict = StateDict::new();
        let large = vec![7_u8; 1 << 20];
        dict.insert("large", Tensor::from_slice(&large, &[1 << 20]).unwrap());
        let directory = Store::directory(folder.path()).unwrap();
        for (store, is_in_file) in [(directory, true), (Store::memory(), false)] {
            store.put_state_dict(&key, &dict, &PutOptions::default()).await.unwrap();
            let opened = store.open(&key, &GetOptions::default()).await.unwrap();
            let mut private = opened.private(&[0]).await.unwrap().remove(0);
            assert_eq!(private.is_some(), is_in_file);
            if let Some(private) = &mut private {
                assert!(bytes(private) == large);
                bytes(private).fill(8);
            }
            let stored = opened.storages(&[0]).await.unwrap().remove(0);
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
