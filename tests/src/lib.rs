//! Test support that the suite, the benches and the fuzzers share.
//!
//! It has generators of state dicts, simple oracles, the test vectors, and daemons and servers as
//! processes.

#[cfg(target_os = "linux")]
pub mod authority;
#[cfg(target_os = "linux")]
pub mod bench;
#[cfg(all(target_os = "linux", feature = "cuda"))]
pub mod caller;
pub mod command;
pub mod corpus;
pub mod damage;
pub mod dice;
#[cfg(target_os = "linux")]
pub mod etcd;
pub mod fuzz;
pub mod generate;
#[cfg(target_os = "linux")]
pub mod growth;
#[cfg(target_os = "linux")]
pub mod host;
#[cfg(target_os = "linux")]
pub mod hostile;
pub mod layout;
#[cfg(target_os = "linux")]
pub mod network;
pub mod proof;
#[cfg(target_os = "linux")]
pub mod raw;
#[cfg(target_os = "linux")]
pub mod s3;
#[cfg(target_os = "linux")]
pub mod served;
pub mod sharding;
pub mod steps;
pub mod vectors;

/// Compiles the examples of the README as doc tests.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
pub struct Readme;
