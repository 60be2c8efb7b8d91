//! What torch pickles: Python reads it, with the package `tssd`, and without running what it says.

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value as Json;

use crate::console::Console;
use crate::document::{Document, looks_like_torch};
use crate::exit::Exit;
use crate::failure::{Failure, Result};
use crate::input::{is_shard_set, is_stream, open, open_archive};
use crate::output::Scratch;

/// A state dict of torch as an archive in a scratch directory.
pub(super) struct Pickled {
    pub(super) document: Document,
    /// Of all files that it was read from.
    pub(super) file_len: u64,
    pub(super) scratch: Scratch,
}

/// Reads a file of torch.save or a directory of torch.distributed.checkpoint; none if the input is
/// neither. The archive is made where there must be room for the output.
pub(super) fn read(input: &Path, output: &Path, console: Console) -> Result<Option<Pickled>> {
    let Some(file_len) = file_len(input)? else { return Ok(None) };
    let scratch = Scratch::beside(output)?;
    let archive = scratch.file("plain.tssd");
    let python = interpreter();
    let spinner = console.spinner("reading, with Python");
    convert(&python, input, &archive)?;
    spinner.finish_and_clear();
    let document = Document::of(input, open_archive(&archive)?);
    Ok(Some(Pickled { document, file_len, scratch }))
}

/// How long what torch has written is, in bytes.
fn file_len(input: &Path) -> Result<Option<u64>> {
    if is_stream(input) || is_shard_set(input) {
        return Ok(None);
    }
    if !input.is_dir() {
        let file = open(input)?;
        let failed = |error| Failure::io("read", input, error);
        return looks_like_torch(&*file).then(|| file.size().map_err(failed)).transpose();
    }
    if !input.join(".metadata").is_file() {
        return Ok(None);
    }
    let failed = |error| Failure::io("read", input, error);
    let mut bytes = 0;
    for entry in input.read_dir().map_err(failed)? {
        bytes += entry.and_then(|entry| entry.metadata()).map_err(failed)?.len();
    }
    Ok(Some(bytes))
}

/// The Python that this command was installed with; else that of the environment.
fn interpreter() -> PathBuf {
    // As environments have it, and people call it.
    const NAMES: (&str, &str) =
        if cfg!(windows) { ("Scripts/python.exe", "python") } else { ("bin/python3", "python3") };
    let (in_environment, name) = NAMES;
    let beside = Path::new(in_environment).file_name().unwrap_or_default();
    let beside = std::env::current_exe().ok().and_then(|own| Some(own.parent()?.join(beside)));
    let active = std::env::var_os("VIRTUAL_ENV").filter(|root| !root.is_empty());
    let active = active.map(|root| Path::new(&root).join(in_environment));
    let mut known = beside.into_iter().chain(active);
    known.find(|path| path.is_file()).unwrap_or_else(|| name.into())
}

/// The current directory is no place to look for modules: it may hold what others have written.
const PROGRAM: &str = "import sys; sys.path[:] = filter(None, sys.path); \
                       import tssd.convert; tssd.convert.main()";

fn convert(python: &Path, old: &Path, new: &Path) -> Result<()> {
    let arguments: [OsString; 4] = ["-c".into(), PROGRAM.into(), old.into(), new.into()];
    let mut command = Command::new(python);
    command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    // Ctrl-C is for this process, which says how it ends.
    #[cfg(unix)]
    std::os::unix::process::CommandExt::process_group(&mut command, 0);
    let ended = command.spawn().and_then(|mut child| {
        // When this process ends, the pipe does, and so does Python.
        let stdin = child.stdin.take();
        let output = child.wait_with_output();
        drop(stdin);
        output
    });
    let name = python.display();
    let output = ended.map_err(|error| {
        let message = match error.kind() {
            io::ErrorKind::NotFound => format!("there is no {name}, which reads files of torch"),
            _ => format!("cannot run {name}, which reads files of torch: {error}"),
        };
        Failure::new(Exit::Refused, message).help(INSTALL)
    })?;
    let reply = serde_json::from_slice::<Json>(&output.stdout).unwrap_or_default();
    if let Some(message) = reply["message"].as_str() {
        let is_damage = reply["is_damage"].as_bool().unwrap_or_default();
        let exit = if is_damage { Exit::Differs } else { Exit::Refused };
        let failure = Failure::new(exit, message);
        return Err(match reply["advice"].as_str() {
            Some(advice) => failure.help(advice),
            None => failure,
        });
    }
    if output.status.success() {
        return Ok(());
    }
    let words = String::from_utf8_lossy(&output.stderr);
    let last = words.trim_end().lines().last().unwrap_or_default();
    if let Some(module) = last.strip_prefix("ModuleNotFoundError: No module named ") {
        let message = format_args!("{name} has no module {module}, which reads files of torch");
        return Err(Failure::new(Exit::Refused, message).help(INSTALL));
    }
    let message =
        format_args!("{name}, which reads files of torch, failed: {}: {last}", output.status);
    Err(Failure::new(Exit::Refused, message))
}

const INSTALL: &str =
    "install tssd and torch for one Python, and name its environment by VIRTUAL_ENV";
