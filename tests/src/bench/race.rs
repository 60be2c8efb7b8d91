//! Races: all runners take turns in one process.
//!
//! Other load of the machine slows all of them equally, and only ratios are compared.

use std::fmt;
use std::time::{Duration, Instant};

use serde::Serialize;
use serde_json::{Value, json};

use super::record::number;
use super::{Bench, Model};
use crate::bench::hardware_limits::minor_faults;

/// Role of a runner.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// TSSD, which the race is about.
    Ours,
    /// An alternative that a user would choose.
    Peer,
    /// A limit of the hardware or the operating system.
    Limit,
    /// A variant of TSSD, or another comparison.
    Variant,
}

/// Target of a figure.
#[derive(Clone, Copy)]
pub enum Target<'a> {
    /// At least this many times as fast as the named runner. Below 1, a fraction of its speed.
    Speed(f64, &'a str),
    /// At most this many milliseconds.
    Milliseconds(f64),
    /// At least this many GB/s.
    Rate(f64),
}

impl fmt::Display for Target<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Speed(speed, other) => write!(f, "{speed} times {other}"),
            Self::Milliseconds(time) => write!(f, "{time} ms"),
            Self::Rate(rate) => write!(f, "{rate} GB/s"),
        }
    }
}

impl Target<'_> {
    fn to_json(self) -> Value {
        match self {
            Self::Speed(speed, of) => json!({"of": of, "speed": speed}),
            Self::Milliseconds(time) => json!({"milliseconds": time}),
            Self::Rate(rate) => json!({"gigabytes_per_second": rate}),
        }
    }
}

/// Duration of a turn, and its minor page faults.
#[derive(Clone, Copy)]
pub(crate) struct Timing {
    pub(crate) time: Duration,
    pub(crate) faults: Option<u64>,
}

/// Something that is timed.
pub struct Runner<'a> {
    name: &'a str,
    role: Role,
    run: Box<dyn FnMut() -> Timing + 'a>,
    targets: Vec<Target<'a>>,
}

impl<'a> Runner<'a> {
    /// Creates a runner of TSSD.
    pub fn ours(name: &'a str, run: impl FnMut() + 'a) -> Self {
        Self::new(Role::Ours, name, run)
    }

    /// Creates a runner of an alternative that a user would choose.
    pub fn peer(name: &'a str, run: impl FnMut() + 'a) -> Self {
        Self::new(Role::Peer, name, run)
    }

    /// Creates a runner of a limit of the hardware or the operating system.
    pub fn limit(name: &'a str, run: impl FnMut() + 'a) -> Self {
        Self::new(Role::Limit, name, run)
    }

    /// Creates a runner of a variant of TSSD, or of another comparison.
    pub fn variant(name: &'a str, run: impl FnMut() + 'a) -> Self {
        Self::new(Role::Variant, name, run)
    }

    fn new(role: Role, name: &'a str, mut run: impl FnMut() + 'a) -> Self {
        let run = move || {
            let before = minor_faults();
            let start = Instant::now();
            run();
            let time = start.elapsed();
            Timing { time, faults: Some(minor_faults() - before) }
        };
        Self { name, role, run: Box::new(run), targets: Vec::new() }
    }

    /// Creates a runner that measures its own time and returns it in seconds.
    pub fn self_timed(role: Role, name: &'a str, mut run: impl FnMut() -> f64 + 'a) -> Self {
        let run = move || Timing { time: Duration::from_secs_f64(run()), faults: None };
        Self { name, role, run: Box::new(run), targets: Vec::new() }
    }

    /// Adds an action before each run, outside its time.
    #[must_use]
    pub fn with_setup(self, mut before: impl FnMut() + 'a) -> Self {
        let mut run = self.run;
        let run = move || {
            before();
            run()
        };
        Self { run: Box::new(run), ..self }
    }

    /// Adds an action after each run, outside its time.
    #[must_use]
    pub fn with_teardown(self, mut after: impl FnMut() + 'a) -> Self {
        let mut run = self.run;
        let run = move || {
            let turn = run();
            after();
            turn
        };
        Self { run: Box::new(run), ..self }
    }

    /// Adds a target.
    #[must_use]
    pub fn with_target(mut self, target: Target<'a>) -> Self {
        self.targets.push(target);
        self
    }
}

/// Turns of all runners. The turns of a round have the same index.
pub(crate) struct Turns<'a> {
    pub(crate) runners: Vec<Runner<'a>>,
    pub(crate) turns: Vec<Vec<Timing>>,
}

impl<'a> Turns<'a> {
    pub(crate) fn measure(mut runners: Vec<Runner<'a>>, warmup: usize, rounds: usize) -> Self {
        let mut turns = vec![Vec::with_capacity(rounds); runners.len()];
        for _ in 0..warmup {
            for runner in &mut runners {
                (runner.run)();
            }
        }
        for round in 0..rounds {
            for turn in 0..runners.len() {
                // The order rotates, so that no runner always follows the same one.
                let at = (turn + round) % runners.len();
                turns[at].push((runners[at].run)());
            }
        }
        Self { runners, turns }
    }

    /// Returns the seconds of each turn of a runner.
    pub(crate) fn seconds(&self, at: usize) -> Vec<f64> {
        self.turns[at].iter().map(|turn| turn.time.as_secs_f64()).collect()
    }

