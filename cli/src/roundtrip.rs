//! `tssd roundtrip`: checks that reading and rewriting a file loses nothing.

mod compare_writer;
mod model;

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use serde_json::{Value as Json, json};
use tssd_format::{
    Archive, Attrs, Blob, Error, ErrorKind, Layout, MANIFEST_NAME, Options, ZSTD_LEVEL_ATTR,
    encode_manifest,
};

use crate::archives::list_archives;
use crate::console::{Console, print, print_json};
use crate::diff;
use crate::document::{Document, Source};
use crate::encode;
use crate::exit::Exit;
use crate::failure::{Failure, Result};
use crate::input::{Defect, OpenError, display_input_path, open_shard_set};
use crate::model::Links;
use crate::roundtrip::compare_writer::CompareWriter;
use crate::verify;

/// Maximum number of reasons that are printed for a file. Further reasons are counted.
const REASONS_MAX: usize = 10;

/// Read archives into state dicts, write those anew, and compare: nothing is lost.
///
/// Each is `identical` (the same bytes), `equal` (other bytes, such as those of another writer, that
/// mean the same), or `lossy`. A delta is `skipped`, because it cannot be read without its base. Of a shard set, each
/// archive is read and written by itself, and all of them together as one. Safetensors files and directories of Hugging
/// Face models are packed and unpacked in memory, and compared byte for byte.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Archives, safetensors files, directories of models, or directories with archives in them; `-`: stdin
    #[arg(required = true)]
    paths: Vec<PathBuf>,
    #[command(flatten)]
    links: Links,
}

/// Result of rewriting a file.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Outcome {
    Identical,
    Equal,
    Lossy,
    Skipped,
}

impl Outcome {
    const ALL: [(Self, &'static str); 4] = [
        (Self::Identical, "identical"),
        (Self::Equal, "equal"),
        (Self::Lossy, "lossy"),
        (Self::Skipped, "skipped"),
    ];

    fn name(self) -> &'static str {
        Self::ALL[self as usize].1
    }
}

/// Outcome for one file, with the reasons why it is not identical.
struct Verdict {
    outcome: Outcome,
    reasons: Vec<String>,
}

