use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::Path;

use crate::bench::page::table::Table;
use crate::bench::plot::Plot;
use crate::bench::saved_run::SavedRun;
use crate::bench::{NAMES, folder};

/// Tables of counts.
mod counts;
/// Tables and plots of series and fits.
mod growth;
/// Table of the dates, machines and options of the runs.
mod machine;
/// Tables and plots of races, and the list of targets.
mod races;
/// Markdown tables.
mod table;

/// Generates the marked regions of the page, and all plots, from the saved runs.
pub(crate) fn write(root: &Path) -> io::Result<()> {
    let folder = folder(root);
    let all = SavedRun::read_all(&folder)?;
    let page = root.join("docs/performance.md");
    let text = with_regions(&fs::read_to_string(&page)?, &all).map_err(io::Error::other)?;
    let plots = plots(&all)?;
    for name in existing_plots(&folder)?.keys().filter(|name| !plots.contains_key(*name)) {
        fs::remove_file(folder.join(name))?;
    }
    for (name, svg) in plots {
        fs::write(folder.join(name), svg)?;
    }
    fs::write(page, text)
}

/// Returns the text with newly generated contents between the markers of each region.
fn with_regions(text: &str, all: &[SavedRun]) -> Result<String, String> {
    let mut written = Vec::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once("<!-- bench:") {
        let (name, after) = after.split_once(" -->\n").ok_or("a region marker is not closed")?;
        let end = format!("<!-- /bench:{name} -->");
        let (_, after) =
            after.split_once(&end).ok_or(format!("region {name} has no end marker"))?;
        let region = region(name, all).ok_or(format!("unknown region {name}"))?;
        let region = if region.is_empty() { "Not measured yet.\n" } else { &region };
        written.push(format!("{before}<!-- bench:{name} -->\n\n{region}\n{end}"));
        rest = after;
    }
    Ok(written.concat() + rest)
}

/// Generates the contents of a region, which are empty if there are no results.
///
/// `None` if the region is unknown.
fn region(name: &str, all: &[SavedRun]) -> Option<String> {
    let (kind, suite) = name.split_once(':').unwrap_or((name, ""));
    let of_suite = || all.iter().find(|kept| kept.suite.name == suite);
    Some(match (kind, suite) {
        ("targets", "") => races::targets(all),
        ("summary", "") => races::summary(all),
        ("series", "") => growth::series(all),
        ("fits", "") => growth::fits(all),
        ("counts", "") => counts::all(all),
        ("machine", "") => machine::all(all),
        ("races", suite) if NAMES.contains(&suite) => {
            of_suite().map(races::all).unwrap_or_default()
        }
        _ => return None,
    })
}

/// Returns the files of all plots, by name.
fn plots(all: &[SavedRun]) -> io::Result<BTreeMap<String, String>> {
    let mut files = BTreeMap::new();
    for plot in Plot::all(all) {
        for (name, svg) in plot.files()? {
            if files.insert(name.clone(), svg).is_some() {
                return Err(io::Error::other(format!("two plots have the name {name}")));
            }
        }
    }
    Ok(files)
}

/// Reads the existing plots, by name.
fn existing_plots(folder: &Path) -> io::Result<BTreeMap<String, String>> {
    let mut files = BTreeMap::new();
    if folder.exists() {
        for entry in fs::read_dir(folder)? {
            let path = entry?.path();
            if let (Some(name), Some("svg")) = (
                path.file_name().and_then(|name| name.to_str()),
                path.extension().and_then(|ending| ending.to_str()),
            ) {
                files.insert(name.to_owned(), fs::read_to_string(&path)?);
            }
        }
    }
    Ok(files)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::{SavedRun, existing_plots, folder, plots, with_regions};
    use crate::bench::example;

    const EXAMPLE: &str = include_str!("page/example.md");

    fn assert_same(found: &str, expected: &str, what: &str) {
        for (number, (found, expected)) in (1..).zip(found.lines().zip(expected.lines())) {
            assert_eq!(found, expected, "{what}, line {number}");
        }
        assert!(found == expected, "{what} has another length");
    }

    #[test]
    fn only_regions_are_replaced() {
        let text = "# A\n<!-- other -->\n\n<!-- bench:counts -->\nold\n<!-- /bench:counts -->\nB\n\
                    <!-- bench:races:python -->\n<!-- /bench:races:python -->\nC";
        let written = with_regions(text, &[]).unwrap();
        let nothing = "\n\nNot measured yet.\n\n";
        assert_eq!(
            written,
            format!(
                "# A\n<!-- other -->\n\n<!-- bench:counts -->{nothing}<!-- /bench:counts -->\nB\n\
                 <!-- bench:races:python -->{nothing}<!-- /bench:races:python -->\nC"
            )
        );
        assert_eq!(with_regions(&written, &[]).unwrap(), written);
        for wrong in [
            "<!-- bench:counts -->\n",
            "<!-- bench:nothing -->\n<!-- /bench:nothing -->",
            "<!-- bench:races:nothing -->\n<!-- /bench:races:nothing -->",
            "<!-- bench:counts",
        ] {
            assert!(with_regions(wrong, &[]).is_err(), "{wrong}");
        }
    }

    /// `TSSD_EXAMPLE_PAGE=1` updates the example.
    #[test]
    fn example_run_generates_all_regions() {
        let written = with_regions(EXAMPLE, &[example::example_run()]).unwrap();
        if std::env::var_os("TSSD_EXAMPLE_PAGE").is_some() {
            let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/bench/page/example.md");
            return std::fs::write(page, written).unwrap();
        }
        assert_same(EXAMPLE, &written, "the example");
    }

    #[test]
    fn page_and_plots_match_saved_runs() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let all = SavedRun::read_all(&folder(&root)).unwrap();
        let page = std::fs::read_to_string(root.join("docs/performance.md")).unwrap();
        assert_same(&page, &with_regions(&page, &all).unwrap(), "`cargo xtask bench page`");
        let (found, expected) = (existing_plots(&folder(&root)).unwrap(), plots(&all).unwrap());
        assert!(found.keys().eq(expected.keys()), "{:?} {:?}", found.keys(), expected.keys());
        for (name, svg) in found {
            assert_same(&svg, &expected[&name], &name);
        }
        let regions = ["targets", "summary", "series", "fits", "counts", "machine"];
        let of_suites = all.iter().filter(|kept| !kept.races.is_empty());
        let of_suites = of_suites.map(|kept| format!("races:{}", kept.suite.name));
        for name in regions.map(str::to_owned).into_iter().chain(of_suites) {
            assert!(page.contains(&format!("<!-- bench:{name} -->")), "{name}");
        }
    }
}
