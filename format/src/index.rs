//! The index of an archive: validated tables, and access to their contents.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};

use bytes::Bytes;

use crate::checksum::checksum;
use crate::chunk::ChunkSize;
use crate::chunk_codec::ChunkCodec;
use crate::convert::{index_to_usize, to_usize};
use crate::decode::{decode_node, decode_value};
use crate::digest::Digest;
use crate::encode::{AttrValue, Attrs};
use crate::error::{Error, ErrorKind, Result};
use crate::frame::IndexLocation;
use crate::key::ObjectPath;
use crate::record::{self, DELTA_STORAGE, NONE, STORED_FLAG, kind};
use crate::shard_file::{CrcTable, OtherStorage, ShardFile};
use crate::state_dict::Value;
use crate::storage::{ChunkLocation, CompressedLayout, StorageReference};
use crate::structure::Node;
use crate::table::{self, TableMap};
use crate::table_views::TableViews;
use crate::validate::validate;

/// The validated tables of one archive: every rule of the spec up to F-082 holds.
#[derive(Debug)]
pub(crate) struct Index {
    /// Aligned for the records, and immutable.
    bytes: Bytes,
    map: TableMap,
    location: IndexLocation,
    /// For each storage the path of the first leaf in it; computed when the first error needs it.
    first_leaves: OnceLock<Vec<ObjectPath>>,
}

impl Index {
    /// Validates an index, given its location from the trailer.
    pub(crate) fn parse(bytes: Bytes, location: IndexLocation) -> Result<Self> {
        if checksum(&bytes) != location.index_crc32 {
            return Err(Error::new(ErrorKind::IndexCorrupt).with_offset(location.index_off));
        }
        let size = |len: u32| usize::try_from(len).unwrap_or(usize::MAX);
        let root = size(location.root_off)
            ..size(location.root_off).saturating_add(size(location.root_len));
        let map = table::map(&bytes, root)?;
        validate(&map.views(&bytes), location.index_off)?;
        Ok(Self { bytes, map, location, first_leaves: OnceLock::new() })
    }

    pub(crate) fn views(&self) -> TableViews<'_> {
        self.map.views(&self.bytes)
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    pub(crate) fn location(&self) -> IndexLocation {
        self.location
    }

    /// Returns the whole tree.
    pub(crate) fn structure(&self) -> Node {
        self.node(&self.views(), 0)
    }

    /// Returns for each storage the path of the first leaf in it.
    ///
    /// Computed once for all errors, because a damaged file may cause an error for each storage.
    pub(crate) fn first_leaves(&self) -> &[ObjectPath] {
        self.first_leaves.get_or_init(|| {
            let mut first = vec![None; self.storages().len()];
            for (path, node) in self.structure().into_leaves() {
                for number in node.storages() {
                    first[index_to_usize(number)].get_or_insert_with(|| path.clone());
                }
            }
            // Validated (F-062): a leaf refers to each storage.
            first.into_iter().map(Option::unwrap_or_default).collect()
        })
    }

    /// Returns the subtree of a node; `views` must be the views of this index.
    pub(crate) fn node(&self, views: &TableViews<'_>, number: usize) -> Node {
        decode_node(views, self.bytes.slice(self.map.heap.clone()), number)
    }

    /// Does the same as [`Index::node`], but reads the bytes of each referenced storage through `storage`.
    pub(crate) fn value(
        &self,
        views: &TableViews<'_>,
        number: usize,
        storage: &mut impl FnMut(u32) -> Result<Bytes>,
    ) -> Result<Value> {
        decode_value(views, self.bytes.slice(self.map.heap.clone()), number, storage)
    }

    fn storages(&self) -> &[record::Storage] {
        table::records(&self.bytes, &self.map.storages)
    }

    pub(crate) fn storage_count(&self) -> u32 {
        u32::try_from(self.storages().len()).expect("tables have fewer than 2^32 records")
    }

    /// Returns a storage by number.
    pub(crate) fn storage(&self, number: u32) -> StorageReference {
        let views = self.views();
        let storage = &views.storages[index_to_usize(number)];
        let first = index_to_usize(storage.crcs.to_native());
        let len = storage.raw_len.to_native();
        let chunk_size = chunk_size(storage);
        let count = usize::try_from(chunk_size.count(len)).expect("proven to be in crcs");
        let compressed_layout = (storage.codec != 0).then(|| {
            let first = index_to_usize(storage.chunks.to_native());
            let chunk = |chunk: &record::Chunk| ChunkLocation {
                offset: chunk.offset.to_native(),
                len: chunk.stored_len.to_native(),
                codec: ChunkCodec::from_number(chunk.codec.to_native())
                    .expect("proven to be known"),
            };
            let chunks = views.chunks[first..first + count].iter().map(chunk).collect();
            CompressedLayout { width: storage.width, chunks }
        });
        let base = views.base_storages.get(index_to_usize(number)).map(|base| base.to_native());
        StorageReference {
            offset: storage.offset.to_native(),
            len,
            crc32: storage.crc32.to_native(),
            chunk_size,
            crcs: views.crcs[first..first + count].iter().map(|crc| crc.to_native()).collect(),
            align_log2: storage.align_log2,
            shard: storage.shard.to_native(),
            compressed_layout,
            base: base.filter(|base| *base != NONE),
            digest: views.digests.get(index_to_usize(number)).copied(),
        }
    }

