//! Input of `tssd pack`: the tensors of a file or of stdin, or the files of a directory.

use std::io::{Read, StdinLock};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use tssd_format::safetensors::Header;
use tssd_format::{Attrs, Blob, Error, Tensor};

use super::folder::Entry;
use crate::failure::{Failure, Result};
use crate::input::{display_input_path, is_stream, open, stdin};

/// The opened input, with verified headers.
pub(super) struct Source {
    /// Attributes of the archive.
    pub(super) attrs: Attrs,
    pub(super) files: Vec<File>,
    /// Files of the directory that are packed unchanged.
    pub(super) other_files: Vec<Entry>,
    /// Names of the entries that are not packed.
    pub(super) skipped: Vec<String>,
}

/// A file with tensors.
pub(super) struct File {
    pub(super) path: PathBuf,
    pub(super) header: Header,
    pub(super) data: Data,
}

/// Source of the tensors of a file.
pub(super) enum Data {
    Blob(Arc<dyn Blob>),
    /// A stream with the tensors in the order of the header.
    Stream(StdinLock<'static>),
}

impl Source {
    /// Opens a file, or stdin.
    pub(super) fn open(path: &Path) -> Result<Self> {
        let format_failure = |error| Failure::format(display_input_path(path), &error);
        let (header, data) = if is_stream(path) {
            open_stream(stdin()?).map_err(format_failure)?
        } else {
            let file = open(path)?;
            (Header::read(&*file).map_err(format_failure)?, Data::Blob(file))
        };
        let attrs = header.attrs().map_err(format_failure)?;
        let file = File { path: display_input_path(path).to_owned(), header, data };
        Ok(Self { attrs, files: vec![file], other_files: Vec::new(), skipped: Vec::new() })
    }

    /// Returns the number of tensors.
    pub(super) fn tensor_count(&self) -> usize {
        self.files.iter().map(|file| file.header.tensors().len()).sum()
    }

    /// Returns the size of all tensors in bytes.
    pub(super) fn tensor_bytes(&self) -> u64 {
        let entries = self.files.iter().flat_map(|file| file.header.tensors());
        entries.map(|entry| entry.meta().nbytes()).sum()
    }

    /// Reads each tensor, in the order of the headers, and passes it to `insert`.
    pub(super) fn read(
        files: Vec<File>,
        insert: &mut impl FnMut(&str, Tensor) -> Result<()>,
    ) -> Result<()> {
        for File { path, header, mut data } in files {
            let format_failure = |error| Failure::format(&path, &error);
            for entry in header.tensors() {
                let tensor = match &mut data {
                    Data::Blob(blob) => entry.tensor(&**blob),
                    Data::Stream(stream) => entry.read_from(stream),
                };
                insert(entry.name(), tensor.map_err(format_failure)?)?;
            }
            if let Data::Stream(stream) = &mut data {
                Header::expect_end(stream).map_err(format_failure)?;
            }
        }
        Ok(())
    }
}

/// Opens a stream. It is read into memory if its tensors are not in the order of the header.
fn open_stream(mut stream: StdinLock<'static>) -> Result<(Header, Data), Error> {
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
