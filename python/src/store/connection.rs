//! The connection of this process to a store, and blocking calls on it.

use std::mem::ManuallyDrop;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use tokio::runtime::{Builder, Runtime};
use tssd_store::{ConnectOptions, GetReport, LeafPart, Store, Target, VersionReader};

use crate::error::{BindingError, Failure, Result};
use crate::interrupt::{InterruptCheck, SIGNAL_CHECK_INTERVAL};

/// A connection to a store, with the tokio runtime that drives it.
///
/// Only the process that opened it can use it: a fork does not copy the threads of the runtime.
pub(crate) struct Connection {
    /// The ID of the process that opened the connection.
    pub(super) process_id: u32,
    pub(crate) store: ManuallyDrop<Store>,
    pub(crate) runtime: ManuallyDrop<Runtime>,
}

impl Drop for Connection {
    #[expect(unsafe_code, reason = "what was forked is left alone")]
    fn drop(&mut self) {
        if self.process_id != std::process::id() {
            // The threads of the runtime are not in this process: waiting for them would never end.
            return;
        }
        // SAFETY: only `drop` takes the field, it runs once, and it does not use the field afterwards.
        let store = unsafe { ManuallyDrop::take(&mut self.store) };
        // SAFETY: as above.
        let runtime = unsafe { ManuallyDrop::take(&mut self.runtime) };
        {
            let _guard = runtime.enter();
            drop(store);
        }
        runtime.shutdown_background();
    }
}

impl Connection {
    /// Opens a connection to the store at `url`, within `options.timeout`.
    pub(super) fn new(url: &str, options: &ConnectOptions) -> Result<Arc<Self>> {
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.map_err(Failure::from)?;
        let connect = async {
            let create = Store::create_with(url, options);
            let timed_out = |_| {
                let text = format!("`{url}` has not answered within {:?}", options.timeout);
                Failure::from(BindingError::new("unreachable", text))
            };
            Ok(tokio::time::timeout(options.timeout, create).await.map_err(timed_out)??)
        };
        let store: Result<Store> =
            Deadline::new(None).and_then(|deadline| block_on(&runtime, &deadline, pin!(connect)));
        let store = match store {
            Ok(store) => store,
            Err(error) => {
                // Dropping the runtime would wait for its blocking tasks, which may outlast the timeout.
                runtime.shutdown_background();
                return Err(error);
            }
        };
        let (store, runtime) = (ManuallyDrop::new(store), ManuallyDrop::new(runtime));
        Ok(Arc::new(Self { process_id: std::process::id(), store, runtime }))
    }

    /// Returns whether this process can use the connection.
    ///
    /// False in a process that was forked since, and after the connection to the daemon is lost.
    pub(super) fn is_usable(&self) -> bool {
        self.process_id == std::process::id() && self.store.is_connected()
    }

    /// Runs `work` to completion. Ctrl-C, cancellation and `timeout`, in seconds, end it early.
    ///
    /// # Errors
    ///
    /// Those of `work`; `invalid` in a process that was forked since; `timeout` after the timeout; and the exception
    /// that a signal handler raises.
    pub(crate) fn block_on<T>(
        &self,
        py: Python<'_>,
        timeout: Option<f64>,
        work: impl Future<Output = tssd_store::Result<T>> + Send,
    ) -> Result<T>
    where
        T: Send,
    {
        self.block_on_until(py, &Deadline::new(timeout)?, work)
    }

    /// Runs `work` to completion, as [`Connection::block_on`], but with a deadline that has begun.
    fn block_on_until<T>(
        &self,
        py: Python<'_>,
        deadline: &Deadline,
        work: impl Future<Output = tssd_store::Result<T>> + Send,
    ) -> Result<T>
    where
        T: Send,
    {
        if self.process_id != std::process::id() {
            let text = "it was opened before this process was forked";
            return Err(BindingError::new("invalid", text).advice("open it again").into());
        }
        py.detach(|| block_on(&self.runtime, deadline, pin!(async { Ok(work.await?) })))
    }
}

