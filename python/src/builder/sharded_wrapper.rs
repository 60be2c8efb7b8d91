//! Construction of DTensors whose local tensor is a wrapper. Spec: `spec/format.md`, section 5.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use tssd_format::{
    ClassTag, Container, Error, MapKey, Node, Placement, Region, ShardSpec, Step, TaggedClass,
    TensorSlice, Value,
};

use super::ObjectBuilder;
use crate::classes;
use crate::dtensor::{encode_placement, parse_placement};
use crate::error::{BindingError, Result};
use crate::slice::TensorShard;

/// The class name in the node of a DTensor whose local tensor is a wrapper.
const DTENSOR: &str = "torch.distributed.tensor.DTensor";

/// The name of the one inner tensor of such a node.
const LOCAL_TENSOR: &str = "_local_tensor";

/// Returns whether a node with a class tag is a DTensor whose local tensor is a wrapper.
pub(super) fn is_sharded_wrapper(tag: ClassTag, children: &[(Step, Node)]) -> bool {
    tag.class() == TaggedClass::Wrapper
        && matches!(
            children,
            [(_, Node::Leaf(Value::Str(class))), ..] if class.as_str() == Some(DTENSOR)
        )
}

impl<'py> ObjectBuilder<'py, '_> {
    /// Builds a DTensor whose local tensor is a wrapper.
    ///
    /// Without a mesh it becomes a `TensorShard`, and if each rank has it whole, in a store, the wrapper.
    pub(super) fn build_sharded_wrapper<'n>(
        &mut self,
        path: &mut Vec<&'n Step>,
        tag: ClassTag,
        children: &'n [(Step, Node)],
    ) -> Result<Bound<'py, PyAny>> {
        self.require_torch("DTensor")?;
        let plain = self.build_wrapper_parts(path, children)?;
        // The values are from the file: they may be of any type.
        let invalid = || {
            BindingError::new("FeatureMissing", "a DTensor that wraps tensors has unknown fields")
                .advice("read it with a newer tssd")
        };
        let context = plain.get_item("context").and_then(|context| context.extract());
        let sharded: Vec<ShardingEntry> = context.map_err(|_| invalid())?;
        let counts: Vec<u64> = sharded.iter().map(|(_, _, _, count)| *count).collect();
        let spec = children.iter().find_map(|(_, child)| first_shard_spec(child));
        if spec.is_none() && counts.iter().any(|count| *count != 1) {
            let text = "a DTensor that wraps tensors is not read whole if it is sharded";
            let advice = "get it with `into`, a DTensor of the stored sharding, or leave it out with `names`";
            return Err(BindingError::new("MeshMismatch", text).advice(advice).into());
        }
        if spec.is_some_and(|spec| count_sharding_dims(spec) != sharded.len()) {
            return Err(invalid().into());
        }
        let local = plain.get_item("tensors").and_then(|tensors| tensors.get_item(LOCAL_TENSOR));
        let local = local.ok().and_then(|local| local.cast_into::<PyTuple>().ok());
        let helper = self.py.import(intern!(self.py, "tssd._torch"))?;
        let local = helper.call_method1("unstack", (local.ok_or_else(invalid)?, counts))?;
        let local = classes::reject_refusal(local)?;
        let flags = tag.parameter();
        let Some(spec) = spec else {
            return Ok(helper.call_method1("with_flags", (local, flags))?);
        };
        let placements = unstacked_placements(spec, &sharded);
        let slices =
            local_slices(&plain.get_item("size")?.extract::<Vec<u64>>()?, spec, &placements)?;
        if let Some(mesh) = &self.device_mesh {
            // The mesh was compared when the inner tensors were built.
            let encoded: Vec<_> = placements.iter().map(encode_placement).collect();
            let arguments = (local, mesh, encoded, flags, plain);
            return Ok(helper.call_method1("make_wrapper_dtensor", arguments)?);
        }
        let local = helper.call_method1("with_flags", (local, flags))?;
        let shard = TensorShard::from_slices(self.py, local.unbind(), slices)?;
        Ok(Bound::new(self.py, shard)?.into_any())
    }

    /// Builds the plain value of a wrapper. Each inner wrapper is a tuple of its flags and its plain value.
    fn build_wrapper_parts<'n>(
        &mut self,
        path: &mut Vec<&'n Step>,
        children: &'n [(Step, Node)],
    ) -> Result<Bound<'py, PyAny>> {
        let plain = PyDict::new(self.py);
        for (step, child) in children {
            let inner = match child {
                Node::Container(Container::Dict, inner) if is_tensors_key(step) => inner,
                _ => {
                    let (key, value) = self.build_entry(path, step, child)?;
                    plain.set_item(key, value)?;
                    continue;
                }
            };
            let tensors = PyDict::new(self.py);
            path.push(step);
            for (step, child) in inner {
                let Node::Container(Container::Tagged(tag), children) = child else {
                    let (key, value) = self.build_entry(path, step, child)?;
                    tensors.set_item(key, value)?;
                    continue;
                };
                let Step::Key(key) = step else { continue };
                path.push(step);
                let parts = (tag.parameter(), self.build_wrapper_parts(path, children)?);
                path.pop();
                tensors.set_item(self.py_key(key)?, parts)?;
            }
            path.pop();
            plain.set_item("tensors", tensors)?;
        }
        Ok(plain.into_any())
    }
}

