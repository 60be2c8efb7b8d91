//! Round trip of safetensors files and model directories through an archive.

use std::collections::BTreeMap;
use std::io::Write;
use std::sync::Arc;

use bytes::Bytes;
use tssd_format::safetensors::{Export, INDEX_NAME};
use tssd_format::{Blob, Error};

use super::{Verdict, difference_note};
use crate::console::Console;
use crate::failure::{Failure, Result};
use crate::model::{Model, OtherFile};
use crate::roundtrip::compare_writer::CompareWriter;

/// A function that writes the content of a file.
type WriteContent<'a> = &'a dyn Fn(&mut dyn Write) -> Result<(), Error>;

/// Packs and unpacks a model in memory. The result must have the same files with the same bytes.
pub(super) fn check(model: &Model, console: Console) -> Result<Verdict> {
    let archive = model.pack_in_memory(console)?;
    let format_failure = |error| Failure::format(&model.path, &error);
    let export = Export::from_archive(&archive).map_err(format_failure)?;
    let mut comparison =
        Comparison { model, files: original_files(model), console, reasons: Vec::new() };
    if model.directory.is_none() {
        let file = export.file().map_err(format_failure)?;
        comparison.compare("", &|mut stream| file.write_to(&mut stream))?;
    } else {
        let directory = export.directory().map_err(format_failure)?;
        for file in &directory.files {
            comparison.compare(file.name(), &|mut stream| file.write_to(&mut stream))?;
        }
        for other in &directory.auxiliary_files {
            comparison.compare(other.name(), &|mut stream| other.write_to(&mut stream))?;
        }
        if let Some(index) = &directory.index {
            comparison.compare(INDEX_NAME, &|stream| Ok(stream.write_all(index.as_bytes())?))?;
        }
    }
    let Comparison { files, mut reasons, .. } = comparison;
    reasons.extend(files.into_keys().map(|name| format!("{name}: not unpacked")));
    Ok(if reasons.is_empty() { Verdict::identical() } else { Verdict::lossy(reasons) })
}

/// An original file. Other files are opened one by one: a directory may have more than a process can open.
enum Original<'a> {
    Blob(Arc<dyn Blob>),
    Other(&'a OtherFile),
}

/// Returns the files of a model by name. A file that is not in a directory has the name "".
fn original_files(model: &Model) -> BTreeMap<String, Original<'_>> {
    let mut files = BTreeMap::new();
    for file in &model.files {
        let name = match &model.directory {
            Some(_) => file.path.file_name().unwrap_or_default().to_string_lossy().into_owned(),
            None => String::new(),
        };
        files.insert(name, Original::Blob(file.blob.clone()));
    }
    for other in model.other_files() {
        files.insert(other.name().to_owned(), Original::Other(other));
    }
    if let Some(index) = model.directory.as_ref().and_then(|directory| directory.index.as_ref()) {
        let text = Bytes::copy_from_slice(index.text().as_bytes());
        files.insert(INDEX_NAME.to_owned(), Original::Blob(Arc::new(text)));
    }
    files
}

struct Comparison<'a> {
    model: &'a Model,
    /// The original files that have not been compared yet.
    files: BTreeMap<String, Original<'a>>,
    console: Console,
    reasons: Vec<String>,
}

impl Comparison<'_> {
    /// Compares an unpacked file with the original file of this name.
    fn compare(&mut self, name: &str, write_content: WriteContent<'_>) -> Result<()> {
        let prefix = if name.is_empty() { String::new() } else { format!("{name}: ") };
        let Some(file) = self.files.remove(name) else {
            self.reasons.push(format!("{prefix}unpacked, but not in the directory"));
            return Ok(());
        };
        let file: Arc<dyn Blob> = match file {
            Original::Blob(blob) => blob,
            Original::Other(other) => Arc::new(other.open()?),
        };
        let mut comparer = CompareWriter::new(&*file);
        let bar = self.console.bytes_bar("comparing", file.size().unwrap_or_default());
        let result = write_content(&mut bar.wrap_write(&mut comparer));
        bar.finish_and_clear();
        match result {
            Ok(()) if comparer.is_complete() => {}
            Err(error) if comparer.first_difference().is_none() => {
                let is_file = self.model.directory.is_none();
                let path =
                    if is_file { self.model.path.clone() } else { self.model.path.join(name) };
                return Err(Failure::format(&path, &error));
            }
            _ => self.reasons.push(format!("{prefix}{}", difference_note(&comparer))),
        }
        Ok(())
    }
}
