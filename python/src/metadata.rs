//! Metadata of a state dict: a dict in Python, attributes in the format.

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyInt, PyString};
use tssd_format::{AttrValue, Attrs};

use crate::builder::decode_str;
use crate::error::{Result, type_error, value_error};
use crate::importer::to_text;

/// Attribute with the values that have no attribute type: a JSON object.
const JSON_ATTR: &str = "tssd.json_attributes";

/// Prefix of the names that a caller must not use.
const RESERVED: &str = "tssd.";

/// Converts the metadata of a caller to attributes.
pub(crate) fn to_attrs(metadata: Option<&Bound<'_, PyDict>>) -> Result<Attrs> {
    let mut attrs = Attrs::new();
    let Some(metadata) = metadata else { return Ok(attrs) };
    let json_values = PyDict::new(metadata.py());
    for (name, value) in metadata.iter() {
        let Ok(known) = name.extract::<String>() else {
            return Err(invalid_metadata("a key").into());
        };
        if known.starts_with(RESERVED) {
            let message =
                format!("metadata {known:?}: names that begin with `{RESERVED}` are reserved");
            return Err(value_error(message).into());
        }
        let int = value.is_exact_instance_of::<PyInt>().then(|| value.extract::<i64>());
        if let Some(Ok(int)) = int {
            attrs.insert(known, AttrValue::Int(int));
        } else if value.is_exact_instance_of::<PyString>() {
            attrs.insert(known, AttrValue::Text(to_text(&value)?));
        } else if let Ok(bytes) = value.cast_exact::<PyBytes>() {
            attrs.insert(known, AttrValue::Bytes(bytes.as_bytes().into()));
        } else {
            json_values.set_item(name, value)?;
        }
    }
    if !json_values.is_empty() {
        let json = metadata.py().import("json")?;
        let options = PyDict::new(metadata.py());
        // JSON has neither infinities nor NaN.
        options.set_item("allow_nan", false)?;
        let json_text = json.call_method("dumps", (&json_values,), Some(&options));
        let json_text = json_text.map_err(|error| invalid_metadata(&error.to_string()))?;
        // A value that JSON changes, such as a tuple, is an error: it would be lost without notice.
        if !json.call_method1("loads", (&json_text,))?.eq(&json_values)? {
            return Err(invalid_metadata("a value").into());
        }
        attrs.insert(JSON_ATTR.to_owned(), AttrValue::Text(to_text(&json_text)?));
    }
    Ok(attrs)
}

/// Converts attributes back to the caller's metadata; `None` if there was none.
pub(crate) fn from_attrs<'py>(
    py: Python<'py>,
    attrs: &Attrs,
) -> Result<Option<Bound<'py, PyDict>>> {
    let metadata = PyDict::new(py);
    if let Some(AttrValue::Text(json)) = attrs.get(JSON_ATTR) {
        let json_values =
            py.import("json")?.call_method1("loads", (decode_str(py, json.as_bytes())?,));
        // Another writer may have made the file, so an invalid attribute is ignored.
        if let Ok(json_values) =
            json_values.and_then(|json_values| Ok(json_values.cast_into::<PyDict>()?))
        {
            metadata.update(json_values.as_mapping())?;
        }
    }
    for (name, value) in attrs.iter().filter(|(name, _)| !name.starts_with(RESERVED)) {
        match value {
            AttrValue::Int(value) => metadata.set_item(name, value)?,
            AttrValue::Text(value) => metadata.set_item(name, decode_str(py, value.as_bytes())?)?,
            AttrValue::Bytes(value) => metadata.set_item(name, PyBytes::new(py, value))?,
        }
    }
    Ok(Some(metadata).filter(|metadata| !metadata.is_empty()))
}

fn invalid_metadata(what: &str) -> PyErr {
    let text = "metadata is a dict of strs to what JSON has: strs, numbers, bools, None, lists and dicts; or bytes";
    type_error(format!("{text} ({what})"))
}
