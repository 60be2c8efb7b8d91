//! The directory of a model as Hugging Face has it: an index and its files, or one file.

use std::collections::BTreeMap;
use std::fs::File as OpenFile;
use std::io;
use std::path::Path;
use std::sync::Arc;

use tssd_format::safetensors::{FILE_NAME, Header, INDEX_NAME, Index};
use tssd_format::{Attrs, Blob};

use super::source::{Data, File, Source};
use crate::exit::Exit;
use crate::failure::{Failure, Result};

/// Opens the files that the index names, or the only one.
pub(super) fn open(directory: &Path) -> Result<Source> {
    let index = directory.join(INDEX_NAME);
    let only = directory.join(FILE_NAME);
    let mut source = if index.symlink_metadata().is_ok() {
        let refused = |error| Failure::format(&index, &error);
        let text = read_text(&index)?;
        let parsed = Index::parse(text).map_err(refused)?;
        if only.symlink_metadata().is_ok() && !parsed.files().contains_key(FILE_NAME) {
            let message = format_args!(
                "{} has a {FILE_NAME} and an index of other files",
                directory.display()
            );
            return Err(Failure::new(Exit::Refused, message)
                .help("name the file to pack it, or move it away to pack the others"));
        }
        let names = parsed.files().into_keys();
        let files = names.map(|name| open_file(&directory.join(name)));
        let files = files.collect::<Result<Vec<_>>>()?;
        let headers = parsed.files().into_keys().zip(files.iter().map(|file| &file.header));
        let headers: BTreeMap<&str, &Header> = headers.collect();
        let attrs = parsed.attrs(&headers).map_err(refused)?;
        Source { attrs, left_alone: Vec::new(), files }
    } else if only.symlink_metadata().is_ok() {
        let file = open_file(&only)?;
        let attrs: Attrs =
            file.header.attrs().map_err(|error| Failure::format(&file.path, &error))?;
        Source { attrs, left_alone: Vec::new(), files: vec![file] }
    } else {
        let message =
            format_args!("{} has neither {INDEX_NAME} nor {FILE_NAME}", directory.display());
        return Err(Failure::new(Exit::NotFound, message)
            .help("name the directory of a model, or one safetensors file"));
    };
    source.left_alone = others(directory, &source)?;
    Ok(source)
}

fn open_file(path: &Path) -> Result<File> {
    let blob: Arc<dyn Blob> = Arc::new(open_plain(path)?);
    let header = Header::read(&*blob).map_err(|error| Failure::format(path, &error))?;
    Ok(File { path: path.to_owned(), header, data: Data::Blob(blob) })
}

fn read_text(path: &Path) -> Result<String> {
    let file = open_plain(path)?;
    let failed = |error| Failure::io("read", path, error);
    let len = file.size().map_err(failed)?;
    if len > Index::MAX {
        let message = format_args!("{} has {len} bytes, too many for an index", path.display());
        return Err(Failure::new(Exit::Refused, message).help("check what this file is"));
    }
    let mut bytes = vec![0; usize::try_from(len).expect("at most 100 MB")];
    file.read_exact_at(&mut bytes, 0).map_err(failed)?;
    String::from_utf8(bytes)
        .map_err(|error| failed(io::Error::new(io::ErrorKind::InvalidData, error.utf8_error())))
}

/// Opens a regular file that is there itself: whoever made the directory chose its names, so a link
/// could lead to any file of whoever packs it.
fn open_plain(path: &Path) -> Result<OpenFile> {
    let failed = |error| Failure::io("read", path, error);
    let refused = |what| Failure::new(Exit::Refused, format_args!("{} is {what}", path.display()));
    let found = path.symlink_metadata().map_err(failed)?;
    if found.is_symlink() {
        return Err(refused("a link")
            .help("links in a directory are not followed: pack a copy of it, as `cp -rL` makes"));
    }
    let file = open_no_follow(path).map_err(failed)?;
    if !file.metadata().map_err(failed)?.is_file() {
        return Err(refused("no regular file").help("take another copy of the directory"));
    }
    Ok(file)
}

/// A link that takes the place of the file meanwhile is an error; so that a pipe is one too, opening
/// does not wait for its writer.
#[cfg(unix)]
fn open_no_follow(path: &Path) -> io::Result<OpenFile> {
    use rustix::fs::{Mode, OFlags};
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    Ok(rustix::fs::open(path, flags, Mode::empty())?.into())
}

#[cfg(not(unix))]
fn open_no_follow(path: &Path) -> io::Result<OpenFile> {
    OpenFile::open(path)
}

/// The names of everything else in the directory, sorted.
fn others(directory: &Path, source: &Source) -> Result<Vec<String>> {
    let failed = |error| Failure::io("read", directory, error);
    let mut names = Vec::new();
    for entry in directory.read_dir().map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let is_packed = source.files.iter().any(|file| file.path == entry.path());
        if !is_packed && entry.file_name() != INDEX_NAME {
            names.push(entry.file_name().to_string_lossy().into_owned());
        }
    }
    names.sort();
    Ok(names)
}
