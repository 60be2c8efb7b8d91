//! Every byte of an archive but those of its tensors, with what it means. Spec: sections 2 to 7.

mod meaning;
mod page;
mod record;

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use tssd_format::{Archive, Blob, DATA_START, Dtype, MANIFEST, StorageReference};

use self::page::{LINE, Page};
use self::record::{NONE, Record, Shape, heap_range, number};
use crate::element::Reader;
use crate::exit::Exit;
use crate::failure::{Failure, Result};
use crate::input::{is_shard_set, open, shown};
use crate::value::quoted;

/// Size and alignment of the entries of tables that hold no records.
const PLAIN: [(&str, usize, usize); 5] =
    [("heap", 1, 1), ("dims", 8, 8), ("by_key", 4, 4), ("crcs", 4, 4), ("digests", 32, 1)];

/// Of a shard set, the manifest is shown.
pub(super) fn run(path: &Path) -> Result<Exit> {
    let path = if is_shard_set(path) { path.join(MANIFEST) } else { path.to_owned() };
    let file = open(&path)?;
    let path = shown(&path);
    let archive =
        Archive::from_blob(file.clone()).map_err(|error| Failure::format(path, &error))?;
    let mut dump = Dump::new(path, &*file, &archive)?;
    dump.frame("HEAD", "Head", 0)?;
    let head_len = Shape::named("Head").size();
    dump.gap(wide(head_len), DATA_START, "up to data_start")?;
    dump.blob()?;
    dump.index()?;
    dump.frame("TRAILER", "Trailer", dump.index.end)?;
    dump.page.print()?;
    Ok(Exit::Ok)
}

/// One table of the index: its name, and where it is in the index.
struct Table {
    name: &'static str,
    shape: Option<Shape>,
    /// Of an entry, in bytes.
    size: usize,
    align: usize,
    range: Range<usize>,
}

struct Dump<'a> {
    path: &'a Path,
    file: &'a dyn Blob,
    archive: &'a Archive,
    /// Where the index is in the file.
    index: Range<u64>,
    root: usize,
    tables: Vec<Table>,
    page: Page,
}

impl<'a> Dump<'a> {
    fn new(path: &'a Path, file: &'a dyn Blob, archive: &'a Archive) -> Result<Self> {
        let index = archive.index_range();
        let trailer = Shape::named("Trailer");
        let page = Page::new(archive.file_len());
        let mut dump = Self { path, file, archive, index, root: 0, tables: Vec::new(), page };
        let bytes = dump.read(dump.index.end, trailer.size())?;
        let trailer = Record { shape: trailer, at: dump.index.end, bytes: &bytes };
        dump.root = place(trailer.get("root_off"));
        for (name, offset, _) in Shape::named("Root").fields {
            let shape = Shape::of_table(name);
            let plain = PLAIN.iter().find(|(plain, ..)| plain == name);
            let (size, align) = match (shape, plain) {
                (Some(shape), _) => (shape.size(), shape.align()),
                (None, plain) => plain.map_or((1, 1), |(_, size, align)| (*size, *align)),
            };
            let (start, count) = dump.table_at(dump.root + offset);
            let range = start..start + count * size;
            dump.tables.push(Table { name, shape, size, align, range });
        }
        Ok(dump)
    }

    /// Where in the index a field of the root says that its table is, and how many entries it has.
    fn table_at(&self, field: usize) -> (usize, usize) {
        let bytes = self.archive.index_bytes();
        let rel = u32::try_from(number(&bytes[field..field + 4])).expect("four bytes");
        let rel = isize::try_from(rel.cast_signed()).expect("isize has at least 32 bits");
        let start = field.checked_add_signed(rel).expect("the index is proven");
        (start, place(number(&bytes[field + 4..field + 8])))
    }

    fn read(&self, at: u64, len: usize) -> Result<Vec<u8>> {
        let mut bytes = vec![0; len];
        let read = self.file.read_exact_at(&mut bytes, at);
        read.map_err(|error| Failure::io("read", self.path, error))?;
        Ok(bytes)
    }

    /// Bytes that should be zeros; what they are is for `tssd verify` to prove.
    fn gap(&mut self, from: u64, to: u64, what: &str) -> Result<()> {
        let bytes = self.read(from, place(to - from))?;
        self.page.bytes(from, &bytes, what)
    }

    /// Head or trailer.
    fn frame(&mut self, heading: &str, name: &str, at: u64) -> Result<()> {
        let shape = Shape::named(name);
        let bytes = self.read(at, shape.size())?;
        self.page.heading(heading);
        self.record(&Record { shape, at, bytes: &bytes })
    }

    fn record(&mut self, record: &Record<'_>) -> Result<()> {
        for (field, offset, size) in record.shape.fields {
            let what = meaning::of_field(record, field);
            let bytes = &record.bytes[*offset..offset + size];
            self.page.bytes(record.at + wide(*offset), bytes, &what)?;
        }
        Ok(())
    }

