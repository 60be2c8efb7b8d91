//! Import of Python objects as values of the format.

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
    AttrValue, Dict, Dtype, Error, ErrorKind, MAX_DEPTH, MapKey, ObjectPath, Region, Shard,
    ShardSpec, StateDict, Step, Storage, TaggedClass, Tensor, TensorFlags, TensorMeta, TensorSlice,
    Text, Value,
};

use crate::cast_rule::CastRule;
use crate::classes::{self, TaggedObject};
use crate::device::DeviceRegions;
use crate::dlpack::{self, ImportedTensor};
use crate::dtensor::{self, MeshCache, TensorSubclass};
use crate::error::{BindingError, Result};
use crate::leaf_import::{FillState, ImportPurpose};
use crate::numpy::Numpy;
use crate::slice::{self, TensorShard};
use crate::torch::Torch;

/// Media tag of pickled objects.
pub(crate) const PICKLE: &str = "application/x-python-pickle";

/// Number of leaves between two signal checks.
const SIGNAL_CHECK_LEAVES: u32 = 1024;

/// A state dict imported from Python.
pub(crate) struct ImportedStateDict {
    pub(crate) dict: StateDict,
    /// The `_metadata` of the ordered dicts, by path.
    pub(crate) module_metadata: serde_json::Map<String, Json>,
    /// The GPU memory of its tensors.
    pub(crate) devices: DeviceRegions,
    /// Whether tensors were omitted because this rank has no shard of them.
    pub(crate) omits_tensors: bool,
    /// The values that are stored as an object of their base class: their fqns and their classes.
    pub(crate) stored_as_base: Vec<(String, String)>,
}

/// Imports a state dict. The memory of its tensors is shared, not copied.
///
/// Each container is read once, so that a concurrent change of it is either seen or not.
pub(crate) fn import_state_dict<'py>(
    object: &Bound<'py, PyAny>,
    allow_pickle: bool,
    transfer: Option<CastRule<'py>>,
) -> Result<ImportedStateDict> {
    let mut importer =
        ValueImporter::new(object.py(), allow_pickle, ImportPurpose::Store(transfer))?;
    let value = importer.import_value(object)?;
    if let Value::Tagged(tag, plain) = &value
        && matches!(**plain, Value::Dict(_))
    {
        let text = format!("a state dict is a dict, this is a {tag}");
        let advice = "convert it with `dict`, or put it into a dict";
        return Err(BindingError::untyped_leaf(text, advice).into());
    }
    let dict = StateDict::from_value(value).map_err(|_| {
        let class = class_name(&object.get_type());
        BindingError::untyped_leaf(
            format!("a state dict is a dict, this is a {class}"),
            "put it into a dict, or pass what its `.state_dict()` returns",
        )
    })?;
    Ok(ImportedStateDict {
        dict,
        module_metadata: importer.metadata,
        devices: importer.devices,
        omits_tensors: importer.omits_tensors,
        stored_as_base: importer.stored_as_base,
    })
}

impl ImportedStateDict {
    /// Returns the attribute with the `_metadata`; `None` if there is no `_metadata`.
    pub(crate) fn module_metadata_attr(&self) -> Option<AttrValue> {
        let text = || Json::Object(self.module_metadata.clone()).to_string();
        (!self.module_metadata.is_empty()).then(|| AttrValue::Text(text().into()))
    }
}

/// Returns the fully qualified name of a class; "?" if it has none.
pub(crate) fn class_name(class: &Bound<'_, PyType>) -> String {
    class.fully_qualified_name().map_or_else(|_| "?".to_owned(), |name| name.to_string())
}

/// A tensor to fill, and its place in a global tensor if it is a shard.
pub(crate) type FillTarget = (Tensor, Option<ShardSpec>);

/// Objects that cannot be filled directly, each with the staging memory that is filled instead.
pub(crate) type StagingPairs<'py> = Vec<(Bound<'py, PyAny>, Bound<'py, PyAny>)>;

/// Importer of the tensors of Python objects that a get fills.
pub(crate) struct TargetImporter<'py>(ValueImporter<'py>);

impl<'py> TargetImporter<'py> {
    pub(crate) fn new(py: Python<'py>) -> Result<Self> {
        ValueImporter::new(py, false, ImportPurpose::Store(None)).map(Self)
    }

