//! Access to the files of an untrusted directory.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::rc::Rc;

use bytes::Bytes;
use tssd_format::safetensors::is_auxiliary_file_name;
use tssd_format::{Blob, INLINE_MAX_BYTES};

use crate::exit::Exit;
use crate::failure::{Failure, Result};

/// The option `--follow-links` of commands that read model directories.
#[derive(Clone, Copy, Debug, Default, clap::Args)]
pub(crate) struct Links {
    /// Of a model directory, follow links to files anywhere, not only within it and Hugging Face's cache
    #[arg(long)]
    follow_links: bool,
}

/// A directory from an untrusted source, in which a link could lead to any file of the user.
///
/// Links are followed to files of the directory itself. In the cache of Hugging Face, which consists
/// of links, they are also followed from a snapshot to the blobs of the model.
pub(super) struct Folder {
    path: PathBuf,
    /// Directories that links may lead into. `None` allows any target.
    allowed: Option<Vec<PathBuf>>,
}

/// The other files of a directory, sorted by name. Names are relative, with `/`.
pub(super) struct FolderListing {
    pub(super) files: Vec<OtherFile>,
    /// Hidden folders, links to folders, special files, `.git` files, and the output archive.
    pub(super) skipped: Vec<String>,
}

/// A file of a model directory that holds no tensors.
pub(crate) struct OtherFile {
    folder: Rc<Folder>,
    name: String,
    len: u64,
    /// The content, if an archive has it in the index. Any other content is read on demand.
    inline: Option<Bytes>,
}

impl OtherFile {
    fn new(folder: &Rc<Folder>, name: String, len: u64) -> Result<Self> {
        let inline =
            if len <= INLINE_MAX_BYTES { Some(folder.read(&name, u64::MAX)?.into()) } else { None };
        Ok(Self { folder: Rc::clone(folder), name, len, inline })
    }

    /// Returns the name: a relative path with `/`.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Returns the length in bytes.
    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// Returns the content, if an archive has it in the index.
    pub(crate) fn inline_content(&self) -> Option<&Bytes> {
        self.inline.as_ref()
    }

    /// Reads the whole file.
    pub(crate) fn read(&self) -> Result<Bytes> {
        match &self.inline {
            Some(bytes) => Ok(bytes.clone()),
            None => Ok(self.folder.read(&self.name, u64::MAX)?.into()),
        }
    }

    /// Opens the file for reads at any offset.
    pub(crate) fn open(&self) -> Result<File> {
        self.folder.open(&self.name)
    }
}

impl Folder {
    pub(super) fn new(path: &Path, links: Links) -> Result<Self> {
        let path = path.to_owned();
        if links.follow_links {
            return Ok(Self { path, allowed: None });
        }
        let canonical = path.canonicalize().map_err(|error| Failure::io("read", &path, error))?;
        let snapshots = canonical.parent().filter(|above| above.ends_with("snapshots"));
        let blobs = snapshots.and_then(Path::parent).map(|model| model.join("blobs"));
        Ok(Self { path, allowed: Some([canonical].into_iter().chain(blobs).collect()) })
    }

    /// Returns the path of a file.
    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Returns whether an entry of this name exists.
    pub(super) fn has(&self, name: &str) -> bool {
        self.path(name).symlink_metadata().is_ok()
    }

    /// Lists all files in the directory and its folders, except `known` files and the output archive.
    pub(super) fn list_other_files(
        self: &Rc<Self>,
        known: impl Fn(&str) -> bool,
        output: Option<&Path>,
    ) -> Result<FolderListing> {
        let output = output.and_then(|output| output.canonicalize().ok());
        let mut found = FolderListing { files: Vec::new(), skipped: Vec::new() };
        let mut folders = vec![String::new()];
        while let Some(folder) = folders.pop() {
            let path = self.path(&folder);
            let io_failure = |error| Failure::io("read", &path, error);
            for entry in path.read_dir().map_err(io_failure)? {
                let entry = entry.map_err(io_failure)?;
                let (path, own_name) = (entry.path(), entry.file_name());
                let name = format!("{folder}{}", own_name.to_string_lossy());
                if known(&name) {
                    continue;
                }
                let io_failure = |error| Failure::io("read", &path, error);
                let is_link = entry.file_type().map_err(io_failure)?.is_symlink();
                let is_hidden = own_name.as_encoded_bytes().starts_with(b".");
                let metadata = path.metadata().map_err(io_failure)?;
                let is_output = output.is_some() && path.canonicalize().ok() == output;
                if metadata.is_dir() && !is_link && !is_hidden {
                    folders.push(format!("{}/", self.check_name(&own_name, name)?));
                } else if metadata.is_file() && own_name != ".git" && !is_output {
                    let name = self.check_name(&own_name, name)?;
                    found.files.push(OtherFile::new(self, name, metadata.len())?);
                } else {
                    // The name is printed on terminals.
                    found.skipped.push(name.replace(char::is_control, "\u{fffd}"));
                }
            }
        }
        found.files.sort_by(|one, other| one.name.cmp(&other.name));
        found.skipped.sort();
        Ok(found)
    }

    /// Returns the name if `unpack` accepts it.
    fn check_name(&self, own_name: &OsStr, name: String) -> Result<String> {
        if own_name.to_str().is_some() && is_auxiliary_file_name(&name) {
            return Ok(name);
        }
        let message =
            format_args!("{} has {name:?}, a name that no archive has", self.path.display());
        Err(Failure::new(Exit::Refused, message).help(
            "rename it: UTF-8 without control characters and backslashes, 1024 bytes at most",
        ))
    }

    /// Opens a regular file.
    ///
    /// Another process may replace the file meanwhile. A link in its place is an error. So is a pipe,
    /// which is opened without waiting for a writer.
    pub(super) fn open(&self, name: &str) -> Result<File> {
        let path = self.path(name);
        let io_failure = |error| Failure::io("read", &path, error);
        let refusal =
            |what| Failure::new(Exit::Refused, format_args!("{} is {what}", path.display()));
        let mut target = path.clone();
        if path.symlink_metadata().map_err(io_failure)?.is_symlink() {
            target = path.canonicalize().map_err(io_failure)?;
            let contains_target = |folder: &PathBuf| target.starts_with(folder);
            if self.allowed.as_ref().is_some_and(|allowed| !allowed.iter().any(contains_target)) {
                return Err(refusal("a link that leads out of the directory").help(
                    "name a copy of the directory, as `cp -rL` makes, or follow it with --follow-links",
                ));
            }
        }
        let file = open_no_follow(&target).map_err(io_failure)?;
        if !file.metadata().map_err(io_failure)?.is_file() {
            return Err(refusal("no regular file").help("take another copy of the directory"));
        }
        Ok(file)
    }

    /// Reads a whole file of at most `max` bytes.
    pub(super) fn read(&self, name: &str, max: u64) -> Result<Vec<u8>> {
        let file = self.open(name)?;
        let path = self.path(name);
        let io_failure = |error| Failure::io("read", &path, error);
        let len = file.size().map_err(io_failure)?;
        if len > max {
            let message = format_args!("{} has {len} bytes, {max} are allowed", path.display());
            return Err(Failure::new(Exit::Refused, message).help("check what this file is"));
        }
        let mut bytes = Vec::new();
        let out_of_memory = |error| io_failure(io::Error::new(io::ErrorKind::OutOfMemory, error));
        bytes
            .try_reserve_exact(usize::try_from(len).unwrap_or(usize::MAX))
            .map_err(out_of_memory)?;
        (&file).take(len).read_to_end(&mut bytes).map_err(io_failure)?;
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
