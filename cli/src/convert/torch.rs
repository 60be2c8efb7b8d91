//! Checkpoints of torch, which Python converts with the package `tssd`, without executing pickled code.

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value as Json;
use tssd_format::Archive;

use crate::console::Console;
use crate::document::{Document, looks_like_torch};
use crate::exit::Exit;
use crate::failure::{Failure, Result};
use crate::input::{is_shard_set, is_stream, is_torch_checkpoint, open};
use crate::output::Scratch;

/// A checkpoint of torch, converted to an archive in a scratch directory.
pub(super) struct ConvertedCheckpoint {
    pub(super) document: Document,
    /// Length of all files of the checkpoint, in bytes.
    pub(super) file_len: u64,
    pub(super) scratch: Scratch,
}

/// Converts a file of torch.save or a directory of torch.distributed.checkpoint to an archive.
///
/// Returns `None` if the input is neither. The archive is on the file system of the output.
pub(super) fn convert_checkpoint(
    input: &Path,
    output: &Path,
    console: Console,
) -> Result<Option<ConvertedCheckpoint>> {
    let Some(file_len) = checkpoint_len(input)? else { return Ok(None) };
    let scratch = Scratch::create_for(output)?;
    let archive = scratch.file("plain.tssd");
    let python = find_python();
    let spinner = console.spinner("reading, with Python");
    run_python(&python, input, &archive)?;
    spinner.finish_and_clear();
    let archive = Archive::open(&archive).map_err(|error| Failure::format(&archive, &error))?;
    let document = Document::from_archive(input, archive);
    Ok(Some(ConvertedCheckpoint { document, file_len, scratch }))
}

/// Returns the length of a checkpoint of torch in bytes, or `None` if the input is not a checkpoint.
fn checkpoint_len(input: &Path) -> Result<Option<u64>> {
    if is_stream(input) || is_shard_set(input) {
        return Ok(None);
    }
    if !input.is_dir() {
        let file = open(input)?;
        let io_failure = |error| Failure::io("read", input, error);
        return looks_like_torch(&*file).then(|| file.size().map_err(io_failure)).transpose();
    }
    if !is_torch_checkpoint(input) {
        return Ok(None);
    }
    let io_failure = |error| Failure::io("read", input, error);
    let mut bytes = 0;
    for entry in input.read_dir().map_err(io_failure)? {
        bytes += entry.and_then(|entry| entry.metadata()).map_err(io_failure)?.len();
    }
    Ok(Some(bytes))
}

/// Returns the Python next to this command, else that of `VIRTUAL_ENV`, else that on `PATH`.
fn find_python() -> PathBuf {
    // The path in a virtual environment, and the name of the command.
    const NAMES: (&str, &str) =
        if cfg!(windows) { ("Scripts/python.exe", "python") } else { ("bin/python3", "python3") };
    let (in_environment, name) = NAMES;
    let sibling = Path::new(in_environment).file_name().unwrap_or_default();
    let sibling = std::env::current_exe()
        .ok()
        .and_then(|executable| Some(executable.parent()?.join(sibling)));
    let venv = std::env::var_os("VIRTUAL_ENV").filter(|root| !root.is_empty());
    let venv = venv.map(|root| Path::new(&root).join(in_environment));
    let mut candidates = sibling.into_iter().chain(venv);
    candidates.find(|path| path.is_file()).unwrap_or_else(|| name.into())
}

/// Runs the converter. Removes the current directory from the module path, as it may be untrusted.
const PROGRAM: &str = "import sys; sys.path[:] = filter(None, sys.path); \
                       import tssd.convert; tssd.convert.main()";

fn run_python(python: &Path, old: &Path, new: &Path) -> Result<()> {
    let arguments: [OsString; 4] = ["-c".into(), PROGRAM.into(), old.into(), new.into()];
    let mut command = Command::new(python);
    command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    // A process group of its own: Ctrl-C reaches only this process, which handles it.
    #[cfg(unix)]
    std::os::unix::process::CommandExt::process_group(&mut command, 0);
    let result = command.spawn().and_then(|mut child| {
        // Python exits when its stdin closes, so it also exits when this process does.
        let stdin = child.stdin.take();
        let output = child.wait_with_output();
        drop(stdin);
        output
    });
    let name = python.display();
    let output = result.map_err(|error| {
        let message = match error.kind() {
            io::ErrorKind::NotFound => format!("there is no {name}, which reads files of torch"),
            _ => format!("cannot run {name}, which reads files of torch: {error}"),
        };
        Failure::new(Exit::Refused, message).help(INSTALL_HELP)
    })?;
    let reply = serde_json::from_slice::<Json>(&output.stdout).unwrap_or_default();
    if let Some(message) = reply["message"].as_str() {
        let is_damage = reply["is_damage"].as_bool().unwrap_or_default();
        let exit = if is_damage { Exit::Mismatch } else { Exit::Refused };
        let failure = Failure::new(exit, message);
        return Err(match reply["advice"].as_str() {
            Some(advice) => failure.help(advice),
            None => failure,
        });
    }
    if output.status.success() {
        return Ok(());
    }
    let stderr = String::from_utf8_lossy(&output.stderr);
    let last = stderr.trim_end().lines().last().unwrap_or_default();
    if let Some(module) = last.strip_prefix("ModuleNotFoundError: No module named ") {
        let message = format_args!("{name} has no module {module}, which reads files of torch");
        return Err(Failure::new(Exit::Refused, message).help(INSTALL_HELP));
    }
    let message =
        format_args!("{name}, which reads files of torch, failed: {}: {last}", output.status);
    Err(Failure::new(Exit::Refused, message))
}

const INSTALL_HELP: &str =
    "install tssd and torch for one Python, and name its environment by VIRTUAL_ENV";
