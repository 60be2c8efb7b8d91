//! Letting go of files, and of maps. When the last one lets go of a file without a name, the system takes its room back, which takes
//! 90 ms for 512 MiB in its cache: nobody is to wait for that but who needs the room.
//!
//! There are no locks here, which a process that is forked meanwhile would find locked for ever.

use std::io::{self, ErrorKind};
use std::process;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// A file of fewer bytes is sooner let go than a thread started.
pub(crate) const LARGE: u64 = 16 << 20;

/// So many are let go at a time, more or less. Who has more lets go of the rest itself, and starts no crowd of threads.
const MAX_PARTING: usize = 4;

/// For room nobody waits longer.
const TIMEOUT: Duration = Duration::from_secs(10);

/// How often who waits looks.
const INTERVAL: Duration = Duration::from_millis(2);

/// What has a large file open, or mapped. When it is dropped, it lets go of that on a thread of its own.
#[derive(Debug)]
pub(crate) struct Parting<T: Send + 'static>(Option<T>);

impl<T: Send + 'static> Parting<T> {
    pub(crate) fn new(it: T) -> Self {
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
        if FILES.pending() < MAX_PARTING {
            let it = self.0.take();
            apart("tssd-parting", &FILES, move || drop(it));
        }
    }
}

/// Restores a map on a thread of its own, which may be the last to have its file. Without a thread it is let go here.
pub(crate) fn restoring(work: impl FnOnce() + Send + 'static) {
    apart("tssd-restore", &MAPS, work);
}

fn apart(name: &str, count: &'static Count, work: impl FnOnce() + Send + 'static) {
    let counted = Counted::of(count);
    let work = move || {
        work();
        drop(counted);
    };
    drop(thread::Builder::new().name(name.to_owned()).spawn(work));
}

/// Waits until this process has let go of the files that it is about to, such as those of versions that are gone; ten
/// seconds at most. Before a process forks: its child would have them as long as it lives.
pub fn settle() {
    let deadline = Instant::now() + TIMEOUT;
    // A map that is restored may be what lets go of a file.
    for count in [&MAPS, &FILES] {
        while count.pending() > 0 && count.wait(count.gone(), deadline) {}
    }
}

/// Does something that takes room on the disk: once more if there is too little, whenever a file is gone that was let go.
pub(crate) fn with_room<T>(mut work: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let before = FILES.gone();
        let error = match work() {
            Err(error) => error,
            done => return done,
        };
        let is_full = matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded);
        if !is_full || Instant::now() >= deadline || !FILES.wait(before, deadline) {
            return Err(error);
        }
    }
}

/// Files that are being let go.
static FILES: Count = Count::new();
/// Maps that are being restored.
static MAPS: Count = Count::new();

/// What is under way on threads of its own.
struct Count {
    /// Whose threads they are: a process that was forked has none of them.
    process: AtomicU32,
    pending: AtomicUsize,
    gone: AtomicU64,
}

impl Count {
    const fn new() -> Self {
        Self { process: AtomicU32::new(0), pending: AtomicUsize::new(0), gone: AtomicU64::new(0) }
    }

    fn pending(&self) -> usize {
        let is_own = self.process.load(Ordering::SeqCst) == process::id();
        if is_own { self.pending.load(Ordering::SeqCst) } else { 0 }
    }

    /// How many are gone by now.
    fn gone(&self) -> u64 {
        self.gone.load(Ordering::SeqCst)
    }

    /// Waits until more than so many are gone; false if nobody else is going, or not until then.
    fn wait(&self, before: u64, deadline: Instant) -> bool {
        while self.gone() == before && self.pending() > 0 && Instant::now() < deadline {
            thread::sleep(INTERVAL);
        }
        self.gone() != before
    }
}

/// One that is counted as long as this lives.
struct Counted(&'static Count);

impl Counted {
    fn of(count: &'static Count) -> Self {
        if count.process.swap(process::id(), Ordering::SeqCst) != process::id() {
            count.pending.store(0, Ordering::SeqCst);
        }
        count.pending.fetch_add(1, Ordering::SeqCst);
        Self(count)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        // First: who sees that none is pending has seen what is gone.
        self.0.gone.fetch_add(1, Ordering::SeqCst);
        let less = |pending: usize| pending.checked_sub(1);
        let _ = self.0.pending.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less);
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
        let before = FILES.gone();
        drop(Parting::new(Slow(told, says)));
        assert!(dropped.try_recv().is_err(), "it is not dropped yet");
        assert!(!FILES.wait(before, Instant::now()), "nor is it until now");
        let tells = thread::spawn(move || go.send(()));
        assert!(FILES.wait(before, soon()));
        tells.join().unwrap().unwrap();
        assert_ne!(dropped.recv().unwrap(), thread::current().id());
        // What is gone already is not waited for, nor missed.
        assert!(FILES.wait(before, Instant::now()));
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
        assert_eq!(FILES.pending(), 0);
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
