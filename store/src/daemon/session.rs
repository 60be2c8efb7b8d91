//! One connection of a daemon.

mod asked;
mod fetching;
mod guest;
mod writing;

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::task::JoinSet;

use self::asked::{Asked, REQUESTS, Requests};
pub(crate) use self::guest::Guest;
use self::guest::Origin;
use self::writing::Contributions;
use super::DaemonOptions;
use super::house::{House, Leased};
use super::mirror::Storing;
use super::reading::{copied, gather, total};
use super::tiers::Place;
use crate::error::{Error, ErrorKind, Result};
use crate::io::exec::run_blocking;
use crate::io::sync::{Lock, MutexGuard, boxed};
use crate::key::Key;
use crate::ledger::Selector;
use crate::net::link::Receiver;
use crate::net::wire::{
    self, Archives, Data, Failure, Frame, FrameKind, Hello, INLINE, Keys, Limits, Location,
    MAX_FDS, Notice, Protocol, Range, Reply, Request, SharedSegment, Sum, Welcome,
};
use crate::shm::{PeerId, SegmentId, Shared};
use crate::status::DaemonStatus;

/// A client says what it is within this time.
const HANDSHAKE: Duration = Duration::from_secs(5);

/// How many kilobytes that were asked for are on their way to one client at most.
const READING: usize = 16 << 10;

/// So many archives go into one head, whatever their key is: the names of each have 4 KiB at most.
const MANY: usize = 200;

/// How many bytes of keys go into one reply: in JSON they have a few times as many at most.
const PAGE: usize = 128 << 10;

/// How often a client hears that a version is on its way from the bucket.
const BEAT: Duration = Duration::from_secs(10);

/// For how long a request waits at most, whatever it says.
const LONGEST: Duration = Duration::from_hours(1);

struct Session {
    house: Arc<House>,
    peer: PeerId,
    origin: Origin,
    /// What has begun and is not decided.
    contributions: Lock<Contributions>,
    /// What was committed here and is on its way to the bucket, by the numbers of the contributions.
    storing: Lock<BTreeMap<u64, Storing>>,
    outgoing: mpsc::Sender<Outgoing>,
    requests: Arc<Requests>,
    /// How many more kilobytes may be on their way to the client.
    reading: Arc<Semaphore>,
    /// Whoever has it sends memory. What has gone once does not go again, so whatever names it must
    /// come after.
    sharing: tokio::sync::Mutex<()>,
}

/// What a request is answered with.
struct Answer<'a> {
    reply: Reply,
    data: Data,
    fds: Vec<OwnedFd>,
    /// The right to send memory of segments, kept until it is sent.
    sharing: Option<tokio::sync::MutexGuard<'a, ()>>,
    credits: Vec<OwnedSemaphorePermit>,
}

impl From<Reply> for Answer<'_> {
    fn from(reply: Reply) -> Self {
        let (fds, credits) = (Vec::new(), Vec::new());
        Self { reply, data: Data::default(), fds, sharing: None, credits }
    }
}

/// A frame, and what is free again once it has gone.
struct Outgoing {
    frame: Frame,
    _credits: Vec<OwnedSemaphorePermit>,
}

