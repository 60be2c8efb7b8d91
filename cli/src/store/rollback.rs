//! `tssd rollback`: makes an old version the newest one.

use tssd_store::{KeyVersion, Label, Selector};

use super::ls::version_json;
use super::{Address, select_version, store_failure};
use crate::console::Console;
use crate::exit::Exit;
use crate::failure::{Failure, Result};

/// Make an old version of a key the newest one. It gets the next number, and no bytes move. Readers that wait
/// for a new version, or watch the key, get it.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    store: Address,
    /// The key and the number of the version: KEY@VERSION, or KEY with --label
    key: KeyVersion,
    /// The version that this label pins
    #[arg(long, value_name = "LABEL")]
    label: Option<Label>,
}

pub(crate) fn run(args: &Args, console: Console) -> Result<Exit> {
    let (key, to) = select_version(&args.key, args.label.as_ref())?;
    if to == Selector::Newest {
        return Err(Failure::new(Exit::Usage, "rollback needs the version to return to")
            .help("name it: KEY@VERSION, or KEY --label LABEL; `tssd ls KEY` lists the versions"));
    }
    let store = args.store.connect()?;
    let newest = store.rollback(key, to).map_err(|error| store_failure(&error))?;
    let line = format!("{key}@{} is the newest version", newest.number);
    console.report(line, &version_json(key, &newest))?;
    Ok(Exit::Ok)
}
