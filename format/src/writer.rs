//! Streaming writer of archives, for entries whose number and sizes are not known in advance.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::sync::Arc;

use crate::compress::{CompressJob, CompressedChunks};
use crate::encode::{AttrValue, Attrs, encode};
use crate::error::{Error, ErrorKind, Result};
use crate::frame;
use crate::key::{MapKey, ObjectPath, Step};
use crate::layout::write_tail;
use crate::options::Options;
use crate::state_dict::Value;
use crate::storage_allocator::StorageAllocator;
use crate::structure::{BorrowedNode, Container, Node, borrow_step};
use crate::write_job::{ChunkChecksum, jobs};

/// Writes one archive to a stream, entry by entry.
///
/// The writer writes the bytes of an entry immediately, so only its index data stays in memory.
/// Tensors are tied within one entry but not across entries, because the memory of an earlier entry may
/// have been reused.
///
/// # Examples
///
/// ```
/// use tssd_format::{Archive, ArchiveWriter, Options, Tensor};
/// let mut writer = ArchiveWriter::new(Vec::new(), Options::new())?;
/// for layer in ["0", "1"] {
///     writer.insert(layer, Tensor::from_slice(&[1.0_f32; 8], &[8])?)?;
/// }
/// let file = writer.finish()?;
/// assert_eq!(Archive::from_bytes(file)?.tensor("1")?.meta().shape(), [8]);
/// # Ok::<(), tssd_format::Error>(())
/// ```
#[derive(Debug)]
pub struct ArchiveWriter<W> {
    stream: W,
    options: Options,
    arranger: StorageAllocator,
    children: Vec<(Step, Node)>,
    /// The positions of the children of the root, by key.
    positions: BTreeMap<MapKey, usize>,
    /// The keys of the dicts that [`ArchiveWriter::insert_into`] has created, by position.
    open_dicts: BTreeMap<usize, BTreeSet<MapKey>>,
    /// Number of bytes of the file that are written.
    written: u64,
    sums: Vec<ChunkChecksum>,
    attrs: Attrs,
    /// True if writing an entry has failed.
    has_failed: bool,
}

impl<W: Write> ArchiveWriter<W> {
    /// Creates a writer of an archive whose root is a dict, and writes the head.
    ///
    /// # Errors
    ///
    /// `Io` if the stream fails.
    pub fn new(mut stream: W, options: Options) -> Result<Self> {
        let head = frame::head();
        stream.write_all(&head)?;
        Ok(Self {
            stream,
            attrs: options.attrs.clone(),
            options,
            arranger: StorageAllocator::new(),
            children: Vec::new(),
            positions: BTreeMap::new(),
            open_dicts: BTreeMap::new(),
            written: 64,
            sums: Vec::new(),
            has_failed: false,
        })
    }

    /// Appends an entry to the root, and writes its bytes.
    ///
    /// # Errors
    ///
    /// - `DuplicateKey` if the root already has the key.
    /// - The errors of [`Layout::plan`](crate::Layout::plan).
    /// - `Io` if the stream fails. The archive cannot be finished after that.
    pub fn insert(&mut self, key: impl Into<MapKey>, value: impl Into<Value>) -> Result<()> {
        let key = key.into();
        let path = ObjectPath::root().key(key.clone());
        if self.positions.contains_key(&key) {
            return Err(Error::new(ErrorKind::DuplicateKey).with_path(path));
        }
        let node = self.write(&path, &value.into())?;
        self.append(key, node);
        Ok(())
    }

