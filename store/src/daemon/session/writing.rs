//! Contributions of one connection: where their archives are written, and what becomes of them.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use rustix::fs::FileType;

use super::{Answer, Asked, LONGEST, Session};
use crate::control::{Contributed, OnDevice, Place, Progress, Proposal};
use crate::daemon::elsewhere::{Keeper, Source};
use crate::daemon::house::Undecided;
use crate::device::HEAD_BYTES;
use crate::error::{Error, ErrorKind, Result};
use crate::io::exec::run_blocking;
use crate::io::sync::Lock;
use crate::key::Key;
use crate::ledger::{Digest, Durability, WriterSet};
use crate::net::tls::Endpoint;
use crate::net::wire::{Begin, Begun, Failure, INLINE, Reply, Room, SharedSegment};
use crate::shm::{Exhausted, Pool, SegmentId, Writing};

/// Of so many contributions of a connection it can be asked what becomes of them in the bucket.
const MAX_STORING: usize = 1024;

/// A GPU is not called by more bytes, and an archive has not more in its memory.
const MAX_UUID: usize = 64;
const MAX_DEVICE_BYTES: u64 = 1 << 46;

/// None is one that waits for room.
pub(crate) type Contributions = BTreeMap<u64, Option<Contribution>>;

pub(crate) struct Contribution {
    place: Place,
    /// Everyone who contributes to the version.
    writers: WriterSet,
    committed: Option<Digest>,
    /// The lengths of its archives; the last one is being written.
    lens: Vec<u64>,
    memory: Memory,
    /// If it is to be in the memory of a GPU: the GPU, how many bytes of it, and once there is room, where.
    device: Option<OnDevice>,
    on_device: Option<SegmentId>,
    /// Until when room for another one is waited for.
    timeout: Duration,
    _undecided: Undecided,
}

/// Where an archive is written.
enum Memory {
    /// In the client's: it comes as data of the frame that completes it.
    Inline,
    /// In a segment that is lent to the client.
    Lent(SegmentId),
    /// In that of another daemon.
    Kept(Endpoint),
    /// In one of the daemon's, where it comes as data of so many bytes so far.
    Own(Writing, u64),
}

fn unknown(contribution: u64) -> Error {
    let text = format_args!("contribution {contribution} is none of this connection's");
    Error::new(ErrorKind::Invalid, text)
}

/// The lengths of archives that are kept elsewhere, if they can be so.
fn kept_lens(lens: Vec<u64>) -> Result<Vec<u64>> {
    let bytes = lens.iter().try_fold(0_u64, |all, len| all.checked_add(*len));
    if lens.is_empty() || bytes.is_none() {
        let text = "the lengths of the archives that are kept, one at least, must have a sum";
        return Err(Error::new(ErrorKind::Invalid, text));
    }
    Ok(lens)
}

impl Contribution {
    /// How many bytes of the last archive are in this host's memory: its shell, if the rest is in a GPU's.
    fn host_len(&self) -> u64 {
        let len = self.lens.last().copied().unwrap_or_default();
        match &self.device {
            Some(device) => HEAD_BYTES.saturating_add(len.saturating_sub(device.len)),
            None => len,
        }
    }
}

