//! The commands on files take every input that `pack` takes: safetensors files, stdin, and model directories.

use serde_json::{Value as Json, json};
use tssd_format::safetensors::{FILE_NAME, INDEX_NAME};
use tssd_format::{Dtype, StateDict, Tensor, Value};

use crate::cli::{Sandbox, safetensors_file};
use crate::model_directory::{assert_same, merge, read_files, write_files};
use crate::safetensors::{Files, pipe, small_directory};

/// Files without tensors: one that an archive has in its index, and one that it has in a storage.
fn other_files() -> Files {
    Files::from([
        ("config.json".to_owned(), b"{}".to_vec()),
        ("sub/vocab.bin".to_owned(), vec![7; 5000]),
    ])
}

/// An input that `pack` takes.
struct Input {
    path: &'static str,
    /// Further arguments of each command.
    args: &'static str,
    /// Content of stdin.
    stdin: Vec<u8>,
    /// The files of the model. A single file has the name `FILE_NAME`.
    files: Files,
    is_directory: bool,
}

/// Creates all inputs in a directory.
fn inputs(place: &Sandbox) -> Vec<Input> {
    let file = safetensors_file(Some(&[("format", "pt")]));
    let file_alone = Files::from([(FILE_NAME.to_owned(), file.clone())]);
    let one = merge(file_alone.clone(), other_files());
    let sharded = merge(small_directory(), other_files());
    place.write("file.safetensors", &file);
    write_files(place, "one", &one);
    write_files(place, "sharded", &sharded);
    let new = |path, files: &Files| Input {
        path,
        args: "",
        stdin: Vec::new(),
        files: files.clone(),
        is_directory: true,
    };
    let mut inputs = vec![
        Input { is_directory: false, ..new("file.safetensors", &file_alone) },
        Input { is_directory: false, stdin: file, ..new("-", &file_alone) },
        new("one", &one),
        new("sharded", &sharded),
        new("sharded/", &sharded),
    ];
    #[cfg(unix)]
    {
        write_files(place, "linked", &small_directory());
        write_files(place, "away", &other_files());
        std::fs::create_dir(place.path("linked/sub")).unwrap();
        for name in other_files().keys() {
            let link = place.path("linked").join(name);
            std::os::unix::fs::symlink(place.path("away").join(name), link).unwrap();
        }
        inputs.push(Input { args: "--follow-links", ..new("linked", &sharded) });
    }
    inputs
}

/// Runs a command with an input on stdin. Asserts the exit code, and returns stdout and stderr.
#[track_caller]
fn run(place: &Sandbox, code: i32, args: &str, stdin: &[u8]) -> String {
    let output = pipe(place, args, stdin);
    let text = [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap());
    let text = text.concat();
    assert_eq!(output.status.code(), Some(code), "tssd {args}\n{text}");
    text
}

/// Commands that succeed on an input, which is `IN`. `a.tssd` is packed from it, and `b.tssd` is another state dict.
///
/// Each has a text of its output.
const COMMANDS: &[(&str, &str)] = &[
    ("inspect IN", "  dict\n├─ "),
    ("inspect --json IN", "\"safetensors\": 1"),
    ("inspect --digest IN", "  content\n"),
    ("diff IN a.tssd", "equal: "),
    ("diff a.tssd IN", "equal: "),
    ("diff --values IN a.tssd", "equal: "),
    ("verify IN", "no checksums: changed bytes of tensors are not found"),
    ("verify --deep IN", "ok       "),
    ("verify --json IN", "\"checksums\": false"),
    ("roundtrip IN", "identical  "),
    ("convert IN -o converted.tssd --force", "leaves, "),
    ("unpack IN -o merged.safetensors --force", "merged.safetensors: "),
    ("delta make IN b.tssd -o delta.tssd --force", "delta.tssd: "),
    ("delta apply IN delta.tssd -o result.tssd --force", "result.tssd: "),
    ("delta make b.tssd IN -o back.tssd --force", "back.tssd: "),
    ("diff b.tssd delta.tssd --base IN", "equal"),
    ("verify --deep delta.tssd --base IN", "ok       delta.tssd"),
    ("pack IN -o again.tssd --force", "again.tssd: "),
];

