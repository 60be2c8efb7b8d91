//! Bytes of archives that a daemon holds for others: read over connections of their own, straight into
//! memory.
//!
//! Each thread has a connection, on which several requests are under way: a request is the credit for
//! its bytes, so no more comes than was asked for.

use std::collections::VecDeque;
use std::io::{self, BufReader, Read, Write};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use tssd_format::MAX_CHUNK_BYTES;

use super::{hello, unexpected};
use crate::blob::{Boxed, Holder, Job, Proof, Proving};
use crate::error::{Error, ErrorKind, Result};
use crate::io::cancel::Stop;
use crate::io::parallel::{self, cores};
use crate::io::sync::{Lock, MutexGuard};
use crate::net::tls::{Duplex, SILENCE};
use crate::net::wire::{
    FrameKind, HEADER_BYTES, Header, Limits, MAX_READ, Piece, Protocol, Range, Reply, Request, Sum,
};

/// How many connections there are at most: more do not make a network faster.
const MAX_LINES: usize = 8;

/// No manifest is longer.
const MAX_MANIFEST: usize = 4 << 30;

/// How many bytes are asked for ahead.
const WINDOW: u64 = 2 * MAX_READ;

/// What is received at once: small enough to be in the cache still when it is summed.
const BLOCK: usize = 256 << 10;

/// What is read ahead when an answer begins; data that is longer goes where it belongs at once.
const HEAD: usize = 16 << 10;

/// The ranges of a request have at most so many bytes of JSON; a range without loops, and each loop, has
/// at most so many.
const MAX_TEXT: usize = 60_000;
const RANGE_TEXT: usize = 48;
const LOOP_TEXT: usize = 44;

/// An answer has come completely within this time.
const PATIENCE: Duration = Duration::from_mins(1);

/// How a connection is made.
pub(crate) type Dial = Arc<dyn Fn() -> Result<Box<dyn Duplex>> + Send + Sync>;

/// Connections to a daemon. Those that are not in use stay open.
pub(crate) struct Lines {
    dial: Dial,
    /// Whether what is read is still kept for us.
    is_held: Box<dyn Fn() -> bool + Send + Sync>,
    idle: Lock<Vec<Line>>,
}

/// One connection.
struct Line {
    stream: BufReader<Box<dyn Duplex>>,
    next: u64,
    /// When the answer is to have come that is read.
    until: Instant,
}

/// A request that is under way.
struct Batch {
    number: u64,
    bytes: u64,
    prove: bool,
    /// Each with the place of its job, and how it is proven.
    pieces: Vec<(usize, Piece, Proof)>,
}

impl Lines {
    pub(crate) fn new(dial: Dial) -> Self {
        Self { dial, is_held: Box::new(|| true), idle: Lock::default() }
    }

    /// The same for bytes that stay the same as long as this is so.
    pub(crate) fn while_held(self, is_held: impl Fn() -> bool + Send + Sync + 'static) -> Self {
        Self { is_held: Box::new(is_held), ..self }
    }

    fn idle(&self) -> MutexGuard<'_, Vec<Line>> {
        self.idle.lock()
    }

    /// Does something on a connection, which is kept if it went well.
    fn with<T>(&self, stop: &Stop, work: impl FnOnce(&mut Line) -> Result<T>) -> Result<T> {
        let mut line = loop {
            let idle = self.idle().pop();
            match idle {
                Some(line) if line.stream.get_ref().is_open() => break line,
                // The daemon has ended it meanwhile.
                Some(_) => {}
                None => {
                    let dial = self.dial.clone();
                    break Line::open(stop.leave(move || dial())?, stop)?;
                }
            }
        };
        let done = work(&mut line)?;
        let mut idle = self.idle();
        if idle.len() < MAX_LINES {
            idle.push(line);
        }
        Ok(done)
    }
}

impl Lines {
    /// A manifest, which is read at once.
    pub(crate) fn manifest(&self, blob: &str, len: u64) -> Result<Vec<u8>> {
        let len = usize::try_from(len).ok().filter(|len| *len <= MAX_MANIFEST);
        let text = format_args!("`{blob}` is longer than a manifest can be");
        let mut bytes = vec![0; len.ok_or_else(|| Error::new(ErrorKind::Corrupt, text))?];
        let read = self.read_exact_at(blob, &mut bytes, 0);
        read.map_err(|error| Error::io(blob, error)).map(|()| bytes)
    }

