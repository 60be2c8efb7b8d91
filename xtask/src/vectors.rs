use std::io;

use crate::runner;
use crate::step::{Step, StepKind};
use crate::workspace::Workspace;

/// Generates the vectors, and checks them with both readers.
pub(crate) fn run(workspace: &Workspace, verbose: bool) -> io::Result<bool> {
    let suite_test = |name, test: &str| {
        Step::cargo(name, &format!("test --workspace --all-features --test suite {test}"))
    };
    let steps = vec![
        suite_test("write valid vectors", "write_vectors -- --ignored").kind(StepKind::Setup),
        Step::python("write invalid vectors", "spec/vectors/make_invalid.py").kind(StepKind::Setup),
        suite_test("Archive on the vectors", "spec::").kind(StepKind::Tests),
        Step::python("reader.py on the vectors", "spec/reader.py --vectors spec/vectors"),
    ];
    Ok(runner::run(workspace, vec![steps], Vec::new(), verbose)?.has_passed())
}
