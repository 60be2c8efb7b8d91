//! The header of a safetensors file: names, dtypes, shapes and places of its tensors.
//!
//! Its rules are checked by the `safetensors` crate. What is here keeps what that crate does not: the
//! order of the entries, so that the same file always gives the same archive and back.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::Range;

use safetensors::tensor::{Metadata, TensorInfo};
use serde::Deserialize;
use serde::de::{self, Deserializer, MapAccess, Visitor};
use serde_json::{Map, Value as Json};
use tssd_format::{Blob, Dtype, TensorMeta};

use crate::exit::Exit;
use crate::failure::{Failure, Result};

/// The attribute with the header of the safetensors file, where it is not the one that `unpack` would
/// write anyway: so that every file comes back byte for byte.
pub(crate) const HEADER_ATTR: &str = "tssd.safetensors_header";

/// The member of the header that is no tensor.
pub(crate) const METADATA: &str = "__metadata__";

/// The `safetensors` crate reads no longer ones.
const HEADER_MAX: u64 = 100_000_000;

/// A header, with its tensors in the order in which it has them.
#[derive(Debug)]
pub(crate) struct Header {
    /// The JSON text, padding included.
    pub(crate) text: String,
    pub(crate) metadata: Option<BTreeMap<String, String>>,
    pub(crate) tensors: Vec<Entry>,
}

/// One tensor of the file.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) name: String,
    pub(crate) meta: TensorMeta,
    /// Where its bytes are in the file.
    pub(crate) range: Range<u64>,
}

impl Header {
    /// Reads and proves the header of a file.
    pub(crate) fn read(file: &impl Blob) -> Result<Self, Reject> {
        let file_len = file.size().map_err(Reject::Io)?;
        let mut len = [0; 8];
        if file_len < 8 {
            return Err(Reject::malformed("it is shorter than 8 bytes"));
        }
        file.read_exact_at(&mut len, 0).map_err(Reject::Io)?;
        let len = u64::from_le_bytes(len);
        if len > HEADER_MAX || len > file_len - 8 {
            return Err(Reject::malformed(format!("its header would take {len} bytes")));
        }
        let mut text = vec![0; usize::try_from(len).expect("at most 100 MB")];
        file.read_exact_at(&mut text, 8).map_err(Reject::Io)?;
        let text = String::from_utf8(text).map_err(Reject::malformed)?;
        let (header, data_len) = Self::parse(text, 8 + len)?;
        if 8 + len + data_len != file_len {
            let note = format!("its tensors take {data_len} bytes, but {} are there", {
                file_len - 8 - len
            });
            return Err(Reject::malformed(note));
        }
        Ok(header)
    }

    /// Parses the text of a header whose data begins at byte `data_start`; also says how many bytes
    /// of data it describes.
    pub(crate) fn parse(text: String, data_start: u64) -> Result<(Self, u64), Reject> {
        let proven: Metadata = serde_json::from_str(&text).map_err(Reject::malformed)?;
        let data_len = wide(proven.data_len());
        let Members(members) = serde_json::from_str(&text).map_err(Reject::malformed)?;
        let mut metadata = None;
        let mut tensors = Vec::with_capacity(members.len());
        for (name, value) in members {
            if name == METADATA {
                metadata = serde_json::from_value(value).map_err(Reject::malformed)?;
                continue;
            }
            let info: TensorInfo = serde_json::from_value(value).map_err(Reject::malformed)?;
            let meta = meta_of(&info).map_err(|note| Reject::Untranslatable(name.clone(), note))?;
            let (start, end) = info.data_offsets;
            let range = data_start + wide(start)..data_start + wide(end);
            tensors.push(Entry { name, meta, range });
        }
        Ok((Self { text, metadata, tensors }, data_len))
    }
}

