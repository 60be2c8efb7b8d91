//! `tssd ls`: lists the keys and versions of a store.

use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Value as Json, json};
use tssd_store::blocking::Store;
use tssd_store::{Key, VersionInfo};

use super::{Address, store_failure};
use crate::console::{Console, print, print_json};
use crate::exit::Exit;
use crate::failure::{Failure, Result};
use crate::size::Size;
use crate::table::{Align, Table};

/// List the keys of a store with their newest versions, or all versions of one key.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    store: Address,
    /// List the versions of this key
    key: Option<Key>,
}

/// Lists keys or versions. A missing key is an error, an empty store is not.
pub(crate) fn run(args: &Args, console: Console) -> Result<Exit> {
    let store = args.store.connect()?;
    let rows = match &args.key {
        Some(key) => versions_of(&store, key)?,
        None => newest_versions(&store)?,
    };
    if console.json {
        let rows: Vec<Json> = rows.iter().map(|(key, info)| version_json(key, info)).collect();
        print_json(&rows.into())?;
        return Ok(Exit::Ok);
    }
    let mut table = Table::new(&[
        ("KEY", Align::Left),
        ("VERSION", Align::Right),
        ("BYTES", Align::Right),
        ("WRITERS", Align::Left),
        ("AGE", Align::Right),
    ]);
    for (key, info) in &rows {
        table.row([
            key.to_string(),
            info.number.to_string(),
            Size(info.bytes).to_string(),
            info.writers.to_string(),
            age(info),
        ]);
    }
    if !rows.is_empty() {
        print(&table)?;
    }
    Ok(Exit::Ok)
}

fn versions_of(store: &Store, key: &Key) -> Result<Vec<(Key, VersionInfo)>> {
    let versions = store.versions(key).map_err(|error| store_failure(&error))?;
    if versions.is_empty() {
        return Err(Failure::new(Exit::NotFound, format_args!("key `{key}` has no version"))
            .help("`tssd ls` lists the keys"));
    }
    Ok(versions.into_iter().map(|info| (key.clone(), info)).collect())
}

fn newest_versions(store: &Store) -> Result<Vec<(Key, VersionInfo)>> {
    let mut rows = Vec::new();
    for key in store.keys(None).map_err(|error| store_failure(&error))? {
        // The key may have been deleted between the two calls.
        if let Some(info) = store.head(&key).map_err(|error| store_failure(&error))? {
            rows.push((key, info));
        }
    }
    Ok(rows)
}

pub(super) fn version_json(key: &Key, info: &VersionInfo) -> Json {
    json!({
        "key": key.as_str(),
        "version": info.number,
        "epoch": info.epoch,
        "id": info.id.to_string(),
        "bytes": info.bytes,
        "writers": info.writers.iter().collect::<Vec<_>>(),
        "since_unix_ms": info.since.0,
        "run": info.process.as_ref().map(|process| &process.run),
        "host": info.process.as_ref().map(|process| &process.host),
        "pid": info.process.as_ref().map(|process| process.pid),
    })
}

/// Returns the age of a version, in the largest unit that fits.
fn age(info: &VersionInfo) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let now = u64::try_from(now.as_millis()).unwrap_or(u64::MAX);
    match now.saturating_sub(info.since.0) / 1000 {
        seconds @ 0..60 => format!("{seconds} s"),
        seconds @ 60..3600 => format!("{} min", seconds / 60),
        seconds @ 3600..86_400 => format!("{} h", seconds / 3600),
        seconds => format!("{} d", seconds / 86_400),
    }
}
