//! Reads and writes that do half of what they are asked for, as any system call may: a process has this in
//! `LD_PRELOAD`, where its calls come before they come to the C library.
//!
//! `TSSD_SHORT=NAME:NUMBER:FOLDER` names one call: that of this name and number, from 1 on, among those on files below
//! the folder and on memory that has a descriptor. It says on stderr that it was short. All others do what they always
//! do.
#![cfg(target_os = "linux")]
#![expect(unsafe_code, reason = "its callers are those of the C library")]
#![expect(clippy::missing_safety_doc, reason = "each is what its manual page says")]
#![expect(missing_docs, reason = "as above")]

use std::ffi::{c_int, c_long, c_void};
use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use libc::{SYS_pread64, SYS_pwrite64, SYS_read, SYS_write, off64_t, size_t, ssize_t, syscall};

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

/// How many bytes a call is to do that was asked for so many.
fn bytes(name: &str, file: c_int, wanted: size_t) -> size_t {
    static SEEN: AtomicU64 = AtomicU64::new(0);
    let Some(short) = Short::named() else { return wanted };
    if !short.is_meant(name, file) || SEEN.fetch_add(1, Ordering::Relaxed) + 1 != short.number {
        return wanted;
    }
    let half = wanted / 2;
    if half == 0 {
        return wanted;
    }
    let said = format!("short: {half} of {wanted} bytes\n");
    // SAFETY: `write` reads so many bytes of a string that is alive.
    unsafe { syscall(SYS_write, libc::STDERR_FILENO, said.as_ptr(), said.len()) };
    half
}

/// What the C library returns: how many bytes, or that there is an error, which `syscall` has told it.
fn result(said: c_long) -> ssize_t {
    ssize_t::try_from(said).unwrap_or(-1)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn read(file: c_int, buffer: *mut c_void, len: size_t) -> ssize_t {
    // SAFETY: what the caller promises for all of its bytes holds for the first of them.
    result(unsafe { syscall(SYS_read, file, buffer, bytes("read", file, len)) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn write(file: c_int, buffer: *const c_void, len: size_t) -> ssize_t {
    // SAFETY: as for `read`.
    result(unsafe { syscall(SYS_write, file, buffer, bytes("write", file, len)) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn pread64(
    file: c_int,
    buffer: *mut c_void,
    len: size_t,
    offset: off64_t,
) -> ssize_t {
    // SAFETY: as for `read`.
    result(unsafe { syscall(SYS_pread64, file, buffer, bytes("pread64", file, len), offset) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn pwrite64(
    file: c_int,
    buffer: *const c_void,
    len: size_t,
    offset: off64_t,
) -> ssize_t {
    // SAFETY: as for `read`.
    result(unsafe { syscall(SYS_pwrite64, file, buffer, bytes("pwrite64", file, len), offset) })
}
