//! The functions of the driver that are called, as safe as they can be made.
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

/// What is called here: without one of them the driver is too old.
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

/// What this machine lacks.
fn no_cuda(text: impl fmt::Display) -> Error {
    Error::new(ErrorKind::Unsupported, format_args!("no CUDA: {text}"))
}

/// A call of the driver that has failed.
pub(crate) fn failed(doing: impl fmt::Display, error: DriverError) -> Error {
    Error::new(ErrorKind::Io, format_args!("CUDA: {doing}: {error}"))
}

/// Loads the driver, once.
///
/// # Errors
///
/// `Unsupported` if there is none, or no device.
pub(crate) fn load() -> Result<()> {
    static LOADED: OnceLock<Result<(), String>> = OnceLock::new();
    LOADED.get_or_init(find).clone().map_err(no_cuda)
}

fn find() -> Result<(), String> {
    // SAFETY: to load it runs what it does at first; it is the driver's library by its name.
    if !unsafe { sys::is_culib_present() } {
        return Err("there is no driver here (libcuda.so.1)".to_owned());
    }
    has(&SYMBOLS)?;
    result::init().map_err(|error| error.to_string())
}

/// Whether the driver, which must be there, has all these functions; or which one it lacks.
pub(crate) fn has(symbols: &[&str]) -> Result<(), String> {
    for symbol in symbols {
        // SAFETY: it was there a moment ago.
        let library = unsafe { sys::culib() };
        // SAFETY: what is found is not called, only looked for.
        let found = unsafe { library.get::<*const c_void>(symbol.as_bytes()) };
        found.map_err(|_| format!("the driver is too old: it has no {symbol}"))?;
    }
    Ok(())
}

/// The context of a device that everybody in the process shares: torch's too. It stays as long as the process.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Context(sys::CUcontext);

// SAFETY: a context may be made current on any thread, on several at once.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    /// That of a device, which may take a second the first time.
    pub(crate) fn of(device: sys::CUdevice) -> Result<Self, DriverError> {
        // SAFETY: `device` was given by the driver.
        unsafe { result::primary_ctx::retain(device) }.map(Self)
    }

    /// Makes it this thread's, until the guard is dropped: whatever the caller has chosen is so again then. Meanwhile
    /// nobody minds what is called here: others may be capturing a graph, which forbids waiting to all threads that have
    /// not said that they know what they do.
    pub(crate) fn enter(self) -> Result<Entered> {
        // SAFETY: it was retained, and never is released.
        let entered = unsafe { sys::cuCtxPushCurrent_v2(self.0) }.result();
        entered.map_err(|error| failed("a context", error))?;
        let mut capture = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: there is room for a mode, which comes back below.
        let exchanged = unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut capture) };
        let capture = exchanged.result().ok().map(|()| capture);
        Ok(Entered { capture, _thread: PhantomData })
    }
}

/// A context is this thread's.
pub(crate) struct Entered {
    /// What it minded before.
    capture: Option<sys::CUstreamCaptureMode>,
    _thread: PhantomData<*const ()>,
}

impl Drop for Entered {
    fn drop(&mut self) {
        if let Some(mut capture) = self.capture {
            // SAFETY: there is room for a mode.
            let _ = unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut capture) };
        }
        let mut context = std::ptr::null_mut();
        // SAFETY: this thread has pushed it, and there is room for one.
        let _ = unsafe { sys::cuCtxPopCurrent_v2(&raw mut context) };
    }
}

/// How many moments there were.
static MOMENTS: AtomicU64 = AtomicU64::new(0);

/// A moment in the work that a device is given.
pub(crate) struct Event {
    context: Context,
    raw: sys::CUevent,
    /// Which of all moments it is: no other one has this number, whatever the driver calls the event.
    number: AtomicU64,
}

// SAFETY: events are the process's, not a thread's.
unsafe impl Send for Event {}
// SAFETY: as above; the driver takes calls about one event from several threads.
unsafe impl Sync for Event {}

