//! Frames: a header of fixed length, a head in JSON, and raw data. Spec: `spec/protocol.md`,
//! section 2.

use std::fmt;
use std::os::fd::OwnedFd;

use bytes::Bytes;

/// Length of a header in bytes.
pub(crate) const HEADER_BYTES: usize = 24;

/// Maximum length of a head in bytes.
pub(crate) const MAX_HEAD_BYTES: u32 = 1 << 20;

/// Maximum length of the data in bytes.
pub(crate) const MAX_DATA_BYTES: u32 = 16 << 20;

/// Limits of a frame: bytes of the head, bytes of the data, and number of descriptors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Limits {
    pub(crate) head: u32,
    pub(crate) data: u32,
    pub(crate) fds: u8,
}

impl Limits {
    /// Frames from a daemon of this host.
    pub(crate) const DAEMON: Self =
        Self { head: MAX_HEAD_BYTES, data: MAX_DATA_BYTES, fds: MAX_FDS };

    /// Frames from a client of another host.
    pub(crate) const REMOTE_CLIENT: Self = Self { data: MAX_WRITE_BYTES, fds: 0, ..Self::CLIENT };

    /// Frames from a daemon of another host.
    pub(crate) const REMOTE_DAEMON: Self = Self { fds: 0, ..Self::DAEMON };

    /// Frames from a client. They are small, because they take memory that all clients share.
    pub(crate) const CLIENT: Self = Self { head: 64 << 10, data: MAX_INLINE_BYTES, fds: 1 };

    /// Frames from a client before its hello is accepted.
    pub(crate) const BEFORE_HELLO: Self = Self { head: 4 << 10, data: 0, fds: 0 };
}

/// Maximum length in bytes of an archive that is sent as data of one frame.
pub(crate) const MAX_INLINE_BYTES: u32 = 256 << 10;

/// Maximum data of one write, in bytes. Another host sends longer archives as several writes.
pub(crate) const MAX_WRITE_BYTES: u32 = 1 << 20;

/// Maximum number of descriptors of one frame.
pub(crate) const MAX_FDS: u8 = 64;

/// The first bytes of every frame. A peer with another protocol is detected at its first frame.
const MAGIC: [u8; 4] = *b"TSSD";

/// The kind of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FrameKind {
    /// Asks for a reply with the same number.
    Request,
    /// Part of a reply: more frames of the reply follow.
    Part,
    /// A reply, or the last frame of one.
    Reply,
    /// A message without a reply.
    Notice,
}

/// The first bytes of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) kind: FrameKind,
    /// Number of descriptors that come with the frame.
    pub(crate) fds: u8,
    pub(crate) head_len: u32,
    pub(crate) data_len: u32,
    /// Number of the request that the frame is, or belongs to.
    pub(crate) number: u64,
}

/// The reason why a header is invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum InvalidHeader {
    /// The magic bytes are wrong.
    Magic,
    /// The kind is unknown.
    Kind(u8),
    /// Reserved bytes are not zero.
    Reserved,
    /// A length or count exceeds its limit: its name, its value, and the limit.
    TooLong(&'static str, u32, u32),
}

impl fmt::Display for InvalidHeader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Magic => f.write_str("what comes is no frame"),
            Self::Kind(kind) => write!(f, "frames of kind {kind} are unknown"),
            Self::Reserved => f.write_str("reserved bytes of a frame are not zero"),
            Self::TooLong(what, len, most) => {
                write!(f, "a frame with {what} {len}, at most {most}")
            }
        }
    }
}

impl std::error::Error for InvalidHeader {}

impl Header {
    pub(crate) fn to_bytes(self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4] = match self.kind {
            FrameKind::Request => 1,
            FrameKind::Part => 2,
            FrameKind::Reply => 3,
            FrameKind::Notice => 4,
        };
        bytes[5] = self.fds;
        bytes[8..12].copy_from_slice(&self.head_len.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.data_len.to_le_bytes());
        bytes[16..].copy_from_slice(&self.number.to_le_bytes());
        bytes
    }

    /// Parses a header.
    ///
    /// # Errors
    ///
    /// The first field that is invalid or exceeds its limit. Lengths are checked before anything is
    /// allocated.
    pub(crate) fn parse(bytes: &[u8; HEADER_BYTES], limits: Limits) -> Result<Self, InvalidHeader> {
        let word = |at: usize| {
            u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        if bytes[..4] != MAGIC {
            return Err(InvalidHeader::Magic);
        }
        let kind = match bytes[4] {
            1 => FrameKind::Request,
            2 => FrameKind::Part,
            3 => FrameKind::Reply,
            4 => FrameKind::Notice,
            kind => return Err(InvalidHeader::Kind(kind)),
        };
        if bytes[6..8] != [0; 2] {
            return Err(InvalidHeader::Reserved);
        }
        let checks = [
            ("descriptors", u32::from(bytes[5]), u32::from(limits.fds)),
            ("a head of bytes", word(8), limits.head),
            ("data of bytes", word(12), limits.data),
        ];
        for (what, len, max) in checks {
            if len > max {
                return Err(InvalidHeader::TooLong(what, len, max));
            }
        }
        let number = u64::from(word(16)) | u64::from(word(20)) << 32;
        Ok(Self { kind, fds: bytes[5], head_len: word(8), data_len: word(12), number })
    }
}

