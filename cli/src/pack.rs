//! `tssd pack`: a safetensors file becomes an archive.

use std::io::Write;
use std::path::PathBuf;

use serde_json::json;
use tssd_format::{ArchiveWriter, AttrValue, Options, Storage, Tensor, TensorMeta};

use crate::console::Console;
use crate::document::{load, open_file};
use crate::exit::Exit;
use crate::failure::{Failure, Result};
use crate::header::{self, HEADER_ATTR, Header};
use crate::output::Output;
use crate::size::{Size, count};

/// Pack a safetensors file into an archive.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The safetensors file
    pub(crate) input: PathBuf,
    /// The archive to write
    #[arg(short, long, value_name = "OUT.tssd")]
    pub(crate) output: PathBuf,
}

/// Tensor by tensor, so that memory holds one of them at a time.
pub(crate) fn run(args: &Args, console: Console) -> Result<Exit> {
    let file = open_file(&args.input)?;
    let header = Header::read(&file).map_err(|reject| reject.into_failure(&args.input))?;
    let options = options_of(&header)?;
    let bytes = header.tensors.iter().map(|entry| entry.meta.nbytes()).sum();
    let output = Output::create(&args.output, console.bytes_bar("packing", bytes))?;

    let refused = |error| Failure::format(&args.output, &error);
    let mut writer = ArchiveWriter::new(output, options).map_err(refused)?;
    for entry in &header.tensors {
        let bytes = load(&file, entry).map_err(|error| Failure::io("read", &args.input, error))?;
        let tensor = Tensor::new(entry.meta.clone(), Storage::from(bytes), 0).map_err(refused)?;
        writer.insert(&*entry.name, tensor).map_err(refused)?;
    }
    let mut output = writer.finish().map_err(refused)?;
    output.flush().map_err(|error| Failure::io("write", &args.output, error))?;
    let file_len = output.commit()?;

    let tensors = header.tensors.len();
    let line = format!(
        "{}: {}, {}, file {}",
        args.output.display(),
        count(tensors, "tensor"),
        Size(bytes),
        Size(file_len)
    );
    let json = json!({
        "output": args.output, "tensors": tensors, "bytes": bytes, "file_len": file_len,
    });
    console.report(line, &json)?;
    Ok(Exit::Ok)
}

/// The metadata of the file as attributes.
fn options_of(header: &Header) -> Result<Options> {
    let mut options = Options::new();
    for (name, value) in header.metadata.iter().flatten() {
        if name.starts_with("tssd.") {
            let message = format_args!("metadata `{name}` has a name that tssd keeps for itself");
            return Err(Failure::new(Exit::Refused, message).help("rename or remove the entry"));
        }
        options = options.attr(name, AttrValue::Text(value.as_str().into()));
    }
    let named = |entry: &header::Entry| (entry.name.clone(), entry.meta.clone());
    let tensors: Vec<(String, TensorMeta)> = header.tensors.iter().map(named).collect();
    let metadata = header.metadata.as_ref().filter(|metadata| !metadata.is_empty());
    let (canonical, _) = header::canonical(metadata, &tensors)?;
    if canonical != header.text {
        options = options.attr(HEADER_ATTR, AttrValue::Text(header.text.as_str().into()));
    }
    Ok(options)
}
