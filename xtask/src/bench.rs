use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use crate::bench::built::Built;
use crate::bench::kept::Kept;
use crate::bench::machine::Machine;
use crate::python;
use crate::workspace::Workspace;

/// The suites as programs.
mod built;
/// A run to test with.
#[cfg(test)]
mod example;
/// What an operation costs once, for each tensor and for each byte.
mod fit;
/// The runs that the page is made of.
mod kept;
/// What races are called.
mod label;
/// What the figures were measured on.
mod machine;
/// `docs/performance.md`.
mod page;
/// Its plots.
mod plot;
/// Figures as people read them.
mod quantity;
/// What suites write.
mod record;
/// Medians.
mod statistics;
/// Whether targets are met.
mod verdict;

/// The suites, in the order in which they run: what needs torch comes late, and last what runs only when it is named,
/// since few machines have a GPU.
pub(crate) const NAMES: [&str; 5] = ["format", "store", "counts", "python", "gpu"];

/// So many of them run on every machine.
const EVERYWHERE: usize = 4;

/// The variable that names the file to which a suite appends its records.
const RECORDS: &str = "TSSD_BENCH_RECORDS";

/// What the command line asks for.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Task<'a> {
    /// To write the page anew, from what was kept.
    Page,
    /// To run suites, or parts of them.
    Run { suites: Vec<&'a str>, arguments: Vec<&'a str> },
}

impl<'a> Task<'a> {
    /// The first word may be the name of a suite; what follows is for the suites to understand.
    pub(crate) fn parse(words: &[&'a str]) -> Option<Self> {
        let (suites, arguments) = match words {
            ["page"] => return Some(Self::Page),
            ["page", ..] => return None,
            ["all", rest @ ..] => (NAMES[..EVERYWHERE].to_vec(), rest),
            [name, rest @ ..] if NAMES.contains(name) => (vec![*name], rest),
            rest => (NAMES[..EVERYWHERE].to_vec(), rest),
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

/// Runs these suites. What whole ones measure by their own defaults is kept for the page, nothing else,
/// so that its figures can be compared with earlier ones.
fn run(workspace: &Workspace, suites: &[&str], arguments: &[&str]) -> io::Result<bool> {
    let is_whole = arguments.is_empty();
    let Some((built, mut python)) = prepare(workspace, suites.contains(&"python"))? else {
        return Ok(false);
    };
    let (mut has_run, commit) = (true, machine::commit(&workspace.root));
    for suite in suites {
        let started = Instant::now();
        let records = workspace.target.join("bench").join(format!("{suite}.jsonl"));
        let mut command = match python.take_if(|_| *suite == "python") {
            Some(command) => command,
            None => built.suite(suite)?,
        };
        command.args(arguments).current_dir(&workspace.root);
        if is_whole {
            make_way(&records)?;
            command.env(RECORDS, &records);
        }
        if !command.status()?.success() {
            println!("nothing is kept of the suite {suite}: it failed");
            has_run = false;
        } else if is_whole {
            let kept = kept(suite, &records, (&commit, started.elapsed()))?;
            kept.write(&folder(&workspace.root))?;
            page::write(&workspace.root)?;
            println!("written: docs/performance/{suite}.json, the page and its plots");
        }
    }
    if !is_whole {
        println!("docs/ is as it was: only whole suites without options are kept for the page");
    }
    Ok(has_run)
}

/// Builds and installs all that is needed, side by side, before anything is measured; none if that fails.
fn prepare(
    workspace: &Workspace,
    with_python: bool,
) -> io::Result<Option<(Built, Option<Command>)>> {
    let (built, installed) = thread::scope(|scope| {
        let install = || if with_python { python::install(workspace) } else { Ok(true) };
        let installing = scope.spawn(install);
        (Built::all(workspace), installing.join().expect("it does not panic"))
    });
    let (Some(built), true) = (built?, installed?) else { return Ok(None) };
    let python = if with_python { Some(python::bench(workspace)?) } else { None };
    Ok(Some((built, python)))
}

/// Suites append to what is there.
fn make_way(records: &Path) -> io::Result<()> {
    records.parent().map_or(Ok(()), fs::create_dir_all)?;
    match fs::remove_file(records) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// What a suite has measured of a commit in so long.
fn kept(suite: &str, records: &Path, (commit, took): (&str, Duration)) -> io::Result<Kept> {
    let failed = |error| io::Error::other(format!("{}: {error}", records.display()));
    let lines = fs::read_to_string(records).map_err(|error| failed(error.to_string()))?;
    let (date, commit) = (machine::today(), commit.to_owned());
    let kept = Kept::parse(&lines, Machine::here()).map_err(failed)?;
    let kept = Kept { date, commit, seconds: took.as_secs(), ..kept };
    if kept.suite.name != suite {
        return Err(failed(format!("these are of the suite {}", kept.suite.name)));
    }
    Ok(kept)
}

/// Where runs are kept, and plots.
fn folder(root: &Path) -> PathBuf {
    root.join("docs/performance")
}

#[cfg(test)]
mod tests {
    use super::Task;

    #[test]
    fn the_first_word_may_be_a_suite() {
        const EVERYWHERE: [&str; 4] = ["format", "store", "counts", "python"];
        let run = |suites: &[&'static str], arguments: &[&'static str]| {
            Some(Task::Run { suites: suites.to_vec(), arguments: arguments.to_vec() })
        };
        for (words, task) in [
            ("", run(&EVERYWHERE, &[])),
            ("all", run(&EVERYWHERE, &[])),
            ("all put", run(&EVERYWHERE, &["put"])),
            ("put", run(&EVERYWHERE, &["put"])),
            ("gpu", run(&["gpu"], &[])),
            ("store", run(&["store"], &[])),
            ("store --size 600MB put get", run(&["store"], &["--size", "600MB", "put", "get"])),
            ("--iterations 3", run(&EVERYWHERE, &["--iterations", "3"])),
            ("page", Some(Task::Page)),
            ("page put", None),
        ] {
            let words: Vec<&str> = words.split_whitespace().collect();
            assert_eq!(Task::parse(&words), task, "{words:?}");
        }
    }
}
