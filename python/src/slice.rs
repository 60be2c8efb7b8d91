//! Tensor slices and shards.

use std::collections::BTreeSet;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PySlice, PyTuple, PyType};
use tssd_format::{
    Error, ErrorKind, Placement, Region, ShardSpec, Tensor, TensorMeta, TensorSlice as Slice,
};

use crate::dtensor::{self, Chunks, DTensorParts, MeshCache, TensorSubclass};
use crate::error::{BindingError, Failure, Result};
use crate::torch::Torch;

/// The part of a global tensor that a rank has: a box, and the coordinates of the rank in its mesh.
///
/// Offsets and tensor shapes are in elements; coordinates and mesh shapes are in devices.
///
/// Args:
///     offsets: the start of the part in the global tensor, one number per dimension.
///     coordinates: the position of the rank in its mesh, one number per mesh dimension; None if it is
///         unknown, or there is no mesh.
///     global_shape: the shape of the global tensor.
///     local_shape: the shape of the part.
///     mesh_shape: the shape of the mesh; () or None if there is none.
///
/// Raises:
///     TssdValueError: the part is not inside the global tensor, or the coordinates are not in the mesh.
#[pyclass(frozen, eq, hash, module = "tssd")]
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct TensorSlice(pub(crate) Slice);

type TensorSliceArgs = (Vec<u64>, Option<Vec<u64>>, Vec<u64>, Vec<u64>, Vec<u64>);

#[pymethods]
impl TensorSlice {
    #[new]
    #[expect(clippy::needless_pass_by_value, reason = "what Python gives is owned")]
    fn new(
        offsets: Vec<u64>,
        coordinates: Option<Vec<u64>>,
        global_shape: Vec<u64>,
        local_shape: Vec<u64>,
        mesh_shape: Option<Vec<u64>>,
    ) -> Result<Self> {
        let mesh_shape = mesh_shape.unwrap_or_default();
        let coordinates = coordinates.filter(|_| !mesh_shape.is_empty());
        let slice = Slice::new(&offsets, &local_shape, &global_shape)?;
        Ok(Self(slice.with_mesh(&mesh_shape, coordinates.as_deref())?))
    }

    /// Returns the slice of the local tensor of a DTensor.
    ///
    /// Raises:
    ///     TssdValueError: the local tensor consists of several boxes, as with `_StridedShard`, or the
    ///         DTensor is Partial.
    #[classmethod]
    fn from_dtensor(_class: &Bound<'_, PyType>, t: &Bound<'_, PyAny>) -> Result<Self> {
        let parts = match dtensor::decompose(t)? {
            TensorSubclass::DTensor(parts) => parts,
            TensorSubclass::Chunks(_) => {
                let detail = "its local tensors name their own offsets";
                return Err(Error::new(ErrorKind::NotABox).with_detail(detail).into());
            }
            TensorSubclass::Wrapper(_) => {
                let detail = "it wraps tensors, which have slices of their own";
                return Err(Error::new(ErrorKind::NotABox).with_detail(detail).into());
            }
        };
        let mesh = MeshCache::default().get_or_convert(&parts.mesh)?;
        let (_, mut slices) = parts.slices(&mesh)?;
        match (slices.pop(), slices.len()) {
            (Some(slice), 0) => Ok(Self(slice)),
            (_, others) => Err(Error::new(ErrorKind::NotABox)
                .with_detail(format_args!("{} boxes", others + 1))
                .into()),
        }
    }

