//! What the heads of frames say. Spec: `spec/protocol.md`, section 4.
//!
//! A field that came after the first version of the protocol has a default; fields that are unknown
//! are passed over. So versions of one major number understand each other.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::time::Duration;

use serde::de::IntoDeserializer;
use serde::{Deserialize, Deserializer, Serialize};

use crate::control::{Got, OnDevice, Progress, Proposal, VersionInfo};
use crate::error::{Error, ErrorKind};
use crate::ledger::{Digest, LeaseId, Refusal, Selection, Selector, VersionId};
use crate::net::wire::Range;
use crate::shm::{Hollow, SegmentId, Span};
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
    /// Which program and version it is, for people.
    #[serde(default)]
    pub(crate) daemon: String,
    pub(crate) pid: u32,
    /// Another one after each start.
    #[serde(default)]
    pub(crate) instance: u64,
    /// Archives of at most this many bytes are committed as data of a frame.
    pub(crate) inline: u64,
    /// Whether archives may be in the memory of GPUs.
    #[serde(default)]
    pub(crate) devices: bool,
}

/// What a client asks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub(crate) enum Request {
    Hello(Hello),
    /// Begin a contribution.
    Begin(Begin),
    /// Another archive of a contribution. The one before is the data of the frame if its room was inline.
    Extend {
        contribution: u64,
        file_len: u64,
        /// The GPU whose memory it is to be in, if it is.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        device: Option<OnDevice>,
    },
    /// Commit one; the last archive is the data of the frame if its room is inline.
    Commit {
        contribution: u64,
        digest: Digest,
        /// The lengths of the archives, if the client keeps them.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        lens: Vec<u64>,
    },
    /// Bytes of the archive of a contribution whose room is frames: the data of the frame.
    Write {
        contribution: u64,
        offset: u64,
    },
    /// How far the version has come in the bucket, once the contribution that was committed is there; waits for that.
    Stored {
        contribution: u64,
        patience: Duration,
    },
    /// Take one back, and say why it failed.
    Withdraw {
        contribution: u64,
    },
    /// A visible version, under a lease.
    Locate {
        key: String,
        selector: Selector,
        /// Whether the client knows of memory of GPUs.
        #[serde(default)]
        devices: bool,
    },
    /// Bytes of a blob: the data of the reply.
    Read {
        blob: String,
        ranges: Vec<Range>,
        /// Whether the daemon is to prove the chunks that these are of, and to sum what it sends.
        #[serde(default)]
        prove: bool,
    },
    /// Blobs that this daemon keeps for the one that asks, which nobody needs any more.
    Discard {
        blobs: Vec<String>,
    },
    /// Which of these blobs, that the client keeps, nobody knows of.
    Missing {
        blobs: Vec<String>,
    },
    /// The memory of a segment of a GPU that was lent: it comes with the request.
    Bring {
        segment: SegmentId,
    },
    /// A version, to be copied here: those of its archives that are named, or all.
    Prefetch {
        key: String,
        selector: Selector,
        #[serde(default)]
        archives: Option<Vec<String>>,
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
        /// Only those that come after this one.
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
        label: String,
    },
    Unpin {
        key: String,
        label: String,
    },
    Pins {
        key: String,
    },
    /// Hold every version of a key that becomes visible from now on, until it was asked for and handed back.
    Follow {
        key: String,
    },
    /// The next one of these; waits for it.
    Next {
        follower: u64,
        /// Whether the client knows of memory of GPUs.
        #[serde(default)]
        devices: bool,
        patience: Duration,
    },
    /// How many versions of a key are held for those who follow it; waits until there are not more than so many.
    Unread {
        key: String,
        at_most: u64,
        patience: Duration,
    },
    Status,
}

impl Request {
    /// Whether data may come along.
    pub(crate) fn takes_data(&self) -> bool {
        use Request::{Begin, Commit, Extend, Write};
        matches!(self, Begin(_) | Extend { .. } | Commit { .. } | Write { .. })
    }

