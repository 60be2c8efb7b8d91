use std::any::Any;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use tssd_format::Blob;

use super::driver::Segment;
use crate::convert::to_u64;
use crate::error::{Error, ErrorKind};

/// Bytes at the beginning of an archive that are in host memory.
pub(crate) const HEAD_BYTES: u64 = 4096;
pub(crate) const HEAD_LEN: usize = 4096;

/// An archive whose data are in device memory. Only its head, index and trailer are in host memory.
///
/// Spec: `spec/protocol.md`, section 10.
pub struct DeviceArchive {
    /// The head (`HEAD_BYTES`), then index and trailer.
    host_part: Bytes,
    /// The bytes of the archive that are on the device only.
    device_range: Range<u64>,
    /// The device memory, each byte at its offset in the archive. None if this process cannot map it.
    segment: Option<Arc<dyn Segment>>,
}

impl DeviceArchive {
    /// Creates an archive of `len` bytes.
    ///
    /// # Errors
    ///
    /// An error if `len` is too small for the host part.
    pub(crate) fn new(
        host_part: Bytes,
        len: u64,
        segment: Option<Arc<dyn Segment>>,
    ) -> io::Result<Self> {
        let tail = to_u64(host_part.len()).checked_sub(HEAD_BYTES);
        let end = tail.and_then(|tail| len.checked_sub(tail)).filter(|end| *end >= HEAD_BYTES);
        let end = end.ok_or_else(|| {
            let host_len = host_part.len();
            io::Error::other(format!(
                "{host_len} bytes in host memory are not part of an archive of {len} bytes"
            ))
        })?;
        Ok(Self { host_part, device_range: HEAD_BYTES..end, segment })
    }

    /// Returns the device memory, if this process maps it.
    ///
    /// Each byte has the offset that it has in the archive.
    pub fn segment(&self) -> Option<&dyn Segment> {
        self.segment.as_deref()
    }

    /// Reads bytes that lie in the device range.
    fn read_device(&self, target: &mut [u8], offset: u64) -> io::Result<()> {
        let segment = self.segment.as_ref().ok_or_else(|| {
            let text = "its data are in the memory of a GPU of another process or host: put it with residency=host";
            io::Error::other(Error::new(ErrorKind::Unsupported, text))
        })?;
        segment.read(target, offset).map_err(io::Error::other)
    }
}

impl Blob for DeviceArchive {
    fn size(&self) -> io::Result<u64> {
        Ok(self.device_range.end + to_u64(self.host_part.len()) - HEAD_BYTES)
    }

    fn read_exact_at(&self, target: &mut [u8], offset: u64) -> io::Result<()> {
        let (mut rest, mut at) = (target, offset);
        while !rest.is_empty() {
            // End of the head, of the device range or of the archive: this read stops there.
            let (host_offset, end) = if at < self.device_range.start {
                (Some(at), self.device_range.start)
            } else if at < self.device_range.end {
                (None, self.device_range.end)
            } else {
                (Some(at - self.device_range.end + HEAD_BYTES), self.size()?)
            };
            let left = usize::try_from(end.saturating_sub(at)).map_err(io::Error::other)?;
            if left == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            let len = rest.len().min(left);
            let (part, tail) = std::mem::take(&mut rest).split_at_mut(len);
            match host_offset {
                Some(start) => self.host_part.read_exact_at(part, start)?,
                None => self.read_device(part, at)?,
            }
            at += to_u64(len);
            rest = tail;
        }
        Ok(())
    }

    fn bytes(&self) -> Option<&Bytes> {
        None
    }

    fn as_any(&self) -> Option<&dyn Any> {
        Some(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn archive_reads_head_and_tail_from_host_memory() {
        let archive: Vec<u8> = (0..=255).cycle().take(9000).collect();
        let host_part = [&archive[..4096], &archive[8192..]].concat();
        let blob = DeviceArchive::new(host_part.clone().into(), 9000, None).unwrap();
        assert_eq!(blob.size().unwrap(), 9000);
        assert!(blob.bytes().is_none(), "they are not in one piece");
        assert!(blob.as_any().is_some_and(<dyn Any>::is::<DeviceArchive>));
        for range in [0..64, 10..4096, 8192..9000, 8999..9000, 9000..9000] {
            let mut found = vec![0; range.len()];
            blob.read_exact_at(&mut found, range.start as u64).unwrap();
            assert_eq!(found, archive[range]);
        }
        let failed =
            |offset, len| blob.read_exact_at(&mut vec![0; len], offset).unwrap_err().kind();
        assert_eq!(failed(4090, 7), io::ErrorKind::Other);
        assert_eq!(failed(8191, 2), io::ErrorKind::Other);
        assert_eq!(failed(8999, 2), io::ErrorKind::UnexpectedEof);
        assert_eq!(failed(u64::MAX, 2), io::ErrorKind::UnexpectedEof);
        for (part, len) in [(&host_part[..4095], 9000), (&host_part, 800), (&host_part, 4903)] {
            assert!(DeviceArchive::new(part.to_vec().into(), len, None).is_err(), "{len}");
        }
    }
}
