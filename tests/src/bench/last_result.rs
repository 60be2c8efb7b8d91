use std::cell::RefCell;

/// Result of the last turn of a runner. It is compared with its source after the race.
#[derive(Default)]
pub struct LastResult<T>(RefCell<Option<T>>);

impl<T> LastResult<T> {
    /// Creates an empty result.
    pub const fn new() -> Self {
        Self(RefCell::new(None))
    }

    /// Drops the previous result, then stores a new one. So each turn includes the time of one drop.
    pub fn replace_with(&self, make: impl FnOnce() -> T) {
        self.clear();
        self.0.replace(Some(make()));
    }

    /// Drops the result outside the time of a turn.
    pub fn clear(&self) {
        drop(self.0.take());
    }

    /// Returns the result of the last turn.
    ///
    /// # Panics
    ///
    /// If there was no turn.
    pub fn take(&self) -> T {
        self.0.take().unwrap()
    }
}
