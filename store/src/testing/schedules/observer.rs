//! An observer of a scenario: records results, and the first violated invariant.

use std::sync::{Mutex, MutexGuard};

/// The results that the tasks of a scenario have observed, and the first violated invariant.
///
/// Uses locks of the standard library, so that shuttle does not schedule at them.
#[derive(Default)]
pub(crate) struct Observer<T> {
    observed: Mutex<T>,
    violation: Mutex<Option<String>>,
}

impl<T> Observer<T> {
    /// Returns the observed results. Do not await while this guard is held.
    pub(crate) fn observed(&self) -> MutexGuard<'_, T> {
        self.observed.lock().unwrap()
    }

    /// Records a violation unless `holds`.
    ///
    /// Does not panic: other tasks would fail as a consequence, and hide the cause.
    pub(crate) fn check(&self, holds: bool, message: impl FnOnce() -> String) {
        if !holds {
            self.violation.lock().unwrap().get_or_insert_with(message);
        }
    }

    /// Reports the first violation after all tasks have ended.
    ///
    /// # Panics
    ///
    /// If an invariant was violated.
    pub(crate) fn assert_no_violation(&self) {
        let violation = self.violation.lock().unwrap().take();
        assert!(violation.is_none(), "{}", violation.unwrap_or_default());
    }
}
