//! How far apart the elements of two tensors are.

use std::cmp::Ordering;

use half::{bf16, f16};
use tssd_format::{Dtype, Runs, TensorView};

/// How the elements of two tensors of one dtype and shape differ.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Delta {
    /// How many are not the same bits.
    pub(super) differing: u64,
    /// The largest absolute difference, for dtypes that are numbers.
    pub(super) max_abs: Option<f64>,
    /// How many are a number in at most one of the two.
    pub(super) nan: u64,
}

impl Delta {
    /// The same for people.
    pub(super) fn describe(&self, numel: u64) -> String {
        let mut text = format!("{} of {numel} elements differ", self.differing);
        if let Some(max_abs) = self.max_abs {
            let is_handy = max_abs == 0.0 || (1e-3..1e6).contains(&max_abs);
            let max_abs = if is_handy { format!("{max_abs:.4}") } else { format!("{max_abs:.3e}") };
            text = format!("{text}, max |a - b| {max_abs}");
        }
        if self.nan > 0 {
            text = format!("{text}, {} with NaN", self.nan);
        }
        text
    }
}

/// Element by element; both tensors must have the same dtype and shape.
pub(super) fn compare(a: &TensorView<'_>, b: &TensorView<'_>) -> Delta {
    let dtype = a.meta().dtype();
    let item = usize::try_from(dtype.itemsize()).expect("at most 16");
    let read = reader_of(dtype);
    let mut delta = Delta::default();
    let size = |bytes: u64| usize::try_from(bytes).expect("it is in memory");
    Runs::new(dtype.itemsize(), a.meta().shape(), &a.meta().strides(), &b.meta().strides())
        .for_each(|left, right, run| {
            // Runs of equal bytes are passed over at the speed of memory.
            const BLOCK: usize = 4096;
            let left = a.span()[size(left)..][..size(run)].chunks(BLOCK * item);
            let right = b.span()[size(right)..][..size(run)].chunks(BLOCK * item);
            for (left, right) in left.zip(right).filter(|(left, right)| left != right) {
                let pairs = left.chunks_exact(item).zip(right.chunks_exact(item));
                for (left, right) in pairs.filter(|(left, right)| left != right) {
                    delta.count(read.map(|read| (read(left), read(right))));
                }
            }
        });
    delta
}

impl Delta {
    fn count(&mut self, pair: Option<(Number, Number)>) {
        self.differing += 1;
        let Some((a, b)) = pair else { return };
        let apart = a.apart(b);
        if apart.is_nan() {
            self.nan += 1;
        }
        // `max` passes NaN over.
        self.max_abs = Some(self.max_abs.unwrap_or(0.0).max(apart));
    }
}

/// An element as a number without loss.
#[derive(Clone, Copy)]
enum Number {
    Int(i128),
    Float(f64),
}

impl Number {
    #[expect(clippy::cast_precision_loss, reason = "a distance is shown, not computed with")]
    fn apart(self, other: Self) -> f64 {
        match (self, other) {
            (Self::Int(a), Self::Int(b)) => a.abs_diff(b) as f64,
            // Equal infinities and the two zeros are no distance apart.
            (Self::Float(a), Self::Float(b)) if a.partial_cmp(&b) == Some(Ordering::Equal) => 0.0,
            (Self::Float(a), Self::Float(b)) => (a - b).abs(),
            _ => unreachable!("both are of one dtype"),
        }
    }
}

type Reader = fn(&[u8]) -> Number;

/// How an element of a dtype is read; `None` if it is no single number.
fn reader_of(dtype: Dtype) -> Option<Reader> {
    Some(match dtype {
        Dtype::Uint8 | Dtype::Bool => |item| Number::Int(u8::from_le_bytes(array(item)).into()),
        Dtype::Int8 => |item| Number::Int(i8::from_le_bytes(array(item)).into()),
        Dtype::Uint16 => |item| Number::Int(u16::from_le_bytes(array(item)).into()),
        Dtype::Int16 => |item| Number::Int(i16::from_le_bytes(array(item)).into()),
        Dtype::Uint32 => |item| Number::Int(u32::from_le_bytes(array(item)).into()),
        Dtype::Int32 => |item| Number::Int(i32::from_le_bytes(array(item)).into()),
        Dtype::Uint64 => |item| Number::Int(u64::from_le_bytes(array(item)).into()),
        Dtype::Int64 => |item| Number::Int(i64::from_le_bytes(array(item)).into()),
        Dtype::Float16 => |item| Number::Float(f16::from_le_bytes(array(item)).into()),
        Dtype::Bfloat16 => |item| Number::Float(bf16::from_le_bytes(array(item)).into()),
        Dtype::Float32 => |item| Number::Float(f32::from_le_bytes(array(item)).into()),
        Dtype::Float64 => |item| Number::Float(f64::from_le_bytes(array(item))),
        Dtype::Float8E5m2 => |item| Number::Float(minifloat(item, 2, 15, Special::Ieee)),
        Dtype::Float8E4m3fn => |item| Number::Float(minifloat(item, 3, 7, Special::Finite)),
        Dtype::Float8E5m2fnuz => |item| Number::Float(minifloat(item, 2, 16, Special::Unsigned)),
        Dtype::Float8E4m3fnuz => |item| Number::Float(minifloat(item, 3, 8, Special::Unsigned)),
        Dtype::Float8E8m0fnu => |item| Number::Float(power_of_two(item)),
        _ => return None,
    })
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
    use super::{Special, minifloat, power_of_two};

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
}
