//! Two readers of this project, with rkyv and without: they say the same of every file.
//! `spec/conformance.py` has the third say it too.

use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use proptest::prelude::*;
use serde_json::{Value as Json, json};
use tssd_tests::vectors::Content;

/// What a reader says of a file, or of the shard set of a directory: its JSON view, or the kind of error.
macro_rules! verdict {
    ($reader:ident, $path:expr) => {{
        let path: &Path = $path;
        let open = || {
            let archive = if path.is_dir() {
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

/// The files and shard sets of the vectors.
fn vectors() -> Vec<PathBuf> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../spec/vectors");
    let mut found = Vec::new();
    let generated = tssd_tests::vectors::generated().to_owned();
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
fn both_say_the_same_of_every_vector() {
    let vectors = vectors();
    assert!(vectors.len() > 300);
    for path in vectors {
        let with: Json = verdict!(tssd_format, &path);
        assert_eq!(with, verdict!(tssd_format_plain, &path), "{}", path.display());
    }
}

/// The small vectors.
static SMALL: LazyLock<Vec<Vec<u8>>> = LazyLock::new(|| {
    let of = |vector: tssd_tests::vectors::Vector| match vector.content {
        Content::File(bytes) if bytes.len() < 20_000 => Some(bytes),
        _ => None,
    };
    tssd_tests::vectors::vectors().into_iter().filter_map(of).collect()
});

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    /// An index that is damaged and has the right checksum again.
    #[test]
    fn both_say_the_same_of_damage(which in any::<prop::sample::Index>(), place in any::<prop::sample::Index>(), byte in any::<u8>()) {
        let mut file = which.get(&SMALL).clone();
        let place = place.index(file.len());
        file[place] = byte;
        tssd_tests::damage::repair(&mut file);
        tssd_tests::fuzz::readers_agree(&file);
    }
}
