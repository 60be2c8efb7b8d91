//! Reads archives in a daemon over separate connections, directly into the target memory.
//!
//! Each thread uses one connection with several requests in flight. A request is the credit for its
//! bytes: the daemon sends only what was requested.

use std::collections::{BTreeMap, VecDeque};
use std::io::{self, BufReader, Read, Write};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use tssd_format::MAX_CHUNK_BYTES;

use super::{hello, unexpected_reply};
use crate::blob::{RangeCopy, RangeJob, RangeReader, StreamingVerifier, VerifyMode};
use crate::convert::to_usize;
use crate::error::{Error, ErrorKind, Result};
use crate::io::cancel::CancelToken;
use crate::io::parallel::{self, cores};
use crate::io::sync::{Lock, MutexGuard};
use crate::ledger::{RunId, RunStatus};
use crate::net::tls::{Duplex, IO_TIMEOUT};
use crate::net::wire::{
    BlobFetchers, Encodings, FrameKind, HEADER_BYTES, Header, Limits, MAX_READ_BYTES, Piece,
    ProtocolVersion, Range, ReadChecksum, ReadReply, Reply, Request,
};

/// Maximum number of connections. More of them do not increase the throughput of a network.
const MAX_CONNECTIONS: usize = 8;

/// Maximum length of a manifest in bytes.
const MAX_MANIFEST_BYTES: usize = 4 << 30;

/// Maximum number of requested bytes in flight on a connection.
const WINDOW_BYTES: u64 = 2 * MAX_READ_BYTES;

/// Bytes of one read from the socket. They are still in the CPU cache when they are checksummed.
const SOCKET_READ_BYTES: usize = 256 << 10;

/// Size of the receive buffer in bytes. Longer reads bypass it.
const BUFFER_BYTES: usize = 16 << 10;

/// Maximum length of the ranges of a request in JSON, in bytes.
///
/// Below it, upper bounds for a range without loops and for a loop.
const MAX_RANGES_JSON_BYTES: usize = 60_000;
const RANGE_JSON_BYTES: usize = 48;
const LOOP_JSON_BYTES: usize = 44;

/// Timeout of a complete response.
const RESPONSE_TIMEOUT: Duration = Duration::from_mins(1);

/// A read of ranges of a blob.
#[derive(Clone)]
pub(crate) struct RangesRequest {
    pub(crate) ranges: Vec<Range>,
    /// Whether the daemon verifies the chunks, and returns the checksum of the bytes.
    pub(crate) verify: bool,
    /// Whether the daemon reads only what it has.
    pub(crate) local_only: bool,
    pub(crate) accept: Encodings,
}

/// What a daemon announces about a blob that it fetches.
#[derive(Clone)]
pub(crate) struct Announcement {
    /// The part that it wants of each piece. Empty: it wants all.
    pub(crate) parts: Arc<[u8]>,
    /// Whether it has all that it wants.
    pub(crate) is_complete: bool,
    /// Bytes that it has.
    pub(crate) present_bytes: u64,
    /// CRC-32 of the tables of the last reply.
    pub(crate) known: u32,
}

/// Opens a connection to a daemon.
pub(crate) type Connector = Arc<dyn Fn() -> Result<Box<dyn Duplex>> + Send + Sync>;

/// A pool of connections to a daemon. Idle connections stay open.
pub(crate) struct ConnectionPool {
    connector: Connector,
    /// Whether the daemon still keeps the blobs unchanged for this process.
    is_leased: Box<dyn Fn() -> bool + Send + Sync>,
    /// Whether the daemon fetches for its host. A read then names all its ranges in advance.
    prefetches: bool,
    idle: Lock<Vec<Connection>>,
}

/// A connection to a daemon.
struct Connection {
    stream: BufReader<Box<dyn Duplex>>,
    next_number: u64,
    /// Deadline of the response that is being received.
    deadline: Instant,
}

/// A read request in flight.
struct Batch {
    number: u64,
    bytes: u64,
    verify: bool,
    /// Pieces in the order of the data, each with the index of its target and how it is verified.
    pieces: Vec<(usize, Piece, VerifyMode)>,
}

