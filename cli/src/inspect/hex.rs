//! `tssd inspect --hex`: prints every byte of an archive except payload, with its meaning.
//!
//! Spec: sections 2 to 7.

mod field;
mod line_buffer;
mod record;

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use tssd_format::{Archive, Blob, ChunkCodec, DATA_START, Dtype, MANIFEST_NAME, StorageReference};

use self::record::{NONE, Record, RecordLayout, decode_le, heap_range};
use crate::document::{Document, Source};
use crate::element::ElementDecoder;
use crate::exit::Exit;
use crate::failure::{Failure, Result};
use crate::input::is_shard_set;
use crate::inspect::hex::line_buffer::{LINE_BYTES, LineBuffer};
use crate::model::Links;
use crate::value::quote;

/// Tables without records: name, and the size and alignment of an entry in bytes.
const PLAIN_TABLES: [(&str, usize, usize); 9] = [
    ("heap", 1, 1),
    ("dims", 8, 8),
    ("by_key", 4, 4),
    ("crcs", 4, 4),
    ("crc_pages", 4, 4),
    ("digests", 32, 1),
    ("subtrees", 32, 1),
    ("base", 32, 1),
    ("base_storages", 4, 4),
];

/// Prints the dump of an archive, or of the manifest of a shard set.
pub(super) fn run(path: &Path, links: Links) -> Result<Exit> {
    let path = if is_shard_set(path) { path.join(MANIFEST_NAME) } else { path.to_owned() };
    let document = Document::open_with(&path, links, None)?;
    let path = document.path();
    let Source::Archive(archive, Some(file)) = document.source() else {
        let message = format_args!("{} is no archive, and --hex explains archives", path.display());
        return Err(Failure::new(Exit::Refused, message).help("`tssd pack` makes an archive of it"));
    };
    let mut dump = Dump::new(path, &**file, archive)?;
    dump.dump_frame("HEAD", "Head", 0)?;
    let head_len = RecordLayout::for_record("Head").size();
    dump.dump_padding(to_u64(head_len), DATA_START, "up to data_start")?;
    dump.dump_blob()?;
    dump.dump_index()?;
    dump.dump_frame("TRAILER", "Trailer", dump.index.end)?;
    dump.page.flush()?;
    Ok(Exit::Ok)
}

/// A table of the index. `range` is its range of bytes in the index.
struct IndexTable {
    name: &'static str,
    shape: Option<RecordLayout>,
    /// Size of an entry, in bytes.
    size: usize,
    align: usize,
    range: Range<usize>,
}

struct Dump<'a> {
    path: &'a Path,
    file: &'a dyn Blob,
    archive: &'a Archive,
    /// Range of the index in the file, in bytes.
    index: Range<u64>,
    /// Offset of the root in the index, in bytes.
    root: usize,
    tables: Vec<IndexTable>,
    page: LineBuffer,
}

impl<'a> Dump<'a> {
    fn new(path: &'a Path, file: &'a dyn Blob, archive: &'a Archive) -> Result<Self> {
        let index = archive.index_range();
        let trailer = RecordLayout::for_record("Trailer");
        let page = LineBuffer::new(archive.file_len());
        let mut dump = Self { path, file, archive, index, root: 0, tables: Vec::new(), page };
        let bytes = dump.read(dump.index.end, trailer.size())?;
        let trailer = Record { layout: trailer, offset: dump.index.end, bytes: &bytes };
        dump.root = to_usize(trailer.get("root_off"));
        for (name, offset, _) in RecordLayout::for_record("Root").fields {
            let shape = RecordLayout::for_table(name);
            let plain = PLAIN_TABLES.iter().find(|(plain, ..)| plain == name);
            let (size, align) = match (shape, plain) {
                (Some(shape), _) => (shape.size(), shape.align()),
                (None, plain) => plain.map_or((1, 1), |(_, size, align)| (*size, *align)),
            };
            let (start, count) = dump.read_table_field(dump.root + offset);
            let range = start..start + count * size;
            dump.tables.push(IndexTable { name, shape, size, align, range });
        }
        Ok(dump)
    }

