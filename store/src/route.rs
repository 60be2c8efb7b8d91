//! The transport of a read or a write, and the reason for its choice.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::error::{Error, ErrorKind, Result};

/// The transport of bytes between a state dict and its store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Transport {
    /// Memory of this process.
    Memory,
    /// Memory that is shared between the processes of this host.
    SharedMemory,
    /// GPU memory that is shared between processes, through CUDA IPC.
    CudaIpc,
    /// Files.
    File,
    /// Unencrypted TCP to a daemon of this host.
    Tcp,
    /// TLS to a daemon of another host.
    Tls,
    /// A bucket of an object store.
    Object,
}

/// The chosen transport, with the reason for the choice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Route {
    pub(crate) transport: Transport,
    pub(crate) reason: String,
}

impl Transport {
    /// All transports with their names.
    const NAMES: [(Self, &str); 7] = [
        (Self::Memory, "memory"),
        (Self::SharedMemory, "shared_memory"),
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
        Self { transport, reason: why.into() }
    }

    /// Checks that the route has the required transport.
    ///
    /// # Errors
    ///
    /// `Refused` if another transport is required.
    pub(crate) fn check_required(&self, required: Option<Transport>) -> Result<()> {
        let Self { transport, reason } = self;
        match required {
            Some(required) if required != *transport => Err(Error::new(
                ErrorKind::Refused,
                format_args!(
                    "{required} is required, and the bytes would go by {transport}: {reason}"
                ),
            )),
            _ => Ok(()),
        }
    }
}
