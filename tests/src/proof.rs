//! What `cargo xtask reliability` runs: how much of a proof is wanted, and the figures that it ends with.
#![expect(clippy::print_stdout, reason = "cargo xtask reliability reads them")]

use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// Names for how many seconds each proof goes on, if it has enough sooner.
const SECONDS: &str = "TSSD_RELIABILITY_SECONDS";

/// A proof in progress.
pub struct Proof {
    name: &'static str,
    started: Instant,
    lasts: Duration,
}

impl Proof {
    /// Begins one; its name says what is promised.
    ///
    /// # Panics
    ///
    /// If the seconds that are wanted are no number.
    pub fn begin(name: &'static str) -> Self {
        let seconds = std::env::var(SECONDS).map_or(0, |seconds| {
            seconds.parse().unwrap_or_else(|_| panic!("{SECONDS}={seconds} is no number"))
        });
        Self { name, started: Instant::now(), lasts: Duration::from_secs(seconds) }
    }

    /// Whether it goes on: until as much is done as CI wants, and as long as its time is not over.
    pub fn goes_on(&self, done: u64, wanted: u64) -> bool {
        done < wanted || self.started.elapsed() < self.lasts
    }

    /// Ends it: what was counted goes into `target/reliability.json`.
    ///
    /// # Panics
    ///
    /// If the figures are no object.
    pub fn end(self, mut figures: Value) {
        figures["seconds"] = json!(self.started.elapsed().as_secs_f64().round());
        println!("\nreliability {}", json!({ self.name: figures }));
    }
}
