//! Everything that crosses crates, in one test binary.
#![expect(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    clippy::unwrap_used,
    reason = "tests count small things, and fail by panicking"
)]

/// What others have tried in order to break the store, and must not work again.
mod attacks;
/// The `tssd` command as its users run it.
mod cli;
/// The commands that store archives otherwise, and those that prove that nothing is lost.
mod convert;
/// The daemon: shared memory, lost peers, hostile peers.
#[cfg(target_os = "linux")]
mod daemon;
/// Foreign and damaged bytes: every change is found, nothing panics.
mod damage;
/// Daemons of other hosts: by TCP and TLS, one that decides for others, versions that are fetched.
#[cfg(target_os = "linux")]
mod far;
/// What fuzzing has found, taken by every target again.
mod fuzz;
/// Meshes, placements and boxes against naive index sets.
mod geometry;
/// Daemons that share their ledgers in etcd.
#[cfg(all(target_os = "linux", feature = "etcd"))]
mod hosts;
/// Versions that go on from memory to a bucket, and come back from there.
#[cfg(target_os = "linux")]
mod lasting;
/// The ledger of one key over random commands and crashes.
mod ledger;
/// Daemons that clients start, that end by themselves, that serve a group.
#[cfg(target_os = "linux")]
mod operation;
/// Whole directories of models: what is no tensor is packed too.
mod packed_files;
/// Compression, digests, alignment: whatever a writer chooses.
mod packing;
/// What torch pickles, by the command, where Python is another's.
#[cfg(target_os = "linux")]
mod pickled;
/// The reader with rkyv and the one without: they say the same of every file.
mod readers;
/// The documents: what they name is there, what they say of stores holds.
mod readme;
/// What hosts keep because it was read there.
#[cfg(all(target_os = "linux", feature = "etcd"))]
mod replicas;
/// What N writers put and M readers get, element by element.
mod reshard;
#[cfg(target_os = "linux")]
mod ring;
/// State dicts to bytes and back.
mod roundtrip;
/// Safetensors files and directories of them, in memory and by the command, byte for byte.
mod safetensors;
/// The good vectors in words, as snapshots.
mod shown;
/// The byte tables of the spec, its rules, and the vectors as the reader takes them.
mod spec;
/// Versions, refusals, damage, several processes, crashes.
mod store;
/// The daemon, its writers and its readers as processes: overwritten, killed, stopped, attacked.
#[cfg(target_os = "linux")]
mod torture;
/// The good vectors as the writer writes them.
mod vectors;
