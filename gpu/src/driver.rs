//! Safe wrappers of the functions of the CUDA driver.
#![expect(unsafe_code, reason = "the driver is a library of C")]

use std::cell::Cell;
use std::ffi::c_void;
use std::fmt;
use std::marker::PhantomData;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys;
use tssd_format::{Loop, Runs};

use tssd_store::{Error, ErrorKind, Result};

use crate::convert::to_usize;

/// Functions that this crate always needs. A driver without one of them is too old.
const SYMBOLS: [&str; 28] = [
    "cuCtxPopCurrent_v2",
    "cuCtxPushCurrent_v2",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDeviceGetCount",
    "cuDeviceGetName",
    "cuDeviceGetUuid_v2",
    "cuDevicePrimaryCtxRetain",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuInit",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuMemcpy2DAsync_v2",
    "cuMemcpyDtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuPointerGetAttribute",
    "cuStreamCreate",
    "cuStreamDestroy_v2",
    "cuStreamQuery",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
    "cuThreadExchangeStreamCaptureMode",
];

/// The error of a machine without CUDA.
fn no_cuda(text: impl fmt::Display) -> Error {
    Error::new(ErrorKind::Unsupported, format_args!("no CUDA: {text}"))
}

/// The error of a driver call.
pub(crate) fn driver_error(doing: impl fmt::Display, error: DriverError) -> Error {
    Error::new(ErrorKind::Io, format_args!("CUDA: {doing}: {error}"))
}

/// Loads the driver, once per process.
///
/// # Errors
///
/// `Unsupported` if there is no driver or no device.
pub(crate) fn load() -> Result<()> {
    static LOADED: OnceLock<Result<(), String>> = OnceLock::new();
    LOADED.get_or_init(initialize).clone().map_err(no_cuda)
}

fn initialize() -> Result<(), String> {
    // SAFETY: loading the library runs its initializers. It is the library of the driver, by its name.
    if !unsafe { sys::is_culib_present() } {
        return Err("there is no driver here (libcuda.so.1)".to_owned());
    }
    check_symbols(&SYMBOLS)?;
    result::init().map_err(|error| error.to_string())
}

/// Checks that the loaded driver has all these functions. The error names a missing one.
pub(crate) fn check_symbols(symbols: &[&str]) -> Result<(), String> {
    for symbol in symbols {
        // SAFETY: the library was loaded before.
        let library = unsafe { sys::culib() };
        // SAFETY: the symbol is only looked up, not called.
        let found = unsafe { library.get::<*const c_void>(symbol.as_bytes()) };
        found.map_err(|_| format!("the driver is too old: it has no {symbol}"))?;
    }
    Ok(())
}

/// The primary context of a device, which torch uses too. It exists as long as the process.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Context(sys::CUcontext);

// SAFETY: a context may be current on several threads at once.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    /// Retains the primary context of a device. The first call may take a second.
    pub(crate) fn primary(device: sys::CUdevice) -> Result<Self, DriverError> {
        // SAFETY: the driver returned `device`.
        unsafe { result::primary_ctx::retain(device) }.map(Self)
    }

    /// Makes the context current on this thread. Dropping the guard restores the previous one.
    ///
    /// It also relaxes the stream capture mode of the thread: a graph capture on another thread would otherwise forbid
    /// calls that wait.
    pub(crate) fn enter(self) -> Result<ContextGuard> {
        // SAFETY: the context was retained and is never released.
        let status = unsafe { sys::cuCtxPushCurrent_v2(self.0) }.result();
        status.map_err(|error| driver_error("a context", error))?;
        let mut capture_mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the pointer is valid for a mode. The mode is restored below.
        let exchanged = unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut capture_mode) };
        let capture_mode = exchanged.result().ok().map(|()| capture_mode);
        Ok(ContextGuard { capture_mode, _thread: PhantomData })
    }
}

/// A guard: the context is current on this thread.
pub(crate) struct ContextGuard {
    /// The previous stream capture mode.
    capture_mode: Option<sys::CUstreamCaptureMode>,
    _thread: PhantomData<*const ()>,
}

impl Drop for ContextGuard {
    fn drop(&mut self) {
        if let Some(mut capture_mode) = self.capture_mode {
            // SAFETY: the pointer is valid for a mode.
            let _ = unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut capture_mode) };
        }
        let mut context = std::ptr::null_mut();
        // SAFETY: this thread has pushed the context, and the pointer is valid for one.
        let _ = unsafe { sys::cuCtxPopCurrent_v2(&raw mut context) };
    }
}

