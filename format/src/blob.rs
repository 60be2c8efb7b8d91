//! Where the bytes of an archive are: in memory, or somewhere that can be read at any place.

use std::io;

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
}
