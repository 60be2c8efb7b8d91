//! A contribution to a version in a daemon.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use tssd_format::{JobChecksums, WriteJob};

use super::calls::Owed;
use super::{Client, PATIENCE, broken, unexpected};
use crate::blob::{Part, slices, split};
use crate::control::{self, Committed, Contribution, OnDevice, Progress, Proposal, UploadFuture};
use crate::device::{self, Download, DownloadTarget, HEAD_BYTES, HEAD_LEN, Upload};
use crate::error::{Error, ErrorKind, Result};
use crate::io::exec::{backoff, run_blocking};
use crate::ledger::{Digest, Durability};
use crate::net::wire::{Begun, MAX_WRITE, Reply, Request, Room, SharedSegment};
use crate::shm::{SegmentId, WriteMap};

/// How often memory of a GPU is asked for that has none left.
const DEVICE_TRIES: u32 = 3;

/// Dropped before it is decided, it is withdrawn.
pub(super) struct RemoteContribution {
    client: Arc<Client>,
    contribution: u64,
    /// Of the archive, or of its shell.
    file_len: usize,
    memory: Memory,
    device: Option<DeviceRoom>,
    /// Copies from devices to the segment, if this process has a driver.
    download: Option<Box<dyn Download>>,
    /// For how long others are waited for.
    timeout: Duration,
    /// Whether it goes on to a bucket.
    is_stored: bool,
    /// How far the version has come, if it is committed already.
    progress: Option<Progress>,
    /// That it is withdrawn.
    owed: Owed,
}

/// Where the archive is written.
enum Memory {
    /// It is stored already.
    None,
    Own(Vec<u8>),
    /// As well, and sent before it is committed.
    Sent(Vec<u8>),
    Segment(SegmentId, WriteMap),
}

/// What an archive has in front of its index, on its way to the memory of a GPU.
struct DeviceRoom {
    len: u64,
    upload: Box<dyn Upload>,
}

impl RemoteContribution {
    pub(super) async fn new(
        client: Arc<Client>,
        begun: &Begun,
        proposal: &Proposal,
        owed: Owed,
    ) -> Result<Self> {
        let mut own = Self {
            client,
            contribution: begun.contribution,
            file_len: 0,
            memory: Memory::None,
            device: None,
            download: None,
            timeout: proposal.timeout,
            is_stored: proposal.durability == Durability::Object,
            progress: begun.progress.clone(),
            owed,
        };
        if begun.committed.is_none() && begun.progress.is_none() {
            let rooms = (begun.room, begun.device.as_ref());
            own.enter_all(rooms, proposal.file_len, proposal.device.as_ref()).await?;
        }
        Ok(own)
    }

    /// Writes the next archive there: all of it, or its shell, if what is in front of its index is to be in the memory of a
    /// GPU.
    async fn enter_all(
        &mut self,
        (room, lent): (Room, Option<&SharedSegment>),
        file_len: u64,
        device: Option<&OnDevice>,
    ) -> Result<()> {
        let Some(wanted) = device else { return self.enter(room, file_len).await };
        let lent = lent.ok_or_else(|| broken("it has no room in the memory of a GPU"))?;
        self.enter_device(lent, wanted.len).await?;
        self.enter(room, HEAD_BYTES + file_len.saturating_sub(wanted.len)).await
    }

    /// Writes what is in front of the index to the memory of a GPU, which is made if there is none to be had again.
    async fn enter_device(&mut self, lent: &SharedSegment, len: u64) -> Result<()> {
        if lent.capacity < len {
            return Err(broken("it lends less memory of a GPU than the archive takes"));
        }
        let (segment, made) = self.device(lent).await?;
        if let Some(memory) = made {
            let request = Request::Bring { segment: lent.segment };
            let brought = (Bytes::new(), Some(memory));
            match self.client.calls.call_with(&request, brought, PATIENCE).await?.reply {
                Reply::Done => self.client.maps.keep_device(lent.segment, segment.clone()),
                other => return Err(unexpected(&other)),
            }
        }
        self.device = Some(DeviceRoom { len, upload: segment.upload()? });
        Ok(())
    }

    /// Writes the next archive there.
    async fn enter(&mut self, room: Room, file_len: u64) -> Result<()> {
        self.file_len = usize::try_from(file_len)
            .map_err(|_| Error::new(ErrorKind::Invalid, "the archive does not fit into memory"))?;
        self.memory = match room {
            Room::Inline => Memory::Own(vec![0; self.file_len]),
            Room::Frames => Memory::Sent(vec![0; self.file_len]),
            Room::Kept => return Err(broken("nobody keeps the archive")),
            Room::Segment { segment, capacity } => {
                let maps = self.client.maps.clone();
                if maps.is_new(segment) {
                    // It is mapped with all its pages: that takes long.
                    run_blocking(move || maps.lent(segment, capacity)).await?;
                }
                let map = self.client.maps.take(segment)?;
                if map.len() < self.file_len {
                    return Err(broken("it lends less memory than the archive takes"));
                }
                self.download = device::driver().ok().map(device::Driver::download);
                Memory::Segment(segment, map)
            }
        };
        Ok(())
    }

