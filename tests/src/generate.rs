//! Random state dicts with every kind of leaf, key, alias and stride.

use bytes::Bytes;
use num_bigint::BigInt;
use proptest::prelude::*;
use tssd_format::{
    ClassTag, DeviceMesh, Dict, Dtype, Float, Int, MapKey, OtherDtype, Placement, Shard, ShardSpec,
    StateDict, Storage, TaggedClass, Tensor, TensorFlags, TensorMeta, TensorSlice, Text, Value,
};

/// Generates Python strings: ASCII, other planes, lone surrogates.
pub fn text() -> impl Strategy<Value = Text> {
    let surrogates = proptest::collection::vec(
        prop_oneof![
            "[a-z.é漢😀]{0,4}".prop_map(String::into_bytes),
            (0xA0..=0xBF_u8, 0x80..=0xBF_u8).prop_map(|(b, c)| vec![0xED, b, c]),
        ],
        0..4,
    );
    prop_oneof![
        4 => "[a-z0-9_.]{0,12}".prop_map(Text::from),
        1 => surrogates.prop_map(|parts| {
            Text::from_generalized_utf8(parts.concat()).expect("made of legal parts")
        }),
    ]
}

/// Generates ints: most are small, some near the limits of `i64`, some are huge.
pub fn int() -> impl Strategy<Value = Int> {
    prop_oneof![
        (-3_i64..3).prop_map(Int::from),
        any::<i64>().prop_map(Int::from),
        (any::<bool>(), -2_i64..2).prop_map(|(low, by)| {
            Int::from(BigInt::from(if low { i64::MIN } else { i64::MAX }) + by)
        }),
        proptest::collection::vec(any::<u8>(), 9..40)
            .prop_map(|bytes| Int::from(BigInt::from_signed_bytes_le(&bytes))),
    ]
}

/// Generates floats, including NaN payloads and signed zeros.
pub fn float() -> impl Strategy<Value = Float> {
    prop_oneof![
        any::<u64>().prop_map(Float::from_bits),
        prop_oneof![Just(0.0), Just(-0.0), Just(f64::NAN), Just(f64::INFINITY), Just(1.0)]
            .prop_map(Float::from),
    ]
}

/// Generates keys of a dict.
pub fn key() -> impl Strategy<Value = MapKey> {
    let leaf = prop_oneof![
        4 => text().prop_map(MapKey::Str),
        2 => int().prop_map(MapKey::Int),
        1 => any::<bool>().prop_map(MapKey::Bool),
        1 => float().prop_filter("NaN is no key", |key| !key.get().is_nan()).prop_map(MapKey::Float),
        1 => Just(MapKey::None),
        1 => proptest::collection::vec(any::<u8>(), 0..6).prop_map(|key| MapKey::Bytes(key.into())),
    ];
    leaf.prop_recursive(3, 8, 3, |key| {
        proptest::collection::vec(key, 0..3).prop_map(|keys| MapKey::Tuple(keys.into()))
    })
}

/// Returns whether two keys are equal in a Python dict, as far as the format checks this.
fn same_in_python(left: &MapKey, right: &MapKey) -> bool {
    let number = |key: &MapKey| match key {
        MapKey::Bool(bool) => Some(Int::from(i64::from(*bool))),
        MapKey::Int(int) => Some(int.clone()),
        MapKey::Float(float) if float.get().fract() == 0.0 && float.get().abs() < 1e300 => {
            int_of(float.get())
        }
        _ => None,
    };
    if let (MapKey::Tuple(left), MapKey::Tuple(right)) = (left, right) {
        let mut pairs = left.iter().zip(right);
        return left.len() == right.len() && pairs.all(|(left, right)| same_in_python(left, right));
    }
    left == right || number(left).is_some_and(|left| number(right) == Some(left))
}

/// Returns the int that equals a whole float, by its decimal form.
fn int_of(float: f64) -> Option<Int> {
    format!("{float:.0}").parse().ok()
}

fn dict(value: impl Strategy<Value = Value>) -> impl Strategy<Value = Dict> {
    proptest::collection::vec((key(), value), 0..5).prop_map(|entries| {
        let mut dict = Dict::new();
        for (key, value) in entries {
            if !dict.iter().any(|(other, _)| same_in_python(other, &key)) {
                dict.insert(key, value);
            }
        }
        dict
    })
}

