//! Python's objects as values of the format.

use bytes::Bytes;
use num_bigint::BigInt;
use pyo3::exceptions::PyTypeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{
    PyBool, PyBytes, PyComplex, PyDict, PyFloat, PyInt, PyList, PyString, PyTuple, PyType,
};
use serde_json::Value as Json;
use tssd_format::{
    AttrValue, Dict, Dtype, Error, ErrorKind, Key, MAX_DEPTH, ObjectPath, Region, Shard,
    ShardPlace, StateDict, Step, Storage, Tensor, TensorFlags, TensorMeta, TensorSlice, Text,
    Value,
};

use crate::device::Devices;
use crate::dlpack::{self, Borrowed};
use crate::dtensor::{self, Meshes, Parts};
use crate::error::{Refusal, Result};
use crate::local::{Filling, Purpose, Transfer};
use crate::numpy::Numpy;
use crate::slice::{self, TensorShard};
use crate::torch::Torch;

/// The media tag of what pickle made.
pub(crate) const PICKLE: &str = "application/x-python-pickle";

/// How often signals are looked for, in leaves.
const LEAVES: u32 = 1024;

/// A state dict of Python, taken over.
pub(crate) struct Taken {
    pub(crate) dict: StateDict,
    /// The `_metadata` of ordered dicts, by path.
    pub(crate) metadata: serde_json::Map<String, Json>,
    /// The GPUs' memory among it.
    pub(crate) devices: Devices,
    /// Whether shards were left out, as this rank has nothing of their tensors.
    pub(crate) lacks: bool,
}

/// Takes a state dict over. Its tensors are shared, not copied; containers are looked at once, so that
/// who changes them meanwhile is either seen or not.
pub(crate) fn take<'py>(
    object: &Bound<'py, PyAny>,
    allow_pickle: bool,
    transfer: Option<Transfer<'py>>,
) -> Result<Taken> {
    let mut taker = Taker::new(object.py(), allow_pickle, Purpose::Store(transfer))?;
    let value = taker.value(object)?;
    let dict = StateDict::from_value(value).map_err(|_| {
        let class = name_of(&object.get_type());
        Refusal::leaf(
            format!("a state dict is a dict, this is a {class}"),
            "put it into a dict, or pass what its `.state_dict()` returns",
        )
    })?;
    Ok(Taken { dict, metadata: taker.metadata, devices: taker.devices, lacks: taker.lacks })
}

impl Taken {
    /// The attribute that has the `_metadata`; none if there is none.
    pub(crate) fn modules(&self) -> Option<AttrValue> {
        let text = || Json::Object(self.metadata.clone()).to_string();
        (!self.metadata.is_empty()).then(|| AttrValue::Text(text().into()))
    }
}

/// How the class of an object is called.
pub(crate) fn name_of(class: &Bound<'_, PyType>) -> String {
    class.fully_qualified_name().map_or_else(|_| "?".to_owned(), |name| name.to_string())
}

/// A tensor that may be filled, and which part of a global tensor it is, if it is one.
pub(crate) type Lent = (Tensor, Option<ShardPlace>);

/// Tensors that are filled in place of others, with those.
pub(crate) type Staged<'py> = Vec<(Bound<'py, PyAny>, Bound<'py, PyAny>)>;

/// Lends tensors of Python's objects, to be filled.
pub(crate) struct Lender<'py>(Taker<'py>);

impl<'py> Lender<'py> {
    pub(crate) fn new(py: Python<'py>) -> Result<Self> {
        Taker::new(py, false, Purpose::Store(None)).map(Self)
    }

