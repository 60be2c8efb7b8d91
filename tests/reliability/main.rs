//! What the store promises (`docs/guarantees.md`), under faults: `cargo xtask reliability` runs this.
//!
//! Every test here is a proof that takes long: it ends with figures, and `cargo test` leaves it out.
#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

/// What was acknowledged to whom.
#[cfg(target_os = "linux")]
mod acknowledged;
/// Writers and readers that are processes.
#[cfg(target_os = "linux")]
mod actor;
/// The store does what its model does, wherever it is and whoever dies.
#[cfg(target_os = "linux")]
mod conformance;
/// State dicts that say whose they are.
#[cfg(target_os = "linux")]
mod contents;
/// The folder of a store, from outside.
#[cfg(target_os = "linux")]
mod folder;
/// Hosts are killed and cut off, with etcd and the bucket that they share.
#[cfg(target_os = "linux")]
#[cfg(feature = "etcd")]
mod hosts;
/// Daemons, writers and readers are killed under load; large stores are opened again.
#[cfg(target_os = "linux")]
mod kill;
/// Disks, memory and descriptors that end, files that rot, peers that lie.
#[cfg(target_os = "linux")]
mod limits;
/// What processes see of a key has an order, whatever happens to them.
#[cfg(target_os = "linux")]
mod linear;
/// Every system call fails, or is the last one of its process.
#[cfg(target_os = "linux")]
mod syscalls;
