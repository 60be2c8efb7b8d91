//! The good vectors: what they are, and that the writer still writes them byte for byte.

use std::path::PathBuf;

use tssd_format::{
    Archive, ArchiveWriter, AttrValue, DeviceMesh, Dict, Dtype, Float, Int, Key, Layout, Options,
    Placement, Shard, ShardPlace, StateDict, Storage, Tensor, TensorFlags, TensorMeta, TensorSlice,
    Text, Value,
};

/// One vector: its name, what it shows, its bytes.
type Vector = (&'static str, &'static str, Vec<u8>);

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../spec/vectors")
}

fn encode(dict: &StateDict, options: &Options) -> Vec<u8> {
    let mut file = Vec::new();
    Layout::plan(dict, options).unwrap().write_to(&mut file).unwrap();
    file
}

fn dict_of(entries: Vec<(Key, Value)>) -> StateDict {
    StateDict::from_value(Value::Dict(Dict::from_iter(entries))).unwrap()
}

fn one(value: impl Into<Value>) -> StateDict {
    dict_of(vec![("value".into(), value.into())])
}

fn f32s(values: &[f32], shape: &[u64]) -> Tensor {
    Tensor::from_slice(values, shape).unwrap()
}

/// Bytes 0, 1, 2 … as a tensor of any dtype.
fn counting(dtype: Dtype, shape: &[u64]) -> Tensor {
    let meta = TensorMeta::new(dtype, shape).unwrap();
    let bytes: Vec<u8> = (0..meta.nbytes()).map(|byte| byte.to_le_bytes()[0] & 1).collect();
    Tensor::new(meta, bytes.into(), 0).unwrap()
}

fn shard_of_rank(rank: u32) -> Shard {
    let mesh = DeviceMesh::new(&[2, 2], &[4, 5, 6, 7]).unwrap();
    let mesh = mesh.with_dim_names(vec!["dp".into(), "tp".into()]).unwrap();
    let placements = vec![Placement::Shard { dim: 0 }, Placement::Shard { dim: 1 }];
    let slice = TensorSlice::from_placements(&[3, 5], &mesh, rank, &placements).unwrap().remove(0);
    let numel: u64 = slice.local_shape().iter().product();
    let values: Vec<f32> = (0_u16..).map(f32::from).take(usize::try_from(numel).unwrap()).collect();
    let tensor = f32s(&values, slice.local_shape());
    let place = ShardPlace::new(slice).on_mesh(mesh).unwrap().placed(placements).unwrap();
    Shard::new(tensor, place).unwrap()
}

fn containers() -> StateDict {
    let list =
        Value::List(vec![Value::List(vec![]), Value::Tuple(vec![]), Value::Dict(Dict::new())]);
    let point = Dict::from_iter([("x", Value::from(1_i64)), ("y", Value::None)]);
    dict_of(vec![
        ("list".into(), list),
        ("tuple".into(), Value::Tuple(vec![Value::from(true), Value::from("é")])),
        ("ordered".into(), Value::OrderedDict(Dict::from_iter([("b", 1_i64), ("a", 2)]))),
        ("point".into(), Value::NamedTuple("Point".into(), point)),
    ])
}

fn keys() -> StateDict {
    let keys = vec![
        Key::from("1"),
        Key::from(1),
        Key::from(-1),
        Key::Float(Float::from(0.5)),
        Key::None,
        Key::Bool(false),
        Key::Bytes(vec![0, 255].into()),
        Key::from(""),
        Key::from("a.b"),
        Key::Int("-9223372036854775809".parse().unwrap()),
        Key::Tuple([Key::from("a"), Key::Tuple([Key::from(2), Key::None].into())].into()),
    ];
    dict_of((0_i64..).zip(keys).map(|(place, key)| (key, Value::from(place))).collect())
}

