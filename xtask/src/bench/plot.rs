use std::io;

use crate::bench::label::{race_input, race_title};
use crate::bench::plot::bars::{Bar, Bars, Row};
use crate::bench::plot::canvas::Canvas;
use crate::bench::plot::curves::{Curves, Line};
use crate::bench::plot::theme::{ColourRole, Theme};
use crate::bench::quantity;
use crate::bench::record::{Race, Role, Runner, Series};
use crate::bench::saved_run::SavedRun;
use crate::bench::statistics::{median, speed};
use crate::bench::verdict;

/// Axes, which convert values to pixels.
mod axis;
/// Bar charts of the ratios of races.
mod bars;
/// The drawing surface.
mod canvas;
/// Line charts of series.
mod curves;
/// Text in plots.
mod text;
/// Colours.
mod theme;

/// A plot of the page: two SVG files, for light and dark pages.
pub(crate) struct Plot {
    /// File name, without extension.
    name: String,
    /// Alternative text.
    about: String,
    drawing: Drawing,
}

enum Drawing {
    Bars(Bars),
    Curves(Curves),
}

impl Plot {
    /// Returns all plots of these runs.
    pub(crate) fn all(all: &[SavedRun]) -> Vec<Self> {
        let mut plots = Vec::new();
        for kept in all {
            plots.extend(Self::ratios(kept));
            plots.extend(kept.series.iter().map(|series| Self::series(kept, series)));
        }
        plots
    }

    /// Returns the plot of the speed of ours relative to the best limit and peer in all races of a suite.
    pub(crate) fn ratios(kept: &SavedRun) -> Option<Self> {
        let rows: Vec<Row> = kept.races.iter().filter_map(row).collect();
        let suite = &kept.suite.name;
        (!rows.is_empty()).then(|| Self {
            name: format!("ratios-{suite}"),
            about: format!("Relative speed of TSSD in each race of the suite {suite}"),
            drawing: Drawing::Bars(Bars { rows }),
        })
    }

    /// Returns the plot of a series.
    pub(crate) fn series(kept: &SavedRun, series: &Series) -> Self {
        let lines = series.runners.iter().map(|runner| {
            let points = runner.points.iter().map(|point| (point.x, median(&point.values)));
            Line {
                name: runner.name.clone(),
                ink: ink(kept, runner.role, &runner.name),
                points: points.collect(),
            }
        });
        let unit = series.y;
        let title = format!("{}: {}", series.name, series.what);
        Self {
            name: format!("series-{}-{}", kept.suite.name, file_name(&series.name)),
            about: title.clone(),
            drawing: Drawing::Curves(Curves {
                title,
                x_name: series.x.clone(),
                x_value: Box::new(quantity::shortest_float),
                y_value: Box::new(move |value| strip_decimals(&verdict::format_value(unit, value))),
                lines: lines.collect(),
            }),
        }
    }

    /// Returns the HTML of the plot in the page.
    pub(crate) fn html(&self) -> String {
        let Self { name, about, .. } = self;
        let about = about.replace('&', "&amp;").replace('"', "&quot;").replace('<', "&lt;");
        format!(
            "<picture>\n  \
               <source media=\"(prefers-color-scheme: dark)\" srcset=\"performance/{name}-dark.svg\">\n  \
               <img alt=\"{about}\" src=\"performance/{name}.svg\">\n\
             </picture>\n"
        )
    }

    /// Returns the names and contents of the two files.
    pub(crate) fn files(&self) -> io::Result<[(String, String); 2]> {
        let light = (format!("{}.svg", self.name), self.svg(&theme::LIGHT)?);
        let dark = (format!("{}-dark.svg", self.name), self.svg(&theme::DARK)?);
        Ok([light, dark])
    }

    fn svg(&self, theme: &Theme) -> io::Result<String> {
        match &self.drawing {
            Drawing::Bars(bars) => Canvas::svg(bars.size(), theme, |canvas| bars.draw(canvas)),
            Drawing::Curves(curves) => {
                Canvas::svg(curves::SIZE, theme, |canvas| curves.draw(canvas))
            }
        }
    }
}

/// Returns the bars of a race. `None` if the race has neither a limit nor a peer.
fn row(race: &Race) -> Option<Row> {
    let bar = |role, ink| {
        fastest_runner(race, role).map(|other| Bar {
            ratio: speed(&race.ours().seconds, &other.seconds),
            other: other.name.clone(),
            ink,
        })
    };
    let bars: Vec<Bar> = [bar(Role::Peer, ColourRole::Ours), bar(Role::Limit, ColourRole::Limit)]
        .into_iter()
        .flatten()
        .collect();
    (!bars.is_empty()).then(|| Row { what: race_title(race), place: race_input(race), bars })
}

/// Returns the fastest runner of a role.
pub(crate) fn fastest_runner(race: &Race, role: Role) -> Option<&Runner> {
    let candidates = race.runners.iter().filter(|runner| runner.role == role);
    candidates.min_by(|one, other| median(&one.seconds).total_cmp(&median(&other.seconds)))
}

/// Returns the colour of a runner. A peer has the same colour in all plots of a suite.
fn ink(kept: &SavedRun, role: Role, name: &str) -> ColourRole {
    match role {
        Role::Ours => ColourRole::Ours,
        Role::Limit => ColourRole::Limit,
        Role::Variant => ColourRole::Variant,
        Role::Peer => {
            let fits = kept.fits.iter().flat_map(|fit| &fit.runners);
            let series = kept.series.iter().flat_map(|series| &series.runners);
            let all = fits
                .map(|runner| (runner.role, &runner.name))
                .chain(series.map(|runner| (runner.role, &runner.name)));
            let mut names: Vec<&str> = Vec::new();
            for (role, name) in all {
                if role == Role::Peer && !names.contains(&name.as_str()) {
                    names.push(name);
                }
            }
            ColourRole::Peer(names.iter().position(|found| *found == name).unwrap_or(0))
        }
    }
}

/// Removes the decimals of a round number at an axis.
fn strip_decimals(figure: &str) -> String {
    figure.replacen(".00 ", " ", 1).replacen(".0 ", " ", 1)
}

/// Converts words to a file name: lower case, separated by `-`.
fn file_name(words: &str) -> String {
    let is_word = |character: char| character.is_ascii_alphanumeric();
    let words: Vec<String> = words
        .split(|character| !is_word(character))
        .filter(|word| !word.is_empty())
        .map(str::to_ascii_lowercase)
        .collect();
    words.join("-")
}

#[cfg(test)]
mod tests {
    use super::{Plot, file_name};
    use crate::bench::example;

    #[test]
    fn file_names_are_simple() {
        assert_eq!(file_name("get, 2 Cores"), "get-2-cores");
    }

    #[test]
    fn all_plots_are_drawn() {
        let files: Vec<(String, String)> = Plot::all(&[example::example_run()])
            .iter()
            .flat_map(|plot| plot.files().unwrap())
            .collect();
        let names: Vec<&str> = files.iter().map(|(name, _)| name.as_str()).collect();
        let expected = ["ratios-store", "series-store-readers"]
            .map(|name| [format!("{name}.svg"), format!("{name}-dark.svg")]);
        assert_eq!(names, expected.concat());
        for (name, text) in &files {
            assert!(text.contains("torchstore"), "{name}");
            assert!(!text.contains("NaN") && !text.contains("inf"), "{name}");
        }
    }
}
