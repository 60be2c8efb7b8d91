use std::fmt;

use serde::{Deserialize, Serialize};

use super::identity::VersionId;

/// Selects one visible version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Selector {
    /// The newest.
    Newest,
    /// The version of this number.
    Number(u64),
    /// The version of this identity.
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

/// Selects versions to delete, open or visible.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Selection {
    /// All versions.
    All,
    /// The versions of this number.
    Number(u64),
    /// The version of this identity.
    Id(VersionId),
}
