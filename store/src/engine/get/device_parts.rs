//! Fills targets in device memory.
//!
//! The device copies from the archives itself if it can. Otherwise the bytes are staged in host memory.

use std::io;

use tssd_format::{Blob, Runs};

use super::plans::{DevicePart, Request};
use super::{Read, allocate, to_u64, to_usize};
use crate::device::{BlobCopy, CopyBatch};
use crate::error::{Error, Result};
use crate::io::parallel;
use crate::io::sync::Lock;
use crate::plan::{RegionCopy, SingleCopy};

/// Approximate bytes that are staged at once.
const STAGED_BYTES: usize = 64 << 20;

impl Read<'_> {
    /// Fills parts of targets in device memory.
    pub(super) fn fill_device_parts(
        &self,
        requests: &[Request<'_>],
        parts: Vec<DevicePart<'_, '_>>,
    ) -> Result<()> {
        let parts = self.copy_from_archives(requests, parts)?;
        let is_direct = |copy: SingleCopy<'_>| {
            self.version.remote_archive(copy.storage).is_none() && copy.runs.loops().is_empty()
        };
        let (direct, mut staged): (Vec<_>, Vec<_>) =
            parts.into_iter().partition(|part| part.single_copies().all(is_direct));
        let failed = |part: &DevicePart<'_, '_>, error| failed(requests, part.target_index, error);
        parallel::map(direct, |part| {
            part.single_copies().try_for_each(|copy| {
                let range = copy.source_offset..copy.source_offset + copy.runs.run_bytes();
                let bytes = self.version.bytes(copy.storage, range, self.unverified)?;
                let written = part.blob.write_all_at(&bytes, part.start + copy.target_offset);
                written.map_err(|error| failed(&part, error))
            })
        })?;
        while !staged.is_empty() {
            let mut bytes = 0;
            let count = staged.iter().take_while(|part| {
                let is_first = bytes == 0;
                bytes += part.len;
                is_first || bytes <= STAGED_BYTES
            });
            let rest = staged.split_off(count.count());
            let batch = std::mem::replace(&mut staged, rest);
            let memories = batch.iter().map(|part| allocate(to_u64(part.len)));
            let mut memories = memories.collect::<Result<Vec<_>>>()?;
            let mut jobs: Vec<(&[RegionCopy], &mut [u8])> = batch
                .iter()
                .map(|part| part.copies)
                .zip(memories.iter_mut().map(Vec::as_mut_slice))
                .collect();
            let copy_local = |copies: &[RegionCopy], target: &mut [u8]| {
                let mut local = copies
                    .iter()
                    .flat_map(RegionCopy::each)
                    .filter(|copy| self.version.remote_archive(copy.storage).is_none());
                local.try_for_each(|copy| self.copy(copy, target))
            };
            parallel::map(jobs.iter_mut().collect(), |(copies, target)| {
                copy_local(copies, target)
            })?;
            self.pull(jobs)?;
            parallel::map(batch.iter().zip(&memories).collect(), |(part, memory)| {
                let filled: u64 = part.copies.iter().map(RegionCopy::total_bytes).sum();
                // If the copies leave no gap, all bytes are written at once, in any order of the elements.
                let written = if filled == to_u64(part.len) {
                    part.blob.write_all_at(memory, part.start)
                } else {
                    write_runs(part, memory)
                };
                written.map_err(|error| failed(part, error))
            })?;
        }
        Ok(())
    }
}

impl Read<'_> {
    /// Fills the parts that the device can copy from the archives. The next part is verified meanwhile.
    ///
    /// Returns the other parts.
    fn copy_from_archives<'p, 't>(
        &self,
        requests: &[Request<'_>],
        parts: Vec<DevicePart<'p, 't>>,
    ) -> Result<Vec<DevicePart<'p, 't>>> {
        let batch = Lock::new(CopyBatch::default());
        let others = parallel::map(parts, |part| {
            let has_begun = self.begin_copy(requests, &part, &batch)?;
            Ok::<_, Error>((!has_begun).then_some(part))
        })?;
        let batch = batch.into_inner();
        batch.wait().map_err(|error| Error::io("what was copied to targets", error))?;
        Ok(others.into_iter().flatten().collect())
    }

    /// Begins to copy a part from its archives.
    ///
    /// Returns false if the device cannot copy from all of them.
    fn begin_copy<'a>(
        &'a self,
        requests: &[Request<'_>],
        part: &DevicePart<'_, 'a>,
        batch: &Lock<CopyBatch<'a>>,
    ) -> Result<bool> {
        let mut sources: Vec<(&dyn Blob, Vec<BlobCopy<'_>>)> = Vec::new();
        for copy in part.single_copies() {
            let Some((blob, offset)) = self.version.raw_archive(copy.storage) else {
                return Ok(false);
            };
            let (source, target) = (offset + copy.source_offset, part.start + copy.target_offset);
            let copy = BlobCopy { source, target, runs: copy.runs };
            match sources.iter_mut().find(|(source, _)| std::ptr::addr_eq(*source, blob)) {
                Some((_, copies)) => copies.push(copy),
                None if part.blob.can_copy_from(blob) => sources.push((blob, vec![copy])),
                None => return Ok(false),
            }
        }
        part.single_copies().try_for_each(|copy| self.verify_source(copy))?;
        let mut batch = batch.lock();
        let mut sources = sources.into_iter();
        let result =
            sources.try_for_each(|(blob, copies)| part.blob.begin_copy(blob, &copies, &mut batch));
        result.map(|()| true).map_err(|error| failed(requests, part.target_index, error))
    }

    /// Verifies the bytes that a copy reads if they are in memory. The device does not verify them.
    fn verify_source(&self, copy: SingleCopy<'_>) -> Result<()> {
        let is_mapped = |(blob, _): (&dyn Blob, u64)| blob.bytes().is_some();
        if self.unverified || !self.version.raw_archive(copy.storage).is_some_and(is_mapped) {
            return Ok(());
        }
        let range = copy.source_offset..copy.source_offset + copy.runs.source_span();
        let mut window = self.version.window(copy.storage, range, false)?;
        let mut verified = Ok(());
        Runs::for_each(copy.runs, |source, _, len| {
            if verified.is_ok() {
                verified = window.verify(&(source..source + len));
            }
        });
        verified
    }
}

fn failed(requests: &[Request<'_>], number: usize, error: io::Error) -> Error {
    let fqn = requests[number].leaf.fqn();
    Error::io(format_args!("leaf `{fqn}`"), error)
}

/// Writes the bytes that copies have filled, and no gap between them.
fn write_runs(part: &DevicePart<'_, '_>, memory: &[u8]) -> io::Result<()> {
    let mut written = Ok(());
    for copy in part.single_copies() {
        let each = |_, target: u64, len: u64| {
            if written.is_ok() {
                let start = copy.target_offset + target;
                let bytes = &memory[to_usize(start)..to_usize(start + len)];
                written = part.blob.write_all_at(bytes, part.start + start);
            }
        };
        Runs::for_each(copy.runs, each);
    }
    written
}
