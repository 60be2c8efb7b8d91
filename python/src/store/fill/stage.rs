//! Staging: the bytes of a version are verified and in the memory of this host before they are copied to the caller's
//! tensors.

use pyo3::prelude::*;
use tssd_format::{Dtype, ShardSpec, TensorSlice};
use tssd_store::{GetReport, LeafPart};

use super::transform::{Transform, UnboundComputation, UnboundTransform};
use super::{
    Batch, Computation, Differences, FillOptions, FillTarget, Leaf, MatchedTree, fill_leaves,
    fill_rounds, finish_fill, increment_versions, match_tree, split_into_rounds,
};
use crate::error::Result;
use crate::importer::TargetImporter;
use crate::mapping::Piece;
use crate::store::connection::VersionRead;

/// The tensors of `into`, and the bytes for them.
pub(crate) struct StagedTargets {
    /// Tensors whose bytes are in memory of the store. They are copied from there.
    direct: Vec<(UnboundLeaf, Dtype)>,
    /// Tensors whose bytes are in staging tensors, each with its staging tensor.
    buffered: Vec<(Py<PyAny>, Py<PyAny>)>,
    /// Boxes that are computed from staging tensors.
    computations: Vec<UnboundComputation>,
    buffered_objects: Vec<Py<PyAny>>,
    /// Leaves that are no tensors: the container, the key and the value.
    values: Vec<(Py<PyAny>, Py<PyAny>, Py<PyAny>)>,
    wrappers: Vec<Py<PyAny>>,
    /// The number of bytes in staging tensors.
    buffered_bytes: u64,
}

/// A [`Leaf`] without a reference to the interpreter.
struct UnboundLeaf {
    fqn: String,
    object: Py<PyAny>,
    dtype: Option<Dtype>,
    shape: Vec<u64>,
    is_in_wrapper: bool,
    pieces: Option<Vec<Piece>>,
    transform: Option<UnboundTransform>,
}

impl UnboundLeaf {
    fn new(leaf: Leaf<'_>) -> Self {
        let Leaf { fqn, object, dtype, shape, is_in_wrapper, pieces, transform, .. } = leaf;
        let (object, transform) = (object.unbind(), transform.map(Transform::unbind));
        Self { fqn, object, dtype, shape, is_in_wrapper, pieces, transform }
    }

    fn bind<'py>(&self, py: Python<'py>) -> Leaf<'py> {
        let object = self.object.bind(py).clone();
        let found = (self.dtype, self.shape.clone());
        let leaf = Leaf::new(self.fqn.clone(), object, found, self.is_in_wrapper);
        let transform = self.transform.as_ref().map(|transform| transform.bind(py));
        Leaf { pieces: self.pieces.clone(), transform, ..leaf }
    }
}

fn bind<'py>(py: Python<'py>, objects: &[Py<PyAny>]) -> Vec<Bound<'py, PyAny>> {
    objects.iter().map(|object| object.bind(py).clone()).collect()
}

