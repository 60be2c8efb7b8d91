use std::collections::BTreeMap;
use std::io::{self, BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::step::cargo;
use crate::workspace::Workspace;

/// Packages and features of the suites, which are built by one command.
const PACKAGES: &str = "--package tssd-tests --package tssd --package tssd-python --features tssd-tests/object,tssd-tests/cuda";

/// The programs of the suites, by name, built in the release profile.
pub(super) struct SuitePrograms(BTreeMap<String, PathBuf>);

impl SuitePrograms {
    /// Builds the programs of all suites. `None` if that fails.
    pub(super) fn build(workspace: &Workspace) -> io::Result<Option<Self>> {
        let mut command = Command::new(cargo());
        command.args(["build", "--release", "--lib", "--bins", "--benches"]);
        command.args(PACKAGES.split(' ')).arg("--message-format=json-render-diagnostics");
        let mut child = command.current_dir(&workspace.root).stdout(Stdio::piped()).spawn()?;
        let output = child.stdout.take().expect("it is a pipe");
        let mut programs = BTreeMap::new();
        for line in BufReader::new(output).lines() {
            programs.extend(program(&line?));
        }
        Ok(child.wait()?.success().then_some(Self(programs)))
    }

    /// Returns a command that runs a suite.
    pub(super) fn suite_command(&self, name: &str) -> io::Result<Command> {
        let program = self.0.get(name).ok_or_else(|| {
            io::Error::new(io::ErrorKind::NotFound, format!("cargo did not build the bench {name}"))
        })?;
        let mut command = Command::new(program);
        // glibc may return freed memory to the system in each turn and request it again, which can take half of the
        // time of a turn. With these thresholds it keeps the memory of small turns, for all runners.
        command.env("MALLOC_TRIM_THRESHOLD_", "1073741824");
        command.env("MALLOC_MMAP_THRESHOLD_", "33554432");
        Ok(command)
    }
}

/// Returns the name and the program of a bench, if a message of Cargo reports one.
fn program(line: &str) -> Option<(String, PathBuf)> {
    let message: Value = serde_json::from_str(line).ok()?;
    let target = &message["target"];
    let is_bench = target["kind"].as_array()?.iter().any(|kind| kind == "bench");
    let program = message["executable"].as_str().filter(|_| is_bench)?;
    Some((target["name"].as_str()?.to_owned(), program.into()))
}

#[cfg(test)]
mod tests {
    use super::program;

    #[test]
    fn benches_are_found_in_cargo_messages() {
        let bench = r#"{"reason":"compiler-artifact","target":{"kind":["bench"],"name":"store"},"executable":"/t/store-1"}"#;
        assert_eq!(program(bench), Some(("store".to_owned(), "/t/store-1".into())));
        for other in [
            bench.replace("bench\"]", "bin\"]"),
            bench.replace("\"/t/store-1\"", "null"),
            r#"{"reason":"build-finished","success":true}"#.to_owned(),
            "warning: none of its messages".to_owned(),
        ] {
            assert_eq!(program(&other), None, "{other}");
        }
    }
}
