//! Background drops of large open files and maps.
//!
//! When the last reference to an unlinked file is dropped, the system frees its blocks, which takes 90 ms for 512 MiB
//! in the page cache. Only a call that needs the space waits for that.
//!
//! This module has no locks: a process forked in the meantime would inherit a locked one.

use std::io::{self, ErrorKind};
use std::process;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Minimum bytes of a file that is dropped in the background. For less, starting a thread takes longer.
pub(crate) const MIN_DEFERRED_BYTES: u64 = 16 << 20;

/// Approximate maximum of concurrent background drops. Above that, the calling thread drops inline.
const MAX_CONCURRENT_DROPS: usize = 4;

/// Maximum time that a call waits for background drops.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Interval at which a waiting call checks the counter.
const POLL_INTERVAL: Duration = Duration::from_millis(2);

/// An owner of a large open or mapped file. Its drop runs on a background thread.
#[derive(Debug)]
pub(crate) struct DeferredDrop<T: Send + 'static>(Option<T>);

impl<T: Send + 'static> DeferredDrop<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(Some(value))
    }
}

impl<T: AsRef<[u8]> + Send + 'static> AsRef<[u8]> for DeferredDrop<T> {
    fn as_ref(&self) -> &[u8] {
        self.0.as_ref().expect("it is taken when it is dropped").as_ref()
    }
}

impl<T: Send + 'static> Drop for DeferredDrop<T> {
    fn drop(&mut self) {
        if FILE_DROPS.pending() < MAX_CONCURRENT_DROPS {
            let value = self.0.take();
            spawn_counted("tssd-parting", &FILE_DROPS, move || drop(value));
        }
    }
}

/// Restores a map on a background thread, which may drop the last reference to the file of the map.
///
/// If no thread can be started, `work` is dropped inline, and the map with it.
pub(crate) fn spawn_restore(work: impl FnOnce() + Send + 'static) {
    spawn_counted("tssd-restore", &MAP_RESTORES, work);
}

fn spawn_counted(name: &str, count: &'static DropCounter, work: impl FnOnce() + Send + 'static) {
    let guard = CountGuard::of(count);
    let work = move || {
        work();
        drop(guard);
    };
    drop(thread::Builder::new().name(name.to_owned()).spawn(work));
}

/// Waits until the background drops of this process are done, for at most 10 seconds.
///
/// Call it before a fork: the child would keep the files open as long as it lives.
pub fn wait_for_deferred_drops() {
    let deadline = Instant::now() + TIMEOUT;
    // A restored map may have the last reference to a file.
    for count in [&MAP_RESTORES, &FILE_DROPS] {
        while count.pending() > 0 && count.wait(count.completed(), deadline) {}
    }
}

/// Runs work that allocates disk space.
///
/// If the disk or the quota is full, retries after each background drop that completes.
pub(crate) fn retry_when_full<T>(mut work: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let before = FILE_DROPS.completed();
        let error = match work() {
            Err(error) => error,
            result => return result,
        };
        let is_full = matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded);
        if !is_full || Instant::now() >= deadline || !FILE_DROPS.wait(before, deadline) {
            return Err(error);
        }
    }
}

/// Files that are being dropped.
static FILE_DROPS: DropCounter = DropCounter::new();
/// Maps that are being restored.
static MAP_RESTORES: DropCounter = DropCounter::new();

/// Counts background threads and the work that they have completed.
struct DropCounter {
    /// The process of these threads. A forked child has none of them.
    process: AtomicU32,
    pending: AtomicUsize,
    completed: AtomicU64,
}

impl DropCounter {
    const fn new() -> Self {
        Self {
            process: AtomicU32::new(0),
            pending: AtomicUsize::new(0),
            completed: AtomicU64::new(0),
        }
    }

    fn pending(&self) -> usize {
        let is_own_process = self.process.load(Ordering::SeqCst) == process::id();
        if is_own_process { self.pending.load(Ordering::SeqCst) } else { 0 }
    }

    /// Returns the number of completed drops.
    fn completed(&self) -> u64 {
        self.completed.load(Ordering::SeqCst)
    }

    /// Waits until more than `before` drops are completed.
    ///
    /// Returns false if none is pending, or at the deadline.
    fn wait(&self, before: u64, deadline: Instant) -> bool {
        while self.completed() == before && self.pending() > 0 && Instant::now() < deadline {
            thread::sleep(POLL_INTERVAL);
        }
        self.completed() != before
    }
}

