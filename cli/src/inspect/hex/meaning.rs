//! What the fields of records mean.

use tssd_format::Dtype;

use super::record::{NONE, Record, heap_range};

/// The kinds of nodes and of attributes. Spec: section 5.
const KINDS: [(u64, &str); 19] = [
    (0, "none"),
    (1, "bool"),
    (2, "int"),
    (3, "bigint"),
    (4, "float"),
    (5, "complex"),
    (6, "str"),
    (7, "bytes"),
    (8, "dtype"),
    (9, "size"),
    (10, "device"),
    (11, "tensor"),
    (12, "opaque"),
    (32, "dict"),
    (33, "ordered_dict"),
    (34, "list"),
    (35, "tuple"),
    (36, "namedtuple"),
    (37, "divergent"),
];

/// The kinds of keys. Spec: section 5.
const KEY_KINDS: [&str; 9] =
    ["index", "str", "int", "bigint", "bool", "float", "none", "bytes", "tuple"];

/// The kinds of placements. Spec: section 7.
const PLACEMENTS: [&str; 3] = ["Replicate", "Shard", "_StridedShard"];

fn name_of(kind: u64) -> &'static str {
    KINDS.iter().find(|(code, _)| *code == kind).map_or("", |(_, name)| name)
}

fn at<'a>(names: &[&'a str], code: u64) -> &'a str {
    usize::try_from(code).ok().and_then(|code| names.get(code)).copied().unwrap_or_default()
}

