//! The project's own commands: `cargo xtask help` lists them.

use std::process::ExitCode;

use crate::workspace::Workspace;

/// `bench`: what tests/benches and python/bench measure, and the page about it.
mod bench;
/// The folder that all checkouts share.
mod cache;
/// `corpus`: the inputs that fuzzing has found, as folders and as archives.
mod corpus;
/// `coverage`: how much of what decides the tests run.
mod coverage;
/// What comes from others: licences, versions, sources.
mod dependencies;
mod etcd;
/// What proofs count, in `target/reliability.json`.
mod figures;
/// The Python package: its tests; `wheel`: what is installed; `bench python`: its races.
mod python;
/// `reliability`: what the store promises, under faults.
mod reliability;
/// What the summary says at the end.
mod report;
/// Runs steps in order, up to the first that fails.
mod runner;
/// `sanitize`: the suites with checks of every access to memory.
mod sanitize;
/// One command that is run.
mod step;
/// How many tests an output reports.
mod tally;
/// `test`: every check there is.
mod test;
/// Programs of others, in a folder of their own.
mod tool;
/// The checks against torch.
mod torch;
/// `vectors`: the vectors of the spec, written anew.
mod vectors;
/// Pythons with packages of its own.
mod virtual_environment;
/// Where things are.
mod workspace;

const HELP: &str = "\
The project's own commands.

    cargo xtask test [-v]         runs every check that needs no torch; installs numpy, pytest and moto (0.4 GB)
    cargo xtask test --all [-v]   runs the others too; needs valgrind, installs torch and cargo-deny (7 GB)
    cargo xtask wheel [--target TRIPLE] [-v]
                                  the Python package with the command, in target/wheels; for another target if
                                  rustc has its standard library and cargo is told its linker
    cargo xtask vectors [-v]      writes spec/vectors anew, and has both readers read them
    cargo xtask corpus unpack     writes the corpora of the fuzz targets as folders, for `cargo fuzz`
    cargo xtask corpus pack       writes the archives of the corpora from these folders
    cargo xtask bench [SUITE] [OPTION…] [CASE…]
                                  runs races; SUITE: format, store, counts, python or all (default)
    cargo xtask bench page        writes docs/performance.md anew, from what is kept
    cargo xtask ci [-v]           everything that CI runs: test --all and reliability, in one run
    cargo xtask reliability [-v]  tests the promises of docs/guarantees.md under faults, as much as CI does; needs strace
    cargo xtask reliability --long [--minutes N] [-v]
                                  the same with larger campaigns, for at least N minutes, and with sanitizers
    cargo xtask sanitize [-v]     the suites with the address and the thread sanitizer
    cargo xtask coverage [-v]     which part of the lines that decode, validate, plan and commit the tests run
    cargo xtask help              this text

Bench options, and words that the names of cases are to have:

    --model DIR|shape:NAME        the state dict: the safetensors files of a folder, or a known shape
    --size SIZE                   as many of its layers as fit in this, such as 600MB
    --iterations N, --warmup N    the rounds that count, and those before them

Whole suites without options are kept in docs/performance, for the page. The suite python installs
torch (7 GB).

Packages and tools are installed in ~/.cache/tssd-xtask, for all checkouts; TSSD_XTASK_CACHE names another folder.

Two steps run at the same time; with -v one, whose output is shown as it comes. Else the output of a step is shown if it
fails, and target/xtask-logs has all of it.
";

#[derive(Debug, PartialEq, Eq)]
enum Task<'a> {
    Help,
    Test { all: bool, verbose: bool },
    Ci { verbose: bool },
    Wheel { target: Option<&'a str>, verbose: bool },
    Vectors { verbose: bool },
    Corpus { direction: corpus::Direction },
    Reliability { long: Option<u64>, verbose: bool },
    Sanitize { verbose: bool },
    Coverage { verbose: bool },
    Bench(bench::Task<'a>),
}

fn main() -> ExitCode {
    let words: Vec<String> =
        std::env::args_os().skip(1).map(|word| word.to_string_lossy().into_owned()).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let Some(task) = Task::parse(&words) else {
        eprint!("cargo xtask {}: there is no such command\n\n{HELP}", words.join(" "));
        return ExitCode::from(2);
    };
    let outcome = Workspace::find().and_then(|workspace| match task {
        Task::Help => {
            print!("{HELP}");
            Ok(true)
        }
        Task::Test { all, verbose } => test::run(&workspace, all, verbose),
        Task::Ci { verbose } => test::run_ci(&workspace, verbose),
        Task::Wheel { target, verbose } => python::run(&workspace, target, verbose),
        Task::Vectors { verbose } => vectors::run(&workspace, verbose),
        Task::Corpus { direction } => corpus::run(&workspace, direction),
        Task::Reliability { long, verbose } => reliability::run(&workspace, long, verbose),
        Task::Sanitize { verbose } => sanitize::run(&workspace, verbose),
        Task::Coverage { verbose } => coverage::run(&workspace, verbose),
        Task::Bench(task) => task.run(&workspace),
    });
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("xtask: {error}");
            ExitCode::FAILURE
        }
    }
}

