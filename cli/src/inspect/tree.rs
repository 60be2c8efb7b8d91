//! Text view of the tree of a file.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fmt::Write;

use tssd_format::{
    ChunkCodec, Container, ContentKind, DistributedTensor, MapKey, Node, ObjectPath, ShardSpec,
    Step, StorageReference, TensorFlags, TensorReference, abridge, abridge_name,
};

use super::digests::to_hex;
use crate::document::Document;
use crate::model::Model;
use crate::size::{Size, join_names, pluralize};
use crate::value::{attr_repr, repr};

/// Text view of a file.
pub(super) struct Tree {
    /// The kind of the root, then one line for each node below it.
    pub(super) lines: String,
    /// One line with totals.
    pub(super) summary: String,
    /// The attributes of the file, one line each.
    pub(super) attributes: String,
}

/// A node: its name with branches, its columns, and a note.
struct Row {
    name: String,
    cells: Vec<String>,
    note: String,
}

struct TreeBuilder<'a> {
    document: &'a Document,
    verbose: bool,
    rows: Vec<Row>,
    /// First leaf of each storage: its fqn, byte offset and length in bytes.
    first_by_storage: BTreeMap<u32, (String, u64, u64)>,
    /// The first leaf of each group of distributed leaves.
    first_by_group: BTreeMap<u32, String>,
    tensors: u64,
    tied: u64,
    bytes: u64,
    /// Size of all storages as stored, in bytes.
    stored: u64,
    /// Size of all storages after decompression, in bytes.
    raw: u64,
    other_leaves: u64,
}

impl Tree {
    /// Creates the text view of a document. The verbose view includes storages.
    pub(super) fn new(document: &Document, verbose: bool) -> Self {
        let mut builder = TreeBuilder {
            document,
            verbose,
            rows: Vec::new(),
            first_by_storage: BTreeMap::new(),
            first_by_group: BTreeMap::new(),
            tensors: 0,
            tied: 0,
            bytes: 0,
            stored: 0,
            raw: 0,
            other_leaves: 0,
        };
        let root = document.structure();
        let mut lines = container_kind(&root);
        if let Node::Container(_, children) = &root {
            builder.add_children(children, "", &ObjectPath::root());
        }
        builder.render(&mut lines);
        let mut attributes = String::new();
        for (name, value) in document.attrs() {
            let name = abridge_name(&name);
            writeln!(attributes, "{name}: {}", attr_repr(&value)).expect("a String takes any text");
        }
        Self { lines, summary: builder.summary(), attributes }
    }
}