#[test]
fn every_command_reads_every_input_of_pack() {
    let place = Sandbox::new();
    let mut other = StateDict::new();
    other.insert("a0", Tensor::from_slice(&[1.5_f32; 6], &[2, 3]).unwrap());
    place.write_dict("b.tssd", &other);
    for Input { path, args, stdin, files, is_directory } in inputs(&place) {
        run(&place, 0, &format!("pack {path} -o a.tssd --force {args}"), &stdin);
        for (command, text) in COMMANDS {
            let command = format!("{} {args}", command.replace("IN", path));
            let output = run(&place, 0, &command, &stdin);
            assert!(output.contains(text), "{command}: {output}");
        }
        assert!(place.read("again.tssd") == place.read("a.tssd"));
        assert!(place.read("converted.tssd") == place.read("a.tssd"), "{path}");
        place.run_with_code(0, "diff result.tssd b.tssd");
        let digest = |path: &str, args: &str| {
            let digest = run(&place, 0, &format!("inspect --digest {path} {args}"), &stdin);
            digest.lines().next().unwrap().to_owned()
        };
        assert_eq!(digest(path, args), digest("a.tssd", ""));

        // `unpack` gives the files of a model, whether they were packed or not.
        for source in [path, "a.tssd"] {
            let args = if source == path { args } else { "" };
            run(&place, 0, &format!("unpack {source} -o out/ {args}"), &stdin);
            assert_same(&read_files(&place.path("out")), &files);
            std::fs::remove_dir_all(place.path("out")).unwrap();
        }
        if !is_directory {
            assert!(place.read("merged.safetensors") == files[FILE_NAME]);
        }
    }
    let names = place.file_names();
    assert!(names.iter().all(|name| !name.starts_with('.')), "{names:?}");
}

/// The commands that read an input, which is `IN`.
const READERS: &[&str] = &[
    "pack IN -o out.tssd",
    "inspect IN",
    "inspect --json IN",
    "inspect --digest IN",
    "inspect --hex IN",
    "diff IN good.tssd",
    "diff good.tssd IN",
    "verify IN",
    "verify --deep IN",
    "roundtrip IN",
    "convert IN -o out.tssd",
    "unpack IN -o out/",
    "unpack IN -o out --shard-size 5GB",
    "delta make IN good.tssd -o out.tssd",
    "delta make good.tssd IN -o out.tssd",
    "delta apply IN delta.tssd -o out.tssd",
    "delta fold IN good.tssd -o out.tssd",
    "put --store store key IN",
];

/// Creates `good.tssd`, and `delta.tssd` from it to itself.
fn write_good(place: &Sandbox) {
    let mut dict = StateDict::new();
    dict.insert("a0", Tensor::from_slice(&[1.5_f32; 6], &[2, 3]).unwrap());
    place.write_dict("good.tssd", &dict);
    place.run_with_code(0, "delta make good.tssd good.tssd -o delta.tssd");
}

fn index_with(weight_map: &Json) -> Vec<u8> {
    json!({ "metadata": {}, "weight_map": weight_map }).to_string().into_bytes()
}

