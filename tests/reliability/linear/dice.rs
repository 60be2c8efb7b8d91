//! Numbers that look like any others, and are the same in every run.

/// Marsaglia's generator.
pub(crate) struct Dice(u64);

impl Dice {
    pub(crate) fn new(seed: u64) -> Self {
        // Zero would stay zero.
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        // The low bits of seeds that are alike are alike.
        (self.0 >> 16) % end
    }

    /// True once in so many times.
    pub(crate) fn hits(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }
}
