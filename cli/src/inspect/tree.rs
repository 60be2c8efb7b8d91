//! The tree of a file as lines of text.

use std::collections::BTreeMap;
use std::fmt::Write;

use tssd_format::{
    Archive, Container, Key, Node, ObjectPath, ShardPlace, Step, StorageReference, Stored,
    TensorFlags, TensorReference,
};

use crate::document::Document;
use crate::size::{Size, count};
use crate::value::{of_attr, repr};

/// What is shown of a file.
pub(super) struct Tree {
    /// The root's kind, then one line for each node below it.
    pub(super) lines: String,
    /// One line about all of it.
    pub(super) summary: String,
    /// What is said of it as a whole, one line each.
    pub(super) attributes: String,
}

/// One node: where it hangs, and what it is in columns.
struct Row {
    name: String,
    cells: Vec<String>,
    note: String,
}

struct Walk<'a> {
    archive: Option<&'a Archive>,
    verbose: bool,
    rows: Vec<Row>,
    /// The first leaf of each storage, with its place in it.
    seen: BTreeMap<u32, (String, u64, u64)>,
    tensors: u64,
    tied: u64,
    bytes: u64,
    /// Of all storages: bytes in files, and what they decode to.
    stored: u64,
    raw: u64,
    others: u64,
}

impl Tree {
    /// The tree of a document; its storages too if it is to be verbose.
    pub(super) fn of(document: &Document, verbose: bool) -> Self {
        let mut walk = Walk {
            archive: document.archive(),
            verbose,
            rows: Vec::new(),
            seen: BTreeMap::new(),
            tensors: 0,
            tied: 0,
            bytes: 0,
            stored: 0,
            raw: 0,
            others: 0,
        };
        let root = document.structure();
        let mut lines = kind_of(&root);
        if let Node::Container(_, children) = &root {
            walk.children(children, "", &ObjectPath::root());
        }
        walk.draw(&mut lines);
        let mut attributes = String::new();
        for (name, value) in document.attrs() {
            writeln!(attributes, "{name}: {}", of_attr(&value)).expect("a String takes any text");
        }
        Self { lines, summary: walk.summary(document), attributes }
    }
}

