//! Blobs that the daemon writes itself.

use std::io;
use std::sync::Arc;

use super::inner::Writer;
use super::{Pool, SegmentId};
use crate::convert::to_usize;
use crate::shm::segment::WriteMap;

/// A blob that the daemon is writing. Dropping it returns the segment to the pool.
pub(crate) struct BlobWriter {
    pub(super) pool: Arc<Pool>,
    /// None once the blob is published.
    pub(super) segment: Option<SegmentId>,
    /// None only if the map could not be created.
    pub(super) map: Option<WriteMap>,
    pub(super) len: u64,
}

impl BlobWriter {
    /// Returns the memory of the blob for writing.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        let len = to_usize(self.len);
        self.map.as_mut().expect("it was made").range_mut(0..len)
    }

    /// Returns the memory of the blob.
    pub(crate) fn bytes(&self) -> &[u8] {
        let len = to_usize(self.len);
        self.map.as_ref().expect("it was made").prefix(len)
    }

    /// Publishes the complete blob under a name.
    pub(crate) fn publish(mut self, name: &str) -> io::Result<()> {
        let mut inner = self.pool.inner();
        let id = self.segment.expect("it is published once");
        inner.publish(id, name, self.len, |segment| segment.is_acquired)?;
        let segment = inner.segments.get_mut(&id).expect("it is in use");
        segment.writer = Writer::Daemon(self.map.take());
        drop(inner);
        self.segment = None;
        Ok(())
    }
}

impl Drop for BlobWriter {
    fn drop(&mut self) {
        let Some(id) = self.segment else { return };
        let mut inner = self.pool.inner();
        if let Some(segment) = inner.segments.get_mut(&id) {
            segment.writer = Writer::Daemon(self.map.take());
            segment.is_acquired = false;
        }
        drop(inner);
        self.pool.freed.notify_waiters();
    }
}
