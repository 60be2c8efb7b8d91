//! `tssd verify`: every byte of an archive is proven.

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error as _;
use std::fmt::Write;
use std::path::{Path, PathBuf};

use serde_json::{Value as Json, json};
use tssd_format::{Archive, Dtype, Error, MANIFEST, Node, Runs, TensorMeta, Verify};

use crate::archives::{Found, is_directory, none_in};
use crate::console::{Console, print, print_json};
use crate::exit::Exit;
use crate::failure::{Failure, Result};
use crate::input::{self, open_set, shown};
use crate::parallel;
use crate::size::{Size, count};
use crate::store::failure;

/// A file with more damage than this is not worth more lines.
const SHOWN_MAX: usize = 10;

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
}

/// One line per file. All files are looked at, whatever is found in the first.
pub(crate) fn run(args: &Args, console: Console) -> Result<Exit> {
    let mut suspects = Vec::new();
    for path in &args.paths {
        suspects.extend(suspects_of(path)?);
    }
    let mut exit = Exit::Ok;
    let mut results = Vec::new();
    let mut damaged = BTreeSet::new();
    for Suspect { path, is_listed, known, is_archive } in &mut suspects {
        let path = &*path;
        let mut verdict = Verdict::default();
        if *is_archive {
            verdict = match verify(path, args.deep, &damaged, console) {
                // It was deleted meanwhile.
                Err(failure)
                    if *is_listed && failure.exit() == Exit::NotFound && known.is_empty() =>
                {
                    continue;
                }
                Err(failure) if *is_listed => Verdict::of(Damage::unread(&failure)),
                verdict => verdict?,
            };
        }
        verdict.damage.append(known);
        if !verdict.damage.is_empty() {
            damaged.insert(path.clone());
        }
        let is_whole = verdict.damage.is_empty();
        if !is_whole {
            exit = Exit::Differs;
        }
        // Damage is never kept quiet.
        let is_fine = is_whole && verdict.warnings.is_empty();
        if !(console.json || is_fine && console.quiet) {
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

/// A file to look at.
struct Suspect {
    path: PathBuf,
    /// Whether nobody has named it: it is in a directory.
    is_listed: bool,
    /// Whether it is an archive, and not a file of a ledger, or a folder.
    is_archive: bool,
    /// What is known to be wrong with it before it is opened.
    known: Vec<Damage>,
}

/// The file itself; or all archives in and below a directory, and what a store there lacks.
fn suspects_of(path: &Path) -> Result<Vec<Suspect>> {
    if !is_directory(path)? {
        let (path, known) = (path.to_owned(), Vec::new());
        return Ok(vec![Suspect { path, is_listed: false, is_archive: true, known }]);
    }
    let Found { archives, unreadable } = Found::below(path);
    let mut suspects: BTreeMap<PathBuf, Suspect> = BTreeMap::new();
    let suspect = |path: &Path, is_archive| Suspect {
        path: path.to_owned(),
        is_listed: true,
        is_archive,
        known: Vec::new(),
    };
    for archive in archives {
        suspects.insert(archive.clone(), suspect(&archive, true));
    }
    let defects = tssd_store::scrub(path).map_err(|error| failure(&error))?;
    let known = defects.into_iter().map(|defect| {
        let message = defect.error.to_string();
        (defect.path, Damage { rule: "store", message, leaf: None, byte: None })
    });
    let unread = unreadable.into_iter().map(|(path, failure)| (path, Damage::unread(&failure)));
    for (path, damage) in known.chain(unread) {
        let entry = suspects.entry(path.clone()).or_insert_with(|| suspect(&path, false));
        entry.known.push(damage);
    }
    if suspects.is_empty() {
        return Err(none_in(path));
    }
    Ok(suspects.into_values().collect())
}

/// What was found in one file.
#[derive(Default)]
struct Verdict {
    what: String,
    damage: Vec<Damage>,
    warnings: Vec<String>,
}

/// One place that is not as it was written.
struct Damage {
    rule: &'static str,
    message: String,
    leaf: Option<String>,
    byte: Option<u64>,
}

impl Verdict {
    fn of(damage: Damage) -> Self {
        Self { damage: vec![damage], ..Self::default() }
    }

    fn lines(&self, path: &Path) -> String {
        let path = shown(path).display();
        if self.damage.is_empty() {
            let mut lines = format!("ok       {path}  {}\n", self.what);
            for warning in &self.warnings {
                writeln!(lines, "         warning  {warning}").expect("a String takes any text");
            }
            return lines;
        }
        let mut lines = format!("DAMAGED  {path}\n");
        for Damage { rule, message, .. } in self.damage.iter().take(SHOWN_MAX) {
            writeln!(lines, "         {rule}  {message}").expect("a String takes any text");
        }
        if let Some(more) = self.damage.len().checked_sub(SHOWN_MAX).filter(|more| *more > 0) {
            writeln!(lines, "         and {more} more").expect("a String takes any text");
        }
        lines
    }
}

impl Damage {
    /// That a file cannot be read is as bad, if nobody has named it.
    fn unread(failure: &Failure) -> Self {
        let source = failure.source().map(|source| format!(": {source}")).unwrap_or_default();
        Self { rule: "io", message: format!("{failure}{source}"), leaf: None, byte: None }
    }

    fn json(&self) -> Json {
        json!({
            "rule": self.rule, "message": self.message, "leaf": self.leaf, "byte": self.byte,
        })
    }
}

/// A broken rule of the format is damage, any other error is none.
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

/// Damage is a verdict; a file that cannot be read is a failure.
fn verify(
    path: &Path,
    deep: bool,
    damaged: &BTreeSet<PathBuf>,
    console: Console,
) -> Result<Verdict> {
    let failed = |error| Failure::format(shown(path), &error);
    let archive = match open(path, damaged)? {
        Ok(archive) => archive,
        Err(error) => return Ok(Verdict::of(error.try_into().map_err(failed)?)),
    };
    let damage = errors(&archive, deep, console).into_iter().map(Damage::try_from);
    let mut damage = damage.collect::<Result<Vec<_>, _>>().map_err(failed)?;
    damage.sort_by_key(|each| each.byte);
    let mut what = Size(archive.file_len()).to_string();
    match archive.shards().len() {
        0 => {}
        files if archive.is_manifest_alone() => {
            write!(what, ", manifest of {} that are not looked at", count(files, "file"))
                .expect("a String takes any text");
        }
        files => {
            write!(what, ", manifest of {}", count(files, "file"))
                .expect("a String takes any text");
        }
    }
    // What is damaged is not looked at for anything else.
    let warnings =
        if deep && damage.is_empty() { odd_bools(&archive).map_err(failed)? } else { Vec::new() };
    Ok(Verdict { what, damage, warnings })
}

/// A manifest is opened with the archives that it names; under another name it is a file alone. So it is if one of
/// them is known to be damaged: that is not said twice.
fn open(path: &Path, damaged: &BTreeSet<PathBuf>) -> Result<Result<Archive, Error>> {
    let alone = Archive::from_blob(input::open(path)?);
    let Ok(archive) = &alone else { return Ok(alone) };
    let is_damaged = |name: String| damaged.contains(&path.with_file_name(name));
    let names = archive.shards().into_iter().map(|shard| shard.name);
    if path.file_name().is_none_or(|name| name != MANIFEST) || names.into_iter().any(is_damaged) {
        return Ok(alone);
    }
    let directory = path.parent().filter(|parent| *parent != Path::new(""));
    open_set(directory.unwrap_or(Path::new(".")))
}

/// Everything that is wrong with the payload of an archive, in any order.
pub(crate) fn errors(archive: &Archive, deep: bool, console: Console) -> Vec<Error> {
    let mut jobs = archive.verify_jobs();
    if deep {
        jobs.extend(archive.decode_jobs());
    }
    let results = parallel::map(&jobs, (console, "verifying"), Verify::len, Verify::run);
    results.into_iter().filter_map(Result::err).collect()
}

/// Bools are bytes; what is neither 0 nor 1 is no damage, but readers may take it for either.
fn odd_bools(archive: &Archive) -> Result<Vec<String>, Error> {
    let mut warnings = Vec::new();
    if archive.is_manifest_alone() {
        return Ok(warnings);
    }
    for (path, node) in archive.leaves() {
        let Node::Tensors(run) = node else { continue };
        let mut odd = 0;
        for reference in run.iter().filter(|each| each.meta.dtype() == Dtype::Bool) {
            let tensor = archive.tensor_of(reference)?;
            let bytes = tensor.view().span();
            let is_odd = |byte: &&u8| **byte > 1;
            let Some(elements) = elements(&reference.meta) else {
                odd += bytes.iter().filter(is_odd).count();
                continue;
            };
            elements.for_each(|start, _, len| {
                let index = |at| usize::try_from(at).expect("it is in memory");
                odd += bytes[index(start)..index(start + len)].iter().filter(is_odd).count();
            });
        }
        if odd > 0 {
            let bools = count(odd, "bool");
            warnings.push(format!("`{}` has {bools} other than 0 and 1", path.fqn()));
        }
    }
    Ok(warnings)
}

/// The elements of a tensor of bytes; those that are repeated are looked at once. `None` if strides
/// make more elements than there are bytes: then all bytes are looked at.
fn elements(meta: &TensorMeta) -> Option<Runs> {
    let strides = meta.strides();
    let once = |(size, stride): (&u64, &u64)| if *stride == 0 { (*size).min(1) } else { *size };
    let shape: Vec<u64> = meta.shape().iter().zip(&strides).map(once).collect();
    let count = shape.iter().fold(1, |count: u64, size| count.saturating_mul(*size));
    let is_once = count <= meta.span_bytes();
    is_once.then(|| Runs::to_row_major(meta.dtype().itemsize(), &shape, &strides))
}
