//! Safetensors files and directories of them, both ways: byte for byte, without a second copy, and
//! nothing that lies.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::Path;
use std::process::{Command, Output, Stdio};

use ::safetensors::SafeTensors;
use ::safetensors::tensor::TensorView;
use bytes::Bytes;
use proptest::prelude::*;
use serde_json::{Value as Json, json};
use tssd_format::safetensors::{
    Directory, Export, FILE_NAME, Header, INDEX_ATTR, INDEX_NAME, Index, import,
};
use tssd_format::{
    Archive, AttrValue, Attrs, Dtype, ErrorKind, Layout, Options, StateDict, Storage, Tensor,
    TensorMeta, Value,
};
use tssd_tests::command::binary;

use crate::cli::{Place, library_file};

// ---- Files that others have written --------------------------------------------------------------

/// Name, dtype and shape of a tensor.
type Spec = (String, Dtype, Vec<usize>);

/// The metadata of a file.
type Texts = BTreeMap<String, String>;

/// Dtypes that torch and safetensors have; but not the packed one, whose last dimension is special.
fn dtypes() -> Vec<Dtype> {
    let has = |dtype: &Dtype| dtype.safetensors().is_some() && *dtype != Dtype::Float4E2m1fnX2;
    Dtype::ALL.iter().copied().filter(has).collect()
}

fn specs() -> impl Strategy<Value = Vec<Spec>> {
    let spec = (
        prop::sample::select(dtypes()),
        prop::collection::vec(prop_oneof![1 => 0..1_usize, 9 => 1..5_usize], 0..4),
    );
    let name = prop_oneof![
        "[a-z]{1,3}(\\.[0-9]{1,2}){0,2}\\.weight",
        "[a-c ]{0,2}",
        "[\"\\\\\n\u{e9}\u{1f980}]{1,3}",
    ];
    prop::collection::btree_map(name, spec, 0..8)
        .prop_map(|specs| specs.into_iter().map(|(name, (dtype, shape))| (name, dtype, shape)))
        .prop_map(Iterator::collect)
        .prop_shuffle()
}

fn metadata() -> impl Strategy<Value = Option<Texts>> {
    prop::option::of(prop::collection::btree_map("[a-z\u{e9}]{0,6}", "[ -~\n]{0,9}", 0..3))
}

/// As the library writes it.
fn serialize(specs: &[Spec], metadata: Option<&Texts>) -> Vec<u8> {
    let bytes: Vec<u8> = (0..=255).cycle().take(1 << 14).collect();
    let view = |(place, (name, dtype, shape)): (usize, &Spec)| {
        let dtype: ::safetensors::Dtype =
            serde_json::from_value(dtype.safetensors().into()).unwrap();
        let len = shape.iter().product::<usize>() * dtype.bitsize() / 8;
        (name.clone(), TensorView::new(dtype, shape.clone(), &bytes[place..][..len]).unwrap())
    };
    // Of no tensors with empty metadata, version 0.8 of the library writes what is no JSON.
    let metadata = metadata.filter(|metadata| specs.len() + metadata.len() > 0);
    let metadata = metadata.map(|metadata| metadata.clone().into_iter().collect());
    ::safetensors::serialize(specs.iter().enumerate().map(view), metadata).unwrap()
}

/// How another library might write the same: entries in this order, so much space around them.
#[derive(Clone, Debug)]
struct Style {
    order: Vec<usize>,
    is_spacious: bool,
    padding: usize,
}

fn style() -> impl Strategy<Value = Style> {
    (prop::collection::vec(0..10_usize, 10), any::<bool>(), 0..9_usize)
        .prop_map(|(order, is_spacious, padding)| Style { order, is_spacious, padding })
}

/// The same tensors under a header of another style; the library takes it too.
fn restyle(file: &[u8], style: &Style) -> Vec<u8> {
    let (header, data) = split(file);
    let Json::Object(members) = serde_json::from_str(header.trim_end()).unwrap() else { panic!() };
    let mut members: Vec<(String, Json)> = members.into_iter().collect();
    for (place, other) in style.order.iter().enumerate().take(members.len()) {
        let other = other % members.len();
        members.swap(place, other);
    }
    let header = Json::Object(members.into_iter().collect());
    let mut text = if style.is_spacious { format!("{header:#}") } else { header.to_string() };
    text.extend(std::iter::repeat_n(' ', style.padding));
    let file = join(&text, data);
    SafeTensors::deserialize(&file).unwrap();
    file
}

