//! Instruction sets: a portable one, and AVX2 with BMI2 where the processor has them.
//!
//! Both give the same results.
// Kernels must be inlined into the function that enables their instructions.
#![allow(clippy::inline_always)]

#[cfg(target_arch = "x86_64")]
#[expect(unsafe_code, reason = "these instructions exist only as intrinsics")]
mod x86_64;

use crate::element::{load, magnitude_mask};

/// Elements that one mask describes.
pub(crate) const GROUP: usize = 64;

/// Instruction set that kernels run with.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Isa {
    Portable(Portable),
    #[cfg(target_arch = "x86_64")]
    Avx2(x86_64::Avx2),
}

impl Isa {
    /// Returns the fastest instruction set that the processor supports.
    pub(crate) fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        if let Some(avx2) = x86_64::Avx2::detect() {
            return Self::Avx2(avx2);
        }
        Self::portable()
    }

    pub(crate) fn portable() -> Self {
        Self::Portable(Portable)
    }

    /// Asks the processor to load bytes, without waiting for them.
    #[inline]
    pub(crate) fn prefetch(self, bytes: &[u8]) {
        match self {
            Self::Portable(isa) => isa.prefetch(bytes),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(isa) => isa.prefetch(bytes),
        }
    }

    /// Runs a kernel, compiled for the instruction set.
    #[inline]
    pub(crate) fn run<K: Kernel>(self, kernel: K) -> K::Output {
        match self {
            Self::Portable(isa) => kernel.run(isa),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(isa) => isa.run(kernel),
        }
    }
}

/// Loop that is compiled for each instruction set.
///
/// `run` and the functions that it calls must be `#[inline(always)]`: only then the compiler may use the instructions.
pub(crate) trait Kernel {
    type Output;
    fn run<I: Instructions>(self, isa: I) -> Self::Output;
}

/// Operations that the instruction sets implement differently.
pub(crate) trait Instructions: Copy {
    /// Moves the lowest bits of `bits` to the set bits of `mask`.
    fn deposit(self, bits: u64, mask: u64) -> u64;

    /// Returns a mask of the elements that differ.
    fn changed<const W: usize>(self, old: &[[u8; W]; GROUP], new: &[[u8; W]; GROUP]) -> u64;

    /// Returns a mask of the elements whose pattern without sign is at least `threshold`.
    ///
    /// `threshold` is not 0 and has no sign bit.
    fn at_least<const W: usize>(self, elements: &[[u8; W]; GROUP], threshold: u32) -> u64;

    /// Writes the bytes that a group of codes of `BITS` bits stands for: a symbol for each code, but for each escape,
    /// which is the highest code, the next byte of `escaped`. Returns the number of escapes.
    ///
    /// `target` has a byte for each code. `escaped` has [`PADDING`] bytes more than there are escapes.
    fn decode_codes<const BITS: i32>(
        self,
        codes: &[u8; CODE_BYTES],
        symbols: &[u8; 16],
        escaped: &[u8],
        target: &mut [u8],
    ) -> usize;

    /// Writes the 2-bit codes of bytes, and to `escaped` the bytes that are no symbols. Returns the number of those.
    ///
    /// The symbols are distinct. `escaped` has [`PADDING`] bytes more than there are bytes. Those after the escaped
    /// ones are unspecified.
    fn encode_codes(
        self,
        bytes: &[u8; 4 * CODE_BYTES],
        symbols: [u8; 3],
        codes: &mut [u8; CODE_BYTES],
        escaped: &mut [u8],
    ) -> usize;

    /// Asks the processor to load bytes, without waiting for them.
    fn prefetch(self, bytes: &[u8]);
}

/// Bytes of a group of codes. Spec: section 6, "Tiers".
pub(crate) const CODE_BYTES: usize = 32;

/// Bytes after the escaped bytes that vector instructions may read or write.
pub(crate) const PADDING: usize = 16;

/// Instructions of all processors.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Portable;

impl Instructions for Portable {
    #[inline(always)]
    fn deposit(self, mut bits: u64, mut mask: u64) -> u64 {
        let mut result = 0;
        while mask != 0 && bits != 0 {
            let lowest = mask & mask.wrapping_neg();
            result |= lowest & (bits & 1).wrapping_neg();
            bits >>= 1;
            mask ^= lowest;
        }
        result
    }

    #[inline(always)]
    fn changed<const W: usize>(self, old: &[[u8; W]; GROUP], new: &[[u8; W]; GROUP]) -> u64 {
        if old == new { 0 } else { changed_elements(old, new) }
    }

    #[inline(always)]
    fn at_least<const W: usize>(self, elements: &[[u8; W]; GROUP], threshold: u32) -> u64 {
        elements_at_least(elements, threshold)
    }

    #[inline(always)]
    fn decode_codes<const BITS: i32>(
        self,
        codes: &[u8; CODE_BYTES],
        symbols: &[u8; 16],
        escaped: &[u8],
        target: &mut [u8],
    ) -> usize {
        let escape = (1 << BITS) - 1;
        let mut escapes = 0;
        for (octet, target) in (0..).zip(target.as_chunks_mut::<CODE_BYTES>().0) {
            for (byte, codes) in target.iter_mut().zip(codes) {
                let code = codes >> (BITS * octet) & escape;
                let is_escape = usize::from(code == escape);
                // No branch, because the processor could not predict it.
                *byte = [symbols[usize::from(code)], escaped[escapes]][is_escape];
                escapes += is_escape;
            }
        }
        escapes
    }

    #[inline(always)]
    fn encode_codes(
        self,
        bytes: &[u8; 4 * CODE_BYTES],
        symbols: [u8; 3],
        codes: &mut [u8; CODE_BYTES],
        escaped: &mut [u8],
    ) -> usize {
        *codes = [0; CODE_BYTES];
        let mut escapes = 0;
        for (octet, bytes) in bytes.as_chunks::<CODE_BYTES>().0.iter().enumerate() {
            for (byte, codes) in bytes.iter().zip(codes.iter_mut()) {
                let [first, second, third] = symbols.map(|symbol| u8::from(*byte == symbol));
                let code = 3 - 3 * first - 2 * second - third;
                *codes |= code << (2 * octet);
                // The byte is overwritten unless it is an escaped one.
                escaped[escapes] = *byte;
                escapes += usize::from(code == 3);
            }
        }
        escapes
    }

    #[inline(always)]
    fn prefetch(self, _: &[u8]) {}
}

/// Returns a mask of the elements that differ, of at most 64.
#[inline(always)]
pub(crate) fn changed_elements<const W: usize>(old: &[[u8; W]], new: &[[u8; W]]) -> u64 {
    pack_bits(old.iter().zip(new).map(|(old, new)| load(old) != load(new)))
}

/// Returns a mask of the elements whose pattern without sign is at least `threshold`, of at most 64.
#[inline(always)]
pub(crate) fn elements_at_least<const W: usize>(elements: &[[u8; W]], threshold: u32) -> u64 {
    pack_bits(elements.iter().map(|element| load(element) & magnitude_mask::<W>() >= threshold))
}

#[inline(always)]
fn pack_bits(bits: impl Iterator<Item = bool>) -> u64 {
    bits.enumerate().fold(0, |mask, (at, bit)| mask | u64::from(bit) << at)
}
