//! AVX2 with BMI2, detected at run time.

use std::arch::x86_64::{
    __m128i, __m256i, _MM_HINT_T0, _mm_cvtsi32_si128, _mm_loadu_si128, _mm_prefetch,
    _mm256_add_epi8, _mm256_and_si256, _mm256_blendv_epi8, _mm256_broadcastsi128_si256,
    _mm256_cmpeq_epi8, _mm256_cmpeq_epi16, _mm256_cmpeq_epi32, _mm256_cmpgt_epi8,
    _mm256_cmpgt_epi16, _mm256_cmpgt_epi32, _mm256_loadu_si256, _mm256_movemask_epi8,
    _mm256_or_si256, _mm256_packs_epi16, _mm256_packs_epi32, _mm256_permute4x64_epi64,
    _mm256_permutevar8x32_epi32, _mm256_set_m128i, _mm256_set1_epi8, _mm256_set1_epi16,
    _mm256_set1_epi32, _mm256_setr_epi32, _mm256_setzero_si256, _mm256_shuffle_epi8,
    _mm256_sll_epi16, _mm256_slli_si256, _mm256_srl_epi16, _mm256_storeu_si256, _mm256_sub_epi8,
    _mm256_xor_si256, _pdep_u64, _pext_u64,
};

use super::{CODE_BYTES, GROUP, Instructions, Kernel};
use crate::element::{magnitude_mask, store};

/// Proof that the processor has AVX2, BMI1, BMI2, LZCNT and POPCNT.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx2(());

impl Avx2 {
    /// Returns the proof if the processor has the instructions.
    pub(crate) fn detect() -> Option<Self> {
        let has_all = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("bmi1")
            && is_x86_feature_detected!("bmi2")
            && is_x86_feature_detected!("lzcnt")
            && is_x86_feature_detected!("popcnt");
        has_all.then_some(Self(()))
    }

