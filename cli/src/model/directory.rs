//! Model directories in the layout of Hugging Face: an index with its files, or one file, and others.

use std::collections::BTreeMap;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

use tssd_format::safetensors::{FILE_NAME, Header, INDEX_NAME, Index};
use tssd_format::{AttrValue, Attrs, Error, ErrorKind, PACKED_FILES_ATTR};

use super::folder::{Folder, FolderListing, Links};
use super::{Directory, Model, TensorFile};
use crate::exit::Exit;
use crate::failure::{Failure, Result};
use crate::input::{Defect, OpenError, directory_failure, is_shard_set};

/// Returns whether a directory has a model: an index of safetensors files, or `FILE_NAME`.
///
/// A directory with a manifest is a shard set, even if it has these files too.
pub(crate) fn is_model_directory(directory: &Path) -> bool {
    let has = |name: &str| directory.join(name).symlink_metadata().is_ok();
    directory.is_dir() && !is_shard_set(directory) && (has(INDEX_NAME) || has(FILE_NAME))
}

/// Opens the safetensors files of the directory, and lists all other files except `output`.
///
/// The safetensors files are those that the index names, or `FILE_NAME` if there is no index.
///
/// # Errors
///
/// Names all files that are missing or damaged. The index is compared with the files only if all of them can be read.
pub(super) fn open(
    directory: &Path,
    links: Links,
    output: Option<&Path>,
) -> Result<Model, OpenError> {
    let folder = Rc::new(Folder::new(directory, links)?);
    let (index, files, mut attrs) = if folder.has(INDEX_NAME) {
        let index = read_index(&folder)?;
        let files = open_files(&folder, &index)?;
        let attrs = index_attrs(&folder, &index, &files)?;
        (Some(index), files, attrs)
    } else if folder.has(FILE_NAME) {
        let file = open_file(&folder, FILE_NAME)?;
        let attrs = file.header.attrs();
        let attrs = attrs.map_err(|error| OpenError::defect(&file.path, error))?;
        (None, vec![file], attrs)
    } else {
        let lacking = format!("neither {INDEX_NAME} nor {FILE_NAME}");
        let help = "name the directory of a model, or one safetensors file";
        return Err(directory_failure(directory, &lacking, help).into());
    };
    let is_model_file = |name: &str| {
        let path = folder.path(name);
        name == INDEX_NAME || files.iter().any(|file| file.path == path)
    };
    let FolderListing { files: other_files, skipped } =
        folder.list_other_files(is_model_file, output)?;
    if !other_files.is_empty() {
        attrs.insert(PACKED_FILES_ATTR.into(), AttrValue::Int(1));
    }
    let path = directory.to_owned();
    Ok(Model { path, attrs, files, directory: Some(Directory { index, other_files, skipped }) })
}

fn read_index(folder: &Folder) -> Result<Index, OpenError> {
    let path = folder.path(INDEX_NAME);
    let text = String::from_utf8(folder.read(INDEX_NAME, Index::MAX_BYTES)?);
    let not_text = |error: std::string::FromUtf8Error| {
        Error::new(ErrorKind::WeightMap).with_detail(error.utf8_error())
    };
    let index = text.map_err(not_text).and_then(Index::parse);
    let index = index.map_err(|error| OpenError::defect(&path, error))?;
    if folder.has(FILE_NAME) && !index.files().contains_key(FILE_NAME) {
        let directory = path.parent().unwrap_or(&path).display();
        let message = format_args!("{directory} has a {FILE_NAME} and an index of other files");
        let help = "name the file to take it, or move it away to take the others";
        return Err(Failure::new(Exit::Refused, message).help(help).into());
    }
    Ok(index)
}

/// Opens the files that the index names.
fn open_files(folder: &Folder, index: &Index) -> Result<Vec<TensorFile>, OpenError> {
    let (mut files, mut defects) = (Vec::new(), Vec::new());
    for (name, tensors) in index.files() {
        match open_file(folder, name) {
            Ok(file) => files.push(file),
            Err(OpenError::Failure(failure)) if failure.exit() == Exit::NotFound => {
                let tensor = tensors.first().copied().unwrap_or_default();
                let note = format_args!("it maps `{tensor}` to {name}, which does not exist");
                let error = Error::new(ErrorKind::WeightMap).with_detail(note);
                defects.push(Defect { path: folder.path(INDEX_NAME), error });
            }
            Err(OpenError::Defects(more)) => defects.extend(more),
            Err(failure) => return Err(failure),
        }
    }
    if defects.is_empty() { Ok(files) } else { Err(OpenError::Defects(defects)) }
}

fn open_file(folder: &Folder, name: &str) -> Result<TensorFile, OpenError> {
    let path = folder.path(name);
    let blob = Arc::new(folder.open(name)?);
    let header = Header::read(&*blob).map_err(|error| OpenError::defect(&path, error))?;
    Ok(TensorFile { path, header, blob })
}

/// Compares the index with the headers of its files, and returns the attributes of the archive.
fn index_attrs(folder: &Folder, index: &Index, files: &[TensorFile]) -> Result<Attrs, OpenError> {
    let headers = index.files().into_keys().zip(files.iter().map(|file| &file.header));
    let headers: BTreeMap<&str, &Header> = headers.collect();
    index.attrs(&headers).map_err(|error| OpenError::defect(&folder.path(INDEX_NAME), error))
}