    /// Appends an entry to a dict of the root, and writes its bytes.
    ///
    /// The first entry creates the dict. A dict that [`ArchiveWriter::insert`] has written cannot be
    /// extended.
    ///
    /// # Errors
    ///
    /// As [`ArchiveWriter::insert`].
    pub fn insert_into(
        &mut self,
        dict: impl Into<MapKey>,
        key: impl Into<MapKey>,
        value: impl Into<Value>,
    ) -> Result<()> {
        let (dict, key) = (dict.into(), key.into());
        let path = ObjectPath::root().key(dict.clone()).key(key.clone());
        let position = self.positions.get(&dict).copied();
        let is_available = position.is_none_or(|position| {
            self.open_dicts.get(&position).is_some_and(|keys| !keys.contains(&key))
        });
        if !is_available {
            return Err(Error::new(ErrorKind::DuplicateKey).with_path(path));
        }
        let node = self.write(&path, &value.into())?;
        let position = position.unwrap_or_else(|| {
            let empty = Node::Container(Container::Dict, Vec::new());
            self.append(dict, empty)
        });
        if let Node::Container(_, children) = &mut self.children[position].1 {
            self.open_dicts.entry(position).or_default().insert(key.clone());
            children.push((Step::Key(key), node));
        }
        Ok(())
    }

    fn append(&mut self, key: MapKey, node: Node) -> usize {
        let position = self.children.len();
        self.positions.insert(key.clone(), position);
        self.children.push((Step::Key(key), node));
        position
    }

    /// Writes the bytes of the value at `path`, and returns its node.
    fn write(&mut self, path: &ObjectPath, value: &Value) -> Result<Node> {
        if self.has_failed {
            return Err(Error::new(ErrorKind::Io).with_detail("an earlier write has failed"));
        }
        check_encodable(path, value, &self.options)?;
        let node = self.arranger.allocate(value, path, &self.options)?.to_node();
        // Storages have numbers from here on. If one of them is not written, no later one can be.
        self.has_failed = true;
        let packed: Vec<CompressedChunks> = self
            .arranger
            .compress_jobs(&self.options)
            .iter()
            .map(CompressJob::run)
            .collect::<Result<_>>()?;
        self.arranger.place_pending(packed, &self.options)?;
        let sources = Arc::new(std::mem::take(&mut self.arranger.sources));
        // An entry without bytes does not write the padding after the head yet.
        let end = if sources.is_empty() { self.written } else { self.arranger.blob_end() };
        let written = std::mem::replace(&mut self.written, end);
        for job in jobs(written..end, None, &sources) {
            // Jobs are in file order, which is the order of the checksum table.
            let filled = job.write_to(&mut self.stream)?;
            self.sums.extend(filled.checksums);
        }
        self.has_failed = false;
        Ok(node)
    }

    /// Sets an attribute of the archive. An earlier value with the same name is replaced.
    pub fn set_attr(&mut self, name: impl Into<String>, value: AttrValue) {
        self.attrs.insert(name.into(), value);
    }

    /// Writes the index and the trailer, and returns the stream.
    ///
    /// If the writer is dropped instead, no reader accepts the bytes as an archive.
    ///
    /// # Errors
    ///
    /// - `KeysCollide` and other errors in the keys of the root.
    /// - `TooLarge` if the index exceeds its limit.
    /// - `Io` if the stream fails, or an earlier write has failed.
    pub fn finish(mut self) -> Result<W> {
        if self.has_failed {
            return Err(Error::new(ErrorKind::Io).with_detail("an earlier write has failed"));
        }
        let root = Node::Container(Container::Dict, self.children);
        self.arranger.storages.set_checksums(&self.sums);
        self.options.attrs = self.attrs;
        let attrs = self.arranger.attrs(&self.options);
        let tables = encode(&root.as_borrowed(), &attrs, &[])?;
        let index_off = self.arranger.index_off()?;
        for job in jobs(self.written..index_off, None, &Arc::default()) {
            let _no_checksums = job.write_to(&mut self.stream)?;
        }
        let views = self.arranger.storages.views(&tables);
        write_tail(&views, index_off, &mut self.stream)?;
        Ok(self.stream)
    }
}

/// Rejects an entry that [`ArchiveWriter::finish`] could not encode, by encoding it alone.
fn check_encodable(path: &ObjectPath, value: &Value, options: &Options) -> Result<()> {
    let entry = StorageAllocator::new().allocate(value, path, options)?;
    let root = path.steps().iter().rev().fold(entry, |child, step| {
        BorrowedNode::Container(Container::Dict, vec![(borrow_step(step), child)])
    });
    encode(&root, &Attrs::new(), &[]).map(drop)
}