/// Number of records of all events.
static RECORDS: AtomicU64 = AtomicU64::new(0);

/// A CUDA event: a point in the work of a stream.
pub(crate) struct Event {
    context: Context,
    raw: sys::CUevent,
    /// Number of its last record: it is unique, even if the driver reuses a handle.
    number: AtomicU64,
}

// SAFETY: events belong to the process, not to a thread.
unsafe impl Send for Event {}
// SAFETY: as above; the driver accepts calls with one event from several threads.
unsafe impl Sync for Event {}

impl Event {
    /// Creates an event after the work that `stream` has been given so far.
    ///
    /// # Safety
    ///
    /// The stream must belong to this context.
    pub(crate) unsafe fn record(context: Context, stream: sys::CUstream) -> Result<Self> {
        let _entered = context.enter()?;
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING;
        let raw = result::event::create(flags).map_err(|error| driver_error("an event", error))?;
        let event = Self { context, raw, number: AtomicU64::new(0) };
        // SAFETY: the caller guarantees the context of the stream.
        unsafe { event.record_raw(stream)? };
        Ok(event)
    }

    /// Records the event again, after the work that `stream` has been given so far.
    ///
    /// Streams that already wait for it keep waiting for the earlier record.
    ///
    /// # Safety
    ///
    /// The stream must belong to the context of the event.
    pub(crate) unsafe fn record_again(&self, stream: sys::CUstream) -> Result<()> {
        let _entered = self.context.enter()?;
        // SAFETY: the caller guarantees the context of the stream.
        unsafe { self.record_raw(stream) }
    }

    /// # Safety
    ///
    /// The stream must belong to the context of the event, which must be current on this thread.
    unsafe fn record_raw(&self, stream: sys::CUstream) -> Result<()> {
        // SAFETY: the event was created here, and the caller guarantees the context of the stream.
        let recorded = unsafe { result::event::record(self.raw, stream) };
        recorded.map_err(|error| driver_error("an event", error))?;
        // Store it after the record: a thread that reads the number then waits for this record.
        self.number.store(RECORDS.fetch_add(1, Ordering::Relaxed) + 1, Ordering::Release);
        Ok(())
    }

    /// Blocks until the work before the event is done.
    pub(crate) fn wait(&self) -> Result<()> {
        let _entered = self.context.enter()?;
        // SAFETY: the event was created here.
        let status = unsafe { result::event::synchronize(self.raw) };
        status.map_err(|error| driver_error("copies", error))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Ok(_entered) = self.context.enter() {
            // SAFETY: the event was created here and is not used again. Streams that wait for it are not affected.
            let _ = unsafe { result::event::destroy(self.raw) };
        }
    }
}

/// A stream of this crate, on which copies run.
pub(crate) struct CopyStream {
    context: Context,
    raw: sys::CUstream,
    /// Number of the event record that the stream waits for already.
    last_wait: Cell<u64>,
    /// Whether work may be in flight.
    is_busy: Cell<bool>,
}

// SAFETY: streams belong to the process, not to a thread.
unsafe impl Send for CopyStream {}

impl CopyStream {
    pub(crate) fn new(context: Context) -> Result<Self> {
        let _entered = context.enter()?;
        let kind = result::stream::StreamKind::NonBlocking;
        let raw = result::stream::create(kind).map_err(|error| driver_error("a stream", error))?;
        Ok(Self { context, raw, last_wait: Cell::default(), is_busy: Cell::default() })
    }

    /// Makes all later work on this stream wait for an event.
    pub(crate) fn wait(&self, event: &Event) -> Result<()> {
        // Most tensors of a state dict wait for the same event. If it is recorded again, the stream waits once more.
        let number = event.number.load(Ordering::Acquire);
        if self.last_wait.get() == number {
            return Ok(());
        }
        self.is_busy.set(true);
        let _entered = self.context.enter()?;
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: both handles exist.
        let status = unsafe { result::stream::wait_event(self.raw, event.raw, flags) };
        status.map_err(|error| driver_error("an event", error))?;
        self.last_wait.set(number);
        Ok(())
    }

    /// Copies device memory to host memory, and returns when the copy is done.
    ///
    /// # Safety
    ///
    /// The `target.len()` bytes at `source` must be device memory, which is not freed during the call.
    pub(crate) unsafe fn read(&self, target: &mut [u8], source: u64) -> Result<()> {
        // SAFETY: the caller guarantees the source. The target is borrowed until the stream is done with it, below.
        let begun = unsafe { self.start_read(target, source) };
        // Wait also after an error: no copy writes to the target after this call.
        self.finish().and(begun)
    }

