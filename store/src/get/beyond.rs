//! Targets that this process does not see: their bytes come into memory here, unless they are there, and go on.

use tssd_format::Runs;

use super::plans::{Beyond, Request};
use super::{Read, memory, native, wide};
use crate::error::{Error, Result};
use crate::parallel;
use crate::plan::Copy;

/// About so many bytes are on their way at once.
const STAGED_BYTES: usize = 64 << 20;

impl Read<'_> {
    /// Fills parts of targets that are elsewhere.
    pub(super) fn send(&self, requests: &[Request<'_>], parts: Vec<Beyond<'_, '_>>) -> Result<()> {
        let is_seen =
            |copy: &Copy| self.version.far(copy.storage).is_none() && copy.runs.loops().is_empty();
        let (direct, mut staged): (Vec<_>, Vec<_>) =
            parts.into_iter().partition(|part| part.copies.iter().all(is_seen));
        let failed = |part: &Beyond<'_, '_>, error| {
            let fqn = requests[part.number].leaf.fqn();
            Error::io(format_args!("leaf `{fqn}`"), error)
        };
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

/// Sends what copies have filled, and nothing between.
fn runs(part: &Beyond<'_, '_>, memory: &[u8]) -> std::io::Result<()> {
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
