//! Calls to a daemon over one connection: many at a time, each with a deadline.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::oneshot;

use super::maps::Maps;
use super::outgoing::{Outgoing, WeakOutgoing};
use crate::error::{Error, ErrorKind, Result};
use crate::io::sync::{Lock, boxed};
use crate::net::link::{Receiver, Sender};
use crate::net::wire::{Archives, Frame, FrameKind, Limits, Notice, Reply, Request, SharedSegment};

/// The asking end of a connection.
pub(super) struct Calls {
    outgoing: Outgoing,
    waiting: Arc<Waiting>,
    next: AtomicU64,
    /// What the daemon takes.
    limits: Limits,
}

/// Who waits for an answer.
#[derive(Default)]
struct Waiting(Lock<Option<Callers>>);

type Callers = BTreeMap<u64, Caller>;

struct Caller {
    answer: oneshot::Sender<Answer>,
    /// How many parts have come before the answer: as long as they do, it is on its way.
    parts: Arc<AtomicU64>,
}

/// A reply, and what it obliges to.
pub(crate) struct Answer {
    pub(crate) reply: Reply,
    pub(crate) owed: Owed,
}

/// What is said to the daemon when this is dropped, if it is anything: that a lease is handed back,
/// a contribution withdrawn. Whoever stops waiting for an answer says so too.
pub(crate) struct Owed(Option<(Outgoing, Frame)>);

impl Owed {
    fn by(reply: &Reply, outgoing: &WeakOutgoing) -> Self {
        let frame = match reply {
            Reply::Leased(leased) => notice(&Notice::Release { lease: leased.lease }),
            Reply::Begun(begun) if begun.progress.is_none() => {
                let withdraw = Request::Withdraw { contribution: begun.contribution };
                // Nobody waits for the answer: no call has the number 0.
                frame(FrameKind::Request, 0, &withdraw, Bytes::new(), Limits::CLIENT)
            }
            _ => return Self(None),
        };
        Self(outgoing.upgrade().zip(frame.ok()))
    }

    /// It is done already.
    pub(crate) fn settle(&mut self) {
        self.0 = None;
    }
}

impl Drop for Owed {
    fn drop(&mut self) {
        if let Some((outgoing, frame)) = self.0.take() {
            // A connection that is lost has told the daemon already.
            outgoing.send(frame);
        }
    }
}

impl Calls {
    /// Starts the tasks that receive and send.
    pub(super) fn start(
        (sender, receiver): (Sender, Receiver),
        limits: Limits,
        maps: Arc<Maps>,
    ) -> Self {
        let (outgoing, sending) = Outgoing::start(sender);
        let waiting = Arc::new(Waiting(Lock::new(Some(Callers::new()))));
        tokio::spawn(boxed(receive(receiver, waiting.clone(), maps, outgoing.downgrade())));
        let ended = waiting.clone();
        tokio::spawn(boxed(async move {
            sending.await;
            ended.end();
        }));
        Self { outgoing, waiting, next: AtomicU64::new(1), limits }
    }

    /// Asks, and waits for the answer, or another part of it, for so long.
    pub(super) async fn call(
        &self,
        request: &Request,
        data: Bytes,
        patience: Duration,
    ) -> Result<Answer> {
        self.call_with(request, (data, None), patience).await
    }

    /// The same with a descriptor that goes along.
    pub(super) async fn call_with(
        &self,
        request: &Request,
        (data, fd): (Bytes, Option<OwnedFd>),
        patience: Duration,
    ) -> Result<Answer> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let fds = fd.into_iter().collect();
        let frame = Frame { fds, ..frame(FrameKind::Request, number, request, data, self.limits)? };
        let (answer, mut answered) = oneshot::channel();
        let parts = Arc::new(AtomicU64::new(0));
        let caller = Caller { answer, parts: parts.clone() };
        let is_open = self.waiting.with(|callers| drop(callers.insert(number, caller)));
        let called = Called { calls: self, number };
        if is_open.is_none() || !self.outgoing.send(frame) {
            return Err(lost());
        }
        let answer = loop {
            let come = parts.load(Ordering::Relaxed);
            match tokio::time::timeout(patience, &mut answered).await {
                Ok(answer) => break answer,
                Err(_) if parts.load(Ordering::Relaxed) != come => {}
                Err(_) => {
                    let text = format_args!("the daemon has not answered for {patience:?}");
                    return Err(Error::new(ErrorKind::Unreachable, text));
                }
            }
        };
        drop(called);
        match answer.map_err(|_| lost())? {
            Answer { reply: Reply::Failed(failure), .. } => Err(failure.into()),
            answer => Ok(answer),
        }
    }

    /// Whether the connection is there still.
    pub(super) fn is_open(&self) -> bool {
        self.waiting.with(|_| ()).is_some()
    }

    /// The same, for whoever outlives this.
    pub(super) fn openness(&self) -> impl Fn() -> bool + Send + Sync + 'static {
        let waiting = self.waiting.clone();
        move || waiting.with(|_| ()).is_some()
    }

    /// Says something that is not answered.
    pub(super) fn notify(&self, said: &Notice) {
        if let Ok(frame) = notice(said) {
            self.outgoing.send(frame);
        }
    }
}

/// What comes ahead of a reply.
#[derive(Default)]
struct Parts {
    archives: Archives,
    segments: Vec<SharedSegment>,
    fds: Vec<OwnedFd>,
}

