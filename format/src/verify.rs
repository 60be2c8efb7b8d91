//! Proving the payload: stored bytes, padding, what compressed bytes decode to. Spec: section 8.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use crate::archive::Archive;
use crate::blob::Blob;
use crate::chunk::ChunkSize;
use crate::digest::{self, ChunkHasher};
use crate::encode::ShardFile;
use crate::error::{Error, ErrorKind, Result};
use crate::fill::length;
use crate::frame::DATA_START;
use crate::seal::combine;
use crate::storage::StorageReference;
use crate::text::is_text;
use crate::views::native;

impl Archive {
    /// Proves the payload: every stored byte and every byte of padding, and that texts are texts.
    ///
    /// # Errors
    ///
    /// `ChunkCorrupt`, `StorageCorrupt`, `PaddingNotZero`, `NotText` with the byte offset and a leaf
    /// that is hurt; `Io` if the file cannot be read.
    pub fn verify(&self) -> Result<()> {
        self.verify_jobs().iter().try_for_each(Verify::run)
    }

    /// As [`Archive::verify`], and proves what the stored bytes mean: that compressed chunks decode,
    /// to bytes with the right checksum, and that all digests match.
    ///
    /// # Errors
    ///
    /// As [`Archive::verify`]; `FrameCorrupt`, `DigestMismatch`; `FeatureMissing` in a build without
    /// zstd.
    pub fn verify_deep(&self) -> Result<()> {
        self.verify()?;
        self.decode_jobs().iter().try_for_each(Verify::run)
    }

    /// The jobs that together are [`Archive::verify`], independent of each other. Those of
    /// a manifest that was opened alone read nothing: its payload lies in other archives.
    pub fn verify_jobs(&self) -> Vec<Verify<'_>> {
        let storages = self.storages();
        let is_alone = self.is_manifest_alone();
        let owns_blob = self.shards().is_empty();
        let mut parts = Vec::new();
        if !is_alone {
            parts.extend(self.text_parts(&storages, false));
        }
        let mut end = DATA_START;
        for (number, storage) in (0..).zip(&storages) {
            let check = |check| Part::Storage(number, storage.clone(), check);
            if owns_blob {
                parts.push(Part::Padding(end..storage.offset));
            }
            end = storage.stored_range().end;
            if storage.packing.is_none() {
                parts.push(check(Check::Checksum));
            }
            let chunks = storage.chunks(&(0..storage.len)).filter(|_| !is_alone);
            parts.extend(chunks.map(|chunk| check(Check::Chunk(chunk))));
        }
        if owns_blob && !storages.is_empty() {
            parts.push(Part::Padding(end..self.index_range().start));
        }
        if !owns_blob && !is_alone {
            parts.extend(self.shard_parts(&storages, Depth::Stored));
        }
        self.jobs(parts)
    }

    /// The jobs that [`Archive::verify_deep`] has besides, independent of each other.
    pub fn decode_jobs(&self) -> Vec<Verify<'_>> {
        if self.is_manifest_alone() {
            return Vec::new();
        }
        let storages = self.storages();
        let mut parts: Vec<Part> = self.text_parts(&storages, true).collect();
        let meant = (0..).zip(&storages);
        let meant = meant.filter(|(_, each)| each.packing.is_some() || each.digest.is_some());
        parts.extend(
            meant.map(|(number, each)| Part::Storage(number, each.clone(), Check::Meaning)),
        );
        parts.extend(self.shard_parts(&storages, Depth::Decoded));
        self.jobs(parts)
    }

    fn jobs(&self, parts: Vec<Part>) -> Vec<Verify<'_>> {
        parts.into_iter().map(|part| Verify { archive: self, part }).collect()
    }

    fn storages(&self) -> Vec<Arc<StorageReference>> {
        (0..self.storage_count()).map(|number| Arc::new(self.storage(number))).collect()
    }

    /// One part for each storage that holds a str, of those that are compressed or of those that are not.
    fn text_parts(
        &self,
        storages: &[Arc<StorageReference>],
        are_packed: bool,
    ) -> impl Iterator<Item = Part> {
        let texts = self.stored_texts(are_packed).into_iter();
        texts.map(|number| Part::Storage(number, storages[native(number)].clone(), Check::Text))
    }

    /// One part for each archive of a shard set.
    fn shard_parts(
        &self,
        storages: &[Arc<StorageReference>],
        depth: Depth,
    ) -> impl Iterator<Item = Part> {
        // Proven: they are sorted by shard.
        let mut rest = storages;
        (0..).zip(self.shards()).map(move |(number, file)| {
            let (own, others) = rest.split_at(rest.partition_point(|each| each.shard <= number));
            rest = others;
            Part::Shard(number, file, own.to_vec(), depth)
        })
    }
}

/// One job of [`Archive::verify_jobs`] or [`Archive::decode_jobs`].
#[derive(Debug)]
pub struct Verify<'a> {
    archive: &'a Archive,
    part: Part,
}

#[derive(Debug)]
enum Part {
    /// Bytes of the blob between or behind storages, which must be zero.
    Padding(Range<u64>),
    /// A storage, by its number.
    Storage(u32, Arc<StorageReference>, Check),
    /// An archive of a shard set, which must have these storages: its index, and what of its blob the
    /// manifest does not name.
    Shard(u32, ShardFile, Vec<Arc<StorageReference>>, Depth),
}

