//! The specification agrees with the code: byte tables, rules, dtypes and vectors.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use serde_json::Value as Json;
use tssd_format::{Archive, Dtype, ErrorKind, TaggedClass};

fn spec(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../spec").join(path)
}

fn read_json(path: &str) -> Json {
    let text = std::fs::read(spec(path)).unwrap();
    // The JSON of 64 levels of containers exceeds the default recursion limit of serde_json.
    let mut parser = serde_json::Deserializer::from_slice(&text);
    parser.disable_recursion_limit();
    serde::Deserialize::deserialize(&mut parser).unwrap()
}

#[test]
fn byte_tables_match_code() {
    let text = std::fs::read_to_string(spec("format.md")).unwrap();
    let mut tables: BTreeMap<&str, Vec<(String, usize, usize)>> = BTreeMap::new();
    let mut record = None;
    for line in text.lines() {
        if let Some(heading) = line.strip_prefix("### ") {
            record = heading.split_once(" (").map(|(name, size)| {
                (name, size.trim_end_matches(" bytes)").parse::<usize>().unwrap())
            });
        }
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let (Some((name, _)), [_, offset, size, field, ..]) = (record, cells.as_slice()) else {
            continue;
        };
        if let (Ok(offset), Ok(size)) = (offset.parse(), size.parse()) {
            tables.entry(name).or_default().push(((*field).into(), offset, size));
        }
    }
    for (name, fields) in tssd_format::record_tables() {
        let fields: Vec<_> = fields.iter().map(|(f, o, s)| ((*f).to_string(), *o, *s)).collect();
        assert_eq!(tables.remove(name), Some(fields), "the table of {name}");
    }
    assert!(tables.is_empty(), "the spec has tables that the code lacks: {tables:?}");
}

#[test]
fn every_rule_has_an_error_kind_and_vice_versa() {
    let text = std::fs::read_to_string(spec("format.md")).unwrap();
    let mut rules: BTreeSet<(String, String)> = BTreeSet::new();
    // A rule extends from its number to the next blank line or rule. It ends with its kind in backticks.
    for part in text.split("\n- **").skip(1) {
        let part = part.split("\n\n").next().unwrap();
        let (Some(rule), true) = (part.get(..5), part.starts_with("F-")) else { continue };
        // Rules for programs name errors of requests.
        if rule > "F-100" {
            continue;
        }
        let named =
            ErrorKind::ALL.iter().filter(|kind| part.contains(&format!("`{}`", kind.name())));
        rules.extend(named.map(|kind| (rule.to_string(), kind.name().to_string())));
    }
    let kinds = ErrorKind::ALL.iter().filter(|kind| kind.rule().starts_with("F-"));
    let kinds: BTreeSet<_> =
        kinds.map(|kind| (kind.rule().to_string(), kind.name().to_string())).collect();
    assert_eq!(rules, kinds);
}

#[test]
fn dtypes_match_table() {
    let rows = Dtype::ALL.iter().map(|dtype| {
        serde_json::json!({
            "number": dtype.number(), "name": dtype.name(), "class": dtype.class().name(),
            "size": dtype.itemsize(), "values": dtype.values(), "bits": dtype.bits(),
            "safetensors": dtype.safetensors(),
        })
    });
    let Json::Array(mut table) = read_json("dtypes.json") else { panic!("a list") };
    for row in &mut table {
        // Only readers of the document need them.
        for name in ["order", "encoding"] {
            assert!(row.as_object_mut().unwrap().remove(name).is_some(), "{name} of {row}");
        }
    }
    assert_eq!(table, rows.collect::<Vec<_>>());
    assert_eq!(Dtype::ALL.len(), 42);
    assert!(Dtype::ALL.is_sorted());
}

#[test]
fn dtype_table_of_document_matches_json() {
    let text = std::fs::read_to_string(spec("format.md")).unwrap();
    let (_, table) = text.split_once("<!-- dtypes: begin -->\n").unwrap();
    let (table, _) = table.split_once("<!-- dtypes: end -->").unwrap();
    let Json::Array(rows) = read_json("dtypes.json") else { panic!("a list") };
    let rows = rows.iter().map(|row| {
        let cell = |name: &str| match &row[name] {
            Json::Null => "\u{2013}".to_owned(),
            Json::String(text) => text.clone(),
            number => number.to_string(),
        };
        let number = row["number"].as_u64().unwrap();
        let names = ["name", "class", "size", "values", "bits", "order", "encoding", "safetensors"];
        let cells: Vec<String> =
            [format!("0x{number:02X}")].into_iter().chain(names.map(cell)).collect();
        format!("| {} |", cells.join(" | "))
    });
    // The first two lines are the header.
    assert_eq!(table.lines().skip(2).collect::<Vec<_>>(), rows.collect::<Vec<_>>());
}

