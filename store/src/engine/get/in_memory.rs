//! Verification of parts of leaves in the memory of this host, ahead of a copy.

use super::{LeafPart, MIN_BYTES_PER_THREAD, Read, to_u64};
use crate::error::Result;
use crate::io::parallel;
use crate::plan::SingleCopy;

impl Read<'_> {
    /// Verifies the parts that are in the memory of this host, without a copy.
    ///
    /// Returns for each part whether all its bytes are there, uncompressed. The other parts are not read.
    pub(crate) fn verify_in_memory(&mut self, parts: &[LeafPart]) -> Result<Vec<bool>> {
        let plan = self.plan_parts(parts)?;
        self.version.load_held(plan.copies().map(|copy| copy.storage))?;
        let is_in_memory = |copy: &SingleCopy<'_>| self.version.is_in_memory(copy.storage);
        let (mut found, mut in_memory) = (Vec::with_capacity(parts.len()), Vec::new());
        for copies in plan.copies_by_target() {
            let is_found = copies.iter().all(is_in_memory);
            found.push(is_found);
            if is_found {
                in_memory.extend(copies);
            }
        }
        if !self.unverified {
            parallel::map(shares(in_memory), |share| {
                share.into_iter().try_for_each(|copy| self.verify(copy))
            })?;
        }
        Ok(found)
    }

    /// Verifies the chunks of a copy.
    fn verify(&self, copy: SingleCopy<'_>) -> Result<()> {
        let range = copy.source_offset..copy.source_offset + copy.runs.source_span();
        let mut window = self.version.window(copy.storage, range, false)?;
        let mut result = Ok(());
        copy.runs.for_each(|from, _, bytes| {
            if result.is_ok() {
                result = window.verify(&(from..from + bytes));
            }
        });
        result
    }
}

/// Splits copies into shares, one for each thread.
fn shares(copies: Vec<SingleCopy<'_>>) -> Vec<Vec<SingleCopy<'_>>> {
    let mut shares = vec![Vec::new()];
    let mut bytes = 0;
    for copy in copies {
        if bytes >= to_u64(MIN_BYTES_PER_THREAD) {
            shares.push(Vec::new());
            bytes = 0;
        }
        bytes += copy.runs.total_bytes();
        shares.last_mut().expect("it has a share").push(copy);
    }
    shares
}
