//! Reads and writes that do half of what they could, as any system call may: a process has this in `LD_PRELOAD`, where
//! its calls come before they come to the C library.
//!
//! `TSSD_SHORT=NAME:NUMBER:FOLDER` names one call: that of this name and number, from 1 on, among those on files below
//! the folder and on memory that has a descriptor. It says on stderr that it was short; or, if it was one of no byte or
//! of one, as at the end of a file, that it was whole. All others do what they always do.
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

/// The one call that is short.
struct Short {
    name: String,
    number: u64,
    folder: PathBuf,
}

impl Short {
    fn named() -> Option<&'static Self> {
        static NAMED: OnceLock<Option<Short>> = OnceLock::new();
        let parse = || {
            let text = std::env::var("TSSD_SHORT").ok()?;
            let mut words = text.splitn(3, ':');
            let (name, number, folder) = (words.next()?, words.next()?, words.next()?);
            let number = number.parse().ok()?;
            Some(Self { name: name.to_owned(), number, folder: folder.into() })
        };
        NAMED.get_or_init(parse).as_ref()
    }

    fn is_meant(&self, name: &str, file: c_int) -> bool {
        if name != self.name {
            return false;
        }
        let path = std::fs::read_link(format!("/proc/self/fd/{file}")).unwrap_or_default();
        path.starts_with(&self.folder)
            || path.as_os_str().as_encoded_bytes().starts_with(b"/memfd:")
    }
}

/// Whether this call is the one that is meant.
fn is_meant(name: &str, file: c_int) -> bool {
    static SEEN: AtomicU64 = AtomicU64::new(0);
    let meant = Short::named().filter(|short| short.is_meant(name, file));
    meant.is_some_and(|short| SEEN.fetch_add(1, Ordering::Relaxed) + 1 == short.number)
}

/// Half of so many bytes; all of them if they are too few to be halved.
fn half(bytes: usize) -> usize {
    let half = bytes / 2;
    let said = if half == 0 {
        format!("whole: {bytes} bytes\n")
    } else {
        format!("short: {half} of {bytes} bytes\n")
    };
    // SAFETY: `write` reads so many bytes of a string that is alive.
    unsafe { syscall(SYS_write, libc::STDERR_FILENO, said.as_ptr(), said.len()) };
    if half == 0 { bytes } else { half }
}

/// What the C library returns: how many bytes, or that there is an error, which `syscall` has told it.
fn result(said: c_long) -> ssize_t {
    ssize_t::try_from(said).unwrap_or(-1)
}

/// Half of what has been read; what is left of it can be read again.
fn half_of(read: ssize_t) -> ssize_t {
    let Ok(bytes) = usize::try_from(read) else { return read };
    ssize_t::try_from(half(bytes)).unwrap_or(read)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn read(file: c_int, buffer: *mut c_void, len: size_t) -> ssize_t {
    // SAFETY: as the caller promises.
    let all = result(unsafe { syscall(SYS_read, file, buffer, len) });
    if !is_meant("read", file) {
        return all;
    }
    let half = half_of(all);
    // SAFETY: it has no memory.
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
    // SAFETY: as the caller promises.
    let all = result(unsafe { syscall(SYS_pread64, file, buffer, len, offset) });
    if is_meant("pread64", file) { half_of(all) } else { all }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn write(file: c_int, buffer: *const c_void, len: size_t) -> ssize_t {
    let len = if is_meant("write", file) { half(len) } else { len };
    // SAFETY: what the caller promises for all of its bytes holds for the first of them.
    result(unsafe { syscall(SYS_write, file, buffer, len) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn pwrite64(
    file: c_int,
    buffer: *const c_void,
    len: size_t,
    offset: off64_t,
) -> ssize_t {
    let len = if is_meant("pwrite64", file) { half(len) } else { len };
    // SAFETY: as for `write`.
    result(unsafe { syscall(SYS_pwrite64, file, buffer, len, offset) })
}
