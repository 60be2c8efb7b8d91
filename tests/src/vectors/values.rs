//! Leaves, keys and containers.

use tssd_format::{
    ArchiveWriter, AttrValue, Dict, Dtype, FILES_KEY, Float, Int, MapKey, Options,
    PACKED_FILES_ATTR, StateDict, Text, Value,
};

use super::{Vector, dict_of, encode, encode_plain, f32_tensor, file_vector, single_value};

#[expect(clippy::too_many_lines, reason = "a list")]
pub(super) fn vectors() -> Vec<Vector> {
    vec![
        file_vector(
            "001-empty-dict",
            "the smallest archive: an empty dict",
            encode_plain(&StateDict::new()),
        ),
        file_vector(
            "002-empty-ordered-dict",
            "an empty OrderedDict",
            encode_plain(&StateDict::ordered()),
        ),
        file_vector(
            "004-containers",
            "list, tuple, ordered dict, namedtuple, empty ones",
            encode_plain(&containers()),
        ),
        file_vector("005-keys", "every kind of key", encode_plain(&keys())),
        file_vector(
            "006-scalars",
            "every kind of leaf but tensors, ints and strs",
            encode_plain(&scalars()),
        ),
        file_vector("007-ints", "ints around the ends of i64 and beyond", encode_plain(&ints())),
        file_vector(
            "008-strs",
            "strs: empty, other planes, a lone surrogate",
            encode_plain(&strs()),
        ),
        file_vector(
            "009-long-content",
            "str and bytes over 4096 bytes are storages, at 4096 bytes they are not",
            encode_plain(&single_value(long_content())),
        ),
        file_vector(
            "014-optimizer",
            "nested optimizer state with int keys",
            encode_plain(&dict_of(vec![("state".into(), optimizer().into())])),
        ),
        file_vector("018-deep", "64 levels of containers", encode_plain(&single_value(deep()))),
        file_vector(
            "019-opaque",
            "opaque leaves: a pickle and JSON",
            encode(&opaques(), &Options::new().allow_opaque()),
        ),
        file_vector(
            "020-attrs",
            "attributes of every kind",
            encode(&single_value(1_i64), &attrs()),
        ),
        file_vector("021-streamed", "written as a stream", streamed()),
        file_vector(
            "025-floats",
            "floats and complex numbers at the ends of their range, and NaNs",
            encode_plain(&floats()),
        ),
        file_vector("026-bytes", "no byte, and each of the 256", encode_plain(&bytes())),
        file_vector("027-dtype-leaves", "every dtype as a value", encode_plain(&dtype_leaves())),
        file_vector(
            "028-sizes",
            "torch.Size: empty, negative entries, 64 entries, one shared",
            encode_plain(&sizes()),
        ),
        file_vector(
            "029-devices",
            "devices: cpu, meta, one with an index, one whose name is not ASCII",
            encode_plain(&devices()),
        ),
        file_vector(
            "030-namedtuples",
            "namedtuples in each other; the name of a field has a surrogate",
            encode_plain(&namedtuples()),
        ),
        file_vector(
            "031-float-keys",
            "float keys: -0.0, subnormal, infinite, beyond i64",
            encode_plain(&float_keys()),
        ),
        file_vector(
            "107-unequal-keys",
            "numbers and tuples that are almost equal",
            encode_plain(&unequal_keys()),
        ),
        file_vector(
            "032-int-keys",
            "int keys around the ends of i64 and beyond, in by_key order",
            encode_plain(&int_keys()),
        ),
        file_vector(
            "033-tuple-keys",
            "tuple keys: empty, 8 deep, 64 elements, of every kind",
            encode_plain(&tuple_keys()),
        ),
        file_vector(
            "034-long-key",
            "a key of 4096 bytes, which a leaf shares",
            encode_plain(&long_key()),
        ),
        file_vector(
            "035-many-keys",
            "300 keys, inserted in an order that is not by_key's",
            encode_plain(&many_keys()),
        ),
        file_vector(
            "036-long-surrogates",
            "a str in a storage that holds a lone surrogate",
            encode_plain(&long_surrogates()),
        ),
        file_vector(
            "037-long-opaque",
            "an opaque leaf in a storage",
            encode(&single_value(opaque(vec![b'.'; 5000])), &Options::new().allow_opaque()),
        ),
        file_vector(
            "038-shared-text",
            "one text as key, value, type name and attribute: in the heap once",
            encode(&shared_text(), &Options::new().attr("text", AttrValue::Text("text".into()))),
        ),
        file_vector(
            "039-equal-looking",
            "`{\"a.b\"}`, `{\"a\": {\"b\"}}`, `1` and `\"1\"` in one dict",
            encode_plain(&equal_looking()),
        ),
        file_vector(
            "154-packed-files",
            "a packed model directory: the files without tensors are under the key `.files`",
            encode(&packed_directory(), &Options::new().attr(PACKED_FILES_ATTR, AttrValue::Int(1))),
        ),
    ]
}

