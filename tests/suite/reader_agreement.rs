//! The reader with rkyv and the reader without it agree on every file.
//!
//! `spec/conformance.py` compares the third reader, which is in Python.

use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use proptest::prelude::*;
use serde_json::{Value as Json, json};
use tssd_tests::vectors::Content;

/// Reads a file, a directory as a shard set, or a delta and its base. Evaluates to its JSON view or the kind of error.
macro_rules! verdict {
    ($reader:ident, $path:expr) => {{
        let path: &Path = $path;
        let open = || {
            let delta = path.join("delta.tssd");
            let archive = if delta.exists() {
                let base = $reader::Archive::open(path.join("base.tssd"))?;
                $reader::Archive::open(delta)?.with_base(base)?
            } else if path.is_dir() {
                $reader::open_shard_set(path)?
            } else {
                $reader::Archive::open(path)?
            };
            archive.verify_deep()?;
            $reader::to_json(&archive)
        };
        open().unwrap_or_else(|error: $reader::Error| json!({ "error": error.kind().name() }))
    }};
}

/// Returns the paths of all vectors: files, shard sets, and deltas with their bases.
fn vectors() -> Vec<PathBuf> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../spec/vectors");
    let mut found = Vec::new();
    let generated = tssd_tests::vectors::generated_folder().to_owned();
    for part in [folder.join("valid"), folder.join("invalid"), generated] {
        for entry in part.read_dir().unwrap().map(Result::unwrap) {
            let path = entry.path();
            if path.is_dir() || path.extension() == Some("tssd".as_ref()) {
                found.push(path);
            }
        }
    }
    found
}

#[test]
fn readers_agree_on_every_vector() {
    let vectors = vectors();
    assert!(vectors.len() > 300);
    for path in vectors {
        let with: Json = verdict!(tssd_format, &path);
        assert_eq!(with, verdict!(tssd_format_plain, &path), "{}", path.display());
    }
}

/// Vectors of less than 20,000 bytes.
static SMALL: LazyLock<Vec<Vec<u8>>> = LazyLock::new(|| {
    let small_file = |vector: tssd_tests::vectors::Vector| match vector.content {
        Content::File(bytes) if bytes.len() < 20_000 => Some(bytes),
        _ => None,
    };
    tssd_tests::vectors::vectors().into_iter().filter_map(small_file).collect()
});

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    /// Replaces one byte of a small vector, then repairs the checksums.
    #[test]
    fn readers_agree_on_damaged_files(
        vector in any::<prop::sample::Index>(),
        position in any::<prop::sample::Index>(),
        byte in any::<u8>(),
    ) {
        let mut file = vector.get(&SMALL).clone();
        let position = position.index(file.len());
        file[position] = byte;
        tssd_tests::checksums::repair_checksums(&mut file);
        tssd_tests::fuzz::assert_readers_agree(&file);
    }
}
