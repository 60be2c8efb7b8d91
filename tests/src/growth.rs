//! Whether a process grows: what it has of the system, looked at again and again.
#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

use std::fs;
use std::path::Path;
use std::time::Instant;

use serde_json::{Value, json};

/// What is looked at, and how much more of it a process may have late in its life than before, by chance.
/// Memory comes in slabs of 4 MiB, each of which one small version keeps as long as a label holds that.
const MEASURES: [(&str, f64); 4] =
    [("MiB", 64.0), ("descriptors", 48.0), ("threads", 24.0), ("maps", 96.0)];

/// Samples of lives, each of one process or of one that takes the place of another.
#[derive(Default)]
pub struct Growth(Vec<Vec<(Instant, [f64; 4])>>);

impl Growth {
    /// A life begins.
    pub fn begin(&mut self) {
        self.0.push(Vec::new());
    }

    /// Looks at the process that lives.
    ///
    /// # Panics
    ///
    /// If none does.
    pub fn sample(&mut self, process: u32) {
        let folder = Path::new("/proc").join(process.to_string());
        let status = fs::read_to_string(folder.join("status")).unwrap();
        let of = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
            line.split_whitespace().next().unwrap().parse::<f64>().unwrap()
        };
        let descriptors = fs::read_dir(folder.join("fd")).unwrap().count();
        let maps = fs::read_to_string(folder.join("maps")).unwrap().lines().count();
        let counts = [descriptors, maps].map(|count| f64::from(u32::try_from(count).unwrap()));
        let sample = [of("VmRSS:") / 1024.0, counts[0], of("Threads:"), counts[1]];
        self.0.last_mut().unwrap().push((Instant::now(), sample));
    }

    /// Says by how much a minute each measure grows in lives of at least so many samples, by Theil and Sen: the median
    /// of the slopes between all samples of a life, but those of its first third: then it warms up.
    ///
    /// # Panics
    ///
    /// If something grows: if its median is higher in the last third of a life than in the second one.
    pub fn end(&self, fewest: usize) -> Value {
        let lives: Vec<_> = self.0.iter().filter(|life| life.len() >= fewest).collect();
        assert!(!lives.is_empty(), "nothing has lived long enough");
        let mut figures = json!({ "samples": lives.iter().map(|life| life.len()).sum::<usize>() });
        for (at, (measure, margin)) in MEASURES.into_iter().enumerate() {
            let (mut slopes, mut most) = (Vec::new(), 0.0_f64);
            for life in &lives {
                let all: Vec<f64> = life.iter().map(|(_, sample)| sample[at]).collect();
                let third = all.len() / 3;
                let (early, late) = (median(&all[third..2 * third]), median(&all[2 * third..]));
                assert!(late <= early + margin, "{measure} grow from {early} to {late}: {all:?}");
                most = all.iter().copied().fold(most, f64::max);
                for (number, (earlier, before)) in life.iter().enumerate().skip(third) {
                    slopes.extend(life[number + 1..].iter().map(|(later, after)| {
                        (after[at] - before[at]) * 60.0 / (*later - *earlier).as_secs_f64()
                    }));
                }
            }
            let slope = (median(&slopes) * 100.0).round() / 100.0;
            figures[measure] = json!({ "most": most.round(), "more a minute": slope });
        }
        figures
    }
}

fn median(of: &[f64]) -> f64 {
    let mut sorted = of.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    sorted[sorted.len() / 2]
}
