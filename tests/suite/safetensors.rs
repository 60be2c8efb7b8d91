//! Import and export of safetensors files and directories.
//!
//! They roundtrip byte for byte, import makes no copy, and forged input is rejected.

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

use crate::cli::{Sandbox, safetensors_file};

// ---- Generated files -----------------------------------------------------------------------------

/// Name, dtype and shape of a tensor.
type TensorSpec = (String, Dtype, Vec<usize>);

/// Metadata of a file.
type Metadata = BTreeMap<String, String>;

/// Returns the dtypes of both torch and safetensors, without the packed one.
///
/// The last dimension of the packed one is special.
fn dtypes() -> Vec<Dtype> {
    let is_common =
        |dtype: &Dtype| dtype.safetensors().is_some() && *dtype != Dtype::Float4E2m1fnX2;
    Dtype::ALL.iter().copied().filter(is_common).collect()
}

fn specs() -> impl Strategy<Value = Vec<TensorSpec>> {
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

fn metadata() -> impl Strategy<Value = Option<Metadata>> {
    prop::option::of(prop::collection::btree_map("[a-z\u{e9}]{0,6}", "[ -~\n]{0,9}", 0..3))
}

/// Serializes tensors with the safetensors library.
fn serialize(specs: &[TensorSpec], metadata: Option<&Metadata>) -> Vec<u8> {
    let bytes: Vec<u8> = (0..=255).cycle().take(1 << 14).collect();
    let view = |(index, (name, dtype, shape)): (usize, &TensorSpec)| {
        let dtype: ::safetensors::Dtype =
            serde_json::from_value(dtype.safetensors().into()).unwrap();
        let len = shape.iter().product::<usize>() * dtype.bitsize() / 8;
        (name.clone(), TensorView::new(dtype, shape.clone(), &bytes[index..][..len]).unwrap())
    };
    // Version 0.8 of the library writes invalid JSON if there are no tensors and the metadata is empty.
    let metadata = metadata.filter(|metadata| specs.len() + metadata.len() > 0);
    let metadata = metadata.map(|metadata| metadata.clone().into_iter().collect());
    ::safetensors::serialize(specs.iter().enumerate().map(view), metadata).unwrap()
}

/// Style of a header: order of its entries, pretty-printed or not, and spaces at its end.
#[derive(Clone, Debug)]
struct Style {
    order: Vec<usize>,
    is_pretty: bool,
    padding: usize,
}

fn style() -> impl Strategy<Value = Style> {
    (prop::collection::vec(0..10_usize, 10), any::<bool>(), 0..9_usize)
        .prop_map(|(order, is_pretty, padding)| Style { order, is_pretty, padding })
}

/// Rewrites the header of a file in another style. Asserts that the library still accepts the file.
fn restyle(file: &[u8], style: &Style) -> Vec<u8> {
    let (header, data) = split(file);
    let Json::Object(members) = serde_json::from_str(header.trim_end()).unwrap() else { panic!() };
    let mut members: Vec<(String, Json)> = members.into_iter().collect();
    for (index, other) in style.order.iter().enumerate().take(members.len()) {
        let other = other % members.len();
        members.swap(index, other);
    }
    let header = Json::Object(members.into_iter().collect());
    let mut text = if style.is_pretty { format!("{header:#}") } else { header.to_string() };
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

fn write_archive(dict: &StateDict, attrs: &Attrs) -> Archive {
    let options = attrs
        .iter()
        .fold(Options::new(), |options, (name, value)| options.attr(name.as_str(), value.clone()));
    let mut file = Vec::new();
    Layout::plan(dict, &options).unwrap().write_to(&mut file).unwrap();
    let archive = Archive::from_bytes(file).unwrap();
    archive.verify().unwrap();
    archive
}

fn exported_bytes(export: &Export) -> Vec<u8> {
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

fn is_within(part: &[u8], whole: &[u8]) -> bool {
    let (part, whole) = (part.as_ptr_range(), whole.as_ptr_range());
    whole.start <= part.start && part.end <= whole.end
}

/// A sink that counts the bytes of slices within `source`.
struct SourceCounter<'a> {
    source: &'a [u8],
    bytes_from_source: usize,
}

impl Write for SourceCounter<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if is_within(bytes, self.source) {
            self.bytes_from_source += bytes.len();
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    /// For any style of the header and any start of the data, import finds the tensors that the library
    /// finds, as views of the file, and export restores the file.
    #[test]
    fn file_roundtrips_without_copy(
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
            let bytes = tensor.view().contiguous_bytes().unwrap();
            prop_assert_eq!(bytes, expected.data());
            prop_assert!(bytes.is_empty() || bytes.as_ptr() == expected.data().as_ptr());
            prop_assert!(bytes.is_empty() || is_within(bytes, &file));
            let shape: Vec<usize> =
                tensor.meta().shape().iter().map(|size| *size as usize).collect();
            prop_assert_eq!(&shape, expected.shape());
        }
        let expected = metadata.unwrap_or_default().into_iter();
        let expected = expected.map(|(name, text)| (name, AttrValue::Text(text.into()))).collect();
        let mut own_attrs = attrs.clone();
        own_attrs.retain(|name, _| !name.starts_with("tssd."));
        prop_assert_eq!(own_attrs, expected);

        let export = Export::from_state_dict(&dict, &attrs).unwrap();
        prop_assert_eq!(&exported_bytes(&export), &file);
        let mut counter = SourceCounter { source: &file, bytes_from_source: 0 };
        export.file().unwrap().write_to(&mut counter).unwrap();
        prop_assert_eq!(counter.bytes_from_source as u64, export.nbytes());

        let archive = write_archive(&dict, &attrs);
        prop_assert_eq!(&archive.to_state_dict().unwrap(), &dict);
        prop_assert_eq!(&exported_bytes(&Export::from_archive(&archive).unwrap()), &file);
    }

    /// Reading from a stream returns the tensors of the file, if they are in order.
    #[test]
    fn stream_returns_tensors_of_file(specs in specs(), metadata in metadata(), style in style()) {
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
            Header::expect_end(&mut stream).unwrap();
        } else {
            prop_assert!(!starts.is_sorted() || starts.windows(2).any(|pair| pair[0] == pair[1]));
        }
    }

    /// A file that is cut, or that has bytes after its end, is rejected: as a file and as a stream.
    #[test]
    fn file_of_wrong_length_is_rejected(
        specs in specs(),
        cut in any::<prop::sample::Index>(),
        more in 1..9_usize,
    ) {
        let file = serialize(&specs, None);
        let longer = [&file[..], &vec![0; more]].concat();
        for bytes in [&file[..cut.index(file.len())], &longer] {
            let error = import(Bytes::copy_from_slice(bytes)).unwrap_err();
            prop_assert_eq!(error.kind(), ErrorKind::NotSafetensors);
            let mut stream = bytes;
            let read = Header::read_from(&mut stream).and_then(|header| {
                for entry in header.tensors() {
                    entry.read_from(&mut stream)?;
                }
                Header::expect_end(&mut stream)
            });
            prop_assert_eq!(read.unwrap_err().kind(), ErrorKind::NotSafetensors);
        }
    }

    /// Shards hold all tensors in order, in files of at most `max` bytes or of one tensor, and the index
    /// describes them.
    #[test]
    fn shards_hold_every_tensor_once(specs in specs(), max in 1..200_u64) {
        let (dict, attrs) = import(serialize(&specs, None)).unwrap();
        let export = Export::from_state_dict(&dict, &attrs).unwrap();
        let directory = export.sharded_directory(max).unwrap();
        let files = directory_files(&directory);
        if directory.files.len() == 1 {
            prop_assert_eq!(&files[FILE_NAME], &exported_bytes(&export));
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
        let packed = pack(&files);
        let expected: BTreeMap<String, Tensor> =
            tensors(&dict).into_iter().map(|(name, tensor)| (name, tensor.clone())).collect();
        let found = packed.to_state_dict().unwrap();
        let found: BTreeMap<String, Tensor> =
            tensors(&found).into_iter().map(|(name, tensor)| (name, tensor.clone())).collect();
        prop_assert_eq!(found, expected);
        prop_assert_eq!(directory_files(&Export::from_archive(&packed).unwrap().directory().unwrap()), files);
    }

    /// A directory roundtrips with its index, for files of any style and with any metadata.
    #[test]
    fn directory_roundtrips(
        parts in prop::collection::vec((specs(), metadata(), prop::option::of(style())), 1..4),
        common in metadata(),
    ) {
        let files = directory(&parts, common.as_ref());
        let archive = pack(&files);
        let export = Export::from_archive(&archive).unwrap();
        prop_assert_eq!(directory_files(&export.directory().unwrap()), files);
        // Exported as one file, it has the tensors of all files.
        let (dict, _) = import(exported_bytes(&export)).unwrap();
        prop_assert_eq!(dict.entries().len(), archive.to_state_dict().unwrap().entries().len());
    }
}

pub(crate) type Files = BTreeMap<String, Vec<u8>>;

fn directory_files(directory: &Directory<'_>) -> Files {
    let mut files = Files::new();
    for file in &directory.files {
        let mut bytes = Vec::new();
        file.write_to(&mut bytes).unwrap();
        assert!(files.insert(file.name().to_owned(), bytes).is_none());
    }
    files.extend(directory.index.clone().map(|text| (INDEX_NAME.to_owned(), text.into_bytes())));
    files
}

/// Generates a directory with an index. Each file has its own metadata and the common metadata.
fn directory(
    parts: &[(Vec<TensorSpec>, Option<Metadata>, Option<Style>)],
    common: Option<&Metadata>,
) -> Files {
    let (mut files, mut weight_map) = (Files::new(), serde_json::Map::new());
    for (number, (specs, own, style)) in parts.iter().enumerate() {
        let file = format!("part_{number}.safetensors");
        // The number makes names unique across files.
        let specs: Vec<TensorSpec> = specs
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

/// Packs a directory into an archive, as the command does.
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
    write_archive(&dict, &index.attrs(&headers).unwrap())
}

#[test]
fn misaligned_tensor_is_imported_as_view() {
    let header = r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[1,9]},"b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#;
    let data: Vec<u8> = [&[7][..], &1.5_f32.to_le_bytes(), &(-2.0_f32).to_le_bytes()].concat();
    for padding in 0..4 {
        let file = Bytes::from(join(&format!("{header}{}", " ".repeat(padding)), &data));
        let (dict, attrs) = import(file.clone()).unwrap();
        let Value::Tensor(tensor) = dict.leaf("a").unwrap() else { panic!() };
        assert!(is_within(tensor.view().span(), &file));
        let is_aligned = tensor.view().span().as_ptr().addr().is_multiple_of(4);
        let elements = tensor.view().as_slice::<f32>().map_err(|error| error.kind());
        assert_eq!(elements.is_ok(), is_aligned);
        assert!(is_aligned || elements == Err(ErrorKind::Misaligned));
        // Storages in an archive are aligned.
        let archive = write_archive(&dict, &attrs);
        assert!(archive.storage(0).offset.is_multiple_of(256));
        let stored = archive.tensor("a").unwrap();
        assert_eq!(stored.view().contiguous_bytes().unwrap(), &data[1..]);
        assert_eq!(exported_bytes(&Export::from_archive(&archive).unwrap()), file);
    }
}

#[test]
fn changed_state_dict_gets_new_header() {
    let style = Style { order: vec![], is_pretty: true, padding: 3 };
    let specs = [("a".to_owned(), Dtype::Float32, vec![2]), ("b".to_owned(), Dtype::Uint8, vec![])];
    let file = restyle(&serialize(&specs, None), &style);
    let (dict, attrs) = import(file.clone()).unwrap();
    assert_eq!(attrs.keys().collect::<Vec<_>>(), ["tssd.file.safetensors_header"]);
    let rewritten = |dict: &StateDict, attrs: &Attrs| {
        let bytes = exported_bytes(&Export::from_state_dict(dict, attrs).unwrap());
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
    // Changed elements keep the header.
    let mut other = dict.clone();
    other.insert("b", Tensor::from_slice(&[9_u8], &[]).unwrap());
    let bytes = exported_bytes(&Export::from_state_dict(&other, &attrs).unwrap());
    assert_eq!(split(&bytes).0, split(&file).0);
}

#[test]
fn export_rejects_expanded_tensor_of_a_tebibyte() {
    let meta = TensorMeta::new(Dtype::Uint8, &[1 << 40]).unwrap().with_strides(&[0]).unwrap();
    let mut dict = StateDict::new();
    dict.insert("a", Tensor::new(meta, Storage::from(vec![0]), 0).unwrap());
    let error = Export::from_state_dict(&dict, &Attrs::new()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::LimitExceeded);
}

#[test]
fn shards_are_split_as_in_hugging_face() {
    let sizes = [("a", 3), ("b", 3), ("big", 20), ("c", 2), ("d", 5), ("e", 5)];
    let mut dict = StateDict::new();
    for (name, size) in sizes {
        dict.insert(name, Tensor::from_slice(&vec![1_u8; size], &[size as u64]).unwrap());
    }
    let export = Export::from_state_dict(&dict, &Attrs::new()).unwrap();
    let split_at = |max| -> Vec<String> {
        let directory = export.sharded_directory(max).unwrap();
        directory.files.iter().map(|file| file.tensors().collect::<Vec<_>>().join(" ")).collect()
    };
    assert_eq!(split_at(8), ["big", "a b c", "d", "e"]);
    assert_eq!(split_at(10), ["big", "a b c", "d e"]);
    assert_eq!(split_at(20), ["a b", "big", "c d e"]);
    assert_eq!(split_at(38), ["a b big c d e"]);
    assert_eq!(split_at(1), ["a", "b", "big", "c", "d", "e"]);
}

/// A forged attribute is ignored if it names a missing tensor or an invalid file name.
#[test]
fn forged_index_attribute_is_ignored() {
    let mut dict = StateDict::new();
    dict.insert("a", Tensor::from_slice(&[1_u8], &[1]).unwrap());
    let header = r#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}"#;
    let index = |file: &str| json!({ "weight_map": { "a": file } }).to_string();
    let good = json!({ "index": index("x.safetensors"), "headers": {} });
    for (packed, is_used) in [
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
        let export = Export::from_state_dict(&dict, &attrs).unwrap();
        let directory = export.directory().unwrap();
        assert_eq!(directory.index.is_some(), is_used, "{packed}");
        let name = if is_used { "x.safetensors" } else { FILE_NAME };
        assert_eq!(directory.files[0].name(), name);
    }
}

// ---- The command ---------------------------------------------------------------------------------

fn write_directory(place: &Sandbox, name: &str, files: &Files) {
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

fn spec(name: &str, dtype: Dtype, shape: &[usize]) -> TensorSpec {
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
fn command_roundtrips_directory() {
    let place = Sandbox::new();
    let files = small_directory();
    write_directory(&place, "model", &files);
    place.run_with_code(0, "pack model -o a.tssd");
    place.run_with_code(0, "verify a.tssd");
    place.run_with_code(0, "unpack a.tssd -o out/");
    assert_eq!(read_directory(&place.path("out")), files);
    // An existing empty directory is filled, not replaced: it may be the working directory of a shell.
    std::fs::create_dir(place.path("empty")).unwrap();
    place.run_with_code(0, "unpack a.tssd -o empty");
    assert_eq!(read_directory(&place.path("empty")), files);
    let message = place.run_with_code(5, "unpack a.tssd -o out");
    assert!(message.contains("out is not empty"), "{message}");
    place.write("file", b"");
    place.run_with_code(5, "unpack a.tssd -o file --shard-size 5GB");
    place.run_with_code(2, "unpack a.tssd -o new --shard-size 0");
    place.run_with_code(2, "unpack a.tssd -o - --shard-size 5GB");
    place.run_with_code(3, "unpack a.tssd -o missing/new/");

    place.run_with_code(0, "unpack a.tssd -o whole --shard-size 5GB");
    let whole = read_directory(&place.path("whole"));
    // The index keeps the metadata of the packed one.
    assert_eq!(whole.keys().collect::<Vec<_>>(), [FILE_NAME, INDEX_NAME]);
    // A directory with one file is a model too, and unpacks to one file.
    place.run_with_code(0, "pack whole -o b.tssd");
    place.run_with_code(0, "unpack b.tssd -o again/");
    assert_eq!(read_directory(&place.path("again")), whole);
    place.run_with_code(0, "diff --values a.tssd whole/model.safetensors");

    place.run_with_code(0, "unpack a.tssd -o split --shard-size 40");
    let split = read_directory(&place.path("split"));
    assert_eq!(
        split.keys().collect::<Vec<_>>(),
        ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", INDEX_NAME]
    );
    place.run_with_code(0, "pack split -o c.tssd");
    place.run_with_code(0, "diff --values a.tssd c.tssd");
    place.run_with_code(0, "unpack c.tssd -o c/");
    assert_eq!(read_directory(&place.path("c")), split);
    let names = place.file_names();
    assert!(names.iter().all(|name| !name.starts_with('.')), "{names:?}");
}

/// Returns the files with a text in the index replaced.
fn edited(files: &Files, from: &str, to: &str) -> Files {
    let mut files = files.clone();
    let index = String::from_utf8(files[INDEX_NAME].clone()).unwrap();
    assert!(index.contains(from), "{index}");
    files.insert(INDEX_NAME.to_owned(), index.replace(from, to).into_bytes());
    files
}

#[test]
fn pack_rejects_directory_that_contradicts_its_index() {
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
        (1, with(INDEX_NAME, vec![0xff]), vec![INDEX_NAME, "utf-8"]),
        (1, without(name), vec![INDEX_NAME, "`c1` to part_1.safetensors", "does not exist"]),
        (3, without(INDEX_NAME), vec![INDEX_NAME, FILE_NAME]),
        (5, with(FILE_NAME, second.clone()), vec![FILE_NAME, "index of other files"]),
    ];
    for (code, files, words) in cases {
        let place = Sandbox::new();
        write_directory(&place, "model", &files);
        let message = place.run_with_code(code, "pack model -o out.tssd");
        for word in words {
            assert!(message.contains(word), "{word}: {message}");
        }
        assert_eq!(place.file_names(), ["model"]);
    }
}

/// A downloaded directory must not make `pack` read other files of the user.
#[cfg(unix)]
#[test]
fn pack_rejects_links_out_of_directory() {
    use std::os::unix::fs::symlink;
    for name in ["part_0.safetensors", INDEX_NAME] {
        let place = Sandbox::new();
        write_directory(&place, "model", &small_directory());
        let file = place.path("model").join(name);
        std::fs::rename(&file, place.path("secret")).unwrap();
        symlink(place.path("secret"), &file).unwrap();
        let message = place.run_with_code(5, "pack model -o out.tssd");
        assert!(message.contains(&format!("{name} is a link that leads out")), "{message}");
        // A pipe is rejected, without waiting for its writer.
        std::fs::remove_file(&file).unwrap();
        assert!(Command::new("mkfifo").arg(&file).status().unwrap().success());
        let message = place.run_with_code(5, "pack model -o out.tssd");
        assert!(message.contains(&format!("{name} is no regular file")), "{message}");
        // The path of the directory itself may be a link.
        std::fs::remove_file(&file).unwrap();
        std::fs::rename(place.path("secret"), &file).unwrap();
        symlink(place.path("model"), place.path("link")).unwrap();
        place.run_with_code(0, "pack link -o out.tssd");
    }
}

#[cfg(unix)]
#[test]
fn failed_unpack_leaves_no_directory() {
    let place = Sandbox::new();
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
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(5), "{stderr}");
        assert!(stderr.contains("model-00001-of-00002.safetensors"), "{stderr}");
    }
    assert_eq!(place.file_names(), ["a.tssd", "empty"]);
    assert_eq!(read_directory(&place.path("empty")), Files::new());
}

/// Runs the command with these bytes on stdin.
pub(crate) fn pipe(place: &Sandbox, args: &str, stdin: &[u8]) -> Output {
    let mut command = place.command();
    command.args(args.split_whitespace()).stdin(Stdio::piped());
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut pipe = child.stdin.take().unwrap();
    let bytes = stdin.to_vec();
    // A command that exits early closes the pipe.
    let writer = std::thread::spawn(move || drop(pipe.write_all(&bytes)));
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap();
    output
}

/// Runs the command with these bytes on stdin. Asserts success; returns stdout and stderr.
#[track_caller]
fn pipe_successfully(place: &Sandbox, args: &str, stdin: &[u8]) -> (Vec<u8>, String) {
    let output = pipe(place, args, stdin);
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(0), "tssd {args}\n{stderr}");
    (output.stdout, stderr)
}