/// What a field names in the heap, if it does.
pub(super) fn in_heap(record: &Record<'_>, field: &str) -> Option<&'static str> {
    match (record.shape.name, field) {
        ("Node", "key") => {
            let kind = at(&KEY_KINDS, record.get("key_kind"));
            Some(kind).filter(|kind| matches!(*kind, "str" | "bigint" | "bytes" | "tuple"))
        }
        ("Node", "a") if record.get("flags") == 0 => match name_of(record.get("kind")) {
            kind @ ("str" | "bigint" | "bytes" | "opaque") => Some(kind),
            "device" => Some("str"),
            _ => None,
        },
        ("Node", "b") => {
            let kind = name_of(record.get("kind"));
            matches!(kind, "opaque" | "namedtuple").then_some("str")
        }
        ("Attr", "value") => {
            Some(name_of(record.get("kind"))).filter(|kind| matches!(*kind, "str" | "bytes"))
        }
        ("Attr" | "Shard", "name") => Some("str"),
        _ => None,
    }
}

/// A field in words.
pub(super) fn of_field(record: &Record<'_>, field: &str) -> String {
    let value = record.get(field);
    let called = |name: &str| format!("{field}: {value}, {name}");
    let of_none = |note: &str, else_: String| {
        if value == NONE { format!("{field}: NONE, {note}") } else { else_ }
    };
    let plain = || format!("{field} {value}");
    match (record.shape.name, field) {
        (_, "magic" | "end_magic") => field.to_owned(),
        ("Head", "index_off" | "index_len" | "flags")
        | ("Trailer", "flags" | "prev_trailer_off" | "generation")
        | ("Slice", "flags") => format!("{field}: reserved"),
        ("Head", "incompat" | "ro_compat" | "compat") if value != 0 => {
            let bits = (0..64).filter(|bit| value >> bit & 1 == 1);
            let bits: Vec<String> = bits.map(|bit: u32| bit.to_string()).collect();
            let draft = if field == "incompat" && value >> 63 == 1 { ", draft" } else { "" };
            format!("{field}: bit {}{draft}", bits.join(", "))
        }
        ("Head", "crc32") => format!("crc32: of bytes {} to {}", record.at, record.at + 59),
        ("Trailer", "crc32") => format!(
            "crc32: of bytes {} to {} and {} to {}",
            record.at,
            record.at + 51,
            record.at + 56,
            record.at + 63
        ),
        ("Trailer", "root_off") => called(&format!("from {} on", record.get("index_off"))),
        ("Trailer", "index_crc32") => {
            let start = record.get("index_off");
            format!("{field}: of bytes {start} to {}", start + record.get("index_len") - 1)
        }

        ("Node" | "Attr", "kind") => called(name_of(value)),
        ("Node", "key_kind") => called(at(&KEY_KINDS, value)),
        ("Node", "flags") if value == 1 => called("the content is a storage"),
        ("Node", "count") => match (name_of(record.get("kind")), value) {
            ("tensor", 1) => "count: 1 record".into(),
            ("tensor", _) => format!("count: {value} records"),
            ("size", 1) => "count: 1 entry".into(),
            ("size", _) => format!("count: {value} entries"),
            (_, 1) => "count: 1 child".into(),
            (_, 0) => plain(),
            _ => format!("count: {value} children"),
        },
        ("Node", "key" | "a" | "b") | ("Attr", "name" | "value") | ("Shard", "name") => {
            word(record, field, value)
        }

        ("Tensor", "storage") => of_none("it has no elements", plain()),
        ("Tensor", "dtype") => called(dtype_of(value)),
        ("Tensor", "flags") => flags(value).map_or_else(plain, |flags| called(&flags)),
        ("Tensor", "shape") | ("Slice", "offsets" | "global_shape") => {
            format!("{field}: dims offset {value}")
        }
        ("Tensor", "strides") => of_none("row-major", format!("{field}: dims offset {value}")),
        ("Tensor", "slice") => of_none("a whole tensor", plain()),

        ("Storage", "chunks") => {
            of_none("codec is 0", format!("{field}: first record is chunk {value}"))
        }
        ("Storage", "crcs") => format!("{field}: first entry is {value}"),
        ("Storage", "crc32") => format!("{field}: of the {} bytes", record.get("raw_len")),
        ("Storage" | "Chunk", "codec") => called(at(&["raw", "zstd"], value)),
        ("Storage", "align_log2") => called(&format!("aligned to {}", power(value))),
        ("Storage", "chunk_log2") => match power(value) >> 10 {
            bytes @ 1..1024 => called(&format!("chunks of {bytes} KiB")),
            bytes => called(&format!("chunks of {} MiB", bytes >> 10)),
        },
        ("Storage", "shuffle") if value != 0 => called("elements of as many bytes"),

        ("Slice", "mesh") => of_none("no mesh", format!("{field}: dims offset {value}")),
        ("Slice", "coordinates" | "ranks") => {
            of_none("unknown", format!("{field}: dims offset {value}"))
        }
        ("Slice", "placements") => of_none("unknown", format!("{field}: first is {value}")),
        ("Slice", "names") => of_none("unnamed", format!("{field}: dims offset {value}")),
        ("Placement", "kind") => called(at(&PLACEMENTS, value)),

        ("Shard", "digest") if value == 0 => format!("{field}: none"),
        ("Shard", "digest") => format!("{field}: root digest of the file"),
        ("Shard", "index_crc32") => format!("{field}: of the index of the file"),
        _ => plain(),
    }
}

/// A word whose meaning depends on the kind of its record.
fn word(record: &Record<'_>, field: &str, value: u64) -> String {
    let says = |what: String| format!("{field}: {what}");
    if in_heap(record, field).is_some() {
        let (offset, len) = heap_range(value);
        return says(format!("heap offset {offset}, length {len}"));
    }
    let kind = match field {
        "key" => at(&KEY_KINDS, record.get("key_kind")),
        _ => name_of(record.get("kind")),
    };
    match (field, kind) {
        ("a", "str" | "bytes" | "opaque") => says(format!("storage {value}")),
        ("a", "dict" | "ordered_dict" | "list" | "tuple" | "namedtuple" | "divergent") => {
            says(format!("first child is node {value}"))
        }
        ("a", "tensor") => says(format!("first record is tensor {value}")),
        ("a", "size") => says(format!("dims offset {value}")),
        ("a", "dtype") => says(format!("{value}, {}", dtype_of(value))),
        ("a" | "value" | "key", "int") => says(value.cast_signed().to_string()),
        ("a" | "key", "float") | ("a" | "b", "complex") => {
            says(format!("{:?}", f64::from_bits(value)))
        }
        _ => format!("{field} {value}"),
    }
}

fn dtype_of(code: u64) -> &'static str {
    u16::try_from(code).ok().and_then(Dtype::from_code).map_or("", Dtype::name)
}

fn flags(value: u64) -> Option<String> {
    let flags = tssd_format::TensorFlags::from_bits(u8::try_from(value).ok()?)?;
    let names = tssd_format::TensorFlags::NAMES;
    let set = names.iter().filter(|(flag, _)| flags.contains(*flag)).map(|(_, name)| *name);
    let set: Vec<&str> = set.collect();
    (!set.is_empty()).then(|| set.join(", "))
}

fn power(log2: u64) -> u64 {
    u32::try_from(log2).ok().and_then(|log2| 1_u64.checked_shl(log2)).unwrap_or_default()
}