fn split(file: &[u8]) -> (&str, &[u8]) {
    let (len, rest) = file.split_first_chunk().unwrap();
    let len = u64::from_le_bytes(*len) as usize;
    (std::str::from_utf8(&rest[..len]).unwrap(), &rest[len..])
}

fn join(header: &str, data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat()
}

// ---- In memory -----------------------------------------------------------------------------------

fn archive(dict: &StateDict, attrs: &Attrs) -> Archive {
    let options = attrs
        .iter()
        .fold(Options::new(), |options, (name, value)| options.attr(name.as_str(), value.clone()));
    let mut file = Vec::new();
    Layout::plan(dict, &options).unwrap().write_to(&mut file).unwrap();
    let archive = Archive::from_bytes(file).unwrap();
    archive.verify().unwrap();
    archive
}

fn written(export: &Export) -> Vec<u8> {
    let file = export.file().unwrap();
    let mut bytes = Vec::new();
    file.write_to(&mut bytes).unwrap();
    assert_eq!(file.file_len(), bytes.len() as u64);
    bytes
}

fn tensors(dict: &StateDict) -> Vec<(String, &Tensor)> {
    let leaves = dict.leaves().into_iter();
    leaves
        .map(|(path, leaf)| match leaf {
            Value::Tensor(tensor) => (path.fqn(), tensor),
            other => panic!("{other:?}"),
        })
        .collect()
}

fn lies_in(part: &[u8], whole: &[u8]) -> bool {
    let (part, whole) = (part.as_ptr_range(), whole.as_ptr_range());
    whole.start <= part.start && part.end <= whole.end
}

/// Remembers which of the slices that it is given lie in these bytes.
struct Witness<'a> {
    source: &'a [u8],
    bytes_of_it: usize,
}

impl Write for Witness<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if lies_in(bytes, self.source) {
            self.bytes_of_it += bytes.len();
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    /// Whatever the header looks like and wherever the data begins: the tensors are those that the
    /// library finds, they are views of the file, and the file comes back.
    #[test]
    fn a_file_comes_back_without_a_copy(
        specs in specs(),
        metadata in metadata(),
        style in prop::option::of(style()),
    ) {
        let mut file = serialize(&specs, metadata.as_ref());
        if let Some(style) = style {
            file = restyle(&file, &style);
        }
        let file = Bytes::from(file);
        let (dict, attrs) = import(file.clone()).unwrap();
        let found = SafeTensors::deserialize(&file).unwrap();
        prop_assert_eq!(found.len(), dict.entries().len());
        for (name, tensor) in tensors(&dict) {
            let expected = found.tensor(&name).unwrap();
            let bytes = tensor.view().contiguous().unwrap();
            prop_assert_eq!(bytes, expected.data());
            prop_assert!(bytes.is_empty() || bytes.as_ptr() == expected.data().as_ptr());
            prop_assert!(bytes.is_empty() || lies_in(bytes, &file));
            let shape: Vec<usize> =
                tensor.meta().shape().iter().map(|size| *size as usize).collect();
            prop_assert_eq!(&shape, expected.shape());
        }
        let texts = metadata.unwrap_or_default().into_iter();
        let texts = texts.map(|(name, text)| (name, AttrValue::Text(text.into()))).collect();
        let mut said = attrs.clone();
        said.retain(|name, _| !name.starts_with("tssd."));
        prop_assert_eq!(said, texts);

        let export = Export::of_state_dict(&dict, &attrs).unwrap();
        prop_assert_eq!(&written(&export), &file);
        let mut witness = Witness { source: &file, bytes_of_it: 0 };
        export.file().unwrap().write_to(&mut witness).unwrap();
        prop_assert_eq!(witness.bytes_of_it as u64, export.nbytes());

        let archive = archive(&dict, &attrs);
        prop_assert_eq!(&archive.to_state_dict().unwrap(), &dict);
        prop_assert_eq!(&written(&Export::of_archive(&archive).unwrap()), &file);
    }

    /// A stream gives what the file gives.
    #[test]
    fn a_stream_is_read_in_order(specs in specs(), metadata in metadata(), style in style()) {
        let file = Bytes::from(restyle(&serialize(&specs, metadata.as_ref()), &style));
        let whole = Header::read(&file).unwrap();
        let mut stream = &file[..];
        let header = Header::read_from(&mut stream).unwrap();
        prop_assert_eq!(header.text(), whole.text());
        prop_assert_eq!(header.file_len(), file.len() as u64);
        let starts: Vec<u64> = header.tensors().iter().map(|entry| entry.range().start).collect();
        if header.is_in_order() {
            prop_assert!(starts.is_sorted());
            for (entry, other) in header.tensors().iter().zip(whole.tensors()) {
                prop_assert_eq!(
                    entry.read_from(&mut stream).unwrap(), other.tensor(&file).unwrap()
                );
            }
            Header::end(&mut stream).unwrap();
        } else {
            prop_assert!(!starts.is_sorted() || starts.windows(2).any(|pair| pair[0] == pair[1]));
        }
    }