fn scalars() -> StateDict {
    let floats = [0.0, -0.0, 1.5, f64::INFINITY, f64::MIN_POSITIVE];
    let mut entries: Vec<(Key, Value)> = floats
        .iter()
        .map(|float| (Key::from(format!("float {float:?}")), Value::from(*float)))
        .collect();
    entries
        .push(("nan with payload".into(), Value::Float(Float::from_bits(0x7FF8_0000_0000_1234))));
    entries.push(("complex".into(), Value::Complex(1.0.into(), (-0.0).into())));
    entries.push(("true".into(), Value::from(true)));
    entries.push(("none".into(), Value::None));
    entries.push(("size".into(), Value::Size([2, 0, -1].into())));
    entries.push(("dtype".into(), Value::Dtype(Dtype::Bfloat16)));
    entries.push(("device".into(), Value::Device("cuda:1".into())));
    entries.push(("bytes".into(), Value::Bytes(vec![1, 2, 3].into())));
    dict_of(entries)
}

fn ints() -> StateDict {
    let ints = [
        "0",
        "-1",
        "9223372036854775807",
        "-9223372036854775808",
        "9223372036854775808",
        "-9223372036854775809",
        "340282366920938463463374607431768211456",
    ];
    let int = |text: &&str| Value::Int(text.parse::<Int>().unwrap());
    one(Value::List(ints.iter().map(int).collect()))
}

fn ties() -> StateDict {
    let storage = Storage::from(&[0.0_f32, 1.0, 2.0, 3.0, 4.0, 5.0][..]);
    let view = |shape: &[u64], strides: &[u64], offset| {
        let meta = TensorMeta::new(Dtype::Float32, shape).unwrap().with_strides(strides).unwrap();
        Tensor::new(meta, storage.clone(), offset).unwrap()
    };
    dict_of(vec![
        ("embedding".into(), view(&[2, 3], &[3, 1], 0).into()),
        ("head".into(), view(&[2, 3], &[3, 1], 0).into()),
        ("transposed".into(), view(&[3, 2], &[1, 3], 0).into()),
        ("row".into(), view(&[3], &[1], 12).into()),
        ("expanded".into(), view(&[4, 3], &[0, 1], 0).into()),
        ("column".into(), view(&[2], &[3], 4).into()),
    ])
}

