//! Requests to a daemon over one connection: many in flight, each with a timeout.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::oneshot;

use super::maps::SegmentMaps;
use crate::error::{Error, ErrorKind, Result};
use crate::io::sync::{Lock, boxed};
use crate::net::client::send_queue::{SendQueue, WeakSendQueue};
use crate::net::link::{FrameReceiver, FrameSender};
use crate::net::wire::{Archives, Frame, FrameKind, Limits, Notice, Reply, Request, SharedSegment};

/// The requesting end of a connection.
pub(super) struct Calls {
    outgoing: SendQueue,
    pending: Arc<PendingRequests>,
    next_number: AtomicU64,
    /// Limits of the frames that the daemon accepts.
    limits: Limits,
}

/// Requests without a reply, by number; none after the connection is lost.
#[derive(Default)]
struct PendingRequests(Lock<Option<PendingMap>>);

type PendingMap = BTreeMap<u64, PendingRequest>;

struct PendingRequest {
    response: oneshot::Sender<Response>,
    /// Number of received parts of the reply. Each part restarts the timeout.
    parts: Arc<AtomicU64>,
}

/// A reply, and the release of what it grants.
pub(crate) struct Response {
    pub(crate) reply: Reply,
    pub(crate) release: ReleaseOnDrop,
}

/// Releases on drop what a reply grants: returns a lease, or withdraws a contribution.
///
/// This also happens if the caller stops waiting for the reply.
pub(crate) struct ReleaseOnDrop(Option<(SendQueue, Frame)>);

impl ReleaseOnDrop {
    fn for_reply(reply: &Reply, outgoing: &WeakSendQueue) -> Self {
        let frame = match reply {
            Reply::Leased(leased) => encode_notice(&Notice::Release { lease: leased.lease }),
            Reply::Begun(begun) if begun.progress.is_none() => {
                let withdraw = Request::Withdraw { contribution: begun.contribution };
                // The reply is ignored, because no request has the number 0.
                encode_frame(FrameKind::Request, 0, &withdraw, Bytes::new(), Limits::CLIENT)
            }
            _ => return Self(None),
        };
        Self(outgoing.upgrade().zip(frame.ok()))
    }

    /// Disarms the release, because the daemon no longer needs it.
    pub(crate) fn disarm(&mut self) {
        self.0 = None;
    }
}

impl Drop for ReleaseOnDrop {
    fn drop(&mut self) {
        if let Some((outgoing, frame)) = self.0.take() {
            // After the connection is lost, the daemon releases everything by itself.
            outgoing.send(frame);
        }
    }
}

impl Calls {
    /// Starts the tasks that receive and send.
    pub(super) fn start(
        sender: FrameSender,
        receiver: FrameReceiver,
        limits: Limits,
        maps: Arc<SegmentMaps>,
    ) -> Self {
        let (outgoing, sending) = SendQueue::start(sender);
        let pending = Arc::new(PendingRequests(Lock::new(Some(PendingMap::new()))));
        tokio::spawn(boxed(receive(receiver, pending.clone(), maps, outgoing.downgrade())));
        let pending_requests = pending.clone();
        tokio::spawn(boxed(async move {
            sending.await;
            pending_requests.fail_all();
        }));
        Self { outgoing, pending, next_number: AtomicU64::new(1), limits }
    }

    /// Sends a request and waits for its reply. Each part of the reply restarts the timeout.
    pub(super) async fn call(
        &self,
        request: &Request,
        data: Bytes,
        timeout: Duration,
    ) -> Result<Response> {
        self.call_with_fd(request, data, None, timeout).await
    }

