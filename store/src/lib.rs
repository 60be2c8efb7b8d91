//! The TSSD store: keeps, moves and reshards state dicts in immutable versions.
//!
//! N writers put their shards of a state dict under a key. The version becomes visible in one step:
//! when the last writer has committed and the shards are verified to form one state dict. M readers
//! then get the version whole or in another sharding. Each reader gets exactly the bytes that it
//! needs, all from one version.
//!
//! A [`Store`] is in the memory of this process, in a directory or bucket that several processes
//! share, or in a daemon. Its decisions are pure functions: the [`ledger`], the merge of
//! contributions, and the [`plan`]. One module accesses files. [`blocking::Store`] is the same
//! store for programs without an async runtime.

#![cfg_attr(
    not(target_os = "linux"),
    allow(dead_code, reason = "daemons use it, and there are daemons on Linux alone")
)]

mod api;
mod blob;
mod control;
mod convert;
mod credentials;
#[cfg(target_os = "linux")]
mod daemon;
mod delta;
pub mod device;
mod engine;
mod error;
#[cfg(target_os = "linux")]
mod fanout;
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
    ConnectOptions, Defect, Follower, Parts, PrefetchReport, Publisher, SeenVersion, Store,
    Subscription, VersionReader, WaitOptions, blocking, file, is_stored_delta, scrub,
};
pub use control::VersionInfo;
pub use credentials::Credentials;
#[cfg(target_os = "linux")]
pub use daemon::{BucketDeltas, Daemon, DaemonOptions, default_memory_limit};
pub use engine::get::{GetOptions, GetReport, LeafPart, Target, TargetMemory};
pub use engine::put::{
    PendingPut, PutOptions, PutPhases, PutReport, Replicas, Residency, Rewind, Ring, pieces,
};
pub use engine::ring::{ReceiveReport, Receiver};
pub use error::{Error, ErrorKind, Result, errno};
pub use io::cow_map::CowBuffer;
pub use io::disk::{Replacement, ReplacementFolder};
pub use key::{Key, KeyVersion, MAX_KEY_BYTES};
pub use ledger::{
    ArchiveDigest, Durability, JobId, Label, Refusal, RunId, RunProcess, Selection, Selector,
    VersionId, VersionPosition, WriterSet,
};
pub use merge::DivergencePolicy;
#[doc(hidden)]
pub use merge::set_min_distributed_slices;
pub use route::Transport;
pub use status::{
    DaemonStatus, FetcherStatus, HostStatus, LeaseStatus, MemoryStatus, PeerStatus, ReplicaStatus,
    UploadStatus,
};
#[cfg(all(target_os = "linux", feature = "shuttle"))]
pub use testing::schedules;
