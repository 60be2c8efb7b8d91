//! DTensors of torch, which `tssd/_torch.py` takes apart.

use std::sync::Arc;

use pyo3::intern;
use pyo3::prelude::*;
use tssd_format::{DeviceMesh, Error, ErrorKind, Placement, ShardPlace, TensorSlice};

use crate::error::{Refusal, Result};

/// What a tensor is made of whose class is not torch's own.
pub(crate) enum Parts<'py> {
    DTensor(DTensor<'py>),
    Chunks(Chunks<'py>),
}

/// A local tensor and how it was cut off; the fields are those of `_torch.DTensorParts`.
#[derive(FromPyObject)]
pub(crate) struct DTensor<'py> {
    pub(crate) local: Bound<'py, PyAny>,
    pub(crate) mesh: Bound<'py, PyAny>,
    global_shape: Vec<u64>,
    coordinates: Option<Vec<u64>>,
    placements: Vec<Spelled>,
}

/// Local tensors with their offsets; the fields are those of `_torch.Chunks`.
#[derive(FromPyObject)]
pub(crate) struct Chunks<'py> {
    pub(crate) locals: Vec<(Bound<'py, PyAny>, Vec<u64>)>,
    pub(crate) global_shape: Vec<u64>,
}

/// A placement as `_torch.py` spells it: the name of its class or of its reduction, dimension, split
/// factor.
pub(crate) type Spelled = (String, u32, u64);

/// The tensor that an asynchronous collective gives, once it is there; any other as it is.
pub(crate) fn waited<'py>(tensor: &Bound<'py, PyAny>) -> Result<Bound<'py, PyAny>> {
    let py = tensor.py();
    let helper = py.import(intern!(py, "tssd._torch"))?;
    Ok(helper.call_method1(intern!(py, "waited"), (tensor,))?)
}

/// Whether its local tensors name their own offsets: asked without taking it apart.
pub(crate) fn has_chunks(tensor: &Bound<'_, PyAny>) -> Result<bool> {
    let py = tensor.py();
    // A DTensor has the method too, and is no such tensor for it.
    let local = tensor.getattr_opt(intern!(py, "_local_tensor"))?;
    let local = local.as_ref().unwrap_or(tensor);
    Ok(local.hasattr(intern!(py, "__create_chunk_list__"))?)
}

/// What a tensor is made of whose class is not torch's own.
pub(crate) fn parts<'py>(tensor: &Bound<'py, PyAny>) -> Result<Parts<'py>> {
    let py = tensor.py();
    let helper = py.import(intern!(py, "tssd._torch"))?;
    let parts = helper.call_method1(intern!(py, "parts"), (tensor,))?;
    match parts.get_type().name()?.to_str()? {
        "DTensorParts" => Ok(Parts::DTensor(parts.extract()?)),
        "Chunks" => Ok(Parts::Chunks(parts.extract()?)),
        _ => {
            let (what, advice): (String, String) = parts.extract()?;
            Err(Refusal::leaf(what, advice).into())
        }
    }
}

impl DTensor<'_> {
    /// Whether this rank is in the mesh.
    pub(crate) fn is_in_mesh(&self) -> bool {
        self.coordinates.is_some()
    }

    /// Where the slices of the local tensor belong, in their order.
    pub(crate) fn places(&self, mesh: &Arc<DeviceMesh>) -> Result<Vec<ShardPlace>> {
        let (placements, slices) = self.slices(mesh)?;
        let placements: Arc<[Placement]> = placements.into();
        let place =
            |slice| ShardPlace::new(slice).on_mesh(mesh.clone())?.placed(placements.clone());
        Ok(slices.into_iter().map(place).collect::<Result<_, Error>>()?)
    }

    /// Its placements, and the slices of the local tensor in their order.
    pub(crate) fn slices(&self, mesh: &DeviceMesh) -> Result<(Vec<Placement>, Vec<TensorSlice>)> {
        let placements: Vec<Placement> = self.placements.iter().map(placement).collect();
        let is_partial = |each: &&Placement| matches!(each, Placement::Partial { .. });
        if let Some(partial) = placements.iter().find(is_partial) {
            return Err(Error::new(ErrorKind::PartialPlacement).note(partial).into());
        }
        let global = &self.global_shape;
        let Some(at) = &self.coordinates else {
            // A rank that is not in the mesh holds nothing.
            let nothing = vec![0; global.len()];
            let slice =
                TensorSlice::new(&nothing, &nothing, global)?.on_mesh(mesh.shape(), None)?;
            return Ok((placements, vec![slice]));
        };
        let boxes = Placement::local_regions(global, mesh.shape(), at, &placements)?;
        let slices = boxes.iter().map(|part| {
            TensorSlice::new(part.offsets(), part.shape(), global)?.on_mesh(mesh.shape(), Some(at))
        });
        let slices = slices.collect::<Result<_, Error>>()?;
        Ok((placements, slices))
    }
}

fn placement((name, dim, split_factor): &Spelled) -> Placement {
    match name.as_str() {
        "Replicate" => Placement::Replicate,
        "Shard" => Placement::Shard { dim: *dim },
        "_StridedShard" => Placement::StridedShard { dim: *dim, split_factor: *split_factor },
        reduce_op => Placement::Partial { reduce_op: reduce_op.to_owned() },
    }
}

/// The inverse of [`placement`], of what can be stored.
pub(crate) fn spelled(placement: &Placement) -> Spelled {
    match placement {
        Placement::Shard { dim } => ("Shard".to_owned(), *dim, 1),
        Placement::StridedShard { dim, split_factor } => {
            ("_StridedShard".to_owned(), *dim, *split_factor)
        }
        _ => ("Replicate".to_owned(), 0, 1),
    }
}

/// Meshes of torch that were met: a state dict has one mesh and thousands of tensors on it.
#[derive(Default)]
pub(crate) struct Meshes<'py>(Vec<(Bound<'py, PyAny>, Arc<DeviceMesh>)>);

impl<'py> Meshes<'py> {
    /// A mesh of torch as ours: the ranks in its tensor, the names of its dimensions.
    pub(crate) fn of(&mut self, mesh: &Bound<'py, PyAny>) -> Result<Arc<DeviceMesh>> {
        if let Some((_, known)) = self.0.iter().find(|(other, _)| other.is(mesh)) {
            return Ok(known.clone());
        }
        let ranks = mesh.getattr("mesh")?;
        let shape: Vec<u64> = ranks.getattr("shape")?.extract()?;
        let ranks: Vec<u32> = ranks.call_method0("flatten")?.call_method0("tolist")?.extract()?;
        let mut made = DeviceMesh::new(&shape, &ranks)?;
        if let Some(names) = mesh.getattr("mesh_dim_names")?.extract::<Option<Vec<String>>>()? {
            made = made.with_dim_names(names)?;
        }
        let made = Arc::new(made);
        self.0.push((mesh.clone(), made.clone()));
        Ok(made)
    }
}
