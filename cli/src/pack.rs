//! `tssd pack`: converts a safetensors file, or the directory of a model, to an archive.

mod directory;
mod folder;
mod source;

use std::io::Write;
use std::path::PathBuf;

use bytes::Bytes;
use serde_json::json;
use tssd_format::safetensors::{FILES_KEY, PACKED_FILES_ATTR};
use tssd_format::{ArchiveWriter, AttrValue, Options};

use self::source::Source;
use crate::codec::Codec;
use crate::console::Console;
use crate::exit::Exit;
use crate::failure::{Failure, Result};
use crate::input::is_stream;
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
    /// Follow links to files anywhere, not only within the directory and Hugging Face's cache
    #[arg(long)]
    follow_links: bool,
}

/// Packs tensor by tensor, then file by file. Memory holds one of them at a time.
pub(crate) fn run(args: &Args, console: Console) -> Result<Exit> {
    let console = console.for_output(&args.output);
    let input = &*args.input;
    let source = if !is_stream(input) && input.is_dir() {
        directory::open(input, args.follow_links, &args.output)?
    } else {
        Source::open(input)?
    };
    let (tensors, bytes) = (source.tensor_count(), source.tensor_bytes());
    let other_bytes = source.other_files.iter().map(|other| other.len).fold(0, u64::saturating_add);
    let bar = console.bytes_bar("packing", bytes.saturating_add(other_bytes));
    let output = Output::create(&args.output, args.force, bar)?;

    let target = display_output_path(&args.output);
    let format_failure = |error| Failure::format(target, &error);
    let Source { attrs, files, other_files, skipped } = source;
    let options =
        attrs.into_iter().fold(Options::new(), |options, (name, value)| options.attr(name, value));
    let options = if other_files.is_empty() {
        options
    } else {
        options.attr(PACKED_FILES_ATTR, AttrValue::Int(1))
    };
    let options = options.compress(args.codec.compression());
    let mut writer = ArchiveWriter::new(output, options).map_err(format_failure)?;
    Source::read(files, &mut |name, tensor| writer.insert(name, tensor).map_err(format_failure))?;
    for other in &other_files {
        let content = Bytes::from(other.read()?);
        writer.insert_into(FILES_KEY, other.name.as_str(), content).map_err(format_failure)?;
    }
    let mut output = writer.finish().map_err(format_failure)?;
    output.flush().map_err(|error| Failure::io("write", target, error))?;
    let file_len = output.commit()?;

    let names: Vec<&str> = other_files.iter().map(|other| &*other.name).collect();
    let mut line =
        format!("{}: {}, {}", target.display(), pluralize(tensors, "tensor"), Size(bytes));
    if !names.is_empty() {
        line = format!("{line}, {}, {}", pluralize(names.len(), "other file"), Size(other_bytes));
    }
    line = format!("{line}, file {}", Size(file_len));
    if !skipped.is_empty() {
        line = format!("{line}\nleft alone: {}", join_names(&skipped));
    }
    let json = json!({
        "output": args.output, "tensors": tensors, "bytes": bytes, "file_len": file_len,
        "files": names, "left_alone": skipped,
    });
    console.report(line, &json)?;
    Ok(Exit::Ok)
}