fn dtype() -> impl Strategy<Value = Dtype> {
    (0..=Dtype::ALL.len()).prop_map(|at| {
        Dtype::ALL.get(at).copied().unwrap_or_else(|| {
            let block = OtherDtype::new(0x8000, "example.block").expect("a free number");
            Dtype::Other(block.with_layout(2, 3, 5).expect("15 bits of 16"))
        })
    })
}

/// Generates flags that a tensor of any dtype and shape can have.
fn flags() -> impl Strategy<Value = TensorFlags> {
    let flags = [TensorFlags::default(), TensorFlags::PARAMETER, TensorFlags::NDARRAY];
    proptest::sample::select(flags.to_vec())
}

/// Generates tensors over a few shared storages, so that many overlap, with any strides that fit.
fn tensor(pool: Vec<Storage>) -> impl Strategy<Value = Tensor> {
    let strided = (
        dtype(),
        proptest::collection::vec((0_u64..4, 0_u64..5), 0..4),
        any::<bool>(),
        0..pool.len(),
        0_u64..64,
        flags(),
    );
    strided.prop_map(move |(dtype, dims, contiguous, storage, offset, flags)| {
        let (shape, strides): (Vec<u64>, Vec<u64>) = dims.into_iter().unzip();
        let mut meta = TensorMeta::new(dtype, &shape).expect("small").with_flags(flags);
        if !contiguous {
            meta = meta.with_strides(&strides).expect("small");
        }
        let offset = offset / 16 * 16;
        let storage = pool[storage].clone();
        Tensor::new(meta.clone(), storage, offset).unwrap_or_else(|_| {
            let span = usize::try_from(meta.span_bytes()).expect("small");
            Tensor::new(meta, vec![7; span].into(), 0).expect("a storage of its own")
        })
    })
}

fn shard() -> impl Strategy<Value = Shard> {
    let meshes = prop_oneof![Just(vec![2_u64]), Just(vec![2, 2]), Just(vec![3, 1])];
    (proptest::collection::vec(0_u64..5, 1..3), meshes, 0_u32..9, any::<bool>(), 0_u32..2).prop_map(
        |(global, mesh_shape, rank, named, dim)| {
            let devices: u64 = mesh_shape.iter().product();
            let rank = rank % u32::try_from(devices).expect("small");
            let mut mesh = DeviceMesh::from_shape(&mesh_shape).expect("small");
            if named {
                let names = (0..mesh_shape.len()).map(|dim| format!("dim{dim}")).collect();
                mesh = mesh.with_dim_names(names).expect("distinct");
            }
            let dim = dim % u32::try_from(global.len()).expect("small");
            let placements: Vec<Placement> = (0..mesh_shape.len())
                .map(|at| if at == 0 { Placement::Shard { dim } } else { Placement::Replicate })
                .collect();
            let slices = TensorSlice::from_placements(&global, &mesh, rank, &placements);
            let slice = slices.expect("one box").remove(0);
            let numel: u64 = slice.local_shape().iter().product();
            let elements: Vec<u8> = (0..numel).map(|each| each.to_le_bytes()[0]).collect();
            let tensor = Tensor::from_slice(&elements, slice.local_shape()).expect("as long");
            let place = ShardSpec::new(slice).with_mesh(mesh).expect("the same mesh");
            let place = place.with_placements(placements).expect("one for each dimension");
            Shard::new(tensor, place).expect("the same shape")
        },
    )
}

