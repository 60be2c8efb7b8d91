//! A checksum by folding, in whose registers the bytes are when they are stored: loads, sums and stores overlap.
//!
//! A CRC is the remainder of a polynomial, the bytes, divided by another. Of bytes, those that lie `n` bits before
//! others can be replaced by their product with `x^n`, reduced, added to the others: the remainder stays. Four
//! lines side by side are added to the next four like this until four are left, whose CRC is that of all. The method is
//! of V. Gopal and others, "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction", Intel, 2009.

#![expect(unsafe_code, reason = "these instructions exist only as intrinsics")]

use std::arch::x86_64::{
    __m512i, _mm_cvtsi32_si128, _mm_set_epi64x, _mm512_broadcast_i32x4, _mm512_clmulepi64_epi128,
    _mm512_loadu_si512, _mm512_storeu_si512, _mm512_stream_si512, _mm512_xor_si512,
    _mm512_zextsi128_si512,
};

use crc32fast::Hasher;

use crate::fetch::Line;

/// Lines that are folded side by side: each fold waits for the one before it.
type Stripe = [Line; 4];

/// The length of a stripe.
const STRIPE_BITS: u32 = 4 * 512;

/// The polynomial of the CRC-32. Its coefficients, and those of all others, stand with the highest power first, at
/// the lowest bit.
const POLYNOMIAL: u32 = 0xEDB8_8320;

/// A processor that has the instructions.
#[derive(Clone, Copy)]
pub(super) struct Folding(());

impl Folding {
    pub(super) fn find() -> Option<Self> {
        let has_all = is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("vpclmulqdq");
        has_all.then_some(Self(()))
    }

    /// Copies bytes, past the cache, to memory of the same length that is aligned to lines, and returns the
    /// CRC-32 of what `crc` is of, followed by them.
    #[expect(clippy::unused_self, reason = "it is the proof that the processor can")]
    pub(super) fn copy_and_checksum(self, source: &[u8], target: &mut [u8], crc: u32) -> u32 {
        // SAFETY: it needs avx512f and vpclmulqdq, which `find` has seen.
        unsafe { copy_and_fold(source, target, crc) }
    }
}

#[target_feature(enable = "avx512f,vpclmulqdq")]
fn copy_and_fold(source: &[u8], target: &mut [u8], crc: u32) -> u32 {
    let (lines, _) = source.as_chunks();
    let (stripes, _) = lines.as_chunks();
    let (source, rest) = source.split_at(size_of_val(stripes));
    let (target, target_rest) = target.split_at_mut(source.len());
    let (target_lines, _) = target.as_chunks_mut();
    let (target_stripes, _) = target_lines.as_chunks_mut();
    let mut all = fold(stripes, target_stripes, crc);
    all.update(rest);
    target_rest.copy_from_slice(rest);
    all.finalize()
}

/// Copies stripes, and returns a hasher that has seen what has the same CRC.
#[target_feature(enable = "avx512f,vpclmulqdq")]
fn fold(source: &[Stripe], target: &mut [Stripe], crc: u32) -> Hasher {
    let mut stripes = source.iter().zip(target);
    let Some((first, target)) = stripes.next() else { return Hasher::new_with_initial(crc) };
    let mut sums = first.each_ref().map(|line| load(line));
    target.iter_mut().zip(sums).for_each(|(target, line)| store(target, line));
    // The state of a CRC, of which what is told is the complement, is added to the first bytes that follow.
    let state = _mm512_zextsi128_si512(_mm_cvtsi32_si128((!crc).cast_signed()));
    sums[0] = _mm512_xor_si512(sums[0], state);
    let factors = factors();
    for (source, target) in stripes {
        for ((sum, source), target) in sums.iter_mut().zip(source).zip(target) {
            let line = load(source);
            let early = _mm512_clmulepi64_epi128::<0x00>(*sum, factors);
            let late = _mm512_clmulepi64_epi128::<0x11>(*sum, factors);
            *sum = _mm512_xor_si512(_mm512_xor_si512(early, late), line);
            store(target, line);
        }
    }
    let mut last: Stripe = [[0; size_of::<Line>()]; 4];
    last.iter_mut().zip(sums).for_each(|(last, sum)| keep(last, sum));
    // From the state 0: the one before is in them.
    let mut all = Hasher::new_with_initial(!0);
    all.update(last.as_flattened());
    all
}

/// What the early and the late half of each 128 bits is multiplied with to go as many bits further as a stripe
/// has.
///
/// 64 bits times a constant of 32 stand in 128 bits as if they were multiplied with `x^32` besides; the early half
/// lies 64 bits before the late one.
#[target_feature(enable = "avx512f")]
fn factors() -> __m512i {
    const EARLY: i64 = power(STRIPE_BITS + 64 - 32);
    const LATE: i64 = power(STRIPE_BITS - 32);
    _mm512_broadcast_i32x4(_mm_set_epi64x(LATE, EARLY))
}

/// `x` to a power, reduced, one bit further up: the product of two polynomials with the highest power first has it in
/// its second bit.
const fn power(mut exponent: u32) -> i64 {
    let mut power: u32 = 1 << 31;
    while exponent > 0 {
        power = (power >> 1) ^ (POLYNOMIAL * (power & 1));
        exponent -= 1;
    }
    (power as i64) << 1
}

#[target_feature(enable = "avx512f")]
fn load(line: &Line) -> __m512i {
    // SAFETY: it reads 64 bytes at any alignment, which `line` has.
    unsafe { _mm512_loadu_si512(line.as_ptr().cast()) }
}

#[target_feature(enable = "avx512f")]
fn keep(line: &mut Line, value: __m512i) {
    // SAFETY: it writes 64 bytes at any alignment, which `line` has, and we borrow it mutably.
    unsafe { _mm512_storeu_si512(line.as_mut_ptr().cast(), value) }
}

/// Past the cache.
#[target_feature(enable = "avx512f")]
fn store(target: &mut Line, value: __m512i) {
    assert!(target.as_ptr().addr().is_multiple_of(size_of::<Line>()), "a line of the target");
    // SAFETY: it writes 64 bytes at a multiple of 64, which the line above has seen; `target` is as many that we
    // borrow mutably.
    unsafe { _mm512_stream_si512(target.as_mut_ptr().cast(), value) }
}
