//! Mappings between the tensors of a process and the stored ones. `tssd/mapping.py` evaluates the rules.

use std::collections::BTreeMap;

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use tssd_format::{
    Dict, ObjectPath, Placement, Region, Shard, ShardSpec, StateDict, Step, Storage, Tensor,
    TensorMeta, TensorSlice, Value,
};

use crate::error::{BindingError, Failure, Result, type_error};

/// A box of a stored tensor, and its place in a tensor of the process: a `_Piece` of `tssd/mapping.py`.
#[derive(Clone, FromPyObject)]
pub(crate) struct Piece {
    /// The fqn of the stored tensor.
    pub(crate) stored: String,
    stored_shape: Vec<u64>,
    stored_offsets: Vec<u64>,
    /// The shape of the box, in elements.
    sizes: Vec<u64>,
    /// The start of the box in the tensor of the process.
    offsets: Vec<u64>,
    /// The dimension of the tensor of the process, for each dimension of the box.
    dims: Vec<usize>,
}

impl Piece {
    /// Returns the shape of the tensor that pieces cover, given its rank.
    pub(crate) fn value_shape(pieces: &[Self], rank: usize) -> Vec<u64> {
        let mut shape = vec![0; rank];
        for piece in pieces {
            let mut end: Vec<u64> = piece.offsets.iter().map(|offset| offset + 1).collect();
            for (&dim, &size) in piece.dims.iter().zip(&piece.sizes) {
                end[dim] = piece.offsets[dim] + size;
            }
            shape = shape.iter().zip(&end).map(|(size, end)| *size.max(end)).collect();
        }
        shape
    }
}

/// A tensor of the process that does not fit its rule: its fqn, the kind of the error, and the text.
#[derive(FromPyObject)]
pub(crate) struct Problem(pub(crate) String, pub(crate) String, pub(crate) String);

/// Returns the kind of the error for a problem.
pub(crate) fn problem_kind(kind: &str) -> &'static str {
    ["NotFound", "SliceMismatch"].into_iter().find(|known| *known == kind).unwrap_or("invalid")
}

/// The plan of a get or a put: a `_Plan` of `tssd/mapping.py`.
#[derive(FromPyObject)]
pub(crate) struct Plan<'py>(
    /// The pieces of each tensor that has a rule, by its fqn.
    pub(crate) BTreeMap<String, Vec<Piece>>,
    /// The tensors that do not fit their rules.
    pub(crate) Vec<Problem>,
    /// What computes tensors from their pieces, by the fqn of the tensor.
    pub(crate) BTreeMap<String, Bound<'py, PyAny>>,
);

/// Shapes of tensors by fqn, in elements.
type Shapes<'py> = BTreeMap<&'py str, &'py [u64]>;

/// The rules of a `tssd.mapping.Mapping`.
pub(crate) struct Mapping<'py>(Bound<'py, PyAny>);

impl<'py> Mapping<'py> {
    /// Extracts the argument `mapping` of a put or a get.
    pub(crate) fn extract(object: &Bound<'py, PyAny>) -> Result<Self> {
        let class = object.py().import("tssd.mapping")?.getattr("Mapping")?;
        if !object.is_instance(&class)? {
            let given = object.get_type().name()?.to_string();
            let text = format!("mapping is a tssd.mapping.Mapping, not a {given}");
            return Err(type_error(text + "; help: Mapping({\"name\": \"stored name\"})").into());
        }
        Ok(Self(object.clone()))
    }

    /// Plans a get into tensors of these shapes, from stored tensors of the others.
    pub(crate) fn plan_get(&self, shapes: &Shapes<'_>, stored: &Shapes<'_>) -> Result<Plan<'py>> {
        let py = self.0.py();
        let plan = (to_tuples(py, shapes)?, to_tuples(py, stored)?);
        Ok(self.0.call_method1(intern!(py, "_plan_get"), plan)?.extract()?)
    }

    /// Replaces the tensors that have a rule by their stored pieces, under the stored names.
    ///
    /// # Errors
    ///
    /// A tensor does not fit its rule, or is not in a dict; a stored name exists already.
    pub(crate) fn apply(&self, state_dict: StateDict) -> Result<StateDict> {
        let py = self.0.py();
        let leaves = state_dict.leaves();
        let leaves: Vec<(String, &Value)> =
            leaves.iter().map(|(path, value)| (path.fqn(), *value)).collect();
        let shapes: Shapes<'_> = leaves
            .iter()
            .filter_map(|(fqn, value)| Some((fqn.as_str(), global_shape(value)?)))
            .collect();
        let plan = self.0.call_method1(intern!(py, "_plan_put"), (to_tuples(py, &shapes)?,))?;
        let Plan(plans, problems, _) = plan.extract()?;
        if let Some(Problem(fqn, kind, text)) = problems.first() {
            return Err(BindingError::new(problem_kind(kind), text).with_fqn(fqn).into());
        }
        let mut splitter = Splitter { plans: &plans, path: Vec::new(), parts: BTreeMap::new() };
        let value = splitter.visit(state_dict.into_value())?;
        let mut mapped = StateDict::from_value(value)?;
        for (stored, part) in splitter.parts {
            let value = match part {
                Part::Whole(tensor) => Value::Tensor(tensor),
                Part::Shards(shards) => Value::Shards(shards),
            };
            if mapped.leaf(&stored).is_ok() {
                return Err(collision(&stored));
            }
            mapped.insert(stored, value);
        }
        Ok(mapped)
    }
}

