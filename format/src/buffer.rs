//! New memory that somebody fills and hands on.

use std::ops::{Deref, DerefMut};

use bytes::Bytes;

use crate::error::{Error, ErrorKind, Result};

/// What is shorter comes from the allocator, which may have it at hand.
#[cfg(feature = "mmap")]
const LARGE_MIN: usize = 4 << 20;

/// New memory, all zero. Much of it is in huge pages where the system has them: then it costs one fault for each
/// 2 MiB to touch it first, not one for each 4 KiB, which takes longer than the copy that fills it.
///
/// # Examples
///
/// ```
/// let mut memory = tssd_format::Buffer::new(3)?;
/// memory[1] = 7;
/// assert_eq!(bytes::Bytes::from(memory), &[0, 7, 0][..]);
/// # Ok::<(), tssd_format::Error>(())
/// ```
#[derive(Debug)]
pub struct Buffer(Kind);

#[derive(Debug)]
enum Kind {
    Small(Vec<u8>),
    #[cfg(feature = "mmap")]
    Large(large::Pages),
}

impl Buffer {
    /// So many bytes.
    ///
    /// # Errors
    ///
    /// `TooLarge` if the system does not give so many.
    pub fn new(len: usize) -> Result<Self> {
        #[cfg(feature = "mmap")]
        if len >= LARGE_MIN {
            let pages = large::Pages::new(len);
            return Ok(Self(Kind::Large(pages.map_err(|error| too_large(len, &error))?)));
        }
        // Refused before the allocator would give up.
        Vec::<u8>::new().try_reserve_exact(len).map_err(|error| too_large(len, &error))?;
        Ok(Self(Kind::Small(vec![0; len])))
    }
}

fn too_large(len: usize, error: &dyn std::fmt::Display) -> Error {
    Error::new(ErrorKind::TooLarge).note(format_args!("{len} bytes of memory: {error}"))
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.0 {
            Kind::Small(bytes) => bytes,
            #[cfg(feature = "mmap")]
            Kind::Large(pages) => pages,
        }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        match &mut self.0 {
            Kind::Small(bytes) => bytes,
            #[cfg(feature = "mmap")]
            Kind::Large(pages) => pages,
        }
    }
}

impl From<Buffer> for Bytes {
    fn from(buffer: Buffer) -> Self {
        match buffer.0 {
            Kind::Small(bytes) => bytes.into(),
            #[cfg(feature = "mmap")]
            Kind::Large(pages) => Self::from_owner(pages),
        }
    }
}

#[cfg(feature = "mmap")]
mod large {
    use std::io;
    use std::ops::{Deref, DerefMut, Range};

    use memmap2::MmapMut;

    /// A huge page of processors with pages of 4 KiB.
    const HUGE: usize = 2 << 20;

    /// Anonymous memory that begins with a huge page.
    #[derive(Debug)]
    pub(super) struct Pages {
        map: MmapMut,
        range: Range<usize>,
    }

    impl Pages {
        pub(super) fn new(len: usize) -> io::Result<Self> {
            // What is not touched costs nothing.
            let room = len.checked_add(HUGE).ok_or(io::ErrorKind::OutOfMemory)?;
            let map = MmapMut::map_anon(room)?;
            // A system without them has small pages, which are as good but for the time that they take.
            #[cfg(target_os = "linux")]
            let _ = map.advise(memmap2::Advice::HugePage);
            let start = map.as_ptr().align_offset(HUGE);
            Ok(Self { map, range: start..start + len })
        }
    }

    impl Deref for Pages {
        type Target = [u8];

        fn deref(&self) -> &[u8] {
            &self.map[self.range.clone()]
        }
    }

    impl DerefMut for Pages {
        fn deref_mut(&mut self) -> &mut [u8] {
            &mut self.map[self.range.clone()]
        }
    }

    impl AsRef<[u8]> for Pages {
        fn as_ref(&self) -> &[u8] {
            self
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn new_memory_is_zero_and_stays_what_it_was_filled_with() {
        for len in [0, 1, (4 << 20) - 1, 4 << 20, (5 << 20) + 7] {
            let mut memory = Buffer::new(len).unwrap();
            assert_eq!(memory.len(), len);
            assert!(memory.iter().all(|byte| *byte == 0));
            if let Some(last) = memory.last_mut() {
                *last = 9;
            }
            let bytes = Bytes::from(memory);
            assert_eq!((bytes.len(), bytes.last()), (len, (len > 0).then_some(&9)));
        }
    }

    #[test]
    fn too_much_is_refused() {
        for len in [usize::MAX, usize::MAX >> 1, usize::MAX >> 4] {
            assert_eq!(Buffer::new(len).unwrap_err().kind(), ErrorKind::TooLarge, "{len}");
        }
    }
}
