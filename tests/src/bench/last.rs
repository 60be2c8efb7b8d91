use std::cell::RefCell;

/// What the last turn of a runner has made: it is compared with its source when the race is over.
#[derive(Default)]
pub struct Last<T>(RefCell<Option<T>>);

impl<T> Last<T> {
    /// Nothing so far.
    pub const fn new() -> Self {
        Self(RefCell::new(None))
    }

    /// Drops what the turn before has made, and makes it anew: a turn pays for one drop, as if it dropped its own.
    pub fn renew(&self, make: impl FnOnce() -> T) {
        self.clear();
        self.0.replace(Some(make()));
    }

    /// Drops it, where that is not to be in the time of a turn.
    pub fn clear(&self) {
        drop(self.0.take());
    }

    /// What the last turn has made.
    ///
    /// # Panics
    ///
    /// If there was no turn.
    pub fn take(&self) -> T {
        self.0.take().unwrap()
    }
}
