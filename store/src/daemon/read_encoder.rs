//! Encodes the bytes of archives that other daemons read, each part once.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use indexmap::IndexMap;
use tssd_format::Archive;

use crate::control::layout::ArchiveName;
use crate::daemon::delta_base::{DeltaBase, HeldArchive, retain_versions};
use crate::daemon::delta_history::DeltaHistory;
use crate::delta::layout::ElementLayout;
use crate::error::{Error, Result};
use crate::io::sync::Lock;
use crate::net::encoding::{self, Accepted};
use crate::net::wire::{Data, Encodings, Range};
use crate::shm::{Pool, Retain};

/// Maximum number of archives whose layout is remembered.
const MAX_LAYOUTS: usize = 256;

/// Maximum number of encoded bytes that are remembered, for daemons that read the same.
const MAX_ENCODED_BYTES: usize = 256 << 20;

/// Bytes that a daemon reads, and how.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct EncodedRead {
    pub(crate) blob: String,
    pub(crate) ranges: Vec<Range>,
    pub(crate) accept: Encodings,
}

/// Encoder of the replies to reads. It encodes the same bytes once.
pub(crate) struct ReadEncoder {
    pool: Arc<Pool>,
    /// Differences from versions that are no longer stored.
    history: DeltaHistory,
    layouts: Lock<BTreeMap<String, Arc<ElementLayout>>>,
    encoded: Lock<EncodedParts>,
}

/// Encoded bytes: those that were inserted last, at most [`MAX_ENCODED_BYTES`].
#[derive(Default)]
struct EncodedParts {
    /// In the order in which they were inserted.
    parts: IndexMap<EncodedRead, Bytes>,
    bytes: usize,
    last_used: Option<Instant>,
}

impl EncodedRead {
    /// Returns about how many bytes of memory this read and its encoded bytes take.
    fn cost(&self, encoded: &Bytes) -> usize {
        let ranges: usize = self.ranges.iter().map(|range| 48 + 16 * range.2.len()).sum();
        encoded.len() + 512 + ranges
    }
}

impl EncodedParts {
    /// Returns bytes for a read: differences if there are some.
    fn get(&mut self, read: &EncodedRead) -> Option<Bytes> {
        self.last_used = Some(Instant::now());
        let Encodings { base, planes, .. } = &read.accept;
        let with = |base: &Option<String>, planes| {
            let accept = Encodings { base: base.clone(), planes, base_only: false };
            self.parts.get(&EncodedRead { accept, ..read.clone() }).cloned()
        };
        with(base, false).or_else(|| with(base, *planes))
    }

    fn insert(&mut self, read: EncodedRead, encoded: Bytes) {
        self.last_used = Some(Instant::now());
        self.bytes += read.cost(&encoded);
        let key_cost = read.cost(&Bytes::new());
        if let Some(replaced) = self.parts.insert(read, encoded) {
            self.bytes -= key_cost + replaced.len();
        }
        if self.bytes > MAX_ENCODED_BYTES {
            // The older half: to remove them one by one would move the others each time.
            let oldest = self.parts.drain(..self.parts.len().div_ceil(2));
            let freed: usize = oldest.map(|(read, encoded)| read.cost(&encoded)).sum();
            self.bytes -= freed;
        }
    }
}

impl ReadEncoder {
    pub(crate) fn new(pool: Arc<Pool>) -> Self {
        let history = DeltaHistory::new(pool.clone());
        Self { pool, history, layouts: Lock::default(), encoded: Lock::default() }
    }

    /// Returns the differences from versions that are no longer stored.
    pub(crate) fn history(&self) -> &DeltaHistory {
        &self.history
    }

    /// Derives the difference from an archive in memory to an earlier one, if other daemons request differences.
    ///
    /// # Errors
    ///
    /// `Io` without memory for the encoder; `Corrupt` if the archive is damaged.
    pub(crate) fn derive(&self, later: &str, earlier: &str) -> Result<()> {
        if !self.history.is_requested(later) {
            return Ok(());
        }
        let open = |name| HeldArchive::open(&self.pool, name);
        let (Some(newer), Some(older)) = (open(later), open(earlier)) else { return Ok(()) };
        let Some(layout) = self.layout(later)? else { return Ok(()) };
        self.history.derive(&layout, &newer, &older)
    }

    /// Remembers encoded bytes, to send them on. The read accepts what they need, and no more.
    pub(crate) fn insert(&self, read: EncodedRead, encoded: Bytes) {
        self.encoded.lock().insert(read, encoded);
    }