impl Event {
    /// What a stream of somebody's has been given until now.
    ///
    /// # Safety
    ///
    /// The stream must be one of this context.
    pub(crate) unsafe fn now(context: Context, stream: sys::CUstream) -> Result<Self> {
        let _entered = context.enter()?;
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING;
        let raw = result::event::create(flags).map_err(|error| failed("an event", error))?;
        let event = Self { context, raw, number: AtomicU64::new(0) };
        // SAFETY: as the caller says.
        unsafe { event.record(stream)? };
        Ok(event)
    }

    /// Moves it to what the stream has been given until now. Who waits for it already waits for what it was.
    ///
    /// # Safety
    ///
    /// The stream must be one of its context.
    pub(crate) unsafe fn move_to_now(&self, stream: sys::CUstream) -> Result<()> {
        let _entered = self.context.enter()?;
        // SAFETY: as the caller says.
        unsafe { self.record(stream) }
    }

    /// # Safety
    ///
    /// The stream must be one of its context, which is this thread's.
    unsafe fn record(&self, stream: sys::CUstream) -> Result<()> {
        // SAFETY: the event was made here, and the stream is as the caller says.
        let recorded = unsafe { result::event::record(self.raw, stream) };
        recorded.map_err(|error| failed("an event", error))?;
        // Afterwards: whoever finds the number waits for this moment.
        self.number.store(MOMENTS.fetch_add(1, Ordering::Relaxed) + 1, Ordering::Release);
        Ok(())
    }

    /// Waits for it.
    pub(crate) fn wait(&self) -> Result<()> {
        let _entered = self.context.enter()?;
        // SAFETY: it was made here.
        let come = unsafe { result::event::synchronize(self.raw) };
        come.map_err(|error| failed("copies", error))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Ok(_entered) = self.context.enter() {
            // SAFETY: it was made here and is not looked at again; what waits for it goes on all the same.
            let _ = unsafe { result::event::destroy(self.raw) };
        }
    }
}

/// A stream of this library's own, on which copies are made.
pub(crate) struct Lane {
    context: Context,
    raw: sys::CUstream,
    /// The number of the moment that what comes next waits for already.
    behind: Cell<u64>,
    /// Whether something may be on its way.
    is_busy: Cell<bool>,
}

// SAFETY: streams are the process's, not a thread's.
unsafe impl Send for Lane {}

impl Lane {
    pub(crate) fn new(context: Context) -> Result<Self> {
        let _entered = context.enter()?;
        let kind = result::stream::StreamKind::NonBlocking;
        let raw = result::stream::create(kind).map_err(|error| failed("a stream", error))?;
        Ok(Self { context, raw, behind: Cell::default(), is_busy: Cell::default() })
    }

    /// What is copied from now on waits for an event.
    pub(crate) fn wait(&self, event: &Event) -> Result<()> {
        // Most tensors of a state dict wait for one. If it moves meanwhile, it is waited for once more.
        let number = event.number.load(Ordering::Acquire);
        if self.behind.get() == number {
            return Ok(());
        }
        self.is_busy.set(true);
        let _entered = self.context.enter()?;
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: both are there.
        let waited = unsafe { result::stream::wait_event(self.raw, event.raw, flags) };
        waited.map_err(|error| failed("an event", error))?;
        self.behind.set(number);
        Ok(())
    }

    /// Copies memory of the device to the host's; returns when it is there.
    ///
    /// # Safety
    ///
    /// From `source` on so many bytes must be memory of the device, which is not freed meanwhile.
    pub(crate) unsafe fn read(&self, target: &mut [u8], source: u64) -> Result<()> {
        // SAFETY: the source is as the caller says; the target is borrowed until the stream has done with it, below.
        let begun = unsafe { self.start_read(target, source) };
        // Whatever has become of the copy, nobody writes there any more once this has returned.
        self.finish().and(begun)
    }

