//! The JSON view of an archive. Spec: section 9.

use serde_json::{Map, Value as Json, json};

use crate::archive::Archive;
use crate::chunk::{ChunkPolicy, ChunkSize};
use crate::class_tag::ClassTag;
use crate::distributed::DistributedTensor;
use crate::dtype::{Dtype, OtherDtype};
use crate::encode::AttrValue;
use crate::error::Result;
use crate::key::{MapKey, Step};
use crate::number::Float;
use crate::placement::Placement;
use crate::reference::TensorReference;
use crate::shard::ShardSpec;
use crate::shard_file::{OtherStorage, ShardFile};
use crate::state_dict::Value;
use crate::storage::ChunkLocation;
use crate::structure::{Container, ContentKind, Node};
use crate::tensor::{TensorFlags, TensorMeta, TensorView};
use crate::text::Text;

/// Tensors of more bytes than this (64 KiB) are shown without their elements.
const MAX_DATA_BYTES: u64 = 65_536;

/// Returns the JSON view of an archive, with the elements of small tensors.
///
/// Elements are included for tensors of at most 65,536 bytes.
///
/// # Errors
///
/// `Io` if the file cannot be read; `ContentNotText` if a long `str` is not valid text.
pub fn to_json(archive: &Archive) -> Result<Json> {
    build_view(archive, ElementFilter::SmallTensors)
}

/// Returns the JSON view of an archive without the elements of tensors, which are not read.
///
/// Memory use is at most a few times the memory of the structure, even if many tensors share one storage.
///
/// # Errors
///
/// As [`to_json`].
pub fn to_json_without_elements(archive: &Archive) -> Result<Json> {
    build_view(archive, ElementFilter::None)
}

/// Selects the tensors that are shown with their elements.
#[derive(Clone, Copy, PartialEq)]
enum ElementFilter {
    SmallTensors,
    None,
}

fn build_view(archive: &Archive, elements: ElementFilter) -> Result<Json> {
    let attrs = archive.attrs().into_iter().map(|(name, value)| {
        let value = match value {
            AttrValue::Int(int) => json!({ "int": int.to_string() }),
            AttrValue::Text(value) => text_to_json("str", &value),
            AttrValue::Bytes(bytes) => json!({ "bytes": hex(&bytes) }),
        };
        json!([name, value])
    });
    let content = match elements {
        _ if archive.is_manifest_only() => None,
        _ if archive.lacks_base() => archive.content_digest(),
        ElementFilter::SmallTensors => Some(archive.compute_content_digest()?),
        ElementFilter::None => archive.content_digest(),
    };
    let mut view = json!({ "tssd": 1 });
    if let Some(digest) = content {
        view["content_digest"] = json!(hex(&digest));
    }
    view["attrs"] = attrs.collect();
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
        if let Some(layout) = &storage.compressed_layout {
            let chunk =
                |chunk: &ChunkLocation| json!([chunk.offset, chunk.len, chunk.codec.number()]);
            let chunks: Vec<Json> = layout.chunks.iter().map(chunk).collect();
            view["compressed"] = match storage.base {
                Some(base) => json!({ "base": base, "width": layout.width, "chunks": chunks }),
                None => json!({ "width": layout.width, "chunks": chunks }),
            };
        }
        if let Some(digest) = &storage.digest {
            view["digest"] = json!(hex(digest));
        }
        view
    });
    view["storages"] = storages.collect();
    let dtypes = archive.other_dtypes();
    if !dtypes.is_empty() {
        view["dtypes"] = dtypes.into_iter().map(dtype_to_json).collect();
    }
    if !shards.is_empty() {
        let shard = |shard: &ShardFile| {
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
            view["crcs_off"] = json!(shard.crcs.offset);
            view["crcs_len"] = json!(shard.crcs.len);
            view["pages_crc32"] = json!(shard.crcs.pages_crc32);
            if let Some(others) = &shard.others {
                let other =
                    |other: &OtherStorage| json!([other.position, other.stored_len, other.crcs]);
                view["others"] = others.iter().map(other).collect();
            }
            view
        };
        view["shards"] = shards.iter().map(shard).collect();
    }
    if let Some(base) = archive.base_digest() {
        view["base"] = json!(hex(&base));
    }
    view["root"] = node_to_json(archive, &archive.structure(), elements)?;
    Ok(view)
}

