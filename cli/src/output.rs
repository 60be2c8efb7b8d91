//! Output files: whole or not at all.

use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use indicatif::ProgressBar;
use tempfile::NamedTempFile;

use crate::exit::Exit;
use crate::failure::{Failure, Result};
use crate::interrupt::Unfinished;

/// A file that appears under its name once it is complete and on the disk. Until then it has a
/// temporary name beside it; whatever had the name before is there until then, and stays after an
/// error or an interrupt.
#[derive(Debug)]
pub(crate) struct Output {
    target: PathBuf,
    stream: BufWriter<NamedTempFile>,
    // Dropped after the file, so that its path is known for as long as it exists.
    unfinished: Unfinished,
    bar: ProgressBar,
}

impl Output {
    /// Begins the file that will be at `target`, which `bar` shows growing.
    pub(crate) fn create(target: &Path, bar: ProgressBar) -> Result<Self> {
        let failed = |error| Failure::io("write", target, error);
        // A link stays a link: what it points to is replaced.
        let target = match target.canonicalize() {
            Ok(real) => real,
            Err(error) if error.kind() == io::ErrorKind::NotFound => target.to_owned(),
            Err(error) => return Err(failed(error)),
        };
        let old = target.metadata().ok();
        if old.as_ref().is_some_and(|old| !old.is_file()) {
            let message = format_args!("{} is no regular file", target.display());
            return Err(Failure::new(Exit::Refused, message)
                .help("name a file, which is replaced once the new one is complete"));
        }
        let make = || temporary_in(directory_of(&target));
        let (unfinished, temporary) = Unfinished::make(make).map_err(failed)?;
        if let Some(old) = old {
            temporary.as_file().set_permissions(old.permissions()).map_err(failed)?;
        }
        Ok(Self { target, unfinished, stream: BufWriter::with_capacity(1 << 20, temporary), bar })
    }

    /// Lets the file appear, and returns its length in bytes.
    pub(crate) fn commit(self) -> Result<u64> {
        let Self { target, unfinished, stream, bar } = self;
        let failed = |error| Failure::io("write", &target, error);
        let file = stream.into_inner().map_err(|error| failed(error.into_error()))?;
        file.as_file().sync_all().map_err(failed)?;
        let len = file.as_file().metadata().map_err(failed)?.len();
        file.persist(&target).map_err(|error| failed(error.error))?;
        drop(unfinished);
        sync_directory(directory_of(&target)).map_err(failed)?;
        bar.finish_and_clear();
        Ok(len)
    }
}

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.stream.write(bytes)?;
        self.bar.inc(u64::try_from(written).unwrap_or_default());
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

fn directory_of(target: &Path) -> &Path {
    match target.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    }
}

/// With the mode that any new file gets, not the private one of temporary files.
fn temporary_in(directory: &Path) -> io::Result<NamedTempFile> {
    let mut builder = tempfile::Builder::new();
    builder.prefix(".tssd-").suffix(".tmp");
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        builder.permissions(std::fs::Permissions::from_mode(0o666));
    }
    builder.tempfile_in(directory)
}

/// A rename is on the disk only once its directory is.
#[cfg(unix)]
fn sync_directory(directory: &Path) -> io::Result<()> {
    std::fs::File::open(directory)?.sync_all()
}

#[cfg(not(unix))]
fn sync_directory(_: &Path) -> io::Result<()> {
    Ok(())
}
