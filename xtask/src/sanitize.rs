use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::json;

use crate::etcd;
use crate::figures::{self, Figures};
use crate::report::{LeftOut, Report};
use crate::runner;
use crate::step::{Step, Worth};
use crate::workspace::Workspace;

/// The platform that both are for here.
const TARGET: &str = "x86_64-unknown-linux-gnu";

/// What is built with one. The extension module is not: it would want a Python that is, too; and shuttle runs its
/// tasks by itself, one at a time.
const PACKAGES: &str = "--workspace --exclude tssd-python --exclude tssd-store-schedules --exclude xtask \
                        --all-features";

/// What runs with one: not what makes the same few accesses for every state, byte or command that there is, and
/// not what measures memory, of which a sanitizer takes its share.
const SUITES: &str = "--lib --test suite --no-fail-fast -- --skip crash:: --skip convert:: --skip geometry:: \
                      --skip ledger:: --skip packed_files:: --skip packing:: --skip pickled:: --skip safetensors:: \
                      --skip damage_of_small_files --skip hostile_connections_use_little_memory";

/// Nor, with the thread sanitizer, what counts the descriptors of daemons, of which it takes two, and what sends a
/// signal to one whose threads wait in calls that it does not know: it holds the signal back until they return.
const NOT_ITS: &str = "--skip torture:: --skip daemon_completes_open_puts";

/// Checks that the compiler puts beside every access to memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sanitizer {
    /// What is accessed is there: within its allocation, not freed, on a stack that still is. And nothing leaks.
    Address,
    /// What two threads access, one of them to write, they access one after the other.
    Thread,
}

/// Runs the suites with both, as far as they are there.
pub(crate) fn run(workspace: &Workspace, verbose: bool) -> io::Result<bool> {
    let mut steps = Vec::from_iter(etcd::installation());
    steps.extend(Sanitizer::Address.steps(workspace)?);
    let left_out = add_thread(workspace, &mut steps)?;
    let report = runner::run(workspace, vec![steps], left_out.into_iter().collect(), verbose)?;
    figures::keep(workspace, figures(&report))?;
    Ok(report.has_passed())
}

/// Adds the thread sanitizer: without the sources of the standard library, which it would take all locks of for
/// none, it is left out.
pub(crate) fn add_thread(
    workspace: &Workspace,
    steps: &mut Vec<Step>,
) -> io::Result<Option<LeftOut>> {
    let output = Command::new("rustc").args(["--print", "sysroot"]).output()?.stdout;
    let sysroot = String::from_utf8_lossy(&output).trim().to_owned();
    if Path::new(&sysroot).join("lib/rustlib/src/rust/library/std").exists() {
        steps.extend(Sanitizer::Thread.steps(workspace)?);
        return Ok(None);
    }
    Ok(Some(LeftOut { name: Sanitizer::Thread.name(), why: "rustup component add rust-src" }))
}

/// How many tests have run with sanitizers.
pub(crate) fn figures(report: &Report) -> Figures {
    let names = [Sanitizer::Address, Sanitizer::Thread].map(Sanitizer::name);
    let done = report.done.iter().filter(|done| names.contains(&done.name));
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

    /// As the compiler calls it.
    fn flag(self) -> &'static str {
        match self {
            Self::Address => "address",
            Self::Thread => "thread",
        }
    }

    pub(crate) fn steps(self, workspace: &Workspace) -> io::Result<Vec<Step>> {
        let reports = self.folder(workspace).join("reports");
        if reports.exists() {
            fs::remove_dir_all(&reports)?;
        }
        fs::create_dir_all(&reports)?;
        // Whoever finds something says it in a file: what a daemon prints may be nobody's to see.
        let found =
            format!("! grep --recursive --before-context=200 SUMMARY: {}", reports.display());
        let tests = match self {
            Self::Address => format!("test {SUITES}"),
            Self::Thread => format!("test {SUITES} {NOT_ITS}"),
        };
        let silence = Step::program(self.silence(), "sh", "-c").argument(found);
        Ok(vec![
            self.cargo(workspace, self.build(), "build --bins").worth(Worth::Nothing),
            self.cargo(workspace, self.name(), &tests).worth(Worth::Tests),
            silence.worth(Worth::Nothing),
        ])
    }

    fn build(self) -> &'static str {
        match self {
            Self::Address => "build with the address sanitizer",
            Self::Thread => "build with the thread sanitizer",
        }
    }

    fn silence(self) -> &'static str {
        match self {
            Self::Address => "no report of the address sanitizer",
            Self::Thread => "no report of the thread sanitizer",
        }
    }

    /// Where everything is built once more.
    fn folder(self, workspace: &Workspace) -> PathBuf {
        workspace.target.join(format!("sanitize-{}", self.flag()))
    }

    /// A command of Cargo in that folder.
    fn cargo(self, workspace: &Workspace, name: &'static str, arguments: &str) -> Step {
        let folder = self.folder(workspace);
        let (command, what) = arguments.split_once(' ').unwrap_or((arguments, ""));
        let standard = if self == Self::Thread { "-Zbuild-std" } else { "" };
        let arguments = format!("{command} {PACKAGES} --target {TARGET} {standard} --target-dir");
        let reports = folder.join("reports/report");
        let (variable, options) = match self {
            Self::Address => ("ASAN_OPTIONS", "detect_stack_use_after_return=1".to_owned()),
            Self::Thread => {
                let unseen = workspace.root.join("tests/thread_sanitizer.txt");
                ("TSAN_OPTIONS", format!("suppressions={}", unseen.display()))
            }
        };
        // What cannot be allocated is an error, which tests look at.
        let options =
            format!("log_path={}:allocator_may_return_null=1:{options}", reports.display());
        let step = Step::cargo(name, &arguments).argument(&folder);
        what.split_whitespace()
            .fold(step, Step::argument)
            // The compiler is a stable one.
            .env("RUSTC_BOOTSTRAP", "1")
            .env("RUSTFLAGS", format!("-Zsanitizer={}", self.flag()))
            // The C compiler has one of its own, which does not know this one.
            .env("CFLAGS", "-fno-sanitize=all")
            .env(variable, options)
            .env("TSSD_BIN", folder.join(TARGET).join("debug/tssd"))
    }
}
