//! Elements of tensors as numbers.

use std::cmp::Ordering;
use std::fmt;

use half::{bf16, f16};
use tssd_format::Dtype;

/// A number without loss.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Number {
    Int(i128),
    /// Its value, and its place among all floats of its dtype: neighbours are one apart.
    Float(f64, i64),
}

impl Number {
    /// The distance of two numbers of one dtype.
    #[expect(clippy::cast_precision_loss, reason = "a distance is shown, not computed with")]
    pub(crate) fn apart(self, other: Self) -> f64 {
        match (self, other) {
            (Self::Int(a), Self::Int(b)) => a.abs_diff(b) as f64,
            // Equal infinities and the two zeros are no distance apart.
            (Self::Float(a, _), Self::Float(b, _))
                if a.partial_cmp(&b) == Some(Ordering::Equal) =>
            {
                0.0
            }
            (Self::Float(a, _), Self::Float(b, _)) => (a - b).abs(),
            _ => unreachable!("both are of one dtype"),
        }
    }

    /// How many floats further the other is, of two floats of one dtype that are numbers.
    pub(crate) fn ulps(self, other: Self) -> Option<u64> {
        match (self, other) {
            (Self::Float(a, _), Self::Float(b, _)) if a.is_nan() || b.is_nan() => None,
            (Self::Float(_, a), Self::Float(_, b)) => Some(a.abs_diff(b)),
            _ => None,
        }
    }
}

/// Floats as Rust writes them, with a point.
impl fmt::Display for Number {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Int(int) => write!(f, "{int}"),
            Self::Float(float, _) => write!(f, "{float:?}"),
        }
    }
}

/// How elements of a dtype are read.
#[derive(Clone, Copy)]
pub(crate) struct Reader {
    read: fn(&[u8]) -> Number,
    /// Bytes of one number: half an element of the complex dtypes.
    size: usize,
}

impl Reader {
    /// The reader of a dtype; `None` if its elements are packed or quantized, and so no numbers.
    pub(crate) fn of(dtype: Dtype) -> Option<Self> {
        let part = match dtype {
            Dtype::Complex32 => Dtype::Float16,
            Dtype::Bcomplex32 => Dtype::Bfloat16,
            Dtype::Complex64 => Dtype::Float32,
            Dtype::Complex128 => Dtype::Float64,
            dtype => dtype,
        };
        let size = usize::try_from(part.itemsize()).expect("at most 8");
        number_of(part).map(|read| Self { read, size })
    }

    /// The number of an element; the two of a complex one.
    pub(crate) fn numbers(self, item: &[u8]) -> impl Iterator<Item = Number> {
        item.chunks_exact(self.size).map(self.read)
    }
}

fn number_of(dtype: Dtype) -> Option<fn(&[u8]) -> Number> {
    Some(match dtype {
        Dtype::Uint8 | Dtype::Bool => |item| Number::Int(u8::from_le_bytes(array(item)).into()),
        Dtype::Int8 => |item| Number::Int(i8::from_le_bytes(array(item)).into()),
        Dtype::Uint16 => |item| Number::Int(u16::from_le_bytes(array(item)).into()),
        Dtype::Int16 => |item| Number::Int(i16::from_le_bytes(array(item)).into()),
        Dtype::Uint32 => |item| Number::Int(u32::from_le_bytes(array(item)).into()),
        Dtype::Int32 => |item| Number::Int(i32::from_le_bytes(array(item)).into()),
        Dtype::Uint64 => |item| Number::Int(u64::from_le_bytes(array(item)).into()),
        Dtype::Int64 => |item| Number::Int(i64::from_le_bytes(array(item)).into()),
        Dtype::Float16 => |item| {
            let half = f16::from_le_bytes(array(item));
            Number::Float(half.into(), place(u64::from(half.to_bits()), 16))
        },
        Dtype::Bfloat16 => |item| {
            let half = bf16::from_le_bytes(array(item));
            Number::Float(half.into(), place(u64::from(half.to_bits()), 16))
        },
        Dtype::Float32 => |item| {
            let float = f32::from_le_bytes(array(item));
            Number::Float(float.into(), place(float.to_bits().into(), 32))
        },
        Dtype::Float64 => |item| {
            let float = f64::from_le_bytes(array(item));
            Number::Float(float, place(float.to_bits(), 64))
        },
        Dtype::Float8E5m2 => |item| small(item, minifloat(item, 2, 15, Special::Ieee)),
        Dtype::Float8E4m3fn => |item| small(item, minifloat(item, 3, 7, Special::Finite)),
        Dtype::Float8E5m2fnuz => |item| small(item, minifloat(item, 2, 16, Special::Unsigned)),
        Dtype::Float8E4m3fnuz => |item| small(item, minifloat(item, 3, 8, Special::Unsigned)),
        Dtype::Float8E8m0fnu => {
            |item| Number::Float(power_of_two(item), u8::from_le_bytes(array(item)).into())
        }
        _ => return None,
    })
}

