//! Export of a state dict to safetensors files: which leaves, in which order, under which header.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io::Write;

use super::header::{Header, METADATA, MetadataMap, canonical_header};
use super::index::{Index, common_metadata, parse_index_attr};
use super::source::Source;
use super::{FILE_NAME, HEADER_ATTR, INDEX_ATTR, INDEX_NAME};
use crate::archive::Archive;
use crate::convert::to_u64;
use crate::encode::{AttrValue, Attrs};
use crate::error::{Error, ErrorKind, Result};
use crate::key::ObjectPath;
use crate::reference::TensorReference;
use crate::runs::Runs;
use crate::safetensors::auxiliary::{AuxiliaryEntry, AuxiliaryFile, check_name_conflicts};
use crate::state_dict::StateDict;
use crate::structure::{Container, Node, PathCursor, PayloadItem, structure_of, walk};
use crate::tensor::TensorMeta;

/// The largest ratio of exported bytes to stored bytes, unless the export is at most 1 GiB.
///
/// Expanded tensors (stride 0) take little space in an archive and an unbounded amount in safetensors.
const EXPANSION_MAX: u64 = 64;

/// A state dict that has been checked for export, to be written as one safetensors file or several.
#[derive(Clone, Debug)]
pub struct Export {
    source: Source,
    leaves: Vec<Leaf>,
    others: Vec<AuxiliaryEntry>,
    metadata: MetadataMap,
    /// The attributes whose names begin with `tssd.`, such as [`HEADER_ATTR`] and [`INDEX_ATTR`].
    origin: Attrs,
}

/// One tensor to export.
#[derive(Clone, Debug)]
struct Leaf {
    name: String,
    reference: TensorReference,
}

impl Export {
    /// Prepares all tensors of an archive for export. Copies no tensor bytes.
    ///
    /// # Errors
    ///
    /// - `NotExportable` for a leaf or an attribute that safetensors cannot hold.
    /// - `OtherFile` for an entry under [`FILES_KEY`](super::FILES_KEY) that cannot be a file.
    /// - `LimitExceeded` if the export is larger than 1 GiB and than 64 times the stored bytes.
    /// - `BlobElsewhere` for a manifest that was opened without its archives.
    pub fn from_archive(archive: &Archive) -> Result<Self> {
        // A manifest that was opened alone fails here, before anything is written.
        if archive.storage_count() > 0 {
            archive.storage_range(0, 0..0)?;
        }
        let storages = (0..archive.storage_count()).map(|number| archive.storage(number).len);
        let stored = storages.fold(0, u64::saturating_add);
        let source = Source::Archive(archive.clone());
        Self::new(source, stored, archive.structure(), &archive.attrs())
    }

    /// Prepares all tensors of a state dict for export.
    ///
    /// Shares the bytes of tensors in this process's memory, and reads all others into memory.
    ///
    /// # Errors
    ///
    /// As [`Export::from_archive`]; `Io` if bytes outside this process's memory cannot be read.
    pub fn from_state_dict(dict: &StateDict, attrs: &Attrs) -> Result<Self> {
        let (mut storages, mut locations) = (Vec::new(), Vec::new());
        // `new` rejects other leaves, with their path. They get a location here because `structure_of`
        // takes one for each item of `walk`.
        walk(dict.as_value(), &PathCursor::Start(&ObjectPath::root()), true, &mut |_, item| {
            let (bytes, byte_offset) = match item {
                PayloadItem::Tensor(tensor) => match tensor.storage().bytes() {
                    Some(bytes) => (bytes.clone(), tensor.byte_offset()),
                    None => (tensor.to_memory()?.storage().bytes().cloned().unwrap_or_default(), 0),
                },
                PayloadItem::Content(bytes) => (bytes.clone(), 0),
            };
            let number = u32::try_from(storages.len());
            locations
                .push((Some(number.map_err(|_| Error::new(ErrorKind::TooLarge))?), byte_offset));
            storages.push(bytes);
            Ok(())
        })?;
        let structure = structure_of(dict.as_value(), &mut locations.into_iter());
        let stored = storages.iter().map(|bytes| to_u64(bytes.len())).fold(0, u64::saturating_add);
        Self::new(Source::Memory(storages), stored, structure.to_node(), attrs)
    }

