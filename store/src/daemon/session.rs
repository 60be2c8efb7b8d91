//! One connection of a daemon.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use rustix::process::{Pid, PidfdFlags};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::net::UnixStream;
use tokio::sync::{Semaphore, mpsc};
use tokio::task::JoinSet;

use super::DaemonOptions;
use super::house::House;
use crate::arena::{Lent, PeerId, SegmentId};
use crate::controller::{Controller, Place, Proposal};
use crate::environment::wait;
use crate::error::{Error, ErrorKind, Result};
use crate::key::Key;
use crate::ledger::{Digest, Durability, Selector};
use crate::link::{self, Receiver};
use crate::wire::{
    Begin, Begun, Failure, Frame, FrameKind, Hello, MAX_FDS, Notice, Protocol, Reply, Request,
    Room, SharedSegment, Welcome,
};

/// A client says what it is within this time.
const HANDSHAKE: Duration = Duration::from_secs(5);

/// Archives of at most this many bytes come as data of a frame.
const INLINE: u64 = 256 << 10;

/// How many requests of one connection are worked on at once; the next ones wait.
const REQUESTS: usize = 64;

/// For how long a request waits at most, whatever it says.
const LONGEST: Duration = Duration::from_hours(1);

struct Session {
    house: Arc<House>,
    peer: PeerId,
    /// What has begun and is not decided.
    contributions: Mutex<BTreeMap<u64, Contribution>>,
    outgoing: mpsc::Sender<Frame>,
}

struct Contribution {
    place: Place,
    file_len: u64,
    committed: Option<Digest>,
    /// Where it is written; none if it is to come with the commit.
    segment: Option<SegmentId>,
}

/// Serves a connection until it ends.
pub(super) async fn run(house: Arc<House>, stream: UnixStream, options: Arc<DaemonOptions>) {
    let Ok(credentials) = rustix::net::sockopt::socket_peercred(&stream) else { return };
    let process = rustix::process::pidfd_open(credentials.pid, PidfdFlags::NONBLOCK).ok();
    let (mut sender, mut receiver) = link::split(stream);
    let Ok(Some((number, client))) = tokio::time::timeout(HANDSHAKE, hello(&mut receiver)).await
    else {
        return;
    };
    let uid = credentials.uid.as_raw();
    if !options.admits(uid) {
        let text = format!("processes of user {uid} may not connect; serve with --allow-uid");
        let error = Error::new(ErrorKind::Refused, text);
        house.counters.count().turned_away += 1;
        tracing::warn!(uid, "turned away");
        // It is turned away, whether it hears it or not.
        let _ = sender.send(&reply(number, Reply::Failed(error.into()), Vec::new())).await;
        return;
    }
    let peer = house.number();
    let pid = pid(credentials.pid);
    tracing::info!(peer, pid, uid, client, "connected");
    house.join(peer, pid, client);
    let (unmaps, mut unmapped) = mpsc::unbounded_channel();
    house.pool.join(peer, unmaps);
    let (outgoing, mut frames) = mpsc::channel::<Frame>(REQUESTS);
    let session = Arc::new(Session { house, peer, contributions: Mutex::default(), outgoing });
    let welcome = Welcome {
        protocol: Protocol::OWN,
        daemon: concat!("tssd ", env!("CARGO_PKG_VERSION")).to_owned(),
        pid: std::process::id(),
        inline: INLINE,
    };
    session.reply(number, Reply::Welcome(welcome), Vec::new()).await;
    let sending = async {
        loop {
            let frame = tokio::select! {
                frame = frames.recv() => frame,
                segment = unmapped.recv() => segment.map(unmap),
            };
            let Some(frame) = frame else { break };
            if sender.send(&frame).await.is_err() {
                break;
            }
        }
    };
    let mut tasks = JoinSet::new();
    let was_said = tokio::select! {
        was_said = session.receive(&mut receiver, &mut tasks) => was_said,
        () = sending => false,
        () = session.house.closed() => false,
    };
    sender.close();
    tracing::info!(peer, was_said, "disconnected");
    // What has begun is carried out; nobody hears of it.
    while tasks.join_next().await.is_some() {}
    session.end().await;
    let pool = session.house.pool.clone();
    match process {
        // Its maps may be there as long as it is, which is longer than the connection.
        Some(process) if !was_said => {
            tokio::spawn(async move {
                exited(process).await;
                pool.exited(peer);
            });
        }
        _ => pool.exited(peer),
    }
}

