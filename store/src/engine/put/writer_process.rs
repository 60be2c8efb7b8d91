use std::collections::BTreeMap;
use std::sync::LazyLock;

use super::PutOptions;
use crate::error::{Error, ErrorKind, Result};
use crate::io::environment::{Environment, SystemEnvironment};
use crate::io::sync::Lock;
use crate::key::Key;
use crate::ledger::{JobId, RunId, RunProcess};

/// The run of puts without a job. A store that is opened again after a lost connection continues it, and so does a
/// process that was forked.
static OWN_RUN: LazyLock<RunId> = LazyLock::new(|| {
    // 64 bits are unique among the runs that a ledger remembers.
    let id = u64::try_from(SystemEnvironment.random_id() >> 64).unwrap_or_default();
    RunId(format!("{id:016x}"))
});

/// This process as a writer of a store: its run, and the counts of its puts.
pub(crate) struct WriterProcess {
    host: String,
    /// Counts the puts of each writer of each job. They match contributions to versions without a number.
    sequences: Lock<BTreeMap<(Key, JobId, u32), u64>>,
}

impl WriterProcess {
    pub(crate) fn new() -> Self {
        Self { host: SystemEnvironment.host_name(), sequences: Lock::default() }
    }

    /// Returns this process, with the run of a put.
    pub(crate) fn run_process(&self, job: Option<&JobId>) -> RunProcess {
        let run = job.map_or_else(|| OWN_RUN.clone(), RunId::from);
        RunProcess { run, host: self.host.clone(), pid: std::process::id() }
    }

    /// Returns the sequence number of a put, from 1 on, if contributions are matched by it.
    ///
    /// A put that fails counts too.
    ///
    /// # Errors
    ///
    /// `Invalid` if a put of a job has neither a number nor a writer.
    pub(crate) fn next_sequence(&self, key: &Key, options: &PutOptions) -> Result<Option<u64>> {
        match (&options.job, options.writer, options.version) {
            (Some(job), Some(writer), _) => {
                let mut counts = self.sequences.lock();
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
