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
use crate::arena::{Exhausted, PeerId, Pool, SegmentId};
use crate::controller::{Controller, Place, Proposal};
use crate::environment::wait;
use crate::error::{Error, ErrorKind, Result};
use crate::key::Key;
use crate::ledger::{Digest, Durability, Selector};
use crate::link::{self, Receiver};
use crate::wire::{
    Begin, Begun, Failure, Frame, FrameKind, Hello, INLINE, Limits, MAX_FDS, Notice, Protocol,
    Reply, Request, Room, SharedSegment, Welcome,
};

/// A client says what it is within this time.
const HANDSHAKE: Duration = Duration::from_secs(5);

/// How many requests of one connection are worked on at once; the next ones wait.
const REQUESTS: usize = 64;

/// For how long a request waits at most, whatever it says.
const LONGEST: Duration = Duration::from_hours(1);

struct Session {
    house: Arc<House>,
    peer: PeerId,
    /// What has begun and is not decided.
    contributions: Mutex<Contributions>,
    outgoing: mpsc::Sender<Frame>,
    /// Whoever has it sends memory. What has gone once does not go again, so whatever names it must
    /// come after.
    sharing: tokio::sync::Mutex<()>,
}

/// What a request is answered with.
struct Answer<'a> {
    reply: Reply,
    fds: Vec<OwnedFd>,
    /// The right to send memory of segments, kept until it is sent.
    sharing: Option<tokio::sync::MutexGuard<'a, ()>>,
}

impl From<Reply> for Answer<'_> {
    fn from(reply: Reply) -> Self {
        Self { reply, fds: Vec::new(), sharing: None }
    }
}

/// None is one that waits for room.
type Contributions = BTreeMap<u64, Option<Contribution>>;

struct Contribution {
    place: Place,
    committed: Option<Digest>,
    /// The lengths of its archives; the last one is being written.
    lens: Vec<u64>,
    /// Where that is; none if it comes as data.
    segment: Option<SegmentId>,
    /// Until when room for another one is waited for.
    timeout: Duration,
}

