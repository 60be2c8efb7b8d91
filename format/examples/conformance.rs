//! The reference reader for `spec/conformance.py`.
//!
//! Prints the JSON view of an archive to stdout. On failure, the last line on stderr begins with the
//! kind of the error.
//!
//! ```text
//! python3 spec/conformance.py -- cargo run -q -p tssd-format --features json --example conformance {file}
//! ```

use std::path::Path;
use std::process::ExitCode;

use tssd_format::{Archive, Error, open_shard_set, to_json};

fn main() -> ExitCode {
    let Some(path) = std::env::args_os().nth(1) else {
        eprintln!("usage: conformance FILE|DIRECTORY");
        return ExitCode::from(2);
    };
    match json_view(path.as_ref()) {
        Ok(view) => {
            println!("{view}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("{} {error}", error.kind().name());
            ExitCode::FAILURE
        }
    }
}

fn json_view(path: &Path) -> Result<String, Error> {
    let archive = open(path)?;
    archive.verify_deep()?;
    Ok(to_json(&archive)?.to_string())
}

/// Opens an archive, the directory of a shard set, or a directory with a delta and its base.
fn open(path: &Path) -> Result<Archive, Error> {
    let delta = path.join("delta.tssd");
    if delta.exists() {
        let base = Archive::open(path.join("base.tssd"))?;
        let delta = Archive::open(delta)?;
        delta.verify_deep()?;
        return delta.with_base(base);
    }
    if path.is_dir() { open_shard_set(path) } else { Archive::open(path) }
}