#[test]
fn every_command_names_what_is_wrong_with_a_directory() {
    let good = small_directory();
    let with = |name: &str, bytes: Vec<u8>| {
        let mut files = good.clone();
        files.insert(name.to_owned(), bytes);
        files
    };
    let without = |name: &str| {
        let mut files = good.clone();
        files.remove(name).unwrap();
        files
    };
    let map = |d1: &str| {
        let weight_map = json!({
            "a0": "part_0.safetensors", "b0": "part_0.safetensors",
            "c1": "part_1.safetensors", d1: "part_1.safetensors",
        });
        with(INDEX_NAME, index_with(&weight_map))
    };
    let first = good["part_0.safetensors"].clone();
    let cut = first[..first.len() - 1].to_vec();
    let cases: Vec<(Files, &[&str])> = vec![
        (Files::new(), &["in has "]),
        (other_files(), &["in has "]),
        (without("part_1.safetensors"), &["part_1.safetensors, which does not exist"]),
        (map("e1"), &["`e1` to part_1.safetensors, which does not have it"]),
        (with("part_1.safetensors", first.clone()), &["`a0` is in part_0", "and in part_1"]),
        (with("part_0.safetensors", cut), &["part_0.safetensors: ", "bytes, not"]),
        (with(INDEX_NAME, b"{".to_vec()), &[INDEX_NAME, "EOF while parsing"]),
        (with(INDEX_NAME, vec![0xff]), &[INDEX_NAME, "utf-8"]),
        (with(FILE_NAME, first.clone()), &[FILE_NAME, "an index of other files"]),
        // A folder in the place of a file.
        (
            merge(
                without("part_0.safetensors"),
                Files::from([("part_0.safetensors/x".to_owned(), Vec::new())]),
            ),
            &["part_0.safetensors is no regular file"],
        ),
    ];
    for (files, words) in cases {
        let place = Sandbox::new();
        write_good(&place);
        std::fs::create_dir(place.path("in")).unwrap();
        write_files(&place, "in", &files);
        for command in READERS {
            let command = command.replace("IN", "in");
            let output = place.run(&command);
            let code = output.status.code().unwrap();
            let text = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
            let text = text.concat();
            assert!([1, 3, 5].contains(&code), "tssd {command}: {code}\n{text}");
            assert!(!text.contains("panicked"), "tssd {command}\n{text}");
            for word in words {
                assert!(text.contains(word), "tssd {command}: {word}\n{text}");
            }
            let is_verdict = ["DAMAGED  in\n", "lossy      in\n"];
            let is_verdict = is_verdict.iter().any(|line| text.starts_with(line));
            assert!(
                is_verdict || text.contains("\nhelp: ") || text.contains("\"help\":\""),
                "tssd {command}\n{text}"
            );
        }
        let names = place.file_names();
        assert!(
            names.iter().all(|name| ["delta.tssd", "good.tssd", "in", "store"].contains(&&**name)),
            "{names:?}"
        );
    }
}

/// A directory with a manifest is a shard set, also if it has a model.
#[test]
fn manifest_takes_precedence_over_model() {
    let place = Sandbox::new();
    write_good(&place);
    place.run_with_code(0, "put --store store key good.tssd");
    let stored = read_files(&place.path("store"));
    let manifest = stored.keys().find(|name| name.ends_with("/manifest.tssd")).unwrap();
    let folder = format!("store/{}", manifest.strip_suffix("/manifest.tssd").unwrap());
    write_files(&place, "both", &small_directory());
    write_files(&place, "both", &read_files(&place.path(&folder)));
    let output = place.run_with_code(0, "inspect both");
    assert!(output.contains("manifest of 1 file") && !output.contains("safetensors"), "{output}");
    place.run_with_code(0, "diff both good.tssd");
    for command in ["verify both", "roundtrip both"] {
        let output = place.run_with_code(0, command);
        assert!(output.contains("  both/manifest.tssd"), "{output}");
        assert!(!output.contains("  both\n"), "{output}");
    }
}

#[test]
fn commands_refer_to_convert_for_checkpoints_of_torch() {
    let place = Sandbox::new();
    write_good(&place);
    write_files(&place, "in", &Files::from([(".metadata".to_owned(), vec![0])]));
    for command in READERS.iter().filter(|command| !command.starts_with("convert")) {
        let output = place.run_with_code(5, &command.replace("IN", "in"));
        assert!(output.contains("in is a directory of torch.distributed.checkpoint"), "{output}");
        assert!(output.contains("`tssd convert DIR -o OUT.tssd`"), "{output}");
    }
}

#[cfg(unix)]
#[test]
fn no_command_follows_links_out_of_directory() {
    let place = Sandbox::new();
    place.write("secret", b"secret");
    write_good(&place);
    write_files(&place, "in", &small_directory());
    std::os::unix::fs::symlink("../secret", place.path("in/config.json")).unwrap();
    for command in READERS {
        let command = command.replace("IN", "in");
        let output = place.run_with_code(5, &command);
        assert!(
            output.contains("config.json is a link that leads out of the directory"),
            "{output}"
        );
        assert!(output.contains("--follow-links"), "{output}");
    }
}

