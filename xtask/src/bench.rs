use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use crate::bench::machine::Machine;
use crate::bench::programs::SuitePrograms;
use crate::bench::saved_run::SavedRun;
use crate::python;
use crate::workspace::Workspace;

/// A saved run, for tests.
#[cfg(test)]
mod example;
/// Fits of the fixed, per-tensor and per-byte cost of an operation.
mod fit;
/// Labels of races.
mod label;
/// The machine that a run was measured on.
mod machine;
/// The page `docs/performance.md`.
mod page;
/// The plots of the page.
mod plot;
/// The programs of the suites.
mod programs;
/// Formatting of numbers with units.
mod quantity;
/// The records that suites write.
mod record;
/// The saved runs, from which the page is generated.
mod saved_run;
/// Medians, quartiles and ratios.
mod statistics;
/// Comparison of results with their targets.
mod verdict;

/// The suites, in the order in which they run.
///
/// The suite gpu runs only if it is named, since it needs a GPU.
pub(crate) const NAMES: [&str; 5] = ["format", "store", "counts", "python", "gpu"];

/// Number of suites, from the first on, that run by default.
const DEFAULT_SUITES: usize = 4;

/// Environment variable: the file to which a suite appends its records.
const RECORDS: &str = "TSSD_BENCH_RECORDS";

/// Task of the command line.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Task<'a> {
    /// Generates the page from the saved runs.
    Page,
    /// Runs suites, or parts of them.
    Run { suites: Vec<&'a str>, arguments: Vec<&'a str> },
}

impl<'a> Task<'a> {
    /// Parses the command line. The first word may name a suite. The other words are passed to the suites.
    pub(crate) fn parse(words: &[&'a str]) -> Option<Self> {
        let (suites, arguments) = match words {
            ["page"] => return Some(Self::Page),
            ["page", ..] => return None,
            ["all", rest @ ..] => (NAMES[..DEFAULT_SUITES].to_vec(), rest),
            [name, rest @ ..] if NAMES.contains(name) => (vec![*name], rest),
            rest => (NAMES[..DEFAULT_SUITES].to_vec(), rest),
        };
        Some(Self::Run { suites, arguments: arguments.to_vec() })
    }

    pub(crate) fn run(&self, workspace: &Workspace) -> io::Result<bool> {
        match self {
            Self::Page => page::write(&workspace.root).map(|()| true),
            Self::Run { suites, arguments } => run(workspace, suites, arguments),
        }
    }
}

/// Runs suites.
///
/// Saves the results only of complete suites with default options, so that saved results are comparable.
fn run(workspace: &Workspace, suites: &[&str], arguments: &[&str]) -> io::Result<bool> {
    let is_complete = arguments.is_empty();
    let Some((built, mut python)) = prepare(workspace, suites.contains(&"python"))? else {
        return Ok(false);
    };
    let (mut has_passed, commit) = (true, machine::commit(&workspace.root));
    for suite in suites {
        let started = Instant::now();
        let records = workspace.target.join("bench").join(format!("{suite}.jsonl"));
        let mut command = match python.take_if(|_| *suite == "python") {
            Some(command) => command,
            None => built.suite_command(suite)?,
        };
        command.args(arguments).current_dir(&workspace.root);
        if is_complete {
            remove_old_records(&records)?;
            command.env(RECORDS, &records);
        }
        if !command.status()?.success() {
            println!("suite {suite} failed: its results are not saved");
            has_passed = false;
        } else if is_complete {
            let run = read_run(suite, &records, &commit, started.elapsed())?;
            run.write(&folder(&workspace.root))?;
            page::write(&workspace.root)?;
            println!("wrote docs/performance/{suite}.json, docs/performance.md and its plots");
        }
    }
    if !is_complete {
        println!("docs/ is unchanged: only results of complete suites without options are saved");
    }
    Ok(has_passed)
}

/// Builds and installs everything in parallel, before anything is measured. `None` if that fails.
fn prepare(
    workspace: &Workspace,
    with_python: bool,
) -> io::Result<Option<(SuitePrograms, Option<Command>)>> {
    let (built, installed) = thread::scope(|scope| {
        let install =
            || if with_python { python::install_environment(workspace) } else { Ok(true) };
        let installing = scope.spawn(install);
        (SuitePrograms::build(workspace), installing.join().expect("it does not panic"))
    });
    let (Some(built), true) = (built?, installed?) else { return Ok(None) };
    let python = if with_python { Some(python::bench_command(workspace)?) } else { None };
    Ok(Some((built, python)))
}

/// Removes records of an earlier run, since suites append to the file.
fn remove_old_records(records: &Path) -> io::Result<()> {
    records.parent().map_or(Ok(()), fs::create_dir_all)?;
    match fs::remove_file(records) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Reads the records of a complete suite, with the commit and the duration of the run.
fn read_run(suite: &str, records: &Path, commit: &str, duration: Duration) -> io::Result<SavedRun> {
    let failed = |error| io::Error::other(format!("{}: {error}", records.display()));
    let lines = fs::read_to_string(records).map_err(|error| failed(error.to_string()))?;
    let (date, commit) = (machine::today(), commit.to_owned());
    let run = SavedRun::parse(&lines, Machine::detect()).map_err(failed)?;
    let run = SavedRun { date, commit, seconds: duration.as_secs(), ..run };
    if run.suite.name != suite {
        return Err(failed(format!("the records are of suite {}", run.suite.name)));
    }
    Ok(run)
}

/// Returns the folder of saved runs and plots.
fn folder(root: &Path) -> PathBuf {
    root.join("docs/performance")
}

#[cfg(test)]
mod tests {
    use super::Task;

    #[test]
    fn first_word_may_be_a_suite() {
        const DEFAULT: [&str; 4] = ["format", "store", "counts", "python"];
        let run = |suites: &[&'static str], arguments: &[&'static str]| {
            Some(Task::Run { suites: suites.to_vec(), arguments: arguments.to_vec() })
        };
        for (words, task) in [
            ("", run(&DEFAULT, &[])),
            ("all", run(&DEFAULT, &[])),
            ("all put", run(&DEFAULT, &["put"])),
            ("put", run(&DEFAULT, &["put"])),
            ("gpu", run(&["gpu"], &[])),
            ("store", run(&["store"], &[])),
            ("store --size 600MB put get", run(&["store"], &["--size", "600MB", "put", "get"])),
            ("--iterations 3", run(&DEFAULT, &["--iterations", "3"])),
            ("page", Some(Task::Page)),
            ("page put", None),
        ] {
            let words: Vec<&str> = words.split_whitespace().collect();
            assert_eq!(Task::parse(&words), task, "{words:?}");
        }
    }
}
