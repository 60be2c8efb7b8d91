//! A contribution to a version in a daemon.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;

use super::calls::Owed;
use super::{Client, PATIENCE, broken, unexpected};
use crate::arena::{SegmentId, WriteMap};
use crate::controller::{Committed, Contribution, Proposal, Storing};
use crate::environment::wait;
use crate::error::{Error, ErrorKind, Result};
use crate::ledger::{Digest, Durability};
use crate::volume::{Part, split};
use crate::wire::{Begun, MAX_WRITE, Reply, Request, Room};

/// Dropped before it is decided, it is withdrawn.
pub(super) struct RemoteContribution {
    client: Arc<Client>,
    contribution: u64,
    file_len: usize,
    memory: Memory,
    /// For how long others are waited for.
    timeout: Duration,
    /// Whether it goes on to a bucket.
    is_stored: bool,
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
            timeout: proposal.timeout,
            is_stored: proposal.durability == Durability::Object,
            owed,
        };
        if begun.committed.is_none() {
            own.enter(begun.room, proposal.file_len).await?;
        }
        Ok(own)
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
                // New memory is mapped with all its pages: that takes long.
                wait(move || maps.lent(segment, capacity)).await?;
                let map = self.client.maps.take(segment)?;
                if map.len() < self.file_len {
                    return Err(broken("it lends less memory than the archive takes"));
                }
                Memory::Segment(segment, map)
            }
        };
        Ok(())
    }

    /// Nobody writes any more: what is still to be sent.
    fn close(&mut self) -> Bytes {
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
}

#[async_trait]
impl Contribution for RemoteContribution {
    fn parts(&mut self, lens: &[u64]) -> Vec<Box<dyn Part + '_>> {
        match &mut self.memory {
            Memory::None => Vec::new(),
            Memory::Own(bytes) | Memory::Sent(bytes) => split(bytes, lens),
            Memory::Segment(_, map) => split(map.range_mut(0..self.file_len), lens),
        }
    }

    async fn extend(&mut self, file_len: u64) -> Result<()> {
        if matches!(self.memory, Memory::None) {
            return Ok(());
        }
        let data = self.complete().await?;
        let request = Request::Extend { contribution: self.contribution, file_len };
        let patience = self.timeout.saturating_add(PATIENCE);
        match self.client.calls.call(&request, data, patience).await?.reply {
            Reply::Room(room) => self.enter(room, file_len).await,
            other => Err(unexpected(&other)),
        }
    }

    async fn commit(mut self: Box<Self>, digest: Digest) -> Result<Committed> {
        let data = self.complete().await?;
        let request = Request::Commit { contribution: self.contribution, digest, lens: Vec::new() };
        let called = self.client.calls.call(&request, data, PATIENCE).await;
        // Whatever came of it, the daemon has decided.
        self.owed.settle();
        let progress = match called?.reply {
            Reply::Progress(progress) => progress,
            other => return Err(unexpected(&other)),
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
        let storing = self.is_stored.then(|| Box::pin(storing) as Storing);
        Ok(Committed { progress, storing })
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

impl Drop for RemoteContribution {
    fn drop(&mut self) {
        // Before the withdrawal goes: then the daemon may lend the segment again.
        self.close();
    }
}