    pub(crate) fn name(&self, at: usize) -> &str {
        self.runners[at].name
    }

    pub(crate) fn role(&self, at: usize) -> Role {
        self.runners[at].role
    }

    fn faults(&self, at: usize) -> Option<f64> {
        let faults: Option<Vec<u64>> = self.turns[at].iter().map(|turn| turn.faults).collect();
        #[expect(clippy::cast_precision_loss, reason = "there are not that many pages")]
        faults.map(|faults| median(faults.into_iter().map(|count| count as f64).collect()))
    }
}

/// Several runners that do the same work.
pub struct Race<'a> {
    case: &'a str,
    what: &'a str,
    state_dict: Option<&'a str>,
    bytes: Option<u64>,
    tensors: Option<usize>,
    rounds: usize,
    warmup: Option<usize>,
    runners: Vec<Runner<'a>>,
}

impl<'a> Race<'a> {
    /// Creates a race with this number of rounds.
    pub fn new(case: &'a str, what: &'a str, rounds: usize) -> Self {
        Self {
            case,
            what,
            state_dict: None,
            bytes: None,
            tensors: None,
            rounds,
            warmup: None,
            runners: Vec::new(),
        }
    }

    /// Sets the model that all runners process.
    #[must_use]
    pub fn with_model(self, model: &'a Model) -> Self {
        let (name, bytes) = (Some(model.name.as_str()), Some(model.bytes));
        Self { state_dict: name, bytes, tensors: Some(model.tensors), ..self }
    }

    /// Sets the state dict that all runners process, without a number of bytes.
    #[must_use]
    pub fn with_tensors(self, name: &'a str, tensors: usize) -> Self {
        Self { state_dict: Some(name), tensors: Some(tensors), ..self }
    }

    /// Sets the number of bytes that each turn transfers.
    #[must_use]
    pub fn with_bytes(self, bytes: u64) -> Self {
        Self { bytes: Some(bytes), ..self }
    }

    /// Disables warmup, so that the first turn is measured.
    #[must_use]
    pub fn without_warmup(self) -> Self {
        Self { warmup: Some(0), ..self }
    }

    /// Adds a runner. The first one is TSSD.
    #[must_use]
    pub fn with_runner(mut self, runner: Runner<'a>) -> Self {
        self.runners.push(runner);
        self
    }
}

impl Bench {
    /// Runs a race, prints medians, rates and the speed of TSSD relative to each runner, and records it.
    #[expect(clippy::print_stdout, reason = "a bench prints its result")]
    pub fn race(&mut self, race: Race<'_>) {
        let Race { case, what, state_dict, bytes, tensors, rounds, warmup, runners } = race;
        let rounds = self.options.iterations.unwrap_or(rounds);
        let race = Turns::measure(runners, warmup.unwrap_or(self.options.warmup), rounds);
        let of = state_dict.map_or_else(String::new, |name| format!(": {name}"));
        println!("{case}: {what}{of} ({rounds} rounds, interleaved; medians)");
        let ours = race.seconds(0);
        let mut records = Vec::new();
        for (at, runner) in race.runners.iter().enumerate() {
            let own = race.seconds(at);
            let time = median(own.clone());
            let rate = bytes.map(|bytes| gigabytes(bytes) / time);
            let printed = rate.map_or_else(String::new, |rate| format!("{rate:>8.2} GB/s"));
            let faults = race.faults(at);
            let pages = faults.map_or_else(String::new, |count| format!("{count:>8} faults"));
            let name = runner.name;
            let mut line = vec![format!("  {name:<34} {:>10.3} ms{printed}{pages}", time * 1e3)];
            if at > 0 {
                line.push(format!("ours {:.3} times as fast", median_ratio(&own, &ours)));
            }
            for target in &runner.targets {
                let is_met = match *target {
                    Target::Speed(speed, of) => {
                        let other = race.runners.iter().position(|other| other.name == of);
                        median_ratio(&race.seconds(other.unwrap()), &own) >= speed
                    }
                    Target::Milliseconds(target) => time * 1e3 <= target,
                    Target::Rate(target) => rate.is_some_and(|rate| rate >= target),
                };
                line.push(format!("target {target}: {}", if is_met { "met" } else { "NOT MET" }));
            }
            println!("{}", line.join("   "));
            let targets: Vec<Value> =
                runner.targets.iter().map(|target| target.to_json()).collect();
            let mut record = json!({
                "name": name,
                "role": runner.role,
                "seconds": own.into_iter().map(number).collect::<Vec<_>>(),
                "targets": targets,
            });
            if let Some(count) = faults {
                record["counts"] = json!({"minor faults": number(count)});
            }
            records.push(record);
        }
        println!();
        self.records.write(&json!({"race": {
            "case": case, "what": what, "state_dict": state_dict, "bytes": bytes, "tensors": tensors,
            "runners": records,
        }}));
    }
}

/// Returns the median of the ratios within rounds.
fn median_ratio(others: &[f64], ours: &[f64]) -> f64 {
    median(others.iter().zip(ours).map(|(other, ours)| other / ours).collect())
}

#[expect(clippy::cast_precision_loss, reason = "a rate is rounded anyway")]
pub(crate) fn gigabytes(bytes: u64) -> f64 {
    bytes as f64 / 1e9
}

pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
