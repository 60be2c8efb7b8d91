//! The header of a safetensors file: names, dtypes, shapes and byte ranges of its tensors.
//!
//! Unlike the `safetensors` crate, this module keeps the order of the entries, so that conversion is
//! deterministic in both directions.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io::{self, Read};
use std::ops::Range;

use bytes::Bytes;
use safetensors::tensor::{Metadata, TensorInfo};
use serde::de::{self, Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::{Map, Value as Json};

use super::{FILES_KEY, HEADER_ATTR};
use crate::blob::Blob;
use crate::convert::to_u64;
use crate::dtype::Dtype;
use crate::encode::{AttrValue, Attrs};
use crate::error::{Error, ErrorKind, Result};
use crate::frame::MAGIC;
use crate::tensor::{Tensor, TensorMeta};

/// The name of the header member that holds the metadata; all other members are tensors.
pub(super) const METADATA: &str = "__metadata__";

/// The metadata of a file: text by name. Missing metadata and empty metadata are equivalent.
pub(super) type MetadataMap = BTreeMap<String, String>;

/// A validated header of a safetensors file, with its tensors in the order of the header.
#[derive(Clone, Debug)]
pub struct Header {
    text: String,
    metadata: MetadataMap,
    tensors: Vec<Entry>,
    file_len: u64,
}

/// The header entry of one tensor.
#[derive(Clone, Debug)]
pub struct Entry {
    name: String,
    meta: TensorMeta,
    range: Range<u64>,
}

impl Header {
    /// The longest header that the `safetensors` crate reads, in bytes.
    pub const MAX_BYTES: u64 = 100_000_000;

    /// Reads and validates the header of a file, and checks the file length against the header.
    ///
    /// # Errors
    ///
    /// - `NotSafetensors` if the header is invalid or the file has another length.
    /// - `NotImportable` for a tensor whose dtype or shape torch cannot represent.
    /// - `Io` if the file cannot be read.
    pub fn read(file: &dyn Blob) -> Result<Self> {
        let found = file.size()?;
        let mut len = [0; 8];
        if found < 8 {
            return Err(not_safetensors(format_args!("it has {found} bytes")));
        }
        file.read_exact_at(&mut len, 0)?;
        let len = u64::from_le_bytes(len);
        check_len(len)?;
        if len > found - 8 {
            return Err(not_safetensors(format_args!("it ends within its header of {len} bytes")));
        }
        let mut text = vec![0; usize::try_from(len).expect("at most 100 MB")];
        file.read_exact_at(&mut text, 8)?;
        let header = Self::from_utf8(text)?;
        if header.file_len != found {
            let expected = header.file_len;
            return Err(not_safetensors(format_args!(
                "it should have {expected} bytes, not {found}"
            )));
        }
        Ok(header)
    }

    /// Reads and validates the header at the beginning of a stream.
    ///
    /// [`Entry::read_from`] and [`Header::expect_end`] check that exactly its tensors follow.
    ///
    /// # Errors
    ///
    /// As [`Header::read`].
    pub fn read_from(stream: &mut impl Read) -> Result<Self> {
        let mut len = [0; 8];
        stream.read_exact(&mut len).map_err(|error| short_read_error(error, "8 bytes"))?;
        let len = u64::from_le_bytes(len);
        check_len(len)?;
        let mut text = Vec::new();
        if to_u64(stream.take(len).read_to_end(&mut text)?) < len {
            return Err(not_safetensors(format_args!("it ends within its header of {len} bytes")));
        }
        Self::from_utf8(text)
    }

    /// Checks that a stream ends after the last tensor.
    ///
    /// # Errors
    ///
    /// `NotSafetensors` if more bytes follow; `Io` if the stream fails.
    pub fn expect_end(stream: &mut impl Read) -> Result<()> {
        match io::copy(&mut stream.take(1), &mut io::sink())? {
            0 => Ok(()),
            _ => Err(not_safetensors("there are bytes behind its last tensor")),
        }
    }

    fn from_utf8(text: Vec<u8>) -> Result<Self> {
        Self::parse(String::from_utf8(text).map_err(not_safetensors)?)
    }

    /// Parses and validates the JSON text of a header, padding included.
    ///
    /// # Errors
    ///
    /// `NotSafetensors`, `NotImportable`.
    pub fn parse(text: String) -> Result<Self> {
        let validated: Metadata = serde_json::from_str(&text).map_err(not_safetensors)?;
        let data_start = 8 + to_u64(text.len());
        let file_len = data_start.saturating_add(to_u64(validated.data_len()));
        let Members(members) = serde_json::from_str(&text).map_err(not_safetensors)?;
        let mut metadata = MetadataMap::new();
        let mut tensors = Vec::with_capacity(members.len());
        for (name, value) in members {
            if name == METADATA {
                let texts: Option<MetadataMap> =
                    serde_json::from_value(value).map_err(not_safetensors)?;
                metadata = texts.unwrap_or_default();
                continue;
            }
            let info: TensorInfo = serde_json::from_value(value).map_err(not_safetensors)?;
            let meta = tensor_meta(&info).map_err(|error| error.with_path(&name))?;
            let (start, end) = info.data_offsets;
            let range =
                data_start.saturating_add(to_u64(start))..data_start.saturating_add(to_u64(end));
            tensors.push(Entry { name, meta, range });
        }
        Ok(Self { text, metadata, tensors, file_len })
    }

    /// Returns the JSON text, padding included.
    pub fn text(&self) -> &str {
        &self.text
    }

    pub(super) fn into_text(self) -> String {
        self.text
    }

    /// Returns the metadata of the file: text by name.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// Returns the tensors in the order of the header, which may differ from the order of their bytes.
    pub fn tensors(&self) -> &[Entry] {
        &self.tensors
    }

    /// Returns the length of the file in bytes.
    pub fn file_len(&self) -> u64 {
        self.file_len
    }

    /// Returns true if the bytes of the tensors are in the order of the header.
    ///
    /// A stream can be read tensor by tensor only in that case.
    pub fn is_in_order(&self) -> bool {
        self.tensors.is_sorted_by(|one, next| one.range.end <= next.range.start)
    }

    /// Returns the attributes of an archive made from this file.
    ///
    /// They are the metadata and, if the header is not canonical, [`HEADER_ATTR`] with its text.
    ///
    /// # Errors
    ///
    /// `NotImportable` for metadata or a tensor whose name is reserved (`tssd.…`, `.files`).
    pub fn attrs(&self) -> Result<Attrs> {
        self.check_names()?;
        let mut attrs = attrs_of(&self.metadata)?;
        if !self.is_canonical(&self.metadata)? {
            attrs.insert(HEADER_ATTR.into(), AttrValue::Text(self.text.as_str().into()));
        }
        Ok(attrs)
    }

    /// Checks that no tensor has the reserved name [`FILES_KEY`].
    pub(super) fn check_names(&self) -> Result<()> {
        if self.tensors.iter().any(|entry| entry.name == FILES_KEY) {
            return Err(Error::new(ErrorKind::NotImportable)
                .with_detail("the name is reserved for the other files of a directory")
                .with_path(FILES_KEY));
        }
        Ok(())
    }

    /// Returns true if this header equals the canonical header for its tensors and this metadata.
    pub(super) fn is_canonical(&self, metadata: &MetadataMap) -> Result<bool> {
        let named = |entry: &Entry| (entry.name.clone(), entry.meta.clone());
        let tensors: Vec<_> = self.tensors.iter().map(named).collect();
        Ok(canonical_header(metadata, &tensors)?.0 == self.text)
    }
}

impl Entry {
    /// Returns the name of the tensor.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the dtype and shape of the tensor.
    pub fn meta(&self) -> &TensorMeta {
        &self.meta
    }

    /// Returns the byte range of the tensor in the file.
    pub fn range(&self) -> Range<u64> {
        self.range.clone()
    }

    /// Returns the tensor: a view if the file is in memory, otherwise a copy read from the file.
    ///
    /// # Errors
    ///
    /// `Io` if the file cannot be read.
    pub fn tensor(&self, file: &dyn Blob) -> Result<Tensor> {
        let bytes = if let Some(bytes) = file.bytes() {
            let index = |at| usize::try_from(at).ok().filter(|at| *at <= bytes.len());
            let range = index(self.range.start).zip(index(self.range.end));
            let (start, end) = range.ok_or_else(|| self.truncated_error())?;
            bytes.slice(start..end)
        } else {
            // `read` has checked the length of the file.
            let mut bytes = vec![0; self.len()?];
            file.read_exact_at(&mut bytes, self.range.start)?;
            bytes.into()
        };
        self.build_tensor(bytes)
    }

    /// Reads the tensor from a stream positioned at its first byte.
    ///
    /// # Errors
    ///
    /// `NotSafetensors` if the stream ends within the tensor; `Io` if the stream fails.
    pub fn read_from(&self, stream: &mut impl Read) -> Result<Tensor> {
        let mut bytes = self.allocate_buffer()?;
        stream.take(self.range.end - self.range.start).read_to_end(&mut bytes)?;
        if bytes.len() < self.len()? {
            return Err(self.truncated_error());
        }
        self.build_tensor(bytes.into())
    }

    fn build_tensor(&self, bytes: Bytes) -> Result<Tensor> {
        Tensor::new(self.meta.clone(), bytes.into(), 0).map_err(|error| error.with_path(&self.name))
    }

    fn len(&self) -> Result<usize> {
        let len = usize::try_from(self.range.end - self.range.start);
        len.map_err(|_| Error::new(ErrorKind::TooLarge).with_path(&self.name))
    }

    /// Allocates a buffer for the bytes of the tensor.
    ///
    /// A header can claim any size, so an allocation failure is an error and not an abort.
    fn allocate_buffer(&self) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(self.len()?).map_err(|error| {
            Error::io(io::Error::new(io::ErrorKind::OutOfMemory, error)).with_path(&self.name)
        })?;
        Ok(bytes)
    }

    fn truncated_error(&self) -> Error {
        not_safetensors("it ends within a tensor").with_path(&self.name)
    }
}