#[test]
fn hex_dump_is_of_archives_only() {
    let place = Sandbox::new();
    for input in inputs(&place) {
        let command = format!("inspect --hex {} {}", input.path, input.args);
        let output = run(&place, 5, &command, &input.stdin);
        assert!(output.contains("is no archive"), "{output}");
        assert!(output.contains("help: `tssd pack`"), "{output}");
    }
}

#[test]
fn inspect_shows_directory_as_one_model() {
    let place = Sandbox::new();
    write_files(&place, "model", &merge(small_directory(), other_files()));
    write_files(&place, "model", &Files::from([(".git/config".to_owned(), vec![1])]));
    let output = place.run_with_code(0, "inspect model");
    let expected = r#"model  dict
├─ a0                float32   [2, 3]  24 B
├─ b0                float32   [4]     16 B
├─ c1                bfloat16  [5]     10 B
├─ d1                uint8     [3]      3 B
└─ ".files"          dict
   ├─ config.json    bytes     2 B
   └─ sub/vocab.bin  bytes     5.00 kB

format: "pt"
tssd.file.packed_files: 1
4 tensors, 53 B, 2 other leaves, 2 safetensors files, directory "#;
    assert!(output.starts_with(expected), "{output}");
    assert!(output.ends_with("\nleft alone: .git\n"), "{output}");
    let output = place.run_with_code(0, "inspect -v model");
    assert!(output.contains("10 B  in part_1.safetensors\n"), "{output}");
    let json: Json = serde_json::from_str(&place.run_with_code(0, "inspect --json model")).unwrap();
    assert_eq!(json["attrs"][0], json!(["format", { "str": "pt" }]));
    assert_eq!(json["left_alone"], json!([".git"]));
    let dict = &json["root"]["dict"];
    assert_eq!(
        dict[0],
        json!([{ "str": "a0" }, { "tensor": { "dtype": "float32", "shape": [2, 3] } }])
    );
    let files = &dict[4][1]["dict"];
    assert_eq!(files[0], json!([{ "str": "config.json" }, { "bytes": "7b7d" }]));
    assert_eq!(files[1], json!([{ "str": "sub/vocab.bin" }, { "bytes": null }]));
}

#[test]
fn diff_compares_files_of_directories() {
    let place = Sandbox::new();
    let files = merge(small_directory(), other_files());
    write_files(&place, "a", &files);
    let mut changed = files.clone();
    changed.insert("config.json".to_owned(), b"{ }".to_vec());
    changed.get_mut("sub/vocab.bin").unwrap()[9] = 8;
    *changed.get_mut("part_1.safetensors").unwrap().last_mut().unwrap() ^= 1;
    changed.insert("new.txt".to_owned(), b"new".to_vec());
    write_files(&place, "b", &changed);
    place.run_with_code(0, "diff a a");
    let output = place.run_with_code(1, "diff a b");
    for line in [
        "values     d1                    1 of 3 elements differ",
        "value      .files.config.json    bytes",
        "value      .files.sub/vocab.bin  long bytes -> long bytes",
        "only in B  .files.new.txt",
        "4 differences",
    ] {
        assert!(output.contains(line), "{line}\n{output}");
    }
    // The other splitting into files is no difference.
    place.run_with_code(0, "unpack a -o split --shard-size 20");
    place.run_with_code(0, "diff --values a split");
    place.run_with_code(0, "unpack a -o one.safetensors");
    let output = place.run_with_code(1, "diff a one.safetensors");
    assert!(output.contains("only in A  .files"), "{output}");
}

