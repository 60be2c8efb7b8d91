//! Maps the leaves of a state dict.

use tssd_format::{Dict, Result, StateDict, Value};

/// Returns a dict of the same structure with each leaf replaced.
pub(super) fn map(
    dict: &StateDict,
    mut leaf: impl FnMut(&Value) -> Result<Value>,
) -> Result<StateDict> {
    StateDict::from_value(map_value(dict.as_value(), &mut leaf)?)
}

fn map_value(value: &Value, leaf: &mut impl FnMut(&Value) -> Result<Value>) -> Result<Value> {
    let mut dict = |dict: &Dict| -> Result<Dict> {
        dict.iter().map(|(key, value)| Ok((key.clone(), map_value(value, leaf)?))).collect()
    };
    Ok(match value {
        Value::Dict(entries) => Value::Dict(dict(entries)?),
        Value::OrderedDict(entries) => Value::OrderedDict(dict(entries)?),
        Value::NamedTuple(name, entries) => Value::NamedTuple(name.clone(), dict(entries)?),
        Value::List(values) => Value::List(list(values, leaf)?),
        Value::Tuple(values) => Value::Tuple(list(values, leaf)?),
        Value::Tagged(tag, plain) => Value::Tagged(*tag, map_value(plain, leaf)?.into()),
        other => leaf(other)?,
    })
}

fn list(values: &[Value], leaf: &mut impl FnMut(&Value) -> Result<Value>) -> Result<Vec<Value>> {
    values.iter().map(|value| map_value(value, leaf)).collect()
}
