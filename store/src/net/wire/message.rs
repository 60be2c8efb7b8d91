//! Messages in the heads of frames. Spec: `spec/protocol.md`, sections 3 to 11.
//!
//! Fields that were added after the first version of the protocol have defaults, and unknown fields
//! are ignored. So all versions with the same major number are compatible.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::path::Path;
use std::time::Duration;

use serde::de::IntoDeserializer;
use serde::{Deserialize, Deserializer, Serialize};

use crate::control::{DeviceMemoryRequest, Progress, Proposal, ReadStats, VersionInfo};
use crate::error::{Error, ErrorKind};
use crate::ledger::{
    ArchiveDigest, Label, LeaseId, Refusal, RunId, RunProcess, RunStatus, Selection, Selector,
    VersionId, VersionPosition,
};
use crate::net::wire::Range;
use crate::shm::{DeviceSpan, SegmentId, Span};
use crate::status::DaemonStatus;

/// A version of the protocol. Versions with the same major number are compatible.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ProtocolVersion {
    pub(crate) major: u32,
    pub(crate) minor: u32,
}

impl ProtocolVersion {
    /// The version of this crate.
    pub(crate) const CURRENT: Self = Self { major: 2, minor: 0 };
}

/// The first request of a client.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Hello {
    pub(crate) protocol: ProtocolVersion,
    /// Name and version of the client program, for people.
    #[serde(default)]
    pub(crate) client: String,
}

/// The reply to [`Hello`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Welcome {
    pub(crate) protocol: ProtocolVersion,
    /// Name and version of the daemon program, for people.
    #[serde(default)]
    pub(crate) daemon: String,
    pub(crate) pid: u32,
    /// Identifies this start of the daemon: another start has another number.
    #[serde(default)]
    pub(crate) instance: u64,
    /// Maximum length in bytes of an archive that is sent as data of a frame.
    pub(crate) inline_max_bytes: u64,
    /// Whether the daemon accepts archives in GPU memory.
    #[serde(default)]
    pub(crate) supports_devices: bool,
}

