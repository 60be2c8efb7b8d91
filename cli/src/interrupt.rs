//! Ctrl-C: whatever lies half-written on the disk goes away first.

use std::fs::File;
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
        exit(Exit::Interrupted)
    })
    .map_err(|error| Failure::new(Exit::Refused, format_args!("cannot catch Ctrl-C: {error}")))
}

/// Ends the process at once: while others tidied up, threads that still run could make something again.
#[cfg(unix)]
#[expect(unsafe_code, reason = "the standard library tidies up before it ends a process")]
fn exit(exit: Exit) -> ! {
    // SAFETY: this is how POSIX declares it.
    unsafe extern "C" {
        safe fn _exit(code: std::ffi::c_int) -> !;
    }
    _exit(exit.code().into())
}

#[cfg(not(unix))]
fn exit(exit: Exit) -> ! {
    std::process::exit(exit.code().into())
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

/// Other threads may still be writing into a directory while it is removed, or make it again: a file in
/// its place makes them fail, and goes last.
fn remove(path: &Path) {
    let started = Instant::now();
    // What is left in the end is in a temporary place.
    while path.is_dir() && started.elapsed() < PATIENCE {
        // What was made meanwhile is removed the next time.
        if std::fs::remove_dir_all(path).is_ok() && File::create_new(path).is_ok() {
            std::thread::sleep(Duration::from_millis(5));
            break;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    // It may be gone already.
    let _ = std::fs::remove_file(path);
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
