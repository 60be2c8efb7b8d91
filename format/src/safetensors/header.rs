//! The header of a safetensors file: names, dtypes, shapes and places of its tensors.
//!
//! What is here keeps what the `safetensors` crate does not: the order of the entries, so that the
//! same file always gives the same archive and back.

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
use crate::dtype::Dtype;
use crate::encode::{AttrValue, Attrs};
use crate::error::{Error, ErrorKind, Result};
use crate::frame::MAGIC;
use crate::tensor::{Tensor, TensorMeta};

/// The member of the header that is no tensor.
pub(super) const METADATA: &str = "__metadata__";

/// The `safetensors` crate reads no longer ones.
const HEADER_MAX: u64 = 100_000_000;

/// The metadata of a file: text by name. A file may have none, or an empty one, which is the same.
pub(super) type Texts = BTreeMap<String, String>;

/// A proven header, with its tensors in the order in which it has them.
#[derive(Clone, Debug)]
pub struct Header {
    text: String,
    metadata: Texts,
    tensors: Vec<Entry>,
    file_len: u64,
}

/// One tensor of a file.
#[derive(Clone, Debug)]
pub struct Entry {
    name: String,
    meta: TensorMeta,
    range: Range<u64>,
}

impl Header {
    /// Reads and proves the header of a file, and that the file is as long as it says.
    ///
    /// # Errors
    ///
    /// `NotSafetensors`; `NotImportable` for a tensor that torch has no dtype or shape for; `Io`.
    pub fn read(file: &dyn Blob) -> Result<Self> {
        let found = file.size()?;
        let mut len = [0; 8];
        if found < 8 {
            return Err(malformed(format_args!("it has {found} bytes")));
        }
        file.read_exact_at(&mut len, 0)?;
        let len = u64::from_le_bytes(len);
        check_len(len)?;
        if len > found - 8 {
            return Err(malformed(format_args!("it ends within its header of {len} bytes")));
        }
        let mut text = vec![0; usize::try_from(len).expect("at most 100 MB")];
        file.read_exact_at(&mut text, 8)?;
        let header = Self::from_utf8(text)?;
        if header.file_len != found {
            let expected = header.file_len;
            return Err(malformed(format_args!("it should have {expected} bytes, not {found}")));
        }
        Ok(header)
    }

    /// Reads and proves the header at the beginning of a stream. Whether all of its tensors follow is
    /// for [`Entry::read_from`] and [`Header::end`] to find.
    ///
    /// # Errors
    ///
    /// As [`Header::read`].
    pub fn read_from(stream: &mut impl Read) -> Result<Self> {
        let mut len = [0; 8];
        stream.read_exact(&mut len).map_err(|error| too_short(error, "8 bytes"))?;
        let len = u64::from_le_bytes(len);
        check_len(len)?;
        let mut text = Vec::new();
        if wide(stream.take(len).read_to_end(&mut text)?) < len {
            return Err(malformed(format_args!("it ends within its header of {len} bytes")));
        }
        Self::from_utf8(text)
    }

    /// Proves that a stream ends behind the last tensor.
    ///
    /// # Errors
    ///
    /// `NotSafetensors` if it does not; `Io`.
    pub fn end(stream: &mut impl Read) -> Result<()> {
        match io::copy(&mut stream.take(1), &mut io::sink())? {
            0 => Ok(()),
            _ => Err(malformed("there are bytes behind its last tensor")),
        }
    }

    fn from_utf8(text: Vec<u8>) -> Result<Self> {
        Self::parse(String::from_utf8(text).map_err(malformed)?)
    }

    /// Parses and proves the JSON text of a header, padding included.
    ///
    /// # Errors
    ///
    /// `NotSafetensors`, `NotImportable`.
    pub fn parse(text: String) -> Result<Self> {
        let proven: Metadata = serde_json::from_str(&text).map_err(malformed)?;
        let data_start = 8 + wide(text.len());
        let file_len = data_start.saturating_add(wide(proven.data_len()));
        let Members(members) = serde_json::from_str(&text).map_err(malformed)?;
        let mut metadata = Texts::new();
        let mut tensors = Vec::with_capacity(members.len());
        for (name, value) in members {
            if name == METADATA {
                let texts: Option<Texts> = serde_json::from_value(value).map_err(malformed)?;
                metadata = texts.unwrap_or_default();
                continue;
            }
            let info: TensorInfo = serde_json::from_value(value).map_err(malformed)?;
            let meta = meta_of(&info).map_err(|error| error.at(&name))?;
            let (start, end) = info.data_offsets;
            let range =
                data_start.saturating_add(wide(start))..data_start.saturating_add(wide(end));
            tensors.push(Entry { name, meta, range });
        }
        Ok(Self { text, metadata, tensors, file_len })
    }