    /// Memory of a GPU that is mapped, or made. What was let go of for it goes a moment later.
    async fn device(
        &self,
        lent: &SharedSegment,
    ) -> Result<(Arc<dyn device::Segment>, Option<OwnedFd>)> {
        let mut tries = 0;
        loop {
            let (maps, lent) = (self.client.maps.clone(), lent.clone());
            match run_blocking(move || maps.device_lent(&lent)).await {
                Err(error) if error.kind() == ErrorKind::Busy && tries < DEVICE_TRIES => {
                    tries += 1;
                    backoff(tries).await;
                }
                made => return made,
            }
        }
    }

    /// It has begun.
    pub(super) fn begun(self, begun: &Begun) -> control::Begun {
        let Begun { id, epoch, number, committed, .. } = *begun;
        control::Begun { id, epoch, number, committed, contribution: Box::new(self) }
    }

    /// Writes the archive, if there is room for it: not if it is there already.
    pub(super) fn write(&mut self, archive: &[u8]) -> Result<()> {
        let len = u64::try_from(archive.len()).unwrap_or(u64::MAX);
        self.parts(&[len]).iter_mut().try_for_each(|part| part.write(archive))
    }

    /// Nobody writes any more: what is still to be sent.
    fn close(&mut self) -> Bytes {
        self.device = None;
        self.download = None;
        match std::mem::replace(&mut self.memory, Memory::None) {
            Memory::None => Bytes::new(),
            Memory::Own(bytes) | Memory::Sent(bytes) => bytes.into(),
            Memory::Segment(segment, map) => {
                self.client.maps.keep(segment, map);
                Bytes::new()
            }
        }
    }

    /// The archive is complete: sends what goes ahead; returns what goes with the word that it is.
    async fn complete(&mut self) -> Result<Bytes> {
        let is_sent = matches!(self.memory, Memory::Sent(_));
        let mut bytes = self.close();
        let mut offset = 0;
        while is_sent && !bytes.is_empty() {
            let part = bytes.split_to(bytes.len().min(MAX_WRITE as usize));
            let len = u64::try_from(part.len()).unwrap_or(u64::MAX);
            let request = Request::Write { contribution: self.contribution, offset };
            match self.client.calls.call(&request, part, PATIENCE).await?.reply {
                Reply::Done => offset += len,
                other => return Err(unexpected(&other)),
            }
        }
        Ok(bytes)
    }

    /// Commits it, with what is still to be sent.
    async fn decide(&mut self, digest: Digest) -> Result<Progress> {
        let data = self.complete().await?;
        let request = Request::Commit { contribution: self.contribution, digest, lens: Vec::new() };
        // What goes along may wait for memory.
        let patience = self.timeout.saturating_add(PATIENCE);
        let called = self.client.calls.call(&request, data, patience).await;
        // Whatever came of it, the daemon has decided.
        self.owed.settle();
        match called?.reply {
            Reply::Progress(progress) => Ok(progress),
            other => Err(unexpected(&other)),
        }
    }
}

#[async_trait]
impl Contribution for RemoteContribution {
    fn is_in_memory(&self) -> bool {
        self.device.is_none()
    }

    fn parts(&mut self, lens: &[u64]) -> Vec<Box<dyn Part + '_>> {
        let (memory, is_shared) = match &mut self.memory {
            Memory::None => return Vec::new(),
            Memory::Own(bytes) | Memory::Sent(bytes) => (bytes.as_mut_slice(), false),
            Memory::Segment(_, map) => (map.range_mut(0..self.file_len), true),
        };
        match &self.device {
            Some(device) => device.parts(memory, lens),
            None => match self.download.as_deref().filter(|_| is_shared) {
                Some(download) => of_segment(memory, download, lens),
                None => split(memory, lens),
            },
        }
    }

    async fn extend(&mut self, file_len: u64, device: Option<OnDevice>) -> Result<()> {
        if matches!(self.memory, Memory::None) {
            return Ok(());
        }
        let data = self.complete().await?;
        let contribution = self.contribution;
        let request = Request::Extend { contribution, file_len, device: device.clone() };
        let patience = self.timeout.saturating_add(PATIENCE);
        match self.client.calls.call(&request, data, patience).await?.reply {
            Reply::Room(room) => self.enter_all((room, None), file_len, device.as_ref()).await,
            Reply::Rooms { room, device: lent } => {
                self.enter_all((room, Some(&lent)), file_len, device.as_ref()).await
            }
            other => Err(unexpected(&other)),
        }
    }

    async fn commit(mut self: Box<Self>, digest: Digest) -> Result<Committed> {
        let progress = match self.progress.take() {
            Some(progress) => progress,
            None => self.decide(digest).await?,
        };
        let (client, contribution, patience) =
            (self.client.clone(), self.contribution, self.timeout);
        let storing = async move {
            let request = Request::Stored { contribution, patience };
            let all = patience.saturating_add(PATIENCE);
            match client.calls.call(&request, Bytes::new(), all).await?.reply {
                Reply::Progress(progress) => Ok(progress),
                other => Err(unexpected(&other)),
            }
        };
        let storing = self.is_stored.then(|| Box::pin(storing) as UploadFuture);
        Ok(Committed { progress, upload: storing })
    }

    async fn withdraw(mut self: Box<Self>, error: Error) -> Error {
        self.close();
        self.owed.settle();
        let request = Request::Withdraw { contribution: self.contribution };
        let call = self.client.calls.call(&request, Bytes::new(), PATIENCE);
        // What has become of the version comes before what that has led to.
        match call.await {
            Err(reason) if error.refusal().is_none() && reason.refusal().is_some() => reason,
            _ => error,
        }
    }
}

