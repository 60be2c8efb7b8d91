use std::io;
use std::path::Path;

use crate::step::{Step, StepKind};
use crate::virtual_environment::{Requirements, VirtualEnvironment};
use crate::workspace::Workspace;

/// Returns the environment with the newest torch, and with the other packages to compare with.
pub(crate) fn environment(workspace: &Workspace) -> io::Result<VirtualEnvironment> {
    let requirements = Requirements {
        name: "torch",
        step: "environment with torch",
        file: "tests/torch/requirements.txt",
        imports: "torch, numpy, safetensors, ml_dtypes, pytest, mypy, pyright, transformers, peft, wandb",
        without_dependencies: Some("torchstore==0.1.2"),
    };
    VirtualEnvironment::new(workspace, requirements)
}

/// Compares results with those of torch and of the safetensors library.
pub(crate) fn checks(workspace: &Workspace, python: &Path) -> Vec<Step> {
    let cases = workspace.target.join("torch-cases.json");
    vec![
        // The selection of packages and features is that of the other tests, so that Cargo builds nothing else.
        Step::cargo(
            "write torch cases",
            "test --workspace --all-features --test suite write_torch_cases -- --ignored",
        )
        .env("TSSD_TORCH_CASES", &cases)
        .kind(StepKind::Setup)
        .after("build"),
        Step::program("torch geometry", python, "tests/torch/geometry.py").argument(&cases),
        Step::program("safetensors demo", python, "tests/torch/safetensors_demo.py")
            .argument(workspace.tssd()),
    ]
}
