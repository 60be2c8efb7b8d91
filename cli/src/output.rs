//! Output files, which are written atomically, and stdout (`-`).

mod directory;
mod replaced;
mod scratch;

use std::io::{self, BufWriter, IsTerminal, StdoutLock, Write};
use std::path::{Path, PathBuf};

use indicatif::ProgressBar;
use tssd_store::Replacement;

use crate::exit::Exit;
use crate::failure::{Failure, Result};
use crate::input::is_stream;
use crate::interrupt::CleanupGuard;

pub(crate) use directory::{OutputDirectory, OutputFile};
pub(crate) use scratch::Scratch;

/// The option `--force` of commands that write a file or a directory.
#[derive(Clone, Copy, Debug, clap::Args)]
pub(crate) struct Force {
    /// Replace an output that exists, in one step, once the new one is complete. A directory must have no files that the
    /// new one does not have
    #[arg(long)]
    force: bool,
}

impl Force {
    /// Checks that an output file does not exist, or may be replaced.
    ///
    /// Commands that work for long before they create the output check it first.
    pub(crate) fn check(self, target: &Path) -> Result<()> {
        if !self.force && !is_stream(target) && target.symlink_metadata().is_ok() {
            return Err(exists_failure(target));
        }
        Ok(())
    }
}

fn exists_failure(target: &Path) -> Failure {
    Failure::new(Exit::Refused, format_args!("{} exists", target.display()))
        .help("name another output, or replace it with --force")
}

/// A file that appears under its name once it is complete and on the disk.
///
/// A file that has the name stays until then, and stays after an error or an interrupt. Output to stdout is not atomic.
#[derive(Debug)]
pub(crate) struct Output {
    sink: Sink,
    written: u64,
    bar: ProgressBar,
}

#[derive(Debug)]
enum Sink {
    File {
        target: PathBuf,
        stream: BufWriter<Replacement>,
        // Dropped after the file, so that the path is registered for as long as the file exists.
        cleanup: CleanupGuard,
    },
    Stdout(BufWriter<StdoutLock<'static>>),
}

/// Size of write buffers, in bytes (1 MiB).
const BUFFER_BYTES: usize = 1 << 20;

/// Returns an output path for messages: `<stdout>` instead of `-`.
pub(crate) fn display_output_path(target: &Path) -> &Path {
    if is_stream(target) { Path::new("<stdout>") } else { target }
}

impl Output {
    /// Creates a file that appears as `target` in [`commit`](Self::commit). `bar` advances with each write.
    ///
    /// # Errors
    ///
    /// Fails if `target` exists and `force` does not permit to replace it, or if it is not a regular file.
    pub(crate) fn create(target: &Path, force: Force, bar: ProgressBar) -> Result<Self> {
        if is_stream(target) {
            return Ok(Self { sink: Sink::stdout()?, written: 0, bar });
        }
        force.check(target)?;
        if target.metadata().is_ok_and(|old| !old.is_file()) {
            let message = format_args!("{} is no regular file", target.display());
            return Err(Failure::new(Exit::Refused, message)
                .help("name a file, which is replaced once the new one is complete"));
        }
        let create = || {
            let create = if force.force { Replacement::create } else { Replacement::create_new };
            create(target, true)
        };
        let (cleanup, file) =
            CleanupGuard::create(create).map_err(|error| output_failure(target, error))?;
        let stream = BufWriter::with_capacity(BUFFER_BYTES, file);
        Ok(Self {
            sink: Sink::File { target: target.to_owned(), stream, cleanup },
            written: 0,
            bar,
        })
    }

    /// Makes the file appear under its name, and returns its length in bytes.
    pub(crate) fn commit(self) -> Result<u64> {
        match self.sink {
            Sink::File { target, stream, cleanup } => {
                let failure = |error| output_failure(&target, error);
                let file = stream.into_inner().map_err(|error| failure(error.into_error()))?;
                file.commit().map_err(failure)?;
                drop(cleanup);
            }
            Sink::Stdout(mut stream) => stream
                .flush()
                .map_err(|error| Failure::io("write", Path::new("<stdout>"), error))?,
        }
        self.bar.finish_and_clear();
        Ok(self.written)
    }
}

/// Another process may create the output meanwhile.
fn output_failure(target: &Path, error: io::Error) -> Failure {
    if error.kind() == io::ErrorKind::AlreadyExists {
        exists_failure(target)
    } else {
        Failure::io("write", target, error)
    }
}

impl Sink {
    /// Locks stdout.
    ///
    /// # Errors
    ///
    /// Fails if stdout is a terminal, because the output is binary.
    fn stdout() -> Result<Self> {
        let stdout = io::stdout();
        if stdout.is_terminal() {
            return Err(Failure::new(Exit::Usage, "stdout is a terminal, the output is binary")
                .help("send it into a pipe or a file, or name a file in place of `-`"));
        }
        Ok(Self::Stdout(BufWriter::with_capacity(BUFFER_BYTES, stdout.lock())))
    }
}

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = match &mut self.sink {
            Sink::File { stream, .. } => stream.write(bytes),
            Sink::Stdout(stream) => stream.write(bytes),
        }?;
        let count = u64::try_from(written).unwrap_or_default();
        self.written += count;
        self.bar.inc(count);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        match &mut self.sink {
            Sink::File { stream, .. } => stream.flush(),
            Sink::Stdout(stream) => stream.flush(),
        }
    }
}

/// Resolves a link, so that the output replaces the target of the link and keeps the link.
fn resolve(target: &Path) -> io::Result<PathBuf> {
    match target.canonicalize() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(target.to_owned()),
        resolved => resolved,
    }
}

fn parent_directory(target: &Path) -> &Path {
    match target.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    }
}

/// Syncs a directory. A rename is durable only after that.
#[cfg(unix)]
fn sync_directory(directory: &Path) -> io::Result<()> {
    std::fs::File::open(directory)?.sync_all()
}

#[cfg(not(unix))]
fn sync_directory(_: &Path) -> io::Result<()> {
    Ok(())
}
