//! Archives whose bytes another host holds: they are read in boxes, straight into memory.

use std::io;
use std::sync::Arc;

use bytes::Bytes;
use tssd_format::{Blob, Runs, StorageReference};

use crate::error::Result;
use crate::io::cancel::Stop;

/// Whoever holds archives elsewhere, and gives exactly the bytes that are asked for. Calls wait.
pub(crate) trait Holder: Send + Sync {
    /// Fills memory, and returns how many bytes came for that. What it holds after an error is not proven. Soon after it
    /// is stopped it ends with an error.
    fn pull(&self, jobs: Vec<Job<'_>>, stop: &Stop) -> Result<u64>;

    /// Reads bytes of a blob as they come: whoever asks proves them.
    fn read_exact_at(&self, blob: &str, target: &mut [u8], offset: u64) -> io::Result<()>;
}

/// Memory, and the boxes of bytes that it is filled with.
pub(crate) struct Job<'a> {
    pub(crate) target: &'a mut [u8],
    pub(crate) boxes: Vec<Boxed>,
}

/// A box of bytes of a blob.
pub(crate) struct Boxed {
    pub(crate) blob: Arc<str>,
    /// Where it begins in the blob, and in the memory.
    pub(crate) source: u64,
    pub(crate) target: u64,
    pub(crate) runs: Runs,
    pub(crate) proof: Proof,
}

/// How it is known that the bytes of a box are those that were put.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Proof {
    /// They are whole chunks of this storage, which has their checksums.
    Whole(Arc<StorageReference>),
    /// They are of chunks of this storage, which has the checksums: the holder proves the chunks and sums what it
    /// sends, or gets them whole and proves them itself.
    Part(Arc<StorageReference>),
    /// Nobody asks.
    None,
}

/// An archive that is held elsewhere.
#[derive(Clone)]
pub(crate) struct Far {
    pub(crate) holder: Arc<dyn Holder>,
    pub(crate) blob: Arc<str>,
    pub(crate) len: u64,
    /// Its last bytes, if they have come already.
    pub(crate) tail: Option<Bytes>,
}

impl Blob for Far {
    fn size(&self) -> io::Result<u64> {
        Ok(self.len)
    }

    fn read_exact_at(&self, target: &mut [u8], offset: u64) -> io::Result<()> {
        let tail = self.tail.as_ref().and_then(|tail| {
            let start = self.len.checked_sub(u64::try_from(tail.len()).ok()?)?;
            let within = usize::try_from(offset.checked_sub(start)?).ok()?;
            tail.get(within..within.checked_add(target.len())?)
        });
        match tail {
            Some(bytes) => target.copy_from_slice(bytes),
            None => self.holder.read_exact_at(&self.blob, target, offset)?,
        }
        Ok(())
    }

    fn bytes(&self) -> Option<&Bytes> {
        None
    }
}
