//! Detection of growing resource usage of a process.
#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

use std::fs;
use std::path::Path;
use std::time::Instant;

use serde_json::{Value, json};

/// Resources, and by how much their median may grow late in the life of a process, by chance.
///
/// Memory comes in slabs of 4 MiB. A small version with a label keeps a whole slab.
const MEASURES: [(&str, f64); 4] =
    [("MiB", 64.0), ("descriptors", 48.0), ("threads", 24.0), ("maps", 96.0)];

/// Samples of processes. A process may be replaced by a successor.
#[derive(Default)]
pub struct ResourceGrowth(Vec<Vec<(Instant, [f64; 4])>>);

impl ResourceGrowth {
    /// Begins the samples of a process.
    pub fn start_process(&mut self) {
        self.0.push(Vec::new());
    }

    /// Samples the resources of the process.
    ///
    /// # Panics
    ///
    /// If the process has ended.
    pub fn sample(&mut self, process: u32) {
        let folder = Path::new("/proc").join(process.to_string());
        let status = fs::read_to_string(folder.join("status")).unwrap();
        let status_field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
            line.split_whitespace().next().unwrap().parse::<f64>().unwrap()
        };
        let descriptors = fs::read_dir(folder.join("fd")).unwrap().count();
        let maps = fs::read_to_string(folder.join("maps")).unwrap().lines().count();
        let counts = [descriptors, maps].map(|count| f64::from(u32::try_from(count).unwrap()));
        let sample =
            [status_field("VmRSS:") / 1024.0, counts[0], status_field("Threads:"), counts[1]];
        self.0.last_mut().unwrap().push((Instant::now(), sample));
    }

    /// Checks that no resource grows, and returns how much each grows per minute.
    ///
    /// Only processes with at least this number of samples count. The growth is the Theil-Sen
    /// estimator: the median of the slopes between all samples of a process. The first third of the
    /// samples is warmup, and left out.
    ///
    /// # Panics
    ///
    /// If the median of a resource is higher in the last third of the samples than in the second
    /// one.
    pub fn finish(&self, min_samples: usize) -> Value {
        let processes: Vec<_> =
            self.0.iter().filter(|samples| samples.len() >= min_samples).collect();
        assert!(!processes.is_empty(), "no process has enough samples");
        let mut figures =
            json!({ "samples": processes.iter().map(|samples| samples.len()).sum::<usize>() });
        for (at, (measure, margin)) in MEASURES.into_iter().enumerate() {
            let (mut slopes, mut maximum) = (Vec::new(), 0.0_f64);
            for samples in &processes {
                let values: Vec<f64> = samples.iter().map(|(_, sample)| sample[at]).collect();
                let third = values.len() / 3;
                let (early, late) =
                    (median(&values[third..2 * third]), median(&values[2 * third..]));
                assert!(
                    late <= early + margin,
                    "{measure}: growth from {early} to {late}: {values:?}"
                );
                maximum = values.iter().copied().fold(maximum, f64::max);
                for (number, (earlier, before)) in samples.iter().enumerate().skip(third) {
                    slopes.extend(samples[number + 1..].iter().map(|(later, after)| {
                        (after[at] - before[at]) * 60.0 / (*later - *earlier).as_secs_f64()
                    }));
                }
            }
            let slope = (median(&slopes) * 100.0).round() / 100.0;
            figures[measure] = json!({ "most": maximum.round(), "more a minute": slope });
        }
        figures
    }
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    sorted[sorted.len() / 2]
}
