use std::fs;
use std::io;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::bench::NAMES;
use crate::bench::machine::Machine;
use crate::bench::record::{Count, Fit, Race, Record, Series, Suite};

/// A whole run of a suite, as a file in `docs/performance` has it: what the page is made of.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Kept {
    pub(crate) date: String,
    /// The commit that was measured.
    pub(crate) commit: String,
    /// How long it took.
    pub(crate) seconds: u64,
    pub(crate) machine: Machine,
    pub(crate) suite: Suite,
    pub(crate) races: Vec<Race>,
    pub(crate) fits: Vec<Fit>,
    pub(crate) series: Vec<Series>,
    pub(crate) counts: Vec<Count>,
}

impl Kept {
    /// What the lines of a suite say.
    pub(crate) fn parse(lines: &str, machine: Machine) -> Result<Self, String> {
        let mut records = lines.lines().zip(1..).map(|(line, number)| {
            Record::parse(line).map_err(|error| format!("record {number}: {error}"))
        });
        let Some(Record::Suite(suite)) = records.next().transpose()? else {
            return Err("the first record does not say which suite ran".into());
        };
        let (races, fits, series, counts) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let (date, commit) = (String::new(), String::new());
        let mut kept =
            Self { date, commit, seconds: 0, machine, suite, races, fits, series, counts };
        for record in records {
            match record? {
                Record::Suite(suite) => return Err(format!("{} ran as well", suite.name)),
                Record::Race(race) => kept.races.push(race),
                Record::Fit(fit) => kept.fits.push(fit),
                Record::Series(series) => kept.series.push(series),
                Record::Count(count) => kept.counts.push(count),
            }
        }
        Ok(kept)
    }

    /// Those of all suites that were ever kept, in the order in which they run.
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

    /// Keeps it for the page.
    pub(crate) fn write(&self, folder: &Path) -> io::Result<()> {
        fs::create_dir_all(folder)?;
        fs::write(folder.join(format!("{}.json", self.suite.name)), self.text()?)
    }

    /// JSON, one record on each line, so that a change of one shows as one.
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
    use super::Kept;
    use crate::bench::example;
    use crate::bench::machine::Machine;

    #[test]
    fn what_is_kept_is_what_was_measured() {
        let kept = example::kept();
        let text = kept.text().unwrap();
        assert_eq!(serde_json::from_str::<Kept>(&text).unwrap(), kept);
        let records = kept.races.len() + kept.fits.len() + kept.series.len() + kept.counts.len();
        assert_eq!(text.lines().count(), records + 15, "{text}");
        assert!(text.lines().all(|line| !line.ends_with(' ')), "{text}");
    }

    #[test]
    fn a_folder_has_all_suites() {
        let folder = std::env::temp_dir().join(format!("tssd-kept-{}", std::process::id()));
        assert_eq!(Kept::read_all(&folder).unwrap(), []);
        example::kept().write(&folder).unwrap();
        let found = Kept::read_all(&folder);
        std::fs::remove_dir_all(&folder).unwrap();
        assert_eq!(found.unwrap(), [example::kept()]);
    }

    #[test]
    fn a_suite_says_first_that_it_is_one() {
        let machine = || -> Machine { example::kept().machine };
        let parse = |lines: &str| Kept::parse(lines, machine());
        let lines: Vec<&str> = example::LINES.lines().collect();
        parse(&lines.join("\n")).unwrap();
        assert!(parse("").is_err());
        assert!(parse(&lines[1..].join("\n")).is_err());
        assert!(parse(&[lines[0], lines[0]].join("\n")).is_err());
        let error = parse(&[lines[0], "{}"].join("\n")).unwrap_err();
        assert!(error.starts_with("record 2: "), "{error}");
    }
}