/// Checks all files and prints one line per file. A lossy file does not stop the command.
pub(crate) fn run(args: &Args, console: Console) -> Result<Exit> {
    let mut files = Vec::new();
    for path in &args.paths {
        files.extend(list_archives(path)?);
    }
    let mut results = Vec::new();
    for path in &files {
        let verdict = check(path, args.links, console)?;
        if !(console.json || console.quiet && verdict.outcome != Outcome::Lossy) {
            print(verdict.lines(path))?;
        }
        results.push((path, verdict));
    }
    let count = |outcome| results.iter().filter(|(_, each)| each.outcome == outcome).count();
    if console.json {
        let json = |(path, verdict): &(&PathBuf, Verdict)| {
            json!({
                "path": path, "result": verdict.outcome.name(), "reasons": verdict.reasons,
            })
        };
        print_json(&results.iter().map(json).collect::<Vec<Json>>().into())?;
    } else if !console.quiet {
        let counts = Outcome::ALL.map(|(outcome, name)| (outcome, count(outcome), name));
        let shown = counts
            .into_iter()
            .filter(|(outcome, count, _)| *outcome != Outcome::Skipped || *count > 0);
        let parts: Vec<String> = shown.map(|(_, count, name)| format!("{count} {name}")).collect();
        print(format_args!("{}\n", parts.join(", ")))?;
    }
    Ok(if count(Outcome::Lossy) == 0 { Exit::Ok } else { Exit::Mismatch })
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

    /// Adds a note to the reasons.
    fn with_note(mut self, note: &str) -> Self {
        self.reasons.push(note.to_owned());
        self
    }

    fn lines(&self, path: &Path) -> String {
        let mut lines =
            format!("{:9}  {}", self.outcome.name(), display_input_path(path).display());
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

/// Converts a format error to a verdict. An I/O error is a failure of the command.
fn verdict_from_error(path: &Path, error: &Error) -> Result<Verdict> {
    let rule = error.kind().rule();
    if error.kind().rule() == "io" {
        return Err(Failure::format(path, error));
    }
    Ok(Verdict::lossy([format!("{rule}  {error}")]))
}

/// Converts the defects that an input could not be opened for.
fn verdict_from_defects(input: &Path, defects: &[Defect]) -> Verdict {
    let reason = |defect: &Defect| {
        let rule = defect.error.kind().rule();
        format!("{rule}  {}", defect.message(input))
    };
    Verdict::lossy(defects.iter().map(reason))
}

/// Reads and rewrites one input.
fn check(path: &Path, links: Links, console: Console) -> Result<Verdict> {
    let document = match Document::open_with(path, links, None) {
        Err(OpenError::Defects(defects)) => return Ok(verdict_from_defects(path, &defects)),
        document => document?,
    };
    let path = display_input_path(path);
    let (archive, file) = match document.source() {
        Source::Model(model) => return model::check(model, console),
        Source::Archive(archive, Some(file)) => (archive.clone(), file),
        // A shard set: its manifest is checked with its archives.
        Source::Archive(_, None) => return check(&path.join(MANIFEST_NAME), links, console),
    };
    if archive.lacks_base() {
        let reasons = vec!["a delta, which needs its base".to_owned()];
        return Ok(Verdict { outcome: Outcome::Skipped, reasons });
    }
    if archive.is_manifest_only() {
        return check_manifest(path, &archive, &**file, console);
    }
    let layout = match reencode(&archive, console) {
        Ok(layout) => layout,
        Err(error) => return verdict_from_error(path, &error),
    };
    let mut comparer = CompareWriter::new(&**file);
    match layout.write_to(&mut comparer) {
        Ok(()) if comparer.is_complete() => return Ok(Verdict::identical()),
        Err(error) if comparer.first_difference().is_none() => {
            return Err(Failure::format(path, &error));
        }
        _ => {}
    }
    compare(path, archive, layout, difference_note(&comparer), console)
}

/// Plans an archive of the state dict of an archive.
fn reencode(archive: &Archive, console: Console) -> Result<Layout, Error> {
    encode::plan(&archive.to_state_dict()?, &Options::from_archive(archive), console)
}

/// Returns the first difference as text.
fn difference_note(comparer: &CompareWriter<'_>) -> String {
    let at = comparer.first_difference().map(|at| format!("other bytes from byte {at} on"));
    at.unwrap_or_else(|| "it ends earlier".into())
}

/// Checks whether a rewritten archive has the same meaning as the original.
fn compare(
    path: &Path,
    archive: Archive,
    layout: Layout,
    note: String,
    console: Console,
) -> Result<Verdict> {
    // Verify first: new checksums would hide damage.
    let mut damage = verify::verify_payload(&archive, true, console);
    damage.sort_by_key(Error::offset);
    if !damage.is_empty() {
        let reason = |error: &Error| format!("{}  {error}", error.kind().rule());
        return Ok(Verdict::lossy(damage.iter().map(reason)));
    }
    let mut bytes = Vec::with_capacity(usize::try_from(layout.file_len()).unwrap_or_default());
    let format_failure = |error| Failure::format(path, &error);
    layout.write_to(&mut bytes).map_err(format_failure)?;
    drop(layout);
    let rewritten = Archive::from_bytes(bytes).map_err(format_failure)?;
    let attrs_differ = attrs_without_level(&archive) != attrs_without_level(&rewritten);
    let [old, new] = [archive, rewritten].map(|archive| Document::from_archive(path, archive));
    let found = diff::compare(&old, &new, false, console)?.differences;
    let mut reasons: Vec<String> = found.iter().map(|each| each.line(0)).collect();
    if attrs_differ && reasons.is_empty() {
        reasons.push("attributes differ".to_owned());
    }
    Ok(if reasons.is_empty() { Verdict::equal(note) } else { Verdict::lossy(reasons) })
}

/// Returns the attributes of an archive, except the compression level.
fn attrs_without_level(archive: &Archive) -> Attrs {
    let mut attrs = archive.attrs();
    attrs.remove(ZSTD_LEVEL_ATTR);
    attrs
}

/// Checks a manifest: rewrites its index, then joins its archives and rewrites the result.
fn check_manifest(
    path: &Path,
    archive: &Archive,
    file: &dyn Blob,
    console: Console,
) -> Result<Verdict> {
    let storages: Vec<_> =
        (0..archive.storage_count()).map(|number| archive.storage(number)).collect();
    let bytes =
        encode_manifest(&archive.structure(), &storages, &archive.attrs(), &archive.shards());
    let bytes = match bytes {
        Ok(bytes) => bytes,
        Err(error) => return verdict_from_error(path, &error),
    };
    let mut comparer = CompareWriter::new(file);
    let index = match comparer.write_all(&bytes) {
        Ok(()) if comparer.is_complete() => Verdict::identical(),
        Err(error) if comparer.first_difference().is_none() => {
            return Err(Failure::io("read", path, error));
        }
        _ => {
            let rewritten =
                Archive::from_bytes(bytes).map_err(|error| Failure::format(path, &error))?;
            let is_equal = rewritten.structure() == archive.structure()
                && (rewritten.attrs(), rewritten.shards()) == (archive.attrs(), archive.shards())
                && (0..)
                    .zip(&storages)
                    .all(|(number, storage)| rewritten.storage(number) == *storage);
            if is_equal {
                Verdict::equal(difference_note(&comparer))
            } else {
                Verdict::lossy(["the index means something else".to_owned()])
            }
        }
    };
    let directory = path.parent().unwrap_or(Path::new(""));
    if index.outcome == Outcome::Lossy {
        return Ok(index);
    }
    if path.file_name().is_none_or(|name| name != MANIFEST_NAME) {
        return Ok(index.with_note("the index alone, not what it names"));
    }
    let directory = if directory == Path::new("") { Path::new(".") } else { directory };
    let set = match open_shard_set(directory) {
        Err(OpenError::Defects(defects)) => return Ok(verdict_from_defects(directory, &defects)),
        set => set?,
    };
    match reencode(&set, console) {
        Ok(layout) => {
            let whole = compare(path, set, layout, String::new(), console)?;
            Ok(if whole.outcome == Outcome::Lossy { whole } else { index })
        }
        // Only a manifest can store values that differ between writers. All values have been read.
        Err(error) if error.kind() == ErrorKind::DivergentNode => {
            Ok(index.with_note("not joined, as its writers hold different values"))
        }
        Err(error) => verdict_from_error(path, &error),
    }
}