    /// Reads a field of the root: returns the offset of its table in the index, and the number of entries.
    fn read_table_field(&self, field: usize) -> (usize, usize) {
        let bytes = self.archive.index_bytes();
        let relative = u32::try_from(decode_le(&bytes[field..field + 4])).expect("four bytes");
        let relative = isize::try_from(relative.cast_signed()).expect("isize has at least 32 bits");
        let start = field.checked_add_signed(relative).expect("the index is proven");
        (start, to_usize(decode_le(&bytes[field + 4..field + 8])))
    }

    fn read(&self, at: u64, len: usize) -> Result<Vec<u8>> {
        let mut bytes = vec![0; len];
        let read = self.file.read_exact_at(&mut bytes, at);
        read.map_err(|error| Failure::io("read", self.path, error))?;
        Ok(bytes)
    }

    /// Dumps padding, which should be zeros. `tssd verify` checks that.
    fn dump_padding(&mut self, from: u64, to: u64, description: &str) -> Result<()> {
        let bytes = self.read(from, to_usize(to - from))?;
        self.page.add_bytes(from, &bytes, description)
    }

    /// Dumps the head or the trailer.
    fn dump_frame(&mut self, heading: &str, name: &str, at: u64) -> Result<()> {
        let layout = RecordLayout::for_record(name);
        let bytes = self.read(at, layout.size())?;
        self.page.add_heading(heading);
        self.dump_record(&Record { layout, offset: at, bytes: &bytes })
    }

    fn dump_record(&mut self, record: &Record<'_>) -> Result<()> {
        for (field, offset, size) in record.layout.fields {
            let description = field::describe_field(record, field);
            let bytes = &record.bytes[*offset..offset + size];
            self.page.add_bytes(record.offset + to_u64(*offset), bytes, &description)?;
        }
        Ok(())
    }

    /// Dumps the first bytes of each storage, or of each chunk of a compressed storage.
    fn dump_blob(&mut self) -> Result<()> {
        if self.index.start == DATA_START {
            return Ok(());
        }
        self.page.add_heading("BLOB");
        let dtypes = self.dtypes_by_storage();
        let mut end = DATA_START;
        for number in 0..self.archive.storage_count() {
            let storage = self.archive.storage(number);
            let align = 1_u64 << storage.align_log2;
            self.dump_padding(
                end,
                storage.offset,
                &format!("up to storage {number}, aligned to {align}"),
            )?;
            match &storage.compressed_layout {
                None => {
                    let dtype = dtypes.get(&number).copied();
                    self.dump_raw_storage(number, &storage, dtype)?;
                }
                Some(layout) => {
                    for (chunk, entry) in (0..).zip(&layout.chunks) {
                        let range = storage.stored_chunk(chunk);
                        let raw = storage.chunk(chunk);
                        let codec = match entry.codec {
                            ChunkCodec::Raw => "raw",
                            ChunkCodec::Zstd => "zstd frame",
                            ChunkCodec::Planes => "planes",
                            ChunkCodec::Delta => "delta",
                            ChunkCodec::Tiers => "tiers",
                            _ => "unknown codec",
                        };
                        let description = format!(
                            "storage {number}, chunk {chunk}: {codec}, {} bytes of {}",
                            entry.len,
                            raw.end - raw.start
                        );
                        self.dump_payload(range, &description)?;
                    }
                }
            }
            end = storage.stored_range().end;
        }
        self.dump_padding(end, self.index.start, "up to the index, a multiple of 64")
    }

    fn dump_raw_storage(
        &mut self,
        number: u32,
        storage: &StorageReference,
        dtype: Option<Dtype>,
    ) -> Result<()> {
        let preview = self.read(storage.offset, LINE_BYTES.min(to_usize(storage.len)))?;
        let is_cut = to_u64(preview.len()) < storage.len;
        let reader = dtype.and_then(|dtype| {
            Some((ElementDecoder::for_dtype(dtype)?, to_usize(dtype.itemsize())))
        });
        let elements = reader.map(|(reader, size)| {
            let items = preview.chunks_exact(size).flat_map(|item| reader.numbers(item));
            let mut items: Vec<String> = items.map(|each| each.to_string()).collect();
            items.extend(is_cut.then(|| "…".to_owned()));
            items.join(", ")
        });
        let elements = elements.unwrap_or_else(|| format!("{} bytes", storage.len));
        self.dump_payload(storage.stored_range(), &format!("storage {number}: {elements}"))
    }