    fn new(source: Source, stored: u64, mut structure: Node, attrs: &Attrs) -> Result<Self> {
        let others = AuxiliaryEntry::remove_from(&mut structure)?;
        let mut leaves = Vec::new();
        collect(structure, &ObjectPath::root(), &mut BTreeSet::new(), &mut leaves)?;
        let mut metadata = MetadataMap::new();
        let mut origin = Attrs::new();
        for (name, value) in attrs {
            match value {
                _ if name.starts_with("tssd.") => drop(origin.insert(name.clone(), value.clone())),
                AttrValue::Text(text) if text.as_str().is_some() => {
                    let text = text.as_str().unwrap_or_default();
                    metadata.insert(name.clone(), text.to_owned());
                }
                _ => {
                    return Err(Error::new(ErrorKind::NotExportable).with_detail(format_args!(
                        "attribute `{name}` is no text, as metadata is"
                    )));
                }
            }
        }
        let export = Self { source, leaves, others, metadata, origin };
        let bytes = export.nbytes();
        if bytes > stored.saturating_mul(EXPANSION_MAX).max(1 << 30) {
            return Err(Error::new(ErrorKind::LimitExceeded).with_detail(format_args!(
                "expanded tensors (stride 0) would be {bytes} bytes when written out, and are \
                 {stored}"
            )));
        }
        Ok(export)
    }

    /// Returns the number of tensors.
    pub fn len(&self) -> usize {
        self.leaves.len()
    }

    /// Returns true if there are no tensors.
    pub fn is_empty(&self) -> bool {
        self.leaves.is_empty()
    }

    /// Returns the size of all tensors, in bytes.
    pub fn nbytes(&self) -> u64 {
        self.leaves.iter().map(Leaf::nbytes).fold(0, u64::saturating_add)
    }

