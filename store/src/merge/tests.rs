//! Tests of the merge of the archives of several writers.

use std::sync::Arc;

use bytes::Bytes;
use tssd_format::{
    Blob, ClassTag, Compression, DeltaClasses, DeltaDraft, Dict, Dtype, Options, OtherDtype, Shard,
    ShardSpec, StateDict, Storage, TaggedClass, Tensor, TensorMeta, TensorSlice,
    TorchStoreStateDict, Value, to_json,
};

use super::*;

/// The archives of writers 1, 3, 5 and so on. No writer number is equal to its index.
struct Archives {
    files: Vec<Bytes>,
    contributions: Vec<WriterArchive>,
}

impl Archives {
    fn new<const N: usize>(dicts: [StateDict; N]) -> Self {
        Self::with_options(dicts.map(|dict| (dict, Options::new())))
    }

    fn with_options<const N: usize>(dicts: [(StateDict, Options); N]) -> Self {
        let encode = |(dict, options): (StateDict, Options)| {
            TorchStoreStateDict::with_options(&dict, &options).unwrap().as_bytes().clone()
        };
        let files = dicts.map(encode).to_vec();
        let contribution = |(index, bytes): (u32, &Bytes)| WriterArchive {
            writer: 2 * index + 1,
            file: format!("{index}.tssd"),
            archive: Archive::from_bytes(bytes.clone()).unwrap(),
            is_readable: true,
        };
        let contributions = (0..).zip(&files).map(contribution).collect();
        Self { files, contributions }
    }

    /// Makes the bytes of the archives with these indices unreadable.
    fn unreadable(mut self, indices: &[usize]) -> Self {
        for index in indices {
            self.contributions[*index].is_readable = false;
        }
        self
    }

    /// Returns the merged version, as readers open it.
    fn merge_with(&self, divergent: DivergencePolicy) -> Result<Archive, String> {
        let label = VersionAttrs {
            id: 0xAB,
            epoch: 3,
            number: 7,
            writers: self.contributions.iter().map(|each| each.writer).collect(),
            digest: ArchiveDigest([5; 16]),
        };
        let open = |file: &ShardFile| -> tssd_format::Result<Arc<dyn Blob>> {
            let index = self.contributions.iter().position(|each| each.file == file.name);
            Ok(Arc::new(self.files[index.unwrap()].clone()))
        };
        let merge = |min_distributed_slices| {
            let options = MergeOptions { divergent, min_distributed_slices };
            let manifest = Bytes::from(merge(&self.contributions, options, &label)?);
            let archive = Archive::from_shard_set(Arc::new(manifest), open).unwrap();
            archive.verify_deep().unwrap();
            Ok::<_, String>(archive)
        };
        let archive = merge(usize::MAX)?;
        // Distributed leaves mean the same as the slices that they stand for.
        assert_eq!(content_view(&merge(0)?), content_view(&archive));
        Ok(archive)
    }

    fn merge(&self) -> Result<Archive, String> {
        self.merge_with(DivergencePolicy::Error)
    }

    #[track_caller]
    fn expect_disagreement(&self, fqn: &str, what: &str) {
        let writers: WriterSet = self.contributions.iter().map(|each| each.writer).collect();
        let error = self.merge().map(|_| ()).unwrap_err();
        let prefix = format!("writers {writers} disagree on `{fqn}`: {what}");
        assert!(error.starts_with(&prefix), "{error}");
    }
}

fn dict<const N: usize>(entries: [(&str, Value); N]) -> StateDict {
    let mut dict = StateDict::new();
    for (name, value) in entries {
        dict.insert(name, value);
    }
    dict
}

fn tensor(elements: &[u32]) -> Tensor {
    Tensor::from_slice(elements, &[elements.len() as u64]).unwrap()
}

/// Returns a slice of a global vector.
fn slice(offset: u64, elements: &[u32], global: u64) -> Value {
    let len = elements.len() as u64;
    let slice = TensorSlice::new(&[offset], &[len], &[global]).unwrap();
    Shard::new(tensor(elements), ShardSpec::new(slice)).unwrap().into()
}

/// Returns a text that is too long for the index, so it has a storage.
fn long(letter: &str) -> Value {
    Value::from(letter.repeat(5000))
}

