//! New memory that somebody fills and hands on.

use crate::error::{Error, ErrorKind, Result};

/// So many bytes of new memory, all zero. From 4 MiB on it is in huge pages where the system has them: then it costs
/// one fault for each 2 MiB to touch it first, not one for each 4 KiB, which takes longer than the copy that fills it.
///
/// # Errors
///
/// `TooLarge` if the system does not give so many.
///
/// # Examples
///
/// ```
/// assert_eq!(tssd_format::zeroed(3)?, [0, 0, 0]);
/// # Ok::<(), tssd_format::Error>(())
/// ```
pub fn zeroed(len: usize) -> Result<Vec<u8>> {
    // Refused before the allocator would give up.
    Vec::<u8>::new().try_reserve_exact(len).map_err(|error| {
        Error::new(ErrorKind::TooLarge).note(format_args!("{len} bytes of memory: {error}"))
    })?;
    #[cfg_attr(not(target_os = "linux"), expect(unused_mut, reason = "nobody is advised"))]
    let mut memory = vec![0; len];
    #[cfg(target_os = "linux")]
    huge::ask_for(&mut memory);
    Ok(memory)
}

#[cfg(target_os = "linux")]
#[expect(unsafe_code, reason = "advice on memory is a system call that takes an address")]
mod huge {
    use rustix::mm::{Advice, madvise};

    /// Less is likely to be memory that the allocator has had before.
    const MIN: usize = 4 << 20;

    /// A huge page of processors with pages of 4 KiB.
    const PAGE: usize = 2 << 20;

    /// Asks for huge pages where they fit in as a whole: the rest of one would be memory that nobody counts.
    pub(super) fn ask_for(memory: &mut [u8]) {
        if memory.len() < MIN {
            return;
        }
        let start = memory.as_ptr().align_offset(PAGE);
        let pages = memory.len().saturating_sub(start) / PAGE;
        let Some(memory) = memory.get_mut(start..start + pages * PAGE) else { return };
        // SAFETY: the range is memory that we borrow mutably, and begins with a page. `MADV_HUGEPAGE` changes no byte of
        // it nor what may be done with it, only by how large pages the system maps it. A system that has none fails,
        // which is as good but for the time that small ones take.
        let _ = unsafe { madvise(memory.as_mut_ptr().cast(), memory.len(), Advice::LinuxHugepage) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn new_memory_is_zero_and_stays_what_it_was_filled_with() {
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
    fn too_much_is_refused() {
        for len in [usize::MAX, usize::MAX >> 1, usize::MAX >> 4] {
            assert_eq!(zeroed(len).unwrap_err().kind(), ErrorKind::TooLarge, "{len}");
        }
    }
}