    /// However short a file is cut, and whatever follows it, it is refused: as a file, and as a
    /// stream.
    #[test]
    fn a_file_of_another_length_is_refused(
        specs in specs(),
        cut in any::<prop::sample::Index>(),
        more in 1..9_usize,
    ) {
        let file = serialize(&specs, None);
        let longer = [&file[..], &vec![0; more]].concat();
        for bytes in [&file[..cut.index(file.len())], &longer] {
            let refused = import(Bytes::copy_from_slice(bytes)).unwrap_err();
            prop_assert_eq!(refused.kind(), ErrorKind::NotSafetensors);
            let mut stream = bytes;
            let read = Header::read_from(&mut stream).and_then(|header| {
                for entry in header.tensors() {
                    entry.read_from(&mut stream)?;
                }
                Header::end(&mut stream)
            });
            prop_assert_eq!(read.unwrap_err().kind(), ErrorKind::NotSafetensors);
        }
    }

    /// What is split is all of it, in order, in files of the size that was asked for, under an index
    /// that describes them.
    #[test]
    fn shards_have_everything_once(specs in specs(), max in 1..200_u64) {
        let (dict, attrs) = import(serialize(&specs, None)).unwrap();
        let export = Export::of_state_dict(&dict, &attrs).unwrap();
        let directory = export.shards(max).unwrap();
        let files = files_of(&directory);
        if directory.files.len() == 1 {
            prop_assert_eq!(&files[FILE_NAME], &written(&export));
            prop_assert_eq!(files.len(), 1);
            return Ok(());
        }
        let count = directory.files.len();
        for (number, file) in (1..).zip(&directory.files) {
            let name = format!("model-{number:05}-of-{count:05}.safetensors");
            prop_assert_eq!(file.name(), name);
            let nbytes: u64 = file.file_len() - 8 - file.header().len() as u64;
            prop_assert!(file.tensors().len() > 0);
            prop_assert!(nbytes <= max || file.tensors().len() == 1, "{nbytes} of {max}");
        }
        let index: Json = serde_json::from_slice(&files[INDEX_NAME]).unwrap();
        prop_assert_eq!(&index["metadata"]["total_size"], export.nbytes());
        let again = pack(&files);
        let total: BTreeMap<String, Tensor> =
            tensors(&dict).into_iter().map(|(name, tensor)| (name, tensor.clone())).collect();
        let back = again.to_state_dict().unwrap();
        let back: BTreeMap<String, Tensor> =
            tensors(&back).into_iter().map(|(name, tensor)| (name, tensor.clone())).collect();
        prop_assert_eq!(back, total);
        prop_assert_eq!(files_of(&Export::of_archive(&again).unwrap().directory().unwrap()), files);
    }

    /// Files of any style and with any metadata come back as they were, and so does their index.
    #[test]
    fn a_directory_comes_back(
        parts in prop::collection::vec((specs(), metadata(), prop::option::of(style())), 1..4),
        common in metadata(),
    ) {
        let files = directory(&parts, common.as_ref());
        let archive = pack(&files);
        let export = Export::of_archive(&archive).unwrap();
        prop_assert_eq!(files_of(&export.directory().unwrap()), files);
        // As one file it has what all of them have in common.
        let (dict, _) = import(written(&export)).unwrap();
        prop_assert_eq!(dict.entries().len(), archive.to_state_dict().unwrap().entries().len());
    }
}

pub(crate) type Files = BTreeMap<String, Vec<u8>>;

fn files_of(directory: &Directory<'_>) -> Files {
    let mut files = Files::new();
    for file in &directory.files {
        let mut bytes = Vec::new();
        file.write_to(&mut bytes).unwrap();
        assert!(files.insert(file.name().to_owned(), bytes).is_none());
    }
    files.extend(directory.index.clone().map(|text| (INDEX_NAME.to_owned(), text.into_bytes())));
    files
}

