//! `tssd pack`: safetensors files become an archive.

mod directory;
mod source;

use std::io::Write;
use std::path::PathBuf;

use serde_json::json;
use tssd_format::{ArchiveWriter, Options};

use self::source::Source;
use crate::console::Console;
use crate::exit::Exit;
use crate::failure::{Failure, Result};
use crate::output::{Output, shown};
use crate::size::{Size, count};

/// Pack a safetensors file, or the files of a Hugging Face model, into an archive.
///
/// `tssd unpack` gives the same files back, byte for byte. Of a directory, the files that
/// model.safetensors.index.json names are packed, or model.safetensors; all others are left alone.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// A safetensors file; a directory with a model; `-`: stdin
    input: PathBuf,
    /// The archive to write; `-`: stdout
    #[arg(short, long, value_name = "OUT.tssd")]
    output: PathBuf,
}

/// Tensor by tensor, so that memory holds one of them at a time.
pub(crate) fn run(args: &Args, console: Console) -> Result<Exit> {
    let console = console.beside(&args.output);
    let source = Source::open(&args.input)?;
    let (tensors, bytes) = (source.tensors(), source.bytes());
    let left_alone = source.left_alone.clone();
    let output = Output::create(&args.output, console.bytes_bar("packing", bytes))?;

    let target = shown(&args.output);
    let refused = |error| Failure::format(target, &error);
    let attrs = source.attrs.iter();
    let options =
        attrs.fold(Options::new(), |options, (name, value)| options.attr(name, value.clone()));
    let mut writer = ArchiveWriter::new(output, options).map_err(refused)?;
    source.read(&mut |name, tensor| writer.insert(name, tensor).map_err(refused))?;
    let mut output = writer.finish().map_err(refused)?;
    output.flush().map_err(|error| Failure::io("write", target, error))?;
    let file_len = output.commit()?;

    let mut line = format!(
        "{}: {}, {}, file {}",
        target.display(),
        count(tensors, "tensor"),
        Size(bytes),
        Size(file_len)
    );
    if !left_alone.is_empty() {
        let others = count(left_alone.len(), "other file");
        line = format!("{line}\nleft alone: {others} ({})", listed(&left_alone));
    }
    let json = json!({
        "output": args.output, "tensors": tensors, "bytes": bytes, "file_len": file_len,
        "left_alone": left_alone,
    });
    console.report(line, &json)?;
    Ok(Exit::Ok)
}

/// A few names are enough to know which.
fn listed(names: &[String]) -> String {
    const SHOWN_MAX: usize = 4;
    let shown = names[..names.len().min(SHOWN_MAX)].join(", ");
    match names.len().checked_sub(SHOWN_MAX).filter(|more| *more > 0) {
        Some(more) => format!("{shown} and {more} more"),
        None => shown,
    }
}
