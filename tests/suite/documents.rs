//! The documents name only files, tests and links that exist.
//!
//! Also tests the rules of `spec/reshard.md` on stores that no other test covers.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use tssd_format::{
    Archive, AttrValue, Dict, MapKey as DictKey, Shard, ShardSpec, StateDict, Tensor, TensorSlice,
    Value,
};
use tssd_store::blocking::Store;
use tssd_store::{
    DivergencePolicy, Error, ErrorKind, GetOptions, JobId, Key, PutOptions, PutReport,
};

const DOCUMENTS: [&str; 13] = [
    "README.md",
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "docs/deltas.md",
    "docs/glossary.md",
    "docs/guarantees.md",
    "docs/internals.md",
    "docs/migration.md",
    "docs/types.md",
    "spec/format.md",
    "spec/protocol.md",
    "spec/reshard.md",
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn read(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// Returns the code spans of a text.
fn code_spans(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

#[test]
fn links_resolve() {
    for document in DOCUMENTS {
        let folder = root().join(document);
        let folder = folder.parent().unwrap();
        for link in read(document).split("](").skip(1) {
            let link = link.split(')').next().unwrap();
            assert!(folder.join(link).exists(), "{document}: {link}");
        }
    }
}

#[test]
fn named_tests_and_files_exist() {
    for document in DOCUMENTS {
        let text = read(document);
        for name in code_spans(&text) {
            if let Some((path, test)) = name.split_once(".rs::") {
                let source = read(&format!("{path}.rs"));
                assert!(source.contains(&format!("fn {test}(")), "{document}: {name}");
            }
            let is_path = ["format/src/", "store/src/", "cli/src/", "tests/", "spec/", "xtask/"]
                .iter()
                .any(|folder| name.starts_with(folder));
            if is_path && !name.contains("::") && !name.contains(['*', '{', 'N']) {
                assert!(root().join(name).exists(), "{document}: {name}");
            }
        }
    }
}

#[test]
fn every_reshard_and_protocol_rule_names_a_test() {
    for (document, letter) in [("spec/reshard.md", 'R'), ("spec/protocol.md", 'P')] {
        let text = read(document);
        let mut numbers = Vec::new();
        for rule in text.split(&format!("\n- **{letter}-")).skip(1) {
            let rule = rule.split("\n\n").next().unwrap();
            numbers.push(rule.get(..3).unwrap().parse::<u32>().unwrap());
            assert!(code_spans(rule).any(|name| name.contains(".rs::")), "{letter}-{rule}");
        }
        assert!(numbers.is_sorted_by(|one, next| one < next), "{numbers:?}");
        assert!(numbers.len() > 35, "{numbers:?}");
    }
}

/// Keywords before the names that Rust and Python sources declare.
const DECLARATIONS: [&str; 8] = ["struct", "enum", "trait", "type", "fn", "const", "class", "def"];

/// Returns the Rust and Python sources in a folder and in its subfolders.
fn read_sources(folder: &Path) -> Vec<String> {
    let mut sources = Vec::new();
    for entry in std::fs::read_dir(root().join(folder)).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources.extend(read_sources(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs" || extension == "py") {
            sources.push(std::fs::read_to_string(path).unwrap());
        }
    }
    sources
}

/// Returns the names that sources declare.
fn declared_names(sources: &[String]) -> BTreeSet<&str> {
    let mut names = BTreeSet::new();
    for source in sources {
        let mut is_declaration = false;
        for word in source.split(|letter: char| !letter.is_alphanumeric() && letter != '_') {
            if is_declaration {
                names.insert(word);
            }
            is_declaration = DECLARATIONS.contains(&word);
        }
    }
    names
}

#[test]
fn glossary_is_sorted_and_names_declared_items() {
    let text = read("docs/glossary.md");
    let lines = text.lines().filter_map(|line| line.strip_prefix("| ")?.strip_suffix(" |"));
    // The first line is the head of the table.
    let rows: Vec<Vec<&str>> = lines.skip(1).map(|line| line.split(" | ").collect()).collect();
    assert!((1..=60).contains(&rows.len()), "{} terms", rows.len());
    assert!(rows.is_sorted_by(|one, next| one.first() < next.first()), "{rows:?}");
    let folders = ["format/src", "store/src", "gpu/src", "python", "cli/src", "xtask/src", "tests"];
    let sources: Vec<String> =
        folders.iter().flat_map(|folder| read_sources(Path::new(folder))).collect();
    let declared = declared_names(&sources);
    for row in &rows {
        let [term, _, names] = row.as_slice() else { panic!("{row:?}") };
        assert!(code_spans(names).next().is_some(), "{term}");
        for name in code_spans(names) {
            // A path such as `Command::Pin` is a plain string in the sources.
            let is_path = name.contains("::");
            let occurs = || sources.iter().any(|source| source.contains(name));
            assert!(declared.contains(name) || is_path && occurs(), "{term}: {name}");
        }
    }
}

/// Returns the (file, test) pairs that a text names.
fn named_tests(text: &str) -> impl Iterator<Item = (&str, &str)> {
    code_spans(text).filter_map(|name| name.split_once("::"))
}

#[test]
fn every_guarantee_names_existing_tests() {
    let text = read("docs/guarantees.md");
    for (file, test) in named_tests(&text) {
        let lines = [format!("fn {test}("), format!("def {test}(")];
        let source = read(file);
        assert!(lines.iter().any(|line| source.contains(line)), "{file}: {test}");
    }
    let guarantees = || text.lines().filter(|row| row.starts_with("| S") || row.starts_with("| F"));
    assert_eq!(guarantees().count(), 12 + 9);
    assert!(guarantees().all(|guarantee| named_tests(guarantee).next().is_some()));
}

/// The table of SECURITY.md lists every file with unsafe code and counts its unsafe places.
#[test]
fn unsafe_code_table_matches_source_files() {
    let mut found = BTreeMap::new();
    for package in ["format", "store", "gpu", "cli", "python", FAKE_DRIVER, SHORT_CALLS] {
        let mut folders = vec![PathBuf::from(package).join("src")];
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(root().join(&folder)).unwrap() {
                let entry = entry.unwrap();
                let path = folder.join(entry.file_name());
                if entry.file_type().unwrap().is_dir() {
                    folders.push(path);
                    continue;
                }
                let source = read(path.to_str().unwrap());
                let code = source.lines().filter_map(|line| line.split("//").next());
                let kinds = ["unsafe {", "unsafe impl ", "unsafe fn ", "unsafe extern "];
                let places: usize = code
                    .map(|line| kinds.map(|kind| line.matches(kind).count()).iter().sum::<usize>())
                    .sum();
                // A library that only tests load has one row.
                let is_test_library = [FAKE_DRIVER, SHORT_CALLS].contains(&package);
                let row = if is_test_library { Path::new(package) } else { &path };
                if places > 0 {
                    *found.entry(row.to_str().unwrap().to_owned()).or_default() += places;
                }
            }
        }
    }
    let text = read("SECURITY.md");
    let rows = text.lines().filter_map(|line| line.strip_prefix("| `")?.split_once("` | "));
    let named: BTreeMap<String, usize> = rows
        .filter_map(|(path, rest)| Some((path.to_owned(), rest.split_once(" |")?.0.parse().ok()?)))
        .collect();
    assert_eq!(named, found);
    let sum = |is_counted: &dyn Fn(&str) -> bool| -> usize {
        named.iter().filter(|(path, _)| is_counted(path)).map(|(_, places)| places).sum()
    };
    let is_for_gpus = |path: &str| path.starts_with("gpu/src/") || path == "python/src/device.rs";
    let (for_gpus, total) = (sum(&is_for_gpus), sum(&|path| !path.starts_with("tests/")));
    let sentence = format!("Of the {total} places that are not for tests, {for_gpus} are for GPUs");
    assert!(text.contains(&sentence), "{sentence}");
}

/// The fake CUDA driver, for tests without a GPU.
const FAKE_DRIVER: &str = "tests/libcuda";

/// The library whose reads and writes transfer half of what they could.
const SHORT_CALLS: &str = "tests/libshort";

#[test]
fn the_readme_is_short() {
    assert!(read("README.md").lines().count() <= 140);
    assert!(read("ARCHITECTURE.md").lines().count() <= 92);
}

fn put(
    store: &Store,
    writer: u32,
    divergent: DivergencePolicy,
    entries: impl IntoIterator<Item = (DictKey, Value)>,
) -> Result<PutReport, Error> {
    let dict = StateDict::from_value(Value::Dict(Dict::from_iter(entries))).unwrap();
    let options = PutOptions {
        writer: Some(writer),
        writers: Some((0..2).collect()),
        job: Some(JobId("run-1".into())),
        on_divergence: divergent,
        ..PutOptions::default()
    };
    store.put_state_dict(&Key::new("policy/actor").unwrap(), &dict, &options)
}

/// Returns the half of `writer` of a tensor of four elements.
fn half_shard(writer: u32, local: &Tensor) -> Value {
    let slice = TensorSlice::new(&[u64::from(writer) * 2], &[2], &[4]).unwrap();
    Shard::new(local.clone(), ShardSpec::new(slice)).unwrap().into()
}

/// Rules.
#[test]
fn put_rejects_colliding_contributions() {
    let store = Store::memory().unwrap();
    put(&store, 0, DivergencePolicy::Error, [(1_i64.into(), Value::None)]).unwrap();
    let collision =
        put(&store, 1, DivergencePolicy::Error, [(DictKey::Bool(true), Value::None)]).unwrap_err();
    assert_eq!(collision.kind(), ErrorKind::Rejected);
    assert!(collision.to_string().contains("equal in Python"), "{collision}");

    put(&store, 0, DivergencePolicy::Keep, [("seed".into(), Value::from(1_i64))]).unwrap();
    let seed = [("seed".into(), Value::from(2_i64))];
    let divergence = put(&store, 1, DivergencePolicy::Lowest, seed).unwrap_err();
    assert_eq!(divergence.kind(), ErrorKind::Rejected);
    assert!(divergence.to_string().contains("`on_divergence`"), "{divergence}");
}

/// Rule R-033.
#[test]
fn sharded_leaves_stay_tied_if_all_writers_tie_them() {
    for is_tied in [true, false] {
        let store = Store::memory().unwrap();
        for writer in 0..2 {
            let local = || Tensor::from_slice(&[1.0_f32, 2.0], &[2]).unwrap();
            let a = local();
            let b = if is_tied || writer == 0 { a.clone() } else { local() };
            let entries =
                [("a".into(), half_shard(writer, &a)), ("b".into(), half_shard(writer, &b))];
            put(&store, writer, DivergencePolicy::Error, entries).unwrap();
        }
        let key = Key::new("policy/actor").unwrap();
        let (dict, _) = store.get_state_dict(&key, &GetOptions::default()).unwrap();
        let address_of = |fqn| match dict.leaf(fqn).unwrap() {
            Value::Tensor(tensor) => tensor.view().span().as_ptr(),
            other => panic!("{other:?}"),
        };
        assert_eq!(address_of("a") == address_of("b"), is_tied);
    }
}

/// Rules.
#[test]
fn version_on_disk_has_described_layout() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::directory(folder.path()).unwrap();
    let entries = |writer| {
        let local = Tensor::from_slice(&[1.0_f32, 2.0], &[2]).unwrap();
        [("w".into(), half_shard(writer, &local))]
    };
    put(&store, 0, DivergencePolicy::Error, entries(0)).unwrap();
    let id = put(&store, 1, DivergencePolicy::Error, entries(1)).unwrap().id.to_string();

    let names = |path: &str| -> BTreeSet<String> {
        let names = std::fs::read_dir(folder.path().join(path)).unwrap();
        names.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    };
    let set = |names: [&str; 3]| BTreeSet::from(names.map(str::to_owned));
    let version = format!("policy%2Factor/0-1-{}", &id[..16]);
    let (_, folder_name) = version.split_once('/').unwrap();
    assert_eq!(names("policy%2Factor"), set([folder_name, ".ledger", ".lock"]));
    let files: Vec<String> = names(&version).into_iter().collect();
    let [first, second, manifest] = files.as_slice() else { panic!("{files:?}") };
    let is_attempt_id = |name: &str| name.len() == 32 && u128::from_str_radix(name, 16).is_ok();
    for (file, writer) in [(first, "0-"), (second, "1-")] {
        let name = file.strip_prefix(writer).and_then(|rest| rest.strip_suffix(".tssd"));
        assert!(name.is_some_and(is_attempt_id), "{file}");
    }
    assert_eq!(manifest, "manifest.tssd");
    let records = names("policy%2Factor/.ledger");
    assert!((1..=2).contains(&records.len()), "{records:?}");
    for record in records {
        let number = record.strip_suffix(".json").unwrap();
        assert!(number.len() == 20 && number.parse::<u64>().is_ok(), "{record}");
    }

    let open = |name: &str| Archive::open(folder.path().join(&version).join(name)).unwrap();
    let manifest = open("manifest.tssd");
    let attrs = manifest.attrs();
    assert_eq!(attrs.get("tssd.store.epoch"), Some(&AttrValue::Int(0)));
    assert_eq!(attrs.get("tssd.store.id"), Some(&AttrValue::Text(id.as_str().into())));
    assert_eq!(attrs.get("tssd.store.version"), Some(&AttrValue::Int(1)));
    assert_eq!(attrs.get("tssd.store.writers"), Some(&AttrValue::Text("0-1".into())));
    assert!(
        matches!(attrs.get("tssd.store.layout_fingerprint"), Some(AttrValue::Bytes(layout)) if layout.len() == 16)
    );
    assert_eq!(attrs.len(), 6);
    let shards = manifest.shards();
    let mut digests = Vec::new();
    for ((shard, name), writer) in shards.iter().zip([first, second]).zip(0_u32..) {
        let archive = open(name);
        assert_eq!((&shard.name, shard.writer), (name, writer));
        assert_eq!(shard.file_len, archive.file_len());
        assert_eq!(shard.index_off, archive.index_range().start);
        assert_eq!(shard.index_crc32, archive.index_crc32());
        let bytes = std::fs::read(folder.path().join(&version).join(name)).unwrap();
        let tail = blake3::hash(&bytes[usize::try_from(shard.index_off).unwrap()..]);
        digests.extend(writer.to_le_bytes());
        digests.extend(&tail.as_bytes()[..16]);
    }
    let digest = blake3::hash(&digests).to_hex()[..32].to_owned();
    assert_eq!(attrs.get("tssd.store.digest"), Some(&AttrValue::Text(digest.into())));
    assert_eq!(shards.len(), 2);
}
