use std::fs;
use std::io;

use crate::etcd;
use crate::figures;
use crate::runner;
use crate::s3;
use crate::sanitize::{self, Sanitizer};
use crate::step::{Step, Worth};
use crate::workspace::Workspace;

/// How many states of the disk after a power cut are looked at, at least.
const CRASH_STATES: &str = "1000000";

/// How many orders of events are tried, at least.
const SCHEDULES: &str = "200000";

/// Names for how many seconds each proof goes on, if it has enough sooner.
const SECONDS: &str = "TSSD_RELIABILITY_SECONDS";

/// Proves what `docs/guarantees.md` promises, for as long as CI has time or for so many minutes, and keeps the
/// figures in `target/reliability.json`.
pub(crate) fn run(workspace: &Workspace, minutes: u64, verbose: bool) -> io::Result<bool> {
    let mut steps = steps(workspace, minutes)?;
    let mut left_out = Vec::new();
    if minutes > 0 {
        // To build all once more takes as long as everything else.
        steps.extend(Sanitizer::Address.steps(workspace)?);
        left_out.extend(sanitize::add_thread(workspace, &mut steps)?);
    }
    let report = runner::run(workspace, steps, left_out, verbose)?;
    let mut figures = figures::printed(&fs::read_to_string(workspace.log())?);
    figures.extend(sanitize::figures(&report));
    figures::keep(workspace, figures)?;
    Ok(report.has_passed())
}

fn steps(workspace: &Workspace, minutes: u64) -> io::Result<Vec<Step>> {
    let s3 = s3::environment(workspace);
    let proofs = [
        Step::cargo(
            "power cuts",
            "test --workspace --all-features --tests -- crash:: --nocapture --test-threads=1",
        )
        .env("TSSD_CRASH_STATES", CRASH_STATES),
        Step::cargo(
            "orders of events",
            "test --workspace --all-features --test schedules -- --nocapture --test-threads=1",
        )
        .env("TSSD_SCHEDULES", SCHEDULES),
        Step::cargo(
            "faults",
            "test --workspace --all-features --test reliability -- --ignored --nocapture --test-threads=1",
        )
        .env("TSSD_BIN", workspace.tssd())
        .env(s3::VARIABLE, s3.python()),
    ];
    // The last step has several proofs, which share its time.
    let seconds = (minutes * 60 / 15).to_string();
    let mut steps = Vec::from_iter(etcd::installation(workspace));
    steps.extend(s3.steps(workspace)?);
    steps.push(
        Step::cargo("build", "build --workspace --all-features --lib --bins --tests")
            .worth(Worth::Nothing),
    );
    steps.extend(proofs.map(|step| step.env(SECONDS, &seconds).worth(Worth::Tests)));
    Ok(steps)
}