    /// The JSON text, padding included.
    pub fn text(&self) -> &str {
        &self.text
    }

    pub(super) fn into_text(self) -> String {
        self.text
    }

    /// What the file says of itself, by name.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// The tensors, in the order of the header; their bytes may have another.
    pub fn tensors(&self) -> &[Entry] {
        &self.tensors
    }

    /// How long the file is, in bytes.
    pub fn file_len(&self) -> u64 {
        self.file_len
    }

    /// True if the bytes of the tensors have the order of the header, so that a stream of them can be
    /// read tensor by tensor.
    pub fn is_in_order(&self) -> bool {
        self.tensors.is_sorted_by(|one, next| one.range.end <= next.range.start)
    }

    /// The attributes of an archive of this file: its metadata, and what is needed to write the file
    /// again.
    ///
    /// # Errors
    ///
    /// `NotImportable` for metadata or a tensor whose name is reserved (`tssd.…`, `.files`).
    pub fn attrs(&self) -> Result<Attrs> {
        self.prove_names()?;
        let mut attrs = attrs_of(&self.metadata)?;
        if !self.is_canonical(&self.metadata)? {
            attrs.insert(HEADER_ATTR.into(), AttrValue::Text(self.text.as_str().into()));
        }
        Ok(attrs)
    }

    /// Proves that no tensor has the name of what is no tensor.
    pub(super) fn prove_names(&self) -> Result<()> {
        if self.tensors.iter().any(|entry| entry.name == FILES_KEY) {
            return Err(Error::new(ErrorKind::NotImportable)
                .note("the name is reserved for the other files of a directory")
                .at(FILES_KEY));
        }
        Ok(())
    }

    /// True if this header is the one that is written for its tensors and this metadata.
    pub(super) fn is_canonical(&self, metadata: &Texts) -> Result<bool> {
        let named = |entry: &Entry| (entry.name.clone(), entry.meta.clone());
        let tensors: Vec<_> = self.tensors.iter().map(named).collect();
        Ok(canonical(metadata, &tensors)?.0 == self.text)
    }
}

impl Entry {
    /// The name of the tensor.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its dtype and shape.
    pub fn meta(&self) -> &TensorMeta {
        &self.meta
    }

    /// Where its bytes are in the file.
    pub fn range(&self) -> Range<u64> {
        self.range.clone()
    }

    /// The tensor: a view if the file is in memory, else read.
    ///
    /// # Errors
    ///
    /// `Io` if the file cannot be read.
    pub fn tensor(&self, file: &dyn Blob) -> Result<Tensor> {
        let bytes = if let Some(bytes) = file.bytes() {
            let place = |at| usize::try_from(at).ok().filter(|at| *at <= bytes.len());
            let ends = place(self.range.start).zip(place(self.range.end));
            let (start, end) = ends.ok_or_else(|| self.truncated())?;
            bytes.slice(start..end)
        } else {
            // The file is proven to be as long.
            let mut bytes = vec![0; self.len()?];
            file.read_exact_at(&mut bytes, self.range.start)?;
            bytes.into()
        };
        self.made_of(bytes)
    }

    /// The tensor that comes next in a stream.
    ///
    /// # Errors
    ///
    /// `NotSafetensors` if the stream ends within it; `Io`.
    pub fn read_from(&self, stream: &mut impl Read) -> Result<Tensor> {
        let mut bytes = self.memory()?;
        stream.take(self.range.end - self.range.start).read_to_end(&mut bytes)?;
        if bytes.len() < self.len()? {
            return Err(self.truncated());
        }
        self.made_of(bytes.into())
    }

    fn made_of(&self, bytes: Bytes) -> Result<Tensor> {
        Tensor::new(self.meta.clone(), bytes.into(), 0).map_err(|error| error.at(&self.name))
    }

    fn len(&self) -> Result<usize> {
        let len = usize::try_from(self.range.end - self.range.start);
        len.map_err(|_| Error::new(ErrorKind::TooLarge).at(&self.name))
    }

    /// Room for its bytes. A header can claim any number of them: too many are an error, no abort.
    fn memory(&self) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(self.len()?).map_err(|error| {
            Error::io(io::Error::new(io::ErrorKind::OutOfMemory, error)).at(&self.name)
        })?;
        Ok(bytes)
    }

    fn truncated(&self) -> Error {
        malformed("it ends within a tensor").at(&self.name)
    }
}

/// Metadata as attributes.
pub(super) fn attrs_of(metadata: &Texts) -> Result<Attrs> {
    let attr = |(name, value): (&String, &String)| {
        if name.starts_with("tssd.") {
            return Err(Error::new(ErrorKind::NotImportable)
                .note(format_args!("metadata `{name}` has a name that is reserved")));
        }
        Ok((name.clone(), AttrValue::Text(value.as_str().into())))
    };
    metadata.iter().map(attr).collect()
}

