//! Verification of safetensors files and model directories.

use std::path::Path;

use tssd_format::Blob;

use super::Verdict;
use crate::console::Console;
use crate::failure::{Failure, Result};
use crate::model::Model;
use crate::size::{Size, pluralize};

/// Size of the blocks that are read, in bytes (1 MiB).
const BLOCK_BYTES: u64 = 1 << 20;

/// Reads every byte of a model. Its headers and its index have been verified by opening it.
pub(super) fn verify(model: &Model, console: Console) -> Result<Verdict> {
    let bar = console.bytes_bar("reading", model.file_len());
    let mut advance = |len| bar.inc(len);
    for file in &model.files {
        read_all(&*file.blob, &file.path, &mut advance)?;
    }
    for other in model.other_files() {
        read_all(&other.open()?, &model.path.join(other.name()), &mut advance)?;
    }
    bar.finish_and_clear();
    let mut summary = Size(model.file_len()).to_string();
    if model.directory.is_some() {
        let files = pluralize(model.files.len(), "safetensors file");
        let other_files = pluralize(model.other_files().len(), "other file");
        summary = format!("{summary}, {files}, {other_files}");
    }
    summary.push_str(", no checksums: changed bytes of tensors are not found");
    let warnings = total_size_warning(model).into_iter().collect();
    Ok(Verdict { summary, damage: Vec::new(), warnings, has_checksums: false })
}

/// Reads a file, so that an unreadable block of the disk is found.
fn read_all(blob: &dyn Blob, path: &Path, advance: &mut impl FnMut(u64)) -> Result<()> {
    let io_failure = |error| Failure::io("read", path, error);
    let len = blob.size().map_err(io_failure)?;
    if blob.bytes().is_some() {
        // It has been read into memory.
        return Ok(());
    }
    let mut buffer = vec![0; usize::try_from(len.min(BLOCK_BYTES)).expect("at most 1 MiB")];
    let mut start = 0;
    while start < len {
        let block = (len - start).min(BLOCK_BYTES);
        let target = &mut buffer[..usize::try_from(block).expect("at most 1 MiB")];
        blob.read_exact_at(target, start).map_err(io_failure)?;
        start += block;
        advance(block);
    }
    Ok(())
}

/// Returns a warning if the index records another size than that of the tensors.
///
/// This is no damage: programs that load models do not read it, and many published models have another number.
fn total_size_warning(model: &Model) -> Option<String> {
    let recorded = model.directory.as_ref()?.index.as_ref()?.total_size()?;
    let bytes = model.tensor_bytes();
    (recorded != bytes)
        .then(|| format!("the index records a total_size of {recorded}, the tensors have {bytes}"))
}
