//! `tssd unpack`: converts an archive to a safetensors file, or to a directory of them.

use std::io::Write;
use std::path::{Path, PathBuf};

use serde_json::json;
use tssd_format::safetensors::{Directory, Export, INDEX_NAME};
use tssd_format::{Error, ErrorKind};

use crate::console::Console;
use crate::document::{Document, DocumentArchive};
use crate::exit::Exit;
use crate::failure::{Failure, Result};
use crate::input::{display_input_path, is_stream};
use crate::model::Links;
use crate::output::{Force, Output, OutputDirectory, OutputFile, display_output_path};
use crate::size::{Size, join_names, pluralize};

/// Unpack an archive of tensors into a safetensors file, or into a directory as Hugging Face has it.
///
/// What was packed comes back byte for byte. The output is a directory if its path ends in `/`, if it
/// is an empty directory, or with --shard-size; it gets the other files that were packed too. A safetensors
/// file or the directory of a model is packed first, into a scratch directory next to the output: so
/// --shard-size splits a model anew.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The archive; a directory with a manifest.tssd or a model; a safetensors file; `-`: stdin
    input: PathBuf,
    /// The safetensors file to write, `-`: stdout; or a directory, new or empty unless --force replaces it
    #[arg(short, long, value_name = "OUT.safetensors|DIR/")]
    output: PathBuf,
    #[command(flatten)]
    force: Force,
    /// Write a directory anew, with files of this many bytes of tensors at most, and an index. It keeps the metadata of
    /// the index that was packed, such as `total_parameters`
    #[arg(long, value_name = "SIZE")]
    shard_size: Option<Size>,
    #[command(flatten)]
    links: Links,
}

/// Unpacks storage by storage. Memory holds one storage at a time.
pub(crate) fn run(args: &Args, console: Console) -> Result<Exit> {
    let console = console.for_output(&args.output);
    if args.shard_size.is_some_and(|size| size.0 == 0) {
        return Err(Failure::new(Exit::Usage, "--shard-size 0 leaves no room for a tensor"));
    }
    if args.shard_size.is_some() && is_stream(&args.output) {
        return Err(Failure::new(Exit::Usage, "--shard-size writes a directory, `-` is none")
            .help("name a new or empty directory, or leave out --shard-size"));
    }
    let document = Document::open_with(&args.input, args.links, Some(&args.output))?;
    // Packing takes long, so an output that exists is refused before.
    if document.model().is_some() {
        if is_directory_output(args) {
            OutputDirectory::check(&args.output, args.force)?;
        } else {
            args.force.check(&args.output)?;
        }
    }
    let DocumentArchive { archive, .. } = &document.to_archive(Some(&args.output), console)?;
    let format_failure = |error| Failure::format(display_input_path(&args.input), &error);
    let export = Export::from_archive(archive).map_err(format_failure)?;
    let other_bytes = export.auxiliary_files().map(|other| other.file_len());
    let other_bytes = other_bytes.fold(0, u64::saturating_add);
    if is_directory_output(args) {
        let directory = match args.shard_size {
            Some(Size(max)) => export.sharded_directory(max),
            None => export.directory(),
        };
        let bar = console.bytes_bar("unpacking", export.nbytes().saturating_add(other_bytes));
        let mut output = OutputDirectory::create(&args.output, args.force, bar)?;
        let (names, len) = write_files(args, &directory.map_err(format_failure)?, &mut output)?;
        output.commit()?;
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        report(args, console, &export, &names, len)?;
    } else {
        let file = export.file().map_err(format_failure)?;
        let bar = console.bytes_bar("unpacking", export.nbytes());
        let mut output = Output::create(&args.output, args.force, bar)?;
        file.write_to(&mut output).map_err(|error| unpack_failure(args, &args.output, &error))?;
        report(args, console, &export, &[], output.commit()?)?;
    }
    Ok(Exit::Ok)
}

fn is_directory_output(args: &Args) -> bool {
    let has_trailing_slash = args.output.as_os_str().as_encoded_bytes().ends_with(b"/");
    args.shard_size.is_some()
        || has_trailing_slash
        || !is_stream(&args.output) && args.output.is_dir()
}

/// Writes all files, and returns their names and their total length in bytes.
///
/// The index is written last, because readers take a directory with an index for a complete one.
fn write_files(
    args: &Args,
    directory: &Directory<'_>,
    output: &mut OutputDirectory,
) -> Result<(Vec<String>, u64)> {
    let (mut names, mut len) = (Vec::new(), 0);
    let mut write_file = |name: &str, write_content: WriteContent<'_>| -> Result<()> {
        let path = args.output.join(name);
        let io_failure = |error| Failure::io("write", &path, error);
        let mut stream = output.file(name).map_err(io_failure)?;
        write_content(&mut stream).map_err(|error| unpack_failure(args, &path, &error))?;
        len += stream.finish().map_err(io_failure)?;
        names.push(name.to_owned());
        Ok(())
    };
    for other in &directory.auxiliary_files {
        write_file(other.name(), &|stream| other.write_to(stream))?;
    }
    for file in &directory.files {
        write_file(file.name(), &|stream| file.write_to(stream))?;
    }
    if let Some(index) = &directory.index {
        write_file(INDEX_NAME, &|stream| Ok(stream.write_all(index.as_bytes())?))?;
    }
    Ok((names, len))
}

/// A function that writes the content of a file.
type WriteContent<'a> = &'a dyn Fn(&mut OutputFile) -> Result<(), Error>;

/// Creates the failure for an error: I/O errors name the output, format errors name the input.
fn unpack_failure(args: &Args, output: &Path, error: &Error) -> Failure {
    let is_io = error.kind() == ErrorKind::Io;
    Failure::format(
        if is_io { display_output_path(output) } else { display_input_path(&args.input) },
        error,
    )
}

/// Prints the report. `names` are the files of an output directory, and empty for a single file.
fn report(
    args: &Args,
    console: Console,
    export: &Export,
    names: &[&str],
    file_len: u64,
) -> Result<()> {
    let (tensors, bytes) = (export.len(), export.nbytes());
    let files = if names.is_empty() {
        format!("file {}", Size(file_len))
    } else {
        format!("{}, {}", pluralize(names.len(), "file"), Size(file_len))
    };
    let mut line = format!(
        "{}: {}, {}, {files}",
        display_output_path(&args.output).display(),
        pluralize(tensors, "tensor"),
        Size(bytes),
    );
    let mut json = json!({
        "output": args.output, "tensors": tensors, "bytes": bytes, "file_len": file_len,
    });
    if names.is_empty() {
        let skipped: Vec<&str> = export.auxiliary_files().map(|other| other.name()).collect();
        if !skipped.is_empty() {
            let other_files = pluralize(skipped.len(), "other file");
            let names = join_names(&skipped);
            line =
                format!("{line}\nleft alone: {other_files} ({names}); `-o NAME/` writes them too");
        }
        json["left_alone"] = json!(skipped);
    } else {
        json["files"] = json!(names);
    }
    console.report(line, &json)
}