    /// As `call`, with a descriptor.
    pub(super) async fn call_with_fd(
        &self,
        request: &Request,
        data: Bytes,
        fd: Option<OwnedFd>,
        timeout: Duration,
    ) -> Result<Response> {
        let number = self.next_number.fetch_add(1, Ordering::Relaxed);
        let fds = fd.into_iter().collect();
        let frame =
            Frame { fds, ..encode_frame(FrameKind::Request, number, request, data, self.limits)? };
        let (response, mut response_receiver) = oneshot::channel();
        let parts = Arc::new(AtomicU64::new(0));
        let pending_request = PendingRequest { response, parts: parts.clone() };
        let is_open = self.pending.with(|requests| drop(requests.insert(number, pending_request)));
        let guard = CallGuard { calls: self, number };
        if is_open.is_none() || !self.outgoing.send(frame) {
            return Err(connection_lost());
        }
        let response = loop {
            let parts_before = parts.load(Ordering::Relaxed);
            match tokio::time::timeout(timeout, &mut response_receiver).await {
                Ok(response) => break response,
                Err(_) if parts.load(Ordering::Relaxed) != parts_before => {}
                Err(_) => {
                    let text = format_args!("the daemon has not answered for {timeout:?}");
                    return Err(Error::new(ErrorKind::Unreachable, text));
                }
            }
        };
        drop(guard);
        match response.map_err(|_| connection_lost())? {
            Response { reply: Reply::Failed(failure), .. } => Err(failure.into()),
            response => Ok(response),
        }
    }

    /// Returns whether the connection is open.
    pub(super) fn is_open(&self) -> bool {
        self.pending.with(|_| ()).is_some()
    }

    /// Returns a function that makes the same check and can outlive this value.
    pub(super) fn open_check(&self) -> impl Fn() -> bool + Send + Sync + 'static {
        let pending = self.pending.clone();
        move || pending.with(|_| ()).is_some()
    }

    /// Sends a notice.
    pub(super) fn notify(&self, message: &Notice) {
        if let Ok(frame) = encode_notice(message) {
            self.outgoing.send(frame);
        }
    }
}

/// Parts of a reply that is not complete.
#[derive(Default)]
struct PartialReply {
    archives: Archives,
    segments: Vec<SharedSegment>,
    fds: Vec<OwnedFd>,
}

/// Removes a pending request on drop. If it has no reply, cancels it.
struct CallGuard<'a> {
    calls: &'a Calls,
    number: u64,
}

impl Drop for CallGuard<'_> {
    fn drop(&mut self) {
        let removed = self.calls.pending.with(|requests| requests.remove(&self.number));
        if let Some(Some(_unanswered)) = removed {
            self.calls.notify(&Notice::Cancel { request: self.number });
        }
    }
}

impl PendingRequests {
    /// Runs `work` on the pending requests. Returns none if the connection is lost.
    fn with<T>(&self, work: impl FnOnce(&mut PendingMap) -> T) -> Option<T> {
        self.0.lock().as_mut().map(work)
    }

    /// Fails all pending requests, because the connection is lost.
    fn fail_all(&self) {
        *self.0.lock() = None;
    }
}

async fn receive(
    mut receiver: FrameReceiver,
    pending: Arc<PendingRequests>,
    maps: Arc<SegmentMaps>,
    outgoing: WeakSendQueue,
) {
    // By request number.
    let mut parts: BTreeMap<u64, PartialReply> = BTreeMap::new();
    while let Ok(Some(frame)) = receiver.receive().await {
        let Frame { kind, number, head, fds, .. } = frame;
        match kind {
            FrameKind::Part => {
                let part = parts.entry(number).or_default();
                match serde_json::from_slice(&head) {
                    Ok(Reply::Segments(segments)) => part.segments.extend(segments),
                    Ok(Reply::Archives(archives)) => part.archives.extend(archives),
                    _ => break,
                }
                part.fds.extend(fds);
                pending.with(|requests| {
                    let request = requests.get(&number);
                    request.map(|request| request.parts.fetch_add(1, Ordering::Relaxed))
                });
            }
            FrameKind::Reply => {
                let Ok(mut reply) = serde_json::from_slice(&head) else { break };
                let mut partial = parts.remove(&number).unwrap_or_default();
                partial.fds.extend(fds);
                if let Reply::Leased(leased) = &mut reply {
                    leased.segments.splice(0..0, partial.segments);
                    leased.archives.extend(partial.archives);
                }
                maps.store_descriptors(&reply, partial.fds);
                let release = ReleaseOnDrop::for_reply(&reply, &outgoing);
                if let Some(Some(request)) = pending.with(|requests| requests.remove(&number)) {
                    // If the caller no longer waits, dropping the response releases what the reply
                    // grants.
                    drop(request.response.send(Response { reply, release }));
                }
            }
            FrameKind::Notice => {
                let Ok(Notice::Unmap { segments }) = serde_json::from_slice(&head) else {
                    continue;
                };
                let unmapped = encode_notice(&Notice::Unmap { segments: maps.unmap(&segments) });
                if let (Some(outgoing), Ok(frame)) = (outgoing.upgrade(), unmapped) {
                    outgoing.send(frame);
                }
            }
            FrameKind::Request => break,
        }
    }
    pending.fail_all();
}

