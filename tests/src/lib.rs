//! Test support that the suite, the benches and the fuzzers share.
//!
//! It has generators of state dicts, simple oracles, the test vectors, and daemons and servers as
//! processes.

#[cfg(target_os = "linux")]
pub mod bench;
pub mod campaign;
#[cfg(target_os = "linux")]
pub mod certificates;
pub mod checksums;
pub mod command;
pub mod corpus;
#[cfg(all(target_os = "linux", feature = "cuda"))]
pub mod device_context;
pub mod distributed;
#[cfg(target_os = "linux")]
pub mod etcd;
pub mod fuzz;
pub mod generate;
#[cfg(target_os = "linux")]
pub mod host;
#[cfg(target_os = "linux")]
pub mod hostile_connection;
pub mod layout;
#[cfg(target_os = "linux")]
pub mod network;
#[cfg(target_os = "linux")]
pub mod raw_connection;
#[cfg(target_os = "linux")]
pub mod resource_growth;
pub mod rng;
#[cfg(target_os = "linux")]
pub mod s3;
pub mod sharding;
#[cfg(target_os = "linux")]
pub mod test_daemon;
pub mod training_steps;
pub mod vectors;

/// Compiles the examples of the README as doc tests.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
pub struct Readme;
