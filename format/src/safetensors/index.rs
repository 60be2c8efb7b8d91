//! The index of a directory of safetensors files: the file of each tensor.

use std::collections::BTreeMap;
use std::fmt;

use serde_json::{Map, Value as Json, json};

use super::header::{Header, METADATA, Members, MetadataMap, attrs_of};
use super::{INDEX_ATTR, INDEX_NAME};
use crate::encode::{AttrValue, Attrs};
use crate::error::{Error, ErrorKind, Result};
use crate::validate::is_base_name;

/// The index of a model directory, as Hugging Face libraries write it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Index {
    text: String,
    /// The file of each tensor.
    weight_map: BTreeMap<String, String>,
    /// The member `metadata` of the text. Empty if the text has none, or one that is no object.
    metadata: Map<String, Json>,
}

/// The member of the index with the file of each tensor.
const WEIGHT_MAP: &str = "weight_map";

/// The member of the index with what its writer says of the model.
const INDEX_METADATA: &str = "metadata";

/// The member of the metadata with the size of all tensors in bytes.
const TOTAL_SIZE: &str = "total_size";

impl Index {
    /// The longest text of an index, in bytes; the same limit as for a header.
    pub const MAX_BYTES: u64 = 100_000_000;

    /// Parses the text of an index.
    ///
    /// Every file name is a base name, so no file outside the directory is addressed.
    ///
    /// # Errors
    ///
    /// `WeightMap` if the text is no valid index or contains another kind of file name.
    pub fn parse(text: String) -> Result<Self> {
        let ParsedIndex { weight_map: Members(map), metadata } =
            serde_json::from_str(&text).map_err(weight_map_error)?;
        let mut weight_map = BTreeMap::new();
        for (tensor, file) in map {
            let Json::String(file) = file else {
                return Err(weight_map_error(format_args!(
                    "it maps `{tensor}` to {file}, no file name"
                )));
            };
            if !is_base_name(file.as_bytes()) || file.eq_ignore_ascii_case(INDEX_NAME) {
                return Err(weight_map_error(format_args!(
                    "it maps `{tensor}` to {file:?}, which is no plain file name"
                )));
            }
            if tensor == METADATA {
                return Err(weight_map_error(format_args!(
                    "it maps `{tensor}`, which is no tensor"
                )));
            }
            weight_map.insert(tensor, file);
        }
        let metadata = match metadata {
            Json::Object(metadata) => metadata,
            _ => Map::new(),
        };
        Ok(Self { text, weight_map, metadata })
    }

    /// Returns the JSON text.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Returns the size of all tensors in bytes, as the index records it. `None` if it records no whole number.
    ///
    /// No reader depends on it, and indexes with another number than that of their files are common.
    pub fn total_size(&self) -> Option<u64> {
        let recorded = self.metadata.get(TOTAL_SIZE)?;
        // Some programs write a whole number as a float, whose text has no fraction.
        recorded.as_u64().or_else(|| recorded.as_f64()?.to_string().parse().ok())
    }

    /// Returns true if the index has metadata that cannot be computed from the tensors.
    pub(super) fn has_own_metadata(&self) -> bool {
        self.metadata.keys().any(|name| name != TOTAL_SIZE)
    }