#[test]
fn pipes_carry_only_contents_of_files() {
    let place = Sandbox::new();
    let in_order = safetensors_file(Some(&[("format", "pt")]));
    let order = vec![1; 10];
    let out_of_order = restyle(&in_order, &Style { order, is_pretty: false, padding: 1 });
    assert!(Header::read(&Bytes::from(in_order.clone())).unwrap().is_in_order());
    assert!(!Header::read(&Bytes::from(out_of_order.clone())).unwrap().is_in_order());
    for file_vector in [in_order, out_of_order] {
        place.write("a.safetensors", &file_vector);
        place.run_with_code(0, "pack a.safetensors -o a.tssd --force");
        let archive = place.read("a.tssd");
        let (packed, message) = pipe_successfully(&place, "pack - -o -", &file_vector);
        assert_eq!(packed, archive);
        assert!(message.starts_with("<stdout>: "), "{message}");
        let (unpacked, message) = pipe_successfully(&place, "unpack - -o - --json", &packed);
        assert_eq!(unpacked, file_vector);
        let json: Json = serde_json::from_str(&message).unwrap();
        assert_eq!((&json["output"], &json["file_len"]), (&"-".into(), &file_vector.len().into()));
        assert_eq!(pipe_successfully(&place, "pack - -o - -q", &file_vector).1, "");

        let text = |args, stdin: &[u8]| {
            String::from_utf8(pipe_successfully(&place, args, stdin).0).unwrap()
        };
        assert!(text("inspect -", &archive).starts_with("<stdin>  dict\n"));
        assert!(text("inspect -", &file_vector).starts_with("<stdin>  dict\n"));
        assert!(text("verify -", &archive).starts_with("ok       <stdin>  "));
        assert!(text("diff - a.tssd", &file_vector).starts_with("equal: "));
        assert!(text("diff a.safetensors -", &archive).starts_with("equal: "));
        for stdin in [&archive, &file_vector] {
            assert!(text("roundtrip -", stdin).starts_with("identical  <stdin>\n"));
        }
        assert!(text("inspect --hex -", &archive).starts_with("HEAD\n"));
        let (converted, message) =
            pipe_successfully(&place, "convert - -o - --codec zstd --digest", &archive);
        assert!(message.starts_with("<stdout>: "), "{message}");
        assert!(text("verify --deep -", &converted).starts_with("ok       <stdin>  "));
        assert!(text("diff a.tssd -", &converted).starts_with("equal in meaning: "));
        assert!(text("inspect --digest -", &converted).starts_with("blake3:"));
        assert_eq!(pipe_successfully(&place, "unpack - -o -", &converted).0, file_vector);
        pipe_successfully(&place, "put --store store key -", &archive);
        let (got, message) = pipe_successfully(&place, "get --store store key -o -", b"");
        assert!(message.starts_with("<stdout>: key@"), "{message}");
        place.write("got.tssd", &got);
        place.run_with_code(0, "diff a.tssd got.tssd");
        std::fs::remove_dir_all(place.path("store")).unwrap();
    }
}

#[test]
fn piped_input_is_validated() {
    let place = Sandbox::new();
    let file = safetensors_file(None);
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
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{stderr}");
        assert!(stderr.contains("<stdin>") && stderr.contains(word), "{word}: {stderr}");
    }
    // The header claims 1 TiB. The command fails without a panic, whether or not it can allocate that much.
    let output = pipe(&place, "pack - -o out.tssd", &join(far, b"abc"));
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(matches!(output.status.code(), Some(1 | 5)), "{stderr}");
    assert!(stderr.contains("`a`") || stderr.contains("<stdin>"), "{stderr}");

    for (code, args) in [
        (1, "unpack - -o out.safetensors"),
        (1, "inspect -"),
        (1, "verify -"),
        (1, "diff - -"),
        (1, "put --store store key -"),
    ] {
        let output = pipe(&place, args, b"neither the one nor the other");
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(code), "tssd {args}\n{stderr}");
    }
    let output = pipe(&place, "diff - -", &file);
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8(output.stderr).unwrap().contains("stdin is named twice"));
    assert!(place.file_names().iter().all(|name| name == "store"), "{:?}", place.file_names());
}
