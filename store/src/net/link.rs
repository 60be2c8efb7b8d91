//! Sends and receives frames over a connection, with descriptors if the connection carries them.

mod tcp;
mod unix;

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use tokio::net::UnixStream;

use crate::net::tls::TcpConnection;
use crate::net::wire::{Frame, HEADER_BYTES, Header, Limits};

/// Timeout of a frame, from its first byte to its last. After it, the peer is considered lost.
pub(crate) const FRAME_TIMEOUT: Duration = Duration::from_secs(30);

/// Smallest and largest number of bytes that one call requests.
///
/// The smallest is enough for most frames, so that one call receives the whole frame. An idle
/// connection allocates no more than that.
const RECEIVE_BYTES: std::ops::RangeInclusive<usize> = 4 << 10..=64 << 10;

/// Maximum number of slices that one call sends. Linux accepts at most 1024 (`IOV_MAX`).
const MAX_SLICES: usize = 256;

/// The sending half of a byte stream.
#[async_trait]
trait SendHalf: Send + Sync {
    /// Sends some bytes of `parts`, and the descriptors with the first byte.
    ///
    /// Returns the number of bytes.
    ///
    /// The parts must not all be empty.
    async fn send(&mut self, parts: &[IoSlice<'_>], fds: &[BorrowedFd<'_>]) -> io::Result<usize>;

    /// Sends as many bytes as the kernel accepts without blocking.
    ///
    /// Returns their number, 0 after an error.
    fn try_send(&self, parts: &[IoSlice<'_>], fds: &[BorrowedFd<'_>]) -> usize;

    /// Closes the connection in both directions.
    fn close(&self);
}

/// The receiving half of a byte stream.
#[async_trait]
trait ReceiveHalf: Send {
    /// Receives some bytes and descriptors.
    ///
    /// Returns the number of bytes, 0 at the end of the stream.
    async fn receive(&mut self, block: &mut [u8], fds: &mut VecDeque<OwnedFd>)
    -> io::Result<usize>;
}

/// Sends frames to the peer.
pub(crate) struct FrameSender(Box<dyn SendHalf>);

/// Receives frames from the peer.
pub(crate) struct FrameReceiver {
    half: Box<dyn ReceiveHalf>,
    /// Received bytes of the next frame.
    buffer: Vec<u8>,
    /// Received descriptors. The next frames take them in order.
    fds: VecDeque<OwnedFd>,
    /// Limits of the peer's frames.
    limits: Limits,
}

/// Returns both directions of a connection within this host.
///
/// `limits` are those of the peer's frames.
pub(crate) fn split_unix(stream: UnixStream, limits: Limits) -> (FrameSender, FrameReceiver) {
    let stream = Arc::new(stream);
    (FrameSender(Box::new(stream.clone())), FrameReceiver::new(Box::new(stream), limits))
}

/// Returns both directions of a connection to another host.
///
/// `limits` are those of the peer's frames.
pub(crate) fn split_tcp(connection: TcpConnection, limits: Limits) -> (FrameSender, FrameReceiver) {
    let TcpConnection { stream, socket } = connection;
    let (receiving, sending) = tokio::io::split(stream);
    (
        FrameSender(Box::new(tcp::TcpSendHalf(sending, socket))),
        FrameReceiver::new(Box::new(receiving), limits),
    )
}

impl FrameSender {
    /// Sends a frame. Frames are sent one at a time: they must not be interleaved.
    pub(crate) async fn send(&mut self, frame: &Frame) -> io::Result<()> {
        self.send_remaining(frame, 0).await
    }

    /// Sends the rest of a frame, of which the first `sent` bytes have been sent.
    pub(crate) async fn send_remaining(&mut self, frame: &Frame, sent: usize) -> io::Result<()> {
        with_timeout(FRAME_TIMEOUT, self.send_unsent(frame, sent)).await
    }

