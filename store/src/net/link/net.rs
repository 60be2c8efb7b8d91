//! A connection to another host: bytes alone.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{BorrowedFd, OwnedFd};

use async_trait::async_trait;
use tokio::io::{AsyncReadExt, AsyncWriteExt, ReadHalf, WriteHalf};

use super::{Inlet, Outlet};
use crate::net::tls::AsyncDuplex;

/// The sending half, and the socket below it.
pub(super) struct Out(pub(super) WriteHalf<Box<dyn AsyncDuplex>>, pub(super) TcpStream);

#[async_trait]
impl Outlet for Out {
    async fn send(&mut self, parts: &[IoSlice<'_>], fds: &[BorrowedFd<'_>]) -> io::Result<usize> {
        if !fds.is_empty() {
            return Err(io::Error::other("descriptors do not leave the host"));
        }
        let sent = self.0.write_vectored(parts).await?;
        // What is encrypted may be held back.
        self.0.flush().await?;
        Ok(sent)
    }

    /// All goes through the runtime: it may have to be encrypted.
    fn send_now(&self, _parts: &[IoSlice<'_>], _fds: &[BorrowedFd<'_>]) -> usize {
        0
    }

    fn close(&self) {
        // It may be closed already.
        let _ = self.1.shutdown(Shutdown::Both);
    }
}

#[async_trait]
impl Inlet for ReadHalf<Box<dyn AsyncDuplex>> {
    async fn receive(
        &mut self,
        block: &mut [u8],
        _fds: &mut VecDeque<OwnedFd>,
    ) -> io::Result<usize> {
        self.read(block).await
    }
}