    /// Returns the dtype and the global shape of an object; `None` if it is not a tensor.
    ///
    /// The dtype is `None` if this rank has nothing to fill. Rejects tensors that cannot be filled.
    pub(crate) fn dtype_and_shape(
        &self,
        object: &Bound<'py, PyAny>,
    ) -> Result<Option<(Option<Dtype>, Vec<u64>)>> {
        let importer = &self.0;
        let (local, shape) = if let Ok(shard) = object.cast::<TensorShard>() {
            let slices = shard.get().slices(importer.py);
            (shard.get().local().bind(importer.py).clone(), slices[0].global_shape().to_vec())
        } else {
            let is_torch = match &importer.torch {
                Some(torch) => torch.is_tensor(object)?,
                None => false,
            };
            if !is_torch && !importer.numpy.as_ref().is_some_and(|numpy| numpy.is_array(object)) {
                let foreign = importer.import_dlpack(object)?;
                return Ok(foreign
                    .map(|foreign| (Some(foreign.meta.dtype()), foreign.meta.shape().to_vec())));
            }
            let shape = object.getattr("shape")?.extract()?;
            if is_torch
                && dtensor::declares_chunks(object)?
                && let TensorSubclass::Chunks(chunks) = dtensor::decompose(object)?
            {
                // The dtype of the outer tensor can differ from that of its local tensors.
                match chunks.locals.into_iter().next() {
                    Some((first, _)) => (first, shape),
                    None => return Ok(Some((None, shape))),
                }
            } else {
                (object.clone(), shape)
            }
        };
        if let Some(foreign) = importer.import_dlpack(&local)? {
            return Ok(Some((Some(foreign.meta.dtype()), shape)));
        }
        let dtype = local.getattr("dtype")?;
        let format_dtype = match (&importer.torch, &importer.numpy) {
            (Some(torch), _) if torch.is_tensor(&local)? => {
                Torch::check_fillable(&local)?;
                torch.to_dtype(&dtype)
            }
            (_, Some(numpy)) => {
                Numpy::check_fillable(&local)?;
                Some(numpy.to_dtype(&dtype)?)
            }
            _ => None,
        };
        let format_dtype = format_dtype.ok_or_else(|| {
            BindingError::untyped_leaf(
                format!("the format has no {dtype}"),
                "fill a tensor of another dtype",
            )
        })?;
        Ok(Some((Some(format_dtype), shape)))
    }

    /// Decomposes a tensor that wraps tensors, or a DTensor of one; `None` for any other object.
    pub(crate) fn decompose_wrapper(
        &self,
        object: &Bound<'py, PyAny>,
    ) -> Result<Option<TaggedObject<'py>>> {
        match &self.0.torch {
            Some(torch) if torch.is_tensor(object)? && !torch.is_builtin_class(object)? => {
                dtensor::decompose_wrapper(&dtensor::wait_for_collective(object)?)
            }
            _ => Ok(None),
        }
    }

    /// Returns the tensors of an object, to be filled with elements of the stored dtype.
    ///
    /// A tensor that cannot be filled directly is replaced by staging memory. If `is_buffered`, each tensor is.
    pub(crate) fn import_targets(
        &mut self,
        object: &Bound<'py, PyAny>,
        stored: Dtype,
        is_buffered: bool,
    ) -> Result<(Vec<FillTarget>, StagingPairs<'py>)> {
        self.0.purpose = ImportPurpose::Fill(FillState::new(stored, is_buffered));
        let targets = self.0.import_targets(object)?.ok_or_else(|| {
            BindingError::untyped_leaf(
                "`into` is no tensor",
                "give a tensor, a TensorShard or an array",
            )
        })?;
        let ImportPurpose::Fill(filling) = &self.0.purpose else {
            unreachable!("it was just made")
        };
        Ok((targets, filling.staging.take()))
    }

    /// Allocates a tensor of torch, to be filled with stored elements from which another is computed.
    ///
    /// It is on the device of `result`, unless the store cannot fill memory there, or it `is_on_host`.
    pub(crate) fn allocate_source(
        &self,
        result: &Bound<'py, PyAny>,
        meta: &TensorMeta,
        is_on_host: bool,
    ) -> Result<(Bound<'py, PyAny>, Tensor)> {
        let py = result.py();
        let Some(torch) =
            self.0.torch.as_ref().filter(|_| result.hasattr("is_cuda").unwrap_or(false))
        else {
            let advice = "give a tensor of torch";
            return Err(BindingError::untyped_leaf("only torch computes it", advice).into());
        };
        let shape = PyTuple::new(py, meta.shape())?;
        let allocate = |device: Bound<'py, PyAny>| -> Result<Bound<'py, PyAny>> {
            let options = PyDict::new(py);
            options.set_item("dtype", torch.torch_dtype(meta.dtype())?)?;
            options.set_item("device", device)?;
            Ok(torch.module.getattr("empty")?.call((&shape,), Some(&options))?)
        };
        let flags = TensorFlags::default();
        if !is_on_host {
            let source = allocate(result.getattr("device")?)?;
            if let Ok(tensor) = torch.try_share(&source, flags, self.devices())? {
                return Ok((source, tensor));
            }
        }
        let source = allocate(PyString::new(py, "cpu").into_any())?;
        let tensor = torch.import_tensor(&source, flags, self.devices())?;
        Ok((source, tensor))
    }

    /// Returns the GPU memory of the tensors to fill.
    pub(crate) fn devices(&self) -> &DeviceRegions {
        &self.0.devices
    }
}

