//! Keys: the names of state dicts.

use std::fmt::{self, Write};
use std::str::FromStr;

use crate::error::{Error, ErrorKind, Result};

/// The name of a state dict in a store.
///
/// - It is UTF-8 of at most [`MAX_KEY_BYTES`] (1024) bytes, and may be empty.
/// - It has no control characters, such as NUL.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key(String);

/// Maximum length of a key, in bytes.
pub const MAX_KEY_BYTES: usize = 1024;

/// Length in bytes beyond which the path of a key continues in another folder.
const MAX_FOLDER_BYTES: usize = 200;

impl Key {
    /// Creates a key.
    ///
    /// # Errors
    ///
    /// `Invalid` if the text breaks one of the rules above.
    pub fn new(text: impl Into<String>) -> Result<Self> {
        let text = text.into();
        if text.len() > MAX_KEY_BYTES {
            let len = text.len();
            return Err(Error::new(
                ErrorKind::Invalid,
                format_args!("key of {len} bytes, at most {MAX_KEY_BYTES}"),
            ));
        }
        if let Some(control) = text.chars().find(|each| each.is_control()) {
            return Err(Error::new(
                ErrorKind::Invalid,
                format_args!("key with the control character {control:?}"),
            ));
        }
        Ok(Self(text))
    }

    /// Returns the text of the key.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns the key as a relative path.
    ///
    /// Everything but `a-z0-9_-` and inner dots is percent-encoded. A folder name has about 200 bytes at most; a name
    /// that continues in the next folder ends with `%`.
    ///
    /// The path is the same on every system. Some systems have one folder for `A` and `a`, drop a trailing dot, or open
    /// a device by its name.
    pub(crate) fn to_path(&self) -> String {
        if self.0.is_empty() {
            return "%%".to_owned();
        }
        let mut parts = vec![String::new()];
        for (index, byte) in self.0.bytes().enumerate() {
            if let Some(last) = parts.last_mut().filter(|last| last.len() + 3 > MAX_FOLDER_BYTES) {
                last.push('%');
                parts.push(String::new());
            }
            let last = parts.last_mut().expect("there is one part at least");
            // Folder names that begin with a dot are reserved for the store.
            let is_inner = !last.is_empty() && index + 1 < self.0.len();
            let is_plain = byte.is_ascii_lowercase()
                || byte.is_ascii_digit()
                || matches!(byte, b'_' | b'-')
                || byte == b'.' && is_inner;
            if is_plain {
                last.push(char::from(byte));
            } else {
                write!(last, "%{byte:02X}").expect("writing to a String does not fail");
            }
        }
        for part in parts.iter_mut().filter(|part| is_windows_device(part)) {
            let first = part.remove(0);
            *part = format!("%{:02X}{part}", u32::from(first));
        }
        parts.join("/")
    }

    /// Returns the key of a path: the inverse of [`Key::to_path`]. Returns `None` if no key has this path.
    pub(crate) fn from_path(path: &str) -> Option<Self> {
        if path == "%%" {
            return Some(Self(String::new()));
        }
        let joined = path.replace("%/", "");
        let mut bytes = Vec::with_capacity(joined.len());
        let mut rest = joined.as_bytes();
        while let [first, tail @ ..] = rest {
            rest = tail;
            if *first == b'%' {
                let (digits, tail) = rest.split_at_checked(2)?;
                bytes.push(u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?);
                rest = tail;
            } else {
                bytes.push(*first);
            }
        }
        let key = Self::new(String::from_utf8(bytes).ok()?).ok()?;
        (key.to_path() == path).then_some(key)
    }
}

/// Whether Windows has a device of this name. Windows ignores what follows the first dot.
fn is_windows_device(name: &str) -> bool {
    let name = name.split('.').next().unwrap_or_default();
    let is_numbered = |name: &str| {
        let number = name.strip_prefix("com").or_else(|| name.strip_prefix("lpt"));
        number.is_some_and(|number| matches!(number.as_bytes(), [b'0'..=b'9']))
    };
    matches!(name, "con" | "prn" | "aux" | "nul") || is_numbered(name)
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for Key {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Self::new(text)
    }
}

