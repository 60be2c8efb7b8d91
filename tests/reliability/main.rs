//! Tests of the guarantees of the store (`docs/guarantees.md`) under faults.
//!
//! Each test is a long campaign that ends with a line of figures. `cargo xtask reliability` runs
//! them, `cargo test` does not.
#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

/// Logs of acknowledged versions.
#[cfg(target_os = "linux")]
mod ack_log;
/// Writer and reader processes.
#[cfg(target_os = "linux")]
mod client_process;
/// Random operations against a store and its model.
#[cfg(target_os = "linux")]
mod conformance;
/// State dicts whose elements identify their key, version and writer.
#[cfg(target_os = "linux")]
mod contents;
/// Killed and disconnected hosts that share etcd and a bucket.
#[cfg(target_os = "linux")]
#[cfg(feature = "etcd")]
mod hosts;
/// Exhausted disks, memory and descriptors, damaged files, malicious peers.
#[cfg(target_os = "linux")]
mod limits;
/// Linearizability of the history of each key under faults.
#[cfg(target_os = "linux")]
mod linearizability;
/// Killed daemons, writers and readers under load; reopening of large stores.
#[cfg(target_os = "linux")]
mod process_kills;
/// Inspection of the directory of a store.
#[cfg(target_os = "linux")]
mod store_dir;
/// Failure or kill at every system call.
#[cfg(target_os = "linux")]
mod syscalls;