fn dtype_to_json(dtype: OtherDtype) -> Json {
    let listed = Dtype::Other(dtype);
    json!({
        "number": dtype.number(),
        "name": dtype.name(),
        "size": listed.itemsize(),
        "bits": listed.bits(),
        "values": listed.values(),
        "class": listed.class().name(),
    })
}

fn node_to_json(archive: &Archive, node: &Node, elements: ElementFilter) -> Result<Json> {
    Ok(match node {
        Node::Leaf(value) => leaf_to_json(value),
        Node::StoredLeaf(stored, storage) => {
            if !archive.can_read(*storage) {
                return Ok(match stored {
                    ContentKind::Str => json!({ "str": null }),
                    ContentKind::Bytes => json!({ "bytes": null }),
                    ContentKind::Opaque(media) => {
                        json!({ "opaque": { "media": string_to_json(media), "bytes": null } })
                    }
                });
            }
            let bytes = archive.storage_bytes(*storage)?;
            match stored {
                ContentKind::Str => text_to_json("str", &Text::from_storage(bytes)?),
                ContentKind::Bytes => json!({ "bytes": hex(&bytes) }),
                ContentKind::Opaque(media) => opaque_to_json(media, &bytes),
            }
        }
        Node::Tensors(run) => {
            let views: Vec<Json> = run
                .iter()
                .map(|reference| tensor_to_json(archive, reference, elements))
                .collect::<Result<_>>()?;
            match run.as_slice() {
                [TensorReference { shard_spec: None, .. }] => json!({ "tensor": views[0] }),
                _ => json!({ "shard": views }),
            }
        }
        Node::Distributed(leaf) => distributed_to_json(leaf),
        Node::Container(container, children) => {
            let children = children
                .iter()
                .map(|(step, child)| Ok((step, node_to_json(archive, child, elements)?)))
                .collect::<Result<Vec<_>>>()?;
            let pairs = |convert: &dyn Fn(&MapKey) -> Json| -> Vec<Json> {
                let pair = |(step, child): &(&Step, Json)| match step {
                    Step::Key(key) => json!([convert(key), child]),
                    Step::Index(_) => child.clone(),
                };
                children.iter().map(pair).collect()
            };
            let view = match container.to_plain() {
                Container::Dict => json!({ "dict": pairs(&key_to_json) }),
                Container::OrderedDict => json!({ "ordered_dict": pairs(&key_to_json) }),
                Container::Divergent => json!({ "divergent": pairs(&key_to_json) }),
                Container::List => json!({ "list": pairs(&key_to_json) }),
                Container::Tuple => json!({ "tuple": pairs(&key_to_json) }),
                Container::NamedTuple(name) => json!({
                    "namedtuple": { "name": string_to_json(&name), "fields": pairs(&field_to_json) }
                }),
                Container::Tagged(_) => unreachable!("the container of a class is plain"),
            };
            match container {
                Container::Tagged(tag) => with_class(view, *tag),
                _ => view,
            }
        }
    })
}

fn distributed_to_json(leaf: &DistributedTensor) -> Json {
    let mut tensor = meta_to_json(&leaf.meta);
    tensor.insert("storage".into(), Json::Null);
    tensor.insert("byte_offset".into(), json!(0));
    tensor.insert("slice".into(), slice_to_json(&leaf.shard_spec));
    let chunk_log2 = match leaf.chunks {
        ChunkPolicy::Fixed(size) => Some(size.log2()),
        ChunkPolicy::Fine => None,
    };
    json!({ "distributed": { "group": leaf.group, "chunk_log2": chunk_log2, "tensor": tensor } })
}

fn leaf_to_json(value: &Value) -> Json {
    match value {
        Value::None => json!({ "none": null }),
        Value::Bool(bool) => json!({ "bool": bool }),
        Value::Int(int) => json!({ "int": int.to_string() }),
        Value::Float(float) => json!({ "float": float_bits(*float) }),
        Value::Complex(re, im) => json!({ "complex": [float_bits(*re), float_bits(*im)] }),
        Value::Str(value) => text_to_json("str", value),
        Value::Bytes(bytes) => json!({ "bytes": hex(bytes) }),
        Value::Dtype(dtype) => json!({ "dtype": dtype.name() }),
        Value::Size(sizes) => {
            json!({ "size": sizes.iter().map(ToString::to_string).collect::<Vec<_>>() })
        }
        Value::Device(name) => json!({ "device": string_to_json(name) }),
        Value::Opaque { media, bytes } => opaque_to_json(media, bytes),
        Value::Tagged(tag, plain) => with_class(leaf_to_json(plain), *tag),
        _ => unreachable!("the other values are other nodes"),
    }
}

