use std::io;

use crate::dependencies;
use crate::etcd;
use crate::python;
use crate::reliability;
use crate::report::LeftOut;
use crate::runner;
use crate::step::{Chain, Step, Worth};
use crate::torch;
use crate::workspace::Workspace;

/// The database of advisories is not on crates.io; those that are known stand in deny.toml.
const NEW_ADVISORIES: LeftOut =
    LeftOut { name: "new advisories", why: "cargo deny check advisories, where it can fetch them" };

/// Runs every check that needs Rust, Python 3 and numpy, and if `all` those that need torch, valgrind or a release build.
pub(crate) fn run(workspace: &Workspace, all: bool, verbose: bool) -> io::Result<bool> {
    let mut chains = chains_without_torch(workspace)?;
    let mut left_out = vec![NEW_ADVISORIES];
    let more = more_chains(workspace)?;
    if all {
        chains.extend(more);
    } else {
        let checks = more.into_iter().flatten().filter(|step| step.worth == Worth::One);
        left_out
            .extend(checks.map(|step| LeftOut { name: step.name, why: "cargo xtask test --all" }));
    }
    Ok(runner::run(workspace, chains, left_out, verbose)?.has_passed())
}

/// Runs everything that CI runs: all checks, and the promises under faults.
pub(crate) fn run_ci(workspace: &Workspace, verbose: bool) -> io::Result<bool> {
    let mut chains = chains_without_torch(workspace)?;
    chains.extend(more_chains(workspace)?);
    chains.push(reliability::proofs(workspace, None)?.into());
    let report = runner::run(workspace, chains, vec![NEW_ADVISORIES], verbose)?;
    reliability::keep_figures(workspace, &report)?;
    Ok(report.has_passed())
}

fn chains_without_torch(workspace: &Workspace) -> io::Result<Vec<Chain>> {
    let mut checks = Vec::from_iter(etcd::installation());
    checks.extend(rust_checks(workspace));
    if cfg!(target_os = "linux") {
        checks.extend(gpus(workspace));
    }
    Ok(vec![checks, python::checks(workspace)?])
}

/// What `--all` adds.
fn more_chains(workspace: &Workspace) -> io::Result<Vec<Chain>> {
    let environment = torch::environment(workspace)?;
    let mut packages = vec![environment.step()];
    packages.extend(python::checks_of_wheel(workspace, &environment.python())?);
    packages.extend(torch::checks(workspace, &environment.python()));
    packages.push(python::tests_with_torch(workspace, &environment.python()));
    Ok(vec![packages, dependencies::checks(), vec![instructions()]])
}

/// That no hot path has become longer: as fast machines and slow ones see it alike.
fn instructions() -> Step {
    // In the profile and with the features of all other tests, so that nothing else is built.
    let arguments = "test --workspace --all-features --bench counts -- instructions";
    // A daemon on busy cores takes more.
    Step::cargo("instructions of hot paths", arguments).after("build").alone()
}

/// That the bench of GPUs runs, and moves what it says: on a driver without one, where its figures say nothing.
fn gpus(workspace: &Workspace) -> [Step; 2] {
    let (debug, folder) = (workspace.target.join("debug"), workspace.target.join("driver"));
    let arguments = "test --workspace --all-features --bench gpu -- --model shape:qwen3-0.6b --size 40MB --iterations 1";
    [
        Step::program("driver without a GPU", "install", "-D")
            .argument(debug.join("libtssd_fake_cuda.so"))
            .argument(folder.join("libcuda.so"))
            .worth(Worth::Nothing),
        Step::cargo("bench of GPUs", arguments).env("LD_LIBRARY_PATH", folder),
    ]
}

/// The cheap ones first.
fn rust_checks(workspace: &Workspace) -> Vec<Step> {
    vec![
        Step::cargo("rustfmt", "fmt --all --check -- --color never"),
        Step::cargo("clippy", "clippy --workspace --all-targets --all-features -- -D warnings"),
        Step::cargo(
            "clippy without features",
            "clippy -p tssd-format --no-default-features -- -D warnings",
        ),
        // Binaries and tests in one go: features are the same in both, so nothing is built twice.
        Step::cargo("build", "build --workspace --all-features --lib --bins --tests")
            .worth(Worth::Nothing),
        Step::cargo("tests", "test --workspace --all-features --no-fail-fast")
            .env("TSSD_BIN", workspace.tssd())
            .worth(Worth::Tests),
        Step::cargo("rustdoc", "doc --workspace --all-features --no-deps --document-private-items")
            .env("RUSTDOCFLAGS", "-Dwarnings"),
        Step::python("bad vectors up to date", "spec/vectors/make_invalid.py --check"),
        Step::python("reader.py over the vectors", "spec/reader.py --vectors spec/vectors"),
        Step::python("reader.py by itself", "spec/reader.py --self-test"),
        Step::python("writer.py by itself", "spec/writer.py --self-test"),
        // As a program that depends on the reader gets it; the tests have the one with rkyv.
        Step::cargo(
            "reader without rkyv",
            "build -p tssd-format --no-default-features --features json,zstd --example conformance",
        )
        .worth(Worth::Nothing),
        Step::python("conformance of it", "spec/conformance.py --")
            .argument(workspace.target.join("debug/examples/conformance"))
            .argument("{file}"),
    ]
}
