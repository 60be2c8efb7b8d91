//! What a state dict is as safetensors files: which leaves, in which order, under which header.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io::Write;
use std::ops::Range;

use bytes::Bytes;

use super::header::{Header, METADATA, Texts, canonical, wide};
use super::index::{Index, common_metadata, remembered};
use super::other::{Other, OtherFile, prove_apart};
use super::{FILE_NAME, HEADER_ATTR, INDEX_ATTR, INDEX_NAME};
use crate::archive::Archive;
use crate::encode::{AttrValue, Attrs};
use crate::error::{Error, ErrorKind, Result};
use crate::key::ObjectPath;
use crate::runs::Runs;
use crate::state_dict::StateDict;
use crate::structure::{Container, Item, Node, TensorReference, Trail, structure_of, walk};
use crate::tensor::TensorMeta;

/// Expanded tensors take no room in an archive and any amount of it in safetensors: what is written
/// may be this many times what is stored, or a GiB.
const EXPANSION_MAX: u64 = 64;

/// A state dict that safetensors can hold, ready to be written as one file or several.
#[derive(Clone, Debug)]
pub struct Export {
    source: Source,
    leaves: Vec<Leaf>,
    others: Vec<Other>,
    metadata: Texts,
    /// The attributes that say what the state dict was made from.
    origin: Attrs,
}

/// Where the bytes of storages are.
#[derive(Clone, Debug)]
pub(super) enum Source {
    Archive(Archive),
    Memory(Vec<Bytes>),
}

/// One tensor.
#[derive(Clone, Debug)]
struct Leaf {
    name: String,
    reference: TensorReference,
}

impl Export {
    /// Takes all tensors of an archive; their bytes stay where they are.
    ///
    /// # Errors
    ///
    /// `NotExportable` for a leaf or an attribute that safetensors cannot hold; `OtherFile` for what is
    /// under [`FILES_KEY`](super::FILES_KEY) and cannot be a file; `LimitExceeded` if expanded tensors
    /// would take far more than they do now; `BlobElsewhere` for a manifest.
    pub fn of_archive(archive: &Archive) -> Result<Self> {
        // What a manifest that was opened alone lacks is said before anything is written.
        if archive.storage_count() > 0 {
            archive.storage_range(0, 0..0)?;
        }
        let storages = (0..archive.storage_count()).map(|number| archive.storage(number).len);
        let stored = storages.fold(0, u64::saturating_add);
        let source = Source::Archive(archive.clone());
        Self::new(source, stored, archive.structure(), &archive.attrs())
    }

    /// Takes all tensors of a state dict; their bytes are shared, not copied, but for those that are elsewhere.
    ///
    /// # Errors
    ///
    /// As [`Export::of_archive`]; `Io` if what is elsewhere cannot be read.
    pub fn of_state_dict(dict: &StateDict, attrs: &Attrs) -> Result<Self> {
        let (mut storages, mut places) = (Vec::new(), Vec::new());
        // What is no tensor is refused with its path later; here it counts, so that places fit.
        walk(dict.as_value(), &Trail::Start(&ObjectPath::root()), true, &mut |_, item| {
            let (bytes, byte_offset) = match item {
                Item::Tensor(tensor) => match tensor.storage().bytes() {
                    Some(bytes) => (bytes.clone(), tensor.byte_offset()),
                    None => (tensor.to_memory()?.storage().bytes().cloned().unwrap_or_default(), 0),
                },
                Item::Content(bytes) => (bytes.clone(), 0),
            };
            let number = u32::try_from(storages.len());
            places.push((Some(number.map_err(|_| Error::new(ErrorKind::TooLarge))?), byte_offset));
            storages.push(bytes);
            Ok(())
        })?;
        let structure = structure_of(dict.as_value(), &mut places.into_iter());
        let stored = storages.iter().map(|bytes| wide(bytes.len())).fold(0, u64::saturating_add);
        Self::new(Source::Memory(storages), stored, structure.to_node(), attrs)
    }

