//! Behaviour of a store at its limits.
//!
//! Exhausted disks, memory and descriptors; slow or malicious peers; damaged, lost and foreign
//! files; a clock that jumps.

mod crowd;
mod descriptors;
mod full;
mod group;
mod holdings;
mod liar;
mod mounted;
mod processes;
mod rot;
mod strangers;
