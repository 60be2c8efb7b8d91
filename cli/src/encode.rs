//! A state dict becomes an archive, compressed on all cores.

use tssd_format::{Draft, Layout, Options, Pack, Result, StateDict};

use crate::console::Console;
use crate::parallel;

/// Plans the archive of a state dict; what is to be compressed, is.
pub(crate) fn plan(dict: &StateDict, options: &Options, console: Console) -> Result<Layout> {
    let draft = Draft::new(dict, options)?;
    let jobs = draft.jobs();
    let bar = console.bytes_bar("compressing", jobs.iter().map(Pack::len).sum());
    let packed = parallel::map(&jobs, |job| {
        let packed = job.run();
        bar.inc(job.len());
        packed
    });
    bar.finish_and_clear();
    draft.place(packed.into_iter().collect::<Result<Vec<_>>>()?)
}
