//! A state dict becomes an archive, compressed on all cores.

use tssd_format::{Draft, Layout, Options, Pack, Result, StateDict};

use crate::console::Console;
use crate::parallel;

/// Plans the archive of a state dict; what is to be compressed, is.
pub(crate) fn plan(dict: &StateDict, options: &Options, console: Console) -> Result<Layout> {
    let draft = Draft::new(dict, options)?;
    let jobs = draft.jobs();
    let packed = parallel::map(&jobs, (console, "compressing"), Pack::len, Pack::run);
    draft.place(packed.into_iter().collect::<Result<Vec<_>>>()?)
}
