//! Tests that span several crates, in one test binary.
#![expect(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    clippy::unwrap_used,
    reason = "tests count small things, and fail by panicking"
)]

/// Versions that are uploaded to a bucket as deltas.
#[cfg(target_os = "linux")]
mod bucket_deltas;
/// Replication of versions from memory to a bucket, and their restore.
#[cfg(target_os = "linux")]
mod bucket_replication;
/// The `tssd` command: files, stdout, stderr and exit codes.
mod cli;
/// `convert`, `roundtrip`, deep verification, hex dumps, and digests.
mod convert;
/// `tssd convert` of files pickled by torch, with Python as a separate process.
#[cfg(target_os = "linux")]
mod convert_pickle;
/// The daemon: shared and recycled memory, lost peers, hostile peers.
#[cfg(target_os = "linux")]
mod daemon;
/// Lifecycle of daemons: started by clients, ended when idle, shared by a group.
#[cfg(target_os = "linux")]
mod daemon_lifecycle;
/// Damaged and foreign files: verification detects every change, and no reader panics.
mod damage;
/// Versions that go to other hosts as differences.
#[cfg(target_os = "linux")]
mod delta_transfers;
/// Deltas between versions: made, applied and folded.
mod deltas;
/// The documents: names and links resolve, and statements about stores hold.
mod distributed;
mod documents;
/// Edge cases found by adversarial testing of the store.
mod edge_cases;
/// Daemons of several hosts that share their ledgers in etcd.
#[cfg(all(target_os = "linux", feature = "etcd"))]
mod etcd_hosts;
/// Faults of hosts that fetch a version from each other.
#[cfg(target_os = "linux")]
mod fanout_faults;
/// The fuzz corpora: every fuzz target runs all of its inputs.
mod fuzz_corpora;
/// Regions, meshes and placements, compared with naive oracles.
mod geometry;
/// Snapshots of the hex dumps of the valid vectors.
mod inspect_snapshots;
/// The ledger of one key under random commands and crashes.
mod ledger;
/// Directories of models, whose files other than tensors are packed too.
mod model_directory;
/// The commands on files, each with every input that `pack` takes.
mod model_inputs;
/// Imports between the modules of each crate.
mod modules;
/// A daemon, writers and readers as processes under load: killed, stopped, attacked.
#[cfg(target_os = "linux")]
mod process_faults;
/// The readers with and without rkyv return equal results for every file.
mod reader_agreement;
/// Daemons of other hosts: ranged reads over TCP, TLS authentication, and proxy daemons.
#[cfg(target_os = "linux")]
mod remote_daemons;
/// Replicas on hosts that have read a version.
#[cfg(all(target_os = "linux", feature = "etcd"))]
mod replicas;
/// Resharding from N writers to M readers, compared element by element.
mod reshard;
#[cfg(target_os = "linux")]
mod ring;
/// Rollbacks, and labels that select versions.
mod rollback;
/// Round trips of state dicts through bytes.
mod roundtrip;
/// Several runs of the same program: which versions a later run replaces.
#[cfg(target_os = "linux")]
mod runs;
/// Round trips of safetensors files and directories, in memory and through the command.
mod safetensors;
/// The spec against the code: byte tables, rules, dtypes, vectors.
mod spec;
/// Versions, refusals, damage, several processes, crashes.
mod store;
/// The writer reproduces the valid vectors byte for byte.
mod vectors;
/// Compression, digests and alignment, under all options of a writer.
mod write_options;