impl ConnectionPool {
    pub(crate) fn new(connector: Connector) -> Self {
        let (is_leased, idle) = (Box::new(|| true), Lock::default());
        Self { connector, is_leased, prefetches: false, idle }
    }

    /// Has the daemon begin to fetch all that a read will request, before the first request.
    ///
    /// It can then fetch chunks that several readers of its host want in part as a whole, and from other hosts.
    pub(crate) fn with_prefetch(self) -> Self {
        Self { prefetches: true, ..self }
    }

    /// Sets the condition under which the daemon keeps the blobs unchanged, such as a lease.
    pub(crate) fn valid_while(self, is_leased: impl Fn() -> bool + Send + Sync + 'static) -> Self {
        Self { is_leased: Box::new(is_leased), ..self }
    }

    fn idle(&self) -> MutexGuard<'_, Vec<Connection>> {
        self.idle.lock()
    }

    /// Runs `work` on a connection. After a success the connection returns to the pool.
    fn with_connection<T>(
        &self,
        stop: &CancelToken,
        work: impl FnOnce(&mut Connection) -> Result<T>,
    ) -> Result<T> {
        let mut connection = loop {
            let idle = self.idle().pop();
            match idle {
                Some(connection) if connection.stream.get_ref().is_open() => break connection,
                // The daemon has closed it.
                Some(_) => {}
                None => {
                    let connector = self.connector.clone();
                    break Connection::open(stop.run_detached(move || connector())?, stop)?;
                }
            }
        };
        let done = work(&mut connection)?;
        let mut idle = self.idle();
        if idle.len() < MAX_CONNECTIONS {
            idle.push(connection);
        }
        Ok(done)
    }
}

impl ConnectionPool {
    /// Reads a whole manifest.
    pub(crate) fn read_manifest(&self, blob: &str, len: u64) -> Result<Vec<u8>> {
        let len = usize::try_from(len).ok().filter(|len| *len <= MAX_MANIFEST_BYTES);
        let text = format_args!("`{blob}` is longer than a manifest can be");
        let mut bytes = vec![0; len.ok_or_else(|| Error::new(ErrorKind::Corrupt, text))?];
        let read = self.read_exact_at(blob, &mut bytes, 0);
        read.map_err(|error| Error::io(blob, error)).map(|()| bytes)
    }

    /// Reads ranges of a blob, in any encoding that the request accepts.
    pub(crate) fn fetch_ranges(
        &self,
        blob: &str,
        request: RangesRequest,
    ) -> Result<(Bytes, ReadReply)> {
        let (blob, without_data) = (blob.to_owned(), false);
        let RangesRequest { ranges, verify, local_only, accept } = request;
        let request = Request::Read { blob, ranges, verify, without_data, local_only, accept };
        self.call(&request, &[], |reply, data| match reply {
            Reply::Read(reply) => Ok((data.into(), reply)),
            other => Err(unexpected_reply(&other)),
        })
    }

    /// Returns the CRC-32 of ranges of a blob, whose chunks the daemon verifies.
    pub(crate) fn checksum_ranges(&self, blob: &str, ranges: Vec<Range>) -> Result<ReadChecksum> {
        let request = Request::Read {
            blob: blob.to_owned(),
            ranges,
            verify: true,
            without_data: true,
            local_only: true,
            accept: Encodings::default(),
        };
        self.call(&request, &[], |reply, _| match reply {
            Reply::Read(ReadReply { crc32, .. }) => Ok(ReadChecksum { crc32 }),
            other => Err(unexpected_reply(&other)),
        })
    }

    /// Tells the daemon that another one, at `address`, fetches a blob or parts of it. Returns the others that do.
    ///
    /// The tables of what they want are empty if they are those that the announcement knows.
    pub(crate) fn announce(
        &self,
        blob: &str,
        address: &str,
        announcement: &Announcement,
    ) -> Result<(BlobFetchers, Vec<u8>)> {
        let (blob, address) = (blob.to_owned(), address.to_owned());
        let Announcement { is_complete, present_bytes, known, .. } = *announcement;
        let request = Request::Announce { blob, address, is_complete, present_bytes, known };
        self.call(&request, &announcement.parts, |reply, data| match reply {
            Reply::BlobFetchers(fetchers) => Ok((fetchers, data)),
            other => Err(unexpected_reply(&other)),
        })
    }

