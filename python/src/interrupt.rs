//! Ctrl-C in long work.

use std::sync::Mutex;
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use pyo3::prelude::*;

use crate::error::Result;

/// How often signals are looked for: to take the GIL can take as long as another thread wants.
const EVERY: Duration = Duration::from_millis(50);

/// Looks for signals now and then, on the thread that made it: Python handles them on its main thread
/// alone.
pub(crate) struct Interrupt {
    thread: ThreadId,
    due: Mutex<Instant>,
}

impl Interrupt {
    pub(crate) fn new() -> Self {
        Self { thread: thread::current().id(), due: Mutex::new(Instant::now() + EVERY) }
    }

    /// What the handler of a signal raises, such as `KeyboardInterrupt`.
    #[expect(clippy::redundant_closure_for_method_calls, reason = "the method has one lifetime")]
    pub(crate) fn check(&self) -> Result<()> {
        if thread::current().id() != self.thread {
            return Ok(());
        }
        {
            let mut due = self.due.lock().expect("nothing panics that holds it");
            if Instant::now() < *due {
                return Ok(());
            }
            *due = Instant::now() + EVERY;
        }
        Ok(Python::attach(|py| py.check_signals())?)
    }
}