#[expect(clippy::too_many_lines, reason = "it is a table")]
fn vectors() -> Vec<Vector> {
    let plain = Options::new();
    let flags = TensorFlags::PARAMETER.union(TensorFlags::REQUIRES_GRAD);
    let parameter = TensorMeta::new(Dtype::Float32, &[2]).unwrap().with_flags(flags);
    let parameter = Tensor::new(parameter, Storage::from(&[1.0_f32, 2.0][..]), 0).unwrap();
    let dtypes = Dtype::ALL
        .iter()
        .map(|dtype| (Key::from(dtype.name()), Value::from(counting(*dtype, &[3]))));
    let lone = Text::from_generalized_utf8(&b"a\xED\xA0\x80b"[..]).unwrap();
    let optimizer = Dict::from_iter([
        (
            0_i64,
            Dict::from_iter([
                ("step", Value::from(f32s(&[3.0], &[]))),
                ("exp_avg", f32s(&[0.1, 0.2], &[2]).into()),
            ]),
        ),
        (1, Dict::new()),
    ]);
    let deep = (1..64).fold(Value::from(1_i64), |value, _| Value::List(vec![value]));
    let opaque = Value::Opaque {
        media: "application/x-python-pickle".into(),
        bytes: vec![0x80, 4, b'.'].into(),
    };
    let attrs = Options::new()
        .attr("format", AttrValue::Text("pt".into()))
        .attr("step", AttrValue::Int(-7))
        .attr("sum", AttrValue::Bytes([1, 2].into()));
    let mut streamed = ArchiveWriter::new(Vec::new(), Options::new()).unwrap();
    streamed.insert("first", f32s(&[1.0], &[1])).unwrap();
    streamed.insert("second", 2_i64).unwrap();
    streamed.insert("third", f32s(&[3.0; 5], &[5])).unwrap();
    let shards = dict_of(vec![
        ("shard".into(), shard_of_rank(4).into()),
        ("same place".into(), shard_of_rank(4).into()),
        (
            "empty shard".into(),
            Shard::new(
                f32s(&[], &[0, 5]),
                ShardPlace::new(TensorSlice::new(&[3, 0], &[0, 5], &[3, 5]).unwrap()),
            )
            .unwrap()
            .into(),
        ),
    ]);
    let boxes = [0, 3].map(|row| {
        let slice = TensorSlice::new(&[row, 0], &[1, 2], &[4, 2]).unwrap();
        Shard::new(f32s(&[1.0, 2.0], &[1, 2]), ShardPlace::new(slice)).unwrap()
    });
    vec![
        (
            "001-empty-dict",
            "the smallest archive: an empty dict",
            encode(&StateDict::new(), &plain),
        ),
        ("002-empty-ordered-dict", "an empty OrderedDict", encode(&StateDict::ordered(), &plain)),
        (
            "003-one-tensor",
            "one float32 tensor: the worked example of section 10",
            encode(&one(f32s(&[1.0, -2.0, 0.5], &[3])), &plain),
        ),
        (
            "004-containers",
            "list, tuple, ordered dict, namedtuple, empty ones",
            encode(&containers(), &plain),
        ),
        ("005-keys", "every kind of key", encode(&keys(), &plain)),
        (
            "006-scalars",
            "every kind of leaf but tensors, ints and strs",
            encode(&scalars(), &plain),
        ),
        ("007-ints", "ints around the ends of i64 and beyond", encode(&ints(), &plain)),
        (
            "008-strs",
            "strs: empty, other planes, a lone surrogate",
            encode(&one(Value::List(vec!["".into(), "漢😀".into(), lone.into()])), &plain),
        ),
        (
            "009-long-content",
            "str and bytes over 4096 bytes are storages, at 4096 bytes they are not",
            encode(
                &one(Value::List(vec![
                    "x".repeat(4096).into(),
                    "x".repeat(4097).into(),
                    Value::Bytes(vec![7; 4097].into()),
                ])),
                &plain,
            ),
        ),
        ("010-dtypes", "all 47 dtypes", encode(&dict_of(dtypes.collect()), &plain)),
        (
            "011-ranks",
            "0-dim and empty tensors",
            encode(
                &dict_of(vec![
                    ("scalar".into(), f32s(&[1.0], &[]).into()),
                    ("empty".into(), f32s(&[], &[0, 4]).into()),
                    ("ones".into(), f32s(&[2.0], &[1, 1, 1]).into()),
                ]),
                &plain,
            ),
        ),
        (
            "012-ties",
            "tied, overlapping, transposed, expanded views of one storage",
            encode(&ties(), &plain),
        ),
        ("013-flags", "a Parameter that requires grad", encode(&one(parameter), &plain)),
        (
            "014-optimizer",
            "nested optimizer state with int keys",
            encode(&dict_of(vec![("state".into(), optimizer.into())]), &plain),
        ),
        (
            "015-shard",
            "shards of a 2 x 2 mesh with ranks, names and placements; an empty one",
            encode(&shards, &plain),
        ),
        (
            "016-boxes",
            "two boxes of one global tensor, without a mesh",
            encode(&one(Value::Shards(boxes.to_vec())), &plain),
        ),
        (
            "017-strided-shard",
            "a _StridedShard on a mesh without names",
            encode(&one(strided()), &plain),
        ),
        ("018-deep", "64 levels of containers", encode(&one(deep), &plain)),
        ("019-opaque", "an opaque leaf", encode(&one(opaque), &Options::new().allow_opaque())),
        ("020-attrs", "attributes of every kind", encode(&one(1_i64), &attrs)),
        ("021-streamed", "written as a stream", streamed.finish().unwrap()),
        (
            "022-alignment",
            "a storage of 64 KiB is aligned to 4096",
            encode(
                &dict_of(vec![
                    ("small".into(), f32s(&[1.0], &[1]).into()),
                    ("large".into(), counting(Dtype::Uint8, &[65536]).into()),
                ]),
                &plain,
            ),
        ),
        ("023-manifest", "a version of two writers: slices in two files", manifest()),
        (
            "024-divergent",
            "a version whose writers hold different values for one leaf",
            divergent(),
        ),
    ]
}