    /// The start of the part in the global tensor, in elements.
    #[getter]
    fn offsets<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.0.offsets())
    }

    /// The position of the rank in its mesh; None if it is unknown.
    #[getter]
    fn coordinates<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyTuple>>> {
        self.0.coordinates().map(|coordinates| PyTuple::new(py, coordinates)).transpose()
    }

    /// The shape of the global tensor, in elements.
    #[getter]
    fn global_shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.0.global_shape())
    }

    /// The shape of the part, in elements.
    #[getter]
    fn local_shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.0.local_shape())
    }

    /// The shape of the mesh, in devices; () if there is none.
    #[getter]
    fn mesh_shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.0.mesh_shape())
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        Ok(format!(
            "TensorSlice(offsets={}, coordinates={}, global_shape={}, local_shape={}, \
             mesh_shape={})",
            self.offsets(py)?.repr()?,
            self.coordinates(py)?.map_or_else(
                || Ok("None".to_owned()),
                |coordinates| { coordinates.repr().map(|repr| repr.to_string()) }
            )?,
            self.global_shape(py)?.repr()?,
            self.local_shape(py)?.repr()?,
            self.mesh_shape(py)?.repr()?,
        ))
    }

    fn __getnewargs__(&self) -> TensorSliceArgs {
        let slice = &self.0;
        (
            slice.offsets().into(),
            slice.coordinates().map(Into::into),
            slice.global_shape().into(),
            slice.local_shape().into(),
            slice.mesh_shape().into(),
        )
    }
}

/// A local tensor and its place in a global tensor: the leaf for shards that are not DTensors.
///
/// Args:
///     local: a torch tensor or a numpy array.
///     tensor_slice: the slice of the tensor; or a list of slices, in row-major order, if the tensor
///         consists of several boxes of the global tensor, as with `_StridedShard`.
///     primary: whether a put stores the tensor. False: another writer has the same tensor and stores it.
///
/// Raises:
///     TssdValueError: the shape of `local` does not match the slices.
#[pyclass(frozen, generic, module = "tssd")]
pub(crate) struct TensorShard {
    local: Py<PyAny>,
    slices: Vec<Py<TensorSlice>>,
    primary: bool,
}

impl TensorShard {
    pub(crate) fn local(&self) -> &Py<PyAny> {
        &self.local
    }

    pub(crate) fn slices(&self, py: Python<'_>) -> Vec<Slice> {
        self.slices.iter().map(|slice| slice.bind(py).get().0.clone()).collect()
    }

    /// Returns the place of each box in the global tensor, and which replica the boxes are.
    pub(crate) fn places(&self, py: Python<'_>) -> Result<Vec<ShardSpec>> {
        let to_shard_place = |slice: Slice| {
            if self.primary {
                return Ok(ShardSpec::new(slice));
            }
            // The arrangement of the ranks is unknown: assume a first replica, and this one as the second.
            ShardSpec::new(slice.with_mesh(&[2], Some(&[1]))?)
                .with_placements([Placement::Replicate])
        };
        Ok(self.slices(py).into_iter().map(to_shard_place).collect::<Result<_, Error>>()?)
    }

    pub(crate) fn from_slices(
        py: Python<'_>,
        local: Py<PyAny>,
        slices: Vec<Slice>,
    ) -> PyResult<Self> {
        let slices = slices.into_iter().map(|slice| Py::new(py, TensorSlice(slice)));
        Ok(Self { local, slices: slices.collect::<PyResult<_>>()?, primary: true })
    }
}