/// Generates values with a few levels of nesting.
pub fn value() -> impl Strategy<Value = Value> {
    let pools = proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..200), 3)
        .prop_map(|pools| pools.iter().map(|bytes| aligned(bytes)).collect::<Vec<_>>());
    pools.prop_flat_map(|pool| {
        let leaf = prop_oneof![
            6 => tensor(pool).prop_map(Value::Tensor),
            2 => shard().prop_map(Value::from),
            1 => Just(Value::None),
            1 => any::<bool>().prop_map(Value::Bool),
            2 => int().prop_map(Value::Int),
            2 => float().prop_map(Value::Float),
            1 => (float(), float()).prop_map(|(re, im)| Value::Complex(re, im)),
            2 => text().prop_map(Value::Str),
            1 => (4090_usize..4100).prop_map(|len| Value::from("x".repeat(len))),
            1 => proptest::collection::vec(any::<u8>(), 0..9)
                .prop_map(|bytes| Value::Bytes(bytes.into())),
            1 => (4090_usize..4100).prop_map(|len| Value::Bytes(vec![3; len].into())),
            1 => dtype().prop_map(Value::Dtype),
            1 => proptest::collection::vec(any::<i64>(), 0..4)
                .prop_map(|sizes| Value::Size(sizes.into())),
            1 => "(cpu|meta|cuda:[0-9])".prop_map(|name| Value::Device(name.into())),
            1 => tagged_leaf(),
        ];
        leaf.prop_recursive(4, 32, 5, |value| {
            prop_oneof![
                dict(value.clone()).prop_map(Value::Dict),
                dict(value.clone()).prop_map(Value::OrderedDict),
                tagged_container(value.clone()),
                proptest::collection::vec(value.clone(), 0..5).prop_map(Value::List),
                proptest::collection::vec(value.clone(), 0..5).prop_map(Value::Tuple),
                ("[A-Za-z_]{1,8}", proptest::collection::btree_map("[a-z]{1,4}", value, 0..4))
                    .prop_map(|(name, fields)| {
                        Value::NamedTuple(name.into(), Dict::from_iter(fields))
                    }),
            ]
        })
    })
}

/// Generates values with class tags that hold no other values.
fn tagged_leaf() -> impl Strategy<Value = Value> {
    let set = |is_frozen: bool, dict: Dict| {
        let elements = dict.into_iter().map(|(key, _)| key);
        let set = if is_frozen { Value::frozenset(elements) } else { Value::set(elements) };
        set.expect("no key is NaN")
    };
    prop_oneof![
        (any::<bool>(), dict(Just(Value::None)))
            .prop_map(move |(is_frozen, dict)| set(is_frozen, dict)),
        "[a-z/.]{1,8}".prop_map(|path| tag(TaggedClass::PosixPath, 0, path.as_str().into())),
        "20[0-9]{2}-0[1-9]-1[0-9]".prop_map(|date| tag(TaggedClass::Date, 0, date.as_str().into())),
        (int(), int()).prop_map(|(start, stop)| {
            let bounds = vec![start.into(), stop.into(), 1_i64.into()];
            tag(TaggedClass::Range, 0, Value::Tuple(bounds))
        }),
    ]
}

/// Generates containers with class tags.
fn tagged_container(
    value: impl Strategy<Value = Value> + Clone + 'static,
) -> impl Strategy<Value = Value> {
    prop_oneof![
        dict(value.clone()).prop_map(|dict| tag(TaggedClass::Counter, 0, dict.into())),
        (0..15_u64, dict(value.clone())).prop_map(|(factory, dict)| tag(
            TaggedClass::DefaultDict,
            factory,
            dict.into()
        )),
        (prop_oneof![Just(0), 6..9_u64], proptest::collection::vec(value, 0..5))
            .prop_map(|(parameter, values)| tag(TaggedClass::Deque, parameter, values.into())),
    ]
}

fn tag(class: TaggedClass, parameter: u64, plain: Value) -> Value {
    let tag = ClassTag::new(class, parameter).expect("the parameter is in the table");
    Value::Tagged(tag, plain.into())
}

/// Copies bytes into a storage that is aligned to 64 bytes, as torch does.
fn aligned(bytes: &[u8]) -> Storage {
    let mut padded = vec![0_u8; bytes.len() + 64];
    let start = padded.as_ptr().align_offset(64);
    padded[start..start + bytes.len()].copy_from_slice(bytes);
    let end = start + bytes.len();
    Storage::from(Bytes::from(padded).slice(start..end))
}

/// Generates state dicts.
pub fn state_dict() -> impl Strategy<Value = StateDict> {
    (any::<bool>(), dict(value())).prop_map(|(ordered, dict)| {
        let value = if ordered { Value::OrderedDict(dict) } else { Value::Dict(dict) };
        StateDict::from_value(value).expect("a dict")
    })
}
