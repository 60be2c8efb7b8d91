//! Frames over a connection, with descriptors where it carries them.

mod net;
mod unix;

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use tokio::net::UnixStream;

use crate::net::tls::AsyncDuplex;
use crate::net::wire::{Frame, HEADER_BYTES, Header, Limits};

/// A frame that has begun to come or to go is complete within this time, or the peer is lost.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// How much is received at once: at least, so that a frame comes in one call mostly, and at most. An
/// idle connection holds no more than the first.
const BLOCKS: std::ops::RangeInclusive<usize> = 4 << 10..=64 << 10;

/// Of how many pieces bytes are sent at once: the system takes no more than 1024.
const MAX_PARTS: usize = 256;

/// Where bytes go out.
#[async_trait]
trait Outlet: Send + Sync {
    /// Sends some bytes of these parts, which are not all empty, and descriptors with the first one; says
    /// how many.
    async fn send(&mut self, parts: &[IoSlice<'_>], fds: &[BorrowedFd<'_>]) -> io::Result<usize>;

    /// The same as far as the system takes it at once: says how many bytes, none if something fails.
    fn send_now(&self, parts: &[IoSlice<'_>], fds: &[BorrowedFd<'_>]) -> usize;

    /// Ends the connection, both ways.
    fn close(&self);
}

/// Where bytes come in.
#[async_trait]
trait Inlet: Send {
    /// Receives some bytes, and descriptors; says how many bytes, 0 at the end.
    async fn receive(&mut self, block: &mut [u8], fds: &mut VecDeque<OwnedFd>)
    -> io::Result<usize>;
}

/// One end that sends.
pub(crate) struct Sender(Box<dyn Outlet>);

/// The same end, receiving.
pub(crate) struct Receiver {
    inlet: Box<dyn Inlet>,
    /// Bytes that have come and belong to the next frame.
    bytes: Vec<u8>,
    /// Descriptors that have come, which belong to the next frames in turn.
    fds: VecDeque<OwnedFd>,
    /// What the peer's frames have at most.
    limits: Limits,
}

/// Both directions of a connection within a host, to a peer whose frames are within these limits.
pub(crate) fn split(stream: UnixStream, limits: Limits) -> (Sender, Receiver) {
    let stream = Arc::new(stream);
    (Sender(Box::new(stream.clone())), Receiver::new(Box::new(stream), limits))
}

/// As [`split`], of a connection to another host and the socket below it.
pub(crate) fn split_net(
    (stream, socket): (Box<dyn AsyncDuplex>, TcpStream),
    limits: Limits,
) -> (Sender, Receiver) {
    let (inlet, outlet) = tokio::io::split(stream);
    (Sender(Box::new(net::Out(outlet, socket))), Receiver::new(Box::new(inlet), limits))
}

impl Sender {
    /// Sends a frame. One at a time: frames do not mix.
    pub(crate) async fn send(&mut self, frame: &Frame) -> io::Result<()> {
        self.send_rest(frame, 0).await
    }

    /// Sends what is left of a frame of which so many bytes have gone.
    pub(crate) async fn send_rest(&mut self, frame: &Frame, sent: usize) -> io::Result<()> {
        deadline(PATIENCE, self.send_from(frame, sent)).await
    }

    /// The same as far as the system takes it at once. If that is not all, says how many bytes have gone.
    pub(crate) fn send_now(&self, frame: &Frame, sent: usize) -> Result<(), usize> {
        let header = frame.header().to_bytes();
        let (mut parts, mut fds) = parts(&header, frame);
        let rest = rest(&mut parts, &mut fds, sent);
        let all: usize = rest.iter().map(|part| part.len()).sum();
        let now = self.0.send_now(&rest[..rest.len().min(MAX_PARTS)], &fds);
        if now == all { Ok(()) } else { Err(sent + now) }
    }

    /// Ends the connection, both ways.
    pub(crate) fn close(&self) {
        self.0.close();
    }

    async fn send_from(&mut self, frame: &Frame, sent: usize) -> io::Result<()> {
        let header = frame.header().to_bytes();
        let (mut parts, mut fds) = parts(&header, frame);
        let mut left = rest(&mut parts, &mut fds, sent);
        while !left.is_empty() {
            let sent = self.0.send(&left[..left.len().min(MAX_PARTS)], &fds).await?;
            left = rest(left, &mut fds, sent);
        }
        Ok(())
    }
}

/// A frame as it goes: its bytes, and its descriptors.
fn parts<'a>(
    header: &'a [u8; HEADER_BYTES],
    frame: &'a Frame,
) -> (Vec<IoSlice<'a>>, Vec<BorrowedFd<'a>>) {
    let pieces = frame.data.pieces().iter().map(|piece| &piece[..]);
    let parts = [&header[..], &frame.head].into_iter().chain(pieces);
    (parts.map(IoSlice::new).collect(), frame.fds.iter().map(AsFd::as_fd).collect())
}

/// What is left once so many more bytes have gone; the descriptors go with the first ones.
fn rest<'a, 'b>(
    mut parts: &'a mut [IoSlice<'b>],
    fds: &mut Vec<BorrowedFd<'_>>,
    sent: usize,
) -> &'a mut [IoSlice<'b>] {
    IoSlice::advance_slices(&mut parts, sent);
    if sent > 0 {
        fds.clear();
    }
    parts
}

impl Receiver {
    fn new(inlet: Box<dyn Inlet>, limits: Limits) -> Self {
        Self { inlet, bytes: Vec::new(), fds: VecDeque::new(), limits }
    }

    /// From now on the peer's frames are within these limits.
    pub(crate) fn limit(&mut self, limits: Limits) {
        self.limits = limits;
    }

