//! Streams versions to their receivers through a few reused buckets. Spec: `spec/protocol.md`, section 11.
//!
//! A bucket is a version of a key of its own, which receivers follow. It is held until each receiver has read it;
//! bucket `n + buckets` is written to the memory of bucket `n`. An exported tensor is in no bucket: the bucket contains
//! a table that says where the tensor is.

mod bucket;
#[cfg(target_os = "linux")]
mod export;
mod receiver;
mod sender;

use serde::{Deserialize, Serialize};
use tssd_format::AttrValue;

pub use self::receiver::{ReceiveReport, Receiver};
pub(crate) use self::sender::{Sender, put};
use crate::engine::version::RING_ATTR;
use crate::error::Result;
use crate::key::Key;

/// The header of a bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct BucketHeader {
    /// Number of the version that the bucket is a part of.
    version: u64,
    /// Identity of the put, which is random. Other puts may have tried the same version.
    put: u64,
    /// Index of the bucket in the version, from 0 on.
    part: u64,
    /// Whether the bucket is the last one.
    #[serde(default)]
    is_last: bool,
    /// Whether the bucket contains a table of exported tensors in place of tensors.
    #[serde(default)]
    is_exported: bool,
}

impl BucketHeader {
    fn parse(attr: &AttrValue) -> Option<Self> {
        let AttrValue::Text(text) = attr else { return None };
        serde_json::from_slice(text.as_bytes()).ok()
    }

    fn to_attr(self) -> (String, AttrValue) {
        let text = serde_json::to_string(&self).expect("it is JSON");
        (RING_ATTR.to_owned(), AttrValue::Text(text.as_str().into()))
    }
}

/// Returns the key that the writer of a put follows as long as it exports tensors. It has no versions.
fn exporter_key(channel: &Key, put: u64) -> Result<Key> {
    Key::new(format!("{channel}/exporter/{put}"))
}

/// Returns the key of the buckets of a key, for receivers of a GPU or of host memory.
fn channel(key: &Key, device: Option<&str>) -> Result<Key> {
    Key::new(format!("{key}/.ring/{}", device.unwrap_or("host")))
}