    /// Forgets encoded bytes if none were used for a time.
    pub(crate) fn forget_unused(&self, timeout: Duration) {
        let mut encoded = self.encoded.lock();
        if encoded.last_used.is_some_and(|last_used| last_used.elapsed() > timeout) {
            *encoded = EncodedParts::default();
        }
    }

    /// Encodes bytes that a daemon reads. Returns `None` if they go as they are.
    ///
    /// # Errors
    ///
    /// `Io` without memory for the encoder; `Corrupt` if the archive is damaged.
    pub(crate) fn encode(&self, read: &EncodedRead, raw: &Data) -> Result<Option<Bytes>> {
        let EncodedRead { blob, ranges, accept } = read;
        if let Some(encoded) = self.encoded.lock().get(read) {
            return Ok(Some(encoded));
        }
        let held_blob = HeldArchive::open(&self.pool, blob);
        let base_name = accept.base.as_ref().filter(|base| is_same_key(blob, base));
        // Held until the bytes are encoded: its memory may be reused afterwards.
        let held = base_name.and_then(|base| HeldArchive::open(&self.pool, base));
        let raw = raw.clone().into_bytes();
        let base =
            base_name.and_then(|name| self.read_base(blob, name, held.as_ref(), ranges, &raw));
        if base.is_none() {
            let planes = Encodings { base: None, ..accept.clone() };
            let read = EncodedRead { accept: planes, ..read.clone() };
            if let Some(encoded) = self.encoded.lock().get(&read).filter(|_| accept.planes) {
                return Ok(Some(encoded));
            }
            if !accept.planes {
                return Ok(None);
            }
        }
        let Some(layout) = self.layout(blob)? else { return Ok(None) };
        let accepted = Accepted { base: base.as_deref(), planes: accept.planes };
        let encoded = encoding::encode(&layout, ranges, &raw, accepted)?;
        let Some((encoded, forms)) = encoded else { return Ok(None) };
        // The bytes of an archive that was evicted before it was held may be others now.
        if held_blob.is_none() || self.pool.span(blob).is_some() {
            let accept = forms.narrow(accept);
            self.insert(EncodedRead { accept, ..read.clone() }, encoded.clone());
        }
        Ok(Some(encoded))
    }

    /// Returns the bytes of ranges of an earlier archive, from its memory or from the differences since then.
    ///
    /// `held` is that archive, if it is in memory. `raw` is the bytes of `blob` at the same ranges.
    pub(crate) fn read_base(
        &self,
        blob: &str,
        base: &str,
        held: Option<&HeldArchive>,
        ranges: &[Range],
        raw: &[u8],
    ) -> Option<Bytes> {
        let stored = held.and_then(|held| held.read(ranges));
        stored.or_else(|| Some(self.history.read(blob, base, ranges, raw)?.into()))
    }

    /// Returns whether an archive can be sent as a difference from one that another daemon has.
    ///
    /// If that one is deleted, the next version that is deleted is retained: the other daemon may request differences again.
    pub(crate) fn has_base(&self, blob: &str, base: &str) -> bool {
        let Some(name) = ArchiveName::parse(blob).filter(|_| is_same_key(blob, base)) else {
            return false;
        };
        self.history.record_request(name.prefix());
        if self.pool.span(base).is_some() {
            return true;
        }
        retain_versions(&self.pool, blob, Retain::Superseded);
        self.pool.is_retained(base) || self.history.leads_to(blob, base)
    }

    /// Returns the layout of an archive in memory. `None` if it is not complete.
    pub(crate) fn layout(&self, blob: &str) -> Result<Option<Arc<ElementLayout>>> {
        if let Some(layout) = self.layouts.lock().get(blob) {
            return Ok(Some(layout.clone()));
        }
        let opened = self.pool.open(blob).map_err(|error| Error::io(blob, error))?;
        let Some(opened) = opened else { return Ok(None) };
        let archive = Archive::from_blob(opened.blob);
        let archive = archive.map_err(|error| Error::from_format(blob, error))?;
        Ok(Some(self.insert_layout(blob, &archive)))
    }

    /// Remembers the layout of an archive.
    pub(crate) fn insert_layout(&self, blob: &str, archive: &Archive) -> Arc<ElementLayout> {
        let layout = Arc::new(ElementLayout::of(archive));
        let mut layouts = self.layouts.lock();
        if layouts.len() >= MAX_LAYOUTS {
            layouts.pop_first();
        }
        layouts.insert(blob.to_owned(), layout.clone());
        layout
    }
}

/// Whether two names are those of archives of one key.
fn is_same_key(one: &str, other: &str) -> bool {
    let key = |name: &str| ArchiveName::parse(name).map(|name| name.prefix());
    key(one).is_some() && key(one) == key(other)
}
