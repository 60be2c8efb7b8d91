//! Safetensors files, and the directories of them that Hugging Face models are.
//!
//! A file comes back byte for byte: where its header is not the one that [`Export`] writes anyway, an
//! attribute remembers it. The rules of safetensors are checked by the `safetensors` crate. Nothing
//! here opens files: a caller brings bytes, a [`Blob`](crate::Blob) or a stream.
//!
//! ```
//! use bytes::Bytes;
//! use tssd_format::safetensors::{Export, import};
//! use tssd_format::{StateDict, Tensor};
//!
//! let mut dict = StateDict::new();
//! dict.insert("weight", Tensor::from_slice(&[1.0_f32, 2.0], &[2])?);
//! let mut file = Vec::new();
//! Export::of_state_dict(&dict, &Default::default())?.file()?.write_to(&mut file)?;
//!
//! let (again, attrs) = import(Bytes::from(file))?; // its tensors are views of the file
//! assert_eq!((again, attrs.len()), (dict, 0));
//! # Ok::<(), tssd_format::Error>(())
//! ```

mod export;
mod header;
mod index;
mod other;

use bytes::Bytes;

use crate::encode::Attrs;
use crate::error::Result;
use crate::state_dict::StateDict;

pub use export::{Directory, Export, File};
pub use header::{Entry, Header};
pub use index::Index;
pub use other::{OtherFile, is_other_name};

/// The attribute with the header of a file, where it is not the one that would be written anew.
pub const HEADER_ATTR: &str = "tssd.safetensors_header";

/// The attribute with the index of a directory, and with what else its files need to come back.
pub const INDEX_ATTR: &str = "tssd.safetensors_index";

/// The name of the only file of a directory, and the beginning of the names of several.
pub const FILE_NAME: &str = "model.safetensors";

/// The name of the index of a directory with several files.
pub const INDEX_NAME: &str = "model.safetensors.index.json";

/// The key of the dict with the other files of a directory, such as its `config.json`: bytes by name.
pub const FILES_KEY: &str = ".files";

/// The state dict of a file that is in memory, and what the file says of itself.
///
/// Its tensors are views of these bytes, in the order of the header. They are aligned in memory as
/// they are in the file: where [`TensorView::as_slice`](crate::TensorView::as_slice) says
/// `Misaligned`, the bytes are there all the same, and an archive that is made of them is aligned.
///
/// # Errors
///
/// `NotSafetensors`; `NotImportable` for a tensor that torch has no dtype for, or whose name is
/// [`FILES_KEY`].
pub fn import(bytes: impl Into<Bytes>) -> Result<(StateDict, Attrs)> {
    let bytes = bytes.into();
    let header = Header::read(&bytes)?;
    let mut dict = StateDict::new();
    for entry in header.tensors() {
        dict.insert(entry.name(), entry.tensor(&bytes)?);
    }
    Ok((dict, header.attrs()?))
}
