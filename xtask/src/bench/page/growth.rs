use crate::bench::fit::Cost;
use crate::bench::page::Table;
use crate::bench::plot::Plot;
use crate::bench::quantity::{rate, shortest_float, time};
use crate::bench::record::SeriesRunner;
use crate::bench::saved_run::SavedRun;
use crate::bench::statistics::{median, quartiles};
use crate::bench::verdict::{format_value, growth_exponent};

/// Generates the table of the fitted costs of all operations.
pub(crate) fn fits(all: &[SavedRun]) -> String {
    let mut table = Table::new(&[
        "Suite",
        "Operation",
        "Runner",
        ">Fixed",
        ">Per tensor",
        ">Throughput",
        ">Maximum error",
    ]);
    for kept in all {
        for fit in &kept.fits {
            for (runner, number) in fit.runners.iter().zip(0..) {
                let Some(cost) = Cost::fit(&runner.points) else { continue };
                // A cost of zero means that it is too small to measure.
                let unless_zero =
                    |cost: f64, text: String| if cost > 0.0 { text } else { "—".into() };
                let in_first_row =
                    |word: &String| if number == 0 { word.clone() } else { String::new() };
                table.row(&[
                    in_first_row(&kept.suite.name),
                    in_first_row(&fit.operation),
                    runner.name.clone(),
                    unless_zero(cost.fixed, time(cost.fixed)),
                    unless_zero(cost.per_tensor, time(cost.per_tensor)),
                    unless_zero(cost.per_byte, rate(1.0 / cost.per_byte)),
                    format!("{:.0} %", cost.max_relative_error(&runner.points) * 100.0),
                ]);
            }
        }
    }
    table.text()
}

/// Generates a plot and a table of each series.
pub(crate) fn series(all: &[SavedRun]) -> String {
    let mut parts = Vec::new();
    for kept in all {
        for series in &kept.series {
            let mut table = Table::new(&["Runner", ">First", ">Last", ">Growth"]);
            for runner in &series.runners {
                let (Some(first), Some(last)) = (runner.points.first(), runner.points.last())
                else {
                    continue;
                };
                let ends = [first, last].map(|point| {
                    let (low, high) = quartiles(&point.values);
                    let [center, low, high] =
                        [median(&point.values), low, high].map(|each| format_value(series.y, each));
                    let spread =
                        if low == high { String::new() } else { format!(" ({low} to {high})") };
                    format!("{} {}: {center}{spread}", series.x, shortest_float(point.x))
                });
                let [first, last] = ends;
                table.row(&[runner.name.clone(), first, last, format_growth(&series.x, runner)]);
            }
            parts.push(format!("{}\n{}", Plot::series(kept, series).html(), table.text()));
        }
    }
    parts.join("\n")
}

/// Formats the growth of a runner as a power of x.
fn format_growth(x: &str, runner: &SeriesRunner) -> String {
    growth_exponent(runner).map_or_else(|| "—".into(), |exponent| format!("{x}^{exponent:.2}"))
}