/// A read of an open version, which ends at a deadline.
pub(super) struct VersionRead<'a> {
    pub(super) connection: &'a Connection,
    pub(super) reader: &'a VersionReader,
    pub(super) deadline: &'a Deadline,
}

impl VersionRead<'_> {
    /// Runs `work` to completion, unless the deadline, Ctrl-C or cancellation end it early.
    ///
    /// # Errors
    ///
    /// As [`Connection::block_on`].
    pub(super) fn block_on<T>(
        &self,
        py: Python<'_>,
        work: impl Future<Output = tssd_store::Result<T>> + Send,
    ) -> Result<T>
    where
        T: Send,
    {
        self.connection.block_on_until(py, self.deadline, work)
    }

    /// Verifies the parts that are in the memory of this host. Returns for each part whether it is.
    pub(super) fn verify_in_memory(&self, py: Python<'_>, parts: &[LeafPart]) -> Result<Vec<bool>> {
        py.detach(|| {
            let _guard = self.connection.runtime.enter();
            Ok(self.reader.verify_in_memory(parts)?)
        })
    }

    /// Fills `targets`.
    pub(super) fn fill(&self, targets: &mut [Target<'_>]) -> Result<GetReport> {
        let _guard = self.connection.runtime.enter();
        self.reader.read_into_cancellable(targets, || self.deadline.check())
    }
}

/// Polls `work` to completion on this thread, and checks for signals every [`SIGNAL_CHECK_INTERVAL`].
///
/// A timer for these checks would have to wake up the thread of the runtime each time.
fn block_on<T>(
    runtime: &Runtime,
    deadline: &Deadline,
    mut work: Pin<&mut impl Future<Output = Result<T>>>,
) -> Result<T> {
    let _guard = runtime.enter();
    let waker = Waker::from(Arc::new(ThreadWaker(thread::current())));
    let mut last_check = Instant::now();
    loop {
        if let Poll::Ready(result) = work.as_mut().poll(&mut Context::from_waker(&waker)) {
            return result;
        }
        // The first check comes after `SIGNAL_CHECK_INTERVAL`: short work, such as most puts, completes rather than being cancelled.
        if last_check.elapsed() >= SIGNAL_CHECK_INTERVAL {
            deadline.interrupt.check()?;
            last_check = Instant::now();
        }
        thread::park_timeout(deadline.remaining()?);
    }
}

/// The end of a wait: an interrupt, or a timeout.
pub(super) struct Deadline {
    interrupt: InterruptCheck,
    timeout: Option<Duration>,
    started: Instant,
}

impl Deadline {
    /// Starts now, and ends after `timeout` seconds. `None`: there is no timeout.
    pub(super) fn new(timeout: Option<f64>) -> Result<Self> {
        let timeout = timeout.map(parse_seconds).transpose()?;
        Ok(Self { interrupt: InterruptCheck::new(), timeout, started: Instant::now() })
    }

    /// Returns an error if the call was interrupted, or if the timeout has passed.
    pub(super) fn check(&self) -> Result<()> {
        self.interrupt.check()?;
        self.remaining().map(drop)
    }

    /// Returns how long to sleep before the next check: the remaining time, at most [`SIGNAL_CHECK_INTERVAL`].
    ///
    /// # Errors
    ///
    /// `timeout` if the timeout has passed.
    fn remaining(&self) -> Result<Duration> {
        let Some(timeout) = self.timeout else { return Ok(SIGNAL_CHECK_INTERVAL) };
        let remaining = timeout.checked_sub(self.started.elapsed()).ok_or_else(|| {
            let text = format!("it has not happened within {timeout:?}");
            Failure::from(BindingError::new("timeout", text))
        })?;
        Ok(remaining.min(SIGNAL_CHECK_INTERVAL))
    }
}

/// A waker that unparks a thread.
struct ThreadWaker(Thread);

impl Wake for ThreadWaker {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Converts seconds to a duration. A negative, too large or NaN number is a `ValueError`.
pub(crate) fn parse_seconds(seconds: f64) -> Result<Duration> {
    let duration = Duration::try_from_secs_f64(seconds);
    Ok(duration.map_err(|error| PyValueError::new_err(format!("{seconds} seconds: {error}")))?)
}
