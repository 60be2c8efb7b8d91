//! Input of `tssd pack`: a model, or a stream that is packed while it is read.

use std::io::{Read, StdinLock, Write};
use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use tssd_format::safetensors::Header;
use tssd_format::{ArchiveWriter, Attrs, Blob, Options};

use crate::failure::{Failure, Result};
use crate::input::{OpenError, display_input_path, is_directory, is_stream, open, stdin};
use crate::model::{Links, Model, with_attrs};

/// The opened input, with verified headers.
pub(super) enum Source {
    Model(Model),
    Stream(Stream),
}

/// Stdin with the tensors in the order of the header. It is not read into memory first.
pub(super) struct Stream {
    header: Header,
    attrs: Attrs,
    stdin: StdinLock<'static>,
}

impl Source {
    /// Opens a file, stdin, or the directory of a model. The file `output` is not part of the model.
    pub(super) fn open(path: &Path, links: Links, output: &Path) -> Result<Self, OpenError> {
        if is_stream(path) {
            return open_stream(display_input_path(path));
        }
        let model = if is_directory(path)? {
            Model::open_directory(path, links, Some(output))?
        } else {
            Model::from_blob(path, open(path)?)?
        };
        Ok(Self::Model(model))
    }

    /// Returns the number of tensors.
    pub(super) fn tensor_count(&self) -> usize {
        match self {
            Self::Model(model) => model.tensor_count(),
            Self::Stream(stream) => stream.header.tensors().len(),
        }
    }

    /// Returns the size of all tensors in bytes.
    pub(super) fn tensor_bytes(&self) -> u64 {
        match self {
            Self::Model(model) => model.tensor_bytes(),
            Self::Stream(stream) => {
                let bytes = stream.header.tensors().iter().map(|entry| entry.meta().nbytes());
                bytes.fold(0, u64::saturating_add)
            }
        }
    }

    /// Returns the model, or `None` for a stream.
    pub(super) fn model(&self) -> Option<&Model> {
        match self {
            Self::Model(model) => Some(model),
            Self::Stream(_) => None,
        }
    }

    /// Writes an archive. `target` names it in messages.
    pub(super) fn write_archive<W: Write>(
        &mut self,
        output: W,
        options: Options,
        target: &Path,
    ) -> Result<W> {
        match self {
            Self::Model(model) => model.write_archive(output, options, target),
            Self::Stream(stream) => stream.write_archive(output, options, target),
        }
    }
}

impl Stream {
    fn write_archive<W: Write>(&mut self, output: W, options: Options, target: &Path) -> Result<W> {
        let format_failure = |error| Failure::format(target, &error);
        let read_failure = |error| Failure::format(display_input_path(Path::new("-")), &error);
        let options = with_attrs(options, &self.attrs);
        let mut writer = ArchiveWriter::new(output, options).map_err(format_failure)?;
        for entry in self.header.tensors() {
            let tensor = entry.read_from(&mut self.stdin).map_err(read_failure)?;
            writer.insert(entry.name(), tensor).map_err(format_failure)?;
        }
        Header::expect_end(&mut self.stdin).map_err(read_failure)?;
        writer.finish().map_err(format_failure)
    }
}

/// Opens stdin. It is read into memory if its tensors are not in the order of the header.
fn open_stream(path: &Path) -> Result<Source, OpenError> {
    let mut stdin = stdin()?;
    let defect = |error| OpenError::defect(path, error);
    let header = Header::read_from(&mut stdin).map_err(defect)?;
    if header.is_in_order() {
        let attrs = header.attrs().map_err(defect)?;
        return Ok(Source::Stream(Stream { header, attrs, stdin }));
    }
    let len = u64::try_from(header.text().len()).expect("a header has at most 100 MB");
    let mut bytes = [&len.to_le_bytes(), header.text().as_bytes()].concat();
    let read = stdin.read_to_end(&mut bytes);
    read.map_err(|error| Failure::io("read", path, error))?;
    let blob: Arc<dyn Blob> = Arc::new(Bytes::from(bytes));
    Ok(Source::Model(Model::from_blob(path, blob)?))
}
