//! `tssd verify`: every byte of an archive is proven.

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

use indicatif::ProgressBar;
use serde_json::{Value as Json, json};
use tssd_format::{Archive, Error};

use crate::archives::archives_in;
use crate::console::{Console, print, print_json};

use crate::exit::Exit;
use crate::failure::{Failure, Result};
use crate::input::{open, shown};
use crate::size::{Size, count};

/// A file with more damage than this is not worth more lines.
const SHOWN_MAX: usize = 10;

/// Prove archives: the index by opening them, the payload by reading every byte.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Archives, or directories with archives in them; `-`: stdin
    #[arg(required = true)]
    paths: Vec<PathBuf>,
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
        let verdict = verify(path, console)?;
        let is_whole = verdict.damage.is_empty();
        if !is_whole {
            exit = Exit::Differs;
        }
        // Damage is never kept quiet.
        if !(console.json || is_whole && console.quiet) {
            print(verdict.lines(path))?;
        }
        let damage: Vec<Json> = verdict.damage.iter().map(Damage::json).collect();
        results.push(json!({ "path": path, "ok": is_whole, "damage": damage }));
    }
    if console.json {
        print_json(&results.into())?;
    }
    Ok(exit)
}

/// What was found in one file.
struct Verdict {
    what: String,
    damage: Vec<Damage>,
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
            return format!("ok       {path}  {}\n", self.what);
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
fn verify(path: &Path, console: Console) -> Result<Verdict> {
    let failed = |error| Failure::format(shown(path), &error);
    let archive = match Archive::from_blob(open(path)?) {
        Ok(archive) => archive,
        Err(error) => {
            let damage = vec![error.try_into().map_err(failed)?];
            return Ok(Verdict { what: String::new(), damage });
        }
    };
    let bar = console.bytes_bar("verifying", archive.file_len());
    let errors = run_jobs(&archive, &bar);
    bar.finish_and_clear();
    let damage = errors.into_iter().map(Damage::try_from).collect::<Result<Vec<_>, _>>();
    let mut damage = damage.map_err(failed)?;
    let mut what = Size(archive.file_len()).to_string();
    let shards = archive.shards();
    if !shards.is_empty() {
        what = format!("{what}, manifest of {}", count(shards.len(), "file"));
        damage.extend(missing_shards(&archive, path)?);
    }
    damage.sort_by_key(|each| each.byte);
    Ok(Verdict { what, damage })
}

/// The jobs on all cores; what they find, in any order.
fn run_jobs(archive: &Archive, bar: &ProgressBar) -> Vec<Error> {
    let jobs = archive.verify_jobs();
    let next = AtomicUsize::new(0);
    let errors = Mutex::new(Vec::new());
    let threads = thread::available_parallelism().map_or(1, usize::from).min(jobs.len()).max(1);
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some(job) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    if let Err(error) = job.run() {
                        errors.lock().unwrap_or_else(PoisonError::into_inner).push(error);
                    }
                    bar.inc(job.len());
                }
            });
        }
    });
    errors.into_inner().unwrap_or_else(PoisonError::into_inner)
}

/// A manifest holds no bytes: the files that it names must be the ones beside it.
fn missing_shards(manifest: &Archive, path: &Path) -> Result<Vec<Damage>> {
    let mut missing = Vec::new();
    for shard in manifest.shards() {
        let beside = path.with_file_name(&shard.name);
        let mut wrong = |note: &str| {
            let message = format!("`{}` {note}", shard.name);
            missing.push(Damage { rule: "shards", message, leaf: None, byte: None });
        };
        if !beside.is_file() {
            wrong("is not there");
            continue;
        }
        let Ok(archive) = Archive::from_blob(open(&beside)?) else {
            wrong("is no valid archive");
            continue;
        };
        let found = (archive.file_len(), archive.index_range().start, archive.index_crc32());
        if found != (shard.file_len, shard.index_off, shard.index_crc32) {
            wrong("is another file than the one that the manifest names");
        }
    }
    Ok(missing)
}
