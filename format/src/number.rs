//! Python numbers: ints of any size, and floats that are compared bit for bit.

use std::fmt;

use num_bigint::BigInt;

use crate::error::{Error, ErrorKind, Result};

/// A Python `int` of any size.
///
/// # Examples
///
/// ```
/// use tssd_format::Int;
/// assert_eq!(Int::from(7).as_i64(), Some(7));
/// let big: Int = "-123456789012345678901234567890".parse()?;
/// assert_eq!(big.as_i64(), None);
/// # Ok::<(), tssd_format::Error>(())
/// ```
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Int(Repr);

/// The representation of an int. Invariant: `Big` holds only numbers outside the `i64` range.
///
/// Equal numbers therefore have equal representations.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Repr {
    Small(i64),
    Big(Box<BigInt>),
}

impl Int {
    /// Returns the number if it fits into an `i64`.
    pub fn as_i64(&self) -> Option<i64> {
        match self.0 {
            Repr::Small(small) => Some(small),
            Repr::Big(_) => None,
        }
    }

    /// Returns the number as a `BigInt`.
    pub fn to_bigint(&self) -> BigInt {
        match &self.0 {
            Repr::Small(small) => BigInt::from(*small),
            Repr::Big(big) => BigInt::clone(big),
        }
    }

    /// Returns the shortest little-endian two's complement; `None` for numbers that fit into an `i64`.
    pub(crate) fn to_bigint_bytes(&self) -> Option<Vec<u8>> {
        match &self.0 {
            Repr::Small(_) => None,
            Repr::Big(big) => Some(big.to_signed_bytes_le()),
        }
    }

    /// Decodes the result of [`Int::to_bigint_bytes`].
    pub(crate) fn from_bigint_bytes(bytes: &[u8]) -> Result<Self> {
        if is_canonical_bigint(bytes) {
            Ok(Self(Repr::Big(Box::new(BigInt::from_signed_bytes_le(bytes)))))
        } else {
            Err(Error::new(ErrorKind::NonCanonicalInt))
        }
    }
}

/// Maximum length of an int outside the `i64` range, in bytes (F-046).
pub(crate) const MAX_BIGINT_BYTES: usize = 4096;

/// Returns whether the bytes are the shortest two's complement of a number outside the `i64` range (F-046).
pub(crate) fn is_canonical_bigint(bytes: &[u8]) -> bool {
    // A number of nine or more bytes is outside the range unless its last byte only repeats the sign bit.
    match bytes {
        [.., below, last] if (9..=MAX_BIGINT_BYTES).contains(&bytes.len()) => {
            !(*last == 0 && below & 0x80 == 0 || *last == 0xFF && below & 0x80 != 0)
        }
        _ => false,
    }
}

/// Returns a number outside the `i64` range, in little-endian two's complement, as the float that is equal to it.
pub(crate) fn bigint_to_float(bytes: &[u8]) -> Option<f64> {
    // The largest float is below 2^1024.
    if bytes.len() > 129 {
        return None;
    }
    let (sign, magnitude) = BigInt::from_signed_bytes_le(bytes).into_parts();
    let exponent = magnitude.trailing_zeros()?;
    if magnitude.bits() > 1024 || magnitude.bits() - exponent > 53 {
        return None;
    }
    let mantissa = u64::try_from(magnitude >> exponent).ok()?;
    #[expect(clippy::cast_precision_loss, reason = "it has at most 53 bits")]
    let float = mantissa as f64 * f64::from_bits((1023 + exponent) << 52);
    Some(if sign == num_bigint::Sign::Minus { -float } else { float })
}

impl From<i64> for Int {
    fn from(small: i64) -> Self {
        Self(Repr::Small(small))
    }
}

impl From<BigInt> for Int {
    fn from(big: BigInt) -> Self {
        Self(i64::try_from(&big).map_or_else(|_| Repr::Big(Box::new(big)), Repr::Small))
    }
}

impl std::str::FromStr for Int {
    type Err = Error;

    fn from_str(decimal: &str) -> Result<Self> {
        if let Ok(small) = decimal.parse::<i64>() {
            return Ok(small.into());
        }
        decimal
            .parse::<BigInt>()
            .map(Self::from)
            .map_err(|error| Error::new(ErrorKind::NonCanonicalInt).with_detail(error))
    }
}

impl fmt::Display for Int {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Repr::Small(small) => small.fmt(f),
            Repr::Big(big) => big.fmt(f),
        }
    }
}

impl fmt::Debug for Int {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A Python `float`. Two floats are equal if all their bits are equal.
///
/// The bits include NaN payloads and the sign of zero.
#[derive(Clone, Copy)]
pub struct Float(f64);

impl Float {
    /// Returns the number.
    pub fn get(self) -> f64 {
        self.0
    }

    /// Returns the IEEE 754 bits.
    pub fn to_bits(self) -> u64 {
        self.0.to_bits()
    }

    /// Creates the number with these IEEE 754 bits.
    pub fn from_bits(bits: u64) -> Self {
        Self(f64::from_bits(bits))
    }
}

impl From<f64> for Float {
    fn from(float: f64) -> Self {
        Self(float)
    }
}

impl PartialEq for Float {
    fn eq(&self, other: &Self) -> bool {
        self.to_bits() == other.to_bits()
    }
}

impl Eq for Float {}

impl PartialOrd for Float {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

/// Orders floats by their bits: a total order, and the order of `by_key` in files.
impl Ord for Float {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.to_bits().cmp(&other.to_bits())
    }
}

impl std::hash::Hash for Float {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.to_bits().hash(state);
    }
}

impl fmt::Display for Float {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

impl fmt::Debug for Float {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}
