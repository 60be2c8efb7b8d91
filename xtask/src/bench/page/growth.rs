use crate::bench::fit::Cost;
use crate::bench::kept::Kept;
use crate::bench::page::Table;
use crate::bench::plot::Plot;
use crate::bench::quantity::{plain, rate, time};
use crate::bench::record::SeriesRunner;
use crate::bench::statistics::{median, quartiles};
use crate::bench::verdict::{growth, value};

/// The costs of all operations.
pub(crate) fn fits(all: &[Kept]) -> String {
    let mut table = Table::new(&[
        "Suite",
        "Operation",
        "Who",
        ">Once",
        ">Each tensor",
        ">Bytes",
        ">Wrong by at most",
    ]);
    for kept in all {
        for fit in &kept.fits {
            for (runner, number) in fit.runners.iter().zip(0..) {
                let Some(cost) = Cost::of(&runner.points) else { continue };
                // Where the times do not show a cost there is none to write down.
                let shown = |cost: f64, text: String| if cost > 0.0 { text } else { "—".into() };
                let once = |word: &String| if number == 0 { word.clone() } else { String::new() };
                table.row(&[
                    once(&kept.suite.name),
                    once(&fit.operation),
                    runner.name.clone(),
                    shown(cost.once, time(cost.once)),
                    shown(cost.tensor, time(cost.tensor)),
                    shown(cost.byte, rate(1.0 / cost.byte)),
                    format!("{:.0} %", cost.worst(&runner.points) * 100.0),
                ]);
            }
        }
    }
    table.text()
}

/// A plot of each series, and how it grows.
pub(crate) fn series(all: &[Kept]) -> String {
    let mut parts = Vec::new();
    for kept in all {
        for series in &kept.series {
            let mut table = Table::new(&["Who", ">First", ">Last", ">Grows as"]);
            for runner in &series.runners {
                let (Some(first), Some(last)) = (runner.points.first(), runner.points.last())
                else {
                    continue;
                };
                let ends = [first, last].map(|point| {
                    let (low, high) = quartiles(&point.values);
                    let [own, low, high] =
                        [median(&point.values), low, high].map(|each| value(series.y, each));
                    let spread =
                        if low == high { String::new() } else { format!(" ({low} to {high})") };
                    format!("{} {}: {own}{spread}", series.x, plain(point.x))
                });
                let [first, last] = ends;
                table.row(&[runner.name.clone(), first, last, grows(&series.x, runner)]);
            }
            parts.push(format!("{}\n{}", Plot::series(kept, series).picture(), table.text()));
        }
    }
    parts.join("\n")
}

fn grows(x: &str, runner: &SeriesRunner) -> String {
    growth(runner).map_or_else(|| "—".into(), |exponent| format!("{x}^{exponent:.2}"))
}