impl<'a> Task<'a> {
    fn parse(words: &[&'a str]) -> Option<Self> {
        let (command, options) = words.split_first()?;
        if options.iter().any(|word| matches!(*word, "-h" | "--help")) {
            return Some(Self::Help);
        }
        if *command == "bench" {
            return bench::Task::parse(options).map(Self::Bench);
        }
        let is_verbose = |word: &&str| matches!(*word, "-v" | "--verbose");
        let verbose = options.iter().any(is_verbose);
        let rest: Vec<&str> = options.iter().copied().filter(|word| !is_verbose(word)).collect();
        match (*command, rest.as_slice(), verbose) {
            ("help" | "-h" | "--help", [], false) => Some(Self::Help),
            ("test", [], _) => Some(Self::Test { all: false, verbose }),
            ("test", ["--all"], _) => Some(Self::Test { all: true, verbose }),
            ("ci", [], _) => Some(Self::Ci { verbose }),
            ("wheel", [], _) => Some(Self::Wheel { target: None, verbose }),
            ("wheel", ["--target", target], _) => {
                Some(Self::Wheel { target: Some(target), verbose })
            }
            ("vectors", [], _) => Some(Self::Vectors { verbose }),
            ("corpus", ["unpack"], false) => {
                Some(Self::Corpus { direction: corpus::Direction::Unpack })
            }
            ("corpus", ["pack"], false) => {
                Some(Self::Corpus { direction: corpus::Direction::Pack })
            }
            ("sanitize", [], _) => Some(Self::Sanitize { verbose }),
            ("coverage", [], _) => Some(Self::Coverage { verbose }),
            ("reliability", [], _) => Some(Self::Reliability { long: None, verbose }),
            ("reliability", ["--long"], _) => Some(Self::Reliability { long: Some(0), verbose }),
            ("reliability", ["--long", "--minutes", minutes], _) => minutes
                .parse()
                .ok()
                .map(|minutes| Self::Reliability { long: Some(minutes), verbose }),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Task, bench};

    #[test]
    fn commands_are_told_apart() {
        for (words, task) in [
            ("help", Some(Task::Help)),
            ("bench store --help", Some(Task::Help)),
            ("test -h", Some(Task::Help)),
            ("test", Some(Task::Test { all: false, verbose: false })),
            ("test -v --all", Some(Task::Test { all: true, verbose: true })),
            ("ci", Some(Task::Ci { verbose: false })),
            ("vectors --verbose", Some(Task::Vectors { verbose: true })),
            ("wheel", Some(Task::Wheel { target: None, verbose: false })),
            ("wheel --target", None),
            ("wheel -v --target a-b-c", Some(Task::Wheel { target: Some("a-b-c"), verbose: true })),
            ("reliability", Some(Task::Reliability { long: None, verbose: false })),
            ("reliability --long", Some(Task::Reliability { long: Some(0), verbose: false })),
            (
                "reliability --long --minutes 30 -v",
                Some(Task::Reliability { long: Some(30), verbose: true }),
            ),
            ("reliability --minutes 30", None),
            ("reliability --long --minutes", None),
            ("reliability --long --minutes ten", None),
            ("sanitize -v", Some(Task::Sanitize { verbose: true })),
            ("coverage", Some(Task::Coverage { verbose: false })),
            ("bench page", Some(Task::Bench(bench::Task::Page))),
            ("bench page put", None),
            ("", None),
            ("tests", None),
            ("test all", None),
        ] {
            let words: Vec<&str> = words.split_whitespace().collect();
            assert_eq!(Task::parse(&words), task, "{words:?}");
        }
    }
}