    /// The dtype of an object, if there is anything to fill, and its shape as a whole. None if it is no tensor.
    pub(crate) fn look(
        &self,
        object: &Bound<'py, PyAny>,
    ) -> Result<Option<(Option<Dtype>, Vec<u64>)>> {
        let own = &self.0;
        let (local, shape) = if let Ok(shard) = object.cast::<TensorShard>() {
            let slices = shard.get().slices(own.py);
            (shard.get().local().bind(own.py).clone(), slices[0].global_shape().to_vec())
        } else {
            let is_torch = match &own.torch {
                Some(torch) => torch.is_tensor(object)?,
                None => false,
            };
            if !is_torch && !own.numpy.as_ref().is_some_and(|numpy| numpy.is_array(object)) {
                let other = own.borrow(object)?;
                return Ok(
                    other.map(|other| (Some(other.meta.dtype()), other.meta.shape().to_vec()))
                );
            }
            let shape = object.getattr("shape")?.extract()?;
            if is_torch
                && dtensor::has_chunks(object)?
                && let Parts::Chunks(chunks) = dtensor::parts(object)?
            {
                // What is around them has a dtype that need not be theirs.
                match chunks.locals.into_iter().next() {
                    Some((first, _)) => (first, shape),
                    None => return Ok(Some((None, shape))),
                }
            } else {
                (object.clone(), shape)
            }
        };
        if let Some(other) = own.borrow(&local)? {
            return Ok(Some((Some(other.meta.dtype()), shape)));
        }
        let dtype = local.getattr("dtype")?;
        let known = match (&own.torch, &own.numpy) {
            (Some(torch), _) if torch.is_tensor(&local)? => {
                Torch::prove_fillable(&local)?;
                torch.dtype_of(&dtype)
            }
            (_, Some(numpy)) => {
                Numpy::prove_fillable(&local)?;
                Some(numpy.dtype_of(&dtype)?)
            }
            _ => None,
        };
        let known = known.ok_or_else(|| {
            Refusal::leaf(format!("the format has no {dtype}"), "fill a tensor of another dtype")
        })?;
        Ok(Some((Some(known), shape)))
    }

    /// The tensors that an object is, which may be filled as this dtype. What cannot be filled as it is has
    /// another one in its place.
    pub(crate) fn lend(
        &mut self,
        object: &Bound<'py, PyAny>,
        stored: Dtype,
    ) -> Result<(Vec<Lent>, Staged<'py>)> {
        self.0.purpose = Purpose::Fill(Filling::new(stored));
        let lent = self.0.lent(object)?.ok_or_else(|| {
            Refusal::leaf("`into` is no tensor", "give a tensor, a TensorShard or an array")
        })?;
        let Purpose::Fill(filling) = &self.0.purpose else { unreachable!("it was just made") };
        Ok((lent, filling.staged.take()))
    }

    /// The GPUs' memory among what was lent.
    pub(crate) fn devices(&self) -> &Devices {
        &self.0.devices
    }
}

struct Taker<'py> {
    py: Python<'py>,
    torch: Option<Torch<'py>>,
    numpy: Option<Numpy<'py>>,
    ordered_dict: Bound<'py, PyAny>,
    allow_pickle: bool,
    path: Vec<Step>,
    leaves: u32,
    metadata: serde_json::Map<String, Json>,
    meshes: Meshes<'py>,
    purpose: Purpose<'py>,
    devices: Devices,
    lacks: bool,
}

impl<'py> Taker<'py> {
    fn new(py: Python<'py>, allow_pickle: bool, purpose: Purpose<'py>) -> Result<Self> {
        Ok(Self {
            py,
            torch: Torch::imported(py)?,
            numpy: Numpy::imported(py)?,
            ordered_dict: py.import("collections")?.getattr("OrderedDict")?,
            allow_pickle,
            path: Vec::new(),
            leaves: 0,
            metadata: serde_json::Map::new(),
            meshes: Meshes::default(),
            purpose,
            devices: Devices::default(),
            lacks: false,
        })
    }

    fn here(&self) -> ObjectPath {
        self.path.iter().cloned().collect()
    }

    fn value(&mut self, object: &Bound<'py, PyAny>) -> Result<Value> {
        if let Some(container) = self.container(object)? {
            return Ok(container);
        }
        self.leaves += 1;
        if self.leaves.is_multiple_of(LEAVES) {
            self.py.check_signals()?;
        }
        self.leaf(object).map_err(|error| error.at(&self.here()))
    }