    fn new(source: Source, stored: u64, mut structure: Node, attrs: &Attrs) -> Result<Self> {
        let others = Other::take_from(&mut structure)?;
        let mut leaves = Vec::new();
        collect(structure, &ObjectPath::root(), &mut BTreeSet::new(), &mut leaves)?;
        let mut metadata = Texts::new();
        let mut origin = Attrs::new();
        for (name, value) in attrs {
            match value {
                _ if name.starts_with("tssd.") => drop(origin.insert(name.clone(), value.clone())),
                AttrValue::Text(text) if text.as_str().is_some() => {
                    let text = text.as_str().unwrap_or_default();
                    metadata.insert(name.clone(), text.to_owned());
                }
                _ => {
                    return Err(Error::new(ErrorKind::NotExportable)
                        .note(format_args!("attribute `{name}` is no text, as metadata is")));
                }
            }
        }
        let export = Self { source, leaves, others, metadata, origin };
        let bytes = export.nbytes();
        if bytes > stored.saturating_mul(EXPANSION_MAX).max(1 << 30) {
            return Err(Error::new(ErrorKind::LimitExceeded).note(format_args!(
                "expanded tensors (stride 0) would be {bytes} bytes when written out, and are \
                 {stored}"
            )));
        }
        Ok(export)
    }

    /// How many tensors there are.
    pub fn len(&self) -> usize {
        self.leaves.len()
    }

    /// True if there are none.
    pub fn is_empty(&self) -> bool {
        self.leaves.is_empty()
    }

    /// How many bytes all tensors take.
    pub fn nbytes(&self) -> u64 {
        self.leaves.iter().map(Leaf::nbytes).fold(0, u64::saturating_add)
    }