    /// What it is called, as in its JSON.
    pub(crate) fn op(&self) -> &'static str {
        match self {
            Self::Hello(_) => "hello",
            Self::Begin(_) => "begin",
            Self::Extend { .. } => "extend",
            Self::Commit { .. } => "commit",
            Self::Write { .. } => "write",
            Self::Stored { .. } => "stored",
            Self::Withdraw { .. } => "withdraw",
            Self::Locate { .. } => "locate",
            Self::Read { .. } => "read",
            Self::Discard { .. } => "discard",
            Self::Missing { .. } => "missing",
            Self::Bring { .. } => "bring",
            Self::Prefetch { .. } => "prefetch",
            Self::Versions { .. } => "versions",
            Self::Newer { .. } => "newer",
            Self::Keys { .. } => "keys",
            Self::Delete { .. } => "delete",
            Self::Retain { .. } => "retain",
            Self::Pin { .. } => "pin",
            Self::Unpin { .. } => "unpin",
            Self::Pins { .. } => "pins",
            Self::Follow { .. } => "follow",
            Self::Next { .. } => "next",
            Self::Unread { .. } => "unread",
            Self::Status => "status",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Begin {
    pub(crate) key: String,
    pub(crate) proposal: Proposal,
    /// The address of the client, if it is a daemon that keeps the archives itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) keeper: Option<String>,
    /// That of the archive, if it is the data of the frame, and the only one: it is committed, unless others are waited
    /// for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) digest: Option<Digest>,
}

/// What is not replied to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub(crate) enum Notice {
    /// A reader has dropped its last view.
    Release { lease: LeaseId },
    /// To a client: unmap these segments. From one: it has.
    Unmap { segments: Vec<SegmentId> },
    /// What a read has come to.
    Got(Got),
    /// A client follows a key no longer.
    Unfollow { follower: u64 },
    /// Nobody waits for the answer of this request any more.
    Cancel { request: u64 },
    /// A client ends, and has nothing mapped any more.
    Goodbye,
}

/// What a daemon answers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Reply {
    Welcome(Welcome),
    Begun(Begun),
    /// Where the next archive of a contribution is written.
    Room(Room),
    /// The same for one that has its shell there, and the rest in the memory of a GPU.
    Rooms {
        room: Room,
        device: SharedSegment,
    },
    Progress(Progress),
    Leased(Leased),
    /// The bytes come as data.
    Read(Sum),
    /// The blobs that nobody knows of.
    Missing(Vec<String>),
    /// The version that was copied.
    Prefetched(Prefetched),
    Versions(Vec<VersionInfo>),
    Newer(Option<VersionInfo>),
    Keys(Keys),
    Deleted(u64),
    Pinned(u64),
    Pins(BTreeMap<String, u64>),
    /// By which number a client follows a key.
    Following(u64),
    Unread(Unread),
    Status(DaemonStatus),
    /// More archives of the reply that follows.
    Archives(Archives),
    /// More descriptors of segments of the reply that follows.
    Segments(Vec<SharedSegment>),
    Done,
    Failed(Failure),
}

/// What is held for those who follow a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Unread {
    /// How many they are.
    pub(crate) followers: u64,
    /// How many versions some of them have not read, or not handed back.
    pub(crate) versions: u64,
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
    /// Where the archive is written that has its shell in the room, if it was to be in the memory of a GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) device: Option<SharedSegment>,
    /// What the names of the archives begin with, if the client keeps them.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(crate) stem: String,
    /// How far the version has come, if the archive came along: then it is committed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) progress: Option<Progress>,
}

/// Where an archive is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Room {
    /// In the client's memory: it is the data of the commit.
    #[default]
    Inline,
    /// Where the client keeps it.
    Kept,
    /// In the daemon's memory: it comes as data of writes.
    Frames,
    /// In a segment, whose memory comes with the reply if the client does not have it yet.
    Segment { segment: SegmentId, capacity: u64 },
}

/// A version under a lease.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Leased {
    pub(crate) lease: LeaseId,
    pub(crate) id: VersionId,
    #[serde(default)]
    pub(crate) number: u64,
    #[serde(default)]
    pub(crate) epoch: u32,
    pub(crate) manifest: Location,
    pub(crate) archives: Archives,
    /// The segments whose memory comes with the reply, in the order of its descriptors.
    pub(crate) segments: Vec<SharedSegment>,
}

/// Archives by the names that the manifest gives them.
pub(crate) type Archives = BTreeMap<String, Location>;

