//! All runners take turns in one process, so that what else the machine does slows all of them alike, and
//! only ratios are judged.

use std::fmt;
use std::time::{Duration, Instant};

use serde::Serialize;
use serde_json::{Value, json};

use super::limit::faults;
use super::record::number;
use super::{Bench, Model};

/// What a runner is to ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// The one that the race is about.
    Ours,
    /// What a user would pick instead.
    Peer,
    /// What the machine itself can do.
    Limit,
    /// Ours in another way, or something to compare with that is neither.
    Also,
}

/// What a figure should be.
#[derive(Clone, Copy)]
pub enum Target<'a> {
    /// At least this many times as fast as that runner: below 1, that part of its speed.
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

/// How long a turn took, and how many pages were new to this process in it.
#[derive(Clone, Copy)]
pub(crate) struct Turn {
    pub(crate) time: Duration,
    pub(crate) faults: Option<u64>,
}

/// Something that is timed.
pub struct Runner<'a> {
    name: &'a str,
    role: Role,
    run: Box<dyn FnMut() -> Turn + 'a>,
    targets: Vec<Target<'a>>,
}

impl<'a> Runner<'a> {
    /// Ours.
    pub fn ours(name: &'a str, run: impl FnMut() + 'a) -> Self {
        Self::new(Role::Ours, name, run)
    }

    /// What a user would pick instead.
    pub fn peer(name: &'a str, run: impl FnMut() + 'a) -> Self {
        Self::new(Role::Peer, name, run)
    }

    /// What the machine itself can do.
    pub fn limit(name: &'a str, run: impl FnMut() + 'a) -> Self {
        Self::new(Role::Limit, name, run)
    }

    /// Ours in another way, or something else to compare with.
    pub fn also(name: &'a str, run: impl FnMut() + 'a) -> Self {
        Self::new(Role::Also, name, run)
    }

    fn new(role: Role, name: &'a str, mut run: impl FnMut() + 'a) -> Self {
        let run = move || {
            let before = faults();
            let start = Instant::now();
            run();
            let time = start.elapsed();
            Turn { time, faults: Some(faults() - before) }
        };
        Self { name, role, run: Box::new(run), targets: Vec::new() }
    }

    /// One that takes its own time: what it returns are its seconds.
    pub fn timed(role: Role, name: &'a str, mut run: impl FnMut() -> f64 + 'a) -> Self {
        let run = move || Turn { time: Duration::from_secs_f64(run()), faults: None };
        Self { name, role, run: Box::new(run), targets: Vec::new() }
    }

    /// The same, with something that happens before each run and takes no time.
    #[must_use]
    pub fn before(self, mut before: impl FnMut() + 'a) -> Self {
        let mut run = self.run;
        let run = move || {
            before();
            run()
        };
        Self { run: Box::new(run), ..self }
    }

    /// The same, with something that happens after each run and takes no time.
    #[must_use]
    pub fn after(self, mut after: impl FnMut() + 'a) -> Self {
        let mut run = self.run;
        let run = move || {
            let turn = run();
            after();
            turn
        };
        Self { run: Box::new(run), ..self }
    }

    /// The same with what its figure should be.
    #[must_use]
    pub fn target(mut self, target: Target<'a>) -> Self {
        self.targets.push(target);
        self
    }
}

/// Turns of all runners, those of one round at one place of each list.
pub(crate) struct Turns<'a> {
    pub(crate) runners: Vec<Runner<'a>>,
    pub(crate) turns: Vec<Vec<Turn>>,
}

impl<'a> Turns<'a> {
    pub(crate) fn take(mut runners: Vec<Runner<'a>>, warmup: usize, rounds: usize) -> Self {
        let mut turns = vec![Vec::with_capacity(rounds); runners.len()];
        for _ in 0..warmup {
            for runner in &mut runners {
                (runner.run)();
            }
        }
        for round in 0..rounds {
            for turn in 0..runners.len() {
                // Nobody always comes after the same one.
                let at = (turn + round) % runners.len();
                turns[at].push((runners[at].run)());
            }
        }
        Self { runners, turns }
    }

    /// The seconds of the runner at a place.
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

/// Several runners of which all do the same.
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
    /// A race of so many rounds.
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

    /// What all of them handle.
    #[must_use]
    pub fn of(self, model: &'a Model) -> Self {
        let (name, bytes) = (Some(model.name.as_str()), Some(model.bytes));
        Self { state_dict: name, bytes, tensors: Some(model.tensors), ..self }
    }

    /// What all of them handle, where bytes are not what counts.
    #[must_use]
    pub fn of_tensors(self, name: &'a str, tensors: usize) -> Self {
        Self { state_dict: Some(name), tensors: Some(tensors), ..self }
    }

    /// How many bytes each turn moves.
    #[must_use]
    pub fn bytes(self, bytes: u64) -> Self {
        Self { bytes: Some(bytes), ..self }
    }

    /// That the first turn counts.
    #[must_use]
    pub fn cold(self) -> Self {
        Self { warmup: Some(0), ..self }
    }

    /// With one more runner. Ours is the first.
    #[must_use]
    pub fn with(mut self, runner: Runner<'a>) -> Self {
        self.runners.push(runner);
        self
    }
}

impl Bench {
    /// Lets all runners take turns, prints for each its median time, its rate, and how many times as fast
    /// ours was within rounds, and records it.
    #[expect(clippy::print_stdout, reason = "a bench prints its result")]
    pub fn race(&mut self, race: Race<'_>) {
        let Race { case, what, state_dict, bytes, tensors, rounds, warmup, runners } = race;
        let rounds = self.options.iterations.unwrap_or(rounds);
        let race = Turns::take(runners, warmup.unwrap_or(self.options.warmup), rounds);
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
                line.push(format!("ours {:.3} times as fast", ratio(&own, &ours)));
            }
            for target in &runner.targets {
                let is_met = match *target {
                    Target::Speed(speed, of) => {
                        let other = race.runners.iter().position(|other| other.name == of);
                        ratio(&race.seconds(other.unwrap()), &own) >= speed
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

/// The median of the ratios within rounds.
fn ratio(others: &[f64], ours: &[f64]) -> f64 {
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