    /// Returns the pieces of a blob of which the daemon has what it wants: a bit for each. `None`: it has all.
    pub(crate) fn present_pieces(&self, blob: &str) -> Result<Option<Vec<u8>>> {
        let request = Request::PresentPieces { blob: blob.to_owned() };
        self.call(&request, &[], |reply, data| match reply {
            Reply::PresentPieces { is_complete } => Ok((!is_complete).then_some(data)),
            other => Err(unexpected_reply(&other)),
        })
    }

    /// Tells the daemon that blobs are no longer needed.
    pub(crate) fn discard(&self, blobs: &[String]) -> Result<()> {
        let request = Request::Discard { blobs: blobs.to_vec() };
        self.call(&request, &[], |reply, _| match reply {
            Reply::Done => Ok(()),
            other => Err(unexpected_reply(&other)),
        })
    }

    /// Returns whether a process of a run is connected to the daemon.
    pub(crate) fn run_status(&self, run: &RunId) -> Result<RunStatus> {
        let request = Request::RunStatus { run: run.clone() };
        self.call(&request, &[], |reply, _| match reply {
            Reply::RunStatus(status) => Ok(status),
            other => Err(unexpected_reply(&other)),
        })
    }

    /// Has the daemon begin to fetch the ranges of jobs, by blob. Blobs of which one request reads all are left out.
    fn begin_fetches(&self, jobs: &[RangeJob<'_>], stop: &CancelToken) -> Result<()> {
        let mut blobs: BTreeMap<&Arc<str>, Vec<Range>> = BTreeMap::new();
        for copy in jobs.iter().flat_map(|job| &job.copies) {
            let ranges = blobs.entry(&copy.blob).or_default();
            for Piece { range, .. } in Piece::split(copy.source, 0, &copy.runs, u64::MAX) {
                match ranges.last_mut() {
                    Some(last) if last.is_followed_by(&range) => last.1 += range.1,
                    _ => ranges.push(range),
                }
            }
        }
        let bytes = |range: &Range| range.total_bytes(u64::MAX).unwrap_or(u64::MAX);
        let total = |ranges: &[Range]| {
            ranges.iter().fold(0_u64, |total, range| total.saturating_add(bytes(range)))
        };
        blobs.retain(|_, ranges| total(ranges) > MAX_READ_BYTES);
        for (blob, ranges) in blobs {
            for part in split_by_json(ranges) {
                let request = Request::Fetch { blob: blob.to_string(), ranges: part };
                let call = |connection: &mut Connection| connection.call(&request, &[], stop);
                if let Err(error) = self.with_connection(stop, call) {
                    // The reads work without it, and find errors of the connection too.
                    tracing::debug!(%blob, %error, "the ranges were not announced");
                    return stop.check();
                }
            }
        }
        Ok(())
    }

    /// Sends a request with data, and converts the reply and its data.
    fn call<T>(
        &self,
        request: &Request,
        data: &[u8],
        convert: impl FnOnce(Reply, Vec<u8>) -> Result<T>,
    ) -> Result<T> {
        let stop = CancelToken::default();
        let call = |connection: &mut Connection| connection.call(request, data, &stop);
        let (reply, data) = self.with_connection(&stop, call)?;
        convert(reply, data)
    }
}

impl RangeReader for ConnectionPool {
    fn read_ranges(&self, jobs: Vec<RangeJob<'_>>, stop: &CancelToken) -> Result<u64> {
        if self.prefetches {
            self.begin_fetches(&jobs, stop)?;
        }
        let threads = cores().min(MAX_CONNECTIONS).min(jobs.len());
        let jobs = Lock::new(jobs.into_iter());
        let next = || jobs.lock().next();
        let run = |_: usize| match next() {
            Some(first) => self.with_connection(stop, |connection| {
                connection.fill_targets(JobQueue::new(first, &next), stop)
            }),
            None => Ok(0),
        };
        let pulled = parallel::map((0..threads).collect(), run);
        // The blobs may have been deleted, and their memory may contain other bytes.
        if !(self.is_leased)() {
            return Err(connection_lost(&"the connection that held them is gone"));
        }
        match pulled {
            // The daemon noticed the end of the connection with the lease before this process did.
            Err(error) if error.kind() == ErrorKind::NotFound => Err(connection_lost(&error)),
            pulled => Ok(pulled?.into_iter().sum()),
        }
    }

