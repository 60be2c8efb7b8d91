use std::env::consts::EXE_SUFFIX;
use std::io;
use std::path::{Path, PathBuf};

/// The folders of this checkout.
pub(crate) struct Workspace {
    /// The repository.
    pub(crate) root: PathBuf,
    /// Where Cargo puts what it builds, whatever its settings: it has put this program there.
    pub(crate) target: PathBuf,
}

impl Workspace {
    pub(crate) fn find() -> io::Result<Self> {
        // This program is TARGET/PROFILE/xtask.
        let program = std::env::current_exe()?;
        let target = program.ancestors().nth(2).ok_or_else(|| {
            io::Error::other(format!("{} is not in a target directory", program.display()))
        })?;
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        Ok(Self { root: root.parent().unwrap_or(root).into(), target: target.into() })
    }

    /// The command-line tool as the dev profile builds it.
    pub(crate) fn tssd(&self) -> PathBuf {
        self.target.join("debug").join(format!("tssd{EXE_SUFFIX}"))
    }

    /// What each step of the last run has printed, one file for each.
    pub(crate) fn logs(&self) -> PathBuf {
        self.target.join("xtask-logs")
    }
}