fn encode_notice(message: &Notice) -> Result<Frame> {
    encode_frame(FrameKind::Notice, 0, message, Bytes::new(), Limits::CLIENT)
}

fn encode_frame(
    kind: FrameKind,
    number: u64,
    head: &impl serde::Serialize,
    data: Bytes,
    limits: Limits,
) -> Result<Frame> {
    let head = serde_json::to_vec(head)
        .map_err(|error| Error::new(ErrorKind::Invalid, format_args!("message: {error}")))?;
    let frame = Frame { kind, number, head, data: data.into(), fds: Vec::new() };
    if frame.is_within(limits) {
        return Ok(frame);
    }
    let (head, data) = (frame.head.len(), frame.data.len());
    let text = format_args!("a message of {head} and {data} bytes is too long for the daemon");
    Err(Error::new(ErrorKind::Invalid, text))
}

fn connection_lost() -> Error {
    Error::new(ErrorKind::Unreachable, "the daemon is gone: start it and connect again")
}

#[cfg(test)]
mod tests {
    use tokio::net::UnixStream;

    use super::super::RESPONSE_TIMEOUT;
    use super::*;
    use crate::error::ErrorKind;
    use crate::net::link::split_unix;

    fn start_calls(client: UnixStream) -> Calls {
        let (sender, receiver) = split_unix(client, Limits::DAEMON);
        Calls::start(sender, receiver, Limits::CLIENT, Arc::default())
    }

    #[tokio::test]
    async fn parts_restart_request_timeout() {
        let (client, daemon) = UnixStream::pair().unwrap();
        let calls = start_calls(client);
        let (mut sender, mut receiver) = split_unix(daemon, Limits::CLIENT);
        let daemon = tokio::spawn(async move {
            for parts in [8, 0] {
                let number = receiver.receive().await.unwrap().unwrap().number;
                for part in 0..=parts {
                    tokio::time::sleep(Duration::from_millis(60)).await;
                    let (kind, reply) = if part < parts {
                        (FrameKind::Part, Reply::Archives(Archives::new()))
                    } else {
                        (FrameKind::Reply, Reply::Done)
                    };
                    let part = encode_frame(kind, number, &reply, Bytes::new(), Limits::DAEMON);
                    // The client may have disconnected.
                    let _ = sender.send(&part.unwrap()).await;
                }
            }
        });
        let call_for =
            |millis| calls.call(&Request::Status, Bytes::new(), Duration::from_millis(millis));
        assert!(matches!(call_for(200).await.unwrap().reply, Reply::Done));
        let error = call_for(20).await.err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
        drop(calls);
        daemon.await.unwrap();
    }

    #[tokio::test]
    async fn dropped_request_is_cancelled() {
        let (client, daemon) = UnixStream::pair().unwrap();
        let calls = start_calls(client);
        let (mut sender, mut receiver) = split_unix(daemon, Limits::CLIENT);
        let start_call = || calls.call(&Request::Status, Bytes::new(), RESPONSE_TIMEOUT);
        // The first call gets a reply, the second is dropped while it waits.
        for is_answered in [true, false] {
            let request = {
                let mut call = std::pin::pin!(start_call());
                let request = tokio::select! {
                    _ = &mut call => panic!("it is not answered yet"),
                    frame = receiver.receive() => frame.unwrap().unwrap(),
                };
                if is_answered {
                    let (kind, number) = (FrameKind::Reply, request.number);
                    let reply =
                        encode_frame(kind, number, &Reply::Done, Bytes::new(), Limits::DAEMON);
                    sender.send(&reply.unwrap()).await.unwrap();
                    call.await.unwrap();
                }
                request
            };
            calls.notify(&Notice::Goodbye);
            let mut notices = Vec::new();
            loop {
                let notice = receiver.receive().await.unwrap().unwrap();
                match serde_json::from_slice(&notice.head).unwrap() {
                    Notice::Goodbye => break,
                    other => notices.push(other),
                }
            }
            let cancelled = Notice::Cancel { request: request.number };
            assert_eq!(notices, if is_answered { vec![] } else { vec![cancelled] });
        }
    }
}
