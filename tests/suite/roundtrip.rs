//! State dicts roundtrip bit for bit, with their ties, and encode to the same bytes every time.

use std::sync::Arc;

use bytes::Bytes;
use num_bigint::BigInt;
use proptest::prelude::*;
use tssd_format::{
    Archive, ArchiveWriter, Blob, Dict, Dtype, ErrorKind, Float, Int, Layout, MapKey, ObjectPath,
    Options, OtherDtype, Shard, ShardSpec, StateDict, Step, Storage, Tensor, TensorFlags,
    TensorMeta, TensorSlice, Text, TorchStoreStateDict, Value,
};
use tssd_tests::generate;

fn encode(dict: &StateDict) -> Vec<u8> {
    TorchStoreStateDict::from_state_dict(dict).unwrap().as_bytes().to_vec()
}

/// Returns the pairs of tensors that overlap, each with the distance of their first bytes.
pub(crate) fn tied_pairs(dict: &StateDict) -> Vec<(usize, usize, isize)> {
    let tensors: Vec<&Tensor> = dict
        .leaves()
        .into_iter()
        .filter_map(|(_, leaf)| match leaf {
            Value::Tensor(tensor) if tensor.meta().numel() > 0 => Some(tensor),
            _ => None,
        })
        .collect();
    let mut ties = Vec::new();
    for (left, one) in tensors.iter().enumerate() {
        for (right, other) in tensors.iter().enumerate().skip(left + 1) {
            let (one, other) =
                (one.view().span().as_ptr_range(), other.view().span().as_ptr_range());
            if one.start < other.end && other.start < one.end {
                let distance = other.start.addr().cast_signed() - one.start.addr().cast_signed();
                ties.push((left, right, distance));
            }
        }
    }
    ties
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn state_dict_roundtrips_bit_for_bit(dict in generate::state_dict()) {
        let bytes = encode(&dict);
        let archive = Archive::from_bytes(bytes.clone()).unwrap();
        archive.verify().unwrap();
        let back = archive.to_state_dict().unwrap();
        prop_assert_eq!(&back, &dict);
        prop_assert_eq!(tied_pairs(&back), tied_pairs(&dict));
        // The decoded state dict encodes to the same bytes.
        prop_assert_eq!(encode(&back), &bytes[..]);
        prop_assert_eq!(TorchStoreStateDict::encoded_len(&dict).unwrap(), bytes.len() as u64);
    }

    #[test]
    fn jobs_in_any_order_write_the_same_bytes(
        dict in generate::state_dict(),
        dirt in any::<u8>(),
        reverse in any::<bool>(),
    ) {
        let layout = Layout::plan(&dict, &Options::new()).unwrap();
        let mut file = vec![dirt; layout.file_len() as usize];
        let mut jobs = layout.jobs();
        if reverse {
            jobs.reverse();
        }
        let checksums: Vec<_> = jobs.iter().map(|job| {
            let range = job.range().start as usize..job.range().end as usize;
            job.run(&mut file[range]).unwrap()
        }).collect();
        let tail = layout.seal(checksums).unwrap();
        file[layout.index_off() as usize..].copy_from_slice(&tail);
        prop_assert_eq!(file, encode(&dict));
    }

    #[test]
    fn streaming_writer_keeps_values(dict in generate::state_dict()) {
        let mut writer = ArchiveWriter::new(Vec::new(), Options::new()).unwrap();
        for (key, value) in dict.entries().iter() {
            match value {
                // Inserting the entries one by one makes the same dict.
                Value::Dict(entries) if !entries.is_empty() => {
                    for (inner, value) in entries.iter() {
                        writer.insert_into(key.clone(), inner.clone(), value.clone()).unwrap();
                    }
                }
                value => writer.insert(key.clone(), value.clone()).unwrap(),
            }
        }
        let archive = Archive::from_bytes(writer.finish().unwrap()).unwrap();
        archive.verify().unwrap();
        let plain = StateDict::from_value(Value::Dict(dict.entries().clone())).unwrap();
        prop_assert_eq!(archive.to_state_dict().unwrap(), plain);
    }

    #[test]
    fn every_leaf_is_found_by_path_and_fqn(dict in generate::state_dict()) {
        let archive = Archive::from_bytes(encode(&dict)).unwrap();
        let leaves = dict.leaves();
        for (path, leaf) in &leaves {
            prop_assert_eq!(&archive.value(path).unwrap(), *leaf);
            let fqn = path.fqn();
            let same_fqn = leaves.iter().filter(|(other, _)| other.fqn() == fqn).count();
            // A key with surrogates is found only by its path, since an fqn has no surrogates.
            let has_fqn = path.steps().iter().all(|step| match step {
                Step::Key(key) => !has_surrogate(key),
                Step::Index(_) => true,
            });
            match archive.leaf(&fqn) {
                Ok(found) => {
                    let is_match = |(other, leaf): &(ObjectPath, &Value)| {
                        other.fqn() == fqn && **leaf == found
                    };
                    prop_assert!(leaves.iter().any(is_match));
                }
                Err(error) => prop_assert!(
                    error.kind() == ErrorKind::AmbiguousFqn && same_fqn > 1
                        || error.kind() == ErrorKind::NotFound && !has_fqn
                ),
            }
        }
    }
}