    /// Returns the auxiliary files of the directory.
    pub fn auxiliary_files(&self) -> impl ExactSizeIterator<Item = AuxiliaryFile<'_>> {
        self.others.iter().map(|other| AuxiliaryFile::new(other, &self.source))
    }

    /// Plans one file with all tensors.
    ///
    /// If the state dict was imported from one file, and its tensors and attributes still match the
    /// header of that file, the result equals that file byte for byte.
    ///
    /// # Errors
    ///
    /// `NotExportable` if the header would exceed 100,000,000 bytes.
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

    /// Plans a directory with all tensors.
    ///
    /// If the state dict was imported from a directory, and its tensors and attributes still match
    /// that directory, the result has the same files. Otherwise it has one file with tensors, as
    /// [`Export::sharded_directory`] plans it.
    ///
    /// # Errors
    ///
    /// As [`Export::file`]; `OtherFile` if the name of an auxiliary file conflicts with another file.
    pub fn directory(&self) -> Result<Directory<'_>> {
        match self.origin_directory() {
            Some((files, index)) => self.with_others(files, Some(index)),
            None => self.sharded_directory(u64::MAX),
        }
    }

    /// Plans a directory of files with at most `max` bytes of tensors each, in order, and an index.
    ///
    /// A larger tensor gets its own file. If the state dict was imported from a directory and has the same tensors, the
    /// index keeps all metadata of that directory's index, except `total_size`, which is computed. A single file needs
    /// no index, so it gets one only for such metadata.
    ///
    /// # Errors
    ///
    /// As [`Export::directory`].
    pub fn sharded_directory(&self, max: u64) -> Result<Directory<'_>> {
        let mut parts: Vec<Vec<&Leaf>> = Vec::new();
        let (mut part, mut part_bytes) = (Vec::new(), 0);
        for leaf in &self.leaves {
            let bytes = leaf.nbytes();
            // As in huggingface_hub, the current file continues after a large tensor.
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
        let origin = self.origin_index();
        let files = if parts.len() <= 1 {
            vec![self.file()?]
        } else {
            let count = parts.len();
            let stem = FILE_NAME.trim_end_matches(".safetensors");
            let name = |number| format!("{stem}-{number:05}-of-{count:05}.safetensors");
            let files = (1..).zip(&parts).map(|(number, part)| self.new_file(name(number), part));
            files.collect::<Result<Vec<_>>>()?
        };
        if files.len() == 1 && !origin.as_ref().is_some_and(Index::has_own_metadata) {
            return self.with_others(files, None);
        }
        let tensor_files = |file: &File<'_>| -> Vec<_> {
            file.leaves.iter().map(|leaf| (leaf.name.clone(), file.name.clone())).collect()
        };
        let weight_map: BTreeMap<String, String> = files.iter().flat_map(tensor_files).collect();
        let index = Index::write(&weight_map, self.nbytes(), origin.as_ref());
        self.with_others(files, Some(index))
    }

    /// Returns the index of the directory that the state dict was imported from, if it names the same tensors.
    fn origin_index(&self) -> Option<Index> {
        let (index, _) = parse_index_attr(self.origin_text(INDEX_ATTR)?)?;
        index.names_exactly(self.leaves.iter().map(|leaf| &*leaf.name)).then_some(index)
    }

    fn with_others<'a>(
        &'a self,
        files: Vec<File<'a>>,
        index: Option<String>,
    ) -> Result<Directory<'a>> {
        let names = files.iter().map(File::name).chain(index.iter().map(|_| INDEX_NAME));
        check_name_conflicts(&self.others, names)?;
        Ok(Directory { files, auxiliary_files: self.auxiliary_files().collect(), index })
    }

    fn origin_text(&self, attr: &str) -> Option<&str> {
        match self.origin.get(attr)? {
            AttrValue::Text(text) => text.as_str(),
            AttrValue::Int(_) | AttrValue::Bytes(_) => None,
        }
    }

    /// Returns the files and the index of the directory that the state dict was imported from.
    fn origin_directory(&self) -> Option<(Vec<File<'_>>, String)> {
        let (index, mut headers) = parse_index_attr(self.origin_text(INDEX_ATTR)?)?;
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
        let is_unchanged = leaves.is_empty()
            && headers.is_empty()
            && common_metadata(metadata.iter()) == self.metadata;
        is_unchanged.then(|| (files, index.text().to_owned()))
    }

    /// Plans a file with a canonical header.
    fn new_file<'a>(&'a self, name: String, leaves: &[&'a Leaf]) -> Result<File<'a>> {
        let meta = |leaf: &&Leaf| (leaf.name.clone(), leaf.reference.meta.clone());
        let tensors: Vec<(String, TensorMeta)> = leaves.iter().map(meta).collect();
        let (header, order) = canonical_header(&self.metadata, &tensors)?;
        let leaves = order.into_iter().map(|position| leaves[position]).collect();
        Ok(File { name, header, leaves, source: &self.source })
    }

    /// Plans a file with this header, if the header describes exactly these tensors.
    fn file_of<'a>(&'a self, name: &str, leaves: &[&'a Leaf], header: Header) -> Option<File<'a>> {
        let by_name: BTreeMap<&str, &Leaf> =
            leaves.iter().map(|leaf| (&*leaf.name, *leaf)).collect();
        let mut order = Vec::with_capacity(leaves.len());
        for entry in header.tensors() {
            let leaf = *by_name.get(entry.name())?;
            let (meta, actual) = (entry.meta(), &leaf.reference.meta);
            if (meta.dtype(), meta.shape()) != (actual.dtype(), actual.shape()) {
                return None;
            }
            order.push((entry.range().start, entry.range().end, leaf));
        }
        // Names in a header are distinct, so equal counts mean equal sets.
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

/// The planned files of a directory: tensor files, their index if needed, and auxiliary files.
#[derive(Clone, Debug)]
pub struct Directory<'a> {
    /// The files with tensors. Their names contain no path separator.
    pub files: Vec<File<'a>>,
    /// The auxiliary files.
    pub auxiliary_files: Vec<AuxiliaryFile<'a>>,
    /// The text of [`INDEX_NAME`].
    pub index: Option<String>,
}

/// A planned safetensors file.
#[derive(Clone, Debug)]
pub struct File<'a> {
    name: String,
    header: String,
    /// The tensors in the order of their bytes in the file.
    leaves: Vec<&'a Leaf>,
    source: &'a Source,
}

impl File<'_> {
    /// Returns the name of the file in a directory.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the JSON text of the header, padding included.
    pub fn header(&self) -> &str {
        &self.header
    }

    /// Returns the names of the tensors, in the order of their bytes.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = &str> {
        self.leaves.iter().map(|leaf| &*leaf.name)
    }

    /// Returns the length of the file in bytes.
    pub fn file_len(&self) -> u64 {
        let tensors = self.leaves.iter().map(|leaf| leaf.nbytes());
        tensors.fold(8 + to_u64(self.header.len()), u64::saturating_add)
    }

    /// Writes the file. Reads an archive that is not in memory one storage at a time.
    ///
    /// # Errors
    ///
    /// `Io` if the stream fails; else as [`Archive::storage_bytes`].
    pub fn write_to(&self, stream: &mut impl Write) -> Result<()> {
        stream.write_all(&to_u64(self.header.len()).to_le_bytes())?;
        stream.write_all(self.header.as_bytes())?;
        let mut loaded = None;
        for leaf in &self.leaves {
            let Some(number) = leaf.reference.storage.filter(|_| leaf.nbytes() > 0) else {
                continue;
            };
            // Consecutive views of one storage read it once. `take` frees the previous storage before
            // the next one is read.
            let bytes = match loaded.take().filter(|(last, _)| *last == number) {
                Some((_, bytes)) => bytes,
                None => self.source.storage(number).map_err(|error| error.with_path(&leaf.name))?,
            };
            write_elements(&leaf.reference, &bytes, stream)?;
            loaded = Some((number, bytes));
        }
        Ok(())
    }
}