/// Converts metadata to attributes.
pub(super) fn attrs_of(metadata: &MetadataMap) -> Result<Attrs> {
    let attr = |(name, value): (&String, &String)| {
        if name.starts_with("tssd.") {
            return Err(Error::new(ErrorKind::NotImportable)
                .with_detail(format_args!("metadata `{name}` has a name that is reserved")));
        }
        Ok((name.clone(), AttrValue::Text(value.as_str().into())))
    };
    metadata.iter().map(attr).collect()
}

/// Returns the canonical header for these tensors, and the order of their bytes.
///
/// Both are those of the safetensors library, except that metadata is sorted by name; the library
/// writes metadata in arbitrary order.
pub(super) fn canonical_header(
    metadata: &MetadataMap,
    tensors: &[(String, TensorMeta)],
) -> Result<(String, Vec<usize>)> {
    let mut infos = Vec::with_capacity(tensors.len());
    for (name, meta) in tensors {
        infos.push(tensor_info(meta).map_err(|error| error.with_path(name))?);
    }
    let mut order: Vec<usize> = (0..tensors.len()).collect();
    // With the widest dtypes first, every tensor is aligned without padding.
    order.sort_by(|&left, &right| {
        let by_dtype = infos[right].dtype.cmp(&infos[left].dtype);
        by_dtype.then_with(|| tensors[left].0.cmp(&tensors[right].0))
    });
    let json = |value: serde_json::Result<Json>| value.expect("strings and numbers are JSON");
    let mut header = Map::new();
    if !metadata.is_empty() {
        header.insert(METADATA.into(), json(serde_json::to_value(metadata)));
    }
    let mut offset = 0_usize;
    for &index in &order {
        let info = &mut infos[index];
        let end = offset.checked_add(info.data_offsets.1);
        let end = end.ok_or_else(|| too_large_error(&info.shape))?;
        info.data_offsets = (offset, end);
        offset = end;
        header.insert(tensors[index].0.clone(), json(serde_json::to_value(info)));
    }
    let mut text = Json::Object(header).to_string();
    let padding = text.len().next_multiple_of(8) - text.len();
    text.extend(std::iter::repeat_n(' ', padding));
    if to_u64(text.len()) > Header::MAX_BYTES {
        return Err(Error::new(ErrorKind::NotExportable).with_detail(format_args!(
            "the header would take {} bytes, {} are allowed: write several files",
            text.len(),
            Header::MAX_BYTES
        )));
    }
    Ok((text, order))
}

