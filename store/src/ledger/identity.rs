//! What names a version, a lease, a job, an archive's contents, and a moment.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Text that is not 32 lower-case hexadecimal digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InvalidHexadecimal;

impl fmt::Display for InvalidHexadecimal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("expected 32 lower-case hexadecimal digits")
    }
}

impl std::error::Error for InvalidHexadecimal {}

/// A type over 16 bytes is shown, parsed and serialized as 32 hexadecimal digits, so that it can be
/// a file name, a key of a JSON object and a word in a log.
macro_rules! hexadecimal {
    ($name:ident, |$value:ident| $to_bytes:expr, |$bytes:ident| $from_bytes:expr) => {
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                let $value = self.0;
                $to_bytes.iter().try_for_each(|byte: &u8| write!(f, "{byte:02x}"))
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({})"), self)
            }
        }

        impl FromStr for $name {
            type Err = InvalidHexadecimal;

            fn from_str(text: &str) -> Result<Self, Self::Err> {
                let $bytes = sixteen_bytes(text)?;
                Ok(Self($from_bytes))
            }
        }

        impl TryFrom<String> for $name {
            type Error = InvalidHexadecimal;

            fn try_from(text: String) -> Result<Self, Self::Error> {
                text.parse()
            }
        }

        impl From<$name> for String {
            fn from(value: $name) -> Self {
                value.to_string()
            }
        }
    };
}

/// The identity of a version: random, never reused. Leases, plans, caches and segments name a
/// version by it; its number is only its name.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct VersionId(pub u128);

hexadecimal!(VersionId, |value| bytes_of(value), |bytes| integer_of(bytes));

/// The identity of a lease: random, never reused.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct LeaseId(pub u128);

hexadecimal!(LeaseId, |value| bytes_of(value), |bytes| integer_of(bytes));

/// A process that writes, by which others can tell whether it has ended: random, never reused.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct SessionId(pub u128);

hexadecimal!(SessionId, |value| bytes_of(value), |bytes| integer_of(bytes));

/// What a file contains, in 16 bytes: equal digests are equal contents.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Digest(pub [u8; 16]);

hexadecimal!(Digest, |value| value, |bytes| bytes);

impl Digest {
    /// The first 16 bytes of the BLAKE3 digest of `bytes`.
    pub(crate) fn of(bytes: &[u8]) -> Self {
        let mut short = [0; 16];
        short.copy_from_slice(&blake3::hash(bytes).as_bytes()[..16]);
        Self(short)
    }
}

/// One run of the writers, from start to crash or end: opaque text that differs from run to run.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct JobId(pub String);

impl fmt::Display for JobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A moment, in milliseconds since the Unix epoch. It is given with each command: the ledger has
/// no clock, and a clock that jumps back makes it wait longer and does no other harm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Timestamp(pub u64);

impl Timestamp {
    /// The moment that lies `span` after this one, or the last one that can be told.
    #[must_use]
    pub fn after(self, span: Duration) -> Self {
        let milliseconds = u64::try_from(span.as_millis()).unwrap_or(u64::MAX);
        Self(self.0.saturating_add(milliseconds))
    }
}

fn sixteen_bytes(text: &str) -> Result<[u8; 16], InvalidHexadecimal> {
    let digits: Vec<u8> = text.bytes().map(digit).collect::<Result<_, _>>()?;
    let bytes: Vec<u8> = digits.chunks_exact(2).map(|pair| pair[0] * 16 + pair[1]).collect();
    if digits.len() != 32 {
        return Err(InvalidHexadecimal);
    }
    bytes.try_into().map_err(|_| InvalidHexadecimal)
}

fn digit(character: u8) -> Result<u8, InvalidHexadecimal> {
    match character {
        b'0'..=b'9' => Ok(character - b'0'),
        b'a'..=b'f' => Ok(character - b'a' + 10),
        _ => Err(InvalidHexadecimal),
    }
}

/// The bytes of an integer, most significant first, as people write numbers.
fn bytes_of(integer: u128) -> [u8; 16] {
    let mut bytes = integer.to_le_bytes();
    bytes.reverse();
    bytes
}

fn integer_of(mut bytes: [u8; 16]) -> u128 {
    bytes.reverse();
    u128::from_le_bytes(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_identity_has_one_text() {
        let text = "00112233445566778899aabbccddeeff";
        let id: VersionId = text.parse().unwrap();
        assert_eq!(id, VersionId(0x0011_2233_4455_6677_8899_aabb_ccdd_eeff));
        assert_eq!(id.to_string(), text);
        let digest: Digest = text.parse().unwrap();
        assert_eq!((digest.0[1], digest.to_string()), (0x11, text.to_owned()));
        for wrong in
            ["", "0", "00112233445566778899AABBCCDDEEFF", "+0112233445566778899aabbccddeeff"]
        {
            assert_eq!(wrong.parse::<LeaseId>(), Err(InvalidHexadecimal));
        }
        let error = format!("{text}0").parse::<LeaseId>().unwrap_err();
        assert_eq!(error.to_string(), "expected 32 lower-case hexadecimal digits");
    }

    #[test]
    fn time_does_not_overflow() {
        assert_eq!(Timestamp(1).after(Duration::MAX), Timestamp(u64::MAX));
        assert_eq!(Timestamp(1).after(Duration::from_secs(1)), Timestamp(1001));
    }
}
