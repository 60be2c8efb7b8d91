//! `tssd unpack`: an archive becomes a safetensors file, or a directory of them.

use std::io::Write;
use std::path::{Path, PathBuf};

use serde_json::json;
use tssd_format::safetensors::{Directory, Export, INDEX_NAME};
use tssd_format::{Error, ErrorKind};

use crate::console::Console;
use crate::exit::Exit;
use crate::failure::{Failure, Result};
use crate::input::{is_stream, open_archive, shown};
use crate::output::{Output, OutputDirectory, OutputFile, shown as shown_output};
use crate::size::{Size, count, listed};

/// Unpack an archive of tensors into a safetensors file, or into a directory as Hugging Face has it.
///
/// What was packed comes back byte for byte. The output is a directory if its path ends in `/`, if it
/// is an empty directory, or with --shard-size; it gets the other files that were packed too.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The archive, or a directory with a manifest.tssd; `-`: stdin
    input: PathBuf,
    /// The safetensors file to write, `-`: stdout; or a new or empty directory
    #[arg(short, long, value_name = "OUT.safetensors|DIR/")]
    output: PathBuf,
    /// Write a directory anew, with files of this many bytes of tensors at most, and an index
    #[arg(long, value_name = "SIZE")]
    shard_size: Option<Size>,
}

/// Storage by storage, so that memory holds one of them at a time.
pub(crate) fn run(args: &Args, console: Console) -> Result<Exit> {
    let console = console.beside(&args.output);
    if args.shard_size.is_some_and(|size| size.0 == 0) {
        return Err(Failure::new(Exit::Usage, "--shard-size 0 leaves no room for a tensor"));
    }
    if args.shard_size.is_some() && is_stream(&args.output) {
        return Err(Failure::new(Exit::Usage, "--shard-size writes a directory, `-` is none")
            .help("name a new or empty directory, or leave out --shard-size"));
    }
    let archive = open_archive(&args.input)?;
    let refused = |error| Failure::format(shown(&args.input), &error);
    let export = Export::of_archive(&archive).map_err(refused)?;
    let others = export.others().map(|other| other.file_len());
    let others = others.fold(0, u64::saturating_add);
    if names_directory(args) {
        let directory = match args.shard_size {
            Some(Size(max)) => export.shards(max),
            None => export.directory(),
        };
        let bar = console.bytes_bar("unpacking", export.nbytes().saturating_add(others));
        let mut output = OutputDirectory::create(&args.output, bar)?;
        let (names, len) = write(args, &directory.map_err(refused)?, &mut output)?;
        output.commit()?;
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        report(args, console, &export, &names, len)?;
    } else {
        let file = export.file().map_err(refused)?;
        let bar = console.bytes_bar("unpacking", export.nbytes());
        let mut output = Output::create(&args.output, bar)?;
        file.write_to(&mut output).map_err(|error| failure(args, &args.output, &error))?;
        report(args, console, &export, &[], output.commit()?)?;
    }
    Ok(Exit::Ok)
}

fn names_directory(args: &Args) -> bool {
    let is_named_so = args.output.as_os_str().as_encoded_bytes().ends_with(b"/");
    args.shard_size.is_some() || is_named_so || !is_stream(&args.output) && args.output.is_dir()
}

/// Writes all files, the index last, as one with an index is taken for a whole one; returns their names,
/// and how many bytes they have together.
fn write(
    args: &Args,
    directory: &Directory<'_>,
    output: &mut OutputDirectory,
) -> Result<(Vec<String>, u64)> {
    let (mut names, mut len) = (Vec::new(), 0);
    let mut write = |name: &str, content: Content<'_>| {
        let path = args.output.join(name);
        let failed = |error| Failure::io("write", &path, error);
        let mut stream = output.file(name).map_err(failed)?;
        content(&mut stream).map_err(|error| failure(args, &path, &error))?;
        len += stream.finish().map_err(failed)?;
        names.push(name.to_owned());
        Ok(())
    };
    for other in &directory.others {
        write(other.name(), &|stream| other.write_to(stream))?;
    }
    for file in &directory.files {
        write(file.name(), &|stream| file.write_to(stream))?;
    }
    if let Some(index) = &directory.index {
        write(INDEX_NAME, &|stream| Ok(stream.write_all(index.as_bytes())?))?;
    }
    Ok((names, len))
}

/// What writes a file.
type Content<'a> = &'a dyn Fn(&mut OutputFile) -> Result<(), Error>;

/// What the system refuses is about the output, what the format refuses about the input.
fn failure(args: &Args, output: &Path, error: &Error) -> Failure {
    let is_io = error.kind() == ErrorKind::Io;
    Failure::format(if is_io { shown_output(output) } else { shown(&args.input) }, error)
}

/// The names are those of the files of a directory.
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
        format!("{}, {}", count(names.len(), "file"), Size(file_len))
    };
    let mut line = format!(
        "{}: {}, {}, {files}",
        shown_output(&args.output).display(),
        count(tensors, "tensor"),
        Size(bytes),
    );
    let mut json = json!({
        "output": args.output, "tensors": tensors, "bytes": bytes, "file_len": file_len,
    });
    if names.is_empty() {
        let left_alone: Vec<&str> = export.others().map(|other| other.name()).collect();
        if !left_alone.is_empty() {
            let others = count(left_alone.len(), "other file");
            let names = listed(&left_alone);
            line = format!("{line}\nleft alone: {others} ({names}); `-o NAME/` writes them too");
        }
        json["left_alone"] = json!(left_alone);
    } else {
        json["files"] = json!(names);
    }
    console.report(line, &json)
}
