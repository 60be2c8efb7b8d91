//! `tssd verify`: verifies every byte of archives, and of safetensors files what can be verified.

mod model;

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error as _;
use std::fmt::Write;
use std::path::{Path, PathBuf};

use serde_json::{Value as Json, json};
use tssd_format::{
    Archive, Dtype, Error, ErrorKind, MANIFEST_NAME, Node, Runs, TensorMeta, TensorReference,
    VerifyJob,
};

use crate::archives::{ArchiveListing, no_archives_failure};
use crate::console::{Console, print, print_json};
use crate::document::{Document, Source};
use crate::exit::Exit;
use crate::failure::{Failure, Result};
use crate::input::{Defect, OpenError, display_input_path, is_directory};
use crate::model::Links;
use crate::parallel;
use crate::size::{Size, pluralize};
use crate::store::store_failure;

/// Maximum number of defects that are printed for a file. Further defects are counted.
const DEFECTS_MAX: usize = 10;

/// Prove archives: the index by opening them, the payload by reading every byte. Of the directory of a store its
/// ledgers too: which files are lost, or others.
///
/// Safetensors files have no checksums. Of them and of the directory of a Hugging Face model, the command reads every
/// byte, and proves the headers, the byte ranges of the tensors, and that model.safetensors.index.json names each tensor
/// once, in the file that has it. Changed bytes of tensors are not found.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Archives, safetensors files, directories of models, or directories with archives in them; `-`: stdin
    #[arg(required = true)]
    paths: Vec<PathBuf>,
    /// Prove what the bytes mean too: decode what is compressed, check all digests; warn of bools that
    /// are neither 0 nor 1
    #[arg(long)]
    deep: bool,
    /// The base of the file, which is a delta: prove what the delta leads to
    #[arg(long, value_name = "BASE", requires = "deep")]
    base: Option<PathBuf>,
    #[command(flatten)]
    links: Links,
}

/// Verifies all files and prints one line per file. A damaged file does not stop the command.
pub(crate) fn run(args: &Args, console: Console) -> Result<Exit> {
    if args.base.is_some() && args.paths.len() > 1 {
        return Err(Failure::new(
            Exit::Usage,
            "--base belongs to one delta, and several files are named",
        )
        .help("verify the deltas one by one"));
    }
    let mut inputs = Vec::new();
    for path in &args.paths {
        inputs.extend(list_inputs(path)?);
    }
    let mut exit = Exit::Ok;
    let mut results = Vec::new();
    let mut damaged = BTreeSet::new();
    for Input { path, is_from_directory, known_damage, is_document } in &mut inputs {
        let path = &*path;
        let mut verdict = Verdict { has_checksums: true, ..Verdict::default() };
        if *is_document {
            verdict = match verify(args, path, &damaged, console) {
                // The file was deleted after the directory was listed.
                Err(failure)
                    if *is_from_directory
                        && failure.exit() == Exit::NotFound
                        && known_damage.is_empty() =>
                {
                    continue;
                }
                Err(failure) if *is_from_directory => {
                    Verdict::from_damage(Damage::from_failure(&failure))
                }
                verdict => verdict?,
            };
        }
        verdict.damage.append(known_damage);
        if !verdict.damage.is_empty() {
            damaged.insert(path.clone());
        }
        let is_whole = verdict.damage.is_empty();
        if !is_whole {
            exit = Exit::Mismatch;
        }
        // Damage and warnings are printed even with `--quiet`.
        let is_clean = is_whole && verdict.warnings.is_empty();
        if !(console.json || is_clean && console.quiet) {
            print(verdict.lines(path))?;
        }
        let damage: Vec<Json> = verdict.damage.iter().map(Damage::json).collect();
        results.push(json!({
            "path": path, "ok": is_whole, "damage": damage, "warnings": verdict.warnings,
            "checksums": verdict.has_checksums,
        }));
    }
    if console.json {
        print_json(&results.into())?;
    }
    Ok(exit)
}

/// A file to verify, or a path with known damage.
struct Input {
    path: PathBuf,
    /// Whether the file was found in a directory, not named on the command line.
    is_from_directory: bool,
    /// Whether the path is an archive or a model, not a file of a ledger or an unreadable folder.
    is_document: bool,
    /// Damage that is known before the file is opened.
    known_damage: Vec<Damage>,
}