    /// Bytes of a blob, with their checksum if they were proven, as they go on to somebody else.
    pub(crate) fn relay(
        &self,
        blob: &str,
        ranges: Vec<Range>,
        prove: bool,
    ) -> Result<(Bytes, Sum)> {
        let request = Request::Read { blob: blob.to_owned(), ranges, prove };
        self.with(&Stop::default(), |line| match line.call(&request, &Stop::default())? {
            (Reply::Read(sum), data) => Ok((data.into(), sum)),
            (other, _) => Err(unexpected(&other)),
        })
    }

    /// The daemon need not keep blobs any more.
    pub(crate) fn discard(&self, blobs: &[String]) -> Result<()> {
        let request = Request::Discard { blobs: blobs.to_vec() };
        self.with(&Stop::default(), |line| match line.call(&request, &Stop::default())? {
            (Reply::Done, _) => Ok(()),
            (other, _) => Err(unexpected(&other)),
        })
    }
}

impl Holder for Lines {
    fn pull(&self, jobs: Vec<Job<'_>>, stop: &Stop) -> Result<u64> {
        let threads = cores().min(MAX_LINES).min(jobs.len());
        let queue = Lock::new(jobs.into_iter());
        let next = || queue.lock().next();
        let run = |_: usize| match next() {
            Some(first) => self.with(stop, |line| line.pull(Pulling::new(first, &next), stop)),
            None => Ok(0),
        };
        let pulled = parallel::map((0..threads).collect(), run);
        // They may be gone, or something else may have been there already.
        if !(self.is_held)() {
            return Err(lost(&"the connection that held them is gone"));
        }
        match pulled {
            // The daemon has seen the end of that connection before this side has.
            Err(error) if error.kind() == ErrorKind::NotFound => Err(lost(&error)),
            pulled => Ok(pulled?.into_iter().sum()),
        }
    }

    fn read_exact_at(&self, blob: &str, target: &mut [u8], offset: u64) -> io::Result<()> {
        let len = u64::try_from(target.len()).map_err(io::Error::other)?;
        let whole = Boxed {
            blob: blob.into(),
            source: offset,
            target: 0,
            runs: tssd_format::Runs::contiguous(len),
            proof: Proof::None,
        };
        let pulled = self.pull(vec![Job { target, boxes: vec![whole] }], &Stop::default());
        pulled.map(drop).map_err(io::Error::other)
    }
}

/// The jobs of a thread, and what of them is not asked for yet.
struct Pulling<'a, 'n> {
    next_job: &'n dyn Fn() -> Option<Job<'a>>,
    targets: Vec<&'a mut [u8]>,
    boxes: VecDeque<(usize, Boxed)>,
    /// Of the first box, if it has begun.
    pieces: VecDeque<Piece>,
}

impl<'a, 'n> Pulling<'a, 'n> {
    fn new(first: Job<'a>, next_job: &'n dyn Fn() -> Option<Job<'a>>) -> Self {
        let mut pulling =
            Self { next_job, targets: Vec::new(), boxes: VecDeque::new(), pieces: VecDeque::new() };
        pulling.take(first);
        pulling
    }

    fn take(&mut self, job: Job<'a>) {
        let place = self.targets.len();
        self.targets.push(job.target);
        self.boxes.extend(job.boxes.into_iter().map(|each| (place, each)));
    }

    /// The next box that is not empty.
    fn first(&mut self) -> Option<&(usize, Boxed)> {
        while self.pieces.is_empty() {
            while self.boxes.is_empty() {
                let job = (self.next_job)()?;
                self.take(job);
            }
            let (_, first) = &self.boxes[0];
            // Pieces that are smaller than requests fill them; chunks are not cut.
            let most = if first.runs.loops().is_empty() { MAX_CHUNK_BYTES } else { MAX_READ };
            self.pieces = Piece::cut(first.source, first.target, &first.runs, most).into();
            if self.pieces.is_empty() {
                self.boxes.pop_front();
            }
        }
        self.boxes.front()
    }