fn has_surrogate(key: &MapKey) -> bool {
    match key {
        MapKey::Str(text) => text.as_str().is_none(),
        MapKey::Tuple(keys) => keys.iter().any(has_surrogate),
        _ => false,
    }
}

fn tensor(len: u8) -> Tensor {
    Tensor::from_slice(&(0..len).collect::<Vec<_>>(), &[u64::from(len)]).unwrap()
}

fn single(value: Value) -> StateDict {
    let mut dict = StateDict::new();
    dict.insert("v", value);
    dict
}

fn surrogate() -> Text {
    Text::from_generalized_utf8(&b"\xED\xA0\x80"[..]).unwrap()
}

/// Returns 256 to this power, whose two's complement has one byte more.
fn bigint(power: u32) -> Int {
    (BigInt::from(1) << (8 * power)).into()
}

/// Generates numbers and tuples, of which many are equal in Python, or almost.
fn similar_keys() -> impl Strategy<Value = Vec<MapKey>> {
    let exponents = prop_oneof![0_u32..4, 50_u32..70, 1020_u32..1026];
    let number = (exponents, -1_i64..=1, any::<bool>(), 0..4_u8).prop_map(
        |(exponent, offset, is_negative, form)| {
            let int = (BigInt::from(1) << exponent) + offset;
            let int = if is_negative { -int } else { int };
            match form {
                0 => MapKey::Int(int.into()),
                1 => MapKey::Bool(offset > 0),
                2 if exponent == 0 && offset < 0 => MapKey::Float(Float::from(-0.0)),
                _ => MapKey::Float(Float::from(int.to_string().parse::<f64>().unwrap())),
            }
        },
    );
    let leaf = prop_oneof![8 => number, 1 => Just(MapKey::None), 1 => Just("1".into())];
    let key = leaf.prop_recursive(2, 8, 2, |key| {
        proptest::collection::vec(key, 1..3).prop_map(|keys| MapKey::Tuple(keys.into()))
    });
    proptest::collection::vec(key, 2..8)
}

/// Returns whether Python holds two keys equal, by exact arithmetic.
fn equal_in_python(left: &MapKey, right: &MapKey) -> bool {
    // A number times 2^1074 is an int for every finite float.
    let scaled = |key: &MapKey| match key {
        MapKey::Bool(bool) => Some(BigInt::from(u8::from(*bool)) << 1074),
        MapKey::Int(int) => Some(int.to_bigint() << 1074),
        MapKey::Float(float) if float.get().is_finite() => {
            let (bits, sign) = (float.to_bits(), float.get().is_sign_negative());
            let (exponent, fraction) = (bits >> 52 & 0x7FF, bits & ((1 << 52) - 1));
            let scaled = match exponent {
                0 => BigInt::from(fraction),
                _ => BigInt::from(fraction | 1 << 52) << (exponent - 1),
            };
            Some(if sign { -scaled } else { scaled })
        }
        _ => None,
    };
    match (left, right) {
        (MapKey::Tuple(left), MapKey::Tuple(right)) => {
            left.len() == right.len()
                && left.iter().zip(right).all(|(left, right)| equal_in_python(left, right))
        }
        _ => match (scaled(left), scaled(right)) {
            (Some(left), Some(right)) => left == right,
            _ => left == right,
        },
    }
}

