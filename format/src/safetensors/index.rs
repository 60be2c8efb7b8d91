//! The index of a directory of safetensors files: which tensor is in which file.

use std::collections::BTreeMap;
use std::fmt;

use serde_json::{Value as Json, json};

use super::header::{Header, METADATA, Members, Texts, attrs_of};
use super::{INDEX_ATTR, INDEX_NAME};
use crate::encode::{AttrValue, Attrs};
use crate::error::{Error, ErrorKind, Result};
use crate::validate::is_base_name;

/// The index of a directory, as Hugging Face's libraries write it beside the files of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Index {
    text: String,
    /// The file of each tensor.
    weight_map: BTreeMap<String, String>,
}

impl Index {
    /// The longest text of an index, in bytes: as long as that of a header.
    pub const MAX: u64 = 100_000_000;

    /// Parses the text of an index. The names of its files are proven to be plain ones: they lead
    /// nowhere else.
    ///
    /// # Errors
    ///
    /// `WeightMap`.
    pub fn parse(text: String) -> Result<Self> {
        let Parsed { weight_map: Members(map) } = serde_json::from_str(&text).map_err(misfit)?;
        let mut weight_map = BTreeMap::new();
        for (tensor, file) in map {
            let Json::String(file) = file else {
                return Err(misfit(format_args!("it maps `{tensor}` to {file}, no file name")));
            };
            if !is_base_name(file.as_bytes()) || file.eq_ignore_ascii_case(INDEX_NAME) {
                return Err(misfit(format_args!(
                    "it maps `{tensor}` to {file:?}, which is no plain file name"
                )));
            }
            if tensor == METADATA {
                return Err(misfit(format_args!("it maps `{tensor}`, which is no tensor")));
            }
            weight_map.insert(tensor, file);
        }
        Ok(Self { text, weight_map })
    }

    /// The JSON text.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// The names of its files, sorted, with those of the tensors that are in each.
    pub fn files(&self) -> BTreeMap<&str, Vec<&str>> {
        let mut files: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for (tensor, file) in &self.weight_map {
            files.entry(file).or_default().push(tensor);
        }
        files
    }

    /// Proves that files have the tensors that the index maps to them, each in one place, and no
    /// others.
    ///
    /// # Errors
    ///
    /// `WeightMap` with a tensor and a file.
    fn prove(&self, headers: &BTreeMap<&str, &Header>) -> Result<()> {
        let mut found = BTreeMap::new();
        for (&file, header) in headers {
            for entry in header.tensors() {
                let name = entry.name();
                if let Some(other) = found.insert(name, file) {
                    return Err(misfit(format_args!("`{name}` is in {other} and in {file}")));
                }
            }
        }
        for (name, file) in &self.weight_map {
            match found.remove(&**name) {
                Some(at) if at == file => {}
                Some(at) => {
                    return Err(misfit(format_args!(
                        "it maps `{name}` to {file}, but {at} has it"
                    )));
                }
                None => {
                    let note = format_args!("it maps `{name}` to {file}, which does not have it");
                    return Err(misfit(note));
                }
            }
        }
        match found.first_key_value() {
            Some((name, file)) => Err(misfit(format_args!("it lacks `{name}`, which {file} has"))),
            None => Ok(()),
        }
    }

    /// The attributes of an archive of the directory with these files, sorted by name: the metadata
    /// that all files have alike, and what is needed to write the directory again.
    ///
    /// # Errors
    ///
    /// `WeightMap` if a tensor is not where the index says, is in two files, or not in the index;
    /// `NotImportable` for metadata or a tensor whose name is reserved (`tssd.…`, `.files`).
    pub fn attrs(&self, headers: &BTreeMap<&str, &Header>) -> Result<Attrs> {
        self.prove(headers)?;
        let metadata = common_metadata(headers.values().map(|header| header.metadata()));
        let mut attrs = attrs_of(&metadata)?;
        let mut others = serde_json::Map::new();
        for (file, header) in headers {
            header.prove_names()?;
            if !header.is_canonical(&metadata)? {
                others.insert((*file).to_owned(), header.text().into());
            }
        }
        let packed = json!({ "index": self.text, "headers": others }).to_string();
        attrs.insert(INDEX_ATTR.into(), AttrValue::Text(packed.into()));
        Ok(attrs)
    }

    /// The text of the index that Hugging Face's libraries write: tensors with the names of their
    /// files, sorted by tensor.
    pub(super) fn write(weight_map: &BTreeMap<String, String>, total_size: u64) -> String {
        let index = json!({ "metadata": { "total_size": total_size }, "weight_map": weight_map });
        format!("{index:#}\n")
    }
}

/// What [`Index::attrs`] has remembered: the index, and by file the headers that are not canonical.
pub(super) fn remembered(attr: &str) -> Option<(Index, BTreeMap<String, Header>)> {
    let mut packed: Json = serde_json::from_str(attr).ok()?;
    let Json::String(text) = packed.get_mut("index")?.take() else { return None };
    let Json::Object(others) = packed.get_mut("headers")?.take() else { return None };
    let mut headers = BTreeMap::new();
    for (file, text) in others {
        let Json::String(text) = text else { return None };
        headers.insert(file, Header::parse(text).ok()?);
    }
    Some((Index::parse(text).ok()?, headers))
}

/// The metadata that all files have alike.
pub(super) fn common_metadata<'a>(mut files: impl Iterator<Item = &'a Texts>) -> Texts {
    let mut common = files.next().cloned().unwrap_or_default();
    for metadata in files {
        common.retain(|name, value| metadata.get(name) == Some(value));
    }
    common
}

fn misfit(note: impl fmt::Display) -> Error {
    Error::new(ErrorKind::WeightMap).note(note)
}

/// The member of an index that matters here.
#[derive(serde::Deserialize)]
struct Parsed {
    weight_map: Members,
}
