use std::io;

use crate::runner;
use crate::step::{Step, StepKind};
use crate::workspace::Workspace;

/// Direction of a conversion.
///
/// Archives are `fuzz/corpus/TARGET.tar.zst`, which are in git. Folders are `fuzz/corpus/TARGET/`, which `cargo fuzz`
/// reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    Pack,
    Unpack,
}

/// Converts the corpora of all fuzz targets.
pub(crate) fn run(workspace: &Workspace, direction: Direction) -> io::Result<bool> {
    let (name, test) = match direction {
        Direction::Pack => ("pack corpora", "corpora_to_archives"),
        Direction::Unpack => ("unpack corpora", "corpora_to_folders"),
    };
    let test = format!("test --workspace --all-features --test suite {test} -- --ignored");
    let steps = vec![Step::cargo(name, &test).kind(StepKind::Setup)];
    Ok(runner::run(workspace, vec![steps], Vec::new(), false)?.has_passed())
}