/// The first request of a client.
async fn hello(receiver: &mut Receiver) -> Option<(u64, String)> {
    let frame = receiver.receive().await.ok()??;
    match serde_json::from_slice(&frame.head).ok()? {
        Request::Hello(Hello { protocol, client }) if protocol.major == Protocol::OWN.major => {
            Some((frame.number, client))
        }
        _ => None,
    }
}

/// Returns when a process has ended.
#[expect(unsafe_code, reason = "the runtime watches a descriptor that is ours")]
async fn exited(process: OwnedFd) {
    // SAFETY: an `OwnedFd` has one descriptor, which is open as long as it lives, and gives no access
    // by which it could be replaced.
    let process = unsafe { AsyncFd::register_with_interest(process, Interest::READABLE) };
    if let Ok(process) = process {
        let _ = process.readable().await;
    }
}

impl Session {
    fn contributions(&self) -> MutexGuard<'_, BTreeMap<u64, Contribution>> {
        self.contributions.lock().expect("nobody panics while holding the contributions")
    }

    /// Takes requests until the connection ends. Says whether the client has said goodbye.
    async fn receive(self: &Arc<Self>, receiver: &mut Receiver, tasks: &mut JoinSet<()>) -> bool {
        let permits = Arc::new(Semaphore::new(REQUESTS));
        loop {
            while tasks.try_join_next().is_some() {}
            let Ok(Some(frame)) = receiver.receive().await else { return false };
            match frame.kind {
                FrameKind::Notice => match serde_json::from_slice(&frame.head) {
                    Ok(Notice::Release { lease }) => self.house.release(self.peer, lease).await,
                    Ok(Notice::Unmap { segments }) => {
                        for segment in segments {
                            self.house.pool.unmapped(self.peer, segment);
                        }
                    }
                    Ok(Notice::Goodbye) => return true,
                    // A notice that is not known yet.
                    Err(_) => {}
                },
                FrameKind::Request => {
                    let permit = permits.clone().acquire_owned().await;
                    let session = self.clone();
                    tasks.spawn(async move {
                        session.answer(frame).await;
                        drop(permit);
                    });
                }
                // No client says such a thing.
                FrameKind::Part | FrameKind::Reply => return false,
            }
        }
    }

    async fn answer(&self, frame: Frame) {
        let started = Instant::now();
        let (number, bytes) = (frame.number, frame.data.len());
        let request = serde_json::from_slice::<Request>(&frame.head);
        let op = request.as_ref().map_or("unknown", Request::op);
        let answered = match request {
            Ok(request) => self.handle(number, request, frame.data).await,
            Err(error) => {
                let text = format_args!("a request that is not understood: {error}");
                Err(Error::new(ErrorKind::Invalid, text))
            }
        };
        let failed = answered.as_ref().err().map(Error::kind);
        let (peer, seconds) = (self.peer, started.elapsed().as_secs_f64());
        match &answered {
            Ok(_) => tracing::debug!(peer, op, bytes, seconds, "answered"),
            Err(error) => tracing::debug!(peer, op, bytes, seconds, %error, "failed"),
        }
        *self.house.counters.count().requests.entry((op, failed)).or_default() += 1;
        let (answer, fds) =
            answered.unwrap_or_else(|error| (Reply::Failed(Failure::from(error)), Vec::new()));
        self.reply(number, answer, fds).await;
    }

    async fn reply(&self, number: u64, answer: Reply, fds: Vec<OwnedFd>) {
        // Who is gone needs no answer.
        let _ = self.outgoing.send(reply(number, answer, fds)).await;
    }

    async fn handle(
        &self,
        number: u64,
        request: Request,
        data: Vec<u8>,
    ) -> Result<(Reply, Vec<OwnedFd>)> {
        let controller = &self.house.controller;
        let answer = match request {
            Request::Hello(_) => {
                return Err(Error::new(ErrorKind::Invalid, "hello is said once"));
            }
            Request::Begin(Begin { key, proposal }) => {
                return self.begin(&Key::new(key)?, proposal).await;
            }
            Request::Commit { contribution, digest } => {
                Reply::Progress(self.commit(contribution, digest, &data).await?)
            }
            Request::Withdraw { contribution } => {
                self.withdraw(contribution).await?;
                Reply::Done
            }
            Request::Locate { key, selector } => {
                return self.locate(number, &Key::new(key)?, selector).await;
            }
            Request::Versions { key } => {
                Reply::Versions(controller.versions(&Key::new(key)?).await?)
            }
            Request::Newer { key, seen, patience } => {
                let key = Key::new(key)?;
                let found = tokio::select! {
                    found = controller.newer(&key, seen, patience.min(LONGEST)) => found?,
                    () = self.outgoing.closed() => None,
                    () = self.house.closed() => None,
                };
                Reply::Newer(found)
            }
            Request::Keys { prefix } => {
                let keys = controller.keys(&prefix).await?;
                Reply::Keys(keys.iter().map(ToString::to_string).collect())
            }
            Request::Delete { key, selection } => {
                Reply::Deleted(controller.delete(&Key::new(key)?, selection).await?)
            }
            Request::Retain { key, keep, ttl } => {
                controller.retain(&Key::new(key)?, keep, ttl).await?;
                Reply::Done
            }
            Request::Pin { key, selector, label } => {
                Reply::Pinned(controller.pin(&Key::new(key)?, selector, &label).await?)
            }
            Request::Unpin { key, label } => {
                controller.unpin(&Key::new(key)?, &label).await?;
                Reply::Done
            }
            Request::Pins { key } => Reply::Pins(controller.pins(&Key::new(key)?).await?),
            Request::Status => Reply::Status(self.house.status()),
        };
        Ok((answer, Vec::new()))
    }

    async fn begin(&self, key: &Key, mut proposal: Proposal) -> Result<(Reply, Vec<OwnedFd>)> {
        proposal.timeout = proposal.timeout.min(LONGEST);
        let deadline = Instant::now() + proposal.timeout;
        let file_len = proposal.file_len;
        self.house.tiers.check(proposal.durability)?;
        let (place, committed) = self.house.controller.open(key, &proposal).await?;
        let lent = if committed.is_some() || file_len <= INLINE {
            None
        } else {
            match self.lend(file_len, deadline).await {
                Ok(lent) => Some(lent),
                Err(error) => {
                    let error = self.house.controller.reason(&place, error).await;
                    self.house.controller.withdraw(&place).await;
                    return Err(error);
                }
            }
        };
        let contribution = self.house.number();
        let room = lent.as_ref().map_or(Room::Inline, |lent| Room::Segment {
            segment: lent.segment,
            capacity: lent.capacity,
        });
        let begun = Begun {
            contribution,
            id: place.id,
            epoch: place.epoch,
            number: place.number,
            committed,
            room,
        };
        let segment = lent.as_ref().map(|lent| lent.segment);
        let open = Contribution { place, file_len, committed, segment };
        self.contributions().insert(contribution, open);
        let fds = lent.and_then(|lent| lent.memory).into_iter().collect();
        Ok((Reply::Begun(begun), fds))
    }

    /// A segment of so many bytes; waits for one if there is no room.
    async fn lend(&self, len: u64, deadline: Instant) -> Result<Lent> {
        let pool = &self.house.pool;
        loop {
            let mut freed = std::pin::pin!(pool.freed.notified());
            freed.as_mut().enable();
            let lent = pool.lend(self.peer, len);
            let exhausted = match lent.map_err(|error| Error::io("segment", error))? {
                Ok(lent) => return Ok(lent),
                Err(exhausted) => exhausted,
            };
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || exhausted.wanted > exhausted.limit {
                return Err(self.house.no_room(&exhausted));
            }
            tokio::select! {
                () = freed => {}
                () = tokio::time::sleep(left) => {}
                () = self.outgoing.closed() => return Err(self.house.no_room(&exhausted)),
                () = self.house.closed() => return Err(self.house.no_room(&exhausted)),
            }
        }
    }

    fn take(&self, contribution: u64) -> Result<Contribution> {
        self.contributions().remove(&contribution).ok_or_else(|| {
            let text = format_args!("contribution {contribution} is none of this connection's");
            Error::new(ErrorKind::Invalid, text)
        })
    }

    async fn commit(
        &self,
        contribution: u64,
        digest: Digest,
        data: &[u8],
    ) -> Result<crate::controller::Progress> {
        let open = self.take(contribution)?;
        let committed = async {
            self.publish(&open, data)?;
            if open.place.durability == Durability::Disk && open.committed.is_none() {
                let (tiers, path) = (self.house.tiers.clone(), open.place.path());
                let started = Instant::now();
                wait(move || tiers.persist(&path)).await?;
                let (bytes, seconds) = (open.file_len, started.elapsed().as_secs_f64());
                tracing::debug!(peer = self.peer, bytes, seconds, "on disk");
            }
            let progress = self.house.controller.commit(&open.place, digest, open.file_len).await?;
            // A contribution that was committed before is no other put.
            if open.committed.is_none() {
                let mut counts = self.house.counters.count();
                counts.puts += 1;
                counts.bytes_put += open.file_len;
                counts.published += u64::from(progress.visible);
            }
            Ok(progress)
        };
        match committed.await {
            Ok(progress) => Ok(progress),
            Err(error) => Err(self.cancel(open, error).await),
        }
    }

    /// Gives the archive its name.
    fn publish(&self, open: &Contribution, data: &[u8]) -> Result<()> {
        if open.committed.is_some() {
            return Ok(());
        }
        let (pool, path) = (&self.house.pool, open.place.path());
        let failed = |error| Error::io(&path, error);
        if let Some(segment) = open.segment {
            return pool.publish(self.peer, segment, &path, open.file_len).map_err(failed);
        }
        if u64::try_from(data.len()) != Ok(open.file_len) {
            let (came, said) = (data.len(), open.file_len);
            let text = format_args!("an archive of {came} bytes where {said} were announced");
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        match pool.write(&path, data).map_err(failed)? {
            Ok(()) => Ok(()),
            Err(exhausted) => Err(self.house.no_room(&exhausted)),
        }
    }

    async fn withdraw(&self, contribution: u64) -> Result<()> {
        let open = self.take(contribution)?;
        let (key, id, number) = (open.place.key.clone(), open.place.id, open.place.number);
        let withdrawn =
            Error::new(ErrorKind::Refused, format_args!("version {number} of `{key}` ({id})"));
        let reason = self.cancel(open, withdrawn).await;
        // Why the put failed, if the ledger knows more than the client.
        if reason.refusal().is_some() { Err(reason) } else { Ok(()) }
    }

    /// Takes a contribution back, and says why it failed.
    async fn cancel(&self, open: Contribution, error: Error) -> Error {
        let error = self.house.controller.reason(&open.place, error).await;
        if let Some(segment) = open.segment {
            self.house.pool.give_back(self.peer, segment);
        }
        self.house.controller.withdraw(&open.place).await;
        error
    }

    /// A version, with the memory of its segments that the client does not have yet.
    async fn locate(
        &self,
        number: u64,
        key: &Key,
        selector: Selector,
    ) -> Result<(Reply, Vec<OwnedFd>)> {
        let mut leased = self.house.lease(self.peer, key, selector).await?;
        let mut segments: Vec<SegmentId> =
            leased.archives.values().map(|span| span.segment).collect();
        segments.push(leased.manifest.segment);
        let mut shared = Vec::new();
        for segment in segments {
            let memory = self.house.pool.share(self.peer, segment);
            if let Some((memory, capacity)) = memory.map_err(|error| Error::io("segment", error))? {
                shared.push((SharedSegment { segment, capacity }, memory));
            }
        }
        // What does not go into one frame goes ahead.
        while shared.len() > usize::from(MAX_FDS) {
            let (segments, fds) = shared.drain(..usize::from(MAX_FDS)).unzip();
            let mut part = reply(number, Reply::Segments(segments), fds);
            part.kind = FrameKind::Part;
            let _ = self.outgoing.send(part).await;
        }
        let (segments, fds) = shared.into_iter().unzip();
        leased.segments = segments;
        Ok((Reply::Leased(leased), fds))
    }

    /// The connection is over: what it has not decided is withdrawn, what it read is handed back.
    async fn end(&self) {
        let open = std::mem::take(&mut *self.contributions());
        for contribution in open.into_values() {
            self.house.controller.withdraw(&contribution.place).await;
        }
        self.house.pool.leave(self.peer);
        self.house.lose(self.peer).await;
    }
}

fn reply(number: u64, answer: Reply, fds: Vec<OwnedFd>) -> Frame {
    let head = serde_json::to_vec(&answer).expect("a reply is JSON");
    Frame { kind: FrameKind::Reply, number, head, data: Vec::new(), fds }
}

fn unmap(segment: SegmentId) -> Frame {
    let notice = Notice::Unmap { segments: vec![segment] };
    let head = serde_json::to_vec(&notice).expect("a notice is JSON");
    Frame { kind: FrameKind::Notice, number: 0, head, data: Vec::new(), fds: Vec::new() }
}

fn pid(pid: Pid) -> u32 {
    pid.as_raw_nonzero().get().cast_unsigned()
}
