//! `tssd roundtrip`: what is read from a file and written anew is the same file.

mod packed;
mod same;

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use serde_json::{Value as Json, json};
use tssd_format::{
    Archive, Attrs, Blob, Error, ErrorKind, Layout, MANIFEST, Options, ZSTD_LEVEL_ATTR, manifest,
};

use self::same::Same;
use crate::archives::archives_in;
use crate::console::{Console, print, print_json};
use crate::diff;
use crate::document::{Document, looks_like_safetensors};
use crate::encode;
use crate::exit::Exit;
use crate::failure::{Failure, Result};
use crate::input::{open, open_set, shown};
use crate::verify;

/// More than this is not worth more lines.
const REASONS_MAX: usize = 10;

/// Read archives into state dicts, write those anew, and compare: nothing is lost.
///
/// Each is `identical` (the same bytes), `equal` (other bytes, such as those of another writer, that
/// mean the same), or `lossy`. Of a shard set, each archive is read and written by itself, and all of
/// them together as one. Safetensors files are packed and unpacked.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Archives, directories with archives in them, or safetensors files; `-`: stdin
    #[arg(required = true)]
    paths: Vec<PathBuf>,
}

/// How much of a file survives.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Outcome {
    Identical,
    Equal,
    Lossy,
}

impl Outcome {
    const ALL: [(Self, &'static str); 3] =
        [(Self::Identical, "identical"), (Self::Equal, "equal"), (Self::Lossy, "lossy")];

    fn name(self) -> &'static str {
        Self::ALL[self as usize].1
    }
}

/// What became of one file, and why it is not the same.
struct Verdict {
    outcome: Outcome,
    reasons: Vec<String>,
}

/// One line per file. All files are looked at, whatever becomes of the first.
pub(crate) fn run(args: &Args, console: Console) -> Result<Exit> {
    let mut files = Vec::new();
    for path in &args.paths {
        files.extend(archives_in(path)?);
    }
    let mut results = Vec::new();
    for path in &files {
        let verdict = check(path, console)?;
        if !(console.json || console.quiet && verdict.outcome != Outcome::Lossy) {
            print(verdict.lines(path))?;
        }
        results.push((path, verdict));
    }
    let of = |outcome| results.iter().filter(|(_, each)| each.outcome == outcome).count();
    if console.json {
        let json = |(path, verdict): &(&PathBuf, Verdict)| {
            json!({
                "path": path, "result": verdict.outcome.name(), "reasons": verdict.reasons,
            })
        };
        print_json(&results.iter().map(json).collect::<Vec<Json>>().into())?;
    } else if !console.quiet {
        let parts = Outcome::ALL.map(|(outcome, name)| format!("{} {name}", of(outcome)));
        print(format_args!("{}\n", parts.join(", ")))?;
    }
    Ok(if of(Outcome::Lossy) == 0 { Exit::Ok } else { Exit::Differs })
}

impl Verdict {
    fn identical() -> Self {
        Self { outcome: Outcome::Identical, reasons: Vec::new() }
    }

    fn equal(reason: String) -> Self {
        Self { outcome: Outcome::Equal, reasons: vec![reason] }
    }

    fn lossy(reasons: impl IntoIterator<Item = String>) -> Self {
        Self { outcome: Outcome::Lossy, reasons: reasons.into_iter().collect() }
    }

    /// The same with something to know about it.
    fn note(mut self, note: &str) -> Self {
        self.reasons.push(note.to_owned());
        self
    }