    fn container(&mut self, object: &Bound<'py, PyAny>) -> Result<Option<Value>> {
        let class = object.get_type();
        let value = if let Ok(dict) = object.cast_exact::<PyDict>() {
            self.deeper()?;
            // A copy: who changes the dict meanwhile does not change what is gone through.
            Value::Dict(self.dict(&dict.items())?)
        } else if class.is(&self.ordered_dict) {
            self.deeper()?;
            self.take_metadata(object)?;
            // Its order is not that of the dict that it is.
            let items = object.call_method0(intern!(self.py, "items"))?;
            let items = self.py.get_type::<PyList>().call1((items,))?;
            Value::OrderedDict(self.dict(items.cast()?)?)
        } else if let Ok(list) = object.cast_exact::<PyList>() {
            self.deeper()?;
            Value::List(self.values(list.to_tuple().iter())?)
        } else if let Ok(tuple) = object.cast_exact::<PyTuple>() {
            self.deeper()?;
            Value::Tuple(self.values(tuple.iter())?)
        } else if let Some(fields) = fields_of(object)? {
            self.deeper()?;
            let values = object.cast::<PyTuple>()?;
            let mut dict = Dict::new();
            for (field, value) in fields.iter().zip(values.iter()) {
                let value = self.element(Step::Key(Key::Str(field.clone())), &value)?;
                dict.insert(Key::Str(field.clone()), value);
            }
            Value::NamedTuple(text(class.name()?.as_any())?, dict)
        } else {
            return Ok(None);
        };
        Ok(Some(value))
    }

    /// Refuses what lies too deep, before it is gone into: a dict may contain itself.
    fn deeper(&self) -> Result<()> {
        if self.path.len() < MAX_DEPTH {
            return Ok(());
        }
        let note = "does a container hold itself?";
        Err(Error::new(ErrorKind::TooDeep).at(self.here().fqn()).note(note).into())
    }

    /// What lies in a container. None if it is a tensor of which this rank has nothing, as of tables that name their own
    /// offsets: not even its dtype is known.
    fn child(&mut self, step: Step, object: &Bound<'py, PyAny>) -> Result<Option<Value>> {
        self.path.push(step);
        let value = self.value(object)?;
        self.path.pop();
        let is_nothing = matches!(&value, Value::Shards(shards) if shards.is_empty());
        self.lacks |= is_nothing;
        Ok((!is_nothing).then_some(value))
    }

    /// What lies in a container that has places for all.
    fn element(&mut self, step: Step, object: &Bound<'py, PyAny>) -> Result<Value> {
        let value = self.child(step.clone(), object)?;
        value.ok_or_else(|| {
            self.path.push(step);
            let text = "a tensor of which this rank has nothing leaves a gap in what it lies in";
            let refusal = Refusal::leaf(text, "put it into a dict").at(&self.here());
            self.path.pop();
            refusal.into()
        })
    }

    fn dict(&mut self, items: &Bound<'py, PyList>) -> Result<Dict> {
        let mut dict = Dict::new();
        for item in items.iter() {
            let (key, value) = (item.get_item(0)?, item.get_item(1)?);
            let key = key_of(&key, MAX_DEPTH).map_err(|error| error.at(&self.here()))?;
            if let Some(value) = self.child(Step::Key(key.clone()), &value)? {
                dict.insert(key, value);
            }
        }
        Ok(dict)
    }

    fn values(&mut self, objects: impl Iterator<Item = Bound<'py, PyAny>>) -> Result<Vec<Value>> {
        (0..)
            .zip(objects)
            .map(|(index, object)| self.element(Step::Index(index), &object))
            .collect()
    }

    /// Keeps the `_metadata` that torch's modules hang on their state dicts.
    fn take_metadata(&mut self, dict: &Bound<'py, PyAny>) -> Result<()> {
        let Some(metadata) = dict.getattr_opt(intern!(self.py, "_metadata"))? else {
            return Ok(());
        };
        let json = self.py.import("json")?;
        let unlike = |_| {
            Refusal::leaf(
                "its `_metadata` is no JSON",
                "make it one of strs, numbers, bools, None, lists and dicts with str keys",
            )
            .at(&self.here())
        };
        let written = json.call_method1("dumps", (&metadata,)).map_err(unlike)?;
        let read = json.call_method1("loads", (&written,))?;
        if !read.eq(&metadata)? {
            return Err(unlike(PyTypeError::new_err(())).into());
        }
        let json = serde_json::from_str(written.cast::<PyString>()?.to_str()?);
        let json = json.map_err(|error| unlike(PyTypeError::new_err(error.to_string())))?;
        self.metadata.insert(self.here().to_string(), json);
        Ok(())
    }