/// Returns the names of the leaves in order, each with its storages.
fn storages(archive: &Archive) -> Vec<(String, Vec<u32>)> {
    let leaves = archive.leaves().into_iter();
    leaves.map(|(path, node)| (path.fqn(), node.storages().collect())).collect()
}

fn numbers(archive: &Archive) -> Vec<u32> {
    storages(archive).into_iter().flat_map(|(_, storages)| storages).collect()
}

fn names(archive: &Archive) -> Vec<String> {
    storages(archive).into_iter().map(|(name, _)| name).collect()
}

/// Returns the JSON view of an archive without the fingerprint of the layout of its manifest.
fn content_view(archive: &Archive) -> Json {
    let mut view = to_json(archive).unwrap();
    let attrs = view["attrs"].as_array_mut().unwrap();
    attrs.retain(|attr| attr[0] != "tssd.store.layout_fingerprint");
    view
}

#[test]
fn merge_keeps_all_leaves_and_stores_shared_ones_once() {
    let dict_of = |own: &str, number: u32| {
        let mut dict = dict([("all", tensor(&[1, 2]).into()), ("text", long("x"))]);
        dict.insert(own, tensor(&[number; 3]));
        dict.insert("step", 12_i64);
        dict
    };
    let found =
        Archives::new([dict_of("b", 10), dict_of("a", 11), dict_of("c", 12)]).merge().unwrap();
    assert_eq!(names(&found), ["all", "text", "b", "step", "a", "c"]);
    let expected = dict([
        ("all", tensor(&[1, 2]).into()),
        ("text", long("x")),
        ("b", tensor(&[10; 3]).into()),
        ("step", Value::from(12_i64)),
        ("a", tensor(&[11; 3]).into()),
        ("c", tensor(&[12; 3]).into()),
    ]);
    assert_eq!(found.to_state_dict().unwrap(), expected);
    // A shared leaf is stored in the archive of the first writer. Storages that no leaf names are left out.
    let shards: Vec<u32> =
        (0..found.storage_count()).map(|number| found.storage(number).shard).collect();
    assert_eq!(shards, [0, 0, 0, 1, 2]);
    let files: Vec<(String, u32)> =
        found.shards().into_iter().map(|shard| (shard.name, shard.writer)).collect();
    assert_eq!(files, [("0.tssd".into(), 1), ("1.tssd".into(), 3), ("2.tssd".into(), 5)]);
}

#[test]
fn divergent_leaves_follow_the_option() {
    let bytes = |letter: u8| Value::Bytes(vec![letter; 5000].into());
    for (what, one, other) in [
        ("numbers", Value::from(1_i64), Value::from(2_i64)),
        ("a number and none", Value::from(1_i64), Value::None),
        ("texts", long("x"), long("y")),
        ("texts of other lengths", long("x"), Value::from("x".repeat(5001))),
        ("text and bytes", long("x"), bytes(b'x')),
        ("elements", tensor(&[1, 2]).into(), tensor(&[1, 3]).into()),
        (
            "shapes",
            tensor(&[1, 2]).into(),
            Tensor::from_slice(&[1_u32, 2], &[2, 1]).unwrap().into(),
        ),
        ("dtypes", tensor(&[1, 2]).into(), Tensor::from_slice(&[1_i32, 2], &[2]).unwrap().into()),
        ("a tensor and a number", tensor(&[1]).into(), Value::from(1_i64)),
    ] {
        let dict_of = |value: &Value| {
            dict([("inner", Value::Dict(dict([("x", value.clone())]).entries().clone()))])
        };
        let archives = Archives::new([dict_of(&one), dict_of(&other), dict_of(&one)]);
        archives.expect_disagreement("inner.x", "different values; shard it, or put with");
        let lowest = archives.merge_with(DivergencePolicy::Lowest).unwrap();
        assert_eq!(lowest.to_state_dict().unwrap(), dict_of(&one), "{what}");
        let keep = archives.merge_with(DivergencePolicy::Keep).unwrap();
        let mut entries = Dict::new();
        for (writer, value) in [(1, &one), (3, &other), (5, &one)] {
            entries.insert(MapKey::from_writer(writer), value.clone());
        }
        let inner = dict([("x", Value::Divergent(entries))]).entries().clone();
        let expected = dict([("inner", Value::Dict(inner))]);
        assert_eq!(keep.to_state_dict().unwrap(), expected, "{what}");
    }
}

