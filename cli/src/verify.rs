//! `tssd verify`: every byte of an archive is proven.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use serde_json::{Value as Json, json};
use tssd_format::{Archive, Dtype, Error, MANIFEST, Node, Runs, TensorMeta, Verify};

use crate::archives::archives_in;
use crate::console::{Console, print, print_json};
use crate::exit::Exit;
use crate::failure::{Failure, Result};
use crate::input::{self, open_set, shown};
use crate::parallel;
use crate::size::{Size, count};

/// A file with more damage than this is not worth more lines.
const SHOWN_MAX: usize = 10;

/// Prove archives: the index by opening them, the payload by reading every byte.
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
    let mut files = Vec::new();
    for path in &args.paths {
        files.extend(archives_in(path)?);
    }
    let mut exit = Exit::Ok;
    let mut results = Vec::new();
    for path in &files {
        let verdict = verify(path, args.deep, console)?;
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
fn verify(path: &Path, deep: bool, console: Console) -> Result<Verdict> {
    let failed = |error| Failure::format(shown(path), &error);
    let archive = match open(path)? {
        Ok(archive) => archive,
        Err(error) => {
            let damage = vec![error.try_into().map_err(failed)?];
            return Ok(Verdict { damage, ..Verdict::default() });
        }
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

/// A manifest is opened with the archives that it names; under another name it is a file alone.
fn open(path: &Path) -> Result<Result<Archive, Error>> {
    if path.file_name().is_some_and(|name| name == MANIFEST) {
        let directory = path.parent().filter(|parent| *parent != Path::new(""));
        return open_set(directory.unwrap_or(Path::new(".")));
    }
    Ok(Archive::from_blob(input::open(path)?))
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