/// A directory with an index and these files; each has the common metadata and its own.
fn directory(parts: &[(Vec<Spec>, Option<Texts>, Option<Style>)], common: Option<&Texts>) -> Files {
    let (mut files, mut weight_map) = (Files::new(), serde_json::Map::new());
    for (number, (specs, own, style)) in parts.iter().enumerate() {
        let file = format!("part_{number}.safetensors");
        // No name is in two files.
        let specs: Vec<Spec> = specs
            .iter()
            .map(|(name, dtype, shape)| (format!("{name}{number}"), *dtype, shape.clone()))
            .collect();
        if specs.is_empty() {
            continue;
        }
        weight_map.extend(specs.iter().map(|(name, ..)| (name.clone(), file.as_str().into())));
        let metadata = own.iter().chain(common).flatten();
        let metadata = metadata.map(|(name, text)| (name.clone(), text.clone())).collect();
        let mut bytes = serialize(&specs, (own.is_some() || common.is_some()).then_some(&metadata));
        if let Some(style) = style {
            bytes = restyle(&bytes, style);
        }
        files.insert(file, bytes);
    }
    let index = json!({ "weight_map": weight_map, "metadata": { "total_size": 7, "x": null } });
    files.insert(INDEX_NAME.to_owned(), index.to_string().into_bytes());
    files
}

/// An archive of a directory, as the command makes it.
fn pack(files: &Files) -> Archive {
    let index = Index::parse(String::from_utf8(files[INDEX_NAME].clone()).unwrap()).unwrap();
    let mut dict = StateDict::new();
    let mut headers = BTreeMap::new();
    for name in index.files().into_keys() {
        let bytes = Bytes::from(files[name].clone());
        headers.insert(name, Header::read(&bytes).unwrap());
        for (key, value) in import(bytes).unwrap().0.entries().iter() {
            dict.insert(key.clone(), value.clone());
        }
    }
    let headers = headers.iter().map(|(name, header)| (*name, header)).collect();
    archive(&dict, &index.attrs(&headers).unwrap())
}

#[test]
fn what_lies_askew_is_a_view_all_the_same() {
    let header = r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[1,9]},"b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#;
    let data: Vec<u8> = [&[7][..], &1.5_f32.to_le_bytes(), &(-2.0_f32).to_le_bytes()].concat();
    for padding in 0..4 {
        let file = Bytes::from(join(&format!("{header}{}", " ".repeat(padding)), &data));
        let (dict, attrs) = import(file.clone()).unwrap();
        let Value::Tensor(tensor) = dict.leaf("a").unwrap() else { panic!() };
        assert!(lies_in(tensor.view().span(), &file));
        let is_aligned = tensor.view().span().as_ptr().addr().is_multiple_of(4);
        let elements = tensor.view().as_slice::<f32>().map_err(|error| error.kind());
        assert_eq!(elements.is_ok(), is_aligned);
        assert!(is_aligned || elements == Err(ErrorKind::Misaligned));
        // An archive of it is aligned.
        let archive = archive(&dict, &attrs);
        assert!(archive.storage(0).offset.is_multiple_of(256));
        let stored = archive.tensor("a").unwrap();
        assert_eq!(stored.view().contiguous().unwrap(), &data[1..]);
        assert_eq!(written(&Export::of_archive(&archive).unwrap()), file);
    }
}

#[test]
fn a_state_dict_that_has_changed_gets_a_new_header() {
    let style = Style { order: vec![], is_spacious: true, padding: 3 };
    let specs = [("a".to_owned(), Dtype::Float32, vec![2]), ("b".to_owned(), Dtype::Uint8, vec![])];
    let file = restyle(&serialize(&specs, None), &style);
    let (dict, attrs) = import(file.clone()).unwrap();
    assert_eq!(attrs.keys().collect::<Vec<_>>(), ["tssd.safetensors_header"]);
    let rewritten = |dict: &StateDict, attrs: &Attrs| {
        let bytes = written(&Export::of_state_dict(dict, attrs).unwrap());
        let header = split(&bytes).0.to_owned();
        assert!(!header.contains('\n'), "{header}");
        import(bytes).unwrap().0
    };
    let mut other = dict.clone();
    other.insert("c", Tensor::from_slice(&[1_u8], &[1]).unwrap());
    assert_eq!(rewritten(&other, &attrs).entries().len(), 3);
    let mut other = dict.clone();
    other.insert("b", Tensor::from_slice(&[1_i8], &[]).unwrap());
    assert_eq!(rewritten(&other, &attrs).leaf("b").unwrap(), other.leaf("b").unwrap());
    let mut more = attrs.clone();
    more.insert("format".into(), AttrValue::Text("pt".into()));
    assert_eq!(rewritten(&dict, &more), dict);
    // Other elements are no other header.
    let mut other = dict.clone();
    other.insert("b", Tensor::from_slice(&[9_u8], &[]).unwrap());
    let bytes = written(&Export::of_state_dict(&other, &attrs).unwrap());
    assert_eq!(split(&bytes).0, split(&file).0);
}