    /// The files that are no tensors, which a directory has too.
    pub fn others(&self) -> impl ExactSizeIterator<Item = OtherFile<'_>> {
        self.others.iter().map(|other| OtherFile::new(other, &self.source))
    }

    /// All tensors as one file: the one that the state dict was made from, byte for byte, if it was
    /// made from one and its tensors and attributes are still those.
    ///
    /// # Errors
    ///
    /// `NotExportable` if the header would be too long.
    pub fn file(&self) -> Result<File<'_>> {
        let origin = self.origin_text(HEADER_ATTR);
        let origin = origin.and_then(|text| Header::parse(text.to_owned()).ok());
        let origin = origin.filter(|header| *header.metadata() == self.metadata);
        let leaves = self.leaves.iter().collect::<Vec<_>>();
        if let Some(file) = origin.and_then(|header| self.file_of(FILE_NAME, &leaves, header)) {
            return Ok(file);
        }
        self.new_file(FILE_NAME.into(), &leaves)
    }

    /// All tensors as the directory that the state dict was made from, file for file, if it was made
    /// from one and its tensors and attributes are still those; else as a directory with one file.
    ///
    /// # Errors
    ///
    /// As [`Export::file`]; `OtherFile` if another file has the name of one with tensors.
    pub fn directory(&self) -> Result<Directory<'_>> {
        match self.origin_directory() {
            Some((files, index)) => self.with_others(files, Some(index)),
            None => self.with_others(vec![self.file()?], None),
        }
    }

    /// All tensors in order as a directory of files that have `max` bytes of tensors at most, with an
    /// index. A larger tensor gets a file of its own; a single file needs no index.
    ///
    /// # Errors
    ///
    /// As [`Export::directory`].
    pub fn shards(&self, max: u64) -> Result<Directory<'_>> {
        let mut parts: Vec<Vec<&Leaf>> = Vec::new();
        let (mut part, mut part_bytes) = (Vec::new(), 0);
        for leaf in &self.leaves {
            let bytes = leaf.nbytes();
            // As in huggingface_hub, the file that was begun goes on behind a large tensor.
            if bytes > max {
                parts.push(vec![leaf]);
                continue;
            }
            if bytes > max - part_bytes {
                parts.push(std::mem::take(&mut part));
                part_bytes = 0;
            }
            part.push(leaf);
            part_bytes += bytes;
        }
        if !part.is_empty() {
            parts.push(part);
        }
        if parts.len() <= 1 {
            return self.with_others(vec![self.file()?], None);
        }
        let count = parts.len();
        let stem = FILE_NAME.trim_end_matches(".safetensors");
        let name = |number| format!("{stem}-{number:05}-of-{count:05}.safetensors");
        let files = (1..).zip(&parts).map(|(number, part)| self.new_file(name(number), part));
        let files = files.collect::<Result<Vec<_>>>()?;
        let in_file = |file: &File<'_>| -> Vec<_> {
            file.leaves.iter().map(|leaf| (leaf.name.clone(), file.name.clone())).collect()
        };
        let weight_map: BTreeMap<String, String> = files.iter().flat_map(in_file).collect();
        self.with_others(files, Some(Index::write(&weight_map, self.nbytes())))
    }

    fn with_others<'a>(
        &'a self,
        files: Vec<File<'a>>,
        index: Option<String>,
    ) -> Result<Directory<'a>> {
        let names = files.iter().map(File::name).chain(index.iter().map(|_| INDEX_NAME));
        prove_apart(&self.others, names)?;
        Ok(Directory { files, others: self.others().collect(), index })
    }

    fn origin_text(&self, attr: &str) -> Option<&str> {
        match self.origin.get(attr)? {
            AttrValue::Text(text) => text.as_str(),
            AttrValue::Int(_) | AttrValue::Bytes(_) => None,
        }
    }

    /// The files that were packed, and their index.
    fn origin_directory(&self) -> Option<(Vec<File<'_>>, String)> {
        let (index, mut headers) = remembered(self.origin_text(INDEX_ATTR)?)?;
        let mut leaves: BTreeMap<&str, &Leaf> =
            self.leaves.iter().map(|leaf| (&*leaf.name, leaf)).collect();
        let (mut files, mut metadata) = (Vec::new(), Vec::new());
        for (name, tensors) in index.files() {
            let part = tensors.into_iter().map(|tensor| leaves.remove(tensor));
            let part = part.collect::<Option<Vec<_>>>()?;
            let file = if let Some(header) = headers.remove(name) {
                metadata.push(header.metadata().clone());
                self.file_of(name, &part, header)?
            } else {
                metadata.push(self.metadata.clone());
                self.new_file(name.to_owned(), &part).ok()?
            };
            files.push(file);
        }
        let is_same = leaves.is_empty()
            && headers.is_empty()
            && common_metadata(metadata.iter()) == self.metadata;
        is_same.then(|| (files, index.text().to_owned()))
    }

    /// A file with a header of its own making.
    fn new_file<'a>(&'a self, name: String, leaves: &[&'a Leaf]) -> Result<File<'a>> {
        let meta = |leaf: &&Leaf| (leaf.name.clone(), leaf.reference.meta.clone());
        let tensors: Vec<(String, TensorMeta)> = leaves.iter().map(meta).collect();
        let (header, order) = canonical(&self.metadata, &tensors)?;
        let leaves = order.into_iter().map(|place| leaves[place]).collect();
        Ok(File { name, header, leaves, source: &self.source })
    }

    /// A file with this header, if it describes these tensors.
    fn file_of<'a>(&'a self, name: &str, leaves: &[&'a Leaf], header: Header) -> Option<File<'a>> {
        let by_name: BTreeMap<&str, &Leaf> =
            leaves.iter().map(|leaf| (&*leaf.name, *leaf)).collect();
        let mut order = Vec::with_capacity(leaves.len());
        for entry in header.tensors() {
            let leaf = *by_name.get(entry.name())?;
            let (meta, found) = (entry.meta(), &leaf.reference.meta);
            if (meta.dtype(), meta.shape()) != (found.dtype(), found.shape()) {
                return None;
            }
            order.push((entry.range().start, entry.range().end, leaf));
        }
        // The names of a header are distinct, so as many are the same.
        if order.len() != leaves.len() {
            return None;
        }
        order.sort_by_key(|(start, end, _)| (*start, *end));
        let leaves = order.into_iter().map(|(.., leaf)| leaf).collect();
        Some(File {
            name: name.to_owned(),
            header: header.into_text(),
            leaves,
            source: &self.source,
        })
    }
}

impl Leaf {
    fn nbytes(&self) -> u64 {
        self.reference.meta.nbytes()
    }
}

/// The files of a directory: those with tensors, their index if they need one, and all others.
#[derive(Clone, Debug)]
pub struct Directory<'a> {
    /// The files, under plain names.
    pub files: Vec<File<'a>>,
    /// What else was packed with them.
    pub others: Vec<OtherFile<'a>>,
    /// The text of [`INDEX_NAME`].
    pub index: Option<String>,
}

/// A safetensors file that is planned, and can be written.
#[derive(Clone, Debug)]
pub struct File<'a> {
    name: String,
    header: String,
    /// In the order of their bytes.
    leaves: Vec<&'a Leaf>,
    source: &'a Source,
}

