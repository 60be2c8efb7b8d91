//! `tssd verify`: every byte of an archive is proven.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use indicatif::ProgressBar;
use serde_json::json;
use tssd_format::{Archive, Error, ErrorKind};

use crate::archives::archives_in;
use crate::console::Console;
use crate::document::{open_archive, open_file};
use crate::exit::Exit;
use crate::failure::{Failure, Result};
use crate::size::{Size, count};

/// A file with more damage than this is not worth more lines.
const SHOWN_MAX: usize = 10;

/// Prove archives: the index by opening them, the payload by reading every byte.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Archives, or directories with archives in them
    #[arg(required = true)]
    paths: Vec<PathBuf>,
}

/// One line per file. All files are looked at, whatever is found in the first.
pub(crate) fn run(args: &Args, console: &Console) -> Result<Exit> {
    let mut files = Vec::new();
    for path in &args.paths {
        files.extend(archives_in(path)?);
    }
    let mut exit = Exit::Ok;
    let mut results = Vec::new();
    for path in &files {
        let verdict = verify(path, console)?;
        if verdict.damage.is_empty() {
            if !console.json && !console.quiet {
                console.print(format_args!("ok       {}  {}\n", path.display(), verdict.what))?;
            }
        } else {
            exit = Exit::Differs;
            if !console.json {
                console.print(verdict.lines(path))?;
            }
        }
        results.push(json!({
            "path": path,
            "ok": verdict.damage.is_empty(),
            "damage": verdict.damage.iter().map(json_of).collect::<Vec<_>>(),
        }));
    }
    if console.json {
        console.print_json(&results.into())?;
    }
    Ok(exit)
}

/// What was found in one file.
struct Verdict {
    what: String,
    damage: Vec<Error>,
}

impl Verdict {
    fn lines(&self, path: &Path) -> String {
        let mut lines = format!("DAMAGED  {}\n", path.display());
        for error in self.damage.iter().take(SHOWN_MAX) {
            let rule = error.kind().rule();
            lines.push_str(&format!("         {rule} {error}\n"));
        }
        if let Some(more) = self.damage.len().checked_sub(SHOWN_MAX).filter(|more| *more > 0) {
            lines.push_str(&format!("         and {more} more\n"));
        }
        lines
    }
}

fn json_of(error: &Error) -> serde_json::Value {
    json!({
        "kind": error.kind().name(),
        "rule": error.kind().rule(),
        "leaf": error.path(),
        "byte": error.offset(),
        "message": error.to_string(),
    })
}

/// A broken rule is a verdict; a file that cannot be read is a failure.
fn verify(path: &Path, console: &Console) -> Result<Verdict> {
    let archive = match Archive::from_blob(Arc::new(open_file(path)?)) {
        Ok(archive) => archive,
        Err(error) if is_damage(&error) => {
            return Ok(Verdict { what: String::new(), damage: vec![error] });
        }
        Err(error) => return Err(Failure::format(path, &error)),
    };
    let bar = console.bytes_bar("verifying", archive.file_len());
    let mut damage = run_jobs(&archive, &bar);
    bar.finish_and_clear();
    if let Some(error) = damage.iter().find(|error| !is_damage(error)) {
        return Err(Failure::format(path, error));
    }
    let mut what = Size(archive.file_len()).to_string();
    let shards = archive.shards();
    if !shards.is_empty() {
        what = format!("{what}, manifest of {}", count(shards.len(), "file"));
        damage.extend(missing_shards(&archive, path)?);
    }
    damage.sort_by_key(Error::offset);
    Ok(Verdict { what, damage })
}

fn is_damage(error: &Error) -> bool {
    error.kind().rule().starts_with("F-")
}

/// The jobs on all cores; what they find, in any order.
fn run_jobs(archive: &Archive, bar: &ProgressBar) -> Vec<Error> {
    let jobs = archive.verify_jobs();
    let next = AtomicUsize::new(0);
    let damage = Mutex::new(Vec::new());
    let threads = thread::available_parallelism().map_or(1, usize::from).min(jobs.len()).max(1);
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some(job) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    if let Err(error) = job.run() {
                        damage.lock().unwrap_or_else(PoisonError::into_inner).push(error);
                    }
                    bar.inc(job.len());
                }
            });
        }
    });
    damage.into_inner().unwrap_or_else(PoisonError::into_inner)
}

/// A manifest holds no bytes: the files that it names must be the ones beside it.
fn missing_shards(manifest: &Archive, path: &Path) -> Result<Vec<Error>> {
    let mut missing = Vec::new();
    for shard in manifest.shards() {
        let beside = path.with_file_name(&shard.name);
        let wrong = |note: &str| Error::new(ErrorKind::ShardTable).at(&shard.name).note(note);
        if !beside.is_file() {
            missing.push(wrong("the file is not there"));
            continue;
        }
        let Ok(archive) = open_archive(&beside, open_file(&beside)?) else {
            missing.push(wrong("the file is no valid archive"));
            continue;
        };
        let found = (archive.file_len(), archive.index_range().start, archive.index_crc32());
        if found != (shard.file_len, shard.index_off, shard.index_crc32) {
            missing.push(wrong("the file is another one than the manifest names"));
        }
    }
    Ok(missing)
}