#[test]
fn containers_must_agree_in_kind_and_lists_in_length() {
    let numbers = |count: i64| (0..count).map(Value::from).collect::<Vec<_>>();
    let entries = || dict([("y", Value::from(1_i64))]).entries().clone();
    for (one, other, what) in [
        (Value::Dict(entries()), Value::from(1_i64), "some hold a container and some a leaf"),
        (Value::from(1_i64), Value::Dict(entries()), "some hold a container and some a leaf"),
        (Value::Dict(entries()), Value::OrderedDict(entries()), "containers of different kinds"),
        (Value::List(numbers(2)), Value::Tuple(numbers(2)), "containers of different kinds"),
        (Value::List(numbers(2)), Value::List(numbers(3)), "different numbers of elements"),
        (Value::Tuple(numbers(3)), Value::Tuple(numbers(2)), "different numbers of elements"),
    ] {
        let archives = Archives::new([dict([("x", one)]), dict([("x", other)])]);
        archives.expect_disagreement("x", what);
    }
    let same = || dict([("x", Value::List(numbers(3))), ("y", Value::OrderedDict(entries()))]);
    let found = Archives::new([same(), same()]).merge().unwrap();
    assert_eq!(found.to_state_dict().unwrap(), same());
    // Dicts of several writers may have different keys.
    let dict_of = |name| Value::OrderedDict(dict([(name, Value::from(1_i64))]).entries().clone());
    let found =
        Archives::new([dict([("x", dict_of("a"))]), dict([("x", dict_of("b"))])]).merge().unwrap();
    assert_eq!(names(&found), ["x.a", "x.b"]);
}

#[test]
fn sets_merge_as_a_whole_and_counters_by_entry() {
    let set = |elements: [&str; 2]| Value::set(elements.map(Into::into)).unwrap();
    let same = Archives::new([dict([("s", set(["a", "b"]))]), dict([("s", set(["b", "a"]))])]);
    assert_eq!(same.merge().unwrap().to_state_dict().unwrap(), dict([("s", set(["a", "b"]))]));

    let different = Archives::new([dict([("s", set(["a", "b"]))]), dict([("s", set(["a", "c"]))])]);
    different.expect_disagreement("s", "different values");
    let lowest = different.merge_with(DivergencePolicy::Lowest).unwrap();
    assert_eq!(lowest.to_state_dict().unwrap(), dict([("s", set(["a", "b"]))]));
    let keep = different.merge_with(DivergencePolicy::Keep).unwrap().to_state_dict().unwrap();
    let Value::Divergent(values) = keep.at(&ObjectPath::root().key("s")).unwrap() else {
        panic!("each writer has its set")
    };
    assert_eq!(values.get(MapKey::from_writer(3)), Some(&set(["a", "c"])));

    let counter = |entries: Vec<(&str, i64)>| {
        let tag = ClassTag::new(TaggedClass::Counter, 0).unwrap();
        Value::Tagged(tag, Value::Dict(entries.into_iter().collect()).into())
    };
    let counters = Archives::new([
        dict([("c", counter(vec![("a", 1)]))]),
        dict([("c", counter(vec![("b", 2), ("a", 1)]))]),
    ]);
    let merged = counters.merge().unwrap().to_state_dict().unwrap();
    assert_eq!(merged, dict([("c", counter(vec![("a", 1), ("b", 2)]))]));
}

/// Returns a wrapper with two inner tensors.
fn wrapper(data: Value, scale: Value, context: Value) -> Value {
    let tensors: Dict = [("data", data), ("scale", scale)].into_iter().collect();
    let fields = [
        ("class", "module.Class".into()),
        ("tensors", Value::Dict(tensors)),
        ("context", context),
        ("size", Value::Size([2].into())),
        ("stride", Value::Size([1].into())),
    ];
    let tag = ClassTag::new(TaggedClass::Wrapper, 0).unwrap();
    Value::Tagged(tag, Value::Dict(fields.into_iter().collect()).into())
}