/// A guard that counts one background thread.
struct CountGuard(&'static DropCounter);

impl CountGuard {
    fn of(count: &'static DropCounter) -> Self {
        if count.process.swap(process::id(), Ordering::SeqCst) != process::id() {
            count.pending.store(0, Ordering::SeqCst);
        }
        count.pending.fetch_add(1, Ordering::SeqCst);
        Self(count)
    }
}

impl Drop for CountGuard {
    fn drop(&mut self) {
        // Count the completion first: a thread that sees no pending drop has then seen all completed ones.
        self.0.completed.fetch_add(1, Ordering::SeqCst);
        let decrement = |pending: usize| pending.checked_sub(1);
        let _ = self.0.pending.fetch_update(Ordering::SeqCst, Ordering::SeqCst, decrement);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Mutex, MutexGuard, PoisonError, mpsc};

    use super::*;

    /// Serializes the tests: they count all pending drops of this process.
    fn serialize() -> MutexGuard<'static, ()> {
        static SERIAL: Mutex<()> = Mutex::new(());
        SERIAL.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Blocks its drop until a signal, and then reports the thread that dropped it.
    struct SlowDrop(mpsc::Receiver<()>, mpsc::Sender<thread::ThreadId>);

    impl Drop for SlowDrop {
        fn drop(&mut self) {
            let _ = self.0.recv_timeout(Duration::from_mins(1));
            let _ = self.1.send(thread::current().id());
        }
    }

    fn in_one_minute() -> Instant {
        Instant::now() + Duration::from_mins(1)
    }

    #[test]
    fn deferred_drop_blocks_only_calls_that_wait_for_it() {
        let _serial = serialize();
        let (release, released) = mpsc::channel();
        let (report, dropped) = mpsc::channel();
        let before = FILE_DROPS.completed();
        drop(DeferredDrop::new(SlowDrop(released, report)));
        assert!(dropped.try_recv().is_err(), "it is not dropped yet");
        assert!(!FILE_DROPS.wait(before, Instant::now()), "nor is it until now");
        let releaser = thread::spawn(move || release.send(()));
        assert!(FILE_DROPS.wait(before, in_one_minute()));
        releaser.join().unwrap().unwrap();
        assert_ne!(dropped.recv().unwrap(), thread::current().id());
        // A drop that is completed already counts without a wait.
        assert!(FILE_DROPS.wait(before, Instant::now()));
    }

    #[test]
    fn drops_above_the_limit_run_inline() {
        let _serial = serialize();
        let (report, dropped) = mpsc::channel();
        let releases: Vec<_> = (0..MAX_CONCURRENT_DROPS)
            .map(|_| {
                let (release, released) = mpsc::channel();
                drop(DeferredDrop::new(SlowDrop(released, report.clone())));
                release
            })
            .collect();
        let (release, released) = mpsc::channel();
        release.send(()).unwrap();
        drop(DeferredDrop::new(SlowDrop(released, report)));
        assert_eq!(dropped.try_recv().unwrap(), thread::current().id());
        for release in releases {
            release.send(()).unwrap();
        }
        assert!(dropped.iter().all(|thread| thread != thread::current().id()));
        wait_for_deferred_drops();
        assert_eq!(FILE_DROPS.pending(), 0);
    }

    #[test]
    fn full_disk_is_retried_after_a_completed_drop() {
        let _serial = serialize();
        let (release, released) = mpsc::channel();
        drop(DeferredDrop::new(SlowDrop(released, mpsc::channel().0)));
        let mut tries = 0;
        let result = retry_when_full(|| {
            tries += 1;
            if tries > 1 {
                return Ok(tries);
            }
            release.send(()).unwrap();
            Err(ErrorKind::StorageFull.into())
        });
        assert_eq!(result.unwrap(), 2);
        let full = retry_when_full::<()>(|| Err(ErrorKind::StorageFull.into()));
        assert_eq!(full.unwrap_err().kind(), ErrorKind::StorageFull);
        let mut tries = 0;
        let other = retry_when_full::<()>(|| {
            tries += 1;
            Err(ErrorKind::NotFound.into())
        });
        assert_eq!((tries, other.unwrap_err().kind()), (1, ErrorKind::NotFound));
    }
}
