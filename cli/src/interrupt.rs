//! Signal handling: on Ctrl-C, incomplete files are removed before the process exits.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::exit::Exit;
use crate::failure::{Failure, Result};

/// Files and directories that the signal handler removes.
static CLEANUP_PATHS: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

fn lock_cleanup_paths() -> MutexGuard<'static, Vec<PathBuf>> {
    // Each operation leaves the list consistent, so a poisoned lock is still usable.
    CLEANUP_PATHS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Installs a handler that removes incomplete files on Ctrl-C, SIGTERM or SIGHUP, then exits.
pub(crate) fn install() -> Result<()> {
    ctrlc::set_handler(|| {
        // Hold the lock until the process exits, so that no other path is registered.
        let paths = lock_cleanup_paths();
        for path in paths.iter() {
            remove(path);
        }
        exit(Exit::Interrupted)
    })
    .map_err(|error| Failure::new(Exit::Refused, format_args!("cannot catch Ctrl-C: {error}")))
}

/// Ends the process without exit handlers: while they ran, other threads could create files again.
#[cfg(unix)]
#[expect(unsafe_code, reason = "the standard library tidies up before it ends a process")]
fn exit(exit: Exit) -> ! {
    // SAFETY: POSIX declares `void _exit(int)`, which does not return. It has no preconditions and
    // touches no memory of the process, so the declaration can be `safe`.
    unsafe extern "C" {
        safe fn _exit(code: std::ffi::c_int) -> !;
    }
    _exit(exit.code().into())
}

#[cfg(not(unix))]
fn exit(exit: Exit) -> ! {
    std::process::exit(exit.code().into())
}

/// Returns a receiver that completes on Ctrl-C, SIGTERM or SIGHUP.
///
/// The daemon uses it instead of [`install`], because it shuts down by itself.
#[cfg(target_os = "linux")]
pub(crate) fn shutdown_signal() -> Result<tokio::sync::oneshot::Receiver<()>> {
    let (sender, receiver) = tokio::sync::oneshot::channel();
    let mut sender = Some(sender);
    ctrlc::set_handler(move || drop(sender.take())).map_err(|error| {
        Failure::new(Exit::Refused, format_args!("cannot catch Ctrl-C: {error}"))
    })?;
    Ok(receiver)
}

/// How long [`remove`] retries while other threads recreate the directory.
const REMOVE_TIMEOUT: Duration = Duration::from_secs(10);

/// Removes a file or a directory.
///
/// Other threads may still write into the directory, or create it again. A file in its place makes
/// their calls fail. That file is removed last.
fn remove(path: &Path) {
    let started = Instant::now();
    // After the timeout, the rest stays behind under its temporary name.
    while path.is_dir() && started.elapsed() < REMOVE_TIMEOUT {
        // If another thread added a file or recreated the directory, try again.
        if std::fs::remove_dir_all(path).is_ok() && File::create_new(path).is_ok() {
            std::thread::sleep(Duration::from_millis(5));
            break;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    // The file may not exist.
    let _ = std::fs::remove_file(path);
}

/// Guard of a file or directory: while it lives, an interrupt removes the path.
#[derive(Debug)]
pub(crate) struct CleanupGuard(PathBuf);

impl CleanupGuard {
    /// Creates a file or a directory with `create`, and registers its path.
    ///
    /// The list is locked meanwhile: an interrupt comes before the creation, or finds the path in the
    /// list. The file is the second element, so that it is dropped before the guard.
    pub(crate) fn create<T: AsRef<Path>>(
        make: impl FnOnce() -> io::Result<T>,
    ) -> io::Result<(Self, T)> {
        let mut paths = lock_cleanup_paths();
        let file = make()?;
        let path = file.as_ref().to_owned();
        paths.push(path.clone());
        Ok((Self(path), file))
    }
}

impl CleanupGuard {
    /// Runs the step that gives the file or directory its final name. An interrupt waits for it.
    pub(crate) fn finish<T>(self, step: impl FnOnce() -> T) -> T {
        let mut paths = lock_cleanup_paths();
        let result = step();
        paths.retain(|path| *path != self.0);
        result
    }
}

impl Drop for CleanupGuard {
    fn drop(&mut self) {
        lock_cleanup_paths().retain(|path| *path != self.0);
    }
}