    /// Copies host memory to device memory, and returns when the copy is done.
    ///
    /// # Safety
    ///
    /// The `source.len()` bytes at `target` must be device memory, which is not freed or used during the call.
    pub(crate) unsafe fn write(&self, target: u64, source: &[u8]) -> Result<()> {
        // SAFETY: the caller guarantees the target. The source is borrowed until the stream is done with it, below.
        let begun = unsafe { self.start_write(target, source) };
        self.finish().and(begun)
    }
}

/// Asynchronous copies. Their sources and targets must exist until [`CopyStream::finish`] has returned.
impl CopyStream {
    /// Begins to copy runs of bytes to device memory.
    ///
    /// # Safety
    ///
    /// All runs, relative to `target`, must be device memory, and relative to `source` the memory that it names. Until
    /// [`CopyStream::finish`] has returned, this memory must not be freed, the sources must not be written, and the targets
    /// must not be used.
    pub(crate) unsafe fn start_runs(
        &self,
        target: u64,
        source: CopySource,
        runs: &Runs,
    ) -> Result<()> {
        self.is_busy.set(true);
        let _entered = self.context.enter()?;
        let mut begun = sys::CUresult::CUDA_SUCCESS;
        let mut begin = |begin: &dyn Fn() -> sys::CUresult| {
            if begun == sys::CUresult::CUDA_SUCCESS {
                begun = begin();
            }
        };
        let run = runs.run_bytes();
        runs.for_each_inner_loop(|source_at, target_at, rows| {
            let (source, target) = (source.offset_by(source_at), target + target_at);
            let is_pitch = |stride: u64| (run..=MAX_PITCH).contains(&stride);
            if rows.count > 1 && is_pitch(rows.source_stride) && is_pitch(rows.target_stride) {
                let copy = rows_of(target, source, run, rows);
                // SAFETY: the caller guarantees all rows. The driver reads the description before the call returns.
                let status = unsafe { sys::cuMemcpy2DAsync_v2(&raw const copy, self.raw) };
                // A driver rejects some pitches: copy the rows one by one.
                if status != sys::CUresult::CUDA_ERROR_INVALID_VALUE {
                    begin(&|| status);
                    return;
                }
            }
            for row in 0..rows.count {
                let target = target + row * rows.target_stride;
                begin(&|| match source.offset_by(row * rows.source_stride) {
                    // SAFETY: as above.
                    CopySource::Device(source) => unsafe {
                        sys::cuMemcpyDtoDAsync_v2(target, source, to_usize(run), self.raw)
                    },
                    // SAFETY: as above.
                    CopySource::Host(source) => unsafe {
                        sys::cuMemcpyHtoDAsync_v2(target, source.cast(), to_usize(run), self.raw)
                    },
                });
            }
        });
        let all = runs.total_bytes();
        begun.result().map_err(|error| driver_error(format_args!("a copy of {all} bytes"), error))
    }

    /// Begins to copy device memory to host memory.
    ///
    /// # Safety
    ///
    /// As [`CopyStream::start_runs`], for `target.len()` bytes at `source`. `target` must exist as long, and must not be
    /// accessed.
    pub(crate) unsafe fn start_read(&self, target: &mut [u8], source: u64) -> Result<()> {
        self.is_busy.set(true);
        let _entered = self.context.enter()?;
        // SAFETY: the caller upholds the same contract.
        let begun = unsafe { result::memcpy_dtoh_async(target, source, self.raw) };
        begun.map_err(|error| driver_error(format_args!("a copy of {} bytes", target.len()), error))
    }

    /// Begins to copy host memory to device memory.
    ///
    /// # Safety
    ///
    /// As [`CopyStream::start_runs`], for `source.len()` bytes at `target`. `source` must exist as long.
    pub(crate) unsafe fn start_write(&self, target: u64, source: &[u8]) -> Result<()> {
        self.is_busy.set(true);
        let _entered = self.context.enter()?;
        // SAFETY: the caller upholds the same contract.
        let begun = unsafe { result::memcpy_htod_async(target, source, self.raw) };
        begun.map_err(|error| driver_error(format_args!("a copy of {} bytes", source.len()), error))
    }