/// Where a blob is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub(crate) enum Location {
    /// In a segment that the client has.
    Span(Span),
    /// In a segment of a GPU that the client has, but for its shell.
    Hollow(Hollow),
    /// Elsewhere: it is read by this name, here or from the daemon that keeps it.
    Blob {
        blob: String,
        len: u64,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        at: Option<String>,
    },
}

/// Keys, sorted, as many as go into one reply.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Keys {
    pub(crate) keys: Vec<String>,
    /// Whether there are more after them.
    #[serde(default)]
    pub(crate) more: bool,
}

/// A version that is here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Prefetched {
    pub(crate) number: u64,
    pub(crate) id: VersionId,
    /// How many bytes came for it.
    pub(crate) bytes: u64,
}

/// What the bytes of a reply add up to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Sum {
    /// Their CRC-32, if the daemon has proven the chunks that they are of.
    #[serde(default)]
    pub(crate) crc32: Option<u32>,
}

/// A segment whose memory comes along.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SharedSegment {
    pub(crate) segment: SegmentId,
    pub(crate) capacity: u64,
    /// The GPU that it is of, by its UUID; none is this host's memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) device: Option<String>,
}

/// Why something failed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Failure {
    #[serde(deserialize_with = "kind")]
    pub(crate) kind: ErrorKind,
    /// What failed, and why if `reason` is empty.
    pub(crate) text: String,
    /// What the refusal says, for those who do not know it.
    #[serde(default)]
    pub(crate) reason: String,
    #[serde(default, deserialize_with = "refusal")]
    pub(crate) refusal: Option<Refusal>,
}

/// A kind that came later is a refusal: what can be done about it is in the words.
fn kind<'de, D: Deserializer<'de>>(deserializer: D) -> Result<ErrorKind, D::Error> {
    let name = String::deserialize(deserializer)?;
    let known: Result<_, serde::de::value::Error> =
        ErrorKind::deserialize(name.into_deserializer());
    Ok(known.unwrap_or(ErrorKind::Refused))
}

