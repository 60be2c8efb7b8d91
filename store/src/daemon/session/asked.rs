//! The requests of a connection that are not answered: how many there may be, and which of them nobody waits for any
//! more.

use std::collections::BTreeMap;
use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

use crate::error::{Error, ErrorKind, Result};
use crate::io::sync::{Lock, MutexGuard};

/// How many requests of one connection are worked on at once; the next ones wait.
pub(crate) const REQUESTS: usize = 64;

/// How many more of them wait for others at once; one with data counts as several.
pub(crate) const WAITING: usize = 1024;

/// Who waits and keeps so many bytes is one more.
const PLACE_BYTES: usize = 64 << 10;

/// Those of one connection.
pub(crate) struct Requests {
    /// By their numbers, whether they were taken back.
    cancelled: Lock<BTreeMap<u64, Arc<watch::Sender<bool>>>>,
    working: Arc<Semaphore>,
    waiting: Arc<Semaphore>,
}

/// One of them, until it is answered.
pub(crate) struct Asked {
    pub(crate) number: u64,
    requests: Arc<Requests>,
    cancelled: Arc<watch::Sender<bool>>,
    /// Among those that are worked on, or those that wait.
    place: Lock<OwnedSemaphorePermit>,
}

impl Requests {
    pub(crate) fn new() -> Arc<Self> {
        let [working, waiting] = [REQUESTS, WAITING].map(|many| Arc::new(Semaphore::new(many)));
        Arc::new(Self { cancelled: Lock::default(), working, waiting })
    }

    fn cancelled(&self) -> MutexGuard<'_, BTreeMap<u64, Arc<watch::Sender<bool>>>> {
        self.cancelled.lock()
    }

    /// A request has come; waits until it may be worked on.
    pub(crate) async fn begin(self: &Arc<Self>, number: u64) -> Asked {
        let place = self.working.clone().acquire_owned().await.expect("it is never closed");
        let cancelled = Arc::new(watch::Sender::new(false));
        self.cancelled().insert(number, cancelled.clone());
        Asked { number, requests: self.clone(), cancelled, place: Lock::new(place) }
    }

    /// Nobody waits for the answer of this request, if it has not gone.
    pub(crate) fn cancel(&self, number: u64) {
        if let Some(cancelled) = self.cancelled().get(&number) {
            cancelled.send_replace(true);
        }
    }
}

impl Asked {
    /// It is about to wait for others, some of whom may be asked on this connection: until it is answered it takes the
    /// place of none that is worked on, unless too many wait. It keeps so many bytes of data meanwhile.
    pub(crate) fn wait(&self, bytes: usize) {
        let mut place = self.place.lock();
        if !Arc::ptr_eq(place.semaphore(), &self.requests.waiting) {
            let places = u32::try_from(1 + bytes / PLACE_BYTES).unwrap_or(u32::MAX);
            if let Ok(waiting) = self.requests.waiting.clone().try_acquire_many_owned(places) {
                *place = waiting;
            }
        }
    }

    /// Proves that it was not taken back.
    pub(crate) fn check(&self) -> Result<()> {
        let text = "nobody waits for it any more";
        if self.is_cancelled() { Err(Error::new(ErrorKind::Busy, text)) } else { Ok(()) }
    }

    /// Whether it was taken back.
    pub(crate) fn is_cancelled(&self) -> bool {
        *self.cancelled.borrow()
    }

    /// Returns once it is taken back.
    pub(crate) async fn cancelled(&self) {
        let mut cancelled = self.cancelled.subscribe();
        // Whoever could say it lives as long as this.
        let _ = cancelled.wait_for(|cancelled| *cancelled).await;
    }
}

impl Drop for Asked {
    fn drop(&mut self) {
        let mut all = self.requests.cancelled();
        // Another one may have come to have the same number.
        if all.get(&self.number).is_some_and(|it| Arc::ptr_eq(it, &self.cancelled)) {
            all.remove(&self.number);
        }
    }
}
