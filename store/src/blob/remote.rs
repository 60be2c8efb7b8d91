//! Archives in the memory of another host or in a bucket: range copies read them straight into memory.

use std::io;
use std::sync::Arc;

use bytes::Bytes;
use tssd_format::{Blob, Runs, StorageReference};

use crate::error::Result;
use crate::io::cancel::CancelToken;

/// A source of remote archives, which returns exactly the requested bytes. Calls block.
pub(crate) trait RangeReader: Send + Sync {
    /// Runs the jobs and returns the number of bytes received for them.
    ///
    /// After an error the targets may hold bytes that are not verified. Soon after `stop` is set, the call ends with an
    /// error.
    fn read_ranges(&self, jobs: Vec<RangeJob<'_>>, stop: &CancelToken) -> Result<u64>;

    /// Reads bytes of a blob without verification: the caller verifies them.
    fn read_exact_at(&self, blob: &str, target: &mut [u8], offset: u64) -> io::Result<()>;
}

/// A target in memory and the range copies that fill it.
pub(crate) struct RangeJob<'a> {
    pub(crate) target: &'a mut [u8],
    pub(crate) copies: Vec<RangeCopy>,
}

/// Runs of bytes to copy from a blob to memory.
pub(crate) struct RangeCopy {
    pub(crate) blob: Arc<str>,
    /// Offset of the first run in the blob, in bytes. `target` is the offset in the target memory.
    pub(crate) source: u64,
    pub(crate) target: u64,
    pub(crate) runs: Runs,
    pub(crate) verify: VerifyMode,
}

/// How the bytes of a range copy are verified.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum VerifyMode {
    /// The runs are whole chunks of this storage, which has their checksums.
    WholeChunks(Arc<StorageReference>),
    /// The runs cover parts of chunks of this storage, which has their checksums.
    ///
    /// The reader fetches the whole chunks and verifies them, or the remote host verifies the chunks and sends a
    /// checksum of the bytes that it returns.
    PartialChunks(Arc<StorageReference>),
    /// The bytes are not verified.
    Skip,
}

/// An open archive on another host or in a bucket.
#[derive(Clone)]
pub(crate) struct RemoteArchive {
    pub(crate) reader: Arc<dyn RangeReader>,
    pub(crate) blob: Arc<str>,
    pub(crate) len: u64,
    /// The last bytes of the archive, if they were fetched when it was opened.
    pub(crate) tail: Option<Bytes>,
}

impl RemoteArchive {
    /// Returns bytes of the archive, if they were fetched when it was opened.
    pub(crate) fn tail(&self, len: usize, offset: u64) -> Option<Bytes> {
        let tail = self.tail.as_ref()?;
        let start = self.len.checked_sub(u64::try_from(tail.len()).ok()?)?;
        let within = usize::try_from(offset.checked_sub(start)?).ok()?;
        let end = within.checked_add(len).filter(|end| *end <= tail.len())?;
        Some(tail.slice(within..end))
    }
}

impl Blob for RemoteArchive {
    fn size(&self) -> io::Result<u64> {
        Ok(self.len)
    }

    fn read_exact_at(&self, target: &mut [u8], offset: u64) -> io::Result<()> {
        match self.tail(target.len(), offset) {
            Some(bytes) => target.copy_from_slice(&bytes),
            None => self.reader.read_exact_at(&self.blob, target, offset)?,
        }
        Ok(())
    }

    fn bytes(&self) -> Option<&Bytes> {
        None
    }
}
