//! Instruction sets: a portable one, and AVX2 with BMI2 where the processor has them.
//!
//! Both give the same results.

use super::element::{load, magnitude_mask};

/// Elements that one mask describes.
pub(super) const GROUP: usize = 64;

/// Instruction set that kernels run with.
#[derive(Clone, Copy, Debug)]
pub(super) enum Isa {
    Portable(Portable),
    #[cfg(target_arch = "x86_64")]
    Avx2(x86_64::Avx2),
}

impl Isa {
    /// Returns the fastest instruction set that the processor supports.
    pub(super) fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        if let Some(avx2) = x86_64::Avx2::detect() {
            return Self::Avx2(avx2);
        }
        Self::portable()
    }

    pub(super) fn portable() -> Self {
        Self::Portable(Portable)
    }

    /// Asks the processor to load bytes, without waiting for them.
    #[inline]
    pub(super) fn prefetch(self, bytes: &[u8]) {
        #[cfg(target_arch = "x86_64")]
        if let Self::Avx2(_) = self {
            bytes.chunks(64).for_each(|line| x86_64::prefetch(&line[0]));
        }
    }

    /// Runs a kernel, compiled for the instruction set.
    #[inline]
    pub(super) fn run<K: Kernel>(self, kernel: K) -> K::Output {
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
pub(super) trait Kernel {
    type Output;
    fn run<I: Instructions>(self, isa: I) -> Self::Output;
}

/// Operations that the instruction sets implement differently.
pub(super) trait Instructions: Copy {
    /// Moves the lowest bits of `bits` to the set bits of `mask`.
    fn deposit(self, bits: u64, mask: u64) -> u64;

    /// Returns a mask of the elements that differ.
    fn changed<const W: usize>(self, old: &[[u8; W]; GROUP], new: &[[u8; W]; GROUP]) -> u64;

    /// Returns a mask of the elements whose pattern without sign is at least `threshold`.
    ///
    /// `threshold` is not 0 and has no sign bit.
    fn at_least<const W: usize>(self, elements: &[[u8; W]; GROUP], threshold: u32) -> u64;
}

/// Instructions of all processors.
#[derive(Clone, Copy, Debug)]
pub(super) struct Portable;

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
}

/// Returns a mask of the elements that differ, of at most 64.
#[inline(always)]
pub(super) fn changed_elements<const W: usize>(old: &[[u8; W]], new: &[[u8; W]]) -> u64 {
    pack_bits(old.iter().zip(new).map(|(old, new)| load(old) != load(new)))
}

/// Returns a mask of the elements whose pattern without sign is at least `threshold`, of at most 64.
#[inline(always)]
pub(super) fn elements_at_least<const W: usize>(elements: &[[u8; W]], threshold: u32) -> u64 {
    pack_bits(elements.iter().map(|element| load(element) & magnitude_mask::<W>() >= threshold))
}

#[inline(always)]
fn pack_bits(bits: impl Iterator<Item = bool>) -> u64 {
    bits.enumerate().fold(0, |mask, (at, bit)| mask | u64::from(bit) << at)
}

#[cfg(target_arch = "x86_64")]
#[expect(unsafe_code, reason = "these instructions exist only as intrinsics")]
mod x86_64 {
    use std::arch::x86_64::{
        __m256i, _MM_HINT_T0, _mm_prefetch, _mm256_and_si256, _mm256_cmpeq_epi8,
        _mm256_cmpeq_epi16, _mm256_cmpeq_epi32, _mm256_cmpgt_epi8, _mm256_cmpgt_epi16,
        _mm256_cmpgt_epi32, _mm256_loadu_si256, _mm256_movemask_epi8, _mm256_packs_epi16,
        _mm256_packs_epi32, _mm256_permute4x64_epi64, _mm256_permutevar8x32_epi32,
        _mm256_set1_epi8, _mm256_set1_epi16, _mm256_set1_epi32, _mm256_setr_epi32, _pdep_u64,
    };

    use super::{GROUP, Instructions, Kernel};
    use crate::delta::element::{magnitude_mask, store};

    #[inline]
    pub(super) fn prefetch(byte: &u8) {
        // SAFETY: `_mm_prefetch` is a hint: it changes no memory that the program can observe, and accepts any address.
        // It needs SSE, which every x86_64 processor has.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(byte).cast()) }
    }

    /// Proof that the processor has AVX2, BMI1, BMI2, LZCNT and POPCNT.
    #[derive(Clone, Copy, Debug)]
    pub(in crate::delta) struct Avx2(());

