use std::env::consts::EXE_SUFFIX;
use std::path::PathBuf;

use crate::cache;
use crate::step::{Step, Worth};

/// A program from crates.io, installed once for all checkouts.
pub(crate) struct Tool {
    /// Its package and its program.
    pub(crate) name: &'static str,
    pub(crate) version: &'static str,
    /// What the step that installs it is called.
    pub(crate) step: &'static str,
}

impl Tool {
    pub(crate) fn program(&self) -> PathBuf {
        self.folder().join("bin").join(format!("{}{EXE_SUFFIX}", self.name))
    }

    /// What installs it: nothing if it is there, in this version.
    pub(crate) fn installation(&self) -> Option<Step> {
        if self.program().exists() {
            return None;
        }
        // It runs for a second: to optimise it would take longer than that.
        let step = Step::cargo(self.step, "install --locked --debug --no-default-features --root")
            .argument(self.folder())
            .argument(format!("{}@{}", self.name, self.version))
            .env("CARGO_PROFILE_DEV_DEBUG", "none");
        Some(step.worth(Worth::Nothing))
    }

    fn folder(&self) -> PathBuf {
        cache::folder().join(format!("tools/{}-{}", self.name, self.version))
    }
}