/// A key, and optionally one version of it: `KEY` or `KEY@VERSION`.
///
/// # Examples
///
/// ```
/// use tssd_store::KeyVersion;
/// let parsed: KeyVersion = "policy@home@17".parse()?;
/// assert_eq!((parsed.key.as_str(), parsed.version), ("policy@home", Some(17)));
/// let parsed: KeyVersion = "policy@home".parse()?;
/// assert_eq!((parsed.key.as_str(), parsed.version), ("policy@home", None));
/// # Ok::<(), tssd_store::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyVersion {
    /// The key.
    pub key: Key,
    /// The number of the version; `None` selects the newest version.
    pub version: Option<u64>,
}

impl FromStr for KeyVersion {
    type Err = Error;

    /// Splits at the last `@` if only digits follow it.
    fn from_str(text: &str) -> Result<Self> {
        let split = text.rsplit_once('@').filter(|(_, digits)| {
            !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit())
        });
        let Some((key, digits)) = split else {
            return Ok(Self { key: Key::new(text)?, version: None });
        };
        let version = digits.parse().map_err(|_| {
            Error::new(ErrorKind::Invalid, format_args!("version {digits} is too large"))
        })?;
        Ok(Self { key: Key::new(key)?, version: Some(version) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_round_trip_through_paths() {
        let long = "é/".repeat(300);
        let dots = [198, 199, 200, 201].map(|len| "a".repeat(len) + "..");
        let device = "con.".repeat(250);
        let texts = [
            "",
            "a",
            "a.b",
            ".",
            "..",
            "../../etc",
            "a/b c",
            "%",
            "策略",
            "CON",
            "nul.txt",
            &device,
            &long,
        ];
        for text in texts.into_iter().chain(dots.iter().map(String::as_str)) {
            let key = Key::new(text).unwrap();
            let path = key.to_path();
            let is_portable = |part: &str| {
                part.len() <= 205
                    && !part.starts_with('.')
                    && !part.ends_with('.')
                    && !is_windows_device(part)
            };
            assert!(path.split('/').all(is_portable), "{path}");
            assert_eq!(Key::from_path(&path), Some(key), "{path}");
        }
        assert_eq!(Key::from_path("a%2"), None);
        assert_eq!(Key::from_path("%61"), None, "a key has one path");
        assert!(Key::new("a\0").is_err());
        assert!(Key::new("a\n").is_err());
        assert!(Key::new("x".repeat(1025)).is_err());
    }

    #[test]
    fn keys_map_to_expected_folders() {
        let long = "a".repeat(193);
        let cases = [
            ("", "%%".to_owned()),
            ("policy", "policy".to_owned()),
            ("Qwen3/step 7.", "%51wen3%2Fstep%207%2E".to_owned()),
            ("..", "%2E%2E".to_owned()),
            ("aux.head", "%61ux.head".to_owned()),
            ("com1", "%63om1".to_owned()),
            ("com10", "com10".to_owned()),
            (&"b".repeat(200), format!("{}%/bb", "b".repeat(198))),
            // The key is divided first. Encoding a device name then makes it two bytes longer.
            (&format!("con.{long}bc"), format!("%63on.{long}b%/c")),
            (&format!("{}con.d", "b".repeat(198)), format!("{}%/%63on.d", "b".repeat(198))),
        ];
        for (key, folder) in cases {
            assert_eq!(Key::new(key).unwrap().to_path(), folder);
        }
    }

    /// File names on macOS and Windows do not depend on case.
    #[test]
    fn keys_that_differ_in_case_have_different_folders() {
        let folder = |text: &str| Key::new(text).unwrap().to_path();
        assert_eq!(folder("Qwen3-0.6B"), "%51wen3-0.6%42");
        assert_ne!(folder("Policy").to_lowercase(), folder("policy").to_lowercase());
        // Windows takes the first name for `a` and the others for devices.
        assert_eq!([folder("a."), folder("con"), folder("lpt1.x")], ["a%2E", "%63on", "%6Cpt1.x"]);
        assert_eq!([folder("cone"), folder("com"), folder("com10")], ["cone", "com", "com10"]);
    }
}
