use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Number, Value};

/// One line that a suite has written.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Record {
    Suite(Suite),
    Race(Race),
    Fit(Fit),
    Series(Series),
    Count(Count),
}

/// What ran: the first line.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Suite {
    pub(crate) name: String,
    pub(crate) versions: BTreeMap<String, String>,
    pub(crate) options: Map<String, Value>,
}

/// Runners that took turns at the same work.
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

/// One of them, with the seconds of each round.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Runner {
    pub(crate) name: String,
    pub(crate) role: Role,
    pub(crate) seconds: Vec<f64>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) targets: Vec<Target>,
    /// What was counted for one turn.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) counts: BTreeMap<String, Number>,
}

/// What a runner is to the one that is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Role {
    /// The one that is measured.
    Ours,
    /// What one would use instead.
    Peer,
    /// What the machine itself can do.
    Limit,
    /// Ours another way, or what helps to understand the others.
    Also,
}

/// What the figure of a runner is to be.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(untagged)]
pub(crate) enum Target {
    Speed(Speed),
    Milliseconds(Milliseconds),
    Rate(Rate),
}

/// At least `speed` times as fast as the runner `of`.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Speed {
    pub(crate) of: String,
    pub(crate) speed: f64,
}

/// At most so many.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Milliseconds {
    pub(crate) milliseconds: f64,
}

/// At least so many.
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

/// Who did it.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct FitRunner {
    pub(crate) name: String,
    pub(crate) role: Role,
    pub(crate) points: Vec<FitPoint>,
}

/// How long one size took.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct FitPoint {
    pub(crate) tensors: u64,
    pub(crate) bytes: u64,
    pub(crate) seconds: Vec<f64>,
}

/// What something costs as something else grows.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Series {
    pub(crate) name: String,
    pub(crate) what: String,
    /// What grows.
    pub(crate) x: String,
    /// What is measured.
    pub(crate) y: Unit,
    pub(crate) runners: Vec<SeriesRunner>,
}

/// What a value of a series counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Unit {
    Seconds,
    Bytes,
}

/// Whose cost it is.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SeriesRunner {
    pub(crate) name: String,
    pub(crate) role: Role,
    pub(crate) points: Vec<SeriesPoint>,
}

/// The values of its rounds at one x.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SeriesPoint {
    pub(crate) x: f64,
    pub(crate) values: Vec<f64>,
}

/// What one turn of an operation needs of the machine, where time would say less.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Count {
    pub(crate) operation: String,
    pub(crate) counts: BTreeMap<String, Number>,
}

impl Record {
    /// Reads a line: what is missing, unknown or without a figure is refused, for it would be a hole
    /// in the page.
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
    /// Ours, which is the first.
    pub(crate) fn ours(&self) -> &Runner {
        &self.runners[0]
    }

    pub(crate) fn runner(&self, name: &str) -> Option<&Runner> {
        self.runners.iter().find(|runner| runner.name == name)
    }

    fn check(&self) -> Result<(), String> {
        let wrong =
            |what: &str| Err(format!("race {} of {:?}: {what}", self.case, self.state_dict));
        let is_ours = |runner: &Runner| runner.role == Role::Ours;
        if !self.runners.first().is_some_and(is_ours) || self.runners.iter().skip(1).any(is_ours) {
            return wrong("the first runner and no other is ours");
        }
        let names: BTreeSet<&str> = self.runners.iter().map(|runner| &*runner.name).collect();
        if names.len() < self.runners.len() {
            return wrong("two runners have one name");
        }
        let rounds = self.ours().seconds.len();
        if self.runners.iter().any(|runner| runner.seconds.len() != rounds) {
            return wrong("not all runners have as many rounds");
        }
        if !self.runners.iter().all(|runner| are_times(&runner.seconds)) {
            return wrong("a turn took no time, or there is none");
        }
        Ok(())
    }
}

impl Fit {
    fn check(&self) -> Result<(), String> {
        let mut points = self.runners.iter().flat_map(|runner| &runner.points);
        if !points.all(|point| are_times(&point.seconds)) {
            return Err(format!("fit {}: a turn took no time, or there is none", self.operation));
        }
        Ok(())
    }
}

impl Series {
    fn check(&self) -> Result<(), String> {
        for runner in &self.runners {
            let is_empty = runner.points.iter().any(|point| point.values.is_empty());
            if is_empty || !runner.points.is_sorted_by(|one, next| one.x < next.x) {
                return Err(format!("series {}: {} is not a curve", self.name, runner.name));
            }
        }
        Ok(())
    }
}

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
    fn a_race_is_read() {
        let Record::Race(race) = Record::parse(RACE).unwrap() else { panic!() };
        assert_eq!(race.ours().name, "tssd");
        assert!(matches!(race.ours().targets[1], Target::Milliseconds(_)));
        assert_eq!(race.runner("memcpy").unwrap().counts["minor faults"].as_u64(), Some(12));
    }

    #[test]
    fn what_the_page_would_not_show_is_refused() {
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
    fn the_other_records_are_read() {
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
