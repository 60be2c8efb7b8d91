//! Access to the system: files, memory maps, threads, time, buckets.

#[cfg(feature = "object")]
pub(crate) mod bucket;
pub(crate) mod cancel;
pub(crate) mod cow_map;
pub(crate) mod deferred_drop;
pub(crate) mod disk;
pub(crate) mod environment;
pub(crate) mod exec;
pub(crate) mod local_archive;
pub(crate) mod parallel;
pub(crate) mod sync;