    fn lines(&self, path: &Path) -> String {
        let mut lines = format!("{:9}  {}", self.outcome.name(), shown(path).display());
        if self.outcome != Outcome::Lossy && !self.reasons.is_empty() {
            return format!("{lines}  {}\n", self.reasons.join("; "));
        }
        lines.push('\n');
        for reason in self.reasons.iter().take(REASONS_MAX) {
            writeln!(lines, "           {reason}").expect("a String takes any text");
        }
        if let Some(more) = self.reasons.len().checked_sub(REASONS_MAX).filter(|more| *more > 0) {
            writeln!(lines, "           and {more} more").expect("a String takes any text");
        }
        lines
    }
}

/// What is wrong with a file is a verdict; what is wrong with the system is a failure.
fn verdict_of(path: &Path, error: &Error) -> Result<Verdict> {
    let rule = error.kind().rule();
    if error.kind().rule() == "io" {
        return Err(Failure::format(path, error));
    }
    Ok(Verdict::lossy([format!("{rule}  {error}")]))
}

fn check(path: &Path, console: Console) -> Result<Verdict> {
    let file = open(path)?;
    let path = shown(path);
    if looks_like_safetensors(&*file) {
        return packed::check(path, &*file, console);
    }
    let archive = match Archive::from_blob(file.clone()) {
        Ok(archive) => archive,
        Err(error) => return verdict_of(path, &error),
    };
    if archive.is_manifest_alone() {
        return check_manifest(path, &archive, &*file, console);
    }
    let layout = match anew(&archive, console) {
        Ok(layout) => layout,
        Err(error) => return verdict_of(path, &error),
    };
    let mut same = Same::to(&*file);
    match layout.write_to(&mut same) {
        Ok(()) if same.is_whole() => return Ok(Verdict::identical()),
        Err(error) if same.difference().is_none() => return Err(Failure::format(path, &error)),
        _ => {}
    }
    compare(path, archive, layout, note_of(&same), console)
}

/// The archive of the state dict of an archive.
fn anew(archive: &Archive, console: Console) -> Result<Layout, Error> {
    encode::plan(&archive.to_state_dict()?, &Options::recorded(archive), console)
}

/// Where the bytes differ.
fn note_of(same: &Same<'_>) -> String {
    let at = same.difference().map(|at| format!("other bytes from byte {at} on"));
    at.unwrap_or_else(|| "it ends earlier".into())
}

/// Whether an archive that was written anew means what the old one means.
fn compare(
    path: &Path,
    archive: Archive,
    layout: Layout,
    note: String,
    console: Console,
) -> Result<Verdict> {
    // With new checksums, damage would look whole.
    let mut damage = verify::errors(&archive, true, console);
    damage.sort_by_key(Error::offset);
    if !damage.is_empty() {
        let reason = |error: &Error| format!("{}  {error}", error.kind().rule());
        return Ok(Verdict::lossy(damage.iter().map(reason)));
    }
    let mut bytes = Vec::with_capacity(usize::try_from(layout.file_len()).unwrap_or_default());
    let failed = |error| Failure::format(path, &error);
    layout.write_to(&mut bytes).map_err(failed)?;
    drop(layout);
    let again = Archive::from_bytes(bytes).map_err(failed)?;
    let attrs_differ = attrs_of(&archive) != attrs_of(&again);
    let [old, new] = [archive, again].map(|archive| Document::of(path, archive));
    let found = diff::compare(&old, &new, false, console)?.found;
    let mut reasons: Vec<String> = found.iter().map(|each| each.line(0)).collect();
    if attrs_differ && reasons.is_empty() {
        reasons.push("attributes differ".to_owned());
    }
    Ok(if reasons.is_empty() { Verdict::equal(note) } else { Verdict::lossy(reasons) })
}

/// What is said of an archive as a whole, but for how it is compressed.
fn attrs_of(archive: &Archive) -> Attrs {
    let mut attrs = archive.attrs();
    attrs.remove(ZSTD_LEVEL_ATTR);
    attrs
}

/// The index of a manifest is written anew from what it says; what the archives hold together, as
/// one archive.
fn check_manifest(
    path: &Path,
    alone: &Archive,
    file: &dyn Blob,
    console: Console,
) -> Result<Verdict> {
    let storages: Vec<_> = (0..alone.storage_count()).map(|number| alone.storage(number)).collect();
    let bytes = manifest(&alone.structure(), &storages, &alone.attrs(), &alone.shards());
    let bytes = match bytes {
        Ok(bytes) => bytes,
        Err(error) => return verdict_of(path, &error),
    };
    let mut same = Same::to(file);
    let index = match same.write_all(&bytes) {
        Ok(()) if same.is_whole() => Verdict::identical(),
        Err(error) if same.difference().is_none() => return Err(Failure::io("read", path, error)),
        _ => {
            let again =
                Archive::from_bytes(bytes).map_err(|error| Failure::format(path, &error))?;
            let is_equal = again.structure() == alone.structure()
                && (again.attrs(), again.shards()) == (alone.attrs(), alone.shards())
                && (0..).zip(&storages).all(|(number, storage)| again.storage(number) == *storage);
            if is_equal {
                Verdict::equal(note_of(&same))
            } else {
                Verdict::lossy(["the index means something else".to_owned()])
            }
        }
    };
    let directory = path.parent().unwrap_or(Path::new(""));
    if index.outcome == Outcome::Lossy {
        return Ok(index);
    }
    if path.file_name().is_none_or(|name| name != MANIFEST) {
        return Ok(index.note("the index alone, not what it names"));
    }
    let directory = if directory == Path::new("") { Path::new(".") } else { directory };
    let set = match open_set(directory)? {
        Ok(set) => set,
        Err(error) => return verdict_of(path, &error),
    };
    match anew(&set, console) {
        Ok(layout) => {
            let whole = compare(path, set, layout, String::new(), console)?;
            Ok(if whole.outcome == Outcome::Lossy { whole } else { index })
        }
        // Nothing but a manifest can hold what writers disagree on; all of it was read.
        Err(error) if error.kind() == ErrorKind::ShardTable => {
            Ok(index.note("not joined, as its writers hold different values"))
        }
        Err(error) => verdict_of(path, &error),
    }
}
