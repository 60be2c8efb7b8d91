//! Conversion of torch DTensors, which `tssd/_torch.py` decomposes.

use std::sync::Arc;

use pyo3::intern;
use pyo3::prelude::*;
use tssd_format::{DeviceMesh, Error, ErrorKind, Placement, ShardSpec, TensorSlice};

use crate::classes::TaggedObject;
use crate::error::{BindingError, Result};

/// Components of a tensor whose class is neither `torch.Tensor` nor `Parameter`.
pub(crate) enum TensorSubclass<'py> {
    DTensor(DTensorParts<'py>),
    Chunks(Chunks<'py>),
    Wrapper(TaggedObject<'py>),
}

/// A local tensor and its sharding. The fields are those of `_torch.DTensorParts`.
#[derive(FromPyObject)]
pub(crate) struct DTensorParts<'py> {
    pub(crate) local: Bound<'py, PyAny>,
    pub(crate) mesh: Bound<'py, PyAny>,
    global_shape: Vec<u64>,
    coordinates: Option<Vec<u64>>,
    placements: Vec<PlacementTuple>,
}

/// Local tensors with their offsets in elements. The fields are those of `_torch.Chunks`.
#[derive(FromPyObject)]
pub(crate) struct Chunks<'py> {
    pub(crate) locals: Vec<(Bound<'py, PyAny>, Vec<u64>)>,
    pub(crate) global_shape: Vec<u64>,
}

/// A placement as `_torch.py` encodes it: name of its class or reduction, dimension, split factor.
pub(crate) type PlacementTuple = (String, u32, u64);

/// Waits for an asynchronous collective and returns its result. Returns any other tensor unchanged.
pub(crate) fn wait_for_collective<'py>(tensor: &Bound<'py, PyAny>) -> Result<Bound<'py, PyAny>> {
    let py = tensor.py();
    let helper = py.import(intern!(py, "tssd._torch"))?;
    Ok(helper.call_method1(intern!(py, "wait_for_collective"), (tensor,))?)
}

/// Returns whether the local tensors declare their own offsets. Does not decompose the tensor.
pub(crate) fn declares_chunks(tensor: &Bound<'_, PyAny>) -> Result<bool> {
    let py = tensor.py();
    // A DTensor has the method too, so the local tensor decides.
    let local = tensor.getattr_opt(intern!(py, "_local_tensor"))?;
    let local = local.as_ref().unwrap_or(tensor);
    Ok(local.hasattr(intern!(py, "__create_chunk_list__"))?)
}

/// Decomposes a tensor that wraps tensors, or a DTensor of one; `None` for other tensors.
///
/// The tensor is neither a `torch.Tensor` nor a `Parameter`.
pub(crate) fn decompose_wrapper<'py>(
    tensor: &Bound<'py, PyAny>,
) -> Result<Option<TaggedObject<'py>>> {
    let py = tensor.py();
    let helper = py.import(intern!(py, "tssd._torch"))?;
    let parts = helper.call_method1(intern!(py, "decompose_wrapper"), (tensor,))?;
    if parts.is_none() {
        return Ok(None);
    }
    if parts.get_type().name()? == "Tagged" {
        return Ok(Some(parts.extract()?));
    }
    let (message, advice): (String, String) = parts.extract()?;
    Err(BindingError::untyped_leaf(message, advice).into())
}

/// Decomposes a tensor whose class is neither `torch.Tensor` nor `Parameter`.
pub(crate) fn decompose<'py>(tensor: &Bound<'py, PyAny>) -> Result<TensorSubclass<'py>> {
    let py = tensor.py();
    let helper = py.import(intern!(py, "tssd._torch"))?;
    let parts = helper.call_method1(intern!(py, "decompose"), (tensor,))?;
    match parts.get_type().name()?.to_str()? {
        "DTensorParts" => Ok(TensorSubclass::DTensor(parts.extract()?)),
        "Chunks" => Ok(TensorSubclass::Chunks(parts.extract()?)),
        "Tagged" => Ok(TensorSubclass::Wrapper(parts.extract()?)),
        _ => {
            let (message, advice): (String, String) = parts.extract()?;
            Err(BindingError::untyped_leaf(message, advice).into())
        }
    }
}