    /// Sends as much of the rest as the kernel accepts without blocking.
    ///
    /// # Errors
    ///
    /// The number of bytes of the frame that have been sent so far, if some are left.
    pub(crate) fn try_send(&self, frame: &Frame, sent: usize) -> Result<(), usize> {
        let header = frame.header().to_bytes();
        let (mut slices, mut fds) = io_slices(&header, frame);
        let unsent = skip_sent(&mut slices, &mut fds, sent);
        let unsent_bytes: usize = unsent.iter().map(|slice| slice.len()).sum();
        let sent_now = self.0.try_send(&unsent[..unsent.len().min(MAX_SLICES)], &fds);
        if sent_now == unsent_bytes { Ok(()) } else { Err(sent + sent_now) }
    }

    /// Closes the connection in both directions.
    pub(crate) fn close(&self) {
        self.0.close();
    }

    async fn send_unsent(&mut self, frame: &Frame, sent: usize) -> io::Result<()> {
        let header = frame.header().to_bytes();
        let (mut slices, mut fds) = io_slices(&header, frame);
        let mut unsent = skip_sent(&mut slices, &mut fds, sent);
        while !unsent.is_empty() {
            let sent = self.0.send(&unsent[..unsent.len().min(MAX_SLICES)], &fds).await?;
            unsent = skip_sent(unsent, &mut fds, sent);
        }
        Ok(())
    }
}

/// Returns the bytes of a frame as slices, and its descriptors.
fn io_slices<'a>(
    header: &'a [u8; HEADER_BYTES],
    frame: &'a Frame,
) -> (Vec<IoSlice<'a>>, Vec<BorrowedFd<'a>>) {
    let pieces = frame.data.pieces().iter().map(|piece| &piece[..]);
    let slices = [&header[..], &frame.head].into_iter().chain(pieces);
    (slices.map(IoSlice::new).collect(), frame.fds.iter().map(AsFd::as_fd).collect())
}

/// Skips `sent` bytes. If the first byte has been sent, the descriptors have been sent with it.
fn skip_sent<'a, 'b>(
    mut slices: &'a mut [IoSlice<'b>],
    fds: &mut Vec<BorrowedFd<'_>>,
    sent: usize,
) -> &'a mut [IoSlice<'b>] {
    IoSlice::advance_slices(&mut slices, sent);
    if sent > 0 {
        fds.clear();
    }
    slices
}

impl FrameReceiver {
    fn new(half: Box<dyn ReceiveHalf>, limits: Limits) -> Self {
        Self { half, buffer: Vec::new(), fds: VecDeque::new(), limits }
    }

    /// Sets the limits of the frames that follow.
    pub(crate) fn set_limits(&mut self, limits: Limits) {
        self.limits = limits;
    }

    /// Receives the next frame. Returns none if the peer closed the connection between two frames.
    ///
    /// Not cancel-safe: after this future is dropped, the connection must not be read again.
    pub(crate) async fn receive(&mut self) -> io::Result<Option<Frame>> {
        // The timeout starts with the first byte of a frame: before that, the peer may be idle.
        if self.buffer.is_empty() && self.fill(HEADER_BYTES).await? == 0 {
            return Ok(None);
        }
        with_timeout(FRAME_TIMEOUT, self.receive_frame()).await.map(Some)
    }

    async fn receive_frame(&mut self) -> io::Result<Frame> {
        self.fill_to(HEADER_BYTES).await?;
        let (header, _) = self.buffer.split_first_chunk().expect("there are so many bytes");
        let header = Header::parse(header, self.limits).map_err(invalid_data)?;
        let size = |len: u32| usize::try_from(len).map_err(io::Error::other);
        let (head_len, data_len) = (size(header.head_len)?, size(header.data_len)?);
        let end = HEADER_BYTES + head_len + data_len;
        self.fill_to(end).await?;
        let rest = self.buffer.split_off(end);
        let mut head = std::mem::replace(&mut self.buffer, rest);
        let data = head.split_off(HEADER_BYTES + head_len);
        head.drain(..HEADER_BYTES);
        let count = usize::from(header.fds);
        if self.fds.len() < count {
            return Err(invalid_data("fewer descriptors have come than the frame says"));
        }
        let fds = self.fds.drain(..count).collect();
        // A frame's descriptors arrive with its first byte, so none can be left without a byte.
        if self.buffer.is_empty() && !self.fds.is_empty() {
            return Err(invalid_data("more descriptors have come than frames say"));
        }
        let data = Bytes::from(data).into();
        Ok(Frame { kind: header.kind, number: header.number, head, data, fds })
    }