/// Adds the class of a value to its view.
fn with_class(mut view: Json, tag: ClassTag) -> Json {
    view["class"] = json!({ "name": tag.class().name(), "parameter": tag.parameter() });
    view
}

fn key_to_json(key: &MapKey) -> Json {
    match key {
        MapKey::Str(value) => text_to_json("str", value),
        MapKey::Int(int) => json!({ "int": int.to_string() }),
        MapKey::Bool(bool) => json!({ "bool": bool }),
        MapKey::Float(float) => json!({ "float": float_bits(*float) }),
        MapKey::None => json!({ "none": null }),
        MapKey::Bytes(bytes) => json!({ "bytes": hex(bytes) }),
        MapKey::Tuple(keys) => json!({ "tuple": keys.iter().map(key_to_json).collect::<Vec<_>>() }),
    }
}

/// Returns a field name of a namedtuple as JSON. Field names are always `str`.
fn field_to_json(key: &MapKey) -> Json {
    match key {
        MapKey::Str(name) => string_to_json(name),
        other => json!(other.to_string()),
    }
}

fn opaque_to_json(media: &Text, bytes: &[u8]) -> Json {
    json!({ "opaque": { "media": string_to_json(media), "bytes": hex(bytes) } })
}

fn tensor_to_json(
    archive: &Archive,
    reference: &TensorReference,
    elements: ElementFilter,
) -> Result<Json> {
    let meta = &reference.meta;
    let mut view = meta_to_json(meta);
    view.insert("storage".into(), json!(reference.storage));
    view.insert("byte_offset".into(), json!(reference.byte_offset));
    let includes_data = elements == ElementFilter::SmallTensors && meta.nbytes() <= MAX_DATA_BYTES;
    if includes_data && reference.storage.is_none_or(|storage| archive.can_read(storage)) {
        let tensor = archive.read_tensor(reference)?;
        view.insert(
            "data".into(),
            json!(hex(&TensorView::to_contiguous(&tensor.view(), MAX_DATA_BYTES)?)),
        );
    }
    if let Some(place) = &reference.shard_spec {
        view.insert("slice".into(), slice_to_json(place));
    }
    Ok(Json::Object(view))
}

fn meta_to_json(meta: &TensorMeta) -> Map<String, Json> {
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
    view
}

fn slice_to_json(place: &ShardSpec) -> Json {
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
        let names = placements.iter().map(|placement| match placement {
            Placement::Replicate => "Replicate()".to_string(),
            Placement::Shard { dim } => format!("Shard({dim})"),
            Placement::StridedShard { dim, split_factor } => {
                format!("_StridedShard({dim}, {split_factor})")
            }
            Placement::Partial { .. } => unreachable!("no file holds a Partial placement"),
        });
        view.insert("placements".into(), names.collect());
    }
    if let Some(names) = place.mesh().and_then(crate::mesh::DeviceMesh::dim_names) {
        view.insert("dim_names".into(), json!(names));
    }
    Json::Object(view)
}

/// Returns `{"str": "…"}`, or the bytes in hexadecimal if the text contains surrogates.
fn text_to_json(member: &str, value: &Text) -> Json {
    match value.as_str() {
        Some(value) => json!({ member: value }),
        None => json!({ "str_hex": hex(value.as_bytes()) }),
    }
}

/// Returns `"…"`, or an object with the bytes in hexadecimal if the text contains surrogates.
fn string_to_json(value: &Text) -> Json {
    value.as_str().map_or_else(|| json!({ "str_hex": hex(value.as_bytes()) }), Json::from)
}

fn float_bits(float: Float) -> String {
    format!("{:016x}", float.to_bits())
}

fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut hex, byte| {
        write!(hex, "{byte:02x}").expect("writing to a String does not fail");
        hex
    })
}
