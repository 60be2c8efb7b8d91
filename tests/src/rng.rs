//! Reproducible random numbers.

use std::thread;
use std::time::Duration;

/// Marsaglia's xorshift generator.
pub struct SeededRng(u64);

impl SeededRng {
    /// Creates a generator with this seed.
    pub fn new(seed: u64) -> Self {
        // A state of zero would stay zero.
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    /// Returns a number below `end`.
    pub fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        // Similar seeds have similar low bits.
        (self.0 >> 16) % end
    }

    /// Returns true once in `times` times, on average.
    pub fn one_in(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }

    /// Sleeps for a random time below this number of milliseconds.
    pub fn sleep_below(&mut self, milliseconds: u64) {
        thread::sleep(Duration::from_millis(self.below(milliseconds)));
    }
}
