//! What is packed: the tensors of a file or of stdin, or the files of a directory.

use std::io::{Read, StdinLock};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use tssd_format::safetensors::Header;
use tssd_format::{Attrs, Blob, Error, Tensor};

use super::folder::Entry;
use crate::failure::{Failure, Result};
use crate::input::{is_stream, open, shown, stdin};

/// Proven headers, and where the tensors are.
pub(super) struct Source {
    /// What the archive says of itself.
    pub(super) attrs: Attrs,
    pub(super) files: Vec<File>,
    /// Files of the directory that are packed as they are.
    pub(super) others: Vec<Entry>,
    /// The names of what else is there.
    pub(super) left_alone: Vec<String>,
}

/// A file with tensors.
pub(super) struct File {
    pub(super) path: PathBuf,
    pub(super) header: Header,
    pub(super) data: Data,
}

/// Where the tensors of a file are.
pub(super) enum Data {
    Blob(Arc<dyn Blob>),
    /// They come one after the other.
    Stream(StdinLock<'static>),
}

impl Source {
    /// Opens a file, or stdin.
    pub(super) fn open(path: &Path) -> Result<Self> {
        let refused = |error| Failure::format(shown(path), &error);
        let (header, data) = if is_stream(path) {
            from_stream(stdin()?).map_err(refused)?
        } else {
            let file = open(path)?;
            (Header::read(&*file).map_err(refused)?, Data::Blob(file))
        };
        let attrs = header.attrs().map_err(refused)?;
        let file = File { path: shown(path).to_owned(), header, data };
        Ok(Self { attrs, files: vec![file], others: Vec::new(), left_alone: Vec::new() })
    }

    /// How many tensors there are.
    pub(super) fn tensors(&self) -> usize {
        self.files.iter().map(|file| file.header.tensors().len()).sum()
    }

    /// How many bytes all tensors take.
    pub(super) fn bytes(&self) -> u64 {
        let entries = self.files.iter().flat_map(|file| file.header.tensors());
        entries.map(|entry| entry.meta().nbytes()).sum()
    }

    /// Reads tensor by tensor, in the order of the headers.
    pub(super) fn read(
        files: Vec<File>,
        take: &mut impl FnMut(&str, Tensor) -> Result<()>,
    ) -> Result<()> {
        for File { path, header, mut data } in files {
            let refused = |error| Failure::format(&path, &error);
            for entry in header.tensors() {
                let tensor = match &mut data {
                    Data::Blob(blob) => entry.tensor(&**blob),
                    Data::Stream(stream) => entry.read_from(stream),
                };
                take(entry.name(), tensor.map_err(refused)?)?;
            }
            if let Data::Stream(stream) = &mut data {
                Header::end(stream).map_err(refused)?;
            }
        }
        Ok(())
    }
}

/// A stream whose tensors have another order than the header has to be in memory whole.
fn from_stream(mut stream: StdinLock<'static>) -> Result<(Header, Data), Error> {
    let header = Header::read_from(&mut stream)?;
    if header.is_in_order() {
        return Ok((header, Data::Stream(stream)));
    }
    let len = u64::try_from(header.text().len()).map_err(std::io::Error::other)?;
    let mut bytes = [&len.to_le_bytes(), header.text().as_bytes()].concat();
    stream.read_to_end(&mut bytes)?;
    let blob: Arc<dyn Blob> = Arc::new(Bytes::from(bytes));
    Ok((Header::read(&*blob)?, Data::Blob(blob)))
}
