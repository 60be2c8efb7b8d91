//! Streams: each has a thread, which does what it is given in turn, some time later.
#![expect(unsafe_code, reason = "functions of callers are called here")]

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{self, SyncSender};
use std::sync::{Arc, Condvar, LazyLock, Mutex, PoisonError};
use std::time::Duration;

use crate::held;
use crate::memory::{self, Place, Side};
use crate::result::Code;

/// A moment that comes.
#[derive(Default)]
struct Moment {
    has_come: Mutex<bool>,
    came: Condvar,
}

impl Moment {
    fn come(&self) {
        *held(&self.has_come) = true;
        self.came.notify_all();
    }

    fn wait(&self) {
        let waited = self.came.wait_while(held(&self.has_come), |has_come| !*has_come);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }

    fn has_come(&self) -> bool {
        *held(&self.has_come)
    }
}

/// A function of a caller's.
pub(crate) type Function = unsafe extern "C" fn(*mut c_void);

/// Bytes that are copied, in one piece on both sides.
struct Piece {
    target: Place,
    source: Place,
    len: usize,
}

enum Work {
    Copy(Vec<Piece>),
    Fill { pieces: Vec<(Place, usize)>, byte: u8 },
    Call { function: Function, data: usize },
    Wait(Arc<Moment>),
    Come(Arc<Moment>),
}

/// How much a stream is given that it has not done: then who gives more waits.
const LONGEST: usize = 1024;

/// Streams by their handles; the default one has the handle 0.
static STREAMS: LazyLock<Mutex<BTreeMap<usize, SyncSender<Work>>>> =
    LazyLock::new(|| Mutex::new(BTreeMap::from([(0, start())])));

/// Events by their handles, each with the moment that it was recorded for last.
static EVENTS: Mutex<BTreeMap<usize, Option<Arc<Moment>>>> = Mutex::new(BTreeMap::new());

/// Handles of events that are no more: the next ones have them again.
static GONE: Mutex<Vec<usize>> = Mutex::new(Vec::new());

static NEXT: AtomicUsize = AtomicUsize::new(0xFA4E_0001);

fn handle() -> usize {
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// How long something takes: now this long, now that.
fn delay() -> Duration {
    static LONGEST: LazyLock<u64> = LazyLock::new(|| {
        let longest = std::env::var("TSSD_FAKE_CUDA_DELAY").ok();
        longest.and_then(|longest| longest.parse().ok()).unwrap_or(0)
    });
    static COUNT: AtomicU64 = AtomicU64::new(1);
    let mixed = COUNT.fetch_add(1, Ordering::Relaxed).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    Duration::from_micros((mixed >> 32) % (*LONGEST + 1))
}

fn start() -> SyncSender<Work> {
    let (sender, works) = mpsc::sync_channel::<Work>(LONGEST);
    std::thread::spawn(move || {
        for work in works {
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
                    // SAFETY: it is the caller's, who has given it for this, with these data.
                    unsafe { function(std::ptr::with_exposed_provenance_mut(data)) };
                }
                Work::Wait(moment) => moment.wait(),
                Work::Come(moment) => moment.come(),
            }
        }
    });
    sender
}

fn give(stream: *mut c_void, work: Work) -> Result<(), Code> {
    let sender = held(&STREAMS).get(&stream.addr()).cloned().ok_or(Code::InvalidHandle)?;
    sender.send(work).map_err(|_| Code::InvalidHandle)
}

pub(crate) fn create() -> Result<*mut c_void, Code> {
    crate::context::device()?;
    let handle = handle();
    held(&STREAMS).insert(handle, start());
    Ok(std::ptr::without_provenance_mut(handle))
}

pub(crate) fn destroy(stream: *mut c_void) -> Result<(), Code> {
    // What it was given is done all the same.
    held(&STREAMS).remove(&stream.addr()).map(drop).ok_or(Code::InvalidHandle)
}

/// How many bytes were copied from and to memory of the host that is registered, and that is not.
pub(crate) static COPIED: [AtomicU64; 2] = [AtomicU64::new(0), AtomicU64::new(0)];

/// How often somebody has copied, and waited, and how many events were made.
pub(crate) static COPIES: AtomicU64 = AtomicU64::new(0);
pub(crate) static WAITED: AtomicU64 = AtomicU64::new(0);
pub(crate) static EVENTS_MADE: AtomicU64 = AtomicU64::new(0);

pub(crate) fn copy(
    stream: *mut c_void,
    target: Side,
    source: Side,
    len: usize,
) -> Result<(), Code> {
    copy_rows(stream, &[(target, source)], len)
}

