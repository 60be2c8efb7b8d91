//! Description of the fields of records.

use tssd_format::{Dtype, TaggedClass};

use super::record::{NONE, Record, heap_range};

/// Kinds of nodes and of attributes. Spec: section 5.
const KINDS: [(u64, &str); 20] = [
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
    (13, "distributed"),
    (32, "dict"),
    (33, "ordered_dict"),
    (34, "list"),
    (35, "tuple"),
    (36, "namedtuple"),
    (37, "divergent"),
];

/// Kinds of keys. Spec: section 5.
const KEY_KINDS: [&str; 9] =
    ["index", "str", "int", "bigint", "bool", "float", "none", "bytes", "tuple"];

/// Kinds of placements. Spec: section 7.
const PLACEMENTS: [&str; 3] = ["Replicate", "Shard", "_StridedShard"];

/// Classes of dtypes that a file describes. Spec: section 6.
const DTYPE_CLASSES: [&str; 7] = ["other", "bool", "int", "uint", "float", "complex", "bits"];

fn kind_name(kind: u64) -> &'static str {
    KINDS.iter().find(|(code, _)| *code == kind).map_or("", |(_, name)| name)
}

fn name_at<'a>(names: &[&'a str], code: u64) -> &'a str {
    usize::try_from(code).ok().and_then(|code| names.get(code)).copied().unwrap_or_default()
}

