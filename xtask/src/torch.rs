use std::io;
use std::process::Command;

use crate::step::{PYTHON, Step, Worth};
use crate::workspace::Workspace;

const REQUIREMENTS: &str = "tests/torch/requirements.txt";

/// Our answers beside those of torch and of the safetensors library.
pub(crate) fn checks(workspace: &Workspace) -> Vec<Step> {
    let python = workspace.environment_python();
    let cases = workspace.target.join("torch-cases.json");
    vec![
        // Everything is selected as for the tests before it, so that nothing is built anew.
        Step::cargo(
            "cases for torch",
            "test --workspace --all-features --test suite write_torch_cases -- --ignored",
        )
        .env("TSSD_TORCH_CASES", &cases)
        .worth(Worth::Nothing),
        Step::program("torch geometry", &python, "tests/torch/geometry.py").argument(&cases),
        Step::program("safetensors demo", &python, "tests/torch/safetensors_demo.py")
            .argument(workspace.tssd()),
    ]
}

/// What makes the virtual environment: nothing if it is there, with the same requirements.
pub(crate) fn environment(workspace: &Workspace) -> io::Result<Vec<Step>> {
    // A wheel is for one version of Python, so that counts as a requirement.
    let requirements = std::fs::read_to_string(workspace.root.join(REQUIREMENTS))?;
    let wanted = format!("# {}\n{requirements}", python_version()?);
    let record = workspace.environment().join("requirements.txt");
    let python = workspace.environment_python();
    if python.exists() && std::fs::read_to_string(&record).is_ok_and(|found| found == wanted) {
        return Ok(Vec::new());
    }
    let install = "-m pip install --no-input --disable-pip-version-check --progress-bar off";
    Ok(vec![
        Step::python("virtual environment", "-m venv --clear")
            .argument(workspace.environment())
            .worth(Worth::Nothing),
        Step::program("torch from PyPI", python, install)
            .argument("--requirement")
            .argument(REQUIREMENTS)
            .worth(Worth::Nothing)
            .record(record, wanted),
    ])
}

fn python_version() -> io::Result<String> {
    let failed = |error: &dyn std::fmt::Display| io::Error::other(format!("{PYTHON}: {error}"));
    let output = Command::new(PYTHON).arg("--version").output().map_err(|error| failed(&error))?;
    if !output.status.success() {
        return Err(failed(&output.status));
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim().into())
}
