//! Short reads and writes: a library for `LD_PRELOAD` that halves the length of one call.
//!
//! `TSSD_SHORT=NAME:NUMBER:FOLDER` selects the call: its name, and its number, counted from 1, among the calls of this
//! name on files below the folder and on memfds. The call reports on stderr that it was short. A call that transfers 0
//! or 1 bytes, for example at the end of a file, cannot be short, and reports that it was whole. Other calls are
//! unchanged.
#![cfg(target_os = "linux")]
#![expect(unsafe_code, reason = "its callers are those of the C library")]
#![expect(clippy::missing_safety_doc, reason = "each is what its manual page says")]
#![expect(missing_docs, reason = "as above")]

use std::ffi::{c_int, c_long, c_void};
use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use libc::{
    SYS_lseek, SYS_pread64, SYS_pwrite64, SYS_read, SYS_write, off64_t, size_t, ssize_t, syscall,
};

/// The selection of the call that is short.
struct ShortCall {
    name: String,
    number: u64,
    folder: PathBuf,
}

impl ShortCall {
    /// Returns the selection by `TSSD_SHORT`, if it is set and valid.
    fn from_env() -> Option<&'static Self> {
        static SELECTED: OnceLock<Option<ShortCall>> = OnceLock::new();
        let parse = || {
            let text = std::env::var("TSSD_SHORT").ok()?;
            let mut parts = text.splitn(3, ':');
            let (name, number, folder) = (parts.next()?, parts.next()?, parts.next()?);
            let number = number.parse().ok()?;
            Some(Self { name: name.to_owned(), number, folder: folder.into() })
        };
        SELECTED.get_or_init(parse).as_ref()
    }

    /// Returns whether a call has the selected name, on a file that counts.
    fn matches(&self, name: &str, file: c_int) -> bool {
        if name != self.name {
            return false;
        }
        let path = std::fs::read_link(format!("/proc/self/fd/{file}")).unwrap_or_default();
        path.starts_with(&self.folder)
            || path.as_os_str().as_encoded_bytes().starts_with(b"/memfd:")
    }
}

/// Counts a call, and returns whether it is the selected one.
fn is_selected(name: &str, file: c_int) -> bool {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let selection = ShortCall::from_env().filter(|short| short.matches(name, file));
    selection.is_some_and(|short| COUNT.fetch_add(1, Ordering::Relaxed) + 1 == short.number)
}

/// Returns half of a number of bytes, or all of them if there are fewer than 2. Reports it on stderr.
fn half(bytes: usize) -> usize {
    let half = bytes / 2;
    let message = if half == 0 {
        format!("whole: {bytes} bytes\n")
    } else {
        format!("short: {half} of {bytes} bytes\n")
    };
    // SAFETY: the pointer and the length are those of a live string.
    unsafe { syscall(SYS_write, libc::STDERR_FILENO, message.as_ptr(), message.len()) };
    if half == 0 { bytes } else { half }
}

/// Converts the result of `syscall`: the number of bytes, or -1 for an error, which is in `errno`.
fn result(code: c_long) -> ssize_t {
    ssize_t::try_from(code).unwrap_or(-1)
}

/// Returns half of the number of bytes that were read. The caller can read the other half again.
fn half_of(read: ssize_t) -> ssize_t {
    let Ok(bytes) = usize::try_from(read) else { return read };
    ssize_t::try_from(half(bytes)).unwrap_or(read)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn read(file: c_int, buffer: *mut c_void, len: size_t) -> ssize_t {
    // SAFETY: the arguments are those of the caller, who upholds the contract of `read`.
    let all = result(unsafe { syscall(SYS_read, file, buffer, len) });
    if !is_selected("read", file) {
        return all;
    }
    let half = half_of(all);
    // SAFETY: `lseek` accesses no memory.
    unsafe { syscall(SYS_lseek, file, half - all, libc::SEEK_CUR) };
    half
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn pread64(
    file: c_int,
    buffer: *mut c_void,
    len: size_t,
    offset: off64_t,
) -> ssize_t {
    // SAFETY: the arguments are those of the caller, who upholds the contract of `pread64`.
    let all = result(unsafe { syscall(SYS_pread64, file, buffer, len, offset) });
    if is_selected("pread64", file) { half_of(all) } else { all }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn write(file: c_int, buffer: *const c_void, len: size_t) -> ssize_t {
    let len = if is_selected("write", file) { half(len) } else { len };
    // SAFETY: the caller upholds the contract of `write` for all bytes, so it holds for the first of them too.
    result(unsafe { syscall(SYS_write, file, buffer, len) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn pwrite64(
    file: c_int,
    buffer: *const c_void,
    len: size_t,
    offset: off64_t,
) -> ssize_t {
    let len = if is_selected("pwrite64", file) { half(len) } else { len };
    // SAFETY: as in `write`.
    result(unsafe { syscall(SYS_pwrite64, file, buffer, len, offset) })
}