impl TreeBuilder<'_> {
    fn add_children(&mut self, children: &[(Step, Node)], indent: &str, path: &ObjectPath) {
        for (index, (step, child)) in children.iter().enumerate() {
            let is_last = index + 1 == children.len();
            let (branch, below) = if is_last { ("└─ ", "   ") } else { ("├─ ", "│  ") };
            let path = path.clone().step(step.clone());
            let name = format!("{indent}{branch}{}", abridge_name(&step_name(step)));
            let below = format!("{indent}{below}");
            match child {
                Node::Container(_, children) => {
                    self.add_row(name, [container_kind(child)], String::new());
                    self.add_children(children, &below, &path);
                }
                Node::Tensors(shards) => self.add_shards(shards, name, &below, &path),
                Node::Distributed(tensor) => self.add_distributed(tensor, name, &path),
                Node::Leaf(value) => {
                    self.other_leaves += 1;
                    let (kind, text) = repr(value);
                    self.add_row(name, [kind.to_owned()], text);
                }
                Node::StoredLeaf(stored, storage) => {
                    self.other_leaves += 1;
                    let kind = match stored {
                        ContentKind::Str => "str".to_owned(),
                        ContentKind::Bytes => "bytes".to_owned(),
                        ContentKind::Opaque(media) => format!("opaque {media}"),
                    };
                    let mut note = Size(self.document.storage_len(*storage)).to_string();
                    if let Some(archive) = self.document.archive() {
                        let storage = archive.storage(*storage);
                        self.stored += storage.stored_len();
                        self.raw += storage.len;
                        if let Some(compression) = describe_compression(&storage) {
                            note = format!("{note}  {compression}");
                        }
                    }
                    self.add_row(name, [kind], note);
                }
            }
        }
    }

    /// Adds the row of a leaf. Several shards are added as rows below the leaf.
    fn add_shards(
        &mut self,
        shards: &[TensorReference],
        name: String,
        indent: &str,
        path: &ObjectPath,
    ) {
        self.tensors += 1;
        let [only] = shards else {
            self.add_row(name, [format!("{} shards", shards.len())], String::new());
            for (index, each) in shards.iter().enumerate() {
                let branch = if index + 1 == shards.len() { "└─ " } else { "├─ " };
                let name = format!("{indent}{branch}#{index}");
                self.add_tensor(each, name, path);
            }
            return;
        };
        self.add_tensor(only, name, path);
    }

    /// Adds the row of a tensor whose shards follow from mesh and placements.
    fn add_distributed(&mut self, tensor: &DistributedTensor, name: String, path: &ObjectPath) {
        let meta = &tensor.meta;
        self.tensors += 1;
        let mut distribution = format!("distributed, mesh {:?}", tensor.mesh().shape());
        for placement in tensor.placements() {
            write!(distribution, " {placement}").expect("a String takes any text");
        }
        let mut notes = vec![distribution];
        match self.first_by_group.entry(tensor.group) {
            Entry::Occupied(first) => {
                notes.push(format!("tied to {}", first.get()));
                self.tied += 1;
            }
            Entry::Vacant(vacant) => {
                vacant.insert(path.fqn());
                self.bytes = self.bytes.saturating_add(meta.nbytes());
            }
        }
        let flags = TensorFlags::NAMES.iter().filter(|(flag, _)| meta.flags().contains(*flag));
        notes.extend(flags.map(|(_, name)| (*name).to_owned()));
        let cells = [
            meta.dtype().to_string(),
            format!("{:?}", meta.shape()),
            Size(meta.nbytes()).to_string(),
        ];
        self.add_row(name, cells, notes.join(", "));
    }

    fn add_tensor(&mut self, each: &TensorReference, name: String, path: &ObjectPath) {
        let meta = &each.meta;
        let mut notes = Vec::new();
        let mut align = String::new();
        if let Some(place) = &each.shard_spec {
            notes.push(describe_slice(place));
        }
        if !meta.is_contiguous() {
            notes.push(format!("strides {:?}", meta.strides()));
        }
        let flags = TensorFlags::NAMES.iter().filter(|(flag, _)| meta.flags().contains(*flag));
        notes.extend(flags.map(|(_, name)| (*name).to_owned()));
        let mut counted_bytes = meta.nbytes();
        if let (Some(number), Some(model), true) =
            (each.storage, self.document.model(), self.verbose)
        {
            notes.extend(model.shard_name(number).map(|file| format!("in {file}")));
        }
        if let (Some(number), Some(archive)) = (each.storage, self.document.archive()) {
            let storage = archive.storage(number);
            align = format!("align {}", alignment_text(1 << storage.align_log2));
            let location = (path.fqn(), each.byte_offset, meta.span_bytes());
            if let Some((first, offset, span)) = self.first_by_storage.get(&number) {
                let same = (*offset, *span) == (location.1, location.2);
                notes.push(format!("{} {first}", if same { "tied to" } else { "overlaps" }));
                self.tied += 1;
                counted_bytes = 0;
            } else {
                self.first_by_storage.insert(number, location);
                self.stored += storage.stored_len();
                self.raw += storage.len;
                notes.extend(describe_compression(&storage));
            }
            if self.verbose {
                notes.push(format!(
                    "storage {number} at byte {}, crc32 {:08x}",
                    storage.offset, storage.crc32
                ));
            }
        }
        self.bytes = self.bytes.saturating_add(counted_bytes);
        let shape = format!("{:?}", meta.shape());
        let size = Size(meta.nbytes()).to_string();
        self.add_row(name, [meta.dtype().to_string(), shape, size, align], notes.join(", "));
    }

    fn add_row(&mut self, name: String, cells: impl IntoIterator<Item = String>, note: String) {
        let cells = cells.into_iter().map(|cell| abridge_name(&cell).into_owned()).collect();
        self.rows.push(Row { name, cells, note: abridge(note) });
    }

    /// Appends the rows to `lines`. A column is as wide as its widest cell. Sizes are right-aligned.
    fn render(&self, lines: &mut String) {
        let width = |text: &String| text.chars().count();
        let names = self.rows.iter().map(|row| width(&row.name)).max().unwrap_or(0);
        let cell = |row: &Row, column: usize| row.cells.get(column).map_or(0, width);
        // Only tensors set the widths: the kind of a container may extend into the next column.
        let is_tensor = |row: &&Row| row.cells.len() > 2;
        let widest = |column| {
            self.rows.iter().filter(is_tensor).map(|row| cell(row, column)).max().unwrap_or(0)
        };
        let widths: [usize; 4] = std::array::from_fn(widest);
        for row in &self.rows {
            let mut line = format!("{:names$}", row.name);
            for (column, text) in row.cells.iter().enumerate() {
                let width = widths[column];
                if width == 0 && text.is_empty() {
                    continue;
                }
                let gap = if column == 0 || row.cells.len() > 2 { "  " } else { " " };
                let cell = match column {
                    2 | 3 => format!("{text:>width$}"),
                    _ => format!("{text:width$}"),
                };
                write!(line, "{gap}{cell}").expect("a String takes any text");
            }
            if !row.note.is_empty() {
                write!(line, "  {}", row.note).expect("a String takes any text");
            }
            write!(lines, "\n{}", line.trim_end()).expect("a String takes any text");
        }
    }

    fn summary(&self) -> String {
        let mut parts = Vec::new();
        let tied = if self.tied > 0 { format!(" ({} tied)", self.tied) } else { String::new() };
        parts.push(format!("{}{tied}", pluralize(self.tensors, "tensor")));
        parts.push(Size(self.bytes).to_string());
        if self.other_leaves > 0 {
            parts.push(pluralize(self.other_leaves, "other leaf"));
        }
        let file_len = Size(self.document.file_len());
        match self.document.model().filter(|model| model.directory.is_some()) {
            Some(model) => {
                let files = pluralize(model.files.len(), "safetensors file");
                parts.push(format!("{files}, directory {file_len}"));
            }
            None => parts.push(format!("file {file_len}")),
        }
        if let Some(archive) = self.document.archive() {
            let index = archive.index_range();
            parts.push(pluralize(archive.storage_count(), "storage"));
            if self.stored < self.raw {
                parts.push(format!("compressed {}", compression_text(self.stored, self.raw)));
            }
            if archive.storage_count() > 0 && archive.storage(0).digest.is_some() {
                parts.push("digests".to_owned());
            }
            parts.push(format!("index {}", Size(index.end - index.start)));
            match archive.shards().len() {
                0 => {}
                files => parts.push(format!("manifest of {}", pluralize(files, "file"))),
            }
            if let Some(base) = archive.base_digest() {
                parts.push(format!("delta of base blake3:{}", to_hex(&base)));
            }
        }
        let skipped = self.document.model().map_or(&[][..], Model::skipped);
        if skipped.is_empty() {
            parts.join(", ")
        } else {
            format!("{}\nleft alone: {}", parts.join(", "), join_names(skipped))
        }
    }
}