struct ValueImporter<'py> {
    py: Python<'py>,
    torch: Option<Torch<'py>>,
    numpy: Option<Numpy<'py>>,
    ordered_dict: Bound<'py, PyAny>,
    allow_pickle: bool,
    path: Vec<Step>,
    leaf_count: u32,
    metadata: serde_json::Map<String, Json>,
    meshes: MeshCache<'py>,
    purpose: ImportPurpose<'py>,
    devices: DeviceRegions,
    omits_tensors: bool,
    stored_as_base: Vec<(String, String)>,
    /// Whether the value that is imported is inside a tensor wrapper.
    is_in_wrapper: bool,
}

impl<'py> ValueImporter<'py> {
    fn new(py: Python<'py>, allow_pickle: bool, purpose: ImportPurpose<'py>) -> Result<Self> {
        Ok(Self {
            py,
            torch: Torch::if_imported(py)?,
            numpy: Numpy::if_imported(py)?,
            ordered_dict: py.import("collections")?.getattr("OrderedDict")?,
            allow_pickle,
            path: Vec::new(),
            leaf_count: 0,
            metadata: serde_json::Map::new(),
            meshes: MeshCache::default(),
            purpose,
            devices: DeviceRegions::default(),
            omits_tensors: false,
            stored_as_base: Vec::new(),
            is_in_wrapper: false,
        })
    }

    fn current_path(&self) -> ObjectPath {
        self.path.iter().cloned().collect()
    }

    fn import_value(&mut self, object: &Bound<'py, PyAny>) -> Result<Value> {
        if let Some(container) = self.import_container(object)? {
            return Ok(container);
        }
        self.leaf_count += 1;
        if self.leaf_count.is_multiple_of(SIGNAL_CHECK_LEAVES) {
            self.py.check_signals()?;
        }
        self.import_leaf(object).map_err(|error| error.with_path(&self.current_path()))
    }

    fn import_container(&mut self, object: &Bound<'py, PyAny>) -> Result<Option<Value>> {
        let class = object.get_type();
        let value = if let Ok(dict) = object.cast_exact::<PyDict>() {
            self.check_depth()?;
            // A copy of the items, which a concurrent change of the dict does not affect.
            Value::Dict(self.import_dict(&dict.items())?)
        } else if class.is(&self.ordered_dict) {
            self.check_depth()?;
            self.import_metadata(object)?;
            // The order of an `OrderedDict` differs from that of the underlying dict.
            let items = object.call_method0(intern!(self.py, "items"))?;
            let items = self.py.get_type::<PyList>().call1((items,))?;
            Value::OrderedDict(self.import_dict(items.cast()?)?)
        } else if let Ok(list) = object.cast_exact::<PyList>() {
            self.check_depth()?;
            Value::List(self.import_values(list.to_tuple().iter())?)
        } else if let Ok(tuple) = object.cast_exact::<PyTuple>() {
            self.check_depth()?;
            Value::Tuple(self.import_values(tuple.iter())?)
        } else if let Some(fields) = namedtuple_fields(object)? {
            self.check_depth()?;
            let values = object.cast::<PyTuple>()?;
            let mut dict = Dict::new();
            for (field, value) in fields.iter().zip(values.iter()) {
                let value = self.import_element(Step::Key(MapKey::Str(field.clone())), &value)?;
                dict.insert(MapKey::Str(field.clone()), value);
            }
            Value::NamedTuple(to_text(class.name()?.as_any())?, dict)
        } else {
            return Ok(None);
        };
        Ok(Some(value))
    }

