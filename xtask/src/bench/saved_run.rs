use std::fs;
use std::io;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::bench::NAMES;
use crate::bench::machine::Machine;
use crate::bench::record::{Count, Fit, Race, Record, Series, Suite};

/// A saved run of a complete suite: a JSON file in `docs/performance`.
///
/// The page is generated from these files.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SavedRun {
    pub(crate) date: String,
    /// Commit that was measured.
    pub(crate) commit: String,
    /// Duration of the run in seconds.
    pub(crate) seconds: u64,
    pub(crate) machine: Machine,
    pub(crate) suite: Suite,
    pub(crate) races: Vec<Race>,
    pub(crate) fits: Vec<Fit>,
    pub(crate) series: Vec<Series>,
    pub(crate) counts: Vec<Count>,
}

impl SavedRun {
    /// Parses the records of a suite, one per line. The first is the suite record.
    pub(crate) fn parse(lines: &str, machine: Machine) -> Result<Self, String> {
        let mut records = lines.lines().zip(1..).map(|(line, number)| {
            Record::parse(line).map_err(|error| format!("record {number}: {error}"))
        });
        let Some(Record::Suite(suite)) = records.next().transpose()? else {
            return Err("the first record is not a suite record".into());
        };
        let (races, fits, series, counts) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let (date, commit) = (String::new(), String::new());
        let mut run =
            Self { date, commit, seconds: 0, machine, suite, races, fits, series, counts };
        for record in records {
            match record? {
                Record::Suite(suite) => {
                    return Err(format!("there is a second suite record: {}", suite.name));
                }
                Record::Race(race) => run.races.push(race),
                Record::Fit(fit) => run.fits.push(fit),
                Record::Series(series) => run.series.push(series),
                Record::Count(count) => run.counts.push(count),
            }
        }
        Ok(run)
    }

    /// Reads the saved runs of all suites, in the order in which the suites run.
    pub(crate) fn read_all(folder: &Path) -> io::Result<Vec<Self>> {
        let mut all = Vec::new();
        for name in NAMES {
            let path = folder.join(format!("{name}.json"));
            if path.exists() {
                let text = fs::read_to_string(&path)?;
                let failed = |error| io::Error::other(format!("{}: {error}", path.display()));
                all.push(serde_json::from_str(&text).map_err(failed)?);
            }
        }
        Ok(all)
    }

    /// Saves the run, in place of an earlier one of the same suite.
    pub(crate) fn write(&self, folder: &Path) -> io::Result<()> {
        fs::create_dir_all(folder)?;
        fs::write(folder.join(format!("{}.json", self.suite.name)), self.text()?)
    }

    /// Formats the run as JSON with one record per line, for readable diffs.
    fn text(&self) -> serde_json::Result<String> {
        let one = [
            ("date", serde_json::to_string(&self.date)?),
            ("commit", serde_json::to_string(&self.commit)?),
            ("seconds", serde_json::to_string(&self.seconds)?),
            ("machine", serde_json::to_string(&self.machine)?),
            ("suite", serde_json::to_string(&self.suite)?),
            ("races", lines(&self.races)?),
            ("fits", lines(&self.fits)?),
            ("series", lines(&self.series)?),
            ("counts", lines(&self.counts)?),
        ];
        let members = one.map(|(key, value)| format!("\"{key}\": {value}"));
        Ok(format!("{{\n{}\n}}\n", members.join(",\n")))
    }
}

fn lines(records: &[impl Serialize]) -> serde_json::Result<String> {
    let lines: Result<Vec<_>, _> = records.iter().map(serde_json::to_string).collect();
    let lines = lines?;
    Ok(if lines.is_empty() { "[]".into() } else { format!("[\n{}\n]", lines.join(",\n")) })
}

#[cfg(test)]
mod tests {
    use super::SavedRun;
    use crate::bench::example;
    use crate::bench::machine::Machine;

    #[test]
    fn saved_run_roundtrips() {
        let kept = example::example_run();
        let text = kept.text().unwrap();
        assert_eq!(serde_json::from_str::<SavedRun>(&text).unwrap(), kept);
        let records = kept.races.len() + kept.fits.len() + kept.series.len() + kept.counts.len();
        assert_eq!(text.lines().count(), records + 15, "{text}");
        assert!(text.lines().all(|line| !line.ends_with(' ')), "{text}");
    }

    #[test]
    fn folder_contains_runs_of_all_suites() {
        let folder = std::env::temp_dir().join(format!("tssd-kept-{}", std::process::id()));
        assert_eq!(SavedRun::read_all(&folder).unwrap(), []);
        example::example_run().write(&folder).unwrap();
        let found = SavedRun::read_all(&folder);
        std::fs::remove_dir_all(&folder).unwrap();
        assert_eq!(found.unwrap(), [example::example_run()]);
    }

    #[test]
    fn first_record_is_the_only_suite_record() {
        let machine = || -> Machine { example::example_run().machine };
        let parse = |lines: &str| SavedRun::parse(lines, machine());
        let lines: Vec<&str> = example::LINES.lines().collect();
        parse(&lines.join("\n")).unwrap();
        assert!(parse("").is_err());
        assert!(parse(&lines[1..].join("\n")).is_err());
        assert!(parse(&[lines[0], lines[0]].join("\n")).is_err());
        let error = parse(&[lines[0], "{}"].join("\n")).unwrap_err();
        assert!(error.starts_with("record 2: "), "{error}");
    }
}
