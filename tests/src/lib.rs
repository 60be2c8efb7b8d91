//! What the suite and the benches share: generators of state dicts, and naive oracles.

pub mod generate;
pub mod race;
pub mod sharding;
