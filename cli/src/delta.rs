//! `tssd delta`: makes, applies and folds deltas between versions.

use std::path::{Path, PathBuf};

use serde_json::json;
use tssd_format::{
    Archive, ChangeCount, DeltaChunks, DeltaClasses, DeltaDraft, DeltaJob, Layout, Options,
    VerifyJob,
};

use crate::codec::Codec;
use crate::console::Console;
use crate::document::{Document, DocumentArchive};
use crate::encode;
use crate::exit::Exit;
use crate::failure::{Failure, Result};
use crate::input::display_input_path;
use crate::model::Links;
use crate::output::{Force, Output, display_output_path};
use crate::parallel;
use crate::size::{Size, pluralize};

/// Make, apply and fold deltas: files with the difference between two versions of a state dict.
///
/// A delta names the content of its base, and the content that it leads to. A wrong base is refused.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    Make(MakeArgs),
    Apply(ApplyArgs),
    Fold(FoldArgs),
}

/// Write the difference between two archives, safetensors files or models.
///
/// Tensors with the same path, dtype, shape and slice become differences. All other leaves are stored whole. Memory holds
/// the delta, and the decoded bytes of leaves that are compressed in the new version and stored whole in the delta. Models
/// are packed first, into scratch directories next to the output.
#[derive(Debug, clap::Args)]
struct MakeArgs {
    /// The old version: an archive, a safetensors file, or a directory with a manifest.tssd or a model; `-`: stdin
    base: PathBuf,
    /// The new version, as one of the same
    result: PathBuf,
    /// The delta to write; `-`: stdout
    #[arg(short, long, value_name = "OUT.tssd")]
    output: PathBuf,
    #[command(flatten)]
    force: Force,
    /// Number of classes of elements. More classes make the delta smaller, and make it slower to make and to apply. Only
    /// deltas of one class can be folded
    #[arg(long, value_enum, value_name = "CLASSES", default_value = "1")]
    classes: Classes,
    #[command(flatten)]
    links: Links,
}

