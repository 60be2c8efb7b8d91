use std::io;

use crate::etcd;
use crate::figures::{self, Figures};
use crate::python;
use crate::report::Report;
use crate::runner;
use crate::sanitize::{self, Sanitizer};
use crate::step::{Step, Worth};
use crate::workspace::Workspace;

/// How many states of the disk after a power cut are checked, at least: in CI, and in the long campaign.
const CRASH_STATES: [&str; 2] = ["100000", "1000000"];

/// How many orders of events are tried, at least: in CI, and in the long campaign.
const SCHEDULES: [&str; 2] = ["50000", "200000"];

/// Set for the tests of the long campaign.
const LONG: &str = "TSSD_RELIABILITY_LONG";

/// Names a Python with moto for the tests.
const S3: &str = "TSSD_S3_PYTHON";

/// Names for how many seconds each proof goes on, if it has enough sooner.
const SECONDS: &str = "TSSD_RELIABILITY_SECONDS";

/// Checks what `docs/guarantees.md` promises, as much as CI has time for or in a long campaign, and keeps the
/// figures in `target/reliability.json`.
///
/// The long campaign takes at least this many minutes, and runs the suites with sanitizers too.
pub(crate) fn run(workspace: &Workspace, long: Option<u64>, verbose: bool) -> io::Result<bool> {
    let mut steps = Vec::from_iter(etcd::installation());
    steps.push(python::environment(workspace)?.step());
    steps.push(
        Step::cargo("build", "build --workspace --all-features --lib --bins --tests")
            .worth(Worth::Nothing),
    );
    steps.extend(proofs(workspace, long)?);
    let mut left_out = Vec::new();
    if long.is_some() {
        // To build all once more takes as long as everything else.
        steps.extend(Sanitizer::Address.steps(workspace)?);
        left_out.extend(sanitize::add_thread(workspace, &mut steps)?);
    }
    let report = runner::run(workspace, vec![steps], left_out, verbose)?;
    keep_figures(workspace, &report)?;
    Ok(report.has_passed())
}

/// Keeps what the proofs of a run have counted.
pub(crate) fn keep_figures(workspace: &Workspace, report: &Report) -> io::Result<()> {
    let printed = report.done.iter().map(|done| figures::printed(&done.output));
    let mut figures: Figures = printed.flatten().collect();
    figures.extend(sanitize::figures(report));
    figures::keep(workspace, figures)
}

/// The proofs, which need a build and the environment without torch.
pub(crate) fn proofs(workspace: &Workspace, long: Option<u64>) -> io::Result<[Step; 3]> {
    let size = usize::from(long.is_some());
    let proofs = [
        Step::cargo(
            "power cuts",
            "test --workspace --all-features --tests -- crash:: --nocapture --test-threads=1",
        )
        .env("TSSD_CRASH_STATES", CRASH_STATES[size])
        .after("build"),
        Step::cargo(
            "orders of events",
            "test --workspace --all-features --test schedules -- --nocapture --test-threads=1",
        )
        .env("TSSD_SCHEDULES", SCHEDULES[size]),
        Step::cargo(
            "faults",
            "test --workspace --all-features --test reliability -- --ignored --nocapture --test-threads=1",
        )
        .env("TSSD_BIN", workspace.tssd())
        .env(S3, python::environment(workspace)?.python())
        .after(python::ENVIRONMENT),
    ];
    // The last step has several proofs, which share its time.
    let seconds = (long.unwrap_or(0) * 60 / 15).to_string();
    Ok(proofs.map(|step| {
        let step = step.env(SECONDS, &seconds).worth(Worth::Tests);
        if long.is_some() { step.env(LONG, "1") } else { step }
    }))
}
