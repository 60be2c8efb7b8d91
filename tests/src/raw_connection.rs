//! Connections to a daemon that send any bytes.
#![expect(clippy::missing_panics_doc, clippy::unwrap_used, reason = "tests fail by panicking")]

use std::io::{IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};
use serde_json::Value;

/// The first request of a client.
pub const HELLO: &str = r#"{"op":"hello","protocol":{"major":2,"minor":0},"client":"test"}"#;

/// Encodes a frame as in `spec/protocol.md`.
pub fn frame(kind: u8, number: u64, head: &str, data: &[u8]) -> Vec<u8> {
    let mut bytes = b"TSSD".to_vec();
    bytes.extend([kind, 0, 0, 0]);
    bytes.extend(u32::try_from(head.len()).unwrap().to_le_bytes());
    bytes.extend(u32::try_from(data.len()).unwrap().to_le_bytes());
    bytes.extend(number.to_le_bytes());
    bytes.extend(head.as_bytes());
    bytes.extend(data);
    bytes
}

/// A connection that sends any bytes.
pub struct RawConnection(pub UnixStream);

impl RawConnection {
    /// Connects to the socket of a daemon.
    pub fn connect(socket: &Path) -> Self {
        let stream = UnixStream::connect(socket).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        Self(stream)
    }

    /// Connects to the socket of a daemon, and sends hello.
    pub fn connect_with_hello(socket: &Path) -> Self {
        let mut raw = Self::connect(socket);
        raw.send(&frame(1, 1, HELLO, b""));
        let (number, head) = raw.receive().unwrap();
        assert_eq!(number, 1);
        assert_eq!(head["welcome"]["protocol"]["major"], 2);
        raw
    }

    /// Sends bytes.
    pub fn send(&mut self, bytes: &[u8]) {
        // The daemon may have closed the connection.
        let _ = self.0.write_all(bytes);
    }

    /// Sends bytes with descriptors. Returns whether the system call succeeded.
    pub fn send_with_descriptors(&mut self, bytes: &[u8], fds: &[impl AsFd]) -> bool {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
        let parts = [IoSlice::new(bytes)];
        rustix::net::sendmsg(&self.0, &parts, &mut control, SendFlags::NOSIGNAL).is_ok()
    }

    /// Receives a frame. Returns its number and head, or `None` if the daemon has closed the connection.
    pub fn receive(&mut self) -> Option<(u64, Value)> {
        let (number, head, data) = self.receive_with_data()?;
        assert_eq!(data, b"", "no reply has data");
        Some((number, head))
    }

    /// Receives a frame. Returns its number, head and data.
    pub fn receive_with_data(&mut self) -> Option<(u64, Value, Vec<u8>)> {
        let mut header = [0; 24];
        self.0.read_exact(&mut header).ok()?;
        let word = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().unwrap());
        let mut head = vec![0; word(8) as usize];
        self.0.read_exact(&mut head).ok()?;
        let mut data = vec![0; word(12) as usize];
        self.0.read_exact(&mut data).ok()?;
        Some((word(16).into(), serde_json::from_slice(&head).unwrap(), data))
    }

    /// Receives a frame. Returns its kind and head, and the descriptors sent with its first bytes.
    pub fn receive_with_descriptors(&mut self) -> (u8, Value, Vec<OwnedFd>) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(64))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut header = [0; 24];
        let into = &mut [IoSliceMut::new(&mut header)];
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::WAITALL;
        let message_info = rustix::net::recvmsg(&self.0, into, &mut control, flags).unwrap();
        assert_eq!(message_info.bytes, 24);
        let mut fds = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(more) = message {
                fds.extend(more);
            }
        }
        assert_eq!(usize::from(header[5]), fds.len());
        let len = u32::from_le_bytes(header[8..12].try_into().unwrap());
        let mut head = vec![0; len as usize];
        self.0.read_exact(&mut head).unwrap();
        (header[4], serde_json::from_slice(&head).unwrap(), fds)
    }

    /// Sends a request. Returns the response.
    pub fn request(&mut self, number: u64, head: &str) -> Value {
        self.send(&frame(1, number, head, b""));
        let (answered, head) = self.receive().unwrap();
        assert_eq!(answered, number);
        head
    }

    /// Sends a request. Returns the response and its descriptors.
    pub fn request_with_descriptors(&mut self, head: &str) -> (Value, Vec<OwnedFd>) {
        self.send(&frame(1, 5, head, b""));
        let (kind, head, fds) = self.receive_with_descriptors();
        assert_eq!(kind, 3);
        (head, fds)
    }

    /// Returns whether the daemon closes the connection.
    pub fn is_closed(&mut self) -> bool {
        self.receive().is_none()
    }
}
