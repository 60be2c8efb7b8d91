//! The other files of a directory, which are packed beside its tensors: a dict of bytes by name.

use std::collections::BTreeSet;
use std::io::Write;
use std::path::{Component, Path};

use bytes::Bytes;

use super::export::Source;
use super::{FILE_NAME, FILES_KEY, INDEX_NAME};
use crate::error::{Error, ErrorKind, Result};
use crate::key::{Key, ObjectPath, Step};
use crate::state_dict::Value;
use crate::structure::{Container, Node, Stored};

/// The longest name, in bytes: a directory to unpack into has room before it in a path of 4096.
const NAME_MAX: usize = 1024;

/// The longest part of a name, in bytes.
const PART_MAX: usize = 255;

/// Long files are written in pieces of this many bytes.
const PIECE: u64 = 1 << 20;

/// Whether another file of a directory can have this name: a relative path with `/` that leads nowhere
/// else, through no hidden folder, and to none of the files that are made of tensors.
///
/// Hidden folders, and `.git` whatever it is, would make a directory more than a place of data: tools
/// run what they find there.
pub fn is_other_name(name: &str) -> bool {
    let is_plain = |part: &str| {
        (1..=PART_MAX).contains(&part.len())
            && part != "."
            && part != ".."
            && !part.contains(|char: char| char == '\\' || char.is_control())
    };
    let (folders, last) = name.rsplit_once('/').unwrap_or(("", name));
    let is_reserved =
        [FILE_NAME, INDEX_NAME].iter().any(|reserved| name.eq_ignore_ascii_case(reserved));
    name.len() <= NAME_MAX
        && name.split('/').all(is_plain)
        && !folders.split('/').any(|folder| folder.starts_with('.'))
        && !last.eq_ignore_ascii_case(".git")
        && !is_reserved
        // What else this system takes for the beginning of an absolute path.
        && Path::new(name).components().all(|part| matches!(part, Component::Normal(_)))
}

/// One of the other files.
#[derive(Clone, Debug)]
pub(super) struct Other {
    name: String,
    content: Content,
}

#[derive(Clone, Debug)]
enum Content {
    Inline(Bytes),
    Storage(u32),
}

impl Other {
    /// Takes all of them out of a tree; what else is in their place is an error.
    pub(super) fn take_from(root: &mut Node) -> Result<Vec<Self>> {
        let Node::Container(_, children) = root else { return Ok(Vec::new()) };
        let files = Step::Key(Key::from(FILES_KEY));
        let Some(place) = children.iter().position(|(step, _)| *step == files) else {
            return Ok(Vec::new());
        };
        let path = ObjectPath::root().step(files);
        match children.remove(place).1 {
            Node::Container(Container::Dict, files) => {
                files.into_iter().map(|(step, node)| Self::new(&step, node, &path)).collect()
            }
            _ => Err(Error::new(ErrorKind::OtherFile).note("it is no dict").at(path)),
        }
    }

    fn new(step: &Step, node: Node, dict: &ObjectPath) -> Result<Self> {
        let path = dict.clone().step(step.clone());
        let refused = |why: &str| Error::new(ErrorKind::OtherFile).note(why).at(&path);
        let content = match node {
            Node::Leaf(Value::Bytes(bytes)) => Content::Inline(bytes),
            Node::Stored(Stored::Bytes, storage) => Content::Storage(storage),
            _ => return Err(refused("it is no bytes")),
        };
        let name = match step {
            Step::Key(Key::Str(name)) => name.as_str().filter(|name| is_other_name(name)),
            _ => None,
        };
        let name = name.ok_or_else(|| refused("its name is no plain relative path"))?;
        Ok(Self { name: name.to_owned(), content })
    }
}

/// Proves that each name can be a file beside those that are written anyway.
pub(super) fn prove_apart<'a>(
    others: &'a [Other],
    written: impl Iterator<Item = &'a str>,
) -> Result<()> {
    let mut names: BTreeSet<&str> = written.collect();
    let refused = |other: &Other, why: &str| {
        let path = ObjectPath::root().key(FILES_KEY).key(&*other.name);
        Err(Error::new(ErrorKind::OtherFile).note(why).at(path))
    };
    for other in others {
        if !names.insert(&other.name) {
            return refused(other, "a file with tensors has this name");
        }
    }
    for other in others {
        let mut folders = other.name.match_indices('/').map(|(end, _)| &other.name[..end]);
        if folders.any(|folder| names.contains(folder)) {
            return refused(other, "another file has the name of its folder");
        }
    }
    Ok(())
}

/// A file that is written as it was packed.
#[derive(Clone, Debug)]
pub struct OtherFile<'a> {
    other: &'a Other,
    source: &'a Source,
}

impl<'a> OtherFile<'a> {
    pub(super) fn new(other: &'a Other, source: &'a Source) -> Self {
        Self { other, source }
    }

    /// Its name in the directory: a relative path with `/`, of which [`is_other_name`] holds.
    pub fn name(&self) -> &'a str {
        &self.other.name
    }

    /// How long it is, in bytes.
    pub fn file_len(&self) -> u64 {
        match &self.other.content {
            Content::Inline(bytes) => super::header::wide(bytes.len()),
            Content::Storage(number) => self.source.len(*number),
        }
    }

    /// Writes it. Of an archive that is not in memory, one MiB is at a time.
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
            let end = len.min(start + PIECE);
            let bytes = self.source.range(number, start..end);
            stream.write_all(&bytes.map_err(|error| error.at(self.name()))?)?;
            start = end;
        }
        Ok(())
    }
}
