//! Ctrl-C: whatever lies half-written on the disk goes away first.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::exit::Exit;
use crate::failure::{Failure, Result};

/// What is to be removed if the process is interrupted now.
static UNFINISHED: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

fn unfinished() -> MutexGuard<'static, Vec<PathBuf>> {
    // A list of paths is whole after every step, so a panic elsewhere does not spoil it.
    UNFINISHED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Makes Ctrl-C and the signals that end a process remove what is unfinished.
pub(crate) fn install() -> Result<()> {
    ctrlc::set_handler(|| {
        // The lock is kept until the end, so that nothing else is begun.
        let paths = unfinished();
        for path in paths.iter() {
            remove(path);
        }
        std::process::exit(Exit::Interrupted.code().into());
    })
    .map_err(|error| Failure::new(Exit::Refused, format_args!("cannot catch Ctrl-C: {error}")))
}

/// What hears of Ctrl-C and of the signals that end a process, in place of [`install`]: the process
/// then ends itself.
#[cfg(target_os = "linux")]
pub(crate) fn notified() -> Result<tokio::sync::oneshot::Receiver<()>> {
    let (stop, stopped) = tokio::sync::oneshot::channel();
    let mut stop = Some(stop);
    ctrlc::set_handler(move || drop(stop.take())).map_err(|error| {
        Failure::new(Exit::Refused, format_args!("cannot catch Ctrl-C: {error}"))
    })?;
    Ok(stopped)
}

/// For how long something is removed that others make again.
const PATIENCE: Duration = Duration::from_secs(10);

/// Other threads may still be writing into a directory while it is removed, or make it again: it is
/// gone once it has been gone a few times in a row.
fn remove(path: &Path) {
    let (mut gone, started) = (0, Instant::now());
    // What is left in the end is in a temporary place.
    while gone < 3 && started.elapsed() < PATIENCE {
        // A failure is tried again.
        let found = path.symlink_metadata();
        gone = if found.is_ok() { 0 } else { gone + 1 };
        let _tried = match found {
            Ok(metadata) if metadata.is_dir() => std::fs::remove_dir_all(path),
            Ok(_) => std::fs::remove_file(path),
            Err(_) => Ok(()),
        };
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// A file or directory that must not outlive an interrupt, as long as this lives.
#[derive(Debug)]
pub(crate) struct Unfinished(PathBuf);

impl Unfinished {
    /// Makes something that has a path: an interrupt comes before that, or finds it in the list.
    /// What is made comes second, so that it is dropped first.
    pub(crate) fn make<T: AsRef<Path>>(
        make: impl FnOnce() -> io::Result<T>,
    ) -> io::Result<(Self, T)> {
        let mut paths = unfinished();
        let made = make()?;
        let path = made.as_ref().to_owned();
        paths.push(path.clone());
        Ok((Self(path), made))
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        unfinished().retain(|path| *path != self.0);
    }
}