fn to_tuples<'py>(py: Python<'py>, shapes: &Shapes<'_>) -> Result<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    for (fqn, shape) in shapes {
        dict.set_item(fqn, PyTuple::new(py, *shape)?)?;
    }
    Ok(dict)
}

/// Returns the global shape of a tensor leaf; `None` for any other leaf.
fn global_shape(value: &Value) -> Option<&[u64]> {
    match value {
        Value::Tensor(tensor) => Some(tensor.meta().shape()),
        Value::Shards(shards) => shards.first().map(|shard| shard.slice().global_shape()),
        _ => None,
    }
}

fn collision(stored: &str) -> Failure {
    BindingError::new("KeysCollide", format!("the mapping stores two tensors as `{stored}`"))
        .advice("give them different names")
        .with_fqn(stored)
        .into()
}

/// What a put stores under one name.
enum Part {
    Whole(Tensor),
    Shards(Vec<Shard>),
}

/// Moves the tensors that have a rule out of a state dict.
struct Splitter<'a> {
    plans: &'a BTreeMap<String, Vec<Piece>>,
    path: Vec<Step>,
    parts: BTreeMap<String, Part>,
}

impl Splitter<'_> {
    /// Returns the value without the tensors that have a rule. They are added to `parts`.
    fn visit(&mut self, value: Value) -> Result<Value> {
        Ok(match value {
            Value::Dict(dict) => Value::Dict(self.visit_dict(dict)?),
            Value::OrderedDict(dict) => Value::OrderedDict(self.visit_dict(dict)?),
            other => {
                self.reject_rules_in(&other)?;
                other
            }
        })
    }

    fn visit_dict(&mut self, dict: Dict) -> Result<Dict> {
        let mut rest = Dict::new();
        for (key, value) in dict {
            self.path.push(Step::Key(key.clone()));
            let pieces = match value {
                Value::Tensor(_) | Value::Shards(_) => self.plans.get(&self.fqn()),
                _ => None,
            };
            if let Some(pieces) = pieces {
                self.split(value, pieces)?;
            } else {
                let value = self.visit(value)?;
                rest.insert(key, value);
            }
            self.path.pop();
        }
        Ok(rest)
    }

    fn split(&mut self, value: Value, pieces: &[Piece]) -> Result<()> {
        match value {
            Value::Tensor(tensor) => {
                for part in split_tensor(&tensor, None, pieces)? {
                    self.add(part, true)?;
                }
            }
            Value::Shards(shards) => {
                for shard in shards {
                    for part in split_tensor(shard.tensor(), Some(shard.spec()), pieces)? {
                        self.add(part, false)?;
                    }
                }
            }
            _ => unreachable!("it is a tensor"),
        }
        Ok(())
    }

    /// Adds a part of a tensor. A part of a shard stays a shard, as those of other writers are, even if it is all.
    fn add(&mut self, part: MappedPart, is_of_whole_tensor: bool) -> Result<()> {
        let MappedPart { stored, tensor, spec } = part;
        let slice = spec.slice();
        if is_of_whole_tensor && slice.local_shape() == slice.global_shape() {
            return match self.parts.insert(stored.clone(), Part::Whole(tensor)) {
                None => Ok(()),
                Some(_) => Err(collision(&stored)),
            };
        }
        let shard = Shard::new(tensor, spec)?;
        match self.parts.entry(stored).or_insert_with(|| Part::Shards(Vec::new())) {
            Part::Shards(shards) => {
                shards.push(shard);
                Ok(())
            }
            Part::Whole(_) => Err(collision(&self.fqn())),
        }
    }

    /// Rejects a container with a tensor that has a rule: its elements cannot be taken out.
    fn reject_rules_in(&self, value: &Value) -> Result<()> {
        let is_container = matches!(
            value,
            Value::List(_) | Value::Tuple(_) | Value::NamedTuple(..) | Value::Tagged(..)
        );
        if !is_container {
            return Ok(());
        }
        let prefix = format!("{}.", self.fqn());
        match self.plans.range(prefix.clone()..).next().filter(|(fqn, _)| fqn.starts_with(&prefix))
        {
            None => Ok(()),
            Some((fqn, _)) => Err(BindingError::new("invalid", format!("`{fqn}` is in no dict"))
                .advice("a mapping renames tensors in dicts")
                .with_fqn(fqn)
                .into()),
        }
    }

    fn fqn(&self) -> String {
        self.path.iter().cloned().collect::<ObjectPath>().fqn()
    }
}

