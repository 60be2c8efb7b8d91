//! How bytes travel, and why that way.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::error::{Error, ErrorKind, Result};

/// How bytes travel between a state dict and its store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Transport {
    /// They stay in this process.
    Memory,
    /// Through memory that this host's processes share.
    Arena,
    /// Within the memory of a GPU that processes share, or from it.
    CudaIpc,
    /// To and from files.
    File,
    /// In the open, to and from a daemon of this host.
    Tcp,
    /// Encrypted, to and from a daemon of another host.
    Tls,
    /// To and from a bucket of an object store.
    Object,
}

/// A way, and what it depends on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Route {
    pub(crate) transport: Transport,
    pub(crate) why: String,
}

impl Transport {
    /// All of them, by name.
    const NAMES: [(Self, &str); 7] = [
        (Self::Memory, "memory"),
        (Self::Arena, "arena"),
        (Self::CudaIpc, "cuda_ipc"),
        (Self::File, "file"),
        (Self::Tcp, "tcp"),
        (Self::Tls, "tls"),
        (Self::Object, "object"),
    ];
}

impl fmt::Display for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (_, name) = Self::NAMES.iter().find(|(each, _)| each == self).expect("all have names");
        f.write_str(name)
    }
}

impl FromStr for Transport {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let found = Self::NAMES.iter().find(|(_, name)| *name == text);
        found.map(|(each, _)| *each).ok_or_else(|| {
            let names = Self::NAMES.map(|(_, name)| name).join(", ");
            let text = format_args!("`{text}` is no way that bytes travel: {names}");
            Error::new(ErrorKind::Invalid, text)
        })
    }
}

impl Route {
    pub(crate) fn new(transport: Transport, why: impl Into<String>) -> Self {
        Self { transport, why: why.into() }
    }

    /// # Errors
    ///
    /// `Refused` if another way is required.
    pub(crate) fn admit(&self, required: Option<Transport>) -> Result<()> {
        let Self { transport, why } = self;
        match required {
            Some(required) if required != *transport => Err(Error::new(
                ErrorKind::Refused,
                format_args!(
                    "{required} is required, and the bytes would go by {transport}: {why}"
                ),
            )),
            _ => Ok(()),
        }
    }
}
