use std::env::consts::EXE_SUFFIX;
use std::io;
use std::path::{Path, PathBuf};

/// The folders of this checkout.
pub(crate) struct Workspace {
    /// Root of the repository.
    pub(crate) root: PathBuf,
    /// Target folder of Cargo.
    pub(crate) target: PathBuf,
}

impl Workspace {
    /// Derives the folders from the path of this program.
    ///
    /// # Errors
    ///
    /// If the program is not in a target folder.
    pub(crate) fn find() -> io::Result<Self> {
        // This program is TARGET/PROFILE/xtask, for any configuration of the target folder.
        let program = std::env::current_exe()?;
        let target = program.ancestors().nth(2).ok_or_else(|| {
            io::Error::other(format!("{} is not in a target directory", program.display()))
        })?;
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        Ok(Self { root: root.parent().unwrap_or(root).into(), target: target.into() })
    }

    /// Returns the path of the command `tssd` of the dev profile.
    pub(crate) fn tssd(&self) -> PathBuf {
        self.target.join("debug").join(format!("tssd{EXE_SUFFIX}"))
    }

    /// Returns the folder with the output of each step of the last run.
    pub(crate) fn logs(&self) -> PathBuf {
        self.target.join("xtask-logs")
    }

    /// Returns the log file of a step.
    pub(crate) fn log(&self, step: &str) -> PathBuf {
        let name = step.replace(|letter: char| !letter.is_alphanumeric(), "-");
        self.logs().join(format!("{name}.log"))
    }
}