/// Serves a connection until it ends.
pub(crate) async fn run(house: Arc<House>, guest: Guest, options: Arc<DaemonOptions>) {
    let Guest { mut sender, mut receiver, origin } = guest;
    let Ok(Some((number, said))) = tokio::time::timeout(HANDSHAKE, hello(&mut receiver)).await
    else {
        return;
    };
    let client = match said.and_then(|client| origin.allow(&options).map(|()| client)) {
        Ok(client) => client,
        Err(error) => {
            tracing::warn!(?origin, %error, "turned away");
            house.counters.count().turned_away += 1;
            // It is turned away, whether it hears it or not.
            let _ = sender.send(&reply(number, Reply::Failed(error.into()).into()).frame).await;
            return;
        }
    };
    receiver.limit(origin.limits());
    // None if it has ended since it said hello, or if nobody here can say when it does: then what it has mapped counts as
    // handed back, and is not written again all the same if it was leased. Who has said nothing costs one descriptor, not two.
    let process = origin.process();
    let peer = house.number();
    tracing::info!(peer, ?origin, client, "connected");
    house.join(peer, (origin.pid(), origin.address()), client);
    let mut unmapped = house.pool.join(peer);
    let (outgoing, mut frames) = mpsc::channel::<Outgoing>(REQUESTS);
    let session = Arc::new(Session {
        house,
        peer,
        origin,
        contributions: Lock::default(),
        storing: Lock::default(),
        outgoing,
        requests: Requests::new(),
        reading: Arc::new(Semaphore::new(READING)),
        sharing: tokio::sync::Mutex::default(),
    });
    let welcome = Welcome {
        protocol: Protocol::OWN,
        daemon: concat!("tssd ", env!("CARGO_PKG_VERSION")).to_owned(),
        pid: std::process::id(),
        instance: session.house.instance,
        inline: INLINE.into(),
        // Whoever decides elsewhere cannot look at what is here.
        devices: session.origin.is_near() && !session.house.registry.is_elsewhere(),
    };
    // Who is gone already is seen to be so below.
    let _ = session.outgoing.send(reply(number, Reply::Welcome(welcome).into())).await;
    let sending = async {
        loop {
            let frame = tokio::select! {
                frame = frames.recv() => frame,
                segment = unmapped.recv() => segment.map(unmap),
            };
            let Some(frame) = frame else { break };
            if sender.send(&frame.frame).await.is_err() {
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
            let pid = session.origin.pid();
            session.house.lost.add(pool, (pid, process), peer);
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

fn not_understood(error: &serde_json::Error) -> Error {
    Error::new(ErrorKind::Invalid, format_args!("a request that is not understood: {error}"))
}

impl Session {
    fn contributions(&self) -> MutexGuard<'_, Contributions> {
        self.contributions.lock()
    }

    fn storing(&self) -> MutexGuard<'_, BTreeMap<u64, Storing>> {
        self.storing.lock()
    }

    /// Takes requests until the connection ends. Says whether the client has said goodbye.
    async fn receive(self: &Arc<Self>, receiver: &mut Receiver, tasks: &mut JoinSet<()>) -> bool {
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
                    Ok(Notice::Got(got)) => self.house.counters.count().add(got),
                    Ok(Notice::Unfollow { follower }) => {
                        self.house.unfollow(self.peer, follower).await;
                    }
                    Ok(Notice::Cancel { request }) => self.requests.cancel(request),
                    Ok(Notice::Goodbye) => return true,
                    // A notice that is not known yet.
                    Err(_) => {}
                },
                FrameKind::Request => {
                    let asked = self.requests.begin(frame.number).await;
                    let session = self.clone();
                    tasks.spawn(boxed(async move { session.answer(frame, asked).await }));
                }
                // No client says such a thing.
                FrameKind::Part | FrameKind::Reply => return false,
            }
        }
    }

    async fn answer(&self, frame: Frame, asked: Asked) {
        let started = Instant::now();
        let Frame { number, head, data, fds, .. } = frame;
        let data = data.into_bytes();
        let bytes = data.len();
        let request = serde_json::from_slice::<Request>(&head);
        // It may have to wait.
        drop(head);
        let op = request.as_ref().map_or("unknown", Request::op);
        let answered = match request {
            Ok(request) => self.handle(&asked, request, (data, fds)).await,
            Err(error) => Err(not_understood(&error)),
        };
        let failed = answered.as_ref().err().map(Error::kind);
        let (peer, seconds) = (self.peer, started.elapsed().as_secs_f64());
        match &answered {
            Ok(_) => tracing::debug!(peer, op, bytes, seconds, "answered"),
            Err(error) => tracing::debug!(peer, op, bytes, seconds, %error, "failed"),
        }
        *self.house.counters.count().requests.entry((op, failed)).or_default() += 1;
        let mut answer =
            answered.unwrap_or_else(|error| Reply::Failed(Failure::from(error)).into());
        let sharing = answer.sharing.take();
        let room = self.outgoing.reserve().await;
        // Whoever hears the answer may ask for as much again.
        drop(asked);
        // Who is gone needs no answer.
        if let Ok(room) = room {
            room.send(reply(number, answer));
        }
        // Memory that others are to send goes after this.
        drop(sharing);
    }

    async fn handle(
        &self,
        asked: &Asked,
        request: Request,
        (data, fds): (Bytes, Vec<OwnedFd>),
    ) -> Result<Answer<'_>> {
        let controller = &self.house.registry;
        // What nobody takes is not kept while something is waited for.
        let data = if request.takes_data() { data } else { Bytes::new() };
        let fds = if matches!(request, Request::Bring { .. }) { fds } else { Vec::new() };
        let answer = match request {
            Request::Hello(_) => {
                return Err(Error::new(ErrorKind::Invalid, "hello is said once"));
            }
            Request::Begin(begin) => return self.begin(asked, begin, data).await,
            Request::Extend { contribution, file_len, device } => {
                return self.extend(asked, contribution, (file_len, device), data).await;
            }
            Request::Commit { contribution, digest, lens } => {
                Reply::Progress(self.commit(asked, contribution, (digest, lens), data).await?)
            }
            Request::Stored { contribution, patience } => {
                Reply::Progress(self.stored(asked, contribution, patience).await?)
            }
            Request::Write { contribution, offset } => {
                self.write(contribution, offset, &data)?;
                Reply::Done
            }
            Request::Withdraw { contribution } => {
                self.withdraw(contribution).await?;
                Reply::Done
            }
            Request::Locate { key, selector, devices } => {
                return self.locate(asked, &Key::new(key)?, selector, devices).await;
            }
            Request::Read { blob, ranges, prove } => {
                return self.read(blob, ranges, prove).await;
            }
            Request::Bring { segment } => {
                self.bring(segment, fds)?;
                Reply::Done
            }
            Request::Discard { blobs } => {
                if self.origin.is_near() {
                    return Err(Error::new(ErrorKind::Refused, "only daemons say that"));
                }
                self.house.discard(&blobs)?;
                Reply::Done
            }
            Request::Missing { blobs } => {
                let is_missing = |name: &String| self.house.tiers.elsewhere.place(name).is_none();
                Reply::Missing(blobs.into_iter().filter(is_missing).collect())
            }
            Request::Prefetch { key, selector, archives } => {
                let key = Key::new(key)?;
                let fetched = self.prefetch(asked, &key, (selector, archives.as_deref()));
                Reply::Prefetched(fetched.await?)
            }
            Request::Versions { key } => {
                Reply::Versions(controller.versions(&Key::new(key)?).await?)
            }
            Request::Newer { key, seen, patience } => {
                let key = Key::new(key)?;
                let newer = controller.newer(&key, seen, patience.min(LONGEST));
                Reply::Newer(self.while_asked(asked, newer).await.transpose()?.flatten())
            }
            Request::Keys { prefix, after } => {
                Reply::Keys(page(&controller.keys(&prefix).await?, after.as_deref()))
            }
            Request::Delete { key, selection } => {
                let key = Key::new(key)?;
                let deleted = controller.delete(&key, selection);
                Reply::Deleted(self.house.change(&key, deleted).await?)
            }
            Request::Retain { key, keep, ttl } => {
                let key = Key::new(key)?;
                self.house.change(&key, controller.retain(&key, keep, ttl)).await?;
                Reply::Done
            }
            Request::Pin { key, selector, label } => {
                let key = Key::new(key)?;
                let pinned = controller.pin(&key, selector, &label);
                Reply::Pinned(self.house.change(&key, pinned).await?)
            }
            Request::Unpin { key, label } => {
                let key = Key::new(key)?;
                self.house.change(&key, controller.unpin(&key, &label)).await?;
                Reply::Done
            }
            Request::Pins { key } => Reply::Pins(controller.pins(&Key::new(key)?).await?),
            Request::Follow { key } => {
                Reply::Following(self.house.follow(self.peer, &Key::new(key)?)?)
            }
            Request::Next { follower, devices, patience } => {
                return self.next(asked, (follower, devices), patience.min(LONGEST)).await;
            }
            Request::Unread { key, at_most, patience } => {
                let key = Key::new(key)?;
                let unread = self.house.unread(&key, at_most, patience.min(LONGEST));
                self.while_asked(asked, unread).await.map_or(Reply::Done, Reply::Unread)
            }
            Request::Status => Reply::Status(self.status().await),
        };
        Ok(answer.into())
    }

    /// The next version of a key that is followed.
    async fn next(
        &self,
        asked: &Asked,
        (follower, devices): (u64, bool),
        patience: Duration,
    ) -> Result<Answer<'_>> {
        asked.wait(0);
        match self.house.next((self.peer, follower), patience, self.unasked(asked)).await? {
            Some((key, leased)) => self.hand(asked.number, &key, leased, devices).await,
            None => Ok(Reply::Done.into()),
        }
    }

    /// What something comes to, unless nobody asks before, or the daemon ends.
    async fn while_asked<T>(&self, asked: &Asked, waiting: impl Future<Output = T>) -> Option<T> {
        asked.wait(0);
        tokio::select! {
            done = waiting => Some(done),
            () = self.unasked(asked) => None,
        }
    }

    /// Returns once nobody waits for an answer: the request was taken back, the client is gone, or the daemon ends.
    async fn unasked(&self, asked: &Asked) {
        tokio::select! {
            () = asked.cancelled() => {}
            () = self.outgoing.closed() => {}
            () = self.house.closed() => {}
        }
    }

    /// Whether the client waits for an answer, as far as it has said.
    fn is_asked(&self, asked: &Asked) -> bool {
        !asked.is_cancelled() && !self.outgoing.is_closed()
    }

    async fn status(&self) -> DaemonStatus {
        let (hosts, hosts_error) = match self.house.hosts().await {
            Ok(hosts) => (hosts, None),
            Err(error) => (Vec::new(), Some(error)),
        };
        DaemonStatus { hosts, hosts_error, ..self.house.status() }
    }

    /// A version, with the memory of its segments that the client does not have yet, and the right to send
    /// that.
    async fn locate(
        &self,
        asked: &Asked,
        key: &Key,
        selector: Selector,
        devices: bool,
    ) -> Result<Answer<'_>> {
        let leased = self.house.lease(self.peer, key, selector);
        let leased = self.alive(asked, leased).await?;
        self.hand(asked.number, key, leased, devices).await
    }

    /// The same for what is leased already.
    async fn hand(
        &self,
        number: u64,
        key: &Key,
        Leased { grant, manifest, archives }: Leased,
        devices: bool,
    ) -> Result<Answer<'_>> {
        let hollow = archives.values().any(|place| matches!(place, Place::Hollow(_)));
        if hollow && !(self.origin.is_near() && devices) {
            self.house.release(self.peer, grant.lease).await;
            let text = format_args!(
                "key `{key}`: version {} is in the memory of a GPU, which only processes of its host that know of \
                 such memory can read: put it with residency=host",
                grant.number
            );
            return Err(Error::new(ErrorKind::Unsupported, text));
        }
        let location = |name: &String, place: &Place| match (place, self.origin) {
            (Place::Hollow(hollow), _) => Location::Hollow(*hollow),
            (Place::Here(span), Origin::Process { .. }) => Location::Span(*span),
            (Place::Here(span), Origin::Address(_)) => {
                Location::Blob { blob: name.clone(), len: span.len, at: None }
            }
            (Place::There(keeper, len), _) => {
                let at = Some(keeper.endpoint.to_string());
                Location::Blob { blob: name.clone(), len: *len, at }
            }
        };
        let located = archives.iter();
        let located =
            located.map(|(file, place)| (file.clone(), location(&grant.archives[file], place)));
        let mut leased = wire::Leased {
            lease: grant.lease,
            id: grant.id,
            number: grant.number,
            epoch: grant.epoch,
            manifest: location(&grant.manifest, &Place::Here(manifest)),
            archives: located.collect(),
            segments: Vec::new(),
        };
        // What does not go into one head goes ahead.
        for part in parts(&mut leased.archives) {
            let mut part = reply(number, Reply::Archives(part).into());
            part.frame.kind = FrameKind::Part;
            let _ = self.outgoing.send(part).await;
        }
        if !self.origin.is_near() {
            return Ok(Reply::Leased(leased).into());
        }
        let segments = archives.values().flat_map(Place::segments);
        let segments: Vec<SegmentId> = segments.chain([manifest.segment]).collect();
        let sharing = self.sharing.lock().await;
        let mut shared = Vec::new();
        for segment in segments {
            match self.house.pool.share(self.peer, segment) {
                Ok(None) => {}
                Ok(Some(Shared { memory, capacity, device })) => {
                    let device = device.map(|uuid| uuid.to_string());
                    shared.push((SharedSegment { segment, capacity, device }, memory));
                }
                Err(error) => {
                    drop(sharing);
                    self.house.release(self.peer, leased.lease).await;
                    return Err(Error::io("segment", error));
                }
            }
        }
        // What does not go into one frame goes ahead.
        while shared.len() > usize::from(MAX_FDS) {
            let (segments, fds) = shared.drain(..usize::from(MAX_FDS)).unzip();
            let mut part = reply(number, Answer { fds, ..Reply::Segments(segments).into() });
            part.frame.kind = FrameKind::Part;
            let _ = self.outgoing.send(part).await;
        }
        let (segments, fds) = shared.into_iter().unzip();
        leased.segments = segments;
        Ok(Answer { fds, sharing: Some(sharing), ..Reply::Leased(leased).into() })
    }

    /// Waits for what takes long; now and then the client is told that it is still waited for.
    async fn alive<T>(&self, asked: &Asked, work: impl Future<Output = T>) -> T {
        let mut work = std::pin::pin!(work);
        loop {
            tokio::select! {
                done = &mut work => return done,
                () = tokio::time::sleep(BEAT) => {
                    asked.wait(0);
                    let mut part = reply(asked.number, Reply::Archives(Archives::new()).into());
                    part.frame.kind = FrameKind::Part;
                    // Who has that much to hear already needs no more.
                    let _ = self.outgoing.try_send(part);
                }
            }
        }
    }

    /// Bytes of a blob. Copies of them are as many as there is credit for, here and for all.
    async fn read(&self, name: String, ranges: Vec<Range>, prove: bool) -> Result<Answer<'_>> {
        let house = self.house.clone();
        // What has come back from the bucket is noted to be elsewhere still.
        let is_here = house.pool.span(&name).is_some();
        let elsewhere = house.tiers.elsewhere.place(&name).filter(|_| !is_here);
        if let Some((_, len)) = elsewhere {
            match self.relay(&name, &ranges, prove, len).await {
                Ok(Some(relayed)) => return Ok(relayed),
                // It is here now.
                Ok(None) => {}
                Err(error) if error.kind() == ErrorKind::Unreachable => {
                    house.rescue(&name, error).await?;
                }
                Err(error) => return Err(error),
            }
        }
        let blob = house.open_blob(&name)?;
        let size = blob.size().map_err(|error| Error::io(&name, error))?;
        let bytes = total(&ranges, size)?;
        let copied = copied(&*blob, &ranges);
        let credits = self.credits(bytes, copied).await?;
        let read = move || {
            if prove {
                house.reading.prove(&name, &blob, &ranges)?;
            }
            let data = gather(&*blob, &ranges)?;
            let crc32 = prove.then(|| {
                let mut all = crc32fast::Hasher::new();
                data.pieces().iter().for_each(|piece| all.update(piece));
                all.finalize()
            });
            Ok((data, Sum { crc32 }))
        };
        let (data, sum) = if copied > 0 || prove { run_blocking(read).await? } else { read()? };
        self.house.counters.count().bytes_read += bytes;
        Ok(Answer { data, credits, ..Reply::Read(sum).into() })
    }

    /// Bytes of a blob of so many that other daemons have; none if it is here meanwhile.
    async fn relay(
        &self,
        name: &str,
        ranges: &[Range],
        prove: bool,
        len: u64,
    ) -> Result<Option<Answer<'_>>> {
        let bytes = total(ranges, len)?;
        let credits = self.credits(bytes, 0).await?;
        let replicas = &self.house.tiers.replicas;
        replicas.make(name, len, &*self.house.registry).await;
        let read = replicas.read(name, ranges, prove).await?;
        Ok(read.map(|(data, sum)| Answer { data: data.into(), credits, ..Reply::Read(sum).into() }))
    }

    /// The right to send so many bytes here, and of all to copy so many of them.
    async fn credits(&self, bytes: u64, copied: u64) -> Result<Vec<OwnedSemaphorePermit>> {
        let kilobytes = |bytes: u64| u32::try_from(bytes.div_ceil(1 << 10)).unwrap_or(u32::MAX);
        let own = self.reading.clone().acquire_many_owned(kilobytes(bytes)).await;
        let mut credits = vec![own.map_err(closed)?];
        if copied > 0 {
            let copies = self.house.copies.clone().acquire_many_owned(kilobytes(copied)).await;
            credits.push(copies.map_err(closed)?);
        }
        Ok(credits)
    }

    /// The connection is over: what it has not decided is withdrawn, what it read is handed back.
    async fn end(&self) {
        self.withdraw_all().await;
        self.house.pool.leave(self.peer);
        self.house.lose(self.peer, self.origin.is_near()).await;
    }
}

