//! The `tssd` command: files, stdout, stderr and exit codes.

use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use safetensors::SafeTensors;
use safetensors::tensor::TensorView;
use tempfile::TempDir;
use tssd_format::{
    Archive, Compression, Dict, Dtype, Options, StateDict, Storage, Tensor, TensorMeta,
    TorchStoreStateDict, Value,
};
use tssd_tests::command::{binary, memory_tempdir};

/// A temporary directory in which the `tssd` command runs.
pub(crate) struct Sandbox(TempDir);

impl Sandbox {
    pub(crate) fn new() -> Self {
        Self(TempDir::new().unwrap())
    }

    /// Creates the directory on tmpfs if available, for property tests that sync thousands of files.
    pub(crate) fn on_tmpfs() -> Self {
        Self(memory_tempdir())
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub(crate) fn command(&self) -> Command {
        let mut command = Command::new(binary());
        command.current_dir(self.0.path()).env_remove("TSSD_STORE").env("NO_COLOR", "1");
        command.env("TMPDIR", self.0.path());
        command
    }

    pub(crate) fn run(&self, args: &str) -> Output {
        self.command().args(args.split_whitespace()).output().unwrap()
    }

    /// Runs the command, asserts its exit code, and returns stdout followed by stderr.
    #[track_caller]
    pub(crate) fn run_with_code(&self, code: i32, args: &str) -> String {
        let output = self.run(args);
        let text = [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap());
        let text = text.concat();
        assert_eq!(output.status.code(), Some(code), "tssd {args}\n{text}");
        text
    }

    pub(crate) fn read(&self, name: &str) -> Vec<u8> {
        std::fs::read(self.path(name)).unwrap()
    }

    pub(crate) fn write(&self, name: &str, bytes: &[u8]) {
        std::fs::write(self.path(name), bytes).unwrap();
    }

    pub(crate) fn write_dict(&self, name: &str, dict: &StateDict) {
        self.write(name, TorchStoreStateDict::from_state_dict(dict).unwrap().as_bytes());
    }

    /// Returns the sorted names of all files, so that a test can check that no temporary file remains.
    pub(crate) fn file_names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.0.path()).unwrap();
        let mut names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

/// A file written by the safetensors library, with tensors of each dtype that torch supports too.
pub(crate) fn safetensors_file(metadata: Option<&[(&str, &str)]>) -> Vec<u8> {
    let bytes: Vec<u8> = (0..=255).cycle().take(4096).collect();
    let mut tensors = Vec::new();
    for dtype in Dtype::ALL.iter().filter_map(|dtype| dtype.safetensors()) {
        let dtype: safetensors::Dtype = serde_json::from_value(dtype.into()).unwrap();
        for (index, shape) in
            [vec![], vec![0, 4], vec![3, 2], vec![2, 1, 4]].into_iter().enumerate()
        {
            let bits = shape.iter().product::<usize>() * dtype.bitsize();
            if bits.is_multiple_of(8) {
                let data = &bytes[index..index + bits / 8];
                let view = TensorView::new(dtype, shape, data).unwrap();
                tensors.push((format!("{index}.{dtype}"), view));
            }
        }
    }
    let owned = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
    let metadata = metadata.map(|metadata| metadata.iter().map(owned).collect());
    safetensors::serialize(tensors, metadata).unwrap()
}

fn tensor(elements: &[f32], shape: &[u64]) -> Tensor {
    Tensor::from_slice(elements, shape).unwrap()
}

/// Two tensors, one of them larger than a chunk.
fn dict() -> StateDict {
    let mut dict = StateDict::new();
    dict.insert("small", tensor(&[1.0, 2.0, 3.0, 4.0], &[2, 2]));
    dict.insert("large", tensor(&vec![0.5; 300_000], &[300_000]));
    dict
}

#[test]
fn pack_and_unpack_restore_safetensors_byte_for_byte() {
    let several_entries = [("z", "1"), ("format", "pt"), ("é", "\"\n"), ("", "")];
    for metadata in [None, Some(&[][..]), Some(&[("format", "pt")]), Some(&several_entries)] {
        let sandbox = Sandbox::new();
        sandbox.write("in.safetensors", &safetensors_file(metadata));
        sandbox.run_with_code(0, "pack in.safetensors -o mid.tssd");
        sandbox.run_with_code(0, "verify mid.tssd");
        sandbox.run_with_code(0, "unpack mid.tssd -o out.safetensors");
        assert_eq!(sandbox.read("out.safetensors"), sandbox.read("in.safetensors"), "{metadata:?}");
        sandbox.run_with_code(0, "diff in.safetensors mid.tssd");
        assert_eq!(sandbox.file_names(), ["in.safetensors", "mid.tssd", "out.safetensors"]);
    }
}

#[test]
fn pack_keeps_dtypes_shapes_and_metadata() {
    let sandbox = Sandbox::new();
    sandbox.write("in.safetensors", &safetensors_file(Some(&[("format", "pt")])));
    sandbox.run_with_code(0, "pack in.safetensors -o mid.tssd");
    let archive = Archive::open(sandbox.path("mid.tssd")).unwrap();
    let meta = archive.tensor("3.F4").unwrap().meta().clone();
    assert_eq!((meta.dtype(), meta.shape()), (Dtype::Float4E2m1fnX2, &[2, 1, 2][..]));
    assert_eq!(archive.tensor("0.C64").unwrap().meta().dtype(), Dtype::Complex64);
    assert_eq!(archive.attrs().into_keys().collect::<Vec<_>>(), ["format"]);
}

#[test]
fn pack_rejects_unsupported_tensors_and_duplicate_names() {
    let sandbox = Sandbox::new();
    let f6 = TensorView::new(safetensors::Dtype::F6_E2M3, vec![4], &[1, 2, 3]).unwrap();
    sandbox.write("f6.safetensors", &safetensors::serialize([("a.b", f6)], None).unwrap());
    let f4 = TensorView::new(safetensors::Dtype::F4, vec![2, 1], &[1]).unwrap();
    sandbox.write("odd.safetensors", &safetensors::serialize([("a.b", f4)], None).unwrap());
    let duplicate = r#"{"a.b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a.b":{"dtype":"I8","shape":[1],"data_offsets":[0,1]}}"#;
    let header = u64::try_from(duplicate.len()).unwrap().to_le_bytes();
    sandbox.write("twice.safetensors", &[&header, duplicate.as_bytes(), &[7]].concat());
    for (code, file) in [(5, "f6"), (5, "odd"), (1, "twice")] {
        let output = sandbox.run_with_code(code, &format!("pack {file}.safetensors -o out.tssd"));
        assert!(output.contains("`a.b`"), "{output}");
        assert!(!sandbox.path("out.tssd").exists());
    }
}

#[test]
fn unpack_rejects_values_that_safetensors_lacks() {
    let one_element = || Value::from(tensor(&[1.0], &[1]));
    let cases: [(&str, Value); 5] = [
        (r#"["a"]["step"]"#, Dict::from_iter([("step", 1_i64)]).into()),
        (r#"["a"][0]"#, Value::List(vec!["text".into()])),
        (r#"["a"]["empty"]"#, Dict::from_iter([("empty", Value::List(vec![]))]).into()),
        (
            r#"["a"]["0"]"#,
            Value::from(Dict::from_iter([(0.into(), one_element()), ("0".into(), one_element())]
                as [(tssd_format::MapKey, _); 2])),
        ),
        (r#"["a"]["c"]"#, {
            let meta = TensorMeta::new(Dtype::Complex32, &[1]).unwrap();
            let tensor = Tensor::new(meta, Storage::from(vec![0; 4]), 0).unwrap();
            Dict::from_iter([("c", tensor)]).into()
        }),
    ];
    for (path, value) in cases {
        let sandbox = Sandbox::new();
        let mut dict = StateDict::new();
        dict.insert("a", value);
        sandbox.write_dict("in.tssd", &dict);
        sandbox.write("out.safetensors", b"old");
        let output = sandbox.run_with_code(5, "unpack in.tssd -o out.safetensors");
        assert!(output.contains(path), "{output}");
        assert_eq!(sandbox.read("out.safetensors"), b"old");
    }
}

#[test]
fn unpack_materializes_strides_and_ties() {
    let sandbox = Sandbox::new();
    let tied = tensor(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], &[2, 3]);
    let meta = TensorMeta::new(Dtype::Float32, &[3, 2]).unwrap().with_strides(&[1, 3]).unwrap();
    let transposed = Tensor::new(meta, tied.storage().clone(), 0).unwrap();
    let mut dict = StateDict::ordered();
    let nested = [("weight", tied.clone()), ("transposed", transposed)];
    dict.insert("layers", Value::List(vec![Dict::from_iter(nested).into()]));
    dict.insert("head", tied);
    sandbox.write_dict("in.tssd", &dict);
    sandbox.run_with_code(0, "unpack in.tssd -o out.safetensors");
    let file = sandbox.read("out.safetensors");
    let tensors = SafeTensors::deserialize(&file).unwrap();
    let elements = |name: &str| -> Vec<f32> {
        let bytes = tensors.tensor(name).unwrap().data().to_vec();
        bytes.chunks_exact(4).map(|item| f32::from_le_bytes(item.try_into().unwrap())).collect()
    };
    assert_eq!(elements("head"), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    assert_eq!(elements("layers.0.weight"), elements("head"));
    assert_eq!(elements("layers.0.transposed"), [1.0, 4.0, 2.0, 5.0, 3.0, 6.0]);
    sandbox.run_with_code(1, "diff in.tssd out.safetensors");
    sandbox.run_with_code(0, "diff --values in.tssd out.safetensors");
}

#[test]
fn verify_reports_damaged_leaf_and_byte() {
    let sandbox = Sandbox::new();
    sandbox.write_dict("good.tssd", &dict());
    let mut bytes = sandbox.read("good.tssd");
    let archive = Archive::open(sandbox.path("good.tssd")).unwrap();
    let byte = archive.storage(1).offset + (1 << 20) + 5;
    bytes[usize::try_from(byte).unwrap()] ^= 1;
    sandbox.write("bad.tssd", &bytes);
    let output = sandbox.run_with_code(1, "verify good.tssd bad.tssd");
    assert!(output.contains("ok       good.tssd"), "{output}");
    assert!(output.contains("DAMAGED  bad.tssd"), "{output}");
    let chunk = archive.storage(1).offset + (1 << 20);
    assert!(output.contains(&format!("F-090  stored bytes do not match their checksum: 151424 bytes (in `large`, at byte {chunk})")), "{output}");
    // A directory argument stands for all of its archives. `-q` lists only the damaged ones.
    let output = sandbox.run_with_code(1, "verify -q .");
    assert_eq!(output.lines().next(), Some("DAMAGED  ./bad.tssd"), "{output}");
    let json: serde_json::Value =
        serde_json::from_str(&sandbox.run_with_code(1, "verify --json .")).unwrap();
    assert_eq!(json[0]["damage"][0]["leaf"], "large");
    assert_eq!(json[1]["ok"], true);

    bytes.truncate(bytes.len() - 1);
    sandbox.write("bad.tssd", &bytes);
    let output = sandbox.run_with_code(1, "verify bad.tssd");
    assert!(output.contains("F-007"), "{output}");
    let output = sandbox.run_with_code(1, "inspect bad.tssd");
    assert!(output.contains("bad.tssd: file does not end with the TSSD magic"), "{output}");
}

#[test]
fn inspect_prints_file_as_tree() {
    let sandbox = Sandbox::new();
    let tied = tensor(&[0.0; 6], &[2, 3]);
    let mut state = Dict::new();
    state.insert(0, Dict::from_iter([("step", Value::from(1000_i64))]));
    state.insert("0", Value::None);
    let mut dict = StateDict::ordered();
    dict.insert("embed.weight", tied.clone());
    dict.insert("lm_head.weight", tied);
    dict.insert("scale", tensor(&[1.0], &[]));
    dict.insert("state", state);
    dict.insert("betas", Value::Tuple(vec![0.9.into(), 0.999.into()]));
    dict.insert("note", "hello");
    sandbox.write_dict("model.tssd", &dict);
    let expected = r#"model.tssd  ordered dict
├─ embed.weight    float32  [2, 3]  24 B  align 256 B
├─ lm_head.weight  float32  [2, 3]  24 B  align 256 B  tied to embed.weight
├─ scale           float32  []       4 B  align 256 B
├─ state           dict
│  ├─ 0            dict
│  │  └─ step      int      1000
│  └─ "0"          None
├─ betas           tuple
│  ├─ [0]          float    0.9
│  └─ [1]          float    0.999
└─ note            str      "hello"

3 tensors (1 tied), 28 B, 5 other leaves"#;
    let output = sandbox.run_with_code(0, "inspect model.tssd");
    assert!(output.starts_with(expected), "{output}");
    let json: serde_json::Value =
        serde_json::from_str(&sandbox.run_with_code(0, "inspect --json model.tssd")).unwrap();
    let tensor = &json["root"]["ordered_dict"][0][1]["tensor"];
    assert_eq!(tensor["dtype"], "float32");
    assert!(tensor.get("data").is_none(), "{tensor}");
}

/// `inspect` reads no tensor data: shared storages would otherwise be read once per tensor.
#[test]
fn inspect_reads_no_tensor_data() {
    let sandbox = Sandbox::new();
    let mut dict = StateDict::new();
    dict.insert("weight", tensor(&[1.0; 4000], &[4000]));
    let options = Options::new().compress(Compression::Zstd);
    let mut file = TorchStoreStateDict::with_options(&dict, &options).unwrap().as_bytes().to_vec();
    file[4096] ^= 1;
    sandbox.write("hurt.tssd", &file);
    sandbox.run_with_code(1, "verify hurt.tssd");
    assert!(sandbox.run_with_code(0, "inspect --json hurt.tssd").contains("4000"));
    assert!(
        sandbox.run_with_code(1, "pack hurt.tssd -o out.tssd").contains("it is a TSSD archive")
    );
}

/// A pipe has no length, and opening one waits for its writer.
#[cfg(unix)]
#[test]
fn commands_reject_named_pipes() {
    let sandbox = Sandbox::new();
    let status = Command::new("mkfifo").arg(sandbox.path("pipe.tssd")).status().unwrap();
    assert!(status.success());
    for command in ["inspect", "verify", "unpack -o out", "diff /dev/null"] {
        let output = sandbox.run_with_code(5, &format!("{command} pipe.tssd"));
        assert!(output.contains("is no regular file"), "{output}");
    }
    assert_eq!(sandbox.file_names(), ["pipe.tssd"]);
}

#[test]
fn diff_counts_differences() {
    let sandbox = Sandbox::new();
    sandbox.write_dict("a.tssd", &dict());
    let mut other = StateDict::new();
    let mut large = vec![0.5; 300_000];
    large[7] = 0.25;
    large[299_999] = f32::NAN;
    other.insert("large", tensor(&large, &[300_000]));
    other.insert("small", tensor(&[1.0, 2.0, 3.0, 4.0], &[4]));
    other.insert("more", 1_i64);
    sandbox.write_dict("b.tssd", &other);
    sandbox.run_with_code(0, "diff a.tssd a.tssd");
    let output = sandbox.run_with_code(1, "diff a.tssd b.tssd");
    assert_eq!(
        output,
        "shape      small  [2, 2] -> [4]\n\
         values     large  2 of 300000 elements differ, max |a - b| 0.2500, max 8388608 ulp, 1 with NaN\n\
         only in B  more   int 1\n\
         order      (all)  the same keys, in another order\n\
         4 differences; 2 leaves in both files\n"
    );
    assert_eq!(sandbox.run_with_code(1, "diff -q a.tssd b.tssd"), "");
    let json: serde_json::Value =
        serde_json::from_str(&sandbox.run_with_code(1, "diff --json a.tssd b.tssd")).unwrap();
    assert_eq!(json["differences"][1]["elements"], 2);
}

#[test]
fn exit_codes_match_help_table() {
    let sandbox = Sandbox::new();
    sandbox.write_dict("a.tssd", &dict());
    sandbox.write("zip.tssd", b"PK\x03\x04 and so on, and so on");
    for (code, args) in [
        (0, "--help"),
        (0, "--version"),
        (0, "put --store store key a.tssd"),
        (0, "ls --store store"),
        (1, "inspect zip.tssd"),
        (1, "verify zip.tssd"),
        (1, "pack zip.tssd -o out.tssd"),
        (2, ""),
        (2, "frobnicate"),
        (2, "pack a.tssd"),
        (2, "ls"),
        (2, "put --store store --job run key a.tssd"),
        (2, "ls --store https://bucket"),
        (2, "demo --size many"),
        (2, "demo --size 10"),
        (2, "verify"),
        (2, "get --store store key -o out.safetensors"),
        (3, "inspect missing.tssd"),
        (3, "verify missing"),
        (3, "pack missing.safetensors -o out.tssd"),
        (3, "get --store store missing -o out.tssd"),
        (3, "ls --store store missing"),
        (3, "rm --store store missing"),
        (3, "unpack a.tssd -o missing/out.safetensors"),
        (4, "ls --store a.tssd/store"),
        (4, "ls --store no-such-store"),
        (4, "get --store no-such-store key -o out.tssd"),
        (5, "unpack a.tssd -o ."),
        (3, "put --store store key@3 ."),
    ] {
        let output = sandbox.run_with_code(code, args);
        assert!(!output.contains("panicked"), "tssd {args}\n{output}");
    }
    assert!(!sandbox.path("out.tssd").exists());
    let help = sandbox.run_with_code(0, "--help");
    for line in ["    0  success", "  130  interrupted"] {
        assert!(help.contains(line), "{help}");
    }
    // Errors have a help line. With `--json`, errors are JSON too.
    assert!(sandbox.run_with_code(3, "inspect missing.tssd").contains("help: check the path"));
    let json = sandbox.run_with_code(3, "inspect --json missing.tssd");
    let json: serde_json::Value = serde_json::from_str(json.trim()).unwrap();
    assert_eq!(json["message"], "cannot read missing.tssd");
}

#[test]
fn store_commands_put_list_get_and_remove_versions() {
    let sandbox = Sandbox::new();
    sandbox.write_dict("a.tssd", &dict());
    sandbox.write("b.safetensors", &safetensors_file(None));
    let store = "--store store";
    sandbox.run_with_code(0, &format!("put {store} team/policy a.tssd --keep 2"));
    sandbox.run_with_code(0, &format!("put {store} team/policy@7 b.safetensors"));
    sandbox.run_with_code(5, &format!("put {store} team/policy@7 a.tssd"));
    let listed = sandbox.run_with_code(0, &format!("ls {store} --json"));
    let listed: serde_json::Value = serde_json::from_str(&listed).unwrap();
    assert_eq!((&listed[0]["key"], &listed[0]["version"]), (&"team/policy".into(), &7.into()));
    let listed = sandbox.run_with_code(0, &format!("ls {store} team/policy"));
    assert_eq!(listed.lines().count(), 3, "{listed}");

    sandbox.run_with_code(0, &format!("get {store} team/policy@1 -o one.tssd"));
    sandbox.run_with_code(0, &format!("get {store} team/policy -o newest.tssd"));
    sandbox.run_with_code(0, "diff a.tssd one.tssd");
    sandbox.run_with_code(0, "diff b.safetensors newest.tssd");
    sandbox.run_with_code(0, "verify store");

    sandbox.run_with_code(0, &format!("rm {store} team/policy@1"));
    sandbox.run_with_code(3, &format!("get {store} team/policy@1 -o one.tssd --force"));
    sandbox.run_with_code(0, "diff a.tssd one.tssd");
    sandbox.run_with_code(0, &format!("rm {store} team/policy"));
    assert_eq!(sandbox.run_with_code(0, &format!("ls {store}")), "");
}

#[test]
fn demo_compares_every_byte() {
    let sandbox = Sandbox::new();
    sandbox.write("model.safetensors", &safetensors_file(None));
    for args in ["demo --size 1MB --json", "demo --model model.safetensors --json"] {
        let json: serde_json::Value =
            serde_json::from_str(&sandbox.run_with_code(0, args)).unwrap();
        let rows = json["rows"].as_array().unwrap();
        assert_eq!(rows.len(), 12, "{json:#}");
        for row in rows {
            assert_eq!(row["versions"], serde_json::json!([1, 2, 3]), "{row:#}");
            assert_eq!(row["bytes_transferred"], row["bytes_needed"], "{row:#}");
        }
        assert_eq!(json["mismatches"], serde_json::json!([]));
    }
    assert_eq!(sandbox.file_names(), ["model.safetensors"]);
}

#[test]
fn closed_stdout_pipe_is_not_an_error() {
    let sandbox = Sandbox::new();
    sandbox.write_dict("a.tssd", &dict());
    let mut command = sandbox.command();
    let command = command.args(["inspect", "a.tssd"]).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(String::from_utf8(output.stderr).unwrap(), "");
}

#[test]
fn commands_replace_an_output_only_with_force() {
    let sandbox = Sandbox::new();
    sandbox.write_dict("a.tssd", &dict());
    sandbox.write_dict("b.tssd", &dict());
    sandbox.run_with_code(0, "unpack a.tssd -o a.safetensors");
    sandbox.run_with_code(0, "delta make a.tssd b.tssd -o ab.tssd");
    sandbox.run_with_code(0, "put --store store key a.tssd");
    let before = sandbox.file_names();
    for command in [
        "pack a.safetensors",
        "convert a.tssd",
        "unpack a.tssd",
        "delta make a.tssd b.tssd",
        "delta apply a.tssd ab.tssd",
        "delta fold ab.tssd ab.tssd",
        "get --store store key",
    ] {
        sandbox.write("out", b"old");
        let output = sandbox.run_with_code(5, &format!("{command} -o out"));
        assert!(output.contains("out exists\nhelp: "), "{command}: {output}");
        assert!(output.contains("--force"), "{command}: {output}");
        assert_eq!(sandbox.read("out"), b"old");
        sandbox.run_with_code(0, &format!("{command} -o out --force"));
        assert!(sandbox.read("out").len() > 100, "{command}");
        std::fs::remove_file(sandbox.path("out")).unwrap();
        sandbox.run_with_code(0, &format!("{command} -o out"));
        std::fs::remove_file(sandbox.path("out")).unwrap();
        assert_eq!(sandbox.file_names(), before, "{command}");
    }
}

#[test]
fn unpack_replaces_only_files_of_its_own() {
    use std::os::unix::fs::PermissionsExt;

    let sandbox = Sandbox::new();
    sandbox.write_dict("a.tssd", &dict());
    sandbox.run_with_code(0, "unpack a.tssd -o out/");
    let output = sandbox.run_with_code(5, "unpack a.tssd -o out/");
    assert!(output.contains("out is not empty\nhelp: name a new or empty directory"), "{output}");
    // Shards of the same model take the place of its only file.
    sandbox.run_with_code(0, "unpack a.tssd -o out --shard-size 8 --force");
    let names = || {
        let entries = std::fs::read_dir(sandbox.path("out")).unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<_> = names.collect();
        names.sort();
        names
    };
    let shards = names();
    assert!(shards.len() > 2 && !shards.contains(&"model.safetensors".to_owned()), "{shards:?}");
    assert_eq!(sandbox.file_names(), ["a.tssd", "out"]);
    for (file, named) in [("out/notes", "notes"), ("out/.git/HEAD", ".git/HEAD")] {
        let folder = sandbox.path(file).parent().unwrap().to_owned();
        std::fs::create_dir_all(&folder).unwrap();
        sandbox.write(file, b"of the user");
        let output = sandbox.run_with_code(5, "unpack a.tssd -o out/ --force");
        assert!(
            output.contains(&format!("does not have: {named}\nhelp: move them away")),
            "{output}"
        );
        assert_eq!(sandbox.read(file), b"of the user");
        std::fs::remove_file(sandbox.path(file)).unwrap();
    }
    // The archive itself is a file that the output does not have.
    std::fs::copy(sandbox.path("a.tssd"), sandbox.path("out/a.tssd")).unwrap();
    let output = sandbox.run_with_code(5, "unpack out/a.tssd -o out/ --force");
    assert!(output.contains("does not have: a.tssd"), "{output}");
    std::fs::remove_file(sandbox.path("out/a.tssd")).unwrap();
    std::os::unix::fs::symlink("a.tssd", sandbox.path("out/link")).unwrap();
    let output = sandbox.run_with_code(5, "unpack a.tssd -o out/ --force");
    assert!(output.contains("does not have: link"), "{output}");
    std::fs::remove_file(sandbox.path("out/link")).unwrap();
    assert!(names().iter().filter(|name| *name != ".git").eq(&shards), "nothing has changed");
    // A model is split anew into its own folder. An empty folder goes, and the mode of the directory stays.
    let mode = std::fs::Permissions::from_mode(0o750);
    std::fs::set_permissions(sandbox.path("out"), mode).unwrap();
    sandbox.run_with_code(0, "unpack out -o out/ --shard-size 1GB --force");
    assert_eq!(names(), ["model.safetensors"]);
    let metadata = std::fs::metadata(sandbox.path("out")).unwrap();
    assert_eq!(metadata.permissions().mode() & 0o777, 0o750);
    assert_eq!(sandbox.file_names(), ["a.tssd", "out"]);
}

/// A file size limit (`ulimit -f`) makes writes fail as they do on a full disk.
#[cfg(unix)]
#[test]
fn full_disk_leaves_old_output_file() {
    let sandbox = Sandbox::new();
    sandbox.write_dict("a.tssd", &dict());
    sandbox.run_with_code(0, "unpack a.tssd -o a.safetensors");
    for (args, file) in [
        ("pack a.safetensors --force -o out.tssd", "out.tssd"),
        ("unpack a.tssd --force -o out.safetensors", "out.safetensors"),
    ] {
        sandbox.write(file, b"old");
        let script = format!("trap '' XFSZ; ulimit -f 100; exec \"$TSSD\" {args}");
        let mut command = Command::new("sh");
        command.args(["-c", &script]).env("TSSD", binary()).current_dir(sandbox.0.path());
        let output = command.output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(5), "{stderr}");
        assert!(stderr.contains("the old file is untouched"), "{stderr}");
        assert_eq!(sandbox.read(file), b"old");
    }
    assert_eq!(sandbox.file_names(), ["a.safetensors", "a.tssd", "out.safetensors", "out.tssd"]);
}

#[cfg(unix)]
#[test]
fn interrupted_demo_removes_its_files() {
    let sandbox = Sandbox::new();
    let mut command = sandbox.command();
    let command = command.args(["demo", "--size", "20MB"]).stdout(Stdio::null());
    let mut child = command.spawn().unwrap();
    // Interrupt the demo as soon as its directory exists.
    while sandbox.file_names().is_empty() {
        assert!(child.try_wait().unwrap().is_none(), "the demo exited before it was interrupted");
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    let pid = child.id().to_string();
    assert!(Command::new("kill").args(["-INT", &pid]).status().unwrap().success());
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert_eq!(sandbox.file_names(), [""; 0]);
}