/// Serves a connection until it ends.
pub(super) async fn run(house: Arc<House>, stream: UnixStream, options: Arc<DaemonOptions>) {
    let Ok(credentials) = rustix::net::sockopt::socket_peercred(&stream) else { return };
    let (mut sender, mut receiver) = link::split(stream, Limits::STRANGER);
    let Ok(Some((number, said))) = tokio::time::timeout(HANDSHAKE, hello(&mut receiver)).await
    else {
        return;
    };
    let uid = credentials.uid.as_raw();
    let client = match said.and_then(|client| allow(uid, &options).map(|()| client)) {
        Ok(client) => client,
        Err(error) => {
            tracing::warn!(uid, %error, "turned away");
            house.counters.count().turned_away += 1;
            // It is turned away, whether it hears it or not.
            let _ = sender.send(&reply(number, &Reply::Failed(error.into()), Vec::new())).await;
            return;
        }
    };
    receiver.limit(Limits::CLIENT);
    // None if it has ended since it said hello. Who has said nothing costs one descriptor, not two.
    let process = rustix::process::pidfd_open(credentials.pid, PidfdFlags::NONBLOCK).ok();
    let peer = house.number();
    let pid = pid(credentials.pid);
    tracing::info!(peer, pid, uid, client, "connected");
    house.join(peer, pid, client);
    let (unmaps, mut unmapped) = mpsc::unbounded_channel();
    house.pool.join(peer, unmaps);
    let (outgoing, mut frames) = mpsc::channel::<Frame>(REQUESTS);
    let session = Arc::new(Session {
        house,
        peer,
        contributions: Mutex::default(),
        outgoing,
        sharing: tokio::sync::Mutex::default(),
    });
    let welcome = Welcome {
        protocol: Protocol::OWN,
        daemon: concat!("tssd ", env!("CARGO_PKG_VERSION")).to_owned(),
        pid: std::process::id(),
        inline: INLINE.into(),
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
    // What has begun is carried out, what waits for others ends; nobody hears of it.
    drop(frames);
    while tasks.join_next().await.is_some() {}
    session.end().await;
    let pool = session.house.pool.clone();
    match process {
        // Its maps may be there as long as it is, which is longer than the connection.
        Some(process) if !was_said && pool.is_mapped_by(peer) => {
            tokio::spawn(async move {
                exited(process).await;
                pool.exited(peer);
            });
        }
        _ => pool.exited(peer),
    }
}

/// The first request of a client: its number, and which program it is, or why it is turned away; none
/// if it does not speak the protocol at all.
async fn hello(receiver: &mut Receiver) -> Option<(u64, Result<String>)> {
    let frame = receiver.receive().await.ok()??;
    if frame.kind != FrameKind::Request {
        return None;
    }
    let said = match serde_json::from_slice(&frame.head) {
        Ok(Request::Hello(Hello { protocol, client })) => {
            let (theirs, own) = (protocol.major, Protocol::OWN.major);
            let other = format_args!("protocol {theirs} is not spoken here, only {own}");
            if theirs == own { Ok(client) } else { Err(Error::new(ErrorKind::Refused, other)) }
        }
        Ok(_) => Err(Error::new(ErrorKind::Invalid, "hello comes first")),
        Err(error) => Err(not_understood(&error)),
    };
    Some((frame.number, said))
}

/// Whether processes of a user may connect.
fn allow(uid: u32, options: &DaemonOptions) -> Result<()> {
    if options.admits(uid) {
        return Ok(());
    }
    let text = format_args!("processes of user {uid} may not connect; serve with --allow-uid");
    Err(Error::new(ErrorKind::Refused, text))
}

fn unknown(contribution: u64) -> Error {
    let text = format_args!("contribution {contribution} is none of this connection's");
    Error::new(ErrorKind::Invalid, text)
}

fn not_understood(error: &serde_json::Error) -> Error {
    Error::new(ErrorKind::Invalid, format_args!("a request that is not understood: {error}"))
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
    fn contributions(&self) -> MutexGuard<'_, Contributions> {
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
            Err(error) => Err(not_understood(&error)),
        };
        let failed = answered.as_ref().err().map(Error::kind);
        let (peer, seconds) = (self.peer, started.elapsed().as_secs_f64());
        match &answered {
            Ok(_) => tracing::debug!(peer, op, bytes, seconds, "answered"),
            Err(error) => tracing::debug!(peer, op, bytes, seconds, %error, "failed"),
        }
        *self.house.counters.count().requests.entry((op, failed)).or_default() += 1;
        let Answer { reply, fds, sharing } =
            answered.unwrap_or_else(|error| Reply::Failed(Failure::from(error)).into());
        self.reply(number, reply, fds).await;
        // Memory that others are to send goes after this.
        drop(sharing);
    }

    async fn reply(&self, number: u64, answer: Reply, fds: Vec<OwnedFd>) {
        // Who is gone needs no answer.
        let _ = self.outgoing.send(reply(number, &answer, fds)).await;
    }

    async fn handle(&self, number: u64, request: Request, data: Vec<u8>) -> Result<Answer<'_>> {
        let controller = &self.house.controller;
        let answer = match request {
            Request::Hello(_) => {
                return Err(Error::new(ErrorKind::Invalid, "hello is said once"));
            }
            Request::Begin(Begin { key, proposal }) => {
                return self.begin(&Key::new(key)?, proposal).await;
            }
            Request::Extend { contribution, file_len } => {
                return self.extend(contribution, file_len, &data).await;
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
        Ok(answer.into())
    }

    async fn begin(&self, key: &Key, mut proposal: Proposal) -> Result<Answer<'_>> {
        proposal.timeout = proposal.timeout.min(LONGEST);
        let deadline = Instant::now() + proposal.timeout;
        let file_len = proposal.file_len;
        self.house.tiers.check(proposal.durability)?;
        let is_wanted = || !self.outgoing.is_closed();
        let (place, committed) = self.house.controller.open(key, &proposal, is_wanted).await?;
        let (timeout, id, epoch, number) = (proposal.timeout, place.id, place.epoch, place.number);
        let mut open =
            Contribution { place, committed, lens: vec![file_len], segment: None, timeout };
        let (room, fds) = match self.room(&mut open, deadline).await {
            Ok(room) => room,
            Err(error) => return Err(self.cancel(open, error).await),
        };
        let contribution = self.house.number();
        self.contributions().insert(contribution, Some(open));
        let reply = Reply::Begun(Begun { contribution, id, epoch, number, committed, room });
        Ok(Answer { reply, fds, sharing: None })
    }

    /// Room for the last archive of a contribution, and its memory if the client does not have it yet.
    async fn room(
        &self,
        open: &mut Contribution,
        deadline: Instant,
    ) -> Result<(Room, Vec<OwnedFd>)> {
        let len = open.lens.last().copied().unwrap_or_default();
        open.segment = None;
        if open.committed.is_some() || len <= INLINE.into() {
            return Ok((Room::Inline, Vec::new()));
        }
        let lent = self.in_memory(deadline, |pool| pool.lend(self.peer, len)).await?;
        open.segment = Some(lent.segment);
        let room = Room::Segment { segment: lent.segment, capacity: lent.capacity };
        Ok((room, lent.memory.into_iter().collect()))
    }

    /// Room for another archive of a contribution, whose last one is complete.
    async fn extend(&self, contribution: u64, file_len: u64, data: &[u8]) -> Result<Answer<'_>> {
        let taken = self.contributions().get_mut(&contribution).and_then(Option::take);
        let mut open = taken.ok_or_else(|| unknown(contribution))?;
        let extended = async {
            self.publish(&open, data).await?;
            open.lens.push(file_len);
            let deadline = Instant::now() + open.timeout;
            self.room(&mut open, deadline).await
        };
        let error = match extended.await {
            Ok((room, fds)) => match self.contributions().get_mut(&contribution) {
                Some(waiting) => {
                    *waiting = Some(open);
                    return Ok(Answer { reply: Reply::Room(room), fds, sharing: None });
                }
                None => unknown(contribution),
            },
            Err(error) => error,
        };
        self.contributions().remove(&contribution);
        Err(self.cancel(open, error).await)
    }

    /// Does something that needs memory; waits for it until the deadline if there is none.
    async fn in_memory<T>(
        &self,
        deadline: Instant,
        mut work: impl FnMut(&Pool) -> std::io::Result<Result<T, Exhausted>>,
    ) -> Result<T> {
        let pool = &self.house.pool;
        loop {
            let mut freed = std::pin::pin!(pool.freed.notified());
            freed.as_mut().enable();
            let exhausted = match work(pool).map_err(|error| Error::io("memory", error))? {
                Ok(done) => return Ok(done),
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

    /// Takes a contribution, to decide it; none if it waits for room: then it is not to get any.
    fn take(&self, contribution: u64) -> Result<Option<Contribution>> {
        self.contributions().remove(&contribution).ok_or_else(|| unknown(contribution))
    }

    async fn commit(
        &self,
        contribution: u64,
        digest: Digest,
        data: &[u8],
    ) -> Result<crate::controller::Progress> {
        let open = self.take(contribution)?.ok_or_else(|| unknown(contribution))?;
        let committed = async {
            self.publish(&open, data).await?;
            let progress = self.house.controller.commit(&open.place, digest, &open.lens).await?;
            // A contribution that was committed before is no other put.
            if open.committed.is_none() {
                let mut counts = self.house.counters.count();
                counts.puts += 1;
                counts.bytes_put += open.lens.iter().sum::<u64>();
                counts.published += u64::from(progress.visible);
            }
            Ok(progress)
        };
        match committed.await {
            Ok(progress) => Ok(progress),
            Err(error) => Err(self.cancel(open, error).await),
        }
    }

    /// Gives the last archive its name.
    async fn publish(&self, open: &Contribution, data: &[u8]) -> Result<()> {
        if open.committed.is_some() {
            return Ok(());
        }
        let path = open.place.path(open.lens.len() - 1);
        let len = open.lens.last().copied().unwrap_or_default();
        match open.segment {
            Some(segment) => {
                let published = self.house.pool.publish(self.peer, segment, &path, len);
                published.map_err(|error| Error::io(&path, error))?;
            }
            None if u64::try_from(data.len()) == Ok(len) => {
                let deadline = Instant::now() + open.timeout;
                self.in_memory(deadline, |pool| pool.write(&path, data)).await?;
            }
            None => {
                let came = data.len();
                let text = format!("an archive of {came} bytes where {len} were announced");
                return Err(Error::new(ErrorKind::Invalid, text));
            }
        }
        if open.place.durability == Durability::Disk {
            let (tiers, started) = (self.house.tiers.clone(), Instant::now());
            wait(move || tiers.persist(&path)).await?;
            let seconds = started.elapsed().as_secs_f64();
            tracing::debug!(peer = self.peer, bytes = len, seconds, "on disk");
        }
        Ok(())
    }

    async fn withdraw(&self, contribution: u64) -> Result<()> {
        let Some(open) = self.take(contribution)? else { return Ok(()) };
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
        self.house.controller.withdraw(&open.place, open.lens.len()).await;
        error
    }

    /// A version, with the memory of its segments that the client does not have yet, and the right to send
    /// that.
    async fn locate(&self, number: u64, key: &Key, selector: Selector) -> Result<Answer<'_>> {
        let mut leased = self.house.lease(self.peer, key, selector).await?;
        let mut segments: Vec<SegmentId> =
            leased.archives.values().map(|span| span.segment).collect();
        segments.push(leased.manifest.segment);
        let sharing = self.sharing.lock().await;
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
            let mut part = reply(number, &Reply::Segments(segments), fds);
            part.kind = FrameKind::Part;
            let _ = self.outgoing.send(part).await;
        }
        let (segments, fds) = shared.into_iter().unzip();
        leased.segments = segments;
        Ok(Answer { reply: Reply::Leased(leased), fds, sharing: Some(sharing) })
    }

    /// The connection is over: what it has not decided is withdrawn, what it read is handed back.
    async fn end(&self) {
        let open = std::mem::take(&mut *self.contributions());
        for contribution in open.into_values().flatten() {
            let Contribution { place, lens, .. } = contribution;
            self.house.controller.withdraw(&place, lens.len()).await;
        }
        self.house.pool.leave(self.peer);
        self.house.lose(self.peer).await;
    }
}

