//! Bit patterns of elements of 1, 2 or 4 bytes.
// Kernels must be inlined into the function that enables their instructions.
#![allow(clippy::inline_always)]

/// Width of an element in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ElementWidth {
    /// 1 byte, such as fp8.
    One,
    /// 2 bytes, such as bf16.
    Two,
    /// 4 bytes, such as fp32.
    Four,
}

impl ElementWidth {
    /// Returns the width of this many bytes, if deltas support it.
    pub fn from_bytes(bytes: u8) -> Option<Self> {
        match bytes {
            1 => Some(Self::One),
            2 => Some(Self::Two),
            4 => Some(Self::Four),
            _ => None,
        }
    }

    /// Returns the width in bytes.
    pub fn bytes(self) -> usize {
        self.to_u8().into()
    }

    /// Returns the width in bytes, as storage records have it.
    pub fn to_u8(self) -> u8 {
        match self {
            Self::One => 1,
            Self::Two => 2,
            Self::Four => 4,
        }
    }
}

/// Evaluates an expression with the width of elements in bytes as the constant `$bytes`.
macro_rules! with_width {
    ($width:expr, $bytes:ident => $result:expr) => {
        match $width {
            ElementWidth::One => {
                const $bytes: usize = 1;
                $result
            }
            ElementWidth::Two => {
                const $bytes: usize = 2;
                $result
            }
            ElementWidth::Four => {
                const $bytes: usize = 4;
                $result
            }
        }
    };
}
pub(crate) use with_width;

/// Returns the bit pattern of an element.
#[inline(always)]
pub(crate) fn load<const W: usize>(element: &[u8; W]) -> u32 {
    let mut wide = [0; 4];
    wide[..W].copy_from_slice(element);
    u32::from_le_bytes(wide)
}

/// Returns the element with the lowest `8 * W` bits of `pattern`.
#[inline(always)]
pub(crate) fn store<const W: usize>(pattern: u32) -> [u8; W] {
    let wide = pattern.to_le_bytes();
    let mut element = [0; W];
    element.copy_from_slice(&wide[..W]);
    element
}

/// Returns the bits of a pattern without the sign bit.
pub(crate) const fn magnitude_mask<const W: usize>() -> u32 {
    u32::MAX >> (33 - 8 * W)
}

/// Returns the zigzag code of `new - old` modulo `2^(8 * W)`: 0, -1, 1, -2, ... become 0, 1, 2, 3, ...
#[inline(always)]
pub(crate) fn zigzag<const W: usize>(difference: u32) -> u32 {
    let shift = 32 - 8 * W;
    let signed = (difference << shift).cast_signed() >> shift;
    let code = (signed << 1) ^ (signed >> 31);
    code.cast_unsigned() & (u32::MAX >> shift)
}

/// Inverts [`zigzag`]. Only the lowest `8 * W` bits of the result count.
#[inline(always)]
pub(crate) const fn unzigzag(code: u32) -> u32 {
    (code >> 1) ^ (code & 1).wrapping_neg()
}
