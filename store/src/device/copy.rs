//! Copies to memory that this process cannot address.

use std::any::Any;
use std::marker::PhantomData;
use std::{fmt, io};

use tssd_format::{Blob, Runs};

/// A target in which several threads can write bytes at once, each at its own offsets.
pub trait BlobMut: fmt::Debug + Send + Sync {
    /// Returns the length in bytes.
    fn size(&self) -> u64;

    /// Writes bytes at `offset` and returns when they are there.
    ///
    /// # Errors
    ///
    /// Errors of the device; `UnexpectedEof` if the bytes do not fit.
    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()>;

    /// Whether [`begin_copy`](Self::begin_copy) accepts `source`.
    ///
    /// Examples are memory of the same GPU and pinned host memory.
    fn can_copy_from(&self, source: &dyn Blob) -> bool {
        let _ = source;
        false
    }

    /// Begins copies from a blob, and adds them to `batch`.
    ///
    /// [`can_copy_from`](Self::can_copy_from) must accept the blob.
    ///
    /// # Errors
    ///
    /// Errors of the device; `Unsupported` if the blob is not accepted.
    fn begin_copy<'a>(
        &'a self,
        source: &'a dyn Blob,
        copies: &[BlobCopy<'_>],
        batch: &mut CopyBatch<'a>,
    ) -> io::Result<()> {
        let _ = (source, copies, batch);
        Err(io::ErrorKind::Unsupported.into())
    }
}

/// Runs of bytes to copy from one blob to another.
#[derive(Clone, Copy, Debug)]
pub struct BlobCopy<'a> {
    /// Byte of the source at which the first run begins.
    pub source: u64,
    /// Byte of the target at which the first run begins.
    pub target: u64,
    /// The runs, relative to these two bytes.
    pub runs: &'a Runs,
}

/// Copies in flight on one queue, such as a CUDA stream. Dropping it waits for them.
pub trait PendingCopy: Any + Send {
    /// Waits until all copies are done.
    ///
    /// # Errors
    ///
    /// Errors of the device.
    fn wait(self: Box<Self>) -> io::Result<()>;
}

/// Copies in flight between borrowed blobs. Dropping it waits for them.
///
/// Targets share one queue per device, because waiting for each of many small copies takes longer than the copies.
#[derive(Default)]
pub struct CopyBatch<'a> {
    pending: Vec<Box<dyn PendingCopy>>,
    borrowed: PhantomData<&'a dyn Blob>,
}

impl CopyBatch<'_> {
    /// Returns the queue of type `T` that `matches` accepts. If there is none, `begin` creates it.
    ///
    /// # Errors
    ///
    /// Errors of `begin`.
    pub fn get_or_begin<T: PendingCopy>(
        &mut self,
        matches: impl Fn(&T) -> bool,
        begin: impl FnOnce() -> io::Result<T>,
    ) -> io::Result<&mut T> {
        let known = self.pending.iter().position(|pending| {
            let pending: &dyn Any = &**pending;
            pending.downcast_ref().is_some_and(&matches)
        });
        let index = if let Some(index) = known {
            index
        } else {
            self.pending.push(Box::new(begin()?));
            self.pending.len() - 1
        };
        let pending: &mut dyn Any = &mut *self.pending[index];
        Ok(pending.downcast_mut().expect("its type is the one that was searched"))
    }

    /// Waits until all copies are done.
    ///
    /// # Errors
    ///
    /// Errors of the device.
    pub fn wait(self) -> io::Result<()> {
        self.pending.into_iter().try_for_each(PendingCopy::wait)
    }
}