#[test]
fn class_tags_match_json_and_document() {
    let rows = TaggedClass::ALL.iter().map(|class| {
        serde_json::json!({
            "number": class.number(), "name": class.name(), "kind": class.kind_name(),
            "parameters": class.parameter_count(),
        })
    });
    let Json::Array(table) = read_json("classes.json") else { panic!("a list") };
    assert_eq!(table, rows.collect::<Vec<_>>());

    let text = std::fs::read_to_string(spec("format.md")).unwrap();
    let (_, table) = text.split_once("<!-- classes: begin -->\n").unwrap();
    let (table, _) = table.split_once("<!-- classes: end -->").unwrap();
    let starts: Vec<String> = table
        .lines()
        .skip(2)
        .map(|row| row.split(" | ").take(3).collect::<Vec<_>>().join(" | "))
        .collect();
    let rows = TaggedClass::ALL.iter().map(|class| {
        format!("| 0x{:02X} | {} | {}", class.number(), class.kind_name(), class.name())
    });
    assert_eq!(starts, rows.collect::<Vec<_>>());
}

/// Opens a vector: a file, the shard set of a directory, or a delta with its base.
fn open(file: &str) -> Result<Archive, tssd_format::Error> {
    tssd_tests::vectors::generated_folder();
    let path = spec(&format!("vectors/{file}"));
    tssd_tests::vectors::open(&path)
}

#[test]
fn valid_vectors_are_accepted() {
    let manifest = read_json("vectors/manifest.json");
    let valid = manifest["valid"].as_array().unwrap();
    assert!(valid.len() >= 60);
    for vector in valid {
        let name = vector["name"].as_str().unwrap();
        let archive = open(vector["file"].as_str().unwrap());
        let archive = archive.unwrap_or_else(|error| panic!("{name}: {error}"));
        archive.verify_deep().unwrap_or_else(|error| panic!("{name}: {error}"));
        let view = tssd_format::to_json(&archive).unwrap();
        assert_eq!(view, read_json(&format!("vectors/valid/{name}.json")), "{name}");
        if !archive.is_manifest_only() && !archive.lacks_base() {
            archive.to_state_dict().unwrap_or_else(|error| panic!("{name}: {error}"));
        }
    }
}

#[test]
fn invalid_vectors_are_rejected_with_listed_error() {
    let manifest = read_json("vectors/manifest.json");
    let invalid = manifest["invalid"].as_array().unwrap();
    assert!(invalid.len() >= 150);
    let mut mismatches = Vec::new();
    for vector in invalid {
        let name = vector["name"].as_str().unwrap();
        let verified =
            open(vector["file"].as_str().unwrap()).and_then(|archive| archive.verify_deep());
        let found = verified.map_err(|error| (error.kind().rule(), error.kind().name()));
        let expected = (vector["rule"].as_str().unwrap(), vector["kind"].as_str().unwrap());
        if found != Err(expected) {
            mismatches.push(format!("{name}: expected {expected:?}, found {found:?}"));
        }
    }
    assert!(
        mismatches.is_empty(),
        "{} of {}:\n{}",
        mismatches.len(),
        invalid.len(),
        mismatches.join("\n")
    );
}

/// Each file has several tensors, one of which is invalid.
#[test]
fn errors_name_invalid_leaf() {
    for (name, path) in [
        ("generated/053-lie-tensors-shape", r#"["1"]"#),
        ("invalid/054-empty-with-storage", r#"["3"]"#),
        ("invalid/054-storage-of-second", r#"["1"]"#),
    ] {
        let error = open(&format!("{name}.tssd")).unwrap_err();
        assert_eq!(error.path(), Some(path), "{name}: {error}");
    }
}

/// The lines of the dump have the right offsets, cover all bytes, and show the bytes of the vector.
#[test]
fn worked_example_matches_vector() {
    let text = std::fs::read_to_string(spec("format.md")).unwrap();
    let (_, section) = text.split_once("\n## 10. ").unwrap();
    let dump = section.split("```").nth(1).unwrap();
    let file = std::fs::read(spec("vectors/valid/003-one-tensor.tssd")).unwrap();
    let mut shown: Vec<u8> = Vec::new();
    for line in dump.lines() {
        // OFFSET: BYTES, two spaces, description. A line without an offset is a heading.
        let Some((offset, rest)) = line.split_once(": ") else { continue };
        assert_eq!(offset.trim().parse(), Ok(shown.len()), "{line}");
        let bytes = rest.split("  ").next().unwrap();
        let (bytes, count) = bytes.split_once(" * ").unwrap_or((bytes, "1"));
        let bytes = bytes.split(' ').map(|byte| u8::from_str_radix(byte, 16).unwrap());
        let start = shown.len();
        shown.extend(bytes.collect::<Vec<u8>>().repeat(count.parse().unwrap()));
        assert_eq!(file.get(start..shown.len()), shown.get(start..), "{line}");
    }
    assert_eq!(shown.len(), file.len());
}