    /// As many bytes as go into one request, and what is asked for them; none if all is asked for.
    fn batch(&mut self, number: u64) -> Option<(Batch, Request)> {
        let (_, first) = self.first()?;
        let blob = first.blob.clone();
        let mut batch = Batch { number, bytes: 0, prove: false, pieces: Vec::new() };
        let (mut ranges, mut text): (Vec<Range>, usize) = (Vec::new(), 0);
        while let Some((place, each)) = self.first().filter(|(_, each)| each.blob == blob) {
            let (place, proof) = (*place, each.proof.clone());
            let piece = self.pieces.front().expect("it has one");
            let bytes = piece.range.bytes_in(u64::MAX).unwrap_or(u64::MAX);
            let longer = text + RANGE_TEXT + LOOP_TEXT * piece.range.2.len();
            if !ranges.is_empty()
                && (batch.bytes.saturating_add(bytes) > MAX_READ || longer > MAX_TEXT)
            {
                break;
            }
            let piece = self.pieces.pop_front().expect("it has one");
            if self.pieces.is_empty() {
                self.boxes.pop_front();
            }
            batch.bytes += bytes;
            batch.prove |= matches!(proof, Proof::Part(_));
            match ranges.last_mut() {
                Some(last) if last.continues(&piece.range) => last.1 += piece.range.1,
                _ => {
                    ranges.push(piece.range.clone());
                    text = longer;
                }
            }
            batch.pieces.push((place, piece, proof));
        }
        let request = Request::Read { blob: blob.to_string(), ranges, prove: batch.prove };
        Some((batch, request))
    }
}

impl Line {
    /// Says hello.
    fn open(stream: Box<dyn Duplex>, stop: &Stop) -> Result<Self> {
        set_socket_timeout(stream.socket(), Timeout::Recv, Some(Stop::INTERVAL))
            .map_err(|error| lost(&error))?;
        let stream = BufReader::with_capacity(HEAD, stream);
        let mut line = Self { stream, next: 1, until: Instant::now() };
        match line.call(&Request::Hello(hello()), stop)?.0 {
            Reply::Welcome(welcome) if welcome.protocol.major == Protocol::OWN.major => Ok(line),
            other => Err(unexpected(&other)),
        }
    }

    /// Asks one thing, and waits for the answer and its data.
    fn call(&mut self, request: &Request, stop: &Stop) -> Result<(Reply, Vec<u8>)> {
        self.ask(request)?;
        let (_, reply, len) = self.answer(stop)?;
        let mut data = vec![0; usize::try_from(len).unwrap_or_default()];
        self.read_exact(&mut data, stop)?;
        Ok((reply, data))
    }

    /// Reads so many bytes of an answer. After silence, or if they come too slowly, it gives up.
    fn read_exact(&mut self, mut bytes: &mut [u8], stop: &Stop) -> Result<()> {
        let mut heard = Instant::now();
        while !bytes.is_empty() {
            stop.check()?;
            let now = Instant::now();
            if now > self.until {
                return Err(lost(&format_args!("it has sent too slowly, for {PATIENCE:?}")));
            }
            match self.stream.read(bytes) {
                Ok(0) => return Err(lost(&io::Error::from(io::ErrorKind::UnexpectedEof))),
                Ok(len) => {
                    bytes = &mut bytes[len..];
                    heard = now;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if now - heard > SILENCE {
                        return Err(lost(&format_args!("it has said nothing for {SILENCE:?}")));
                    }
                }
                Err(error) => return Err(lost(&error)),
            }
        }
        Ok(())
    }

    fn ask(&mut self, request: &Request) -> Result<()> {
        let head = serde_json::to_vec(request)
            .map_err(|error| Error::new(ErrorKind::Invalid, format_args!("message: {error}")))?;
        let head_len = u32::try_from(head.len()).unwrap_or(u32::MAX);
        let number = self.next;
        self.next += 1;
        let header = Header { kind: FrameKind::Request, fds: 0, head_len, data_len: 0, number };
        let stream = self.stream.get_mut();
        let bytes = [&header.to_bytes()[..], &head].concat();
        stream.write_all(&bytes).and_then(|()| stream.flush()).map_err(|error| lost(&error))
    }