/// Returns the name of a step. A string key is quoted if it could be confused with another key.
fn step_name(step: &Step) -> String {
    match step {
        Step::Index(index) => format!("[{index}]"),
        Step::Key(MapKey::Str(text)) => {
            let plain = text.as_str().filter(|text| {
                let starts_like_a_name = |c: char| c.is_alphabetic() || c == '_';
                text.starts_with(starts_like_a_name)
                    && text.chars().all(|c| c.is_alphanumeric() || "._-/".contains(c))
                    && !["True", "False", "None"].contains(text)
            });
            plain.map_or_else(|| format!("{text:?}"), ToOwned::to_owned)
        }
        Step::Key(key) => key.to_string(),
    }
}

fn container_kind(node: &Node) -> String {
    let Node::Container(container, children) = node else { return String::new() };
    let kind = match container {
        Container::Dict => "dict",
        Container::OrderedDict => "ordered dict",
        Container::List => "list",
        Container::Tuple => "tuple",
        Container::NamedTuple(name) => return format!("namedtuple {name}"),
        Container::Divergent => "divergent, by writer",
        Container::Tagged(tag) => tag.class().name(),
    };
    if children.is_empty() { format!("empty {kind}") } else { kind.to_owned() }
}

/// Describes a shard: its region, the global shape, the mesh and the placements.
fn describe_slice(place: &ShardSpec) -> String {
    let slice = place.slice();
    let mut text = format!("{} of {:?}", slice.region(), slice.global_shape());
    if !slice.mesh_shape().is_empty() {
        let coordinates = slice.coordinates().map(|at| format!("{at:?} of ")).unwrap_or_default();
        write!(text, ", mesh {coordinates}{:?}", slice.mesh_shape()).expect("a String");
    }
    for placement in place.placements().into_iter().flatten() {
        write!(text, " {placement}").expect("a String takes any text");
    }
    text
}

/// Describes the compression of a storage. Returns `None` if it is not compressed.
fn describe_compression(storage: &StorageReference) -> Option<String> {
    let layout = storage.compressed_layout.as_ref()?;
    if storage.base.is_some() {
        return Some(format!("delta {}", compression_text(storage.stored_len(), storage.len)));
    }
    let (codec, width_name) = match layout.codec() {
        ChunkCodec::Planes => ("planes", "width"),
        ChunkCodec::Tiers => ("tiers", "width"),
        _ => ("zstd", "shuffle"),
    };
    let width = match layout.width {
        1 => String::new(),
        width => format!(" {width_name} {width}"),
    };
    Some(format!("{codec}{width} {}", compression_text(storage.stored_len(), storage.len)))
}

/// Returns the size before and after compression, and the ratio.
#[expect(clippy::cast_precision_loss, reason = "three digits of it are shown")]
fn compression_text(stored: u64, raw: u64) -> String {
    if stored == 0 {
        return format!("{} -> {}", Size(raw), Size(stored));
    }
    let ratio = raw as f64 / stored as f64;
    let digits = if ratio < 100.0 { 2 } else { 0 };
    format!("{} -> {} (x {ratio:.digits$})", Size(raw), Size(stored))
}

/// Returns an alignment in bytes or KiB. Alignments are powers of two.
fn alignment_text(bytes: u64) -> String {
    if bytes >= 1024 { format!("{} KiB", bytes >> 10) } else { format!("{bytes} B") }
}