    fn read_exact_at(&self, blob: &str, target: &mut [u8], offset: u64) -> io::Result<()> {
        let len = u64::try_from(target.len()).map_err(io::Error::other)?;
        let whole = RangeCopy {
            blob: blob.into(),
            source: offset,
            target: 0,
            runs: tssd_format::Runs::contiguous(len),
            verify: VerifyMode::Skip,
        };
        let pulled = self
            .read_ranges(vec![RangeJob { target, copies: vec![whole] }], &CancelToken::default());
        pulled.map(drop).map_err(io::Error::other)
    }
}

/// Splits ranges into parts that fit into a request.
fn split_by_json(ranges: Vec<Range>) -> Vec<Vec<Range>> {
    let mut parts: Vec<Vec<Range>> = Vec::new();
    let mut json_bytes = 0;
    for range in ranges {
        let range_bytes = range_json_bytes(&range);
        if parts.is_empty() || json_bytes + range_bytes > MAX_RANGES_JSON_BYTES {
            parts.push(Vec::new());
            json_bytes = 0;
        }
        json_bytes += range_bytes;
        parts.last_mut().expect("there is one").push(range);
    }
    parts
}

/// Returns an upper bound of the length of a range in JSON, in bytes.
fn range_json_bytes(range: &Range) -> usize {
    RANGE_JSON_BYTES + LOOP_JSON_BYTES * range.2.len()
}

/// The jobs of a thread, and the boxes that are not requested yet.
struct JobQueue<'a, 'n> {
    next_job: &'n dyn Fn() -> Option<RangeJob<'a>>,
    targets: Vec<&'a mut [u8]>,
    boxes: VecDeque<(usize, RangeCopy)>,
    /// Pieces of the first box that are not requested yet.
    pieces: VecDeque<Piece>,
}

impl<'a, 'n> JobQueue<'a, 'n> {
    fn new(first: RangeJob<'a>, next_job: &'n dyn Fn() -> Option<RangeJob<'a>>) -> Self {
        let mut queue =
            Self { next_job, targets: Vec::new(), boxes: VecDeque::new(), pieces: VecDeque::new() };
        queue.add_job(first);
        queue
    }

    fn add_job(&mut self, job: RangeJob<'a>) {
        let target_index = self.targets.len();
        self.targets.push(job.target);
        self.boxes.extend(job.copies.into_iter().map(|each| (target_index, each)));
    }

    /// Returns the next box that has bytes. Takes another job if there is none.
    fn next_box(&mut self) -> Option<&(usize, RangeCopy)> {
        while self.pieces.is_empty() {
            while self.boxes.is_empty() {
                let job = (self.next_job)()?;
                self.add_job(job);
            }
            let (_, first) = &self.boxes[0];
            // Small pieces of a contiguous run fill requests better. Chunks are not split.
            let max_bytes =
                if first.runs.loops().is_empty() { MAX_CHUNK_BYTES } else { MAX_READ_BYTES };
            self.pieces = Piece::split(first.source, first.target, &first.runs, max_bytes).into();
            if self.pieces.is_empty() {
                self.boxes.pop_front();
            }
        }
        self.boxes.front()
    }

