//! What becomes of what several writers hold.

use std::sync::Arc;

use bytes::Bytes;
use tssd_format::{
    Blob, Compression, Dict, Dtype, Options, Shard, ShardSpec, StateDict, Storage, Tensor,
    TensorMeta, TensorSlice, TorchStoreStateDict, Value,
};

use super::*;

/// The archives of writers 1, 3, 5 and so on, so that no number is a place.
struct Writers {
    files: Vec<Bytes>,
    contributions: Vec<Contribution>,
}

impl Writers {
    fn of<const N: usize>(dicts: [StateDict; N]) -> Self {
        Self::with(dicts.map(|dict| (dict, Options::new())))
    }

    fn with<const N: usize>(dicts: [(StateDict, Options); N]) -> Self {
        let encode = |(dict, options): (StateDict, Options)| {
            TorchStoreStateDict::with_options(&dict, &options).unwrap().as_bytes().clone()
        };
        let files = dicts.map(encode).to_vec();
        let contribution = |(place, bytes): (u32, &Bytes)| Contribution {
            writer: 2 * place + 1,
            file: format!("{place}.tssd"),
            archive: Archive::from_bytes(bytes.clone()).unwrap(),
            is_seen: true,
        };
        let contributions = (0..).zip(&files).map(contribution).collect();
        Self { files, contributions }
    }

    /// The bytes of these, by place, are not to be looked at.
    fn unseen(mut self, places: &[usize]) -> Self {
        for place in places {
            self.contributions[*place].is_seen = false;
        }
        self
    }

    /// The version that they make together, as readers open it.
    fn merged_if(&self, divergent: Divergent) -> Result<Archive, String> {
        let label = Label {
            id: 0xAB,
            epoch: 3,
            number: 7,
            writers: self.contributions.iter().map(|each| each.writer).collect(),
            digest: Digest([5; 16]),
        };
        let manifest = merge(&self.contributions, divergent, &label)?;
        let open = |file: &ShardFile| -> tssd_format::Result<Arc<dyn Blob>> {
            let place = self.contributions.iter().position(|each| each.file == file.name);
            Ok(Arc::new(self.files[place.unwrap()].clone()))
        };
        let archive = Archive::from_shard_set(Arc::new(Bytes::from(manifest)), open).unwrap();
        archive.verify_deep().unwrap();
        Ok(archive)
    }

    fn merged(&self) -> Result<Archive, String> {
        self.merged_if(Divergent::Error)
    }

