//! Benches as races: all runners take turns in one process, so that what else the machine does slows
//! all of them alike, and only ratios are reported.

use std::time::Instant;

/// Something that is timed.
pub struct Runner<'a> {
    /// Its name in the table.
    pub name: &'a str,
    /// What it does.
    pub run: Box<dyn FnMut() + 'a>,
    /// What its figure should be.
    pub target: &'a str,
}

impl<'a> Runner<'a> {
    /// A runner.
    pub fn new(name: &'a str, run: impl FnMut() + 'a) -> Self {
        Self { name, run: Box::new(run), target: "" }
    }

    /// The same with what its figure should be, which is printed beside it.
    #[must_use]
    pub fn target(self, target: &'a str) -> Self {
        Self { target, ..self }
    }
}

/// Lets all runners take turns and prints, for each, its median time and the median of its ratios to
/// the first runner in the same round; with the rate, if each moves that many bytes.
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
            let start = Instant::now();
            (runners[at].run)();
            seconds[at].push(start.elapsed().as_secs_f64());
        }
    }
    println!("{title} ({rounds} rounds, interleaved; medians)");
    for (runner, own) in runners.iter().zip(&seconds) {
        let ratios = own.iter().zip(&seconds[0]).map(|(own, first)| own / first).collect();
        let median_seconds = median(own.clone());
        let rate = bytes.map_or_else(String::new, |bytes| {
            #[expect(clippy::cast_precision_loss, reason = "a rate is rounded anyway")]
            let gigabytes = bytes as f64 / 1e9;
            format!("{:>8.2} GB/s", gigabytes / median_seconds)
        });
        let figures = format!(
            "  {:<44} {:>10.3} ms{rate}   x {:.3}   {}",
            runner.name,
            median_seconds * 1e3,
            median(ratios),
            runner.target
        );
        println!("{}", figures.trim_end());
    }
    println!();
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
