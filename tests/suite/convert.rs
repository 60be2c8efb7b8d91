//! `convert`, `roundtrip`, `verify --deep`, `inspect --digest` and `--hex`, and what `diff` and `put`
//! know of compression and digests.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use serde_json::{Value as Json, json};
use tssd_format::{
    Archive, AttrValue, Chunks, Compression, Dict, Dtype, Layout, Options, Shard, ShardPlace,
    StateDict, Storage, Tensor, TensorMeta, TensorSlice, TorchStoreStateDict, Value,
};
use tssd_store::blocking::Store;
use tssd_store::{JobId, Key, PutOptions};
use tssd_tests::generate;

use super::cli::Place;
use super::roundtrip::ties;

fn encoded(dict: &StateDict, options: &Options) -> Vec<u8> {
    TorchStoreStateDict::with_options(dict, options).unwrap().as_bytes().to_vec()
}

fn open(place: &Place, name: &str) -> Archive {
    Archive::open(place.path(name)).unwrap()
}

fn json_of(said: &str) -> Json {
    serde_json::from_str(said).unwrap_or_else(|error| panic!("{error}: {said}"))
}

fn floats(len: u16) -> Tensor {
    let elements: Vec<f32> = (0..len).map(|at| f32::from(at % 251) * 0.5).collect();
    Tensor::from_slice(&elements, &[len.into()]).unwrap()
}

/// Weights, a bias that ties to them, and optimizer state.
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

/// How each leaf is stored: shuffle if it is compressed, alignment, whether it has a digest.
fn stored(archive: &Archive) -> Vec<(String, Option<u8>, u8, bool)> {
    let leaves = archive.leaves().into_iter().map(|(path, node)| {
        let storage = archive.storage(node.storages().next().unwrap());
        let shuffle = storage.packing.map(|packing| packing.shuffle);
        (path.fqn(), shuffle, storage.align_log2, storage.digest.is_some())
    });
    leaves.collect()
}

/// Command lines, the options that they ask for, and those that a file may have before.
fn ask() -> impl Strategy<Value = String> {
    let zstd = prop_oneof![
        Just(""),
        Just("--raw"),
        Just("--zstd"),
        Just("--zstd=7 --no-shuffle"),
        Just("--zstd=-3"),
        Just("--zstd-only *a*"),
    ];
    let digest = prop_oneof![Just(""), Just("--digest"), Just("--no-digest")];
    let align = prop_oneof![Just(""), Just("--align 64"), Just("--align 8KiB")];
    let chunks = prop_oneof![Just(""), Just("--chunks fine"), Just("--chunks 8KiB")];
    (zstd, digest, align, chunks)
        .prop_map(|(zstd, digest, align, chunks)| format!("{zstd} {digest} {align} {chunks}"))
}

fn before() -> impl Strategy<Value = Options> {
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
                options = options.chunks(Chunks::Fine);
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
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn converting_keeps_what_is_meant(
        dict in generate::state_dict(),
        before in before(),
        ask in ask(),
    ) {
        let place = Place::quick();
        let mut dict = dict;
        // So that every pattern names something, and something is worth compressing.
        dict.insert("a", floats(3000));
        place.write("in.tssd", &encoded(&dict, &before));
        place.expect(0, &format!("convert in.tssd -o out.tssd {ask}"));
        let archive = open(&place, "out.tssd");
        archive.verify_deep().unwrap();
        let back = archive.to_state_dict().unwrap();
        prop_assert_eq!(&back, &dict);
        prop_assert_eq!(ties(&back), ties(&dict));
        prop_assert_eq!(archive.attrs().remove("user"), Some(AttrValue::Int(-7)));
        place.expect(0, "verify --deep out.tssd");
        place.expect(0, "diff in.tssd out.tssd");
        let said = place.expect(0, "roundtrip in.tssd out.tssd");
        prop_assert!(said.ends_with("2 identical, 0 equal, 0 lossy\n"), "{}", said);
        // Nothing asked for is nothing changed.
        place.expect(0, "convert out.tssd -o again.tssd");
        prop_assert_eq!(place.read("again.tssd"), place.read("out.tssd"));
    }
}

