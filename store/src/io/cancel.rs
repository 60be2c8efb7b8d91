//! Work that waits for others, while somebody looks whether it is still wanted.

use std::panic;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use crate::error::{Error, ErrorKind, Result};

/// An error if nobody waits any more for what is done.
pub(crate) type GoesOn<'a> = &'a (dyn Fn() -> Result<()> + Sync);

/// Whether nobody waits any more for what is done.
#[derive(Debug, Default)]
pub(crate) struct Stop(AtomicBool);

impl Stop {
    /// How often who waits for others looks.
    pub(crate) const INTERVAL: Duration = Duration::from_millis(50);

    /// An error if it is so.
    pub(crate) fn check(&self) -> Result<()> {
        let text = "nobody waits for it any more";
        if self.0.load(Ordering::Relaxed) { Err(Error::new(ErrorKind::Busy, text)) } else { Ok(()) }
    }

    /// Does something that cannot be stopped, such as to connect, on a thread of its own: who is stopped leaves it there.
    pub(crate) fn leave<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> Result<T> {
        self.check()?;
        let (done, ended) = mpsc::sync_channel(1);
        let working = thread::Builder::new().spawn(move || drop(done.send(work())));
        let working = working.map_err(|error| Error::io("a thread", error))?;
        loop {
            match ended.recv_timeout(Self::INTERVAL) {
                Ok(done) => {
                    // None is left over to be lost in a fork.
                    drop(working.join());
                    return done;
                }
                Err(RecvTimeoutError::Timeout) => self.check()?,
                Err(RecvTimeoutError::Disconnected) => {
                    let panic = working.join().expect_err("what ends without a word has panicked");
                    panic::resume_unwind(panic)
                }
            }
        }
    }

    /// Does something that waits on a thread of its own, and looks on this one whether it goes on: after an error there it
    /// is stopped, and that error is what has become of it.
    pub(crate) fn watch<T: Send>(
        goes_on: GoesOn<'_>,
        work: impl FnOnce(&Self) -> Result<T> + Send,
    ) -> Result<T> {
        let stop = &Self::default();
        // It is dropped when the work has ended, however it has.
        let (works, ended) = mpsc::channel::<()>();
        thread::scope(|scope| {
            let working = scope.spawn(move || {
                let _works = works;
                work(stop)
            });
            let mut going = Ok(());
            loop {
                if going.is_ok() {
                    going = goes_on();
                    stop.0.store(going.is_err(), Ordering::Relaxed);
                }
                if ended.recv_timeout(Self::INTERVAL) != Err(RecvTimeoutError::Timeout) {
                    break;
                }
            }
            let done = working.join().unwrap_or_else(|panic| panic::resume_unwind(panic));
            going.and(done)
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::atomic::AtomicUsize;

    use super::*;

    #[test]
    fn what_is_stopped_ends_with_why() {
        let looked = AtomicUsize::new(0);
        let goes_on = || match looked.fetch_add(1, Ordering::Relaxed) {
            0 | 1 => Ok(()),
            _ => Err(Error::new(ErrorKind::Invalid, "no more")),
        };
        let waits = |stop: &Stop| -> Result<()> {
            loop {
                stop.check()?;
                thread::sleep(Duration::from_millis(1));
            }
        };
        assert_eq!(Stop::watch(&goes_on, waits).unwrap_err().kind(), ErrorKind::Invalid);
        assert_eq!(looked.load(Ordering::Relaxed), 3, "nobody looks again");
    }

    #[test]
    fn what_cannot_be_stopped_is_left() {
        let (begun, begins) = mpsc::channel();
        let begins = Mutex::new(begins);
        let (end, ended) = mpsc::channel::<()>();
        let goes_on = || match begins.lock().unwrap().try_recv() {
            Ok(()) => Err(Error::new(ErrorKind::Invalid, "no more")),
            Err(_) => Ok(()),
        };
        let waits = |stop: &Stop| {
            stop.leave(move || {
                begun.send(()).unwrap();
                // Nobody says it before the call has returned.
                ended.recv().unwrap();
                Ok(())
            })
        };
        assert_eq!(Stop::watch(&goes_on, waits).unwrap_err().kind(), ErrorKind::Invalid);
        end.send(()).unwrap();
        assert_eq!(Stop::default().leave(|| Ok(7)).unwrap(), 7);
        let panics =
            panic::catch_unwind(|| Stop::default().leave(|| -> Result<()> { panic!("it") }));
        assert_eq!(*panics.unwrap_err().downcast::<&str>().unwrap(), "it");
    }

    #[test]
    fn what_goes_on_says_what_has_become_of_it() {
        assert_eq!(Stop::watch(&|| Ok(()), |_| Ok(7)).unwrap(), 7);
        let fails = |_: &Stop| Err::<(), _>(Error::new(ErrorKind::Io, "lost"));
        assert_eq!(Stop::watch(&|| Ok(()), fails).unwrap_err().kind(), ErrorKind::Io);
        let panics =
            panic::catch_unwind(|| Stop::watch(&|| Ok(()), |_| -> Result<()> { panic!("it") }));
        assert_eq!(*panics.unwrap_err().downcast::<&str>().unwrap(), "it");
    }
}
