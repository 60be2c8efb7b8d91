//! Staging: the bytes of a version are verified and in the memory of this host before they are copied to the caller's
//! tensors.

use pyo3::prelude::*;
use tssd_store::{GetReport, LeafPart};

use super::{
    Batch, Differences, FillOptions, FillTarget, MatchedTree, fill_rounds, finish_fill,
    increment_versions, match_tree, split_into_rounds,
};
use crate::error::Result;
use crate::importer::TargetImporter;
use crate::store::connection::VersionRead;

/// The tensors of `into`, and the bytes for them.
pub(crate) struct StagedTargets {
    /// Tensors whose bytes are in memory of the store. They are copied from there.
    direct: StagedBatch,
    /// Tensors whose bytes are in staging tensors.
    buffered: StagedBatch,
    /// Leaves that are no tensors: the container, the key and the value.
    values: Vec<(Py<PyAny>, Py<PyAny>, Py<PyAny>)>,
    wrappers: Vec<Py<PyAny>>,
    /// The number of bytes in staging tensors.
    buffered_bytes: u64,
}

/// A batch without a reference to the interpreter.
struct StagedBatch {
    rounds: Vec<Vec<FillTarget>>,
    objects: Vec<Py<PyAny>>,
    staged: Vec<(Py<PyAny>, Py<PyAny>)>,
}

impl StagedBatch {
    fn new(batch: Batch<'_>) -> Self {
        Self {
            rounds: split_into_rounds(batch.targets),
            objects: batch.objects.into_iter().map(Bound::unbind).collect(),
            staged: batch
                .staged
                .into_iter()
                .map(|(object, staged)| (object.unbind(), staged.unbind()))
                .collect(),
        }
    }

    /// Copies staging tensors to the tensors that they stand for.
    fn finish(&self, py: Python<'_>) -> Result<()> {
        let pairs: Vec<_> = self
            .staged
            .iter()
            .map(|(object, staged)| (object.bind(py).clone(), staged.bind(py).clone()))
            .collect();
        finish_fill(py, &pairs, bind(py, &self.objects))
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
    pub(crate) fn stage(
        read: &VersionRead<'_>,
        into: &Bound<'_, PyAny>,
        options: FillOptions<'_, '_>,
    ) -> Result<(Self, GetReport, Differences)> {
        let py = into.py();
        let mut importer = TargetImporter::new(py)?;
        let MatchedTree { leaves, differences, values, wrappers } =
            match_tree(read, &importer, into, options)?;
        let mut batches = Vec::with_capacity(leaves.len());
        for (leaf, stored) in &leaves {
            let mut batch = Batch::default();
            batch.add(&mut importer, leaf, *stored, false)?;
            batches.push(batch);
        }
        let parts: Vec<LeafPart> = batches
            .iter()
            .flat_map(|batch| &batch.targets)
            .map(|target| LeafPart { fqn: target.fqn.clone(), shard_spec: target.part.clone() })
            .collect();
        let in_memory = read.verify_in_memory(py, &parts)?;
        let (mut direct, mut buffered) = (Batch::default(), Batch::default());
        let mut rest = in_memory.as_slice();
        for ((leaf, stored), batch) in leaves.iter().zip(batches) {
            let (own, others) = rest.split_at(batch.targets.len());
            rest = others;
            if own.iter().all(|is_in_memory| *is_in_memory) {
                direct.targets.extend(batch.targets);
                direct.objects.extend(batch.objects);
                direct.staged.extend(batch.staged);
            } else {
                buffered.add(&mut importer, leaf, *stored, true)?;
            }
        }
        let bytes_of = |batch: &Batch<'_>| -> u64 {
            batch.targets.iter().map(|target| target.meta.nbytes()).sum()
        };
        let (direct_bytes, buffered_bytes) = (bytes_of(&direct), bytes_of(&buffered));
        let staged = Self {
            direct: StagedBatch::new(direct),
            buffered: StagedBatch::new(buffered),
            values: values
                .into_iter()
                .map(|(container, key, value)| (container.unbind(), key.unbind(), value.unbind()))
                .collect(),
            wrappers: wrappers.into_iter().map(Bound::unbind).collect(),
            buffered_bytes,
        };
        let mut report = read.reader.report();
        fill_rounds(py, read, &staged.buffered.rounds, &mut report)?;
        let last = read.reader.report();
        (report.bytes_received, report.bytes_verified) = (last.bytes_received, last.bytes_verified);
        report.bytes_needed += direct_bytes;
        report.seconds = last.seconds;
        Ok((staged, report, differences))
    }

    /// Copies the bytes to the tensors of `into`. Returns the number of bytes. It can be repeated.
    ///
    /// `read` does not verify: the bytes are verified already.
    pub(crate) fn commit(&self, py: Python<'_>, read: &VersionRead<'_>) -> Result<u64> {
        let mut report = read.reader.report();
        fill_rounds(py, read, &self.direct.rounds, &mut report)?;
        self.direct.finish(py)?;
        self.buffered.finish(py)?;
        for (container, key, value) in &self.values {
            container.bind(py).set_item(key, value)?;
        }
        increment_versions(py, bind(py, &self.wrappers))?;
        Ok(report.bytes_transferred + self.buffered_bytes)
    }
}
