use std::env::consts::EXE_SUFFIX;
use std::path::PathBuf;

use crate::cache;
use crate::step::{Step, StepKind};

/// A program from crates.io, installed once for all checkouts.
pub(crate) struct Tool {
    /// Name of the package and of the program.
    pub(crate) name: &'static str,
    pub(crate) version: &'static str,
    /// Name of the step that installs it.
    pub(crate) step: &'static str,
}

impl Tool {
    pub(crate) fn program(&self) -> PathBuf {
        self.folder().join("bin").join(format!("{}{EXE_SUFFIX}", self.name))
    }

    /// Returns the step that installs the tool, or `None` if this version is installed.
    pub(crate) fn install_step(&self) -> Option<Step> {
        if self.program().exists() {
            return None;
        }
        // A debug build: the tool runs for a second, and optimisation would take longer.
        let step = Step::cargo(self.step, "install --locked --debug --no-default-features --root")
            .argument(self.folder())
            .argument(format!("{}@{}", self.name, self.version))
            .env("CARGO_PROFILE_DEV_DEBUG", "none");
        Some(step.kind(StepKind::Setup))
    }

    fn folder(&self) -> PathBuf {
        cache::folder().join(format!("tools/{}-{}", self.name, self.version))
    }
}