impl File<'_> {
    /// Its name in a directory.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The JSON text of its header, padding included.
    pub fn header(&self) -> &str {
        &self.header
    }

    /// The names of its tensors, in the order of their bytes.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = &str> {
        self.leaves.iter().map(|leaf| &*leaf.name)
    }

    /// How long it is, in bytes.
    pub fn file_len(&self) -> u64 {
        let tensors = self.leaves.iter().map(|leaf| leaf.nbytes());
        tensors.fold(8 + wide(self.header.len()), u64::saturating_add)
    }

    /// Writes it. Of an archive that is not in memory, one storage is at a time.
    ///
    /// # Errors
    ///
    /// `Io` if the stream fails; else as [`Archive::storage_bytes`].
    pub fn write_to(&self, stream: &mut impl Write) -> Result<()> {
        stream.write_all(&wide(self.header.len()).to_le_bytes())?;
        stream.write_all(self.header.as_bytes())?;
        let mut loaded = None;
        for leaf in &self.leaves {
            let Some(number) = leaf.reference.storage.filter(|_| leaf.nbytes() > 0) else {
                continue;
            };
            // Views of one storage that follow each other read it once; another one is let go first.
            let bytes = match loaded.take().filter(|(last, _)| *last == number) {
                Some((_, bytes)) => bytes,
                None => self.source.storage(number).map_err(|error| error.at(&leaf.name))?,
            };
            write_elements(&leaf.reference, &bytes, stream)?;
            loaded = Some((number, bytes));
        }
        Ok(())
    }
}

impl Source {
    fn storage(&self, number: u32) -> Result<Bytes> {
        match self {
            Self::Archive(archive) => archive.storage_bytes(number),
            Self::Memory(storages) => {
                let place = usize::try_from(number).expect("it numbers what is in memory");
                Ok(storages[place].clone())
            }
        }
    }

    /// A range of the bytes of a storage.
    pub(super) fn range(&self, number: u32, range: Range<u64>) -> Result<Bytes> {
        match self {
            Self::Archive(archive) => archive.storage_range(number, range),
            Self::Memory(_) => {
                let size = |at: u64| usize::try_from(at).expect("it is in memory");
                Ok(self.storage(number)?.slice(size(range.start)..size(range.end)))
            }
        }
    }

    /// How many bytes a storage has.
    pub(super) fn len(&self, number: u32) -> u64 {
        match self {
            Self::Archive(archive) => archive.storage(number).len,
            Self::Memory(storages) => {
                let place = usize::try_from(number).expect("it numbers what is in memory");
                wide(storages[place].len())
            }
        }
    }
}

/// Row by row if need be: safetensors has no strides.
fn write_elements(
    reference: &TensorReference,
    storage: &[u8],
    stream: &mut impl Write,
) -> std::io::Result<()> {
    let meta = &reference.meta;
    let size = |bytes: u64| usize::try_from(bytes).expect("it is in memory");
    let span = &storage[size(reference.byte_offset)..];
    let mut written = Ok(());
    Runs::to_row_major(meta.dtype().itemsize(), meta.shape(), &meta.strides()).for_each(
        |source, _, run| {
            if written.is_ok() {
                written = stream.write_all(&span[size(source)..][..size(run)]);
            }
        },
    );
    written
}

/// All tensors of the tree; whatever safetensors cannot hold is an error.
fn collect(
    node: Node,
    path: &ObjectPath,
    names: &mut BTreeSet<String>,
    leaves: &mut Vec<Leaf>,
) -> Result<()> {
    let refused =
        |why: &dyn fmt::Display| Err(Error::new(ErrorKind::NotExportable).note(why).at(path));
    match node {
        Node::Container(Container::Divergent, _) => {
            refused(&"the writers disagree on it: get it from the store as one of them has it")
        }
        Node::Container(_, children) => {
            if children.is_empty() && !path.steps().is_empty() {
                return refused(&"it is an empty container");
            }
            for (step, child) in children {
                collect(child, &path.clone().step(step), names, leaves)?;
            }
            Ok(())
        }
        Node::Tensors(mut run) => match run.pop() {
            Some(reference) if run.is_empty() && reference.place.is_none() => {
                let (name, dtype) = (path.fqn(), reference.meta.dtype());
                if name == METADATA {
                    return refused(&"the name is taken by the metadata");
                }
                if !names.insert(name.clone()) {
                    return refused(&format_args!("another leaf is `{name}` too"));
                }
                if dtype.safetensors().is_none() {
                    return refused(&format_args!("it has no dtype for torch's {dtype}"));
                }
                leaves.push(Leaf { name, reference });
                Ok(())
            }
            _ => refused(
                &"it is a shard of a larger tensor: put all shards into a store and get the whole",
            ),
        },
        Node::Leaf(_) | Node::Stored(..) => refused(&"it is no tensor"),
    }
}
