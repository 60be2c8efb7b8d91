use std::io;

use crate::dependencies;
use crate::etcd;
use crate::python;
use crate::report::LeftOut;
use crate::runner;
use crate::step::{Step, Worth};
use crate::torch;
use crate::workspace::Workspace;

/// Runs every check that needs Rust, Python 3 and numpy, and if `all` those that need torch, valgrind or what has to be
/// built first.
pub(crate) fn run(workspace: &Workspace, all: bool, verbose: bool) -> io::Result<bool> {
    let mut steps = Vec::from_iter(etcd::installation());
    steps.extend(checks(workspace));
    if cfg!(target_os = "linux") {
        steps.extend(gpus(workspace));
    }
    steps.extend(python::checks(workspace)?);
    let environment = torch::environment(workspace)?;
    let mut more = vec![instructions()];
    more.extend(dependencies::checks());
    more.push(environment.step());
    more.extend(torch::checks(workspace, &environment.python()));
    more.extend(python::checks_with_torch(workspace, &environment.python())?);
    // Its database of advisories is not on crates.io; those that are known stand in deny.toml.
    let mut left_out = vec![LeftOut {
        name: "new advisories",
        why: "cargo deny check advisories, where it can fetch them",
    }];
    if all {
        steps.extend(more);
    } else {
        let named = more.into_iter().filter(|step| step.worth == Worth::One);
        left_out
            .extend(named.map(|step| LeftOut { name: step.name, why: "cargo xtask test --all" }));
    }
    Ok(runner::run(workspace, steps, left_out, verbose)?.has_passed())
}

/// That no hot path has become longer: as fast machines and slow ones see it alike.
fn instructions() -> Step {
    // In the profile and with the features of all other tests, so that nothing else is built.
    let arguments = "test --workspace --all-features --bench counts -- instructions";
    Step::cargo("instructions of hot paths", arguments)
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
fn checks(workspace: &Workspace) -> Vec<Step> {
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
