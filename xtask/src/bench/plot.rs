use std::io;

use crate::bench::kept::Kept;
use crate::bench::label::{place, what};
use crate::bench::plot::bars::{Bar, Bars, Row};
use crate::bench::plot::canvas::Canvas;
use crate::bench::plot::curves::{Curves, Line};
use crate::bench::plot::theme::{Ink, Theme};
use crate::bench::quantity;
use crate::bench::record::{Race, Role, Runner, Series};
use crate::bench::statistics::{median, speed};
use crate::bench::verdict;

/// From values to pixels.
mod axis;
/// Ratios of many races.
mod bars;
/// What is drawn on.
mod canvas;
/// What grows.
mod curves;
/// Words in a plot.
mod text;
/// The colours.
mod theme;

/// One of the page's plots: two files, for light and dark pages.
pub(crate) struct Plot {
    /// The file, without the ending.
    name: String,
    /// What it shows, for those who do not see it.
    about: String,
    drawing: Drawing,
}

enum Drawing {
    Bars(Bars),
    Curves(Curves),
}

impl Plot {
    /// All that these runs give.
    pub(crate) fn all(all: &[Kept]) -> Vec<Self> {
        let mut plots = Vec::new();
        for kept in all {
            plots.extend(Self::ratios(kept));
            plots.extend(kept.series.iter().map(|series| Self::series(kept, series)));
        }
        plots
    }

    /// How fast ours is beside the limit and the best peer, in all races of a suite.
    pub(crate) fn ratios(kept: &Kept) -> Option<Self> {
        let rows: Vec<Row> = kept.races.iter().filter_map(row).collect();
        let suite = &kept.suite.name;
        (!rows.is_empty()).then(|| Self {
            name: format!("ratios-{suite}"),
            about: format!("How many times as fast ours is, in each race of the suite {suite}"),
            drawing: Drawing::Bars(Bars { rows }),
        })
    }

    pub(crate) fn series(kept: &Kept, series: &Series) -> Self {
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
                x_value: Box::new(quantity::plain),
                y_value: Box::new(move |value| round(&verdict::value(unit, value))),
                lines: lines.collect(),
            }),
        }
    }

    /// How the page shows it.
    pub(crate) fn picture(&self) -> String {
        let Self { name, about, .. } = self;
        let about = about.replace('&', "&amp;").replace('"', "&quot;").replace('<', "&lt;");
        format!(
            "<picture>\n  \
               <source media=\"(prefers-color-scheme: dark)\" srcset=\"performance/{name}-dark.svg\">\n  \
               <img alt=\"{about}\" src=\"performance/{name}.svg\">\n\
             </picture>\n"
        )
    }

    /// Its files: their names and what is in them.
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

/// The bars of a race that has anything to compare with.
fn row(race: &Race) -> Option<Row> {
    let bar = |role, ink| {
        best(race, role).map(|other| Bar {
            ratio: speed(&race.ours().seconds, &other.seconds),
            other: other.name.clone(),
            ink,
        })
    };
    let bars: Vec<Bar> =
        [bar(Role::Peer, Ink::Ours), bar(Role::Limit, Ink::Limit)].into_iter().flatten().collect();
    (!bars.is_empty()).then(|| Row { what: what(race), place: place(race), bars })
}

/// The fastest runner of this role.
pub(crate) fn best(race: &Race, role: Role) -> Option<&Runner> {
    let candidates = race.runners.iter().filter(|runner| runner.role == role);
    candidates.min_by(|one, other| median(&one.seconds).total_cmp(&median(&other.seconds)))
}

/// One peer has one colour in all plots of a suite.
fn ink(kept: &Kept, role: Role, name: &str) -> Ink {
    match role {
        Role::Ours => Ink::Ours,
        Role::Limit => Ink::Limit,
        Role::Also => Ink::Also,
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
            Ink::Peer(names.iter().position(|found| *found == name).unwrap_or(0))
        }
    }
}

/// A figure beside an axis, which is round.
fn round(figure: &str) -> String {
    figure.replacen(".00 ", " ", 1).replacen(".0 ", " ", 1)
}

/// Words as a file may be called.
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
    fn files_have_simple_names() {
        assert_eq!(file_name("get, 2 Cores"), "get-2-cores");
    }

    #[test]
    fn all_plots_are_drawn() {
        let files: Vec<(String, String)> =
            Plot::all(&[example::kept()]).iter().flat_map(|plot| plot.files().unwrap()).collect();
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
