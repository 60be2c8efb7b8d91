//! A fake CUDA driver, with the names and the ABI of NVIDIA's `libcuda.so.1`.
//!
//! Device memory is a memfd, mapped at an address that only the driver knows. A device pointer is a reserved address
//! without access, so that a process that uses it as host memory is killed. Memfds can be passed to other processes,
//! and live as long as one of them holds them, like the memory of a real device.
//!
//! Each stream has a thread that executes its work after a random delay, so that a caller that does not wait finds the
//! previous contents.
//!
//! Environment variables:
//!
//! - `TSSD_FAKE_CUDA_DELAY`: maximum delay in microseconds (default 0)
//! - `TSSD_FAKE_CUDA_DEVICES`: number of devices (default 1)
//! - `TSSD_FAKE_CUDA_MEMORY`: maximum number of bytes that a process may allocate on all devices together
//! - `TSSD_FAKE_CUDA_NO_VMM`: if set, the devices do not support virtual memory management
#![cfg(target_os = "linux")]
#![expect(unsafe_code, reason = "its callers are those of a library of C")]
#![expect(clippy::missing_safety_doc, reason = "each is what the driver's documentation says")]
#![expect(missing_docs, reason = "as above")]

mod context;
mod device_memory;
mod ipc;
mod memory;
mod result;
mod stream;
mod strided_copy;
mod virtual_memory;

