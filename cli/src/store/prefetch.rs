//! `tssd prefetch`: copies a version to this host before it is read.

use serde_json::json;
use tssd_store::GetOptions;

use super::{Address, VersionName, store_failure};
use crate::console::Console;
use crate::exit::Exit;
use crate::failure::Result;
use crate::size::{Size, format_throughput};

/// Copy a version into the memory of this host's daemon, ahead of those who will get it by its number.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    store: Address,
    #[command(flatten)]
    version: VersionName,
}

pub(crate) fn run(args: &Args, console: Console) -> Result<Exit> {
    let (key, version) = args.version.parts()?;
    let store = args.store.connect()?;
    let spinner = console.spinner(&format!("fetching {key}"));
    let options = GetOptions { version, ..GetOptions::default() };
    let report = store.prefetch(key, &[], &options).map_err(|error| store_failure(&error))?;
    spinner.finish_and_clear();
    let base = report.base.map_or_else(String::new, |base| {
        format!(": the difference of {} from version {base}", Size(report.size))
    });
    let line = format!(
        "{key}@{}: {} in {:.2} s, {}{base}",
        report.version,
        Size(report.bytes),
        report.seconds,
        format_throughput(report.bytes, report.seconds),
    );
    let json = json!({
        "key": key.as_str(),
        "version": report.version,
        "id": report.id.to_string(),
        "bytes": report.bytes,
        "size": report.size,
        "base": report.base,
        "seconds": report.seconds,
    });
    console.report(line, &json)?;
    Ok(Exit::Ok)
}
