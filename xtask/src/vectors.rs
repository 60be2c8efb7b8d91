use std::io;

use crate::runner;
use crate::step::{Step, Worth};
use crate::workspace::Workspace;

/// Writes the vectors anew and has both readers read them.
pub(crate) fn run(workspace: &Workspace, verbose: bool) -> io::Result<bool> {
    let suite = |name, test: &str| {
        Step::cargo(name, &format!("test --workspace --all-features --test suite {test}"))
    };
    let steps = vec![
        suite("good vectors written", "write_vectors -- --ignored").worth(Worth::Nothing),
        Step::python("bad vectors written", "spec/vectors/make_invalid.py").worth(Worth::Nothing),
        suite("Archive over the vectors", "spec::").worth(Worth::Tests),
        Step::python("reader.py over the vectors", "spec/reader.py --vectors spec/vectors"),
    ];
    Ok(runner::run(workspace, vec![steps], Vec::new(), verbose)?.has_passed())
}
