//! The status of a daemon: its memory, connections, leases and uploads.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Maximum number of versions, and of daemons that fetch them, in a status.
pub(crate) const MAX_STATUSES: usize = 256;

/// The status of a daemon.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct DaemonStatus {
    /// Its process id.
    pub pid: u32,
    /// The name and version of its program.
    pub daemon: String,
    /// Time since it started to serve.
    pub uptime: Duration,
    /// Its memory.
    pub memory: MemoryStatus,
    /// Its connections.
    pub peers: Vec<PeerStatus>,
    /// The leases of its readers.
    pub leases: Vec<LeaseStatus>,
    /// The pending uploads to the bucket.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub uploads: Vec<UploadStatus>,
    /// The versions of other daemons of which it has or fetches archives, the last fetch last.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub replicas: Vec<ReplicaStatus>,
    /// The daemons that have fetched archives of it in the last 10 minutes, or fetch them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub fetchers: Vec<FetcherStatus>,
    /// CPU time of the daemon since it started.
    #[serde(default)]
    pub cpu_time: Duration,
    /// Bytes that were put to the daemon, that it sent, and that it fetched, since it started.
    #[serde(default)]
    pub moved_bytes_total: u64,
    /// The known daemons of its store on all hosts.
    ///
    /// These are the daemons that share its ledgers, itself included, or the daemon that is its controller. The list is
    /// empty if the daemon is the only controller.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hosts: Vec<HostStatus>,
    /// The error if `hosts` cannot be determined now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hosts_error: Option<String>,
}

/// The archives of a version that a daemon has fetched or fetches.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ReplicaStatus {
    /// The key of the version.
    pub key: String,
    /// The number of the version.
    pub version: u64,
    /// Size of these archives, in bytes.
    pub bytes: u64,
    /// Bytes of them that the daemon has.
    pub present_bytes: u64,
    /// Bytes that came from each sender: a daemon by its address, or `bucket`.
    pub senders: BTreeMap<String, u64>,
    /// Number of the version from which they came as differences. `None` if they came whole.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<u64>,
    /// Bytes per second: in the last two seconds, or of the whole fetch if it has ended.
    pub bytes_per_second: u64,
    /// Whether a fetch is slower than the daemon expects.
    #[serde(default)]
    pub is_slow: bool,
    /// Time since the fetch began, or the time that it took.
    pub duration: Duration,
}

/// A daemon that has fetched archives of a version from another one, or fetches them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct FetcherStatus {
    /// The key of the version.
    pub key: String,
    /// The number of the version.
    pub version: u64,
    /// The address at which other hosts connect to it.
    pub address: String,
    /// Bytes that it has.
    pub present_bytes: u64,
    /// Whether it has all that it wants.
    pub is_complete: bool,
}

/// The status of a daemon of the same store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct HostStatus {
    /// The address at which other hosts connect to it.
    pub address: String,
    /// Whether it is the daemon that reports this status.
    pub is_self: bool,
}

/// The memory of the segments of a daemon, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct MemoryStatus {
    /// Maximum bytes of all segments.
    pub limit_bytes: u64,
    /// Bytes of all segments.
    pub used_bytes: u64,
    /// Bytes of `used_bytes` in retired segments that a process still maps.
    pub retired_bytes: u64,
    /// Bytes of `used_bytes` that are free and still mapped.
    pub free_bytes: u64,
    /// Bytes of `used_bytes` in deleted archives from which deltas are made. They are evicted first.
    #[serde(default)]
    pub retained_bytes: u64,
    /// Bytes of the differences between earlier versions. They are not part of `used_bytes`.
    #[serde(default)]
    pub delta_bytes: u64,
    /// Bytes of segments in GPU memory. They are not part of `used_bytes`.
    pub device_bytes: u64,
    /// Number of segments.
    pub segments: u64,
    /// Number of segments that were reused while still mapped, since the start.
    pub recycled_total: u64,
    /// Bytes of segments that were created since the start, with new pages.
    pub created_bytes_total: u64,
    /// Bytes of segments that were retired since the start.
    pub retired_bytes_total: u64,
}

/// The status of one connection.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PeerStatus {
    /// Its process id. 0 for a TCP connection, or a process in a PID namespace that the daemon cannot see.
    pub pid: u32,
    /// The address of the process, if it is connected by TCP.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// The name and version of the program, as the client states them.
    pub client: String,
    /// Time since it connected.
    pub age: Duration,
}

/// The status of the upload of one contribution to the bucket.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct UploadStatus {
    /// The key of the contribution.
    pub key: String,
    /// The number of the version.
    pub version: u64,
    /// The writer of the contribution.
    pub writer: u32,
    /// Size of the contribution, in bytes.
    pub bytes: u64,
    /// Bytes that the current attempt has sent.
    pub sent: u64,
    /// Number of failed attempts.
    pub failures: u32,
    /// The error of the last failed attempt.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Time since the put.
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

/// The status of one lease.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct LeaseStatus {
    /// The key of the leased version.
    pub key: String,
    /// The number of the version.
    pub version: u64,
    /// The process id of the reader.
    ///
    /// The daemon itself for data that it has fetched. 0 for a reader that is connected by TCP, or in a PID namespace
    /// that the daemon cannot see.
    pub pid: u32,
    /// The address of the process, if it is connected by TCP.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// Time since the lease was taken.
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