    impl Avx2 {
        /// Returns the proof if the processor has the instructions.
        pub(super) fn detect() -> Option<Self> {
            let has_all = is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("bmi1")
                && is_x86_feature_detected!("bmi2")
                && is_x86_feature_detected!("lzcnt")
                && is_x86_feature_detected!("popcnt");
            has_all.then_some(Self(()))
        }

        #[inline]
        pub(super) fn run<K: Kernel>(self, kernel: K) -> K::Output {
            // SAFETY: `run_kernel` requires the five features. Only `detect` creates an `Avx2`, after it has detected
            // all of them.
            unsafe { run_kernel(self, kernel) }
        }
    }

    #[target_feature(enable = "avx2,bmi1,bmi2,lzcnt,popcnt")]
    fn run_kernel<K: Kernel>(isa: Avx2, kernel: K) -> K::Output {
        kernel.run(isa)
    }

    impl Instructions for Avx2 {
        #[inline(always)]
        fn deposit(self, bits: u64, mask: u64) -> u64 {
            // SAFETY: it requires BMI2, and `self` proves that the processor has it.
            unsafe { _pdep_u64(bits, mask) }
        }

        #[inline(always)]
        fn changed<const W: usize>(self, old: &[[u8; W]; GROUP], new: &[[u8; W]; GROUP]) -> u64 {
            // SAFETY: it requires AVX2, and `self` proves that the processor has it.
            !unsafe { equal(old, new) }
        }

        #[inline(always)]
        fn at_least<const W: usize>(self, elements: &[[u8; W]; GROUP], threshold: u32) -> u64 {
            // SAFETY: it requires AVX2, and `self` proves that the processor has it.
            unsafe { at_least(elements, threshold) }
        }
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    fn equal<const W: usize>(old: &[[u8; W]; GROUP], new: &[[u8; W]; GROUP]) -> u64 {
        lane_mask::<W>(|at| {
            let (old, new) = (vector(old, at), vector(new, at));
            match W {
                1 => _mm256_cmpeq_epi8(old, new),
                2 => _mm256_cmpeq_epi16(old, new),
                _ => _mm256_cmpeq_epi32(old, new),
            }
        })
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    fn at_least<const W: usize>(elements: &[[u8; W]; GROUP], threshold: u32) -> u64 {
        // Patterns without sign are non-negative as signed integers too, so that signed comparisons order them.
        let (below, magnitude) = (splat::<W>(threshold - 1), splat::<W>(magnitude_mask::<W>()));
        lane_mask::<W>(|at| {
            let elements = _mm256_and_si256(vector(elements, at), magnitude);
            match W {
                1 => _mm256_cmpgt_epi8(elements, below),
                2 => _mm256_cmpgt_epi16(elements, below),
                _ => _mm256_cmpgt_epi32(elements, below),
            }
        })
    }

    /// Returns one bit for each of 64 lanes of `W` bytes. `lanes` returns vector `at` of `2 * W`, with lanes 0 or -1.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn lane_mask<const W: usize>(lanes: impl Fn(usize) -> __m256i) -> u64 {
        let half = |at: usize| {
            // Packing works within the halves of a vector. The permutations restore the order of the elements.
            let bytes = match W {
                1 => lanes(at),
                2 => {
                    let packed = _mm256_packs_epi16(lanes(2 * at), lanes(2 * at + 1));
                    _mm256_permute4x64_epi64::<0b11_01_10_00>(packed)
                }
                _ => {
                    let low = _mm256_packs_epi32(lanes(4 * at), lanes(4 * at + 1));
                    let high = _mm256_packs_epi32(lanes(4 * at + 2), lanes(4 * at + 3));
                    let order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
                    _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order)
                }
            };
            u64::from(_mm256_movemask_epi8(bytes).cast_unsigned())
        };
        half(0) | half(1) << 32
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    fn splat<const W: usize>(pattern: u32) -> __m256i {
        match W {
            1 => _mm256_set1_epi8(i8::from_le_bytes(store(pattern))),
            2 => _mm256_set1_epi16(i16::from_le_bytes(store(pattern))),
            _ => _mm256_set1_epi32(pattern.cast_signed()),
        }
    }

    /// Loads the 32 bytes at byte `32 * at`.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn vector<const W: usize>(elements: &[[u8; W]; GROUP], at: usize) -> __m256i {
        let bytes = &elements.as_flattened()[32 * at..32 * at + 32];
        // SAFETY: `_mm256_loadu_si256` reads 32 bytes at any alignment, and `bytes` has 32 bytes.
        unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) }
    }
}