#[test]
fn wrappers_are_merged_as_a_whole() {
    let plain = |scale: u32, context: i64| {
        wrapper(tensor(&[1, 2]).into(), tensor(&[scale]).into(), context.into())
    };
    let merge = |one: Value, other: Value, divergent| {
        let archives = Archives::new([dict([("w", one)]), dict([("w", other)])]);
        archives.merge_with(divergent).map(|found| found.to_state_dict().unwrap())
    };
    let same = merge(plain(1, 2), plain(1, 2), DivergencePolicy::Error).unwrap();
    assert_eq!(same, dict([("w", plain(1, 2))]));
    for other in [plain(1, 3), plain(2, 2)] {
        let message = merge(plain(1, 2), other.clone(), DivergencePolicy::Error).unwrap_err();
        assert!(message.contains("disagree on `w`: different values"), "{message}");
        let lowest = merge(plain(1, 2), other.clone(), DivergencePolicy::Lowest).unwrap();
        assert_eq!(lowest, dict([("w", plain(1, 2))]));
        let keep = merge(plain(1, 2), other.clone(), DivergencePolicy::Keep).unwrap();
        let Value::Divergent(values) = keep.at(&ObjectPath::root().key("w")).unwrap() else {
            panic!("each writer has its wrapper")
        };
        assert_eq!(values.get(MapKey::from_writer(3)), Some(&other));
    }

    let half =
        |start: u64, context: Value| wrapper(slice(start, &[7], 2), slice(start, &[9], 2), context);
    let merged = merge(half(0, 5.into()), half(1, 5.into()), DivergencePolicy::Error).unwrap();
    let path = ObjectPath::root().key("w").key("tensors").key("data");
    let Value::Shards(shards) = merged.at(&path).unwrap() else { panic!("it has slices") };
    assert_eq!(shards.len(), 2);
    // A context of another writer does not belong to the slices, so no option allows it.
    let context = |name: &str| Value::Dict([(name, Value::from(5))].into_iter().collect());
    for divergent in [DivergencePolicy::Error, DivergencePolicy::Lowest, DivergencePolicy::Keep] {
        let message = merge(half(0, 5.into()), half(1, 6.into()), divergent).unwrap_err();
        let expected = "disagree on `w.context`: different values in a tensor that wraps tensors";
        assert!(message.ends_with(expected), "{message}");
        merge(half(0, context("a")), half(1, context("b")), divergent).unwrap_err();
    }
}

#[test]
fn slices_must_tile_their_tensor() {
    let dict_of = |value| dict([("x", value)]);
    let found = Archives::new([
        dict_of(slice(2, &[3, 4], 5)),
        dict_of(slice(0, &[1, 2], 5)),
        // A replica, of which the first is kept, and a slice without elements.
        dict_of(slice(2, &[3, 4], 5)),
        dict_of(slice(5, &[], 5)),
        dict_of(slice(4, &[5], 5)),
    ])
    .merge()
    .unwrap();
    let [(_, Node::Tensors(references))] = &*found.leaves() else { panic!("one leaf of slices") };
    let slices: Vec<(u64, u32)> = references
        .iter()
        .map(|each| {
            let spec = each.shard_spec.as_ref().unwrap();
            (spec.slice().offsets()[0], found.storage(each.storage.unwrap()).shard)
        })
        .collect();
    // Each slice is there once. Their order is not checked.
    let mut sorted = slices.clone();
    sorted.sort_unstable();
    assert_eq!(sorted, [(0, 1), (2, 0), (4, 4)]);

    let whole = || dict_of(tensor(&[1, 2, 3, 4]).into());
    for (one, other) in
        [(whole(), dict_of(slice(0, &[1; 4], 4))), (dict_of(slice(0, &[1; 4], 4)), whole())]
    {
        let archives = Archives::new([one, other]);
        archives.expect_disagreement("x", "some hold slices and some a whole leaf");
    }
    let error = |one: Value, other: Value| {
        Archives::new([dict_of(one), dict_of(other)]).merge().map(|_| ()).unwrap_err()
    };
    let other_dtype = {
        let local = Tensor::from_slice(&[1_i8], &[1]).unwrap();
        let slice = TensorSlice::new(&[1], &[1], &[2]).unwrap();
        Shard::new(local, ShardSpec::new(slice)).unwrap().into()
    };
    let message = error(slice(0, &[1], 2), other_dtype);
    assert_eq!(message, "`x` is uint32 at writer 1 and int8 at writer 3");
    let message = error(slice(0, &[1], 2), slice(1, &[1], 3));
    assert_eq!(message, "`x` has the global shape [2] at writer 1 and [3] at writer 3");
    for other in [slice(2, &[1], 4), slice(1, &[1, 1, 1], 4), slice(0, &[1], 4)] {
        let message = error(slice(0, &[1, 1], 4), other);
        let writers: WriterSet = [1, 3].into_iter().collect();
        let end = format!("; writers {writers} hold it");
        assert!(message.starts_with("`x`: ") && message.ends_with(&end), "{message}");
    }
    // A single writer must hold the whole tensor too.
    Archives::new([dict_of(slice(0, &[1, 1], 4))]).merge().map(|_| ()).unwrap_err();
    // One reference to a tensor without elements stays.
    let found =
        Archives::new([dict_of(slice(0, &[], 0)), dict_of(slice(0, &[], 0))]).merge().unwrap();
    assert_eq!(storages(&found), [("x".to_owned(), vec![])]);
}

