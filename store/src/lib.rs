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

mod api;
mod blob;
mod control;
mod credentials;
#[cfg(target_os = "linux")]
mod daemon;
pub mod device;
mod engine;
mod error;
mod io;
mod key;
pub mod ledger;
mod merge;
mod metadata;
#[cfg(target_os = "linux")]
mod net;
pub mod plan;
mod route;
#[cfg(target_os = "linux")]
mod shm;
mod status;
#[cfg(any(test, feature = "shuttle"))]
mod testing;

pub use api::{
    ConnectOptions, Defect, Follower, Opened, Parts, PrefetchReport, Publisher, Store,
    Subscription, blocking, file, scrub,
};
pub use control::VersionInfo;
pub use credentials::Credentials;
#[cfg(target_os = "linux")]
pub use daemon::{Daemon, DaemonOptions, default_memory_limit};
pub use engine::get::{GetOptions, GetReport, Target, TargetMemory};
pub use engine::put::{
    PendingPut, PutOptions, PutPhases, PutReport, Replicas, Residency, Ring, pieces,
};
pub use engine::ring::{ReceiveReport, Receiver};
pub use engine::version::VERSION_ATTRS;
pub use error::{Error, ErrorKind, Result};
pub use io::cow_map::Private;
pub use io::disk::Replacement;
pub use key::{Key, KeyVersion, MAX_KEY_BYTES};
pub use ledger::{Digest, Durability, JobId, Refusal, VersionId, WriterSet};
pub use merge::Divergent;
pub use route::Transport;
pub use status::{DaemonStatus, HostStatus, LeaseStatus, Memory, PeerStatus, UploadStatus};
#[cfg(all(target_os = "linux", feature = "shuttle"))]
pub use testing::schedules;