/// Writes the elements of a tensor in row-major order, because safetensors has no strides.
fn write_elements(
    reference: &TensorReference,
    storage: &[u8],
    stream: &mut impl Write,
) -> std::io::Result<()> {
    let meta = &reference.meta;
    let size = |bytes: u64| usize::try_from(bytes).expect("it is in memory");
    let span = &storage[size(reference.byte_offset)..];
    let mut result = Ok(());
    Runs::to_row_major(meta.dtype().itemsize(), meta.shape(), &meta.strides()).for_each(
        |source, _, run| {
            if result.is_ok() {
                result = stream.write_all(&span[size(source)..][..size(run)]);
            }
        },
    );
    result
}

/// Collects all tensors of the tree. Rejects all leaves that safetensors cannot hold.
fn collect(
    node: Node,
    path: &ObjectPath,
    names: &mut BTreeSet<String>,
    leaves: &mut Vec<Leaf>,
) -> Result<()> {
    let not_exportable = |reason: &dyn fmt::Display| {
        Err(Error::new(ErrorKind::NotExportable).with_detail(reason).with_path(path))
    };
    match node {
        Node::Container(Container::Divergent, _) => not_exportable(
            &"the writers disagree on it: get it from the store as one of them has it",
        ),
        Node::Container(_, children) => {
            if children.is_empty() && !path.steps().is_empty() {
                return not_exportable(&"it is an empty container");
            }
            for (step, child) in children {
                collect(child, &path.clone().step(step), names, leaves)?;
            }
            Ok(())
        }
        Node::Tensors(mut run) => match run.pop() {
            Some(reference) if run.is_empty() && reference.shard_spec.is_none() => {
                let (name, dtype) = (path.fqn(), reference.meta.dtype());
                if name == METADATA {
                    return not_exportable(&"the name is taken by the metadata");
                }
                if !names.insert(name.clone()) {
                    return not_exportable(&format_args!("another leaf is `{name}` too"));
                }
                if dtype.safetensors().is_none() {
                    return not_exportable(&format_args!("it has no dtype for torch's {dtype}"));
                }
                leaves.push(Leaf { name, reference });
                Ok(())
            }
            _ => not_exportable(
                &"it is a shard of a larger tensor: put all shards into a store and get the whole",
            ),
        },
        Node::Distributed(_) => not_exportable(
            &"its shards are in other files: name the directory of the manifest, or get it from the store",
        ),
        Node::Leaf(_) | Node::StoredLeaf(..) => not_exportable(&"it is no tensor"),
    }
}
