//! Archives that are written as their tensors come, sizes unknown ahead.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::sync::Arc;

use crate::arrange::Arranger;
use crate::encode::{AttrValue, Attrs, encode};
use crate::error::{Error, ErrorKind, Result};
use crate::fill::{Sum, jobs};
use crate::frame;
use crate::key::{Key, ObjectPath, Step};
use crate::layout::write_tail;
use crate::options::Options;
use crate::pack::{Pack, Packed};
use crate::state_dict::Value;
use crate::structure::{Container, Node, Tree, branch};

/// Writes one archive to a stream, entry by entry.
///
/// The bytes of an entry go to the stream at once, so they need not stay in memory; only what the
/// index says of them does. Tensors are tied within one entry, not across entries, because the memory
/// of an earlier one may have been used again.
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
    arranger: Arranger,
    children: Vec<(Step, Node)>,
    /// The places of the children of the root.
    places: BTreeMap<Key, usize>,
    /// The keys of those that grow.
    growing: BTreeMap<usize, BTreeSet<Key>>,
    /// How much of the file is written.
    written: u64,
    sums: Vec<Sum>,
    attrs: Attrs,
    /// An entry was not written to its end.
    is_broken: bool,
}

impl<W: Write> ArchiveWriter<W> {
    /// Begins an archive whose root is a dict.
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
            arranger: Arranger::new(),
            children: Vec::new(),
            places: BTreeMap::new(),
            growing: BTreeMap::new(),
            written: 64,
            sums: Vec::new(),
            is_broken: false,
        })
    }

    /// Appends an entry to the root, and writes its bytes.
    ///
    /// # Errors
    ///
    /// `DuplicateKey` if the key is there; else as [`Layout::plan`](crate::Layout::plan); `Io` if the
    /// stream fails, after which the archive cannot be finished.
    pub fn insert(&mut self, key: impl Into<Key>, value: impl Into<Value>) -> Result<()> {
        let key = key.into();
        let path = ObjectPath::root().key(key.clone());
        if self.places.contains_key(&key) {
            return Err(Error::new(ErrorKind::DuplicateKey).at(path));
        }
        let node = self.write(&path, &value.into())?;
        self.append(key, node);
        Ok(())
    }

    /// Appends an entry to a dict of the root, and writes its bytes. The first entry makes the dict;
    /// one that [`ArchiveWriter::insert`] has written does not grow.
    ///
    /// # Errors
    ///
    /// As [`ArchiveWriter::insert`].
    pub fn insert_into(
        &mut self,
        dict: impl Into<Key>,
        key: impl Into<Key>,
        value: impl Into<Value>,
    ) -> Result<()> {
        let (dict, key) = (dict.into(), key.into());
        let path = ObjectPath::root().key(dict.clone()).key(key.clone());
        let place = self.places.get(&dict).copied();
        let is_free = place
            .is_none_or(|place| self.growing.get(&place).is_some_and(|keys| !keys.contains(&key)));
        if !is_free {
            return Err(Error::new(ErrorKind::DuplicateKey).at(path));
        }
        let node = self.write(&path, &value.into())?;
        let place = place.unwrap_or_else(|| {
            let empty = Node::Container(Container::Dict, Vec::new());
            self.append(dict, empty)
        });
        if let Node::Container(_, children) = &mut self.children[place].1 {
            self.growing.entry(place).or_default().insert(key.clone());
            children.push((Step::Key(key), node));
        }
        Ok(())
    }

    fn append(&mut self, key: Key, node: Node) -> usize {
        let place = self.children.len();
        self.places.insert(key.clone(), place);
        self.children.push((Step::Key(key), node));
        place
    }

    /// Writes the bytes of a value that is to be at `path`.
    fn write(&mut self, path: &ObjectPath, value: &Value) -> Result<Node> {
        if self.is_broken {
            return Err(Error::new(ErrorKind::Io).note("an earlier write has failed"));
        }
        check(path, value, &self.options)?;
        let node = self.arranger.arrange(value, path, &self.options)?.to_node();
        // What has a number by now is written or not: if it is not, nothing after it can be.
        self.is_broken = true;
        let packed: Vec<Packed> =
            self.arranger.jobs(&self.options).iter().map(Pack::run).collect::<Result<_>>()?;
        self.arranger.place(packed, &self.options)?;
        let sources = Arc::new(std::mem::take(&mut self.arranger.sources));
        // An entry without bytes leaves the end of the head unwritten for now.
        let end = if sources.is_empty() { self.written } else { self.arranger.cursor() };
        let written = std::mem::replace(&mut self.written, end);
        for job in jobs(written..end, None, &sources) {
            // Jobs are in order, and so are their entries of the checksum table.
            let filled = job.write_to(&mut self.stream)?;
            self.sums.extend(filled.sums);
        }
        self.is_broken = false;
        Ok(node)
    }

    /// Says something of the archive as a whole.
    pub fn attr(&mut self, name: impl Into<String>, value: AttrValue) {
        self.attrs.insert(name.into(), value);
    }

    /// Writes the index and returns the stream. Dropping a writer instead leaves bytes that no reader
    /// takes for an archive.
    ///
    /// # Errors
    ///
    /// `KeysCollide` and what else the keys of the root can break; `TooLarge`; `Io`.
    pub fn finish(mut self) -> Result<W> {
        if self.is_broken {
            return Err(Error::new(ErrorKind::Io).note("an earlier write has failed"));
        }
        let root = Node::Container(Container::Dict, self.children);
        self.arranger.storages.seal(&self.sums);
        self.options.attrs = self.attrs;
        let attrs = self.arranger.attrs(&self.options);
        let tables = encode(&root.as_tree(), &attrs, &[])?;
        let index_off = self.arranger.index_off()?;
        for job in jobs(self.written..index_off, None, &Arc::default()) {
            let _no_checksums = job.write_to(&mut self.stream)?;
        }
        let views = self.arranger.storages.views(&tables);
        write_tail(&views, index_off, &mut self.stream)?;
        Ok(self.stream)
    }
}

/// Refuses an entry whose keys could not be written at the end. It is encoded as if it were alone.
fn check(path: &ObjectPath, value: &Value, options: &Options) -> Result<()> {
    let entry = Arranger::new().arrange(value, path, options)?;
    let root =
        path.steps().iter().rev().fold(entry, |child, step| {
            Tree::Container(Container::Dict, vec![(branch(step), child)])
        });
    encode(&root, &Attrs::new(), &[]).map(drop)
}
