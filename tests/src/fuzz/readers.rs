//! Three readers of one archive: with rkyv, without rkyv, and `spec/reader.py`.

use std::io::{self, Read, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{LazyLock, Mutex};

use serde::Deserialize;
use serde_json::{Value as Json, json};

/// Result of a reader: `{"ok": VIEW}`, or `{"error": KIND}`.
pub type Verdict = Json;

/// Returns the verdict of a reader of this workspace on an archive in memory.
macro_rules! verdict {
    ($reader:ident, $file:expr) => {{
        let open = || {
            let archive = $reader::Archive::from_bytes($file.to_vec())?;
            archive.verify_deep()?;
            $reader::to_json(&archive)
        };
        match open() {
            Ok(view) => json!({ "ok": view }),
            Err(error) => json!({ "error": $reader::Error::kind(&error).name() }),
        }
    }};
}

/// Whether fuzzers run the third reader, too. It is slow.
static WITH_PYTHON: LazyLock<bool> =
    LazyLock::new(|| std::env::var_os("TSSD_FUZZ_PYTHON").is_some());

/// Compares both readers of this workspace, and the third one if `TSSD_FUZZ_PYTHON` is set.
pub(super) fn compare(file: &[u8]) {
    if is_too_large(file) {
        return;
    }
    assert_readers_agree(file);
    if *WITH_PYTHON && let Some(difference) = python_difference(file) {
        panic!("{difference}");
    }
}

/// Reads an archive with and without rkyv.
///
/// # Panics
///
/// If the verdicts differ.
pub fn assert_readers_agree(file: &[u8]) {
    let with = verdict!(tssd_format, file);
    assert_eq!(with, verdict!(tssd_format_plain, file), "with rkyv and without");
}

/// Returns whether the view is too large. Views of tensors that share bytes can exceed their file.
fn is_too_large(file: &[u8]) -> bool {
    let Ok(archive) = tssd_format::Archive::from_bytes(file.to_vec()) else { return false };
    let tensors = archive.leaves().into_iter().filter_map(|(_, node)| match node {
        tssd_format::Node::Tensors(run) => Some(run),
        _ => None,
    });
    let bytes = tensors.flatten().map(|each| each.meta.nbytes()).filter(|bytes| *bytes <= 65_536);
    bytes.sum::<u64>() > 1 << 20
}

/// Returns how the verdict of `spec/reader.py` differs from that of this project, if it does.
///
/// # Panics
///
/// If there is no Python 3.
pub fn python_difference(file: &[u8]) -> Option<String> {
    static PYTHON: LazyLock<Mutex<Python>> = LazyLock::new(|| Mutex::new(Python::start()));
    let mut python = PYTHON.lock().expect("nobody panics while asking");
    let theirs = python.ask(file).unwrap_or_else(|error| panic!("reader.py: {error}"));
    let ours = verdict!(tssd_format, file);
    // Versions of zstd differ in which corrupt frames they reject.
    let is_corrupt_chunk = |verdict: &Verdict| {
        let kind = verdict["error"].as_str();
        kind.is_some_and(|kind| {
            ["FrameCorrupt", "StorageCorrupt", "DigestMismatch"].contains(&kind)
        })
    };
    if is_corrupt_chunk(&ours) && (is_corrupt_chunk(&theirs) || is_refused_by_zstd(file)) {
        return None;
    }
    (theirs != ours).then(|| format!("ours {ours:.300}, reader.py {theirs:.300}"))
}

/// Returns whether zstd, and no rule of the format, rejects a frame.
///
/// Recognized by the messages for corrupt data, and for blocks that exceed the window.
fn is_refused_by_zstd(file: &[u8]) -> bool {
    let verify = || tssd_format::Archive::from_bytes(file.to_vec())?.verify_deep().map(drop);
    let messages = ["Data corruption detected", "Destination buffer is too small"];
    verify().is_err_and(|error| messages.iter().any(|message| error.to_string().contains(message)))
}

struct Python {
    _child: Child,
    stdin: ChildStdin,
    stdout: ChildStdout,
}

impl Python {
    fn start() -> Self {
        let reader = Path::new(env!("CARGO_MANIFEST_DIR")).join("../spec/reader.py");
        let mut child = Command::new("python3")
            .arg(reader)
            .arg("--serve")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("there is a Python 3");
        let stdin = child.stdin.take().expect("it is piped");
        let stdout = child.stdout.take().expect("it is piped");
        Self { _child: child, stdin, stdout }
    }

    fn ask(&mut self, file: &[u8]) -> io::Result<Verdict> {
        let len = u32::try_from(file.len()).map_err(io::Error::other)?;
        self.stdin.write_all(&len.to_le_bytes())?;
        self.stdin.write_all(file)?;
        self.stdin.flush()?;
        let mut len = [0; 4];
        self.stdout.read_exact(&mut len)?;
        let len = usize::try_from(u32::from_le_bytes(len)).map_err(io::Error::other)?;
        let mut answer = vec![0; len];
        self.stdout.read_exact(&mut answer)?;
        // Views are nested deeper than the containers that they show.
        let mut json = serde_json::Deserializer::from_slice(&answer);
        json.disable_recursion_limit();
        Ok(Json::deserialize(&mut json)?)
    }
}
