//! What the heads of frames say. Spec: `spec/protocol.md`, section 4.
//!
//! A field that came after the first version of the protocol has a default; fields that are unknown
//! are passed over. So versions of one major number understand each other.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::arena::{SegmentId, Span};
use crate::controller::{Progress, Proposal, VersionInfo};
use crate::error::{Error, ErrorKind};
use crate::ledger::{Digest, LeaseId, Refusal, Selection, Selector, VersionId};
use crate::status::DaemonStatus;

/// A version of the protocol: those of one major number understand each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Protocol {
    pub(crate) major: u32,
    pub(crate) minor: u32,
}

impl Protocol {
    /// The one that is spoken here.
    pub(crate) const OWN: Self = Self { major: 1, minor: 0 };
}

/// The first thing that a client says.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Hello {
    pub(crate) protocol: Protocol,
    /// Which program and version it is, for people.
    #[serde(default)]
    pub(crate) client: String,
}

/// What a daemon says to that.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Welcome {
    pub(crate) protocol: Protocol,
    pub(crate) daemon: String,
    pub(crate) pid: u32,
    /// Archives of at most this many bytes are committed as data of a frame.
    pub(crate) inline: u64,
}

/// What a client asks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub(crate) enum Request {
    Hello(Hello),
    /// Begin a contribution.
    Begin(Begin),
    /// Commit one; the archive is the data of the frame if its room is inline.
    Commit {
        contribution: u64,
        digest: Digest,
    },
    /// Take one back, and say why it failed.
    Withdraw {
        contribution: u64,
    },
    /// A visible version, under a lease.
    Locate {
        key: String,
        selector: Selector,
    },
    /// The visible versions of a key.
    Versions {
        key: String,
    },
    /// The newest version, if it is another than the one that was seen; waits for it.
    Newer {
        key: String,
        #[serde(default)]
        seen: Option<VersionId>,
        patience: Duration,
    },
    Keys {
        prefix: String,
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
        label: String,
    },
    Unpin {
        key: String,
        label: String,
    },
    Pins {
        key: String,
    },
    Status,
}

impl Request {
    /// What it is called, as in its JSON.
    pub(crate) fn op(&self) -> &'static str {
        match self {
            Self::Hello(_) => "hello",
            Self::Begin(_) => "begin",
            Self::Commit { .. } => "commit",
            Self::Withdraw { .. } => "withdraw",
            Self::Locate { .. } => "locate",
            Self::Versions { .. } => "versions",
            Self::Newer { .. } => "newer",
            Self::Keys { .. } => "keys",
            Self::Delete { .. } => "delete",
            Self::Retain { .. } => "retain",
            Self::Pin { .. } => "pin",
            Self::Unpin { .. } => "unpin",
            Self::Pins { .. } => "pins",
            Self::Status => "status",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Begin {
    pub(crate) key: String,
    pub(crate) proposal: Proposal,
}

/// What is not replied to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub(crate) enum Notice {
    /// A reader has dropped its last view.
    Release { lease: LeaseId },
    /// To a client: unmap these segments. From one: it has.
    Unmap { segments: Vec<SegmentId> },
    /// A client ends, and has nothing mapped any more.
    Goodbye,
}

/// What a daemon answers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Reply {
    Welcome(Welcome),
    Begun(Begun),
    Progress(Progress),
    Leased(Lease),
    Versions(Vec<VersionInfo>),
    Newer(Option<VersionInfo>),
    Keys(Vec<String>),
    Deleted(u64),
    Pinned(u64),
    Pins(BTreeMap<String, u64>),
    Status(DaemonStatus),
    /// More descriptors of segments of the reply that follows.
    Segments(Vec<SharedSegment>),
    Done,
    Failed(Failure),
}

/// A contribution that has begun.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Begun {
    /// How the client names it from now on.
    pub(crate) contribution: u64,
    pub(crate) id: VersionId,
    pub(crate) epoch: u32,
    pub(crate) number: u64,
    /// What the writer has committed before: then there is no room.
    #[serde(default)]
    pub(crate) committed: Option<Digest>,
    #[serde(default)]
    pub(crate) room: Room,
}

/// Where an archive is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Room {
    /// In the client's memory: it is the data of the commit.
    #[default]
    Inline,
    /// In a segment, whose memory comes with the reply if the client does not have it yet.
    Segment { segment: SegmentId, capacity: u64 },
}

/// A version under a lease.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Lease {
    pub(crate) lease: LeaseId,
    pub(crate) id: VersionId,
    pub(crate) manifest: Span,
    pub(crate) archives: Archives,
    /// The segments whose memory comes with the reply, in the order of its descriptors.
    pub(crate) segments: Vec<SharedSegment>,
}

/// Archives by the names that the manifest gives them.
pub(crate) type Archives = BTreeMap<String, Span>;

/// A segment whose memory comes along.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SharedSegment {
    pub(crate) segment: SegmentId,
    pub(crate) capacity: u64,
}

/// Why something failed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Failure {
    pub(crate) kind: ErrorKind,
    pub(crate) text: String,
    #[serde(default)]
    pub(crate) refusal: Option<Refusal>,
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let refusal = error.refusal().cloned();
        // What a refusal says comes with it.
        let text = if refusal.is_some() { error.text().to_owned() } else { error.to_string() };
        Self { kind: error.kind(), text, refusal }
    }
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        let error = Self::new(failure.kind, failure.text);
        match failure.refusal {
            Some(refusal) => error.because(refusal),
            None => error,
        }
    }
}
