//! `tssd head`: prints the newest version of a key. `tssd watch`: prints each new version.

use tssd_store::{Key, VersionInfo};

use super::ls::version_json;
use super::{Address, store_failure};
use crate::console::Console;
use crate::exit::Exit;
use crate::failure::{Failure, Result};
use crate::size::Size;

/// Print the number of the newest version of a key.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    store: Address,
    /// The key
    key: Key,
}

/// Print each version of a key as it becomes visible, from the newest on.
#[derive(Debug, clap::Args)]
pub(crate) struct WatchArgs {
    #[command(flatten)]
    store: Address,
    /// The key, which need not be there yet
    key: Key,
    /// End after so many versions
    #[arg(long, value_name = "COUNT")]
    count: Option<usize>,
}

pub(crate) fn run(args: &Args, console: Console) -> Result<Exit> {
    let store = args.store.connect()?;
    let head = store.head(&args.key).map_err(|error| store_failure(&error))?;
    let Some(head) = head else {
        let key = &args.key;
        return Err(Failure::new(Exit::NotFound, format_args!("key `{key}` has no version"))
            .help("`tssd ls` lists the keys; `tssd watch` waits for the first version"));
    };
    console.result(head.number, &version_json(&args.key, &head))?;
    Ok(Exit::Ok)
}

pub(crate) fn watch(args: &WatchArgs, console: Console) -> Result<Exit> {
    let store = args.store.connect()?;
    for info in store.subscribe(&args.key).take(args.count.unwrap_or(usize::MAX)) {
        let info = info.map_err(|error| store_failure(&error))?;
        console.result(version_line(&args.key, &info), &version_json(&args.key, &info))?;
    }
    Ok(Exit::Ok)
}

fn version_line(key: &Key, info: &VersionInfo) -> String {
    format!("{key}@{}: {}, writers {}", info.number, Size(info.bytes), info.writers)
}
