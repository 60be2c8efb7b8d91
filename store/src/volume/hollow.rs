//! Archives whose bytes are in the memory of a GPU. Spec: `spec/protocol.md`, section 10.

use std::any::Any;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use tssd_format::Blob;

use crate::cuda::DeviceSegment;
use crate::error::{Error, ErrorKind};

/// A shell begins with what its archive has in front of its data: so many bytes.
pub(crate) const HEAD_BYTES: u64 = 4096;
pub(crate) const HEAD_LEN: usize = 4096;

/// An archive that is a shell in this host's memory, and the rest elsewhere.
pub(crate) struct HollowBlob {
    /// What is in front of the data, index and trailer, one after the other.
    shell: Bytes,
    /// The bytes between head and index that are in the shell of no archive.
    hollow: Range<u64>,
    /// Where they are: none for those who look at the shell alone.
    segment: Option<Arc<DeviceSegment>>,
}

impl HollowBlob {
    /// An archive of so many bytes.
    pub(crate) fn new(
        shell: Bytes,
        len: u64,
        segment: Option<Arc<DeviceSegment>>,
    ) -> io::Result<Self> {
        let tail = wide(shell.len()).checked_sub(HEAD_BYTES).and_then(|tail| len.checked_sub(tail));
        let end = tail.filter(|end| *end >= HEAD_BYTES);
        let end = end.ok_or_else(|| io::Error::other("a shell that no such archive has"))?;
        Ok(Self { shell, hollow: HEAD_BYTES..end, segment })
    }

    /// The memory that has the bytes, each at its place in the file.
    #[cfg(feature = "cuda")]
    pub(crate) fn segment(&self) -> Option<&DeviceSegment> {
        self.segment.as_deref()
    }

    /// Fills a part that begins in the hollow, and ends there.
    fn read_hollow(&self, target: &mut [u8], offset: u64) -> io::Result<()> {
        let segment = self.segment.as_ref().ok_or_else(|| {
            let text = "its bytes are in the memory of a GPU of another process's, or of another host's: put it \
                        with residency=host";
            io::Error::other(Error::new(ErrorKind::Unsupported, text))
        })?;
        segment.read(target, offset).map_err(io::Error::other)
    }
}

impl Blob for HollowBlob {
    fn size(&self) -> io::Result<u64> {
        Ok(self.hollow.end + wide(self.shell.len()) - HEAD_BYTES)
    }

    fn read_exact_at(&self, target: &mut [u8], offset: u64) -> io::Result<()> {
        let (mut rest, mut at) = (target, offset);
        while !rest.is_empty() {
            // The head, the hollow, or what follows: up to the end of that.
            let (shell, end) = if at < self.hollow.start {
                (Some(at), self.hollow.start)
            } else if at < self.hollow.end {
                (None, self.hollow.end)
            } else {
                (Some(at - self.hollow.end + HEAD_BYTES), self.size()?)
            };
            let left = usize::try_from(end.saturating_sub(at)).map_err(io::Error::other)?;
            if left == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            let len = rest.len().min(left);
            let (part, tail) = std::mem::take(&mut rest).split_at_mut(len);
            match shell {
                Some(start) => self.shell.read_exact_at(part, start)?,
                None => self.read_hollow(part, at)?,
            }
            at += wide(len);
            rest = tail;
        }
        Ok(())
    }

    fn bytes(&self) -> Option<&Bytes> {
        None
    }

    fn kind(&self) -> Option<&dyn Any> {
        Some(self)
    }
}

fn wide(len: usize) -> u64 {
    u64::try_from(len).expect("usize is at most 64 bits")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shell_is_the_archive_but_for_what_is_elsewhere() {
        let archive: Vec<u8> = (0..=255).cycle().take(9000).collect();
        let shell = [&archive[..4096], &archive[8192..]].concat();
        let blob = HollowBlob::new(shell.clone().into(), 9000, None).unwrap();
        assert_eq!(blob.size().unwrap(), 9000);
        assert!(blob.bytes().is_none(), "nobody has all of them");
        assert!(blob.kind().is_some_and(<dyn Any>::is::<HollowBlob>));
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
        for (shell, len) in [(&shell[..4095], 9000), (&shell, 800), (&shell, 4903)] {
            assert!(HollowBlob::new(shell.to_vec().into(), len, None).is_err(), "{len}");
        }
    }
}