/// A refusal that came later is none: its reason says it in words.
fn refusal<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Refusal>, D::Error> {
    let value = serde_json::Value::deserialize(deserializer)?;
    Ok(serde_json::from_value(value).unwrap_or_default())
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let kind = error.kind();
        match error.refusal().cloned() {
            Some(refusal) => {
                let (text, reason) = (error.text().to_owned(), refusal.to_string());
                Self { kind, text, reason, refusal: Some(refusal) }
            }
            None => Self { kind, text: error.to_string(), reason: String::new(), refusal: None },
        }
    }
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        let Failure { kind, text, reason, refusal } = failure;
        match refusal {
            Some(refusal) => Self::new(kind, text).because(refusal),
            None if reason.is_empty() => Self::new(kind, text),
            None => Self::new(kind, format_args!("{text}: {reason}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failed(text: &str) -> Error {
        match serde_json::from_str(text).unwrap() {
            Reply::Failed(failure) => failure.into(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn errors_come_as_they_are_sent() {
        let refused = Error::refused("policy", Refusal::Gone { number: 7 });
        let (kind, words, refusal) =
            (refused.kind(), refused.to_string(), refused.refusal().cloned());
        let sent = serde_json::to_string(&Reply::Failed(refused.into())).unwrap();
        let come = failed(&sent);
        assert_eq!(
            (come.kind(), come.to_string(), come.refusal().cloned()),
            (kind, words, refusal)
        );
        assert!(sent.contains(r#""refusal":{"gone":{"number":7}}"#), "{sent}");
    }

    #[test]
    fn errors_of_a_later_version_are_errors() {
        let error = failed(
            r#"{"failed": {"kind": "bewitched", "text": "key `k`", "reason": "it is under a spell",
                "refusal": {"spell": {"by": "a witch"}}, "broom": null}}"#,
        );
        assert_eq!(error.kind(), ErrorKind::Refused);
        assert_eq!(error.to_string(), "key `k`: it is under a spell");
        let error = failed(r#"{"failed": {"kind": "busy", "text": "later"}}"#);
        assert_eq!((error.kind(), error.to_string().as_str()), (ErrorKind::Busy, "later"));
    }

    #[test]
    fn what_may_be_left_out_has_a_default() {
        let request = |text: &str| serde_json::from_str::<Request>(text).unwrap();
        let hello = request(r#"{"op": "hello", "protocol": {"major": 1, "minor": 9}, "pace": 3}"#);
        assert!(matches!(hello, Request::Hello(Hello { client, .. }) if client.is_empty()));
        let begin = request(
            r#"{"op": "begin", "key": "", "proposal": {"writer": 0, "writers": "0",
                "file_len": 9, "timeout": {"secs": 0, "nanos": 0}}}"#,
        );
        let Request::Begin(Begin { proposal, .. }) = begin else { panic!("{begin:?}") };
        assert!(!proposal.writers_defaulted && !proposal.rewind);
        assert_eq!((proposal.job, proposal.call, proposal.number), (None, None, None));
        // None and nothing are the same, and an empty text is a text.
        let newer = |seen: &str| {
            let patience = r#""patience": {"secs": 1, "nanos": 0}"#;
            request(&format!(r#"{{"op": "newer", "key": "k", {seen} {patience}}}"#))
        };
        assert_eq!(newer(""), newer(r#""seen": null,"#));
        assert!(serde_json::from_str::<Request>(r#"{"op": "keys", "prefix": null}"#).is_err());
        assert!(serde_json::from_str::<Request>(r#"{"op": "keys"}"#).is_err());
        let twice = r#"{"op": "keys", "prefix": "a", "prefix": "b"}"#;
        assert!(serde_json::from_str::<Request>(twice).is_err());
        let reply = |text: &str| serde_json::from_str::<Reply>(text).unwrap();
        let welcome = reply(
            r#"{"welcome": {"protocol": {"major": 1, "minor": 1}, "pid": 1, "inline": 0, "x": {}}}"#,
        );
        assert!(matches!(welcome, Reply::Welcome(welcome) if welcome.protocol.minor == 1));
        let id = "00112233445566778899aabbccddeeff";
        let begun = reply(&format!(
            r#"{{"begun": {{"contribution": 1, "id": "{id}", "epoch": 0, "number": 1}}}}"#
        ));
        assert!(matches!(begun, Reply::Begun(Begun { committed: None, room: Room::Inline, .. })));
    }

    /// The examples of one kind, and that they are written as they were read.
    fn examples<T>(kind: &str, split: bool) -> Vec<String>
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

    /// All names that a message may have, as its reader says them when it meets another one.
    fn names<T: serde::de::DeserializeOwned>(strange: &str) -> Vec<String> {
        let error = serde_json::from_str::<T>(strange).err().unwrap().to_string();
        let (_, names) = error.split_once("expected one of ").expect(&error);
        names.split('`').skip(1).step_by(2).map(str::to_owned).collect()
    }

    #[test]
    fn the_examples_of_the_spec_are_messages() {
        let (by_op, by_name) = (r#"{"op":"?"}"#, r#"{"?":{}}"#);
        let requests = examples::<Request>("request", false);
        for name in names::<Request>(by_op) {
            let op = format!(r#""op": "{name}""#);
            assert!(requests.iter().any(|text| text.contains(&op)), "request {name}");
        }
        let mut notices = examples::<Notice>("notice", false);
        notices.retain(|text| !text.is_empty());
        for name in names::<Notice>(by_op) {
            let op = format!(r#""op": "{name}""#);
            assert!(notices.iter().any(|text| text.contains(&op)), "notice {name}");
        }
        let mut replies = examples::<Reply>("reply", false);
        replies.extend(examples::<Reply>("part", false));
        for name in names::<Reply>(by_name) {
            let is_of = |text: &String| {
                text.starts_with(&format!(r#"{{"{name}":"#)) || *text == format!("\"{name}\"\n")
            };
            assert!(replies.iter().any(is_of), "reply {name}");
        }
        let refusals = examples::<Refusal>("refusals", true);
        let all = [names::<Refusal>(by_name), names::<crate::ledger::Reason>(by_name)].concat();
        for name in all {
            let is_of = |text: &String| text.contains(&format!("\"{name}\""));
            assert!(refusals.iter().any(is_of), "refusal {name}");
        }
        let spec = include_str!("../../../../spec/protocol.md");
        for name in names::<ErrorKind>(r#""?""#) {
            assert!(spec.contains(&format!("\n| `{name}` | ")), "kind {name}");
        }
    }
}
