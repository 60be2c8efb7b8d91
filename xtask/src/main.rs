//! Commands for developers of the project. `cargo xtask help` lists them.

use std::process::ExitCode;

use crate::workspace::Workspace;

/// `bench`: runs the benchmarks of tests/benches and python/bench, and generates docs/performance.md.
mod bench;
/// The cache folder that all checkouts share.
mod cache;
/// `corpus`: converts the fuzz corpora between archives and folders.
mod corpus;
/// `coverage`: line coverage of the modules that decode, validate, plan and commit.
mod coverage;
/// Checks of the dependencies: licences, bans, sources.
mod dependencies;
/// Tests of the plug-ins in real engines.
mod engines;
/// The etcd program of the tests.
mod etcd;
/// Figures of the reliability campaigns, in `target/reliability.json`.
mod figures;
/// `gpu-bundle`: the GPU tests and benchmarks, for machines without Rust.
mod gpu_bundle;
/// The Python package: tests, `wheel`, and `bench python`.
mod python;
/// `reliability`: tests the guarantees of the store under faults.
mod reliability;
/// The summary at the end of a run.
mod report;
/// Runs steps in order, up to the first that fails.
mod runner;
/// `sanitize`: runs the tests with the address and thread sanitizers.
mod sanitize;
/// A step: one command of a run.
mod step;
/// `test`: runs the checks.
mod test;
/// Test counts in the output of `cargo test`.
mod test_counts;
/// Programs from crates.io, installed in the cache folder.
mod tool;
/// Checks against torch.
mod torch;
/// `vectors`: generates the test vectors of the specification.
mod vectors;
/// Python virtual environments.
mod virtual_environment;
/// Paths of the checkout.
mod workspace;

const HELP: &str = "\
Commands for developers of TSSD.

    cargo xtask test [-v]         Runs all checks that do not need torch. Installs numpy, pytest and moto (0.4 GB).
    cargo xtask test --all [-v]   Runs all checks. Needs valgrind. Installs torch and cargo-deny (7 GB).
    cargo xtask ci [-v]           Runs everything that CI runs: test --all and reliability, in one run.
    cargo xtask reliability [-v]  Tests the guarantees of docs/guarantees.md under faults, as in CI. Needs strace.
    cargo xtask reliability --long [--minutes N] [-v]
                                  Runs larger campaigns for at least N minutes, and the tests with sanitizers.
    cargo xtask sanitize [-v]     Runs the tests with the address sanitizer and the thread sanitizer.
    cargo xtask coverage [-v]     Prints the line coverage of the modules that decode, validate, plan and commit.
    cargo xtask wheel [--target TRIPLE] [-v]
                                  Builds the Python package with the command, in target/wheels. For another target,
                                  install its standard library and configure its linker first.
    cargo xtask gpu-bundle [-v]   Assembles the GPU tests and benchmarks in target/gpu-bundle, for a machine that has a
                                  GPU, Python and torch, but no Rust.
    cargo xtask vectors [-v]      Generates spec/vectors, and checks them with both readers.
    cargo xtask corpus unpack     Unpacks the fuzz corpora into folders, for `cargo fuzz`.
    cargo xtask corpus pack       Packs the folders of the fuzz corpora into archives.
    cargo xtask bench [SUITE] [OPTION…] [CASE…]
                                  Runs benchmarks. SUITE: format, store, counts, python, gpu, or all (default), which
                                  is all except gpu. CASE: part of the name of a case.
    cargo xtask bench page        Generates docs/performance.md from the saved results.
    cargo xtask help              Prints this text.

Options of bench:

    --model DIR|shape:NAME        State dict: the safetensors files of a folder, or a known shape.
    --size SIZE                   Maximum size of the state dict, such as 600MB. Layers beyond it are dropped.
    --iterations N, --warmup N    Number of measured rounds, and of rounds before them.

Results of complete suites without options are saved in docs/performance. The suite python installs torch (7 GB).

Packages and tools are installed in ~/.cache/tssd-xtask, which all checkouts share. TSSD_XTASK_CACHE overrides the folder.

Two steps run at the same time. The output of a step is shown if it fails. target/xtask-logs has the output of each step.
With -v, one step runs at a time, and its output is shown immediately.
";

#[derive(Debug, PartialEq, Eq)]
enum Task<'a> {
    Help,
    Test { all: bool, verbose: bool },
    Ci { verbose: bool },
    Wheel { target: Option<&'a str>, verbose: bool },
    GpuBundle { verbose: bool },
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
        eprint!("cargo xtask {}: unknown command\n\n{HELP}", words.join(" "));
        return ExitCode::from(2);
    };
    let outcome = Workspace::find().and_then(|workspace| match task {
        Task::Help => {
            print!("{HELP}");
            Ok(true)
        }
        Task::Test { all, verbose } => test::run(&workspace, all, verbose),
        Task::Ci { verbose } => test::run_ci(&workspace, verbose),
        Task::Wheel { target, verbose } => python::build_wheel(&workspace, target, verbose),
        Task::GpuBundle { verbose } => gpu_bundle::run(&workspace, verbose),
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
            ("gpu-bundle", [], _) => Some(Self::GpuBundle { verbose }),
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
    fn commands_are_parsed() {
        for (words, task) in [
            ("help", Some(Task::Help)),
            ("bench store --help", Some(Task::Help)),
            ("test -h", Some(Task::Help)),
            ("test", Some(Task::Test { all: false, verbose: false })),
            ("test -v --all", Some(Task::Test { all: true, verbose: true })),
            ("ci", Some(Task::Ci { verbose: false })),
            ("gpu-bundle -v", Some(Task::GpuBundle { verbose: true })),
            ("gpu-bundle size", None),
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
