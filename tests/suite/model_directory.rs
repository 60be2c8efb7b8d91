//! Packing the directory of a model into one archive and unpacking it, byte for byte.

use std::path::Path;

use serde_json::{Value as Json, json};
use tssd_format::safetensors::{
    AuxiliaryFile, Export, FILE_NAME, FILES_KEY, INDEX_NAME, import, is_auxiliary_file_name,
};
use tssd_format::{
    Archive, Attrs, Dict, ErrorKind, MapKey, Options, StateDict, Tensor, TorchStoreStateDict, Value,
};
use tssd_tests::checksums::repair_checksums;

use crate::cli::{Sandbox, safetensors_file};
use crate::safetensors::{Files, small_directory};

/// Writes files into a directory and its subdirectories.
pub(crate) fn write_files(place: &Sandbox, directory: &str, files: &Files) {
    for (name, bytes) in files {
        let path = place.path(directory).join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, bytes).unwrap();
    }
}

/// Reads all files of a directory and its subdirectories. Panics on a link or a special file.
pub(crate) fn read_files(directory: &Path) -> Files {
    let mut files = Files::new();
    let mut folders = vec![directory.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in folder.read_dir().unwrap().map(Result::unwrap) {
            let path = entry.path();
            if entry.file_type().unwrap().is_dir() {
                folders.push(path);
                continue;
            }
            assert!(entry.file_type().unwrap().is_file(), "{}", path.display());
            let name = path.strip_prefix(directory).unwrap().to_str().unwrap().to_owned();
            files.insert(name, std::fs::read(path).unwrap());
        }
    }
    files
}

/// Asserts that both sets of files are equal. Prints only the names of files that differ.
#[track_caller]
pub(crate) fn assert_same(found: &Files, expected: &Files) {
    let names = found.keys().chain(expected.keys());
    let different: Vec<&String> =
        names.filter(|name| found.get(*name) != expected.get(*name)).collect();
    assert_eq!(different, Vec::<&String>::new());
}

/// Returns files that models have besides tensors, and files with unusual names and contents.
fn other_files() -> Files {
    let long = [&"n".repeat(255)[..]; 3].join("/");
    let big = (0..3_000_001_u32).map(|number| number.to_le_bytes()[number as usize % 3]).collect();
    [
        (".gitattributes", b"*.safetensors filter=lfs\n".to_vec()),
        ("README.md", "# Ü\r\n".into()),
        ("chat_template.jinja", b"{{ messages }}".to_vec()),
        ("config.json", b"{\"architectures\": []}\n".to_vec()),
        ("empty", Vec::new()),
        ("latin1.txt", b"\xe9\xff\x00\xc0".to_vec()),
        ("limit", vec![b'x'; 4096]),
        ("merges.txt", vec![b'm'; 4097]),
        ("pytorch_model.bin", big),
        ("original/consolidated.safetensors", safetensors_file(None)),
        ("original/params.json", b"{}".to_vec()),
        ("original/sub/.hidden", b"h".to_vec()),
        ("original/sub/model.safetensors", b"not what it says".to_vec()),
        (" ", b"blank".to_vec()),
        ("--json", b"option".to_vec()),
        ("...", b"dots".to_vec()),
        ("a:b*?\"<>|'`$(x)", b"shell".to_vec()),
        ("e\u{301}\u{1f980}/\u{202e}", b"unicode".to_vec()),
        (&long, b"long".to_vec()),
    ]
    .into_iter()
    .map(|(name, bytes)| (name.to_owned(), bytes))
    .collect()
}

pub(crate) fn merge(mut files: Files, more: Files) -> Files {
    files.extend(more);
    files
}

fn open_archive(place: &Sandbox, name: &str) -> Archive {
    Archive::from_bytes(place.read(name)).unwrap()
}