#[test]
fn equal_elements_match_in_any_storage() {
    let dict_of = |tensor: Tensor| dict([("x", Value::from(tensor))]);
    let merge = |archives: &Archives| archives.merge().map(|found| storages(&found)[0].1.clone());
    // At one offset of equal storages, the bytes need not be read.
    let same =
        Archives::new([dict_of(tensor(&[1, 2])), dict_of(tensor(&[1, 2]))]).unreadable(&[0, 1]);
    assert_eq!(merge(&same), Ok(vec![0]));
    let empty = Archives::new([dict_of(tensor(&[])), dict_of(tensor(&[]))]).unreadable(&[0, 1]);
    assert_eq!(merge(&empty), Ok(vec![]));
    // A view of a part of a storage, and another leaf with the whole storage.
    let part = |all: &[u32], start: u64, len: u64| {
        let all = tensor(all);
        let meta = TensorMeta::new(Dtype::Uint32, &[len]).unwrap();
        let part = Tensor::new(meta, all.storage().clone(), 4 * start).unwrap();
        dict([("x", part.into()), ("all", all.into())])
    };
    let mixed = || Archives::new([dict_of(tensor(&[1, 2])), part(&[7, 1, 2], 1, 2)]);
    assert_eq!(merge(&mixed()), Ok(vec![0]));
    for indices in [&[0][..], &[1], &[0, 1]] {
        mixed().unreadable(indices).expect_disagreement("x", "different values");
    }
    // Equal storages, different offsets.
    let different_offsets = || Archives::new([part(&[5, 5, 5], 2, 1), part(&[5, 5, 5], 1, 1)]);
    assert_eq!(merge(&different_offsets()), Ok(vec![0]));
    different_offsets().unreadable(&[1]).expect_disagreement("x", "different values");
    let differing = Archives::new([dict_of(tensor(&[1, 2])), part(&[7, 1, 3], 1, 2)]);
    differing.expect_disagreement("x", "different values");
}

/// Rule F-057 of the format, for the merged tree.
#[test]
fn writers_must_describe_dtypes_alike() {
    let leaf = |values| {
        let dtype = OtherDtype::new(0x8000, "example.block").unwrap();
        Value::Dtype(Dtype::Other(dtype.with_layout(4, values, 4).unwrap()))
    };
    let merged = Archives::new([dict([("a", leaf(8))]), dict([("b", leaf(8))])]).merge().unwrap();
    assert_eq!(merged.other_dtypes().len(), 1);
    let error =
        Archives::new([dict([("a", leaf(8))]), dict([("b", leaf(4))])]).merge().unwrap_err();
    assert!(error.contains("have the same number"), "{error}");
}

