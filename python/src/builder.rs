//! Construction of Python objects from the nodes of an archive.

use std::cell::OnceCell;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use pyo3::exceptions::PyImportError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyComplex, PyDict, PyFloat, PyList, PyString, PyTuple};
use serde_json::Value as Json;
use tssd_format::{
    Archive, AttrValue, Attrs, ClassTag, Container, ContentKind, Dtype, Error, ErrorKind,
    FILES_KEY, MapKey, Node, ObjectPath, PACKED_FILES_ATTR, Placement, Step, TaggedClass,
    TensorFlags, TensorReference, TensorSlice, Text, Value,
};

use crate::classes;
use crate::dtensor::encode_placement;
use crate::error::{BindingError, Failure, Result, value_error};
use crate::gc_pause::GcPause;
use crate::importer::PICKLE;
use crate::memory::MemoryBlock;
use crate::numpy::Numpy;
use crate::slice::{TensorShard, box_index, local_offsets};
use crate::torch::Torch;

/// DTensors whose local tensor is a wrapper.
mod sharded_wrapper;

use self::sharded_wrapper::is_sharded_wrapper;

/// Attribute with the `_metadata` of ordered dicts: a JSON object whose keys are their paths.
pub(crate) const MODULE_METADATA_ATTR: &str = "tssd.module_metadata";

/// Number of leaves between two signal checks.
const SIGNAL_CHECK_LEAVES: u32 = 1024;

/// Framework of the tensors that are created.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Framework {
    Torch,
    Numpy,
}

impl Framework {
    /// Parses the name of a framework. Without a name: torch, or numpy if torch is not installed.
    pub(crate) fn parse(py: Python<'_>, name: Option<&str>) -> Result<Self> {
        match name {
            Some("pt" | "torch" | "pytorch") => Ok(Self::Torch),
            Some("np" | "numpy") => Ok(Self::Numpy),
            None => match py.import("torch") {
                Ok(_) => Ok(Self::Torch),
                Err(error) if error.is_instance_of::<PyImportError>(py) => Ok(Self::Numpy),
                Err(error) => Err(error.into()),
            },
            Some(other) => {
                let message = format!("framework is \"torch\" or \"numpy\", not {other:?}");
                Err(value_error(message).into())
            }
        }
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Torch => "torch",
            Self::Numpy => "numpy",
        }
    }

    /// Returns the dtype object of the framework.
    pub(crate) fn py_dtype(self, py: Python<'_>, dtype: Dtype) -> Result<Bound<'_, PyAny>> {
        match self {
            Self::Torch => Ok(Torch::import(py)?.torch_dtype(dtype)?.clone()),
            Self::Numpy => Numpy::import(py)?.numpy_dtype(dtype),
        }
    }
}

/// Returns whether the slices are all regions that the placements assign to their rank.
///
/// An archive of a version that was published in parts has some of them. It has none of a replica that another rank
/// stores.
fn covers_rank(first: &TensorSlice, placements: &[Placement], slices: &[TensorSlice]) -> bool {
    let Some(coordinates) = first.coordinates() else {
        return slices.iter().all(|slice| slice.region().is_empty());
    };
    let (global, mesh) = (first.global_shape(), first.mesh_shape());
    Placement::local_regions(global, mesh, coordinates, placements)
        .is_ok_and(|regions| regions.iter().eq(slices.iter().map(TensorSlice::region)))
}

/// Returns the path of a leaf.
fn object_path(path: &[&Step]) -> ObjectPath {
    path.iter().copied().cloned().collect()
}

/// Source of the bytes of storages.
pub(crate) trait StorageSource {
    /// Returns a block of a storage, and the offset of the block in the storage, in bytes.
    ///
    /// It is called at most once per storage.
    fn block(&self, storage: u32) -> Result<(MemoryBlock, u64)>;
}

/// Contents from which Python objects are built.
pub(crate) trait ArchiveContents {
    /// Returns the tree.
    fn structure(&self) -> Arc<Node>;

    /// Returns the attributes of the whole.
    fn attrs(&self) -> Attrs;