proptest! {
    #[test]
    fn writer_rejects_exactly_keys_that_python_holds_equal(keys in similar_keys()) {
        let mut unique: Vec<MapKey> = Vec::new();
        for key in keys {
            if !unique.contains(&key) {
                unique.push(key);
            }
        }
        let is_equal = unique.iter().enumerate().any(|(at, left)| {
            unique[at + 1..].iter().any(|right| equal_in_python(left, right))
        });
        let mut dict = StateDict::new();
        for key in &unique {
            dict.insert(key.clone(), 1_i64);
        }
        let result = Layout::plan(&dict, &Options::new()).map_err(|error| error.kind());
        prop_assert_eq!(result.err(), is_equal.then_some(ErrorKind::KeysCollide), "{:?}", unique);
    }
}

#[track_caller]
fn assert_rejected(dict: &StateDict, kind: ErrorKind, path: &str) {
    let error = Layout::plan(dict, &Options::new()).unwrap_err();
    assert_eq!((error.kind(), error.path()), (kind, Some(path)), "{error}");
}

#[test]
fn keys_keep_their_types() {
    let mut inner = Dict::new();
    inner.insert(1_i64, tensor(1));
    inner.insert("1", tensor(2));
    let mut dict = StateDict::new();
    dict.insert("a", inner);
    dict.insert("a.1", tensor(3));
    let archive = Archive::from_bytes(encode(&dict)).unwrap();
    assert_eq!(archive.to_state_dict().unwrap(), dict);
    let error = archive.leaf("a.1").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::AmbiguousFqn);
    assert!(error.to_string().contains(r#"["a"][1]"#), "{error}");
    let exact = ObjectPath::root().key("a").key(1);
    assert_eq!(archive.value(&exact).unwrap(), Value::from(tensor(1)));
}

/// A list has indices. A dict has keys, and a key may be an int.
#[test]
fn path_steps_match_kind_of_container() {
    let list = || Value::List((7_i64..10).map(Value::from).collect());
    let mut dict = StateDict::new();
    dict.insert("a", Dict::from_iter([("b", list())]));
    dict.insert("a.b", list());
    dict.insert("c", Dict::from_iter([(0_i64, 5_i64)]));
    let archive = Archive::from_bytes(encode(&dict)).unwrap();
    let (a, c) = (ObjectPath::root().key("a").key("b"), ObjectPath::root().key("c"));
    assert_eq!(archive.value(&a.clone().index(2)).unwrap(), Value::from(9_i64));
    assert_eq!(archive.value(&c.clone().key(0)).unwrap(), Value::from(5_i64));
    for path in [a.clone().key(2), a.clone().index(3), c.clone().index(0), c.key(1)] {
        assert_eq!(archive.value(&path).unwrap_err().kind(), ErrorKind::NotFound, "{path}");
    }
    let error = archive.leaf("a.b.2").unwrap_err().to_string();
    assert!(error.contains(r#"["a.b"][2] and ["a"]["b"][2]"#), "{error}");
}

/// Readers verify the order of keys, so the writer must sort keys with a common prefix of any length.
#[test]
fn keys_with_common_prefix_are_sorted() {
    for shared in [0, 1, 23, 24, 25, 4000] {
        let texts = ["", "\0", "\0\0", "a", "a\0", "b", "a23456789012345678901234", "\u{10ffff}"];
        let longer = texts.map(|text| format!("a23456789012345678901234{text}"));
        let texts = texts.iter().copied().chain(longer.iter().map(String::as_str));
        let texts: std::collections::BTreeSet<_> = texts.collect();
        let shared = "s".repeat(shared);
        let mut dict = StateDict::new();
        for text in texts.iter().rev() {
            dict.insert(format!("{shared}{text}"), 0);
            dict.insert(MapKey::Bytes(format!("{shared}{text}").into()), 1);
        }
        assert_eq!(Archive::from_bytes(encode(&dict)).unwrap().to_state_dict().unwrap(), dict);
        dict.insert(-1, 2);
        dict.insert(i64::MAX, 3);
        assert_eq!(Archive::from_bytes(encode(&dict)).unwrap().to_state_dict().unwrap(), dict);
    }
}

#[test]
fn loaded_dict_is_mutable() {
    let dict = Dict::from_iter([("a", 0), ("b", 1)]);
    let bytes = encode(&StateDict::from_value(dict.clone().into()).unwrap());
    let mut loaded = Archive::from_bytes(bytes).unwrap().to_state_dict().unwrap();
    assert_eq!(loaded.insert("a", 2), Some(Value::from(0)));
    assert_eq!(loaded.insert("c", 3), None);
    assert_eq!(loaded.insert("c", 4), Some(Value::from(3)));
    *loaded.entries_mut().get_mut("b").unwrap() = Value::None;
    let expected = [("a", Value::from(2)), ("b", Value::None), ("c", Value::from(4))];
    assert_eq!(loaded.entries(), &Dict::from_iter(expected));
    assert_eq!(loaded.entries().get("c"), Some(&Value::from(4)));
    assert_eq!(dict.get("c"), None);
}

#[test]
fn writer_rejects_unsupported_value_by_path() {
    let mut dict = StateDict::new();
    let mut inner = Dict::new();
    inner.insert(
        "rng",
        Value::Opaque { media: "application/x-python-pickle".into(), bytes: vec![1].into() },
    );
    dict.insert("state", inner);
    assert_rejected(&dict, ErrorKind::UntypedLeaf, r#"["state"]["rng"]"#);

    let mut dict = StateDict::new();
    dict.insert("a", Dict::from_iter([(MapKey::Bool(true), 1_i64), (MapKey::Int(1.into()), 2)]));
    assert_rejected(&dict, ErrorKind::KeysCollide, r#"["a"][True]"#);

    let flagged = |flags| {
        let tensor = tensor(1);
        let meta = tensor.meta().clone().with_flags(flags);
        Tensor::new(meta, tensor.storage().clone(), 0).unwrap()
    };
    let shard = |flags| {
        let slice = TensorSlice::new(&[0], &[1], &[2]).unwrap();
        Value::Shards(vec![Shard::new(flagged(flags), ShardSpec::new(slice)).unwrap()])
    };
    for (value, kind) in [
        (Value::Device("".into()), ErrorKind::NameLength),
        (Value::Device("d".repeat(257).into()), ErrorKind::NameLength),
        (Value::Device(surrogate()), ErrorKind::NotText),
        (Value::NamedTuple("".into(), Dict::new()), ErrorKind::NameLength),
        (Value::NamedTuple(surrogate(), Dict::new()), ErrorKind::NotText),
        (Value::Int(bigint(4096)), ErrorKind::TooLarge),
        (flagged(TensorFlags::REQUIRES_GRAD).into(), ErrorKind::TensorFlags),
        (flagged(TensorFlags::SCALAR).into(), ErrorKind::TensorFlags),
        (shard(TensorFlags::REQUIRES_GRAD), ErrorKind::TensorFlags),
    ] {
        assert_rejected(&single(value), kind, r#"["v"]"#);
    }
    for longest in [
        Value::Device("d".repeat(256).into()),
        Value::NamedTuple("t".repeat(256).into(), Dict::new()),
        Value::Int(bigint(4095)),
    ] {
        Layout::plan(&single(longest), &Options::new()).unwrap();
    }

    let mut dict = StateDict::new();
    dict.insert(MapKey::Float(Float::from(f64::NAN)), 1_i64);
    assert_rejected(&dict, ErrorKind::KeyKind, "[NaN]");

    let mut dict = StateDict::new();
    dict.insert("k".repeat(4097), 1_i64);
    let error = Layout::plan(&dict, &Options::new()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::KeyKind);

    // Two u16 views of one u8 storage, one of them at an odd byte.
    let storage = Storage::from(vec![0_u8; 8]);
    let view = |offset| {
        let meta = TensorMeta::new(Dtype::Int16, &[2]).unwrap();
        Tensor::new(meta, storage.clone(), offset).unwrap()
    };
    let mut dict = StateDict::new();
    dict.insert("even", view(0));
    dict.insert("odd", view(1));
    assert_rejected(&dict, ErrorKind::Misaligned, r#"["even"]"#);
}

#[test]
fn nesting_is_limited_to_64_levels() {
    let nested = |levels| {
        let mut value = Value::from(1_i64);
        for _ in 1..levels {
            value = Value::List(vec![value]);
        }
        let mut dict = StateDict::new();
        dict.insert("deep", value);
        dict
    };
    let legal = nested(64);
    assert_eq!(Archive::from_bytes(encode(&legal)).unwrap().to_state_dict().unwrap(), legal);
    let error = Layout::plan(&nested(65), &Options::new()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TooDeep);
    assert!(error.path().unwrap().starts_with(r#"["deep"][0][0]"#), "{error}");
}

#[test]
fn shard_must_match_its_slice() {
    let slice = |offset| TensorSlice::new(&[offset], &[4], &[8]);
    assert_eq!(slice(5).unwrap_err().kind(), ErrorKind::OutsideGlobal);
    let place = ShardSpec::new(slice(4).unwrap());
    assert_eq!(Shard::new(tensor(3), place).unwrap_err().kind(), ErrorKind::SliceMismatch);
}

/// Rules F-057 and F-111 of the format.
#[test]
fn dtypes_that_files_describe_are_checked_and_not_converted() {
    let other = |number, name| OtherDtype::new(number, name).map(Dtype::Other);
    for (number, name) in [
        (0, "a"),
        (Dtype::Float32.number(), "a"),
        (0x8000, ""),
        (0x8000, "float32"),
        (0x8000, "Upper"),
        (0x8000, "a\0"),
        (0x8000, "a234567890123456789012345678901234"),
    ] {
        let error = other(number, name).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::DtypeTable, "{number} {name:?}");
    }
    for (itemsize, values, bits) in [(0, 1, 8), (257, 1, 8), (1, 0, 8), (1, 1, 0), (1, 3, 3)] {
        let dtype = OtherDtype::new(2, "a").unwrap().with_layout(itemsize, values, bits);
        assert_eq!(dtype.unwrap_err().kind(), ErrorKind::DtypeTable, "{itemsize} {values} {bits}");
    }

    let (one, twin, namesake) = (other(2, "a"), other(2, "b"), other(3, "a"));
    let one = one.unwrap();
    for second in [twin, namesake] {
        let mut dict = single(Value::Dtype(one));
        dict.insert("second", Value::Dtype(second.unwrap()));
        let error = Layout::plan(&dict, &Options::new()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::DtypeTable);
    }

    // Overlapping tensors of elements of 256 bytes and of 1 byte.
    let block = OtherDtype::new(2, "block").unwrap().with_layout(256, 1, 8).unwrap();
    let storage = Storage::from(vec![7; 1024]);
    let view = |dtype, len, offset| {
        let meta = TensorMeta::new(dtype, &[len]).unwrap();
        Value::from(Tensor::new(meta, storage.clone(), offset).unwrap())
    };
    let mut dict = single(view(Dtype::Other(block), 3, 256));
    dict.insert("bytes", view(Dtype::Uint8, 100, 200));
    let loaded = Archive::from_bytes(encode(&dict)).unwrap().to_state_dict().unwrap();
    assert_eq!(loaded, dict);

    let meta = TensorMeta::new(one, &[3]).unwrap();
    let dict = single(Tensor::new(meta, Storage::from(vec![1, 2, 3]), 0).unwrap().into());
    let archive = Archive::from_bytes(encode(&dict)).unwrap();
    let tensor = archive.tensor("v").unwrap();
    assert_eq!(tensor.view().contiguous_bytes().unwrap(), [1, 2, 3]);
    assert_eq!(tensor.view().as_slice::<u8>().unwrap_err().kind(), ErrorKind::WrongType);
    assert_eq!(archive.other_dtypes().len(), 1);
}

#[test]
fn views_check_dtype_and_size() {
    let meta = TensorMeta::new(Dtype::Float32, &[1 << 40]).unwrap();
    let expanded = meta.with_strides(&[0]).unwrap();
    let storage = Storage::from(&[1.5_f32][..]);
    let tensor = Tensor::new(expanded, storage, 0).unwrap();
    assert_eq!(tensor.meta().span_bytes(), 4);
    let view = tensor.view();
    assert_eq!(view.to_contiguous(1 << 20).unwrap_err().kind(), ErrorKind::LimitExceeded);
    assert_eq!(view.as_slice::<f32>().unwrap_err().kind(), ErrorKind::NotContiguous);
    assert_eq!(view.as_slice::<u32>().unwrap_err().kind(), ErrorKind::WrongType);

    let mut dict = StateDict::new();
    dict.insert("expanded", tensor);
    let archive = Archive::from_bytes(encode(&dict)).unwrap();
    assert!(archive.file_len() < 8192, "the file stores the span of an expanded tensor");
    assert_eq!(archive.tensor("expanded").unwrap().meta().shape(), [1 << 40]);
}

#[test]
fn view_is_stored_without_rest_of_its_storage() {
    let storage = Storage::from(vec![9_u8; 1 << 20]);
    let meta = TensorMeta::new(Dtype::Uint8, &[10]).unwrap();
    let mut dict = StateDict::new();
    dict.insert("slice", Tensor::new(meta, storage, 1000).unwrap());
    assert!(encode(&dict).len() < 8192);
}

/// Generates nested dicts whose keys consist of a few parts and dots.
///
/// An fqn then splits into keys in many ways, most of which name no leaf.
fn dotted_dict() -> impl Strategy<Value = StateDict> {
    let key = proptest::collection::vec(
        prop_oneof![Just("a"), Just("b"), Just("1"), Just("."), Just("-")],
        0..5,
    )
    .prop_map(|parts| MapKey::from(parts.concat()));
    let key =
        prop_oneof![8 => key, 1 => Just(MapKey::from(1)), 1 => Just(MapKey::Float(1.5.into()))];
    let dict = |value: BoxedStrategy<Value>| {
        proptest::collection::vec((key.clone(), value), 0..12).prop_map(Dict::from_iter)
    };
    let leaf = Just(Value::None).boxed();
    let inner = dict(leaf.clone()).prop_map(Value::from).boxed();
    let middle = dict(prop_oneof![leaf.clone(), inner.clone()].boxed()).prop_map(Value::from);
    dict(prop_oneof![leaf, inner, middle].boxed())
        .prop_map(|dict| StateDict::from_value(dict.into()).unwrap())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn fqn_lookup_tries_every_split_into_keys(dict in dotted_dict()) {
        let archive = Archive::from_bytes(encode(&dict)).unwrap();
        let fqns: Vec<String> = dict.leaves().iter().map(|(path, _)| path.fqn()).collect();
        let prefixes = fqns.iter().flat_map(|fqn| (0..=fqn.len()).map(|end| &fqn[..end]));
        for fqn in prefixes {
            let expected = match fqns.iter().filter(|other| *other == fqn).count() {
                0 => Err(ErrorKind::NotFound),
                1 => Ok(Value::None),
                _ => Err(ErrorKind::AmbiguousFqn),
            };
            prop_assert_eq!(archive.leaf(fqn).map_err(|error| error.kind()), expected, "{}", fqn);
        }
    }
}

#[test]
fn archive_opens_at_any_alignment_in_memory() {
    let dict = StateDict::from_value(Dict::from_iter([("a", Value::from(tensor(5)))]).into());
    let dict = dict.unwrap();
    let file = encode(&dict);
    let opened = [0, 1, 2, 4, 7, 8].map(|shift| {
        let memory = Bytes::from([vec![0; shift], file.clone()].concat());
        let archive = Archive::from_bytes(memory.slice(shift..)).unwrap();
        assert_eq!(archive.to_state_dict().unwrap(), dict);
        (shift, memory, archive)
    });
    for (shift, memory, archive) in opened {
        let is_inside = memory.as_ptr_range().contains(&archive.index_bytes().as_ptr());
        let is_aligned = (memory.as_ptr().addr() + shift).is_multiple_of(8);
        assert_eq!(is_inside, is_aligned, "an aligned index is not copied");
        // An index in memory that may change is copied.
        let archive = Archive::from_blob(Arc::new(SharedBlob(memory.slice(shift..)))).unwrap();
        assert!(!memory.as_ptr_range().contains(&archive.index_bytes().as_ptr()));
        assert_eq!(archive.to_state_dict().unwrap(), dict);
    }
}

/// A blob in memory that may change.
struct SharedBlob(Bytes);

impl Blob for SharedBlob {
    fn size(&self) -> std::io::Result<u64> {
        self.0.size()
    }

    fn read_exact_at(&self, target: &mut [u8], offset: u64) -> std::io::Result<()> {
        self.0.read_exact_at(target, offset)
    }

    fn bytes(&self) -> Option<&Bytes> {
        Some(&self.0)
    }
}

#[test]
fn write_to_full_disk_fails_with_io_error() {
    struct LimitedWriter(usize);
    impl std::io::Write for LimitedWriter {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            let written = self.0.min(bytes.len());
            self.0 -= written;
            if written == 0 { Err(std::io::ErrorKind::StorageFull.into()) } else { Ok(written) }
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let mut dict = StateDict::new();
    dict.insert("weight", tensor(200));
    let layout = Layout::plan(&dict, &Options::new()).unwrap();
    let whole = usize::try_from(layout.file_len()).unwrap();
    for capacity in (0..whole).step_by(97) {
        let error = layout.write_to(&mut LimitedWriter(capacity)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Io);
    }
    layout.write_to(&mut LimitedWriter(whole)).unwrap();
}

#[test]
fn long_str_is_stored_in_blob() {
    let long = Text::from_generalized_utf8([&b"\xED\xA0\x80"[..], &[b'x'; 5000]].concat()).unwrap();
    let mut dict = StateDict::new();
    dict.insert("long", Value::Str(long));
    let archive = Archive::from_bytes(encode(&dict)).unwrap();
    assert_eq!(archive.storage_count(), 1);
    assert_eq!(archive.to_state_dict().unwrap(), dict);
}

/// Readers open every archive that a plan accepts, so a plan rejects what readers reject.
#[test]
fn plan_rejects_what_readers_reject() {
    let divergent = Dict::from_iter([(0_i64, 1_i64)]);
    let mut dict = StateDict::new();
    dict.insert("d", Value::Divergent(divergent));
    assert_rejected(&dict, ErrorKind::DivergentNode, r#"["d"]"#);

    let mut dict = StateDict::new();
    dict.insert("p", Value::NamedTuple("P".into(), Dict::from_iter([(1_i64, 2_i64)])));
    assert_rejected(&dict, ErrorKind::KeyKind, r#"["p"]"#);

    let shard = |global: u64, elements: &[f32]| {
        let slice = TensorSlice::new(&[0], &[elements.len() as u64], &[global]).unwrap();
        let local = Tensor::from_slice(elements, &[elements.len() as u64]).unwrap();
        Shard::new(local, ShardSpec::new(slice)).unwrap()
    };
    let mut dict = StateDict::new();
    dict.insert("s", Value::Shards(vec![shard(4, &[1.0]), shard(5, &[1.0])]));
    assert_rejected(&dict, ErrorKind::MixedRun, r#"["s"]"#);

    let mut dict = StateDict::new();
    dict.insert("size", Value::Size(vec![1; 65].into()));
    assert_rejected(&dict, ErrorKind::RankTooLarge, r#"["size"]"#);

    let slice = TensorSlice::new(&[0], &[1], &[1]).unwrap();
    for mesh in [&[0][..], &[1 << 40], &[1 << 40, 1 << 40]] {
        let error = slice.clone().with_mesh(mesh, None).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::MeshMismatch);
    }
    // The offset of a tensor without elements has no meaning.
    let meta = TensorMeta::new(Dtype::Uint8, &[0]).unwrap();
    let mut dict = StateDict::new();
    dict.insert("empty", Tensor::new(meta, Storage::default(), u64::MAX).unwrap());
    assert_eq!(Archive::from_bytes(encode(&dict)).unwrap().to_state_dict().unwrap(), dict);
}

/// A stream whose third write fails. Other writes succeed.
struct FailsThirdWrite(u32);
impl std::io::Write for FailsThirdWrite {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0 += 1;
        if self.0 == 3 { Err(std::io::ErrorKind::StorageFull.into()) } else { Ok(bytes.len()) }
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn streaming_writer_survives_rejected_entries_but_not_io_errors() {
    let mut writer = ArchiveWriter::new(Vec::new(), Options::new()).unwrap();
    let storage = Storage::from(vec![0_u8; 40]);
    let view = |dtype, offset| {
        let meta = TensorMeta::new(dtype, &[4]).unwrap();
        Value::from(Tensor::new(meta, storage.clone(), offset).unwrap())
    };
    let odd = Value::List(vec![tensor(9).into(), view(Dtype::Float32, 5), view(Dtype::Float32, 6)]);
    assert_eq!(writer.insert("odd", odd).unwrap_err().kind(), ErrorKind::Misaligned);
    let nan = writer.insert(MapKey::Float(f64::NAN.into()), 1_i64).unwrap_err();
    assert_eq!(nan.kind(), ErrorKind::KeyKind);
    writer.insert("good", tensor(3)).unwrap();
    for (dict, key) in [(f64::NAN, 1.0), (1.0, f64::NAN)] {
        let [dict, key] = [dict, key].map(|float| MapKey::Float(float.into()));
        let nan = writer.insert_into(dict, key, 1_i64).unwrap_err();
        assert_eq!(nan.kind(), ErrorKind::KeyKind);
    }
    // `insert_into` extends a dict while other entries are inserted. A value of `insert` is complete.
    writer.insert_into("one", "a", tensor(1)).unwrap();
    writer.insert_into("other", "a", tensor(2)).unwrap();
    writer.insert_into("one", "b", vec![7_i64.into()]).unwrap();
    writer.insert("whole", Dict::from_iter([("a", Value::from(1_i64))])).unwrap();
    for result in [
        writer.insert_into("one", "a", 1_i64),
        writer.insert_into("whole", "b", 1_i64),
        writer.insert_into("good", "b", 1_i64),
        writer.insert("one", 1_i64),
    ] {
        assert_eq!(result.unwrap_err().kind(), ErrorKind::DuplicateKey);
    }
    let archive = Archive::from_bytes(writer.finish().unwrap()).unwrap();
    archive.verify().unwrap();
    assert_eq!(archive.tensor("good").unwrap(), tensor(3));
    let names: Vec<String> = archive.leaves().iter().map(|(path, _)| path.fqn()).collect();
    assert_eq!(names, ["good", "one.a", "one.b.0", "other.a", "whole.a"]);
    assert_eq!(archive.tensor("other.a").unwrap(), tensor(2));

    let mut writer = ArchiveWriter::new(FailsThirdWrite(0), Options::new()).unwrap();
    assert_eq!(writer.insert("a", tensor(9)).unwrap_err().kind(), ErrorKind::Io);
    assert_eq!(writer.insert("a", tensor(9)).unwrap_err().kind(), ErrorKind::Io);
    assert!(writer.finish().is_err());
}

/// A tensor of 3 * 2^60 elements is compared by its stored bytes: comparing elements would take years.
#[test]
fn expanded_tensors_are_compared_by_stored_bytes() {
    let expanded = || {
        let meta = TensorMeta::new(Dtype::Uint8, &[1 << 60, 3]).unwrap();
        let meta = meta.with_strides(&[0, 1]).unwrap();
        Tensor::new(meta, Storage::from(vec![1, 2, 3]), 0).unwrap()
    };
    assert!(expanded() == expanded());
}

#[test]
fn fqn_may_be_longer_than_any_key() {
    let value = (0..50).fold(Value::from(7_i64), |value, _| {
        Value::Dict(Dict::from_iter([("k".repeat(100), value)]))
    });
    let dict = StateDict::from_value(value).unwrap();
    let fqn = dict.leaves()[0].0.fqn();
    assert!(fqn.len() > 4096);
    let archive = Archive::from_bytes(encode(&dict)).unwrap();
    assert_eq!(archive.leaf(&fqn).unwrap(), Value::from(7_i64));
    let nan = ObjectPath::root().key(MapKey::Float(f64::NAN.into()));
    assert_eq!(archive.value(&nan).unwrap_err().kind(), ErrorKind::NotFound);
}
