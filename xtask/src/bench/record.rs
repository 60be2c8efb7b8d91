use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Number, Value};

/// A record: one line of JSON that a suite has written.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Record {
    Suite(Suite),
    Race(Race),
    Fit(Fit),
    Series(Series),
    Count(Count),
}

/// The suite that has run. The first record of a file.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Suite {
    pub(crate) name: String,
    pub(crate) versions: BTreeMap<String, String>,
    pub(crate) options: Map<String, Value>,
}

/// A race: runners that do the same work in turns.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Race {
    pub(crate) case: String,
    pub(crate) what: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) state_dict: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) tensors: Option<u64>,
    pub(crate) runners: Vec<Runner>,
}

/// A runner of a race.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Runner {
    pub(crate) name: String,
    pub(crate) role: Role,
    /// Duration of the turn of each round.
    pub(crate) seconds: Vec<f64>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) targets: Vec<Target>,
    /// Counts of one turn, such as minor faults.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) counts: BTreeMap<String, Number>,
}

/// Role of a runner.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Role {
    /// TSSD, which the race is about.
    Ours,
    /// An alternative that a user would choose.
    Peer,
    /// A limit of the hardware or the operating system.
    Limit,
    /// A variant of TSSD, or another comparison.
    #[serde(rename = "also")]
    Variant,
}

/// Target of a runner.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(untagged)]
pub(crate) enum Target {
    Speed(Speed),
    Milliseconds(Milliseconds),
    Rate(Rate),
}

/// Target: at least `speed` times as fast as the runner `of`.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Speed {
    #[serde(rename = "of")]
    pub(crate) reference: String,
    pub(crate) speed: f64,
}

/// Target: at most this many milliseconds.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Milliseconds {
    pub(crate) milliseconds: f64,
}

/// Target: at least this many GB/s.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Rate {
    pub(crate) gigabytes_per_second: f64,
}

/// An operation on state dicts of different sizes.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Fit {
    pub(crate) operation: String,
    pub(crate) what: String,
    pub(crate) runners: Vec<FitRunner>,
}

/// A runner of a fit.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct FitRunner {
    pub(crate) name: String,
    pub(crate) role: Role,
    pub(crate) points: Vec<FitPoint>,
}

/// Times of one size of state dict.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct FitPoint {
    pub(crate) tensors: u64,
    pub(crate) bytes: u64,
    pub(crate) seconds: Vec<f64>,
}

/// A series: costs for a growing parameter.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Series {
    pub(crate) name: String,
    pub(crate) what: String,
    /// Name of the parameter.
    pub(crate) x: String,
    /// Unit of the costs.
    pub(crate) y: Unit,
    pub(crate) runners: Vec<SeriesRunner>,
}

/// Unit of the values of a series.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Unit {
    Seconds,
    Bytes,
}

/// A runner of a series.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SeriesRunner {
    pub(crate) name: String,
    pub(crate) role: Role,
    pub(crate) points: Vec<SeriesPoint>,
}

/// Costs of all rounds at one value of the parameter.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SeriesPoint {
    pub(crate) x: f64,
    pub(crate) values: Vec<f64>,
}

/// Counts of one turn of an operation, such as allocations and requests.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Count {
    pub(crate) operation: String,
    pub(crate) counts: BTreeMap<String, Number>,
}

impl Record {
    /// Parses a line.
    ///
    /// # Errors
    ///
    /// If a field is missing or unknown, or a figure is missing: the page would have a gap.
    pub(crate) fn parse(line: &str) -> Result<Self, String> {
        let record: Self = serde_json::from_str(line).map_err(|error| error.to_string())?;
        match &record {
            Self::Race(race) => race.check()?,
            Self::Fit(fit) => fit.check()?,
            Self::Series(series) => series.check()?,
            Self::Suite(_) | Self::Count(_) => {}
        }
        Ok(record)
    }
}

impl Race {
    /// Returns the runner with the role `Ours`, which is the first one.
    pub(crate) fn ours(&self) -> &Runner {
        &self.runners[0]
    }

    pub(crate) fn runner(&self, name: &str) -> Option<&Runner> {
        self.runners.iter().find(|runner| runner.name == name)
    }