    /// Returns true if the index names exactly these tensors.
    pub(super) fn names_exactly<'a>(
        &self,
        tensors: impl ExactSizeIterator<Item = &'a str>,
    ) -> bool {
        tensors.len() == self.weight_map.len()
            && tensors.into_iter().all(|name| self.weight_map.contains_key(name))
    }

    /// Returns the names of the tensors of each file, sorted by file.
    pub fn files(&self) -> BTreeMap<&str, Vec<&str>> {
        let mut files: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for (tensor, file) in &self.weight_map {
            files.entry(file).or_default().push(tensor);
        }
        files
    }

    /// Checks that each file has exactly the tensors that the index maps to it.
    ///
    /// # Errors
    ///
    /// `WeightMap`, with the names of the tensor and the file.
    fn check_headers(&self, headers: &BTreeMap<&str, &Header>) -> Result<()> {
        let mut found = BTreeMap::new();
        for (&file, header) in headers {
            for entry in header.tensors() {
                let name = entry.name();
                if let Some(other) = found.insert(name, file) {
                    return Err(weight_map_error(format_args!(
                        "`{name}` is in {other} and in {file}"
                    )));
                }
            }
        }
        for (name, file) in &self.weight_map {
            match found.remove(&**name) {
                Some(at) if at == file => {}
                Some(at) => {
                    return Err(weight_map_error(format_args!(
                        "it maps `{name}` to {file}, but {at} has it"
                    )));
                }
                None => {
                    let note = format_args!("it maps `{name}` to {file}, which does not have it");
                    return Err(weight_map_error(note));
                }
            }
        }
        match found.first_key_value() {
            Some((name, file)) => {
                Err(weight_map_error(format_args!("it lacks `{name}`, which {file} has")))
            }
            None => Ok(()),
        }
    }

    /// Returns the attributes of an archive made from the directory, given the header of each file.
    ///
    /// They are the metadata that all files share, and [`INDEX_ATTR`] with the index and all
    /// non-canonical headers.
    ///
    /// # Errors
    ///
    /// - `WeightMap` if a tensor is not in the file that the index names, is in two files, or is
    ///   missing from the index.
    /// - `NotImportable` for metadata or a tensor whose name is reserved (`tssd.…`, `.files`).
    pub fn attrs(&self, headers: &BTreeMap<&str, &Header>) -> Result<Attrs> {
        self.check_headers(headers)?;
        let metadata = common_metadata(headers.values().map(|header| header.metadata()));
        let mut attrs = attrs_of(&metadata)?;
        let mut headers_by_file = Map::new();
        for (file, header) in headers {
            header.check_names()?;
            if !header.is_canonical(&metadata)? {
                headers_by_file.insert((*file).to_owned(), header.text().into());
            }
        }
        let attr = json!({ "index": self.text, "headers": headers_by_file }).to_string();
        attrs.insert(INDEX_ATTR.into(), AttrValue::Text(attr.into()));
        Ok(attrs)
    }

    /// Returns the text of an index as Hugging Face libraries write it, sorted by tensor name.
    ///
    /// `total_size` is the size of all tensors in bytes. All other members are those of `origin`, the index of the same
    /// tensors in other files, in the same order.
    pub(super) fn write(
        weight_map: &BTreeMap<String, String>,
        total_size: u64,
        origin: Option<&Self>,
    ) -> String {
        let parsed = origin.map(|origin| serde_json::from_str(&origin.text));
        let mut index = match parsed {
            Some(Ok(Json::Object(members))) => members,
            _ => Map::new(),
        };
        let mut metadata = origin.map(|origin| origin.metadata.clone()).unwrap_or_default();
        metadata.insert(TOTAL_SIZE.into(), total_size.into());
        match index.get_mut(INDEX_METADATA) {
            Some(member) => *member = metadata.into(),
            None => drop(index.shift_insert(0, INDEX_METADATA.into(), metadata.into())),
        }
        index.insert(WEIGHT_MAP.into(), json!(weight_map));
        format!("{:#}\n", Json::Object(index))
    }
}

/// Parses [`INDEX_ATTR`]: the index, and the non-canonical headers by file name.
pub(super) fn parse_index_attr(attr: &str) -> Option<(Index, BTreeMap<String, Header>)> {
    let mut attr: Json = serde_json::from_str(attr).ok()?;
    let Json::String(text) = attr.get_mut("index")?.take() else { return None };
    let Json::Object(headers_by_file) = attr.get_mut("headers")?.take() else { return None };
    let mut headers = BTreeMap::new();
    for (file, text) in headers_by_file {
        let Json::String(text) = text else { return None };
        headers.insert(file, Header::parse(text).ok()?);
    }
    Some((Index::parse(text).ok()?, headers))
}

/// Returns the metadata entries that all files share.
pub(super) fn common_metadata<'a>(mut files: impl Iterator<Item = &'a MetadataMap>) -> MetadataMap {
    let mut common = files.next().cloned().unwrap_or_default();
    for metadata in files {
        common.retain(|name, value| metadata.get(name) == Some(value));
    }
    common
}

fn weight_map_error(note: impl fmt::Display) -> Error {
    Error::new(ErrorKind::WeightMap).with_detail(note)
}

/// The members of an index that this module reads.
#[derive(serde::Deserialize)]
struct ParsedIndex {
    weight_map: Members,
    #[serde(default)]
    metadata: Json,
}
