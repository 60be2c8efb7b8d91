use std::env::consts::{DLL_PREFIX, DLL_SUFFIX};
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::runner;
use crate::step::{Step, Worth};
use crate::torch;
use crate::virtual_environment::{Requirements, VirtualEnvironment};
use crate::workspace::Workspace;

const TESTS: &str = "-m pytest -p no:cacheprovider -c python/pyproject.toml python/tests";

/// The step that makes the environment without torch.
pub(crate) const ENVIRONMENT: &str = "environment without torch";

/// Packs wheels, runs the tests without torch, and serves S3 to the reliability suite.
pub(crate) fn environment(workspace: &Workspace) -> io::Result<VirtualEnvironment> {
    let requirements = Requirements {
        name: "python",
        step: ENVIRONMENT,
        file: "python/requirements.txt",
        imports: "maturin, ml_dtypes, moto, numpy, pytest",
        without_dependencies: None,
    };
    VirtualEnvironment::of(workspace, requirements)
}

/// The package without torch, from the extension module that was built with everything else.
pub(crate) fn checks(workspace: &Workspace) -> io::Result<Vec<Step>> {
    let environment = environment(workspace)?;
    let package = workspace.target.join("python");
    Ok(vec![
        environment.step(),
        staged(workspace, "debug", &package).after("build"),
        Step::program("Python tests", environment.python(), TESTS)
            .env("PYTHONPATH", package)
            .env("TSSD_BIN", workspace.tssd()),
    ])
}

/// The package in a folder, with the extension module of a profile.
fn staged(workspace: &Workspace, profile: &str, package: &Path) -> Step {
    let library = format!("{profile}/{DLL_PREFIX}_tssd{DLL_SUFFIX}");
    Step::python("Python package", "python/stage.py package")
        .argument(workspace.target.join(library))
        .argument(package)
        .worth(Worth::Nothing)
}

/// The extension module and the command, as users have them.
fn release(target: Option<&str>) -> Step {
    let build = "build --release --package tssd-python --features command --lib --bins";
    let target = target.map_or_else(String::new, |target| format!("--target {target}"));
    Step::cargo("release build", &format!("{build} {target}")).worth(Worth::Nothing)
}

/// The wheel, and its types beside torch.
pub(crate) fn checks_of_wheel(workspace: &Workspace, python: &Path) -> io::Result<Vec<Step>> {
    let folder = installation(workspace);
    let mut steps = wheel(workspace, None)?;
    steps.push(installed(workspace, python, &folder));
    steps.push(
        Step::program("Python types", python, "python/check_types.py")
            .env("PYTHONPATH", &folder)
            .env("MYPYPATH", &folder),
    );
    Ok(steps)
}

/// All tests, of the installed wheel.
pub(crate) fn tests_with_torch(workspace: &Workspace, python: &Path) -> Step {
    Step::program("Python tests with torch", python, TESTS)
        .env("PYTHONPATH", installation(workspace))
        .env("TSSD_BIN", workspace.tssd())
        .after("build")
}

/// Builds the wheel.
pub(crate) fn run(workspace: &Workspace, target: Option<&str>, verbose: bool) -> io::Result<bool> {
    let mut steps = vec![environment(workspace)?.step()];
    steps.extend(wheel(workspace, target)?);
    let is_built = runner::run(workspace, vec![steps], Vec::new(), verbose)?.has_passed();
    if is_built {
        println!("the wheel is in {}", wheels(workspace).display());
    }
    Ok(is_built)
}

/// Makes the environment of the benchmarks.
pub(crate) fn install(workspace: &Workspace) -> io::Result<bool> {
    let steps = vec![torch::environment(workspace)?.step()];
    Ok(runner::run(workspace, vec![steps], Vec::new(), false)?.has_passed())
}

/// What races the package, which is built, with what users would have without it.
pub(crate) fn bench(workspace: &Workspace) -> io::Result<Command> {
    let package = workspace.target.join("release/python");
    let staged = staged(workspace, "release", &package).command.status()?;
    if !staged.success() {
        return Err(io::Error::other(format!("python/stage.py: {staged}")));
    }
    let mut command = Command::new(torch::environment(workspace)?.python());
    command.arg("python/bench/main.py").env("PYTHONPATH", package);
    command.env("TSSD_BIN", workspace.target.join("release/tssd"));
    Ok(command)
}

/// The wheel in a folder of this checkout: other checkouts share the environment of this Python.
fn installed(workspace: &Workspace, python: &Path, folder: &Path) -> Step {
    let install =
        "-m pip install --no-input --disable-pip-version-check --quiet --no-deps --no-index";
    Step::program("wheel installed", python, install)
        .arguments(["--upgrade", "--target"])
        .argument(folder)
        .argument("--find-links")
        .argument(wheels(workspace))
        .argument("tssd")
        .worth(Worth::Nothing)
}

fn wheels(workspace: &Workspace) -> PathBuf {
    workspace.target.join("wheels")
}

fn installation(workspace: &Workspace) -> PathBuf {
    workspace.target.join("wheel-installed")
}

/// The extension module, the package and the command in one file.
fn wheel(workspace: &Workspace, target: Option<&str>) -> io::Result<Vec<Step>> {
    let folder = target.map_or_else(|| workspace.target.clone(), |it| workspace.target.join(it));
    let is_windows = target.map_or(cfg!(windows), |target| target.contains("-windows-"));
    let command = if is_windows { "release/tssd-wheel.exe" } else { "release/tssd-wheel" };
    let mut packed = Step::program(
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
    .worth(Worth::Nothing)
    .after(ENVIRONMENT);
    if let Some(target) = target {
        packed = packed.argument("--target").argument(target);
    }
    Ok(vec![
        release(target),
        Step::python("command for the wheel", "python/stage.py command")
            .argument(folder.join(command))
            .worth(Worth::Nothing),
        packed,
    ])
}