    /// Copies memory of the host to the device's; returns when it is there.
    ///
    /// # Safety
    ///
    /// From `target` on so many bytes must be memory of the device, which is not freed or used meanwhile.
    pub(crate) unsafe fn write(&self, target: u64, source: &[u8]) -> Result<()> {
        // SAFETY: the target is as the caller says; the source is borrowed until the stream has done with it, below.
        let begun = unsafe { self.start_write(target, source) };
        self.finish().and(begun)
    }
}

/// Work that is begun and not waited for. What it reads and writes must be there until [`Lane::finish`] has returned.
impl Lane {
    /// Begins to copy runs of bytes to the memory of a device.
    ///
    /// # Safety
    ///
    /// All runs, counted from `target` on, must be memory of devices, and from `source` on what that says; none of it may be
    /// freed before [`Lane::finish`] has returned, and until then nobody may write what is read, nor use what is written.
    pub(crate) unsafe fn start_runs(&self, target: u64, source: Source, runs: &Runs) -> Result<()> {
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
            let (source, target) = (source.after(source_at), target + target_at);
            let is_pitch = |stride: u64| (run..=MAX_PITCH).contains(&stride);
            if rows.count > 1 && is_pitch(rows.source_stride) && is_pitch(rows.target_stride) {
                let copy = rows_of(target, source, run, rows);
                // SAFETY: all rows are as the caller says; the description is read before this returns.
                let at_once = unsafe { sys::cuMemcpy2DAsync_v2(&raw const copy, self.raw) };
                // Some pitches a driver does not take at once.
                if at_once != sys::CUresult::CUDA_ERROR_INVALID_VALUE {
                    begin(&|| at_once);
                    return;
                }
            }
            for row in 0..rows.count {
                let target = target + row * rows.target_stride;
                begin(&|| match source.after(row * rows.source_stride) {
                    // SAFETY: as above.
                    Source::Device(source) => unsafe {
                        sys::cuMemcpyDtoDAsync_v2(target, source, native(run), self.raw)
                    },
                    // SAFETY: as above.
                    Source::Host(source) => unsafe {
                        sys::cuMemcpyHtoDAsync_v2(target, source.cast(), native(run), self.raw)
                    },
                });
            }
        });
        let all = runs.total_bytes();
        begun.result().map_err(|error| failed(format_args!("a copy of {all} bytes"), error))
    }

    /// Begins to copy memory of the device to the host's.
    ///
    /// # Safety
    ///
    /// As [`Lane::start_runs`], for so many bytes from `source` on; `target` must be there as long, and nobody's else.
    pub(crate) unsafe fn start_read(&self, target: &mut [u8], source: u64) -> Result<()> {
        self.is_busy.set(true);
        let _entered = self.context.enter()?;
        // SAFETY: as the caller says.
        let begun = unsafe { result::memcpy_dtoh_async(target, source, self.raw) };
        begun.map_err(|error| failed(format_args!("a copy of {} bytes", target.len()), error))
    }

    /// Begins to copy memory of the host to the device's.
    ///
    /// # Safety
    ///
    /// As [`Lane::start_runs`], for so many bytes from `target` on; `source` must be there as long.
    pub(crate) unsafe fn start_write(&self, target: u64, source: &[u8]) -> Result<()> {
        self.is_busy.set(true);
        let _entered = self.context.enter()?;
        // SAFETY: as the caller says.
        let begun = unsafe { result::memcpy_htod_async(target, source, self.raw) };
        begun.map_err(|error| failed(format_args!("a copy of {} bytes", source.len()), error))
    }

    /// What was begun until now.
    pub(crate) fn begun(&self) -> Result<Event> {
        // SAFETY: the stream is one of this context.
        unsafe { Event::now(self.context, self.raw) }
    }

    /// Waits for all that was begun.
    pub(crate) fn finish(&self) -> Result<()> {
        if !self.is_busy.get() {
            return Ok(());
        }
        let _entered = self.context.enter()?;
        // SAFETY: the stream is there.
        let done = unsafe { result::stream::synchronize(self.raw) };
        done.map_err(|error| failed("copies", error))?;
        self.is_busy.set(false);
        Ok(())
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        if let Ok(_entered) = self.context.enter() {
            // SAFETY: it was made here and is not used again; nothing is on its way on it.
            let _ = unsafe { result::stream::destroy(self.raw) };
        }
    }
}

