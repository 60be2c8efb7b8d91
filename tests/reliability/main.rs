//! What the store promises (`docs/guarantees.md`), under faults: `cargo xtask reliability` runs this.
//!
//! Every test here is a proof that takes long: it ends with figures, and `cargo test` leaves it out.
#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

/// The store does what its model does, wherever it is and whoever dies.
#[cfg(target_os = "linux")]
mod conformance;
/// State dicts that say whose they are.
#[cfg(target_os = "linux")]
mod contents;
/// The folder of a store, from outside.
#[cfg(target_os = "linux")]
mod folder;
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
