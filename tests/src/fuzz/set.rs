//! Shard sets with changed bytes.

use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock};

use bytes::Bytes;
use serde_json::json;

use crate::checksums::{index_offset, repair_checksums};
use crate::vectors::{Content, vectors};

/// The shard sets of the test vectors, as files by name.
static SETS: LazyLock<Vec<BTreeMap<String, Vec<u8>>>> = LazyLock::new(|| {
    let set = |vector: crate::vectors::Vector| match vector.content {
        Content::Set(files) => Some(files.into_iter().collect()),
        Content::File(_) => None,
    };
    let sets = vectors().into_iter().filter_map(set);
    // The others are deltas with their bases.
    sets.filter(|files: &BTreeMap<_, _>| files.contains_key(tssd_format::MANIFEST_NAME)).collect()
});

/// Returns the verdict of a reader on a shard set in memory.
macro_rules! verdict {
    ($reader:ident, $files:expr, $with_view:expr) => {{
        let blob = |name: &str| -> Option<Arc<dyn $reader::Blob>> {
            let bytes: &Vec<u8> = $files.get(name)?;
            Some(Arc::new(Bytes::from(bytes.clone())))
        };
        let open = || -> Result<_, $reader::Error> {
            let manifest = blob($reader::MANIFEST_NAME).expect("every set has one");
            let archive = $reader::Archive::from_shard_set(manifest, |shard| {
                let gone = || $reader::Error::new($reader::ErrorKind::ShardMismatch);
                blob(&shard.name).ok_or_else(gone)
            })?;
            archive.verify_deep()?;
            if $with_view {
                return $reader::to_json(&archive);
            }
            let leaves = archive.to_state_dict()?.leaves().len();
            Ok(json!({ "leaves": leaves, "content_digest": archive.content_digest() }))
        };
        open().unwrap_or_else(|error| json!({ "error": error.kind().name() }))
    }};
}

/// Opens a shard set with changes that the input describes.
///
/// The input gives the number of a set, then changes: a file, an offset in its index (or in the
/// whole file, if the highest bit of the offset is set), and a byte.
pub(super) fn open_modified_set(data: &[u8]) {
    let Some((which, changes)) = data.split_first() else { return };
    let mut files = SETS[usize::from(*which) % SETS.len()].clone();
    let names: Vec<String> = files.keys().cloned().collect();
    for change in changes.chunks_exact(4).take(16) {
        let [file, low, high, byte] = *change else { continue };
        let file = files.get_mut(&names[usize::from(file) % names.len()]).expect("a file of it");
        let place = u16::from_le_bytes([low, high]);
        let start = if place & 0x8000 == 0 { index_offset(file).min(file.len() - 1) } else { 0 };
        let place = start + usize::from(place & 0x7FFF) % (file.len() - start);
        file[place] = byte;
        repair_checksums(file);
    }
    if let Some(bytes) = updated_manifest(&files) {
        files.insert(tssd_format::MANIFEST_NAME.to_owned(), bytes);
    }
    // Views are slow, so only some inputs make them.
    let with_view = which & 0xF0 == 0;
    let with = verdict!(tssd_format, files, with_view);
    assert_eq!(with, verdict!(tssd_format_plain, files, with_view), "with rkyv and without");
}

/// Returns the manifest with the current checksums of the indexes, and without digests.
///
/// `None` if it no longer names the archives.
fn updated_manifest(files: &BTreeMap<String, Vec<u8>>) -> Option<Vec<u8>> {
    let manifest = files.get(tssd_format::MANIFEST_NAME)?;
    let archive = tssd_format::Archive::from_bytes(manifest.clone()).ok()?;
    let mut shards = archive.shards();
    for shard in &mut shards {
        let file = files.get(&shard.name)?;
        let crc = file.get(file.len() - 40..file.len() - 36)?;
        shard.index_crc32 = u32::from_le_bytes(crc.try_into().ok()?);
        shard.digest = None;
    }
    let storages: Vec<_> =
        (0..archive.storage_count()).map(|number| archive.storage(number)).collect();
    tssd_format::encode_manifest(&archive.structure(), &storages, &archive.attrs(), &shards).ok()
}
