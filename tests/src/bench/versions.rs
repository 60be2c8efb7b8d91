use std::collections::BTreeMap;
use std::path::Path;

/// Returns the versions of crates in `Cargo.lock`.
pub(crate) fn locked_versions(crates: &[&str]) -> BTreeMap<String, String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../Cargo.lock");
    let lock = std::fs::read_to_string(path).unwrap();
    let version = |name: &&str| {
        let (_, package) = lock.split_once(&format!("name = \"{name}\"\nversion = \"")).unwrap();
        let (version, _) = package.split_once('"').unwrap();
        ((*name).to_owned(), version.to_owned())
    };
    crates.iter().map(version).collect()
}