#[test]
fn expanded_tensors_do_not_fill_a_disk() {
    let meta = TensorMeta::new(Dtype::Uint8, &[1 << 40]).unwrap().with_strides(&[0]).unwrap();
    let mut dict = StateDict::new();
    dict.insert("a", Tensor::new(meta, Storage::from(vec![0]), 0).unwrap());
    let refused = Export::of_state_dict(&dict, &Attrs::new()).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::LimitExceeded);
}

#[test]
fn shards_are_cut_as_hugging_face_does() {
    let sizes = [("a", 3), ("b", 3), ("big", 20), ("c", 2), ("d", 5), ("e", 5)];
    let mut dict = StateDict::new();
    for (name, size) in sizes {
        dict.insert(name, Tensor::from_slice(&vec![1_u8; size], &[size as u64]).unwrap());
    }
    let export = Export::of_state_dict(&dict, &Attrs::new()).unwrap();
    let cut = |max| -> Vec<String> {
        let directory = export.shards(max).unwrap();
        directory.files.iter().map(|file| file.tensors().collect::<Vec<_>>().join(" ")).collect()
    };
    assert_eq!(cut(8), ["big", "a b c", "d", "e"]);
    assert_eq!(cut(10), ["big", "a b c", "d e"]);
    assert_eq!(cut(20), ["a b", "big", "c d e"]);
    assert_eq!(cut(38), ["a b big c d e"]);
    assert_eq!(cut(1), ["a", "b", "big", "c", "d", "e"]);
}

