//! Support for the benches: options, state dicts of known shapes, races, and records.
//!
//! `cargo xtask bench` makes `docs/performance.md` from the records.
#![expect(clippy::unwrap_used, reason = "a bench fails by panicking")]

mod curve;
mod fsdp;
mod hardware_limits;
mod last_result;
mod model;
mod options;
pub mod peer;
mod race;
mod record;
mod shapes;
mod truncate;
mod versions;

use std::collections::BTreeMap;

use serde_json::json;

use crate::bench::record::Records;

pub use crate::bench::curve::Curve;
pub use crate::bench::fsdp::Fsdp;
pub use crate::bench::hardware_limits::{
    CopyBuffers, Echo, core_label, minor_faults, read_in_pieces, read_into, run_on_cores,
};
pub use crate::bench::last_result::LastResult;
pub use crate::bench::model::{Model, expert_name, normal_bf16, sum_words, targets};
pub use crate::bench::options::{Options, exit_with_error};
pub use crate::bench::race::{Race, Role, Runner, Target};
pub use crate::bench::shapes::{shapes_of, stacked_shapes};

/// One run of a suite, with its options and its records.
pub struct Bench {
    /// Options of the command line.
    pub options: Options,
    records: Records,
}

/// A case of a suite, with its name.
pub type Case = (&'static str, fn(&mut Bench));

/// A suite, as it is recorded.
pub struct Suite<'a> {
    name: &'a str,
    model: &'a str,
    size: Option<u64>,
    versions: BTreeMap<String, String>,
}

impl<'a> Suite<'a> {
    /// Creates a suite. Its default model is a small one.
    pub fn new(name: &'a str) -> Self {
        Self { name, model: "shape:qwen3-0.6b", size: None, versions: BTreeMap::new() }
    }

    /// Sets the default model and its maximum size in bytes.
    #[must_use]
    pub fn with_model(self, model: &'a str, size: u64) -> Self {
        Self { model, size: Some(size), ..self }
    }

    /// Records the versions of crates that the suite compares with, from `Cargo.lock`.
    #[must_use]
    pub fn with_crates(self, crates: &[&str]) -> Self {
        Self { versions: versions::locked_versions(crates), ..self }
    }

    /// Records the version of another component.
    #[must_use]
    pub fn with_version(mut self, name: impl Into<String>, version: impl Into<String>) -> Self {
        self.versions.insert(name.into(), version.into());
        self
    }
}

impl Bench {
    /// Runs the cases of a suite that the command line selects by name, or all.
    pub fn run(suite: Suite<'_>, cases: &[Case]) {
        let Suite { name, model, size, versions } = suite;
        let options = Options::from_args(name, model, size);
        let mut bench = Self { options, records: Records::from_env() };
        bench.records.write(&json!({"suite": {
            "name": name, "versions": versions, "options": bench.options.to_json(),
        }}));
        for (name, case) in cases {
            if bench.options.wants(name) {
                case(&mut bench);
            }
        }
    }

    /// Records and prints counts.
    #[expect(clippy::print_stdout, reason = "a bench prints its result")]
    pub fn record_counts(&mut self, operation: &str, counts: &[(&str, f64)]) {
        println!("{operation}");
        for (what, count) in counts {
            println!("  {what:<48} {count:>12}");
        }
        println!();
        let counts: serde_json::Map<String, serde_json::Value> =
            counts.iter().map(|&(what, count)| (what.into(), record::number(count))).collect();
        self.records.write(&json!({"count": {"operation": operation, "counts": counts}}));
    }
}