    fn check(&self) -> Result<(), String> {
        let invalid =
            |reason: &str| Err(format!("race {} of {:?}: {reason}", self.case, self.state_dict));
        let is_ours = |runner: &Runner| runner.role == Role::Ours;
        if !self.runners.first().is_some_and(is_ours) || self.runners.iter().skip(1).any(is_ours) {
            return invalid("the first runner, and no other one, must have the role \"ours\"");
        }
        let names: BTreeSet<&str> = self.runners.iter().map(|runner| &*runner.name).collect();
        if names.len() < self.runners.len() {
            return invalid("two runners have the same name");
        }
        let rounds = self.ours().seconds.len();
        if self.runners.iter().any(|runner| runner.seconds.len() != rounds) {
            return invalid("runners have different numbers of rounds");
        }
        if !self.runners.iter().all(|runner| are_times(&runner.seconds)) {
            return invalid("a turn has no duration, or there are no turns");
        }
        Ok(())
    }
}

impl Fit {
    fn check(&self) -> Result<(), String> {
        let mut points = self.runners.iter().flat_map(|runner| &runner.points);
        if !points.all(|point| are_times(&point.seconds)) {
            return Err(format!(
                "fit {}: a turn has no duration, or there are no turns",
                self.operation
            ));
        }
        Ok(())
    }
}

impl Series {
    fn check(&self) -> Result<(), String> {
        for runner in &self.runners {
            let is_empty = runner.points.iter().any(|point| point.values.is_empty());
            if is_empty || !runner.points.is_sorted_by(|one, next| one.x < next.x) {
                return Err(format!(
                    "series {}: the points of {} are empty, or not sorted by x",
                    self.name, runner.name
                ));
            }
        }
        Ok(())
    }
}

/// Returns whether there are times, and all of them are positive.
fn are_times(seconds: &[f64]) -> bool {
    !seconds.is_empty() && seconds.iter().all(|seconds| *seconds > 0.0)
}

#[cfg(test)]
mod tests {
    use super::{Record, Target};

    const RACE: &str = r#"{"race":{"case":"put","what":"Put","state_dict":null,"bytes":8,"tensors":1,"runners":[
        {"name":"tssd","role":"ours","seconds":[0.1,0.2],"targets":[{"of":"memcpy","speed":0.85},{"milliseconds":1}]},
        {"name":"memcpy","role":"limit","seconds":[0.1,0.3],"counts":{"minor faults":12}}]}}"#;

    #[test]
    fn race_is_parsed() {
        let Record::Race(race) = Record::parse(RACE).unwrap() else { panic!() };
        assert_eq!(race.ours().name, "tssd");
        assert!(matches!(race.ours().targets[1], Target::Milliseconds(_)));
        assert_eq!(race.runner("memcpy").unwrap().counts["minor faults"].as_u64(), Some(12));
    }

    #[test]
    fn invalid_records_are_refused() {
        for (found, instead) in [
            (r#""case":"put""#, r#""case":"put","colour":"red""#),
            (r#""case":"put","#, ""),
            (r#""speed":0.85"#, r#""speed":0.85,"milliseconds":1"#),
            (r#"{"of":"memcpy","speed":0.85}"#, r#"{"of":"memcpy"}"#),
            (r#""role":"limit""#, r#""role":"best""#),
            (r#""role":"limit""#, r#""role":"ours""#),
            (r#""role":"ours""#, r#""role":"also""#),
            (r#""name":"memcpy""#, r#""name":"tssd""#),
            ("[0.1,0.3]", "[0.1]"),
            ("[0.1,0.3]", "[0.1,0]"),
            (r#"{"race""#, r#"{"run""#),
            (r#"{"race""#, r#"{"count":{"operation":"x","counts":{}},"race""#),
        ] {
            let line = RACE.replacen(found, instead, 1);
            assert_ne!(line, RACE);
            assert!(Record::parse(&line).is_err(), "{line}");
        }
    }

    #[test]
    fn other_records_are_parsed() {
        for line in [
            r#"{"suite":{"name":"python","versions":{"torch":"2.15.0"},"options":{"size":null,"iterations":9}}}"#,
            r#"{"fit":{"operation":"save","what":"Save","runners":[{"name":"tssd","role":"ours","points":[{"tensors":100,"bytes":16000000,"seconds":[0.1]}]}]}}"#,
            r#"{"series":{"name":"readers","what":"Gets","x":"readers","y":"seconds","runners":[{"name":"tssd","role":"ours","points":[{"x":1,"values":[0.1]}]}]}}"#,
            r#"{"count":{"operation":"put","counts":{"requests":2,"bytes requested / needed":1.0}}}"#,
        ] {
            Record::parse(line).unwrap();
        }
        let empty = r#"{"series":{"name":"readers","what":"","x":"","y":"bytes","runners":[{"name":"tssd","role":"ours","points":[{"x":1,"values":[]}]}]}}"#;
        assert!(Record::parse(empty).is_err());
    }
}
