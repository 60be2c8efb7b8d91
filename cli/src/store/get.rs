//! `tssd get`: writes a version of a key to an archive.

use std::path::PathBuf;

use serde_json::json;
use tssd_format::{Layout, Options};
use tssd_store::GetOptions;

use super::{Address, VersionName, store_failure};
use crate::console::Console;
use crate::exit::Exit;
use crate::failure::{Failure, Result};
use crate::output::{Force, Output, display_output_path};
use crate::size::{Size, format_throughput};

/// Get a version of a key from a store, whole, as an archive.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    store: Address,
    #[command(flatten)]
    version: VersionName,
    /// The archive to write; `-`: stdout
    #[arg(short, long, value_name = "OUT.tssd")]
    output: PathBuf,
    #[command(flatten)]
    force: Force,
    /// Whose values to take where writers hold different ones
    #[arg(long, value_name = "RANK")]
    writer: Option<u32>,
}

/// Reads a version, with the shards of all writers joined, and writes the archive.
pub(crate) fn run(args: &Args, console: Console) -> Result<Exit> {
    if args.output.extension().is_some_and(|extension| extension == "safetensors") {
        return Err(Failure::new(Exit::Usage, "get writes archives")
            .help("name the output .tssd, then `tssd unpack` it"));
    }
    let (key, version) = args.version.parts()?;
    let console = console.for_output(&args.output);
    let store = args.store.connect()?;
    // Open the output first, so that its errors are reported before the read.
    let bar = console.bytes_bar("writing", 0);
    let mut output = Output::create(&args.output, args.force, bar.clone())?;
    let spinner = console.spinner(&format!("getting {key}"));
    let options = GetOptions { version, writer: args.writer, ..GetOptions::default() };
    let (dict, report) =
        store.get_state_dict(key, &options).map_err(|error| store_failure(&error))?;
    spinner.finish_and_clear();

    let format_failure = |error| Failure::format(display_output_path(&args.output), &error);
    // The writer has allowed opaque leaves in the put, so they are kept.
    let attrs = report.attrs.iter();
    let options = attrs.fold(Options::new().allow_opaque(), |options, (name, value)| {
        options.attr(name, value.clone())
    });
    let layout = Layout::plan(&dict, &options).map_err(format_failure)?;
    bar.set_length(layout.file_len());
    layout.write_to(&mut output).map_err(format_failure)?;
    let file_len = output.commit()?;

    let line = format!(
        "{}: {key}@{}, {}, read in {:.2} s, {}",
        display_output_path(&args.output).display(),
        report.version,
        Size(file_len),
        report.seconds,
        format_throughput(report.bytes_transferred, report.seconds),
    );
    let json = json!({
        "key": key.as_str(),
        "version": report.version,
        "epoch": report.epoch,
        "id": report.id.to_string(),
        "output": args.output,
        "file_len": file_len,
        "bytes_needed": report.bytes_needed,
        "bytes_transferred": report.bytes_transferred,
        "bytes_received": report.bytes_received,
        "bytes_verified": report.bytes_verified,
        "transport": report.transport.to_string(),
        "transport_reason": report.transport_reason,
        "seconds": report.seconds,
    });
    console.report(line, &json)?;
    Ok(Exit::Ok)
}
