//! Values with class tags.

use tssd_format::{ClassTag, Dict, Dtype, Int, MapKey, StateDict, TaggedClass, Tensor, Value};

use super::{Vector, dict_of, encode_plain, f32_tensor, file_vector};

pub(super) fn vectors() -> Vec<Vector> {
    vec![
        file_vector(
            "150-class-containers",
            "class tags of dicts and lists: Counter, defaultdict with each factory, sets, SimpleNamespace, deques",
            encode_plain(&containers()),
        ),
        file_vector(
            "151-class-tuples",
            "class tags of tuples: range, slice, timedelta, timezone, at the ends of their ranges",
            encode_plain(&tuples()),
        ),
        file_vector(
            "152-class-strs",
            "class tags of strs: paths, dates and times, layouts and memory formats of torch",
            encode_plain(&strs()),
        ),
        file_vector(
            "153-wrappers",
            "tensor wrappers: one in another, with flags, with an object of a registered class",
            encode_plain(&wrappers()),
        ),
    ]
}

fn tagged(class: TaggedClass, parameter: u64, plain: Value) -> Value {
    let tag = ClassTag::new(class, parameter).expect("the parameter is in the table");
    Value::Tagged(tag, plain.into())
}

fn containers() -> StateDict {
    let counts = || Value::Dict(Dict::from_iter([("b", 3_i64), ("a", -1)]));
    let mut entries: Vec<(MapKey, Value)> = vec![
        ("counter".into(), tagged(TaggedClass::Counter, 0, counts())),
        ("set".into(), Value::set(elements()).expect("they can be keys")),
        ("empty set".into(), Value::set([]).expect("it has no elements")),
        ("frozenset".into(), Value::frozenset(elements()).expect("they can be keys")),
        ("namespace".into(), tagged(TaggedClass::SimpleNamespace, 0, counts())),
    ];
    for factory in 0..15_u64 {
        let key = MapKey::from(format!("defaultdict {factory}"));
        entries.push((key, tagged(TaggedClass::DefaultDict, factory, counts())));
    }
    let list = || Value::List(vec![1_i64.into(), "é".into()]);
    for (name, max_len) in
        [("deque", None), ("deque of 2", Some(2)), ("largest deque", Some((1 << 48) - 2))]
    {
        let tag = ClassTag::deque(max_len).expect("it is below 2^48 - 1");
        entries.push((name.into(), Value::Tagged(tag, list().into())));
    }
    let empty = ClassTag::deque(Some(0)).expect("it is below 2^48 - 1");
    entries.push(("empty deque".into(), Value::Tagged(empty, Value::List(vec![]).into())));
    dict_of(entries)
}

/// Returns one element for each kind of key, in no particular order.
fn elements() -> Vec<MapKey> {
    vec![
        MapKey::Tuple([MapKey::from(1), MapKey::from("a")].into()),
        MapKey::None,
        MapKey::from(-1),
        MapKey::from("b"),
        MapKey::from("a"),
        MapKey::Float(0.5.into()),
        MapKey::Bool(true),
        MapKey::Bytes(vec![0].into()),
        MapKey::Int(int("18446744073709551616")),
    ]
}

fn int(digits: &str) -> Int {
    digits.parse().expect("it is digits")
}

fn tuples() -> StateDict {
    let tuple = |class, values: Vec<Value>| tagged(class, 0, Value::Tuple(values));
    let ints = |class, ints: &[i64]| tuple(class, ints.iter().map(|int| (*int).into()).collect());
    let zone = |days: i64, seconds: i64, microseconds: i64, name: Value| {
        let values = vec![days.into(), seconds.into(), microseconds.into(), name];
        tuple(TaggedClass::Timezone, values)
    };
    let large = || Value::Int(int("18446744073709551616"));
    dict_of(vec![
        ("range".into(), ints(TaggedClass::Range, &[10, 0, -2])),
        (
            "large range".into(),
            tuple(TaggedClass::Range, vec![large(), 0_i64.into(), 1_i64.into()]),
        ),
        ("slice".into(), tuple(TaggedClass::Slice, vec![Value::None, 5_i64.into(), Value::None])),
        (
            "slice with step 0".into(),
            tuple(TaggedClass::Slice, vec![large(), (-1_i64).into(), 0_i64.into()]),
        ),
        ("timedelta".into(), ints(TaggedClass::Timedelta, &[-999_999_999, 0, 0])),
        ("largest timedelta".into(), ints(TaggedClass::Timedelta, &[999_999_999, 86_399, 999_999])),
        ("utc".into(), zone(0, 0, 0, Value::None)),
        ("first timezone".into(), zone(-1, 0, 1, Value::None)),
        ("last timezone".into(), zone(0, 86_399, 999_999, "far east".into())),
    ])
}

fn strs() -> StateDict {
    let rows = [
        (TaggedClass::PurePosixPath, "."),
        (TaggedClass::PosixPath, "/data/é"),
        (TaggedClass::PureWindowsPath, r"C:\data"),
        (TaggedClass::WindowsPath, r"\\host\share\"),
        (TaggedClass::Date, "0001-01-01"),
        (TaggedClass::Date, "2024-02-29"),
        (TaggedClass::Time, "23:59:59.000001"),
        (TaggedClass::Time, "00:00:00+00:00"),
        (TaggedClass::DateTime, "9999-12-31T23:59:59.999999"),
        (TaggedClass::DateTime, "2026-11-28T09:30:00-23:59:59.999999"),
        (TaggedClass::DateTime, "2026-11-28T09:30:00+05:30"),
        (TaggedClass::DateTime, "2026-11-28T09:30:00+00:00:30"),
        (TaggedClass::TorchLayout, "strided"),
        (TaggedClass::TorchMemoryFormat, "channels_last_3d"),
    ];
    let entry = |(class, text): (TaggedClass, &str)| {
        (MapKey::from(format!("{} {text}", class.name())), tagged(class, 0, text.into()))
    };
    let mut entries: Vec<_> = rows.into_iter().map(entry).collect();
    let long = "a".repeat(4096);
    entries.push(("long path".into(), tagged(TaggedClass::PosixPath, 0, long.as_str().into())));
    dict_of(entries)
}

fn wrappers() -> StateDict {
    let wrapper = |flags, class: &str, tensors: Vec<(&str, Value)>, context: Value| {
        let entries: [(&str, Value); 5] = [
            ("class", class.into()),
            ("tensors", Value::Dict(tensors.into_iter().collect())),
            ("context", context),
            ("size", Value::Size([2, 2].into())),
            ("stride", Value::Size([2, 1].into())),
        ];
        tagged(TaggedClass::Wrapper, flags, Value::Dict(entries.into_iter().collect()))
    };
    let data = Tensor::from_slice(&[1_i8, -2, 3, -4], &[2, 2]).expect("four elements");
    let granularity: [(&str, Value); 2] = [
        ("class", "torchao.quantization.granularity.PerRow".into()),
        ("value", Value::Dict(Dict::from_iter([("dim", -1_i64)]))),
    ];
    let granularity =
        tagged(TaggedClass::Registered, 0, Value::Dict(granularity.into_iter().collect()));
    let context = Value::List(vec![Value::Dtype(Dtype::Bfloat16), granularity]);
    let scale =
        wrapper(0, "example.Scale", vec![("value", f32_tensor(&[0.5], &[1]).into())], Value::None);
    let outer =
        wrapper(3, "example.Int8Tensor", vec![("qdata", data.into()), ("scale", scale)], context);
    dict_of(vec![("weight".into(), outer)])
}
