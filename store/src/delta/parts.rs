//! Parts of an archive as they are stored: raw, in byte planes, or as the difference from a base (pure).
//! Spec: `spec/protocol.md`, rule P-086.

use tssd_format::{
    ChunkCodec, DeltaEncoder, DeltaOptions, ElementWidth, PlanesEncoder, StorageCodec,
};

use crate::convert::to_usize;
use crate::error::{Error, Result};

/// Maximum number of raw bytes of a part.
pub(crate) const MAX_PART_BYTES: usize = 8 << 20;

/// Maximum number of raw bytes of a part in byte planes.
const MAX_PLANES_BYTES: usize = 1 << 20;

/// Length in bytes of the entry of a part in the table.
pub(crate) const ENTRY_BYTES: usize = 12;

/// Bytes are encoded if that saves at least 1/`SAVING_DIVISOR` of them.
const SAVING_DIVISOR: usize = 16;

/// A difference is not tried against byte planes if it has at most 1/`SPARSE_DIVISOR` of the bytes.
const SPARSE_DIVISOR: usize = 2;

/// How a part is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    Raw,
    Planes,
    Difference,
}

/// Entry of a part in the table.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) raw_len: usize,
    pub(crate) stored_len: usize,
    pub(crate) form: Form,
    pub(crate) width: ElementWidth,
}

impl Entry {
    /// Appends the entry to a table.
    pub(crate) fn write(&self, table: &mut Vec<u8>) {
        let form = match self.form {
            Form::Raw => 0,
            Form::Planes => 1,
            Form::Difference => 2,
        };
        table.extend(to_word(self.raw_len));
        table.extend(to_word(self.stored_len));
        table.extend([form, self.width.to_u8(), 0, 0]);
    }

    /// Parses an entry. Returns `None` if it is invalid.
    pub(crate) fn parse(entry: &[u8; ENTRY_BYTES]) -> Option<Self> {
        let word = |at: usize| {
            let bytes = [entry[at], entry[at + 1], entry[at + 2], entry[at + 3]];
            to_usize(u64::from(u32::from_le_bytes(bytes)))
        };
        let form = match entry[8] {
            0 => Form::Raw,
            1 => Form::Planes,
            2 => Form::Difference,
            _ => return None,
        };
        let max = if form == Form::Planes { MAX_PLANES_BYTES } else { MAX_PART_BYTES };
        let (raw_len, stored_len) = (word(0), word(4));
        // A raw part has its own length. No other part is empty.
        let has_bytes = if form == Form::Raw { stored_len == raw_len } else { stored_len > 0 };
        let is_valid = (1..=max).contains(&raw_len) && has_bytes && entry[10..] == [0; 2];
        let width = ElementWidth::from_bytes(entry[9]).filter(|_| is_valid)?;
        Some(Self { raw_len, stored_len, form, width })
    }

    /// Returns the codec of the stored bytes.
    pub(crate) fn codec(&self) -> StorageCodec {
        let codec = match self.form {
            Form::Raw => ChunkCodec::Raw,
            Form::Planes => ChunkCodec::Planes,
            Form::Difference => ChunkCodec::Delta,
        };
        StorageCodec { codec, width: self.width.to_u8() }
    }
}

/// Returns a length as it is written.
pub(crate) fn to_word(len: usize) -> [u8; 4] {
    u32::try_from(len).expect("a part is shorter than 4 GiB").to_le_bytes()
}

/// Encoder of parts. It appends them to the parts before.
pub(crate) struct PartEncoder {
    delta: DeltaEncoder,
    planes: Option<PlanesEncoder>,
    pub(crate) entries: Vec<Entry>,
    /// The stored bytes of all parts.
    pub(crate) stored: Vec<u8>,
}

impl PartEncoder {
    /// Creates an encoder. If `has_planes` is true, it tries byte planes.
    ///
    /// # Errors
    ///
    /// `Io` without memory.
    pub(crate) fn new(has_planes: bool) -> Result<Self> {
        let failed = |error| Error::from_format("encoder", error);
        let planes = if has_planes { Some(PlanesEncoder::new().map_err(failed)?) } else { None };
        let delta = DeltaEncoder::new().map_err(failed)?;
        Ok(Self { delta, planes, entries: Vec::new(), stored: Vec::new() })
    }

    /// Adds a part of at most [`MAX_PART_BYTES`].
    pub(crate) fn push(
        &mut self,
        raw: &[u8],
        base: Option<&[u8]>,
        width: ElementWidth,
    ) -> Result<()> {
        let failed = |error| Error::from_format("encoder", error);
        let start = self.stored.len();
        if let Some(base) = base {
            let options = DeltaOptions::default();
            let versions = [base, raw];
            self.delta.encode(versions, width, &options, &mut self.stored).map_err(failed)?;
            let stored_len = self.stored.len() - start;
            let is_sparse = stored_len <= raw.len() / SPARSE_DIVISOR;
            if is_sparse || (self.planes.is_none() && saves_enough(raw.len(), stored_len)) {
                self.add(raw.len(), stored_len, Form::Difference, width);
                return Ok(());
            }
            self.stored.truncate(start);
        }
        for chunk in raw.chunks(MAX_PLANES_BYTES) {
            let planes = self.planes.as_mut().map(|planes| planes.encode(chunk, width.to_u8()));
            if let Some(planes) = planes.transpose().map_err(failed)?.flatten() {
                self.stored.extend_from_slice(&planes);
                self.add(chunk.len(), planes.len(), Form::Planes, width);
            } else {
                self.stored.extend_from_slice(chunk);
                self.add(chunk.len(), chunk.len(), Form::Raw, width);
            }
        }
        Ok(())
    }

    fn add(&mut self, raw_len: usize, stored_len: usize, form: Form, width: ElementWidth) {
        self.entries.push(Entry { raw_len, stored_len, form, width });
    }
}

/// Returns whether stored bytes are enough shorter than the raw ones.
pub(crate) fn saves_enough(raw_len: usize, stored_len: usize) -> bool {
    stored_len <= raw_len - raw_len / SAVING_DIVISOR
}
