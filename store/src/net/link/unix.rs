//! A connection over a Unix socket, which carries descriptors.

use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use async_trait::async_trait;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, Shutdown,
};
use tokio::io::Interest;
use tokio::net::UnixStream;

use super::{ReceiveHalf, SendHalf};

#[async_trait]
impl SendHalf for Arc<UnixStream> {
    async fn send(&mut self, parts: &[IoSlice<'_>], fds: &[BorrowedFd<'_>]) -> io::Result<usize> {
        self.async_io(Interest::WRITABLE, || send(self, parts, fds)).await
    }

    fn try_send(&self, parts: &[IoSlice<'_>], fds: &[BorrowedFd<'_>]) -> usize {
        send(self, parts, fds).unwrap_or(0)
    }

    fn close(&self) {
        // It may be closed already.
        let _ = rustix::net::shutdown(&**self, Shutdown::Both);
    }
}

#[async_trait]
impl ReceiveHalf for Arc<UnixStream> {
    async fn receive(
        &mut self,
        block: &mut [u8],
        fds: &mut VecDeque<OwnedFd>,
    ) -> io::Result<usize> {
        self.async_io(Interest::READABLE, || {
            let mut space = [MaybeUninit::uninit(); fd_space()];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let flags = RecvFlags::CMSG_CLOEXEC;
            let into = &mut [IoSliceMut::new(block)];
            let message = rustix::net::recvmsg(&**self, into, &mut control, flags)?;
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(more) = message {
                    fds.extend(more);
                }
            }
            Ok(message.bytes)
        })
        .await
    }
}

fn send(stream: &UnixStream, parts: &[IoSlice<'_>], fds: &[BorrowedFd<'_>]) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); fd_space()];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        let pushed = control.push(SendAncillaryMessage::ScmRights(fds));
        debug_assert!(pushed, "there is space for as many as a frame has");
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    Ok(rustix::net::sendmsg(stream, parts, &mut control, flags)?)
}

/// Returns the size of a control buffer for the descriptors of one frame, in bytes.
const fn fd_space() -> usize {
    rustix::cmsg_space!(ScmRights(64))
}