    /// Returns the bytes of a leaf that is not a tensor.
    fn storage_bytes(&self, storage: u32) -> Result<Bytes>;
}

impl ArchiveContents for Archive {
    fn structure(&self) -> Arc<Node> {
        Arc::new(Self::structure(self))
    }

    fn attrs(&self) -> Attrs {
        Self::attrs(self)
    }

    fn storage_bytes(&self, storage: u32) -> Result<Bytes> {
        Ok(self.storage_bytes(storage)?)
    }
}

/// Builder of Python objects from the nodes of an archive. Tensors of one storage share memory.
pub(crate) struct ObjectBuilder<'py, 'a> {
    py: Python<'py>,
    contents: &'a dyn ArchiveContents,
    source: &'a dyn StorageSource,
    framework: Framework,
    torch: OnceCell<Torch<'py>>,
    numpy: OnceCell<Numpy<'py>>,
    device: Option<Bound<'py, PyAny>>,
    device_mesh: Option<Bound<'py, PyAny>>,
    allow_pickle: bool,
    metadata: serde_json::Map<String, Json>,
    storages: BTreeMap<u32, CachedStorage<'py>>,
    named_tuples: Vec<(Text, Vec<Text>, Bound<'py, PyAny>)>,
    leaf_count: u32,
}

/// Bytes of a storage that were loaded before.
struct CachedStorage<'py> {
    /// Offset of the bytes in the storage of the archive.
    start: u64,
    /// A numpy array or torch tensor on the host that spans all of the bytes.
    host: Bound<'py, PyAny>,
    /// Copy on the device, if the device is not the host.
    device_copy: Option<Bound<'py, PyAny>>,
}

impl<'py> CachedStorage<'py> {
    /// Returns the storage for torch tensors: on the device if there is a copy, else on the host.
    fn untyped(&self) -> Result<Bound<'py, PyAny>> {
        let tensor = self.device_copy.as_ref().unwrap_or(&self.host);
        Ok(tensor.call_method0(intern!(tensor.py(), "untyped_storage"))?)
    }
}

impl<'py, 'a> ObjectBuilder<'py, 'a> {
    pub(crate) fn new(
        py: Python<'py>,
        contents: &'a dyn ArchiveContents,
        source: &'a dyn StorageSource,
        framework: Framework,
    ) -> Self {
        Self {
            py,
            contents,
            source,
            framework,
            torch: OnceCell::new(),
            numpy: OnceCell::new(),
            device: None,
            device_mesh: None,
            allow_pickle: false,
            metadata: serde_json::Map::new(),
            storages: BTreeMap::new(),
            named_tuples: Vec::new(),
            leaf_count: 0,
        }
    }

    /// Sets the device of the tensors; `None` or "cpu": the host.
    pub(crate) fn on_device(mut self, device: Option<Bound<'py, PyAny>>) -> Result<Self> {
        let Some(device) = device else { return Ok(self) };
        if device.str()?.to_str()? == "cpu" {
            return Ok(self);
        }
        if self.framework == Framework::Numpy {
            let message = format!("numpy has no device {device}: load it with torch");
            return Err(value_error(message).into());
        }
        self.device = Some(device);
        Ok(self)
    }

    /// Sets the mesh on which shards become DTensors.
    pub(crate) fn on_mesh(mut self, mesh: Option<Bound<'py, PyAny>>) -> Self {
        self.device_mesh = mesh;
        self
    }

    pub(crate) fn allow_pickle(mut self, allow: bool) -> Self {
        self.allow_pickle = allow;
        self
    }