#[test]
fn directory_roundtrips_byte_for_byte() {
    let one = Files::from([(FILE_NAME.to_owned(), safetensors_file(None))]);
    for weights in [one, small_directory()] {
        let place = Sandbox::new();
        let files = merge(weights.clone(), other_files());
        write_files(&place, "model", &files);
        let json: Json =
            serde_json::from_str(&place.run_with_code(0, "pack model -o a.tssd --json")).unwrap();
        let names: Vec<String> = other_files().into_keys().collect();
        assert_eq!(json["files"], json!(names));
        assert_eq!(json["left_alone"], json!([]));
        place.run_with_code(0, "verify --deep a.tssd");
        assert!(place.run_with_code(0, "roundtrip a.tssd").starts_with("identical"));

        // The tensors come first, as in an archive without other files.
        let packed = open_archive(&place, "a.tssd").to_state_dict().unwrap();
        write_files(&place, "weights", &weights);
        place.run_with_code(0, "pack weights -o weights.tssd");
        let weights_only = open_archive(&place, "weights.tssd").to_state_dict().unwrap();
        let mut expected = weights_only.entries().clone();
        let entry = |(name, bytes): (String, Vec<u8>)| (name, Value::Bytes(bytes.into()));
        expected.insert(FILES_KEY, other_files().into_iter().map(entry).collect::<Dict>());
        assert!(packed.entries() == &expected);

        std::fs::create_dir(place.path("empty")).unwrap();
        for target in ["new/", "empty"] {
            let json = place.run_with_code(0, &format!("unpack a.tssd -o {target} --json"));
            let json: Json = serde_json::from_str(&json).unwrap();
            assert_same(&read_files(&place.path(target)), &files);
            let len: usize = files.values().map(Vec::len).sum();
            assert_eq!(json["file_len"], len);
            assert_eq!(json["files"].as_array().unwrap().len(), files.len());
        }
        let message = place.run_with_code(5, "unpack a.tssd -o new");
        assert!(message.contains("new is not empty"), "{message}");
        // Packing the unpacked directory writes the same archive.
        place.run_with_code(0, "pack new -o again.tssd");
        assert!(place.read("again.tssd") == place.read("a.tssd"));

        // Another shard size changes the tensor files only.
        place.run_with_code(0, "unpack a.tssd -o split --shard-size 40");
        let split = read_files(&place.path("split"));
        assert!(split.contains_key(INDEX_NAME));
        for (name, bytes) in other_files() {
            assert!(split[&name] == bytes, "{name}");
        }
        // A single safetensors file has the tensors only. The command names the files that it leaves out.
        let message = place.run_with_code(0, "unpack a.tssd -o one.safetensors");
        assert!(message.contains("left alone: 19 other files ( , --json, "), "{message}");
        let json = place.run_with_code(0, "unpack a.tssd -o one.safetensors --force --json");
        let json: Json = serde_json::from_str(&json).unwrap();
        assert_eq!(json["left_alone"], json!(names));
        let (dict, _) = import(place.read("one.safetensors")).unwrap();
        assert_eq!(dict.entries().len(), weights_only.entries().len());

        // A store keeps the other files, but not how the tensors were split into files.
        place.run_with_code(0, "put --store store key a.tssd");
        place.run_with_code(0, "get --store store key -o got.tssd");
        place.run_with_code(0, "unpack got.tssd -o got/");
        let mut got = read_files(&place.path("got"));
        assert!(got.remove(FILE_NAME).is_some());
        assert_same(&got, &other_files());
        let names = place.file_names();
        assert!(names.iter().all(|name| !name.starts_with('.')), "{names:?}");
    }
}

#[cfg(unix)]
#[test]
fn pack_skips_hidden_folders_links_and_special_files() {
    use std::os::unix::fs::symlink;
    let place = Sandbox::new();
    let files = small_directory();
    write_files(&place, "model", &files);
    let hidden =
        [".git/config", ".cache/huggingface/x.metadata", "sub/.ipynb_checkpoints/x", "sub/.git"];
    write_files(&place, "model", &hidden.map(|name| (name.to_owned(), b"x".to_vec())).into());
    symlink(place.path("model"), place.path("model/circle")).unwrap();
    symlink("..", place.path("model/sub/up")).unwrap();
    let pipe = place.path("model/p\u{1b}[2J");
    assert!(std::process::Command::new("mkfifo").arg(pipe).status().unwrap().success());
    std::fs::create_dir(place.path("model/nothing")).unwrap();
    // The archive leaves itself out.
    place.run_with_code(0, "pack model -o model/all.tssd");
    let first = place.read("model/all.tssd");
    let json = place.run_with_code(0, "pack model -o model/all.tssd --force --json");
    let json: Json = serde_json::from_str(&json).unwrap();
    assert!(place.read("model/all.tssd") == first);
    let left_alone = [
        ".cache",
        ".git",
        "all.tssd",
        "circle",
        "p\u{fffd}[2J",
        "sub/.git",
        "sub/.ipynb_checkpoints",
        "sub/up",
    ];
    assert_eq!(json["left_alone"], json!(left_alone));
    assert_eq!(json["files"], json!([]));
    let message = place.run_with_code(0, "pack model -o a.tssd");
    assert!(message.contains("1 other file, "), "{message}");
    assert!(
        message.contains("left alone: .cache, .git, circle, p\u{fffd}[2J and 3 more"),
        "{message}"
    );
    place.run_with_code(0, "unpack model/all.tssd -o out/");
    assert_same(&read_files(&place.path("out")), &files);
}