/// A call that is waited for: whoever stops waiting is forgotten, and says so.
struct Called<'a> {
    calls: &'a Calls,
    number: u64,
}

impl Drop for Called<'_> {
    fn drop(&mut self) {
        let waiting = self.calls.waiting.with(|callers| callers.remove(&self.number));
        if let Some(Some(_unanswered)) = waiting {
            self.calls.notify(&Notice::Cancel { request: self.number });
        }
    }
}

impl Waiting {
    /// Does something to those who wait; nothing once the connection is lost.
    fn with<T>(&self, work: impl FnOnce(&mut Callers) -> T) -> Option<T> {
        self.0.lock().as_mut().map(work)
    }

    /// The connection is lost: nobody waits any more.
    fn end(&self) {
        *self.0.lock() = None;
    }
}

async fn receive(
    mut receiver: Receiver,
    waiting: Arc<Waiting>,
    maps: Arc<Maps>,
    outgoing: WeakOutgoing,
) {
    // What belongs to replies whose end has not come.
    let mut parts: BTreeMap<u64, Parts> = BTreeMap::new();
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
                waiting.with(|callers| {
                    let caller = callers.get(&number);
                    caller.map(|caller| caller.parts.fetch_add(1, Ordering::Relaxed))
                });
            }
            FrameKind::Reply => {
                let Ok(mut reply) = serde_json::from_slice(&head) else { break };
                let mut all = parts.remove(&number).unwrap_or_default();
                all.fds.extend(fds);
                if let Reply::Leased(leased) = &mut reply {
                    leased.segments.splice(0..0, all.segments);
                    leased.archives.extend(all.archives);
                }
                maps.receive(&reply, all.fds);
                let owed = Owed::by(&reply, &outgoing);
                if let Some(Some(caller)) = waiting.with(|callers| callers.remove(&number)) {
                    // Whoever asked may have gone: then what is owed is done.
                    drop(caller.answer.send(Answer { reply, owed }));
                }
            }
            FrameKind::Notice => {
                let Ok(Notice::Unmap { segments }) = serde_json::from_slice(&head) else {
                    continue;
                };
                let unmapped = notice(&Notice::Unmap { segments: maps.unmap(&segments) });
                if let (Some(outgoing), Ok(frame)) = (outgoing.upgrade(), unmapped) {
                    outgoing.send(frame);
                }
            }
            FrameKind::Request => break,
        }
    }
    waiting.end();
}

fn notice(said: &Notice) -> Result<Frame> {
    frame(FrameKind::Notice, 0, said, Bytes::new(), Limits::CLIENT)
}

fn frame(
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

fn lost() -> Error {
    Error::new(ErrorKind::Unreachable, "the daemon is gone: start it and connect again")
}

#[cfg(test)]
mod tests {
    use tokio::net::UnixStream;

    use super::super::PATIENCE;
    use super::*;
    use crate::error::ErrorKind;
    use crate::net::link::split;

    #[tokio::test]
    async fn who_hears_parts_waits_for_the_rest() {
        let (client, daemon) = UnixStream::pair().unwrap();
        let calls = Calls::start(split(client, Limits::DAEMON), Limits::CLIENT, Arc::default());
        let (mut sender, mut receiver) = split(daemon, Limits::CLIENT);
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
                    let part = frame(kind, number, &reply, Bytes::new(), Limits::DAEMON);
                    // Nobody may be there any more.
                    let _ = sender.send(&part.unwrap()).await;
                }
            }
        });
        let ask =
            |millis| calls.call(&Request::Status, Bytes::new(), Duration::from_millis(millis));
        assert!(matches!(ask(200).await.unwrap().reply, Reply::Done));
        let error = ask(20).await.err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
        drop(calls);
        daemon.await.unwrap();
    }

    #[tokio::test]
    async fn who_stops_waiting_says_so() {
        let (client, daemon) = UnixStream::pair().unwrap();
        let calls = Calls::start(split(client, Limits::DAEMON), Limits::CLIENT, Arc::default());
        let (mut sender, mut receiver) = split(daemon, Limits::CLIENT);
        let ask = || calls.call(&Request::Status, Bytes::new(), PATIENCE);
        // One that is answered, and one that is dropped while it waits.
        for is_answered in [true, false] {
            let asked = {
                let mut call = std::pin::pin!(ask());
                let asked = tokio::select! {
                    _ = &mut call => panic!("it is not answered yet"),
                    frame = receiver.receive() => frame.unwrap().unwrap(),
                };
                if is_answered {
                    let (kind, number) = (FrameKind::Reply, asked.number);
                    let reply = frame(kind, number, &Reply::Done, Bytes::new(), Limits::DAEMON);
                    sender.send(&reply.unwrap()).await.unwrap();
                    call.await.unwrap();
                }
                asked
            };
            calls.notify(&Notice::Goodbye);
            let mut said = Vec::new();
            loop {
                let notice = receiver.receive().await.unwrap().unwrap();
                match serde_json::from_slice(&notice.head).unwrap() {
                    Notice::Goodbye => break,
                    other => said.push(other),
                }
            }
            let cancelled = Notice::Cancel { request: asked.number };
            assert_eq!(said, if is_answered { vec![] } else { vec![cancelled] });
        }
    }
}
