use std::io;
use std::process::Command;

use crate::step::cargo;
use crate::workspace::Workspace;

/// Runs the bench of this name, or all of them.
pub(crate) fn run(workspace: &Workspace, name: Option<&str>) -> io::Result<bool> {
    let mut command = Command::new(cargo());
    command.args(["bench", "--package", "tssd-tests", "--bench", name.unwrap_or("*")]);
    Ok(command.current_dir(&workspace.root).status()?.success())
}
