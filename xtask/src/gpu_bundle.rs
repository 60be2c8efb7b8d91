use std::io;
use std::path::Path;

use crate::python;
use crate::runner;
use crate::step::{Step, StepKind};
use crate::workspace::Workspace;

/// Maximum size of the bundle. It is copied to machines by hand.
const MAX_MIB: &str = "40";

/// Assembles the bundle in `target/gpu-bundle`, from release builds.
pub(crate) fn run(workspace: &Workspace, verbose: bool) -> io::Result<bool> {
    let folder = workspace.target.join("gpu-bundle");
    let environment = python::environment(workspace)?;
    let mut steps = vec![environment.step()];
    steps.extend(python::wheel(workspace, None)?);
    let cargo = "--release -p tssd-tests --features cuda";
    steps.push(assemble(workspace, &environment.python(), &folder, MAX_MIB, cargo));
    let is_assembled = runner::run(workspace, vec![steps], Vec::new(), verbose)?.has_passed();
    if is_assembled {
        println!("copy {} to the machine, and run `python3 run.py` there", folder.display());
    }
    Ok(is_assembled)
}

/// Runs a bundle with the fake CUDA driver. Its transfers are checked; its speeds are meaningless.
///
/// The programs are those of the other tests, so that Cargo builds nothing else. `python` has torch and pytest.
pub(crate) fn checks(workspace: &Workspace, python: &Path) -> Vec<Step> {
    let (bundle, driver) =
        (workspace.target.join("fake-gpu-bundle"), workspace.target.join("driver"));
    vec![
        Step::program("install fake CUDA driver", "install", "-D")
            .argument(workspace.target.join("debug/libtssd_fake_cuda.so"))
            .argument(driver.join("libcuda.so"))
            .kind(StepKind::Setup)
            .after("build"),
        assemble(workspace, python, &bundle, "0", "--workspace --all-features"),
        Step::program("GPU bundle", python, "")
            .argument(bundle.join("run.py"))
            .arguments(["--model", "shape:qwen3-0.6b", "--size", "40MB", "--iterations", "1"])
            .env("LD_LIBRARY_PATH", driver),
    ]
}

/// Builds the programs with these arguments of Cargo, and copies them and the wheel into a folder.
fn assemble(
    workspace: &Workspace,
    python: &Path,
    folder: &Path,
    max_mib: &str,
    cargo: &str,
) -> Step {
    Step::program("assemble GPU bundle", python, "xtask/gpu_bundle/assemble.py")
        .argument(folder)
        .argument(python::wheels(workspace))
        .argument(max_mib)
        .arguments(cargo.split(' '))
        .kind(StepKind::Setup)
        .shows_last_line()
}
