use crate::step::{Step, Worth};
use crate::virtual_environment::VirtualEnvironment;
use crate::workspace::Workspace;

/// Where torch is.
pub(crate) fn environment(workspace: &Workspace) -> VirtualEnvironment {
    VirtualEnvironment {
        folder: workspace.target.join("venv"),
        requirements: "tests/torch/requirements.txt",
        alone: Some("torchstore==0.1.2"),
        name: "torch from PyPI",
    }
}

/// Our answers beside those of torch and of the safetensors library.
pub(crate) fn checks(workspace: &Workspace) -> Vec<Step> {
    let python = environment(workspace).python();
    let cases = workspace.target.join("torch-cases.json");
    vec![
        // Everything is selected as for the tests before it, so that nothing is built anew.
        Step::cargo(
            "cases for torch",
            "test --workspace --all-features --test suite write_torch_cases -- --ignored",
        )
        .env("TSSD_TORCH_CASES", &cases)
        .worth(Worth::Nothing),
        Step::program("torch geometry", &python, "tests/torch/geometry.py").argument(&cases),
        Step::program("safetensors demo", &python, "tests/torch/safetensors_demo.py")
            .argument(workspace.tssd()),
    ]
}