    /// Builds the state dict.
    pub(crate) fn build_state_dict(mut self) -> Result<Bound<'py, PyAny>> {
        if let Some(AttrValue::Text(text)) = self.contents.attrs().get(MODULE_METADATA_ATTR) {
            // Another writer may have made the file, so an invalid attribute is ignored.
            if let Ok(Json::Object(metadata)) = serde_json::from_slice(text.as_bytes()) {
                self.metadata = metadata;
            }
        }
        let mut structure = self.contents.structure();
        if self.contents.attrs().contains_key(PACKED_FILES_ATTR)
            && let Node::Container(_, children) = Arc::make_mut(&mut structure)
        {
            let files = Step::Key(MapKey::from(FILES_KEY));
            children.retain(|(step, _)| *step != files);
        }
        let _pause = GcPause::new(self.py)?;
        self.build(&mut Vec::new(), &structure)
    }

    fn torch(&self) -> Result<&Torch<'py>> {
        if let Some(torch) = self.torch.get() {
            return Ok(torch);
        }
        let torch = Torch::import(self.py)?;
        Ok(self.torch.get_or_init(|| torch))
    }

    fn numpy(&self) -> Result<&Numpy<'py>> {
        if let Some(numpy) = self.numpy.get() {
            return Ok(numpy);
        }
        let numpy = Numpy::import(self.py)?;
        Ok(self.numpy.get_or_init(|| numpy))
    }

    /// Builds the object of the node at this path.
    fn build<'n>(&mut self, path: &mut Vec<&'n Step>, node: &'n Node) -> Result<Bound<'py, PyAny>> {
        let (container, children) = match node {
            Node::Container(container, children) => (container, children),
            leaf => {
                self.leaf_count += 1;
                if self.leaf_count.is_multiple_of(SIGNAL_CHECK_LEAVES) {
                    self.py.check_signals()?;
                }
                return self.build_leaf(leaf).map_err(|error| error.with_path(&object_path(path)));
            }
        };
        self.build_container(path, container, children)
    }

    fn build_container<'n>(
        &mut self,
        path: &mut Vec<&'n Step>,
        container: &Container,
        children: &'n [(Step, Node)],
    ) -> Result<Bound<'py, PyAny>> {
        match container {
            Container::Tagged(tag) => self
                .build_tagged(path, *tag, children)
                .map_err(|error| error.with_path(&object_path(path))),
            Container::Dict | Container::Divergent => {
                let dict = PyDict::new(self.py);
                for (step, child) in children {
                    let (key, value) = self.build_entry(path, step, child)?;
                    dict.set_item(key, value)?;
                }
                Ok(dict.into_any())
            }
            Container::OrderedDict => self.ordered_dict(path, children),
            Container::List => {
                Ok(PyList::new(self.py, self.build_values(path, children)?)?.into_any())
            }
            Container::Tuple => {
                Ok(PyTuple::new(self.py, self.build_values(path, children)?)?.into_any())
            }
            Container::NamedTuple(name) => {
                let mut fields = Vec::with_capacity(children.len());
                for (step, _) in children {
                    let Step::Key(MapKey::Str(field)) = step else { continue };
                    fields.push(field.clone());
                }
                let values = self.build_values(path, children)?;
                let class = self.named_tuple(name, fields)?;
                Ok(class.call1(PyTuple::new(self.py, values)?)?)
            }
        }
    }

    /// Builds an object of a class that is stored as a plain container.
    fn build_tagged<'n>(
        &mut self,
        path: &mut Vec<&'n Step>,
        tag: ClassTag,
        children: &'n [(Step, Node)],
    ) -> Result<Bound<'py, PyAny>> {
        if is_sharded_wrapper(tag, children) {
            return self.build_sharded_wrapper(path, tag, children);
        }
        let plain = if let TaggedClass::Set | TaggedClass::FrozenSet = tag.class() {
            let elements = PyList::empty(self.py);
            for (step, _) in children {
                let Step::Key(key) = step else { continue };
                elements.append(self.py_key(key)?)?;
            }
            elements.into_any()
        } else {
            self.build_container(path, &Container::Tagged(tag).to_plain(), children)?
        };
        classes::compose(tag, &plain)
    }

    fn ordered_dict<'n>(
        &mut self,
        path: &mut Vec<&'n Step>,
        children: &'n [(Step, Node)],
    ) -> Result<Bound<'py, PyAny>> {
        let collections = self.py.import(intern!(self.py, "collections"))?;
        let dict = collections.getattr(intern!(self.py, "OrderedDict"))?.call0()?;
        if !self.metadata.is_empty()
            && let Some(metadata) = self.metadata.get(&object_path(path).to_string())
        {
            let json = self.py.import("json")?;
            let options = PyDict::new(self.py);
            let metadata = json.call_method1("loads", (metadata.to_string(),))?;
            let metadata = collections.getattr("OrderedDict")?.call((metadata,), Some(&options))?;
            dict.setattr("_metadata", metadata)?;
        }
        for (step, child) in children {
            let (key, value) = self.build_entry(path, step, child)?;
            dict.set_item(key, value)?;
        }
        Ok(dict)
    }

    fn build_entry<'n>(
        &mut self,
        path: &mut Vec<&'n Step>,
        step: &'n Step,
        child: &'n Node,
    ) -> Result<(Bound<'py, PyAny>, Bound<'py, PyAny>)> {
        let key = match step {
            Step::Key(key) => self.py_key(key)?,
            Step::Index(index) => index.into_pyobject(self.py).map_err(PyErr::from)?.into_any(),
        };
        path.push(step);
        let value = self.build(path, child)?;
        path.pop();
        Ok((key, value))
    }

    fn build_values<'n>(
        &mut self,
        path: &mut Vec<&'n Step>,
        children: &'n [(Step, Node)],
    ) -> Result<Vec<Bound<'py, PyAny>>> {
        children.iter().map(|(step, child)| Ok(self.build_entry(path, step, child)?.1)).collect()
    }

    /// Returns the class for a namedtuple. Namedtuples with equal names and fields share one class.
    fn named_tuple(&mut self, name: &Text, fields: Vec<Text>) -> Result<Bound<'py, PyAny>> {
        let cached =
            self.named_tuples.iter().find(|cached| cached.0 == *name && cached.1 == fields);
        if let Some((_, _, class)) = cached {
            return Ok(class.clone());
        }
        let namedtuple = self.py.import("collections")?.getattr("namedtuple")?;
        let field_names =
            fields.iter().map(|field| self.py_str(field)).collect::<Result<Vec<_>>>()?;
        let create = |renames: bool| {
            let options = PyDict::new(self.py);
            options.set_item("rename", renames)?;
            namedtuple
                .call((self.py_str(name)?, &field_names), Some(&options))
                .map_err(Failure::from)
        };
        // A class that was created with `rename=True` can have fields such as `_1`. All other names must not change.
        let renamed = create(true)?;
        let is_same = renamed.getattr("_fields")?.eq(PyTuple::new(self.py, &field_names)?)?;
        let class = if is_same { renamed } else { create(false)? };
        self.named_tuples.push((name.clone(), fields, class.clone()));
        Ok(class)
    }

    fn py_str(&self, text: &Text) -> Result<Bound<'py, PyAny>> {
        decode_str(self.py, text.as_bytes())
    }

    fn py_key(&self, key: &MapKey) -> Result<Bound<'py, PyAny>> {
        let py = self.py;
        Ok(match key {
            MapKey::Str(text) => self.py_str(text)?,
            MapKey::Int(int) => py_int(py, int)?,
            MapKey::Bool(value) => {
                value.into_pyobject(py).map_err(PyErr::from)?.to_owned().into_any()
            }
            MapKey::Float(float) => PyFloat::new(py, float.get()).into_any(),
            MapKey::None => py.None().into_bound(py),
            MapKey::Bytes(bytes) => PyBytes::new(py, bytes).into_any(),
            MapKey::Tuple(keys) => {
                let keys = keys.iter().map(|key| self.py_key(key)).collect::<Result<Vec<_>>>()?;
                PyTuple::new(py, keys)?.into_any()
            }
            _ => return Err(unsupported_value().into()),
        })
    }

    pub(crate) fn build_leaf(&mut self, node: &Node) -> Result<Bound<'py, PyAny>> {
        match node {
            Node::Tensors(references) => self.build_tensors(references),
            Node::Distributed(_) => Err(Error::new(ErrorKind::BlobElsewhere).into()),
            Node::Leaf(value) => self.build_value(value),
            Node::StoredLeaf(stored, storage) => {
                let bytes = self.contents.storage_bytes(*storage)?;
                match stored {
                    ContentKind::Str => decode_str(self.py, &bytes),
                    ContentKind::Bytes => Ok(PyBytes::new(self.py, &bytes).into_any()),
                    ContentKind::Opaque(media) => self.unpickle(media, &bytes),
                }
            }
            Node::Container(..) => unreachable!("a leaf is no container"),
        }
    }

    /// Builds a leaf whose value is in the index.
    pub(crate) fn build_value(&self, value: &Value) -> Result<Bound<'py, PyAny>> {
        let py = self.py;
        Ok(match value {
            Value::None => py.None().into_bound(py),
            Value::Bool(value) => {
                value.into_pyobject(py).map_err(PyErr::from)?.to_owned().into_any()
            }
            Value::Int(int) => py_int(py, int)?,
            Value::Float(float) => PyFloat::new(py, float.get()).into_any(),
            Value::Complex(real, imag) => {
                PyComplex::from_doubles(py, real.get(), imag.get()).into_any()
            }
            Value::Str(text) => self.py_str(text)?,
            Value::Bytes(bytes) => PyBytes::new(py, bytes).into_any(),
            Value::Dtype(dtype) => self.require_torch("torch.dtype")?.torch_dtype(*dtype)?.clone(),
            Value::Size(sizes) => {
                let size = self.require_torch("torch.Size")?.module.getattr("Size")?;
                size.call1((PyTuple::new(py, sizes)?,))?
            }
            Value::Device(device) => {
                let class = self.require_torch("torch.device")?.module.getattr("device")?;
                class.call1((self.py_str(device)?,))?
            }
            Value::Opaque { media, bytes } => self.unpickle(media, bytes)?,
            Value::Tagged(tag, plain) => classes::compose(*tag, &self.build_value(plain)?)?,
            _ => return Err(unsupported_value().into()),
        })
    }

    /// Returns torch, for a leaf of a class that only torch has.
    fn require_torch(&self, class: &str) -> Result<&Torch<'py>> {
        self.torch().map_err(|_| {
            BindingError::new("FeatureMissing", format!("a {class} needs torch"))
                .advice("install torch, or read the tensors alone with safe_open")
                .into()
        })
    }

    fn unpickle(&self, media: &Text, bytes: &[u8]) -> Result<Bound<'py, PyAny>> {
        if !self.allow_pickle {
            return Err(BindingError::untyped_leaf(
                format!("it is an opaque object ({media}), which is not unpickled"),
                "if you trust who wrote it, read it with allow_pickle=True: load_file, or get_state_dict",
            )
            .into());
        }
        if media.as_str() != Some(PICKLE) {
            let message = format!("nothing here reads an object of type {media}");
            return Err(BindingError::untyped_leaf(
                message,
                "read it with the library that wrote it",
            )
            .into());
        }
        let pickle = self.py.import("pickle")?;
        Ok(pickle.call_method1("loads", (PyBytes::new(self.py, bytes),))?)
    }

    /// Builds a tensor, or the shards of one.
    pub(crate) fn build_tensors(
        &mut self,
        references: &[TensorReference],
    ) -> Result<Bound<'py, PyAny>> {
        let [first, others @ ..] = references else { return Err(unsupported_value().into()) };
        let Some(place) = &first.shard_spec else { return self.tensor(first) };
        let slices: Vec<TensorSlice> = references
            .iter()
            .filter_map(|reference| Some(reference.shard_spec.as_ref()?.slice().clone()))
            .collect();
        let local = if others.is_empty() {
            self.tensor(first)?
        } else if let Some((shape, offsets)) = local_offsets(&slices) {
            self.assemble(references, &shape, &offsets)?
        } else {
            // The boxes do not form one local tensor: each box becomes a shard.
            let shards = PyList::empty(self.py);
            for (reference, slice) in references.iter().zip(slices) {
                let local = self.tensor(reference)?.unbind();
                shards.append(TensorShard::from_slices(self.py, local, vec![slice])?)?;
            }
            return Ok(shards.into_any());
        };
        if let (Some(mesh), Some(placements)) = (&self.device_mesh, place.placements()) {
            let helper = self.py.import(intern!(self.py, "tssd._torch"))?;
            let mesh_shape = PyTuple::new(self.py, place.slice().mesh_shape())?;
            let coordinates =
                place.slice().coordinates().map(|at| PyTuple::new(self.py, at)).transpose()?;
            let mismatch =
                helper.call_method1("find_mesh_mismatch", (mesh, mesh_shape, coordinates))?;
            if let Some(message) = mismatch.extract::<Option<String>>()? {
                return Err(BindingError::new("MeshMismatch", message).into());
            }
            if covers_rank(place.slice(), placements, &slices) {
                let placements: Vec<_> = placements.iter().map(encode_placement).collect();
                let global_shape = PyTuple::new(self.py, place.slice().global_shape())?;
                let arguments = (local, mesh, placements, global_shape);
                return Ok(helper.call_method1("make_dtensor", arguments)?);
            }
        }
        let shard = TensorShard::from_slices(self.py, local.unbind(), slices)?;
        Ok(Bound::new(self.py, shard)?.into_any())
    }

    /// Copies several boxes into one local tensor.
    fn assemble(
        &mut self,
        references: &[TensorReference],
        shape: &[u64],
        offsets: &[Vec<u64>],
    ) -> Result<Bound<'py, PyAny>> {
        let meta = &references[0].meta;
        let without_torch_flags = |reference: &TensorReference| {
            let flags = reference.meta.flags();
            let kept = TensorFlags::from_bits(flags.bits() & TensorFlags::NDARRAY.bits());
            let meta = reference.meta.clone().with_flags(kept.unwrap_or_default());
            TensorReference { meta, ..reference.clone() }
        };
        let target = TensorReference {
            meta: tssd_format::TensorMeta::new(meta.dtype(), shape)?
                .with_flags(without_torch_flags(&references[0]).meta.flags()),
            storage: None,
            byte_offset: 0,
            shard_spec: None,
        };
        let local = self.tensor(&target)?;
        for (reference, offsets) in references.iter().zip(offsets) {
            let part = self.tensor(&without_torch_flags(reference))?;
            let index = box_index(self.py, offsets, reference.meta.shape())?;
            local.set_item(index, part)?;
        }
        if self.framework == Framework::Numpy || meta.flags().contains(TensorFlags::NDARRAY) {
            return Ok(local);
        }
        self.torch()?.with_flags(local, meta.flags())
    }

    /// Builds a plain tensor, or the local tensor of a shard.
    fn tensor(&mut self, reference: &TensorReference) -> Result<Bound<'py, PyAny>> {
        let flags = reference.meta.flags();
        let is_array = flags.contains(TensorFlags::NDARRAY) || flags.contains(TensorFlags::SCALAR);
        if self.framework == Framework::Torch
            && !is_array
            && let Some(tensor) = self.whole_storage_tensor(reference)?
        {
            return Ok(tensor);
        }
        let mut reference = reference.clone();
        if let Some(number) = reference.storage {
            self.load_storage(number)?;
            reference.byte_offset -= self.storages[&number].start;
        }
        let storage = reference.storage.map(|number| &self.storages[&number]);
        if self.framework == Framework::Numpy {
            return self.numpy()?.make_array(&reference, storage.map(|storage| &storage.host));
        }
        if is_array {
            let bytes = storage.map(|storage| {
                let bytes = self.torch()?.storage_array(&storage.host)?;
                bytes.call_method1("setflags", (false,))?;
                Ok::<_, Failure>(bytes)
            });
            return self.numpy()?.make_array(&reference, bytes.transpose()?.as_ref());
        }
        let untyped = storage.map(CachedStorage::untyped).transpose()?;
        self.torch()?.make_tensor(&reference, untyped.as_ref(), self.device.as_ref())
    }

    /// Builds a torch tensor that spans a whole storage that is not loaded yet. This is the fast path.
    ///
    /// Returns `None` for any other tensor.
    fn whole_storage_tensor(
        &mut self,
        reference: &TensorReference,
    ) -> Result<Option<Bound<'py, PyAny>>> {
        let Some(number) = reference.storage.filter(|number| !self.storages.contains_key(number))
        else {
            return Ok(None);
        };
        if self.device.is_some() || reference.byte_offset > 0 {
            return Ok(None);
        }
        let (block, start) = self.source.block(number)?;
        let torch = self.torch()?;
        let (host, is_whole_storage) = match torch.tensor_from_block(block, &reference.meta)? {
            Ok(tensor) => (tensor, true),
            Err(block) => (torch.bytes_tensor(block)?, false),
        };
        let tensor = host.clone();
        self.storages.insert(number, CachedStorage { start, host, device_copy: None });
        if !is_whole_storage {
            return Ok(None);
        }
        self.torch()?.with_flags(tensor, reference.meta.flags()).map(Some)
    }

    /// Loads the bytes of a storage, unless they are loaded already.
    fn load_storage(&mut self, number: u32) -> Result<()> {
        if self.storages.contains_key(&number) {
            return Ok(());
        }
        let (block, start) = self.source.block(number)?;
        let host = match self.framework {
            Framework::Numpy => self.numpy()?.bytes_array(block)?,
            Framework::Torch => self.torch()?.bytes_tensor(block)?,
        };
        let to_device = |device: &Bound<'py, PyAny>| host.call_method1("to", (device,));
        let device_copy = self.device.as_ref().map(to_device).transpose()?;
        self.storages.insert(number, CachedStorage { start, host, device_copy });
        Ok(())
    }

    /// Builds a view of part of a tensor, whose element 0 is at byte `first` of the storage.
    ///
    /// `shape` and `strides` are in elements.
    pub(crate) fn build_view(
        &mut self,
        reference: &TensorReference,
        shape: &[u64],
        strides: &[i64],
        first: u64,
    ) -> Result<Bound<'py, PyAny>> {
        let storage = match reference.storage {
            Some(number) => {
                self.load_storage(number)?;
                Some(&self.storages[&number])
            }
            None => None,
        };
        let first = first - storage.map_or(0, |storage| storage.start);
        let dtype = reference.meta.dtype();
        if self.framework == Framework::Numpy {
            let bytes = storage.map(|storage| &storage.host);
            return self.numpy()?.view(dtype, shape, strides, first, bytes);
        }
        let untyped = storage.map(CachedStorage::untyped).transpose()?;
        let strides: Vec<u64> =
            strides.iter().map(|stride| u64::try_from(*stride).unwrap_or_default()).collect();
        let reference = TensorReference {
            meta: tssd_format::TensorMeta::new(dtype, shape)?.with_strides(&strides)?,
            byte_offset: first,
            ..reference.clone()
        };
        self.torch()?.make_tensor(&reference, untyped.as_ref(), self.device.as_ref())
    }
}