#[test]
fn archives_that_are_deltas_are_refused() {
    let version = |last| dict([("x", tensor(&[1, 2, last]).into())]);
    let mut archives = Archives::new([version(3), version(4)]);
    let [base, result] = [0, 1].map(|index: usize| archives.contributions[index].archive.clone());
    let draft = DeltaDraft::between(&base, &result, DeltaClasses::One).unwrap();
    let mut delta = Vec::new();
    draft.plan().unwrap().write_to(&mut delta).unwrap();
    archives.contributions[1].archive = Archive::from_bytes(delta).unwrap();
    let error = archives.merge().map(drop).unwrap_err();
    assert_eq!(error, "the archive of writer 3 is a delta");
}

#[test]
fn overlapping_elements_are_compared_as_bytes() {
    // A windowed view of few bytes, as `unfold` makes it. To compare each element would take years.
    let x = |last: u8, lead: u64| {
        let mut bytes = vec![7; usize::try_from(6 * 1023 + 1 + lead).unwrap()];
        *bytes.last_mut().unwrap() = last;
        let meta = TensorMeta::new(Dtype::Uint8, &[1024; 6]).unwrap();
        let meta = meta.with_strides(&[1; 6]).unwrap();
        dict([("x", Tensor::new(meta, Storage::from_owner(bytes), lead).unwrap().into())])
    };
    assert!(Archives::new([x(7, 0), x(7, 0)]).merge().is_ok());
    // In storages with other contents.
    assert!(Archives::new([x(7, 0), x(7, 3)]).merge().is_ok());
    Archives::new([x(7, 0), x(8, 0)]).expect_disagreement("x", "different values");
    Archives::new([x(7, 0), x(8, 3)]).expect_disagreement("x", "different values");
}

#[test]
fn compressed_tensors_match_by_digest_or_contents() {
    let dict_of = || dict([("x", Value::from(tensor(&[7; 1000])))]);
    let raw = Options::new();
    let compressed = Options::new().compress(Compression::Zstd);
    for (one, other, is_equal) in [
        (raw.clone(), raw.clone(), true),
        (compressed.clone(), compressed.clone(), true),
        (raw.clone(), compressed.clone(), false),
        (compressed.clone(), raw.clone(), false),
        (raw.clone().digests(), compressed.clone().digests(), true),
        (raw.clone().digests(), raw.clone(), true),
        (raw.digests(), compressed, false),
    ] {
        let archives =
            || Archives::with_options([(dict_of(), one.clone()), (dict_of(), other.clone())]);
        assert_eq!(archives().merge().unwrap().storage_count(), 1);
        let unreadable = archives().unreadable(&[0, 1]);
        if is_equal {
            assert_eq!(unreadable.merge().unwrap().storage_count(), 1);
        } else {
            unreadable.expect_disagreement("x", "different values");
        }
    }
    // Equal lengths, different bytes.
    let other = || dict([("x", Value::from(tensor(&[8; 1000])))]);
    for options in [Options::new(), Options::new().digests()] {
        let archives = Archives::with_options([(dict_of(), options.clone()), (other(), options)]);
        archives.unreadable(&[0, 1]).expect_disagreement("x", "different values");
    }
}

/// A tie survives if every writer that holds both leaves has the tie.
#[test]
fn tie_survives_only_if_all_holders_have_it() {
    // Leaves with the same letter are tied. `aab` stands for three leaves, the first two tied.
    let dict_of = |leaves: &str| {
        let mut tied = BTreeMap::new();
        let mut dict = StateDict::new();
        for (name, letter) in ["x", "y", "z"].into_iter().zip(leaves.chars()) {
            if letter != '-' {
                let tensor = tied.entry(letter).or_insert_with(|| tensor(&[1, 2, 3]));
                dict.insert(name, tensor.clone());
            }
        }
        dict
    };
    for (one, other, expected) in [
        ("aab", "aab", "aab"),
        ("aab", "abc", "abc"),
        ("abc", "aab", "abc"),
        ("aaa", "aab", "aab"),
        ("aab", "aaa", "aab"),
        ("aab", "aba", "abc"),
        ("aab", "abb", "abc"),
        ("aaa", "aa-", "aaa"),
        ("aaa", "a-b", "aab"),
        // A leaf that the first writer lacks is stored in the archive of another writer.
        ("aa-", "aaa", "aab"),
        ("aa-", "--b", "aab"),
    ] {
        let found = Archives::new([dict_of(one), dict_of(other)]).merge().unwrap();
        let found = numbers(&found);
        let mut letters = Vec::new();
        for storage in &found {
            if !letters.contains(storage) {
                letters.push(*storage);
            }
        }
        let letter = |storage: &u32| {
            let index = letters.iter().position(|each| each == storage).unwrap();
            ["a", "b", "c"][index]
        };
        let found: String = found.iter().map(letter).collect();
        assert_eq!(found, expected, "{one} and {other}");
    }
    let single = Archives::new([dict_of("aab")]).merge().unwrap();
    assert_eq!(numbers(&single), [0, 0, 1]);
}

