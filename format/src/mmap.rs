//! Archives as memory maps.
#![expect(
    unsafe_code,
    reason = "a map is as safe as the file is unchanged, which its opener vouches for"
)]

use std::fs::File;
use std::io;
use std::sync::Arc;

use bytes::Bytes;

use crate::archive::Archive;
use crate::blob::Blob;
use crate::error::Result;

/// A memory map, such as of a file, which lives as long as the last slice of its bytes.
#[derive(Clone, Debug)]
pub struct Map(Bytes);

/// What is stable is a copy: whoever breaks the promise to leave the file as it is must not change
/// what was proven.
impl Blob for Map {
    fn size(&self) -> io::Result<u64> {
        self.0.size()
    }

    fn read_exact_at(&self, target: &mut [u8], offset: u64) -> io::Result<()> {
        self.0.read_exact_at(target, offset)
    }

    fn bytes(&self) -> Option<&Bytes> {
        Some(&self.0)
    }
}

/// Bytes of a map that somebody else made, such as of memory that another process wrote.
impl From<Bytes> for Map {
    fn from(bytes: Bytes) -> Self {
        Self(bytes)
    }
}

/// Maps a file.
///
/// # Errors
///
/// Whatever the system says.
///
/// # Safety
///
/// Nobody may change or truncate the file while the map lives, in this process or another.
pub unsafe fn map_file(file: &File) -> io::Result<Map> {
    // SAFETY: the caller vouches that the file does not change while the map lives; the map belongs
    // to the `Bytes`, which live as long as any slice of them.
    let map = unsafe { memmap2::Mmap::map(file)? };
    Ok(Map(Bytes::from_owner(map)))
}

impl Archive {
    /// Opens a file as a memory map. The index is copied and proven as always; tensors are views of
    /// the map, and their pages are read when they are touched.
    ///
    /// # Errors
    ///
    /// As [`Archive::from_bytes`]; `Io` if the file cannot be mapped.
    ///
    /// # Safety
    ///
    /// Nobody may change or truncate the file while the archive or a tensor of it lives, in this
    /// process or another: a change would alter memory that Rust takes for immutable, and reading
    /// behind a new end kills the process. Use [`Archive::open`] for files that are not under your
    /// control, or that lie on a network.
    ///
    /// # Examples
    ///
    /// ```
    /// # use tssd_format::{Archive, StateDict, TorchStoreStateDict};
    /// # let path = std::env::temp_dir().join(format!("tssd-map-{}.tssd", std::process::id()));
    /// # std::fs::write(&path, TorchStoreStateDict::from_state_dict(&StateDict::new())?.as_bytes())?;
    /// // SAFETY: this process alone knows the file, and does not write it again.
    /// let archive = unsafe { Archive::map(&std::fs::File::open(&path)?)? };
    /// archive.verify()?;
    /// # std::fs::remove_file(&path)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub unsafe fn map(file: &File) -> Result<Self> {
        // SAFETY: the caller vouches for the same.
        Self::from_blob(Arc::new(unsafe { map_file(file)? }))
    }
}
