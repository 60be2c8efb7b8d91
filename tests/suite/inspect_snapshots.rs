//! Snapshots of `tssd inspect --hex` for each valid vector. `cargo insta review` accepts a change.

use std::fmt::Write;
use std::path::Path;

use crate::cli::Sandbox;

/// Vectors with a complete snapshot: containers, shards, a manifest, chunks. The others have a digest.
const COMPLETE: [&str; 4] = ["004-containers", "015-shard", "023-manifest", "064-three-chunks"];

#[test]
fn inspect_hex_matches_snapshots_of_every_vector() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../spec/vectors/valid");
    let mut paths: Vec<_> = folder.read_dir().unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    let mut settings = insta::Settings::clone_current();
    settings.set_prepend_module_to_snapshot(false);
    settings.set_omit_expression(true);
    let place = Sandbox::new();
    let mut digests = String::new();
    for path in paths.iter().filter(|path| path.extension() == Some("tssd".as_ref())) {
        let name = path.file_stem().unwrap().to_str().unwrap();
        place.write("vector.tssd", &std::fs::read(path).unwrap());
        let hex = place.run_with_code(0, "inspect --hex vector.tssd");
        writeln!(digests, "{name} {}", blake3::hash(hex.as_bytes())).unwrap();
        if COMPLETE.contains(&name) {
            settings.bind(|| insta::assert_snapshot!(name, hex));
        }
    }
    settings.bind(|| insta::assert_snapshot!("digests", digests));
}