    fn leaf(&mut self, object: &Bound<'py, PyAny>) -> Result<Value> {
        if let Some(torch) = &self.torch
            && torch.is_plain(object)?
        {
            return Ok(Value::Tensor(self.local(torch, object, torch.flags(object)?)?));
        }
        if let Some(value) = plain(object)? {
            return Ok(value);
        }
        if let Some(value) = self.of_torch(object)? {
            return Ok(value);
        }
        if let Some(numpy) = &self.numpy {
            if numpy.is_array(object) {
                return Ok(Value::Tensor(self.array(numpy, object)?));
            }
            if numpy.is_scalar(object)? {
                return Ok(Value::Tensor(numpy.take_scalar(object)?));
            }
            if numpy.is_any_array(object)? {
                let class = name_of(&object.get_type());
                return Err(Refusal::leaf(
                    format!("an array of class {class} cannot be stored"),
                    "convert it with `numpy.asarray`, and store what that loses beside it",
                )
                .into());
            }
        }
        if let Ok(shard) = object.cast::<TensorShard>() {
            return self.shard(shard.get());
        }
        match self.borrow(object)? {
            Some(other) => Ok(Value::Tensor(self.other(other)?)),
            None => self.opaque(object),
        }
    }

    /// An array of neither torch nor numpy.
    fn borrow(&self, object: &Bound<'py, PyAny>) -> Result<Option<Borrowed>> {
        let is_tensor = self.torch.as_ref().map(|torch| torch.is_tensor(object)).transpose()?;
        let is_array = self.numpy.as_ref().map(|numpy| numpy.is_any_array(object)).transpose()?;
        if is_tensor == Some(true) || is_array == Some(true) {
            return Ok(None);
        }
        dlpack::borrow(object)
    }

    /// An array of another framework.
    fn other(&self, borrowed: Borrowed) -> Result<Tensor> {
        self.purpose.other(&self.devices, borrowed, || self.here().fqn())
    }

    /// A plain tensor of torch.
    fn local(
        &self,
        torch: &Torch<'py>,
        tensor: &Bound<'py, PyAny>,
        flags: TensorFlags,
    ) -> Result<Tensor> {
        self.purpose.torch(torch, &self.devices, tensor, flags, || self.here().fqn())
    }

    /// A plain array of numpy.
    fn array(&self, numpy: &Numpy<'py>, array: &Bound<'py, PyAny>) -> Result<Tensor> {
        self.purpose.numpy(numpy, array, || self.here().fqn())
    }

    fn of_torch(&mut self, object: &Bound<'py, PyAny>) -> Result<Option<Value>> {
        let Some(torch) = &self.torch else { return Ok(None) };
        if torch.is_tensor(object)? {
            return self.tensor_subclass(object).map(Some);
        }
        if let Some(dtype) = torch.dtype_of(object) {
            return Ok(Some(Value::Dtype(dtype)));
        }
        let class = object.get_type();
        if class.is(torch.module.getattr(intern!(self.py, "Size"))?) {
            return Ok(Some(Value::Size(object.extract::<Vec<i64>>()?.into())));
        }
        if class.is(torch.module.getattr(intern!(self.py, "device"))?) {
            return Ok(Some(Value::Device(text(object.str()?.as_any())?)));
        }
        Ok(None)
    }