/// A request of a client.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub(crate) enum Request {
    Hello(Hello),
    /// Begins a contribution.
    Begin(Begin),
    /// Adds an archive to a contribution. The data is the previous archive, if its write target was
    /// inline.
    Extend {
        contribution: u64,
        file_len: u64,
        /// The GPU whose memory stores the archive, if the client wants that.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        device: Option<DeviceMemoryRequest>,
    },
    /// Commits a contribution. The data is the last archive, if its write target is inline.
    Commit {
        contribution: u64,
        digest: ArchiveDigest,
        /// Lengths of the archives in bytes, if the client stores them.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        lens: Vec<u64>,
    },
    /// Writes bytes of an archive whose write target is frames. The data is these bytes.
    Write {
        contribution: u64,
        offset: u64,
    },
    /// Waits until a committed contribution is in the bucket. Replies with the version's progress
    /// there.
    AwaitUpload {
        contribution: u64,
        timeout: Duration,
    },
    /// Withdraws a contribution. Fails with the outcome of the version, if that is known.
    Withdraw {
        contribution: u64,
    },
    /// Leases a visible version.
    Locate {
        key: String,
        selector: Selector,
        /// Whether the client can read archives in GPU memory.
        #[serde(default)]
        supports_devices: bool,
    },
    /// Reads ranges of a blob. The data of the reply is their bytes.
    Read {
        blob: String,
        ranges: Vec<Range>,
        /// Whether the daemon verifies the chunks of the ranges and returns the CRC-32 of the data.
        #[serde(default)]
        verify: bool,
        /// Whether the reply has no data, only the CRC-32 of it.
        #[serde(default)]
        without_data: bool,
        /// Whether the daemon reads only what it has, and nothing of other daemons.
        #[serde(default)]
        local_only: bool,
        /// Which encodings of the data the client accepts.
        #[serde(default, skip_serializing_if = "Encodings::is_empty")]
        accept: Encodings,
    },
    /// Begins to copy ranges of a blob of another daemon, which the client will read.
    Fetch {
        blob: String,
        ranges: Vec<Range>,
    },
    /// Says that the client, which is a daemon, fetches a blob or parts of it. Returns the other daemons that do.
    ///
    /// The data is the part that it wants of each piece. Without data, it wants all.
    Announce {
        blob: String,
        /// Where other daemons reach the client.
        address: String,
        /// Whether the client has all that it wants.
        #[serde(default)]
        is_complete: bool,
        /// Bytes that the client has.
        #[serde(default)]
        present_bytes: u64,
        /// CRC-32 of the data of the last reply. If it is the same, the reply has no data.
        #[serde(default)]
        known: u32,
    },
    /// Returns the pieces of a blob of which the daemon has what it wants.
    PresentPieces {
        blob: String,
    },
    /// Deletes blobs that this daemon stores for the controller that sends the request.
    Discard {
        blobs: Vec<String>,
    },
    /// Returns which of these blobs, which the client stores, the daemon does not know.
    FindUnknownBlobs {
        blobs: Vec<String>,
    },
    /// Attaches memory to a GPU segment. Its descriptor comes with the request.
    AttachDeviceMemory {
        segment: SegmentId,
    },
    /// Copies archives of a version to this host: the named ones, or all.
    Prefetch {
        key: String,
        selector: Selector,
        #[serde(default)]
        archives: Option<Vec<String>>,
    },
    /// Returns the visible versions of a key.
    Versions {
        key: String,
    },
    /// Waits until the newest version differs from `seen`, and returns it.
    AwaitNewer {
        key: String,
        #[serde(default)]
        seen: Option<VersionId>,
        /// The position of that version when the client saw it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        seen_position: Option<VersionPosition>,
        timeout: Duration,
    },
    Keys {
        prefix: String,
        /// Only keys after this one.
        #[serde(default)]
        after: Option<String>,
    },
    Delete {
        key: String,
        selection: Selection,
    },
    Retain {
        key: String,
        keep: NonZeroU32,
        #[serde(default)]
        ttl: Option<Duration>,
    },
    Pin {
        key: String,
        selector: Selector,
        label: Label,
    },
    /// Makes a version the newest one, under the next number in a new epoch.
    Rollback {
        key: String,
        selector: Selector,
    },
    Unpin {
        key: String,
        label: String,
    },
    Pins {
        key: String,
    },
    /// Leases every version of a key that becomes visible from now on, until the client releases
    /// it.
    Follow {
        key: String,
    },
    /// Waits for the next version of a follower.
    Next {
        follower: u64,
        /// Whether the client can read archives in GPU memory.
        #[serde(default)]
        supports_devices: bool,
        timeout: Duration,
    },
    /// Waits until the followers of a key hold at most `max_unread` versions. Returns both numbers.
    AwaitUnread {
        key: String,
        max_unread: u64,
        timeout: Duration,
    },
    /// Returns whether a process of a run is connected to this daemon.
    RunStatus {
        run: RunId,
    },
    Status,
}

impl Request {
    /// Returns whether the frame of the request can have data.
    pub(crate) fn accepts_data(&self) -> bool {
        use Request::{Announce, Begin, Commit, Extend, Write};
        matches!(self, Begin(_) | Extend { .. } | Commit { .. } | Write { .. } | Announce { .. })
    }

