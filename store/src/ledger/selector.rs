use std::fmt;

use serde::{Deserialize, Serialize};

use super::identity::VersionId;

/// Selects one visible version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Selector {
    /// The newest visible version.
    Newest,
    /// The version with this number.
    Number(u64),
    /// The version with this identity.
    Id(VersionId),
}

impl fmt::Display for Selector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Newest => f.write_str("the newest"),
            Self::Number(number) => write!(f, "number {number}"),
            Self::Id(id) => write!(f, "{id}"),
        }
    }
}

/// Selects open and visible versions to delete.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Selection {
    /// All versions.
    All,
    /// The versions with this number.
    Number(u64),
    /// The version with this identity.
    Id(VersionId),
}
