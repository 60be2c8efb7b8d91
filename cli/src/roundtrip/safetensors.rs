//! Round trip of safetensors files through an archive.

use std::path::Path;

use tssd_format::safetensors::{Export, Header};
use tssd_format::{Archive, ArchiveWriter, Blob, Error, Options};

use super::{Verdict, difference_note, verdict_from_error};
use crate::console::Console;
use crate::failure::{Failure, Result};
use crate::roundtrip::compare_writer::CompareWriter;

/// Packs and unpacks a file in memory. The result must have the same bytes.
pub(super) fn check(path: &Path, file: &dyn Blob, console: Console) -> Result<Verdict> {
    let archive = match pack(file) {
        Ok(archive) => archive,
        Err(error) => return verdict_from_error(path, &error),
    };
    let mut comparer = CompareWriter::new(file);
    let bar = console.bytes_bar("comparing", file.size().unwrap_or_default());
    let result = unpack(&archive, &mut bar.wrap_write(&mut comparer));
    bar.finish_and_clear();
    match result {
        Ok(()) if comparer.is_complete() => Ok(Verdict::identical()),
        Err(error) if comparer.first_difference().is_none() => Err(Failure::format(path, &error)),
        _ => Ok(Verdict::lossy([difference_note(&comparer)])),
    }
}

/// Packs a file as `tssd pack` does.
fn pack(file: &dyn Blob) -> Result<Archive, Error> {
    let header = Header::read(file)?;
    let attrs = header.attrs()?.into_iter();
    let options = attrs.fold(Options::new(), |options, (name, value)| options.attr(name, value));
    let mut writer = ArchiveWriter::new(Vec::new(), options)?;
    for entry in header.tensors() {
        writer.insert(entry.name(), entry.tensor(file)?)?;
    }
    Archive::from_bytes(writer.finish()?)
}

/// Unpacks an archive as `tssd unpack` does.
fn unpack(archive: &Archive, stream: &mut impl std::io::Write) -> Result<(), Error> {
    Export::from_archive(archive)?.file()?.write_to(stream)
}
