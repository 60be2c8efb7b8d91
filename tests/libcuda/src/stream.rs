//! Streams: each has a thread that executes its work in order, with delays.
#![expect(unsafe_code, reason = "functions of callers are called here")]

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{self, SyncSender};
use std::sync::{Arc, Condvar, LazyLock, Mutex, PoisonError};
use std::time::Duration;

use crate::lock;
use crate::memory::{self, CopyAddress, ResolvedAddress};
use crate::result::Code;

/// A one-shot notification that a stream has reached a position in its work.
#[derive(Default)]
struct Completion {
    is_complete: Mutex<bool>,
    completed: Condvar,
}

impl Completion {
    fn complete(&self) {
        *lock(&self.is_complete) = true;
        self.completed.notify_all();
    }

    fn wait(&self) {
        let waited =
            self.completed.wait_while(lock(&self.is_complete), |is_complete| !*is_complete);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }

    fn is_complete(&self) -> bool {
        *lock(&self.is_complete)
    }
}

/// A host function of the caller.
pub(crate) type Function = unsafe extern "C" fn(*mut c_void);

/// A copy that is contiguous at both ends.
struct Piece {
    target: ResolvedAddress,
    source: ResolvedAddress,
    len: usize,
}

/// An entry of the work queue of a stream.
enum Work {
    Copy(Vec<Piece>),
    Fill {
        pieces: Vec<(ResolvedAddress, usize)>,
        byte: u8,
    },
    Call {
        function: Function,
        data: usize,
    },
    /// Waits for an event.
    Wait(Arc<Completion>),
    /// Notifies the waiters of an event.
    Complete(Arc<Completion>),
}

/// Maximum length of a work queue. Beyond it, the caller waits.
const QUEUE_CAPACITY: usize = 1024;

/// Work queues of streams, by handle. The default stream has handle 0.
static STREAMS: LazyLock<Mutex<BTreeMap<usize, SyncSender<Work>>>> =
    LazyLock::new(|| Mutex::new(BTreeMap::from([(0, start())])));

/// Events by handle, each with its last recording.
static EVENTS: Mutex<BTreeMap<usize, Option<Arc<Completion>>>> = Mutex::new(BTreeMap::new());

/// Handles of destroyed events, which new events reuse.
static FREE_EVENT_HANDLES: Mutex<Vec<usize>> = Mutex::new(Vec::new());

static NEXT_HANDLE: AtomicUsize = AtomicUsize::new(0xFA4E_0001);

fn new_handle() -> usize {
    NEXT_HANDLE.fetch_add(1, Ordering::Relaxed)
}

/// Returns a varying delay of at most `TSSD_FAKE_CUDA_DELAY` microseconds.
fn delay() -> Duration {
    static MAX_MICROS: LazyLock<u64> = LazyLock::new(|| {
        let max = std::env::var("TSSD_FAKE_CUDA_DELAY").ok();
        max.and_then(|max| max.parse().ok()).unwrap_or(0)
    });
    static COUNT: AtomicU64 = AtomicU64::new(1);
    let mixed = COUNT.fetch_add(1, Ordering::Relaxed).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    Duration::from_micros((mixed >> 32) % (*MAX_MICROS + 1))
}

/// Starts the thread of a stream.
fn start() -> SyncSender<Work> {
    let (sender, queue) = mpsc::sync_channel::<Work>(QUEUE_CAPACITY);
    std::thread::spawn(move || {
        for work in queue {
            match work {
                Work::Copy(pieces) => {
                    std::thread::sleep(delay());
                    for Piece { target, source, len } in pieces {
                        memory::copy(&target, &source, len);
                    }
                }
                Work::Fill { pieces, byte } => {
                    std::thread::sleep(delay());
                    for (target, len) in pieces {
                        memory::fill(&target, byte, len);
                    }
                }
                Work::Call { function, data } => {
                    std::thread::sleep(delay());
                    // SAFETY: the caller passed the function and its data to `cuLaunchHostFunc`, whose contract is
                    // that the function may be called with the data.
                    unsafe { function(std::ptr::with_exposed_provenance_mut(data)) };
                }
                Work::Wait(completion) => completion.wait(),
                Work::Complete(completion) => completion.complete(),
            }
        }
    });
    sender
}