    /// Rejects containers that are nested too deep, before recursing: a dict can contain itself.
    fn check_depth(&self) -> Result<()> {
        if self.path.len() < MAX_DEPTH {
            return Ok(());
        }
        let note = "does a container hold itself?";
        Err(Error::new(ErrorKind::TooDeep)
            .with_path(self.current_path().fqn())
            .with_detail(note)
            .into())
    }

    /// Imports an object in a container; `None` for a tensor of which this rank has no shard.
    ///
    /// Tables that declare their own offsets can be such tensors. Not even their dtype is known.
    fn import_child(&mut self, step: Step, object: &Bound<'py, PyAny>) -> Result<Option<Value>> {
        self.path.push(step);
        let value = self.import_value(object)?;
        self.path.pop();
        let is_empty = matches!(&value, Value::Shards(shards) if shards.is_empty());
        self.omits_tensors |= is_empty;
        Ok((!is_empty).then_some(value))
    }

    /// Imports an object in a container that cannot omit an entry.
    fn import_element(&mut self, step: Step, object: &Bound<'py, PyAny>) -> Result<Value> {
        let value = self.import_child(step.clone(), object)?;
        value.ok_or_else(|| {
            self.path.push(step);
            let text = "a tensor of which this rank has nothing leaves a gap in what it lies in";
            let refusal = BindingError::untyped_leaf(text, "put it into a dict")
                .with_path(&self.current_path());
            self.path.pop();
            refusal.into()
        })
    }

    fn import_dict(&mut self, items: &Bound<'py, PyList>) -> Result<Dict> {
        let mut dict = Dict::new();
        for item in items.iter() {
            let (key, value) = (item.get_item(0)?, item.get_item(1)?);
            let key = self.import_key(&key)?;
            if let Some(value) = self.import_child(Step::Key(key.clone()), &value)?
                && dict.insert(key.clone(), value).is_some()
            {
                return Err(self.collision(&key).into());
            }
        }
        Ok(dict)
    }

    fn import_values(
        &mut self,
        objects: impl Iterator<Item = Bound<'py, PyAny>>,
    ) -> Result<Vec<Value>> {
        (0..)
            .zip(objects)
            .map(|(index, object)| self.import_element(Step::Index(index), &object))
            .collect()
    }

    /// Imports the `_metadata` that torch modules attach to their state dicts.
    fn import_metadata(&mut self, dict: &Bound<'py, PyAny>) -> Result<()> {
        let Some(metadata) = dict.getattr_opt(intern!(self.py, "_metadata"))? else {
            return Ok(());
        };
        let json = self.py.import("json")?;
        let invalid_metadata = |_| {
            BindingError::untyped_leaf(
                "its `_metadata` is no JSON",
                "make it one of strs, numbers, bools, None, lists and dicts with str keys",
            )
            .with_path(&self.current_path())
        };
        let json_text = json.call_method1("dumps", (&metadata,)).map_err(invalid_metadata)?;
        let parsed = json.call_method1("loads", (&json_text,))?;
        if !parsed.eq(&metadata)? {
            return Err(invalid_metadata(PyTypeError::new_err(())).into());
        }
        let json = serde_json::from_str(json_text.cast::<PyString>()?.to_str()?);
        let json =
            json.map_err(|error| invalid_metadata(PyTypeError::new_err(error.to_string())))?;
        self.metadata.insert(self.current_path().to_string(), json);
        Ok(())
    }