/// Takes archives away until the others surely go into a reply; returns them in parts that do.
fn parts(archives: &mut Archives) -> Vec<Archives> {
    let mut parts = Vec::new();
    while let Some((file, _)) = archives.iter().nth(MANY) {
        let file = file.clone();
        let rest = archives.split_off(&file);
        parts.push(std::mem::replace(archives, rest));
    }
    parts
}

/// As many keys as surely go into a reply.
fn page(keys: &[Key], after: Option<&str>) -> Keys {
    let first = after.map_or(0, |after| keys.partition_point(|key| key.as_str() <= after));
    let mut bytes = 0;
    let fit = keys[first..].iter().take_while(|key| {
        bytes += key.as_str().len();
        bytes <= PAGE
    });
    let fit: Vec<String> = fit.map(ToString::to_string).collect();
    Keys { more: first + fit.len() < keys.len(), keys: fit }
}

fn closed(error: tokio::sync::AcquireError) -> Error {
    Error::io("the daemon ends", std::io::Error::other(error))
}

fn reply(number: u64, answer: Answer<'_>) -> Outgoing {
    let Answer { reply, data, fds, credits, .. } = answer;
    let head = serde_json::to_vec(&reply).expect("a reply is JSON");
    let mut frame = Frame { kind: FrameKind::Reply, number, head, data, fds };
    if !frame.is_within(Limits::DAEMON) {
        let len = frame.head.len();
        let text = format_args!("the answer has {len} bytes, too many for one: ask for less");
        let failed = Reply::Failed(Error::new(ErrorKind::Invalid, text).into());
        frame.head = serde_json::to_vec(&failed).expect("a reply is JSON");
        (frame.data, frame.fds) = (Data::default(), Vec::new());
    }
    Outgoing { frame, _credits: credits }
}