fn check_len(len: u64) -> Result<()> {
    if len.to_le_bytes() == MAGIC {
        return Err(not_safetensors("it is a TSSD archive"));
    }
    if len > Header::MAX_BYTES {
        let max = Header::MAX_BYTES;
        let note = format_args!("its header would take {len} bytes, {max} are allowed");
        return Err(not_safetensors(note));
    }
    Ok(())
}

fn not_safetensors(note: impl fmt::Display) -> Error {
    Error::new(ErrorKind::NotSafetensors).with_detail(note)
}

fn short_read_error(error: io::Error, what: &str) -> Error {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => not_safetensors(format_args!("it is shorter than {what}")),
        _ => Error::io(error),
    }
}

/// Converts safetensors metadata to tensor metadata.
///
/// In safetensors, an F4 element is one value; in torch, it is one byte with two values.
fn tensor_meta(info: &TensorInfo) -> Result<TensorMeta> {
    let not_importable = |note| Error::new(ErrorKind::NotImportable).with_detail(note);
    let name = info.dtype.to_string();
    let dtype = Dtype::from_safetensors(&name)
        .ok_or_else(|| not_importable(format!("torch has no dtype for safetensors' {name}")))?;
    let mut shape: Vec<u64> = info.shape.iter().map(|size| to_u64(*size)).collect();
    if dtype == Dtype::Float4E2m1fnX2 {
        let last = shape.last_mut().filter(|last| last.is_multiple_of(2));
        let odd_size_error = || {
            not_importable("F4 needs a last dimension of even size, as torch packs pairs".into())
        };
        *last.ok_or_else(odd_size_error)? /= 2;
    }
    TensorMeta::new(dtype, &shape)
}

