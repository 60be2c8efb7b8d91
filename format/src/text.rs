//! Strings as Python has them.

use std::fmt;

use bytes::Bytes;

use crate::error::{Error, ErrorKind, Result};

/// A Python `str`: any sequence of code points, lone surrogates included.
///
/// It is kept as generalized UTF-8, which is UTF-8 except that surrogates are encoded too, three
/// bytes each (Python's `surrogatepass`). Spec: section 4.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Text(Bytes);

impl Text {
    /// Takes generalized UTF-8.
    ///
    /// # Errors
    ///
    /// `NotText` if the bytes are none.
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

    /// Takes generalized UTF-8 that is proven to be such.
    pub(crate) fn from_proven(bytes: Bytes) -> Self {
        debug_assert!(is_text(&bytes));
        Self(bytes)
    }

    /// The generalized UTF-8.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// The generalized UTF-8, if it is too long to lie in the index of an archive.
    pub(crate) fn long_bytes(&self) -> Option<&Bytes> {
        (!crate::record::is_inline(self.0.len())).then_some(&self.0)
    }

    /// The string, unless it holds surrogates.
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

/// Surrogates are written as Python's `repr` does: `\ud800`.
impl fmt::Display for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for part in parts(&self.0) {
            match part {
                Part::Str(text) => f.write_str(text)?,
                Part::Surrogate(code) => write!(f, "\\u{code:04x}")?,
                Part::Bad => f.write_str("\u{fffd}")?,
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

/// True if the bytes are generalized UTF-8.
pub(crate) fn is_text(bytes: &[u8]) -> bool {
    parts(bytes).all(|part| !matches!(part, Part::Bad))
}

enum Part<'a> {
    Str(&'a str),
    Surrogate(u32),
    Bad,
}

/// Cuts bytes into runs of UTF-8 and single surrogates; ends at the first byte that is neither.
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
        Some(Part::Bad)
    })
}
