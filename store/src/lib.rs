//! The TSSD store: keeps, moves and reshards state dicts, in immutable versions.
//!
//! N writers put their shards of a state dict under a key; the version becomes visible in one step
//! when the last of them has committed and all shards are proven to be one state dict. M readers then
//! get it whole or in another sharding, each exactly the bytes that it needs, all of one version.
//!
//! A [`Store`] lives in this process's memory or in a directory that several processes share. What it
//! decides is pure ([`ledger`], the merge of contributions, [`plan`]); files are touched in one
//! module. [`blocking::Store`] is the same for programs without an async runtime.

#![cfg_attr(
    not(target_os = "linux"),
    allow(dead_code, reason = "daemons use it, and there are daemons on Linux alone")
)]

// What is decided.
mod key;
pub mod ledger;
mod merge;
pub mod plan;

// Where things are.
mod address;
#[cfg(target_os = "linux")]
mod arena;
#[cfg(feature = "object")]
mod bucket;
mod credentials;
#[cfg_attr(not(all(target_os = "linux", feature = "cuda")), path = "cuda/absent.rs")]
mod cuda;
mod disk;
mod environment;
mod ledgers;
mod meta;
mod volume;

// Between processes.
#[cfg(target_os = "linux")]
mod daemon;
#[cfg(target_os = "linux")]
mod link;
#[cfg(target_os = "linux")]
mod net;
#[cfg(target_os = "linux")]
mod remote;
#[cfg(target_os = "linux")]
mod socket;
#[cfg(target_os = "linux")]
mod wire;
mod work;

// What is done.
mod controller;
#[cfg(test)]
mod crash;
mod follow;
mod get;
mod opened;
mod parallel;
mod parting;
mod private;
mod publish;
mod put;
mod ring;
mod route;
mod scrub;
mod status;
mod version;

pub mod blocking;
mod error;
pub mod file;
#[cfg(all(target_os = "linux", feature = "shuttle"))]
pub mod schedules;
mod store;
mod sync;

pub use controller::VersionInfo;
pub use credentials::Credentials;
pub use cuda::{Copied, Device, DeviceMemory, Moments, Stream};
#[cfg(target_os = "linux")]
pub use daemon::{Daemon, DaemonOptions, default_memory_limit};
pub use disk::Replacement;
pub use error::{Error, ErrorKind, Result};
pub use follow::Follower;
pub use get::{BlobCopy, BlobMut, Coming, GetOptions, GetReport, Target, TargetMemory, UnderWay};
pub use key::{Key, KeyVersion, MAX_KEY_BYTES};
pub use ledger::{Digest, Durability, JobId, Refusal, VersionId, WriterSet};
pub use merge::Divergent;
pub use opened::Opened;
pub use private::Private;
pub use publish::{Parts, Publisher, pieces};
pub use put::{PendingPut, PutOptions, PutPhases, PutReport, Replicas, Residency};
pub use ring::{ReceiveReport, Receiver, Ring};
pub use route::Transport;
pub use scrub::{Defect, scrub};
pub use status::{DaemonStatus, HostStatus, LeaseStatus, Memory, PeerStatus, UploadStatus};
pub use store::{ConnectOptions, PrefetchReport, Store, Subscription};
pub use version::VERSION_ATTRS;