/// The text of the header that the safetensors library writes for these tensors, and the order in
/// which it writes their bytes. Metadata is sorted by name; that of the library has any order.
pub(super) fn canonical(
    metadata: &Texts,
    tensors: &[(String, TensorMeta)],
) -> Result<(String, Vec<usize>)> {
    let mut infos = Vec::with_capacity(tensors.len());
    for (name, meta) in tensors {
        infos.push(info_of(meta).map_err(|error| error.at(name))?);
    }
    let mut order: Vec<usize> = (0..tensors.len()).collect();
    // Widest dtypes first keeps every tensor aligned without padding.
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
    for &place in &order {
        let info = &mut infos[place];
        let end = offset.checked_add(info.data_offsets.1);
        let end = end.ok_or_else(|| too_large(&info.shape))?;
        info.data_offsets = (offset, end);
        offset = end;
        header.insert(tensors[place].0.clone(), json(serde_json::to_value(info)));
    }
    let mut text = Json::Object(header).to_string();
    let padding = text.len().next_multiple_of(8) - text.len();
    text.extend(std::iter::repeat_n(' ', padding));
    if wide(text.len()) > HEADER_MAX {
        return Err(Error::new(ErrorKind::NotExportable).note(format_args!(
            "the header would take {} bytes, {HEADER_MAX} are allowed: write several files",
            text.len()
        )));
    }
    Ok((text, order))
}

fn check_len(len: u64) -> Result<()> {
    if len.to_le_bytes() == MAGIC {
        return Err(malformed("it is a TSSD archive"));
    }
    if len > HEADER_MAX {
        let note = format_args!("its header would take {len} bytes, {HEADER_MAX} are allowed");
        return Err(malformed(note));
    }
    Ok(())
}

fn malformed(note: impl fmt::Display) -> Error {
    Error::new(ErrorKind::NotSafetensors).note(note)
}

fn too_short(error: io::Error, what: &str) -> Error {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => malformed(format_args!("it is shorter than {what}")),
        _ => Error::io(error),
    }
}

/// In safetensors, an F4 element is one value; in torch, it is a byte with two of them.
fn meta_of(info: &TensorInfo) -> Result<TensorMeta> {
    let lacks = |note| Error::new(ErrorKind::NotImportable).note(note);
    let name = info.dtype.to_string();
    let dtype = Dtype::from_safetensors(&name)
        .ok_or_else(|| lacks(format!("torch has no dtype for safetensors' {name}")))?;
    let mut shape: Vec<u64> = info.shape.iter().map(|size| wide(*size)).collect();
    if dtype == Dtype::Float4E2m1fnX2 {
        let last = shape.last_mut().filter(|last| last.is_multiple_of(2));
        let odd = || lacks("F4 needs a last dimension of even size, as torch packs pairs".into());
        *last.ok_or_else(odd)? /= 2;
    }
    TensorMeta::new(dtype, &shape)
}

/// The inverse; of the offsets only the length is set.
fn info_of(meta: &TensorMeta) -> Result<TensorInfo> {
    let lacks = |note: String| Error::new(ErrorKind::NotExportable).note(note);
    let no_dtype = || lacks(format!("it has no dtype for torch's {}", meta.dtype()));
    let name = meta.dtype().safetensors().ok_or_else(no_dtype)?;
    let dtype = serde_json::from_value(Json::from(name)).map_err(|_| no_dtype())?;
    let sizes = meta.shape().iter().map(|size| usize::try_from(*size));
    let too_large = || too_large(&meta.shape());
    let mut shape: Vec<usize> = sizes.collect::<Result<_, _>>().map_err(|_| too_large())?;
    if meta.dtype() == Dtype::Float4E2m1fnX2 {
        let last = shape.last_mut();
        let last = last.ok_or_else(|| lacks("it has no dimension of packed pairs".into()))?;
        *last = last.checked_mul(2).ok_or_else(too_large)?;
    }
    let len = usize::try_from(meta.nbytes()).map_err(|_| too_large())?;
    Ok(TensorInfo { dtype, shape, data_offsets: (0, len) })
}

fn too_large(shape: &dyn fmt::Debug) -> Error {
    Error::new(ErrorKind::TooLarge).note(format_args!("shape {shape:?}"))
}

pub(super) fn wide(size: usize) -> u64 {
    u64::try_from(size).expect("usize is at most 64 bits")
}

/// The members of a JSON object in order, none of them twice.
pub(super) struct Members(pub(super) Vec<(String, Json)>);

impl<'de> Deserialize<'de> for Members {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Object;

        impl<'de> Visitor<'de> for Object {
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

        deserializer.deserialize_map(Object)
    }
}