/// The inverse of [`tensor_meta`], with the data offsets `0..length`.
fn tensor_info(meta: &TensorMeta) -> Result<TensorInfo> {
    let not_exportable = |note: String| Error::new(ErrorKind::NotExportable).with_detail(note);
    let no_dtype_error = || not_exportable(format!("it has no dtype for torch's {}", meta.dtype()));
    let name = meta.dtype().safetensors().ok_or_else(no_dtype_error)?;
    let dtype = serde_json::from_value(Json::from(name)).map_err(|_| no_dtype_error())?;
    let sizes = meta.shape().iter().map(|size| usize::try_from(*size));
    let too_large_error = || too_large_error(&meta.shape());
    let mut shape: Vec<usize> = sizes.collect::<Result<_, _>>().map_err(|_| too_large_error())?;
    if meta.dtype() == Dtype::Float4E2m1fnX2 {
        let last = shape.last_mut();
        let last =
            last.ok_or_else(|| not_exportable("it has no dimension of packed pairs".into()))?;
        *last = last.checked_mul(2).ok_or_else(too_large_error)?;
    }
    let len = usize::try_from(meta.nbytes()).map_err(|_| too_large_error())?;
    Ok(TensorInfo { dtype, shape, data_offsets: (0, len) })
}

fn too_large_error(shape: &dyn fmt::Debug) -> Error {
    Error::new(ErrorKind::TooLarge).with_detail(format_args!("shape {shape:?}"))
}

/// The members of a JSON object in order, without duplicates.
pub(super) struct Members(pub(super) Vec<(String, Json)>);

impl<'de> Deserialize<'de> for Members {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct MembersVisitor;

        impl<'de> Visitor<'de> for MembersVisitor {
            type Value = Members;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Members, A::Error> {
                let (mut members, mut names) = (Vec::new(), BTreeSet::new());
                while let Some((name, value)) = map.next_entry::<String, Json>()? {
                    if !names.insert(name.clone()) {
                        return Err(de::Error::custom(format!("`{name}` is there twice")));
                    }
                    members.push((name, value));
                }
                Ok(Members(members))
            }
        }

        deserializer.deserialize_map(MembersVisitor)
    }
}
