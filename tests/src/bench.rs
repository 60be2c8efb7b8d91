//! What the benches share: options, state dicts of known shapes, races, and the records of which
//! `cargo xtask bench` makes `docs/performance.md`.
#![expect(clippy::unwrap_used, reason = "a bench fails by panicking")]

mod curve;
mod cut;
mod fsdp;
mod limit;
mod model;
mod options;
pub mod peer;
mod race;
mod record;
mod shapes;
mod versions;

use serde_json::json;

use crate::bench::record::Records;

pub use crate::bench::curve::Curve;
pub use crate::bench::fsdp::Fsdp;
pub use crate::bench::limit::{Memory, cores, faults, on_cores};
pub use crate::bench::model::{Model, adding_up, name_of_expert, normal, targets};
pub use crate::bench::options::Options;
pub use crate::bench::race::{Race, Role, Runner, Target};
pub use crate::bench::shapes::stacked_shapes;

/// One run of a suite: how much of it is wanted, and where the records go.
pub struct Bench {
    /// What the command line says.
    pub options: Options,
    records: Records,
}

/// A case of a suite, by name.
pub type Case = (&'static str, fn(&mut Bench));

impl Bench {
    /// Runs the cases of a suite: those whose names have one of the command line's words in them, or all.
    /// The record of the suite says which versions of the peers it was built with.
    pub fn run(suite: &str, peers: &[&str], cases: &[Case]) {
        let options = Options::from_args(suite);
        let mut bench = Self { options, records: Records::from_env() };
        bench.records.write(&json!({"suite": {
            "name": suite, "versions": versions::of(peers), "options": bench.options.to_json(),
        }}));
        for (name, case) in cases {
            if bench.options.wants(name) {
                case(&mut bench);
            }
        }
    }

    /// Records what was counted, and prints it.
    #[expect(clippy::print_stdout, reason = "a bench prints its result")]
    pub fn count(&mut self, operation: &str, counts: &[(&str, f64)]) {
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