impl DTensorParts<'_> {
    /// Returns whether this rank is in the mesh.
    pub(crate) fn is_in_mesh(&self) -> bool {
        self.coordinates.is_some()
    }

    /// Returns the place of each slice of the local tensor in the global tensor, in order.
    pub(crate) fn places(&self, mesh: &Arc<DeviceMesh>) -> Result<Vec<ShardSpec>> {
        let (placements, slices) = self.slices(mesh)?;
        let placements: Arc<[Placement]> = placements.into();
        let to_shard_place = |slice| {
            ShardSpec::new(slice).with_mesh(mesh.clone())?.with_placements(placements.clone())
        };
        Ok(slices.into_iter().map(to_shard_place).collect::<Result<_, Error>>()?)
    }

    /// Returns the placements, and the slices of the local tensor in order.
    ///
    /// # Errors
    ///
    /// `PartialPlacement` if a placement is `Partial`.
    pub(crate) fn slices(&self, mesh: &DeviceMesh) -> Result<(Vec<Placement>, Vec<TensorSlice>)> {
        let placements: Vec<Placement> = self.placements.iter().map(parse_placement).collect();
        let is_partial = |placement: &&Placement| matches!(placement, Placement::Partial { .. });
        if let Some(partial) = placements.iter().find(is_partial) {
            return Err(Error::new(ErrorKind::PartialPlacement).with_detail(partial).into());
        }
        let global = &self.global_shape;
        let Some(coordinates) = &self.coordinates else {
            // A rank outside the mesh holds no elements.
            let zeros = vec![0; global.len()];
            let slice = TensorSlice::new(&zeros, &zeros, global)?.with_mesh(mesh.shape(), None)?;
            return Ok((placements, vec![slice]));
        };
        let regions = Placement::local_regions(global, mesh.shape(), coordinates, &placements)?;
        let slices = regions.iter().map(|region| {
            TensorSlice::new(region.offsets(), region.shape(), global)?
                .with_mesh(mesh.shape(), Some(coordinates))
        });
        let slices = slices.collect::<Result<_, Error>>()?;
        Ok((placements, slices))
    }
}

pub(crate) fn parse_placement((name, dim, split_factor): &PlacementTuple) -> Placement {
    match name.as_str() {
        "Replicate" => Placement::Replicate,
        "Shard" => Placement::Shard { dim: *dim },
        "_StridedShard" => Placement::StridedShard { dim: *dim, split_factor: *split_factor },
        reduce_op => Placement::Partial { reduce_op: reduce_op.to_owned() },
    }
}

/// Encodes a placement that can be stored: the inverse of [`parse_placement`].
pub(crate) fn encode_placement(placement: &Placement) -> PlacementTuple {
    match placement {
        Placement::Shard { dim } => ("Shard".to_owned(), *dim, 1),
        Placement::StridedShard { dim, split_factor } => {
            ("_StridedShard".to_owned(), *dim, *split_factor)
        }
        _ => ("Replicate".to_owned(), 0, 1),
    }
}

/// Cache of converted torch meshes. A state dict has one mesh and thousands of tensors on it.
#[derive(Default)]
pub(crate) struct MeshCache<'py>(Vec<(Bound<'py, PyAny>, Arc<DeviceMesh>)>);

impl<'py> MeshCache<'py> {
    /// Converts a torch mesh: its ranks, and the names of its dimensions. Converts each mesh once.
    pub(crate) fn get_or_convert(&mut self, mesh: &Bound<'py, PyAny>) -> Result<Arc<DeviceMesh>> {
        if let Some((_, cached)) = self.0.iter().find(|(other, _)| other.is(mesh)) {
            return Ok(cached.clone());
        }
        let ranks = mesh.getattr("mesh")?;
        let shape: Vec<u64> = ranks.getattr("shape")?.extract()?;
        let ranks: Vec<u32> = ranks.call_method0("flatten")?.call_method0("tolist")?.extract()?;
        let mut converted = DeviceMesh::new(&shape, &ranks)?;
        if let Some(names) = mesh.getattr("mesh_dim_names")?.extract::<Option<Vec<String>>>()? {
            converted = converted.with_dim_names(names)?;
        }
        let converted = Arc::new(converted);
        self.0.push((mesh.clone(), converted.clone()));
        Ok(converted)
    }
}