    fn import_leaf(&mut self, object: &Bound<'py, PyAny>) -> Result<Value> {
        if let Some(torch) = &self.torch
            && torch.is_builtin_class(object)?
        {
            return Ok(Value::Tensor(self.import_torch(torch, object, torch.flags(object)?)?));
        }
        if let Some(value) = import_plain(object)? {
            return Ok(value);
        }
        if let Some(value) = self.import_torch_object(object)? {
            return Ok(value);
        }
        if let Some(numpy) = &self.numpy {
            if numpy.is_array(object) {
                return Ok(Value::Tensor(self.import_numpy(numpy, object)?));
            }
            // `numpy.str_` and `numpy.bytes_` are subclasses of builtin classes.
            let is_text = object.is_instance_of::<PyString>() || object.is_instance_of::<PyBytes>();
            if !is_text && numpy.is_scalar(object)? {
                return Ok(Value::Tensor(numpy.import_scalar(object)?));
            }
            if numpy.is_any_array(object)? {
                let class = class_name(&object.get_type());
                return Err(BindingError::untyped_leaf(
                    format!("an array of class {class} cannot be stored"),
                    "convert it with `numpy.asarray`, and store what that loses beside it",
                )
                .into());
            }
        }
        if let Ok(shard) = object.cast::<TensorShard>() {
            return self.import_shard(shard.get());
        }
        if let Some(value) = self.import_as_plain(object)? {
            return Ok(value);
        }
        match self.import_dlpack(object)? {
            Some(other) => Ok(Value::Tensor(self.import_foreign(other)?)),
            None => self.import_opaque(object),
        }
    }

    /// Imports an object with a class tag, or one of a subclass of a builtin class; `None` for any other object.
    fn import_as_plain(&mut self, object: &Bound<'py, PyAny>) -> Result<Option<Value>> {
        match classes::decompose(object)? {
            Some(Ok(tagged)) => return self.import_tagged(&tagged).map(Some),
            Some(Err(refusal)) if !self.allow_pickle => {
                return Err(refusal.into_untyped_leaf().into());
            }
            // A pickle keeps the class.
            _ if self.allow_pickle => return Ok(None),
            _ => {}
        }
        let Some(base) = classes::to_base(object)? else { return Ok(None) };
        self.stored_as_base.push((self.current_path().fqn(), class_name(&object.get_type())));
        self.import_value(&base).map(Some)
    }

    /// Imports a key of a dict or an element of a set in the current container.
    ///
    /// A key has no place for a pickle, so a key of a subclass is stored as its base in any case.
    fn import_key(&mut self, object: &Bound<'py, PyAny>) -> Result<MapKey> {
        let key =
            to_map_key(object, MAX_DEPTH).map_err(|error| error.with_path(&self.current_path()))?;
        if let Some(class) = subclass_in_key(object) {
            let path = self.current_path().key(key.clone());
            self.stored_as_base.push((format!("{} (key)", path.fqn()), class));
        }
        Ok(key)
    }

    /// Returns the error for two keys that are different in Python and have one base.
    fn collision(&self, key: &MapKey) -> Error {
        let path = self.current_path().key(key.clone());
        Error::new(ErrorKind::KeysCollide)
            .with_path(path)
            .with_detail("two keys of subclasses are equal as their base")
    }

    /// Imports a plain object that has a class tag.
    fn import_tagged(&mut self, tagged: &TaggedObject<'py>) -> Result<Value> {
        let tag = tagged.tag()?;
        if !matches!(tag.class(), TaggedClass::Set | TaggedClass::FrozenSet) {
            return Ok(Value::Tagged(tag, self.import_value(&tagged.plain)?.into()));
        }
        self.check_depth()?;
        let mut elements = Dict::new();
        for element in tagged.plain.try_iter()? {
            let element = self.import_key(&element?)?;
            if elements.insert(element.clone(), Value::None).is_some() {
                return Err(self.collision(&element).into());
            }
        }
        let elements = elements.iter().map(|(element, _)| element.clone());
        Ok(match tag.class() {
            TaggedClass::Set => Value::set(elements)?,
            _ => Value::frozenset(elements)?,
        })
    }

