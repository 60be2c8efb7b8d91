use std::collections::BTreeMap;

use super::PutOptions;
use crate::error::{Error, ErrorKind, Result};
use crate::io::sync::Lock;
use crate::key::Key;
use crate::ledger::JobId;

/// Counts the puts of each writer of each job.
///
/// The counts match contributions to versions without a number.
#[derive(Default)]
pub(crate) struct PutSequences(Lock<BTreeMap<(Key, JobId, u32), u64>>);

impl PutSequences {
    /// Returns the sequence number of a put, from 1 on, if contributions are matched by it.
    ///
    /// A put that fails counts too.
    ///
    /// # Errors
    ///
    /// `Invalid` if a put of a job has neither a number nor a writer.
    pub(crate) fn next(&self, key: &Key, options: &PutOptions) -> Result<Option<u64>> {
        match (&options.job, options.writer, options.version) {
            (Some(job), Some(writer), _) => {
                let mut counts = self.0.lock();
                let count = counts.entry((key.clone(), job.clone(), writer)).or_default();
                *count += 1;
                Ok(Some(*count))
            }
            (None, ..) | (_, _, Some(_)) => Ok(None),
            (Some(_), None, None) => Err(Error::new(
                ErrorKind::Invalid,
                "puts of a job are matched by their number or by their writer's count; say version= or \
                 writer=",
            )),
        }
    }
}
