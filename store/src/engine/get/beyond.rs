//! Targets that this process does not see: their bytes come into memory here, unless they are there, and go on.

use std::io;

use tssd_format::{Blob, Runs};

use super::plans::{Beyond, Request};
use super::{Read, memory, native, wide};
use crate::device::{BlobCopy, CopyBatch};
use crate::error::{Error, Result};
use crate::io::parallel;
use crate::io::sync::Lock;
use crate::plan::Copy;

/// About so many bytes are on their way at once.
const STAGED_BYTES: usize = 64 << 20;

impl Read<'_> {
    /// Fills parts of targets that are elsewhere.
    pub(super) fn send(&self, requests: &[Request<'_>], parts: Vec<Beyond<'_, '_>>) -> Result<()> {
        let parts = self.straight(requests, parts)?;
        let is_seen =
            |copy: &Copy| self.version.far(copy.storage).is_none() && copy.runs.loops().is_empty();
        let (direct, mut staged): (Vec<_>, Vec<_>) =
            parts.into_iter().partition(|part| part.copies.iter().all(is_seen));
        let failed = |part: &Beyond<'_, '_>, error| failed(requests, part.number, error);
        parallel::map(direct, |part| {
            part.copies.iter().try_for_each(|copy| {
                let range = copy.source..copy.source + copy.runs.run_bytes();
                let bytes = self.version.bytes(copy.storage, range, self.unverified)?;
                let sent = part.blob.write_all_at(&bytes, part.start + copy.target);
                sent.map_err(|error| failed(&part, error))
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
            let memories = batch.iter().map(|part| memory(wide(part.len)));
            let mut memories = memories.collect::<Result<Vec<_>>>()?;
            let mut jobs: Vec<(&[Copy], &mut [u8])> = batch
                .iter()
                .map(|part| part.copies)
                .zip(memories.iter_mut().map(Vec::as_mut_slice))
                .collect();
            let near = |copies: &[Copy], target: &mut [u8]| {
                let mut near =
                    copies.iter().filter(|copy| self.version.far(copy.storage).is_none());
                near.try_for_each(|copy| self.copy(copy, target))
            };
            parallel::map(jobs.iter_mut().collect(), |(copies, target)| near(copies, target))?;
            self.pull(jobs)?;
            parallel::map(batch.iter().zip(&memories).collect(), |(part, memory)| {
                let filled: u64 = part.copies.iter().map(|copy| copy.runs.total_bytes()).sum();
                // Without a gap, in whatever order the elements are.
                let sent = if filled == wide(part.len) {
                    part.blob.write_all_at(memory, part.start)
                } else {
                    runs(part, memory)
                };
                sent.map_err(|error| failed(part, error))
            })?;
        }
        Ok(())
    }
}

impl Read<'_> {
    /// Fills what takes its bytes straight from where they are, while what comes next is proven. Gives what does not.
    fn straight<'p, 't>(
        &self,
        requests: &[Request<'_>],
        parts: Vec<Beyond<'p, 't>>,
    ) -> Result<Vec<Beyond<'p, 't>>> {
        let batch = Lock::new(CopyBatch::default());
        let others = parallel::map(parts, |part| {
            let has_begun = self.begin(requests, &part, &batch)?;
            Ok::<_, Error>((!has_begun).then_some(part))
        })?;
        let batch = batch.into_inner();
        batch.wait().map_err(|error| Error::io("what was copied to targets", error))?;
        Ok(others.into_iter().flatten().collect())
    }

    /// Begins to copy a part straight from the archives that it comes from; says whether that can be for all of them.
    fn begin<'a>(
        &'a self,
        requests: &[Request<'_>],
        part: &Beyond<'_, 'a>,
        batch: &Lock<CopyBatch<'a>>,
    ) -> Result<bool> {
        let mut sources: Vec<(&dyn Blob, Vec<BlobCopy<'_>>)> = Vec::new();
        for copy in part.copies {
            let Some((blob, offset)) = self.version.raw(copy.storage) else { return Ok(false) };
            let (source, target) = (offset + copy.source, part.start + copy.target);
            let copy = BlobCopy { source, target, runs: &copy.runs };
            match sources.iter_mut().find(|(known, _)| std::ptr::addr_eq(*known, blob)) {
                Some((_, copies)) => copies.push(copy),
                None if part.blob.can_copy_from(blob) => sources.push((blob, vec![copy])),
                None => return Ok(false),
            }
        }
        part.copies.iter().try_for_each(|copy| self.prove(copy))?;
        let mut batch = batch.lock();
        let mut sources = sources.into_iter();
        let begun =
            sources.try_for_each(|(blob, copies)| part.blob.begin_copy(blob, &copies, &mut batch));
        begun.map(|()| true).map_err(|error| failed(requests, part.number, error))
    }

    /// Proves what a copy reads, if this process sees it: whoever copies it does not look.
    fn prove(&self, copy: &Copy) -> Result<()> {
        let sees = |(blob, _): (&dyn Blob, u64)| blob.bytes().is_some();
        if self.unverified || !self.version.raw(copy.storage).is_some_and(sees) {
            return Ok(());
        }
        let range = copy.source..copy.source + copy.runs.source_span();
        let mut window = self.version.window(copy.storage, range, false)?;
        let mut proven = Ok(());
        Runs::for_each(&copy.runs, |source, _, len| {
            if proven.is_ok() {
                proven = window.prove(&(source..source + len));
            }
        });
        proven
    }
}

fn failed(requests: &[Request<'_>], number: usize, error: io::Error) -> Error {
    let fqn = requests[number].leaf.fqn();
    Error::io(format_args!("leaf `{fqn}`"), error)
}

/// Sends what copies have filled, and nothing between.
fn runs(part: &Beyond<'_, '_>, memory: &[u8]) -> io::Result<()> {
    let mut sent = Ok(());
    for copy in part.copies {
        let each = |_, target: u64, len: u64| {
            if sent.is_ok() {
                let start = copy.target + target;
                let bytes = &memory[native(start)..native(start + len)];
                sent = part.blob.write_all_at(bytes, part.start + start);
            }
        };
        Runs::for_each(&copy.runs, each);
    }
    sent
}