/// Rows are not farther apart than this for the driver, in bytes (`CU_DEVICE_ATTRIBUTE_MAX_PITCH`).
const MAX_PITCH: u64 = i32::MAX as u64;

/// What is copied from, by where it begins.
#[derive(Clone, Copy)]
pub(crate) enum Source {
    /// Memory of a device.
    Device(u64),
    /// Memory of the host.
    Host(*const u8),
}

impl Source {
    fn after(self, offset: u64) -> Self {
        match self {
            Self::Device(start) => Self::Device(start + offset),
            Self::Host(start) => Self::Host(start.wrapping_add(native(offset))),
        }
    }
}

/// Rows of so many bytes, as the driver is told of them.
fn rows_of(target: u64, source: Source, run: u64, rows: Loop) -> sys::CUDA_MEMCPY2D {
    let (kind, host, device) = match source {
        Source::Device(start) => (sys::CUmemorytype::CU_MEMORYTYPE_DEVICE, std::ptr::null(), start),
        Source::Host(start) => (sys::CUmemorytype::CU_MEMORYTYPE_HOST, start.cast(), 0),
    };
    sys::CUDA_MEMCPY2D {
        srcXInBytes: 0,
        srcY: 0,
        srcMemoryType: kind,
        srcHost: host,
        srcDevice: device,
        srcArray: std::ptr::null_mut(),
        srcPitch: native(rows.source_stride),
        dstXInBytes: 0,
        dstY: 0,
        dstMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
        dstHost: std::ptr::null_mut(),
        dstDevice: target,
        dstArray: std::ptr::null_mut(),
        dstPitch: native(rows.target_stride),
        WidthInBytes: native(run),
        Height: native(rows.count),
    }
}

fn native(bytes: u64) -> usize {
    usize::try_from(bytes).expect("the driver is one of 64 bits")
}

/// `CU_MEMORYTYPE_DEVICE`.
const DEVICE: i32 = 2;

/// Which device a pointer is of; none if it is of no device's memory.
pub(crate) fn device_of(pointer: u64) -> Option<sys::CUdevice> {
    let ordinal = sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL;
    let kind = sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE;
    let ask = |attribute| {
        let mut value: i32 = 0;
        // SAFETY: both attributes are ints, for which there is room; any pointer may be asked about.
        let asked =
            unsafe { sys::cuPointerGetAttribute((&raw mut value).cast(), attribute, pointer) };
        asked.result().ok().map(|()| value)
    };
    (ask(kind)? == DEVICE).then(|| ask(ordinal)).flatten()
}

/// Lets the driver copy from and to host memory without a copy of its own. Says why not.
///
/// # Safety
///
/// The memory must be there until it is [`unpin`]ned.
pub(crate) unsafe fn pin(start: usize, len: usize, is_writable: bool) -> Result<(), String> {
    let address = std::ptr::without_provenance_mut::<c_void>(start);
    let read_only = if is_writable { 0 } else { sys::CU_MEMHOSTREGISTER_READ_ONLY };
    let flags = sys::CU_MEMHOSTREGISTER_PORTABLE | read_only;
    // SAFETY: the memory is there, as the caller says; to register it changes no byte.
    let pinned = unsafe { sys::cuMemHostRegister_v2(address, len, flags) };
    pinned.result().map_err(|error| error.to_string())
}

/// The opposite.
pub(crate) fn unpin(start: usize) {
    let address = std::ptr::without_provenance_mut::<c_void>(start);
    // SAFETY: what is not registered is an error, and no more.
    let _ = unsafe { sys::cuMemHostUnregister(address) };
}
