use std::collections::BTreeMap;

use crate::bench::fit::float;
use crate::bench::kept::Kept;
use crate::bench::label::{place, what};
use crate::bench::page::Table;
use crate::bench::plot::{Plot, best};
use crate::bench::quantity::{count, rate, time, times};
use crate::bench::record::{Race, Role, Runner};
use crate::bench::statistics::{median, quartiles, speed};
use crate::bench::verdict::Verdict;

/// How many targets are met, and those that are not.
pub(crate) fn targets(all: &[Kept]) -> String {
    let mut numbers: BTreeMap<&str, usize> = BTreeMap::new();
    let mut missed = Table::new(&["Suite", "What", "State dict", "Who", ">Wanted", ">Found", ""]);
    for kept in all {
        let suite = &kept.suite.name;
        for (what, place, who, verdict) in of_suite(kept) {
            *numbers.entry(verdict.said()).or_default() += 1;
            if !verdict.is_met {
                let (said, found) = (verdict.said(), verdict.found.unwrap_or_default());
                let cells = [suite.clone(), what, place, who, verdict.wanted, found, said.into()];
                missed.row(&cells);
            }
        }
    }
    let sums: Vec<String> = ["met", "**not met**", "not measured"]
        .iter()
        .filter_map(|said| Some(format!("{} {said}", numbers.get(said)?)))
        .collect();
    let total: usize = numbers.values().sum();
    if total == 0 {
        return String::new();
    }
    let missed = missed.text();
    let missed = if missed.is_empty() { missed } else { format!("\n{missed}") };
    format!("{total} targets: {}.\n{missed}", sums.join(", "))
}

/// What was done, with what, by whom, and whether that was enough.
fn of_suite(kept: &Kept) -> impl Iterator<Item = (String, String, String, Verdict)> {
    let races = kept.races.iter().flat_map(|race| {
        race.runners.iter().flat_map(move |runner| {
            Verdict::all(race, runner)
                .into_iter()
                .map(move |verdict| (what(race), place(race), runner.name.clone(), verdict))
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

/// A plot and a table of each suite.
pub(crate) fn summary(all: &[Kept]) -> String {
    let parts = all.iter().filter_map(|kept| {
        let plot = Plot::ratios(kept)?.picture();
        Some(format!("### In the suite {}\n\n{plot}\n{}", kept.suite.name, compared(kept)))
    });
    parts.collect::<Vec<_>>().join("\n")
}

/// A row for each race that has something to compare with.
fn compared(kept: &Kept) -> String {
    let mut table = Table::new(&[
        "What",
        "State dict",
        ">Limit",
        ">Ours",
        ">Best peer",
        ">Ours / limit",
        ">Ours / peer",
        "Target",
    ]);
    for race in &kept.races {
        let [limit, peer] = [Role::Limit, Role::Peer].map(|role| best(race, role));
        if limit.is_none() && peer.is_none() {
            continue;
        }
        let other = |other: Option<&Runner>| {
            other.map(|other| format!("{}: {}", other.name, pace(race, other))).unwrap_or_default()
        };
        let ratio = |other: Option<&Runner>| {
            let ratio = other.map(|other| speed(&race.ours().seconds, &other.seconds));
            ratio.map(times).unwrap_or_default()
        };
        table.row(&[
            what(race),
            place(race),
            other(limit),
            pace(race, race.ours()),
            other(peer),
            ratio(limit),
            ratio(peer),
            verdicts(race, race.ours()),
        ]);
    }
    table.text()
}

/// All runners of all races of a suite.
pub(crate) fn all(kept: &Kept) -> String {
    let mut table = Table::new(&[
        "What",
        "Who",
        "As",
        ">Median",
        ">Quartiles",
        ">Rate",
        ">Ours is",
        "Counts",
        "Target",
    ]);
    for race in &kept.races {
        for runner in &race.runners {
            let is_ours = runner.role == Role::Ours;
            let what = format!("**{}**: {}<br>{}", race.case, race.what, place(race));
            let what = what.trim_end_matches("<br>").to_owned();
            let (low, high) = quartiles(&runner.seconds);
            let own = median(&runner.seconds);
            let ratio = speed(&race.ours().seconds, &runner.seconds);
            let counts = runner.counts.iter().map(|(name, n)| format!("{name}: {}", count(n)));
            table.row(&[
                if is_ours { what } else { String::new() },
                if is_ours { format!("**{}**", runner.name) } else { runner.name.clone() },
                role(runner.role).into(),
                time(own),
                format!("{} to {}", time(low), time(high)),
                race.bytes.map(|bytes| rate(float(bytes) / own)).unwrap_or_default(),
                if is_ours { String::new() } else { times(ratio) },
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
        Role::Also => "also",
    }
}

/// How long it took, and how fast that is.
fn pace(race: &Race, runner: &Runner) -> String {
    let own = median(&runner.seconds);
    let rate = race.bytes.map(|bytes| format!(", {}", rate(float(bytes) / own)));
    time(own) + &rate.unwrap_or_default()
}

/// Each target, and whether it is met.
fn verdicts(race: &Race, runner: &Runner) -> String {
    let all = Verdict::all(race, runner);
    let said = all.iter().map(|verdict| format!("{}: {}", verdict.wanted, verdict.said()));
    said.collect::<Vec<_>>().join("<br>")
}