/// What is proven of a storage.
#[derive(Clone, Copy, Debug)]
enum Check {
    /// A stored chunk.
    Chunk(u64),
    /// The checksum of a raw storage against those of its chunks: no payload at all.
    Checksum,
    /// That the storage, which is a str, is text.
    Text,
    /// The raw bytes: that they can be decoded, their checksum and their digest.
    Meaning,
}

/// Whether bytes are proven as they are stored, or what they decode to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Depth {
    Stored,
    Decoded,
}

impl Verify<'_> {
    /// How many bytes of the file the job reads.
    pub fn len(&self) -> u64 {
        let range = match &self.part {
            Part::Padding(range) => range.clone(),
            Part::Storage(_, storage, Check::Chunk(chunk)) => storage.stored_chunk(*chunk),
            Part::Storage(_, _, Check::Checksum) => 0..0,
            Part::Storage(_, storage, Check::Text | Check::Meaning) => storage.stored_range(),
            // Its index, and little more.
            Part::Shard(_, file, ..) => 0..file.index_len(),
        };
        range.end - range.start
    }

    /// True if the job reads nothing.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Proves its part.
    ///
    /// # Errors
    ///
    /// As [`Archive::verify_deep`].
    pub fn run(&self) -> Result<()> {
        match &self.part {
            Part::Padding(range) => prove_padding(self.archive, range),
            Part::Storage(number, storage, check) => {
                prove_storage(self.archive, *number, storage, *check).map_err(|error| {
                    let at = error.offset().unwrap_or(storage.offset);
                    error.at(self.archive.leaf_in(*number)).byte(at)
                })
            }
            Part::Shard(number, file, storages, depth) => {
                prove_shard(self.archive.blob(*number), storages, *depth)
                    .map_err(|error| error.at(&file.name))
            }
        }
    }
}

fn prove_padding(archive: &Archive, range: &Range<u64>) -> Result<()> {
    let bytes = archive.read(0, range.clone())?;
    let Some(at) = bytes.iter().position(|byte| *byte != 0) else { return Ok(()) };
    Err(Error::new(ErrorKind::PaddingNotZero).byte(range.start + length(&bytes[..at])))
}

fn prove_storage(
    archive: &Archive,
    number: u32,
    storage: &StorageReference,
    check: Check,
) -> Result<()> {
    match check {
        Check::Chunk(chunk) => {
            let place = storage.stored_chunk(chunk);
            let crc = archive.crc_of(storage.shard, place.clone())?;
            storage.prove_chunk(chunk, crc).map_err(|error| error.byte(place.start))
        }
        Check::Checksum => {
            check_crc(storage, combine(extent(storage), storage.crcs.iter().copied()))
        }
        Check::Text if is_text(&archive.storage_bytes(number)?) => Ok(()),
        Check::Text => Err(Error::new(ErrorKind::NotText)),
        Check::Meaning => {
            let mut crc = crc32fast::Hasher::new();
            let mut digests = Vec::new();
            archive.each_chunk(storage, |chunk, raw| {
                crc.update(raw);
                let mut hasher = ChunkHasher::new(chunk, extent(storage));
                hasher.update(raw);
                digests.push(hasher.finish());
            })?;
            check_crc(storage, crc.finalize())?;
            let digest = digest::merge(extent(storage), &digests);
            match storage.digest {
                Some(recorded) if recorded != digest => Err(Error::new(ErrorKind::DigestMismatch)),
                _ => Ok(()),
            }
        }
    }
}

/// How many raw bytes it has, and how they are cut.
fn extent(storage: &StorageReference) -> (u64, ChunkSize) {
    (storage.len, storage.chunk_size)
}

fn check_crc(storage: &StorageReference, crc: u32) -> Result<()> {
    if crc == storage.crc32 { Ok(()) } else { Err(Error::new(ErrorKind::StorageCorrupt)) }
}

/// Proves the index of an archive of a shard set, that it has the storages that the manifest says, and the
/// rest of its blob.
fn prove_shard(blob: &Arc<dyn Blob>, named: &[Arc<StorageReference>], depth: Depth) -> Result<()> {
    let archive = Archive::from_blob(blob.clone())?;
    let by_offset: BTreeMap<u64, &StorageReference> =
        named.iter().map(|storage| (storage.offset, &**storage)).collect();
    let mut found = 0;
    let jobs = match depth {
        Depth::Stored => archive.verify_jobs(),
        Depth::Decoded => archive.decode_jobs(),
    };
    for job in jobs {
        let is_named = match &job.part {
            Part::Storage(_, own, check) => by_offset
                .get(&own.offset)
                .filter(|named| named.same_bytes(own))
                .is_some_and(|named| match check {
                    Check::Chunk(_) => true,
                    Check::Meaning => named.digest == own.digest || own.digest.is_none(),
                    // What is a str here need not be one in the manifest.
                    Check::Text | Check::Checksum => false,
                }),
            Part::Padding(_) | Part::Shard(..) => false,
        };
        // What the manifest names is proven by jobs of its own, but for a digest that it leaves out.
        if !is_named {
            job.run()?;
        }
    }
    for number in 0..archive.storage_count() {
        let own = archive.storage(number);
        found +=
            usize::from(by_offset.get(&own.offset).is_some_and(|named| named.same_bytes(&own)));
    }
    if found == named.len() {
        return Ok(());
    }
    Err(Error::new(ErrorKind::ShardMismatch).note("it has other storages than the manifest says"))
}
