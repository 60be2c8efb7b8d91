//! A driver without a GPU, with the names and the ABI of NVIDIA's `libcuda.so.1`.
//!
//! Memory of a device is anonymous memory that the process does not see: a pointer to it is an address at which nothing
//! may be read or written, so that who takes it for memory of the host is killed. Work that a stream is given is done by
//! a thread, later: after a delay of up to `TSSD_FAKE_CUDA_DELAY` microseconds, so that who does not wait for it finds
//! what was there before. `TSSD_FAKE_CUDA_DEVICES` says how many devices there are (1), `TSSD_FAKE_CUDA_MEMORY` how many
//! bytes of all of them together a process may allocate. With `TSSD_FAKE_CUDA_NO_VMM` they have no virtual memory.
//!
//! Memory has descriptors of files without a path, so that it goes from process to process as a real device's does, and
//! is there as long as one of them has it.
#![cfg(target_os = "linux")]
#![expect(unsafe_code, reason = "its callers are those of a library of C")]
#![expect(clippy::missing_safety_doc, reason = "each is what the driver's documentation says")]
#![expect(missing_docs, reason = "as above")]

mod context;
mod ipc;
mod memory;
mod pages;
mod result;
mod rows;
mod stream;
mod virtual_memory;

use std::ffi::{c_char, c_int, c_uchar, c_uint, c_ulonglong, c_void};
use std::os::fd::{AsRawFd, IntoRawFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::ipc::CUipcMemHandle;
use crate::memory::Side;
use crate::result::{CUresult, Code, answer};
use crate::rows::{CUDA_MEMCPY2D, CUDA_MEMCPY3D};
use crate::virtual_memory::{CUmemAccessDesc, CUmemAllocationProp};

type CUdevice = c_int;
type CUdeviceptr = u64;
type CUcontext = *mut c_void;
type CUstream = *mut c_void;
type CUevent = *mut c_void;
type CUmemGenericAllocationHandle = c_ulonglong;
type CUhostFn = Option<stream::Function>;

/// Some tests count what the process has: one at a time runs.
#[cfg(test)]
static TESTS: Mutex<()> = Mutex::new(());

const NAME: &[u8] = b"a fake GPU\0";

fn devices() -> c_int {
    let count = std::env::var("TSSD_FAKE_CUDA_DEVICES").ok();
    count.and_then(|count| count.parse().ok()).unwrap_or(1)
}

fn held<T>(all: &Mutex<T>) -> MutexGuard<'_, T> {
    all.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Writes what a caller asked for.
unsafe fn put<T>(place: *mut T, value: T) -> Result<(), Code> {
    if place.is_null() {
        return Err(Code::InvalidValue);
    }
    // SAFETY: it is the caller's room for one, and not nothing.
    unsafe { place.write(value) };
    Ok(())
}

/// What a caller points to.
unsafe fn get<'a, T>(place: *const T) -> Result<&'a T, Code> {
    // SAFETY: it is one of the caller's, or nothing.
    unsafe { place.as_ref() }.ok_or(Code::InvalidValue)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuInit(flags: c_uint) -> CUresult {
    answer(|| match (flags, devices()) {
        (0, 0) => Err(Code::NoDevice),
        (0, _) => Ok(()),
        _ => Err(Code::InvalidValue),
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDriverGetVersion(version: *mut c_int) -> CUresult {
    // SAFETY: it is the caller's.
    answer(|| unsafe { put(version, 12080) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorName(error: c_uint, name: *mut *const c_char) -> CUresult {
    // SAFETY: it is the caller's.
    answer(|| unsafe { put(name, result::name(error)?.as_ptr()) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorString(error: c_uint, text: *mut *const c_char) -> CUresult {
    // SAFETY: it is the caller's.
    answer(|| unsafe { put(text, result::name(error)?.as_ptr()) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetCount(count: *mut c_int) -> CUresult {
    // SAFETY: it is the caller's.
    answer(|| unsafe { put(count, devices()) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGet(device: *mut CUdevice, ordinal: c_int) -> CUresult {
    answer(|| {
        if !(0..devices()).contains(&ordinal) {
            return Err(Code::InvalidDevice);
        }
        // SAFETY: it is the caller's.
        unsafe { put(device, ordinal) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetName(
    name: *mut c_char,
    len: c_int,
    _device: CUdevice,
) -> CUresult {
    answer(|| {
        if usize::try_from(len).is_ok_and(|len| len < NAME.len()) {
            return Err(Code::InvalidValue);
        }
        // SAFETY: there is room for so many, as the caller says.
        unsafe { name.cast::<u8>().copy_from_nonoverlapping(NAME.as_ptr(), NAME.len()) };
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: CUdevice) -> CUresult {
    let mut bytes = *b"a fake GPU: no. ";
    bytes[15] = device.to_le_bytes()[0];
    // SAFETY: it is the caller's.
    answer(|| unsafe { put(uuid, bytes) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetUuid(uuid: *mut [u8; 16], device: CUdevice) -> CUresult {
    // SAFETY: as the caller says.
    unsafe { cuDeviceGetUuid_v2(uuid, device) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetAttribute(
    value: *mut c_int,
    attribute: c_uint,
    _device: CUdevice,
) -> CUresult {
    const MAX_PITCH: c_uint = 11;
    const VIRTUAL_MEMORY: c_uint = 102;
    const SHARED_BY_DESCRIPTORS: c_uint = 103;
    let found = match attribute {
        MAX_PITCH => rows::MAX_PITCH,
        VIRTUAL_MEMORY | SHARED_BY_DESCRIPTORS => c_int::from(virtual_memory::is_supported()),
        _ => 0,
    };
    // SAFETY: it is the caller's.
    answer(|| unsafe { put(value, found) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDevicePrimaryCtxRetain(
    context: *mut CUcontext,
    device: CUdevice,
) -> CUresult {
    // SAFETY: it is the caller's.
    answer(|| unsafe { put(context, context::of(device)?) })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxRelease_v2(_device: CUdevice) -> CUresult {
    answer(|| Ok(()))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSetCurrent(context: CUcontext) -> CUresult {
    answer(|| context::set(context))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxGetCurrent(context: *mut CUcontext) -> CUresult {
    // SAFETY: it is the caller's.
    answer(|| unsafe { put(context, context::current()) })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxPushCurrent_v2(context: CUcontext) -> CUresult {
    answer(|| context::push(context))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxPopCurrent_v2(context: *mut CUcontext) -> CUresult {
    // SAFETY: it is the caller's.
    answer(|| unsafe { put(context, context::pop()?) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuThreadExchangeStreamCaptureMode(mode: *mut c_int) -> CUresult {
    answer(|| {
        // SAFETY: it is the caller's.
        let wanted = unsafe { *mode };
        // SAFETY: as above.
        unsafe { put(mode, context::exchange_capture(wanted)?) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAlloc_v2(pointer: *mut CUdeviceptr, len: usize) -> CUresult {
    // SAFETY: it is the caller's.
    answer(|| unsafe { put(pointer, memory::allocate(context::device()?, len)?) })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemFree_v2(pointer: CUdeviceptr) -> CUresult {
    answer(|| {
        // It is not freed under what is on its way.
        stream::settle_all();
        memory::free(pointer)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> CUresult {
    answer(|| {
        let (left, all) = pages::left();
        // SAFETY: they are the caller's.
        unsafe { put(free, left) }?;
        // SAFETY: as above.
        unsafe { put(total, all) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemGetAllocationGranularity(
    granularity: *mut usize,
    wanted: *const CUmemAllocationProp,
    option: c_uint,
) -> CUresult {
    answer(|| {
        // SAFETY: it is the caller's.
        let found = virtual_memory::granularity(unsafe { get(wanted) }?, option)?;
        // SAFETY: as above.
        unsafe { put(granularity, found) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemCreate(
    handle: *mut CUmemGenericAllocationHandle,
    len: usize,
    wanted: *const CUmemAllocationProp,
    flags: c_ulonglong,
) -> CUresult {
    answer(|| {
        // SAFETY: it is the caller's.
        let created = virtual_memory::create(len, unsafe { get(wanted) }?, flags)?;
        // SAFETY: as above.
        unsafe { put(handle, created) }
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemRelease(handle: CUmemGenericAllocationHandle) -> CUresult {
    answer(|| virtual_memory::release(handle))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemExportToShareableHandle(
    shared: *mut c_void,
    handle: CUmemGenericAllocationHandle,
    kind: c_uint,
    flags: c_ulonglong,
) -> CUresult {
    answer(|| {
        let descriptor = virtual_memory::export(handle, kind, flags)?;
        // SAFETY: the caller has room for a descriptor, which is an int.
        unsafe { put(shared.cast::<c_int>(), descriptor.as_raw_fd()) }?;
        // It is the caller's from now on.
        let _ = descriptor.into_raw_fd();
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemImportFromShareableHandle(
    handle: *mut CUmemGenericAllocationHandle,
    shared: *mut c_void,
    kind: c_uint,
) -> CUresult {
    // SAFETY: it is the caller's.
    answer(|| unsafe { put(handle, virtual_memory::import(shared.addr(), kind)?) })
}

/// Where the caller would like the addresses to be is not looked at: the real one need not do it either.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAddressReserve(
    pointer: *mut CUdeviceptr,
    len: usize,
    alignment: usize,
    _wanted: CUdeviceptr,
    flags: c_ulonglong,
) -> CUresult {
    // SAFETY: it is the caller's.
    answer(|| unsafe { put(pointer, virtual_memory::reserve(len, alignment, flags)?) })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemAddressFree(pointer: CUdeviceptr, len: usize) -> CUresult {
    answer(|| virtual_memory::free(pointer, len))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemMap(
    pointer: CUdeviceptr,
    len: usize,
    offset: usize,
    handle: CUmemGenericAllocationHandle,
    flags: c_ulonglong,
) -> CUresult {
    answer(|| virtual_memory::map(pointer, len, offset, handle, flags))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemUnmap(pointer: CUdeviceptr, len: usize) -> CUresult {
    answer(|| {
        stream::settle_all();
        virtual_memory::unmap(pointer, len)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemSetAccess(
    pointer: CUdeviceptr,
    len: usize,
    wanted: *const CUmemAccessDesc,
    count: usize,
) -> CUresult {
    answer(|| {
        if wanted.is_null() || count == 0 {
            return Err(Code::InvalidValue);
        }
        // SAFETY: they are the caller's, and so many.
        let wanted = unsafe { std::slice::from_raw_parts(wanted, count) };
        virtual_memory::set_access(pointer, len, wanted)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuIpcGetMemHandle(
    handle: *mut CUipcMemHandle,
    pointer: CUdeviceptr,
) -> CUresult {
    // SAFETY: it is the caller's.
    answer(|| unsafe { put(handle, ipc::handle(pointer)?) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuIpcOpenMemHandle_v2(
    pointer: *mut CUdeviceptr,
    handle: CUipcMemHandle,
    flags: c_uint,
) -> CUresult {
    // SAFETY: it is the caller's.
    answer(|| unsafe { put(pointer, ipc::open(&handle, flags)?) })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuIpcCloseMemHandle(pointer: CUdeviceptr) -> CUresult {
    answer(|| {
        stream::settle_all();
        ipc::close(pointer)
    })
}

/// No function of the real one: how many bytes of a device's memory this process has created or imported, and has not
/// let go of.
#[unsafe(no_mangle)]
pub extern "C" fn tssd_fake_cuda_memory(device: CUdevice) -> u64 {
    pages::count(device)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemGetAddressRange_v2(
    base: *mut CUdeviceptr,
    len: *mut usize,
    pointer: CUdeviceptr,
) -> CUresult {
    answer(|| {
        let (start, all) = memory::allocation(pointer)?;
        // SAFETY: both are the caller's.
        unsafe { put(base, start) }?;
        // SAFETY: as above.
        unsafe { put(len, all) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuPointerGetAttribute(
    value: *mut c_void,
    attribute: c_uint,
    pointer: CUdeviceptr,
) -> CUresult {
    const MEMORY_TYPE: c_uint = 2;
    const DEVICE_ORDINAL: c_uint = 9;
    const DEVICE: c_int = 2;
    answer(|| {
        let device = memory::device(pointer)?;
        let found = match attribute {
            MEMORY_TYPE => DEVICE,
            DEVICE_ORDINAL => device,
            _ => return Err(Code::InvalidValue),
        };
        // SAFETY: both attributes are ints, for which the caller has room.
        unsafe { put(value.cast(), found) }
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemHostRegister_v2(start: *mut c_void, len: usize, flags: c_uint) -> CUresult {
    answer(|| memory::register(start.addr(), len, flags))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemHostUnregister(start: *mut c_void) -> CUresult {
    answer(|| {
        stream::settle_all();
        memory::unregister(start.addr())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyDtoHAsync_v2(
    target: *mut c_void,
    source: CUdeviceptr,
    len: usize,
    stream: CUstream,
) -> CUresult {
    answer(|| stream::copy(stream, Side::Host(target.addr()), Side::Device(source), len))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyHtoDAsync_v2(
    target: CUdeviceptr,
    source: *const c_void,
    len: usize,
    stream: CUstream,
) -> CUresult {
    answer(|| stream::copy(stream, Side::Device(target), Side::Host(source.addr()), len))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyDtoDAsync_v2(
    target: CUdeviceptr,
    source: CUdeviceptr,
    len: usize,
    stream: CUstream,
) -> CUresult {
    answer(|| stream::copy(stream, Side::Device(target), Side::Device(source), len))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyDtoH_v2(
    target: *mut c_void,
    source: CUdeviceptr,
    len: usize,
) -> CUresult {
    answer(|| {
        stream::copy(std::ptr::null_mut(), Side::Host(target.addr()), Side::Device(source), len)?;
        stream::settle(std::ptr::null_mut())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyHtoD_v2(
    target: CUdeviceptr,
    source: *const c_void,
    len: usize,
) -> CUresult {
    answer(|| {
        stream::copy(std::ptr::null_mut(), Side::Device(target), Side::Host(source.addr()), len)?;
        stream::settle(std::ptr::null_mut())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpy2DAsync_v2(
    copy: *const CUDA_MEMCPY2D,
    stream: CUstream,
) -> CUresult {
    answer(|| {
        // SAFETY: it is the caller's.
        let (rows, len) = unsafe { get(copy) }?.rows()?;
        stream::copy_rows(stream, &rows, len)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpy3DAsync_v2(
    copy: *const CUDA_MEMCPY3D,
    stream: CUstream,
) -> CUresult {
    answer(|| {
        // SAFETY: it is the caller's.
        let (rows, len) = unsafe { get(copy) }?.rows()?;
        stream::copy_rows(stream, &rows, len)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemsetD8Async(
    target: CUdeviceptr,
    byte: c_uchar,
    len: usize,
    stream: CUstream,
) -> CUresult {
    answer(|| stream::fill(stream, target, byte, len))
}

/// No function of the real one: how many bytes were copied from and to memory of the host that is registered, or is not.
#[unsafe(no_mangle)]
pub extern "C" fn tssd_fake_cuda_copied(is_registered: bool) -> u64 {
    let counted = &stream::COPIED[usize::from(!is_registered)];
    counted.load(std::sync::atomic::Ordering::Relaxed)
}

/// No functions of the real one: how many events were made, how often somebody has copied, and waited for an event or a
/// stream.
#[unsafe(no_mangle)]
pub extern "C" fn tssd_fake_cuda_events() -> u64 {
    stream::EVENTS_MADE.load(std::sync::atomic::Ordering::Relaxed)
}

#[unsafe(no_mangle)]
pub extern "C" fn tssd_fake_cuda_copies() -> u64 {
    stream::COPIES.load(std::sync::atomic::Ordering::Relaxed)
}

#[unsafe(no_mangle)]
pub extern "C" fn tssd_fake_cuda_waits() -> u64 {
    stream::WAITED.load(std::sync::atomic::Ordering::Relaxed)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamCreate(stream: *mut CUstream, _flags: c_uint) -> CUresult {
    // SAFETY: it is the caller's.
    answer(|| unsafe { put(stream, stream::create()?) })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamDestroy_v2(stream: CUstream) -> CUresult {
    answer(|| stream::destroy(stream))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamQuery(stream: CUstream) -> CUresult {
    answer(|| stream::query(stream))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamSynchronize(stream: CUstream) -> CUresult {
    answer(|| stream::settle(stream))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamWaitEvent(stream: CUstream, event: CUevent, _flags: c_uint) -> CUresult {
    answer(|| stream::wait(stream, event))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuLaunchHostFunc(
    stream: CUstream,
    function: CUhostFn,
    data: *mut c_void,
) -> CUresult {
    answer(|| stream::call(stream, function, data))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventCreate(event: *mut CUevent, _flags: c_uint) -> CUresult {
    // SAFETY: it is the caller's.
    answer(|| unsafe { put(event, stream::create_event()?) })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventRecord(event: CUevent, stream: CUstream) -> CUresult {
    answer(|| stream::record(event, stream))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventQuery(event: CUevent) -> CUresult {
    answer(|| stream::query_event(event))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventSynchronize(event: CUevent) -> CUresult {
    answer(|| stream::settle_event(event))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventDestroy_v2(event: CUevent) -> CUresult {
    answer(|| stream::destroy_event(event))
}
