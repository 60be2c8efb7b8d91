//! Conversion of tensor elements to numbers.

use std::cmp::Ordering;
use std::fmt;

use half::{bf16, f16};
use tssd_format::Dtype;

/// The exact value of an element.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Number {
    Int(i128),
    /// The value, and its ordinal among all floats of the dtype. Ordinals of adjacent floats differ by 1.
    Float(f64, i64),
}

impl Number {
    /// Returns the absolute difference of two numbers of the same dtype.
    #[expect(clippy::cast_precision_loss, reason = "a distance is shown, not computed with")]
    pub(crate) fn abs_difference(self, other: Self) -> f64 {
        match (self, other) {
            (Self::Int(a), Self::Int(b)) => a.abs_diff(b) as f64,
            // The difference of equal infinities, and of the two zeros, is 0.
            (Self::Float(a, _), Self::Float(b, _))
                if a.partial_cmp(&b) == Some(Ordering::Equal) =>
            {
                0.0
            }
            (Self::Float(a, _), Self::Float(b, _)) => (a - b).abs(),
            _ => unreachable!("both are of one dtype"),
        }
    }

    /// Returns the distance of two floats of the same dtype in ULPs.
    ///
    /// Returns `None` for integers, and if one of the floats is NaN.
    pub(crate) fn ulps(self, other: Self) -> Option<u64> {
        match (self, other) {
            (Self::Float(a, _), Self::Float(b, _)) if a.is_nan() || b.is_nan() => None,
            (Self::Float(_, a), Self::Float(_, b)) => Some(a.abs_diff(b)),
            _ => None,
        }
    }
}

/// Displays floats in the debug format of Rust, such as `1.0`.
impl fmt::Display for Number {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Int(int) => write!(f, "{int}"),
            Self::Float(float, _) => write!(f, "{float:?}"),
        }
    }
}

/// Decoder for the elements of a dtype.
#[derive(Clone, Copy)]
pub(crate) struct ElementDecoder {
    read: fn(&[u8]) -> Number,
    /// Bytes of one number, which is half an element for complex dtypes.
    size: usize,
}

impl ElementDecoder {
    /// Returns the decoder of a dtype, or `None` if the elements are packed or quantized.
    pub(crate) fn for_dtype(dtype: Dtype) -> Option<Self> {
        let part = match dtype {
            Dtype::Complex32 => Dtype::Float16,
            Dtype::Bcomplex32 => Dtype::Bfloat16,
            Dtype::Complex64 => Dtype::Float32,
            Dtype::Complex128 => Dtype::Float64,
            dtype => dtype,
        };
        let size = usize::try_from(part.itemsize()).expect("at most 8");
        decode_fn(part).map(|read| Self { read, size })
    }

    /// Returns the number of an element, or both numbers of a complex element.
    pub(crate) fn numbers(self, item: &[u8]) -> impl Iterator<Item = Number> {
        item.chunks_exact(self.size).map(self.read)
    }
}

fn decode_fn(dtype: Dtype) -> Option<fn(&[u8]) -> Number> {
    Some(match dtype {
        Dtype::Uint8 | Dtype::Bool => |item| Number::Int(u8::from_le_bytes(to_array(item)).into()),
        Dtype::Int8 => |item| Number::Int(i8::from_le_bytes(to_array(item)).into()),
        Dtype::Uint16 => |item| Number::Int(u16::from_le_bytes(to_array(item)).into()),
        Dtype::Int16 => |item| Number::Int(i16::from_le_bytes(to_array(item)).into()),
        Dtype::Uint32 => |item| Number::Int(u32::from_le_bytes(to_array(item)).into()),
        Dtype::Int32 => |item| Number::Int(i32::from_le_bytes(to_array(item)).into()),
        Dtype::Uint64 => |item| Number::Int(u64::from_le_bytes(to_array(item)).into()),
        Dtype::Int64 => |item| Number::Int(i64::from_le_bytes(to_array(item)).into()),
        Dtype::Float16 => |item| {
            let half = f16::from_le_bytes(to_array(item));
            Number::Float(half.into(), float_ordinal(u64::from(half.to_bits()), 16))
        },
        Dtype::Bfloat16 => |item| {
            let half = bf16::from_le_bytes(to_array(item));
            Number::Float(half.into(), float_ordinal(u64::from(half.to_bits()), 16))
        },
        Dtype::Float32 => |item| {
            let float = f32::from_le_bytes(to_array(item));
            Number::Float(float.into(), float_ordinal(float.to_bits().into(), 32))
        },
        Dtype::Float64 => |item| {
            let float = f64::from_le_bytes(to_array(item));
            Number::Float(float, float_ordinal(float.to_bits(), 64))
        },
        Dtype::Float8E5m2 => |item| float8(item, minifloat(item, 2, 15, SpecialValues::Ieee)),
        Dtype::Float8E4m3fn => |item| float8(item, minifloat(item, 3, 7, SpecialValues::Finite)),
        Dtype::Float8E5m2fnuz => {
            |item| float8(item, minifloat(item, 2, 16, SpecialValues::UnsignedZero))
        }
        Dtype::Float8E4m3fnuz => {
            |item| float8(item, minifloat(item, 3, 8, SpecialValues::UnsignedZero))
        }
        Dtype::Float8E8m0fnu => {
            |item| Number::Float(power_of_two(item), u8::from_le_bytes(to_array(item)).into())
        }
        _ => return None,
    })
}

/// Returns the ordinal of a float among those of its dtype, from its bits. Both zeros have ordinal 0.
fn float_ordinal(bits: u64, width: u32) -> i64 {
    let magnitude = (bits & !(1 << (width - 1))).cast_signed();
    if bits >> (width - 1) == 0 { magnitude } else { -magnitude }
}