    #[inline]
    pub(crate) fn run<K: Kernel>(self, kernel: K) -> K::Output {
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

    #[inline(always)]
    fn decode_codes<const BITS: i32>(
        self,
        codes: &[u8; CODE_BYTES],
        symbols: &[u8; 16],
        escaped: &[u8],
        target: &mut [u8],
    ) -> usize {
        // SAFETY: it requires AVX2 and POPCNT, and `self` proves that the processor has them.
        unsafe { decode_codes::<BITS>(codes, symbols, escaped, target) }
    }

    #[inline(always)]
    fn encode_codes(
        self,
        bytes: &[u8; 4 * CODE_BYTES],
        symbols: [u8; 3],
        codes: &mut [u8; CODE_BYTES],
        escaped: &mut [u8],
    ) -> usize {
        // SAFETY: it requires AVX2, BMI2 and POPCNT, and `self` proves that the processor has them.
        unsafe { encode_codes(bytes, symbols, codes, escaped) }
    }

    #[inline(always)]
    fn prefetch(self, bytes: &[u8]) {
        for line in bytes.chunks(64) {
            // SAFETY: `_mm_prefetch` is a hint: it changes no memory that the program can observe, and accepts any
            // address. It needs SSE, which every x86_64 processor has.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().cast()) }
        }
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

#[inline]
#[target_feature(enable = "avx2,popcnt")]
fn decode_codes<const BITS: i32>(
    codes: &[u8; CODE_BYTES],
    symbols: &[u8; 16],
    escaped: &[u8],
    target: &mut [u8],
) -> usize {
    let packed = load_bytes(codes);
    let symbols = _mm256_broadcastsi128_si256(load_half(symbols));
    // As a mask of the lowest `BITS` bits it selects a code, too.
    let escape = _mm256_set1_epi8((1 << BITS) - 1);
    let mut escapes = 0;
    for (octet, target) in (0..).zip(target.as_chunks_mut().0) {
        let shifted = _mm256_srl_epi16(packed, _mm_cvtsi32_si128(octet * BITS));
        let codes = _mm256_and_si256(shifted, escape);
        let is_escape = _mm256_cmpeq_epi8(codes, escape);
        let mask = _mm256_movemask_epi8(is_escape).cast_unsigned();
        // Each half of the vector takes its escaped bytes from 16 bytes of memory. The index of a byte in these is the
        // number of escapes before it in the half.
        let middle = escapes + (mask & 0xFFFF).count_ones() as usize;
        let low = load_half(&escaped[escapes..]);
        let high = load_half(&escaped[middle..]);
        let mut counts = _mm256_sub_epi8(_mm256_setzero_si256(), is_escape);
        counts = _mm256_add_epi8(counts, _mm256_slli_si256::<1>(counts));
        counts = _mm256_add_epi8(counts, _mm256_slli_si256::<2>(counts));
        counts = _mm256_add_epi8(counts, _mm256_slli_si256::<4>(counts));
        counts = _mm256_add_epi8(counts, _mm256_slli_si256::<8>(counts));
        let index = _mm256_add_epi8(counts, _mm256_set1_epi8(-1));
        let escaped = _mm256_shuffle_epi8(_mm256_set_m128i(high, low), index);
        let coded = _mm256_shuffle_epi8(symbols, codes);
        store_bytes(target, _mm256_blendv_epi8(coded, escaped, is_escape));
        escapes += mask.count_ones() as usize;
    }
    escapes
}

#[inline]
#[target_feature(enable = "avx2,bmi2,popcnt")]
fn encode_codes(
    bytes: &[u8; 4 * CODE_BYTES],
    symbols: [u8; 3],
    codes: &mut [u8; CODE_BYTES],
    escaped: &mut [u8],
) -> usize {
    let symbols = symbols.map(|symbol| _mm256_set1_epi8(symbol.cast_signed()));
    let bits = [3, 2, 1].map(|bits| _mm256_set1_epi8(bits));
    let mut packed = _mm256_setzero_si256();
    let mut escapes = 0;
    for (octet, bytes) in (0..).zip(bytes.as_chunks().0) {
        let vector = load_bytes(bytes);
        // 3 minus the code. It has at most one of the three parts, because the symbols are distinct.
        let parts: [_; 3] = std::array::from_fn(|number| {
            _mm256_and_si256(_mm256_cmpeq_epi8(vector, symbols[number]), bits[number])
        });
        let inverted = _mm256_or_si256(_mm256_or_si256(parts[0], parts[1]), parts[2]);
        let codes = _mm256_xor_si256(inverted, bits[0]);
        packed = _mm256_or_si256(packed, _mm256_sll_epi16(codes, _mm_cvtsi32_si128(2 * octet)));
        let mut is_escape = [0; CODE_BYTES];
        store_bytes(&mut is_escape, _mm256_cmpeq_epi8(inverted, _mm256_setzero_si256()));
        for (word, mask) in bytes.as_chunks().0.iter().zip(is_escape.as_chunks().0) {
            let mask = u64::from_le_bytes(*mask);
            let kept = _pext_u64(u64::from_le_bytes(*word), mask);
            escaped[escapes..][..8].copy_from_slice(&kept.to_le_bytes());
            escapes += mask.count_ones() as usize / 8;
        }
    }
    store_bytes(codes, packed);
    escapes
}

/// Loads the 32 bytes at byte `32 * at`.
#[inline]
#[target_feature(enable = "avx2")]
fn vector<const W: usize>(elements: &[[u8; W]; GROUP], at: usize) -> __m256i {
    load_bytes(elements.as_flattened()[32 * at..].first_chunk().expect("`at` is below `2 * W`"))
}

#[inline]
#[target_feature(enable = "avx2")]
fn load_bytes(bytes: &[u8; 32]) -> __m256i {
    // SAFETY: `_mm256_loadu_si256` reads 32 bytes at any alignment, and `bytes` has 32 bytes.
    unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) }
}

/// Loads the first 16 bytes.
#[inline]
#[target_feature(enable = "avx2")]
fn load_half(bytes: &[u8]) -> __m128i {
    let bytes: &[u8; 16] = bytes.first_chunk().expect("the caller passes padding");
    // SAFETY: `_mm_loadu_si128` reads 16 bytes at any alignment, and `bytes` has 16 bytes.
    unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx2")]
fn store_bytes(target: &mut [u8; 32], bytes: __m256i) {
    // SAFETY: `_mm256_storeu_si256` writes 32 bytes at any alignment, and `target` has 32 bytes.
    unsafe { _mm256_storeu_si256(target.as_mut_ptr().cast(), bytes) }
}