/// Lists the inputs of a path: the file itself, or the model of a directory and all archives in and below it.
///
/// In the directory of a store, the files with defects that the ledgers reveal are listed too.
fn list_inputs(path: &Path) -> Result<Vec<Input>> {
    if !is_directory(path)? {
        let (path, known_damage) = (path.to_owned(), Vec::new());
        return Ok(vec![Input { path, is_from_directory: false, is_document: true, known_damage }]);
    }
    let ArchiveListing { archives, unreadable } = ArchiveListing::scan(path);
    let mut inputs: BTreeMap<PathBuf, Input> = BTreeMap::new();
    // The model of the directory itself is named by the caller, who learns why it cannot be read.
    let input = |at: &Path, is_document| Input {
        path: at.to_owned(),
        is_from_directory: at != path,
        is_document,
        known_damage: Vec::new(),
    };
    // Of versions that are stored as deltas, `scrub` verifies the contents.
    let deltas: Vec<&PathBuf> =
        archives.iter().filter(|path| tssd_store::is_stored_delta(path)).collect();
    let folders: BTreeSet<&Path> = deltas.iter().filter_map(|path| path.parent()).collect();
    for archive in &archives {
        let is_manifest = archive.ends_with(MANIFEST_NAME);
        let is_in_delta =
            is_manifest && archive.parent().is_some_and(|folder| folders.contains(folder));
        if !is_in_delta && !deltas.contains(&archive) {
            inputs.insert(archive.clone(), input(archive, true));
        }
    }
    let defects = tssd_store::scrub(path).map_err(|error| store_failure(&error))?;
    let store_damage = defects.into_iter().map(|defect| {
        let message = defect.error.to_string();
        (defect.path, Damage { rule: "store", message, leaf: None, byte: None })
    });
    let unreadable_damage =
        unreadable.into_iter().map(|(path, failure)| (path, Damage::from_failure(&failure)));
    for (path, damage) in store_damage.chain(unreadable_damage) {
        let entry = inputs.entry(path.clone()).or_insert_with(|| input(&path, false));
        entry.known_damage.push(damage);
    }
    if inputs.is_empty() {
        return Err(no_archives_failure(path));
    }
    Ok(inputs.into_values().collect())
}

/// Result of verifying one file.
#[derive(Default)]
struct Verdict {
    summary: String,
    damage: Vec<Damage>,
    warnings: Vec<String>,
    /// Whether the file has checksums, so that changed bytes are damage. `false` for safetensors.
    has_checksums: bool,
}

/// One defect of a file.
struct Damage {
    rule: &'static str,
    message: String,
    leaf: Option<String>,
    byte: Option<u64>,
}

impl Verdict {
    fn from_damage(damage: Damage) -> Self {
        Self { damage: vec![damage], has_checksums: true, ..Self::default() }
    }

    /// Converts the defects that an input could not be opened for. `path` is the input.
    fn from_defects(path: &Path, defects: Vec<Defect>) -> Result<Self> {
        let mut verdict = Self::default();
        for defect in defects {
            verdict.has_checksums = defect.error.kind().rule() != SAFETENSORS_RULE;
            let message = defect.message(path);
            let damage = Damage::try_from(defect.error)
                .map_err(|error| Failure::format(display_input_path(&defect.path), &error))?;
            verdict.damage.push(Damage { message, ..damage });
        }
        Ok(verdict)
    }

    fn lines(&self, path: &Path) -> String {
        let path = display_input_path(path).display();
        if self.damage.is_empty() {
            let mut lines = format!("ok       {path}  {}\n", self.summary);
            for warning in &self.warnings {
                writeln!(lines, "         warning  {warning}").expect("a String takes any text");
            }
            return lines;
        }
        let mut lines = format!("DAMAGED  {path}\n");
        for Damage { rule, message, .. } in self.damage.iter().take(DEFECTS_MAX) {
            writeln!(lines, "         {rule}  {message}").expect("a String takes any text");
        }
        if let Some(more) = self.damage.len().checked_sub(DEFECTS_MAX).filter(|more| *more > 0) {
            writeln!(lines, "         and {more} more").expect("a String takes any text");
        }
        lines
    }
}

impl Damage {
    /// Converts a failure to read a file to damage. Used for files that were found in a directory.
    fn from_failure(failure: &Failure) -> Self {
        let source = failure.source().map(|source| format!(": {source}")).unwrap_or_default();
        Self { rule: "io", message: format!("{failure}{source}"), leaf: None, byte: None }
    }

    fn json(&self) -> Json {
        json!({
            "rule": self.rule, "message": self.message, "leaf": self.leaf, "byte": self.byte,
        })
    }
}

/// The rule of errors in safetensors files.
const SAFETENSORS_RULE: &str = ErrorKind::NotSafetensors.rule();

/// A broken rule of the format or of safetensors is damage. Other errors are returned unchanged.
impl TryFrom<Error> for Damage {
    type Error = Error;

    fn try_from(error: Error) -> Result<Self, Error> {
        let rule = error.kind().rule();
        let is_damage = matches!(error.kind(), ErrorKind::NotSafetensors | ErrorKind::WeightMap);
        if !is_damage && !rule.starts_with("F-") {
            return Err(error);
        }
        let (message, leaf) = (error.to_string(), error.path().map(ToOwned::to_owned));
        Ok(Self { rule, message, leaf, byte: error.offset() })
    }
}