fn reply(number: u64, answer: &Reply, fds: Vec<OwnedFd>) -> Frame {
    let of = |answer: &Reply, fds| {
        let head = serde_json::to_vec(answer).expect("a reply is JSON");
        Frame { kind: FrameKind::Reply, number, head, data: Vec::new(), fds }
    };
    let frame = of(answer, fds);
    if frame.is_within(Limits::DAEMON) {
        return frame;
    }
    let len = frame.head.len();
    let text = format_args!("the answer has {len} bytes, too many for one: ask for less");
    of(&Reply::Failed(Error::new(ErrorKind::Invalid, text).into()), Vec::new())
}

fn unmap(segment: SegmentId) -> Frame {
    let notice = Notice::Unmap { segments: vec![segment] };
    let head = serde_json::to_vec(&notice).expect("a notice is JSON");
    Frame { kind: FrameKind::Notice, number: 0, head, data: Vec::new(), fds: Vec::new() }
}

fn pid(pid: Pid) -> u32 {
    pid.as_raw_nonzero().get().cast_unsigned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_of_the_same_user_and_of_root_may_connect() {
        let own = rustix::process::geteuid().as_raw();
        let other = own + 7;
        let mut options = DaemonOptions::at("socket", 0);
        assert!(allow(own, &options).is_ok() && allow(0, &options).is_ok());
        assert!(allow(other, &options).is_err());
        // Who is not of the group cannot connect.
        options.socket_group = Some(1);
        assert!(allow(other, &options).is_ok());
        options.allow_uids = vec![other];
        assert!(allow(other, &options).is_ok());
        let error = allow(other + 1, &options).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Refused);
        assert!(error.to_string().contains(&(other + 1).to_string()), "{error}");
    }

    #[test]
    fn limits_are_those_of_the_spec() {
        let spec = include_str!("../../../spec/protocol.md");
        let seconds = |span: Duration| span.as_secs();
        let count = |count: usize| u64::try_from(count).unwrap();
        let (daemon, client, stranger) = (Limits::DAEMON, Limits::CLIENT, Limits::STRANGER);
        let limits = [
            ("daemon_head", daemon.head.into()),
            ("daemon_data", daemon.data.into()),
            ("daemon_fds", daemon.fds.into()),
            ("client_head", client.head.into()),
            ("client_data", client.data.into()),
            ("client_fds", client.fds.into()),
            ("hello_head", stranger.head.into()),
            ("hello", seconds(HANDSHAKE)),
            ("frame", seconds(link::PATIENCE)),
            ("longest", seconds(LONGEST)),
            ("drain", seconds(super::super::DRAIN)),
            ("requests", count(REQUESTS)),
            ("connections", count(super::super::MAX_PEERS)),
        ];
        for (name, value) in limits {
            assert!(spec.contains(&format!("\n| `{name}` | {value} | ")), "{name} = {value}");
        }
        assert_eq!((client.data, stranger.data, stranger.fds), (INLINE, 0, 0));
    }
}