fn float8(item: &[u8], value: f64) -> Number {
    Number::Float(value, float_ordinal(u8::from_le_bytes(to_array(item)).into(), 8))
}

fn to_array<const N: usize>(item: &[u8]) -> [u8; N] {
    item.try_into().expect("an element has the size of its dtype")
}

/// Encoding of infinities and NaN in an 8-bit float format.
#[derive(Clone, Copy, PartialEq)]
enum SpecialValues {
    /// Infinities and NaNs as in IEEE 754.
    Ieee,
    /// No infinities. All bits but the sign are 1 in NaN (`fn`).
    Finite,
    /// No infinities and no -0. NaN has the bits of -0 (`fnuz`).
    UnsignedZero,
}

/// Decodes an 8-bit float with `mantissa_bits` bits of mantissa.
fn minifloat(item: &[u8], mantissa_bits: i32, bias: i32, special: SpecialValues) -> f64 {
    let byte = u8::from_le_bytes(to_array(item));
    let magnitude = i32::from(byte & 0x7F);
    let exponent = magnitude >> mantissa_bits;
    let mantissa = magnitude & ((1 << mantissa_bits) - 1);
    let top = (1 << (7 - mantissa_bits)) - 1;
    match special {
        SpecialValues::Finite if magnitude == 0x7F => return f64::NAN,
        SpecialValues::UnsignedZero if byte == 0x80 => return f64::NAN,
        SpecialValues::Ieee if exponent == top && mantissa != 0 => return f64::NAN,
        SpecialValues::Ieee if exponent == top => {
            return if byte < 0x80 { f64::INFINITY } else { f64::NEG_INFINITY };
        }
        _ => {}
    }
    let (units, power) = match exponent {
        0 => (mantissa, 1 - bias - mantissa_bits),
        _ => (mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits),
    };
    let value = f64::from(units) * 2_f64.powi(power);
    if byte < 0x80 { value } else { -value }
}

/// Decodes an 8-bit scale without sign and mantissa (E8M0).
fn power_of_two(item: &[u8]) -> f64 {
    match u8::from_le_bytes(to_array(item)) {
        0xFF => f64::NAN,
        exponent => 2_f64.powi(i32::from(exponent) - 127),
    }
}

#[cfg(test)]
mod tests {
    use super::{ElementDecoder, SpecialValues, minifloat, power_of_two};

    /// Checks extreme values from the tables of OCP and ONNX.
    #[test]
    fn minifloat_decodes_extreme_values() {
        for (byte, mantissa_bits, bias, special, value) in [
            (0x7E, 3, 7, SpecialValues::Finite, 448.0),
            (0x01, 3, 7, SpecialValues::Finite, 2_f64.powi(-9)),
            (0x08, 3, 7, SpecialValues::Finite, 2_f64.powi(-6)),
            (0xB8, 3, 7, SpecialValues::Finite, -1.0),
            (0x7B, 2, 15, SpecialValues::Ieee, 57344.0),
            (0xFC, 2, 15, SpecialValues::Ieee, f64::NEG_INFINITY),
            (0x7F, 3, 8, SpecialValues::UnsignedZero, 240.0),
            (0x7F, 2, 16, SpecialValues::UnsignedZero, 57344.0),
        ] {
            assert_eq!(minifloat(&[byte], mantissa_bits, bias, special).to_bits(), value.to_bits());
        }
        assert!(minifloat(&[0xFF], 3, 7, SpecialValues::Finite).is_nan());
        assert!(minifloat(&[0x7D], 2, 15, SpecialValues::Ieee).is_nan());
        assert!(minifloat(&[0x80], 3, 8, SpecialValues::UnsignedZero).is_nan());
        assert_eq!(power_of_two(&[128]).to_bits(), 2.0_f64.to_bits());
    }

    #[test]
    fn ulps_counts_steps_between_floats() {
        use tssd_format::Dtype;
        for (dtype, a, b, ulps) in [
            (Dtype::Float32, &1.0_f32.to_le_bytes()[..], &(1.0_f32).next_up().to_le_bytes()[..], 1),
            (Dtype::Float32, &(-0.0_f32).to_le_bytes(), &0.0_f32.to_le_bytes(), 0),
            (Dtype::Float64, &(-5e-324_f64).to_le_bytes(), &5e-324_f64.to_le_bytes(), 2),
            (
                Dtype::Float64,
                &f64::MIN.to_le_bytes(),
                &f64::MAX.to_le_bytes(),
                (0x7FEF << 48 | 0xFFFF_FFFF_FFFF) * 2,
            ),
            (Dtype::Bfloat16, &[0x80, 0x3F], &[0x82, 0x3F], 2),
            (Dtype::Float16, &[0x00, 0x3C], &[0x00, 0xBC], 2 * 0x3C00),
            (Dtype::Float8E4m3fn, &[0x08], &[0x07], 1),
            (Dtype::Float8E5m2fnuz, &[0x01], &[0x81], 2),
            (Dtype::Float8E8m0fnu, &[127], &[130], 3),
        ] {
            let reader = ElementDecoder::for_dtype(dtype).unwrap();
            let [a, b] = [a, b].map(|item| reader.numbers(item).next().unwrap());
            assert_eq!(a.ulps(b), Some(ulps), "{dtype}: {a} and {b}");
            assert_eq!(b.ulps(a), Some(ulps), "{dtype}: {b} and {a}");
        }
        let complex = ElementDecoder::for_dtype(Dtype::Complex32).unwrap();
        let parts: Vec<String> =
            complex.numbers(&[0x00, 0x3C, 0x00, 0xC0]).map(|part| part.to_string()).collect();
        assert_eq!(parts, ["1.0", "-2.0"]);
    }
}
