//! `tssd pack`: converts a safetensors file, or the directory of a model, to an archive.

mod source;

use std::io::Write;
use std::path::PathBuf;

use serde_json::json;
use tssd_format::Options;

use self::source::Source;
use crate::codec::Codec;
use crate::console::Console;
use crate::exit::Exit;
use crate::failure::{Failure, Result};
use crate::model::{Links, Model, OtherFile};
use crate::output::{Force, Output, display_output_path};
use crate::size::{Size, join_names, pluralize};

/// Pack a safetensors file, or the directory of a Hugging Face model, into an archive.
///
/// `tssd unpack` gives the same files back, byte for byte. Of a directory, the tensors are those of the
/// files that model.safetensors.index.json names, or of model.safetensors. All other files are packed as
/// they are, under the key `.files`; hidden folders, such as .git, are left alone.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// A safetensors file; a directory with a model; `-`: stdin
    input: PathBuf,
    /// The archive to write; `-`: stdout
    #[arg(short, long, value_name = "OUT.tssd")]
    output: PathBuf,
    #[command(flatten)]
    force: Force,
    /// Compress the storages with this codec
    #[arg(long, value_enum, value_name = "CODEC", default_value = "none")]
    codec: Codec,
    #[command(flatten)]
    links: Links,
}

/// Packs tensor by tensor, then file by file. Memory holds one of them at a time.
pub(crate) fn run(args: &Args, console: Console) -> Result<Exit> {
    let console = console.for_output(&args.output);
    let mut source = Source::open(&args.input, args.links, &args.output)?;
    let (tensors, bytes) = (source.tensor_count(), source.tensor_bytes());
    let other_bytes = source.model().map_or(0, Model::other_bytes);
    let bar = console.bytes_bar("packing", bytes.saturating_add(other_bytes));
    let output = Output::create(&args.output, args.force, bar)?;

    let target = display_output_path(&args.output);
    let options = Options::new().compress(args.codec.compression());
    let mut output = source.write_archive(output, options, target)?;
    output.flush().map_err(|error| Failure::io("write", target, error))?;
    let file_len = output.commit()?;

    let other_files = source.model().map_or(&[][..], Model::other_files);
    let names: Vec<&str> = other_files.iter().map(OtherFile::name).collect();
    let skipped = source.model().map_or(&[][..], Model::skipped);
    let mut line =
        format!("{}: {}, {}", target.display(), pluralize(tensors, "tensor"), Size(bytes));
    if !names.is_empty() {
        line = format!("{line}, {}, {}", pluralize(names.len(), "other file"), Size(other_bytes));
    }
    line = format!("{line}, file {}", Size(file_len));
    if !skipped.is_empty() {
        line = format!("{line}\nleft alone: {}", join_names(skipped));
    }
    let json = json!({
        "output": args.output, "tensors": tensors, "bytes": bytes, "file_len": file_len,
        "files": names, "left_alone": skipped,
    });
    console.report(line, &json)?;
    Ok(Exit::Ok)
}
