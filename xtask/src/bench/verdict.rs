use crate::bench::fit::to_float;
use crate::bench::quantity::{bytes, rate, ratio, shortest_float, time};
use crate::bench::record::{Race, Role, Runner, Series, SeriesRunner, Target, Unit};
use crate::bench::statistics::{exponent, median, speed};

/// Maximum exponent of linear growth. It is above 1, since medians vary.
const MAX_LINEAR_EXPONENT: f64 = 1.1;

/// A target, and the measured result.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Verdict {
    /// The target.
    pub(crate) target: String,
    /// The result, if it was measured.
    pub(crate) result: Option<String>,
    pub(crate) is_met: bool,
}

impl Verdict {
    /// Compares a runner of a race with each of its targets.
    pub(crate) fn all(race: &Race, runner: &Runner) -> Vec<Self> {
        runner.targets.iter().map(|target| Self::new(race, runner, target)).collect()
    }

    /// Checks that a series of ours grows at most linearly. `None` for other roles.
    pub(crate) fn growth(series: &Series, runner: &SeriesRunner) -> Option<Self> {
        let exponent = growth_exponent(runner)?;
        (runner.role == Role::Ours).then(|| Self {
            target: format!("linear in {}", series.x),
            result: Some(format!("as {}^{exponent:.2}", series.x)),
            is_met: exponent <= MAX_LINEAR_EXPONENT,
        })
    }

    fn new(race: &Race, runner: &Runner, target: &Target) -> Self {
        let median_seconds = median(&runner.seconds);
        match target {
            Target::Speed(target) => {
                let other = race.runner(&target.reference);
                let found = other.map(|other| speed(&runner.seconds, &other.seconds));
                Self {
                    target: format!("{}× {}", shortest_float(target.speed), target.reference),
                    result: found.map(ratio),
                    is_met: found.is_some_and(|found| found >= target.speed),
                }
            }
            Target::Milliseconds(target) => Self {
                target: format!("{} ms", shortest_float(target.milliseconds)),
                result: Some(time(median_seconds)),
                is_met: median_seconds * 1e3 <= target.milliseconds,
            },
            Target::Rate(target) => {
                let found = race.bytes.map(|bytes| to_float(bytes) / median_seconds);
                Self {
                    target: format!("{} GB/s", shortest_float(target.gigabytes_per_second)),
                    result: found.map(rate),
                    is_met: found.is_some_and(|found| found >= target.gigabytes_per_second * 1e9),
                }
            }
        }
    }

    /// Returns the label of the verdict in the page.
    pub(crate) fn label(&self) -> &'static str {
        match (self.result.is_some(), self.is_met) {
            (false, _) => "not measured",
            (true, true) => "met",
            (true, false) => "**not met**",
        }
    }
}

/// Returns the exponent with which a runner grows, from its first to its last point.
pub(crate) fn growth_exponent(runner: &SeriesRunner) -> Option<f64> {
    let (first, last) = (runner.points.first()?, runner.points.last()?);
    exponent((first.x, median(&first.values)), (last.x, median(&last.values)))
}

/// Formats a value of a series.
pub(crate) fn format_value(unit: Unit, value: f64) -> String {
    match unit {
        Unit::Seconds => time(value),
        Unit::Bytes => bytes(value),
    }
}

#[cfg(test)]
mod tests {
    use super::Verdict;
    use crate::bench::example;

    #[test]
    fn targets_are_compared_with_results() {
        let kept = example::example_run();
        let verdicts = |case: &str| {
            let race = kept.races.iter().find(|race| race.case == case).unwrap();
            let all = Verdict::all(race, race.ours());
            let text = |verdict: Verdict| {
                let found = verdict.result.clone().unwrap_or_default();
                [verdict.target.clone(), found, verdict.label().into()].join("; ")
            };
            all.into_iter().map(text).collect::<Vec<_>>()
        };
        assert_eq!(
            verdicts("put"),
            [
                "0.85× memcpy; 0.900×; met",
                "2× torchstore; 1.80×; **not met**",
                "10 GB/s; 18.0 GB/s; met"
            ]
        );
        assert_eq!(verdicts("views"), ["1 ms; 1.20 ms; **not met**", "2× DCP; ; not measured"]);
        let series = &kept.series[0];
        let growth = |at: usize| Verdict::growth(series, &series.runners[at]);
        let found = growth(0).unwrap();
        assert!(found.is_met, "{found:?}");
        assert_eq!(growth(1), None);
    }
}
