//! Auxiliary files of a model directory: all files except tensor files and their index.
//!
//! An archive stores them beside the tensors, as a dict from names to bytes.

use std::collections::BTreeSet;
use std::io::Write;
use std::path::{Component, Path};

use bytes::Bytes;

use super::source::Source;
use super::{FILE_NAME, FILES_KEY, INDEX_NAME};
use crate::convert::to_u64;
use crate::error::{Error, ErrorKind, Result};
use crate::key::{MapKey, ObjectPath, Step};
use crate::state_dict::Value;
use crate::structure::{Container, ContentKind, Node};

/// The longest name, in bytes. The rest of a 4096-byte path is for the target directory.
const NAME_MAX: usize = 1024;

/// The longest component of a name, in bytes.
const COMPONENT_MAX: usize = 255;

/// The size of the blocks in which files are written, in bytes.
const BLOCK_BYTES: u64 = 1 << 20;

/// Returns true if an auxiliary file of a directory can have this name.
///
/// The name is a relative path with `/` as separator. It stays inside the directory, has no hidden
/// folder, and is not the name of a file that [`Export`](super::Export) writes.
///
/// Hidden folders and the name `.git` are rejected because tools execute files that they find there.
pub fn is_auxiliary_file_name(name: &str) -> bool {
    let is_valid_component = |component: &str| {
        (1..=COMPONENT_MAX).contains(&component.len())
            && component != "."
            && component != ".."
            && !component.contains(|char: char| char == '\\' || char.is_control())
    };
    let (folders, last) = name.rsplit_once('/').unwrap_or(("", name));
    let is_reserved =
        [FILE_NAME, INDEX_NAME].iter().any(|reserved| name.eq_ignore_ascii_case(reserved));
    name.len() <= NAME_MAX
        && name.split('/').all(is_valid_component)
        && !folders.split('/').any(|folder| folder.starts_with('.'))
        && !last.eq_ignore_ascii_case(".git")
        && !is_reserved
        // Rejects further prefixes that the operating system treats as absolute.
        && Path::new(name).components().all(|component| matches!(component, Component::Normal(_)))
}

/// One auxiliary file.
#[derive(Clone, Debug)]
pub(super) struct AuxiliaryEntry {
    name: String,
    content: Content,
}

#[derive(Clone, Debug)]
enum Content {
    Inline(Bytes),
    Storage(u32),
}

impl AuxiliaryEntry {
    /// Removes the dict of auxiliary files from the tree and returns its files.
    ///
    /// # Errors
    ///
    /// `OtherFile` if the value is no dict, or an entry cannot be a file.
    pub(super) fn remove_from(root: &mut Node) -> Result<Vec<Self>> {
        let Node::Container(_, children) = root else { return Ok(Vec::new()) };
        let files = Step::Key(MapKey::from(FILES_KEY));
        let Some(position) = children.iter().position(|(step, _)| *step == files) else {
            return Ok(Vec::new());
        };
        let path = ObjectPath::root().step(files);
        match children.remove(position).1 {
            Node::Container(Container::Dict, files) => {
                files.into_iter().map(|(step, node)| Self::new(&step, node, &path)).collect()
            }
            _ => Err(Error::new(ErrorKind::OtherFile).with_detail("it is no dict").with_path(path)),
        }
    }

    fn new(step: &Step, node: Node, dict: &ObjectPath) -> Result<Self> {
        let path = dict.clone().step(step.clone());
        let other_file_error =
            |reason: &str| Error::new(ErrorKind::OtherFile).with_detail(reason).with_path(&path);
        let content = match node {
            Node::Leaf(Value::Bytes(bytes)) => Content::Inline(bytes),
            Node::StoredLeaf(ContentKind::Bytes, storage) => Content::Storage(storage),
            _ => return Err(other_file_error("it is no bytes")),
        };
        let name = match step {
            Step::Key(MapKey::Str(name)) => {
                name.as_str().filter(|name| is_auxiliary_file_name(name))
            }
            _ => None,
        };
        let name = name.ok_or_else(|| other_file_error("its name is no plain relative path"))?;
        Ok(Self { name: name.to_owned(), content })
    }
}

/// Checks that the names conflict neither with each other nor with the `written` files.
pub(super) fn check_name_conflicts<'a>(
    others: &'a [AuxiliaryEntry],
    written: impl Iterator<Item = &'a str>,
) -> Result<()> {
    let mut names: BTreeSet<&str> = written.collect();
    let other_file_error = |other: &AuxiliaryEntry, reason: &str| {
        let path = ObjectPath::root().key(FILES_KEY).key(&*other.name);
        Err(Error::new(ErrorKind::OtherFile).with_detail(reason).with_path(path))
    };
    for other in others {
        if !names.insert(&other.name) {
            return other_file_error(other, "a file with tensors has this name");
        }
    }
    for other in others {
        let mut folders = other.name.match_indices('/').map(|(end, _)| &other.name[..end]);
        if folders.any(|folder| names.contains(folder)) {
            return other_file_error(other, "another file has the name of its folder");
        }
    }
    Ok(())
}

/// An auxiliary file to write.
#[derive(Clone, Debug)]
pub struct AuxiliaryFile<'a> {
    other: &'a AuxiliaryEntry,
    source: &'a Source,
}

impl<'a> AuxiliaryFile<'a> {
    pub(super) fn new(other: &'a AuxiliaryEntry, source: &'a Source) -> Self {
        Self { other, source }
    }

    /// Returns the name in the directory: a relative path with `/` that satisfies [`is_auxiliary_file_name`].
    pub fn name(&self) -> &'a str {
        &self.other.name
    }

    /// Returns the length of the file in bytes.
    pub fn file_len(&self) -> u64 {
        match &self.other.content {
            Content::Inline(bytes) => to_u64(bytes.len()),
            Content::Storage(number) => self.source.len(*number),
        }
    }

    /// Writes the file. Reads an archive that is not in memory in blocks of 1 MiB.
    ///
    /// # Errors
    ///
    /// `Io` if the stream fails; else as [`Archive::storage_range`](crate::Archive::storage_range).
    pub fn write_to(&self, stream: &mut impl Write) -> Result<()> {
        let number = match &self.other.content {
            Content::Inline(bytes) => return Ok(stream.write_all(bytes)?),
            Content::Storage(number) => *number,
        };
        let len = self.file_len();
        let mut start = 0;
        while start < len {
            let end = len.min(start + BLOCK_BYTES);
            let bytes = self.source.range(number, start..end);
            stream.write_all(&bytes.map_err(|error| error.with_path(self.name()))?)?;
            start = end;
        }
        Ok(())
    }
}
