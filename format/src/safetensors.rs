//! Import and export of safetensors files and of Hugging Face model directories.
//!
//! A round trip reproduces a file byte for byte. If its header is not in the canonical form that
//! [`Export`] writes, an attribute stores the header. The `safetensors` crate checks the rules of
//! safetensors. This module opens no files: the caller passes bytes, a [`Blob`](crate::Blob) or a
//! stream.
//!
//! ```
//! use bytes::Bytes;
//! use tssd_format::safetensors::{Export, import};
//! use tssd_format::{StateDict, Tensor};
//!
//! let mut dict = StateDict::new();
//! dict.insert("weight", Tensor::from_slice(&[1.0_f32, 2.0], &[2])?);
//! let mut file = Vec::new();
//! Export::from_state_dict(&dict, &Default::default())?.file()?.write_to(&mut file)?;
//!
//! let (imported, attrs) = import(Bytes::from(file))?; // the tensors are views of the file
//! assert_eq!((imported, attrs.len()), (dict, 0));
//! # Ok::<(), tssd_format::Error>(())
//! ```

mod auxiliary;
mod export;
mod header;
mod index;
mod source;

use bytes::Bytes;

use crate::encode::Attrs;
use crate::error::Result;
use crate::state_dict::StateDict;

pub use crate::options::{FILES_KEY, PACKED_FILES_ATTR};
pub use auxiliary::{AuxiliaryFile, is_auxiliary_file_name};
pub use export::{Directory, Export, File};
pub use header::{Entry, Header};
pub use index::Index;

/// The attribute that stores the header of a file if the header is not in canonical form.
pub const HEADER_ATTR: &str = "tssd.file.safetensors_header";

/// The attribute that stores the index of a directory and the non-canonical headers of its files.
pub const INDEX_ATTR: &str = "tssd.file.safetensors_index";

/// The name of a single tensor file, and the stem of the names of several.
pub const FILE_NAME: &str = "model.safetensors";

/// The name of the index of a directory with several files.
pub const INDEX_NAME: &str = "model.safetensors.index.json";

/// Reads the state dict and the attributes of a file in memory.
///
/// The tensors are views of these bytes, in the order of the header. Their alignment in memory is
/// that of the file, so [`TensorView::as_slice`](crate::TensorView::as_slice) can return
/// `Misaligned`. An archive made from these tensors is aligned.
///
/// # Errors
///
/// - `NotSafetensors` if the file is not valid.
/// - `NotImportable` for a tensor whose dtype or shape torch cannot represent or whose name is
///   [`FILES_KEY`], and for metadata whose name begins with `tssd.`.
pub fn import(bytes: impl Into<Bytes>) -> Result<(StateDict, Attrs)> {
    let bytes = bytes.into();
    let header = Header::read(&bytes)?;
    let mut dict = StateDict::new();
    for entry in header.tensors() {
        dict.insert(entry.name(), entry.tensor(&bytes)?);
    }
    Ok((dict, header.attrs()?))
}
