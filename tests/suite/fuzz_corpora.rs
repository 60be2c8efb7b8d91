//! The fuzz corpora: every fuzz target runs all of its inputs, in every build.

use std::path::Path;

use tssd_format::{Archive, ChunkPolicy, Layout, Options};
use tssd_tests::corpus::{self, Input};
use tssd_tests::fuzz::{TARGETS, compact, expand, python_difference};
use tssd_tests::vectors::{self, Content, vectors};

fn inputs(target: &str) -> Vec<Input> {
    corpus::inputs(target).unwrap()
}

#[test]
fn fuzz_targets_accept_their_corpora() {
    for (name, run) in TARGETS {
        let inputs = inputs(name);
        assert!(inputs.len() > 10, "{name} has {} inputs", inputs.len());
        for input in inputs {
            let result = std::panic::catch_unwind(|| run(&input.bytes));
            assert!(result.is_ok(), "{} makes {name} panic", input.name);
        }
    }
}

/// The Python reader returns the same values and error kinds for the corpora.
#[test]
fn python_reader_agrees_on_corpora() {
    let mut differences = Vec::new();
    let mut count = 0;
    for input in inputs("index").into_iter().chain(inputs("readers")) {
        count += 1;
        if let Some(difference) = python_difference(&expand(&input.bytes)) {
            differences.push(format!("{}: {difference}", input.name));
        }
    }
    assert!(
        differences.is_empty(),
        "{} of {count} inputs differ:\n{}",
        differences.len(),
        differences.join("\n")
    );
}

/// Unpacks the corpora into folders, as `cargo fuzz` expects.
#[test]
#[ignore = "writes fuzz/corpus/TARGET/"]
fn corpora_to_folders() {
    for (target, _) in TARGETS {
        corpus::unpack(target).unwrap();
    }
}

#[test]
#[ignore = "writes fuzz/corpus/TARGET.tar.zst"]
fn corpora_to_archives() {
    for (target, _) in TARGETS {
        corpus::pack(target).unwrap();
    }
}

/// Writes the initial corpora: inputs from the test vectors, and noise.
#[test]
#[ignore = "writes fuzz/corpus/TARGET/"]
fn write_seeds() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../spec/vectors");
    let mut files: Vec<(String, Vec<u8>)> = Vec::new();
    for vector in vectors() {
        if let Content::File(bytes) = vector.content {
            files.push((vector.name.to_owned(), bytes));
        }
    }
    let invalid = [folder.join("invalid"), vectors::generated_folder().to_owned()];
    for entry in invalid.iter().flat_map(|folder| folder.read_dir().unwrap()).map(Result::unwrap) {
        if entry.path().is_file() {
            let name = entry.file_name().into_string().unwrap();
            files.push((name, std::fs::read(entry.path()).unwrap()));
        }
    }
    for (name, bytes) in files.into_iter().filter(|(_, bytes)| bytes.len() < 9000) {
        if bytes.len() < 5000 {
            write("parse", &name, &bytes);
        }
        if bytes.len() >= 4296
            && let Some(compact) = compact(&bytes)
        {
            write("index", &name, &compact);
            write("readers", &name, &compact);
        }
        if let Some(compact) = with_fine_chunks(&bytes).as_deref().and_then(compact) {
            write("index", &format!("{name}.fine"), &compact);
            write("readers", &format!("{name}.fine"), &compact);
        }
    }
    write_delta_chunks();
    for (target, seed) in
        ["roundtrip", "chunk", "shard_set", "reshard_plan", "delta"].into_iter().zip(0_u64..)
    {
        for number in 0..40_u64 {
            let noise = |index: u64| {
                let mixed = (seed << 40 | number << 20 | index).wrapping_mul(0x9E37_79B9_7F4A_7C15);
                (mixed ^ mixed >> 29).to_le_bytes()[5]
            };
            let bytes: Vec<u8> = (0..number * 12).map(noise).collect();
            write(target, &format!("noise-{number:02}"), &bytes);
        }
    }
}

/// Writes the delta chunks of the vectors as inputs of the target `delta`.
fn write_delta_chunks() {
    let deltas = vectors().into_iter().filter_map(|vector| match vector.content {
        Content::Set(files) => {
            let delta = files.into_iter().find(|(name, _)| name == "delta.tssd")?;
            Some((vector.name, Archive::from_bytes(delta.1).unwrap()))
        }
        Content::File(_) => None,
    });
    for (name, delta) in deltas {
        for number in 0..delta.storage_count() {
            let storage = delta.storage(number);
            let Some(layout) =
                storage.compressed_layout.as_ref().filter(|_| storage.base.is_some())
            else {
                continue;
            };
            let range = storage.stored_chunk(0);
            let stored =
                delta.blob(0).bytes().unwrap().slice(range.start as usize..range.end as usize);
            // As `fuzz::delta` reads it: a choice of the width, and half of the number of elements.
            let width = u64::from(layout.width);
            let half = ((storage.len / width / 2) as u16).to_le_bytes();
            let choice = layout.width.trailing_zeros() as u8;
            let input = [&[choice, half[0], half[1]], &stored[..]].concat();
            write("delta", &format!("{name}-{number}"), &input);
        }
    }
}

/// Re-encodes a file with fine chunks. Returns `None` for files without storages, or with shards.
fn with_fine_chunks(bytes: &[u8]) -> Option<Vec<u8>> {
    let archive = Archive::from_bytes(bytes.to_vec()).ok()?;
    if archive.storage_count() == 0 || !archive.shards().is_empty() {
        return None;
    }
    let dict = archive.to_state_dict().ok()?;
    let mut file = Vec::new();
    let options = Options::from_archive(&archive).chunks(ChunkPolicy::Fine);
    Layout::plan(&dict, &options).ok()?.write_to(&mut file).ok()?;
    Some(file)
}

fn write(target: &str, name: &str, bytes: &[u8]) {
    let folder = corpus::folder(target);
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join(name), bytes).unwrap();
}
