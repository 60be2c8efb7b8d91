use crate::virtual_environment::VirtualEnvironment;
use crate::workspace::Workspace;

/// Names its Python for the tests.
pub(crate) const VARIABLE: &str = "TSSD_S3_PYTHON";

/// A server that speaks S3, which tests start.
pub(crate) fn environment(workspace: &Workspace) -> VirtualEnvironment {
    VirtualEnvironment {
        folder: workspace.target.join("venv-s3"),
        requirements: "tests/s3/requirements.txt",
        alone: None,
        name: "moto from PyPI",
    }
}