    #[track_caller]
    fn expect_disagreement(&self, fqn: &str, what: &str) {
        let writers: WriterSet = self.contributions.iter().map(|each| each.writer).collect();
        let error = self.merged().map(|_| ()).unwrap_err();
        let begin = format!("writers {writers} disagree on `{fqn}`: {what}");
        assert!(error.starts_with(&begin), "{error}");
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

/// Elements from a place on, of a global vector.
fn slice(offset: u64, elements: &[u32], global: u64) -> Value {
    let len = elements.len() as u64;
    let slice = TensorSlice::new(&[offset], &[len], &[global]).unwrap();
    Shard::new(tensor(elements), ShardSpec::new(slice)).unwrap().into()
}

/// Too long for the index.
fn long(letter: &str) -> Value {
    Value::from(letter.repeat(5000))
}

/// The storages that leaves lie in, in order.
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

#[test]
fn what_each_holds_alone_is_there_and_what_all_hold_once() {
    let own = |own: &str, number: u32| {
        let mut dict = dict([("all", tensor(&[1, 2]).into()), ("text", long("x"))]);
        dict.insert(own, tensor(&[number; 3]));
        dict.insert("step", 12_i64);
        dict
    };
    let found = Writers::of([own("b", 10), own("a", 11), own("c", 12)]).merged().unwrap();
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
    // The first writer's are the ones that are kept, and nobody's that is not named.
    let shards: Vec<u32> =
        (0..found.storage_count()).map(|number| found.storage(number).shard).collect();
    assert_eq!(shards, [0, 0, 0, 1, 2]);
    let files: Vec<(String, u32)> =
        found.shards().into_iter().map(|shard| (shard.name, shard.writer)).collect();
    assert_eq!(files, [("0.tssd".into(), 1), ("1.tssd".into(), 3), ("2.tssd".into(), 5)]);
}

#[test]
fn what_differs_is_refused_or_kept_as_is_asked_for() {
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
        let of = |value: &Value| {
            dict([("inner", Value::Dict(dict([("x", value.clone())]).entries().clone()))])
        };
        let writers = Writers::of([of(&one), of(&other), of(&one)]);
        writers.expect_disagreement("inner.x", "different values; shard it, or put with");
        let lowest = writers.merged_if(Divergent::Lowest).unwrap();
        assert_eq!(lowest.to_state_dict().unwrap(), of(&one), "{what}");
        let keep = writers.merged_if(Divergent::Keep).unwrap();
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
fn containers_agree_in_kind_and_lists_in_length() {
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
        let writers = Writers::of([dict([("x", one)]), dict([("x", other)])]);
        writers.expect_disagreement("x", what);
    }
    let same = || dict([("x", Value::List(numbers(3))), ("y", Value::OrderedDict(entries()))]);
    let found = Writers::of([same(), same()]).merged().unwrap();
    assert_eq!(found.to_state_dict().unwrap(), same());
    // Of dicts each may have what others have not.
    let of = |name| Value::OrderedDict(dict([(name, Value::from(1_i64))]).entries().clone());
    let found = Writers::of([dict([("x", of("a"))]), dict([("x", of("b"))])]).merged().unwrap();
    assert_eq!(names(&found), ["x.a", "x.b"]);
}

#[test]
fn slices_tile_their_tensor() {
    let of = |value| dict([("x", value)]);
    let found = Writers::of([
        of(slice(2, &[3, 4], 5)),
        of(slice(0, &[1, 2], 5)),
        // A replica, of which the first one is kept, and what has no elements.
        of(slice(2, &[3, 4], 5)),
        of(slice(5, &[], 5)),
        of(slice(4, &[5], 5)),
    ])
    .merged()
    .unwrap();
    let [(_, Node::Tensors(run))] = &*found.leaves() else { panic!("one leaf of slices") };
    let boxes: Vec<(u64, u32)> = run
        .iter()
        .map(|each| {
            let place = each.shard_spec.as_ref().unwrap();
            (place.slice().offsets()[0], found.storage(each.storage.unwrap()).shard)
        })
        .collect();
    // By where they lie in the tensor or by writer: each is there once.
    let mut sorted = boxes.clone();
    sorted.sort_unstable();
    assert_eq!(sorted, [(0, 1), (2, 0), (4, 4)]);

    let whole = || of(tensor(&[1, 2, 3, 4]).into());
    for (one, other) in [(whole(), of(slice(0, &[1; 4], 4))), (of(slice(0, &[1; 4], 4)), whole())] {
        let writers = Writers::of([one, other]);
        writers.expect_disagreement("x", "some hold slices and some a whole leaf");
    }
    let error = |one: Value, other: Value| {
        Writers::of([of(one), of(other)]).merged().map(|_| ()).unwrap_err()
    };
    let other_dtype = {
        let local = Tensor::from_slice(&[1_i8], &[1]).unwrap();
        let slice = TensorSlice::new(&[1], &[1], &[2]).unwrap();
        Shard::new(local, ShardSpec::new(slice)).unwrap().into()
    };
    let said = error(slice(0, &[1], 2), other_dtype);
    assert_eq!(said, "`x` is uint32 at writer 1 and int8 at writer 3");
    let said = error(slice(0, &[1], 2), slice(1, &[1], 3));
    assert_eq!(said, "`x` has the global shape [2] at writer 1 and [3] at writer 3");
    for other in [slice(2, &[1], 4), slice(1, &[1, 1, 1], 4), slice(0, &[1], 4)] {
        let said = error(slice(0, &[1, 1], 4), other);
        let writers: WriterSet = [1, 3].into_iter().collect();
        let end = format!("; writers {writers} hold it");
        assert!(said.starts_with("`x`: ") && said.ends_with(&end), "{said}");
    }
    // Who is alone must have all of it, too.
    Writers::of([of(slice(0, &[1, 1], 4))]).merged().map(|_| ()).unwrap_err();
    // Of a tensor without elements something stays.
    let found = Writers::of([of(slice(0, &[], 0)), of(slice(0, &[], 0))]).merged().unwrap();
    assert_eq!(storages(&found), [("x".to_owned(), vec![])]);
}

#[test]
fn the_same_elements_are_the_same_however_they_lie() {
    let of = |tensor: Tensor| dict([("x", Value::from(tensor))]);
    let merged = |writers: &Writers| writers.merged().map(|found| storages(&found)[0].1.clone());
    // At one place of equal storages nobody has to look.
    let same = Writers::of([of(tensor(&[1, 2])), of(tensor(&[1, 2]))]).unseen(&[0, 1]);
    assert_eq!(merged(&same), Ok(vec![0]));
    let empty = Writers::of([of(tensor(&[])), of(tensor(&[]))]).unseen(&[0, 1]);
    assert_eq!(merged(&empty), Ok(vec![]));
    // A part of a storage that another leaf has all of.
    let part = |all: &[u32], at: u64, len: u64| {
        let all = tensor(all);
        let meta = TensorMeta::new(Dtype::Uint32, &[len]).unwrap();
        let part = Tensor::new(meta, all.storage().clone(), 4 * at).unwrap();
        dict([("x", part.into()), ("all", all.into())])
    };
    let company = || Writers::of([of(tensor(&[1, 2])), part(&[7, 1, 2], 1, 2)]);
    assert_eq!(merged(&company()), Ok(vec![0]));
    for unseen in [&[0][..], &[1], &[0, 1]] {
        company().unseen(unseen).expect_disagreement("x", "different values");
    }
    // Equal storages, and another place in them.
    let places = || Writers::of([part(&[5, 5, 5], 2, 1), part(&[5, 5, 5], 1, 1)]);
    assert_eq!(merged(&places()), Ok(vec![0]));
    places().unseen(&[1]).expect_disagreement("x", "different values");
    let differing = Writers::of([of(tensor(&[1, 2])), part(&[7, 1, 3], 1, 2)]);
    differing.expect_disagreement("x", "different values");
}

#[test]
fn elements_that_share_bytes_are_compared_in_their_place() {
    // A windowed view of few bytes, such as `unfold` makes: to look at each element would take years.
    let x = |last: u8, lead: u64| {
        let mut bytes = vec![7; usize::try_from(6 * 1023 + 1 + lead).unwrap()];
        *bytes.last_mut().unwrap() = last;
        let meta = TensorMeta::new(Dtype::Uint8, &[1024; 6]).unwrap();
        let meta = meta.with_strides(&[1; 6]).unwrap();
        dict([("x", Tensor::new(meta, Storage::from_owner(bytes), lead).unwrap().into())])
    };
    assert!(Writers::of([x(7, 0), x(7, 0)]).merged().is_ok());
    // In other company.
    assert!(Writers::of([x(7, 0), x(7, 3)]).merged().is_ok());
    Writers::of([x(7, 0), x(8, 0)]).expect_disagreement("x", "different values");
    Writers::of([x(7, 0), x(8, 3)]).expect_disagreement("x", "different values");
}

#[test]
fn what_is_compressed_is_known_by_its_digest_or_looked_at() {
    let of = || dict([("x", Value::from(tensor(&[7; 1000])))]);
    let raw = Options::new();
    let packed = Options::new().compress(Compression::Zstd);
    for (one, other, is_known) in [
        (raw.clone(), raw.clone(), true),
        (packed.clone(), packed.clone(), true),
        (raw.clone(), packed.clone(), false),
        (packed.clone(), raw.clone(), false),
        (raw.clone().digests(), packed.clone().digests(), true),
        (raw.clone().digests(), raw.clone(), true),
        (raw.digests(), packed, false),
    ] {
        let writers = || Writers::with([(of(), one.clone()), (of(), other.clone())]);
        assert_eq!(writers().merged().unwrap().storage_count(), 1);
        let unseen = writers().unseen(&[0, 1]);
        if is_known {
            assert_eq!(unseen.merged().unwrap().storage_count(), 1);
        } else {
            unseen.expect_disagreement("x", "different values");
        }
    }
    // Of equal length, and other bytes.
    let other = || dict([("x", Value::from(tensor(&[8; 1000])))]);
    for options in [Options::new(), Options::new().digests()] {
        let writers = Writers::with([(of(), options.clone()), (other(), options)]);
        writers.unseen(&[0, 1]).expect_disagreement("x", "different values");
    }
}

/// A tie survives if every writer that holds both leaves has it.
#[test]
fn ties_are_those_of_all_who_hold_both() {
    // Leaves of one letter are tied: `aab` are three leaves, of which the first two are.
    let of = |leaves: &str| {
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
        // What the first one has not lies in the archive of who has it.
        ("aa-", "aaa", "aab"),
        ("aa-", "--b", "aab"),
    ] {
        let found = Writers::of([of(one), of(other)]).merged().unwrap();
        let found = numbers(&found);
        let mut letters = Vec::new();
        for storage in &found {
            if !letters.contains(storage) {
                letters.push(*storage);
            }
        }
        let letter = |storage: &u32| {
            let at = letters.iter().position(|each| each == storage).unwrap();
            ["a", "b", "c"][at]
        };
        let found: String = found.iter().map(letter).collect();
        assert_eq!(found, expected, "{one} and {other}");
    }
    let alone = Writers::of([of("aab")]).merged().unwrap();
    assert_eq!(numbers(&alone), [0, 0, 1]);
}

#[test]
fn a_manifest_says_what_all_say_and_whose_it_is() {
    let of = |options: Options| (dict([("x", Value::from(tensor(&[1])))]), options);
    let step = |step: i64| Options::new().attr("step", AttrValue::Int(step));
    let run = Options::new().attr("run", AttrValue::Text("r".into()));
    let found = Writers::with([of(step(3)), of(run), of(step(3))]).merged().unwrap();
    let attrs = found.attrs();
    assert_eq!(attrs["step"], AttrValue::Int(3));
    assert_eq!(attrs["run"], AttrValue::Text("r".into()));
    assert_eq!(attrs["tssd.version"], AttrValue::Int(7));
    assert_eq!(attrs["tssd.epoch"], AttrValue::Int(3));
    assert_eq!(attrs["tssd.id"], AttrValue::Text(format!("{:032x}", 0xAB).into()));
    assert_eq!(attrs["tssd.digest"], AttrValue::Text(Digest([5; 16]).to_string().into()));
    let writers: WriterSet = [1, 3, 5].into_iter().collect();
    assert_eq!(attrs["tssd.writers"], AttrValue::Text(writers.to_string().into()));
    let said = Writers::with([of(step(3)), of(step(4))]).merged().map(|_| ()).unwrap_err();
    assert_eq!(said, "writer 3 gives the attribute `step` another value");
    // Of modules each says what it has.
    let modules =
        |text: &str| of(Options::new().attr("tssd.module_metadata", AttrValue::Text(text.into())));
    let [first, last] =
        [r#"{"[]":{"":{"version":1},"a":{"version":2}}}"#, r#"{"[]":{"":{"version":1},"b":{}}}"#];
    let found = Writers::with([modules(first), of(step(3)), modules(last)]).merged().unwrap();
    let both = r#"{"[]":{"":{"version":1},"a":{"version":2},"b":{}}}"#;
    assert_eq!(found.attrs()["tssd.module_metadata"], AttrValue::Text(both.into()));
    for other in [r#"{"[]":{"":{"version":2}}}"#, r#"{"[]":{"":1}}"#, "no JSON"] {
        let said =
            Writers::with([modules(first), modules(other)]).merged().map(|_| ()).unwrap_err();
        assert_eq!(said, "writer 3 gives the attribute `tssd.module_metadata` another value");
    }
    // How each has compressed is its own affair.
    let level = |level| of(Options::new().compress(Compression::Zstd).zstd_level(level));
    let found = Writers::with([level(2), level(3)]).merged().unwrap();
    assert!(!found.attrs().contains_key(ZSTD_LEVEL_ATTR));
}

#[test]
fn a_layout_has_a_name_that_values_do_not_change() {
    let layout = |dicts: [StateDict; 2]| {
        Writers::of(dicts).merged().unwrap().attrs().remove("tssd.layout").unwrap()
    };
    let of = |offset, elements: &[u32]| dict([("x", slice(offset, elements, 4))]);
    let one = layout([of(0, &[1, 2]), of(2, &[3, 4])]);
    assert_eq!(one, layout([of(0, &[5, 6]), of(2, &[7, 8])]));
    assert_ne!(one, layout([of(0, &[1, 2, 3]), of(3, &[4])]));
    assert_ne!(one, layout([of(2, &[3, 4]), of(0, &[1, 2])]));
    let AttrValue::Bytes(name) = one else { panic!("a name of bytes") };
    assert_eq!(name.len(), 16);
}
