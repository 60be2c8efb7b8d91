//! `tssd verify`: verifies every byte of archives.

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error as _;
use std::fmt::Write;
use std::path::{Path, PathBuf};

use serde_json::{Value as Json, json};
use tssd_format::{Archive, Dtype, Error, MANIFEST_NAME, Node, Runs, TensorMeta, VerifyJob};

use crate::archives::{ArchiveListing, is_directory, no_archives_failure};
use crate::console::{Console, print, print_json};
use crate::delta::with_base;
use crate::exit::Exit;
use crate::failure::{Failure, Result};
use crate::input::{self, display_input_path, open_shard_set};
use crate::parallel;
use crate::size::{Size, pluralize};
use crate::store::store_failure;

/// Maximum number of defects that are printed for a file. Further defects are counted.
const DEFECTS_MAX: usize = 10;

/// Prove archives: the index by opening them, the payload by reading every byte. Of the directory of a store its
/// ledgers too: which files are lost, or others.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Archives, or directories with archives in them; `-`: stdin
    #[arg(required = true)]
    paths: Vec<PathBuf>,
    /// Prove what the bytes mean too: decode what is compressed, check all digests; warn of bools that
    /// are neither 0 nor 1
    #[arg(long)]
    deep: bool,
    /// The base of the file, which is a delta: prove what the delta leads to
    #[arg(long, value_name = "BASE.tssd", requires = "deep")]
    base: Option<PathBuf>,
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
    for Input { path, is_from_directory, known_damage, is_archive } in &mut inputs {
        let path = &*path;
        let mut verdict = Verdict::default();
        if *is_archive {
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
    /// Whether the path is an archive, not a file of a ledger or a folder.
    is_archive: bool,
    /// Damage that is known before the file is opened.
    known_damage: Vec<Damage>,
}

/// Lists the inputs of a path: the file itself, or all archives in and below a directory.
///
/// In the directory of a store, the files with defects that the ledgers reveal are listed too.
fn list_inputs(path: &Path) -> Result<Vec<Input>> {
    if !is_directory(path)? {
        let (path, known_damage) = (path.to_owned(), Vec::new());
        return Ok(vec![Input { path, is_from_directory: false, is_archive: true, known_damage }]);
    }
    let ArchiveListing { archives, unreadable } = ArchiveListing::scan(path);
    let mut inputs: BTreeMap<PathBuf, Input> = BTreeMap::new();
    let input = |path: &Path, is_archive| Input {
        path: path.to_owned(),
        is_from_directory: true,
        is_archive,
        known_damage: Vec::new(),
    };
    for archive in archives {
        inputs.insert(archive.clone(), input(&archive, true));
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
        Self { damage: vec![damage], ..Self::default() }
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

/// A broken rule of the format is damage. Other errors are returned unchanged.
impl TryFrom<Error> for Damage {
    type Error = Error;

    fn try_from(error: Error) -> Result<Self, Error> {
        let rule = error.kind().rule();
        if !rule.starts_with("F-") {
            return Err(error);
        }
        let (message, leaf) = (error.to_string(), error.path().map(ToOwned::to_owned));
        Ok(Self { rule, message, leaf, byte: error.offset() })
    }
}

/// Verifies a file. Damage is part of the verdict, an unreadable file is an error.
fn verify(
    args: &Args,
    path: &Path,
    damaged: &BTreeSet<PathBuf>,
    console: Console,
) -> Result<Verdict> {
    let format_failure = |error| Failure::format(display_input_path(path), &error);
    let archive = match open(path, damaged)? {
        Ok(archive) => archive,
        Err(error) => return Ok(Verdict::from_damage(error.try_into().map_err(format_failure)?)),
    };
    let archive = match &args.base {
        Some(base) => with_base(archive, path, base)?,
        None => archive,
    };
    let damage = verify_payload(&archive, args.deep, console).into_iter().map(Damage::try_from);
    let mut damage = damage.collect::<Result<Vec<_>, _>>().map_err(format_failure)?;
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
    // Damaged files are not searched for warnings.
    let warnings = if args.deep && damage.is_empty() {
        invalid_bool_warnings(&archive).map_err(format_failure)?
    } else {
        Vec::new()
    };
    Ok(Verdict { summary, damage, warnings })
}

/// Opens a file. A file with the name of a manifest is opened with the archives that it names.
///
/// The manifest is opened alone if one of its archives is known to be damaged, so that the damage is
/// reported once.
fn open(path: &Path, damaged: &BTreeSet<PathBuf>) -> Result<Result<Archive, Error>> {
    let archive_alone = Archive::from_blob(input::open(path)?);
    let Ok(archive) = &archive_alone else { return Ok(archive_alone) };
    let is_damaged = |name: String| damaged.contains(&path.with_file_name(name));
    let names = archive.shards().into_iter().map(|shard| shard.name);
    if path.file_name().is_none_or(|name| name != MANIFEST_NAME)
        || names.into_iter().any(is_damaged)
    {
        return Ok(archive_alone);
    }
    let directory = path.parent().filter(|parent| *parent != Path::new(""));
    open_shard_set(directory.unwrap_or(Path::new(".")))
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
fn invalid_bool_warnings(archive: &Archive) -> Result<Vec<String>, Error> {
    let mut warnings = Vec::new();
    if archive.is_manifest_only() {
        return Ok(warnings);
    }
    for (path, node) in archive.leaves() {
        let Node::Tensors(shards) = node else { continue };
        let mut invalid_count = 0;
        for reference in shards.iter().filter(|each| each.meta.dtype() == Dtype::Bool) {
            let tensor = archive.read_tensor(reference)?;
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