    /// The first bytes of each storage, and of each chunk if it is compressed.
    fn blob(&mut self) -> Result<()> {
        if self.index.start == DATA_START {
            return Ok(());
        }
        self.page.heading("BLOB");
        let dtypes = self.dtypes();
        let mut end = DATA_START;
        for number in 0..self.archive.storage_count() {
            let storage = self.archive.storage(number);
            let align = 1_u64 << storage.align_log2;
            self.gap(end, storage.offset, &format!("up to storage {number}, aligned to {align}"))?;
            match &storage.packing {
                None => {
                    let dtype = dtypes.get(&number).copied();
                    self.raw(number, &storage, dtype)?;
                }
                Some(packing) => {
                    for (chunk, packed) in (0..).zip(&packing.chunks) {
                        let place = storage.stored_chunk(chunk);
                        let raw = storage.chunk(chunk);
                        let codec = if packed.is_zstd { "zstd frame" } else { "raw" };
                        let what = format!(
                            "storage {number}, chunk {chunk}: {codec}, {} bytes of {}",
                            packed.len,
                            raw.end - raw.start
                        );
                        self.part(place, &what)?;
                    }
                }
            }
            end = storage.stored_range().end;
        }
        self.gap(end, self.index.start, "up to the index, a multiple of 64")
    }

    fn raw(&mut self, number: u32, storage: &StorageReference, dtype: Option<Dtype>) -> Result<()> {
        let shown = self.read(storage.offset, LINE.min(place(storage.len)))?;
        let is_cut = wide(shown.len()) < storage.len;
        let reader = dtype.and_then(|dtype| Some((Reader::of(dtype)?, place(dtype.itemsize()))));
        let elements = reader.map(|(reader, size)| {
            let items = shown.chunks_exact(size).flat_map(|item| reader.numbers(item));
            let mut items: Vec<String> = items.map(|each| each.to_string()).collect();
            items.extend(is_cut.then(|| "…".to_owned()));
            items.join(", ")
        });
        let elements = elements.unwrap_or_else(|| format!("{} bytes", storage.len));
        self.part(storage.stored_range(), &format!("storage {number}: {elements}"))
    }

    /// Stored bytes: the first ones, and how many more there are.
    fn part(&mut self, range: Range<u64>, what: &str) -> Result<()> {
        let len = range.end - range.start;
        let shown = self.read(range.start, LINE.min(place(len)))?;
        self.page.bytes(range.start, &shown, what)?;
        let rest = range.start + wide(shown.len());
        self.page.repeated(rest, "..", range.end - rest, "the rest of it")
    }

    /// The dtype of the tensor at the start of each storage.
    fn dtypes(&self) -> BTreeMap<u32, Dtype> {
        let mut dtypes = BTreeMap::new();
        for (_, node) in self.archive.leaves() {
            let tssd_format::Node::Tensors(run) = node else { continue };
            for each in run.iter().filter(|each| each.byte_offset == 0) {
                if let Some(storage) = each.storage {
                    dtypes.entry(storage).or_insert(each.meta.dtype());
                }
            }
        }
        dtypes
    }

    /// All tables, and the root.
    fn index(&mut self) -> Result<()> {
        let start = self.index.start;
        self.page.heading(&format!("INDEX, from {start} on"));
        let names = Names::of(self);
        let tables = std::mem::take(&mut self.tables);
        let mut end = 0;
        for table in &tables {
            let what = format!("up to {}, a multiple of {}", table.name, table.align);
            self.gap(start + wide(end), start + wide(table.range.start), &what)?;
            end = table.range.end;
            match table.shape {
                Some(shape) => self.records(table, shape)?,
                None if table.range.is_empty() => {}
                None => {
                    self.page.heading(table.name);
                    self.plain(table, &names)?;
                }
            }
        }
        let root = self.root;
        let is_later = self.archive.index_bytes().len() > root + Shape::named("Root").size();
        let what = if is_later { "of a later version" } else { "up to the root, a multiple of 4" };
        self.gap(start + wide(end), start + wide(root), what)?;
        self.root_fields(&tables)?;
        self.tables = tables;
        Ok(())
    }

    fn records(&mut self, table: &Table, shape: Shape) -> Result<()> {
        let bytes = self.archive.index_bytes();
        for (number, at) in table.range.clone().step_by(table.size).enumerate() {
            self.page.heading(&format!("{}[{number}]", table.name));
            let bytes = &bytes[at..at + table.size];
            self.record(&Record { shape, at: self.index.start + wide(at), bytes })?;
        }
        Ok(())
    }

