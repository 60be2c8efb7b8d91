use std::io;
use std::path::PathBuf;
use std::process::Command;

use crate::step::{PYTHON, Step, Worth};
use crate::workspace::Workspace;

/// A Python with packages of its own, made once.
pub(crate) struct VirtualEnvironment {
    pub(crate) folder: PathBuf,
    /// The file that names its packages.
    pub(crate) requirements: &'static str,
    /// A package that is installed without those that it asks for, which are older ones.
    pub(crate) alone: Option<&'static str>,
    /// The step that installs them.
    pub(crate) name: &'static str,
}

impl VirtualEnvironment {
    pub(crate) fn python(&self) -> PathBuf {
        self.folder.join(if cfg!(windows) { "Scripts/python.exe" } else { "bin/python" })
    }

    /// What makes it: nothing if it is there, with the same requirements.
    pub(crate) fn steps(&self, workspace: &Workspace) -> io::Result<Vec<Step>> {
        // A wheel is for one version of Python, so that counts as a requirement.
        let requirements = std::fs::read_to_string(workspace.root.join(self.requirements))?;
        let alone = self.alone.unwrap_or_default();
        let wanted = format!("# {}\n{requirements}{alone}", python_version()?);
        let record = self.folder.join("requirements.txt");
        let python = self.python();
        if python.exists() && std::fs::read_to_string(&record).is_ok_and(|found| found == wanted) {
            return Ok(Vec::new());
        }
        let install = "-m pip install --no-input --disable-pip-version-check --progress-bar off";
        let made = Step::python("virtual environment", "-m venv --clear");
        let alone = self.alone.map(|package| {
            Step::program(self.name, &python, install).argument("--no-deps").argument(package)
        });
        let installed = Step::program(self.name, &python, install)
            .argument("--requirement")
            .argument(self.requirements)
            .record(record, wanted);
        let steps = [Some(made.argument(&self.folder)), alone, Some(installed)];
        Ok(steps.into_iter().flatten().map(|step| step.worth(Worth::Nothing)).collect())
    }
}

fn python_version() -> io::Result<String> {
    let failed = |error: &dyn std::fmt::Display| io::Error::other(format!("{PYTHON}: {error}"));
    let output = Command::new(PYTHON).arg("--version").output().map_err(|error| failed(&error))?;
    if !output.status.success() {
        return Err(failed(&output.status));
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim().into())
}