#[test]
fn raw_storages_are_cut_as_is_asked_for() {
    let place = Place::new();
    let mut dict = model();
    dict.insert("large", Tensor::from_slice(&vec![0.5_f32; 1 << 20], &[1 << 20]).unwrap());
    place.write(
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
        let archive = open(&place, name);
        archive.verify_deep().unwrap();
        let storages = (0..archive.storage_count()).map(|number| archive.storage(number));
        let raw = storages.filter(|storage| storage.packing.is_none());
        raw.map(|storage| storage.chunk_size.bytes()).collect()
    };
    assert!(sizes("in.tssd").iter().all(|bytes| *bytes == 1 << 20));
    place.expect(0, "convert in.tssd -o fine.tssd --chunks fine");
    let fine = sizes("fine.tssd");
    assert!(fine.contains(&(8 << 10)) && fine.contains(&(4 << 10)), "{fine:?}");
    place.expect(0, "convert fine.tssd -o same.tssd");
    assert_eq!(place.read("same.tssd"), place.read("fine.tssd"));
    // The one that is compressed has its own.
    let said = place.expect(0, "diff in.tssd fine.tssd");
    assert!(said.ends_with("stored otherwise: chunk size of 5 leaves\n"), "{said}");
    assert_eq!(
        json_of(&place.expect(0, "diff --json in.tssd fine.tssd"))["stored"]["chunk_size"],
        5
    );
    place.expect(0, "convert fine.tssd -o middle.tssd --chunks 64KiB");
    assert!(sizes("middle.tssd").iter().all(|bytes| *bytes == 64 << 10));
    place.expect(0, "convert middle.tssd -o again.tssd");
    assert_eq!(place.read("again.tssd"), place.read("middle.tssd"));
    place.expect(0, "convert middle.tssd -o large.tssd --chunks 1MiB");
    assert_eq!(place.read("large.tssd"), place.read("in.tssd"));
    for wrong in ["2KiB", "2MiB", "5000", "coarse"] {
        let said = place.expect(2, &format!("convert in.tssd -o out.tssd --chunks {wrong}"));
        let what = format!("`{wrong}` is neither `fine` nor a power of two from 4KiB to 1MiB");
        assert!(said.contains("for '--chunks <BYTES>'") && said.contains(&what), "{said}");
    }
}

#[test]
fn what_is_asked_for_is_done_and_the_rest_stays() {
    let place = Place::new();
    place.write("in.tssd", &encoded(&model(), &Options::new().align(512).unwrap()));
    let rows = |name: &str| -> Vec<(Option<u8>, u8, bool)> {
        let rows = stored(&open(&place, name)).into_iter();
        rows.map(|(_, shuffle, align, digest)| (shuffle, align, digest)).collect()
    };
    let (raw, four, none) = (None, Some(4), Some(0));
    for (from, asked, shuffles, align, digests) in [
        ("in", "", [raw, raw, raw, raw, raw], 9, false),
        ("in", "--zstd", [four, four, four, four, none], 9, false),
        ("out", "--digest", [four, four, four, four, none], 9, true),
        ("out", "--no-shuffle", [none, none, none, none, none], 9, true),
        ("out", "--shuffle --align 64", [four, four, four, four, none], 6, true),
        ("out", "--zstd-only optimizer", [raw, raw, four, four, raw], 6, true),
        ("out", "--raw --no-digest", [raw, raw, raw, raw, raw], 6, false),
        (
            "out",
            "--zstd-only optimizer.*_sq --zstd-only note",
            [raw, raw, raw, four, none],
            6,
            false,
        ),
        // Tied leaves share the choice of the first.
        ("in", "--zstd-only tied", [raw, raw, raw, raw, raw], 9, false),
    ] {
        place.expect(0, &format!("convert {from}.tssd -o out.tssd {asked}"));
        let expected: Vec<_> =
            shuffles.into_iter().map(|shuffle| (shuffle, align, digests)).collect();
        assert_eq!(rows("out.tssd"), expected, "{asked}");
        assert_eq!(open(&place, "out.tssd").to_state_dict().unwrap(), model());
    }
    place.expect(0, "convert in.tssd -o level.tssd --zstd=5");
    let level = open(&place, "level.tssd").attrs().remove("tssd.zstd_level");
    assert_eq!(level, Some(AttrValue::Int(5)));
    place.expect(0, "convert level.tssd -o out.tssd --raw");
    assert_eq!(place.read("out.tssd"), place.read("in.tssd"));
    assert_eq!(place.names(), ["in.tssd", "level.tssd", "out.tssd"]);
}