/// Returns the kind of content that a field references in the heap, or `None`.
pub(super) fn heap_kind(record: &Record<'_>, field: &str) -> Option<&'static str> {
    match (record.layout.name, field) {
        ("Node", "key") => {
            let kind = name_at(&KEY_KINDS, record.get("key_kind"));
            Some(kind).filter(|kind| matches!(*kind, "str" | "bigint" | "bytes" | "tuple"))
        }
        ("Node", "a") if record.get("flags") == 0 => match kind_name(record.get("kind")) {
            kind @ ("str" | "bigint" | "bytes" | "opaque") => Some(kind),
            "device" => Some("str"),
            _ => None,
        },
        ("Node", "b") => {
            let kind = kind_name(record.get("kind"));
            matches!(kind, "opaque" | "namedtuple").then_some("str")
        }
        ("Attr", "value") => {
            Some(kind_name(record.get("kind"))).filter(|kind| matches!(*kind, "str" | "bytes"))
        }
        ("Attr" | "Shard" | "Dtype", "name") => Some("str"),
        _ => None,
    }
}

/// Describes a field.
pub(super) fn describe_field(record: &Record<'_>, field: &str) -> String {
    let value = record.get(field);
    let with_name = |name: &str| format!("{field}: {value}, {name}");
    let or_none = |note: &str, otherwise: String| {
        if value == NONE { format!("{field}: NONE, {note}") } else { otherwise }
    };
    let plain = || format!("{field} {value}");
    match (record.layout.name, field) {
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
        ("Head", "crc32") => format!("crc32: of bytes {} to {}", record.offset, record.offset + 59),
        ("Trailer", "crc32") => format!(
            "crc32: of bytes {} to {} and {} to {}",
            record.offset,
            record.offset + 51,
            record.offset + 56,
            record.offset + 63
        ),
        ("Trailer", "root_off") => with_name(&format!("from {} on", record.get("index_off"))),
        ("Trailer", "index_crc32") => {
            let start = record.get("index_off");
            format!("{field}: of bytes {start} to {}", start + record.get("index_len") - 1)
        }

        ("Node" | "Attr", "kind") => with_name(kind_name(value)),
        ("Node", "key_kind") => with_name(name_at(&KEY_KINDS, value)),
        ("Node", "flags") if value == 1 => with_name("the content is a storage"),
        ("Node", "count") => match (kind_name(record.get("kind")), value) {
            ("tensor" | "distributed", 1) => "count: 1 record".into(),
            ("tensor", _) => format!("count: {value} records"),
            ("size", 1) => "count: 1 entry".into(),
            ("size", _) => format!("count: {value} entries"),
            (_, 1) => "count: 1 child".into(),
            (_, 0) => plain(),
            _ => format!("count: {value} children"),
        },
        ("Node", "key" | "a" | "b") | ("Attr", "name" | "value") | ("Shard" | "Dtype", "name") => {
            describe_value(record, field, value)
        }

        ("Tensor", "storage") => or_none("no elements, or distributed", plain()),
        ("Tensor", "dtype") => format!("{field}: {}", dtype_label(value)),
        ("Tensor", "flags") => flag_names(value).map_or_else(plain, |flags| with_name(&flags)),
        ("Tensor", "shape") | ("Slice", "offsets" | "global_shape") => {
            format!("{field}: dims offset {value}")
        }
        ("Tensor", "strides") => or_none("row-major", format!("{field}: dims offset {value}")),
        ("Tensor", "slice") => or_none("a whole tensor", plain()),

        ("Storage", "chunks") => {
            or_none("codec is 0", format!("{field}: first record is chunk {value}"))
        }
        ("Storage", "crcs") => format!("{field}: first entry is {value}"),
        ("Storage", "crc32") => format!("{field}: of the {} bytes", record.get("raw_len")),
        ("Storage", "codec") => with_name(name_at(&["raw", "chunks with codecs", "delta"], value)),
        ("Chunk", "codec") => {
            with_name(name_at(&["raw", "zstd", "planes", "delta", "tiers"], value))
        }
        ("Storage", "align_log2") => with_name(&format!("aligned to {}", power_of_two(value))),
        ("Storage", "chunk_log2") => match power_of_two(value) >> 10 {
            bytes @ 1..1024 => with_name(&format!("chunks of {bytes} KiB")),
            bytes => with_name(&format!("chunks of {} MiB", bytes >> 10)),
        },
        ("Storage", "width") if value != 0 => with_name("bytes of an element, for the codecs"),

        ("Storage", "subtrees") => {
            or_none("no entries", format!("{field}: first entry is {value}"))
        }

        ("Dtype", "number") => format!("{field}: 0x{value:04X}"),
        ("Dtype", "class") => with_name(name_at(&DTYPE_CLASSES, value)),

        ("Slice", "mesh") => or_none("no mesh", format!("{field}: dims offset {value}")),
        ("Slice", "coordinates" | "ranks") => {
            or_none("unknown", format!("{field}: dims offset {value}"))
        }
        ("Slice", "placements") => or_none("unknown", format!("{field}: first is {value}")),
        ("Slice", "names") => or_none("unnamed", format!("{field}: dims offset {value}")),
        ("Placement", "kind") => with_name(name_at(&PLACEMENTS, value)),

        ("Shard", "digest") if value == 0 => format!("{field}: none"),
        ("Shard", "digest") => format!("{field}: content digest of the file"),
        ("Shard", "index_crc32") => format!("{field}: of the index of the file"),
        ("Shard", "pages_crc32") => format!("{field}: of crc_pages of the file"),
        ("Shard", "others") if value == NONE => {
            format!("{field}: NONE, places are in the index of the file")
        }
        ("Shard", "others") => format!("{field}: first is {value}"),
        _ => plain(),
    }
}

/// Describes a field whose meaning depends on the kind of its record.
fn describe_value(record: &Record<'_>, field: &str, value: u64) -> String {
    let labeled = |text: String| format!("{field}: {text}");
    if heap_kind(record, field).is_some() {
        let (offset, len) = heap_range(value);
        return labeled(format!("heap offset {offset}, length {len}"));
    }
    let kind = match field {
        "key" => name_at(&KEY_KINDS, record.get("key_kind")),
        _ => kind_name(record.get("kind")),
    };
    match (field, kind) {
        ("a", "str" | "bytes" | "opaque") => labeled(format!("storage {value}")),
        ("a", "dict" | "ordered_dict" | "list" | "tuple" | "namedtuple" | "divergent") => {
            labeled(format!("first child is node {value}"))
        }
        ("a", "tensor") => labeled(format!("first record is tensor {value}")),
        ("a", "distributed") => labeled(format!("record is tensor {value}")),
        ("b", "distributed") => labeled(distribution_label(value)),
        ("a", "size") => labeled(format!("dims offset {value}")),
        ("a", "dtype") => labeled(dtype_label(value)),
        ("b", "str" | "dict" | "list" | "tuple") if value != 0 => labeled(class_label(value)),
        ("a" | "value" | "key", "int") => labeled(value.cast_signed().to_string()),
        ("a" | "key", "float") | ("a" | "b", "complex") => {
            labeled(format!("{:?}", f64::from_bits(value)))
        }
        _ => format!("{field} {value}"),
    }
}

/// Returns the group and the chunks of a distributed leaf.
fn distribution_label(word: u64) -> String {
    match word & 0xFF {
        0 => format!("group {}, fine chunks", word >> 32),
        log2 => format!("group {}, chunk_log2 {log2}", word >> 32),
    }
}

/// Returns the number, the name and the parameter of a class tag.
fn class_label(word: u64) -> String {
    let (number, parameter) = (word & 0xFFFF, word >> 16);
    let class = TaggedClass::ALL.iter().find(|class| u64::from(class.number()) == number);
    let name = class.map_or("unknown", |class| class.name());
    format!("class tag 0x{number:02X}, {name}, parameter {parameter}")
}

/// Returns the number of a dtype as section 6 of the spec writes it, and its name.
fn dtype_label(number: u64) -> String {
    let dtype = u16::try_from(number).ok().and_then(Dtype::from_number);
    let name = dtype.as_ref().map_or("described in the file", Dtype::name);
    format!("0x{number:02X}, {name}")
}

fn flag_names(value: u64) -> Option<String> {
    let flags = tssd_format::TensorFlags::from_bits(u8::try_from(value).ok()?)?;
    let names = tssd_format::TensorFlags::NAMES;
    let set = names.iter().filter(|(flag, _)| flags.contains(*flag)).map(|(_, name)| *name);
    let set: Vec<&str> = set.collect();
    (!set.is_empty()).then(|| set.join(", "))
}

fn power_of_two(log2: u64) -> u64 {
    u32::try_from(log2).ok().and_then(|log2| 1_u64.checked_shl(log2)).unwrap_or_default()
}
