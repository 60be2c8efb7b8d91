//! The writer writes the valid vectors byte for byte.

use std::path::{Path, PathBuf};

use serde_json::{Value as Json, json};
use tssd_tests::vectors::{Content, Vector, open, vectors};

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../spec/vectors")
}

/// Returns the files of a vector, with their paths below `valid`.
fn files(vector: Vector) -> Vec<(String, Vec<u8>)> {
    let name = vector.name;
    match vector.content {
        Content::File(bytes) => vec![(format!("{name}.tssd"), bytes)],
        Content::Set(files) => {
            files.into_iter().map(|(file, bytes)| (format!("{name}/{file}"), bytes)).collect()
        }
    }
}

#[test]
fn writer_reproduces_valid_vectors() {
    let mut expected = std::collections::BTreeSet::new();
    for (path, bytes) in vectors().into_iter().flat_map(files) {
        let committed = std::fs::read(folder().join("valid").join(&path));
        let committed = committed.unwrap_or_else(|error| panic!("{path}: {error}"));
        assert!(committed == bytes, "{path}: the writer writes other bytes");
        expected.insert(path);
    }
    let archives = list_files(&folder().join("valid"));
    let is_json = |path: &String| Path::new(path).extension() == Some("json".as_ref());
    let found = archives.into_iter().filter(|path| !is_json(path)).collect();
    assert_eq!(expected, found, "files without a vector");
}

/// Returns the relative paths of all files below a directory.
fn list_files(directory: &Path) -> Vec<String> {
    let mut files = Vec::new();
    for entry in directory.read_dir().unwrap().map(Result::unwrap) {
        let name = entry.file_name().into_string().unwrap();
        if entry.path().is_dir() {
            files
                .extend(list_files(&entry.path()).into_iter().map(|file| format!("{name}/{file}")));
        } else {
            files.push(name);
        }
    }
    files
}

/// Writes the vectors anew. Run it only after a change of the format, in a commit that says why.
#[test]
#[ignore = "writes spec/vectors/valid"]
fn write_vectors() {
    let valid = folder().join("valid");
    std::fs::remove_dir_all(&valid).ok();
    let mut list = Vec::new();
    for vector in vectors() {
        let (name, about) = (vector.name, vector.description);
        let is_set = matches!(vector.content, Content::Set(_));
        for (path, bytes) in files(vector) {
            let path = valid.join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, bytes).unwrap();
        }
        let file = if is_set { name.to_owned() } else { format!("{name}.tssd") };
        let archive = open(&valid.join(&file)).unwrap_or_else(|error| panic!("{name}: {error}"));
        archive.verify_deep().unwrap_or_else(|error| panic!("{name}: {error}"));
        let view = tssd_format::to_json(&archive).unwrap();
        let text = serde_json::to_string_pretty(&view).unwrap() + "\n";
        std::fs::write(valid.join(format!("{name}.json")), text).unwrap();
        // `make_invalid.py` adds files, digests and verdicts.
        list.push(json!({ "name": name, "about": about }));
    }
    let path = folder().join("manifest.json");
    let manifest = std::fs::read(&path).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok());
    let mut manifest: Json = manifest.unwrap_or_else(|| json!({}));
    manifest["valid"] = list.into();
    let text = serde_json::to_string_pretty(&manifest).unwrap();
    std::fs::write(path, text + "\n").unwrap();
}