/// Write the new version, given the old one and the delta.
///
/// Each byte is verified against the checksums and digests of the delta. Memory holds the whole state dict.
#[derive(Debug, clap::Args)]
struct ApplyArgs {
    /// The old version: an archive, a safetensors file, or a directory with a manifest.tssd or a model; `-`: stdin
    base: PathBuf,
    /// The delta
    delta: PathBuf,
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

/// Write one delta with the effect of several, each of which continues the one before it.
///
/// The base is not needed. All deltas must have one class.
#[derive(Debug, clap::Args)]
struct FoldArgs {
    /// The deltas, the oldest first
    #[arg(required = true, num_args = 2..)]
    deltas: Vec<PathBuf>,
    /// The delta to write; `-`: stdout
    #[arg(short, long, value_name = "OUT.tssd")]
    output: PathBuf,
    #[command(flatten)]
    force: Force,
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum Classes {
    #[value(name = "1")]
    One,
    #[value(name = "2")]
    Two,
    #[value(name = "4")]
    Four,
    Auto,
}

impl From<Classes> for DeltaClasses {
    fn from(classes: Classes) -> Self {
        match classes {
            Classes::One => Self::One,
            Classes::Two => Self::Two,
            Classes::Four => Self::Four,
            Classes::Auto => Self::Auto,
        }
    }
}

pub(crate) fn run(args: &Args, console: Console) -> Result<Exit> {
    match &args.command {
        Command::Make(args) => make(args, console),
        Command::Apply(args) => apply(args, console),
        Command::Fold(args) => fold(args, console),
    }
}

/// Returns the names of two inputs, for errors that may be about either.
fn both(one: &Path, other: &Path) -> PathBuf {
    let [one, other] = [one, other].map(|path| display_input_path(path).display().to_string());
    format!("{one} and {other}").into()
}

fn make(args: &MakeArgs, console: Console) -> Result<Exit> {
    let console = console.for_output(&args.output);
    args.force.check(&args.output)?;
    let path = display_output_path(&args.output);
    let open = |path: &Path| {
        let document = Document::open_with(path, args.links, Some(&args.output))?;
        if document.archive().is_some_and(Archive::lacks_base) {
            let message = format_args!("{} is a delta", document.path().display());
            return Err(Failure::new(Exit::Refused, message).help("apply it to its base first"));
        }
        document.to_archive(Some(&args.output), console)
    };
    let base = open(&args.base)?;
    let result = open(&args.result)?;
    let (base, result) = (&base.archive, &result.archive);
    let inputs = both(&args.base, &args.result);
    let format_failure = |error| Failure::format(&inputs, &error);
    let draft = DeltaDraft::between(base, result, args.classes.into()).map_err(format_failure)?;
    let (layout, changes) = encode_draft(draft, console).map_err(format_failure)?;
    let file_len = write_layout(&layout, &args.output, args.force, console)?;
    let raw_len = (0..result.storage_count()).map(|number| result.storage(number).len).sum();
    let ChangeCount { listed, dense } = changes;
    let line = format!(
        "{}: {} changed one by one, {} in dense blocks, file {} for {} raw",
        path.display(),
        pluralize(listed, "element"),
        pluralize(dense, "element"),
        Size(file_len),
        Size(raw_len),
    );
    let json = json!({
        "output": args.output, "listed_elements": listed, "dense_elements": dense,
        "file_len": file_len, "raw_bytes": raw_len,
    });
    console.report(line, &json)?;
    Ok(Exit::Ok)
}

fn apply(args: &ApplyArgs, console: Console) -> Result<Exit> {
    let console = console.for_output(&args.output);
    args.force.check(&args.output)?;
    let path = display_output_path(&args.output);
    let delta = Document::open(&args.delta)?;
    let delta = delta.delta("the base comes first, then the delta")?;
    let base = Document::open_with(&args.base, args.links, Some(&args.output))?;
    let DocumentArchive { archive: base, .. } = &base.to_archive(Some(&args.output), console)?;
    let base_failure = |error| Failure::format(display_input_path(&args.base), &error);
    // A base that is the result already needs no delta.
    let archive = delta.clone().result_from(base.clone()).map_err(base_failure)?;
    let is_result = archive.base().is_none();
    let inputs = if is_result { args.base.clone() } else { both(&args.base, &args.delta) };
    let jobs = archive.verify_jobs();
    let deep_jobs = archive.deep_verify_jobs();
    let jobs: Vec<VerifyJob<'_>> = jobs.into_iter().chain(deep_jobs).collect();
    let results = parallel::map(&jobs, console, "verifying", VerifyJob::len, VerifyJob::run);
    let error = results.into_iter().filter_map(Result::err).min_by_key(tssd_format::Error::offset);
    if let Some(error) = error {
        return Err(Failure::format(&inputs, &error));
    }
    let options = Options::new().attrs_of(delta).digests().allow_opaque();
    let options = options.compress(args.codec.compression());
    let dict = archive.to_state_dict().map_err(|error| Failure::format(&inputs, &error))?;
    let layout = encode::plan(&dict, &options, console);
    let layout = layout.map_err(|error| Failure::format(path, &error))?;
    let file_len = write_layout(&layout, &args.output, args.force, console)?;
    let leaves = archive.leaves().len();
    let note = if is_result { ", a copy: the base was the result already" } else { "" };
    let line =
        format!("{}: {}, file {}{note}", path.display(), pluralize(leaves, "leaf"), Size(file_len));
    let json = json!({
        "output": args.output, "leaves": leaves, "file_len": file_len, "base_was_result": is_result,
    });
    console.report(line, &json)?;
    Ok(Exit::Ok)
}

fn fold(args: &FoldArgs, console: Console) -> Result<Exit> {
    let console = console.for_output(&args.output);
    args.force.check(&args.output)?;
    let path = display_output_path(&args.output);
    let mut deltas = args.deltas.iter();
    let mut last = deltas.next().expect("clap requires two");
    let mut folded = open_delta(last)?;
    let mut layout = None;
    for next in deltas {
        if let Some(layout) = layout.take() {
            folded = to_archive(&layout).map_err(|error| Failure::format(last, &error))?;
        }
        let inputs = both(last, next);
        let format_failure = |error| Failure::format(&inputs, &error);
        let next_delta = open_delta(next)?;
        let draft = DeltaDraft::fold(&folded, &next_delta).map_err(format_failure)?;
        layout = Some(encode_draft(draft, console).map_err(format_failure)?.0);
        last = next;
    }
    let layout = layout.expect("clap requires two");
    let file_len = write_layout(&layout, &args.output, args.force, console)?;
    let line = format!(
        "{}: {} folded, file {}",
        path.display(),
        pluralize(args.deltas.len(), "delta"),
        Size(file_len)
    );
    let json = json!({
        "output": args.output, "deltas": args.deltas.len(), "file_len": file_len,
    });
    console.report(line, &json)?;
    Ok(Exit::Ok)
}

fn open_delta(path: &Path) -> Result<Archive> {
    Document::open(path)?.delta("name deltas, the oldest first").cloned()
}

fn to_archive(layout: &Layout) -> std::result::Result<Archive, tssd_format::Error> {
    let mut file = Vec::new();
    layout.write_to(&mut file)?;
    Archive::from_bytes(file)
}

/// Encodes a delta on all cores. Returns its layout and the number of changed elements.
fn encode_draft(
    draft: DeltaDraft,
    console: Console,
) -> std::result::Result<(Layout, ChangeCount), tssd_format::Error> {
    let results = parallel::map(draft.jobs(), console, "comparing", DeltaJob::len, DeltaJob::run);
    let chunks: Vec<DeltaChunks> = results.into_iter().collect::<std::result::Result<_, _>>()?;
    let mut changes = ChangeCount::default();
    for chunks in &chunks {
        changes += chunks.changes();
    }
    Ok((draft.into_layout(chunks)?, changes))
}

fn write_layout(layout: &Layout, path: &Path, force: Force, console: Console) -> Result<u64> {
    let bar = console.bytes_bar("writing", layout.file_len());
    let mut output = Output::create(path, force, bar)?;
    layout
        .write_to(&mut output)
        .map_err(|error| Failure::format(display_output_path(path), &error))?;
    output.commit()
}
