//! Tensors that are computed from stored elements: rules with `quantize` and `block_scales`.

use pyo3::intern;
use pyo3::prelude::*;
use tssd_format::{Dtype, Region, ShardSpec, TensorMeta, TensorSlice};

use super::{Batch, FillTarget, Leaf, no_tensor};
use crate::error::{BindingError, Result};
use crate::importer::TargetImporter;
use crate::mapping::{Piece, split_tensor};
use crate::slice::LocalTensors;

/// Computes boxes of a tensor from boxes of the stored parts: a `Transform` of `tssd/_block_scaling.py`.
#[derive(Clone)]
pub(super) struct Transform<'py> {
    object: Bound<'py, PyAny>,
    /// Dtype of the result.
    pub(super) dtype: Dtype,
}

impl<'py> Transform<'py> {
    pub(super) fn new(object: Bound<'py, PyAny>) -> Result<Self> {
        let name: String = object.getattr(intern!(object.py(), "dtype"))?.extract()?;
        let dtype = Dtype::from_name(&name).expect("a transform has a dtype of the format");
        Ok(Self { object, dtype })
    }

    pub(super) fn unbind(self) -> UnboundTransform {
        UnboundTransform { object: self.object.unbind(), dtype: self.dtype }
    }

    /// Returns the box of the source that a box of the result is computed from.
    fn source_box(&self, region: &Region) -> Result<Region> {
        let (offsets, sizes): (Vec<u64>, Vec<u64>) = self
            .object
            .call_method1("source_box", (region.offsets(), region.shape()))?
            .extract()?;
        Ok(Region::new(&offsets, &sizes)?)
    }
}

/// A [`Transform`] without a reference to the interpreter.
pub(super) struct UnboundTransform {
    object: Py<PyAny>,
    dtype: Dtype,
}

impl UnboundTransform {
    pub(super) fn bind<'py>(&self, py: Python<'py>) -> Transform<'py> {
        Transform { object: self.object.bind(py).clone(), dtype: self.dtype }
    }
}

/// A box that is computed when its source is filled.
pub(super) struct Computation<'py> {
    transform: Transform<'py>,
    /// Tensor with the stored elements.
    source: Bound<'py, PyAny>,
    source_offsets: Vec<u64>,
    /// The caller's tensor.
    result: Bound<'py, PyAny>,
    offsets: Vec<u64>,
}

impl Computation<'_> {
    pub(super) fn run(&self) -> Result<()> {
        let arguments = (&self.source, &self.source_offsets, &self.result, &self.offsets);
        self.transform.object.call_method1("apply", arguments)?;
        Ok(())
    }

    pub(super) fn unbind(self) -> UnboundComputation {
        let Self { transform, source, source_offsets, result, offsets } = self;
        let (transform, source, result) = (transform.unbind(), source.unbind(), result.unbind());
        UnboundComputation { transform, source, source_offsets, result, offsets }
    }
}

/// A [`Computation`] without a reference to the interpreter.
pub(super) struct UnboundComputation {
    transform: UnboundTransform,
    source: Py<PyAny>,
    source_offsets: Vec<u64>,
    result: Py<PyAny>,
    offsets: Vec<u64>,
}

impl UnboundComputation {
    pub(super) fn bind<'py>(&self, py: Python<'py>) -> Computation<'py> {
        Computation {
            transform: self.transform.bind(py),
            source: self.source.bind(py).clone(),
            source_offsets: self.source_offsets.clone(),
            result: self.result.bind(py).clone(),
            offsets: self.offsets.clone(),
        }
    }
}

impl<'py> Batch<'py> {
    /// Adds a leaf that is computed from elements of the stored dtype.
    pub(super) fn add_computed(
        &mut self,
        importer: &mut TargetImporter<'py>,
        leaf: &Leaf<'py>,
        (transform, pieces): (&Transform<'py>, &[Piece]),
        stored: Dtype,
        is_buffered: bool,
    ) -> Result<()> {
        let failed = |error: BindingError| error.with_fqn(&leaf.fqn);
        let locals = LocalTensors::from_object(&leaf.object)?;
        let locals = locals.ok_or_else(|| failed(no_tensor(&leaf.fqn)))?;
        let boxes = importer.import_targets(&leaf.object, transform.dtype, false);
        let (boxes, staged) = boxes.map_err(|error| error.with_fqn(&leaf.fqn))?;
        let results = locals.tensors();
        if boxes.len() != results.len() || !staged.is_empty() {
            let text = "a tensor that is computed is one box in the memory of the host or of a GPU";
            let advice = "get it into a tensor of another sharding";
            return Err(failed(BindingError::untyped_leaf(text, advice)).into());
        }
        self.objects.push(leaf.object.clone());
        for ((tensor, spec), result) in boxes.into_iter().zip(results) {
            let region = match &spec {
                Some(spec) => spec.slice().region().clone(),
                None => Region::whole(tensor.meta().shape()),
            };
            if region.is_empty() {
                continue;
            }
            let source_region = transform.source_box(&region)?;
            let meta = TensorMeta::new(stored, source_region.shape())?;
            let (source, filled) = importer
                .allocate_source(result, &meta, is_buffered)
                .map_err(|error| error.with_fqn(&leaf.fqn))?;
            self.staged_bytes += meta.nbytes();
            let source_shape = Piece::value_shape(pieces, source_region.rank());
            let slice =
                TensorSlice::new(source_region.offsets(), source_region.shape(), &source_shape)?;
            for part in split_tensor(&filled, Some(&ShardSpec::new(slice)), pieces)? {
                let target =
                    FillTarget::new(part.stored, importer.devices(), part.tensor, Some(part.spec));
                self.targets.push(target);
            }
            self.computations.push(Computation {
                transform: transform.clone(),
                source,
                source_offsets: source_region.offsets().to_vec(),
                result: result.clone(),
                offsets: region.offsets().to_vec(),
            });
        }
        Ok(())
    }
}