#[test]
fn sizes_before_and_after_are_told() {
    let place = Place::new();
    place.write_dict("in.tssd", &model());
    let said = place.expect(0, "convert in.tssd -o out.tssd --zstd");
    assert!(said.starts_with("out.tssd: 5 leaves, 45.0 kB raw, file 5"), "{said}");
    let json = json_of(&place.expect(0, "convert in.tssd -o out.tssd --zstd --json"));
    let len = |name: &str| place.read(name).len();
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
fn what_makes_no_sense_is_refused() {
    let place = Place::new();
    place.write_dict("in.tssd", &model());
    let mut flat = StateDict::new();
    flat.insert("w", floats(10));
    place.write_dict("flat.tssd", &flat);
    place.expect(0, "unpack flat.tssd -o flat.safetensors");
    place.write("out.tssd", b"old");
    std::fs::create_dir(place.path("empty")).unwrap();
    for (code, args, says) in [
        (2, "in.tssd", "--output"),
        (2, "in.tssd -o out.tssd --raw --zstd", "cannot be used with"),
        (2, "in.tssd -o out.tssd --shuffle --no-shuffle", "cannot be used with"),
        (2, "in.tssd -o out.tssd --digest --no-digest", "cannot be used with"),
        (2, "in.tssd -o out.tssd --zstd=40", "40 is not in"),
        (2, "in.tssd -o out.tssd --align 100", "100 is no power of two from 64 to 2097152"),
        (2, "in.tssd -o out.tssd --align 4MiB", "4194304 is no power of two"),
        (2, "in.tssd -o out.tssd --shuffle", "add --zstd"),
        (3, "in.tssd -o out.tssd --zstd-only weights", "`weights` matches no leaf"),
        (3, "missing.tssd -o out.tssd", "check the path"),
        (5, "flat.safetensors -o out.tssd", "`tssd pack` makes an archive of it"),
        (5, "empty -o out.tssd", "empty is a directory"),
    ] {
        let said = place.expect(code, &format!("convert {args}"));
        assert!(said.contains(says), "convert {args}: {said}");
        assert_eq!(place.read("out.tssd"), b"old");
    }
}

/// New checksums would make damage look whole.
#[test]
fn damage_is_not_converted() {
    let place = Place::new();
    place.write("in.tssd", &encoded(&model(), &Options::new()));
    place.expect(0, "convert in.tssd -o packed.tssd --zstd");
    for name in ["in.tssd", "packed.tssd"] {
        let mut bytes = place.read(name);
        bytes[4100] ^= 1;
        place.write(name, &bytes);
        let said = place.expect(1, &format!("convert {name} -o out.tssd"));
        assert!(said.contains("F-090 ChunkCorrupt"), "{said}");
        assert!(!place.path("out.tssd").exists());
        let said = place.expect(1, &format!("roundtrip {name}"));
        assert!(said.starts_with(&format!("lossy      {name}\n           F-090  ")), "{said}");
    }
}

/// A matrix whose rows two writers have, and what both have; in a store in `store`.
fn put_two_writers(place: &Place, compression: Compression) -> String {
    let store = Store::directory(place.path("store")).unwrap();
    for writer in 0..2_u8 {
        let slice = TensorSlice::new(&[u64::from(writer) * 300, 0], &[300, 4], &[600, 4]).unwrap();
        let rows = Tensor::from_slice(&[f32::from(writer); 1200], &[300, 4]).unwrap();
        let mut dict = model();
        dict.insert("rows", Shard::new(rows, ShardPlace::new(slice)).unwrap());
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
    version_of(place)
}

/// The first version of the key `key` of the store in `store`.
fn version_of(place: &Place) -> String {
    let version = tssd_tests::layout::version(&place.path("store/key"), "0-1");
    format!("store/key/{}", version.file_name().unwrap().to_str().unwrap())
}

fn files_of(place: &Place, directory: &str) -> Vec<String> {
    let entries = std::fs::read_dir(place.path(directory)).unwrap();
    let mut names: Vec<String> = entries
        .map(|entry| format!("{directory}/{}", entry.unwrap().file_name().to_str().unwrap()))
        .collect();
    names.sort();
    names
}

#[test]
fn a_shard_set_is_one_archive() {
    for compression in [Compression::None, Compression::ShuffledZstd] {
        let place = Place::new();
        let set = put_two_writers(&place, compression);
        let said = place.expect(0, &format!("verify --deep {set}"));
        assert_eq!(said.lines().filter(|line| line.starts_with("ok ")).count(), 3, "{said}");
        assert!(said.contains("manifest of 2 files"), "{said}");
        let said = place.expect(0, &format!("roundtrip {set}"));
        assert!(said.ends_with("3 identical, 0 equal, 0 lossy\n"), "{said}");

        place.expect(0, &format!("convert {set} -o joined.tssd"));
        let (joined, whole) =
            (open(&place, "joined.tssd"), tssd_format::open_shard_set(place.path(&set)).unwrap());
        assert_eq!(joined.to_state_dict().unwrap(), whole.to_state_dict().unwrap());
        let attrs: Vec<String> = joined.attrs().into_keys().collect();
        let level = (compression != Compression::None).then_some("tssd.zstd_level");
        assert_eq!(attrs, ["format"].into_iter().chain(level).collect::<Vec<_>>());
        let Value::Shards(rows) = joined.leaf("rows").unwrap() else { panic!() };
        assert_eq!(rows.len(), 2);
        let said = place.expect(0, &format!("diff {set} joined.tssd"));
        assert!(said.starts_with("equal: 6 leaves"), "{said}");
        let shown = place.expect(0, &format!("inspect {set}"));
        assert!(shown.contains("rows           2 shards"), "{shown}");
        assert!(shown.contains("manifest of 2 files"), "{shown}");
        // The storages have the same digests, the sets do not.
        let digests = |path: &str| -> Vec<String> {
            let said = place.expect(0, &format!("inspect --digest {path}"));
            said.lines().map(ToOwned::to_owned).collect()
        };
        let (set, joined) = (digests(&set), digests("joined.tssd"));
        assert_eq!(set[1..], joined[1..]);
        assert_ne!(set[0], joined[0]);
        assert!(set.iter().any(|line| line.ends_with("  rows#1")), "{set:?}");
    }
}

/// F-083.
#[test]
fn a_shard_set_with_another_file_is_damaged() {
    let place = Place::new();
    let set = put_two_writers(&place, Compression::None);
    let files = files_of(&place, &set);
    let (archive, manifest) = (&files[0], &files[2]);
    let own = place.read(archive);
    let says = |what: &str| {
        for path in [&set, manifest] {
            let said = place.expect(1, &format!("verify {path}"));
            assert!(said.contains(&format!("DAMAGED  {manifest}\n         F-083  ")), "{said}");
            assert!(said.contains(what), "{said}");
            let json = json_of(&place.expect(1, &format!("verify --json {path}")));
            let last = json.as_array().unwrap().last().unwrap();
            assert_eq!(last["damage"][0]["rule"], "F-083");
        }
        let said = place.expect(1, &format!("roundtrip {manifest}"));
        assert!(said.starts_with(&format!("lossy      {manifest}\n           F-083  ")), "{said}");
        let said = place.expect(1, &format!("inspect {set}"));
        assert!(said.contains("F-083 ShardMismatch"), "{said}");
    };
    std::fs::remove_file(place.path(archive)).unwrap();
    says("No such file");
    place.write_dict(archive, &model());
    says("file is not the one that its manifest names");
    place.write(archive, &own);
    place.expect(0, &format!("verify {set}"));
    #[cfg(unix)]
    {
        place.write("elsewhere.tssd", &own);
        std::fs::remove_file(place.path(archive)).unwrap();
        std::os::unix::fs::symlink(place.path("elsewhere.tssd"), place.path(archive)).unwrap();
        let said = place.expect(1, &format!("verify {set}"));
        assert!(said.contains("F-083"), "{said}");
    }
}

#[test]
fn what_writers_disagree_on_is_not_joined() {
    let place = Place::new();
    let store = Store::directory(place.path("store")).unwrap();
    for writer in 0..2_u32 {
        let dict = Dict::from_iter([("seed", i64::from(writer))]);
        let options = PutOptions {
            writer: Some(writer),
            writers: Some((0..2).collect()),
            job: Some(JobId("run-1".into())),
            divergent: tssd_store::Divergent::Keep,
            ..PutOptions::default()
        };
        let dict = StateDict::from_value(Value::Dict(dict)).unwrap();
        store.put_state_dict(&Key::new("key").unwrap(), &dict, &options).unwrap();
    }
    let said = place.expect(5, &format!("convert {} -o out.tssd", version_of(&place)));
    assert!(said.contains(r#"the writers hold each their own value of ["seed"]"#), "{said}");
    assert!(said.contains("tssd get --writer"), "{said}");
    let said = place.expect(0, "roundtrip store");
    assert!(said.contains("manifest.tssd  not joined, as its writers hold different values"));
}

/// Where a field of a record is in a file, as `inspect --hex` says.
fn place_of(place: &Place, name: &str, record: &str, field: &str) -> usize {
    let dump = place.expect(0, &format!("inspect --hex {name}"));
    let (_, behind) = dump.split_once(&format!("\n{record}\n")).expect(record);
    let line = behind.lines().find(|line| line.split("  ").last().unwrap().starts_with(field));
    line.expect(field).split(':').next().unwrap().trim().parse().unwrap()
}

/// Gives the index of a changed file its checksums again.
fn seal(bytes: &mut [u8]) {
    let word = |bytes: &[u8], at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
    let trailer = bytes.len() - 64;
    let start = word(bytes, trailer) as usize;
    let crc = crc32fast::hash(&bytes[start..trailer]);
    bytes[trailer + 24..trailer + 28].copy_from_slice(&crc.to_le_bytes());
    let ends = [&bytes[trailer..trailer + 52], &bytes[trailer + 56..]].concat();
    let crc = crc32fast::hash(&ends);
    bytes[trailer + 52..trailer + 56].copy_from_slice(&crc.to_le_bytes());
}

/// Another writer's file, whose two storages lie in another order.
#[test]
fn another_layout_is_equal() {
    let place = Place::new();
    let mut dict = StateDict::new();
    dict.insert("a", Tensor::from_slice(&[1.0_f32; 100], &[100]).unwrap());
    dict.insert("b", Tensor::from_slice(&[2.0_f32; 100], &[100]).unwrap());
    place.write_dict("own.tssd", &dict);
    let mut bytes = place.read("own.tssd");
    let mut swap = |one: usize, other: usize, len: usize| {
        let (low, high) = bytes.split_at_mut(other);
        low[one..one + len].swap_with_slice(&mut high[..len]);
    };
    let archive = open(&place, "own.tssd");
    swap(archive.storage(0).offset as usize, archive.storage(1).offset as usize, 400);
    let field = |record: &str, field: &str| place_of(&place, "own.tssd", record, field);
    swap(field("tensors[0]", "storage"), field("tensors[1]", "storage"), 4);
    swap(field("storages[0]", "crc32"), field("storages[1]", "crc32"), 4);
    swap(field("crcs", "crcs[0]"), field("crcs", "crcs[1]"), 4);
    seal(&mut bytes);
    place.write("other.tssd", &bytes);
    place.expect(0, "verify --deep other.tssd");
    let said = place.expect(0, "roundtrip own.tssd other.tssd");
    let lines: Vec<&str> = said.lines().collect();
    assert_eq!(lines[0], "identical  own.tssd");
    // The first two bytes of 1 and 2 are alike.
    let expected = format!("other bytes from byte {} on", archive.storage(0).offset + 2);
    assert_eq!(lines[1], format!("equal      other.tssd  {expected}"));
    assert_eq!(lines[2], "1 identical, 1 equal, 0 lossy");
    let json = json_of(&place.expect(0, "roundtrip --json other.tssd"));
    assert_eq!(json, json!([{ "path": "other.tssd", "result": "equal", "reasons": [expected] }]));
    // Whoever converts it gets the usual order.
    place.expect(0, "convert other.tssd -o again.tssd");
    assert_eq!(place.read("again.tssd"), place.read("own.tssd"));
}

/// Another version of zstd makes other frames; another level does so too.
#[test]
fn other_frames_are_equal() {
    let place = Place::new();
    let options = Options::new().compress(Compression::Zstd).zstd_level(19);
    place.write("in.tssd", &encoded(&model(), &options));
    place.expect(0, "roundtrip in.tssd");
    let mut bytes = place.read("in.tssd");
    let at = place_of(&place, "in.tssd", "attrs[0]", "value: 19");
    bytes[at] = 1;
    seal(&mut bytes);
    place.write("in.tssd", &bytes);
    let said = place.expect(0, "roundtrip in.tssd");
    assert!(said.starts_with("equal      in.tssd  other bytes from byte 4"), "{said}");
}

#[test]
fn a_round_trip_of_many_files_ends_with_a_summary() {
    let place = Place::new();
    place.write_dict("a.tssd", &model());
    place.write("b.tssd", b"no archive at all");
    let said = place.expect(1, "roundtrip .");
    let expected = "identical  ./a.tssd\nlossy      ./b.tssd\n           F-002  file does not begin \
                    with the TSSD magic\n1 identical, 0 equal, 1 lossy\n";
    assert_eq!(said, expected);
    assert_eq!(place.expect(0, "roundtrip -q a.tssd"), "");
    place.expect(3, "roundtrip missing.tssd");
    place.expect(2, "roundtrip");
}

#[test]
fn safetensors_files_make_the_round_trip() {
    let place = Place::new();
    let mut flat = StateDict::new();
    flat.insert("w", floats(1000));
    place.write_dict("flat.tssd", &flat);
    place.expect(0, "unpack flat.tssd -o flat.safetensors");
    let said = place.expect(0, "roundtrip flat.safetensors flat.tssd");
    assert!(said.starts_with("identical  flat.safetensors\nidentical  flat.tssd\n"), "{said}");
    // A version in a store is unpacked as one archive.
    place.expect(0, "put --store store key flat.tssd");
    place.expect(0, &format!("unpack {} -o again.safetensors", version_of(&place)));
    assert_eq!(place.read("again.safetensors"), place.read("flat.safetensors"));
    std::fs::remove_file(place.path("again.safetensors")).unwrap();
    std::fs::remove_dir_all(place.path("store")).unwrap();
    // What is no safetensors file is not kept, and the others are looked at.
    let whole = place.read("flat.safetensors");
    place.write("cut.safetensors", &whole[..whole.len() - 1]);
    let said = place.expect(1, "roundtrip cut.safetensors flat.safetensors");
    assert!(said.starts_with("lossy      cut.safetensors\n           safetensors  "), "{said}");
    assert!(said.ends_with("1 identical, 0 equal, 1 lossy\n"), "{said}");
    assert_eq!(place.names(), ["cut.safetensors", "flat.safetensors", "flat.tssd"]);
}

/// All good vectors; so the reader and the writer lose nothing that the format has.
#[test]
fn good_vectors_make_the_round_trip() {
    let place = Place::new();
    let valid = Path::new(env!("CARGO_MANIFEST_DIR")).join("../spec/vectors/valid");
    let json = json_of(&place.expect(0, &format!("roundtrip --json {}", valid.display())));
    assert!(json.as_array().unwrap().len() >= 24);
    for file in json.as_array().unwrap() {
        assert_ne!(file["result"], "lossy", "{file}");
    }
}

#[test]
fn only_a_deep_look_finds_what_decodes_to_other_bytes() {
    let place = Place::new();
    let options = Options::new().compress(Compression::ShuffledZstd).digests();
    place.write("in.tssd", &encoded(&model(), &options));
    place.expect(0, "verify --deep in.tssd");
    for (record, field, rule) in
        [("storages[0]", "crc32", "F-091"), ("digests", "digests[1]", "F-094")]
    {
        let mut bytes = place.read("in.tssd");
        bytes[place_of(&place, "in.tssd", record, field)] ^= 1;
        seal(&mut bytes);
        place.write("bad.tssd", &bytes);
        place.expect(0, "verify bad.tssd");
        let json = json_of(&place.expect(1, "verify --deep --json bad.tssd"));
        assert_eq!(json[0]["damage"][0]["rule"], rule, "{json}");
        place.expect(1, "convert bad.tssd -o out.tssd");
        place.expect(1, "roundtrip bad.tssd");
    }
}

#[test]
fn odd_bools_are_a_warning() {
    let place = Place::new();
    let bools = |bytes: &[u8], shape: &[u64], strides: &[u64]| {
        let meta = TensorMeta::new(Dtype::Bool, shape).unwrap().with_strides(strides).unwrap();
        Tensor::new(meta, Storage::from(bytes.to_vec()), 0).unwrap()
    };
    let mut dict = StateDict::new();
    dict.insert("good", bools(&[0, 1, 1], &[3], &[1]));
    dict.insert("odd", bools(&[0, 1, 2, 255], &[4], &[1]));
    // Between its elements there may be anything; one that is there often is one.
    dict.insert("strided", bools(&[1, 7, 0, 7, 1], &[1 << 40, 3], &[0, 2]));
    dict.insert("repeated", bools(&[3], &[1 << 40], &[0]));
    // More elements than anyone could look at, in few bytes.
    dict.insert("overlapping", bools(&[5; 3 << 10], &[1 << 10; 3], &[1, 1, 1]));
    dict.insert("overlaps", bools(&vec![1; 5 << 20], &[1 << 20; 3], &[1, 1, 1]));
    place.write_dict("in.tssd", &dict);
    assert!(!place.expect(0, "verify in.tssd").contains("warning"));
    let said = place.expect(0, "verify --deep in.tssd");
    let warnings: Vec<&str> = said.lines().skip(1).collect();
    assert_eq!(
        warnings,
        [
            "         warning  `odd` has 2 bools other than 0 and 1",
            "         warning  `repeated` has 1 bool other than 0 and 1",
            "         warning  `overlapping` has 3070 bools other than 0 and 1",
        ]
    );
    assert_eq!(place.expect(0, "verify --deep -q in.tssd"), said);
    assert!(place.expect(0, "diff in.tssd in.tssd").starts_with("equal: 6 leaves"));
    let json = json_of(&place.expect(0, "verify --deep --json in.tssd"));
    assert_eq!((&json[0]["ok"], json[0]["warnings"].as_array().unwrap().len()), (&json!(true), 3));
}

#[test]
fn digests_are_lines_that_can_be_compared() {
    let place = Place::new();
    let mut dict = model();
    dict.insert("two\nlines", floats(10));
    place.write("in.tssd", &encoded(&dict, &Options::new().digests()));
    let hex = |digest: [u8; 32]| {
        digest.iter().fold(String::new(), |mut text, byte| {
            write!(text, "{byte:02x}").unwrap();
            text
        })
    };
    let archive = open(&place, "in.tssd");
    let digest = |number| hex(archive.storage(number).digest.unwrap());
    let said = place.expect(0, "inspect --digest in.tssd");
    let lines: Vec<&str> = said.lines().collect();
    let expected = [
        format!("blake3:{}  root", hex(archive.root_digest().unwrap())),
        format!("{}  weight", digest(0)),
        format!("{}  tied", digest(0)),
        format!("{}  optimizer.exp_avg", digest(1)),
        format!("{}  optimizer.exp_avg_sq", digest(2)),
        format!("{}  note", digest(3)),
        format!("\\{}  two\\nlines", digest(4)),
    ];
    assert_eq!(lines, expected);
    let json = json_of(&place.expect(0, "inspect --digest --json in.tssd"));
    assert_eq!(json["root"], hex(archive.root_digest().unwrap()));
    assert_eq!(json["leaves"][5], json!(["two\nlines", digest(4)]));

    place.expect(0, "convert in.tssd -o none.tssd --no-digest");
    let said = place.expect(5, "inspect --digest none.tssd");
    assert!(said.contains("none.tssd has no digests"), "{said}");
    assert!(said.contains("`tssd convert --digest`"), "{said}");
    // The same bytes have the same digests, however they are stored.
    place.expect(0, "convert none.tssd -o packed.tssd --digest --zstd --align 64");
    let packed = place.expect(0, "inspect --digest packed.tssd");
    assert_eq!(packed.lines().skip(1).collect::<Vec<_>>(), lines[1..]);
}

#[test]
fn compression_is_shown() {
    let place = Place::new();
    let options = Options::new().compress(Compression::ShuffledZstd).digests();
    place.write("in.tssd", &encoded(&model(), &options));
    let said = place.expect(0, "inspect in.tssd");
    let archive = open(&place, "in.tssd");
    let storage = archive.storage(0);
    let ratio = storage.len as f64 / storage.stored_len() as f64;
    let line = said.lines().find(|line| line.contains(" weight")).unwrap();
    assert!(line.contains("zstd shuffle 4 20.0 kB -> "), "{said}");
    assert!(line.ends_with(&format!("(x {ratio:.2})")), "{said}");
    // What is tied is stored once.
    let line = said.lines().find(|line| line.contains(" tied ")).unwrap();
    assert!(line.ends_with("tied to weight"), "{said}");
    assert!(said.contains("compressed 45.0 kB -> "), "{said}");
    assert!(said.contains(", digests, "), "{said}");
}

/// Reads a dump back: which bytes it shows, and that it leaves none out.
fn check_dump(name: &str, dump: &str, file: &[u8]) {
    let mut at = 0;
    for line in dump.lines() {
        let Some((offset, rest)) = line.split_once(": ") else { continue };
        let Ok(offset) = offset.trim().parse::<usize>() else { continue };
        assert_eq!(offset, at, "{name}: {line}");
        let bytes = rest.split("  ").next().unwrap();
        let shown = match bytes.split_once(" * ") {
            Some(("..", count)) => {
                at += count.parse::<usize>().unwrap();
                continue;
            }
            Some((byte, count)) => vec![byte; count.parse().unwrap()],
            None => bytes.split(' ').collect(),
        };
        for byte in shown {
            assert_eq!(u8::from_str_radix(byte, 16), Ok(file[at]), "{name}: {line}");
            at += 1;
        }
    }
    assert_eq!(at, file.len(), "{name}");
}

#[test]
fn a_dump_leaves_no_byte_out() {
    let place = Place::new();
    let vectors = tssd_tests::vectors::generated().parent().unwrap();
    let archives = |folder: &str| {
        let entries = std::fs::read_dir(vectors.join(folder)).unwrap();
        let paths = entries.map(|entry| entry.unwrap().path());
        paths.filter(|path| path.extension().is_some_and(|extension| extension == "tssd"))
    };
    let mut files: Vec<_> = archives("valid").collect();
    // What is padding by its place is shown as it is, too.
    let is_padded = |path: &PathBuf| path.file_name().unwrap().to_str().unwrap().starts_with("092");
    files.extend(archives("invalid").chain(archives("generated")).filter(is_padded));
    let options = Options::new().compress(Compression::ShuffledZstd).digests();
    place.write("packed.tssd", &encoded(&model(), &options.attr("n", AttrValue::Int(-1))));
    files.push(place.path("packed.tssd"));
    let set = put_two_writers(&place, Compression::Zstd);
    files.push(place.path(&format!("{set}/manifest.tssd")));
    for file in files {
        let name = file.display().to_string();
        let dump = place.expect(0, &format!("inspect --hex {name}"));
        check_dump(&name, &dump, &std::fs::read(&file).unwrap());
    }
    let dump = place.expect(0, "inspect --hex packed.tssd");
    for shown in [
        "storage 0, chunk 0: zstd frame, ",
        "shuffle: 4, elements of as many bytes",
        "codec: 1, zstd",
        "chunks: first record is chunk 3",
        "key: heap offset 0, length 6",
        "0: \"weight\"",
        "value: -1",
        "a: storage 3",
        "digests[3]: of storage 3",
    ] {
        assert!(dump.contains(shown), "{shown}\n{dump}");
    }
    // A directory with a manifest is its manifest.
    let manifest = place.expect(0, &format!("inspect --hex {set}"));
    assert!(manifest.contains("digest: root digest of the file"), "{manifest}");
    place.expect(2, "inspect --hex --json packed.tssd");
    place.write("text.tssd", b"text");
    place.expect(1, "inspect --hex text.tssd");
}

/// The worked example of the spec is what the command prints.
#[test]
fn the_worked_example_is_the_dump() {
    let spec = Path::new(env!("CARGO_MANIFEST_DIR")).join("../spec");
    let text = std::fs::read_to_string(spec.join("format.md")).unwrap();
    let (_, section) = text.split_once("\n## 10. ").unwrap();
    let shown = section.split("```text\n").nth(1).unwrap().split("```").next().unwrap();
    let vector = spec.join("vectors/valid/003-one-tensor.tssd");
    let dump = Place::new().expect(0, &format!("inspect --hex {}", vector.display()));
    assert_eq!(dump, shown);
}

/// The bits of 1 and of the next float, of each dtype.
#[test]
fn floats_are_compared_by_what_they_are_and_by_ulps() {
    let place = Place::new();
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
        place.write_dict(name, &dict);
    }
    let json = json_of(&place.expect(1, "diff --json a.tssd b.tssd"));
    for (found, (dtype, _, apart)) in json["differences"].as_array().unwrap().iter().zip(cases) {
        assert_eq!(found["leaf"], dtype.name());
        assert_eq!(found["elements"], 1);
        assert_eq!(found["max_abs_difference"], apart, "{dtype}");
        assert_eq!(found["max_ulp_difference"], 1, "{dtype}");
    }
    let said = place.expect(1, "diff a.tssd b.tssd");
    let line = "1 of 2 elements differ, max |a - b| 0.0078, max 1 ulp\n";
    assert!(said.contains(line), "{said}");
    assert_eq!(said.lines().count(), cases.len() + 1);
}

#[test]
fn another_storage_is_no_difference() {
    let place = Place::new();
    place.write_dict("a.tssd", &model());
    place.expect(0, "convert a.tssd -o b.tssd --zstd --digest --align 64");
    let said = place.expect(0, "diff a.tssd b.tssd");
    assert!(said.starts_with("equal in meaning: 5 leaves"), "{said}");
    let stored = "stored otherwise: codec of 5 leaves, alignment of 5 leaves, digest of 5 leaves\n";
    assert!(said.ends_with(stored), "{said}");
    let json = json_of(&place.expect(0, "diff --json a.tssd b.tssd"));
    assert_eq!(json["equal"], true);
    assert_eq!(json["stored"]["codec"], 5);
    place.expect(0, "convert b.tssd -o c.tssd --zstd=4");
    let said = place.expect(0, "diff b.tssd c.tssd");
    assert!(said.ends_with("stored otherwise: zstd level 1 -> 4\n"), "{said}");
}

#[test]
fn ties_are_compared() {
    let place = Place::new();
    place.write_dict("tied.tssd", &model());
    let mut dict = model();
    dict.insert("tied", floats(5000));
    place.write_dict("loose.tssd", &dict);
    let said = place.expect(1, "diff tied.tssd loose.tssd");
    assert!(said.starts_with("ties       tied  tied to weight -> bytes of its own\n"), "{said}");
    place.expect(0, "diff --values tied.tssd loose.tssd");
}

#[test]
fn a_put_compresses_and_digests() {
    let place = Place::new();
    place.write_dict("in.tssd", &model());
    place.expect(0, "put --store store key in.tssd --zstd --digest");
    let version = version_of(&place);
    let files = files_of(&place, &version);
    let archive = open(&place, &files[0]);
    assert!(archive.root_digest().is_some());
    assert!(stored(&archive).iter().all(|(_, shuffle, ..)| shuffle.is_some()));
    place.expect(0, "verify --deep store");
    // Who gets it gets it as it was.
    place.expect(0, "get --store store key -o out.tssd");
    place.expect(0, "diff in.tssd out.tssd");
    assert_eq!(open(&place, "out.tssd").attrs(), open(&place, "in.tssd").attrs());
    // A version is put again as the shard set that it is.
    place.expect(0, &format!("put --store store copy {version}"));
    place.expect(0, "get --store store copy -o copy.tssd");
    place.expect(0, "diff in.tssd copy.tssd");
}

/// A layout that is planned by hand is what the command writes.
#[test]
fn the_command_writes_what_the_library_writes() {
    let place = Place::new();
    place.write_dict("in.tssd", &model());
    place.expect(0, "convert in.tssd -o out.tssd --zstd=2 --digest");
    let options = Options::new().compress(Compression::ShuffledZstd).zstd_level(2).digests();
    let mut bytes = Vec::new();
    Layout::plan(&model(), &options).unwrap().write_to(&mut bytes).unwrap();
    assert_eq!(place.read("out.tssd"), bytes);
}