    /// Returns the name of the request in JSON.
    pub(crate) fn op(&self) -> &'static str {
        match self {
            Self::Hello(_) => "hello",
            Self::Begin(_) => "begin",
            Self::Extend { .. } => "extend",
            Self::Commit { .. } => "commit",
            Self::Write { .. } => "write",
            Self::AwaitUpload { .. } => "await_upload",
            Self::Withdraw { .. } => "withdraw",
            Self::Locate { .. } => "locate",
            Self::Read { .. } => "read",
            Self::Fetch { .. } => "fetch",
            Self::Announce { .. } => "announce",
            Self::PresentPieces { .. } => "present_pieces",
            Self::Discard { .. } => "discard",
            Self::FindUnknownBlobs { .. } => "find_unknown_blobs",
            Self::AttachDeviceMemory { .. } => "attach_device_memory",
            Self::Prefetch { .. } => "prefetch",
            Self::Versions { .. } => "versions",
            Self::AwaitNewer { .. } => "await_newer",
            Self::Keys { .. } => "keys",
            Self::Delete { .. } => "delete",
            Self::Retain { .. } => "retain",
            Self::Pin { .. } => "pin",
            Self::Rollback { .. } => "rollback",
            Self::Unpin { .. } => "unpin",
            Self::Pins { .. } => "pins",
            Self::Follow { .. } => "follow",
            Self::Next { .. } => "next",
            Self::AwaitUnread { .. } => "await_unread",
            Self::RunStatus { .. } => "run_status",
            Self::Status => "status",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Begin {
    pub(crate) key: String,
    pub(crate) proposal: Proposal,
    /// Address of the client, if it is a daemon that stores the archives itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) replica_address: Option<String>,
    /// Digest of the archive, if that is the data of the frame and the only archive. The daemon
    /// then commits it, unless the version has to wait for other writers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) digest: Option<ArchiveDigest>,
}

/// A message without a reply.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub(crate) enum Notice {
    /// A reader has dropped its last view.
    Release { lease: LeaseId },
    /// From the daemon: unmap these segments. From a client: they are unmapped.
    Unmap { segments: Vec<SegmentId> },
    /// Statistics of a read.
    ReadStats(ReadStats),
    /// The client no longer follows a key.
    Unfollow { follower: u64 },
    /// The client no longer waits for the reply to this request.
    Cancel { request: u64 },
    /// From a daemon to its controller: processes of these runs are connected to it.
    RunsConnected { processes: Vec<RunProcess> },
    /// From a daemon to its controller: no process of these runs is connected to it any more.
    RunsDisconnected { runs: Vec<RunId> },
    /// The client disconnects and has nothing mapped.
    Goodbye,
}

/// A reply of a daemon.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Reply {
    Welcome(Welcome),
    Begun(BeginReply),
    /// Write target of the next archive of a contribution.
    WriteTarget(WriteTarget),
    /// Write targets of an archive in GPU memory: one for its host part, one for the rest.
    DeviceWriteTargets {
        write_target: WriteTarget,
        device_segment: SharedSegment,
    },
    Progress(Progress),
    Leased(LeaseReply),
    /// The data is the bytes.
    Read(ReadReply),
    /// The daemons that fetch a blob or parts of it. The data is the tables of what they want.
    BlobFetchers(BlobFetchers),
    /// The data has a bit for each piece. It is empty if the daemon has the whole blob.
    PresentPieces {
        is_complete: bool,
    },
    /// The blobs that the daemon does not know.
    UnknownBlobs(Vec<String>),
    /// The version that was copied.
    Prefetched(PrefetchReply),
    Versions(Vec<VersionInfo>),
    Newest(Option<VersionInfo>),
    Keys(KeyPage),
    Deleted(u64),
    Pinned(u64),
    /// The version that is the newest one.
    RolledBack(VersionInfo),
    Pins(BTreeMap<String, u64>),
    /// Number of the follower on this connection.
    Follower(u64),
    UnreadCounts(UnreadCounts),
    RunStatus(RunStatus),
    Status(DaemonStatus),
    /// More archives of the reply that follows.
    Archives(Archives),
    /// More segments of the reply that follows. Their descriptors come with this frame.
    Segments(Vec<SharedSegment>),
    Done,
    Failed(Failure),
}

/// The daemons that fetch a blob of another one, or parts of it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct BlobFetchers {
    pub(crate) fetchers: Vec<BlobFetcher>,
    /// Number of tables in the data.
    #[serde(default)]
    pub(crate) tables: u32,
    /// CRC-32 of the data. 0 if there are no tables.
    #[serde(default)]
    pub(crate) crc32: u32,
}

/// A daemon that fetches a blob of another one, or parts of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct BlobFetcher {
    pub(crate) address: String,
    /// Whether it has all that it wants.
    #[serde(default)]
    pub(crate) is_complete: bool,
    /// The table of what it wants. None: it wants all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) table: Option<u32>,
}

/// Counts of the followers of a key, and of the versions that they hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct UnreadCounts {
    /// Number of followers.
    pub(crate) followers: u64,
    /// Number of versions that a follower has not read, or not released.
    pub(crate) versions: u64,
}

/// A contribution that has begun.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct BeginReply {
    /// Number of the contribution on this connection.
    pub(crate) contribution: u64,
    pub(crate) id: VersionId,
    pub(crate) epoch: u32,
    pub(crate) number: u64,
    /// Digest that the writer committed earlier. Then there is nothing to write.
    #[serde(default)]
    pub(crate) committed_digest: Option<ArchiveDigest>,
    #[serde(default)]
    pub(crate) write_target: WriteTarget,
    /// GPU segment for the archive, if the client asked for one. The other write target is then
    /// that of the host part.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) device_segment: Option<SharedSegment>,
    /// Common beginning of the archive names, if the client stores the archives.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(crate) stem: String,
    /// Progress of the version, if the archive came with the request and is committed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) progress: Option<Progress>,
}