    /// Imports an array of a third framework through DLPack; `None` for any other object.
    fn import_dlpack(&self, object: &Bound<'py, PyAny>) -> Result<Option<ImportedTensor>> {
        let is_tensor = self.torch.as_ref().map(|torch| torch.is_tensor(object)).transpose()?;
        let is_array = self.numpy.as_ref().map(|numpy| numpy.is_any_array(object)).transpose()?;
        if is_tensor == Some(true) || is_array == Some(true) {
            return Ok(None);
        }
        dlpack::import_tensor(object)
    }

    /// Imports an array of another framework, to be stored or filled.
    fn import_foreign(&self, borrowed: ImportedTensor) -> Result<Tensor> {
        self.purpose.import_foreign(&self.devices, borrowed, || self.current_path().fqn())
    }

    /// Imports a plain torch tensor.
    fn import_torch(
        &self,
        torch: &Torch<'py>,
        tensor: &Bound<'py, PyAny>,
        flags: TensorFlags,
    ) -> Result<Tensor> {
        if self.is_in_wrapper {
            // A cast of the inner tensors would change the elements of the wrapper.
            return torch.import_tensor(tensor, flags, &self.devices);
        }
        self.purpose.import_torch(torch, &self.devices, tensor, flags, || self.current_path().fqn())
    }

    /// Imports a plain numpy array.
    fn import_numpy(&self, numpy: &Numpy<'py>, array: &Bound<'py, PyAny>) -> Result<Tensor> {
        self.purpose.import_numpy(numpy, array, || self.current_path().fqn())
    }

    fn import_torch_object(&mut self, object: &Bound<'py, PyAny>) -> Result<Option<Value>> {
        let Some(torch) = &self.torch else { return Ok(None) };
        if torch.is_tensor(object)? {
            return self.import_tensor_subclass(object).map(Some);
        }
        if let Some(dtype) = torch.to_dtype(object) {
            return Ok(Some(Value::Dtype(dtype)));
        }
        let class = object.get_type();
        if class.is(torch.module.getattr(intern!(self.py, "Size"))?) {
            return Ok(Some(Value::Size(object.extract::<Vec<i64>>()?.into())));
        }
        if class.is(torch.module.getattr(intern!(self.py, "device"))?) {
            return Ok(Some(Value::Device(to_text(object.str()?.as_any())?)));
        }
        Ok(None)
    }

    /// Imports a tensor whose class is neither `torch.Tensor` nor `Parameter`.
    fn import_tensor_subclass(&mut self, object: &Bound<'py, PyAny>) -> Result<Value> {
        let torch = self.torch.as_ref().expect("it is a tensor");
        let object = dtensor::wait_for_collective(object)?;
        let flags = torch.flags(&object)?;
        if torch.is_builtin_class(&object)? {
            return Ok(Value::Tensor(self.import_torch(torch, &object, flags)?));
        }
        let shards = match dtensor::decompose(&object)? {
            TensorSubclass::Chunks(chunks) => {
                let part = self.purpose.part();
                let mut shards = Vec::new();
                for (index, (local, mut offsets)) in chunks.locals.into_iter().enumerate() {
                    if let Some(part) = part {
                        if !part.local_indices.contains(&index) {
                            continue;
                        }
                        let box_offsets = part.region.iter().flat_map(Region::offsets);
                        let offsets = offsets.iter_mut().zip(box_offsets);
                        offsets.for_each(|(start, by)| *start = start.saturating_add(*by));
                    }
                    let tensor = self.import_torch(torch, &local, flags)?;
                    let shape = tensor.meta().shape();
                    let slice = TensorSlice::new(&offsets, shape, &chunks.global_shape)?;
                    shards.push(Shard::new(tensor, ShardSpec::new(slice))?);
                }
                shards
            }
            TensorSubclass::Wrapper(tagged) => {
                if let ImportPurpose::Fill(_) = self.purpose {
                    let class = class_name(&object.get_type());
                    return Err(BindingError::untyped_leaf(
                        format!("a tensor of class {class} cannot be filled"),
                        "get it without `into`, and copy it",
                    )
                    .into());
                }
                let is_in_wrapper = std::mem::replace(&mut self.is_in_wrapper, true);
                let value = self.import_tagged(&tagged);
                self.is_in_wrapper = is_in_wrapper;
                return value;
            }
            TensorSubclass::DTensor(parts) => {
                let places = parts.places(&self.meshes.get_or_convert(&parts.mesh)?)?;
                let mut local = self.import_torch(torch, &parts.local, flags)?;
                if !parts.is_in_mesh() {
                    // torch gives the local tensor one dimension, regardless of the global tensor.
                    let local_shape = places[0].slice().local_shape();
                    let meta =
                        TensorMeta::new(local.meta().dtype(), local_shape)?.with_flags(flags);
                    local = Tensor::new(meta, Storage::default(), 0)?;
                }
                self.split_shards(&local, places)?
            }
        };
        Ok(Value::Shards(shards))
    }

