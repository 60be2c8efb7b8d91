//! How fast bytes go.

use std::time::{Duration, Instant};

use crate::io::sync::Lock;

/// A number of bytes in a second that is not passed.
pub(crate) struct Pace {
    bytes_per_second: Option<u64>,
    /// When the next bytes may go.
    next: Lock<Instant>,
}

impl Pace {
    pub(crate) fn new(bytes_per_second: Option<u64>) -> Self {
        Self { bytes_per_second, next: Lock::new(Instant::now()) }
    }

    /// Waits until so many bytes may go.
    pub(crate) fn wait(&self, bytes: u64) {
        let Some(rate) = self.bytes_per_second else { return };
        let (now, takes) = (Instant::now(), Duration::from_secs_f64(as_f64(bytes) / as_f64(rate)));
        let turn = {
            let mut next = self.next.lock();
            let turn = (*next).max(now);
            *next = turn + takes;
            turn
        };
        std::thread::sleep(turn - now);
    }
}

#[expect(clippy::cast_precision_loss, reason = "a time need not be exact")]
fn as_f64(bytes: u64) -> f64 {
    bytes.max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_goes_than_may() {
        let (pace, started) = (Pace::new(Some(1_000_000)), Instant::now());
        (0..5).for_each(|_| pace.wait(50_000));
        assert!(started.elapsed() >= Duration::from_millis(200));
    }
}
