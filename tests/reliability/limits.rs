//! Behaviour of a store at its limits.
//!
//! Exhausted disks, memory and descriptors; slow or malicious peers; damaged, lost and foreign
//! files; a clock that jumps.

mod bit_flips;
mod cgroup;
mod client_process;
mod descriptors;
mod fixtures;
mod foreign_files;
mod full_disk;
mod hostile_clients;
mod malicious_peer;
mod temp_mount;