fn strided() -> Shard {
    let mesh = DeviceMesh::from_shape(&[2, 2]).unwrap();
    let placements =
        vec![Placement::StridedShard { dim: 0, split_factor: 2 }, Placement::Shard { dim: 0 }];
    let slice = TensorSlice::from_placements(&[8], &mesh, 1, &placements).unwrap().remove(0);
    let tensor = f32s(&[4.0, 5.0], slice.local_shape());
    Shard::new(tensor, ShardPlace::new(slice).on_mesh(mesh).unwrap().placed(placements).unwrap())
        .unwrap()
}

/// A file that a manifest names; it need not be there for the manifest to be read.
fn shard_file(writer: u32) -> tssd_format::ShardFile {
    tssd_format::ShardFile {
        name: format!("{writer}.tssd"),
        file_len: 4672,
        index_off: 4160,
        index_crc32: 7,
        writer,
        digest: None,
    }
}

fn manifest() -> Vec<u8> {
    use tssd_format::{Container, Node, Step, StorageReference, TensorReference};
    let reference = |row: u64, storage: u32| TensorReference {
        meta: TensorMeta::new(Dtype::Float32, &[1, 2]).unwrap(),
        storage: Some(storage),
        byte_offset: 0,
        place: Some(ShardPlace::new(TensorSlice::new(&[row, 0], &[1, 2], &[2, 2]).unwrap())),
    };
    let children =
        vec![(Step::Key("weight".into()), Node::Tensors(vec![reference(0, 0), reference(1, 1)]))];
    let storage = |shard| StorageReference {
        offset: 4096,
        len: 8,
        crc32: crc32fast::hash(&[0; 8]),
        crcs: vec![crc32fast::hash(&[0; 8])],
        align_log2: 8,
        shard,
        packing: None,
        digest: None,
    };
    tssd_format::manifest(
        &Node::Container(Container::Dict, children),
        &[storage(0), storage(1)],
        &tssd_format::Attrs::new(),
        &[shard_file(0), shard_file(1)],
    )
    .unwrap()
}

fn divergent() -> Vec<u8> {
    use tssd_format::{Container, Node, Step};
    let own = |writer: u32| {
        (Step::Key(Key::writer(writer)), Node::Leaf(Value::from(i64::from(writer) * 10)))
    };
    let node = Node::Container(Container::Divergent, vec![own(0), own(3)]);
    let root = Node::Container(Container::Dict, vec![(Step::Key("seed".into()), node)]);
    tssd_format::manifest(&root, &[], &tssd_format::Attrs::new(), &[shard_file(0), shard_file(3)])
        .unwrap()
}

#[test]
fn the_writer_writes_the_vectors() {
    for (name, _, bytes) in vectors() {
        let path = folder().join(format!("valid/{name}.tssd"));
        let committed = std::fs::read(&path).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert!(committed == bytes, "{name}: the writer writes other bytes now");
    }
}

/// Blesses the vectors: after a change of the format only, in a commit that says why.
#[test]
#[ignore = "writes spec/vectors/valid"]
fn write_vectors() {
    let valid = folder().join("valid");
    std::fs::remove_dir_all(&valid).ok();
    std::fs::create_dir_all(&valid).unwrap();
    let mut list = Vec::new();
    for (name, about, bytes) in vectors() {
        let archive =
            Archive::from_bytes(bytes.clone()).unwrap_or_else(|error| panic!("{name}: {error}"));
        let mut view =
            serde_json::to_string_pretty(&tssd_format::to_json(&archive).unwrap()).unwrap();
        view.push('\n');
        std::fs::write(valid.join(format!("{name}.tssd")), bytes).unwrap();
        std::fs::write(valid.join(format!("{name}.json")), view).unwrap();
        list.push(serde_json::json!({ "name": name, "about": about }));
    }
    let path = folder().join("manifest.json");
    let manifest = std::fs::read(&path).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok());
    let mut manifest: serde_json::Value = manifest.unwrap_or_else(|| serde_json::json!({}));
    manifest["valid"] = list.into();
    let text = serde_json::to_string_pretty(&manifest).unwrap();
    std::fs::write(path, text + "\n").unwrap();
}