/// What a stranger put into the attribute leads to no file that the index of a directory could not
/// name, and to no tensor that is not there.
#[test]
fn a_forged_index_is_not_believed() {
    let mut dict = StateDict::new();
    dict.insert("a", Tensor::from_slice(&[1_u8], &[1]).unwrap());
    let header = r#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}"#;
    let index = |file: &str| json!({ "weight_map": { "a": file } }).to_string();
    let good = json!({ "index": index("x.safetensors"), "headers": {} });
    for (packed, is_believed) in [
        (good, true),
        (json!({ "index": index("../x"), "headers": {} }), false),
        (json!({ "index": index("/tmp/x"), "headers": {} }), false),
        (json!({ "index": index(""), "headers": {} }), false),
        (json!({ "index": index(INDEX_NAME), "headers": {} }), false),
        (json!({ "index": index("x"), "headers": { "x": header } }), false),
        (json!({ "index": index("x"), "headers": { "y": "{}" } }), false),
        (json!({ "index": json!({ "weight_map": {} }).to_string(), "headers": {} }), false),
        (json!({ "index": r#"{"weight_map":{"a":"x","b":"x"}}"#, "headers": {} }), false),
        (json!({ "index": 1, "headers": {} }), false),
        (json!([]), false),
    ] {
        let text = AttrValue::Text(packed.to_string().into());
        let attrs = Attrs::from([(INDEX_ATTR.to_owned(), text)]);
        let export = Export::of_state_dict(&dict, &attrs).unwrap();
        let directory = export.directory().unwrap();
        assert_eq!(directory.index.is_some(), is_believed, "{packed}");
        let name = if is_believed { "x.safetensors" } else { FILE_NAME };
        assert_eq!(directory.files[0].name(), name);
    }
}

// ---- The command ---------------------------------------------------------------------------------

fn write_directory(place: &Place, name: &str, files: &Files) {
    std::fs::create_dir(place.path(name)).unwrap();
    for (file, bytes) in files {
        place.write(&format!("{name}/{file}"), bytes);
    }
}

fn read_directory(path: &Path) -> Files {
    let entries = std::fs::read_dir(path).unwrap().map(Result::unwrap);
    let read = |path: &Path| std::fs::read(path).unwrap();
    entries.map(|entry| (entry.file_name().into_string().unwrap(), read(&entry.path()))).collect()
}

fn spec(name: &str, dtype: Dtype, shape: &[usize]) -> Spec {
    (name.to_owned(), dtype, shape.to_vec())
}

/// Two files with tensors `a0`, `b0`, `c1` and `d1`.
pub(crate) fn small_directory() -> Files {
    let metadata = Some(BTreeMap::from([("format".to_owned(), "pt".to_owned())]));
    let first = vec![spec("a", Dtype::Float32, &[2, 3]), spec("b", Dtype::Float32, &[4])];
    let second = vec![spec("c", Dtype::Bfloat16, &[5]), spec("d", Dtype::Uint8, &[3])];
    directory(&[(first, None, None), (second, None, None)], metadata.as_ref())
}

#[test]
fn a_directory_is_packed_and_unpacked() {
    let place = Place::new();
    let files = small_directory();
    write_directory(&place, "model", &files);
    place.expect(0, "pack model -o a.tssd");
    place.expect(0, "verify a.tssd");
    place.expect(0, "unpack a.tssd -o out/");
    assert_eq!(read_directory(&place.path("out")), files);
    // A directory that is there is written into if it is empty; the shell may stand in it.
    std::fs::create_dir(place.path("empty")).unwrap();
    place.expect(0, "unpack a.tssd -o empty");
    assert_eq!(read_directory(&place.path("empty")), files);
    let said = place.expect(5, "unpack a.tssd -o out");
    assert!(said.contains("out is not empty"), "{said}");
    place.write("file", b"");
    place.expect(5, "unpack a.tssd -o file --shard-size 5GB");
    place.expect(2, "unpack a.tssd -o new --shard-size 0");
    place.expect(2, "unpack a.tssd -o - --shard-size 5GB");
    place.expect(3, "unpack a.tssd -o missing/new/");

    place.expect(0, "unpack a.tssd -o whole --shard-size 5GB");
    let whole = read_directory(&place.path("whole"));
    assert_eq!(whole.keys().collect::<Vec<_>>(), [FILE_NAME]);
    // A directory with one file is a model too, and comes back as one.
    place.expect(0, "pack whole -o b.tssd");
    place.expect(0, "unpack b.tssd -o again/");
    assert_eq!(read_directory(&place.path("again")), whole);
    place.expect(0, "diff --values a.tssd whole/model.safetensors");

    place.expect(0, "unpack a.tssd -o split --shard-size 40");
    let split = read_directory(&place.path("split"));
    assert_eq!(
        split.keys().collect::<Vec<_>>(),
        ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", INDEX_NAME]
    );
    place.expect(0, "pack split -o c.tssd");
    place.expect(0, "diff --values a.tssd c.tssd");
    place.expect(0, "unpack c.tssd -o c/");
    assert_eq!(read_directory(&place.path("c")), split);
    let names = place.names();
    assert!(names.iter().all(|name| !name.starts_with('.')), "{names:?}");
}

/// Replaces text in the index.
fn edited(files: &Files, from: &str, to: &str) -> Files {
    let mut files = files.clone();
    let index = String::from_utf8(files[INDEX_NAME].clone()).unwrap();
    assert!(index.contains(from), "{index}");
    files.insert(INDEX_NAME.to_owned(), index.replace(from, to).into_bytes());
    files
}

#[test]
fn a_directory_that_does_not_fit_its_index_is_refused() {
    let good = small_directory();
    let without = |name: &str| {
        let mut files = good.clone();
        files.remove(name).unwrap();
        files
    };
    let with = |name: &str, bytes: Vec<u8>| {
        let mut files = good.clone();
        files.insert(name.to_owned(), bytes);
        files
    };
    let huge = [&(1_u64 << 40).to_le_bytes()[..], b"{}"].concat();
    let second = &good["part_1.safetensors"];
    let twice = serialize(&[spec("c1", Dtype::Bool, &[]), spec("b0", Dtype::Bool, &[])], None);
    let long = "x".repeat(256);
    let name = "part_1.safetensors";
    let cases = vec![
        (1, edited(&good, name, "../part_1.safetensors"), vec!["c1", "../part_1.safetensors"]),
        (1, edited(&good, name, "sub/part_1.safetensors"), vec!["c1", "sub/part_1.safetensors"]),
        (1, edited(&good, name, "/etc/passwd"), vec!["c1", "/etc/passwd"]),
        (1, edited(&good, name, ".hidden"), vec!["c1", ".hidden"]),
        (1, edited(&good, name, ".."), vec!["c1", "\"..\""]),
        (1, edited(&good, name, ""), vec!["c1", "no plain file name"]),
        (1, edited(&good, name, &long), vec!["c1", "no plain file name"]),
        (1, edited(&good, name, "a\\u0000b"), vec!["c1", "no plain file name"]),
        (1, edited(&good, name, INDEX_NAME), vec!["c1", "no plain file name"]),
        (1, edited(&good, "\"part_1.safetensors\"", "7"), vec!["c1", "to 7"]),
        (1, edited(&good, "weight_map", "weights"), vec!["weight_map"]),
        (1, edited(&good, "\"d1\"", "\"c1\""), vec!["`c1` is there twice"]),
        (1, edited(&good, "\"d1\"", "\"e1\""), vec!["`e1` to part_1.safetensors", "does not have"]),
        (
            1,
            edited(&good, ",\"d1\":\"part_1.safetensors\"", ""),
            vec!["lacks `d1`", "part_1.safetensors has"],
        ),
        (
            1,
            edited(&good, "\"d1\":\"part_1.safetensors\"", "\"d1\":\"part_0.safetensors\""),
            vec!["`d1` to part_0.safetensors", "part_1.safetensors has it"],
        ),
        (1, with(name, twice), vec!["`b0` is in part_0.safetensors and in part_1.safetensors"]),
        (1, with(name, second[..second.len() - 1].to_vec()), vec![name, "bytes, not"]),
        (1, with(name, second[..20].to_vec()), vec![name, "within its header"]),
        (1, with(name, huge), vec![name, "are allowed"]),
        (1, with(name, vec![]), vec![name, "it has 0 bytes"]),
        (1, with(INDEX_NAME, b"{".to_vec()), vec![INDEX_NAME]),
        (5, with(INDEX_NAME, vec![0xff]), vec![INDEX_NAME]),
        (3, without(name), vec![name]),
        (3, without(INDEX_NAME), vec![INDEX_NAME, FILE_NAME]),
        (5, with(FILE_NAME, second.clone()), vec![FILE_NAME, "index of other files"]),
    ];
    for (code, files, words) in cases {
        let place = Place::new();
        write_directory(&place, "model", &files);
        let said = place.expect(code, "pack model -o out.tssd");
        for word in words {
            assert!(said.contains(word), "{word}: {said}");
        }
        assert_eq!(place.names(), ["model"]);
    }
}

/// A directory from elsewhere must not lead to the files of whoever packs it.
#[cfg(unix)]
#[test]
fn links_of_a_directory_are_not_followed() {
    use std::os::unix::fs::symlink;
    for name in ["part_0.safetensors", INDEX_NAME] {
        let place = Place::new();
        write_directory(&place, "model", &small_directory());
        let file = place.path("model").join(name);
        std::fs::rename(&file, place.path("secret")).unwrap();
        symlink(place.path("secret"), &file).unwrap();
        let said = place.expect(5, "pack model -o out.tssd");
        assert!(said.contains(&format!("{name} is a link that leads out")), "{said}");
        // A pipe is not waited for.
        std::fs::remove_file(&file).unwrap();
        assert!(Command::new("mkfifo").arg(&file).status().unwrap().success());
        let said = place.expect(5, "pack model -o out.tssd");
        assert!(said.contains(&format!("{name} is no regular file")), "{said}");
        // The directory itself may be named by a link.
        std::fs::remove_file(&file).unwrap();
        std::fs::rename(place.path("secret"), &file).unwrap();
        symlink(place.path("model"), place.path("link")).unwrap();
        place.expect(0, "pack link -o out.tssd");
    }
}

#[cfg(unix)]
#[test]
fn a_directory_that_does_not_fit_on_the_disk_is_not_there() {
    let place = Place::new();
    let large = Tensor::from_slice(&vec![0.5_f32; 100_000], &[100_000]).unwrap();
    let mut dict = StateDict::new();
    dict.insert("small", Tensor::from_slice(&[1_u8], &[1]).unwrap());
    dict.insert("large", large);
    place.write_dict("a.tssd", &dict);
    std::fs::create_dir(place.path("empty")).unwrap();
    for target in ["new/", "empty/"] {
        let args = format!("unpack a.tssd -o {target} --shard-size 1000");
        let script = format!("trap '' XFSZ; ulimit -f 100; exec \"$TSSD\" {args}");
        let mut command = Command::new("sh");
        command.args(["-c", &script]).env("TSSD", binary());
        command.current_dir(place.path("."));
        let output = command.output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(5), "{said}");
        assert!(said.contains("model-00001-of-00002.safetensors"), "{said}");
    }
    assert_eq!(place.names(), ["a.tssd", "empty"]);
    assert_eq!(read_directory(&place.path("empty")), Files::new());
}

/// Runs the command with these bytes on stdin.
fn pipe(place: &Place, args: &str, stdin: &[u8]) -> Output {
    let mut command = place.command();
    command.args(args.split_whitespace()).stdin(Stdio::piped());
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut pipe = child.stdin.take().unwrap();
    let bytes = stdin.to_vec();
    // A command that has seen enough closes the pipe.
    let writer = std::thread::spawn(move || drop(pipe.write_all(&bytes)));
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap();
    output
}

/// The same, of a command that succeeds; returns stdout and stderr.
#[track_caller]
fn piped(place: &Place, args: &str, stdin: &[u8]) -> (Vec<u8>, String) {
    let output = pipe(place, args, stdin);
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(0), "tssd {args}\n{said}");
    (output.stdout, said)
}

#[test]
fn pipes_carry_files_and_nothing_else() {
    let place = Place::new();
    let in_order = library_file(Some(&[("format", "pt")]));
    let order = vec![1; 10];
    let out_of_order = restyle(&in_order, &Style { order, is_spacious: false, padding: 1 });
    assert!(Header::read(&Bytes::from(in_order.clone())).unwrap().is_in_order());
    assert!(!Header::read(&Bytes::from(out_of_order.clone())).unwrap().is_in_order());
    for file in [in_order, out_of_order] {
        place.write("a.safetensors", &file);
        place.expect(0, "pack a.safetensors -o a.tssd");
        let archive = place.read("a.tssd");
        let (packed, said) = piped(&place, "pack - -o -", &file);
        assert_eq!(packed, archive);
        assert!(said.starts_with("<stdout>: "), "{said}");
        let (unpacked, said) = piped(&place, "unpack - -o - --json", &packed);
        assert_eq!(unpacked, file);
        let json: Json = serde_json::from_str(&said).unwrap();
        assert_eq!((&json["output"], &json["file_len"]), (&"-".into(), &file.len().into()));
        assert_eq!(piped(&place, "pack - -o - -q", &file).1, "");

        let text = |args, stdin: &[u8]| String::from_utf8(piped(&place, args, stdin).0).unwrap();
        assert!(text("inspect -", &archive).starts_with("<stdin>  dict\n"));
        assert!(text("inspect -", &file).starts_with("<stdin>  dict\n"));
        assert!(text("verify -", &archive).starts_with("ok       <stdin>  "));
        assert!(text("diff - a.tssd", &file).starts_with("equal: "));
        assert!(text("diff a.safetensors -", &archive).starts_with("equal: "));
        for stdin in [&archive, &file] {
            assert!(text("roundtrip -", stdin).starts_with("identical  <stdin>\n"));
        }
        assert!(text("inspect --hex -", &archive).starts_with("HEAD\n"));
        let (converted, said) = piped(&place, "convert - -o - --zstd --digest", &archive);
        assert!(said.starts_with("<stdout>: "), "{said}");
        assert!(text("verify --deep -", &converted).starts_with("ok       <stdin>  "));
        assert!(text("diff a.tssd -", &converted).starts_with("equal in meaning: "));
        assert!(text("inspect --digest -", &converted).starts_with("blake3:"));
        assert_eq!(piped(&place, "unpack - -o -", &converted).0, file);
        piped(&place, "put --store store key -", &archive);
        let (got, said) = piped(&place, "get --store store key -o -", b"");
        assert!(said.starts_with("<stdout>: key@"), "{said}");
        place.write("got.tssd", &got);
        place.expect(0, "diff a.tssd got.tssd");
        std::fs::remove_dir_all(place.path("store")).unwrap();
    }
}

#[test]
fn what_comes_out_of_a_pipe_is_not_trusted() {
    let place = Place::new();
    let file = library_file(None);
    let huge = [&(1_u64 << 40).to_le_bytes()[..], b"{}"].concat();
    let far = r#"{"a":{"dtype":"U8","shape":[1099511627776],"data_offsets":[0,1099511627776]}}"#;
    for (bytes, word) in [
        (&b""[..], "shorter than 8 bytes"),
        (&file[..20], "within its header"),
        (&file[..file.len() - 1], "within a tensor"),
        (&[&file[..], b"x"].concat(), "behind its last tensor"),
        (&huge, "are allowed"),
        (b"not at all a safetensors file", "are allowed"),
    ] {
        let output = pipe(&place, "pack - -o out.tssd", bytes);
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains("<stdin>") && said.contains(word), "{word}: {said}");
    }
    // Whether there is memory for what the header claims, or not: it is not there, and no panic.
    let output = pipe(&place, "pack - -o out.tssd", &join(far, b"abc"));
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(matches!(output.status.code(), Some(1 | 5)), "{said}");
    assert!(said.contains("`a`") || said.contains("<stdin>"), "{said}");

    for (code, args) in [
        (1, "unpack - -o out.safetensors"),
        (1, "inspect -"),
        (1, "verify -"),
        (1, "diff - -"),
        (1, "put --store store key -"),
    ] {
        let output = pipe(&place, args, b"neither the one nor the other");
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(code), "tssd {args}\n{said}");
    }
    let output = pipe(&place, "diff - -", &file);
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8(output.stderr).unwrap().contains("stdin is named twice"));
    assert!(place.names().iter().all(|name| name == "store"), "{:?}", place.names());
}
