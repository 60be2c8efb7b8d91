//! The TSSD format: a nested, sharded PyTorch state dict as one flat, checksummed, zero-copy archive.
//!
//! This crate converts a [`StateDict`] to bytes and bytes to a [`StateDict`]. It uses no sockets, threads or clocks.
//! Parallel work is returned as independent jobs ([`Layout::jobs`], [`Archive::verify_jobs`]), which the caller runs
//! on its own threads. `spec/format.md` specifies the bytes. An error names the broken rule and its location.
//!
//! ```
//! use tssd_format::{Archive, Dict, StateDict, Tensor, TorchStoreStateDict, Value};
//!
//! let mut dict = StateDict::ordered();
//! dict.insert("layer.weight", Tensor::from_slice(&[1.0_f32, -0.0, 2.5, 4.0], &[2, 2])?);
//! dict.insert("optimizer", Dict::from_iter([(0_i64, Value::from(1000_i64))])); // int keys stay ints
//!
//! let encoded = TorchStoreStateDict::from_state_dict(&dict)?;
//! let archive = Archive::from_bytes(encoded.as_bytes().clone())?; // validates the index
//! archive.verify()?; // verifies the payload
//! assert_eq!(archive.tensor("layer.weight")?.view().as_slice::<f32>()?, [1.0, -0.0, 2.5, 4.0]);
//! assert_eq!(archive.to_state_dict()?, dict);
//! # Ok::<(), tssd_format::Error>(())
//! ```
#![cfg_attr(docsrs, feature(doc_cfg))]

#[cfg(target_endian = "big")]
compile_error!(
    "tensors are little-endian in files and in memory; big-endian hosts need a swap that is not written yet"
);

// Values.
mod chunk;
mod chunk_codec;
mod class_tag;
mod content_digest;
mod convert;
mod dtype;
mod iso_time;
mod key;
mod number;
mod state_dict;
mod text;

// Tensors and shards.
mod held_indices;
mod held_parts;
mod mesh;
mod placement;
mod region;
mod runs;
mod shape;
mod shard;
mod slice;
mod storage;
mod tensor;

// Memory: allocation, copies, checksums.
mod checksum;
mod copy;
mod element;
mod isa;
mod memory;
mod prefetch;

// The structure of a file.
mod frame;
mod record;
mod reference;
mod shard_file;
mod structure;
mod table;

// Writers.
mod codec;
mod codec_choice;
mod compress;
mod delta;
mod delta_draft;
mod digest;
mod distribute;
mod distributed;
mod encode;
mod expand;
mod finite;
mod layout;
mod options;
mod plane_blocks;
mod planes;
mod storage_allocator;
mod storage_tables;
#[cfg(test)]
mod test_bytes;
mod tiers;
mod write_job;
mod writer;

// Readers.
mod archive;
mod blob;
mod cast;
mod crc_table;
mod decode;
mod index;
#[cfg(feature = "json")]
mod json;
mod lookup;
#[cfg(feature = "mmap")]
mod mmap;
mod shard_set;
mod table_views;
mod torchstore_state_dict;
mod validate;
mod verify;

// Other file formats.
#[cfg(feature = "safetensors")]
pub mod safetensors;

mod abridge;
mod error;

pub use abridge::{abridge, abridge_name};
pub use archive::Archive;
pub use blob::Blob;
pub use cast::Cast;
pub use checksum::checksum;
pub use chunk::{ChunkPolicy, ChunkSize, MAX_CHUNK_BYTES};
pub use chunk_codec::{ChunkCodec, ChunkDecoder, StorageCodec};
pub use class_tag::{ClassTag, TaggedClass};
pub use compress::{CompressJob, CompressedChunks};
pub use content_digest::STORE_ATTR_PREFIX;
pub use copy::{copy, copy_and_checksum, copy_chunks, copy_runs};
pub use delta::{
    Change, ChangeCount, DeltaClasses, DeltaDecoder, DeltaEncoder, DeltaFolder, DeltaOptions,
    EncodedDelta,
};
pub use delta_draft::{DeltaChunks, DeltaDraft, DeltaJob};
pub use digest::Digest;
pub use distribute::ManifestContent;
pub use distributed::{DistributedGroups, DistributedTensor, HeldStorage, HeldStorages};
pub use dtype::{Dtype, DtypeClass, OtherDtype};
pub use element::ElementWidth;
pub use encode::{AttrValue, Attrs};
pub use error::{Error, ErrorKind, Result};
pub use frame::DATA_START;
pub use held_parts::{HeldPart, PartRepeat, held_parts, local_shape_of};
#[cfg(feature = "json")]
pub use json::{to_json, to_json_without_elements};
pub use key::{MapKey, ObjectPath, Step};
pub use layout::{Draft, Layout, encode_manifest};
pub use memory::zeroed;
pub use mesh::DeviceMesh;
#[cfg(feature = "mmap")]
pub use mmap::{Mmap, map_file};
pub use number::{Float, Int};
pub use options::{Compression, FILES_KEY, Options, PACKED_FILES_ATTR, ZSTD_LEVEL_ATTR};
pub use placement::Placement;
pub use planes::PlanesEncoder;
pub use record::INLINE_MAX_BYTES;
pub use reference::TensorReference;
pub use region::Region;
pub use runs::{Loop, Runs};
pub use shape::{MAX_RANK, numel, row_major_strides};
pub use shard::{Shard, ShardSpec};
pub use shard_file::{CrcTable, OtherStorage, ShardFile};
pub use shard_set::{MANIFEST_NAME, open_shard_set};
pub use slice::TensorSlice;
pub use state_dict::{Dict, MAX_DEPTH, StateDict, Value};
pub use storage::{ChunkLocation, CompressedLayout, RangeDecoder, StorageReference};
pub use structure::{Container, ContentKind, Node};
pub use tensor::{Element, Storage, Tensor, TensorFlags, TensorMeta, TensorView};
pub use text::Text;
pub use torchstore_state_dict::{FlatLeaf, TorchStoreStateDict};
pub use verify::VerifyJob;
pub use write_job::{JobChecksums, Piece, WriteJob};
pub use writer::ArchiveWriter;

/// Returns the records of the format: name, offset and size of each field.
///
/// Names are those of `spec/format.md`, so that a test can compare the two.
#[doc(hidden)]
#[expect(clippy::type_complexity, reason = "a table of tables")]
pub fn record_tables() -> Vec<(&'static str, &'static [(&'static str, usize, usize)])> {
    frame::FRAMES.iter().chain(table::RECORDS).copied().collect()
}
