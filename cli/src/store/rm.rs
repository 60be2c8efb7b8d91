//! `tssd rm`: deletes versions of a key.

use serde_json::json;
use tssd_store::{KeyVersion, Label, Selection, Selector};

use super::{Address, select_version, store_failure};
use crate::console::Console;
use crate::exit::Exit;
use crate::failure::{Failure, Result};
use crate::size::pluralize;

/// Delete a version of a key, or all of its versions. Their numbers are not used again, unless all that
/// was put was in memory and the daemon starts anew.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    store: Address,
    /// KEY (all versions) or KEY@VERSION
    key: KeyVersion,
    /// The version that this label pins. Readers no longer find it by its number; the label keeps its data until
    /// `tssd unpin`
    #[arg(long, value_name = "LABEL")]
    label: Option<Label>,
}

/// Deletes versions and reports their number. If there are none, that is an error.
pub(crate) fn run(args: &Args, console: Console) -> Result<Exit> {
    let version = args.key.version;
    let (key, versions) = match select_version(&args.key, args.label.as_ref())? {
        (key, Selector::Label(label)) => (key, Selection::Label(label)),
        (key, _) => (key, Selection::from(version)),
    };
    let store = args.store.connect()?;
    let deleted = store.delete(key, versions).map_err(|error| store_failure(&error))?;
    if deleted == 0 {
        let missing = match (&args.label, version) {
            (Some(label), _) => format!("no visible version of {key} has the label `{label}`"),
            (None, Some(version)) => format!("there is no {key}@{version}"),
            (None, None) => format!("there is no {key}"),
        };
        return Err(Failure::new(Exit::NotFound, missing)
            .help("`tssd ls` lists the keys, `tssd ls KEY` its versions"));
    }
    let line = format!("{key}: {} deleted", pluralize(deleted, "version"));
    console.report(line, &json!({ "key": key.as_str(), "deleted": deleted }))?;
    Ok(Exit::Ok)
}
