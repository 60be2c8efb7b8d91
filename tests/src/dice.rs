//! Numbers that look like any others, and are the same in every run.

use std::thread;
use std::time::Duration;

/// Marsaglia's generator.
pub struct Dice(u64);

impl Dice {
    /// The numbers of a seed.
    pub fn new(seed: u64) -> Self {
        // Zero would stay zero.
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    /// A number below `end`.
    pub fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        // The low bits of seeds that are alike are alike.
        (self.0 >> 16) % end
    }

    /// True once in so many times.
    pub fn hits(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }

    /// Sleeps for less than so many milliseconds.
    pub fn pause(&mut self, milliseconds: u64) {
        thread::sleep(Duration::from_millis(self.below(milliseconds)));
    }
}
