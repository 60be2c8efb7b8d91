//! Memory-mapped archives.
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

/// A memory map, for example of a file. It is unmapped when the last slice of its bytes is dropped.
#[derive(Clone, Debug)]
pub struct Mmap(Bytes);

/// [`Blob::read_stable`] copies the bytes.
///
/// If a caller breaks the contract and changes the file, validated bytes must not change.
impl Blob for Mmap {
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

/// Wraps the bytes of an existing map, for example of memory that another process has written.
impl From<Bytes> for Mmap {
    fn from(bytes: Bytes) -> Self {
        Self(bytes)
    }
}

/// Maps a file into memory.
///
/// # Errors
///
/// The error of the system call.
///
/// # Safety
///
/// No process may change or truncate the file while the map exists.
pub unsafe fn map_file(file: &File) -> io::Result<Mmap> {
    // SAFETY: the caller guarantees that the file does not change while the map exists. The `Bytes` own the map, and
    // unmap it when the last slice of them is dropped.
    let map = unsafe { memmap2::Mmap::map(file)? };
    Ok(Mmap(Bytes::from_owner(map)))
}

impl Archive {
    /// Opens a file as a memory map.
    ///
    /// The index is copied and validated, as for every archive. Tensors are views of the map; their pages are read on
    /// first access.
    ///
    /// # Errors
    ///
    /// As [`Archive::from_bytes`]; `Io` if the file cannot be mapped.
    ///
    /// # Safety
    ///
    /// No process may change or truncate the file while the archive, or a tensor of it, exists. A change would alter
    /// memory that Rust treats as immutable. A read beyond a new end of the file kills the process. Use
    /// [`Archive::open`] for files that other users can change, and for files on a network file system.
    ///
    /// # Examples
    ///
    /// ```
    /// # use tssd_format::{Archive, StateDict, TorchStoreStateDict};
    /// # let path = std::env::temp_dir().join(format!("tssd-map-{}.tssd", std::process::id()));
    /// # std::fs::write(&path, TorchStoreStateDict::from_state_dict(&StateDict::new())?.as_bytes())?;
    /// // SAFETY: only this process knows the file, and it does not write the file again.
    /// let archive = unsafe { Archive::map(&std::fs::File::open(&path)?)? };
    /// archive.verify()?;
    /// # std::fs::remove_file(&path)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub unsafe fn map(file: &File) -> Result<Self> {
        // SAFETY: the caller guarantees that the file does not change while the archive or a tensor of it exists. Both
        // hold the map, so this is the contract of `map_file`.
        Self::from_blob(Arc::new(unsafe { map_file(file)? }))
    }
}