    /// The next frame; none if the peer has ended the connection between two frames.
    ///
    /// Not to be dropped before it is done, unless nothing more is to be received.
    pub(crate) async fn receive(&mut self) -> io::Result<Option<Frame>> {
        // Nothing is owed until the first byte has come.
        if self.bytes.is_empty() && self.fill(HEADER_BYTES).await? == 0 {
            return Ok(None);
        }
        deadline(PATIENCE, self.rest()).await.map(Some)
    }

    async fn rest(&mut self) -> io::Result<Frame> {
        self.fill_to(HEADER_BYTES).await?;
        let (header, _) = self.bytes.split_first_chunk().expect("there are so many bytes");
        let header = Header::parse(header, self.limits).map_err(invalid)?;
        let size = |len: u32| usize::try_from(len).map_err(io::Error::other);
        let (head_len, data_len) = (size(header.head_len)?, size(header.data_len)?);
        let end = HEADER_BYTES + head_len + data_len;
        self.fill_to(end).await?;
        let rest = self.bytes.split_off(end);
        let mut head = std::mem::replace(&mut self.bytes, rest);
        let data = head.split_off(HEADER_BYTES + head_len);
        head.drain(..HEADER_BYTES);
        let count = usize::from(header.fds);
        if self.fds.len() < count {
            return Err(invalid("fewer descriptors have come than the frame says"));
        }
        let fds = self.fds.drain(..count).collect();
        // Those of a frame come with its first byte.
        if self.bytes.is_empty() && !self.fds.is_empty() {
            return Err(invalid("more descriptors have come than frames say"));
        }
        let data = Bytes::from(data).into();
        Ok(Frame { kind: header.kind, number: header.number, head, data, fds })
    }

    async fn fill_to(&mut self, len: usize) -> io::Result<()> {
        while self.bytes.len() < len {
            if self.fill(len - self.bytes.len()).await? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
        Ok(())
    }

    /// Receives what there is, of so many bytes that are missing and some more; says how many have
    /// come, and 0 at the end.
    async fn fill(&mut self, missing: usize) -> io::Result<usize> {
        let start = self.bytes.len();
        self.bytes.resize(start + missing.clamp(*BLOCKS.start(), *BLOCKS.end()), 0);
        let received = self.inlet.receive(&mut self.bytes[start..], &mut self.fds).await;
        self.bytes.truncate(start + received.as_ref().map_or(0, |received| *received));
        // What nobody has announced is not kept.
        if self.fds.len() > 2 * usize::from(self.limits.fds) {
            return Err(invalid("more descriptors have come than frames say"));
        }
        received
    }
}

async fn deadline<T>(
    patience: Duration,
    work: impl Future<Output = io::Result<T>>,
) -> io::Result<T> {
    let slow = |_| io::Error::new(io::ErrorKind::TimedOut, "the peer is too slow");
    tokio::time::timeout(patience, work).await.map_err(slow)?
}

fn invalid(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncWriteExt;

    use super::*;
    use crate::net::wire::FrameKind;

    /// A runtime whose time passes when nothing else happens.
    fn run<T>(work: impl Future<Output = T>) -> T {
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        runtime.enable_all().start_paused(true).build().unwrap().block_on(work)
    }

    fn frame(data: usize) -> Frame {
        // In pieces, some of which are empty.
        let mut rest = Bytes::from(vec![7; data]);
        let mut data = Vec::new();
        while !rest.is_empty() {
            data.extend([rest.split_to(rest.len().min(100_001)), Bytes::new()]);
        }
        let (head, data) = (b"{}".to_vec(), data.into());
        Frame { kind: FrameKind::Reply, number: 9, head, data, fds: Vec::new() }
    }

    #[test]
    fn a_frame_that_begins_must_end() {
        run(async {
            for len in [1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 2] {
                let (near, far) = UnixStream::pair().unwrap();
                let (_sender, mut receiver) = split(near, Limits::DAEMON);
                let mut far = far;
                far.write_all(&frame(1).header().to_bytes()[..len.min(HEADER_BYTES)])
                    .await
                    .unwrap();
                far.write_all(&b"{}"[..len.saturating_sub(HEADER_BYTES)]).await.unwrap();
                let error = receiver.receive().await.unwrap_err();
                assert_eq!(error.kind(), io::ErrorKind::TimedOut, "{len}");
            }
        });
    }

    #[test]
    fn a_peer_that_does_not_receive_is_lost() {
        run(async {
            let (near, _far) = UnixStream::pair().unwrap();
            let (mut sender, _receiver) = split(near, Limits::CLIENT);
            let error = sender.send(&frame(16 << 20)).await.unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        });
    }

    #[test]
    fn frames_come_as_they_went_however_they_are_cut() {
        run(async {
            let (near, far) = UnixStream::pair().unwrap();
            let ((mut sender, _), (_, mut receiver)) =
                (split(near, Limits::DAEMON), split(far, Limits::DAEMON));
            let sizes = [0, 1, 4 << 10, 300_000, 0, 16 << 20, 5];
            let sending = async {
                for size in sizes {
                    sender.send(&frame(size)).await.unwrap();
                }
                sender.close();
            };
            let receiving = async {
                for size in sizes {
                    let come = receiver.receive().await.unwrap().unwrap();
                    assert_eq!(
                        (come.number, come.head, come.data.len()),
                        (9, b"{}".to_vec(), size)
                    );
                    assert!(come.data.into_bytes().iter().all(|byte| *byte == 7));
                }
                assert!(receiver.receive().await.unwrap().is_none());
            };
            tokio::join!(sending, receiving);
        });
    }
}