    /// Returns the next request, of as many pieces of one blob as fit; none if all are requested.
    fn next_batch(&mut self, number: u64) -> Option<(Batch, Request)> {
        let (_, first) = self.next_box()?;
        let blob = first.blob.clone();
        let mut batch = Batch { number, bytes: 0, verify: false, pieces: Vec::new() };
        let (mut ranges, mut json_bytes): (Vec<Range>, usize) = (Vec::new(), 0);
        while let Some((target_index, each)) = self.next_box().filter(|(_, each)| each.blob == blob)
        {
            let (target_index, proof) = (*target_index, each.verify.clone());
            let piece = self.pieces.front().expect("it has one");
            let bytes = piece.range.total_bytes(u64::MAX).unwrap_or(u64::MAX);
            let next_json_bytes = json_bytes + range_json_bytes(&piece.range);
            if !ranges.is_empty()
                && (batch.bytes.saturating_add(bytes) > MAX_READ_BYTES
                    || next_json_bytes > MAX_RANGES_JSON_BYTES)
            {
                break;
            }
            let piece = self.pieces.pop_front().expect("it has one");
            if self.pieces.is_empty() {
                self.boxes.pop_front();
            }
            batch.bytes += bytes;
            batch.verify |= matches!(proof, VerifyMode::PartialChunks(_));
            match ranges.last_mut() {
                Some(last) if last.is_followed_by(&piece.range) => last.1 += piece.range.1,
                _ => {
                    ranges.push(piece.range.clone());
                    json_bytes = next_json_bytes;
                }
            }
            batch.pieces.push((target_index, piece, proof));
        }
        let request = Request::Read {
            blob: blob.to_string(),
            ranges,
            verify: batch.verify,
            without_data: false,
            local_only: false,
            accept: Encodings::default(),
        };
        Some((batch, request))
    }
}

impl Connection {
    /// Exchanges hello and welcome, and checks the protocol version.
    fn open(stream: Box<dyn Duplex>, stop: &CancelToken) -> Result<Self> {
        set_socket_timeout(stream.socket(), Timeout::Recv, Some(CancelToken::POLL_INTERVAL))
            .map_err(|error| connection_lost(&error))?;
        let stream = BufReader::with_capacity(BUFFER_BYTES, stream);
        let mut connection = Self { stream, next_number: 1, deadline: Instant::now() };
        match connection.call(&Request::Hello(hello()), &[], stop)?.0 {
            Reply::Welcome(welcome) if welcome.protocol.major == ProtocolVersion::CURRENT.major => {
                Ok(connection)
            }
            other => Err(unexpected_reply(&other)),
        }
    }

    /// Sends a request with data, and receives the reply and its data.
    fn call(
        &mut self,
        request: &Request,
        data: &[u8],
        stop: &CancelToken,
    ) -> Result<(Reply, Vec<u8>)> {
        self.send_request(request, data)?;
        let (_, reply, len) = self.receive_reply(stop)?;
        let mut data = vec![0; usize::try_from(len).unwrap_or_default()];
        self.read_exact(&mut data, stop)?;
        Ok((reply, data))
    }

    /// Reads `bytes.len()` bytes of a response.
    ///
    /// # Errors
    ///
    /// `Unreachable` if the daemon is silent for too long, or the deadline has passed; the error of
    /// `stop`.
    fn read_exact(&mut self, mut bytes: &mut [u8], stop: &CancelToken) -> Result<()> {
        let mut last_received = Instant::now();
        while !bytes.is_empty() {
            stop.check()?;
            let now = Instant::now();
            if now > self.deadline {
                return Err(connection_lost(&format_args!(
                    "it has sent too slowly, for {RESPONSE_TIMEOUT:?}"
                )));
            }
            match self.stream.read(bytes) {
                Ok(0) => {
                    return Err(connection_lost(&io::Error::from(io::ErrorKind::UnexpectedEof)));
                }
                Ok(len) => {
                    bytes = &mut bytes[len..];
                    last_received = now;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if now - last_received > IO_TIMEOUT {
                        return Err(connection_lost(&format_args!(
                            "it has said nothing for {IO_TIMEOUT:?}"
                        )));
                    }
                }
                Err(error) => return Err(connection_lost(&error)),
            }
        }
        Ok(())
    }

    fn send_request(&mut self, request: &Request, data: &[u8]) -> Result<()> {
        let head = serde_json::to_vec(request)
            .map_err(|error| Error::new(ErrorKind::Invalid, format_args!("message: {error}")))?;
        let [head_len, data_len] =
            [head.len(), data.len()].map(|len| u32::try_from(len).unwrap_or(u32::MAX));
        let number = self.next_number;
        self.next_number += 1;
        let header = Header { kind: FrameKind::Request, fds: 0, head_len, data_len, number };
        let stream = self.stream.get_mut();
        let bytes = [&header.to_bytes()[..], &head, data].concat();
        stream
            .write_all(&bytes)
            .and_then(|()| stream.flush())
            .map_err(|error| connection_lost(&error))
    }