/// The text of the header that the safetensors library writes for these tensors, and the order in
/// which it writes their bytes. Metadata is sorted by name; that of the library has any order.
pub(crate) fn canonical(
    metadata: Option<&BTreeMap<String, String>>,
    tensors: &[(String, TensorMeta)],
) -> Result<(String, Vec<usize>)> {
    let mut infos = Vec::with_capacity(tensors.len());
    for (name, meta) in tensors {
        infos.push(info_of(meta).map_err(|note| {
            Failure::new(Exit::Refused, format_args!("safetensors cannot hold `{name}`: {note}"))
        })?);
    }
    let mut order: Vec<usize> = (0..tensors.len()).collect();
    // Widest dtypes first keeps every tensor aligned without padding.
    order.sort_by(|&left, &right| {
        let by_dtype = infos[right].dtype.cmp(&infos[left].dtype);
        by_dtype.then_with(|| tensors[left].0.cmp(&tensors[right].0))
    });
    let json = |value: serde_json::Result<Json>| value.expect("strings and numbers are JSON");
    let mut header = Map::new();
    if let Some(metadata) = metadata {
        header.insert(METADATA.into(), json(serde_json::to_value(metadata)));
    }
    let mut offset = 0_usize;
    for &place in &order {
        let info = &mut infos[place];
        let end = offset + info.data_offsets.1;
        info.data_offsets = (offset, end);
        offset = end;
        header.insert(tensors[place].0.clone(), json(serde_json::to_value(info)));
    }
    let mut text = Json::Object(header).to_string();
    let padding = text.len().next_multiple_of(8) - text.len();
    text.extend(std::iter::repeat_n(' ', padding));
    if wide(text.len()) > HEADER_MAX {
        let message = format_args!("the header would take {} bytes", text.len());
        return Err(Failure::new(Exit::Refused, message)
            .help("safetensors has no headers of over 100 MB: split the state dict"));
    }
    Ok((text, order))
}

/// Why a file is not read.
#[derive(Debug)]
pub(crate) enum Reject {
    /// The system says so.
    Io(std::io::Error),
    /// It is no safetensors file.
    Malformed(String),
    /// A tensor of this name has a dtype or shape that torch lacks.
    Untranslatable(String, String),
}

impl Reject {
    fn malformed(note: impl fmt::Display) -> Self {
        Self::Malformed(note.to_string())
    }

    /// The same for people.
    pub(crate) fn into_failure(self, path: &std::path::Path) -> Failure {
        let shown = path.display();
        match self {
            Self::Io(error) => Failure::io("read", path, error),
            Self::Malformed(note) => Failure::new(
                Exit::Differs,
                format_args!("{shown} is no valid safetensors file: {note}"),
            )
            .help("the file is damaged, incomplete or of another format: take another copy of it"),
            Self::Untranslatable(name, note) => {
                Failure::new(Exit::Refused, format_args!("{shown}: `{name}`: {note}"))
                    .help("convert this tensor to a dtype that torch has first")
            }
        }
    }
}

/// In safetensors, an F4 element is one value; in torch, it is a byte with two of them.
fn meta_of(info: &TensorInfo) -> Result<TensorMeta, String> {
    let name = info.dtype.to_string();
    let dtype = Dtype::from_safetensors(&name)
        .ok_or_else(|| format!("torch has no dtype for safetensors' {name}"))?;
    let mut shape: Vec<u64> = info.shape.iter().map(|size| wide(*size)).collect();
    if dtype == Dtype::Float4E2m1fnX2 {
        let last = shape.last_mut().filter(|last| last.is_multiple_of(2));
        *last.ok_or("F4 needs a last dimension of even size, as torch packs pairs")? /= 2;
    }
    TensorMeta::new(dtype, &shape).map_err(|error| error.to_string())
}

/// The inverse; of the offsets only the length is set.
fn info_of(meta: &TensorMeta) -> Result<TensorInfo, String> {
    let lacks = || format!("it has no dtype for torch's {}", meta.dtype());
    let name = meta.dtype().safetensors().ok_or_else(lacks)?;
    let dtype = serde_json::from_value(Json::from(name)).map_err(|_| lacks())?;
    let too_large = |_| "it is too large for this machine".to_string();
    let mut shape: Vec<usize> = meta
        .shape()
        .iter()
        .map(|size| usize::try_from(*size).map_err(too_large))
        .collect::<Result<_, _>>()?;
    if meta.dtype() == Dtype::Float4E2m1fnX2 {
        *shape.last_mut().ok_or("it has no dimension of packed pairs")? *= 2;
    }
    let len = usize::try_from(meta.nbytes()).map_err(too_large)?;
    Ok(TensorInfo { dtype, shape, data_offsets: (0, len) })
}

fn wide(size: usize) -> u64 {
    u64::try_from(size).expect("usize is at most 64 bits")
}

/// The members of a JSON object in order, none of them twice.
struct Members(Vec<(String, Json)>);

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
