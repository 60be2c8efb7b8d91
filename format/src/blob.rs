//! Blobs: random-access bytes of an archive, in memory or outside it.

use std::any::Any;
use std::io;
use std::ops::Range;

use bytes::Bytes;

/// Immutable bytes with random access from any thread.
pub trait Blob: Send + Sync {
    /// Returns the length in bytes.
    ///
    /// # Errors
    ///
    /// The error of the operating system.
    fn size(&self) -> io::Result<u64>;

    /// Reads the bytes from `offset` on into `target`, and fills it completely.
    ///
    /// # Errors
    ///
    /// The error of the operating system; `UnexpectedEof` if the blob ends before `target` is full.
    fn read_exact_at(&self, target: &mut [u8], offset: u64) -> io::Result<()>;

    /// Returns all bytes if they are in this process's memory, so that views of them need no copy.
    fn bytes(&self) -> Option<&Bytes>;

    /// Returns the concrete type for downcasting, if the type has uses beyond reading.
    ///
    /// For example, code for GPUs recognizes blobs in device memory.
    fn as_any(&self) -> Option<&dyn Any> {
        None
    }

    /// Returns a range of the blob in memory that no other process can change, aligned to 8 bytes.
    ///
    /// Once validated, these bytes stay valid. They are copied, unless they already lie in such memory.
    ///
    /// The caller must check that the range lies in the blob, because its memory is allocated before the
    /// read.
    ///
    /// # Errors
    ///
    /// As [`Blob::read_exact_at`].
    fn read_stable(&self, range: Range<u64>) -> io::Result<Bytes> {
        read_aligned(self, range)
    }
}

/// Reads a range into newly allocated memory that is aligned to 8 bytes.
fn read_aligned(blob: &(impl Blob + ?Sized), range: Range<u64>) -> io::Result<Bytes> {
    let len = usize::try_from(range.end - range.start).map_err(io::Error::other)?;
    let mut buffer = AlignedBuffer(vec![0; len.div_ceil(size_of::<u64>())]);
    blob.read_exact_at(&mut bytemuck::cast_slice_mut(&mut buffer.0)[..len], range.start)?;
    Ok(Bytes::from_owner(buffer).slice(..len))
}

/// Memory aligned to 8 bytes, viewed as bytes.
struct AlignedBuffer(Vec<u64>);

impl AsRef<[u8]> for AlignedBuffer {
    fn as_ref(&self) -> &[u8] {
        bytemuck::cast_slice(&self.0)
    }
}

/// Reads the file and never maps it.
///
/// If another process truncates the file, reads return an error. A map would crash this process.
impl Blob for std::fs::File {
    fn size(&self) -> io::Result<u64> {
        Ok(self.metadata()?.len())
    }

    #[cfg(unix)]
    fn read_exact_at(&self, target: &mut [u8], offset: u64) -> io::Result<()> {
        std::os::unix::fs::FileExt::read_exact_at(self, target, offset)
    }

    #[cfg(windows)]
    fn read_exact_at(&self, mut target: &mut [u8], mut offset: u64) -> io::Result<()> {
        while !target.is_empty() {
            match std::os::windows::fs::FileExt::seek_read(self, target, offset) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => {
                    target = &mut target[count..];
                    offset += u64::try_from(count).map_err(io::Error::other)?;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn bytes(&self) -> Option<&Bytes> {
        None
    }
}

impl Blob for Bytes {
    fn size(&self) -> io::Result<u64> {
        u64::try_from(self.len()).map_err(io::Error::other)
    }

    fn read_exact_at(&self, target: &mut [u8], offset: u64) -> io::Result<()> {
        let start = usize::try_from(offset).map_err(io::Error::other)?;
        let end = start.checked_add(target.len());
        let bytes = end.and_then(|end| self.get(start..end));
        target.copy_from_slice(bytes.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }

    fn bytes(&self) -> Option<&Bytes> {
        Some(self)
    }

    fn read_stable(&self, range: Range<u64>) -> io::Result<Bytes> {
        let index = |offset| usize::try_from(offset).map_err(io::Error::other);
        let bytes = self.slice(index(range.start)?..index(range.end)?);
        if bytes.as_ptr().addr().is_multiple_of(size_of::<u64>()) {
            return Ok(bytes);
        }
        read_aligned(self, range)
    }
}