#[test]
fn manifest_has_common_attributes_and_version() {
    let input = |options: Options| (dict([("x", Value::from(tensor(&[1])))]), options);
    let step = |step: i64| Options::new().attr("step", AttrValue::Int(step));
    let run = Options::new().attr("run", AttrValue::Text("r".into()));
    let found =
        Archives::with_options([input(step(3)), input(run), input(step(3))]).merge().unwrap();
    let attrs = found.attrs();
    assert_eq!(attrs["step"], AttrValue::Int(3));
    assert_eq!(attrs["run"], AttrValue::Text("r".into()));
    assert_eq!(attrs["tssd.store.version"], AttrValue::Int(7));
    assert_eq!(attrs["tssd.store.epoch"], AttrValue::Int(3));
    assert_eq!(attrs["tssd.store.id"], AttrValue::Text(format!("{:032x}", 0xAB).into()));
    assert_eq!(
        attrs["tssd.store.digest"],
        AttrValue::Text(ArchiveDigest([5; 16]).to_string().into())
    );
    let writers: WriterSet = [1, 3, 5].into_iter().collect();
    assert_eq!(attrs["tssd.store.writers"], AttrValue::Text(writers.to_string().into()));
    let message =
        Archives::with_options([input(step(3)), input(step(4))]).merge().map(|_| ()).unwrap_err();
    assert_eq!(message, "writer 3 gives the attribute `step` another value");
    // Module metadata of several writers is merged.
    let modules = |text: &str| {
        input(Options::new().attr("tssd.module_metadata", AttrValue::Text(text.into())))
    };
    let [first, last] =
        [r#"{"[]":{"":{"version":1},"a":{"version":2}}}"#, r#"{"[]":{"":{"version":1},"b":{}}}"#];
    let found =
        Archives::with_options([modules(first), input(step(3)), modules(last)]).merge().unwrap();
    let both = r#"{"[]":{"":{"version":1},"a":{"version":2},"b":{}}}"#;
    assert_eq!(found.attrs()["tssd.module_metadata"], AttrValue::Text(both.into()));
    for other in [r#"{"[]":{"":{"version":2}}}"#, r#"{"[]":{"":1}}"#, "no JSON"] {
        let message = Archives::with_options([modules(first), modules(other)])
            .merge()
            .map(|_| ())
            .unwrap_err();
        assert_eq!(message, "writer 3 gives the attribute `tssd.module_metadata` another value");
    }
    // The compression level of an archive is not an attribute of the version.
    let level = |level| input(Options::new().compress(Compression::Zstd).zstd_level(level));
    let found = Archives::with_options([level(2), level(3)]).merge().unwrap();
    assert!(!found.attrs().contains_key(ZSTD_LEVEL_ATTR));
}

#[test]
fn layout_fingerprint_ignores_values() {
    let layout = |dicts: [StateDict; 2]| {
        Archives::new(dicts)
            .merge()
            .unwrap()
            .attrs()
            .remove("tssd.store.layout_fingerprint")
            .unwrap()
    };
    let dict_of = |offset, elements: &[u32]| dict([("x", slice(offset, elements, 4))]);
    let one = layout([dict_of(0, &[1, 2]), dict_of(2, &[3, 4])]);
    assert_eq!(one, layout([dict_of(0, &[5, 6]), dict_of(2, &[7, 8])]));
    assert_ne!(one, layout([dict_of(0, &[1, 2, 3]), dict_of(3, &[4])]));
    assert_ne!(one, layout([dict_of(2, &[3, 4]), dict_of(0, &[1, 2])]));
    let AttrValue::Bytes(name) = one else { panic!("a name of bytes") };
    assert_eq!(name.len(), 16);
}