/// `pack` follows links inside the directory, and from a Hugging Face snapshot to its blobs.
///
/// Other links need `--follow-links`: the author of a directory could link to any file of the user.
#[cfg(unix)]
#[test]
fn pack_follows_links_only_inside_directory_and_cache() {
    use std::os::unix::fs::symlink;
    let place = Sandbox::new();
    let files = merge(small_directory(), other_files());
    std::fs::create_dir_all(place.path("hub/blobs")).unwrap();
    for (number, (name, bytes)) in files.iter().enumerate() {
        place.write(&format!("hub/blobs/{number}"), bytes);
        let link = place.path("hub/snapshots/rev").join(name);
        std::fs::create_dir_all(link.parent().unwrap()).unwrap();
        let up = "../".repeat(2 + name.matches('/').count());
        symlink(format!("{up}blobs/{number}"), link).unwrap();
    }
    symlink("hub/snapshots/rev", place.path("named")).unwrap();
    for name in ["hub/snapshots/rev", "named"] {
        place.run_with_code(0, &format!("pack {name} -o a.tssd --force"));
        std::fs::create_dir(place.path("out")).unwrap();
        place.run_with_code(0, "unpack a.tssd -o out");
        assert_same(&read_files(&place.path("out")), &files);
        std::fs::remove_dir_all(place.path("out")).unwrap();
    }
    // A blobs folder that is a link does not belong to the cache. Neither do files next to it.
    place.write("hub/secret", b"secret");
    std::fs::rename(place.path("hub/blobs"), place.path("moved")).unwrap();
    symlink("../moved", place.path("hub/blobs")).unwrap();
    let message = place.run_with_code(5, "pack hub/snapshots/rev -o b.tssd");
    assert!(message.contains("a link that leads out of the directory"), "{message}");

    write_files(&place, "model", &small_directory());
    symlink("part_0.safetensors", place.path("model/same")).unwrap();
    place.run_with_code(0, "pack model -o c.tssd");
    place.run_with_code(0, "unpack c.tssd -o c/");
    assert_eq!(read_files(&place.path("c"))["same"], small_directory()["part_0.safetensors"]);
    symlink("../hub/secret", place.path("model/config.json")).unwrap();
    let message = place.run_with_code(5, "pack model -o b.tssd");
    assert!(
        message.contains("config.json is a link") && message.contains("--follow-links"),
        "{message}"
    );
    place.run_with_code(0, "pack model -o d.tssd --follow-links");
    place.run_with_code(0, "unpack d.tssd -o d/");
    assert_eq!(read_files(&place.path("d"))["config.json"], b"secret");
    std::fs::remove_file(place.path("hub/secret")).unwrap();
    let message = place.run_with_code(3, "pack model -o b.tssd");
    assert!(message.contains("config.json"), "{message}");
    assert!(!place.path("b.tssd").exists());
}

#[cfg(unix)]
#[test]
fn pack_rejects_invalid_file_names() {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;
    for name in [&b"a\nb"[..], b"a\\b", b"\xff", b"\xed\xa0\x80", b"\xc2\x85", b"Model.safetensors"]
    {
        let place = Sandbox::new();
        write_files(&place, "model", &small_directory());
        std::fs::write(place.path("model").join(OsStr::from_bytes(name)), b"x").unwrap();
        let message = place.run_with_code(5, "pack model -o a.tssd");
        assert!(message.contains("a name that no archive has"), "{message}");
        assert_eq!(place.file_names(), ["model"]);
    }
}

