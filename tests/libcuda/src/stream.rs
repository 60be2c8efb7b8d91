//! Streams: each has a thread, which does what it is given in turn, some time later.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Condvar, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

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

enum Work {
    Copy { target: Place, source: Place, len: usize },
    Wait(Arc<Moment>),
    Come(Arc<Moment>),
}

/// Streams by their handles; the default one has the handle 0.
static STREAMS: LazyLock<Mutex<BTreeMap<usize, Sender<Work>>>> =
    LazyLock::new(|| Mutex::new(BTreeMap::from([(0, start())])));

/// Events by their handles, each with the moment that it was recorded for last.
static EVENTS: Mutex<BTreeMap<usize, Option<Arc<Moment>>>> = Mutex::new(BTreeMap::new());

static NEXT: AtomicUsize = AtomicUsize::new(0xFA4E_0001);

fn held<T>(all: &Mutex<T>) -> MutexGuard<'_, T> {
    all.lock().unwrap_or_else(PoisonError::into_inner)
}

fn handle() -> (usize, *mut c_void) {
    let handle = NEXT.fetch_add(1, Ordering::Relaxed);
    (handle, std::ptr::without_provenance_mut(handle))
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

fn start() -> Sender<Work> {
    let (sender, works) = mpsc::channel::<Work>();
    std::thread::spawn(move || {
        for work in works {
            match work {
                Work::Copy { target, source, len } => {
                    std::thread::sleep(delay());
                    memory::copy(&target, &source, len);
                }
                Work::Wait(moment) => moment.wait(),
                Work::Come(moment) => moment.come(),
            }
        }
    });
    sender
}

fn give(stream: *mut c_void, work: Work) -> Result<(), Code> {
    let streams = held(&STREAMS);
    let sender = streams.get(&stream.addr()).ok_or(Code::InvalidHandle)?;
    sender.send(work).map_err(|_| Code::InvalidHandle)
}

pub(crate) fn create() -> Result<*mut c_void, Code> {
    crate::context::device()?;
    let (number, handle) = handle();
    held(&STREAMS).insert(number, start());
    Ok(handle)
}

pub(crate) fn destroy(stream: *mut c_void) -> Result<(), Code> {
    // What it was given is done all the same.
    held(&STREAMS).remove(&stream.addr()).map(drop).ok_or(Code::InvalidHandle)
}

/// How many bytes were copied from and to memory of the host that is registered, and that is not.
pub(crate) static COPIED: [AtomicU64; 2] = [AtomicU64::new(0), AtomicU64::new(0)];

pub(crate) fn copy(
    stream: *mut c_void,
    target: Side,
    source: Side,
    len: usize,
) -> Result<(), Code> {
    crate::context::device()?;
    for side in [target, source] {
        if let Side::Host(start) = side {
            let counted = usize::from(!memory::is_registered(start, len));
            COPIED[counted].fetch_add(len as u64, Ordering::Relaxed);
        }
    }
    let (target, source) = (target.place(len)?, source.place(len)?);
    give(stream, Work::Copy { target, source, len })
}

/// The moment at which a stream has done what it was given until now.
fn now(stream: *mut c_void) -> Result<Arc<Moment>, Code> {
    let moment = Arc::new(Moment::default());
    give(stream, Work::Come(moment.clone()))?;
    Ok(moment)
}

pub(crate) fn settle(stream: *mut c_void) -> Result<(), Code> {
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
    let (number, handle) = handle();
    held(&EVENTS).insert(number, None);
    Ok(handle)
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
    if let Some(moment) = moment(event)? {
        moment.wait();
    }
    Ok(())
}

pub(crate) fn destroy_event(event: *mut c_void) -> Result<(), Code> {
    held(&EVENTS).remove(&event.addr()).map(drop).ok_or(Code::InvalidHandle)
}
