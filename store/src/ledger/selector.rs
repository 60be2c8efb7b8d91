use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::identity::VersionId;

/// Maximum length of a label, in bytes.
pub const MAX_LABEL_BYTES: usize = 255;

/// A label, which pins a version and names it.
///
/// It has at least 1 and at most [`MAX_LABEL_BYTES`] bytes, no control character, no white space at its ends, and not
/// only digits: it is never mistaken for a version number.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Label(Arc<str>);

impl Label {
    /// Creates a label.
    ///
    /// # Errors
    ///
    /// [`InvalidLabel`] if the text is no label.
    pub fn new(text: &str) -> Result<Self, InvalidLabel> {
        let is_number = text.bytes().all(|byte| byte.is_ascii_digit());
        let is_bare = text.trim() == text && !text.chars().any(char::is_control);
        if is_number || text.len() > MAX_LABEL_BYTES || !is_bare {
            return Err(InvalidLabel);
        }
        Ok(Self(text.into()))
    }

    /// Returns the text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Label {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for Label {
    type Err = InvalidLabel;

    fn from_str(text: &str) -> Result<Self, InvalidLabel> {
        Self::new(text)
    }
}

impl TryFrom<String> for Label {
    type Error = InvalidLabel;

    fn try_from(text: String) -> Result<Self, InvalidLabel> {
        Self::new(&text)
    }
}

impl From<Label> for String {
    fn from(label: Label) -> Self {
        label.as_str().to_owned()
    }
}

/// The error for a text that is no [`Label`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InvalidLabel;

impl fmt::Display for InvalidLabel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "a label has 1 to {MAX_LABEL_BYTES} bytes, no control characters, no white space at its ends, and \
             not only digits"
        )
    }
}

impl std::error::Error for InvalidLabel {}

/// Selects one visible version, or one that a label pins.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Selector {
    /// The newest visible version.
    #[default]
    Newest,
    /// The version with this number. Of several epochs, the newest.
    Number(u64),
    /// The version with this identity.
    Id(VersionId),
    /// The version that this label pins. It may be retired, by a rewind or a deletion.
    Label(Label),
}

impl From<u64> for Selector {
    fn from(number: u64) -> Self {
        Self::Number(number)
    }
}

impl From<Option<u64>> for Selector {
    fn from(number: Option<u64>) -> Self {
        number.map_or(Self::Newest, Self::Number)
    }
}

impl From<Label> for Selector {
    fn from(label: Label) -> Self {
        Self::Label(label)
    }
}

impl fmt::Display for Selector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Newest => f.write_str("the newest"),
            Self::Number(number) => write!(f, "number {number}"),
            Self::Id(id) => write!(f, "{id}"),
            Self::Label(label) => write!(f, "labelled `{label}`"),
        }
    }
}

/// Selects open and visible versions to delete.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Selection {
    /// All versions.
    All,
    /// The versions with this number.
    Number(u64),
    /// The version with this identity.
    Id(VersionId),
    /// The version that this label pins. The label and its data stay.
    Label(Label),
}

impl From<u64> for Selection {
    fn from(number: u64) -> Self {
        Self::Number(number)
    }
}

/// All versions if there is no number.
impl From<Option<u64>> for Selection {
    fn from(number: Option<u64>) -> Self {
        number.map_or(Self::All, Self::Number)
    }
}

impl From<Label> for Selection {
    fn from(label: Label) -> Self {
        Self::Label(label)
    }
}
