//! Frames: a header of fixed length, a head in JSON, data as it is. Spec: `spec/protocol.md`,
//! section 2.

use std::fmt;
use std::os::fd::OwnedFd;

use bytes::Bytes;

/// Length of a header in bytes.
pub(crate) const HEADER_BYTES: usize = 24;

/// The longest head, in bytes.
pub(crate) const MAX_HEAD: u32 = 1 << 20;

/// The most data, in bytes.
pub(crate) const MAX_DATA: u32 = 16 << 20;

/// What a frame may have at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Limits {
    pub(crate) head: u32,
    pub(crate) data: u32,
    pub(crate) fds: u8,
}

impl Limits {
    /// From a daemon.
    pub(crate) const DAEMON: Self = Self { head: MAX_HEAD, data: MAX_DATA, fds: MAX_FDS };

    /// From a client of another host.
    pub(crate) const FAR_CLIENT: Self = Self { data: MAX_WRITE, fds: 0, ..Self::CLIENT };

    /// To another host.
    pub(crate) const FAR_DAEMON: Self = Self { fds: 0, ..Self::DAEMON };

    /// From a client: what it sends takes the memory of all.
    pub(crate) const CLIENT: Self = Self { head: 64 << 10, data: INLINE, fds: 1 };

    /// From a client that has not said hello.
    pub(crate) const STRANGER: Self = Self { head: 4 << 10, data: 0, fds: 0 };
}

/// Archives of at most this many bytes come as data of a frame.
pub(crate) const INLINE: u32 = 256 << 10;

/// Archives that are longer come from another host as data of several frames, of at most this many
/// bytes.
pub(crate) const MAX_WRITE: u32 = 1 << 20;

/// The most descriptors of one frame.
pub(crate) const MAX_FDS: u8 = 64;

/// Four bytes that every frame begins with, so that whoever talks something else is found at once.
const MARK: [u8; 4] = *b"TSSD";

/// What a frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FrameKind {
    /// Asks for a reply of the same number.
    Request,
    /// Part of a reply: more follows.
    Part,
    /// A reply, or the end of one.
    Reply,
    /// Is not replied to.
    Notice,
}

/// The first bytes of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) kind: FrameKind,
    /// How many descriptors come with it.
    pub(crate) fds: u8,
    pub(crate) head_len: u32,
    pub(crate) data_len: u32,
    /// Which request it is, or belongs to.
    pub(crate) number: u64,
}

/// A header that no frame has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum InvalidHeader {
    /// It does not begin as frames do.
    Mark,
    /// There is no such kind of frame.
    Kind(u8),
    /// What must be zero is not.
    Reserved,
    /// More than a frame may have of something.
    TooLong(&'static str, u32, u32),
}

impl fmt::Display for InvalidHeader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Mark => f.write_str("what comes is no frame"),
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
        bytes[..4].copy_from_slice(&MARK);
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

    /// # Errors
    ///
    /// What is wrong; nothing is allocated for lengths before they are compared with the limits.
    pub(crate) fn parse(bytes: &[u8; HEADER_BYTES], most: Limits) -> Result<Self, InvalidHeader> {
        let word = |at: usize| {
            u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        if bytes[..4] != MARK {
            return Err(InvalidHeader::Mark);
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
        let limits = [
            ("descriptors", u32::from(bytes[5]), u32::from(most.fds)),
            ("a head of bytes", word(8), most.head),
            ("data of bytes", word(12), most.data),
        ];
        for (what, len, most) in limits {
            if len > most {
                return Err(InvalidHeader::TooLong(what, len, most));
            }
        }
        let number = u64::from(word(16)) | u64::from(word(20)) << 32;
        Ok(Self { kind, fds: bytes[5], head_len: word(8), data_len: word(12), number })
    }
}

/// Data of a frame: memory that goes out piece by piece, from where it lies. What comes in is one piece.
#[derive(Clone, Debug, Default)]
pub(crate) struct Data(Vec<Bytes>);

impl Data {
    /// How many bytes they have together.
    pub(crate) fn len(&self) -> usize {
        self.0.iter().map(Bytes::len).sum()
    }

    pub(crate) fn pieces(&self) -> &[Bytes] {
        &self.0
    }

    /// All bytes in one piece.
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

/// A frame, with the descriptors that come with it.
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
        let len = |what: usize| u32::try_from(what).unwrap_or(u32::MAX);
        Header {
            kind: self.kind,
            fds: u8::try_from(self.fds.len()).unwrap_or(u8::MAX),
            head_len: len(self.head.len()),
            data_len: len(self.data.len()),
            number: self.number,
        }
    }

    /// Whether whoever receives it takes it.
    pub(crate) fn is_within(&self, most: Limits) -> bool {
        let Header { fds, head_len, data_len, .. } = self.header();
        fds <= most.fds && head_len <= most.head && data_len <= most.data
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> Header {
        Header { kind: FrameKind::Reply, fds: 3, head_len: 7, data_len: 1 << 20, number: 1 << 40 }
    }

    #[test]
    fn a_header_is_bytes_and_back() {
        assert_eq!(Header::parse(&header().to_bytes(), Limits::DAEMON), Ok(header()));
    }

    #[test]
    fn the_frame_of_the_spec_is_a_frame() {
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
    fn other_headers_are_refused() {
        let change = |at: usize, byte: u8| {
            let mut bytes = header().to_bytes();
            bytes[at] = byte;
            Header::parse(&bytes, Limits::DAEMON)
        };
        assert_eq!(change(0, b'G'), Err(InvalidHeader::Mark));
        assert_eq!(change(4, 0), Err(InvalidHeader::Kind(0)));
        assert_eq!(change(4, 5), Err(InvalidHeader::Kind(5)));
        assert_eq!(change(6, 1), Err(InvalidHeader::Reserved));
        assert_eq!(change(7, 1), Err(InvalidHeader::Reserved));
        assert_eq!(change(5, 65), Err(InvalidHeader::TooLong("descriptors", 65, 64)));
        assert!(matches!(change(11, 0x80), Err(InvalidHeader::TooLong("a head of bytes", ..))));
        assert!(matches!(change(15, 0x01), Err(InvalidHeader::TooLong("data of bytes", ..))));
        let at_limit = Header { head_len: MAX_HEAD, data_len: MAX_DATA, fds: MAX_FDS, ..header() };
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
        assert_eq!(Header::parse(&first.to_bytes(), Limits::STRANGER), Ok(first));
        assert!(Header::parse(&of_client.to_bytes(), Limits::STRANGER).is_err());
    }
}