impl Session {
    pub(crate) async fn begin(
        &self,
        asked: &Asked,
        Begin { key, mut proposal, keeper, digest }: Begin,
        data: Bytes,
    ) -> Result<Answer<'_>> {
        let key = &Key::new(key)?;
        let undecided = self.house.undecided()?;
        proposal.timeout = proposal.timeout.min(LONGEST);
        self.check_device(proposal.device.as_ref(), proposal.file_len, proposal.durability)?;
        let deadline = Instant::now() + proposal.timeout;
        let file_len = proposal.file_len;
        self.house.check(proposal.durability)?;
        let keeper = keeper.map(|url| self.keeper(&url, &proposal)).transpose()?;
        let carried = digest.filter(|_| file_len <= INLINE.into()).map(|digest| (digest, data));
        let carried = Lock::new(carried);
        let take = || carried.lock().take();
        let is_wanted = || {
            // What waits for others holds neither a place nor an archive, and is not committed by itself.
            drop(take());
            asked.wait(0);
            self.is_asked(asked)
        };
        if let (Durability::Object, Some(mirror)) = (proposal.durability, &self.house.mirror) {
            mirror.admit(key, deadline, is_wanted).await?;
            proposal.timeout = deadline.saturating_duration_since(Instant::now());
        }
        let (place, committed) = self.house.registry.open(key, &proposal, &is_wanted).await?;
        let (timeout, id, epoch, number) = (proposal.timeout, place.id, place.epoch, place.number);
        let mut open = Contribution {
            place,
            writers: proposal.writers,
            committed,
            lens: vec![file_len],
            memory: Memory::Inline,
            device: proposal.device,
            on_device: None,
            timeout,
            _undecided: undecided,
        };
        let stem = if keeper.is_some() { open.place.stem.clone() } else { String::new() };
        if let Some(keeper) = keeper {
            open.memory = Memory::Kept(keeper);
        }
        let rooms = self.rooms(&mut open, (asked, deadline)).await;
        let (room, fds, device) = match rooms.and_then(|rooms| asked.check().map(|()| rooms)) {
            Ok(rooms) => rooms,
            Err(error) => return Err(self.cancel(open, error).await),
        };
        let contribution = self.house.number();
        let archive = take().filter(|_| room == Room::Inline && device.is_none());
        let progress = if let Some(archive) = archive {
            Some(self.decide(asked, contribution, open, archive).await?)
        } else {
            self.contributions().insert(contribution, Some(open));
            None
        };
        let begun =
            Begun { contribution, id, epoch, number, committed, room, device, stem, progress };
        let reply = Reply::Begun(begun);
        Ok(Answer { fds, ..reply.into() })
    }

    /// Room for the last archive of a contribution: what is to be in the memory of a GPU first, since the memory of the host
    /// comes with the reply alone.
    async fn rooms(
        &self,
        open: &mut Contribution,
        until: (&Asked, Instant),
    ) -> Result<(Room, Vec<OwnedFd>, Option<SharedSegment>)> {
        let device = self.room_on_device(open)?;
        let (room, fds) = self.room(open, until).await?;
        Ok((room, fds, device))
    }

    /// Room for the last archive of a contribution, and its memory if the client does not have it yet.
    async fn room(
        &self,
        open: &mut Contribution,
        until: (&Asked, Instant),
    ) -> Result<(Room, Vec<OwnedFd>)> {
        let len = open.host_len();
        if let Memory::Kept(_) = open.memory {
            return Ok((Room::Kept, Vec::new()));
        }
        open.memory = Memory::Inline;
        if open.committed.is_some() || len <= INLINE.into() {
            return Ok((Room::Inline, Vec::new()));
        }
        if !self.origin.is_near() {
            let writing = self.in_memory(until, 0, |pool| pool.write_own(len)).await?;
            open.memory = Memory::Own(writing, 0);
            return Ok((Room::Frames, Vec::new()));
        }
        let lent = self.in_memory(until, 0, |pool| pool.lend(self.peer, len)).await?;
        open.memory = Memory::Lent(lent.segment);
        let room = Room::Segment { segment: lent.segment, capacity: lent.capacity };
        Ok((room, lent.memory.into_iter().collect()))
    }

    /// Proves that what is to be in the memory of a GPU can be.
    fn check_device(
        &self,
        device: Option<&OnDevice>,
        file_len: u64,
        durability: Durability,
    ) -> Result<()> {
        let Some(OnDevice { uuid, len, room }) = device else { return Ok(()) };
        let text = if uuid.len() > MAX_UUID || (*len).max(*room) > MAX_DEVICE_BYTES {
            "no GPU is called so, or has so much memory"
        } else if !self.origin.is_near() {
            "only processes of this host put to the memory of its GPUs"
        } else if self.house.registry.is_elsewhere() {
            "whoever decides elsewhere cannot look at what is in the memory of a GPU here"
        } else if durability != Durability::Memory {
            "what must last does not stay in the memory of a GPU"
        } else if *len < HEAD_BYTES || *len > file_len {
            "an archive has 4096 bytes in front of its data, and no more in front of its index than in all"
        } else {
            return Ok(());
        };
        Err(Error::new(ErrorKind::Invalid, text))
    }

    /// Room for what an archive has in front of its index, in the memory of a GPU.
    fn room_on_device(&self, open: &mut Contribution) -> Result<Option<SharedSegment>> {
        let device = open.device.as_ref().filter(|_| open.committed.is_none());
        let Some(OnDevice { uuid, len, room }) = device else { return Ok(None) };
        let lent = self.house.pool.lend_device(self.peer, uuid, (*len).max(*room)).ok_or_else(|| {
            let text = "this process has as many segments of GPUs as a daemon keeps for one: put larger buckets, \
                        or keep fewer versions";
            Error::new(ErrorKind::Busy, text)
        })?;
        open.on_device = Some(lent.segment);
        let device = Some(uuid.clone());
        Ok(Some(SharedSegment { segment: lent.segment, capacity: lent.capacity, device }))
    }

    /// The memory of a segment of a GPU that was lent.
    pub(crate) fn bring(&self, segment: SegmentId, fds: Vec<OwnedFd>) -> Result<()> {
        let invalid = |text: &dyn std::fmt::Display| Error::new(ErrorKind::Invalid, text);
        let Ok([memory]) = <[OwnedFd; 1]>::try_from(fds) else {
            return Err(invalid(&"one descriptor comes with memory that is brought"));
        };
        let kind = rustix::fs::fstat(&memory).map(|status| FileType::from_raw_mode(status.st_mode));
        if matches!(kind, Err(_) | Ok(FileType::Socket | FileType::Fifo | FileType::Directory)) {
            return Err(invalid(&"what was brought is no memory of a GPU"));
        }
        let brought = self.house.pool.bring(self.peer, segment, memory);
        brought.map_err(|error| invalid(&format_args!("segment {segment}: {error}")))
    }

    /// Bytes of an archive that comes in frames.
    pub(crate) fn write(&self, contribution: u64, offset: u64, data: &[u8]) -> Result<()> {
        let mut open = self.contributions();
        let open = open.get_mut(&contribution).and_then(Option::as_mut);
        let open = open.ok_or_else(|| unknown(contribution))?;
        let Memory::Own(writing, come) = &mut open.memory else {
            return Err(Error::new(ErrorKind::Invalid, "its room is not in frames"));
        };
        // One after the other: nothing is left out that another archive was in before.
        let start = usize::try_from(offset).ok().filter(|_| offset == *come);
        let range = start.and_then(|start| Some(start..start.checked_add(data.len())?));
        let target = range.and_then(|range| writing.bytes_mut().get_mut(range));
        let target = target.ok_or_else(|| {
            let len = data.len();
            let text =
                format_args!("{len} bytes at {offset} of an archive of which {come} have come");
            Error::new(ErrorKind::Invalid, text)
        })?;
        target.copy_from_slice(data);
        *come = come.saturating_add(u64::try_from(data.len()).unwrap_or(u64::MAX));
        Ok(())
    }

    /// The daemon that keeps the archives of a contribution.
    fn keeper(&self, url: &str, proposal: &Proposal) -> Result<Endpoint> {
        if self.origin.is_near() {
            return Err(Error::new(ErrorKind::Refused, "only daemons keep archives"));
        }
        if proposal.durability != Durability::Memory {
            let text = "what must last is put on the host of the daemon that decides";
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        if self.house.registry.is_elsewhere() {
            let text = "another daemon decides here: name that one as the controller";
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        let endpoint: Endpoint = url.parse()?;
        // What is proven here is not to be read in the open there.
        if endpoint.is_tls() != self.house.tiers.elsewhere.is_tls() {
            let text =
                format_args!("`{endpoint}`: daemons talk to each other all by tls:, or none");
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        Ok(endpoint)
    }

    /// Room for another archive of a contribution, whose last one is complete.
    pub(crate) async fn extend(
        &self,
        asked: &Asked,
        contribution: u64,
        (file_len, device): (u64, Option<OnDevice>),
        data: Bytes,
    ) -> Result<Answer<'_>> {
        let taken = self.contributions().get_mut(&contribution).and_then(Option::take);
        let mut open = taken.ok_or_else(|| unknown(contribution))?;
        let extended = async {
            self.check_device(device.as_ref(), file_len, open.place.durability)?;
            self.publish(asked, &mut open, data).await?;
            open.lens.push(file_len);
            (open.device, open.on_device) = (device, None);
            let deadline = Instant::now() + open.timeout;
            self.rooms(&mut open, (asked, deadline)).await
        };
        let error = match extended.await {
            Ok((room, fds, device)) => match self.contributions().get_mut(&contribution) {
                Some(waiting) => {
                    *waiting = Some(open);
                    let reply = match device {
                        Some(device) => Reply::Rooms { room, device },
                        None => Reply::Room(room),
                    };
                    return Ok(Answer { fds, ..reply.into() });
                }
                None => unknown(contribution),
            },
            Err(error) => error,
        };
        self.contributions().remove(&contribution);
        Err(self.cancel(open, error).await)
    }

    /// Does something that needs memory; waits for it if there is none, while it is asked for and until the deadline,
    /// and keeps so many bytes of data meanwhile.
    pub(crate) async fn in_memory<T>(
        &self,
        (asked, deadline): (&Asked, Instant),
        bytes: usize,
        work: impl FnMut(&Arc<Pool>) -> std::io::Result<Result<T, Exhausted>>,
    ) -> Result<T> {
        let left = deadline.saturating_duration_since(Instant::now());
        let waits_no_more = async {
            asked.wait(bytes);
            tokio::select! {
                () = tokio::time::sleep(left) => {}
                () = self.unasked(asked) => {}
            }
        };
        let replicas = &self.house.tiers.replicas;
        let done = replicas.in_memory(&*self.house.registry, waits_no_more, work).await;
        let done = done.map_err(|error| Error::io("memory", error))?;
        done.map_err(|exhausted| self.house.no_room(&exhausted))
    }

    /// Takes a contribution, to decide it; none if it waits for room: then it is not to get any.
    fn take(&self, contribution: u64) -> Result<Option<Contribution>> {
        self.contributions().remove(&contribution).ok_or_else(|| unknown(contribution))
    }

    pub(crate) async fn commit(
        &self,
        asked: &Asked,
        contribution: u64,
        (digest, lens): (Digest, Vec<u64>),
        data: Bytes,
    ) -> Result<Progress> {
        let mut open = self.take(contribution)?.ok_or_else(|| unknown(contribution))?;
        if let Memory::Kept(_) = open.memory {
            match kept_lens(lens) {
                Ok(lens) => open.lens = lens,
                Err(error) => return Err(self.cancel(open, error).await),
            }
        }
        self.decide(asked, contribution, open, (digest, data)).await
    }

    /// Commits a contribution, whose last archive is the data if its room was inline.
    async fn decide(
        &self,
        asked: &Asked,
        contribution: u64,
        mut open: Contribution,
        (digest, data): (Digest, Bytes),
    ) -> Result<Progress> {
        let committed = async {
            self.publish(asked, &mut open, data).await?;
            let turn = self.house.turn(&open.place.key).await;
            asked.check()?;
            let progress = self.house.registry.commit(&open.place, digest, &open.lens).await?;
            if progress.visible {
                let Place { key, id, epoch, number, .. } = &open.place;
                self.house.tell_followers(key, (*id, (*epoch, *number))).await;
            }
            drop(turn);
            // A contribution that was committed before is no other put.
            if open.committed.is_none() {
                let mut counts = self.house.counters.count();
                let bytes = open.lens.iter().copied().fold(0, u64::saturating_add);
                counts.puts += 1;
                counts.bytes_put = counts.bytes_put.saturating_add(bytes);
                counts.published += u64::from(progress.visible);
            }
            Ok(progress)
        };
        match committed.await {
            Ok(progress) => {
                self.house.let_go_of_replaced(&open.place.key).await;
                self.store(contribution, open, digest).await?;
                Ok(progress)
            }
            Err(error) => Err(self.cancel(open, error).await),
        }
    }

    /// Lets a contribution that was committed go on to the bucket, if it is to be there.
    async fn store(&self, contribution: u64, open: Contribution, digest: Digest) -> Result<()> {
        let Some(mirror) = &self.house.mirror else { return Ok(()) };
        let Contribution { place, writers, lens, committed, .. } = open;
        if place.durability == Durability::Object {
            let earlier = match committed {
                Some(_) => mirror.committed(&place).await?,
                None => None,
            };
            let own = Contributed { place, writers, digest, lens };
            let stored = mirror.store(earlier.unwrap_or(own));
            let mut storing = self.storing();
            if storing.len() >= MAX_STORING {
                storing.pop_first();
            }
            storing.insert(contribution, stored);
        }
        Ok(())
    }

    /// Waits until a contribution is in the bucket; says how far its version has come there.
    pub(crate) async fn stored(
        &self,
        asked: &Asked,
        contribution: u64,
        patience: Duration,
    ) -> Result<Progress> {
        asked.wait(0);
        let storing = self.storing().remove(&contribution);
        let mut storing = storing.ok_or_else(|| unknown(contribution))?;
        let patience = patience.min(LONGEST);
        let waited = tokio::select! {
            biased;
            stored = storing.wait_for(Option::is_some) => stored.ok().and_then(|it| it.clone()),
            () = tokio::time::sleep(patience) => None,
            () = self.unasked(asked) => None,
        };
        match waited {
            Some(Ok(progress)) => Ok(progress),
            Some(Err(failure)) => {
                let text = format!("the version is not in the bucket: {}", failure.text);
                Err(Failure { text, ..failure }.into())
            }
            None if self.house.is_ending() => {
                let text = "the daemon ends, and the version is not in the bucket";
                Err(Error::new(ErrorKind::Unreachable, text))
            }
            None => {
                let text = format_args!(
                    "the version is in memory, and not in the bucket after {patience:?}: `status` says how far it is"
                );
                Err(Error::new(ErrorKind::Busy, text))
            }
        }
    }

    /// Gives the last archive its name.
    async fn publish(&self, asked: &Asked, open: &mut Contribution, data: Bytes) -> Result<()> {
        if open.committed.is_some() {
            return Ok(());
        }
        let path = open.place.path(open.lens.len() - 1);
        let len = open.host_len();
        let all = |come: u64| {
            let text = format!("an archive of {come} bytes where {len} were announced");
            if come == len { Ok(()) } else { Err(Error::new(ErrorKind::Invalid, text)) }
        };
        let failed = |error| Error::io(&path, error);
        match std::mem::replace(&mut open.memory, Memory::Inline) {
            Memory::Kept(endpoint) => {
                let keeper = Keeper { endpoint, source: Source::Origin };
                for (number, len) in open.lens.iter().enumerate() {
                    let name = open.place.path(number);
                    self.house.tiers.elsewhere.note(&name, std::slice::from_ref(&keeper), *len);
                }
                return Ok(());
            }
            Memory::Lent(segment) => {
                let published = self.house.pool.publish(self.peer, segment, &path, len);
                if let Err(error) = published {
                    open.memory = Memory::Lent(segment);
                    return Err(failed(error));
                }
            }
            Memory::Own(writing, come) => {
                all(come)?;
                writing.publish(&path).map_err(failed)?;
            }
            Memory::Inline => {
                all(u64::try_from(data.len()).unwrap_or(u64::MAX))?;
                let deadline = Instant::now() + open.timeout;
                let write = |pool: &Arc<Pool>| pool.write(&path, &data);
                self.in_memory((asked, deadline), data.len(), write).await?;
            }
        }
        if let Some(segment) = open.on_device {
            let whole = open.lens.last().copied().unwrap_or_default();
            let published = self.house.pool.publish_hollow(self.peer, segment, &path, whole);
            let invalid = |error| Error::new(ErrorKind::Invalid, format_args!("`{path}`: {error}"));
            published.map_err(invalid)?;
            // It is no longer this contribution's to give back.
            open.on_device = None;
        }
        if open.place.durability == Durability::Disk {
            let (tiers, started) = (self.house.tiers.clone(), Instant::now());
            run_blocking(move || tiers.persist(&path)).await?;
            let seconds = started.elapsed().as_secs_f64();
            tracing::debug!(peer = self.peer, bytes = len, seconds, "on disk");
        }
        Ok(())
    }

    pub(crate) async fn withdraw(&self, contribution: u64) -> Result<()> {
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
        let error = self.house.registry.reason(&open.place, error).await;
        if let Memory::Lent(segment) = open.memory {
            self.house.pool.give_back(self.peer, segment);
        }
        if let Some(segment) = open.on_device {
            self.house.pool.give_back(self.peer, segment);
        }
        self.house.registry.withdraw(&open.place, open.lens.len()).await;
        error
    }

    /// Withdraws all that is not decided.
    pub(crate) async fn withdraw_all(&self) {
        let open = std::mem::take(&mut *self.contributions());
        for contribution in open.into_values().flatten() {
            let Contribution { place, lens, .. } = contribution;
            self.house.registry.withdraw(&place, lens.len()).await;
        }
    }
}
