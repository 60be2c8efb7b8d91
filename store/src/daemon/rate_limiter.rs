//! A rate limiter.

use std::time::{Duration, Instant};

use crate::io::sync::Lock;

/// Limits a transfer to a number of bytes per second.
pub(crate) struct RateLimiter {
    bytes_per_second: Option<u64>,
    /// Earliest time of the next bytes.
    next: Lock<Instant>,
}

impl RateLimiter {
    /// Creates a limiter. `None` means no limit.
    pub(crate) fn new(bytes_per_second: Option<u64>) -> Self {
        Self { bytes_per_second, next: Lock::new(Instant::now()) }
    }

    /// Blocks the thread until `bytes` bytes may be sent.
    pub(crate) fn wait(&self, bytes: u64) {
        std::thread::sleep(self.reserve(bytes));
    }

    /// Reserves the time for `bytes` bytes. Returns the time until they may be sent.
    pub(crate) fn reserve(&self, bytes: u64) -> Duration {
        let Some(rate) = self.bytes_per_second else { return Duration::ZERO };
        let (now, duration) =
            (Instant::now(), Duration::from_secs_f64(as_f64(bytes) / as_f64(rate)));
        let start = {
            let mut next = self.next.lock();
            let start = (*next).max(now);
            *next = start + duration;
            start
        };
        start - now
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
    fn rate_limiter_delays_bytes_above_rate() {
        let (limiter, started) = (RateLimiter::new(Some(1_000_000)), Instant::now());
        (0..5).for_each(|_| limiter.wait(50_000));
        assert!(started.elapsed() >= Duration::from_millis(200));
    }
}