    /// Receives a reply. Returns the number of its request, the reply, and the length of its data.
    fn receive_reply(&mut self, stop: &CancelToken) -> Result<(u64, Reply, u32)> {
        loop {
            self.deadline = Instant::now() + RESPONSE_TIMEOUT;
            let mut header = [0; HEADER_BYTES];
            self.read_exact(&mut header, stop)?;
            let header = Header::parse(&header, Limits::REMOTE_DAEMON)
                .map_err(|error| connection_lost(&error))?;
            let mut head = vec![0; usize::try_from(header.head_len).unwrap_or_default()];
            self.read_exact(&mut head, stop)?;
            // A daemon that fetches what it is asked for sends empty parts meanwhile.
            if header.kind == FrameKind::Part && header.data_len == 0 {
                continue;
            }
            let reply = serde_json::from_slice(&head).map_err(|error| connection_lost(&error))?;
            return match reply {
                Reply::Failed(failure) => Err(failure.into()),
                reply => Ok((header.number, reply, header.data_len)),
            };
        }
    }

    /// Fills the targets of all jobs. Returns the number of received bytes.
    fn fill_targets(&mut self, mut queue: JobQueue<'_, '_>, stop: &CancelToken) -> Result<u64> {
        let mut in_flight: VecDeque<Batch> = VecDeque::new();
        let (mut credit, mut received) = (WINDOW_BYTES, 0);
        loop {
            while credit >= MAX_READ_BYTES
                && let Some((batch, request)) = queue.next_batch(self.next_number)
            {
                self.send_request(&request, &[])?;
                credit -= batch.bytes;
                in_flight.push_back(batch);
            }
            if in_flight.is_empty() {
                return Ok(received);
            }
            let (number, reply, len) = self.receive_reply(stop)?;
            let Reply::Read(sum) = reply else { return Err(unexpected_reply(&reply)) };
            let index = in_flight.iter().position(|batch| batch.number == number);
            let batch = index.and_then(|index| in_flight.remove(index));
            let batch = batch.filter(|batch| batch.bytes == u64::from(len));
            let batch = batch.ok_or_else(|| connection_lost(&"it answers what was not asked"))?;
            self.receive_data(&batch, sum, &mut queue.targets, stop)?;
            credit += batch.bytes;
            received += batch.bytes;
        }
    }

    /// Receives the data of a response into the targets, and verifies it.
    fn receive_data(
        &mut self,
        batch: &Batch,
        sum: ReadReply,
        targets: &mut [&mut [u8]],
        stop: &CancelToken,
    ) -> Result<()> {
        let mut crc = crc32fast::Hasher::new();
        for (target_index, piece, proof) in &batch.pieces {
            let target = &mut *targets[*target_index];
            let len = to_usize(piece.range.1);
            let mut verification = match proof {
                VerifyMode::WholeChunks(storage) => {
                    Some((storage, StreamingVerifier::new(storage, piece.range.0 - storage.offset)))
                }
                VerifyMode::PartialChunks(_) | VerifyMode::Skip => None,
            };
            piece.for_each_target(|at| {
                let at = to_usize(at);
                for block in target[at..at + len].chunks_mut(SOCKET_READ_BYTES) {
                    self.read_exact(block, stop)?;
                    if let Some((_, verifier)) = &mut verification {
                        verifier.update(block);
                    }
                    if batch.verify {
                        crc.update(block);
                    }
                }
                Ok::<_, Error>(())
            })?;
            if let Some((storage, verifier)) = verification {
                verifier.finish().map_err(|chunk| {
                    let place = storage.stored_chunk(chunk);
                    checksum_mismatch(&format_args!("bytes {place:?} of an archive"))
                })?;
            }
        }
        if batch.verify && sum.crc32 != Some(crc.finalize()) {
            return Err(checksum_mismatch(&"bytes of an archive"));
        }
        Ok(())
    }
}

fn connection_lost(error: &dyn std::fmt::Display) -> Error {
    let text = format_args!("the daemon that holds the bytes is lost: {error}; get them again");
    Error::new(ErrorKind::Unreachable, text)
}

fn checksum_mismatch(what: &dyn std::fmt::Display) -> Error {
    let text = format_args!("checksum mismatch in {what}, as received: get them again");
    Error::new(ErrorKind::Corrupt, text)
}
