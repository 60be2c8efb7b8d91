//! Encoding of a state dict as an archive, with compression on all cores.

use tssd_format::{CompressJob, Draft, Layout, Options, Result, StateDict};

use crate::console::Console;
use crate::parallel;

/// Plans the archive of a state dict, and runs its compression jobs.
pub(crate) fn plan(dict: &StateDict, options: &Options, console: Console) -> Result<Layout> {
    let draft = Draft::new(dict, options)?;
    let jobs = draft.jobs();
    let compressed =
        parallel::map(&jobs, console, "compressing", CompressJob::len, CompressJob::run);
    draft.into_layout(compressed.into_iter().collect::<Result<Vec<_>>>()?)
}
