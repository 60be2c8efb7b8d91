//! Benches as races: all runners take turns in one process, so that what else the machine does slows
//! all of them alike, and only ratios are reported.

use std::fmt;
use std::time::{Duration, Instant};

/// Something that is timed.
pub struct Runner<'a> {
    /// Its name in the table.
    pub name: &'a str,
    /// Does it, and says how long that took.
    pub run: Box<dyn FnMut() -> Duration + 'a>,
    /// What its figure should be.
    pub target: Option<Target>,
}

/// What a figure should be.
#[derive(Clone, Copy)]
pub enum Target {
    /// At least this many times as fast as the first runner: below 1, that part of its speed.
    Speed(f64),
    /// At most this many milliseconds.
    Milliseconds(f64),
    /// At least this many GB/s.
    Rate(f64),
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Speed(speed) => write!(f, "{speed} times the first"),
            Self::Milliseconds(time) => write!(f, "{time} ms"),
            Self::Rate(rate) => write!(f, "{rate} GB/s"),
        }
    }
}

/// Whether a target was reached, in words.
pub fn verdict(is_met: bool) -> &'static str {
    if is_met { "met" } else { "NOT MET" }
}

impl<'a> Runner<'a> {
    /// A runner.
    pub fn new(name: &'a str, mut run: impl FnMut() + 'a) -> Self {
        Self::timed(name, move || {
            let start = Instant::now();
            run();
            start.elapsed()
        })
    }

    /// One that times itself, such as another process.
    pub fn timed(name: &'a str, run: impl FnMut() -> Duration + 'a) -> Self {
        Self { name, run: Box::new(run), target: None }
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
            let span = run();
            after();
            span
        };
        Self { run: Box::new(run), ..self }
    }

    /// The same with what its figure should be, which is printed beside it.
    #[must_use]
    pub fn target(self, target: Target) -> Self {
        Self { target: Some(target), ..self }
    }
}

/// Runs the rows of a bench: those whose names have one of the command's words in them, or all of them.
pub fn rows(rows: &[(&str, fn())]) {
    // Cargo passes options as well.
    let wanted: Vec<String> =
        std::env::args().skip(1).filter(|argument| !argument.starts_with('-')).collect();
    for (name, run) in rows {
        if wanted.is_empty() || wanted.iter().any(|wanted| name.contains(wanted.as_str())) {
            run();
        }
    }
}

/// Lets all runners take turns and prints, for each, its median time and the median of its speeds in
/// terms of that of the first runner in the same round; with the rate, if each moves that many bytes.
#[expect(clippy::print_stdout, reason = "a bench prints its result")]
pub fn race(title: &str, bytes: Option<u64>, rounds: usize, mut runners: Vec<Runner<'_>>) {
    let mut seconds = vec![Vec::with_capacity(rounds); runners.len()];
    for runner in &mut runners {
        (runner.run)();
    }
    for round in 0..rounds {
        for turn in 0..runners.len() {
            // Nobody always comes after the same one.
            let at = (turn + round) % runners.len();
            seconds[at].push((runners[at].run)().as_secs_f64());
        }
    }
    println!("{title} ({rounds} rounds, interleaved; medians)");
    for (runner, own) in runners.iter().zip(&seconds) {
        // How many times as fast as the first one in the same round.
        let speeds = own.iter().zip(&seconds[0]).map(|(own, first)| first / own).collect();
        let (speed, time) = (median(speeds), median(own.clone()));
        #[expect(clippy::cast_precision_loss, reason = "a rate is rounded anyway")]
        let rate = bytes.map(|bytes| bytes as f64 / 1e9 / time);
        let printed = rate.map_or_else(String::new, |rate| format!("{rate:>8.2} GB/s"));
        let target = runner.target.map_or_else(String::new, |target| {
            let is_met = match target {
                Target::Speed(target) => speed >= target,
                Target::Milliseconds(target) => time * 1e3 <= target,
                Target::Rate(target) => rate.is_some_and(|rate| rate >= target),
            };
            format!("   target {target}: {}", verdict(is_met))
        });
        let name = runner.name;
        println!("  {name:<48} {:>10.3} ms{printed}   speed {speed:>6.3}{target}", time * 1e3);
    }
    println!();
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
