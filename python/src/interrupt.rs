//! Ctrl-C, and cancelled tasks, in long work.

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use pyo3::prelude::*;

use crate::error::Result;

/// How often signals are looked for: to take the GIL can take as long as another thread wants.
pub(crate) const EVERY: Duration = Duration::from_millis(50);

thread_local! {
    /// What cancels the call that this thread is in.
    static CANCEL: RefCell<Option<Arc<AtomicBool>>> = const { RefCell::new(None) };
}

/// Looks for signals now and then, on the thread that made it: Python handles them on its main thread
/// alone. And whether the call is cancelled that it was made in.
pub(crate) struct Interrupt {
    thread: ThreadId,
    due: Mutex<Instant>,
    cancelled: Option<Arc<AtomicBool>>,
}

impl Interrupt {
    pub(crate) fn new() -> Self {
        let cancelled = CANCEL.with_borrow(Clone::clone);
        Self { thread: thread::current().id(), due: Mutex::new(Instant::now() + EVERY), cancelled }
    }

    /// What the handler of a signal raises, such as `KeyboardInterrupt`; `CancelledError`.
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
            let mut due = self.due.lock().expect("nothing panics that holds it");
            if Instant::now() < *due {
                return Ok(());
            }
            *due = Instant::now() + EVERY;
        }
        // An interpreter that is at its end has no more signals.
        Ok(Python::try_attach(|py| py.check_signals()).unwrap_or(Ok(()))?)
    }
}

/// Ends a call on another thread: see `aio.py`.
#[pyclass(frozen, name = "_Cancel", module = "tssd")]
pub(crate) struct Cancel(Arc<AtomicBool>);

#[pymethods]
impl Cancel {
    #[new]
    fn new() -> Self {
        Self(Arc::default())
    }

    /// The call, whichever it is in, raises `concurrent.futures.CancelledError`.
    fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Calls something that can be cancelled.
    fn run<'py>(&self, call: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let before = CANCEL.replace(Some(self.0.clone()));
        let result = call.call0();
        CANCEL.set(before);
        result
    }
}

/// Raises what a signal, or the end of the task, has to raise: between calls that are short.
#[pyfunction]
pub(crate) fn _interrupted() -> Result<()> {
    Interrupt::new().check()
}
