//! Conversion of objects to and from plain values with class tags, by `tssd/_classes.py`.

use pyo3::intern;
use pyo3::prelude::*;
use tssd_format::{ClassTag, Error, ErrorKind, TaggedClass};

use crate::error::{BindingError, Result};

/// A plain object with its class tag. The fields are those of `_classes.Tagged`.
#[derive(FromPyObject)]
pub(crate) struct TaggedObject<'py> {
    name: String,
    parameter: u64,
    pub(crate) plain: Bound<'py, PyAny>,
}

impl TaggedObject<'_> {
    /// Returns the class tag.
    pub(crate) fn tag(&self) -> Result<ClassTag> {
        let class = TaggedClass::from_name(&self.name).ok_or_else(|| {
            Error::new(ErrorKind::ClassTag).with_detail(format_args!("class {}", self.name))
        })?;
        Ok(ClassTag::new(class, self.parameter)?)
    }
}

/// Reason why an object cannot be converted. The fields are those of `_classes.Refusal`.
#[derive(FromPyObject)]
pub(crate) struct Refusal {
    message: String,
    advice: String,
}

impl Refusal {
    /// Returns the error of a save.
    pub(crate) fn into_untyped_leaf(self) -> BindingError {
        BindingError::untyped_leaf(self.message, self.advice)
    }

    /// Returns the error of a load.
    pub(crate) fn into_feature_missing(self) -> BindingError {
        BindingError::new("FeatureMissing", self.message).advice(self.advice)
    }
}

/// Decomposes an object into a plain object with a class tag; `None` for objects of other classes.
pub(crate) fn decompose<'py>(
    object: &Bound<'py, PyAny>,
) -> Result<Option<Result<TaggedObject<'py>, Refusal>>> {
    let py = object.py();
    let classes = py.import(intern!(py, "tssd._classes"))?;
    let found = classes.call_method1(intern!(py, "decompose"), (object,))?;
    if found.is_none() {
        return Ok(None);
    }
    let tagged = found.hasattr(intern!(py, "plain"))?;
    Ok(Some(if tagged { Ok(found.extract()?) } else { Err(found.extract()?) }))
}

/// Returns the decomposed wrapper of a `StackedWrapper`; `None` for any other object.
pub(crate) fn stacked_wrapper<'py>(
    object: &Bound<'py, PyAny>,
) -> Result<Option<TaggedObject<'py>>> {
    let py = object.py();
    let class = py.import(intern!(py, "tssd._classes"))?.getattr(intern!(py, "StackedWrapper"))?;
    if !object.is_instance(&class)? {
        return Ok(None);
    }
    Ok(Some(object.getattr(intern!(py, "tagged"))?.extract()?))
}

/// Returns an object of a subclass of a builtin class as an object of that class; `None` for any other object.
pub(crate) fn to_base<'py>(object: &Bound<'py, PyAny>) -> Result<Option<Bound<'py, PyAny>>> {
    let py = object.py();
    let classes = py.import(intern!(py, "tssd._classes"))?;
    let base = classes.call_method1(intern!(py, "to_base"), (object,))?;
    Ok((!base.is_none()).then_some(base))
}

/// Returns the object of a plain object with a class tag.
///
/// # Errors
///
/// `FeatureMissing` if the class is not registered, or if torch does not have the constant.
pub(crate) fn compose<'py>(tag: ClassTag, plain: &Bound<'py, PyAny>) -> Result<Bound<'py, PyAny>> {
    let py = plain.py();
    let classes = py.import(intern!(py, "tssd._classes"))?;
    let arguments = (tag.class().name(), tag.parameter(), plain);
    let object = classes.call_method1(intern!(py, "compose"), arguments)?;
    reject_refusal(object)
}

/// Returns an object that Python made from stored values.
///
/// # Errors
///
/// `FeatureMissing` if the object is a `Refusal`.
pub(crate) fn reject_refusal(object: Bound<'_, PyAny>) -> Result<Bound<'_, PyAny>> {
    let py = object.py();
    let class = py.import(intern!(py, "tssd._classes"))?.getattr(intern!(py, "Refusal"))?;
    if object.is_instance(&class)? {
        return Err(object.extract::<Refusal>()?.into_feature_missing().into());
    }
    Ok(object)
}