#[test]
fn verify_reports_every_damaged_file_of_directory() {
    let place = Sandbox::new();
    let mut files = merge(small_directory(), other_files());
    write_files(&place, "model", &files);
    let output = place.run_with_code(0, "verify model");
    assert!(output.contains("2 safetensors files, 2 other files, no checksums"), "{output}");
    // `total_size` is of no use to readers, and wrong in many directories.
    assert!(output.contains("warning  the index records a total_size of 7, the tensors have 53"));
    for name in ["part_0.safetensors", "part_1.safetensors"] {
        files.get_mut(name).unwrap().pop();
    }
    write_files(&place, "model", &files);
    place.write_dict("model/good.tssd", &StateDict::new());
    let output = place.run_with_code(1, "verify model");
    let lines: Vec<&str> = output.lines().collect();
    assert_eq!(lines[0], "DAMAGED  model");
    assert!(lines[1].starts_with("         safetensors  part_0.safetensors: "), "{output}");
    assert!(lines[2].starts_with("         safetensors  part_1.safetensors: "), "{output}");
    // Archives in the directory are verified too.
    assert!(lines[3].starts_with("ok       model/good.tssd"), "{output}");
    let json: Json = serde_json::from_str(&place.run_with_code(1, "verify --json model")).unwrap();
    assert_eq!((&json[0]["ok"], &json[0]["checksums"]), (&false.into(), &false.into()));
    assert_eq!((&json[1]["ok"], &json[1]["checksums"]), (&true.into(), &true.into()));
    assert_eq!(json[0]["damage"][1]["rule"], "safetensors");
    let output = place.run_with_code(1, "roundtrip model");
    assert!(output.starts_with("lossy      model\n           safetensors  part_0"), "{output}");
    assert!(output.contains("identical  model/good.tssd"), "{output}");
    let output = place.run_with_code(1, "inspect model");
    assert!(output.contains("part_0.safetensors: ") && output.contains("help: "), "{output}");
}

/// A safetensors file has no magic number, so a file that is cut must not be taken for another format.
#[test]
fn cut_safetensors_file_is_named_as_one() {
    let place = Sandbox::new();
    let file = safetensors_file(None);
    for (len, words) in [(20, "it ends within its header"), (file.len() - 1, "it should have")] {
        place.write("in", &file[..len]);
        let output = place.run_with_code(1, "verify in");
        assert!(output.starts_with("DAMAGED  in\n         safetensors  "), "{output}");
        assert!(output.contains(words), "{output}");
        let output = place.run_with_code(1, "roundtrip in");
        assert!(output.starts_with("lossy      in\n           safetensors  "), "{output}");
        for command in ["inspect in", "diff in in", "convert in -o out", "unpack in -o out"] {
            let output = place.run_with_code(1, command);
            assert!(output.contains(words) && output.contains("help: "), "{command}: {output}");
        }
    }
}

/// Bools other than 0 and 1 are found in safetensors files too, which have no checksums.
#[test]
fn deep_verify_warns_of_invalid_bools_in_safetensors() {
    let place = Sandbox::new();
    let mut dict = StateDict::new();
    let meta = tssd_format::TensorMeta::new(Dtype::Bool, &[3]).unwrap();
    let storage = tssd_format::Storage::from(vec![0, 1, 2]);
    dict.insert("mask", Value::from(Tensor::new(meta, storage, 0).unwrap()));
    place.write_dict("a.tssd", &dict);
    place.run_with_code(0, "unpack a.tssd -o a.safetensors");
    let output = place.run_with_code(0, "verify --deep a.safetensors a.tssd");
    assert_eq!(output.matches("warning  `mask` has 1 bool other than 0 and 1").count(), 2);
    assert!(!place.run_with_code(0, "verify a.safetensors").contains("warning"));
}

/// Some programs write the size as a float.
#[test]
fn verify_compares_recorded_size_with_tensors() {
    let good = small_directory();
    let index: Json = serde_json::from_slice(&good[INDEX_NAME]).unwrap();
    for (recorded, is_warned) in [
        (json!(53), false),
        (json!(53.0), false),
        (json!(54), true),
        (json!(5.4e1), true),
        (json!("54"), false),
        (json!(null), false),
    ] {
        let place = Sandbox::new();
        let mut index = index.clone();
        index["metadata"] = json!({ "total_size": recorded });
        let mut files = good.clone();
        files.insert(INDEX_NAME.to_owned(), index.to_string().into_bytes());
        write_files(&place, "model", &files);
        let output = place.run_with_code(0, "verify model");
        assert_eq!(output.contains("warning"), is_warned, "{recorded}: {output}");
    }
}