/// Local tensors of an object: the tensor itself, or the local tensors of its shards.
pub(crate) enum LocalTensors<'py> {
    Whole(Bound<'py, PyAny>),
    Shard(Bound<'py, TensorShard>),
    DTensor(DTensorParts<'py>),
    /// Each local tensor has its own place.
    Chunks(Chunks<'py>),
}

impl<'py> LocalTensors<'py> {
    /// Returns `None` for an object that cannot be stored: the import of the object reports the error.
    pub(crate) fn from_object(object: &Bound<'py, PyAny>) -> Result<Option<Self>> {
        if let Ok(shard) = object.cast::<TensorShard>() {
            return Ok(Some(Self::Shard(shard.clone())));
        }
        let Some(torch) = Torch::if_imported(object.py())? else {
            return Ok(Some(Self::Whole(object.clone())));
        };
        if !torch.is_tensor(object)? || torch.is_builtin_class(object)? {
            return Ok(Some(Self::Whole(object.clone())));
        }
        let object = dtensor::wait_for_collective(object)?;
        if torch.is_builtin_class(&object)? {
            return Ok(Some(Self::Whole(object)));
        }
        match dtensor::decompose(&object) {
            Ok(TensorSubclass::DTensor(parts)) => Ok(Some(Self::DTensor(parts))),
            Ok(TensorSubclass::Chunks(chunks)) => Ok(Some(Self::Chunks(chunks))),
            Ok(TensorSubclass::Wrapper(_)) | Err(_) => Ok(None),
        }
    }

    pub(crate) fn tensors(&self) -> Vec<&Bound<'py, PyAny>> {
        match self {
            Self::Whole(object) => vec![object],
            Self::Shard(shard) => vec![shard.get().local.bind(shard.py())],
            Self::DTensor(parts) => vec![&parts.local],
            Self::Chunks(chunks) => chunks.locals.iter().map(|(local, _)| local).collect(),
        }
    }

    /// Returns whether a local tensor of this shape matches its slices.
    ///
    /// A whole tensor always matches; so do chunks, as each has its own place.
    pub(crate) fn matches_shape(&self, shape: &[u64]) -> Result<bool> {
        let slices = match self {
            Self::Whole(_) | Self::Chunks(_) => return Ok(true),
            Self::Shard(shard) => shard.get().slices(shard.py()),
            Self::DTensor(parts) => {
                let mesh = MeshCache::default().get_or_convert(&parts.mesh)?;
                // A Partial DTensor has no slices here. Its import reports the placement.
                parts.slices(&mesh).map(|(_, slices)| slices).unwrap_or_default()
            }
        };
        Ok(run_grid(&slices).is_some_and(|grid| grid_shape(&grid) == shape))
    }
}

#[derive(FromPyObject)]
enum OneOrManySlices {
    One(Py<TensorSlice>),
    Many(Vec<Py<TensorSlice>>),
}

#[pymethods]
impl TensorShard {
    #[new]
    #[pyo3(signature = (local, tensor_slice, primary=true))]
    fn new(local: &Bound<'_, PyAny>, tensor_slice: OneOrManySlices, primary: bool) -> Result<Self> {
        let py = local.py();
        let slices = match tensor_slice {
            OneOrManySlices::One(slice) => vec![slice],
            OneOrManySlices::Many(slices) => slices,
        };
        if slices.is_empty() {
            return Err(PyValueError::new_err("a shard has a slice").into());
        }
        let shape = local.getattr("shape").and_then(|shape| shape.extract());
        let shape: Vec<u64> = shape.map_err(|_: PyErr| {
            BindingError::untyped_leaf(
                "the local part of a TensorShard has no shape",
                "give it a tensor",
            )
        })?;
        let shard = Self { local: local.clone().unbind(), slices, primary };
        let fits = run_grid(&shard.slices(py)).is_some_and(|grid| grid_shape(&grid) == shape);
        if fits {
            return Ok(shard);
        }
        let note = format!("tensor of shape {shape:?}");
        Err(Error::new(ErrorKind::SliceMismatch).with_detail(note).into())
    }

    /// Converts a `ShardedTensor` of Megatron to a shard that shares its memory.
    ///
    /// Any object with the same attributes is accepted: `data`, `global_shape`, `global_offset` and
    /// `replica_id`. As the memory is shared, the shard can also be filled, as `into`.
    ///
    /// A put of such shards needs `writer=` and `writers=`. It stores the replicas whose `replica_id` is
    /// 0 in all its parts.
    ///
    /// Raises:
    ///     TssdTypeError: the object has no data, or only a flattened part, as in a distributed optimizer.
    ///     TssdValueError: the data does not match the shape or the offset.
    #[classmethod]
    fn from_megatron<'py>(
        _class: &Bound<'py, PyType>,
        sharded_tensor: &Bound<'py, PyAny>,
    ) -> Result<Self> {
        let py = sharded_tensor.py();
        let flattened_range = sharded_tensor.getattr_opt("flattened_range")?;
        if flattened_range.is_some_and(|range| !range.is_none()) {
            let advice = "give the tensor that it is a part of";
            return Err(BindingError::untyped_leaf(
                "a flattened part of a tensor is no box of it",
                advice,
            )
            .into());
        }
        let attribute = |name: &str| {
            sharded_tensor.getattr_opt(name)?.ok_or_else(|| {
                let class = sharded_tensor.get_type();
                Failure::from(BindingError::untyped_leaf(
                    format!("{class} is no ShardedTensor: it has no `{name}`"),
                    "give one, or make a TensorShard of its tensor and slice",
                ))
            })
        };
        let ints = |name: &str| -> Result<Vec<u64>> {
            let ints = attribute(name)?;
            let single = || ints.extract().map(|int| vec![int]);
            Ok(ints.extract().or_else(|_: PyErr| single()).map_err(|_: PyErr| {
                BindingError::untyped_leaf(
                    format!("its `{name}` is {ints:?}"),
                    "give it an int, or ints",
                )
            })?)
        };
        let data = attribute("data")?;
        if data.is_none() {
            return Err(BindingError::untyped_leaf("it has no data", "make it with data").into());
        }
        let (global_shape, offsets) = (ints("global_shape")?, ints("global_offset")?);
        let shape: Option<Vec<u64>> =
            data.getattr_opt("shape")?.and_then(|shape| shape.extract().ok());
        let shape = shape.ok_or_else(|| {
            BindingError::untyped_leaf(
                "it is no ShardedTensor: its `data` has no shape",
                "give it a tensor",
            )
        })?;
        // Layers that are stacked in the global tensor have additional leading dimensions there.
        let leading_dims =
            vec![py.None().into_bound(py); global_shape.len().saturating_sub(shape.len())];
        let local_shape = [vec![1; leading_dims.len()], shape].concat();
        let local = if leading_dims.is_empty() {
            data
        } else {
            data.get_item(PyTuple::new(py, leading_dims)?)?
        };
        let slice = TensorSlice(Slice::new(&offsets, &local_shape, &global_shape)?);
        let replica = ints("replica_id")?;
        Self::new(
            &local,
            OneOrManySlices::One(Py::new(py, slice)?),
            replica.iter().all(|part| *part == 0),
        )
    }

    /// The local tensor.
    #[getter(local)]
    fn local_tensor<'py>(&self, py: Python<'py>) -> &Bound<'py, PyAny> {
        self.local.bind(py)
    }

    /// The slice of the local tensor, or a list of slices if it consists of several boxes.
    #[getter]
    fn tensor_slice<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        match self.slices.as_slice() {
            [slice] => Ok(slice.bind(py).clone().into_any()),
            slices => Ok(slices.into_pyobject(py)?.into_any()),
        }
    }

    /// Whether a put stores the local tensor.
    #[getter]
    fn primary(&self) -> bool {
        self.primary
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        Ok(format!(
            "TensorShard(local={}, tensor_slice={}{})",
            self.local.bind(py).repr()?,
            self.tensor_slice(py)?.repr()?,
            if self.primary { "" } else { ", primary=False" }
        ))
    }

    fn __getnewargs__<'py>(
        &self,
        py: Python<'py>,
    ) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyAny>, bool)> {
        Ok((self.local.bind(py).clone(), self.tensor_slice(py)?, self.primary))
    }
}