/// The place to which the client writes an archive.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum WriteTarget {
    /// Memory of the client. The archive is the data of the next `extend` or `commit`.
    #[default]
    Inline,
    /// The client stores the archive itself.
    ClientReplica,
    /// Memory of the daemon. The archive is the data of `write` requests.
    Frames,
    /// A segment. Its descriptor comes with the reply, unless the client already has it.
    Segment { segment: SegmentId, capacity: u64 },
}

/// A version under a lease.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct LeaseReply {
    pub(crate) lease: LeaseId,
    pub(crate) id: VersionId,
    #[serde(default)]
    pub(crate) number: u64,
    #[serde(default)]
    pub(crate) epoch: u32,
    pub(crate) manifest: Location,
    pub(crate) archives: Archives,
    /// The segments whose memory comes with the reply, in the order of the descriptors.
    pub(crate) segments: Vec<SharedSegment>,
}

/// Archives by their names in the manifest.
pub(crate) type Archives = BTreeMap<String, Location>;

/// The place of a blob.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub(crate) enum Location {
    /// In a segment that the client has.
    Span(Span),
    /// In a GPU segment that the client has, except for its host part.
    Device(DeviceSpan),
    /// Not in shared memory. It is read by name from this daemon, or from the daemon at `address`.
    Blob {
        blob: String,
        len: u64,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        address: Option<String>,
    },
}

/// A page of keys, sorted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct KeyPage {
    pub(crate) keys: Vec<String>,
    /// Whether there are more keys after the last one.
    #[serde(default)]
    pub(crate) more: bool,
}

/// A version that was copied to this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PrefetchReply {
    pub(crate) number: u64,
    pub(crate) id: VersionId,
    /// Number of bytes that were received for it.
    pub(crate) bytes: u64,
    /// Size in bytes of the archives that were copied.
    #[serde(default)]
    pub(crate) size: u64,
    /// Number of the version from which they came as differences.
    #[serde(default)]
    pub(crate) base: Option<u64>,
}

/// Encodings of the data of a read.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct Encodings {
    /// A blob that the client has, from which the data may be a difference.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) base: Option<String>,
    /// Whether the data may be in byte planes.
    #[serde(default)]
    pub(crate) planes: bool,
    /// Whether a daemon that lacks `base` sends no data.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) base_only: bool,
}

impl Encodings {
    /// Whether the data must come as it is.
    pub(crate) fn is_empty(&self) -> bool {
        self.base.is_none() && !self.planes
    }
}

/// How the data of a read comes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ReadReply {
    /// CRC-32 of the bytes of the blob, if the daemon has verified the chunks that contain them.
    #[serde(default)]
    pub(crate) crc32: Option<u32>,
    /// Whether the data is encoded.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) is_encoded: bool,
    /// Whether the daemon lacks the base that the client has.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) lacks_base: bool,
}

/// Checksum of the bytes of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ReadChecksum {
    /// CRC-32 of the bytes, if the daemon has verified the chunks that contain them.
    pub(crate) crc32: Option<u32>,
}

/// A segment whose descriptor comes with the message.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SharedSegment {
    pub(crate) segment: SegmentId,
    pub(crate) capacity: u64,
    /// UUID of the GPU, or none for host memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) device_uuid: Option<String>,
}

/// An error as a message.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Failure {
    #[serde(deserialize_with = "kind")]
    pub(crate) kind: ErrorKind,
    /// What failed, and also why if `reason` is empty.
    pub(crate) text: String,
    /// Text of the refusal, for clients that do not know it.
    #[serde(default)]
    pub(crate) reason: String,
    #[serde(default, deserialize_with = "refusal")]
    pub(crate) refusal: Option<Refusal>,
    /// Number of the system error that is the cause, as the daemon's system numbers it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) errno: Option<i32>,
    /// File or folder of that error.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) file: Option<String>,
}

/// Reads a kind. An unknown kind of a later version becomes `Refused`: the text says what to do.
fn kind<'de, D: Deserializer<'de>>(deserializer: D) -> Result<ErrorKind, D::Error> {
    let name = String::deserialize(deserializer)?;
    let parsed: Result<_, serde::de::value::Error> =
        ErrorKind::deserialize(name.into_deserializer());
    Ok(parsed.unwrap_or(ErrorKind::Refused))
}

