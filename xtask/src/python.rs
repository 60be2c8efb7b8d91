use std::env::consts::{DLL_PREFIX, DLL_SUFFIX, EXE_SUFFIX};
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::runner;
use crate::step::{Step, StepKind};
use crate::torch;
use crate::virtual_environment::{Requirements, VirtualEnvironment};
use crate::workspace::Workspace;

const TESTS: &str = "-m pytest -p no:cacheprovider -c python/pyproject.toml python/tests";

/// Name of the step that creates the environment without torch.
pub(crate) const ENVIRONMENT: &str = "environment without torch";

/// Name of the step that installs the wheel.
pub(crate) const INSTALL: &str = "install wheel";

/// Name of the step that comes after the build and the environment without torch.
pub(crate) const STAGE: &str = "stage Python package";

/// Returns the environment without torch.
///
/// It builds wheels, runs the tests without torch, and serves S3 to the reliability tests.
pub(crate) fn environment(workspace: &Workspace) -> io::Result<VirtualEnvironment> {
    let requirements = Requirements {
        name: "python",
        step: ENVIRONMENT,
        file: "python/requirements.txt",
        imports: "maturin, ml_dtypes, moto, numpy, pytest",
        without_dependencies: None,
    };
    VirtualEnvironment::new(workspace, requirements)
}

/// Returns the tests of the package without torch. The extension module is that of the step "build".
pub(crate) fn checks(workspace: &Workspace) -> io::Result<Vec<Step>> {
    let environment = environment(workspace)?;
    let package = workspace.target.join("python");
    Ok(vec![
        environment.step(),
        stage(workspace, "debug", &package).after("build"),
        Step::program("Python tests", environment.python(), TESTS)
            .env("PYTHONPATH", package)
            .env("TSSD_BIN", workspace.tssd()),
    ])
}

/// Copies the package and the extension module of a profile into a folder.
fn stage(workspace: &Workspace, profile: &str, package: &Path) -> Step {
    let library = format!("{profile}/{DLL_PREFIX}_tssd{DLL_SUFFIX}");
    Step::python(STAGE, "python/stage.py package")
        .argument(workspace.target.join(library))
        .argument(package)
        .kind(StepKind::Setup)
}

/// Builds the extension module and the command in the release profile.
fn release(target: Option<&str>) -> Step {
    let build = "build --release --package tssd-python --features command --lib --bins";
    let target = target.map_or_else(String::new, |target| format!("--target {target}"));
    Step::cargo("release build", &format!("{build} {target}")).kind(StepKind::Setup)
}

/// Builds and installs the wheel, and checks its types with torch.
pub(crate) fn checks_of_wheel(workspace: &Workspace, python: &Path) -> io::Result<Vec<Step>> {
    let folder = installation(workspace);
    let mut steps = wheel(workspace, None)?;
    steps.push(install_wheel(workspace, python, &folder));
    steps.push(
        Step::program("Python types", python, "python/check_types.py")
            .env("PYTHONPATH", &folder)
            .env("MYPYPATH", &folder),
    );
    Ok(steps)
}

/// Runs all Python tests with the installed wheel.
pub(crate) fn tests_with_torch(workspace: &Workspace, python: &Path) -> Step {
    Step::program("Python tests with torch", python, TESTS)
        .env("PYTHONPATH", installation(workspace))
        .env("TSSD_BIN", workspace.tssd())
        .after("build")
}

/// Builds the wheel, for this platform or for another target.
pub(crate) fn build_wheel(
    workspace: &Workspace,
    target: Option<&str>,
    verbose: bool,
) -> io::Result<bool> {
    let mut steps = vec![environment(workspace)?.step()];
    steps.extend(wheel(workspace, target)?);
    let is_built = runner::run(workspace, vec![steps], Vec::new(), verbose)?.has_passed();
    if is_built {
        println!("the wheel is in {}", wheels(workspace).display());
    }
    Ok(is_built)
}

/// Creates the environment of the benchmarks.
pub(crate) fn install_environment(workspace: &Workspace) -> io::Result<bool> {
    let steps = vec![torch::environment(workspace)?.step()];
    Ok(runner::run(workspace, vec![steps], Vec::new(), false)?.has_passed())
}

/// Returns the command of the Python benchmarks. Stages the package, which must be built.
pub(crate) fn bench_command(workspace: &Workspace) -> io::Result<Command> {
    let package = workspace.target.join("release/python");
    let status = stage(workspace, "release", &package).command.status()?;
    if !status.success() {
        return Err(io::Error::other(format!("python/stage.py: {status}")));
    }
    let mut command = Command::new(torch::environment(workspace)?.python());
    command.arg("python/bench/main.py").env("PYTHONPATH", package);
    command.env("TSSD_BIN", workspace.target.join("release/tssd"));
    Ok(command)
}

/// Installs the wheel into a folder of this checkout, since other checkouts share the environment.
fn install_wheel(workspace: &Workspace, python: &Path, folder: &Path) -> Step {
    let install =
        "-m pip install --no-input --disable-pip-version-check --quiet --no-deps --no-index";
    Step::program(INSTALL, python, install)
        .arguments(["--upgrade", "--target"])
        .argument(folder)
        .argument("--find-links")
        .argument(wheels(workspace))
        .argument("tssd")
        .kind(StepKind::Setup)
}

/// Returns the folder of the wheels.
pub(crate) fn wheels(workspace: &Workspace) -> PathBuf {
    workspace.target.join("wheels")
}

/// Returns the folder in which the wheel is installed.
pub(crate) fn installation(workspace: &Workspace) -> PathBuf {
    workspace.target.join("wheel-installed")
}

/// Returns the command of the installed wheel.
pub(crate) fn installed_command(workspace: &Workspace) -> PathBuf {
    installation(workspace).join("bin").join(format!("tssd{EXE_SUFFIX}"))
}

/// Builds the wheel, which contains the package, the extension module and the command.
pub(crate) fn wheel(workspace: &Workspace, target: Option<&str>) -> io::Result<Vec<Step>> {
    let folder = target.map_or_else(|| workspace.target.clone(), |it| workspace.target.join(it));
    let is_windows = target.map_or(cfg!(windows), |target| target.contains("-windows-"));
    let command = if is_windows { "release/tssd-wheel.exe" } else { "release/tssd-wheel" };
    let mut maturin = Step::program(
        "wheel",
        environment(workspace)?.python(),
        "-m maturin build --release --features command",
    )
    .argument("--manifest-path")
    .argument(workspace.root.join("python/Cargo.toml"))
    .argument("--target-dir")
    .argument(&workspace.target)
    .argument("--out")
    .argument(wheels(workspace))
    .kind(StepKind::Setup)
    .after(ENVIRONMENT);
    if let Some(target) = target {
        maturin = maturin.argument("--target").argument(target);
    }
    Ok(vec![
        release(target),
        Step::python("stage command for the wheel", "python/stage.py command")
            .argument(folder.join(command))
            .kind(StepKind::Setup),
        maturin,
    ])
}
