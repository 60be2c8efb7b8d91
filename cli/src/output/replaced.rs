//! Replacement of a directory of files: in one step, and without the loss of any other file.

use std::collections::BTreeSet;
use std::path::Path;
use std::{fs, io};

use tssd_store::ReplacementFolder;

use crate::exit::Exit;
use crate::failure::{Failure, Result};

/// Number of files that a message names.
const NAMED_FILES: usize = 3;

/// Replaces the directory `target` by a new one with these files, and deletes the old files.
///
/// # Errors
///
/// `Refused`, and nothing is changed, if the old directory has a file that is not one of `new` and no other shard of the
/// same model: the command has not written it, so it must not delete it.
pub(super) fn replace(
    temporary: ReplacementFolder,
    target: &Path,
    new: &BTreeSet<String>,
) -> Result<()> {
    let io_failure = |error| Failure::io("write", target, error);
    let exchange_failure = |error: io::Error| match error.kind() {
        io::ErrorKind::Unsupported | io::ErrorKind::InvalidInput => {
            let text = "this file system cannot replace a directory in one step";
            Failure::new(Exit::Refused, format_args!("{}: {text}", target.display()))
                .help("name a new or empty directory")
        }
        _ => io_failure(error),
    };
    Contents::read(target).map_err(io_failure)?.check(target, new)?;
    let old = temporary.exchange_with(target).map_err(exchange_failure)?;
    // A file that was added before the exchange is kept too.
    let contents = Contents::read(&old).map_err(|error| Failure::io("read", &old, error))?;
    if let Err(failure) = contents.check(target, new) {
        let text = format_args!("{failure}; the old files are in {}", old.display());
        return Err(Failure::new(Exit::Refused, text).help("move them back"));
    }
    contents.remove(&old).map_err(|error| Failure::io("remove", &old, error))
}

/// The contents of a directory, by their paths in it.
#[derive(Default)]
struct Contents {
    files: BTreeSet<String>,
    folders: BTreeSet<String>,
    /// Links, pipes, devices, and names that are not UTF-8.
    others: BTreeSet<String>,
}

impl Contents {
    fn read(directory: &Path) -> io::Result<Self> {
        let mut contents = Self::default();
        contents.add(directory, "")?;
        Ok(contents)
    }

    fn add(&mut self, directory: &Path, prefix: &str) -> io::Result<()> {
        for entry in fs::read_dir(directory)? {
            let entry = entry?;
            let kind = entry.file_type()?;
            let name = entry.file_name();
            let path = format!("{prefix}{}", name.to_string_lossy());
            if name.to_str().is_none() {
                self.others.insert(path);
            } else if kind.is_file() {
                self.files.insert(path);
            } else if kind.is_dir() {
                self.add(&entry.path(), &format!("{path}/"))?;
                self.folders.insert(path);
            } else {
                self.others.insert(path);
            }
        }
        Ok(())
    }

    /// Checks that all files may be deleted.
    fn check(&self, target: &Path, new: &BTreeSet<String>) -> Result<()> {
        let foreign = self.files.iter().filter(|file| !is_replaced(file, new));
        let foreign: Vec<&str> = foreign.chain(&self.others).map(String::as_str).collect();
        if foreign.is_empty() {
            return Ok(());
        }
        let (named, rest) = foreign.split_at(foreign.len().min(NAMED_FILES));
        let more =
            if rest.is_empty() { String::new() } else { format!(" and {} more", rest.len()) };
        let text = format_args!(
            "{} has files that the new directory does not have: {}{more}",
            target.display(),
            named.join(", ")
        );
        Err(Failure::new(Exit::Refused, text)
            .help("move them away, or name a new or empty directory"))
    }

    /// Removes these files, and the folders if they are empty then.
    fn remove(&self, directory: &Path) -> io::Result<()> {
        for file in &self.files {
            fs::remove_file(directory.join(file))?;
        }
        // A folder comes before the folders inside it.
        for folder in self.folders.iter().rev() {
            fs::remove_dir(directory.join(folder))?;
        }
        fs::remove_dir(directory)
    }
}

/// Returns whether a file of the old directory has a successor in the new one: a file of the same name, or the shards of
/// the same model.
fn is_replaced(file: &str, new: &BTreeSet<String>) -> bool {
    let model = model_of(file);
    new.contains(file) || model.is_some() && new.iter().any(|name| model_of(name) == model)
}

/// Returns the model that a file belongs to: the part of its path before `.safetensors`, `-00001-of-00002.safetensors` or
/// `.safetensors.index.json`.
fn model_of(file: &str) -> Option<&str> {
    if let Some(model) = file.strip_suffix(".safetensors.index.json") {
        return Some(model);
    }
    let stem = file.strip_suffix(".safetensors")?;
    let is_number = |text: &str| text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
    let shard = stem.rsplit_once("-of-").filter(|(_, count)| is_number(count));
    let shard = shard.and_then(|(rest, _)| rest.rsplit_once('-'));
    Some(shard.filter(|(_, number)| is_number(number)).map_or(stem, |(model, _)| model))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_same_model_are_replaced() {
        let new: BTreeSet<String> = [
            "config.json",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "model.safetensors.index.json",
            "sub/adapter.safetensors",
        ]
        .map(str::to_owned)
        .into();
        for (file, expected) in [
            ("config.json", true),
            ("model.safetensors", true),
            ("model-00007-of-00009.safetensors", true),
            ("sub/adapter-00001-of-00002.safetensors", true),
            ("adapter.safetensors", false),
            ("sub/model.safetensors", false),
            ("model-7-of-9.safetensors", false),
            ("model.safetensors.bak", false),
            ("notes.txt", false),
            (".git/HEAD", false),
        ] {
            assert_eq!(is_replaced(file, &new), expected, "{file}");
        }
    }
}
