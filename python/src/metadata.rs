//! What a caller says of a state dict as a whole: a dict of Python, attributes of the format.

use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyInt, PyString};
use tssd_format::{AttrValue, Attrs};

use crate::error::Result;
use crate::object::string;
use crate::value::text;

/// The attribute with what no attribute can say: a JSON object.
const JSON_ATTR: &str = "tssd.json";

/// Names that a caller may not give.
const RESERVED: &str = "tssd.";

/// What a caller gives, as attributes.
pub(crate) fn attrs(metadata: Option<&Bound<'_, PyDict>>) -> Result<Attrs> {
    let mut attrs = Attrs::new();
    let Some(metadata) = metadata else { return Ok(attrs) };
    let others = PyDict::new(metadata.py());
    for (name, value) in metadata.iter() {
        let Ok(known) = name.extract::<String>() else { return Err(not_metadata("a key").into()) };
        if known.starts_with(RESERVED) {
            let message =
                format!("metadata {known:?}: names that begin with `{RESERVED}` are reserved");
            return Err(PyValueError::new_err(message).into());
        }
        let int = value.is_exact_instance_of::<PyInt>().then(|| value.extract::<i64>());
        if let Some(Ok(int)) = int {
            attrs.insert(known, AttrValue::Int(int));
        } else if value.is_exact_instance_of::<PyString>() {
            attrs.insert(known, AttrValue::Text(text(&value)?));
        } else if let Ok(bytes) = value.cast_exact::<PyBytes>() {
            attrs.insert(known, AttrValue::Bytes(bytes.as_bytes().into()));
        } else {
            others.set_item(name, value)?;
        }
    }
    if !others.is_empty() {
        let json = metadata.py().import("json")?;
        let options = PyDict::new(metadata.py());
        // JSON has neither infinities nor what is no number.
        options.set_item("allow_nan", false)?;
        let written = json.call_method("dumps", (&others,), Some(&options));
        let written = written.map_err(|error| not_metadata(&error.to_string()))?;
        // What comes back otherwise, such as a tuple, would be lost unnoticed.
        if !json.call_method1("loads", (&written,))?.eq(&others)? {
            return Err(not_metadata("a value").into());
        }
        attrs.insert(JSON_ATTR.to_owned(), AttrValue::Text(text(&written)?));
    }
    Ok(attrs)
}

/// The same, as the caller gave it; none if nothing was given.
pub(crate) fn given<'py>(py: Python<'py>, attrs: &Attrs) -> Result<Option<Bound<'py, PyDict>>> {
    let metadata = PyDict::new(py);
    if let Some(AttrValue::Text(json)) = attrs.get(JSON_ATTR) {
        let others = py.import("json")?.call_method1("loads", (string(py, json.as_bytes())?,));
        // The attribute is the package's, the file is not.
        if let Ok(others) = others.and_then(|others| Ok(others.cast_into::<PyDict>()?)) {
            metadata.update(others.as_mapping())?;
        }
    }
    for (name, value) in attrs.iter().filter(|(name, _)| !name.starts_with(RESERVED)) {
        match value {
            AttrValue::Int(value) => metadata.set_item(name, value)?,
            AttrValue::Text(value) => metadata.set_item(name, string(py, value.as_bytes())?)?,
            AttrValue::Bytes(value) => metadata.set_item(name, PyBytes::new(py, value))?,
        }
    }
    Ok(Some(metadata).filter(|metadata| !metadata.is_empty()))
}

fn not_metadata(what: &str) -> PyErr {
    let text = "metadata is a dict of strs to what JSON has: strs, numbers, bools, None, lists and dicts; or bytes";
    PyTypeError::new_err(format!("{text} ({what})"))
}
