use std::fmt;

use serde::{Deserialize, Serialize};

/// Whether a version outlives the process that holds it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Durability {
    /// The version is in memory and ends with the process. (A store in a directory keeps it on disk.)
    #[default]
    Memory,
    /// The version is on disk before it is visible. It survives a power cut.
    Disk,
    /// The version is visible as soon as it is in memory. It is uploaded to a bucket, which outlives the host.
    Object,
}

impl fmt::Display for Durability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Memory => "memory",
            Self::Disk => "disk",
            Self::Object => "object",
        })
    }
}
