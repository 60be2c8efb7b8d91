//! How a daemon is: what it holds, who is connected, who reads.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// How a daemon is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct DaemonStatus {
    /// Its process.
    pub pid: u32,
    /// Which program and version it is.
    pub daemon: String,
    /// For how long it has served.
    pub uptime: Duration,
    /// Its memory.
    pub memory: Memory,
    /// Who is connected.
    pub peers: Vec<PeerStatus>,
    /// Who reads.
    pub leases: Vec<LeaseStatus>,
    /// What is on its way to the bucket.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub uploads: Vec<UploadStatus>,
    /// The daemons of its store on all hosts, as far as they are found: those that share its ledgers, itself included,
    /// or the one that decides for it. None if it alone decides.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hosts: Vec<HostStatus>,
    /// Why they cannot be told now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hosts_error: Option<String>,
}

/// A daemon of the same store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct HostStatus {
    /// Where other hosts find it.
    pub address: String,
    /// Whether it is the one that says this.
    pub is_own: bool,
}

/// What the segments of a daemon take, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Memory {
    /// What they may take together.
    pub limit: u64,
    /// What they take.
    pub used: u64,
    /// Of that, what is retired, and mapped by somebody still.
    pub retired: u64,
    /// Of that, what is free and warm.
    pub warm: u64,
    /// Beside that, what segments of GPUs take there.
    #[serde(default)]
    pub devices: u64,
    /// How many segments there are.
    pub segments: u64,
    /// How many segments were lent again, warm, since the start.
    pub recycled: u64,
    /// The bytes of segments that were made since the start: fresh pages.
    pub created_bytes: u64,
    /// The bytes of segments that were retired since the start.
    pub retired_bytes: u64,
}

/// One connection.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PeerStatus {
    /// Its process; 0 for one that has come by TCP, or of a PID namespace that the daemon does not see.
    pub pid: u32,
    /// Where that is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// Which program and version it says it is.
    pub client: String,
    /// For how long it has been there.
    pub age: Duration,
}

/// One writer's contribution on its way to the bucket.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct UploadStatus {
    /// Its key.
    pub key: String,
    /// The number of its version.
    pub version: u64,
    /// Who has put it.
    pub writer: u32,
    /// How many bytes it has.
    pub bytes: u64,
    /// How many of them have gone, in the try that is under way.
    pub sent: u64,
    /// How many tries have failed.
    pub failures: u32,
    /// Why the last one has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// How long ago it was put.
    pub age: Duration,
}

impl fmt::Display for UploadStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { key, version, writer, bytes, sent, failures, error, age } = self;
        let seconds = age.as_secs_f64();
        write!(
            f,
            "`{key}` version {version}, writer {writer}: {sent} of {bytes} bytes after {seconds:.1} s"
        )?;
        match error {
            Some(error) => write!(f, " ({failures} tries have failed: {error})"),
            None => Ok(()),
        }
    }
}

/// One lease.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct LeaseStatus {
    /// The key that is read.
    pub key: String,
    /// The number of the version.
    pub version: u64,
    /// The process that reads: the daemon itself for what it has fetched; 0 for one that has come by TCP, or of a PID
    /// namespace that the daemon does not see.
    pub pid: u32,
    /// Where that is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// For how long it has read.
    pub age: Duration,
}

impl fmt::Display for LeaseStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { key, version, pid, address, age } = self;
        match address {
            None if *pid == 0 => f.write_str("a process of another PID namespace")?,
            None => write!(f, "process {pid}")?,
            Some(address) => f.write_str(address)?,
        }
        write!(f, " (`{key}` version {version}, for {:.1} s)", age.as_secs_f64())
    }
}