impl StagedTargets {
    /// Matches `into` with a version, and brings the bytes of its tensors into the memory of this host, verified.
    ///
    /// # Errors
    ///
    /// As [`fill_state_dict`](super::fill_state_dict). No tensor of `into` is written.
    pub(crate) fn stage<'py>(
        read: &VersionRead<'_>,
        into: &Bound<'py, PyAny>,
        options: FillOptions<'_, 'py>,
    ) -> Result<(Self, GetReport, Differences)> {
        let py = into.py();
        let mut importer = TargetImporter::new(py)?;
        let MatchedTree { leaves, differences, values, wrappers } =
            match_tree(read, &importer, into, options)?;
        let mut parts = Vec::new();
        let mut counts = Vec::with_capacity(leaves.len());
        let mut direct_bytes = 0;
        for (leaf, stored) in &leaves {
            let mut batch = Batch::default();
            // With its own dtype, a tensor needs no staging memory.
            let dtype = if leaf.transform.is_some() { None } else { leaf.dtype };
            batch.add(&mut importer, leaf, dtype.unwrap_or(*stored), false)?;
            counts.push(batch.targets.len());
            parts.extend(batch.targets.into_iter().map(FillTarget::into_part));
        }
        let in_memory = read.verify_in_memory(py, &parts)?;
        let (mut direct, mut buffered) = (Vec::new(), Batch::default());
        let (mut rest, mut parts) = (in_memory.as_slice(), parts.as_slice());
        for ((leaf, stored), count) in leaves.into_iter().zip(counts) {
            let (own, others) = rest.split_at(count);
            let (own_parts, other_parts) = parts.split_at(count);
            (rest, parts) = (others, other_parts);
            if own.iter().all(|is_in_memory| *is_in_memory) {
                let itemsize = stored.itemsize();
                direct_bytes +=
                    own_parts.iter().map(|part| numel(part, &leaf) * itemsize).sum::<u64>();
                direct.push((UnboundLeaf::new(leaf), stored));
            } else {
                buffered.add(&mut importer, &leaf, stored, true)?;
            }
        }
        let buffered_bytes = buffered.targets.iter().map(|target| target.meta.nbytes()).sum();
        let rounds = split_into_rounds(buffered.targets);
        let staged = Self {
            direct,
            buffered: buffered
                .staged
                .into_iter()
                .map(|(object, staged)| (object.unbind(), staged.unbind()))
                .collect(),
            computations: buffered.computations.into_iter().map(Computation::unbind).collect(),
            buffered_objects: buffered.objects.into_iter().map(Bound::unbind).collect(),
            values: values
                .into_iter()
                .map(|(container, key, value)| (container.unbind(), key.unbind(), value.unbind()))
                .collect(),
            wrappers: wrappers.into_iter().map(Bound::unbind).collect(),
            buffered_bytes,
        };
        let mut report = read.reader.report();
        fill_rounds(py, read, &rounds, &mut report)?;
        let last = read.reader.report();
        (report.bytes_received, report.bytes_verified) = (last.bytes_received, last.bytes_verified);
        report.bytes_needed += direct_bytes;
        report.seconds = last.seconds;
        Ok((staged, report, differences))
    }

    /// Returns the number of bytes in staging tensors.
    pub(crate) fn buffered_bytes(&self) -> u64 {
        self.buffered_bytes
    }

    /// Copies the bytes to the tensors of `into`. Returns the number of bytes. It can be repeated.
    ///
    /// `read` does not verify: the bytes are verified already. The memory of the tensors is looked up now, because they may
    /// have been given other memory since they were staged.
    pub(crate) fn commit(&self, py: Python<'_>, read: &VersionRead<'_>) -> Result<u64> {
        let mut importer = TargetImporter::new(py)?;
        let direct = self.direct.iter().map(|(leaf, stored)| (leaf.bind(py), *stored)).collect();
        let filled = fill_leaves(py, read, &mut importer, direct)?;
        let pairs: Vec<_> = self
            .buffered
            .iter()
            .map(|(object, staged)| (object.bind(py).clone(), staged.bind(py).clone()))
            .collect();
        for computation in &self.computations {
            computation.bind(py).run()?;
        }
        finish_fill(py, &pairs, bind(py, &self.buffered_objects))?;
        for (container, key, value) in &self.values {
            container.bind(py).set_item(key, value)?;
        }
        increment_versions(py, bind(py, &self.wrappers))?;
        Ok(filled.report.bytes_transferred + self.buffered_bytes)
    }
}

/// Returns the number of elements of a part of a leaf.
fn numel(part: &LeafPart, leaf: &Leaf<'_>) -> u64 {
    let slice = part.shard_spec.as_ref().map(ShardSpec::slice);
    slice.map_or(leaf.shape.as_slice(), TensorSlice::local_shape).iter().product()
}