/// A view of a part of a tensor of the process, and its place in a stored tensor.
pub(crate) struct MappedPart {
    /// The fqn of the stored tensor.
    pub(crate) stored: String,
    pub(crate) tensor: Tensor,
    pub(crate) spec: ShardSpec,
}

/// Splits a local tensor into the parts that belong to pieces. The parts are views of the tensor.
///
/// `spec` is the place of the local tensor in the global one; `None` if it is the global tensor.
pub(crate) fn split_tensor(
    local: &Tensor,
    spec: Option<&ShardSpec>,
    pieces: &[Piece],
) -> Result<Vec<MappedPart>> {
    let meta = local.meta();
    let own =
        spec.map_or_else(|| Region::whole(meta.shape()), |spec| spec.slice().region().clone());
    let strides = meta.strides();
    let mut parts = Vec::new();
    for piece in pieces {
        let mut extent = vec![1; own.rank()];
        for (&dim, &size) in piece.dims.iter().zip(&piece.sizes) {
            extent[dim] = size;
        }
        let place = Region::new(&piece.offsets, &extent)?;
        if own.is_empty() {
            parts.push(empty_part(local, spec, piece)?);
            continue;
        }
        let Some(part) = place.intersect(&own) else { continue };
        let (in_local, in_piece) = (part.relative_to(&own), part.relative_to(&place));
        let start: u64 = in_local.offsets().iter().zip(&strides).map(|(at, by)| at * by).sum();
        let pick = |values: &[u64]| piece.dims.iter().map(|&dim| values[dim]).collect::<Vec<u64>>();
        let shape = pick(part.shape());
        let view = TensorMeta::new(meta.dtype(), &shape)?
            .with_strides(&pick(&strides))?
            .with_flags(meta.flags());
        let byte_offset = local.byte_offset() + start * meta.dtype().itemsize();
        let offsets: Vec<u64> = pick(in_piece.offsets())
            .iter()
            .zip(&piece.stored_offsets)
            .map(|(inner, outer)| inner + outer)
            .collect();
        let slice = TensorSlice::new(&offsets, &shape, &piece.stored_shape)?;
        parts.push(MappedPart {
            stored: piece.stored.clone(),
            tensor: Tensor::new(view, local.storage().clone(), byte_offset)?,
            spec: place_on_mesh(slice, spec, piece)?,
        });
    }
    Ok(parts)
}

/// Returns the part of a local tensor without elements: the rank takes part in the put of the stored tensor.
fn empty_part(local: &Tensor, spec: Option<&ShardSpec>, piece: &Piece) -> Result<MappedPart> {
    let zeros = vec![0; piece.sizes.len()];
    let (offsets, shape) =
        if spec.is_some() { (&zeros, &zeros) } else { (&piece.stored_offsets, &piece.sizes) };
    let slice = TensorSlice::new(offsets, shape, &piece.stored_shape)?;
    let meta = TensorMeta::new(local.meta().dtype(), shape)?.with_flags(local.meta().flags());
    Ok(MappedPart {
        stored: piece.stored.clone(),
        tensor: Tensor::new(meta, Storage::default(), 0)?,
        spec: place_on_mesh(slice, spec, piece)?,
    })
}

/// Returns the spec of a part on the mesh of the tensor that it is a part of.
///
/// The placements say on which dimensions of the mesh the parts are replicas. A part need not be a regular shard: its
/// slice says where it is.
fn place_on_mesh(slice: TensorSlice, spec: Option<&ShardSpec>, piece: &Piece) -> Result<ShardSpec> {
    let Some(spec) = spec else { return Ok(ShardSpec::new(slice)) };
    let own = spec.slice();
    let mut placed = ShardSpec::new(slice.with_mesh(own.mesh_shape(), own.coordinates())?);
    if let Some(mesh) = spec.mesh() {
        placed = placed.with_mesh(mesh.clone())?;
    }
    let Some(placements) = spec.placements() else { return Ok(placed) };
    let stored_dim = |dim: u32| {
        let found = piece.dims.iter().position(|&each| u32::try_from(each) == Ok(dim));
        u32::try_from(found.unwrap_or(0)).expect("a tensor has at most 64 dimensions")
    };
    let placements = placements.iter().map(|placement| match placement {
        Placement::Shard { dim } | Placement::StridedShard { dim, .. } => {
            Placement::Shard { dim: stored_dim(*dim) }
        }
        other => other.clone(),
    });
    Ok(placed.with_placements(placements.collect::<Vec<_>>())?)
}