    /// A table of numbers, strings or digests.
    fn plain(&mut self, table: &Table, names: &Names) -> Result<()> {
        let (bytes, start) = (self.archive.index_bytes(), self.index.start);
        if table.name == "heap" {
            for ((offset, len), what) in &names.heap {
                let at = table.range.start + place(*offset);
                let content = &bytes[at..at + place(*len)];
                let what = format!("{offset}: {}", of_content(what, content));
                self.page.bytes(start + wide(at), content, &what)?;
            }
            return Ok(());
        }
        for (entry, at) in (0..).zip(table.range.clone().step_by(table.size)) {
            let bytes = &bytes[at..at + table.size];
            let value = number(bytes);
            let what = match table.name {
                "dims" if names.dims.iter().any(|range| range.contains(&entry)) => {
                    let (offset, len) = heap_range(value);
                    format!("{entry}: heap offset {offset}, length {len}")
                }
                // Entries of sizes may be below 0; no other is so large.
                "dims" => format!("{entry}: {}", value.cast_signed()),
                "by_key" if entry == 0 => "by_key[0]: always 0".to_owned(),
                "by_key" => format!("by_key[{entry}]: node {value}"),
                "crcs" => format!("crcs[{entry}]: {}", names.crc(entry)),
                name => format!("{name}[{entry}]: of storage {entry}"),
            };
            self.page.bytes(start + wide(at), bytes, &what)?;
        }
        Ok(())
    }

    fn root_fields(&mut self, tables: &[Table]) -> Result<()> {
        let (bytes, start) = (self.archive.index_bytes(), self.index.start);
        let shape = Shape::named("Root");
        self.page.heading(&format!("root, from {} on", start + wide(self.root)));
        for ((name, offset, size), table) in shape.fields.iter().zip(tables) {
            let field = self.root + offset;
            let at = start + wide(field);
            let target = start + wide(table.range.start);
            let count = table.range.len() / table.size;
            let what = format!("{name}: {count} at {at} - {} = {target}", at - target);
            self.page.bytes(at, &bytes[field..field + size], &what)?;
        }
        let end = self.root + shape.size();
        self.page.bytes(start + wide(end), &bytes[end..], "of a later version")
    }
}

/// What entries of the plain tables are for, as records tell.
struct Names {
    /// What lies in the heap: offset and length.
    heap: BTreeMap<(u64, u64), &'static str>,
    /// The entries of dims that are heap ranges.
    dims: Vec<Range<u64>>,
    /// The first entry of crcs of each storage.
    crcs: Vec<u64>,
}

impl Names {
    fn of(dump: &Dump<'_>) -> Self {
        let mut names = Self { heap: BTreeMap::new(), dims: Vec::new(), crcs: Vec::new() };
        let bytes = dump.archive.index_bytes();
        for table in &dump.tables {
            let Some(shape) = table.shape else { continue };
            for at in table.range.clone().step_by(table.size) {
                let record = Record { shape, at: 0, bytes: &bytes[at..at + table.size] };
                for (field, ..) in shape.fields {
                    if let Some(what) = meaning::in_heap(&record, field) {
                        names.content(record.get(field), what);
                    }
                }
                match shape.name {
                    "Slice" if record.get("names") != NONE => {
                        let first = record.get("names");
                        names.dims.push(first..first + record.get("mesh_rank"));
                    }
                    "Storage" => names.crcs.push(record.get("crcs")),
                    _ => {}
                }
            }
        }
        names.dims.sort_by_key(|range| range.start);
        names.dims.dedup();
        for entry in names.dims.clone().into_iter().flatten() {
            let dims = dump.tables.iter().find(|table| table.name == "dims");
            let at = dims.map_or(0, |dims| dims.range.start) + place(entry) * 8;
            names.content(number(&bytes[at..at + 8]), "str");
        }
        names
    }

    fn content(&mut self, range: u64, what: &'static str) {
        let (offset, len) = heap_range(range);
        if len > 0 {
            self.heap.entry((offset, len)).or_insert(what);
        }
    }

    fn crc(&self, entry: u64) -> String {
        let storage = self.crcs.partition_point(|first| *first <= entry).saturating_sub(1);
        let first = self.crcs.get(storage).copied().unwrap_or_default();
        format!("storage {storage}, chunk {}", entry - first)
    }
}

/// Content of the heap in words.
fn of_content(what: &str, content: &[u8]) -> String {
    match (what, std::str::from_utf8(content)) {
        ("str", Ok(text)) => quoted(text),
        ("str", Err(_)) => "str with surrogates".to_owned(),
        ("tuple", _) => "packed tuple".to_owned(),
        _ => what.to_owned(),
    }
}

fn wide(len: usize) -> u64 {
    u64::try_from(len).expect("usize is at most 64 bits")
}

/// Places in an index, which is in memory, and lengths of a few bytes.
fn place(number: u64) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}
