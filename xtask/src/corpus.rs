use std::io;

use crate::runner;
use crate::step::{Step, Worth};
use crate::workspace::Workspace;

/// Between `fuzz/corpus/TARGET.tar.zst`, which git has, and `fuzz/corpus/TARGET/`, which `cargo fuzz` reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    Pack,
    Unpack,
}

/// Converts the corpora of all targets.
pub(crate) fn run(workspace: &Workspace, direction: Direction) -> io::Result<bool> {
    let (name, test) = match direction {
        Direction::Pack => ("corpora packed", "corpora_to_archives"),
        Direction::Unpack => ("corpora unpacked", "corpora_to_folders"),
    };
    let test = format!("test --workspace --all-features --test suite {test} -- --ignored");
    let steps = vec![Step::cargo(name, &test).worth(Worth::Nothing)];
    Ok(runner::run(workspace, vec![steps], Vec::new(), false)?.has_passed())
}