    fn import_targets(&mut self, object: &Bound<'py, PyAny>) -> Result<Option<Vec<FillTarget>>> {
        let is_torch = match &self.torch {
            Some(torch) => torch.is_tensor(object)?,
            None => false,
        };
        let is_array = self.numpy.as_ref().is_some_and(|numpy| numpy.is_array(object));
        let is_shard = object.cast::<TensorShard>().is_ok();
        if !is_torch && !is_array && !is_shard && !object.hasattr("__dlpack__")? {
            return Ok(None);
        }
        Ok(Some(match self.import_leaf(object)? {
            Value::Tensor(tensor) => vec![(tensor, None)],
            Value::Shards(shards) => {
                let to_target = |shard: Shard| (shard.tensor().clone(), Some(shard.spec().clone()));
                shards.into_iter().map(to_target).collect()
            }
            _ => return Ok(None),
        }))
    }

    fn import_shard(&self, shard: &TensorShard) -> Result<Value> {
        let local = shard.local().bind(self.py);
        let tensor = self.import_plain_tensor(local)?.ok_or_else(|| {
            let class = class_name(&local.get_type());
            BindingError::untyped_leaf(
                format!("the local part of a TensorShard is a {class}"),
                "give it a plain tensor of torch or an array of numpy",
            )
        })?;
        Ok(Value::Shards(self.split_shards(&tensor, shard.places(self.py)?)?))
    }

    /// Splits a local tensor, or the part of it that is imported, into its boxes.
    fn split_shards(&self, local: &Tensor, mut places: Vec<ShardSpec>) -> Result<Vec<Shard>> {
        if let Some(region) = self.purpose.part().and_then(|part| part.region.as_ref()) {
            places = slice::intersect_places(&places, region)?;
        }
        let slices: Vec<TensorSlice> = places.iter().map(|place| place.slice().clone()).collect();
        let locals = slice::split_local(local, &slices)?;
        let shards = locals.into_iter().zip(places);
        Ok(shards.map(|(local, place)| Shard::new(local, place)).collect::<Result<_, Error>>()?)
    }

    fn import_plain_tensor(&self, object: &Bound<'py, PyAny>) -> Result<Option<Tensor>> {
        if let Some(torch) = &self.torch
            && torch.is_builtin_class(object)?
        {
            return self.import_torch(torch, object, torch.flags(object)?).map(Some);
        }
        if let Some(numpy) = &self.numpy
            && numpy.is_array(object)
        {
            return self.import_numpy(numpy, object).map(Some);
        }
        self.import_dlpack(object)?.map(|other| self.import_foreign(other)).transpose()
    }