/// Copies rows, each to where it belongs; all of them are that long.
pub(crate) fn copy_rows(
    stream: *mut c_void,
    rows: &[(Side, Side)],
    len: usize,
) -> Result<(), Code> {
    let device = crate::context::device()?;
    let mut pieces = Vec::new();
    for (target, source) in rows {
        let mut done = 0;
        loop {
            let (target, piece) = target.after(done)?.place(device, len - done)?;
            let (source, piece) = source.after(done)?.place(device, piece)?;
            pieces.push(Piece { target, source, len: piece });
            done += piece;
            if done == len {
                break;
            }
        }
    }
    for side in rows.iter().flat_map(|(target, source)| [target, source]) {
        if let Side::Host(start) = side {
            let counted = usize::from(!memory::is_registered(*start, len));
            COPIED[counted].fetch_add(len as u64, Ordering::Relaxed);
        }
    }
    COPIES.fetch_add(1, Ordering::Relaxed);
    give(stream, Work::Copy(pieces))
}

pub(crate) fn fill(stream: *mut c_void, target: u64, byte: u8, len: usize) -> Result<(), Code> {
    let device = crate::context::device()?;
    let mut pieces = Vec::new();
    let mut done = 0;
    while done < len {
        let found = Side::Device(target).after(done)?.place(device, len - done)?;
        done += found.1;
        pieces.push(found);
    }
    give(stream, Work::Fill { pieces, byte })
}

pub(crate) fn call(
    stream: *mut c_void,
    function: Option<Function>,
    data: *mut c_void,
) -> Result<(), Code> {
    crate::context::device()?;
    let function = function.ok_or(Code::InvalidValue)?;
    give(stream, Work::Call { function, data: data.expose_provenance() })
}

/// The moment at which a stream has done what it was given until now.
fn now(stream: *mut c_void) -> Result<Arc<Moment>, Code> {
    let moment = Arc::new(Moment::default());
    give(stream, Work::Come(moment.clone()))?;
    Ok(moment)
}

pub(crate) fn settle(stream: *mut c_void) -> Result<(), Code> {
    WAITED.fetch_add(1, Ordering::Relaxed);
    now(stream)?.wait();
    Ok(())
}

pub(crate) fn settle_all() {
    let handles: Vec<usize> = held(&STREAMS).keys().copied().collect();
    for handle in handles {
        // One may be destroyed meanwhile.
        let _ = settle(std::ptr::without_provenance_mut(handle));
    }
}

pub(crate) fn query(stream: *mut c_void) -> Result<(), Code> {
    let moment = now(stream)?;
    if moment.has_come() { Ok(()) } else { Err(Code::NotReady) }
}

pub(crate) fn create_event() -> Result<*mut c_void, Code> {
    crate::context::device()?;
    EVENTS_MADE.fetch_add(1, Ordering::Relaxed);
    let handle = held(&GONE).pop().unwrap_or_else(handle);
    held(&EVENTS).insert(handle, None);
    Ok(std::ptr::without_provenance_mut(handle))
}

pub(crate) fn record(event: *mut c_void, stream: *mut c_void) -> Result<(), Code> {
    let moment = now(stream)?;
    let mut events = held(&EVENTS);
    *events.get_mut(&event.addr()).ok_or(Code::InvalidHandle)? = Some(moment);
    Ok(())
}

/// One that was never recorded has come.
fn moment(event: *mut c_void) -> Result<Option<Arc<Moment>>, Code> {
    held(&EVENTS).get(&event.addr()).cloned().ok_or(Code::InvalidHandle)
}

pub(crate) fn wait(stream: *mut c_void, event: *mut c_void) -> Result<(), Code> {
    match moment(event)? {
        Some(moment) => give(stream, Work::Wait(moment)),
        None => Ok(()),
    }
}

pub(crate) fn query_event(event: *mut c_void) -> Result<(), Code> {
    let has_come = moment(event)?.is_none_or(|moment| moment.has_come());
    if has_come { Ok(()) } else { Err(Code::NotReady) }
}

pub(crate) fn settle_event(event: *mut c_void) -> Result<(), Code> {
    WAITED.fetch_add(1, Ordering::Relaxed);
    if let Some(moment) = moment(event)? {
        moment.wait();
    }
    Ok(())
}

pub(crate) fn destroy_event(event: *mut c_void) -> Result<(), Code> {
    held(&EVENTS).remove(&event.addr()).ok_or(Code::InvalidHandle)?;
    held(&GONE).push(event.addr());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{cuCtxSetCurrent, cuLaunchHostFunc, cuStreamSynchronize};

    unsafe extern "C" fn add(data: *mut c_void) {
        // SAFETY: it is the test's number, which is there until the stream has done this.
        let number = unsafe { &*data.cast::<AtomicU64>() };
        number.fetch_add(1, Ordering::Relaxed);
    }

    #[test]
    fn functions_are_called_with_their_data() {
        let (number, stream) = (AtomicU64::new(1), std::ptr::null_mut());
        let data = (&raw const number).cast_mut().cast();
        assert_eq!(cuCtxSetCurrent(crate::context::of(0).unwrap()), 0);
        assert_eq!(cuLaunchHostFunc(stream, Some(add), data), 0);
        assert_eq!(cuLaunchHostFunc(stream, Some(add), data), 0);
        assert_eq!(cuStreamSynchronize(stream), 0);
        assert_eq!(number.into_inner(), 3);
        assert_eq!(cuLaunchHostFunc(stream, None, std::ptr::null_mut()), 1);
    }
}
