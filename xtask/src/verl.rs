use std::io;

use crate::python;
use crate::step::Step;
use crate::virtual_environment::{Requirements, VirtualEnvironment};
use crate::workspace::Workspace;

/// Returns the tests of the plug-in with workers of verl, in an environment of their own.
pub(crate) fn checks(workspace: &Workspace) -> io::Result<Vec<Step>> {
    let requirements = Requirements {
        name: "verl",
        step: "environment with verl",
        file: "tests/verl/requirements.txt",
        imports: "pytest, ray, torch, verl.checkpoint_engine, verl.workers.engine",
        without_dependencies: Some("verl==0.9.1"),
    };
    let environment = VirtualEnvironment::new(workspace, requirements)?;
    let tests = "-m pytest -p no:cacheprovider -c tests/verl/pytest.ini tests/verl";
    Ok(vec![
        environment.step(),
        Step::program("verl", environment.python(), tests)
            .env("PYTHONPATH", python::installation(workspace))
            .env("TSSD_BIN", python::installed_command(workspace))
            .after(python::INSTALL),
    ])
}