/// Fields of an index besides those that follow from the tensors and their files.
fn index_with_metadata() -> Vec<u8> {
    let weight_map = json!({
        "a0": "part_0.safetensors", "b0": "part_0.safetensors",
        "c1": "part_1.safetensors", "d1": "part_1.safetensors",
    });
    let metadata = json!({
        "total_parameters": 18, "total_size": 7, "z": { "nested": [1, 2.5, null] }, "a": "text",
    });
    let index = json!({ "metadata": metadata, "weight_map": weight_map, "more": true });
    format!("{index:#}\n").into_bytes()
}

#[test]
fn shard_size_keeps_metadata_of_index() {
    let place = Sandbox::new();
    let mut files = small_directory();
    files.insert(INDEX_NAME.to_owned(), index_with_metadata());
    write_files(&place, "model", &files);
    place.run_with_code(0, "pack model -o a.tssd");
    place.run_with_code(0, "convert a.tssd -o packed.tssd --codec zstd");
    for source in ["model", "a.tssd", "packed.tssd"] {
        for (size, count) in [("20", 3), ("40", 2), ("5GB", 1)] {
            place.run_with_code(0, &format!("unpack {source} -o split --shard-size {size}"));
            let split = read_files(&place.path("split"));
            assert_eq!(split.len(), count + 1, "{:?}", split.keys());
            let text = std::str::from_utf8(&split[INDEX_NAME]).unwrap();
            let index: Json = serde_json::from_str(text).unwrap();
            let expected = json!({
                "total_parameters": 18, "total_size": 53, "z": { "nested": [1, 2.5, null] },
                "a": "text",
            });
            // The text shows the order of the fields, too.
            assert_eq!(index["metadata"].to_string(), expected.to_string());
            let names: Vec<&String> = index.as_object().unwrap().keys().collect();
            assert_eq!(names, ["metadata", "weight_map", "more"]);
            let map = index["weight_map"].as_object().unwrap();
            assert_eq!(map.keys().collect::<Vec<_>>(), ["a0", "b0", "c1", "d1"]);
            assert!(map.values().all(|file| split.contains_key(file.as_str().unwrap())));
            place.run_with_code(0, "diff --values model split");
            // Only the index of the input has the wrong `total_size`.
            assert!(!place.run_with_code(0, "verify split").contains("warning"));
            place.run_with_code(0, "pack split -o again.tssd --force");
            place.run_with_code(0, "unpack again.tssd -o again/");
            assert_same(&read_files(&place.path("again")), &split);
            std::fs::remove_dir_all(place.path("again")).unwrap();
            std::fs::remove_dir_all(place.path("split")).unwrap();
        }
    }
}

/// An index that names other tensors describes another model.
#[test]
fn changed_model_gets_new_index() {
    use tssd_format::safetensors::{Export, INDEX_ATTR};
    use tssd_format::{AttrValue, Attrs};
    let index = String::from_utf8(index_with_metadata()).unwrap();
    let attr = json!({ "index": index, "headers": {} }).to_string();
    let attrs = Attrs::from([(INDEX_ATTR.to_owned(), AttrValue::Text(attr.into()))]);
    let tensor = || Tensor::from_slice(&[1_u8; 4], &[4]).unwrap();
    for (names, is_kept) in [
        (&["a0", "b0", "c1", "d1"][..], true),
        (&["a0", "b0", "c1"], false),
        (&["a0", "b0", "c1", "e1"], false),
    ] {
        let mut dict = StateDict::new();
        for name in names {
            dict.insert(*name, tensor());
        }
        let export = Export::from_state_dict(&dict, &attrs).unwrap();
        let index = export.sharded_directory(4).unwrap().index.unwrap();
        let index: Json = serde_json::from_str(&index).unwrap();
        assert_eq!(index["metadata"]["total_size"], 4 * names.len());
        assert_eq!(index["metadata"].get("total_parameters").is_some(), is_kept);
        assert_eq!(export.sharded_directory(1 << 30).unwrap().index.is_some(), is_kept);
    }
}
