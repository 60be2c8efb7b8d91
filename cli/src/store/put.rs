//! `tssd put`: stores a file as a version of a key.

use std::num::NonZeroU32;
use std::path::PathBuf;
use std::time::Duration;

use serde_json::json;
use tssd_store::{Durability, JobId, KeyVersion, PutOptions, Rewind};

use super::{Address, store_failure};
use crate::codec::Codec;
use crate::console::Console;
use crate::document::Document;
use crate::exit::Exit;
use crate::failure::{Failure, Result};
use crate::model::Links;
use crate::size::{Size, format_throughput};

/// Put a file into a store, as a new version of a key.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    store: Address,
    /// The key, and optionally the number of the version: KEY or KEY@VERSION
    key: KeyVersion,
    /// The state dict (.tssd or .safetensors), or a directory with a manifest.tssd or a model; `-`: stdin
    file: PathBuf,
    #[command(flatten)]
    links: Links,
    /// The global rank that the shards in the file belong to, if they do not say it themselves
    #[arg(long, value_name = "RANK")]
    writer: Option<u32>,
    /// The run that the file is from: the same for all writers of a version
    #[arg(long)]
    job: Option<String>,
    /// How many of the newest versions of the key the store keeps from now on (at first: 1)
    #[arg(long, value_name = "COUNT")]
    keep: Option<NonZeroU32>,
    /// Go back to a lower number: versions from it on are given up
    #[arg(long)]
    rewind: bool,
    /// Take leaves that are opaque objects too
    #[arg(long)]
    allow_opaque: bool,
    /// Compress the storages with this codec: reading takes longer
    #[arg(long, value_enum, value_name = "CODEC", default_value = "none")]
    codec: Codec,
    /// What the version outlives; a store in a directory keeps all on disk, one in a bucket there
    #[arg(long, value_enum, default_value_t = DurabilityArg::Memory)]
    durability: DurabilityArg,
    /// For how many seconds other writers, memory and the bucket are waited for
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = parse_seconds)]
    timeout: Duration,
    /// Write digests: a BLAKE3 for each storage, and one for all
    #[arg(long)]
    digest: bool,
}

/// What a version outlives.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum DurabilityArg {
    /// Nothing: it ends with the daemon
    Memory,
    /// The daemon, and a power cut
    Disk,
    /// The daemon's host too: it goes on to the bucket that the daemon has
    Object,
}

fn parse_seconds(text: &str) -> std::result::Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "not a number of seconds".to_owned())?;
    Duration::try_from_secs_f64(seconds).map_err(|error| error.to_string())
}

/// Puts the file as the shards of one writer. Most versions have one writer.
pub(crate) fn run(args: &Args, console: Console) -> Result<Exit> {
    if args.job.is_some() && args.key.version.is_none() {
        return Err(Failure::new(Exit::Usage, "--job needs the number of the version").help(
            "say KEY@VERSION: commands of several writers know of each other by nothing else",
        ));
    }
    let store = args.store.create()?;
    let key = &args.key.key;
    let spinner = console.spinner(&format!("putting {key}"));
    let document = Document::open_with(&args.file, args.links, None)?;
    let dict = document.to_state_dict()?;
    if let Some(keep) = args.keep {
        store.retain(key, keep).map_err(|error| store_failure(&error))?;
    }
    let options = PutOptions {
        version: args.key.version,
        writer: args.writer,
        job: args.job.clone().map(JobId),
        attrs: if document.is_shard_set() {
            document.attrs_without_version()
        } else {
            document.attrs()
        },
        // Each command is a run of its own, so an old number may be a mistake.
        rewind: if args.rewind { Rewind::Always } else { Rewind::Never },
        allow_opaque: args.allow_opaque,
        compression: args.codec.compression(),
        digests: args.digest,
        durability: match args.durability {
            DurabilityArg::Memory => Durability::Memory,
            DurabilityArg::Disk => Durability::Disk,
            DurabilityArg::Object => Durability::Object,
        },
        timeout: args.timeout,
        ..PutOptions::default()
    };
    let report =
        store.put_state_dict(key, &dict, &options).map_err(|error| store_failure(&error))?;
    spinner.finish_and_clear();

    let state = if report.visible {
        String::new()
    } else {
        format!(", waits for writers {}", report.missing)
    };
    let line = format!(
        "{key}@{}: {} in {:.2} s, {}{state}",
        report.version,
        Size(report.bytes),
        report.seconds,
        format_throughput(report.bytes, report.seconds),
    );
    let json = json!({
        "key": key.as_str(),
        "version": report.version,
        "epoch": report.epoch,
        "id": report.id.to_string(),
        "visible": report.visible,
        "missing": report.missing.iter().collect::<Vec<_>>(),
        "stored": report.stored,
        "bytes": report.bytes,
        "transport": report.transport.to_string(),
        "transport_reason": report.transport_reason,
        "seconds": report.seconds,
    });
    console.report(line, &json)?;
    Ok(Exit::Ok)
}