/// Names that lead out of a directory, or that have a meaning in it, such as `.git` and tensor files.
const INVALID_NAMES: &[&str] = &[
    "",
    "/",
    "/abs",
    "..",
    ".",
    "../x",
    "a/../../x",
    "a/..",
    "./a",
    "a//b",
    "a/",
    "a\\b",
    "..\\x",
    "a\0b",
    "a\nb",
    "\u{1b}[2J",
    "a\u{7f}",
    "\u{85}",
    ".git",
    ".GIT",
    "sub/.git",
    ".git/config",
    "sub/.git/hooks/post-checkout",
    ".cache/x",
    FILE_NAME,
    "MODEL.safetensors",
    INDEX_NAME,
];

#[test]
fn names_of_other_files_are_plain_relative_paths() {
    for name in INVALID_NAMES {
        assert!(!is_auxiliary_file_name(name), "{name:?}");
    }
    for name in other_files().keys() {
        assert!(is_auxiliary_file_name(name), "{name:?}");
    }
    for (name, is_valid) in [
        ("a".repeat(255), true),
        ("a".repeat(256), false),
        (["a"; 512].join("/"), true),
        (["a"; 513].join("/"), false),
    ] {
        assert_eq!(is_auxiliary_file_name(&name), is_valid);
    }
}

/// Returns a state dict with a tensor, and with `files` as its other files.
fn forged(files: impl Into<Value>) -> StateDict {
    let mut dict = StateDict::new();
    dict.insert("a", Tensor::from_slice(&[1_u8], &[1]).unwrap());
    dict.insert(FILES_KEY, files);
    dict
}

/// Returns a state dict with a tensor, and with other files of these names.
fn with_names(names: &[&str]) -> StateDict {
    let entries = names.iter().map(|name| (*name, Value::Bytes(b"x".to_vec().into())));
    forged(entries.collect::<Dict>())
}

#[test]
fn unpack_rejects_forged_other_files() {
    let tensor = || Value::from(Tensor::from_slice(&[1_u8], &[1]).unwrap());
    let bytes = || Value::Bytes(b"x".to_vec().into());
    let mut cases: Vec<(StateDict, &str)> =
        INVALID_NAMES.iter().map(|name| (with_names(&[name]), "no plain relative path")).collect();
    cases.extend([
        (with_names(&["a", "a/b"]), "the name of its folder"),
        (with_names(&["a/b/c", "a/b"]), "the name of its folder"),
        (with_names(&["model.safetensors/x"]), "the name of its folder"),
        (forged(tensor()), "it is no dict"),
        (forged(bytes()), "it is no dict"),
        (forged(Value::None), "it is no dict"),
        (forged(Value::List(vec![bytes()])), "it is no dict"),
        (forged(Value::OrderedDict(Dict::from_iter([("a", bytes())]))), "it is no dict"),
        (forged(Dict::from_iter([("config.json", tensor())])), "it is no bytes"),
        (forged(Dict::from_iter([("config.json", Value::from("text"))])), "it is no bytes"),
        (forged(Dict::from_iter([("sub", Dict::from_iter([("a", bytes())]))])), "it is no bytes"),
        (forged(Dict::from_iter([(1_i64, bytes())])), "no plain relative path"),
        (forged(Dict::from_iter([(MapKey::Bytes(b"a".to_vec().into()), bytes())])), "no plain"),
    ]);
    for (dict, words) in cases {
        let place = Sandbox::new();
        place.write_dict("in.tssd", &dict);
        std::fs::create_dir(place.path("empty")).unwrap();
        for target in ["new/", "empty/", "split --shard-size 1GB"] {
            let message = place.run_with_code(5, &format!("unpack in.tssd -o {target}"));
            assert!(message.contains(words) && message.contains(".files"), "{words}: {message}");
            assert!(message.contains("safetensors OtherFile"), "{message}");
            assert!(!message.contains('\u{1b}'), "{message:?}");
        }
        assert_eq!(place.file_names(), ["empty", "in.tssd"]);
        assert_same(&read_files(&place.path("empty")), &Files::new());
        let error = Export::from_state_dict(&dict, &Attrs::new())
            .and_then(|export| export.directory().map(drop))
            .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::OtherFile);
    }
}

