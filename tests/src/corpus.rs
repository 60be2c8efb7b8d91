//! Corpora of the fuzz targets, `fuzz/corpus/TARGET.tar.zst`.
//!
//! `cargo fuzz` uses directories. [`unpack`] creates `fuzz/corpus/TARGET/`, which git ignores, and
//! [`pack`] writes the archive from it.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// zstd level of the archives.
const LEVEL: i32 = 19;

/// An input of a target.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Input {
    /// File name in the corpus.
    pub name: String,
    /// Contents.
    pub bytes: Vec<u8>,
}

/// Reads the archive of a target. Returns its inputs by name.
///
/// # Errors
///
/// If the archive is missing or damaged.
pub fn inputs(target: &str) -> io::Result<Vec<Input>> {
    let mut archive = tar::Archive::new(zstd::Decoder::new(File::open(archive(target))?)?);
    let mut inputs = Vec::new();
    for entry in archive.entries()? {
        let mut entry = entry?;
        let name = entry.path()?.to_string_lossy().into_owned();
        let mut bytes = Vec::new();
        entry.read_to_end(&mut bytes)?;
        inputs.push(Input { name, bytes });
    }
    inputs.sort();
    Ok(inputs)
}

/// Writes the inputs of a target to its directory.
///
/// # Errors
///
/// If the archive cannot be read or a file cannot be written.
pub fn unpack(target: &str) -> io::Result<()> {
    let folder = folder(target);
    std::fs::create_dir_all(&folder)?;
    for input in inputs(target)? {
        std::fs::write(folder.join(input.name), input.bytes)?;
    }
    Ok(())
}

/// Replaces the archive of a target by the inputs in its directory. The result is deterministic.
///
/// # Errors
///
/// If the directory does not exist, or a file cannot be read or written.
pub fn pack(target: &str) -> io::Result<()> {
    let entries = folder(target).read_dir()?.collect::<io::Result<Vec<_>>>()?;
    let mut paths: Vec<PathBuf> = entries.iter().map(std::fs::DirEntry::path).collect();
    paths.sort();
    let mut encoder = zstd::Encoder::new(Vec::new(), LEVEL)?;
    encoder.long_distance_matching(true)?;
    let mut builder = tar::Builder::new(encoder);
    for path in paths {
        let bytes = std::fs::read(&path)?;
        let mut header = tar::Header::new_ustar();
        header.set_size(bytes.len() as u64);
        header.set_mode(0o644);
        let name = path.file_name().unwrap_or_default();
        builder.append_data(&mut header, name, bytes.as_slice())?;
    }
    std::fs::write(archive(target), builder.into_inner()?.finish()?)
}

/// Returns the directory of a target for `cargo fuzz`.
pub fn folder(target: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus").join(target)
}

fn archive(target: &str) -> PathBuf {
    folder(target).with_extension("tar.zst")
}