    /// A tensor whose class is not torch's own.
    fn tensor_subclass(&mut self, object: &Bound<'py, PyAny>) -> Result<Value> {
        let torch = self.torch.as_ref().expect("it is a tensor");
        let object = dtensor::waited(object)?;
        let flags = torch.flags(&object)?;
        if torch.is_plain(&object)? {
            return Ok(Value::Tensor(self.local(torch, &object, flags)?));
        }
        let shards = match dtensor::parts(&object)? {
            Parts::Chunks(chunks) => {
                let part = self.purpose.part();
                let mut shards = Vec::new();
                for (number, (local, mut offsets)) in chunks.locals.into_iter().enumerate() {
                    if let Some(part) = part {
                        if !part.locals.contains(&number) {
                            continue;
                        }
                        let inside = part.region.iter().flat_map(Region::offsets);
                        let offsets = offsets.iter_mut().zip(inside);
                        offsets.for_each(|(at, more)| *at = at.saturating_add(*more));
                    }
                    let tensor = self.local(torch, &local, flags)?;
                    let shape = tensor.meta().shape();
                    let slice = TensorSlice::new(&offsets, shape, &chunks.global_shape)?;
                    shards.push(Shard::new(tensor, ShardPlace::new(slice))?);
                }
                shards
            }
            Parts::DTensor(parts) => {
                let places = parts.places(&self.meshes.of(&parts.mesh)?)?;
                let mut local = self.local(torch, &parts.local, flags)?;
                if !parts.is_in_mesh() {
                    // torch gives it one dimension, whatever the global tensor has.
                    let nothing = places[0].slice().local_shape();
                    let meta = TensorMeta::new(local.meta().dtype(), nothing)?.with_flags(flags);
                    local = Tensor::new(meta, Storage::default(), 0)?;
                }
                self.shards(&local, places)?
            }
        };
        Ok(Value::Shards(shards))
    }

    fn lent(&mut self, object: &Bound<'py, PyAny>) -> Result<Option<Vec<Lent>>> {
        let is_torch = match &self.torch {
            Some(torch) => torch.is_tensor(object)?,
            None => false,
        };
        let is_array = self.numpy.as_ref().is_some_and(|numpy| numpy.is_array(object));
        let is_shard = object.cast::<TensorShard>().is_ok();
        if !is_torch && !is_array && !is_shard && !object.hasattr("__dlpack__")? {
            return Ok(None);
        }
        Ok(Some(match self.leaf(object)? {
            Value::Tensor(tensor) => vec![(tensor, None)],
            Value::Shards(shards) => {
                let part = |shard: Shard| (shard.tensor().clone(), Some(shard.place().clone()));
                shards.into_iter().map(part).collect()
            }
            _ => return Ok(None),
        }))
    }

    fn shard(&self, shard: &TensorShard) -> Result<Value> {
        let local = shard.local().bind(self.py);
        let tensor = self.plain_tensor(local)?.ok_or_else(|| {
            let class = name_of(&local.get_type());
            Refusal::leaf(
                format!("the local part of a TensorShard is a {class}"),
                "give it a plain tensor of torch or an array of numpy",
            )
        })?;
        Ok(Value::Shards(self.shards(&tensor, shard.places(self.py)?)?))
    }

    /// A local tensor, or what is wanted of it, as the boxes that it is.
    fn shards(&self, local: &Tensor, mut places: Vec<ShardPlace>) -> Result<Vec<Shard>> {
        if let Some(region) = self.purpose.part().and_then(|part| part.region.as_ref()) {
            places = slice::parts(&places, region)?;
        }
        let slices: Vec<TensorSlice> = places.iter().map(|place| place.slice().clone()).collect();
        let locals = slice::cut(local, &slices)?;
        let shards = locals.into_iter().zip(places);
        Ok(shards.map(|(local, place)| Shard::new(local, place)).collect::<Result<_, Error>>()?)
    }

    fn plain_tensor(&self, object: &Bound<'py, PyAny>) -> Result<Option<Tensor>> {
        if let Some(torch) = &self.torch
            && torch.is_plain(object)?
        {
            return self.local(torch, object, torch.flags(object)?).map(Some);
        }
        if let Some(numpy) = &self.numpy
            && numpy.is_array(object)
        {
            return self.array(numpy, object).map(Some);
        }
        self.borrow(object)?.map(|other| self.other(other)).transpose()
    }

