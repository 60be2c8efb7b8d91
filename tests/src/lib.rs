//! What the suite and the benches share: generators of state dicts, and naive oracles.

pub mod generate;
pub mod race;
pub mod sharding;

/// The example of the README is a test.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
pub struct Readme;
