//! Who looks on: it keeps what has happened, and what must not have.

use std::sync::{Mutex, MutexGuard};

/// What has been seen so far. It is locked by the standard library: looking on is no event.
#[derive(Default)]
pub(crate) struct Observer<T> {
    seen: Mutex<T>,
    broken: Mutex<Option<String>>,
}

impl<T> Observer<T> {
    /// What has been seen. Nothing may be waited for while this is kept.
    pub(crate) fn seen(&self) -> MutexGuard<'_, T> {
        self.seen.lock().unwrap()
    }

    /// Something must hold. The others go on: whoever panics amid them would hide what it has broken.
    pub(crate) fn must(&self, holds: bool, otherwise: impl FnOnce() -> String) {
        if !holds {
            self.broken.lock().unwrap().get_or_insert_with(otherwise);
        }
    }

    /// All have ended.
    ///
    /// # Panics
    ///
    /// If something did not hold.
    pub(crate) fn end(&self) {
        let broken = self.broken.lock().unwrap().take();
        assert!(broken.is_none(), "{}", broken.unwrap_or_default());
    }
}
