use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::json;

use crate::etcd;
use crate::figures::{self, Figures};
use crate::report::{Report, SkippedStep};
use crate::runner;
use crate::step::{Step, StepKind};
use crate::workspace::Workspace;

/// Target platform of both sanitizers.
const TARGET: &str = "x86_64-unknown-linux-gnu";

/// Packages that are built with a sanitizer.
///
/// Not the extension module, which would need a Python with the sanitizer. Not the schedules: shuttle runs one task at
/// a time.
const PACKAGES: &str = "--workspace --exclude tssd-python --exclude tssd-store-schedules --exclude xtask \
                        --all-features";

/// Tests that run with a sanitizer.
///
/// Not exhaustive tests, which repeat the same few memory accesses. Not tests that measure memory, since a sanitizer
/// uses memory itself.
const SUITES: &str = "--lib --test suite --no-fail-fast -- --skip crash:: --skip convert:: --skip geometry:: \
                      --skip ledger:: --skip model_directory:: --skip write_options:: --skip convert_pickle:: --skip safetensors:: \
                      --skip damage_of_small_files --skip hostile_connections_use_little_memory";

/// Tests that do not run with the thread sanitizer.
///
/// Not tests that count the descriptors of daemons, since the sanitizer uses two. Not tests that send signals to
/// daemons whose threads wait in system calls that it does not intercept: it defers the signals until these return.
const THREAD_SKIPS: &str = "--skip process_faults:: --skip daemon_completes_open_puts";

/// A sanitizer of the compiler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sanitizer {
    /// Detects accesses outside of allocations, uses after free and after return, and leaks.
    Address,
    /// Detects data races.
    Thread,
}

/// Runs the tests with both sanitizers, if they are available.
pub(crate) fn run(workspace: &Workspace, verbose: bool) -> io::Result<bool> {
    let mut steps = Vec::from_iter(etcd::install_step());
    steps.extend(Sanitizer::Address.steps(workspace)?);
    let left_out = add_thread_sanitizer(workspace, &mut steps)?;
    let report = runner::run(workspace, vec![steps], left_out.into_iter().collect(), verbose)?;
    figures::save(workspace, figures(&report))?;
    Ok(report.has_passed())
}

/// Adds the steps of the thread sanitizer, or returns why it is skipped.
///
/// It needs the sources of the standard library, to instrument its locks.
pub(crate) fn add_thread_sanitizer(
    workspace: &Workspace,
    steps: &mut Vec<Step>,
) -> io::Result<Option<SkippedStep>> {
    let output = Command::new("rustc").args(["--print", "sysroot"]).output()?.stdout;
    let sysroot = String::from_utf8_lossy(&output).trim().to_owned();
    if Path::new(&sysroot).join("lib/rustlib/src/rust/library/std").exists() {
        steps.extend(Sanitizer::Thread.steps(workspace)?);
        return Ok(None);
    }
    Ok(Some(SkippedStep {
        name: Sanitizer::Thread.name(),
        reason: "rustup component add rust-src",
    }))
}

/// Returns the number of tests that have run with each sanitizer.
pub(crate) fn figures(report: &Report) -> Figures {
    let names = [Sanitizer::Address, Sanitizer::Thread].map(Sanitizer::name);
    let done = report.finished.iter().filter(|done| names.contains(&done.name));
    done.map(|done| {
        let seconds = done.time.as_secs_f64().round();
        (done.name.to_owned(), json!({ "tests": done.passed, "seconds": seconds }))
    })
    .collect()
}

impl Sanitizer {
    fn name(self) -> &'static str {
        match self {
            Self::Address => "address sanitizer",
            Self::Thread => "thread sanitizer",
        }
    }

    /// Returns the value of the compiler option `-Zsanitizer`.
    fn flag(self) -> &'static str {
        match self {
            Self::Address => "address",
            Self::Thread => "thread",
        }
    }

    /// Returns the steps: build, tests, and a check that there are no reports.
    pub(crate) fn steps(self, workspace: &Workspace) -> io::Result<Vec<Step>> {
        let reports = self.folder(workspace).join("reports");
        if reports.exists() {
            fs::remove_dir_all(&reports)?;
        }
        fs::create_dir_all(&reports)?;
        // Reports go to files, since the output of daemons may be discarded.
        let search =
            format!("! grep --recursive --before-context=200 SUMMARY: {}", reports.display());
        let tests = match self {
            Self::Address => format!("test {SUITES}"),
            Self::Thread => format!("test {SUITES} {THREAD_SKIPS}"),
        };
        let no_reports = Step::program(self.no_reports(), "sh", "-c").argument(search);
        Ok(vec![
            self.cargo(workspace, self.build(), "build --bins").kind(StepKind::Setup),
            self.cargo(workspace, self.name(), &tests).kind(StepKind::Tests),
            no_reports.kind(StepKind::Setup),
        ])
    }

    fn build(self) -> &'static str {
        match self {
            Self::Address => "build with address sanitizer",
            Self::Thread => "build with thread sanitizer",
        }
    }

    fn no_reports(self) -> &'static str {
        match self {
            Self::Address => "no reports of the address sanitizer",
            Self::Thread => "no reports of the thread sanitizer",
        }
    }

    /// Returns the target folder of the build with the sanitizer.
    fn folder(self, workspace: &Workspace) -> PathBuf {
        workspace.target.join(format!("sanitize-{}", self.flag()))
    }

    /// Returns a Cargo command with the sanitizer. Its reports go to `reports` in the target folder.
    fn cargo(self, workspace: &Workspace, name: &'static str, arguments: &str) -> Step {
        let folder = self.folder(workspace);
        let (command, rest) = arguments.split_once(' ').unwrap_or((arguments, ""));
        let build_std = if self == Self::Thread { "-Zbuild-std" } else { "" };
        let arguments = format!("{command} {PACKAGES} --target {TARGET} {build_std} --target-dir");
        let reports = folder.join("reports/report");
        let (variable, options) = match self {
            Self::Address => ("ASAN_OPTIONS", "detect_stack_use_after_return=1".to_owned()),
            Self::Thread => {
                let suppressions = workspace.root.join("tests/thread_sanitizer.txt");
                ("TSAN_OPTIONS", format!("suppressions={}", suppressions.display()))
            }
        };
        // Tests check how failed allocations are handled, so they must not abort the process.
        let options =
            format!("log_path={}:allocator_may_return_null=1:{options}", reports.display());
        let step = Step::cargo(name, &arguments).argument(&folder);
        rest.split_whitespace()
            .fold(step, Step::argument)
            // Enables unstable options in the stable compiler.
            .env("RUSTC_BOOTSTRAP", "1")
            .env("RUSTFLAGS", format!("-Zsanitizer={}", self.flag()))
            // The sanitizer runtime of the C compiler is not compatible with that of rustc.
            .env("CFLAGS", "-fno-sanitize=all")
            .env(variable, options)
            .env("TSSD_BIN", folder.join(TARGET).join("debug/tssd"))
    }
}
