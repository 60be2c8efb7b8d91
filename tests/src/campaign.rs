//! Campaigns of `cargo xtask reliability`: how long they run, and the figures that they print.
#![expect(clippy::print_stdout, reason = "cargo xtask reliability reads them")]

use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// Environment variable: minimum duration of each campaign in seconds.
const SECONDS: &str = "TSSD_RELIABILITY_SECONDS";

/// A campaign that is running.
pub struct Campaign {
    name: &'static str,
    started: Instant,
    min_duration: Duration,
}

impl Campaign {
    /// Begins a campaign. Its name says what it checks.
    ///
    /// # Panics
    ///
    /// If the environment variable is not a number.
    pub fn start(name: &'static str) -> Self {
        let seconds = std::env::var(SECONDS).map_or(0, |seconds| {
            seconds.parse().unwrap_or_else(|_| panic!("{SECONDS}={seconds} is no number"))
        });
        Self { name, started: Instant::now(), min_duration: Duration::from_secs(seconds) }
    }

    /// Returns whether the campaign continues.
    ///
    /// It continues until `done` reaches `wanted`, and at least for its minimum duration.
    pub fn should_continue(&self, done: u64, wanted: u64) -> bool {
        done < wanted || self.started.elapsed() < self.min_duration
    }

    /// Ends the campaign and prints its figures. They are stored in `target/reliability.json`.
    ///
    /// # Panics
    ///
    /// If the figures are not an object.
    pub fn finish(self, mut figures: Value) {
        figures["seconds"] = json!(self.started.elapsed().as_secs_f64().round());
        println!("\nreliability {}", json!({ self.name: figures }));
    }
}