    async fn fill_to(&mut self, len: usize) -> io::Result<()> {
        while self.buffer.len() < len {
            if self.fill(len - self.buffer.len()).await? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
        Ok(())
    }

    /// Receives bytes, of which `missing` are needed. More than that may be received.
    ///
    /// Returns the number of bytes, 0 at the end of the stream.
    async fn fill(&mut self, missing: usize) -> io::Result<usize> {
        let start = self.buffer.len();
        self.buffer.resize(start + missing.clamp(*RECEIVE_BYTES.start(), *RECEIVE_BYTES.end()), 0);
        let received = self.half.receive(&mut self.buffer[start..], &mut self.fds).await;
        self.buffer.truncate(start + received.as_ref().map_or(0, |received| *received));
        // Bounds the number of descriptors that are queued without a frame that announces them.
        if self.fds.len() > 2 * usize::from(self.limits.fds) {
            return Err(invalid_data("more descriptors have come than frames say"));
        }
        received
    }
}

async fn with_timeout<T>(
    timeout: Duration,
    work: impl Future<Output = io::Result<T>>,
) -> io::Result<T> {
    let slow = |_| io::Error::new(io::ErrorKind::TimedOut, "the peer is too slow");
    tokio::time::timeout(timeout, work).await.map_err(slow)?
}

fn invalid_data(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncWriteExt;

    use super::*;
    use crate::net::wire::FrameKind;

    /// Runs a future on a runtime with paused time, which advances when no task can run.
    fn run_paused<T>(work: impl Future<Output = T>) -> T {
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        runtime.enable_all().start_paused(true).build().unwrap().block_on(work)
    }

    fn frame(data_len: usize) -> Frame {
        // The data consists of several pieces, some of which are empty.
        let mut rest = Bytes::from(vec![7; data_len]);
        let mut data = Vec::new();
        while !rest.is_empty() {
            data.extend([rest.split_to(rest.len().min(100_001)), Bytes::new()]);
        }
        let (head, data) = (b"{}".to_vec(), data.into());
        Frame { kind: FrameKind::Reply, number: 9, head, data, fds: Vec::new() }
    }

    #[test]
    fn incomplete_frame_times_out() {
        run_paused(async {
            for len in [1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 2] {
                let (local, remote) = UnixStream::pair().unwrap();
                let (_sender, mut receiver) = split_unix(local, Limits::DAEMON);
                let mut remote = remote;
                remote
                    .write_all(&frame(1).header().to_bytes()[..len.min(HEADER_BYTES)])
                    .await
                    .unwrap();
                remote.write_all(&b"{}"[..len.saturating_sub(HEADER_BYTES)]).await.unwrap();
                let error = receiver.receive().await.unwrap_err();
                assert_eq!(error.kind(), io::ErrorKind::TimedOut, "{len}");
            }
        });
    }

    #[test]
    fn send_to_stalled_peer_times_out() {
        run_paused(async {
            let (local, _remote) = UnixStream::pair().unwrap();
            let (mut sender, _receiver) = split_unix(local, Limits::CLIENT);
            let error = sender.send(&frame(16 << 20)).await.unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        });
    }

    #[test]
    fn frames_round_trip_across_partial_reads() {
        run_paused(async {
            let (local, remote) = UnixStream::pair().unwrap();
            let ((mut sender, _), (_, mut receiver)) =
                (split_unix(local, Limits::DAEMON), split_unix(remote, Limits::DAEMON));
            let sizes = [0, 1, 4 << 10, 300_000, 0, 16 << 20, 5];
            let sending = async {
                for size in sizes {
                    sender.send(&frame(size)).await.unwrap();
                }
                sender.close();
            };
            let receiving = async {
                for size in sizes {
                    let received = receiver.receive().await.unwrap().unwrap();
                    assert_eq!(
                        (received.number, received.head, received.data.len()),
                        (9, b"{}".to_vec(), size)
                    );
                    assert!(received.data.into_bytes().iter().all(|byte| *byte == 7));
                }
                assert!(receiver.receive().await.unwrap().is_none());
            };
            tokio::join!(sending, receiving);
        });
    }
}
