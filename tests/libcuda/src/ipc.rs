//! IPC handles, by which other processes of this machine open allocations of `cuMemAlloc`.

use std::ffi::c_uint;

use crate::context;
use crate::device_memory::{DeviceMemory, GRANULE};
use crate::memory::{self, MappingKind, Range};
use crate::result::Code;

/// IPC handle: process, file descriptor and serial number of the memory, as text padded with zeros.
///
/// The serial number detects that the descriptor has been reused for other memory.
#[repr(C)]
pub struct CUipcMemHandle {
    bytes: [u8; 64],
}

/// Returns the handle of the allocation that contains an address.
pub(crate) fn handle(pointer: u64) -> Result<CUipcMemHandle, Code> {
    context::current_device()?;
    let text = memory::with_range(pointer, |range, _| match range.kind {
        MappingKind::Allocated => {
            let (descriptor, serial) = (range.pages.descriptor(), &range.pages.serial);
            Ok(format!("{} {descriptor} {serial}", std::process::id()))
        }
        MappingKind::Mapped(_) | MappingKind::Opened(_) => Err(Code::InvalidValue),
    })?;
    let mut bytes = [0; 64];
    let room = bytes.get_mut(..text.len()).ok_or(Code::InvalidValue)?;
    room.copy_from_slice(text.as_bytes());
    Ok(CUipcMemHandle { bytes })
}

impl CUipcMemHandle {
    fn parse(&self) -> Option<(u32, u32, &str)> {
        let text = str::from_utf8(&self.bytes).ok()?.trim_end_matches('\0');
        let (process, rest) = text.split_once(' ')?;
        let (descriptor, serial) = rest.split_once(' ')?;
        Some((process.parse().ok()?, descriptor.parse().ok()?, serial))
    }
}

pub(crate) fn open(handle: &CUipcMemHandle, flags: c_uint) -> Result<u64, Code> {
    const ENABLE_PEERS: c_uint = 1;
    context::current_device()?;
    if flags != ENABLE_PEERS {
        return Err(Code::InvalidValue);
    }
    let (process, descriptor, serial) = handle.parse().ok_or(Code::InvalidHandle)?;
    if process == std::process::id() {
        return Err(Code::InvalidContext);
    }
    let mut ranges = memory::ranges();
    for (start, range) in ranges.iter_mut() {
        if let MappingKind::Opened(count) = &mut range.kind
            && range.pages.serial == serial
        {
            *count += 1;
            return Ok(*start as u64);
        }
    }
    // The path does not exist if the process is in another PID namespace.
    let pages = DeviceMemory::open(format!("/proc/{process}/fd/{descriptor}").as_ref());
    let pages = pages.ok().filter(|pages| pages.serial == serial).ok_or(Code::InvalidHandle)?;
    let start = memory::reserve(pages.len, GRANULE)?;
    ranges.insert(start, Range { len: pages.len, pages, kind: MappingKind::Opened(1) });
    Ok(start as u64)
}

pub(crate) fn close(pointer: u64) -> Result<(), Code> {
    let start = usize::try_from(pointer).map_err(|_| Code::InvalidValue)?;
    let mut ranges = memory::ranges();
    let Some(Range { len, kind: MappingKind::Opened(count), .. }) = ranges.get_mut(&start) else {
        return Err(Code::InvalidValue);
    };
    *count -= 1;
    if *count == 0 {
        memory::unreserve(start, *len);
        ranges.remove(&start);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::ffi::c_void;
    use std::process::Command;

    use super::*;
    use crate::{
        cuCtxSetCurrent, cuIpcCloseMemHandle, cuIpcGetMemHandle, cuIpcOpenMemHandle_v2,
        cuMemAlloc_v2, cuMemFree_v2, cuMemcpyDtoH_v2, cuMemsetD8Async, cuStreamSynchronize, lock,
        tssd_fake_cuda_memory,
    };

    /// The default stream.
    const STREAM: *mut c_void = std::ptr::null_mut();

    fn open(handle: &str) -> Result<u64, u32> {
        let (mut bytes, mut pointer) = ([0; 64], 0);
        bytes[..handle.len()].copy_from_slice(handle.as_bytes());
        // SAFETY: the pointer is valid for writing.
        match unsafe { cuIpcOpenMemHandle_v2(&raw mut pointer, CUipcMemHandle { bytes }, 1) } {
            0 => Ok(pointer),
            code => Err(code),
        }
    }

    /// Runs a test in another process, with a handle.
    fn run(test: &str, handle: &str) {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--ignored", "--exact", test]).env("TSSD_TESTS_HANDLE", handle);
        let output = command.output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && text.contains("1 passed"), "{text}");
    }

    #[test]
    fn other_process_opens_allocation_until_it_is_freed() {
        let _lock = lock(&crate::TESTS);
        assert_eq!(cuCtxSetCurrent(context::primary(0).unwrap()), 0);
        let (mut pointer, mut handle) = (0, CUipcMemHandle { bytes: [0; 64] });
        // SAFETY: the pointer is valid for writing.
        assert_eq!(unsafe { cuMemAlloc_v2(&raw mut pointer, 1000) }, 0);
        // SAFETY: the pointer is valid for writing a handle.
        assert_eq!(unsafe { cuIpcGetMemHandle(&raw mut handle, pointer + 999) }, 0);
        assert_eq!(cuMemsetD8Async(pointer, 7, 1000, STREAM), 0);
        assert_eq!(cuStreamSynchronize(STREAM), 0);
        let text = str::from_utf8(&handle.bytes).unwrap().trim_end_matches('\0');
        assert_eq!(open(text), Err(201));
        assert_eq!(cuIpcCloseMemHandle(pointer), 1);
        run("ipc::tests::handle_is_open", text);
        assert_eq!(cuMemFree_v2(pointer), 0);
        run("ipc::tests::handle_is_invalid", text);
        // SAFETY: the pointer is valid for writing.
        assert_eq!(unsafe { cuMemAlloc_v2(&raw mut pointer, 1000) }, 0);
        run("ipc::tests::handle_is_invalid", text);
        assert_eq!(cuMemFree_v2(pointer), 0);
    }

    #[test]
    #[ignore = "needs a handle of another process"]
    fn handle_is_open() {
        let Ok(handle) = std::env::var("TSSD_TESTS_HANDLE") else { return };
        assert_eq!(cuCtxSetCurrent(context::primary(0).unwrap()), 0);
        let [one, other] = [(); 2].map(|()| open(&handle).unwrap());
        assert_eq!((one, tssd_fake_cuda_memory(0)), (other, GRANULE as u64));
        let mut found = [0_u8; 1001];
        for is_last in [false, true] {
            assert_eq!(cuMemcpyDtoH_v2(found.as_mut_ptr().cast(), one, 1001), 0);
            assert!(found[..1000] == [7; 1000] && found[1000] == 0);
            assert_eq!([cuMemFree_v2(one), cuIpcCloseMemHandle(one + 1)], [1; 2]);
            assert_eq!(cuIpcCloseMemHandle(one), 0);
            assert_eq!(tssd_fake_cuda_memory(0) == 0, is_last);
        }
        assert_eq!(cuIpcCloseMemHandle(one), 1);
    }

    #[test]
    #[ignore = "needs a handle of another process"]
    fn handle_is_invalid() {
        let Ok(handle) = std::env::var("TSSD_TESTS_HANDLE") else { return };
        assert_eq!(cuCtxSetCurrent(context::primary(0).unwrap()), 0);
        assert_eq!(open(&handle), Err(400));
    }
}