/// A range of indices of one dimension of the global tensor.
struct IndexRun {
    offset: u64,
    size: u64,
    /// First index in the local tensor.
    start: u64,
}

/// Returns the runs of each dimension whose product is the list of boxes, in row-major order.
///
/// Returns `None` if the boxes are not such a product.
fn run_grid(slices: &[Slice]) -> Option<Vec<Vec<IndexRun>>> {
    let rank = slices.first()?.offsets().len();
    let mut seen_runs = vec![BTreeSet::new(); rank];
    let mut grid: Vec<Vec<IndexRun>> = (0..rank).map(|_| Vec::new()).collect();
    for slice in slices {
        if slice.offsets().len() != rank {
            return None;
        }
        for (dim, (&offset, &size)) in slice.offsets().iter().zip(slice.local_shape()).enumerate() {
            if seen_runs[dim].insert((offset, size)) {
                let start =
                    grid[dim].last().map_or(Some(0), |last| last.start.checked_add(last.size))?;
                grid[dim].push(IndexRun { offset, size, start });
            }
        }
    }
    let count = grid.iter().try_fold(1_usize, |count, runs| count.checked_mul(runs.len()))?;
    let is_product = count == slices.len()
        && slices.iter().enumerate().all(|(index, slice)| {
            let position = grid_position(&grid, index);
            let box_dims = slice.offsets().iter().zip(slice.local_shape());
            let mut dims = grid.iter().zip(&position).zip(box_dims);
            dims.all(|((runs, position), (offset, size))| {
                (runs[*position].offset, runs[*position].size) == (*offset, *size)
            })
        });
    is_product.then_some(grid)
}