/// Appends work to the queue of a stream.
fn enqueue(stream: *mut c_void, work: Work) -> Result<(), Code> {
    let sender = lock(&STREAMS).get(&stream.addr()).cloned().ok_or(Code::InvalidHandle)?;
    sender.send(work).map_err(|_| Code::InvalidHandle)
}

pub(crate) fn create() -> Result<*mut c_void, Code> {
    crate::context::current_device()?;
    let handle = new_handle();
    lock(&STREAMS).insert(handle, start());
    Ok(std::ptr::without_provenance_mut(handle))
}

pub(crate) fn destroy(stream: *mut c_void) -> Result<(), Code> {
    // The thread executes the remaining work, and then ends.
    lock(&STREAMS).remove(&stream.addr()).map(drop).ok_or(Code::InvalidHandle)
}

/// Number of bytes copied from and to registered host memory, and from and to other host memory.
pub(crate) static COPIED_BYTES: [AtomicU64; 2] = [AtomicU64::new(0), AtomicU64::new(0)];

/// Number of copies.
pub(crate) static COPIES: AtomicU64 = AtomicU64::new(0);
/// Number of waits for streams and events.
pub(crate) static WAITS: AtomicU64 = AtomicU64::new(0);
/// Number of events created.
pub(crate) static EVENTS_MADE: AtomicU64 = AtomicU64::new(0);

pub(crate) fn copy(
    stream: *mut c_void,
    target: CopyAddress,
    source: CopyAddress,
    len: usize,
) -> Result<(), Code> {
    copy_rows(stream, &[(target, source)], len)
}

/// Copies rows of `len` bytes, each from its source to its target.
pub(crate) fn copy_rows(
    stream: *mut c_void,
    rows: &[(CopyAddress, CopyAddress)],
    len: usize,
) -> Result<(), Code> {
    let device = crate::context::current_device()?;
    let mut pieces = Vec::new();
    for (target, source) in rows {
        let mut done = 0;
        loop {
            let (target, piece) = target.offset_by(done)?.resolve(device, len - done)?;
            let (source, piece) = source.offset_by(done)?.resolve(device, piece)?;
            pieces.push(Piece { target, source, len: piece });
            done += piece;
            if done == len {
                break;
            }
        }
    }
    for side in rows.iter().flat_map(|(target, source)| [target, source]) {
        if let CopyAddress::Host(start) = side {
            let counter = usize::from(!memory::is_registered(*start, len));
            COPIED_BYTES[counter].fetch_add(len as u64, Ordering::Relaxed);
        }
    }
    COPIES.fetch_add(1, Ordering::Relaxed);
    enqueue(stream, Work::Copy(pieces))
}

pub(crate) fn fill(stream: *mut c_void, target: u64, byte: u8, len: usize) -> Result<(), Code> {
    let device = crate::context::current_device()?;
    let mut pieces = Vec::new();
    let mut done = 0;
    while done < len {
        let found = CopyAddress::Device(target).offset_by(done)?.resolve(device, len - done)?;
        done += found.1;
        pieces.push(found);
    }
    enqueue(stream, Work::Fill { pieces, byte })
}

pub(crate) fn call(
    stream: *mut c_void,
    function: Option<Function>,
    data: *mut c_void,
) -> Result<(), Code> {
    crate::context::current_device()?;
    let function = function.ok_or(Code::InvalidValue)?;
    enqueue(stream, Work::Call { function, data: data.expose_provenance() })
}

/// Returns a completion of all work that the stream has been given so far.
fn enqueue_completion(stream: *mut c_void) -> Result<Arc<Completion>, Code> {
    let completion = Arc::new(Completion::default());
    enqueue(stream, Work::Complete(completion.clone()))?;
    Ok(completion)
}

