//! Requests about the bytes of blobs, from clients and from other daemons.

use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;

use super::{Credits, InFlightRequest, Origin, Response, Session, semaphore_closed};
use crate::convert::to_u64;
use crate::daemon::chunk_verifier::{copied_bytes, gather, total_bytes};
use crate::daemon::read_encoder::EncodedRead;
use crate::error::{Error, ErrorKind, Result};
use crate::io::exec::run_blocking;
use crate::net::client::Announcement;
use crate::net::tls::Endpoint;
use crate::net::wire::{BlobFetchers, Data, Range, ReadChecksum, ReadReply, Reply, Request};

impl Session {
    /// Runs a request about blobs.
    pub(super) async fn handle_blobs(
        &self,
        in_flight: &InFlightRequest,
        request: Request,
        data: Bytes,
    ) -> Result<Response<'_>> {
        let answer = match request {
            Request::Read { blob, ranges, verify, without_data, local_only, accept } => {
                // The other daemon counts what a process of this host reads of its archives.
                let is_remote = self.state.volume.remote_blobs.len(&blob).is_some();
                let replicas = &self.state.volume.replicas;
                let lacks_base =
                    accept.base.as_ref().is_some_and(|base| !replicas.has_base(&blob, base));
                if lacks_base && accept.base_only {
                    let reply = ReadReply { lacks_base, ..ReadReply::default() };
                    return Ok(Reply::Read(reply).into());
                }
                let read = async {
                    let read = self.read(blob.clone(), ranges.clone(), verify, local_only);
                    let mut answer = read.await?;
                    if without_data {
                        answer.data = Data::default();
                    } else if !accept.is_empty() {
                        self.encode(&mut answer, EncodedRead { blob, ranges, accept }).await;
                    }
                    if let Reply::Read(reply) = &mut answer.reply {
                        reply.lacks_base = lacks_base;
                    }
                    if let (Some(uplink), Origin::Address(peer)) = (&self.state.uplink, self.origin)
                    {
                        let permit = uplink.admit(peer.ip(), to_u64(answer.data.len())).await;
                        answer.credits.uplink = Some(permit);
                    }
                    Ok::<_, Error>(answer)
                };
                // A reader takes a daemon that sends nothing for a lost one.
                let answer = self.with_keepalive(in_flight, read).await?;
                if !is_remote || !self.origin.is_local() {
                    self.state.counters.lock().sent_bytes += to_u64(answer.data.len());
                }
                return Ok(answer);
            }
            Request::Fetch { blob, ranges } => {
                self.begin_fetch(&blob, &ranges).await;
                Reply::Done
            }
            Request::Announce { blob, address, is_complete, present_bytes, known } => {
                let parts = Arc::from(&data[..]);
                let announcement = Announcement { parts, is_complete, present_bytes, known };
                let (fetchers, tables) = self.announce(&blob, &address, announcement)?;
                let tables = if fetchers.crc32 == known { Vec::new() } else { tables };
                let data = Bytes::from(tables).into();
                return Ok(Response { data, ..Reply::BlobFetchers(fetchers).into() });
            }
            Request::PresentPieces { blob } => {
                let is_complete = self.state.pool.span(&blob).is_some();
                let present = self.state.volume.replicas.present_pieces(&blob);
                let data = if is_complete { Vec::new() } else { present };
                let data = Bytes::from(data).into();
                return Ok(Response { data, ..Reply::PresentPieces { is_complete }.into() });
            }
            Request::Discard { blobs } => {
                if self.origin.is_local() {
                    return Err(Error::new(ErrorKind::Refused, "only daemons send `discard`"));
                }
                self.state.discard(&blobs)?;
                Reply::Done
            }
            Request::FindUnknownBlobs { blobs } => {
                let is_missing =
                    |name: &String| self.state.volume.remote_blobs.locate(name).is_none();
                Reply::UnknownBlobs(blobs.into_iter().filter(is_missing).collect())
            }
            other => {
                let text = format_args!("`{}` is not about blobs", other.op());
                return Err(Error::new(ErrorKind::Invalid, text));
            }
        };
        Ok(answer.into())
    }

    /// Records that another daemon fetches a blob of this one, or parts of it. Returns the others that do.
    fn announce(
        &self,
        blob: &str,
        address: &str,
        announcement: Announcement,
    ) -> Result<(BlobFetchers, Vec<u8>)> {
        if self.origin.is_local() {
            return Err(Error::new(ErrorKind::Refused, "only daemons announce what they fetch"));
        }
        // Of daemons with a bucket, one that may not have the blob lists those that restore it.
        if self.state.volume.locate(blob)?.is_none() && self.state.replicator.is_none() {
            return Err(Error::new(ErrorKind::NotFound, format_args!("`{blob}` is not here")));
        }
        let address: Endpoint = address.parse()?;
        Ok(self.state.fetchers.announce(blob, &address, announcement, Instant::now()))
    }

    /// Begins to copy ranges of a blob of another daemon to this one. Without memory for it, later reads are direct.
    async fn begin_fetch(&self, blob: &str, ranges: &[Range]) {
        let state = &self.state;
        let remote = state.volume.remote_blobs.locate(blob);
        let Some((_, len)) = remote.filter(|_| state.pool.span(blob).is_none()) else { return };
        let replicas = &state.volume.replicas;
        replicas.prepare(blob, len, &*state.control_plane).await;
        replicas.request_ranges(blob, ranges);
    }

    /// Encodes the data of a reply if the client can decode it, and if that makes it shorter.
    async fn encode(&self, answer: &mut Response<'_>, read: EncodedRead) {
        let (Some(encoder), Reply::Read(reply)) =
            (self.state.volume.replicas.encoder(), &mut answer.reply)
        else {
            return;
        };
        let (encoder, data) = (encoder.clone(), answer.data.clone());
        match run_blocking(move || encoder.encode(&read, &data)).await {
            Ok(Some(encoded)) => {
                reply.is_encoded = true;
                answer.data = encoded.into();
            }
            Ok(None) => {}
            Err(error) => tracing::debug!(%error, "the bytes go as they are"),
        }
    }

    /// Reads ranges of a blob, from memory or through this daemon from another one.
    ///
    /// The data and the copies of it take credit until they are sent.
    async fn read(
        &self,
        name: String,
        ranges: Vec<Range>,
        verify: bool,
        local_only: bool,
    ) -> Result<Response<'_>> {
        let state = self.state.clone();
        // An archive that was restored from the bucket is still listed as remote.
        let is_local = state.pool.span(&name).is_some();
        let remote_len = state.volume.remote_blobs.len(&name).filter(|_| !is_local);
        if let Some(len) = remote_len.filter(|_| !local_only) {
            match self.read_remote(&name, &ranges, verify, len).await {
                Ok(Some(answer)) => return Ok(answer),
                // The archive is local now.
                Ok(None) => {}
                Err(error)
                    if matches!(error.kind(), ErrorKind::Unreachable | ErrorKind::NotFound) =>
                {
                    state.restore_from_bucket(&name, error).await?;
                }
                Err(error) => return Err(error),
            }
        } else if !is_local && !self.origin.is_local() {
            // A fetcher asks for bytes that were fetched for a reader whose lease has ended.
            if let Some(answer) = self.read_fetched(&name, &ranges, verify).await? {
                return Ok(answer);
            }
        }
        let blob = state.open_blob(&name)?;
        let size = blob.size().map_err(|error| Error::io(&name, error))?;
        let bytes = total_bytes(&ranges, size)?;
        let copied = copied_bytes(&*blob, &ranges);
        let credits = self.acquire_credits(bytes, copied).await?;
        let read = move || {
            if verify {
                state.chunk_verifier.verify(&name, &blob, &ranges)?;
            }
            let data = gather(&*blob, &ranges)?;
            let crc32 = verify.then(|| {
                let mut all = crc32fast::Hasher::new();
                data.pieces().iter().for_each(|piece| all.update(piece));
                all.finalize()
            });
            Ok((data, ReadChecksum { crc32 }))
        };
        let (data, sum) = if copied > 0 || verify { run_blocking(read).await? } else { read()? };
        Ok(Response { data, credits, ..read_reply(sum).into() })
    }

    /// Reads ranges of a blob of `len` bytes from other daemons. `None` if it is local meanwhile.
    async fn read_remote(
        &self,
        name: &str,
        ranges: &[Range],
        verify: bool,
        len: u64,
    ) -> Result<Option<Response<'_>>> {
        let bytes = total_bytes(ranges, len)?;
        let credits = self.acquire_credits(bytes, 0).await?;
        let replicas = &self.state.volume.replicas;
        replicas.prepare(name, len, &*self.state.control_plane).await;
        // Fetchers wait for requests to holders only. So they never wait for each other.
        let read = replicas.read(name, ranges, verify, self.origin.is_local()).await?;
        Ok(read.map(|(data, sum)| Response {
            data: data.into(),
            credits,
            ..read_reply(sum).into()
        }))
    }

    /// Reads ranges of a blob that is here in part. `None` if some bytes are missing.
    async fn read_fetched(
        &self,
        name: &str,
        ranges: &[Range],
        verify: bool,
    ) -> Result<Option<Response<'_>>> {
        let credits = self.acquire_credits(total_bytes(ranges, u64::MAX)?, 0).await?;
        let read = self.state.volume.replicas.read_fetched(name, ranges, verify).await?;
        Ok(read.map(|(data, sum)| Response {
            data: data.into(),
            credits,
            ..read_reply(sum).into()
        }))
    }

    /// Waits for credit to send `bytes` bytes to the client, `copied` of which are copies.
    async fn acquire_credits(&self, bytes: u64, copied: u64) -> Result<Credits> {
        let kilobytes = |bytes: u64| u32::try_from(bytes.div_ceil(1 << 10)).unwrap_or(u32::MAX);
        let own = self.read_credit.clone().acquire_many_owned(kilobytes(bytes)).await;
        let mut credits = vec![own.map_err(semaphore_closed)?];
        if copied > 0 {
            let copies = self.state.copy_credit.clone().acquire_many_owned(kilobytes(copied)).await;
            credits.push(copies.map_err(semaphore_closed)?);
        }
        Ok(Credits { _bytes: credits, uplink: None })
    }
}

fn read_reply(ReadChecksum { crc32 }: ReadChecksum) -> Reply {
    Reply::Read(ReadReply { crc32, ..ReadReply::default() })
}
