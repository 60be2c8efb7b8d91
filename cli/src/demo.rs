//! `tssd demo`: demonstrates put, reshard and get on this machine, and checks every byte.
//!
//! Trainers put a model with one sharding. Generators get it with another sharding. The demo compares
//! every byte that they read with the source.

#[cfg(target_os = "linux")]
mod daemon;
mod memcpy;
mod model;
mod round;
mod shard;

use std::path::PathBuf;

use serde_json::{Value as Json, json};
use tssd_format::StateDict;
use tssd_store::blocking::Store;

use crate::console::{Console, print, print_json};
use crate::demo::model::Model;
use crate::demo::round::{Measurement, Round};
use crate::exit::Exit;
use crate::failure::{Failure, Result};
use crate::interrupt::CleanupGuard;
use crate::size::{Size, gigabytes_per_second};
use crate::store::store_failure;
use crate::table::{Align, Table};

/// Number of versions that each store receives.
const VERSIONS: u64 = 3;

/// Put, reshard and pull a model on this machine, and compare every byte.
///
/// 4 trainer ranks shard a Qwen3-shaped model (FSDP) and put three versions of it; 2 generator ranks pull
/// each with another sharding (tensor parallel), and one reader pulls it whole. All of it once in a
/// directory, once in a daemon's shared memory and once in this process's own.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// How large the model is, about
    #[arg(long, default_value = "500MB", conflicts_with = "model")]
    size: Size,
    /// Take this model instead (.safetensors or .tssd)
    #[arg(long, value_name = "FILE")]
    model: Option<PathBuf>,
}

/// Runs the demo on all stores and prints a table. A byte that differs makes it fail.
pub(crate) fn run(args: &Args, console: Console) -> Result<Exit> {
    let spinner = console.spinner("making the model");
    let model = match &args.model {
        Some(path) => Model::from_file(path)?,
        None => Model::of_size(args.size)?,
    };
    let sources: Vec<StateDict> =
        (1..=VERSIONS).map(|version| model.version(version)).collect::<Result<_>>()?;
    spinner.set_message("measuring memcpy");
    let memcpy = memcpy::measure_memcpy(model.bytes());
    if !console.json && !console.quiet {
        spinner.suspend(|| print(intro(&model, &memcpy)))?;
    }

    let mut results = Vec::new();
    {
        let create = || tempfile::Builder::new().prefix("tssd-demo-").tempdir();
        let (_cleanup, directory) = CleanupGuard::create(create).map_err(|error| {
            Failure::new(Exit::Refused, format_args!("cannot make a temporary directory: {error}"))
        })?;
        let store = Store::directory(directory.path()).map_err(|error| store_failure(&error))?;
        results.push(("directory", Round::new(&store, &sources, &spinner).run()?));
        #[cfg(target_os = "linux")]
        {
            let socket = directory.path().join("socket");
            let round = |store: &Store| Round::new(store, &sources, &spinner).run();
            results.push(("daemon", daemon::with_daemon(&socket, model.bytes(), round)?));
        }
    }
    let store = Store::memory().map_err(|error| store_failure(&error))?;
    results.push(("memory", Round::new(&store, &sources, &spinner).run()?));
    spinner.finish_and_clear();
    report(console, &model, &memcpy, &results)
}

fn intro(model: &Model, memcpy: &memcpy::Memcpy) -> String {
    format!(
        "{model}\n\
         4 trainers shard it (FSDP) and put {VERSIONS} versions; 2 generators pull them tensor-parallel, \
         1 reader whole.\n\
         memcpy of this machine: {:.2} GB/s on {} threads.\n\n",
        memcpy.speed, memcpy.threads
    )
}

fn report(
    console: Console,
    model: &Model,
    memcpy: &memcpy::Memcpy,
    results: &[(&str, Vec<Measurement>)],
) -> Result<Exit> {
    let measurements = || results.iter().flat_map(|(_, measurements)| measurements);
    let mismatches: Vec<&String> = measurements().flat_map(|each| &each.mismatches).collect();
    let compared: u64 = measurements().map(|each| each.bytes_compared).sum();
    let exit = if mismatches.is_empty() { Exit::Ok } else { Exit::Mismatch };
    if console.json {
        print_json(&json!({
            "model": model.to_string(),
            "memcpy_gb_per_s": memcpy.speed,
            "rows": results.iter().flat_map(|(store, rows)| {
                rows.iter().map(|row| measurement_json(store, row))
            }).collect::<Vec<_>>(),
            "bytes_compared": compared,
            "mismatches": mismatches,
        }))?;
        return Ok(exit);
    }
    if !console.quiet {
        print(table(memcpy, results))?;
    }
    for mismatch in &mismatches {
        print(format_args!("MISMATCH {mismatch}\n"))?;
    }
    let verdict = if mismatches.is_empty() {
        format!("\nall {} that were read are equal to the source, byte for byte", Size(compared))
    } else {
        format!("\n{} of the leaves that were read differ from the source", mismatches.len())
    };
    console.report(verdict, &Json::Null)?;
    Ok(exit)
}

fn table(memcpy: &memcpy::Memcpy, results: &[(&str, Vec<Measurement>)]) -> Table {
    let mut table = Table::new(&[
        ("STORE", Align::Left),
        ("OPERATION", Align::Left),
        ("TENSORS", Align::Right),
        ("BYTES", Align::Right),
        ("SECONDS", Align::Right),
        ("GB/s", Align::Right),
        ("OF MEMCPY", Align::Right),
        ("MOVED/NEEDED", Align::Right),
        ("VERSIONS", Align::Left),
    ]);
    for (store, rows) in results {
        for (position, row) in rows.iter().enumerate() {
            let speed = gigabytes_per_second(row.bytes, row.seconds());
            let ratio = row.ratio().map_or_else(String::new, |ratio| format!("{ratio:.2}"));
            let versions: Vec<String> = row.versions.iter().map(ToString::to_string).collect();
            table.row([
                if position == 0 { (*store).to_owned() } else { String::new() },
                row.operation.clone(),
                row.tensors.to_string(),
                Size(row.bytes).to_string(),
                format!("{:.3}", row.seconds()),
                format!("{speed:.2}"),
                format!("{:.0} %", 100.0 * speed / memcpy.speed),
                ratio,
                versions.join(" "),
            ]);
        }
    }
    table
}

fn measurement_json(store: &str, row: &Measurement) -> Json {
    json!({
        "store": store,
        "operation": row.operation,
        "tensors": row.tensors,
        "bytes": row.bytes,
        "seconds": row.all_seconds,
        "gb_per_s": gigabytes_per_second(row.bytes, row.seconds()),
        "bytes_transferred": row.bytes_transferred,
        "bytes_needed": row.bytes_needed,
        "versions": row.versions,
    })
}