/// Data of a frame: slices of memory that are sent without a copy. Received data is one slice.
#[derive(Clone, Debug, Default)]
pub(crate) struct Data(Vec<Bytes>);

impl Data {
    /// Returns the number of bytes.
    pub(crate) fn len(&self) -> usize {
        self.0.iter().map(Bytes::len).sum()
    }

    pub(crate) fn pieces(&self) -> &[Bytes] {
        &self.0
    }

    /// Returns all bytes as one slice. Several slices are copied.
    pub(crate) fn into_bytes(mut self) -> Bytes {
        match self.0.len() {
            0 | 1 => self.0.pop().unwrap_or_default(),
            _ => self.0.concat().into(),
        }
    }
}

impl From<Bytes> for Data {
    fn from(bytes: Bytes) -> Self {
        Self(if bytes.is_empty() { Vec::new() } else { vec![bytes] })
    }
}

impl From<Vec<Bytes>> for Data {
    fn from(pieces: Vec<Bytes>) -> Self {
        Self(pieces)
    }
}

/// A frame with its descriptors.
#[derive(Debug)]
pub(crate) struct Frame {
    pub(crate) kind: FrameKind,
    pub(crate) number: u64,
    pub(crate) head: Vec<u8>,
    pub(crate) data: Data,
    pub(crate) fds: Vec<OwnedFd>,
}

impl Frame {
    pub(crate) fn header(&self) -> Header {
        let len = |bytes: usize| u32::try_from(bytes).unwrap_or(u32::MAX);
        Header {
            kind: self.kind,
            fds: u8::try_from(self.fds.len()).unwrap_or(u8::MAX),
            head_len: len(self.head.len()),
            data_len: len(self.data.len()),
            number: self.number,
        }
    }

    /// Returns whether the frame is within these limits.
    pub(crate) fn is_within(&self, limits: Limits) -> bool {
        let Header { fds, head_len, data_len, .. } = self.header();
        fds <= limits.fds && head_len <= limits.head && data_len <= limits.data
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> Header {
        Header { kind: FrameKind::Reply, fds: 3, head_len: 7, data_len: 1 << 20, number: 1 << 40 }
    }

    #[test]
    fn header_round_trips() {
        assert_eq!(Header::parse(&header().to_bytes(), Limits::DAEMON), Ok(header()));
    }

    #[test]
    fn spec_frame_example_parses() {
        let spec = include_str!("../../../../spec/protocol.md");
        let dump = spec.split("```hex").nth(1).and_then(|rest| rest.split("```").next()).unwrap();
        let bytes = dump.split_whitespace().map(|byte| u8::from_str_radix(byte, 16).unwrap());
        let bytes: Vec<u8> = bytes.collect();
        let (header, head) = bytes.split_first_chunk().unwrap();
        let header = Header::parse(header, Limits::CLIENT).unwrap();
        assert_eq!((header.kind, header.number, header.data_len), (FrameKind::Request, 1, 0));
        assert_eq!(
            (head, u32::try_from(head.len()).ok()),
            (&br#"{"op":"status"}"#[..], Some(header.head_len))
        );
    }

    #[test]
    fn invalid_headers_are_rejected() {
        let change = |at: usize, byte: u8| {
            let mut bytes = header().to_bytes();
            bytes[at] = byte;
            Header::parse(&bytes, Limits::DAEMON)
        };
        assert_eq!(change(0, b'G'), Err(InvalidHeader::Magic));
        assert_eq!(change(4, 0), Err(InvalidHeader::Kind(0)));
        assert_eq!(change(4, 5), Err(InvalidHeader::Kind(5)));
        assert_eq!(change(6, 1), Err(InvalidHeader::Reserved));
        assert_eq!(change(7, 1), Err(InvalidHeader::Reserved));
        assert_eq!(change(5, 65), Err(InvalidHeader::TooLong("descriptors", 65, 64)));
        assert!(matches!(change(11, 0x80), Err(InvalidHeader::TooLong("a head of bytes", ..))));
        assert!(matches!(change(15, 0x01), Err(InvalidHeader::TooLong("data of bytes", ..))));
        let at_limit =
            Header { head_len: MAX_HEAD_BYTES, data_len: MAX_DATA_BYTES, fds: MAX_FDS, ..header() };
        assert_eq!(Header::parse(&at_limit.to_bytes(), Limits::DAEMON), Ok(at_limit));
        let of_client = Header { head_len: 64 << 10, data_len: 256 << 10, fds: 1, ..header() };
        assert_eq!(Header::parse(&of_client.to_bytes(), Limits::CLIENT), Ok(of_client));
        for beyond in [
            Header { head_len: (64 << 10) + 1, ..of_client },
            Header { data_len: (256 << 10) + 1, ..of_client },
            Header { fds: 2, ..of_client },
        ] {
            assert!(Header::parse(&beyond.to_bytes(), Limits::CLIENT).is_err(), "{beyond:?}");
        }
        let first = Header { head_len: 4 << 10, data_len: 0, fds: 0, ..of_client };
        assert_eq!(Header::parse(&first.to_bytes(), Limits::BEFORE_HELLO), Ok(first));
        assert!(Header::parse(&of_client.to_bytes(), Limits::BEFORE_HELLO).is_err());
    }
}
