//! The files of a directory, and which of them are opened.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::rc::Rc;

use tssd_format::Blob;
use tssd_format::safetensors::is_other_name;

use crate::exit::Exit;
use crate::failure::{Failure, Result};

/// A directory from elsewhere: whoever made it chose its names, so a link could lead to any file of
/// whoever packs it. Links are followed to files of the directory itself, and, as the cache of
/// Hugging Face consists of them, from one of its snapshots to its blobs.
pub(super) struct Folder {
    path: PathBuf,
    /// Where links may lead; anywhere if there is no list.
    within: Option<Vec<PathBuf>>,
}

/// What else is in a directory, by relative names with `/`, sorted.
pub(super) struct Found {
    pub(super) files: Vec<Entry>,
    /// Hidden folders, links to folders, what is no file, and the archive that is to be written.
    pub(super) left_alone: Vec<String>,
}

/// One file, which is not open.
pub(super) struct Entry {
    folder: Rc<Folder>,
    pub(super) name: String,
    pub(super) len: u64,
}

impl Entry {
    /// All of its bytes.
    pub(super) fn read(&self) -> Result<Vec<u8>> {
        self.folder.read(&self.name, u64::MAX)
    }
}

impl Folder {
    pub(super) fn new(path: &Path, follow_links: bool) -> Result<Self> {
        let path = path.to_owned();
        if follow_links {
            return Ok(Self { path, within: None });
        }
        let own = path.canonicalize().map_err(|error| Failure::io("read", &path, error))?;
        let snapshots = own.parent().filter(|above| above.ends_with("snapshots"));
        let blobs = snapshots.and_then(Path::parent).map(|model| model.join("blobs"));
        Ok(Self { path, within: Some([own].into_iter().chain(blobs).collect()) })
    }

    /// The path of a file, by its name.
    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Whether something has this name.
    pub(super) fn has(&self, name: &str) -> bool {
        self.path(name).symlink_metadata().is_ok()
    }

    /// All files in it and in its folders but for those that are `known`, and the archive that is to be
    /// written.
    pub(super) fn others(
        self: &Rc<Self>,
        known: impl Fn(&str) -> bool,
        output: &Path,
    ) -> Result<Found> {
        let output = output.canonicalize().ok();
        let mut found = Found { files: Vec::new(), left_alone: Vec::new() };
        let mut folders = vec![String::new()];
        while let Some(folder) = folders.pop() {
            let path = self.path(&folder);
            let failed = |error| Failure::io("read", &path, error);
            for entry in path.read_dir().map_err(failed)? {
                let entry = entry.map_err(failed)?;
                let (path, own_name) = (entry.path(), entry.file_name());
                let name = format!("{folder}{}", own_name.to_string_lossy());
                if known(&name) {
                    continue;
                }
                let failed = |error| Failure::io("read", &path, error);
                let is_link = entry.file_type().map_err(failed)?.is_symlink();
                let is_hidden = own_name.as_encoded_bytes().starts_with(b".");
                let metadata = path.metadata().map_err(failed)?;
                let is_output = output.is_some() && path.canonicalize().ok() == output;
                if metadata.is_dir() && !is_link && !is_hidden {
                    folders.push(format!("{}/", self.packable(&own_name, name)?));
                } else if metadata.is_file() && own_name != ".git" && !is_output {
                    let name = self.packable(&own_name, name)?;
                    let folder = Rc::clone(self);
                    found.files.push(Entry { folder, name, len: metadata.len() });
                } else {
                    // It is shown on terminals.
                    found.left_alone.push(name.replace(char::is_control, "\u{fffd}"));
                }
            }
        }
        found.files.sort_by(|one, other| one.name.cmp(&other.name));
        found.left_alone.sort();
        Ok(found)
    }

    /// The name, if `unpack` takes it.
    fn packable(&self, own_name: &OsStr, name: String) -> Result<String> {
        if own_name.to_str().is_some() && is_other_name(&name) {
            return Ok(name);
        }
        let message =
            format_args!("{} has {name:?}, a name that no archive has", self.path.display());
        Err(Failure::new(Exit::Refused, message).help(
            "rename it: UTF-8 without control characters and backslashes, 1024 bytes at most",
        ))
    }

    /// Opens a regular file. One that is put in its place meanwhile is an error if it is a link; so that
    /// a pipe is one too, opening does not wait for its writer.
    pub(super) fn open(&self, name: &str) -> Result<File> {
        let path = self.path(name);
        let failed = |error| Failure::io("read", &path, error);
        let refused =
            |what| Failure::new(Exit::Refused, format_args!("{} is {what}", path.display()));
        let mut target = path.clone();
        if path.symlink_metadata().map_err(failed)?.is_symlink() {
            target = path.canonicalize().map_err(failed)?;
            let is_within = |folder: &PathBuf| target.starts_with(folder);
            if self.within.as_ref().is_some_and(|within| !within.iter().any(is_within)) {
                return Err(refused("a link that leads out of the directory").help(
                    "pack a copy of it, as `cp -rL` makes, or follow it with --follow-links",
                ));
            }
        }
        let file = open_no_follow(&target).map_err(failed)?;
        if !file.metadata().map_err(failed)?.is_file() {
            return Err(refused("no regular file").help("take another copy of the directory"));
        }
        Ok(file)
    }

    /// All bytes of a file, which must be `max` at most.
    pub(super) fn read(&self, name: &str, max: u64) -> Result<Vec<u8>> {
        let file = self.open(name)?;
        let path = self.path(name);
        let failed = |error| Failure::io("read", &path, error);
        let len = file.size().map_err(failed)?;
        if len > max {
            let message = format_args!("{} has {len} bytes, {max} are allowed", path.display());
            return Err(Failure::new(Exit::Refused, message).help("check what this file is"));
        }
        let mut bytes = Vec::new();
        let memory = |error| failed(io::Error::new(io::ErrorKind::OutOfMemory, error));
        bytes.try_reserve_exact(usize::try_from(len).unwrap_or(usize::MAX)).map_err(memory)?;
        (&file).take(len).read_to_end(&mut bytes).map_err(failed)?;
        Ok(bytes)
    }
}

#[cfg(unix)]
fn open_no_follow(path: &Path) -> io::Result<File> {
    use rustix::fs::{Mode, OFlags};
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    Ok(rustix::fs::open(path, flags, Mode::empty())?.into())
}

#[cfg(not(unix))]
fn open_no_follow(path: &Path) -> io::Result<File> {
    File::open(path)
}
