//! The requests of a connection that have no reply yet: their limits and their cancellation.

use std::collections::BTreeMap;
use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

use crate::error::{Error, ErrorKind, Result};
use crate::io::sync::{Lock, MutexGuard};

/// Maximum number of requests of a connection that run concurrently.
///
/// At the limit the daemon reads no further frame of the connection.
pub(crate) const MAX_ACTIVE_REQUESTS: usize = 64;

/// Maximum number of additional requests that wait for other writers, readers or daemons.
///
/// A request with data takes several of these slots.
pub(crate) const MAX_WAITING_REQUESTS: usize = 1024;

/// A waiting request takes one more slot for each of these bytes of data.
const BYTES_PER_SLOT: usize = 64 << 10;

/// The requests of a connection that have no reply yet.
pub(crate) struct InFlightRequests {
    /// Whether each request is cancelled, by request number.
    cancel_flags: Lock<BTreeMap<u64, Arc<watch::Sender<bool>>>>,
    active: Arc<Semaphore>,
    waiting: Arc<Semaphore>,
}

/// A request that has no reply yet.
pub(crate) struct InFlightRequest {
    pub(crate) number: u64,
    requests: Arc<InFlightRequests>,
    cancelled: Arc<watch::Sender<bool>>,
    /// Its slot among the active requests, or its slots among the waiting ones.
    slot: Lock<OwnedSemaphorePermit>,
}

impl InFlightRequests {
    pub(crate) fn new() -> Arc<Self> {
        let [active, waiting] = [MAX_ACTIVE_REQUESTS, MAX_WAITING_REQUESTS]
            .map(|count| Arc::new(Semaphore::new(count)));
        Arc::new(Self { cancel_flags: Lock::default(), active, waiting })
    }

    fn cancel_flags(&self) -> MutexGuard<'_, BTreeMap<u64, Arc<watch::Sender<bool>>>> {
        self.cancel_flags.lock()
    }

    /// Registers a request, and waits until it may run.
    pub(crate) async fn register(self: &Arc<Self>, number: u64) -> InFlightRequest {
        let slot = self.active.clone().acquire_owned().await.expect("it is never closed");
        let cancelled = Arc::new(watch::Sender::new(false));
        self.cancel_flags().insert(number, cancelled.clone());
        InFlightRequest { number, requests: self.clone(), cancelled, slot: Lock::new(slot) }
    }

    /// Cancels a request, unless it has its reply.
    pub(crate) fn cancel(&self, number: u64) {
        if let Some(cancelled) = self.cancel_flags().get(&number) {
            cancelled.send_replace(true);
        }
    }
}

impl InFlightRequest {
    /// Frees the active slot of a request that is about to wait, and takes waiting slots instead.
    ///
    /// The request may wait for other requests of the same connection, so it must not block them. If no waiting slots
    /// are left, it keeps its active slot. `bytes` is the length of the data that it keeps meanwhile.
    pub(crate) fn release_active_slot(&self, bytes: usize) {
        let mut slot = self.slot.lock();
        if !Arc::ptr_eq(slot.semaphore(), &self.requests.waiting) {
            let slots = u32::try_from(1 + bytes / BYTES_PER_SLOT).unwrap_or(u32::MAX);
            if let Ok(waiting) = self.requests.waiting.clone().try_acquire_many_owned(slots) {
                *slot = waiting;
            }
        }
    }

    /// Checks that the request is not cancelled.
    ///
    /// # Errors
    ///
    /// `Busy` if it is.
    pub(crate) fn check_cancelled(&self) -> Result<()> {
        let text = "nobody waits for it any more";
        if self.is_cancelled() { Err(Error::new(ErrorKind::Busy, text)) } else { Ok(()) }
    }

    /// Whether the request is cancelled.
    pub(crate) fn is_cancelled(&self) -> bool {
        *self.cancelled.borrow()
    }

    /// Waits until the request is cancelled.
    pub(crate) async fn cancelled(&self) {
        let mut cancelled = self.cancelled.subscribe();
        // `self` owns the sender, so the channel stays open.
        let _ = cancelled.wait_for(|cancelled| *cancelled).await;
    }
}

impl Drop for InFlightRequest {
    fn drop(&mut self) {
        let mut all = self.requests.cancel_flags();
        // The client may have reused the number for a later request.
        if all.get(&self.number).is_some_and(|it| Arc::ptr_eq(it, &self.cancelled)) {
            all.remove(&self.number);
        }
    }
}
