use std::io;
use std::path::Path;

use crate::step::{Step, Worth};
use crate::virtual_environment::{Requirements, VirtualEnvironment};
use crate::workspace::Workspace;

/// The newest torch, and the packages that the suites compare with.
pub(crate) fn environment(workspace: &Workspace) -> io::Result<VirtualEnvironment> {
    let requirements = Requirements {
        name: "torch",
        step: "environment with torch",
        file: "tests/torch/requirements.txt",
        imports: "torch, numpy, safetensors, ml_dtypes, pytest, mypy, pyright, transformers",
        without_dependencies: Some("torchstore==0.1.2"),
    };
    VirtualEnvironment::of(workspace, requirements)
}

/// Our answers beside those of torch and of the safetensors library.
pub(crate) fn checks(workspace: &Workspace, python: &Path) -> Vec<Step> {
    let cases = workspace.target.join("torch-cases.json");
    vec![
        // Everything is selected as for the tests before it, so that nothing is built anew.
        Step::cargo(
            "cases for torch",
            "test --workspace --all-features --test suite write_torch_cases -- --ignored",
        )
        .env("TSSD_TORCH_CASES", &cases)
        .worth(Worth::Nothing)
        .after("build"),
        Step::program("torch geometry", python, "tests/torch/geometry.py").argument(&cases),
        Step::program("safetensors demo", python, "tests/torch/safetensors_demo.py")
            .argument(workspace.tssd()),
    ]
}