use std::ffi::{c_char, c_int, c_uchar, c_uint, c_ulonglong, c_void};
use std::os::fd::{AsRawFd, IntoRawFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::ipc::CUipcMemHandle;
use crate::memory::CopyAddress;
use crate::result::{CUresult, Code, to_result};
use crate::strided_copy::{CUDA_MEMCPY2D, CUDA_MEMCPY3D};
use crate::virtual_memory::{CUmemAccessDesc, CUmemAllocationProp};

type CUdevice = c_int;
type CUdeviceptr = u64;
type CUcontext = *mut c_void;
type CUstream = *mut c_void;
type CUevent = *mut c_void;
type CUmemGenericAllocationHandle = c_ulonglong;
type CUhostFn = Option<stream::Function>;

/// Serializes the tests that count the memory of the process.
#[cfg(test)]
static TESTS: Mutex<()> = Mutex::new(());

const NAME: &[u8] = b"a fake GPU\0";

/// Returns the number of devices.
fn device_count() -> c_int {
    let count = std::env::var("TSSD_FAKE_CUDA_DEVICES").ok();
    count.and_then(|count| count.parse().ok()).unwrap_or(1)
}

/// Locks a mutex, also if a thread has panicked while it held it.
fn lock<T>(all: &Mutex<T>) -> MutexGuard<'_, T> {
    all.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Writes a result to an output pointer of the caller.
///
/// # Safety
///
/// The pointer must be null, or valid for writing a `T`.
unsafe fn write_output<T>(pointer: *mut T, value: T) -> Result<(), Code> {
    if pointer.is_null() {
        return Err(Code::InvalidValue);
    }
    // SAFETY: it is valid for writing, as this function requires, and it is not null.
    unsafe { pointer.write(value) };
    Ok(())
}

/// Reads an input pointer of the caller.
///
/// # Safety
///
/// The pointer must be null, or point to a `T` that lives for `'a`.
unsafe fn read_input<'a, T>(pointer: *const T) -> Result<&'a T, Code> {
    // SAFETY: it is null, or points to a `T` that lives for `'a`, as this function requires.
    unsafe { pointer.as_ref() }.ok_or(Code::InvalidValue)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuInit(flags: c_uint) -> CUresult {
    to_result(|| match (flags, device_count()) {
        (0, 0) => Err(Code::NoDevice),
        (0, _) => Ok(()),
        _ => Err(Code::InvalidValue),
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDriverGetVersion(version: *mut c_int) -> CUresult {
    // SAFETY: the caller passes a valid pointer, as the driver API requires.
    to_result(|| unsafe { write_output(version, 12080) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorName(error: c_uint, name: *mut *const c_char) -> CUresult {
    // SAFETY: the caller passes a valid pointer, as the driver API requires.
    to_result(|| unsafe { write_output(name, result::name(error)?.as_ptr()) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorString(error: c_uint, text: *mut *const c_char) -> CUresult {
    // SAFETY: the caller passes a valid pointer, as the driver API requires.
    to_result(|| unsafe { write_output(text, result::name(error)?.as_ptr()) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetCount(count: *mut c_int) -> CUresult {
    // SAFETY: the caller passes a valid pointer, as the driver API requires.
    to_result(|| unsafe { write_output(count, device_count()) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGet(device: *mut CUdevice, ordinal: c_int) -> CUresult {
    to_result(|| {
        if !(0..device_count()).contains(&ordinal) {
            return Err(Code::InvalidDevice);
        }
        // SAFETY: the caller passes a valid pointer, as the driver API requires.
        unsafe { write_output(device, ordinal) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetName(
    name: *mut c_char,
    len: c_int,
    _device: CUdevice,
) -> CUresult {
    to_result(|| {
        if usize::try_from(len).is_ok_and(|len| len < NAME.len()) {
            return Err(Code::InvalidValue);
        }
        // SAFETY: the buffer has `len` bytes, as the driver API requires, and `len` is at least `NAME.len()`.
        unsafe { name.cast::<u8>().copy_from_nonoverlapping(NAME.as_ptr(), NAME.len()) };
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: CUdevice) -> CUresult {
    let mut bytes = *b"a fake GPU: no. ";
    bytes[15] = device.to_le_bytes()[0];
    // SAFETY: the caller passes a valid pointer, as the driver API requires.
    to_result(|| unsafe { write_output(uuid, bytes) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetUuid(uuid: *mut [u8; 16], device: CUdevice) -> CUresult {
    // SAFETY: both functions have the same contract.
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
        MAX_PITCH => strided_copy::MAX_PITCH,
        VIRTUAL_MEMORY | SHARED_BY_DESCRIPTORS => c_int::from(virtual_memory::is_supported()),
        _ => 0,
    };
    // SAFETY: the caller passes a valid pointer, as the driver API requires.
    to_result(|| unsafe { write_output(value, found) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDevicePrimaryCtxRetain(
    context: *mut CUcontext,
    device: CUdevice,
) -> CUresult {
    // SAFETY: the caller passes a valid pointer, as the driver API requires.
    to_result(|| unsafe { write_output(context, context::primary(device)?) })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxRelease_v2(_device: CUdevice) -> CUresult {
    to_result(|| Ok(()))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSetCurrent(context: CUcontext) -> CUresult {
    to_result(|| context::set(context))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxGetCurrent(context: *mut CUcontext) -> CUresult {
    // SAFETY: the caller passes a valid pointer, as the driver API requires.
    to_result(|| unsafe { write_output(context, context::current()) })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxPushCurrent_v2(context: CUcontext) -> CUresult {
    to_result(|| context::push(context))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxPopCurrent_v2(context: *mut CUcontext) -> CUresult {
    // SAFETY: the caller passes a valid pointer, as the driver API requires.
    to_result(|| unsafe { write_output(context, context::pop()?) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuThreadExchangeStreamCaptureMode(mode: *mut c_int) -> CUresult {
    to_result(|| {
        // SAFETY: the caller passes a valid pointer, as the driver API requires.
        let wanted = unsafe { *mode };
        // SAFETY: the caller passes valid pointers, as the driver API requires.
        unsafe { write_output(mode, context::exchange_capture(wanted)?) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAlloc_v2(pointer: *mut CUdeviceptr, len: usize) -> CUresult {
    // SAFETY: the caller passes a valid pointer, as the driver API requires.
    to_result(|| unsafe {
        write_output(pointer, memory::allocate(context::current_device()?, len)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemFree_v2(pointer: CUdeviceptr) -> CUresult {
    to_result(|| {
        // Pending work may still use the memory.
        stream::synchronize_all();
        memory::free(pointer)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> CUresult {
    to_result(|| {
        let (left, all) = device_memory::available_and_total();
        // SAFETY: the caller passes valid pointers, as the driver API requires.
        unsafe { write_output(free, left) }?;
        // SAFETY: the caller passes valid pointers, as the driver API requires.
        unsafe { write_output(total, all) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemGetAllocationGranularity(
    granularity: *mut usize,
    wanted: *const CUmemAllocationProp,
    option: c_uint,
) -> CUresult {
    to_result(|| {
        // SAFETY: the caller passes a valid pointer, as the driver API requires.
        let found = virtual_memory::granularity(unsafe { read_input(wanted) }?, option)?;
        // SAFETY: the caller passes valid pointers, as the driver API requires.
        unsafe { write_output(granularity, found) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemCreate(
    handle: *mut CUmemGenericAllocationHandle,
    len: usize,
    wanted: *const CUmemAllocationProp,
    flags: c_ulonglong,
) -> CUresult {
    to_result(|| {
        // SAFETY: the caller passes a valid pointer, as the driver API requires.
        let created = virtual_memory::create(len, unsafe { read_input(wanted) }?, flags)?;
        // SAFETY: the caller passes valid pointers, as the driver API requires.
        unsafe { write_output(handle, created) }
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemRelease(handle: CUmemGenericAllocationHandle) -> CUresult {
    to_result(|| virtual_memory::release(handle))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemExportToShareableHandle(
    shared: *mut c_void,
    handle: CUmemGenericAllocationHandle,
    kind: c_uint,
    flags: c_ulonglong,
) -> CUresult {
    to_result(|| {
        let descriptor = virtual_memory::export(handle, kind, flags)?;
        // SAFETY: for this kind of handle, the caller passes a pointer to an `int`, as the driver API requires.
        unsafe { write_output(shared.cast::<c_int>(), descriptor.as_raw_fd()) }?;
        // The caller owns the descriptor from now on.
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
    // SAFETY: the caller passes a valid pointer, as the driver API requires.
    to_result(|| unsafe { write_output(handle, virtual_memory::import(shared.addr(), kind)?) })
}

/// Ignores the address that the caller would like. The real driver treats it as a hint too.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAddressReserve(
    pointer: *mut CUdeviceptr,
    len: usize,
    alignment: usize,
    _wanted: CUdeviceptr,
    flags: c_ulonglong,
) -> CUresult {
    // SAFETY: the caller passes a valid pointer, as the driver API requires.
    to_result(|| unsafe { write_output(pointer, virtual_memory::reserve(len, alignment, flags)?) })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemAddressFree(pointer: CUdeviceptr, len: usize) -> CUresult {
    to_result(|| virtual_memory::free(pointer, len))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemMap(
    pointer: CUdeviceptr,
    len: usize,
    offset: usize,
    handle: CUmemGenericAllocationHandle,
    flags: c_ulonglong,
) -> CUresult {
    to_result(|| virtual_memory::map(pointer, len, offset, handle, flags))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemUnmap(pointer: CUdeviceptr, len: usize) -> CUresult {
    to_result(|| {
        stream::synchronize_all();
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
    to_result(|| {
        if wanted.is_null() || count == 0 {
            return Err(Code::InvalidValue);
        }
        // SAFETY: the caller passes `count` descriptors, as the driver API requires, and the pointer is not null.
        let wanted = unsafe { std::slice::from_raw_parts(wanted, count) };
        virtual_memory::set_access(pointer, len, wanted)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuIpcGetMemHandle(
    handle: *mut CUipcMemHandle,
    pointer: CUdeviceptr,
) -> CUresult {
    // SAFETY: the caller passes a valid pointer, as the driver API requires.
    to_result(|| unsafe { write_output(handle, ipc::handle(pointer)?) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuIpcOpenMemHandle_v2(
    pointer: *mut CUdeviceptr,
    handle: CUipcMemHandle,
    flags: c_uint,
) -> CUresult {
    // SAFETY: the caller passes a valid pointer, as the driver API requires.
    to_result(|| unsafe { write_output(pointer, ipc::open(&handle, flags)?) })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuIpcCloseMemHandle(pointer: CUdeviceptr) -> CUresult {
    to_result(|| {
        stream::synchronize_all();
        ipc::close(pointer)
    })
}

/// Returns the number of bytes of a device that this process has created or imported, and not released.
///
/// Not a function of the real driver.
#[unsafe(no_mangle)]
pub extern "C" fn tssd_fake_cuda_memory(device: CUdevice) -> u64 {
    device_memory::device_bytes(device)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemGetAddressRange_v2(
    base: *mut CUdeviceptr,
    len: *mut usize,
    pointer: CUdeviceptr,
) -> CUresult {
    to_result(|| {
        let (start, all) = memory::allocation(pointer)?;
        // SAFETY: the caller passes valid pointers, as the driver API requires.
        unsafe { write_output(base, start) }?;
        // SAFETY: the caller passes valid pointers, as the driver API requires.
        unsafe { write_output(len, all) }
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
    to_result(|| {
        let device = memory::device(pointer)?;
        let found = match attribute {
            MEMORY_TYPE => DEVICE,
            DEVICE_ORDINAL => device,
            _ => return Err(Code::InvalidValue),
        };
        // SAFETY: both attributes are of type `int`, for which the caller passes a valid pointer, as the driver API
        // requires.
        unsafe { write_output(value.cast(), found) }
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemHostRegister_v2(start: *mut c_void, len: usize, flags: c_uint) -> CUresult {
    to_result(|| memory::register(start.addr(), len, flags))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemHostUnregister(start: *mut c_void) -> CUresult {
    to_result(|| {
        stream::synchronize_all();
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
    to_result(|| {
        stream::copy(stream, CopyAddress::Host(target.addr()), CopyAddress::Device(source), len)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyHtoDAsync_v2(
    target: CUdeviceptr,
    source: *const c_void,
    len: usize,
    stream: CUstream,
) -> CUresult {
    to_result(|| {
        stream::copy(stream, CopyAddress::Device(target), CopyAddress::Host(source.addr()), len)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyDtoDAsync_v2(
    target: CUdeviceptr,
    source: CUdeviceptr,
    len: usize,
    stream: CUstream,
) -> CUresult {
    to_result(|| {
        stream::copy(stream, CopyAddress::Device(target), CopyAddress::Device(source), len)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyDtoH_v2(
    target: *mut c_void,
    source: CUdeviceptr,
    len: usize,
) -> CUresult {
    to_result(|| {
        stream::copy(
            std::ptr::null_mut(),
            CopyAddress::Host(target.addr()),
            CopyAddress::Device(source),
            len,
        )?;
        stream::synchronize(std::ptr::null_mut())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyHtoD_v2(
    target: CUdeviceptr,
    source: *const c_void,
    len: usize,
) -> CUresult {
    to_result(|| {
        stream::copy(
            std::ptr::null_mut(),
            CopyAddress::Device(target),
            CopyAddress::Host(source.addr()),
            len,
        )?;
        stream::synchronize(std::ptr::null_mut())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpy2DAsync_v2(
    copy: *const CUDA_MEMCPY2D,
    stream: CUstream,
) -> CUresult {
    to_result(|| {
        // SAFETY: the caller passes a valid pointer, as the driver API requires.
        let (rows, len) = unsafe { read_input(copy) }?.rows()?;
        stream::copy_rows(stream, &rows, len)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpy3DAsync_v2(
    copy: *const CUDA_MEMCPY3D,
    stream: CUstream,
) -> CUresult {
    to_result(|| {
        // SAFETY: the caller passes a valid pointer, as the driver API requires.
        let (rows, len) = unsafe { read_input(copy) }?.rows()?;
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
    to_result(|| stream::fill(stream, target, byte, len))
}

/// Returns the number of bytes copied from and to registered or other host memory.
///
/// Not a function of the real driver.
#[unsafe(no_mangle)]
pub extern "C" fn tssd_fake_cuda_copied(is_registered: bool) -> u64 {
    let bytes = &stream::COPIED_BYTES[usize::from(!is_registered)];
    bytes.load(std::sync::atomic::Ordering::Relaxed)
}

/// Returns the number of events created. Not a function of the real driver.
#[unsafe(no_mangle)]
pub extern "C" fn tssd_fake_cuda_events() -> u64 {
    stream::EVENTS_MADE.load(std::sync::atomic::Ordering::Relaxed)
}

/// Returns the number of copies. Not a function of the real driver.
#[unsafe(no_mangle)]
pub extern "C" fn tssd_fake_cuda_copies() -> u64 {
    stream::COPIES.load(std::sync::atomic::Ordering::Relaxed)
}

/// Returns the number of waits for a stream or an event. Not a function of the real driver.
#[unsafe(no_mangle)]
pub extern "C" fn tssd_fake_cuda_waits() -> u64 {
    stream::WAITS.load(std::sync::atomic::Ordering::Relaxed)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamCreate(stream: *mut CUstream, _flags: c_uint) -> CUresult {
    // SAFETY: the caller passes a valid pointer, as the driver API requires.
    to_result(|| unsafe { write_output(stream, stream::create()?) })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamDestroy_v2(stream: CUstream) -> CUresult {
    to_result(|| stream::destroy(stream))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamQuery(stream: CUstream) -> CUresult {
    to_result(|| stream::query(stream))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamSynchronize(stream: CUstream) -> CUresult {
    to_result(|| stream::synchronize(stream))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamWaitEvent(stream: CUstream, event: CUevent, _flags: c_uint) -> CUresult {
    to_result(|| stream::wait(stream, event))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuLaunchHostFunc(
    stream: CUstream,
    function: CUhostFn,
    data: *mut c_void,
) -> CUresult {
    to_result(|| stream::call(stream, function, data))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventCreate(event: *mut CUevent, _flags: c_uint) -> CUresult {
    // SAFETY: the caller passes a valid pointer, as the driver API requires.
    to_result(|| unsafe { write_output(event, stream::create_event()?) })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventRecord(event: CUevent, stream: CUstream) -> CUresult {
    to_result(|| stream::record(event, stream))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventQuery(event: CUevent) -> CUresult {
    to_result(|| stream::query_event(event))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventSynchronize(event: CUevent) -> CUresult {
    to_result(|| stream::synchronize_event(event))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventDestroy_v2(event: CUevent) -> CUresult {
    to_result(|| stream::destroy_event(event))
}
