//! Python strings.

use std::fmt;
use std::ops::RangeInclusive;

use bytes::Bytes;

use crate::error::{Error, ErrorKind, Result};

/// A Python `str`: any sequence of code points, lone surrogates included.
///
/// It is stored as generalized UTF-8: UTF-8 that also encodes surrogates, as three bytes each
/// (Python's `surrogatepass`). Spec: section 4.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Text(Bytes);

impl Text {
    /// Creates a text from generalized UTF-8.
    ///
    /// # Errors
    ///
    /// `NotText` if the bytes are not generalized UTF-8.
    ///
    /// # Examples
    ///
    /// ```
    /// use tssd_format::Text;
    /// let lone = Text::from_generalized_utf8(&b"\xED\xA0\x80"[..])?;
    /// assert_eq!(lone.as_str(), None);
    /// assert_eq!(lone.to_string(), "\\ud800");
    /// # Ok::<(), tssd_format::Error>(())
    /// ```
    pub fn from_generalized_utf8(bytes: impl Into<Bytes>) -> Result<Self> {
        let bytes = bytes.into();
        if is_text(&bytes) { Ok(Self(bytes)) } else { Err(Error::new(ErrorKind::NotText)) }
    }

    /// Creates a text from the bytes of a storage.
    ///
    /// # Errors
    ///
    /// `ContentNotText` (F-096) if the bytes are not generalized UTF-8.
    pub(crate) fn from_storage(bytes: Bytes) -> Result<Self> {
        if is_text(&bytes) { Ok(Self(bytes)) } else { Err(Error::new(ErrorKind::ContentNotText)) }
    }

    /// Creates a text from bytes that have been validated as generalized UTF-8.
    pub(crate) fn from_validated(bytes: Bytes) -> Self {
        debug_assert!(is_text(&bytes));
        Self(bytes)
    }

    /// Returns the generalized UTF-8.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// Returns the generalized UTF-8 if it is too long for the index of an archive.
    pub(crate) fn non_inline_bytes(&self) -> Option<&Bytes> {
        (!crate::record::is_inline(self.0.len())).then_some(&self.0)
    }

    /// Returns the string; `None` if it contains surrogates.
    pub fn as_str(&self) -> Option<&str> {
        std::str::from_utf8(&self.0).ok()
    }
}

impl From<&str> for Text {
    fn from(text: &str) -> Self {
        Self(Bytes::copy_from_slice(text.as_bytes()))
    }
}

impl From<String> for Text {
    fn from(text: String) -> Self {
        Self(text.into_bytes().into())
    }
}

/// Writes surrogates as Python's `repr` does: `\ud800`.
impl fmt::Display for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for part in parts(&self.0) {
            match part {
                Part::Str(text) => f.write_str(text)?,
                Part::Surrogate(code) => write!(f, "\\u{code:04x}")?,
                Part::Invalid => f.write_str("\u{fffd}")?,
            }
        }
        Ok(())
    }
}

impl fmt::Debug for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.to_string(), f)
    }
}

/// Returns true if the bytes are generalized UTF-8.
pub(crate) fn is_text(bytes: &[u8]) -> bool {
    parts(bytes).all(|part| !matches!(part, Part::Invalid))
}

/// Checks the length of a name in bytes (F-034).
pub(crate) fn check_name_len(name: &[u8], lengths: RangeInclusive<usize>) -> Result<()> {
    if lengths.contains(&name.len()) {
        return Ok(());
    }
    let (min, max) = lengths.into_inner();
    Err(Error::new(ErrorKind::NameLength)
        .with_detail(format_args!("{} bytes, not {min} to {max}", name.len())))
}

enum Part<'a> {
    Str(&'a str),
    Surrogate(u32),
    Invalid,
}

/// Splits bytes into UTF-8 strings and single surrogates. Stops at the first invalid byte.
fn parts(mut bytes: &[u8]) -> impl Iterator<Item = Part<'_>> {
    std::iter::from_fn(move || {
        if bytes.is_empty() {
            return None;
        }
        let valid = match std::str::from_utf8(bytes) {
            Ok(text) => {
                bytes = &[];
                return Some(Part::Str(text));
            }
            Err(error) => error.valid_up_to(),
        };
        let (head, tail) = bytes.split_at(valid);
        if let (false, Ok(text)) = (head.is_empty(), std::str::from_utf8(head)) {
            bytes = tail;
            return Some(Part::Str(text));
        }
        if let [0xED, second @ 0xA0..=0xBF, third @ 0x80..=0xBF, rest @ ..] = tail {
            bytes = rest;
            let code = 0xD000 | u32::from(second & 0x3F) << 6 | u32::from(third & 0x3F);
            return Some(Part::Surrogate(code));
        }
        bytes = &[];
        Some(Part::Invalid)
    })
}
