//! Positioned reads: how an archive that is not in memory is read.

use std::io;

use bytes::Bytes;

/// Something that can be read at any place, from any thread.
pub trait ReadAt: Send + Sync {
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
}

impl ReadAt for std::fs::File {
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
}

impl ReadAt for Bytes {
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
}
