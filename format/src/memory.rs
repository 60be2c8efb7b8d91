//! Allocation of large, zeroed buffers.

use crate::error::{Error, ErrorKind, Result};

/// Allocates `len` bytes of memory, all zero.
///
/// Buffers of at least 4 MiB use huge pages where the system supports them. First access then costs one page fault
/// for each 2 MiB. With pages of 4 KiB the faults take longer than the copy that fills the buffer.
///
/// # Errors
///
/// `TooLarge` if the memory cannot be allocated.
///
/// # Examples
///
/// ```
/// assert_eq!(tssd_format::zeroed(3)?, [0, 0, 0]);
/// # Ok::<(), tssd_format::Error>(())
/// ```
pub fn zeroed(len: usize) -> Result<Vec<u8>> {
    // Returns an error if the allocation fails; `vec!` would abort the process.
    Vec::<u8>::new().try_reserve_exact(len).map_err(|error| {
        Error::new(ErrorKind::TooLarge).with_detail(format_args!("{len} bytes of memory: {error}"))
    })?;
    #[cfg_attr(not(target_os = "linux"), expect(unused_mut, reason = "nobody is advised"))]
    let mut memory = vec![0; len];
    #[cfg(target_os = "linux")]
    huge_pages::advise(&mut memory);
    Ok(memory)
}

#[cfg(target_os = "linux")]
#[expect(unsafe_code, reason = "advice on memory is a system call that takes an address")]
mod huge_pages {
    use rustix::mm::{Advice, madvise};

    /// Smaller buffers are likely to reuse memory of the allocator that is already mapped.
    const MIN_BYTES: usize = 4 << 20;

    /// Size of a huge page on processors with pages of 4 KiB, in bytes.
    const HUGE_PAGE_BYTES: usize = 2 << 20;

    /// Requests huge pages for the part of `memory` that consists of whole huge pages.
    ///
    /// A huge page that is only partly in `memory` would use memory that is not accounted for.
    pub(super) fn advise(memory: &mut [u8]) {
        if memory.len() < MIN_BYTES {
            return;
        }
        let start = memory.as_ptr().align_offset(HUGE_PAGE_BYTES);
        let pages = memory.len().saturating_sub(start) / HUGE_PAGE_BYTES;
        let Some(memory) = memory.get_mut(start..start + pages * HUGE_PAGE_BYTES) else { return };
        // SAFETY: the range is memory that this function borrows mutably, and it begins at a page boundary.
        // `MADV_HUGEPAGE` changes neither the content nor the protection of the range, only the size of the pages that
        // back it. A system without huge pages returns an error, which only costs time and is ignored.
        let _ = unsafe { madvise(memory.as_mut_ptr().cast(), memory.len(), Advice::LinuxHugepage) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeroed_memory_is_zero_and_keeps_writes() {
        for len in [0, 1, (4 << 20) - 1, 4 << 20, (5 << 20) + 7, 40 << 20] {
            let mut memory = zeroed(len).unwrap();
            assert_eq!(memory.len(), len);
            assert!(memory.iter().all(|byte| *byte == 0));
            if let Some(last) = memory.last_mut() {
                *last = 9;
            }
            assert_eq!(memory.last(), (len > 0).then_some(&9));
        }
    }

    #[test]
    fn zeroed_rejects_sizes_that_cannot_be_allocated() {
        for len in [usize::MAX, usize::MAX >> 1, usize::MAX >> 4] {
            assert_eq!(zeroed(len).unwrap_err().kind(), ErrorKind::TooLarge, "{len}");
        }
    }
}
