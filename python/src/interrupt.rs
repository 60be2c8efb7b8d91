//! Interruption of long calls by signals, such as Ctrl-C, and by cancelled tasks.

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use pyo3::prelude::*;

use crate::error::Result;

/// Minimum interval between signal checks.
///
/// A check acquires the GIL, which takes as long as another thread holds it.
pub(crate) const SIGNAL_CHECK_INTERVAL: Duration = Duration::from_millis(50);

thread_local! {
    /// Cancellation flag of the call that this thread runs.
    static CANCEL_FLAG: RefCell<Option<Arc<AtomicBool>>> = const { RefCell::new(None) };
}

/// Check for pending signals and for cancellation of the call that created it.
///
/// It acts only on the thread that created it, because Python handles signals only on its main thread. It looks for
/// signals at most once every [`SIGNAL_CHECK_INTERVAL`].
pub(crate) struct InterruptCheck {
    thread: ThreadId,
    next_check: Mutex<Instant>,
    cancelled: Option<Arc<AtomicBool>>,
}

impl InterruptCheck {
    pub(crate) fn new() -> Self {
        let cancelled = CANCEL_FLAG.with_borrow(Clone::clone);
        Self {
            thread: thread::current().id(),
            next_check: Mutex::new(Instant::now() + SIGNAL_CHECK_INTERVAL),
            cancelled,
        }
    }

    /// Returns an error if the call must end.
    ///
    /// # Errors
    ///
    /// `CancelledError` if the call is cancelled; the exception of a signal handler, such as `KeyboardInterrupt`.
    #[expect(clippy::redundant_closure_for_method_calls, reason = "the method has one lifetime")]
    pub(crate) fn check(&self) -> Result<()> {
        if thread::current().id() != self.thread {
            return Ok(());
        }
        if self.cancelled.as_ref().is_some_and(|cancelled| cancelled.load(Ordering::Relaxed)) {
            let error = |py: Python<'_>| {
                let class = py.import("concurrent.futures")?.getattr("CancelledError")?;
                Ok::<_, PyErr>(PyErr::from_value(class.call0()?))
            };
            return Err(Python::attach(error)?.into());
        }
        {
            let mut next_check = self.next_check.lock().expect("nothing panics that holds it");
            if Instant::now() < *next_check {
                return Ok(());
            }
            *next_check = Instant::now() + SIGNAL_CHECK_INTERVAL;
        }
        // An interpreter that is shutting down delivers no signals.
        Ok(Python::try_attach(|py| py.check_signals()).unwrap_or(Ok(()))?)
    }
}

/// Cancels a call on another thread: see `aio.py`.
#[pyclass(frozen, name = "_Cancel", module = "tssd")]
pub(crate) struct CancelToken(Arc<AtomicBool>);

#[pymethods]
impl CancelToken {
    #[new]
    fn new() -> Self {
        Self(Arc::default())
    }

    /// Makes the call that `run` executes raise `concurrent.futures.CancelledError`.
    fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Runs a call that `cancel` can end.
    fn run<'py>(&self, call: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let previous = CANCEL_FLAG.replace(Some(self.0.clone()));
        let result = call.call0();
        CANCEL_FLAG.set(previous);
        result
    }
}

/// Raises `concurrent.futures.CancelledError` if the current call is cancelled.
///
/// For use between short calls.
#[pyfunction]
pub(crate) fn _check_cancelled() -> Result<()> {
    InterruptCheck::new().check()
}
