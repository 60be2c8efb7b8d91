//! Host memory that the store has mapped. A driver may pin it, so that devices copy by DMA.

use std::any::Any;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard};

/// The maps of this process, by their start addresses.
static MAPS: Mutex<BTreeMap<usize, Entry>> = Mutex::new(BTreeMap::new());

struct Entry {
    len: usize,
    is_writable: bool,
    /// Dropped before the memory is unmapped.
    driver_state: Option<Box<dyn Any + Send>>,
}

/// Mapped host memory.
pub struct HostMap<'a> {
    /// Start address.
    pub start: usize,
    /// Length in bytes.
    pub len: usize,
    /// Whether this process may write to it.
    pub is_writable: bool,
    /// State of the driver. The store drops it before it unmaps the memory.
    ///
    /// An example is a registration whose `Drop` unpins the memory.
    pub driver_state: &'a mut Option<Box<dyn Any + Send>>,
}

fn maps() -> MutexGuard<'static, BTreeMap<usize, Entry>> {
    MAPS.lock().expect("no code panics while it holds the host maps")
}

/// Calls `visit` with the map that contains a range of addresses, if there is one.
///
/// The map stays mapped during the call.
pub fn with_map<T>(range: &Range<usize>, visit: impl FnOnce(HostMap<'_>) -> T) -> Option<T> {
    let mut maps = maps();
    let (&start, entry) = maps.range_mut(..=range.start).next_back()?;
    (range.end <= start + entry.len).then(|| {
        let Entry { len, is_writable, driver_state } = entry;
        visit(HostMap { start, len: *len, is_writable: *is_writable, driver_state })
    })
}

/// Registers mapped memory until [`remove`].
pub(crate) fn add(start: usize, len: usize, is_writable: bool) {
    maps().insert(start, Entry { len, is_writable, driver_state: None });
}

/// Removes memory that is about to be unmapped.
pub(crate) fn remove(start: usize) {
    let mut maps = maps();
    let entry = maps.remove(&start);
    // Under the lock: a driver must not pin memory that is being unmapped.
    drop(entry);
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    struct Pinned(Arc<AtomicBool>);

    impl Drop for Pinned {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }

    #[test]
    fn driver_state_is_dropped_with_its_map() {
        // Addresses that no map of this process has.
        let start = 4096;
        add(start, 100, true);
        let is_dropped = Arc::new(AtomicBool::new(false));
        let found = with_map(&(start + 10..start + 100), |map| {
            *map.driver_state = Some(Box::new(Pinned(is_dropped.clone())));
            (map.start, map.len, map.is_writable)
        });
        assert_eq!(found, Some((start, 100, true)));
        for outside in [start - 1..start + 1, start + 99..start + 101, start + 200..start + 201] {
            assert!(with_map(&outside, |_| ()).is_none(), "{outside:?}");
        }
        assert!(!is_dropped.load(Ordering::Relaxed));
        remove(start);
        assert!(is_dropped.load(Ordering::Relaxed));
        assert!(with_map(&(start..start + 1), |_| ()).is_none());
    }
}
