//! Telling the core what of memory it is about to need.
//!
//! Intel's processors do not fetch far enough ahead by themselves: a Xeon of 2 MiB of L2 thanks it with 1.3
//! times the speed of a checksum (docs/performance.md). AMD's copy slower if they are told of all that comes.

/// What a cache takes from memory at a time.
pub(crate) type Line = [u8; 64];

/// Whether this processor is faster if it is told of all that comes.
#[cfg(not(target_arch = "x86_64"))]
pub(crate) fn helps() -> bool {
    false
}

/// Asks for the line in which a value begins, and waits for nothing.
#[cfg(not(target_arch = "x86_64"))]
pub(crate) fn fetch<T>(_: &T) {}

#[cfg(target_arch = "x86_64")]
pub(crate) use x86_64::{fetch, helps};

/// Asks for what comes some records after this one, by who reads several tables side by side.
#[inline]
pub(crate) fn fetch_ahead<T>(table: &[T], number: usize) {
    if let Some(record) = table.get(number + 64) {
        fetch(record);
    }
}

#[cfg(target_arch = "x86_64")]
#[expect(unsafe_code, reason = "an intrinsic")]
mod x86_64 {
    use std::arch::x86_64::{__cpuid, _MM_HINT_T0, _mm_prefetch};
    use std::sync::LazyLock;

    static HELPS: LazyLock<bool> = LazyLock::new(|| {
        let vendor = __cpuid(0);
        [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes).as_flattened() == b"GenuineIntel"
    });

    pub(crate) fn helps() -> bool {
        *HELPS
    }

    #[inline]
    pub(crate) fn fetch<T>(value: &T) {
        // SAFETY: `_mm_prefetch` reads nothing that the program sees. It needs SSE, which every x86_64 processor
        // has.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(value).cast()) }
    }
}