/// Returns whether a step leads to the inner tensors of a wrapper.
fn is_tensors_key(step: &Step) -> bool {
    *step == Step::Key(MapKey::from("tensors"))
}

/// Returns the mesh, coordinates and placements of the first stacked tensor in a node.
fn first_shard_spec(node: &Node) -> Option<&ShardSpec> {
    match node {
        Node::Container(_, children) => {
            children.iter().find_map(|(_, child)| first_shard_spec(child))
        }
        Node::Tensors(references) => references.first()?.shard_spec.as_ref(),
        _ => None,
    }
}

/// A mesh dimension that shards a DTensor: the placement, as [`parse_placement`] takes it, and the size of the dimension.
type ShardingEntry = (String, u32, u64, u64);

/// Returns the number of mesh dimensions that shard a tensor.
fn count_sharding_dims(spec: &ShardSpec) -> usize {
    let placements = spec.placements().unwrap_or_default().iter();
    placements.filter(|placement| !matches!(placement, Placement::Replicate)).count()
}

/// Returns the slices of the local tensor of a DTensor, for the mesh and the coordinates of a stacked tensor.
fn local_slices(
    global_shape: &[u64],
    stacked: &ShardSpec,
    placements: &[Placement],
) -> Result<Vec<TensorSlice>> {
    let (mesh, coordinates) = (stacked.slice().mesh_shape(), stacked.slice().coordinates());
    let at = coordinates.unwrap_or_default();
    let regions = Placement::local_regions(global_shape, mesh, at, placements)?;
    let slice = |region: &Region| {
        TensorSlice::new(region.offsets(), region.shape(), global_shape)?
            .with_mesh(mesh, coordinates)
    };
    Ok(regions.iter().map(slice).collect::<Result<_, Error>>()?)
}

/// Returns the placements of a DTensor from those of the stacked tensors of its wrapper.
///
/// A stacked tensor has the placement Shard(i) for the mesh dimension with the i-th placement that shards the DTensor.
fn unstacked_placements(stacked: &ShardSpec, sharded: &[ShardingEntry]) -> Vec<Placement> {
    let placements = stacked.placements().unwrap_or_default().iter();
    let unstack = |placement: &Placement| match placement {
        Placement::Shard { dim } => {
            let shard = usize::try_from(*dim).ok().and_then(|dim| sharded.get(dim));
            shard.map_or(Placement::Replicate, |(name, dim, factor, _)| {
                parse_placement(&(name.clone(), *dim, *factor))
            })
        }
        _ => Placement::Replicate,
    };
    placements.map(unstack).collect()
}