/// Parts of a segment of the host's memory, of these lengths.
fn of_segment<'a>(
    memory: &'a mut [u8],
    download: &'a dyn Download,
    lens: &[u64],
) -> Vec<Box<dyn Part + 'a>> {
    let part = |memory| Box::new(OfSegment(download.target(memory))) as Box<dyn Part>;
    slices(memory, lens).map(part).collect()
}

/// A part that GPUs write to by themselves.
struct OfSegment<'a>(Box<dyn DownloadTarget + 'a>);

impl Part for OfSegment<'_> {
    fn begin(&mut self, job: &WriteJob) -> Result<()> {
        self.0.begin(job)
    }

    fn fill(&mut self, job: &WriteJob) -> Result<JobChecksums> {
        let (memory, is_there) = self.0.finish()?;
        let filled = if is_there { job.run_prefilled(memory) } else { job.run(memory) };
        filled.map_err(|error| Error::request("fill", error))
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        let (mut memory, _) = self.0.finish()?;
        Part::write(&mut memory, bytes)
    }
}

impl DeviceRoom {
    /// Parts of these lengths: those in front of the index are the GPU's, and what follows belongs into the shell.
    fn parts<'a>(&'a self, shell: &'a mut [u8], lens: &[u64]) -> Vec<Box<dyn Part + 'a>> {
        let upload = &*self.upload;
        let (head, mut rest) = shell.split_at_mut(shell.len().min(HEAD_LEN));
        let (mut head, mut at) = (Some(head), 0);
        let mut parts: Vec<Box<dyn Part + 'a>> = Vec::with_capacity(lens.len());
        for len in lens {
            if at < self.len {
                parts.push(Box::new(OfDevice { upload, head: head.take(), filled: None }));
            } else {
                let len = usize::try_from(*len).unwrap_or(usize::MAX).min(rest.len());
                let (shell, others) = std::mem::take(&mut rest).split_at_mut(len);
                rest = others;
                parts.push(Box::new(OfShell { upload, shell }));
            }
            at += len;
        }
        parts
    }
}

/// A part that goes to the memory of a GPU, and to the shell what the archive begins with.
struct OfDevice<'a> {
    upload: &'a dyn Upload,
    head: Option<&'a mut [u8]>,
    /// What has come of it, if it was begun ahead.
    filled: Option<JobChecksums>,
}

impl Part for OfDevice<'_> {
    fn begin(&mut self, job: &WriteJob) -> Result<()> {
        self.filled = Some(self.upload.write(job, self.head.as_deref_mut())?);
        Ok(())
    }

    fn fill(&mut self, job: &WriteJob) -> Result<JobChecksums> {
        match self.filled.take() {
            Some(filled) => Ok(filled),
            None => self.upload.write(job, self.head.as_deref_mut()),
        }
    }

    fn write(&mut self, _bytes: &[u8]) -> Result<()> {
        Err(Error::new(ErrorKind::Invalid, "the memory of a GPU is filled by jobs"))
    }
}

/// What follows what is in the memory of a GPU. All of that is there when this is written.
struct OfShell<'a> {
    upload: &'a dyn Upload,
    shell: &'a mut [u8],
}

impl Part for OfShell<'_> {
    fn fill(&mut self, job: &WriteJob) -> Result<JobChecksums> {
        Part::fill(&mut &mut *self.shell, job)
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.upload.finish()?;
        Part::write(&mut &mut *self.shell, bytes)
    }
}

impl Drop for RemoteContribution {
    fn drop(&mut self) {
        // Before the withdrawal goes: then the daemon may lend the segment again.
        self.close();
    }
}
