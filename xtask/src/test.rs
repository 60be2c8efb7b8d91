use std::io;

use crate::dependencies;
use crate::engines;
use crate::etcd;
use crate::gpu_bundle;
use crate::python;
use crate::reliability;
use crate::report::SkippedStep;
use crate::runner;
use crate::step::{Chain, Step, StepKind};
use crate::torch;
use crate::workspace::Workspace;

/// New advisories need network access: their database is not on crates.io.
///
/// Known advisories are in deny.toml.
const NEW_ADVISORIES: SkippedStep = SkippedStep {
    name: "new advisories",
    reason: "cargo deny check advisories, with network access",
};

/// Runs all checks that need only Rust, Python 3 and numpy.
///
/// If `all`, also runs those that need torch, valgrind or a release build.
pub(crate) fn run(workspace: &Workspace, all: bool, verbose: bool) -> io::Result<bool> {
    let mut chains = chains_without_torch(workspace, "")?;
    let mut left_out = vec![NEW_ADVISORIES];
    let more = more_chains(workspace)?;
    if all {
        chains.extend(more);
    } else {
        let checks = more.into_iter().flatten().filter(|step| step.kind == StepKind::Check);
        left_out.extend(
            checks.map(|step| SkippedStep { name: step.name, reason: "cargo xtask test --all" }),
        );
    }
    Ok(runner::run(workspace, chains, left_out, verbose)?.has_passed())
}

/// Runs everything that CI runs: all checks, and the reliability campaigns.
pub(crate) fn run_ci(workspace: &Workspace, verbose: bool) -> io::Result<bool> {
    // The step `power cuts` runs these tests with a larger campaign.
    let mut chains = chains_without_torch(workspace, " -- --skip testing::crash::")?;
    chains.extend(more_chains(workspace)?);
    // Faults mostly wait, for sessions to expire and for processes to start.
    let [power_cuts, schedules, faults] = reliability::campaigns(workspace, None)?;
    chains.extend([vec![faults], vec![power_cuts, schedules]]);
    let report = runner::run(workspace, chains, vec![NEW_ADVISORIES], verbose)?;
    reliability::save_figures(workspace, &report)?;
    Ok(report.has_passed())
}

/// Returns the chains that need only Rust, Python 3 and numpy. `filter` is added to the command of the Rust tests.
fn chains_without_torch(workspace: &Workspace, filter: &str) -> io::Result<Vec<Chain>> {
    let mut checks = Vec::from_iter(etcd::install_step());
    checks.extend(rust_checks(workspace, filter));
    Ok(vec![checks, python::checks(workspace)?])
}

/// Returns the additional chains of `--all`.
fn more_chains(workspace: &Workspace) -> io::Result<Vec<Chain>> {
    let environment = torch::environment(workspace)?;
    let mut packages = vec![environment.step()];
    packages.extend(python::checks_of_wheel(workspace, &environment.python())?);
    packages.extend(torch::checks(workspace, &environment.python()));
    packages.push(python::tests_with_torch(workspace, &environment.python()));
    if cfg!(target_os = "linux") {
        packages.extend(gpu_bundle::checks(workspace, &environment.python()));
    }
    let mut chains = vec![packages, dependencies::checks(), vec![instructions()]];
    if cfg!(all(target_os = "linux", target_arch = "x86_64")) {
        // One after the other: each starts many processes.
        chains.push(engines::checks(workspace)?);
    }
    Ok(chains)
}

/// Checks the instruction counts of the hot paths, which do not depend on the speed of the machine.
fn instructions() -> Step {
    // The profile and the features are those of all other tests, so that Cargo builds nothing else.
    let arguments = "test --workspace --all-features --bench counts -- instructions";
    // A daemon on busy cores executes more instructions.
    Step::cargo("instruction counts", arguments).after("build").exclusive()
}

/// Returns the checks of the Rust code and of the specification, the fast ones first.
fn rust_checks(workspace: &Workspace, filter: &str) -> Vec<Step> {
    vec![
        Step::cargo("rustfmt", "fmt --all --check -- --color never"),
        Step::cargo("clippy", "clippy --workspace --all-targets --all-features -- -D warnings"),
        Step::cargo(
            "clippy without features",
            "clippy -p tssd-format --no-default-features -- -D warnings",
        ),
        // One command for binaries and tests, so that both have the same features, and nothing is built twice.
        Step::cargo("build", "build --workspace --all-features --lib --bins --tests")
            .kind(StepKind::Setup),
        Step::cargo("tests", &format!("test --workspace --all-features --no-fail-fast{filter}"))
            .env("TSSD_BIN", workspace.tssd())
            .kind(StepKind::Tests),
        Step::cargo("rustdoc", "doc --workspace --all-features --no-deps --document-private-items")
            .env("RUSTDOCFLAGS", "-Dwarnings"),
        Step::python("invalid vectors up to date", "spec/vectors/make_invalid.py --check"),
        Step::python("reader.py on the vectors", "spec/reader.py --vectors spec/vectors"),
        Step::python("docs/support.md up to date", "xtask/support_matrix.py --check"),
        Step::python("reader.py self-test", "spec/reader.py --self-test"),
        Step::python("writer.py self-test", "spec/writer.py --self-test"),
        // A program that depends on the format alone gets this reader. The tests use the one with rkyv.
        Step::cargo(
            "build reader without rkyv",
            "build -p tssd-format --no-default-features --features json,zstd --example conformance",
        )
        .kind(StepKind::Setup),
        Step::python("conformance without rkyv", "spec/conformance.py --")
            .argument(workspace.target.join("debug/examples/conformance"))
            .argument("{file}"),
    ]
}