fn unsupported_value() -> BindingError {
    BindingError::new("FeatureMissing", "this version of the package does not know such a value")
        .advice("use a newer one")
}

/// Decodes generalized UTF-8 to a str.
pub(crate) fn decode_str<'py>(py: Python<'py>, bytes: &[u8]) -> Result<Bound<'py, PyAny>> {
    if let Ok(text) = std::str::from_utf8(bytes) {
        return Ok(PyString::new(py, text).into_any());
    }
    let bytes = PyBytes::new(py, bytes);
    Ok(bytes.call_method1("decode", ("utf-8", "surrogatepass"))?)
}

fn py_int<'py>(py: Python<'py>, int: &tssd_format::Int) -> Result<Bound<'py, PyAny>> {
    Ok(match int.as_i64() {
        Some(small) => small.into_pyobject(py).map_err(PyErr::from)?.into_any(),
        None => int.to_bigint().into_pyobject(py)?.into_any(),
    })
}

/// Returns the range from the first to the last byte of the references, by storage.
pub(crate) fn storage_spans(references: &[TensorReference]) -> BTreeMap<u32, Range<u64>> {
    let mut spans: BTreeMap<u32, Range<u64>> = BTreeMap::new();
    for reference in references {
        let Some(number) = reference.storage else { continue };
        let (start, end) =
            (reference.byte_offset, reference.byte_offset + reference.meta.span_bytes());
        let span = spans.entry(number).or_insert(start..end);
        *span = span.start.min(start)..span.end.max(end);
    }
    spans
}
