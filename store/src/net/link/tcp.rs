//! A connection to another host, which carries no descriptors.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{BorrowedFd, OwnedFd};

use async_trait::async_trait;
use tokio::io::{AsyncReadExt, AsyncWriteExt, ReadHalf, WriteHalf};

use super::{ReceiveHalf, SendHalf};
use crate::net::tls::AsyncDuplex;

/// The sending half of a stream, and the socket below it.
pub(super) struct TcpSendHalf(pub(super) WriteHalf<Box<dyn AsyncDuplex>>, pub(super) TcpStream);

#[async_trait]
impl SendHalf for TcpSendHalf {
    async fn send(&mut self, parts: &[IoSlice<'_>], fds: &[BorrowedFd<'_>]) -> io::Result<usize> {
        if !fds.is_empty() {
            return Err(io::Error::other("descriptors do not leave the host"));
        }
        let sent = self.0.write_vectored(parts).await?;
        // TLS may buffer encrypted bytes.
        self.0.flush().await?;
        Ok(sent)
    }

    /// Sends nothing: the bytes may have to be encrypted, which needs the runtime.
    fn try_send(&self, _parts: &[IoSlice<'_>], _fds: &[BorrowedFd<'_>]) -> usize {
        0
    }

    fn close(&self) {
        // It may be closed already.
        let _ = self.1.shutdown(Shutdown::Both);
    }
}

#[async_trait]
impl ReceiveHalf for ReadHalf<Box<dyn AsyncDuplex>> {
    async fn receive(
        &mut self,
        block: &mut [u8],
        _fds: &mut VecDeque<OwnedFd>,
    ) -> io::Result<usize> {
        self.read(block).await
    }
}
