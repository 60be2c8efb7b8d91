//! Safetensors files: to an archive and back.

use std::io::{self, Write};
use std::path::Path;

use tssd_format::Blob;

use super::same::Same;
use super::{Verdict, note_of};
use crate::console::Console;
use crate::document::open_file;
use crate::failure::{Failure, Result};
use crate::interrupt::Unfinished;
use crate::{pack, unpack};

/// Packs and unpacks a file in a temporary directory; only the same bytes will do.
pub(super) fn check(path: &Path, file: &dyn Blob, console: Console) -> Result<Verdict> {
    let failed = |error| Failure::io("write", &std::env::temp_dir(), error);
    let make = || tempfile::Builder::new().prefix("tssd-roundtrip-").tempdir();
    let (_removed_by_ctrl_c, directory) = Unfinished::make(make).map_err(failed)?;
    let [archive, back] = ["file.tssd", "file.safetensors"].map(|name| directory.path().join(name));
    let silent = Console { json: false, quiet: true, verbose: false };
    pack::run(&pack::Args { input: path.to_owned(), output: archive.clone() }, silent)?;
    unpack::run(&unpack::Args { input: archive, output: back.clone() }, silent)?;
    let (mut back, mut same) = (open_file(&back)?, Same::to(file));
    let bar = console.bytes_bar("comparing", file.size().unwrap_or_default());
    let copied = io::copy(&mut bar.wrap_read(&mut back), &mut same).and_then(|_| same.flush());
    bar.finish_and_clear();
    match copied {
        Ok(()) if same.is_whole() => Ok(Verdict::identical()),
        Err(error) if same.difference().is_none() => Err(Failure::io("read", path, error)),
        _ => Ok(Verdict::lossy([note_of(&same)])),
    }
}