/// Reads a refusal. An unknown refusal of a later version becomes none: `reason` has its text.
fn refusal<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Refusal>, D::Error> {
    let value = serde_json::Value::deserialize(deserializer)?;
    Ok(serde_json::from_value(value).unwrap_or_default())
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let (kind, errno) = (error.kind(), error.errno());
        let file = error.file().map(|file| file.display().to_string());
        let (text, reason, refusal) = match error.refusal().cloned() {
            Some(refusal) => (error.message().to_owned(), refusal.to_string(), Some(refusal)),
            None => (error.to_string(), String::new(), None),
        };
        Self { kind, text, reason, refusal, errno, file }
    }
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        let Failure { kind, text, reason, refusal, errno, file } = failure;
        match refusal {
            Some(refusal) => Self::new(kind, text).with_source(refusal),
            None if reason.is_empty() => {
                Self::new(kind, text).with_system_error(errno, file.as_deref().map(Path::new))
            }
            None => Self::new(kind, format_args!("{text}: {reason}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error_from_json(text: &str) -> Error {
        match serde_json::from_str(text).unwrap() {
            Reply::Failed(failure) => failure.into(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn error_round_trips() {
        let refused = Error::from_refusal("policy", Refusal::DataDeleted { number: 7 });
        let (kind, text, refusal) =
            (refused.kind(), refused.to_string(), refused.refusal().cloned());
        let sent = serde_json::to_string(&Reply::Failed(refused.into())).unwrap();
        let received = error_from_json(&sent);
        assert_eq!(
            (received.kind(), received.to_string(), received.refusal().cloned()),
            (kind, text, refusal)
        );
        assert!(sent.contains(r#""refusal":{"data_deleted":{"number":7}}"#), "{sent}");
    }

    #[test]
    fn number_and_file_of_a_system_error_round_trip() {
        let full = std::io::Error::from_raw_os_error(28);
        let full = Error::from_format("archive", tssd_format::Error::io(full));
        let sent = full.with_file(Path::new("/data/k/0.tssd"));
        let text = sent.to_string();
        let sent = serde_json::to_string(&Reply::Failed(sent.into())).unwrap();
        let received = error_from_json(&sent);
        assert_eq!(received.to_string(), text);
        assert_eq!(received.errno(), Some(28));
        assert_eq!(received.io_error().unwrap().kind(), std::io::ErrorKind::StorageFull);
        assert_eq!(received.file(), Some(Path::new("/data/k/0.tssd")));
    }

    #[test]
    fn unknown_error_kind_and_refusal_are_accepted() {
        let error = error_from_json(
            r#"{"failed": {"kind": "bewitched", "text": "key `k`", "reason": "it is under a spell",
                "refusal": {"spell": {"by": "a witch"}}, "broom": null}}"#,
        );
        assert_eq!(error.kind(), ErrorKind::Refused);
        assert_eq!(error.to_string(), "key `k`: it is under a spell");
        let error = error_from_json(r#"{"failed": {"kind": "busy", "text": "later"}}"#);
        assert_eq!((error.kind(), error.to_string().as_str()), (ErrorKind::Busy, "later"));
    }

    #[test]
    fn op_is_the_name_in_json() {
        let spec = include_str!("../../../../spec/protocol.md");
        let examples = spec.split("```json request\n").skip(1);
        for example in examples.map(|rest| rest.split("```").next().unwrap()) {
            let request: Request = serde_json::from_str(example).unwrap();
            let json: serde_json::Value = serde_json::from_str(example).unwrap();
            assert_eq!(json["op"], request.op());
        }
    }

    #[test]
    fn optional_fields_have_defaults() {
        let request = |text: &str| serde_json::from_str::<Request>(text).unwrap();
        let hello = request(r#"{"op": "hello", "protocol": {"major": 1, "minor": 9}, "pace": 3}"#);
        assert!(matches!(hello, Request::Hello(Hello { client, .. }) if client.is_empty()));
        let begin = request(
            r#"{"op": "begin", "key": "", "proposal": {"writer": 0, "writers": "0",
                "file_len": 9, "timeout": {"secs": 0, "nanos": 0}}}"#,
        );
        let Request::Begin(Begin { proposal, .. }) = begin else { panic!("{begin:?}") };
        assert!(!proposal.writers_defaulted && !proposal.rewind);
        assert_eq!((proposal.job, proposal.sequence, proposal.number), (None, None, None));
        // A null field is the same as an absent one. An empty string is a value.
        let newer = |seen: &str| {
            let timeout = r#""timeout": {"secs": 1, "nanos": 0}"#;
            request(&format!(r#"{{"op": "await_newer", "key": "k", {seen} {timeout}}}"#))
        };
        assert_eq!(newer(""), newer(r#""seen": null,"#));
        assert!(serde_json::from_str::<Request>(r#"{"op": "keys", "prefix": null}"#).is_err());
        assert!(serde_json::from_str::<Request>(r#"{"op": "keys"}"#).is_err());
        let twice = r#"{"op": "keys", "prefix": "a", "prefix": "b"}"#;
        assert!(serde_json::from_str::<Request>(twice).is_err());
        let reply = |text: &str| serde_json::from_str::<Reply>(text).unwrap();
        let welcome = reply(
            r#"{"welcome": {"protocol": {"major": 1, "minor": 1}, "pid": 1, "inline_max_bytes": 0, "x": {}}}"#,
        );
        assert!(matches!(welcome, Reply::Welcome(welcome) if welcome.protocol.minor == 1));
        let id = "00112233445566778899aabbccddeeff";
        let begun = reply(&format!(
            r#"{{"begun": {{"contribution": 1, "id": "{id}", "epoch": 0, "number": 1}}}}"#
        ));
        assert!(matches!(
            begun,
            Reply::Begun(BeginReply {
                committed_digest: None,
                write_target: WriteTarget::Inline,
                ..
            })
        ));
    }

    /// Returns the examples of one kind in the spec. Checks that each round-trips.
    fn check_examples<T>(kind: &str, split: bool) -> Vec<String>
    where
        T: Serialize + serde::de::DeserializeOwned,
    {
        let spec = include_str!("../../../../spec/protocol.md");
        let fence = format!("```json {kind}\n");
        let blocks = spec.split(&fence).skip(1);
        let blocks = blocks.map(|rest| rest.split("```").next().unwrap());
        let texts: Vec<&str> =
            if split { blocks.flat_map(str::lines).collect() } else { blocks.collect() };
        for text in &texts {
            let example: serde_json::Value = serde_json::from_str(text).unwrap();
            let message: T = serde_json::from_str(text).unwrap_or_else(|e| panic!("{text}: {e}"));
            assert_eq!(serde_json::to_value(message).unwrap(), example, "{text}");
        }
        texts.into_iter().map(str::to_owned).collect()
    }

    /// Returns all names that a message can have, from the error for an unknown one.
    fn message_names<T: serde::de::DeserializeOwned>(unknown: &str) -> Vec<String> {
        let error = serde_json::from_str::<T>(unknown).err().unwrap().to_string();
        let (_, names) = error.split_once("expected one of ").expect(&error);
        names.split('`').skip(1).step_by(2).map(str::to_owned).collect()
    }

    #[test]
    fn spec_examples_round_trip_and_name_every_message() {
        let (by_op, by_name) = (r#"{"op":"?"}"#, r#"{"?":{}}"#);
        let requests = check_examples::<Request>("request", false);
        for name in message_names::<Request>(by_op) {
            let op = format!(r#""op": "{name}""#);
            assert!(requests.iter().any(|text| text.contains(&op)), "request {name}");
        }
        let mut notices = check_examples::<Notice>("notice", false);
        notices.retain(|text| !text.is_empty());
        for name in message_names::<Notice>(by_op) {
            let op = format!(r#""op": "{name}""#);
            assert!(notices.iter().any(|text| text.contains(&op)), "notice {name}");
        }
        let mut replies = check_examples::<Reply>("reply", false);
        replies.extend(check_examples::<Reply>("part", false));
        for name in message_names::<Reply>(by_name) {
            let is_of = |text: &String| {
                text.starts_with(&format!(r#"{{"{name}":"#)) || *text == format!("\"{name}\"\n")
            };
            assert!(replies.iter().any(is_of), "reply {name}");
        }
        let refusals = check_examples::<Refusal>("refusals", true);
        let all =
            [message_names::<Refusal>(by_name), message_names::<crate::ledger::Reason>(by_name)]
                .concat();
        for name in all {
            let is_of = |text: &String| text.contains(&format!("\"{name}\""));
            assert!(refusals.iter().any(is_of), "refusal {name}");
        }
        let spec = include_str!("../../../../spec/protocol.md");
        for name in message_names::<ErrorKind>(r#""?""#) {
            assert!(spec.contains(&format!("\n| `{name}` | ")), "kind {name}");
        }
    }
}