fn unmap(segment: SegmentId) -> Outgoing {
    let notice = Notice::Unmap { segments: vec![segment] };
    let head = serde_json::to_vec(&notice).expect("a notice is JSON");
    let (data, fds) = (Data::default(), Vec::new());
    let frame = Frame { kind: FrameKind::Notice, number: 0, head, data, fds };
    Outgoing { frame, _credits: Vec::new() }
}

#[cfg(test)]
mod tests {
    use super::*;

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
            ("frame", seconds(crate::net::link::PATIENCE)),
            ("beat", seconds(BEAT)),
            ("longest", seconds(LONGEST)),
            ("drain", seconds(super::super::DRAIN)),
            ("far_client_data", Limits::FAR_CLIENT.data.into()),
            ("read", wire::MAX_READ),
            ("reading", count(READING << 10)),
            ("copies", count(super::super::house::COPIES << 10)),
            ("requests", count(REQUESTS)),
            ("waiting", count(asked::WAITING)),
            ("follow", count(super::super::house::MAX_FOLLOWED)),
            ("follow_waiting", count(super::super::house::MAX_WAITING)),
            ("connections", count(super::super::MAX_PEERS)),
        ];
        for (name, value) in limits {
            assert!(spec.contains(&format!("\n| `{name}` | {value} | ")), "{name} = {value}");
        }
        assert_eq!((client.data, stranger.data, stranger.fds), (INLINE, 0, 0));
    }
}