    /// Returns an event after all copies begun so far.
    pub(crate) fn record_event(&self) -> Result<Event> {
        // SAFETY: the stream belongs to this context.
        unsafe { Event::record(self.context, self.raw) }
    }

    /// Waits until all copies are done.
    pub(crate) fn finish(&self) -> Result<()> {
        if !self.is_busy.get() {
            return Ok(());
        }
        let _entered = self.context.enter()?;
        // SAFETY: the stream exists.
        let done = unsafe { result::stream::synchronize(self.raw) };
        done.map_err(|error| driver_error("copies", error))?;
        self.is_busy.set(false);
        Ok(())
    }
}

impl Drop for CopyStream {
    fn drop(&mut self) {
        if let Ok(_entered) = self.context.enter() {
            // SAFETY: the stream was created here and is not used again. No copy is in flight on it.
            let _ = unsafe { result::stream::destroy(self.raw) };
        }
    }
}

/// Maximum distance of two rows in bytes (`CU_DEVICE_ATTRIBUTE_MAX_PITCH`).
const MAX_PITCH: u64 = i32::MAX as u64;

/// The start of the source of a copy.
#[derive(Clone, Copy)]
pub(crate) enum CopySource {
    /// A device address.
    Device(u64),
    /// A host address.
    Host(*const u8),
}

impl CopySource {
    fn offset_by(self, offset: u64) -> Self {
        match self {
            Self::Device(start) => Self::Device(start + offset),
            Self::Host(start) => Self::Host(start.wrapping_add(to_usize(offset))),
        }
    }
}

/// Describes rows of `run` bytes for the driver.
fn rows_of(target: u64, source: CopySource, run: u64, rows: Loop) -> sys::CUDA_MEMCPY2D {
    let (kind, host, device) = match source {
        CopySource::Device(start) => {
            (sys::CUmemorytype::CU_MEMORYTYPE_DEVICE, std::ptr::null(), start)
        }
        CopySource::Host(start) => (sys::CUmemorytype::CU_MEMORYTYPE_HOST, start.cast(), 0),
    };
    sys::CUDA_MEMCPY2D {
        srcXInBytes: 0,
        srcY: 0,
        srcMemoryType: kind,
        srcHost: host,
        srcDevice: device,
        srcArray: std::ptr::null_mut(),
        srcPitch: to_usize(rows.source_stride),
        dstXInBytes: 0,
        dstY: 0,
        dstMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
        dstHost: std::ptr::null_mut(),
        dstDevice: target,
        dstArray: std::ptr::null_mut(),
        dstPitch: to_usize(rows.target_stride),
        WidthInBytes: to_usize(run),
        Height: to_usize(rows.count),
    }
}

/// `CU_MEMORYTYPE_DEVICE`.
const DEVICE: i32 = 2;

/// Returns the device whose memory a pointer points to. Returns none for other memory.
pub(crate) fn device_of(pointer: u64) -> Option<sys::CUdevice> {
    let ordinal = sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL;
    let kind = sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE;
    let query = |attribute| {
        let mut value: i32 = 0;
        // SAFETY: both attributes are ints, for which the pointer is valid. Any pointer may be queried.
        let status =
            unsafe { sys::cuPointerGetAttribute((&raw mut value).cast(), attribute, pointer) };
        status.result().ok().map(|()| value)
    };
    (query(kind)? == DEVICE).then(|| query(ordinal)).flatten()
}

/// Pins host memory, so that the driver copies from and to it by DMA. The error says why it cannot.
///
/// # Safety
///
/// The memory must stay mapped until it is [`unpin`]ned.
pub(crate) unsafe fn pin(start: usize, len: usize, is_writable: bool) -> Result<(), String> {
    let address = std::ptr::without_provenance_mut::<c_void>(start);
    let read_only = if is_writable { 0 } else { sys::CU_MEMHOSTREGISTER_READ_ONLY };
    let flags = sys::CU_MEMHOSTREGISTER_PORTABLE | read_only;
    // SAFETY: the caller guarantees that the memory is mapped. The registration changes no byte.
    let pinned = unsafe { sys::cuMemHostRegister_v2(address, len, flags) };
    pinned.result().map_err(|error| error.to_string())
}

/// Unpins memory that [`pin`] has pinned.
pub(crate) fn unpin(start: usize) {
    let address = std::ptr::without_provenance_mut::<c_void>(start);
    // SAFETY: for memory that is not registered, the call only returns an error.
    let _ = unsafe { sys::cuMemHostUnregister(address) };
}
