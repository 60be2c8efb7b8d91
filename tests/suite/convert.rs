//! `convert`, `roundtrip`, `verify --deep`, `inspect --digest` and `--hex`, and how `diff` and `put`
//! handle compression and digests.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use serde_json::{Value as Json, json};
use tssd_format::{
    Archive, AttrValue, ChunkPolicy, Compression, Dict, Dtype, Layout, Options, Shard, ShardSpec,
    StateDict, Storage, Tensor, TensorMeta, TensorSlice, TorchStoreStateDict, Value,
};
use tssd_store::blocking::Store;
use tssd_store::{JobId, Key, PutOptions};
use tssd_tests::checksums::repair_checksums;
use tssd_tests::generate;

use super::cli::Sandbox;
use super::roundtrip::tied_pairs;

fn encoded(dict: &StateDict, options: &Options) -> Vec<u8> {
    TorchStoreStateDict::with_options(dict, options).unwrap().as_bytes().to_vec()
}

fn open(sandbox: &Sandbox, name: &str) -> Archive {
    Archive::open(sandbox.path(name)).unwrap()
}

fn parse_json(text: &str) -> Json {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

fn floats(len: u16) -> Tensor {
    let elements: Vec<f32> = (0..len).map(|index| f32::from(index % 251) * 0.5).collect();
    Tensor::from_slice(&elements, &[len.into()]).unwrap()
}

/// A weight, a second entry tied to it, optimizer state, and a long string.
fn model() -> StateDict {
    let weight = floats(5000);
    let optimizer = Dict::from_iter([("exp_avg", floats(3000)), ("exp_avg_sq", floats(2000))]);
    let mut dict = StateDict::ordered();
    dict.insert("weight", weight.clone());
    dict.insert("tied", weight);
    dict.insert("optimizer", optimizer);
    dict.insert("note", "n".repeat(5000));
    dict
}

/// Returns for each leaf: fqn, shuffle width if compressed, log2 of the alignment, whether it has a digest.
fn storage_options(archive: &Archive) -> Vec<(String, Option<u8>, u8, bool)> {
    let leaves = archive.leaves().into_iter().map(|(path, node)| {
        let storage = archive.storage(node.storages().next().unwrap());
        let shuffle = storage.compressed_layout.map(|layout| layout.width);
        (path.fqn(), shuffle, storage.align_log2, storage.digest.is_some())
    });
    leaves.collect()
}

/// Flags of a `convert` command line.
fn convert_flags() -> impl Strategy<Value = String> {
    let zstd = prop_oneof![
        Just(""),
        Just("--codec none"),
        Just("--codec zstd"),
        Just("--codec planes"),
        Just("--codec tiers"),
        Just("--codec auto"),
        Just("--codec zstd-plain --zstd-level 7"),
        Just("--codec zstd --zstd-level -3"),
        Just("--codec zstd --only *a*"),
    ];
    let digest = prop_oneof![Just(""), Just("--digest"), Just("--no-digest")];
    let align = prop_oneof![Just(""), Just("--align 64"), Just("--align 8KiB")];
    let chunks = prop_oneof![Just(""), Just("--chunks fine"), Just("--chunks 8KiB")];
    (zstd, digest, align, chunks)
        .prop_map(|(zstd, digest, align, chunks)| format!("{zstd} {digest} {align} {chunks}"))
}

/// Options that the source file is written with.
fn source_options() -> impl Strategy<Value = Options> {
    let compression = prop_oneof![
        Just(Compression::None),
        Just(Compression::Zstd),
        Just(Compression::ShuffledZstd)
    ];
    (compression, any::<[bool; 2]>(), prop::option::of(6_u32..13)).prop_map(
        |(compression, [digests, fine], align)| {
            let mut options = Options::new().compress(compression).zstd_level(2);
            if digests {
                options = options.digests();
            }
            if fine {
                options = options.chunks(ChunkPolicy::Fine);
            }
            match align {
                Some(log2) => options.align(1 << log2).unwrap(),
                None => options,
            }
            .attr("user", AttrValue::Int(-7))
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn convert_preserves_contents_ties_and_attrs(
        dict in generate::state_dict(),
        options in source_options(),
        flags in convert_flags(),
    ) {
        let sandbox = Sandbox::on_tmpfs();
        let mut dict = dict;
        // Makes every `--only` pattern match a leaf, and gives compression something to do.
        dict.insert("a", floats(3000));
        sandbox.write("in.tssd", &encoded(&dict, &options));
        sandbox.run_with_code(0, &format!("convert in.tssd -o out.tssd {flags}"));
        let archive = open(&sandbox, "out.tssd");
        archive.verify_deep().unwrap();
        let back = archive.to_state_dict().unwrap();
        prop_assert_eq!(&back, &dict);
        prop_assert_eq!(tied_pairs(&back), tied_pairs(&dict));
        prop_assert_eq!(archive.attrs().remove("user"), Some(AttrValue::Int(-7)));
        sandbox.run_with_code(0, "verify --deep out.tssd");
        sandbox.run_with_code(0, "diff in.tssd out.tssd");
        let output = sandbox.run_with_code(0, "roundtrip in.tssd out.tssd");
        prop_assert!(output.ends_with("2 identical, 0 equal, 0 lossy\n"), "{}", output);
        // Without flags, `convert` changes nothing.
        sandbox.run_with_code(0, "convert out.tssd -o again.tssd");
        prop_assert_eq!(sandbox.read("again.tssd"), sandbox.read("out.tssd"));
    }
}

#[test]
fn convert_applies_requested_chunk_size() {
    let sandbox = Sandbox::new();
    let mut dict = model();
    dict.insert("large", Tensor::from_slice(&vec![0.5_f32; 1 << 20], &[1 << 20]).unwrap());
    sandbox.write(
        "in.tssd",
        &encoded(
            &dict,
            &Options::new().compress_leaves(|path, _| {
                let is_packed = path.fqn() == "optimizer.exp_avg";
                if is_packed { Compression::Zstd } else { Compression::None }
            }),
        ),
    );
    let sizes = |name: &str| -> Vec<u64> {
        let archive = open(&sandbox, name);
        archive.verify_deep().unwrap();
        let storages = (0..archive.storage_count()).map(|number| archive.storage(number));
        let raw = storages.filter(|storage| storage.compressed_layout.is_none());
        raw.map(|storage| storage.chunk_size.bytes()).collect()
    };
    assert!(sizes("in.tssd").iter().all(|bytes| *bytes == 1 << 20));
    sandbox.run_with_code(0, "convert in.tssd -o fine.tssd --chunks fine");
    let fine = sizes("fine.tssd");
    assert!(fine.contains(&(8 << 10)) && fine.contains(&(4 << 10)), "{fine:?}");
    sandbox.run_with_code(0, "convert fine.tssd -o same.tssd");
    assert_eq!(sandbox.read("same.tssd"), sandbox.read("fine.tssd"));
    // The compressed leaf keeps its chunk size.
    let output = sandbox.run_with_code(0, "diff in.tssd fine.tssd");
    assert!(output.ends_with("stored otherwise: chunk size of 5 leaves\n"), "{output}");
    assert_eq!(
        parse_json(&sandbox.run_with_code(0, "diff --json in.tssd fine.tssd"))["stored"]["chunk_size"],
        5
    );
    sandbox.run_with_code(0, "convert fine.tssd -o middle.tssd --chunks 64KiB");
    assert!(sizes("middle.tssd").iter().all(|bytes| *bytes == 64 << 10));
    sandbox.run_with_code(0, "convert middle.tssd -o again.tssd");
    assert_eq!(sandbox.read("again.tssd"), sandbox.read("middle.tssd"));
    sandbox.run_with_code(0, "convert middle.tssd -o large.tssd --chunks 1MiB");
    assert_eq!(sandbox.read("large.tssd"), sandbox.read("in.tssd"));
    for wrong in ["2KiB", "2MiB", "5000", "coarse"] {
        let output =
            sandbox.run_with_code(2, &format!("convert in.tssd -o out.tssd --chunks {wrong}"));
        let reason = format!("`{wrong}` is neither `fine` nor a power of two from 4KiB to 1MiB");
        assert!(output.contains("for '--chunks <BYTES>'") && output.contains(&reason), "{output}");
    }
}

#[test]
fn convert_changes_only_requested_options() {
    let sandbox = Sandbox::new();
    sandbox.write("in.tssd", &encoded(&model(), &Options::new().align(512).unwrap()));
    let rows = |name: &str| -> Vec<(Option<u8>, u8, bool)> {
        let rows = storage_options(&open(&sandbox, name)).into_iter();
        rows.map(|(_, shuffle, align, digest)| (shuffle, align, digest)).collect()
    };
    let (raw, shuffled, plain) = (None, Some(4), Some(1));
    for (from, flags, shuffles, align, digests) in [
        ("in", "", [raw, raw, raw, raw, raw], 9, false),
        ("in", "--codec zstd", [shuffled, shuffled, shuffled, shuffled, plain], 9, false),
        ("out", "--digest", [shuffled, shuffled, shuffled, shuffled, plain], 9, true),
        ("out", "--codec zstd-plain", [plain, plain, plain, plain, plain], 9, true),
        (
            "out",
            "--codec zstd --align 64",
            [shuffled, shuffled, shuffled, shuffled, plain],
            6,
            true,
        ),
        ("out", "--codec zstd --only optimizer", [raw, raw, shuffled, shuffled, raw], 6, true),
        ("out", "--codec none --no-digest", [raw, raw, raw, raw, raw], 6, false),
        (
            "out",
            "--codec zstd --only optimizer.*_sq --only note",
            [raw, raw, raw, shuffled, plain],
            6,
            false,
        ),
        // Tied leaves take the choice made for the first of them.
        ("in", "--codec zstd --only tied", [raw, raw, raw, raw, raw], 9, false),
    ] {
        sandbox.run_with_code(0, &format!("convert {from}.tssd -o out.tssd --force {flags}"));
        let expected: Vec<_> =
            shuffles.into_iter().map(|shuffle| (shuffle, align, digests)).collect();
        assert_eq!(rows("out.tssd"), expected, "{flags}");
        assert_eq!(open(&sandbox, "out.tssd").to_state_dict().unwrap(), model());
    }
    sandbox.run_with_code(0, "convert in.tssd -o level.tssd --codec zstd --zstd-level 5");
    let level = open(&sandbox, "level.tssd").attrs().remove("tssd.file.zstd_level");
    assert_eq!(level, Some(AttrValue::Int(5)));
    sandbox.run_with_code(0, "convert level.tssd -o out.tssd --force --codec none");
    assert_eq!(sandbox.read("out.tssd"), sandbox.read("in.tssd"));
    assert_eq!(sandbox.file_names(), ["in.tssd", "level.tssd", "out.tssd"]);
}

#[test]
fn convert_reports_file_sizes() {
    let sandbox = Sandbox::new();
    sandbox.write_dict("in.tssd", &model());
    let output = sandbox.run_with_code(0, "convert in.tssd -o out.tssd --codec zstd");
    assert!(output.starts_with("out.tssd: 5 leaves, 45.0 kB raw, file 5"), "{output}");
    let json = parse_json(
        &sandbox.run_with_code(0, "convert in.tssd -o out.tssd --force --codec zstd --json"),
    );
    let len = |name: &str| sandbox.read(name).len();
    assert_eq!(
        json,
        json!({
            "output": "out.tssd", "leaves": 5, "raw_bytes": 45_000,
            "file_len_before": len("in.tssd"), "file_len": len("out.tssd"),
        })
    );
    assert!(len("out.tssd") * 2 < len("in.tssd"));
}

#[test]
fn convert_rejects_invalid_arguments() {
    let sandbox = Sandbox::new();
    sandbox.write_dict("in.tssd", &model());
    sandbox.write("out.tssd", b"old");
    std::fs::create_dir(sandbox.path("empty")).unwrap();
    for (code, args, message) in [
        (2, "in.tssd", "--output"),
        (2, "in.tssd -o out.tssd --codec lz4", "invalid value 'lz4'"),
        (2, "in.tssd -o out.tssd --digest --no-digest", "cannot be used with"),
        (2, "in.tssd -o out.tssd --codec zstd --zstd-level 40", "40 is not in"),
        (2, "in.tssd -o out.tssd --align 100", "100 is no power of two from 64 to 2097152"),
        (2, "in.tssd -o out.tssd --align 4MiB", "4194304 is no power of two"),
        (2, "in.tssd -o out.tssd --only a", "--codec <CODEC>"),
        (2, "in.tssd -o out.tssd --codec none --zstd-level 3", "have no effect"),
        (2, "in.tssd -o out.tssd --zstd-level 3", "--codec <CODEC>"),
        (3, "in.tssd -o out.tssd --codec zstd --only weights", "`weights` matches no leaf"),
        (3, "missing.tssd -o out.tssd", "check the path"),
        (
            3,
            "empty -o out.tssd",
            "empty has neither manifest.tssd, model.safetensors.index.json nor",
        ),
    ] {
        let output = sandbox.run_with_code(code, &format!("convert --force {args}"));
        assert!(output.contains(message), "convert {args}: {output}");
        assert_eq!(sandbox.read("out.tssd"), b"old");
    }
}

/// `convert` verifies its input: new checksums would hide the damage.
#[test]
fn convert_rejects_damaged_files() {
    let sandbox = Sandbox::new();
    sandbox.write("in.tssd", &encoded(&model(), &Options::new()));
    sandbox.run_with_code(0, "convert in.tssd -o packed.tssd --codec zstd");
    for name in ["in.tssd", "packed.tssd"] {
        let mut bytes = sandbox.read(name);
        bytes[4100] ^= 1;
        sandbox.write(name, &bytes);
        let output = sandbox.run_with_code(1, &format!("convert {name} -o out.tssd"));
        assert!(output.contains("F-090 ChunkCorrupt"), "{output}");
        assert!(!sandbox.path("out.tssd").exists());
        let output = sandbox.run_with_code(1, &format!("roundtrip {name}"));
        assert!(output.starts_with(&format!("lossy      {name}\n           F-090  ")), "{output}");
    }
}

/// Puts one version from two writers into the store `store`: halves of a matrix, and a model that both have.
///
/// Returns the relative path of the version.
fn put_two_writers(sandbox: &Sandbox, compression: Compression) -> String {
    let store = Store::directory(sandbox.path("store")).unwrap();
    for writer in 0..2_u8 {
        let slice = TensorSlice::new(&[u64::from(writer) * 300, 0], &[300, 4], &[600, 4]).unwrap();
        let rows = Tensor::from_slice(&[f32::from(writer); 1200], &[300, 4]).unwrap();
        let mut dict = model();
        dict.insert("rows", Shard::new(rows, ShardSpec::new(slice)).unwrap());
        let options = PutOptions {
            writer: Some(writer.into()),
            writers: Some((0..2).collect()),
            job: Some(JobId("run-1".into())),
            compression,
            digests: true,
            attrs: [("format".to_owned(), AttrValue::Text("pt".into()))].into(),
            ..PutOptions::default()
        };
        store.put_state_dict(&Key::new("key").unwrap(), &dict, &options).unwrap();
    }
    first_version_path(sandbox)
}

/// Returns the relative path of the first version of `key` in the store `store`.
fn first_version_path(sandbox: &Sandbox) -> String {
    let version = tssd_tests::layout::version_folder(&sandbox.path("store/key"), "0-1");
    format!("store/key/{}", version.file_name().unwrap().to_str().unwrap())
}

/// Returns the sorted relative paths of the files in a directory.
fn list_files(sandbox: &Sandbox, directory: &str) -> Vec<String> {
    let entries = std::fs::read_dir(sandbox.path(directory)).unwrap();
    let mut names: Vec<String> = entries
        .map(|entry| format!("{directory}/{}", entry.unwrap().file_name().to_str().unwrap()))
        .collect();
    names.sort();
    names
}

#[test]
fn commands_treat_shard_set_as_one_archive() {
    for compression in [Compression::None, Compression::ShuffledZstd] {
        let sandbox = Sandbox::new();
        let set = put_two_writers(&sandbox, compression);
        let output = sandbox.run_with_code(0, &format!("verify --deep {set}"));
        assert_eq!(output.lines().filter(|line| line.starts_with("ok ")).count(), 3, "{output}");
        assert!(output.contains("manifest of 2 files"), "{output}");
        let output = sandbox.run_with_code(0, &format!("roundtrip {set}"));
        assert!(output.ends_with("3 identical, 0 equal, 0 lossy\n"), "{output}");

        sandbox.run_with_code(0, &format!("convert {set} -o joined.tssd"));
        let (joined, whole) = (
            open(&sandbox, "joined.tssd"),
            tssd_format::open_shard_set(sandbox.path(&set)).unwrap(),
        );
        assert_eq!(joined.to_state_dict().unwrap(), whole.to_state_dict().unwrap());
        let attrs: Vec<String> = joined.attrs().into_keys().collect();
        let level = (compression != Compression::None).then_some("tssd.file.zstd_level");
        assert_eq!(attrs, ["format"].into_iter().chain(level).collect::<Vec<_>>());
        let Value::Shards(rows) = joined.leaf("rows").unwrap() else { panic!() };
        assert_eq!(rows.len(), 2);
        let output = sandbox.run_with_code(0, &format!("diff {set} joined.tssd"));
        assert!(output.starts_with("equal: 6 leaves"), "{output}");
        let listing = sandbox.run_with_code(0, &format!("inspect {set}"));
        assert!(listing.contains("rows           2 shards"), "{listing}");
        assert!(listing.contains("manifest of 2 files"), "{listing}");
        // The storages have equal digests, and joining does not change the content.
        let digests = |path: &str| -> Vec<String> {
            let output = sandbox.run_with_code(0, &format!("inspect --digest {path}"));
            output.lines().map(ToOwned::to_owned).collect()
        };
        let (set, joined) = (digests(&set), digests("joined.tssd"));
        assert_eq!(set, joined);
        assert!(set.iter().any(|line| line.ends_with("  rows#1")), "{set:?}");
    }
}

/// Rule F-083 of the format.
#[test]
fn shard_set_with_wrong_file_is_damaged() {
    let sandbox = Sandbox::new();
    let set = put_two_writers(&sandbox, Compression::None);
    let files = list_files(&sandbox, &set);
    let (archive, manifest) = (&files[0], &files[2]);
    let original = sandbox.read(archive);
    let assert_damaged = |reason: &str| {
        for path in [&set, manifest] {
            let output = sandbox.run_with_code(1, &format!("verify {path}"));
            assert!(output.contains(&format!("DAMAGED  {manifest}\n         F-083  ")), "{output}");
            assert!(output.contains(reason), "{output}");
            let json = parse_json(&sandbox.run_with_code(1, &format!("verify --json {path}")));
            let last = json.as_array().unwrap().last().unwrap();
            assert_eq!(last["damage"][0]["rule"], "F-083");
        }
        let output = sandbox.run_with_code(1, &format!("roundtrip {manifest}"));
        assert!(
            output.starts_with(&format!("lossy      {manifest}\n           F-083  ")),
            "{output}"
        );
        let output = sandbox.run_with_code(1, &format!("inspect {set}"));
        assert!(output.contains("F-083 ShardMismatch"), "{output}");
    };
    std::fs::remove_file(sandbox.path(archive)).unwrap();
    assert_damaged("No such file");
    sandbox.write_dict(archive, &model());
    assert_damaged("file is not the one that its manifest names");
    sandbox.write(archive, &original);
    sandbox.run_with_code(0, &format!("verify {set}"));
    #[cfg(unix)]
    {
        sandbox.write("elsewhere.tssd", &original);
        std::fs::remove_file(sandbox.path(archive)).unwrap();
        std::os::unix::fs::symlink(sandbox.path("elsewhere.tssd"), sandbox.path(archive)).unwrap();
        let output = sandbox.run_with_code(1, &format!("verify {set}"));
        assert!(output.contains("F-083"), "{output}");
    }
}

#[test]
fn convert_rejects_divergent_writers() {
    let sandbox = Sandbox::new();
    let store = Store::directory(sandbox.path("store")).unwrap();
    for writer in 0..2_u32 {
        let dict = Dict::from_iter([("seed", i64::from(writer))]);
        let options = PutOptions {
            writer: Some(writer),
            writers: Some((0..2).collect()),
            job: Some(JobId("run-1".into())),
            on_divergence: tssd_store::DivergencePolicy::Keep,
            ..PutOptions::default()
        };
        let dict = StateDict::from_value(Value::Dict(dict)).unwrap();
        store.put_state_dict(&Key::new("key").unwrap(), &dict, &options).unwrap();
    }
    let output =
        sandbox.run_with_code(5, &format!("convert {} -o out.tssd", first_version_path(&sandbox)));
    assert!(output.contains(r#"the writers hold each their own value of ["seed"]"#), "{output}");
    assert!(output.contains("tssd get --writer"), "{output}");
    let output = sandbox.run_with_code(0, "roundtrip store");
    assert!(output.contains("manifest.tssd  not joined, as its writers hold different values"));
}

/// Returns the byte offset of a field of a record, as printed by `inspect --hex`.
fn field_offset(sandbox: &Sandbox, name: &str, record: &str, field: &str) -> usize {
    let dump = sandbox.run_with_code(0, &format!("inspect --hex {name}"));
    let (_, rest) = dump.split_once(&format!("\n{record}\n")).expect(record);
    let line = rest.lines().find(|line| line.split("  ").last().unwrap().starts_with(field));
    line.expect(field).split(':').next().unwrap().trim().parse().unwrap()
}

/// A file whose two storages are in a different order, as another writer may write it.
#[test]
fn roundtrip_reports_reordered_storages_as_equal() {
    let sandbox = Sandbox::new();
    let mut dict = StateDict::new();
    dict.insert("a", Tensor::from_slice(&[1.0_f32; 100], &[100]).unwrap());
    dict.insert("b", Tensor::from_slice(&[2.0_f32; 100], &[100]).unwrap());
    sandbox.write_dict("own.tssd", &dict);
    let mut bytes = sandbox.read("own.tssd");
    let mut swap = |first: usize, second: usize, len: usize| {
        let (low, high) = bytes.split_at_mut(second);
        low[first..first + len].swap_with_slice(&mut high[..len]);
    };
    let archive = open(&sandbox, "own.tssd");
    swap(archive.storage(0).offset as usize, archive.storage(1).offset as usize, 400);
    let field = |record: &str, field: &str| field_offset(&sandbox, "own.tssd", record, field);
    swap(field("tensors[0]", "storage"), field("tensors[1]", "storage"), 4);
    swap(field("storages[0]", "crc32"), field("storages[1]", "crc32"), 4);
    swap(field("crcs", "crcs[0]"), field("crcs", "crcs[1]"), 4);
    repair_checksums(&mut bytes);
    sandbox.write("other.tssd", &bytes);
    sandbox.run_with_code(0, "verify --deep other.tssd");
    let output = sandbox.run_with_code(0, "roundtrip own.tssd other.tssd");
    let lines: Vec<&str> = output.lines().collect();
    assert_eq!(lines[0], "identical  own.tssd");
    // The first two bytes of 1.0 and 2.0 are equal.
    let expected = format!("other bytes from byte {} on", archive.storage(0).offset + 2);
    assert_eq!(lines[1], format!("equal      other.tssd  {expected}"));
    assert_eq!(lines[2], "1 identical, 1 equal, 0 lossy");
    let json = parse_json(&sandbox.run_with_code(0, "roundtrip --json other.tssd"));
    assert_eq!(json, json!([{ "path": "other.tssd", "result": "equal", "reasons": [expected] }]));
    // `convert` restores the order of this writer.
    sandbox.run_with_code(0, "convert other.tssd -o again.tssd");
    assert_eq!(sandbox.read("again.tssd"), sandbox.read("own.tssd"));
}

/// Another version of zstd compresses to different frames. A different level stands in for it here.
#[test]
fn roundtrip_reports_different_zstd_frames_as_equal() {
    let sandbox = Sandbox::new();
    let options = Options::new().compress(Compression::Zstd).zstd_level(19);
    sandbox.write("in.tssd", &encoded(&model(), &options));
    sandbox.run_with_code(0, "roundtrip in.tssd");
    let mut bytes = sandbox.read("in.tssd");
    let offset = field_offset(&sandbox, "in.tssd", "attrs[0]", "value: 19");
    bytes[offset] = 1;
    repair_checksums(&mut bytes);
    sandbox.write("in.tssd", &bytes);
    let output = sandbox.run_with_code(0, "roundtrip in.tssd");
    assert!(output.starts_with("equal      in.tssd  other bytes from byte 4"), "{output}");
}

#[test]
fn roundtrip_of_several_files_prints_summary() {
    let sandbox = Sandbox::new();
    sandbox.write_dict("a.tssd", &model());
    sandbox.write("b.tssd", b"no archive at all");
    let output = sandbox.run_with_code(1, "roundtrip .");
    let expected = "identical  ./a.tssd\nlossy      ./b.tssd\n           F-002  file does not begin \
                    with the TSSD magic\n1 identical, 0 equal, 1 lossy\n";
    assert_eq!(output, expected);
    assert_eq!(sandbox.run_with_code(0, "roundtrip -q a.tssd"), "");
    sandbox.run_with_code(3, "roundtrip missing.tssd");
    sandbox.run_with_code(2, "roundtrip");
}

#[test]
fn roundtrip_accepts_safetensors_files() {
    let sandbox = Sandbox::new();
    let mut flat = StateDict::new();
    flat.insert("w", floats(1000));
    sandbox.write_dict("flat.tssd", &flat);
    sandbox.run_with_code(0, "unpack flat.tssd -o flat.safetensors");
    let output = sandbox.run_with_code(0, "roundtrip flat.safetensors flat.tssd");
    assert!(output.starts_with("identical  flat.safetensors\nidentical  flat.tssd\n"), "{output}");
    // A version in a store is unpacked as one archive.
    sandbox.run_with_code(0, "put --store store key flat.tssd");
    sandbox
        .run_with_code(0, &format!("unpack {} -o again.safetensors", first_version_path(&sandbox)));
    assert_eq!(sandbox.read("again.safetensors"), sandbox.read("flat.safetensors"));
    std::fs::remove_file(sandbox.path("again.safetensors")).unwrap();
    std::fs::remove_dir_all(sandbox.path("store")).unwrap();
    // A truncated file is reported as lossy, leaves no output, and does not stop the check of the other files.
    let complete = sandbox.read("flat.safetensors");
    sandbox.write("cut.safetensors", &complete[..complete.len() - 1]);
    let output = sandbox.run_with_code(1, "roundtrip cut.safetensors flat.safetensors");
    assert!(output.starts_with("lossy      cut.safetensors\n           safetensors  "), "{output}");
    assert!(output.ends_with("1 identical, 0 equal, 1 lossy\n"), "{output}");
    assert_eq!(sandbox.file_names(), ["cut.safetensors", "flat.safetensors", "flat.tssd"]);
}

/// The reader and the writer lose nothing of any valid vector, and so of any feature of the format.
#[test]
fn roundtrip_of_valid_vectors_is_lossless() {
    let sandbox = Sandbox::new();
    let valid = Path::new(env!("CARGO_MANIFEST_DIR")).join("../spec/vectors/valid");
    let json =
        parse_json(&sandbox.run_with_code(0, &format!("roundtrip --json {}", valid.display())));
    assert!(json.as_array().unwrap().len() >= 24);
    for file in json.as_array().unwrap() {
        assert_ne!(file["result"], "lossy", "{file}");
    }
}

#[test]
fn only_deep_verify_detects_mismatch_of_decoded_bytes() {
    let sandbox = Sandbox::new();
    let options = Options::new().compress(Compression::ShuffledZstd).digests();
    sandbox.write("in.tssd", &encoded(&model(), &options));
    sandbox.run_with_code(0, "verify --deep in.tssd");
    for (record, field, rule) in
        [("storages[0]", "crc32", "F-091"), ("digests", "digests[1]", "F-094")]
    {
        let mut bytes = sandbox.read("in.tssd");
        bytes[field_offset(&sandbox, "in.tssd", record, field)] ^= 1;
        repair_checksums(&mut bytes);
        sandbox.write("bad.tssd", &bytes);
        sandbox.run_with_code(0, "verify bad.tssd");
        let json = parse_json(&sandbox.run_with_code(1, "verify --deep --json bad.tssd"));
        assert_eq!(json[0]["damage"][0]["rule"], rule, "{json}");
        sandbox.run_with_code(1, "convert bad.tssd -o out.tssd");
        sandbox.run_with_code(1, "roundtrip bad.tssd");
    }
}

#[test]
fn deep_verify_warns_about_invalid_bools() {
    let sandbox = Sandbox::new();
    let bools = |bytes: &[u8], shape: &[u64], strides: &[u64]| {
        let meta = TensorMeta::new(Dtype::Bool, shape).unwrap().with_strides(strides).unwrap();
        Tensor::new(meta, Storage::from(bytes.to_vec()), 0).unwrap()
    };
    let mut dict = StateDict::new();
    dict.insert("good", bools(&[0, 1, 1], &[3], &[1]));
    dict.insert("odd", bools(&[0, 1, 2, 255], &[4], &[1]));
    // Bytes between the elements are ignored. A repeated element counts once.
    dict.insert("strided", bools(&[1, 7, 0, 7, 1], &[1 << 40, 3], &[0, 2]));
    dict.insert("repeated", bools(&[3], &[1 << 40], &[0]));
    // More elements than can be visited one by one, in few bytes.
    dict.insert("overlapping", bools(&[5; 3 << 10], &[1 << 10; 3], &[1, 1, 1]));
    dict.insert("overlaps", bools(&vec![1; 5 << 20], &[1 << 20; 3], &[1, 1, 1]));
    sandbox.write_dict("in.tssd", &dict);
    assert!(!sandbox.run_with_code(0, "verify in.tssd").contains("warning"));
    let output = sandbox.run_with_code(0, "verify --deep in.tssd");
    let warnings: Vec<&str> = output.lines().skip(1).collect();
    assert_eq!(
        warnings,
        [
            "         warning  `odd` has 2 bools other than 0 and 1",
            "         warning  `repeated` has 1 bool other than 0 and 1",
            "         warning  `overlapping` has 3070 bools other than 0 and 1",
        ]
    );
    assert_eq!(sandbox.run_with_code(0, "verify --deep -q in.tssd"), output);
    assert!(sandbox.run_with_code(0, "diff in.tssd in.tssd").starts_with("equal: 6 leaves"));
    let json = parse_json(&sandbox.run_with_code(0, "verify --deep --json in.tssd"));
    assert_eq!((&json[0]["ok"], json[0]["warnings"].as_array().unwrap().len()), (&json!(true), 3));
}

#[test]
fn inspect_lists_dtypes_that_the_file_describes() {
    let vector =
        concat!(env!("CARGO_MANIFEST_DIR"), "/../spec/vectors/valid/105-other-dtypes.tssd");
    let output = Sandbox::new().run_with_code(0, &format!("inspect {vector}"));
    for line in
        ["vendor        example.q4_0  [2]     36 B", "vendor_dtype  dtype         example.q4_0"]
    {
        assert!(output.contains(line), "{output}");
    }
    assert!(!output.contains("torch."), "{output}");
}

#[test]
fn inspect_digest_prints_comparable_lines() {
    let sandbox = Sandbox::new();
    let mut dict = model();
    dict.insert("two\nlines", floats(10));
    sandbox.write("in.tssd", &encoded(&dict, &Options::new().digests()));
    let hex = |digest: [u8; 32]| {
        digest.iter().fold(String::new(), |mut text, byte| {
            write!(text, "{byte:02x}").unwrap();
            text
        })
    };
    let archive = open(&sandbox, "in.tssd");
    let digest = |number| hex(archive.storage(number).digest.unwrap());
    let output = sandbox.run_with_code(0, "inspect --digest in.tssd");
    let lines: Vec<&str> = output.lines().collect();
    let expected = [
        format!("blake3:{}  content", hex(archive.content_digest().unwrap())),
        format!("{}  weight", digest(0)),
        format!("{}  tied", digest(0)),
        format!("{}  optimizer.exp_avg", digest(1)),
        format!("{}  optimizer.exp_avg_sq", digest(2)),
        format!("{}  note", digest(3)),
        format!("\\{}  two\\nlines", digest(4)),
    ];
    assert_eq!(lines, expected);
    let json = parse_json(&sandbox.run_with_code(0, "inspect --digest --json in.tssd"));
    assert_eq!(json["content"], hex(archive.content_digest().unwrap()));
    assert_eq!(json["leaves"][5], json!(["two\nlines", digest(4)]));

    sandbox.run_with_code(0, "convert in.tssd -o none.tssd --no-digest");
    // Without digests in the file, the content digest is computed, and no leaves are listed.
    let computed = sandbox.run_with_code(0, "inspect --digest none.tssd");
    assert_eq!(computed.lines().collect::<Vec<_>>(), lines[..1]);
    // Codec and alignment do not change the digests.
    sandbox.run_with_code(0, "convert none.tssd -o packed.tssd --digest --codec zstd --align 64");
    let packed = sandbox.run_with_code(0, "inspect --digest packed.tssd");
    assert_eq!(packed.lines().collect::<Vec<_>>(), lines);
}

#[test]
fn inspect_shows_compression() {
    let sandbox = Sandbox::new();
    let options = Options::new().compress(Compression::ShuffledZstd).digests();
    sandbox.write("in.tssd", &encoded(&model(), &options));
    let output = sandbox.run_with_code(0, "inspect in.tssd");
    let archive = open(&sandbox, "in.tssd");
    let storage = archive.storage(0);
    let ratio = storage.len as f64 / storage.stored_len() as f64;
    let line = output.lines().find(|line| line.contains(" weight")).unwrap();
    assert!(line.contains("zstd shuffle 4 20.0 kB -> "), "{output}");
    assert!(line.ends_with(&format!("(x {ratio:.2})")), "{output}");
    // Tied leaves share one storage.
    let line = output.lines().find(|line| line.contains(" tied ")).unwrap();
    assert!(line.ends_with("tied to weight"), "{output}");
    assert!(output.contains("compressed 45.0 kB -> "), "{output}");
    assert!(output.contains(", digests, "), "{output}");
}

/// Parses a dump, and asserts that it prints every byte of the file.
fn assert_dump_is_complete(name: &str, dump: &str, file: &[u8]) {
    let mut position = 0;
    for line in dump.lines() {
        let Some((offset, rest)) = line.split_once(": ") else { continue };
        let Ok(offset) = offset.trim().parse::<usize>() else { continue };
        assert_eq!(offset, position, "{name}: {line}");
        let bytes = rest.split("  ").next().unwrap();
        let tokens = match bytes.split_once(" * ") {
            Some(("..", count)) => {
                position += count.parse::<usize>().unwrap();
                continue;
            }
            Some((byte, count)) => vec![byte; count.parse().unwrap()],
            None => bytes.split(' ').collect(),
        };
        for byte in tokens {
            assert_eq!(u8::from_str_radix(byte, 16), Ok(file[position]), "{name}: {line}");
            position += 1;
        }
    }
    assert_eq!(position, file.len(), "{name}");
}

#[test]
fn inspect_hex_prints_every_byte() {
    let sandbox = Sandbox::new();
    let vectors = tssd_tests::vectors::generated_folder().parent().unwrap();
    let archives = |folder: &str| {
        let entries = std::fs::read_dir(vectors.join(folder)).unwrap();
        let paths = entries.map(|entry| entry.unwrap().path());
        paths.filter(|path| path.extension().is_some_and(|extension| extension == "tssd"))
    };
    let mut files: Vec<_> = archives("valid").collect();
    // Invalid vectors whose padding is not zero: the dump shows the actual bytes.
    let has_bad_padding =
        |path: &PathBuf| path.file_name().unwrap().to_str().unwrap().starts_with("092");
    files.extend(archives("invalid").chain(archives("generated")).filter(has_bad_padding));
    let options = Options::new().compress(Compression::ShuffledZstd).digests();
    sandbox.write("packed.tssd", &encoded(&model(), &options.attr("n", AttrValue::Int(-1))));
    files.push(sandbox.path("packed.tssd"));
    let set = put_two_writers(&sandbox, Compression::Zstd);
    files.push(sandbox.path(&format!("{set}/manifest.tssd")));
    for file in files {
        let name = file.display().to_string();
        let dump = sandbox.run_with_code(0, &format!("inspect --hex {name}"));
        assert_dump_is_complete(&name, &dump, &std::fs::read(&file).unwrap());
    }
    let dump = sandbox.run_with_code(0, "inspect --hex packed.tssd");
    for text in [
        "storage 0, chunk 0: zstd frame, ",
        "width: 4, bytes of an element, for the codecs",
        "codec: 1, zstd",
        "chunks: first record is chunk 3",
        "key: heap offset 0, length 6",
        "0: \"weight\"",
        "value: -1",
        "a: storage 3",
        "digests[3]: of storage 3",
    ] {
        assert!(dump.contains(text), "{text}\n{dump}");
    }
    // A directory with a manifest stands for the manifest.
    let manifest = sandbox.run_with_code(0, &format!("inspect --hex {set}"));
    assert!(manifest.contains("digest: content digest of the file"), "{manifest}");
    sandbox.run_with_code(2, "inspect --hex --json packed.tssd");
    sandbox.write("text.tssd", b"text");
    sandbox.run_with_code(1, "inspect --hex text.tssd");
}

/// The worked example of `spec/format.md` equals the output of the command.
#[test]
fn spec_worked_example_matches_hex_dump() {
    let spec = Path::new(env!("CARGO_MANIFEST_DIR")).join("../spec");
    let text = std::fs::read_to_string(spec.join("format.md")).unwrap();
    let (_, section) = text.split_once("\n## 10. ").unwrap();
    let example = section.split("```text\n").nth(1).unwrap().split("```").next().unwrap();
    let vector = spec.join("vectors/valid/003-one-tensor.tssd");
    let dump = Sandbox::new().run_with_code(0, &format!("inspect --hex {}", vector.display()));
    assert_eq!(dump, example);
}

/// Compares 1.0 with the next larger value, for each float dtype.
#[test]
fn diff_reports_absolute_and_ulp_difference_of_floats() {
    let sandbox = Sandbox::new();
    let cases: [(Dtype, u64, f64); 9] = [
        (Dtype::Float64, 0x3FF0_0000_0000_0000, f64::EPSILON),
        (Dtype::Float32, 0x3F80_0000, f64::from(f32::EPSILON)),
        (Dtype::Float16, 0x3C00, 2_f64.powi(-10)),
        (Dtype::Bfloat16, 0x3F80, 2_f64.powi(-7)),
        (Dtype::Float8E5m2, 0x3C, 0.25),
        (Dtype::Float8E4m3fn, 0x38, 0.125),
        (Dtype::Float8E5m2fnuz, 0x40, 0.25),
        (Dtype::Float8E4m3fnuz, 0x40, 0.125),
        (Dtype::Float8E8m0fnu, 127, 1.0),
    ];
    for name in ["a.tssd", "b.tssd"] {
        let mut dict = StateDict::new();
        for (dtype, bits, _) in cases {
            let size = dtype.itemsize() as usize;
            let other = if name == "a.tssd" { bits } else { bits + 1 };
            let bytes = [&bits.to_le_bytes()[..size], &other.to_le_bytes()[..size]].concat();
            let meta = TensorMeta::new(dtype, &[2]).unwrap();
            dict.insert(dtype.name(), Tensor::new(meta, Storage::from(bytes), 0).unwrap());
        }
        sandbox.write_dict(name, &dict);
    }
    let json = parse_json(&sandbox.run_with_code(1, "diff --json a.tssd b.tssd"));
    for (difference, (dtype, _, distance)) in
        json["differences"].as_array().unwrap().iter().zip(cases)
    {
        assert_eq!(difference["leaf"], dtype.name());
        assert_eq!(difference["elements"], 1);
        assert_eq!(difference["max_abs_difference"], distance, "{dtype}");
        assert_eq!(difference["max_ulp_difference"], 1, "{dtype}");
    }
    let output = sandbox.run_with_code(1, "diff a.tssd b.tssd");
    let line = "1 of 2 elements differ, max |a - b| 0.0078, max 1 ulp\n";
    assert!(output.contains(line), "{output}");
    assert_eq!(output.lines().count(), cases.len() + 1);
}

#[test]
fn diff_ignores_codec_alignment_and_digest() {
    let sandbox = Sandbox::new();
    sandbox.write_dict("a.tssd", &model());
    sandbox.run_with_code(0, "convert a.tssd -o b.tssd --codec zstd --digest --align 64");
    let output = sandbox.run_with_code(0, "diff a.tssd b.tssd");
    assert!(output.starts_with("equal in meaning: 5 leaves"), "{output}");
    let stored = "stored otherwise: codec of 5 leaves, alignment of 5 leaves, digest of 5 leaves\n";
    assert!(output.ends_with(stored), "{output}");
    let json = parse_json(&sandbox.run_with_code(0, "diff --json a.tssd b.tssd"));
    assert_eq!(json["equal"], true);
    assert_eq!(json["stored"]["codec"], 5);
    sandbox.run_with_code(0, "convert b.tssd -o c.tssd --codec zstd --zstd-level 4");
    let output = sandbox.run_with_code(0, "diff b.tssd c.tssd");
    assert!(output.ends_with("stored otherwise: zstd level 1 -> 4\n"), "{output}");
}

#[test]
fn diff_compares_ties() {
    let sandbox = Sandbox::new();
    sandbox.write_dict("tied.tssd", &model());
    let mut dict = model();
    dict.insert("tied", floats(5000));
    sandbox.write_dict("loose.tssd", &dict);
    let output = sandbox.run_with_code(1, "diff tied.tssd loose.tssd");
    assert!(
        output.starts_with("ties       tied  tied to weight -> bytes of its own\n"),
        "{output}"
    );
    sandbox.run_with_code(0, "diff --values tied.tssd loose.tssd");
}

#[test]
fn put_compresses_and_writes_digests() {
    let sandbox = Sandbox::new();
    sandbox.write_dict("in.tssd", &model());
    sandbox.run_with_code(0, "put --store store key in.tssd --codec zstd --digest");
    let version = first_version_path(&sandbox);
    let files = list_files(&sandbox, &version);
    let archive = open(&sandbox, &files[0]);
    assert!(archive.content_digest().is_some());
    assert!(storage_options(&archive).iter().all(|(_, shuffle, ..)| shuffle.is_some()));
    sandbox.run_with_code(0, "verify --deep store");
    // `get` returns the original contents and attributes.
    sandbox.run_with_code(0, "get --store store key -o out.tssd");
    sandbox.run_with_code(0, "diff in.tssd out.tssd");
    assert_eq!(open(&sandbox, "out.tssd").attrs(), open(&sandbox, "in.tssd").attrs());
    // `put` of a version directory puts its shard set.
    sandbox.run_with_code(0, &format!("put --store store copy {version}"));
    sandbox.run_with_code(0, "get --store store copy -o copy.tssd");
    sandbox.run_with_code(0, "diff in.tssd copy.tssd");
}

/// The command writes the same bytes as a layout planned through the library.
#[test]
fn convert_writes_same_bytes_as_library() {
    let sandbox = Sandbox::new();
    sandbox.write_dict("in.tssd", &model());
    sandbox.run_with_code(0, "convert in.tssd -o out.tssd --codec zstd --zstd-level 2 --digest");
    let options = Options::new().compress(Compression::ShuffledZstd).zstd_level(2).digests();
    let mut bytes = Vec::new();
    Layout::plan(&model(), &options).unwrap().write_to(&mut bytes).unwrap();
    assert_eq!(sandbox.read("out.tssd"), bytes);
}
