use std::collections::BTreeMap;

use crate::bench::fit::to_float;
use crate::bench::label::{race_input, race_title};
use crate::bench::page::Table;
use crate::bench::plot::{Plot, fastest_runner};
use crate::bench::quantity::{count, rate, ratio, time};
use crate::bench::record::{Race, Role, Runner};
use crate::bench::saved_run::SavedRun;
use crate::bench::statistics::{median, quartiles, speed};
use crate::bench::verdict::Verdict;

/// Generates the number of targets that are met, and the table of those that are not.
pub(crate) fn targets(all: &[SavedRun]) -> String {
    let mut numbers: BTreeMap<&str, usize> = BTreeMap::new();
    let mut missed =
        Table::new(&["Suite", "Case", "State dict", "Runner", ">Target", ">Measured", ""]);
    for kept in all {
        let suite = &kept.suite.name;
        for (title, input, runner, verdict) in suite_verdicts(kept) {
            *numbers.entry(verdict.label()).or_default() += 1;
            if !verdict.is_met {
                let (label, found) = (verdict.label(), verdict.result.unwrap_or_default());
                let cells =
                    [suite.clone(), title, input, runner, verdict.target, found, label.into()];
                missed.row(&cells);
            }
        }
    }
    let sums: Vec<String> = ["met", "**not met**", "not measured"]
        .iter()
        .filter_map(|label| Some(format!("{} {label}", numbers.get(label)?)))
        .collect();
    let total: usize = numbers.values().sum();
    if total == 0 {
        return String::new();
    }
    let missed = missed.text();
    let missed = if missed.is_empty() { missed } else { format!("\n{missed}") };
    format!("{total} targets: {}.\n{missed}", sums.join(", "))
}

/// Returns the title, the input, the runner and the verdict of each target of a suite.
fn suite_verdicts(kept: &SavedRun) -> impl Iterator<Item = (String, String, String, Verdict)> {
    let races = kept.races.iter().flat_map(|race| {
        race.runners.iter().flat_map(move |runner| {
            Verdict::all(race, runner).into_iter().map(move |verdict| {
                (race_title(race), race_input(race), runner.name.clone(), verdict)
            })
        })
    });
    let series = kept.series.iter().flat_map(|series| {
        series.runners.iter().filter_map(move |runner| {
            let verdict = Verdict::growth(series, runner)?;
            Some((series.what.clone(), String::new(), runner.name.clone(), verdict))
        })
    });
    races.chain(series)
}

/// Generates a plot and a table of each suite.
pub(crate) fn summary(all: &[SavedRun]) -> String {
    let parts = all.iter().filter_map(|kept| {
        let plot = Plot::ratios(kept)?.html();
        Some(format!("### Suite {}\n\n{plot}\n{}", kept.suite.name, comparison(kept)))
    });
    parts.collect::<Vec<_>>().join("\n")
}

/// Generates the table of races that have a limit or a peer.
fn comparison(kept: &SavedRun) -> String {
    let mut table = Table::new(&[
        "Case",
        "State dict",
        ">Limit",
        ">Ours",
        ">Best peer",
        ">Ours / limit",
        ">Ours / peer",
        "Target",
    ]);
    for race in &kept.races {
        let [limit, peer] = [Role::Limit, Role::Peer].map(|role| fastest_runner(race, role));
        if limit.is_none() && peer.is_none() {
            continue;
        }
        let other = |other: Option<&Runner>| {
            other
                .map(|other| format!("{}: {}", other.name, time_and_rate(race, other)))
                .unwrap_or_default()
        };
        let ratio = |other: Option<&Runner>| {
            let speed = other.map(|other| speed(&race.ours().seconds, &other.seconds));
            speed.map(ratio).unwrap_or_default()
        };
        table.row(&[
            race_title(race),
            race_input(race),
            other(limit),
            time_and_rate(race, race.ours()),
            other(peer),
            ratio(limit),
            ratio(peer),
            verdicts(race, race.ours()),
        ]);
    }
    table.text()
}

/// Generates the table of all runners of all races of a suite.
pub(crate) fn all(kept: &SavedRun) -> String {
    let mut table = Table::new(&[
        "Case",
        "Runner",
        "Role",
        ">Median",
        ">Quartiles",
        ">Rate",
        ">Speed of ours",
        "Counts",
        "Target",
    ]);
    for race in &kept.races {
        for runner in &race.runners {
            let is_ours = runner.role == Role::Ours;
            let title = format!("**{}**: {}<br>{}", race.case, race.what, race_input(race));
            let title = title.trim_end_matches("<br>").to_owned();
            let (low, high) = quartiles(&runner.seconds);
            let median_seconds = median(&runner.seconds);
            let speed = speed(&race.ours().seconds, &runner.seconds);
            let counts = runner.counts.iter().map(|(name, n)| format!("{name}: {}", count(n)));
            table.row(&[
                if is_ours { title } else { String::new() },
                if is_ours { format!("**{}**", runner.name) } else { runner.name.clone() },
                role(runner.role).into(),
                time(median_seconds),
                format!("{} to {}", time(low), time(high)),
                race.bytes.map(|bytes| rate(to_float(bytes) / median_seconds)).unwrap_or_default(),
                if is_ours { String::new() } else { ratio(speed) },
                counts.collect::<Vec<_>>().join("<br>"),
                verdicts(race, runner),
            ]);
        }
    }
    table.text()
}

fn role(role: Role) -> &'static str {
    match role {
        Role::Ours => "ours",
        Role::Peer => "peer",
        Role::Limit => "limit",
        Role::Variant => "variant",
    }
}

/// Formats the median time of a runner, and its rate if the race has a size.
fn time_and_rate(race: &Race, runner: &Runner) -> String {
    let median_seconds = median(&runner.seconds);
    let rate = race.bytes.map(|bytes| format!(", {}", rate(to_float(bytes) / median_seconds)));
    time(median_seconds) + &rate.unwrap_or_default()
}

/// Formats the targets of a runner, and whether they are met.
fn verdicts(race: &Race, runner: &Runner) -> String {
    let all = Verdict::all(race, runner);
    let lines = all.iter().map(|verdict| format!("{}: {}", verdict.target, verdict.label()));
    lines.collect::<Vec<_>>().join("<br>")
}
