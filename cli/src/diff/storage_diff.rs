//! Differences in how two files store the same leaves: compression, chunks, alignment and digests.

use serde_json::{Value as Json, json};
use tssd_format::{Archive, CompressedLayout, StorageReference, ZSTD_LEVEL_ATTR};

use crate::size::pluralize;
use crate::value::attr_repr;

/// Number of leaves that the files store differently, for each storage option.
#[derive(Debug, Default)]
pub(super) struct StorageDiff {
    codec: u64,
    chunks: u64,
    alignment: u64,
    digest: u64,
    /// The zstd levels, if both files record one and the two differ.
    level: Option<(String, String)>,
}

impl StorageDiff {
    /// Compares the zstd levels of the files. Safetensors files record none.
    pub(super) fn from_archives(a: Option<&Archive>, b: Option<&Archive>) -> Self {
        let level = |archive: Option<&Archive>| archive?.attrs().remove(ZSTD_LEVEL_ATTR);
        let differing_levels = level(a).zip(level(b)).filter(|(a, b)| a != b);
        Self {
            level: differing_levels.map(|(a, b)| (attr_repr(&a), attr_repr(&b))),
            ..Self::default()
        }
    }

    /// Counts the differences of one leaf between its storages in the two files.
    pub(super) fn count(&mut self, a: &StorageReference, b: &StorageReference) {
        let codec = |each: &StorageReference| {
            each.compressed_layout.as_ref().map(|layout: &CompressedLayout| {
                (each.base.is_some(), layout.codec(), layout.width)
            })
        };
        self.codec += u64::from(codec(a) != codec(b));
        self.chunks += u64::from(a.chunk_size != b.chunk_size);
        self.alignment += u64::from(a.align_log2 != b.align_log2);
        self.digest += u64::from(a.digest.is_some() != b.digest.is_some());
    }

    pub(super) fn describe(&self) -> Option<String> {
        let counts = [
            ("codec", self.codec),
            ("chunk size", self.chunks),
            ("alignment", self.alignment),
            ("digest", self.digest),
        ];
        let mut parts = Vec::new();
        for (option, leaves) in counts.into_iter().filter(|(_, leaves)| *leaves > 0) {
            parts.push(format!("{option} of {}", pluralize(leaves, "leaf")));
        }
        parts.extend(self.level.as_ref().map(|(a, b)| format!("zstd level {a} -> {b}")));
        (!parts.is_empty()).then(|| parts.join(", "))
    }

    pub(super) fn json(&self) -> Json {
        json!({
            "codec": self.codec, "chunk_size": self.chunks, "alignment": self.alignment,
            "digest": self.digest, "zstd_level": self.level,
        })
    }
}
