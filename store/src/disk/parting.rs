//! Letting go of files. When the last one lets go of a file without a name, the system takes its room back, which takes
//! 90 ms for 512 MiB in its cache: nobody is to wait for that but who needs the room.
//!
//! There are no locks here, which a process that is forked meanwhile would find locked for ever.

use std::io::{self, ErrorKind};
use std::process;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// A file of fewer bytes is sooner let go than a thread started.
pub(super) const LARGE: u64 = 16 << 20;

/// So many are let go at a time, at most. Who has more waits for them, and starts no crowd of threads.
const MAX_PARTING: usize = 4;

/// For room nobody waits longer.
const TIMEOUT: Duration = Duration::from_secs(10);

/// How often who waits looks.
const INTERVAL: Duration = Duration::from_millis(2);

/// What has a large file open, or mapped. When it is dropped, it lets go of that on a thread of its own.
#[derive(Debug)]
pub(super) struct Parting<T: Send + 'static>(Option<T>);

impl<T: Send + 'static> Parting<T> {
    pub(super) fn new(it: T) -> Self {
        Self(Some(it))
    }
}

impl<T: AsRef<[u8]> + Send + 'static> AsRef<[u8]> for Parting<T> {
    fn as_ref(&self) -> &[u8] {
        self.0.as_ref().expect("it is taken when it is dropped").as_ref()
    }
}

impl<T: Send + 'static> Drop for Parting<T> {
    fn drop(&mut self) {
        let Some(counted) = Counted::new() else { return };
        let it = self.0.take();
        let part = move || {
            drop(it);
            drop(counted);
        };
        // Without a thread it is dropped here.
        drop(thread::Builder::new().name("tssd-parting".to_owned()).spawn(part));
    }
}

/// Waits until the room of files that this process has let go, such as those of versions that are gone, is free; ten seconds
/// at most. Before a process forks: its child would have them open as long as it lives.
pub fn settle() {
    let deadline = Instant::now() + TIMEOUT;
    while pending() > 0 && wait(gone(), deadline) {}
}

/// Does something that takes room on the disk: once more if there is too little, whenever a file is gone that was let go.
pub(super) fn with_room<T>(mut work: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let before = gone();
        let error = match work() {
            Err(error) => error,
            done => return done,
        };
        let is_full = matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded);
        if !is_full || Instant::now() >= deadline || !wait(before, deadline) {
            return Err(error);
        }
    }
}

/// How many are gone by now.
fn gone() -> u64 {
    GONE.load(Ordering::SeqCst)
}

/// Waits until more than so many are gone; false if nobody else is going, or not until then.
fn wait(before: u64, deadline: Instant) -> bool {
    while gone() == before && pending() > 0 && Instant::now() < deadline {
        thread::sleep(INTERVAL);
    }
    gone() != before
}

/// How many are being let go, by which process: one that was forked has none of these threads.
static PENDING: AtomicUsize = AtomicUsize::new(0);
static PROCESS: AtomicU32 = AtomicU32::new(0);
static GONE: AtomicU64 = AtomicU64::new(0);

fn pending() -> usize {
    if PROCESS.load(Ordering::SeqCst) == process::id() { PENDING.load(Ordering::SeqCst) } else { 0 }
}

/// One that is counted as long as this lives.
struct Counted;

impl Counted {
    /// None if there are enough of them.
    fn new() -> Option<Self> {
        if PROCESS.swap(process::id(), Ordering::SeqCst) != process::id() {
            PENDING.store(0, Ordering::SeqCst);
        }
        let more = |pending| (pending < MAX_PARTING).then_some(pending + 1);
        PENDING.fetch_update(Ordering::SeqCst, Ordering::SeqCst, more).ok().map(|_| Self)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        // First: who sees that none is pending has seen what is gone.
        GONE.fetch_add(1, Ordering::SeqCst);
        let less = |pending: usize| pending.checked_sub(1);
        let _ = PENDING.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Mutex, MutexGuard, PoisonError, mpsc};

    use super::*;

    /// Tests count all that are pending in this process: one at a time.
    fn alone() -> MutexGuard<'static, ()> {
        static ALONE: Mutex<()> = Mutex::new(());
        ALONE.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes until it is told to drop, and says on which thread that was.
    struct Slow(mpsc::Receiver<()>, mpsc::Sender<thread::ThreadId>);

    impl Drop for Slow {
        fn drop(&mut self) {
            let _ = self.0.recv_timeout(Duration::from_mins(1));
            let _ = self.1.send(thread::current().id());
        }
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_mins(1)
    }

    #[test]
    fn who_lets_go_does_not_wait_but_who_needs_the_room_does() {
        let _alone = alone();
        let (go, told) = mpsc::channel();
        let (says, dropped) = mpsc::channel();
        let before = gone();
        drop(Parting::new(Slow(told, says)));
        assert!(dropped.try_recv().is_err(), "it is not dropped yet");
        assert!(!wait(before, Instant::now()), "nor is it until now");
        let tells = thread::spawn(move || go.send(()));
        assert!(wait(before, soon()));
        tells.join().unwrap().unwrap();
        assert_ne!(dropped.recv().unwrap(), thread::current().id());
        // What is gone already is not waited for, nor missed.
        assert!(wait(before, Instant::now()));
    }

    #[test]
    fn who_lets_go_of_many_waits_for_the_rest() {
        let _alone = alone();
        let (says, dropped) = mpsc::channel();
        let goes: Vec<_> = (0..MAX_PARTING)
            .map(|_| {
                let (go, told) = mpsc::channel();
                drop(Parting::new(Slow(told, says.clone())));
                go
            })
            .collect();
        let (go, told) = mpsc::channel();
        go.send(()).unwrap();
        drop(Parting::new(Slow(told, says)));
        assert_eq!(dropped.try_recv().unwrap(), thread::current().id());
        for go in goes {
            go.send(()).unwrap();
        }
        assert!(dropped.iter().all(|thread| thread != thread::current().id()));
        settle();
        assert_eq!(pending(), 0);
    }

    #[test]
    fn who_lacks_room_tries_again_when_a_file_is_gone_that_was_let_go() {
        let _alone = alone();
        let (go, told) = mpsc::channel();
        drop(Parting::new(Slow(told, mpsc::channel().0)));
        let mut tries = 0;
        let found = with_room(|| {
            tries += 1;
            if tries > 1 {
                return Ok(tries);
            }
            go.send(()).unwrap();
            Err(ErrorKind::StorageFull.into())
        });
        assert_eq!(found.unwrap(), 2);
        let full = with_room::<()>(|| Err(ErrorKind::StorageFull.into()));
        assert_eq!(full.unwrap_err().kind(), ErrorKind::StorageFull);
        let mut tries = 0;
        let other = with_room::<()>(|| {
            tries += 1;
            Err(ErrorKind::NotFound.into())
        });
        assert_eq!((tries, other.unwrap_err().kind()), (1, ErrorKind::NotFound));
    }
}
