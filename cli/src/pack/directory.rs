//! Model directories in the layout of Hugging Face: an index with its files, or one file, and others.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

use tssd_format::Blob;
use tssd_format::safetensors::{FILE_NAME, Header, INDEX_NAME, Index};

use super::folder::{Folder, FolderListing};
use super::source::{Data, File, Source};
use crate::exit::Exit;
use crate::failure::{Failure, Result};

/// Opens the safetensors files of the directory, and lists all other files except the output.
///
/// The safetensors files are those that the index names, or `FILE_NAME` if there is no index.
pub(super) fn open(directory: &Path, follow_links: bool, output: &Path) -> Result<Source> {
    let folder = Rc::new(Folder::new(directory, follow_links)?);
    let (attrs, files) = if folder.has(INDEX_NAME) {
        let path = folder.path(INDEX_NAME);
        let format_failure = |error| Failure::format(&path, &error);
        let parsed = Index::parse(read_text(&folder, INDEX_NAME)?).map_err(format_failure)?;
        if folder.has(FILE_NAME) && !parsed.files().contains_key(FILE_NAME) {
            let message = format_args!(
                "{} has a {FILE_NAME} and an index of other files",
                directory.display()
            );
            return Err(Failure::new(Exit::Refused, message)
                .help("name the file to pack it, or move it away to pack the others"));
        }
        let names = parsed.files().into_keys();
        let files = names.map(|name| open_file(&folder, name)).collect::<Result<Vec<_>>>()?;
        let headers = parsed.files().into_keys().zip(files.iter().map(|file| &file.header));
        let headers: BTreeMap<&str, &Header> = headers.collect();
        (parsed.attrs(&headers).map_err(format_failure)?, files)
    } else if folder.has(FILE_NAME) {
        let file = open_file(&folder, FILE_NAME)?;
        let format_failure = |error| Failure::format(&file.path, &error);
        (file.header.attrs().map_err(format_failure)?, vec![file])
    } else {
        let message =
            format_args!("{} has neither {INDEX_NAME} nor {FILE_NAME}", directory.display());
        return Err(Failure::new(Exit::NotFound, message)
            .help("name the directory of a model, or one safetensors file"));
    };
    let is_model_file = |name: &str| {
        let path = folder.path(name);
        name == INDEX_NAME || files.iter().any(|file| file.path == path)
    };
    let FolderListing { files: other_files, skipped } =
        folder.list_other_files(is_model_file, output)?;
    Ok(Source { attrs, files, other_files, skipped })
}

fn open_file(folder: &Folder, name: &str) -> Result<File> {
    let path = folder.path(name);
    let blob: Arc<dyn Blob> = Arc::new(folder.open(name)?);
    let header = Header::read(&*blob).map_err(|error| Failure::format(&path, &error))?;
    Ok(File { path, header, data: Data::Blob(blob) })
}

fn read_text(folder: &Folder, name: &str) -> Result<String> {
    String::from_utf8(folder.read(name, Index::MAX_BYTES)?).map_err(|error| {
        let error = io::Error::new(io::ErrorKind::InvalidData, error.utf8_error());
        Failure::io("read", &folder.path(name), error)
    })
}