    /// The next answer: to which request, and how many bytes come as its data.
    fn answer(&mut self, stop: &Stop) -> Result<(u64, Reply, u32)> {
        self.until = Instant::now() + PATIENCE;
        let mut header = [0; HEADER_BYTES];
        self.read_exact(&mut header, stop)?;
        let header = Header::parse(&header, Limits::FAR_DAEMON).map_err(|error| lost(&error))?;
        let mut head = vec![0; usize::try_from(header.head_len).unwrap_or_default()];
        self.read_exact(&mut head, stop)?;
        let reply = serde_json::from_slice(&head).map_err(|error| lost(&error))?;
        match reply {
            Reply::Failed(failure) => Err(failure.into()),
            reply => Ok((header.number, reply, header.data_len)),
        }
    }

    /// Fills the targets of jobs, until there are no more; returns how many bytes came.
    fn pull(&mut self, mut pulling: Pulling<'_, '_>, stop: &Stop) -> Result<u64> {
        let mut asked: VecDeque<Batch> = VecDeque::new();
        let (mut credit, mut received) = (WINDOW, 0);
        loop {
            while credit >= MAX_READ
                && let Some((batch, request)) = pulling.batch(self.next)
            {
                self.ask(&request)?;
                credit -= batch.bytes;
                asked.push_back(batch);
            }
            if asked.is_empty() {
                return Ok(received);
            }
            let (number, reply, len) = self.answer(stop)?;
            let Reply::Read(sum) = reply else { return Err(unexpected(&reply)) };
            let place = asked.iter().position(|batch| batch.number == number);
            let batch = place.and_then(|place| asked.remove(place));
            let batch = batch.filter(|batch| batch.bytes == u64::from(len));
            let batch = batch.ok_or_else(|| lost(&"it answers what was not asked"))?;
            self.receive((&batch, sum), &mut pulling.targets, stop)?;
            credit += batch.bytes;
            received += batch.bytes;
        }
    }

    /// Receives the bytes of an answer where they belong, and proves them.
    fn receive(
        &mut self,
        (batch, sum): (&Batch, Sum),
        targets: &mut [&mut [u8]],
        stop: &Stop,
    ) -> Result<()> {
        let mut all = crc32fast::Hasher::new();
        for (place, piece, proof) in &batch.pieces {
            let target = &mut *targets[*place];
            let len = usize::try_from(piece.range.1).expect("it fits the target");
            let mut whole = match proof {
                Proof::Whole(storage) => {
                    Some((storage, Proving::new(storage, piece.range.0 - storage.offset)))
                }
                Proof::Part(_) | Proof::None => None,
            };
            piece.for_each_target(|at| {
                let at = usize::try_from(at).expect("it lies in the target");
                for block in target[at..at + len].chunks_mut(BLOCK) {
                    self.read_exact(block, stop)?;
                    if let Some((_, proving)) = &mut whole {
                        proving.add(block);
                    }
                    if batch.prove {
                        all.update(block);
                    }
                }
                Ok::<_, Error>(())
            })?;
            if let Some((storage, proving)) = whole {
                proving.finish().map_err(|chunk| {
                    let place = storage.stored_chunk(chunk);
                    corrupt(&format_args!("bytes {place:?} of an archive"))
                })?;
            }
        }
        if batch.prove && sum.crc32 != Some(all.finalize()) {
            return Err(corrupt(&"bytes of an archive"));
        }
        Ok(())
    }
}

fn lost(error: &dyn std::fmt::Display) -> Error {
    let text = format_args!("the daemon that holds the bytes is lost: {error}; get them again");
    Error::new(ErrorKind::Unreachable, text)
}

fn corrupt(what: &dyn std::fmt::Display) -> Error {
    let text = format_args!("{what} that came do not have their checksum; get them again");
    Error::new(ErrorKind::Corrupt, text)
}
