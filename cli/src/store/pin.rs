//! `tssd pin`, `tssd unpin` and `tssd pins`: labels that retain versions.

use serde_json::json;
use tssd_store::{Key, KeyVersion, Label};

use super::{Address, store_failure};
use crate::console::{Console, print, print_json};
use crate::exit::Exit;
use crate::failure::Result;
use crate::table::{Align, Table};

/// Let a label hold a version of a key: it stays, whatever is kept.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    store: Address,
    /// The key, and optionally the number of the version: KEY or KEY@VERSION
    key: KeyVersion,
    /// The label: not only digits; one that is there moves
    label: Label,
}

/// Let a label hold its version no longer.
#[derive(Debug, clap::Args)]
pub(crate) struct UnpinArgs {
    #[command(flatten)]
    store: Address,
    /// The key
    key: Key,
    /// The label
    label: String,
}

/// List the labels of a key, and the versions that they hold.
#[derive(Debug, clap::Args)]
pub(crate) struct PinsArgs {
    #[command(flatten)]
    store: Address,
    /// The key
    key: Key,
}

pub(crate) fn run(args: &Args, console: Console) -> Result<Exit> {
    let store = args.store.connect()?;
    let KeyVersion { key, version } = &args.key;
    let number =
        store.pin(key, *version, args.label.as_str()).map_err(|error| store_failure(&error))?;
    let (line, label) = (format!("`{}` holds {key}@{number}", args.label), args.label.as_str());
    console.report(line, &json!({"key": key.as_str(), "label": label, "version": number}))?;
    Ok(Exit::Ok)
}

/// Removes a label. A missing label is not an error.
pub(crate) fn unpin(args: &UnpinArgs, console: Console) -> Result<Exit> {
    let store = args.store.connect()?;
    let key = &args.key;
    store.unpin(key, &args.label).map_err(|error| store_failure(&error))?;
    let line = format!("`{}` holds no version of {key}", args.label);
    console.report(line, &json!({"key": key.as_str(), "label": args.label}))?;
    Ok(Exit::Ok)
}

pub(crate) fn pins(args: &PinsArgs, console: Console) -> Result<Exit> {
    let store = args.store.connect()?;
    let pins = store.pins(&args.key).map_err(|error| store_failure(&error))?;
    if console.json {
        print_json(&json!(pins))?;
        return Ok(Exit::Ok);
    }
    let mut table = Table::new(&[("LABEL", Align::Left), ("VERSION", Align::Right)]);
    for (label, number) in &pins {
        table.row([label.clone(), number.to_string()]);
    }
    if !pins.is_empty() {
        print(&table)?;
    }
    Ok(Exit::Ok)
}