    /// Dumps the first bytes of a range, and the number of the remaining bytes.
    fn dump_payload(&mut self, range: Range<u64>, description: &str) -> Result<()> {
        let len = range.end - range.start;
        let preview = self.read(range.start, LINE_BYTES.min(to_usize(len)))?;
        self.page.add_bytes(range.start, &preview, description)?;
        let rest = range.start + to_u64(preview.len());
        self.page.add_repeated(rest, "..", range.end - rest, "the rest of it")
    }

    /// Returns the dtype of the tensor at the start of each storage.
    fn dtypes_by_storage(&self) -> BTreeMap<u32, Dtype> {
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

    /// Dumps all tables, and the root.
    fn dump_index(&mut self) -> Result<()> {
        let start = self.index.start;
        self.page.add_heading(&format!("INDEX, from {start} on"));
        let uses = EntryUses::collect(self);
        let tables = std::mem::take(&mut self.tables);
        let mut end = 0;
        for table in &tables {
            let description = format!("up to {}, a multiple of {}", table.name, table.align);
            self.dump_padding(
                start + to_u64(end),
                start + to_u64(table.range.start),
                &description,
            )?;
            end = table.range.end;
            match table.shape {
                Some(shape) => self.dump_records(table, shape)?,
                None if table.range.is_empty() => {}
                None => {
                    self.page.add_heading(table.name);
                    self.dump_plain_table(table, &uses)?;
                }
            }
        }
        let root = self.root;
        let is_later =
            self.archive.index_bytes().len() > root + RecordLayout::for_record("Root").size();
        let description =
            if is_later { "of a later version" } else { "up to the root, a multiple of 4" };
        self.dump_padding(start + to_u64(end), start + to_u64(root), description)?;
        self.dump_root(&tables)?;
        self.tables = tables;
        Ok(())
    }

    fn dump_records(&mut self, table: &IndexTable, layout: RecordLayout) -> Result<()> {
        let bytes = self.archive.index_bytes();
        for (number, at) in table.range.clone().step_by(table.size).enumerate() {
            self.page.add_heading(&format!("{}[{number}]", table.name));
            let bytes = &bytes[at..at + table.size];
            self.dump_record(&Record { layout, offset: self.index.start + to_u64(at), bytes })?;
        }
        Ok(())
    }

    /// Dumps a table of numbers, strings or digests.
    fn dump_plain_table(&mut self, table: &IndexTable, uses: &EntryUses) -> Result<()> {
        let (bytes, start) = (self.archive.index_bytes(), self.index.start);
        if table.name == "heap" {
            for ((offset, len), kind) in &uses.heap {
                let at = table.range.start + to_usize(*offset);
                let content = &bytes[at..at + to_usize(*len)];
                let description = format!("{offset}: {}", describe_content(kind, content));
                self.page.add_bytes(start + to_u64(at), content, &description)?;
            }
            return Ok(());
        }
        for (entry, at) in (0..).zip(table.range.clone().step_by(table.size)) {
            let bytes = &bytes[at..at + table.size];
            let value = decode_le(bytes);
            let description = match table.name {
                "dims" if uses.dims.iter().any(|range| range.contains(&entry)) => {
                    let (offset, len) = heap_range(value);
                    format!("{entry}: heap offset {offset}, length {len}")
                }
                // Entries of sizes may be negative. Other entries never exceed the range of `i64`.
                "dims" => format!("{entry}: {}", value.cast_signed()),
                "by_key" if entry == 0 => "by_key[0]: always 0".to_owned(),
                "by_key" => format!("by_key[{entry}]: node {value}"),
                "crcs" => format!("crcs[{entry}]: {}", uses.describe_crc(entry)),
                "crc_pages" => {
                    format!("crc_pages[{entry}]: of entries of crcs from {} on", 1024 * entry)
                }
                "base" => "content digest of the base".to_owned(),
                "base_storages" if value == u64::from(u32::MAX) => {
                    format!("base_storages[{entry}]: NONE, storage {entry} is no delta storage")
                }
                "base_storages" => format!("base_storages[{entry}]: base storage {value}"),
                name => format!("{name}[{entry}]: of storage {entry}"),
            };
            self.page.add_bytes(start + to_u64(at), bytes, &description)?;
        }
        Ok(())
    }

    fn dump_root(&mut self, tables: &[IndexTable]) -> Result<()> {
        let (bytes, start) = (self.archive.index_bytes(), self.index.start);
        let shape = RecordLayout::for_record("Root");
        self.page.add_heading(&format!("root, from {} on", start + to_u64(self.root)));
        for ((name, offset, size), table) in shape.fields.iter().zip(tables) {
            let field = self.root + offset;
            let at = start + to_u64(field);
            let target = start + to_u64(table.range.start);
            let count = table.range.len() / table.size;
            let description = format!("{name}: {count} at {at} - {} = {target}", at - target);
            self.page.add_bytes(at, &bytes[field..field + size], &description)?;
        }
        let end = self.root + shape.size();
        self.page.add_bytes(start + to_u64(end), &bytes[end..], "of a later version")
    }
}

/// Uses of the entries of plain tables, collected from the records.
struct EntryUses {
    /// Kind of each heap range, by offset and length.
    heap: BTreeMap<(u64, u64), &'static str>,
    /// Entries of `dims` that are heap ranges.
    dims: Vec<Range<u64>>,
    /// First entry of each storage in `crcs`.
    crcs: Vec<u64>,
}

impl EntryUses {
    fn collect(dump: &Dump<'_>) -> Self {
        let mut uses = Self { heap: BTreeMap::new(), dims: Vec::new(), crcs: Vec::new() };
        let bytes = dump.archive.index_bytes();
        for table in &dump.tables {
            let Some(shape) = table.shape else { continue };
            for at in table.range.clone().step_by(table.size) {
                let record =
                    Record { layout: shape, offset: 0, bytes: &bytes[at..at + table.size] };
                for (field, ..) in shape.fields {
                    if let Some(kind) = field::heap_kind(&record, field) {
                        uses.add_heap_range(record.get(field), kind);
                    }
                }
                match shape.name {
                    "Slice" if record.get("names") != NONE => {
                        let first = record.get("names");
                        uses.dims.push(first..first + record.get("mesh_rank"));
                    }
                    "Storage" => uses.crcs.push(record.get("crcs")),
                    _ => {}
                }
            }
        }
        uses.dims.sort_by_key(|range| range.start);
        uses.dims.dedup();
        for entry in uses.dims.clone().into_iter().flatten() {
            let dims = dump.tables.iter().find(|table| table.name == "dims");
            let at = dims.map_or(0, |dims| dims.range.start) + to_usize(entry) * 8;
            uses.add_heap_range(decode_le(&bytes[at..at + 8]), "str");
        }
        uses
    }

    fn add_heap_range(&mut self, range: u64, kind: &'static str) {
        let (offset, len) = heap_range(range);
        if len > 0 {
            self.heap.entry((offset, len)).or_insert(kind);
        }
    }

    fn describe_crc(&self, entry: u64) -> String {
        let storage = self.crcs.partition_point(|first| *first <= entry).saturating_sub(1);
        let first = self.crcs.get(storage).copied().unwrap_or_default();
        format!("storage {storage}, chunk {}", entry - first)
    }
}

/// Describes the content of a heap range.
fn describe_content(kind: &str, content: &[u8]) -> String {
    match (kind, std::str::from_utf8(content)) {
        ("str", Ok(text)) => quote(text),
        ("str", Err(_)) => "str with surrogates".to_owned(),
        ("tuple", _) => "packed tuple".to_owned(),
        _ => kind.to_owned(),
    }
}

fn to_u64(len: usize) -> u64 {
    u64::try_from(len).expect("usize is at most 64 bits")
}

/// Converts an offset in the index, which is in memory, or the length of a few bytes.
fn to_usize(number: u64) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}
