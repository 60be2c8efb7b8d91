use std::io;
use std::process::Command;

use crate::step::cargo;
use crate::workspace::Workspace;

/// Runs the bench of this name, or all of them.
pub(crate) fn run(workspace: &Workspace, name: Option<&str>) -> io::Result<bool> {
    let mut command = Command::new(cargo());
    // glibc gives memory back to the system and asks for it again as its state will have it, which
    // can be half the time of a turn. It keeps what a turn of few bytes needs, whoever runs it.
    command.env("MALLOC_TRIM_THRESHOLD_", "1073741824").env("MALLOC_MMAP_THRESHOLD_", "33554432");
    command.args(["bench", "--package", "tssd-tests", "--bench", name.unwrap_or("*")]);
    Ok(command.current_dir(&workspace.root).status()?.success())
}
