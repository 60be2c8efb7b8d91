//! The `tssd` command as a process, and the files that it needs.
#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

use std::path::{Path, PathBuf};

use tempfile::TempDir;

#[cfg(target_os = "linux")]
pub use self::serve::{DaemonProcess, kill_and_wait, send_signal};

#[cfg(target_os = "linux")]
mod serve;

/// Returns the path of the `tssd` binary: `TSSD_BIN`, or where cargo puts it next to this test.
///
/// # Panics
///
/// If the file does not exist.
pub fn binary() -> PathBuf {
    let path = std::env::var_os("TSSD_BIN").map_or_else(default_binary, PathBuf::from);
    assert!(path.is_file(), "no {}: run `cargo build -p tssd`, or set TSSD_BIN", path.display());
    path
}

fn default_binary() -> PathBuf {
    target_file(&format!("tssd{}", std::env::consts::EXE_SUFFIX))
}

/// Returns the path of a file that cargo builds next to this test.
fn target_file(file: &str) -> PathBuf {
    let test = std::env::current_exe().unwrap();
    test.parent().and_then(Path::parent).unwrap().join(file)
}

/// Returns the path of a library of this workspace that processes preload.
///
/// # Panics
///
/// If the file does not exist.
pub fn preload_library(package: &str) -> PathBuf {
    let path = target_file(&format!("lib{}.so", package.replace('-', "_")));
    assert!(path.is_file(), "no {}: run `cargo build -p {package}`", path.display());
    path
}

/// Creates a directory in memory, if the system has such a file system.
///
/// # Panics
///
/// If it cannot be created.
pub fn memory_tempdir() -> TempDir {
    let memory = Path::new("/dev/shm");
    if memory.is_dir() { TempDir::new_in(memory) } else { TempDir::new() }.unwrap()
}
