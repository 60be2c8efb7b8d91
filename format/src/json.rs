//! The JSON view of an archive. Spec: section 9.

use serde_json::{Map, Value as Json, json};

use crate::archive::Archive;
use crate::chunk::ChunkSize;
use crate::encode::AttrValue;
use crate::error::Result;
use crate::key::{Key, Step};
use crate::number::Float;
use crate::placement::Placement;
use crate::shard::ShardPlace;
use crate::state_dict::Value;
use crate::storage::PackedChunk;
use crate::structure::{Container, Node, Stored, TensorReference};
use crate::tensor::{TensorFlags, TensorView};
use crate::text::Text;

/// Elements of more bytes than this are left out.
const DATA_MAX: u64 = 65_536;

/// The JSON view of an archive, elements of small tensors included.
///
/// # Errors
///
/// `Io` if the file cannot be read; `NotText` for a long str that is none.
pub fn to_json(archive: &Archive) -> Result<Json> {
    view_of(archive, Elements::OfSmallTensors)
}

/// The JSON view of an archive without the elements of tensors, which are not read. It takes no more
/// memory than a few times that of the structure, whatever tensors share.
///
/// # Errors
///
/// As [`to_json`].
pub fn to_json_without_elements(archive: &Archive) -> Result<Json> {
    view_of(archive, Elements::LeftOut)
}

/// Which tensors are shown with their elements.
#[derive(Clone, Copy, PartialEq)]
enum Elements {
    OfSmallTensors,
    LeftOut,
}

fn view_of(archive: &Archive, elements: Elements) -> Result<Json> {
    let attrs = archive.attrs().into_iter().map(|(name, value)| {
        let value = match value {
            AttrValue::Int(int) => json!({ "int": int.to_string() }),
            AttrValue::Text(value) => text("str", &value),
            AttrValue::Bytes(bytes) => json!({ "bytes": hex(&bytes) }),
        };
        json!([name, value])
    });
    let mut view = json!({ "tssd": 1, "attrs": attrs.collect::<Vec<_>>() });
    let shards = archive.shards();
    let storages = (0..archive.storage_count()).map(|number| {
        let storage = archive.storage(number);
        let mut view = json!({
            "offset": storage.offset,
            "stored_len": storage.stored_len(),
            "raw_len": storage.len,
            "align_log2": storage.align_log2,
            "crc32": storage.crc32,
        });
        if !shards.is_empty() {
            view["shard"] = json!(storage.shard);
        }
        if storage.chunk_size != ChunkSize::default() {
            view["chunk_log2"] = json!(storage.chunk_size.log2());
        }
        if let Some(packing) = &storage.packing {
            let chunk =
                |chunk: &PackedChunk| json!([chunk.offset, chunk.len, u8::from(chunk.is_zstd)]);
            let chunks: Vec<Json> = packing.chunks.iter().map(chunk).collect();
            view["zstd"] = json!({ "shuffle": packing.shuffle, "chunks": chunks });
        }
        if let Some(digest) = &storage.digest {
            view["digest"] = json!(hex(digest));
        }
        view
    });
    view["storages"] = storages.collect();
    if !shards.is_empty() {
        let shard = |shard: &crate::encode::ShardFile| {
            let mut view = json!({
                "name": shard.name,
                "file_len": shard.file_len,
                "index_off": shard.index_off,
                "index_crc32": shard.index_crc32,
                "writer": shard.writer,
            });
            if let Some(digest) = &shard.digest {
                view["digest"] = json!(hex(digest));
            }
            view
        };
        view["shards"] = shards.iter().map(shard).collect();
    }
    view["root"] = node(archive, &archive.structure(), elements)?;
    Ok(view)
}

fn node(archive: &Archive, each: &Node, elements: Elements) -> Result<Json> {
    Ok(match each {
        Node::Leaf(value) => leaf(value),
        Node::Stored(stored, storage) => {
            if archive.is_manifest_alone() {
                return Ok(match stored {
                    Stored::Str => json!({ "str": null }),
                    Stored::Bytes => json!({ "bytes": null }),
                    Stored::Opaque(media) => {
                        json!({ "opaque": { "media": string(media), "bytes": null } })
                    }
                });
            }
            let bytes = archive.storage_bytes(*storage)?;
            match stored {
                Stored::Str => text("str", &Text::from_generalized_utf8(bytes)?),
                Stored::Bytes => json!({ "bytes": hex(&bytes) }),
                Stored::Opaque(media) => opaque(media, &bytes),
            }
        }
        Node::Tensors(run) => {
            let views: Vec<Json> =
                run.iter().map(|each| tensor(archive, each, elements)).collect::<Result<_>>()?;
            match run.as_slice() {
                [TensorReference { place: None, .. }] => json!({ "tensor": views[0] }),
                _ => json!({ "shard": views }),
            }
        }
        Node::Container(container, children) => {
            let children = children
                .iter()
                .map(|(step, child)| Ok((step, node(archive, child, elements)?)))
                .collect::<Result<Vec<_>>>()?;
            let pairs = |key: &dyn Fn(&Key) -> Json| -> Vec<Json> {
                let pair = |(step, child): &(&Step, Json)| match step {
                    Step::Key(each) => json!([key(each), child]),
                    Step::Index(_) => child.clone(),
                };
                children.iter().map(pair).collect()
            };
            match container {
                Container::Dict => json!({ "dict": pairs(&key) }),
                Container::OrderedDict => json!({ "ordered_dict": pairs(&key) }),
                Container::Divergent => json!({ "divergent": pairs(&key) }),
                Container::List => json!({ "list": pairs(&key) }),
                Container::Tuple => json!({ "tuple": pairs(&key) }),
                Container::NamedTuple(name) => json!({
                    "namedtuple": { "name": string(name), "fields": pairs(&field) }
                }),
            }
        }
    })
}