impl Walk<'_> {
    fn children(&mut self, children: &[(Step, Node)], indent: &str, path: &ObjectPath) {
        for (place, (step, child)) in children.iter().enumerate() {
            let is_last = place + 1 == children.len();
            let (branch, below) = if is_last { ("└─ ", "   ") } else { ("├─ ", "│  ") };
            let path = path.clone().step(step.clone());
            let name = format!("{indent}{branch}{}", name_of(step));
            let below = format!("{indent}{below}");
            match child {
                Node::Container(_, children) => {
                    self.row(name, [kind_of(child)], String::new());
                    self.children(children, &below, &path);
                }
                Node::Tensors(run) => self.tensors(run, name, &below, &path),
                Node::Leaf(value) => {
                    self.others += 1;
                    let (kind, text) = repr(value);
                    self.row(name, [kind.to_owned()], text);
                }
                Node::Stored(stored, storage) => {
                    self.others += 1;
                    let kind = match stored {
                        Stored::Str => "str".to_owned(),
                        Stored::Bytes => "bytes".to_owned(),
                        Stored::Opaque(media) => format!("opaque {media}"),
                    };
                    let storage = self.archive.map(|archive| archive.storage(*storage));
                    let size = storage.map_or_else(String::new, |storage| {
                        let size = Size(storage.len).to_string();
                        self.stored += storage.stored_len();
                        self.raw += storage.len;
                        packing(&storage)
                            .map_or(size.clone(), |packing| format!("{size}  {packing}"))
                    });
                    self.row(name, [kind], size);
                }
            }
        }
    }

    /// Shards beside each other are lines of their own under their leaf.
    fn tensors(&mut self, run: &[TensorReference], name: String, indent: &str, path: &ObjectPath) {
        self.tensors += 1;
        let [only] = run else {
            self.row(name, [format!("{} shards", run.len())], String::new());
            for (place, each) in run.iter().enumerate() {
                let branch = if place + 1 == run.len() { "└─ " } else { "├─ " };
                let name = format!("{indent}{branch}#{place}");
                self.tensor(each, name, path);
            }
            return;
        };
        self.tensor(only, name, path);
    }

    fn tensor(&mut self, each: &TensorReference, name: String, path: &ObjectPath) {
        let meta = &each.meta;
        let mut notes = Vec::new();
        let mut align = String::new();
        if let Some(place) = &each.place {
            notes.push(slice(place));
        }
        if !meta.is_contiguous() {
            notes.push(format!("strides {:?}", meta.strides()));
        }
        let flags = TensorFlags::NAMES.iter().filter(|(flag, _)| meta.flags().contains(*flag));
        notes.extend(flags.map(|(_, name)| (*name).to_owned()));
        let mut counts = meta.nbytes();
        if let (Some(number), Some(archive)) = (each.storage, self.archive) {
            let storage = archive.storage(number);
            align = format!("align {}", binary(1 << storage.align_log2));
            let here = (path.fqn(), each.byte_offset, meta.span_bytes());
            if let Some((first, offset, span)) = self.seen.get(&number) {
                let same = (*offset, *span) == (here.1, here.2);
                notes.push(format!("{} {first}", if same { "tied to" } else { "overlaps" }));
                self.tied += 1;
                counts = 0;
            } else {
                self.seen.insert(number, here);
                self.stored += storage.stored_len();
                self.raw += storage.len;
                notes.extend(packing(&storage));
            }
            if self.verbose {
                notes.push(format!(
                    "storage {number} at byte {}, crc32 {:08x}",
                    storage.offset, storage.crc32
                ));
            }
        }
        self.bytes = self.bytes.saturating_add(counts);
        let shape = format!("{:?}", meta.shape());
        let size = Size(meta.nbytes()).to_string();
        self.row(name, [meta.dtype().to_string(), shape, size, align], notes.join(", "));
    }

    fn row(&mut self, name: String, cells: impl IntoIterator<Item = String>, note: String) {
        self.rows.push(Row { name, cells: cells.into_iter().collect(), note });
    }

    /// Columns are as wide as their widest cell. Sizes stand to the right.
    fn draw(&self, lines: &mut String) {
        let width = |text: &String| text.chars().count();
        let names = self.rows.iter().map(|row| width(&row.name)).max().unwrap_or(0);
        let cell = |row: &Row, column: usize| row.cells.get(column).map_or(0, width);
        // A container's kind or a plain value may run into the next column.
        let is_tensor = |row: &&Row| row.cells.len() > 2;
        let widest = |column| {
            self.rows.iter().filter(is_tensor).map(|row| cell(row, column)).max().unwrap_or(0)
        };
        let widths: [usize; 4] = std::array::from_fn(widest);
        for row in &self.rows {
            let mut line = format!("{:names$}", row.name);
            for (column, text) in row.cells.iter().enumerate() {
                let width = widths[column];
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

    fn summary(&self, document: &Document) -> String {
        let mut parts = Vec::new();
        let tied = if self.tied > 0 { format!(" ({} tied)", self.tied) } else { String::new() };
        parts.push(format!("{}{tied}", count(self.tensors, "tensor")));
        parts.push(Size(self.bytes).to_string());
        if self.others > 0 {
            parts.push(count(self.others, "other leaf"));
        }
        parts.push(format!("file {}", Size(document.file_len())));
        if let Some(archive) = self.archive {
            let index = archive.index_range();
            parts.push(count(archive.storage_count(), "storage"));
            if self.stored < self.raw {
                parts.push(format!("compressed {}", shrunk(self.stored, self.raw)));
            }
            if archive.storage_count() > 0 && archive.storage(0).digest.is_some() {
                parts.push("digests".to_owned());
            }
            parts.push(format!("index {}", Size(index.end - index.start)));
            match archive.shards().len() {
                0 => {}
                files => parts.push(format!("manifest of {}", count(files, "file"))),
            }
        }
        parts.join(", ")
    }
}

/// Keys that are strings stand for themselves, unless they could be taken for something else.
fn name_of(step: &Step) -> String {
    match step {
        Step::Index(index) => format!("[{index}]"),
        Step::Key(Key::Str(text)) => {
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

fn kind_of(node: &Node) -> String {
    let Node::Container(container, children) = node else { return String::new() };
    let kind = match container {
        Container::Dict => "dict",
        Container::OrderedDict => "ordered dict",
        Container::List => "list",
        Container::Tuple => "tuple",
        Container::NamedTuple(name) => return format!("namedtuple {name}"),
        Container::Divergent => "divergent, by writer",
    };
    if children.is_empty() { format!("empty {kind}") } else { kind.to_owned() }
}

/// Which box of which tensor, and who has it.
fn slice(place: &ShardPlace) -> String {
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

/// How a compressed storage is stored.
fn packing(storage: &StorageReference) -> Option<String> {
    let packing = storage.packing.as_ref()?;
    let shuffle = match packing.shuffle {
        0 => String::new(),
        width => format!(" shuffle {width}"),
    };
    Some(format!("zstd{shuffle} {}", shrunk(storage.stored_len(), storage.len)))
}

/// What compression has made of so many bytes.
#[expect(clippy::cast_precision_loss, reason = "three digits of it are shown")]
fn shrunk(stored: u64, raw: u64) -> String {
    let ratio = raw as f64 / stored.max(1) as f64;
    let digits = if ratio < 100.0 { 2 } else { 0 };
    format!("{} -> {} (x {ratio:.digits$})", Size(raw), Size(stored))
}

/// Alignments are powers of two.
fn binary(bytes: u64) -> String {
    if bytes >= 1024 { format!("{} KiB", bytes >> 10) } else { format!("{bytes} B") }
}
