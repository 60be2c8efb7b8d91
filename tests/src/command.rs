//! The `tssd` command, as a process; where it runs.
#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

use std::path::{Path, PathBuf};

use tempfile::TempDir;

#[cfg(target_os = "linux")]
pub use self::serve::{Serve, end, send};

#[cfg(target_os = "linux")]
mod serve;

/// The binary: `TSSD_BIN`, or where cargo puts it beside this test.
///
/// # Panics
///
/// If it is not there.
pub fn binary() -> PathBuf {
    let path = std::env::var_os("TSSD_BIN").map_or_else(beside_this_test, PathBuf::from);
    assert!(path.is_file(), "no {}: run `cargo build -p tssd`, or set TSSD_BIN", path.display());
    path
}

fn beside_this_test() -> PathBuf {
    built(&format!("tssd{}", std::env::consts::EXE_SUFFIX))
}

/// Where cargo puts what it builds beside this test.
fn built(file: &str) -> PathBuf {
    let test = std::env::current_exe().unwrap();
    test.parent().and_then(Path::parent).unwrap().join(file)
}

/// A library of this package that processes load, which cargo has put beside this test.
///
/// # Panics
///
/// If it is not there.
pub fn library(package: &str) -> PathBuf {
    let path = built(&format!("lib{}.so", package.replace('-', "_")));
    assert!(path.is_file(), "no {}: run `cargo build -p {package}`", path.display());
    path
}

/// A directory in memory, where the system has such.
///
/// # Panics
///
/// If there is no room.
pub fn quick_folder() -> TempDir {
    let memory = Path::new("/dev/shm");
    if memory.is_dir() { TempDir::new_in(memory) } else { TempDir::new() }.unwrap()
}