fn leaf(value: &Value) -> Json {
    match value {
        Value::None => json!({ "none": null }),
        Value::Bool(bool) => json!({ "bool": bool }),
        Value::Int(int) => json!({ "int": int.to_string() }),
        Value::Float(float) => json!({ "float": bits(*float) }),
        Value::Complex(re, im) => json!({ "complex": [bits(*re), bits(*im)] }),
        Value::Str(value) => text("str", value),
        Value::Bytes(bytes) => json!({ "bytes": hex(bytes) }),
        Value::Dtype(dtype) => json!({ "dtype": dtype.name() }),
        Value::Size(sizes) => {
            json!({ "size": sizes.iter().map(ToString::to_string).collect::<Vec<_>>() })
        }
        Value::Device(name) => json!({ "device": string(name) }),
        Value::Opaque { media, bytes } => opaque(media, bytes),
        _ => unreachable!("the other values are other nodes"),
    }
}

fn key(key: &Key) -> Json {
    match key {
        Key::Str(value) => text("str", value),
        Key::Int(int) => json!({ "int": int.to_string() }),
        Key::Bool(bool) => json!({ "bool": bool }),
        Key::Float(float) => json!({ "float": bits(*float) }),
        Key::None => json!({ "none": null }),
        Key::Bytes(bytes) => json!({ "bytes": hex(bytes) }),
        Key::Tuple(keys) => json!({ "tuple": keys.iter().map(self::key).collect::<Vec<_>>() }),
    }
}

/// The fields of namedtuples are strs.
fn field(key: &Key) -> Json {
    match key {
        Key::Str(name) => string(name),
        other => json!(other.to_string()),
    }
}

fn opaque(media: &Text, bytes: &[u8]) -> Json {
    json!({ "opaque": { "media": string(media), "bytes": hex(bytes) } })
}

fn tensor(archive: &Archive, each: &TensorReference, elements: Elements) -> Result<Json> {
    let meta = &each.meta;
    let mut view = Map::new();
    view.insert("dtype".into(), json!(meta.dtype().name()));
    view.insert("shape".into(), json!(meta.shape()));
    if let Some(strides) = meta.explicit_strides() {
        view.insert("strides".into(), json!(strides));
    }
    let named = TensorFlags::NAMES.iter().filter(|(flag, _)| meta.flags().contains(*flag));
    let flags: Vec<&str> = named.map(|(_, name)| *name).collect();
    if !flags.is_empty() {
        view.insert("flags".into(), json!(flags));
    }
    view.insert("storage".into(), json!(each.storage));
    view.insert("byte_offset".into(), json!(each.byte_offset));
    let is_shown = elements == Elements::OfSmallTensors && meta.nbytes() <= DATA_MAX;
    if is_shown && !archive.is_manifest_alone() {
        let tensor = archive.tensor_of(each)?;
        view.insert(
            "data".into(),
            json!(hex(&TensorView::to_contiguous(&tensor.view(), DATA_MAX)?)),
        );
    }
    if let Some(place) = &each.place {
        view.insert("slice".into(), slice(place));
    }
    Ok(Json::Object(view))
}

fn slice(place: &ShardPlace) -> Json {
    let slice = place.slice();
    let mut view = Map::new();
    view.insert("offsets".into(), json!(slice.offsets()));
    view.insert("global_shape".into(), json!(slice.global_shape()));
    if !slice.mesh_shape().is_empty() {
        view.insert("mesh_shape".into(), json!(slice.mesh_shape()));
    }
    if let Some(coordinates) = slice.coordinates() {
        view.insert("coordinates".into(), json!(coordinates));
    }
    if let Some(mesh) = place.mesh() {
        view.insert("ranks".into(), json!(mesh.ranks()));
    }
    if let Some(placements) = place.placements() {
        let spelled = placements.iter().map(|placement| match placement {
            Placement::Replicate => "Replicate()".to_string(),
            Placement::Shard { dim } => format!("Shard({dim})"),
            Placement::StridedShard { dim, split_factor } => {
                format!("_StridedShard({dim}, {split_factor})")
            }
            Placement::Partial { .. } => unreachable!("no file holds a Partial placement"),
        });
        view.insert("placements".into(), spelled.collect());
    }
    if let Some(names) = place.mesh().and_then(crate::mesh::DeviceMesh::dim_names) {
        view.insert("dim_names".into(), json!(names));
    }
    Json::Object(view)
}

/// `{"str": "…"}`, or its bytes where JSON has no such string.
fn text(member: &str, value: &Text) -> Json {
    match value.as_str() {
        Some(value) => json!({ member: value }),
        None => json!({ "str_hex": hex(value.as_bytes()) }),
    }
}

/// `"…"`, or the object with its bytes.
fn string(value: &Text) -> Json {
    value.as_str().map_or_else(|| json!({ "str_hex": hex(value.as_bytes()) }), Json::from)
}

fn bits(float: Float) -> String {
    format!("{:016x}", float.to_bits())
}

fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut hex, byte| {
        write!(hex, "{byte:02x}").expect("writing to a String does not fail");
        hex
    })
}
