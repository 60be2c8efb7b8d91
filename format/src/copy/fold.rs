//! CRC-32 by folding, fused with the copy.
//!
//! Each line is stored from the register in which it is folded, so that loads, folds and stores overlap.
//!
//! A CRC is the remainder of a polynomial, the message, divided by the CRC polynomial. Bits that lie `n` bits before
//! others can be folded into them: multiplied by `x^n`, reduced, and added. The remainder stays the same. Each stripe
//! of four lines is folded into the next one until one stripe is left, whose CRC is that of the message. The method is
//! from V. Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction", Intel, 2009.

#![expect(unsafe_code, reason = "these instructions exist only as intrinsics")]

use std::arch::x86_64::{
    __m512i, _mm_cvtsi32_si128, _mm_set_epi64x, _mm512_broadcast_i32x4, _mm512_clmulepi64_epi128,
    _mm512_loadu_si512, _mm512_storeu_si512, _mm512_stream_si512, _mm512_xor_si512,
    _mm512_zextsi128_si512,
};

use crc32fast::Hasher;

use crate::prefetch::CacheLine;

/// Lines that are folded in parallel, because the folds into one line form a dependency chain.
type Stripe = [CacheLine; 4];

/// The length of a stripe in bits.
const STRIPE_BITS: u32 = 4 * 512;

/// The polynomial of CRC-32. Like all polynomials here it is bit-reflected: bit 0 is the highest power.
const POLYNOMIAL: u32 = 0xEDB8_8320;

/// Proof that the processor has AVX-512F and VPCLMULQDQ.
#[derive(Clone, Copy)]
pub(super) struct FoldingCrc(());

impl FoldingCrc {
    /// Returns the proof if the processor has the instructions.
    pub(super) fn detect() -> Option<Self> {
        let has_all = is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("vpclmulqdq");
        has_all.then_some(Self(()))
    }

    /// Copies bytes with non-temporal stores, and extends `crc` by them.
    ///
    /// `target` must have the same length and be aligned to lines.
    #[expect(clippy::unused_self, reason = "it is the proof that the processor can")]
    pub(super) fn copy_and_checksum(self, source: &[u8], target: &mut [u8], crc: u32) -> u32 {
        // SAFETY: `copy_and_fold` requires avx512f and vpclmulqdq. Only `detect` creates a `FoldingCrc`, after it has
        // detected both.
        unsafe { copy_and_fold(source, target, crc) }
    }
}

#[target_feature(enable = "avx512f,vpclmulqdq")]
fn copy_and_fold(source: &[u8], target: &mut [u8], crc: u32) -> u32 {
    let (lines, _) = source.as_chunks();
    let (stripes, _) = lines.as_chunks();
    let (source, tail) = source.split_at(size_of_val(stripes));
    let (target, target_tail) = target.split_at_mut(source.len());
    let (target_lines, _) = target.as_chunks_mut();
    let (target_stripes, _) = target_lines.as_chunks_mut();
    let mut hasher = fold(stripes, target_stripes, crc);
    hasher.update(tail);
    target_tail.copy_from_slice(tail);
    hasher.finalize()
}

/// Copies stripes, and returns a hasher in the state after `crc` is extended by them.
#[target_feature(enable = "avx512f,vpclmulqdq")]
fn fold(source: &[Stripe], target: &mut [Stripe], crc: u32) -> Hasher {
    let mut stripes = source.iter().zip(target);
    let Some((first, target)) = stripes.next() else { return Hasher::new_with_initial(crc) };
    let mut folded = first.each_ref().map(|line| load(line));
    target.iter_mut().zip(folded).for_each(|(target, line)| store_streaming(target, line));
    // The register of a CRC is the complement of its value. It is added to the first bytes that follow.
    let register = _mm512_zextsi128_si512(_mm_cvtsi32_si128((!crc).cast_signed()));
    folded[0] = _mm512_xor_si512(folded[0], register);
    let factors = factors();
    for (source, target) in stripes {
        for ((folded, source), target) in folded.iter_mut().zip(source).zip(target) {
            let line = load(source);
            let low = _mm512_clmulepi64_epi128::<0x00>(*folded, factors);
            let high = _mm512_clmulepi64_epi128::<0x11>(*folded, factors);
            *folded = _mm512_xor_si512(_mm512_xor_si512(low, high), line);
            store_streaming(target, line);
        }
    }
    let mut last: Stripe = [[0; size_of::<CacheLine>()]; 4];
    last.iter_mut().zip(folded).for_each(|(last, folded)| store_unaligned(last, folded));
    // A register of 0, because `last` includes the initial register.
    let mut hasher = Hasher::new_with_initial(!0);
    hasher.update(last.as_flattened());
    hasher
}

/// Returns the factors that move the low and the high half of each 128-bit lane forward by one stripe.
///
/// In its 128 bits, the product of 64 bits and a 32-bit constant has an additional factor of `x^32`, so both exponents
/// are smaller by 32. The low half precedes the high half by 64 bits, so its exponent is larger by 64.
#[target_feature(enable = "avx512f")]
fn factors() -> __m512i {
    const LOW: i64 = power(STRIPE_BITS + 64 - 32);
    const HIGH: i64 = power(STRIPE_BITS - 32);
    _mm512_broadcast_i32x4(_mm_set_epi64x(HIGH, LOW))
}

/// Returns `x^exponent` modulo the polynomial, shifted left by one bit.
///
/// In the carry-less product of two bit-reflected polynomials the highest power is one bit too low. The shift
/// corrects that.
const fn power(mut exponent: u32) -> i64 {
    let mut power: u32 = 1 << 31;
    while exponent > 0 {
        power = (power >> 1) ^ (POLYNOMIAL * (power & 1));
        exponent -= 1;
    }
    (power as i64) << 1
}

#[target_feature(enable = "avx512f")]
fn load(line: &CacheLine) -> __m512i {
    // SAFETY: `_mm512_loadu_si512` reads 64 bytes at any alignment, and `line` is 64 bytes.
    unsafe { _mm512_loadu_si512(line.as_ptr().cast()) }
}

#[target_feature(enable = "avx512f")]
fn store_unaligned(line: &mut CacheLine, value: __m512i) {
    // SAFETY: `_mm512_storeu_si512` writes 64 bytes at any alignment, and `line` is 64 bytes that we borrow mutably.
    unsafe { _mm512_storeu_si512(line.as_mut_ptr().cast(), value) }
}

/// Writes a line with a non-temporal store.
#[target_feature(enable = "avx512f")]
fn store_streaming(target: &mut CacheLine, value: __m512i) {
    assert!(target.as_ptr().addr().is_multiple_of(size_of::<CacheLine>()), "a line of the target");
    // SAFETY: `_mm512_stream_si512` writes 64 bytes at a multiple of 64, which the assertion above checks. `target` is
    // 64 bytes that we borrow mutably.
    unsafe { _mm512_stream_si512(target.as_mut_ptr().cast(), value) }
}