    /// Imports an object that is not a typed leaf: pickles it if the caller allows that.
    fn import_opaque(&self, object: &Bound<'py, PyAny>) -> Result<Value> {
        if !self.allow_pickle {
            let class = class_name(&object.get_type());
            return Err(BindingError::untyped_leaf(
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

/// Converts a key whose tuples are nested at most `depth` deep. The format has a limit of its own.
///
/// A key of a subclass of a builtin class becomes one of that class.
pub(crate) fn to_map_key(object: &Bound<'_, PyAny>, depth: usize) -> Result<MapKey> {
    Ok(if object.is_exact_instance_of::<PyString>() {
        MapKey::Str(to_text(object)?)
    } else if object.is_exact_instance_of::<PyInt>() {
        MapKey::Int(to_int(object)?)
    } else if let Ok(value) = object.cast_exact::<PyBool>() {
        MapKey::Bool(value.is_true())
    } else if let Ok(value) = object.cast_exact::<PyFloat>() {
        MapKey::Float(value.value().into())
    } else if object.is_none() {
        MapKey::None
    } else if let Ok(value) = object.cast_exact::<PyBytes>() {
        MapKey::Bytes(Bytes::copy_from_slice(value.as_bytes()))
    } else if let Ok(value) = object.cast_exact::<PyTuple>() {
        let depth = depth
            .checked_sub(1)
            .ok_or_else(|| Error::new(ErrorKind::KeyKind).with_detail("tuples nest too deep"))?;
        MapKey::Tuple(value.iter().map(|key| to_map_key(&key, depth)).collect::<Result<_>>()?)
    } else if let Some(base) = classes::to_base(object)? {
        to_map_key(&base, depth)?
    } else {
        let class = class_name(&object.get_type());
        return Err(BindingError::untyped_leaf(
            format!("a {class} cannot be a key"),
            "use a str, int, bool, float, None, bytes, or a tuple of them",
        )
        .into());
    })
}

/// Returns the class of a key, or of an element of a tuple in it, that is a subclass of a builtin class.
fn subclass_in_key(key: &Bound<'_, PyAny>) -> Option<String> {
    if let Ok(elements) = key.cast_exact::<PyTuple>() {
        return elements.iter().find_map(|element| subclass_in_key(&element));
    }
    let is_builtin = key.is_exact_instance_of::<PyString>()
        || key.is_exact_instance_of::<PyInt>()
        || key.is_exact_instance_of::<PyBool>()
        || key.is_exact_instance_of::<PyFloat>()
        || key.is_exact_instance_of::<PyBytes>()
        || key.is_none();
    (!is_builtin).then(|| class_name(&key.get_type()))
}

/// Returns the field names of a namedtuple; `None` for any other object.
pub(crate) fn namedtuple_fields(object: &Bound<'_, PyAny>) -> Result<Option<Vec<Text>>> {
    let Ok(tuple) = object.cast::<PyTuple>() else { return Ok(None) };
    let Some(fields) = object.getattr_opt(intern!(object.py(), "_fields"))? else {
        return Ok(None);
    };
    let Ok(fields) = fields.cast::<PyTuple>() else { return Ok(None) };
    if fields.len() != tuple.len() {
        return Ok(None);
    }
    fields.iter().map(|field| to_text(&field)).collect::<Result<_>>().map(Some)
}

/// Imports a leaf of a builtin Python type; `None` for any other object.
fn import_plain(object: &Bound<'_, PyAny>) -> Result<Option<Value>> {
    Ok(Some(if object.is_none() {
        Value::None
    } else if let Ok(value) = object.cast_exact::<PyBool>() {
        Value::Bool(value.is_true())
    } else if object.is_exact_instance_of::<PyInt>() {
        Value::Int(to_int(object)?)
    } else if let Ok(value) = object.cast_exact::<PyFloat>() {
        Value::Float(value.value().into())
    } else if object.is_exact_instance_of::<PyString>() {
        Value::Str(to_text(object)?)
    } else if let Ok(value) = object.cast_exact::<PyBytes>() {
        Value::Bytes(Bytes::copy_from_slice(value.as_bytes()))
    } else if let Ok(value) = object.cast_exact::<PyComplex>() {
        Value::Complex(value.real().into(), value.imag().into())
    } else {
        return Ok(None);
    }))
}

fn to_int(object: &Bound<'_, PyAny>) -> Result<tssd_format::Int> {
    match object.extract::<i64>() {
        Ok(small) => Ok(small.into()),
        Err(_) => Ok(object.extract::<BigInt>()?.into()),
    }
}

/// Converts a str. Lone surrogates are kept.
pub(crate) fn to_text(object: &Bound<'_, PyAny>) -> Result<Text> {
    let text = object.cast::<PyString>()?;
    if let Ok(text) = text.to_str() {
        return Ok(text.into());
    }
    let bytes = text.call_method1("encode", ("utf-8", "surrogatepass"))?;
    let bytes = Bytes::copy_from_slice(bytes.cast::<PyBytes>()?.as_bytes());
    Ok(Text::from_generalized_utf8(bytes)?)
}
