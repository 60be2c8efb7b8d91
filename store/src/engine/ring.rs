//! Versions that go to their readers through a few buckets, and stay nowhere. Spec: `spec/protocol.md`, section 11.
//!
//! A bucket is a version of a key of its own, which readers follow: it is held until each has read it, and the next one
//! but `buckets` is written where it was. What is lent is in no bucket: they say where it is.

mod bucket;
#[cfg(target_os = "linux")]
mod export;
mod receiver;
mod sender;

use serde::{Deserialize, Serialize};
use tssd_format::AttrValue;

pub use self::receiver::{ReceiveReport, Receiver};
pub(crate) use self::sender::{Sender, put};
use crate::error::Result;
use crate::key::Key;

/// What a bucket says of itself.
const MARK: &str = "tssd.ring";

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Mark {
    /// The number of the version that it is a part of.
    version: u64,
    /// The put, by a number of its own: others may have tried the same version.
    #[serde(default)]
    put: u64,
    /// The how-manieth part, from 0 on.
    part: u64,
    /// Whether it is the last one.
    #[serde(default)]
    is_last: bool,
    /// Whether it says where its tensors are, in place of having them.
    #[serde(default)]
    is_lent: bool,
}

impl Mark {
    fn of(attr: &AttrValue) -> Option<Self> {
        let AttrValue::Text(text) = attr else { return None };
        serde_json::from_slice(text.as_bytes()).ok()
    }

    fn attr(self) -> (String, AttrValue) {
        let text = serde_json::to_string(&self).expect("it is JSON");
        (MARK.to_owned(), AttrValue::Text(text.as_str().into()))
    }
}

/// The key that the writer of a put follows as long as it lends: nobody puts to it.
fn lender(channel: &Key, put: u64) -> Result<Key> {
    Key::new(format!("{channel}/lender/{put}"))
}

/// Where the buckets of a key are, for readers of a GPU, or of the host's memory.
fn channel(key: &Key, device: Option<&str>) -> Result<Key> {
    Key::new(format!("{key}/.ring/{}", device.unwrap_or("host")))
}