    /// What is no typed leaf: pickled if the caller allows it.
    fn opaque(&self, object: &Bound<'py, PyAny>) -> Result<Value> {
        if !self.allow_pickle {
            let class = name_of(&object.get_type());
            return Err(Refusal::leaf(
                format!("an object of class {class} is no typed leaf and cannot be stored"),
                "leave it out, store its fields as tensors, numbers, strs, lists and dicts, or \
                 allow it with allow_pickle=True",
            )
            .into());
        }
        let pickle = self.py.import("cloudpickle").or_else(|_| self.py.import("pickle"))?;
        let bytes = pickle.call_method1("dumps", (object,))?.cast_into::<PyBytes>()?;
        let bytes = Bytes::copy_from_slice(bytes.as_bytes());
        Ok(Value::Opaque { media: PICKLE.into(), bytes })
    }
}

/// A key whose tuples nest no deeper than that; the format then has a limit of its own.
pub(crate) fn key_of(object: &Bound<'_, PyAny>, depth: usize) -> Result<Key> {
    Ok(if object.is_exact_instance_of::<PyString>() {
        Key::Str(text(object)?)
    } else if object.is_exact_instance_of::<PyInt>() {
        Key::Int(int(object)?)
    } else if let Ok(value) = object.cast_exact::<PyBool>() {
        Key::Bool(value.is_true())
    } else if let Ok(value) = object.cast_exact::<PyFloat>() {
        Key::Float(value.value().into())
    } else if object.is_none() {
        Key::None
    } else if let Ok(value) = object.cast_exact::<PyBytes>() {
        Key::Bytes(Bytes::copy_from_slice(value.as_bytes()))
    } else if let Ok(value) = object.cast_exact::<PyTuple>() {
        let depth = depth
            .checked_sub(1)
            .ok_or_else(|| Error::new(ErrorKind::KeyKind).note("tuples nest too deep"))?;
        Key::Tuple(value.iter().map(|key| key_of(&key, depth)).collect::<Result<_>>()?)
    } else {
        let class = name_of(&object.get_type());
        return Err(Refusal::leaf(
            format!("a {class} cannot be a key"),
            "use a str, int, bool, float, None, bytes, or a tuple of them",
        )
        .into());
    })
}

/// The field names of a namedtuple; none if it is another object.
pub(crate) fn fields_of(object: &Bound<'_, PyAny>) -> Result<Option<Vec<Text>>> {
    let Ok(tuple) = object.cast::<PyTuple>() else { return Ok(None) };
    let Some(fields) = object.getattr_opt(intern!(object.py(), "_fields"))? else {
        return Ok(None);
    };
    let Ok(fields) = fields.cast::<PyTuple>() else { return Ok(None) };
    if fields.len() != tuple.len() {
        return Ok(None);
    }
    fields.iter().map(|field| text(&field)).collect::<Result<_>>().map(Some)
}

/// A leaf of Python's own types.
fn plain(object: &Bound<'_, PyAny>) -> Result<Option<Value>> {
    Ok(Some(if object.is_none() {
        Value::None
    } else if let Ok(value) = object.cast_exact::<PyBool>() {
        Value::Bool(value.is_true())
    } else if object.is_exact_instance_of::<PyInt>() {
        Value::Int(int(object)?)
    } else if let Ok(value) = object.cast_exact::<PyFloat>() {
        Value::Float(value.value().into())
    } else if object.is_exact_instance_of::<PyString>() {
        Value::Str(text(object)?)
    } else if let Ok(value) = object.cast_exact::<PyBytes>() {
        Value::Bytes(Bytes::copy_from_slice(value.as_bytes()))
    } else if let Ok(value) = object.cast_exact::<PyComplex>() {
        Value::Complex(value.real().into(), value.imag().into())
    } else {
        return Ok(None);
    }))
}

fn int(object: &Bound<'_, PyAny>) -> Result<tssd_format::Int> {
    match object.extract::<i64>() {
        Ok(small) => Ok(small.into()),
        Err(_) => Ok(object.extract::<BigInt>()?.into()),
    }
}

/// A str; lone surrogates are kept.
pub(crate) fn text(object: &Bound<'_, PyAny>) -> Result<Text> {
    let text = object.cast::<PyString>()?;
    if let Ok(text) = text.to_str() {
        return Ok(text.into());
    }
    let bytes = text.call_method1("encode", ("utf-8", "surrogatepass"))?;
    let bytes = Bytes::copy_from_slice(bytes.cast::<PyBytes>()?.as_bytes());
    Ok(Text::from_generalized_utf8(bytes)?)
}