#[test]
fn unpack_rejects_duplicate_names() {
    let place = Sandbox::new();
    let mut file = TorchStoreStateDict::from_state_dict(&with_names(&["name-1", "name-2"]))
        .unwrap()
        .as_bytes()
        .to_vec();
    let at = file.windows(6).position(|name| name == b"name-2").unwrap();
    file[at + 5] = b'1';
    repair_checksums(&mut file);
    place.write("in.tssd", &file);
    let message = place.run_with_code(1, "unpack in.tssd -o out/");
    assert!(message.contains("F-044 DuplicateKey"), "{message}");
    assert_eq!(place.file_names(), ["in.tssd"]);
}

/// A name that was free in the packed directory can be that of a tensor file of `unpack`.
#[test]
fn unpack_rejects_other_file_with_name_of_tensor_file() {
    let place = Sandbox::new();
    write_files(&place, "model", &small_directory());
    place.write("model/model-00001-of-00002.safetensors", b"stale");
    place.run_with_code(0, "pack model -o a.tssd");
    place.run_with_code(0, "unpack a.tssd -o out/");
    let message = place.run_with_code(5, "unpack a.tssd -o split --shard-size 40");
    assert!(message.contains("a file with tensors has this name"), "{message}");
    assert!(message.contains("model-00001-of-00002.safetensors"), "{message}");
    place.run_with_code(0, "unpack a.tssd -o whole --shard-size 5GB");
    assert_eq!(read_files(&place.path("whole")).len(), 3);
    assert_eq!(place.file_names(), ["a.tssd", "model", "out", "whole"]);
}

#[test]
fn pack_rejects_tensor_with_reserved_name() {
    let header = r#"{".files":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#;
    let len = (header.len() as u64).to_le_bytes();
    let file = [&len[..], header.as_bytes(), &[7]].concat();
    assert_eq!(import(file.clone()).unwrap_err().kind(), ErrorKind::NotImportable);
    let place = Sandbox::new();
    write_files(&place, "one", &[(FILE_NAME.to_owned(), file.clone())].into());
    let index = json!({ "weight_map": { ".files": "x.safetensors" } }).to_string();
    let files = [("x.safetensors".to_owned(), file), (INDEX_NAME.to_owned(), index.into())];
    write_files(&place, "several", &files.into());
    for name in ["one", "several", "one/model.safetensors"] {
        let message = place.run_with_code(5, &format!("pack {name} -o out.tssd"));
        assert!(message.contains("the name is reserved"), "{message}");
    }
    assert_eq!(place.file_names(), ["one", "several"]);
}

/// The unpacked file equals the packed one: compressed or raw, from memory or from a file.
#[test]
fn other_file_is_written_in_pieces() {
    let content: Vec<u8> =
        (0..20_000_003_u32).map(|number| (number >> 7).to_le_bytes()[0]).collect();
    let place = Sandbox::new();
    write_files(&place, "model", &small_directory());
    place.write("model/big.bin", &content);
    place.run_with_code(0, "pack model -o a.tssd");
    place.run_with_code(0, "convert a.tssd -o packed.tssd --codec zstd --digest");
    let content_of = |file: AuxiliaryFile<'_>| {
        let mut bytes = Vec::new();
        file.write_to(&mut bytes).unwrap();
        assert_eq!(file.file_len(), bytes.len() as u64);
        (file.name().to_owned(), bytes)
    };
    let expected = [("big.bin".to_owned(), content)];
    for name in ["a.tssd", "packed.tssd"] {
        let stored = Archive::open(place.path(name)).unwrap();
        let dict = stored.to_state_dict().unwrap();
        for export in [
            Export::from_archive(&stored).unwrap(),
            Export::from_archive(&open_archive(&place, name)).unwrap(),
            Export::from_state_dict(&dict, &stored.attrs()).unwrap(),
        ] {
            assert!(export.auxiliary_files().map(content_of).eq(expected.clone()));
            let directory = export.directory().unwrap();
            assert!(directory.auxiliary_files.into_iter().map(content_of).eq(expected.clone()));
        }
    }
    // An empty dict of other files exports no file.
    let dict = forged(Dict::new());
    let export = Export::from_state_dict(&dict, &Attrs::new()).unwrap();
    assert_eq!((export.auxiliary_files().len(), export.len()), (0, 1));
    assert!(TorchStoreStateDict::with_options(&dict, &Options::new()).is_ok());
}
