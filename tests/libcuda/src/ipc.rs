//! Handles by which other processes of this machine open what `cuMemAlloc` has allocated.

use std::ffi::c_uint;

use crate::context;
use crate::memory::{self, Kind, Range};
use crate::pages::{GRANULE, Pages};
use crate::result::Code;

/// A text, and zeros after it: the process, its descriptor of the memory, and the memory's serial number, because another
/// may have that descriptor later.
#[repr(C)]
pub struct CUipcMemHandle {
    bytes: [u8; 64],
}

/// That of the whole allocation.
pub(crate) fn handle(pointer: u64) -> Result<CUipcMemHandle, Code> {
    context::device()?;
    let text = memory::find(pointer, |range, _| match range.kind {
        Kind::Allocated => {
            let (descriptor, serial) = (range.pages.number(), &range.pages.serial);
            Ok(format!("{} {descriptor} {serial}", std::process::id()))
        }
        Kind::Mapped(_) | Kind::Opened(_) => Err(Code::InvalidValue),
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
    context::device()?;
    if flags != ENABLE_PEERS {
        return Err(Code::InvalidValue);
    }
    let (process, descriptor, serial) = handle.parse().ok_or(Code::InvalidHandle)?;
    if process == std::process::id() {
        return Err(Code::InvalidContext);
    }
    let mut ranges = memory::ranges();
    for (start, range) in ranges.iter_mut() {
        if let Kind::Opened(count) = &mut range.kind
            && range.pages.serial == serial
        {
            *count += 1;
            return Ok(*start as u64);
        }
    }
    // It is not there if the process is one of another namespace.
    let pages = Pages::open(format!("/proc/{process}/fd/{descriptor}").as_ref());
    let pages = pages.ok().filter(|pages| pages.serial == serial).ok_or(Code::InvalidHandle)?;
    let start = memory::reserve(pages.len, GRANULE)?;
    ranges.insert(start, Range { len: pages.len, pages, kind: Kind::Opened(1) });
    Ok(start as u64)
}

pub(crate) fn close(pointer: u64) -> Result<(), Code> {
    let start = usize::try_from(pointer).map_err(|_| Code::InvalidValue)?;
    let mut ranges = memory::ranges();
    let Some(Range { len, kind: Kind::Opened(count), .. }) = ranges.get_mut(&start) else {
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
        cuMemAlloc_v2, cuMemFree_v2, cuMemcpyDtoH_v2, cuMemsetD8Async, cuStreamSynchronize, held,
        tssd_fake_cuda_memory,
    };

    /// The default stream.
    const STREAM: *mut c_void = std::ptr::null_mut();

    fn open(handle: &str) -> Result<u64, u32> {
        let (mut bytes, mut pointer) = ([0; 64], 0);
        bytes[..handle.len()].copy_from_slice(handle.as_bytes());
        // SAFETY: there is room for a pointer.
        match unsafe { cuIpcOpenMemHandle_v2(&raw mut pointer, CUipcMemHandle { bytes }, 1) } {
            0 => Ok(pointer),
            code => Err(code),
        }
    }

    fn run(test: &str, handle: &str) {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--ignored", "--exact", test]).env("TSSD_TESTS_HANDLE", handle);
        let output = command.output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && text.contains("1 passed"), "{text}");
    }

    #[test]
    fn another_process_opens_what_is_there() {
        let _turn = held(&crate::TESTS);
        assert_eq!(cuCtxSetCurrent(context::of(0).unwrap()), 0);
        let (mut pointer, mut handle) = (0, CUipcMemHandle { bytes: [0; 64] });
        // SAFETY: there is room for a pointer.
        assert_eq!(unsafe { cuMemAlloc_v2(&raw mut pointer, 1000) }, 0);
        // SAFETY: there is room for a handle.
        assert_eq!(unsafe { cuIpcGetMemHandle(&raw mut handle, pointer + 999) }, 0);
        assert_eq!(cuMemsetD8Async(pointer, 7, 1000, STREAM), 0);
        assert_eq!(cuStreamSynchronize(STREAM), 0);
        let text = str::from_utf8(&handle.bytes).unwrap().trim_end_matches('\0');
        assert_eq!(open(text), Err(201));
        assert_eq!(cuIpcCloseMemHandle(pointer), 1);
        run("ipc::tests::it_is_there", text);
        assert_eq!(cuMemFree_v2(pointer), 0);
        run("ipc::tests::it_is_gone", text);
        // SAFETY: as above.
        assert_eq!(unsafe { cuMemAlloc_v2(&raw mut pointer, 1000) }, 0);
        run("ipc::tests::it_is_gone", text);
        assert_eq!(cuMemFree_v2(pointer), 0);
    }

    #[test]
    #[ignore = "needs a handle of another process"]
    fn it_is_there() {
        let Ok(handle) = std::env::var("TSSD_TESTS_HANDLE") else { return };
        assert_eq!(cuCtxSetCurrent(context::of(0).unwrap()), 0);
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
    fn it_is_gone() {
        let Ok(handle) = std::env::var("TSSD_TESTS_HANDLE") else { return };
        assert_eq!(cuCtxSetCurrent(context::of(0).unwrap()), 0);
        assert_eq!(open(&handle), Err(400));
    }
}
