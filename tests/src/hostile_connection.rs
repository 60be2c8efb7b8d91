//! Hostile connections to a daemon.
#![expect(clippy::missing_panics_doc, clippy::unwrap_used, reason = "tests fail by panicking")]

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::Path;

use rustix::net::sockopt;

use crate::raw_connection::{HELLO, frame};

/// Number of behaviours.
pub const BEHAVIOURS: usize = 11;

/// A Unix or TCP stream.
trait Stream: Read + Write + Send {}

impl<T: Read + Write + Send> Stream for T {}

/// A hostile connection.
pub struct HostileConnection {
    stream: Box<dyn Stream>,
    bytes: Vec<u8>,
    sent: usize,
    /// Maximum number of bytes of each send.
    chunk_bytes: usize,
    /// Whether it never reads.
    never_reads: bool,
}

impl HostileConnection {
    /// Connects to a socket, with one of the behaviours.
    ///
    /// Some behaviours read the newest version of `key`, and the blob `manifest`.
    ///
    /// # Errors
    ///
    /// If it cannot connect.
    pub fn connect_unix(
        socket: &Path,
        way: usize,
        key: &str,
        manifest: &str,
    ) -> std::io::Result<Self> {
        let stream = UnixStream::connect(socket)?;
        stream.set_nonblocking(true)?;
        Ok(Self::new(Box::new(stream), way, key, manifest))
    }

    /// Connects to a TCP address, with the smallest receive window.
    ///
    /// # Errors
    ///
    /// If it cannot connect.
    pub fn connect_tcp(
        address: &str,
        way: usize,
        key: &str,
        manifest: &str,
    ) -> std::io::Result<Self> {
        let stream = TcpStream::connect(address.strip_prefix("tcp://").unwrap())?;
        sockopt::set_socket_recv_buffer_size(&stream, 1)?;
        stream.set_nonblocking(true)?;
        Ok(Self::new(Box::new(stream), way, key, manifest))
    }

    fn new(stream: Box<dyn Stream>, behaviour: usize, key: &str, manifest: &str) -> Self {
        let hello = frame(1, 1, HELLO, b"");
        let with_lengths = |head: u32, data: u32| {
            let mut header = frame(1, 2, "", b"");
            header[8..12].copy_from_slice(&head.to_le_bytes());
            header[12..16].copy_from_slice(&data.to_le_bytes());
            header
        };
        let garbage = |len: usize| {
            (0..len).map(|at| u8::try_from(((at * behaviour * 31) >> 3) & 255).unwrap())
        };
        let requests = |head: &dyn Fn(u64) -> String| {
            let requests = (2..2000).flat_map(|number| frame(1, number, &head(number), b""));
            hello.iter().copied().chain(requests).collect::<Vec<u8>>()
        };
        let (bytes, chunk_bytes) = match behaviour % BEHAVIOURS {
            0 => (garbage(8192).collect(), 1024),
            // Half a header, half a hello, a frame without its last byte, and single bytes.
            1 => (hello[..13].to_vec(), 13),
            2 => (hello[..40].to_vec(), 40),
            3 => (with_lengths(4096, 0).into_iter().chain(garbage(4095)).collect(), 4096),
            4 => (hello, 1),
            // Wrong lengths, before and after hello.
            5 => (with_lengths(u32::MAX, u32::MAX), 24),
            6 => ([hello, with_lengths(1 << 20, 16 << 20)].concat(), 1 << 20),
            // The largest frames, each without its last byte.
            7 => {
                let most = with_lengths(64 << 10, 256 << 10).into_iter();
                let most = most.chain(garbage((320 << 10) - 1));
                ([hello, most.collect()].concat(), 1 << 20)
            }
            // No bytes.
            8 => (Vec::new(), 0),
            // Many requests whose responses are not read: for versions, and for their bytes.
            9 => {
                let locate = format!(r#"{{"op":"locate","key":"{key}","selector":"newest"}}"#);
                (requests(&|_| locate.clone()), 1 << 20)
            }
            _ => {
                let read =
                    format!(r#"{{"op":"read","blob":"{manifest}","ranges":[[0,512,[[8192,0]]]]}}"#);
                let status = r#"{"op":"status"}"#;
                (
                    requests(&|number| if number % 2 == 0 { read.clone() } else { status.into() }),
                    1 << 20,
                )
            }
        };
        Self { stream, bytes, sent: 0, chunk_bytes, never_reads: behaviour % BEHAVIOURS >= 9 }
    }

    /// Sends more bytes. Returns whether the connection is still open.
    pub fn step(&mut self) -> bool {
        let end = self.bytes.len().min(self.sent + self.chunk_bytes);
        let sent = self.stream.write(&self.bytes[self.sent..end]);
        match sent {
            Ok(sent) => self.sent += sent,
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(_) => return false,
        }
        if self.never_reads {
            return true;
        }
        match self.stream.read(&mut [0; 4096]) {
            Ok(read) => read > 0,
            Err(error) => error.kind() == ErrorKind::WouldBlock,
        }
    }
}