/// Verifies an input. Damage is part of the verdict, an unreadable file is an error.
fn verify(
    args: &Args,
    path: &Path,
    damaged: &BTreeSet<PathBuf>,
    console: Console,
) -> Result<Verdict> {
    let document = match open(path, args.links, damaged) {
        Err(OpenError::Defects(defects)) => return Verdict::from_defects(path, defects),
        document => document?,
    };
    let document = match &args.base {
        Some(base) => document.with_base(&Document::open_with(base, args.links, None)?, console)?,
        None => document,
    };
    let mut verdict = match document.source() {
        Source::Archive(archive, _) => {
            verify_archive(archive, document.path(), args.deep, console)?
        }
        Source::Model(model) => model::verify(model, console)?,
    };
    // Damaged files are not searched for warnings.
    if args.deep && verdict.damage.is_empty() {
        verdict.warnings.extend(invalid_bool_warnings(&document)?);
    }
    Ok(verdict)
}

fn verify_archive(archive: &Archive, path: &Path, deep: bool, console: Console) -> Result<Verdict> {
    let damage = verify_payload(archive, deep, console).into_iter().map(Damage::try_from);
    let damage = damage.collect::<Result<Vec<_>, _>>();
    let mut damage = damage.map_err(|error| Failure::format(path, &error))?;
    damage.sort_by_key(|each| each.byte);
    let mut summary = Size(archive.file_len()).to_string();
    match archive.shards().len() {
        0 => {}
        files if archive.is_manifest_only() => {
            write!(summary, ", manifest of {} that are not looked at", pluralize(files, "file"))
                .expect("a String takes any text");
        }
        files => {
            write!(summary, ", manifest of {}", pluralize(files, "file"))
                .expect("a String takes any text");
        }
    }
    if archive.lacks_base() {
        summary.push_str(", a delta whose base is not looked at");
    }
    Ok(Verdict { summary, damage, warnings: Vec::new(), has_checksums: true })
}

/// Opens an input. A file with the name of a manifest is opened with the archives that it names.
///
/// The manifest is opened alone if one of its archives is known to be damaged, so that the damage is
/// reported once.
fn open(path: &Path, links: Links, damaged: &BTreeSet<PathBuf>) -> Result<Document, OpenError> {
    let document = Document::open_with(path, links, None)?;
    let is_damaged = |name: String| damaged.contains(&path.with_file_name(name));
    let Some(archive) = document.archive() else { return Ok(document) };
    let shards = archive.shards();
    if path.file_name().is_none_or(|name| name != MANIFEST_NAME)
        || shards.into_iter().any(|shard| is_damaged(shard.name))
    {
        return Ok(document);
    }
    let directory = path.parent().filter(|parent| *parent != Path::new(""));
    Document::open_shard_set(directory.unwrap_or(Path::new(".")))
}

/// Returns all defects in the payload of an archive, in any order.
pub(crate) fn verify_payload(archive: &Archive, deep: bool, console: Console) -> Vec<Error> {
    let mut jobs = archive.verify_jobs();
    if deep {
        jobs.extend(archive.deep_verify_jobs());
    }
    let results = parallel::map(&jobs, console, "verifying", VerifyJob::len, VerifyJob::run);
    results.into_iter().filter_map(Result::err).collect()
}

/// Returns a warning for each leaf with bools other than 0 and 1.
///
/// Such bytes are not damage, but readers may disagree on their value.
fn invalid_bool_warnings(document: &Document) -> Result<Vec<String>> {
    let mut warnings = Vec::new();
    // A manifest that is opened alone has no bytes, and a delta without its base only some.
    let can_read = |number| document.archive().is_none_or(|archive| archive.can_read(number));
    for (path, node) in document.structure().into_leaves() {
        let Node::Tensors(shards) = node else { continue };
        let mut invalid_count = 0;
        let is_bool = |each: &&TensorReference| {
            each.meta.dtype() == Dtype::Bool && each.storage.is_none_or(can_read)
        };
        for reference in shards.iter().filter(is_bool) {
            let tensor = document.tensor(reference)?;
            let bytes = tensor.view().span();
            let is_invalid = |byte: &&u8| **byte > 1;
            let Some(elements) = distinct_elements(&reference.meta) else {
                invalid_count += bytes.iter().filter(is_invalid).count();
                continue;
            };
            elements.for_each(|start, _, len| {
                let to_usize = |at| usize::try_from(at).expect("it is in memory");
                invalid_count +=
                    bytes[to_usize(start)..to_usize(start + len)].iter().filter(is_invalid).count();
            });
        }
        if invalid_count > 0 {
            let bools = pluralize(invalid_count, "bool");
            warnings.push(format!("`{}` has {bools} other than 0 and 1", path.fqn()));
        }
    }
    Ok(warnings)
}

/// Returns the elements of a tensor of bytes, with each repeated element once.
///
/// Returns `None` if the strides make more elements than there are bytes. The caller then checks all
/// bytes of the span.
fn distinct_elements(meta: &TensorMeta) -> Option<Runs> {
    let strides = meta.strides();
    let distinct_size =
        |(size, stride): (&u64, &u64)| if *stride == 0 { (*size).min(1) } else { *size };
    let shape: Vec<u64> = meta.shape().iter().zip(&strides).map(distinct_size).collect();
    let count = shape.iter().fold(1, |count: u64, size| count.saturating_mul(*size));
    let fits_span = count <= meta.span_bytes();
    fits_span.then(|| Runs::to_row_major(meta.dtype().itemsize(), &shape, &strides))
}
