//! Identities of versions, leases, sessions and jobs; digests of archives; timestamps.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Error for text that is not 32 lower-case hexadecimal digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InvalidHexadecimal;

impl fmt::Display for InvalidHexadecimal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("expected 32 lower-case hexadecimal digits")
    }
}

impl std::error::Error for InvalidHexadecimal {}

/// Implements formatting, parsing and serialization as 32 lower-case hexadecimal digits for a type of 16 bytes.
///
/// The text works as a file name, as a key of a JSON object and as a word in a log.
macro_rules! impl_hex_id {
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
                let $bytes = parse_hex(text)?;
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

/// The identity of a version: random and never reused.
///
/// Leases, plans, caches and segments refer to a version by its identity. The number is only a name for users.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct VersionId(pub u128);

impl_hex_id!(VersionId, |value| to_big_endian(value), |bytes| from_big_endian(bytes));

/// The identity of a lease: random and never reused.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct LeaseId(pub u128);

impl_hex_id!(LeaseId, |value| to_big_endian(value), |bytes| from_big_endian(bytes));

/// The identity of a session: random and never reused.
///
/// A process that writes has a session, by which other processes detect that it has ended.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct SessionId(pub u128);

impl_hex_id!(SessionId, |value| to_big_endian(value), |bytes| from_big_endian(bytes));

/// A digest of file contents, 16 bytes. Equal digests mean equal contents.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ArchiveDigest(pub [u8; 16]);

impl_hex_id!(ArchiveDigest, |value| value, |bytes| bytes);

impl ArchiveDigest {
    /// Returns the first 16 bytes of the BLAKE3 digest of `bytes`.
    pub(crate) fn compute(bytes: &[u8]) -> Self {
        let mut short = [0; 16];
        short.copy_from_slice(&blake3::hash(bytes).as_bytes()[..16]);
        Self(short)
    }
}

/// The identity of one run of the writers, from start to end or crash: opaque text, different in every run.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct JobId(pub String);

impl fmt::Display for JobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The identity of a run: the job of its writers, or a random text that a process draws once.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RunId(pub String);

impl fmt::Display for RunId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl From<&JobId> for RunId {
    fn from(job: &JobId) -> Self {
        Self(job.0.clone())
    }
}

/// A process of a run that puts.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct RunProcess {
    /// The run.
    pub run: RunId,
    /// The name of its host.
    pub host: String,
    /// Its process id on that host.
    pub pid: u32,
}

impl fmt::Display for RunProcess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { run, host, pid } = self;
        write!(f, "run {run} (process {pid} on host {host})")
    }
}

/// Whether a process of a run is connected to the store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RunStatus {
    /// This process is connected.
    Connected(RunProcess),
    /// All its processes have disconnected.
    Disconnected,
    /// Processes do not connect to this store, so it is not known.
    Unknown,
}

/// A point in time, in milliseconds since the Unix epoch.
///
/// Commands carry it, because the ledger has no clock. If the caller's clock jumps back, timeouts take longer; it has
/// no other effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Timestamp(pub u64);

impl Timestamp {
    /// Returns the time `span` after this one, saturating at the largest timestamp.
    #[must_use]
    pub fn saturating_add(self, span: Duration) -> Self {
        let milliseconds = u64::try_from(span.as_millis()).unwrap_or(u64::MAX);
        Self(self.0.saturating_add(milliseconds))
    }
}

fn parse_hex(text: &str) -> Result<[u8; 16], InvalidHexadecimal> {
    let digits: Vec<u8> = text.bytes().map(hex_digit).collect::<Result<_, _>>()?;
    let bytes: Vec<u8> = digits.chunks_exact(2).map(|pair| pair[0] * 16 + pair[1]).collect();
    if digits.len() != 32 {
        return Err(InvalidHexadecimal);
    }
    bytes.try_into().map_err(|_| InvalidHexadecimal)
}

fn hex_digit(character: u8) -> Result<u8, InvalidHexadecimal> {
    match character {
        b'0'..=b'9' => Ok(character - b'0'),
        b'a'..=b'f' => Ok(character - b'a' + 10),
        _ => Err(InvalidHexadecimal),
    }
}

/// Returns the bytes of an integer in big-endian order, the order of its digits.
fn to_big_endian(integer: u128) -> [u8; 16] {
    let mut bytes = integer.to_le_bytes();
    bytes.reverse();
    bytes
}

fn from_big_endian(mut bytes: [u8; 16]) -> u128 {
    bytes.reverse();
    u128::from_le_bytes(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identity_has_one_text_form() {
        let text = "00112233445566778899aabbccddeeff";
        let id: VersionId = text.parse().unwrap();
        assert_eq!(id, VersionId(0x0011_2233_4455_6677_8899_aabb_ccdd_eeff));
        assert_eq!(id.to_string(), text);
        let digest: ArchiveDigest = text.parse().unwrap();
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
    fn timestamp_addition_saturates() {
        assert_eq!(Timestamp(1).saturating_add(Duration::MAX), Timestamp(u64::MAX));
        assert_eq!(Timestamp(1).saturating_add(Duration::from_secs(1)), Timestamp(1001));
    }
}
