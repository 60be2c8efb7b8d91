use crate::bench::fit::float;
use crate::bench::quantity::{bytes, plain, rate, time, times};
use crate::bench::record::{Race, Role, Runner, Series, SeriesRunner, Target, Unit};
use crate::bench::statistics::{exponent, median, speed};

/// What grows as this power of x or less grows linearly: two medians are never quite the same.
const LINEAR: f64 = 1.1;

/// A target beside what was found.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Verdict {
    /// What was to be reached.
    pub(crate) wanted: String,
    /// What was; nothing if nobody measured it.
    pub(crate) found: Option<String>,
    pub(crate) is_met: bool,
}

impl Verdict {
    /// Those of a runner.
    pub(crate) fn all(race: &Race, runner: &Runner) -> Vec<Self> {
        runner.targets.iter().map(|target| Self::of(race, runner, target)).collect()
    }

    /// Whether what grows does so linearly or better, which all of ours is to do.
    pub(crate) fn growth(series: &Series, runner: &SeriesRunner) -> Option<Self> {
        let exponent = growth(runner)?;
        (runner.role == Role::Ours).then(|| Self {
            wanted: format!("linear in {}", series.x),
            found: Some(format!("as {}^{exponent:.2}", series.x)),
            is_met: exponent <= LINEAR,
        })
    }

    fn of(race: &Race, runner: &Runner, target: &Target) -> Self {
        let own = median(&runner.seconds);
        match target {
            Target::Speed(target) => {
                let other = race.runner(&target.of);
                let found = other.map(|other| speed(&runner.seconds, &other.seconds));
                Self {
                    wanted: format!("{}× {}", plain(target.speed), target.of),
                    found: found.map(times),
                    is_met: found.is_some_and(|found| found >= target.speed),
                }
            }
            Target::Milliseconds(target) => Self {
                wanted: format!("{} ms", plain(target.milliseconds)),
                found: Some(time(own)),
                is_met: own * 1e3 <= target.milliseconds,
            },
            Target::Rate(target) => {
                let found = race.bytes.map(|bytes| float(bytes) / own);
                Self {
                    wanted: format!("{} GB/s", plain(target.gigabytes_per_second)),
                    found: found.map(rate),
                    is_met: found.is_some_and(|found| found >= target.gigabytes_per_second * 1e9),
                }
            }
        }
    }

    /// In words.
    pub(crate) fn said(&self) -> &'static str {
        match (self.found.is_some(), self.is_met) {
            (false, _) => "not measured",
            (true, true) => "met",
            (true, false) => "**not met**",
        }
    }
}

/// The power of x as which it grows from the first point to the last.
pub(crate) fn growth(runner: &SeriesRunner) -> Option<f64> {
    let (first, last) = (runner.points.first()?, runner.points.last()?);
    exponent((first.x, median(&first.values)), (last.x, median(&last.values)))
}

/// A value of a series.
pub(crate) fn value(unit: Unit, value: f64) -> String {
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
    fn targets_are_judged() {
        let kept = example::kept();
        let verdicts = |case: &str| {
            let race = kept.races.iter().find(|race| race.case == case).unwrap();
            let all = Verdict::all(race, race.ours());
            let said = |verdict: Verdict| {
                let found = verdict.found.clone().unwrap_or_default();
                [verdict.wanted.clone(), found, verdict.said().into()].join("; ")
            };
            all.into_iter().map(said).collect::<Vec<_>>()
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
