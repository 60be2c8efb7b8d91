//! Bytes for tests of codecs, and the naive inverse of byte planes.

/// Returns bytes without any regularity.
pub(crate) fn noise(len: usize) -> Vec<u8> {
    let mut state = 1_u64;
    let next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        state.to_le_bytes()[7]
    };
    std::iter::repeat_with(next).take(len).collect()
}

/// Returns zeros of both signs, an infinity, a subnormal number and a NaN with a payload: as fp32, and as bf16.
pub(crate) fn special_floats() -> [Vec<u8>; 2] {
    let specials = [-0.0, 0.0, f32::INFINITY, f32::MIN_POSITIVE / 2.0, f32::from_bits(0x7FA0_0001)];
    let floats: Vec<f32> = specials.iter().copied().cycle().take(1999).collect();
    let wide: Vec<u8> = floats.iter().flat_map(|float| float.to_le_bytes()).collect();
    let half: Vec<u8> = wide.as_chunks::<4>().0.iter().flat_map(|f| [f[2], f[3]]).collect();
    [wide, half]
}

/// Returns the elements with these byte planes, bit by bit, as the specification reads.
pub(crate) fn join_planes(planes: &[Vec<u8>]) -> Vec<u8> {
    let (width, count) = (planes.len(), planes[0].len());
    let mut raw = vec![0; count * width];
    for element in 0..count {
        for bit in 0..8 * width {
            let is_set = planes[bit / 8][element] >> (bit % 8) & 1;
            let to = if width == 1 { bit } else { (bit + 8 * width - 1) % (8 * width) };
            raw[element * width + to / 8] |= is_set << (to % 8);
        }
    }
    raw
}