    /// Returns the chaining values of the chunks of a storage; none if it has one chunk or no digest.
    pub(crate) fn subtrees(&self, number: u32) -> &[Digest] {
        let views = self.views();
        let storage = &views.storages[index_to_usize(number)];
        if storage.subtrees == NONE {
            return &[];
        }
        let first = index_to_usize(storage.subtrees.to_native());
        let count = chunk_size(storage).count(storage.raw_len.to_native());
        &views.subtrees[first..first + to_usize(count)]
    }

    /// Returns the content digest of the base; `None` if the file is no delta.
    pub(crate) fn base(&self) -> Option<Digest> {
        self.views().base.first().copied()
    }

    pub(crate) fn is_delta_storage(&self, number: u32) -> bool {
        self.storages()[index_to_usize(number)].codec == DELTA_STORAGE
    }

    /// Returns location and checksum of the checksum table.
    pub(crate) fn crc_table(&self) -> CrcTable {
        let offset = self.map.crcs.start;
        let views = self.views();
        CrcTable {
            offset: u32::try_from(offset).expect("an index has at most 2^30 bytes"),
            len: u32::try_from(views.crcs.len()).expect("an index has at most 2^30 bytes"),
            pages_crc32: checksum(bytemuck::cast_slice(views.crc_pages)),
        }
    }

    /// Returns the number of raw bytes of a storage.
    pub(crate) fn storage_len(&self, number: u32) -> u64 {
        self.storages()[index_to_usize(number)].raw_len.to_native()
    }

    /// Returns shard and offset (in bytes) of a storage that is not compressed.
    pub(crate) fn raw_location(&self, number: u32) -> Option<(u32, u64)> {
        let storage = &self.storages()[index_to_usize(number)];
        (storage.codec == 0).then(|| (storage.shard.to_native(), storage.offset.to_native()))
    }

    /// Returns the numbers of the storages that hold the content of a `str` leaf.
    pub(crate) fn str_storages(&self) -> Vec<u32> {
        let nodes = self.views().nodes.iter();
        let texts = nodes.filter(|node| node.kind == kind::STR && node.flags == STORED_FLAG);
        texts
            .map(|node| u32::try_from(node.a.to_native()).expect("proven to be in storages"))
            .collect()
    }

    pub(crate) fn attrs(&self) -> Attrs {
        let views = self.views();
        let attr = |attr: &record::Attr| {
            let value = attr.value.to_native();
            let value = match attr.kind {
                kind::INT => AttrValue::Int(value.cast_signed()),
                kind::STR => AttrValue::Text(views.text(value)),
                _ => AttrValue::Bytes(views.validated_heap(value).into()),
            };
            (views.text(attr.name.to_native()).to_string(), value)
        };
        views.attrs.iter().map(attr).collect()
    }

    pub(crate) fn shards(&self) -> Vec<ShardFile> {
        let views = self.views();
        // Many shards have the same other storages.
        let mut others = BTreeMap::new();
        let shard = |shard: &record::Shard| ShardFile {
            name: views.text(shard.name.to_native()).to_string(),
            file_len: shard.file_len.to_native(),
            index_off: shard.index_off.to_native(),
            index_crc32: shard.index_crc32.to_native(),
            writer: shard.writer.to_native(),
            digest: (shard.digest != [0; 32]).then_some(shard.digest),
            crcs: CrcTable {
                offset: shard.crcs_off.to_native(),
                len: shard.crcs_len.to_native(),
                pages_crc32: shard.pages_crc32.to_native(),
            },
            others: (shard.others != NONE).then(|| {
                let first = (shard.others.to_native(), shard.other_count.to_native());
                others.entry(first).or_insert_with(|| other_storages(&views, first)).clone()
            }),
        };
        views.shards.iter().map(shard).collect()
    }
}

/// Returns the other storages of a shard, given the first record and the number of records.
fn other_storages(views: &TableViews<'_>, (first, count): (u32, u32)) -> Arc<[OtherStorage]> {
    let other = |record: &record::Other| OtherStorage {
        position: record.position.to_native(),
        stored_len: record.stored_len.to_native(),
        crcs: record.crcs.to_native(),
    };
    let first = index_to_usize(first);
    views.others[first..first + index_to_usize(count)].iter().map(other).collect()
}

fn chunk_size(storage: &record::Storage) -> ChunkSize {
    ChunkSize::from_record(storage.chunk_log2, storage.codec).expect("proven to be one")
}