/// Returns the number of the run of each dimension that a box of a grid consists of.
fn grid_position(grid: &[Vec<IndexRun>], mut index: usize) -> Vec<usize> {
    let mut position = vec![0; grid.len()];
    for (run_index, runs) in position.iter_mut().zip(grid).rev() {
        *run_index = index % runs.len();
        index /= runs.len();
    }
    position
}

fn grid_shape(grid: &[Vec<IndexRun>]) -> Vec<u64> {
    grid.iter()
        .map(|runs| runs.last().map_or(0, |last| last.start.saturating_add(last.size)))
        .collect()
}

/// Splits a local tensor into its boxes. The boxes are views of the tensor.
pub(crate) fn split_local(local: &Tensor, slices: &[Slice]) -> Result<Vec<Tensor>> {
    let meta = local.meta();
    let grid =
        run_grid(slices).filter(|grid| grid_shape(grid) == meta.shape()).ok_or_else(|| {
            let note = format!("{} boxes, tensor of shape {:?}", slices.len(), meta.shape());
            Error::new(ErrorKind::SliceMismatch).with_detail(note)
        })?;
    if slices.len() == 1 {
        return Ok(vec![local.clone()]);
    }
    let strides = meta.strides();
    let to_view = |(index, slice): (usize, &Slice)| {
        let run_starts = grid.iter().zip(grid_position(&grid, index)).zip(&strides);
        let offset: u64 = run_starts.map(|((runs, run), stride)| runs[run].start * stride).sum();
        let box_meta = TensorMeta::new(meta.dtype(), slice.local_shape())?
            .with_strides(&strides)?
            .with_flags(meta.flags());
        let offset = local.byte_offset() + offset * meta.dtype().itemsize();
        Ok(Tensor::new(box_meta, local.storage().clone(), offset)?)
    };
    slices.iter().enumerate().map(to_view).collect()
}

/// Returns the shape of the local tensor, and the offsets of each box in it, in elements.
///
/// Returns `None` if the boxes do not form a local tensor.
pub(crate) fn local_offsets(slices: &[Slice]) -> Option<(Vec<u64>, Vec<Vec<u64>>)> {
    let grid = run_grid(slices)?;
    let offsets = (0..slices.len()).map(|index| {
        grid.iter().zip(grid_position(&grid, index)).map(|(runs, run)| runs[run].start).collect()
    });
    Some((grid_shape(&grid), offsets.collect()))
}

/// Intersects a region of a local tensor with its boxes. Returns the places of the intersections.
pub(crate) fn intersect_places(places: &[ShardSpec], region: &Region) -> Result<Vec<ShardSpec>> {
    let slices: Vec<Slice> = places.iter().map(|place| place.slice().clone()).collect();
    let (_, offsets) = local_offsets(&slices).ok_or_else(|| {
        let note = format!("{} boxes that are no local tensor", slices.len());
        Error::new(ErrorKind::SliceMismatch).with_detail(note)
    })?;
    let mut selected = Vec::new();
    for (place, offsets) in places.iter().zip(offsets) {
        let local_box = Region::new(&offsets, place.slice().local_shape())?;
        if let Some(overlap) = local_box.intersect(region) {
            selected.push(place.subregion(&overlap.relative_to(&local_box))?);
        }
    }
    Ok(selected)
}

/// Returns the index that selects a box of a tensor or an array.
pub(crate) fn box_index<'py>(
    py: Python<'py>,
    offsets: &[u64],
    sizes: &[u64],
) -> Result<Bound<'py, PyTuple>> {
    let mut slices = Vec::with_capacity(sizes.len());
    for (offset, size) in offsets.iter().zip(sizes) {
        let (start, end) = (isize::try_from(*offset)?, isize::try_from(offset + size)?);
        slices.push(PySlice::new(py, start, end, 1));
    }
    Ok(PyTuple::new(py, slices)?)
}