/// Waits until a stream has executed all of its work.
pub(crate) fn synchronize(stream: *mut c_void) -> Result<(), Code> {
    WAITS.fetch_add(1, Ordering::Relaxed);
    enqueue_completion(stream)?.wait();
    Ok(())
}

/// Waits until all streams have executed all of their work.
pub(crate) fn synchronize_all() {
    let handles: Vec<usize> = lock(&STREAMS).keys().copied().collect();
    for handle in handles {
        // A stream may be destroyed meanwhile.
        let _ = synchronize(std::ptr::without_provenance_mut(handle));
    }
}

pub(crate) fn query(stream: *mut c_void) -> Result<(), Code> {
    let completion = enqueue_completion(stream)?;
    if completion.is_complete() { Ok(()) } else { Err(Code::NotReady) }
}

pub(crate) fn create_event() -> Result<*mut c_void, Code> {
    crate::context::current_device()?;
    EVENTS_MADE.fetch_add(1, Ordering::Relaxed);
    let handle = lock(&FREE_EVENT_HANDLES).pop().unwrap_or_else(new_handle);
    lock(&EVENTS).insert(handle, None);
    Ok(std::ptr::without_provenance_mut(handle))
}

pub(crate) fn record(event: *mut c_void, stream: *mut c_void) -> Result<(), Code> {
    let completion = enqueue_completion(stream)?;
    let mut events = lock(&EVENTS);
    *events.get_mut(&event.addr()).ok_or(Code::InvalidHandle)? = Some(completion);
    Ok(())
}

/// Returns the last recording of an event. An event that was never recorded counts as complete.
fn last_recording(event: *mut c_void) -> Result<Option<Arc<Completion>>, Code> {
    lock(&EVENTS).get(&event.addr()).cloned().ok_or(Code::InvalidHandle)
}

pub(crate) fn wait(stream: *mut c_void, event: *mut c_void) -> Result<(), Code> {
    match last_recording(event)? {
        Some(completion) => enqueue(stream, Work::Wait(completion)),
        None => Ok(()),
    }
}

pub(crate) fn query_event(event: *mut c_void) -> Result<(), Code> {
    let is_complete = last_recording(event)?.is_none_or(|completion| completion.is_complete());
    if is_complete { Ok(()) } else { Err(Code::NotReady) }
}

/// Waits until the last recording of an event is complete.
pub(crate) fn synchronize_event(event: *mut c_void) -> Result<(), Code> {
    WAITS.fetch_add(1, Ordering::Relaxed);
    if let Some(completion) = last_recording(event)? {
        completion.wait();
    }
    Ok(())
}

pub(crate) fn destroy_event(event: *mut c_void) -> Result<(), Code> {
    lock(&EVENTS).remove(&event.addr()).ok_or(Code::InvalidHandle)?;
    lock(&FREE_EVENT_HANDLES).push(event.addr());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{cuCtxSetCurrent, cuLaunchHostFunc, cuStreamSynchronize};

    unsafe extern "C" fn add(data: *mut c_void) {
        // SAFETY: `data` points to the number of the test, which lives until the stream is synchronized.
        let number = unsafe { &*data.cast::<AtomicU64>() };
        number.fetch_add(1, Ordering::Relaxed);
    }

    #[test]
    fn host_functions_are_called_with_their_data() {
        let (number, stream) = (AtomicU64::new(1), std::ptr::null_mut());
        let data = (&raw const number).cast_mut().cast();
        assert_eq!(cuCtxSetCurrent(crate::context::primary(0).unwrap()), 0);
        assert_eq!(cuLaunchHostFunc(stream, Some(add), data), 0);
        assert_eq!(cuLaunchHostFunc(stream, Some(add), data), 0);
        assert_eq!(cuStreamSynchronize(stream), 0);
        assert_eq!(number.into_inner(), 3);
        assert_eq!(cuLaunchHostFunc(stream, None, std::ptr::null_mut()), 1);
    }
}