fn packed_directory() -> StateDict {
    let files: [(&str, &[u8]); 3] =
        [("config.json", b"{}"), ("original/params.json", b""), ("tokenizer.model", &[b't'; 5000])];
    let entries: Dict = files
        .into_iter()
        .map(|(name, content)| (name, Value::Bytes(content.to_vec().into())))
        .collect();
    let mut dict = dict_of(vec![("weight".into(), f32_tensor(&[1.0, 2.0], &[2]).into())]);
    dict.insert(FILES_KEY, entries);
    dict
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

/// Returns a dict with these keys and the values 0, 1, 2, …
fn with_keys(keys: Vec<MapKey>) -> StateDict {
    dict_of((0_i64..).zip(keys).map(|(place, key)| (key, Value::from(place))).collect())
}

fn keys() -> StateDict {
    with_keys(vec![
        MapKey::from("1"),
        MapKey::from(1),
        MapKey::from(-1),
        MapKey::Float(Float::from(0.5)),
        MapKey::None,
        MapKey::Bool(false),
        MapKey::Bytes(vec![0, 255].into()),
        MapKey::from(""),
        MapKey::from("a.b"),
        big("-9223372036854775809"),
        MapKey::Tuple(
            [MapKey::from("a"), MapKey::Tuple([MapKey::from(2), MapKey::None].into())].into(),
        ),
    ])
}

fn big(digits: &str) -> MapKey {
    MapKey::Int(int(digits))
}

fn int(digits: &str) -> Int {
    digits.parse().expect("it is digits")
}

fn scalars() -> StateDict {
    let floats = [0.0, -0.0, 1.5, f64::INFINITY, f64::MIN_POSITIVE];
    let mut entries: Vec<(MapKey, Value)> = floats
        .iter()
        .map(|float| (MapKey::from(format!("float {float:?}")), Value::from(*float)))
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
    single_value(Value::List(ints.iter().map(|digits| Value::Int(int(digits))).collect()))
}

fn surrogate() -> Text {
    Text::from_generalized_utf8(&b"a\xED\xA0\x80b"[..]).expect("it is generalized UTF-8")
}

fn strs() -> StateDict {
    single_value(Value::List(vec!["".into(), "漢😀".into(), surrogate().into()]))
}

fn long_content() -> Value {
    Value::List(vec![
        "x".repeat(4096).into(),
        "x".repeat(4097).into(),
        Value::Bytes(vec![7; 4097].into()),
    ])
}

fn optimizer() -> Dict {
    let state = Dict::from_iter([
        ("step", Value::from(f32_tensor(&[3.0], &[]))),
        ("exp_avg", f32_tensor(&[0.1, 0.2], &[2]).into()),
    ]);
    Dict::from_iter([(0_i64, state), (1, Dict::new())])
}

fn deep() -> Value {
    (1..64).fold(Value::from(1_i64), |value, _| Value::List(vec![value]))
}

fn opaque(bytes: Vec<u8>) -> Value {
    Value::Opaque { media: "application/x-python-pickle".into(), bytes: bytes.into() }
}

fn opaques() -> StateDict {
    let json = Value::Opaque {
        media: "application/json".into(),
        bytes: br#"{"lr": 0.1}"#.to_vec().into(),
    };
    single_value(Value::List(vec![opaque(vec![0x80, 4, b'.']), json]))
}

fn attrs() -> Options {
    Options::new()
        .attr("format", AttrValue::Text("pt".into()))
        .attr("step", AttrValue::Int(-7))
        .attr("sum", AttrValue::Bytes([1, 2].into()))
}

fn streamed() -> Vec<u8> {
    let write = || {
        let mut writer = ArchiveWriter::new(Vec::new(), Options::new())?;
        writer.insert("first", f32_tensor(&[1.0], &[1]))?;
        writer.insert("second", 2_i64)?;
        writer.insert("third", f32_tensor(&[3.0; 5], &[5]))?;
        writer.finish()
    };
    write().expect("a Vec takes all")
}

fn floats() -> StateDict {
    let bits = [
        0xFFF0_0000_0000_0000, // -inf
        0x7FEF_FFFF_FFFF_FFFF, // the largest
        0x0000_0000_0000_0001, // the smallest subnormal
        0x7FF0_0000_0000_0001, // a signalling NaN
        0xFFF8_0000_0000_0000, // a negative NaN
    ];
    let float = |bits: &u64| Value::Float(Float::from_bits(*bits));
    let complex = |bits: &u64| Value::Complex(Float::from_bits(*bits), Float::from(-0.0));
    single_value(Value::List(bits.iter().map(float).chain(bits.iter().map(complex)).collect()))
}

fn bytes() -> StateDict {
    let all: Vec<u8> = (0..=255).collect();
    single_value(Value::List(vec![Value::Bytes(Vec::new().into()), Value::Bytes(all.into())]))
}

fn dtype_leaves() -> StateDict {
    single_value(Value::List(Dtype::ALL.iter().map(|dtype| Value::Dtype(*dtype)).collect()))
}

fn sizes() -> StateDict {
    let sizes =
        [vec![], vec![i64::MIN, -1, 0, i64::MAX], (0..64).collect(), vec![3, 4], vec![3, 4]];
    single_value(Value::List(sizes.into_iter().map(|size| Value::Size(size.into())).collect()))
}

fn devices() -> StateDict {
    let names = ["cpu", "meta", "cuda:1", "\u{88c5}\u{7f6e}"];
    single_value(Value::List(names.into_iter().map(|name| Value::Device(name.into())).collect()))
}

fn namedtuples() -> StateDict {
    let inner = Value::NamedTuple("Empty".into(), Dict::new());
    let field = MapKey::Str(surrogate());
    let outer = Dict::from_iter([(MapKey::from("inner"), inner), (field, Value::None)]);
    single_value(Value::NamedTuple("Outer".into(), outer))
}

fn float_keys() -> StateDict {
    let keys = [-0.0, 5e-324, f64::INFINITY, -f64::INFINITY, 1e300, -0.5];
    with_keys(keys.into_iter().map(|key| MapKey::Float(Float::from(key))).collect())
}

fn unequal_keys() -> StateDict {
    let float = |float: f64| MapKey::Float(Float::from(float));
    let tuple = |keys: &[MapKey]| MapKey::Tuple(keys.into());
    let power = |exponent: u32, offset: u8| {
        MapKey::Int(((num_bigint::BigInt::from(1) << exponent) + offset).into())
    };
    let one = MapKey::from(1);
    with_keys(vec![
        power(53, 1),
        float(2_f64.powi(53)),
        power(70, 1),
        float(2_f64.powi(70)),
        power(1024, 0),
        float(f64::INFINITY),
        one.clone(),
        "1".into(),
        MapKey::Bytes(b"1".to_vec().into()),
        float(0.1),
        MapKey::None,
        tuple(&[]),
        tuple(std::slice::from_ref(&one)),
        tuple(&[one.clone(), one.clone()]),
        tuple(&[tuple(&[one])]),
        tuple(&["1".into()]),
        tuple(&[float(0.1)]),
        tuple(&[power(70, 1)]),
        tuple(&[float(2_f64.powi(70))]),
        tuple(&[MapKey::None]),
    ])
}

fn int_keys() -> StateDict {
    let mut keys: Vec<MapKey> =
        [0, -1, 1, i64::MAX, i64::MIN].into_iter().map(MapKey::from).collect();
    keys.extend(["9223372036854775808", "-9223372036854775809", "36893488147419103232"].map(big));
    with_keys(keys)
}

fn tuple_keys() -> StateDict {
    let tuple = |keys: Vec<MapKey>| MapKey::Tuple(keys.into());
    let deep = (1..8).fold(tuple(vec![]), |inner, _| tuple(vec![inner]));
    let kinds = tuple(vec![
        MapKey::from("s"),
        MapKey::from(-7),
        big("18446744073709551616"),
        MapKey::Bool(true),
        MapKey::Float(Float::from(2.5)),
        MapKey::None,
        MapKey::Bytes(vec![0].into()),
        tuple(vec![MapKey::from("")]),
    ]);
    with_keys(vec![tuple(vec![]), deep, tuple((0..64).map(MapKey::from).collect()), kinds])
}

fn long_key() -> StateDict {
    let long = "k".repeat(4096);
    dict_of(vec![(long.as_str().into(), long.as_str().into())])
}

fn many_keys() -> StateDict {
    // 7 and 300 are coprime, so each number occurs once.
    with_keys(
        (0..300_i64).map(|place| MapKey::from(format!("layer.{}", place * 7 % 300))).collect(),
    )
}

fn long_surrogates() -> StateDict {
    let bytes = [vec![b'x'; 5000], surrogate().as_bytes().to_vec()].concat();
    single_value(Text::from_generalized_utf8(bytes).expect("it is generalized UTF-8"))
}

fn shared_text() -> StateDict {
    let fields = Dict::from_iter([("text", Value::from("text"))]);
    dict_of(vec![
        ("text".into(), Value::NamedTuple("text".into(), fields)),
        (MapKey::Bytes(b"text".to_vec().into()), Value::Bytes(b"text".to_vec().into())),
    ])
}

fn equal_looking() -> StateDict {
    let nested = Dict::from_iter([("b", 2_i64)]);
    dict_of(vec![
        ("a.b".into(), 1_i64.into()),
        ("a".into(), nested.into()),
        (1.into(), 3_i64.into()),
        ("1".into(), 4_i64.into()),
    ])
}
