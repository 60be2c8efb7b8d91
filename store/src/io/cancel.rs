//! Cancellation of blocking work: one thread works, another checks whether the result is still wanted.

use std::panic;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use crate::error::{Error, ErrorKind, Result};

/// A check that returns an error once the work is no longer wanted.
pub(crate) type CancelCheck<'a> = &'a (dyn Fn() -> Result<()> + Sync);

/// A flag that tells blocking work to end early.
#[derive(Debug, Default)]
pub(crate) struct CancelToken(AtomicBool);

impl CancelToken {
    /// Interval at which blocking work checks the token.
    pub(crate) const POLL_INTERVAL: Duration = Duration::from_millis(50);

    /// Returns an error if the work was cancelled.
    pub(crate) fn check(&self) -> Result<()> {
        let text = "nobody waits for it any more";
        if self.0.load(Ordering::Relaxed) { Err(Error::new(ErrorKind::Busy, text)) } else { Ok(()) }
    }

    /// Runs work that cannot be cancelled, such as a connect, on its own thread.
    ///
    /// If the token is cancelled, the call returns an error at once and the thread runs on by itself.
    pub(crate) fn run_detached<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> Result<T> {
        self.check()?;
        let (done, ended) = mpsc::sync_channel(1);
        let worker = thread::Builder::new().spawn(move || drop(done.send(work())));
        let worker = worker.map_err(|error| Error::io("a thread", error))?;
        loop {
            match ended.recv_timeout(Self::POLL_INTERVAL) {
                Ok(done) => {
                    // The thread has ended: a forked child cannot lose it.
                    drop(worker.join());
                    return done;
                }
                Err(RecvTimeoutError::Timeout) => self.check()?,
                Err(RecvTimeoutError::Disconnected) => {
                    let panic = worker.join().expect_err("what ends without a word has panicked");
                    panic::resume_unwind(panic)
                }
            }
        }
    }

    /// Runs blocking work on its own thread, and `check` on this one at every [`POLL_INTERVAL`](Self::POLL_INTERVAL).
    ///
    /// After the first error of the check, the work is cancelled. The call waits for the work to end and returns that
    /// error.
    pub(crate) fn run_cancellable<T: Send>(
        check: CancelCheck<'_>,
        work: impl FnOnce(&Self) -> Result<T> + Send,
    ) -> Result<T> {
        let token = &Self::default();
        // The sender is dropped when the work ends, also by a panic.
        let (running, ended) = mpsc::channel::<()>();
        thread::scope(|scope| {
            let worker = scope.spawn(move || {
                let _running = running;
                work(token)
            });
            let mut status = Ok(());
            loop {
                if status.is_ok() {
                    status = check();
                    token.0.store(status.is_err(), Ordering::Relaxed);
                }
                if ended.recv_timeout(Self::POLL_INTERVAL) != Err(RecvTimeoutError::Timeout) {
                    break;
                }
            }
            let done = worker.join().unwrap_or_else(|panic| panic::resume_unwind(panic));
            status.and(done)
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::atomic::AtomicUsize;

    use super::*;

    #[test]
    fn run_cancellable_returns_the_error_of_the_check() {
        let checks = AtomicUsize::new(0);
        let check = || match checks.fetch_add(1, Ordering::Relaxed) {
            0 | 1 => Ok(()),
            _ => Err(Error::new(ErrorKind::Invalid, "no more")),
        };
        let wait_until_cancelled = |token: &CancelToken| -> Result<()> {
            loop {
                token.check()?;
                thread::sleep(Duration::from_millis(1));
            }
        };
        assert_eq!(
            CancelToken::run_cancellable(&check, wait_until_cancelled).unwrap_err().kind(),
            ErrorKind::Invalid
        );
        assert_eq!(checks.load(Ordering::Relaxed), 3, "nobody looks again");
    }

    #[test]
    fn cancellation_leaves_detached_work_running() {
        let (started, starts) = mpsc::channel();
        let starts = Mutex::new(starts);
        let (finish, finished) = mpsc::channel::<()>();
        let check = || match starts.lock().unwrap().try_recv() {
            Ok(()) => Err(Error::new(ErrorKind::Invalid, "no more")),
            Err(_) => Ok(()),
        };
        let run_detached = |token: &CancelToken| {
            token.run_detached(move || {
                started.send(()).unwrap();
                // The test sends this only after the call has returned.
                finished.recv().unwrap();
                Ok(())
            })
        };
        assert_eq!(
            CancelToken::run_cancellable(&check, run_detached).unwrap_err().kind(),
            ErrorKind::Invalid
        );
        finish.send(()).unwrap();
        assert_eq!(CancelToken::default().run_detached(|| Ok(7)).unwrap(), 7);
        let outcome = panic::catch_unwind(|| {
            CancelToken::default().run_detached(|| -> Result<()> { panic!("it") })
        });
        assert_eq!(*outcome.unwrap_err().downcast::<&str>().unwrap(), "it");
    }

    #[test]
    fn run_cancellable_returns_the_result_of_the_work() {
        assert_eq!(CancelToken::run_cancellable(&|| Ok(()), |_| Ok(7)).unwrap(), 7);
        let fail = |_: &CancelToken| Err::<(), _>(Error::new(ErrorKind::Io, "lost"));
        assert_eq!(
            CancelToken::run_cancellable(&|| Ok(()), fail).unwrap_err().kind(),
            ErrorKind::Io
        );
        let outcome = panic::catch_unwind(|| {
            CancelToken::run_cancellable(&|| Ok(()), |_| -> Result<()> { panic!("it") })
        });
        assert_eq!(*outcome.unwrap_err().downcast::<&str>().unwrap(), "it");
    }
}
