//! Where the bytes of an archive are: in memory, or somewhere that can be read at any place.

use std::any::Any;
use std::io;
use std::ops::Range;

use bytes::Bytes;

/// Bytes that can be read at any place, from any thread, and do not change.
pub trait Blob: Send + Sync {
    /// Its length in bytes.
    ///
    /// # Errors
    ///
    /// Whatever the system says.
    fn size(&self) -> io::Result<u64>;

    /// Fills `target` from `offset` on.
    ///
    /// # Errors
    ///
    /// Whatever the system says; `UnexpectedEof` if there are not so many bytes.
    fn read_exact_at(&self, target: &mut [u8], offset: u64) -> io::Result<()>;

    /// All of it, if it is in this process's memory: views of it cost nothing.
    fn bytes(&self) -> Option<&Bytes>;

    /// What it is, for those who can do more with one of its kind than read it, such as a GPU with memory of its own.
    fn kind(&self) -> Option<&dyn Any> {
        None
    }

    /// A range of it, aligned to 8 bytes, in memory that nothing outside this process can change:
    /// what is proven of these bytes stays true. They are copied, unless they lie so already.
    ///
    /// # Errors
    ///
    /// As [`Blob::read_exact_at`]. The range must be known to lie in the blob: it is allocated first.
    fn stable(&self, range: Range<u64>) -> io::Result<Bytes> {
        copied(self, range)
    }
}

fn copied(blob: &(impl Blob + ?Sized), range: Range<u64>) -> io::Result<Bytes> {
    let len = usize::try_from(range.end - range.start).map_err(io::Error::other)?;
    let mut words = Words(vec![0; len.div_ceil(size_of::<u64>())]);
    blob.read_exact_at(&mut bytemuck::cast_slice_mut(&mut words.0)[..len], range.start)?;
    Ok(Bytes::from_owner(words).slice(..len))
}

/// Aligned memory, as bytes.
struct Words(Vec<u64>);

impl AsRef<[u8]> for Words {
    fn as_ref(&self) -> &[u8] {
        bytemuck::cast_slice(&self.0)
    }
}

/// A file is read, never mapped: whatever happens to it meanwhile is an error, not a crash.
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
                Ok(read) => {
                    target = &mut target[read..];
                    offset += u64::try_from(read).map_err(io::Error::other)?;
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

    fn stable(&self, range: Range<u64>) -> io::Result<Bytes> {
        let index = |at| usize::try_from(at).map_err(io::Error::other);
        let bytes = self.slice(index(range.start)?..index(range.end)?);
        if bytes.as_ptr().addr().is_multiple_of(size_of::<u64>()) {
            return Ok(bytes);
        }
        copied(self, range)
    }
}
