//! Blobs that a daemon writes itself.

use std::io;
use std::sync::Arc;

use super::inner::Writer;
use super::{Pool, SegmentId};
use crate::shm::segment::WriteMap;

/// A blob that the daemon writes itself. Dropped, its memory is given back.
pub(crate) struct Writing {
    pub(super) pool: Arc<Pool>,
    /// None once it is published.
    pub(super) segment: Option<SegmentId>,
    /// None only if it could not be made.
    pub(super) map: Option<WriteMap>,
    pub(super) len: u64,
}

impl Writing {
    /// Its memory.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        let len = usize::try_from(self.len).expect("it is in memory");
        self.map.as_mut().expect("it was made").range_mut(0..len)
    }

    /// What of it is written.
    pub(crate) fn bytes(&self) -> &[u8] {
        let len = usize::try_from(self.len).expect("it is in memory");
        self.map.as_ref().expect("it was made").first(len)
    }

    /// It is complete: gives it a name.
    pub(crate) fn publish(mut self, name: &str) -> io::Result<()> {
        let mut inner = self.pool.inner();
        let id = self.segment.expect("it is published once");
        inner.publish(id, name, self.len, |segment| segment.is_lent)?;
        let segment = inner.segments.get_mut(&id).expect("it is in use");
        segment.writer = Writer::Own(self.map.take());
        drop(inner);
        self.segment = None;
        Ok(())
    }
}

impl Drop for Writing {
    fn drop(&mut self) {
        let Some(id) = self.segment else { return };
        let mut inner = self.pool.inner();
        if let Some(segment) = inner.segments.get_mut(&id) {
            segment.writer = Writer::Own(self.map.take());
            segment.is_lent = false;
        }
        drop(inner);
        self.pool.freed.notify_waiters();
    }
}
