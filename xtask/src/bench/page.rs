use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::Path;

use crate::bench::kept::Kept;
use crate::bench::page::table::Table;
use crate::bench::plot::Plot;
use crate::bench::{NAMES, folder};

/// What operations need of the machine.
mod counts;
/// What grows, and with what.
mod growth;
/// Who measured what, when and where.
mod machine;
/// Races, and the targets of all.
mod races;
/// A table of Markdown.
mod table;

/// Writes the marked regions of the page and all plots, from what is kept.
pub(crate) fn write(root: &Path) -> io::Result<()> {
    let folder = folder(root);
    let all = Kept::read_all(&folder)?;
    let page = root.join("docs/performance.md");
    let text = with_regions(&fs::read_to_string(&page)?, &all).map_err(io::Error::other)?;
    let plots = plots(&all)?;
    for name in drawn(&folder)?.keys().filter(|name| !plots.contains_key(*name)) {
        fs::remove_file(folder.join(name))?;
    }
    for (name, svg) in plots {
        fs::write(folder.join(name), svg)?;
    }
    fs::write(page, text)
}

/// The text with what stands between the marks of each region made anew.
fn with_regions(text: &str, all: &[Kept]) -> Result<String, String> {
    let mut written = Vec::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once("<!-- bench:") {
        let (name, after) = after.split_once(" -->\n").ok_or("a mark of a region has no end")?;
        let end = format!("<!-- /bench:{name} -->");
        let (_, after) = after.split_once(&end).ok_or(format!("region {name} has no end"))?;
        let region = region(name, all).ok_or(format!("there is no region {name}"))?;
        let region = if region.is_empty() { "Not measured yet.\n" } else { &region };
        written.push(format!("{before}<!-- bench:{name} -->\n\n{region}\n{end}"));
        rest = after;
    }
    Ok(written.concat() + rest)
}

/// What stands in a region: nothing if nobody has measured it yet.
fn region(name: &str, all: &[Kept]) -> Option<String> {
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

/// The files of all plots.
fn plots(all: &[Kept]) -> io::Result<BTreeMap<String, String>> {
    let mut files = BTreeMap::new();
    for plot in Plot::all(all) {
        for (name, svg) in plot.files()? {
            if files.insert(name.clone(), svg).is_some() {
                return Err(io::Error::other(format!("two plots are called {name}")));
            }
        }
    }
    Ok(files)
}

/// Those that are there.
fn drawn(folder: &Path) -> io::Result<BTreeMap<String, String>> {
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

    use super::{Kept, drawn, folder, plots, with_regions};
    use crate::bench::example;

    const EXAMPLE: &str = include_str!("page/example.md");

    fn assert_same(found: &str, expected: &str, what: &str) {
        for (number, (found, expected)) in (1..).zip(found.lines().zip(expected.lines())) {
            assert_eq!(found, expected, "{what}, line {number}");
        }
        assert!(found == expected, "{what} has another length");
    }

    #[test]
    fn regions_are_replaced_and_nothing_else() {
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

    /// To have it written anew: `TSSD_EXAMPLE_PAGE=1`.
    #[test]
    fn an_example_gives_all_regions() {
        let written = with_regions(EXAMPLE, &[example::kept()]).unwrap();
        if std::env::var_os("TSSD_EXAMPLE_PAGE").is_some() {
            let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/bench/page/example.md");
            return std::fs::write(page, written).unwrap();
        }
        assert_same(EXAMPLE, &written, "the example");
    }

    #[test]
    fn the_page_and_its_plots_are_what_is_kept() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let all = Kept::read_all(&folder(&root)).unwrap();
        let page = std::fs::read_to_string(root.join("docs/performance.md")).unwrap();
        assert_same(&page, &with_regions(&page, &all).unwrap(), "`cargo xtask bench page`");
        let (found, expected) = (drawn(&folder(&root)).unwrap(), plots(&all).unwrap());
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
