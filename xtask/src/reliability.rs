use std::io;

use crate::etcd;
use crate::figures::{self, Figures};
use crate::python;
use crate::report::Report;
use crate::runner;
use crate::sanitize::{self, Sanitizer};
use crate::step::{Step, StepKind};
use crate::workspace::Workspace;

/// Minimum number of disk states after power cuts: in CI, and in the long campaign.
const CRASH_STATES: [&str; 2] = ["50000", "1000000"];

/// Minimum number of schedules: in CI, and in the long campaign.
const SCHEDULES: [&str; 2] = ["50000", "200000"];

/// Environment variable: set for the tests of the long campaign.
const LONG: &str = "TSSD_RELIABILITY_LONG";

/// Environment variable: a Python with moto, which serves S3 to the tests.
const S3_PYTHON: &str = "TSSD_S3_PYTHON";

/// Environment variable: minimum duration of each campaign in seconds.
const SECONDS: &str = "TSSD_RELIABILITY_SECONDS";

/// Tests the guarantees of `docs/guarantees.md` under faults.
///
/// Writes the figures to `target/reliability.json`. `long` is the minimum duration of the long campaign in minutes, which
/// also runs the tests with sanitizers. `None` runs the campaign of CI.
pub(crate) fn run(workspace: &Workspace, long: Option<u64>, verbose: bool) -> io::Result<bool> {
    let mut steps = Vec::from_iter(etcd::install_step());
    steps.push(python::environment(workspace)?.step());
    steps.push(
        Step::cargo("build", "build --workspace --all-features --lib --bins --tests")
            .kind(StepKind::Setup),
    );
    steps.extend(campaigns(workspace, long)?);
    let mut left_out = Vec::new();
    if long.is_some() {
        // The builds for the sanitizers take as long as everything else, so they come last.
        steps.extend(Sanitizer::Address.steps(workspace)?);
        left_out.extend(sanitize::add_thread_sanitizer(workspace, &mut steps)?);
    }
    let report = runner::run(workspace, vec![steps], left_out, verbose)?;
    save_figures(workspace, &report)?;
    Ok(report.has_passed())
}

/// Saves the figures of the campaigns of a run.
pub(crate) fn save_figures(workspace: &Workspace, report: &Report) -> io::Result<()> {
    let printed = report.finished.iter().map(|done| figures::parse_output(&done.output));
    let mut figures: Figures = printed.flatten().collect();
    figures.extend(sanitize::figures(report));
    figures::save(workspace, figures)
}

/// Returns the campaigns. They need a build and the environment without torch.
pub(crate) fn campaigns(workspace: &Workspace, long: Option<u64>) -> io::Result<[Step; 3]> {
    let size = usize::from(long.is_some());
    let steps = [
        Step::cargo(
            "power cuts",
            "test --workspace --all-features --tests -- crash:: --nocapture --test-threads=1",
        )
        .env("TSSD_CRASH_STATES", CRASH_STATES[size])
        .after("build"),
        Step::cargo(
            "schedules",
            "test --workspace --all-features --test schedules -- --nocapture --test-threads=1",
        )
        .env("TSSD_SCHEDULES", SCHEDULES[size]),
        Step::cargo(
            "faults",
            "test --workspace --all-features --test reliability -- --ignored --nocapture --test-threads=1",
        )
        .env("TSSD_BIN", workspace.tssd())
        .env(S3_PYTHON, python::environment(workspace)?.python())
        .after(python::STAGE),
    ];
    // There are about 15 campaigns. Those of the last step share its time.
    let seconds = (long.unwrap_or(0) * 60 / 15).to_string();
    Ok(steps.map(|step| {
        let step = step.env(SECONDS, &seconds).kind(StepKind::Tests);
        if long.is_some() { step.env(LONG, "1") } else { step }
    }))
}