/// The place of a float among those of its dtype, given its bits: both zeros are at 0.
fn place(bits: u64, width: u32) -> i64 {
    let magnitude = (bits & !(1 << (width - 1))).cast_signed();
    if bits >> (width - 1) == 0 { magnitude } else { -magnitude }
}

fn small(item: &[u8], value: f64) -> Number {
    Number::Float(value, place(u8::from_le_bytes(array(item)).into(), 8))
}

fn array<const N: usize>(item: &[u8]) -> [u8; N] {
    item.try_into().expect("an element has the size of its dtype")
}

/// What the 8-bit floats do with the bit patterns at the end of their range.
#[derive(Clone, Copy, PartialEq)]
enum Special {
    /// Infinities and NaNs, as in larger floats.
    Ieee,
    /// No infinity; NaN is all ones (`fn`).
    Finite,
    /// No infinity; NaN is where -0 would be (`fnuz`).
    Unsigned,
}

/// An 8-bit float with this many bits of mantissa.
fn minifloat(item: &[u8], mantissa_bits: i32, bias: i32, special: Special) -> f64 {
    let byte = u8::from_le_bytes(array(item));
    let magnitude = i32::from(byte & 0x7F);
    let exponent = magnitude >> mantissa_bits;
    let mantissa = magnitude & ((1 << mantissa_bits) - 1);
    let top = (1 << (7 - mantissa_bits)) - 1;
    match special {
        Special::Finite if magnitude == 0x7F => return f64::NAN,
        Special::Unsigned if byte == 0x80 => return f64::NAN,
        Special::Ieee if exponent == top && mantissa != 0 => return f64::NAN,
        Special::Ieee if exponent == top => {
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

/// A scale of 8 bits, all of them exponent.
fn power_of_two(item: &[u8]) -> f64 {
    match u8::from_le_bytes(array(item)) {
        0xFF => f64::NAN,
        exponent => 2_f64.powi(i32::from(exponent) - 127),
    }
}

#[cfg(test)]
mod tests {
    use super::{Reader, Special, minifloat, power_of_two};

    /// The extremes, as the OCP and ONNX tables have them.
    #[test]
    fn small_floats_are_read_right() {
        for (byte, mantissa_bits, bias, special, value) in [
            (0x7E, 3, 7, Special::Finite, 448.0),
            (0x01, 3, 7, Special::Finite, 2_f64.powi(-9)),
            (0x08, 3, 7, Special::Finite, 2_f64.powi(-6)),
            (0xB8, 3, 7, Special::Finite, -1.0),
            (0x7B, 2, 15, Special::Ieee, 57344.0),
            (0xFC, 2, 15, Special::Ieee, f64::NEG_INFINITY),
            (0x7F, 3, 8, Special::Unsigned, 240.0),
            (0x7F, 2, 16, Special::Unsigned, 57344.0),
        ] {
            assert_eq!(minifloat(&[byte], mantissa_bits, bias, special).to_bits(), value.to_bits());
        }
        assert!(minifloat(&[0xFF], 3, 7, Special::Finite).is_nan());
        assert!(minifloat(&[0x7D], 2, 15, Special::Ieee).is_nan());
        assert!(minifloat(&[0x80], 3, 8, Special::Unsigned).is_nan());
        assert_eq!(power_of_two(&[128]).to_bits(), 2.0_f64.to_bits());
    }

    #[test]
    fn neighbours_are_one_ulp_apart() {
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
            let reader = Reader::of(dtype).unwrap();
            let [a, b] = [a, b].map(|item| reader.numbers(item).next().unwrap());
            assert_eq!(a.ulps(b), Some(ulps), "{dtype}: {a} and {b}");
            assert_eq!(b.ulps(a), Some(ulps), "{dtype}: {b} and {a}");
        }
        let complex = Reader::of(Dtype::Complex32).unwrap();
        let parts: Vec<String> =
            complex.numbers(&[0x00, 0x3C, 0x00, 0xC0]).map(|part| part.to_string()).collect();
        assert_eq!(parts, ["1.0", "-2.0"]);
    }
}
