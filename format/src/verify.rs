//! Verification of the payload: stored bytes, padding and decoded bytes. Spec: section 8.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use crate::archive::Archive;
use crate::blob::Blob;
use crate::checksum::combine_crcs;
use crate::convert::index_to_usize;
use crate::digest::{self, Digest};
use crate::distributed::DistributedGroups;
use crate::error::{Error, ErrorKind, Result};
use crate::frame::DATA_START;
use crate::shard_file::ShardFile;
use crate::storage::StorageReference;
use crate::text::is_text;
use crate::write_job::length;

impl Archive {
    /// Verifies every stored byte, every byte of padding, and the texts in uncompressed storages.
    ///
    /// # Errors
    ///
    /// - `ChunkCorrupt`, `StorageCorrupt`, `PaddingNotZero` and `ContentNotText`, with the byte offset and, for
    ///   a storage, an affected leaf.
    /// - `ShardMismatch` (F-083), and the errors of opening an archive, if an archive of a shard set does
    ///   not match the manifest.
    /// - `Io` if the file cannot be read.
    pub fn verify(&self) -> Result<()> {
        self.verify_jobs().iter().try_for_each(VerifyJob::run)
    }

    /// Verifies the payload like [`Archive::verify`], and the decoded bytes and digests of all storages.
    ///
    /// Of a delta without its base, the chunks of delta storages are checked, but not what they decode to.
    ///
    /// All compressed chunks must decode to bytes with the recorded checksum, and all digests must
    /// match.
    ///
    /// # Errors
    ///
    /// - The errors of [`Archive::verify`].
    /// - `FrameCorrupt`, `PlaneLengths` or `DeltaChunk` if a chunk does not decode, `DigestMismatch` if a digest does not
    ///   match.
    /// - `DeltaMismatch` if a delta chunk does not fit the base.
    /// - `FeatureMissing` for compressed storages in a build without zstd.
    pub fn verify_deep(&self) -> Result<()> {
        self.verify()?;
        self.deep_verify_jobs().iter().try_for_each(VerifyJob::run)
    }

    /// Returns the independent jobs that together do the work of [`Archive::verify`].
    ///
    /// The jobs of a manifest that was opened alone read nothing, because its payload is in other
    /// archives.
    pub fn verify_jobs(&self) -> Vec<VerifyJob<'_>> {
        let storages = self.storages();
        let is_alone = self.is_manifest_only();
        let owns_blob = self.shards().is_empty();
        let mut targets = Vec::new();
        if !is_alone {
            targets.extend(self.text_targets(&storages, false));
        }
        let mut end = DATA_START;
        for (number, storage) in (0..).zip(&storages) {
            let check = |check| Target::Storage(number, storage.clone(), check);
            if owns_blob {
                targets.push(Target::Padding(end..storage.offset));
            }
            end = storage.stored_range().end;
            if storage.compressed_layout.is_none() {
                targets.push(check(Check::Checksum));
            }
            if !self.subtrees(number).is_empty() {
                targets.push(check(Check::Subtrees));
            }
            let chunks = storage.chunks(&(0..storage.len)).filter(|_| !is_alone);
            targets.extend(chunks.map(|chunk| check(Check::Chunk(chunk))));
        }
        if owns_blob && !storages.is_empty() {
            targets.push(Target::Padding(end..self.index_range().start));
        }
        if !owns_blob && !is_alone {
            targets.extend(self.shard_targets(&storages, Depth::Stored));
        }
        self.jobs(targets)
    }

    /// Returns the independent jobs that [`Archive::verify_deep`] runs after those of [`Archive::verify`].
    pub fn deep_verify_jobs(&self) -> Vec<VerifyJob<'_>> {
        if self.is_manifest_only() {
            return Vec::new();
        }
        let storages = self.storages();
        let mut targets: Vec<Target> = self.text_targets(&storages, true).collect();
        let decodable = (0..).zip(&storages);
        let decodable =
            decodable.filter(|(_, each)| each.compressed_layout.is_some() || each.digest.is_some());
        targets.extend(decodable.map(|(number, each)| {
            let check = if self.can_read(number) { Check::Decoded } else { Check::Delta };
            Target::Storage(number, each.clone(), check)
        }));
        targets.extend(self.shard_targets(&storages, Depth::Decoded));
        self.jobs(targets)
    }

    fn jobs(&self, targets: Vec<Target>) -> Vec<VerifyJob<'_>> {
        targets.into_iter().map(|target| VerifyJob { archive: self, target }).collect()
    }

    fn storages(&self) -> Vec<Arc<StorageReference>> {
        (0..self.storage_count()).map(|number| Arc::new(self.storage(number))).collect()
    }

    /// Returns one target for each str storage that is compressed, or for each one that is not.
    fn text_targets(
        &self,
        storages: &[Arc<StorageReference>],
        are_compressed: bool,
    ) -> impl Iterator<Item = Target> {
        let texts = self.str_storages(are_compressed).into_iter();
        texts.filter(|number| self.can_read(*number)).map(|number| {
            Target::Storage(number, storages[index_to_usize(number)].clone(), Check::Text)
        })
    }

    /// Returns one target for each archive of a shard set.
    fn shard_targets(
        &self,
        storages: &[Arc<StorageReference>],
        depth: Depth,
    ) -> impl Iterator<Item = Target> {
        // The validator has checked that storages are sorted by shard.
        let mut remaining = storages;
        (0..).zip(self.shards()).map(move |(number, file)| {
            let (own, tail) =
                remaining.split_at(remaining.partition_point(|each| each.shard <= number));
            remaining = tail;
            Target::Shard(number, file, own.to_vec(), depth)
        })
    }
}

/// One job of [`Archive::verify_jobs`] or [`Archive::deep_verify_jobs`].
#[derive(Debug)]
pub struct VerifyJob<'a> {
    archive: &'a Archive,
    target: Target,
}

#[derive(Debug)]
enum Target {
    /// Bytes of the blob before, between or after storages, which must be zero.
    Padding(Range<u64>),
    /// A storage, with its number.
    Storage(u32, Arc<StorageReference>, Check),
    /// An archive of a shard set, which must have these storages.
    ///
    /// The job verifies its index and the part of its blob that the manifest does not name.
    Shard(u32, ShardFile, Vec<Arc<StorageReference>>, Depth),
}

/// The check of a storage.
#[derive(Clone, Copy, Debug)]
enum Check {
    /// The CRC-32 of a stored chunk, by chunk number.
    Chunk(u64),
    /// The checksum of a raw storage against those of its chunks. Reads no payload.
    Checksum,
    /// The digest of a storage against those of its chunks. Reads no payload.
    Subtrees,
    /// The text of a storage that holds a str.
    Text,
    /// The raw bytes: that the chunks decode, the checksum, the digest and the digests of the chunks.
    Decoded,
    /// The chunks of a delta storage, as far as that needs no base.
    Delta,
}

/// The depth of a verification: of the stored bytes, or of the bytes that they decode to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Depth {
    Stored,
    Decoded,
}

impl VerifyJob<'_> {
    /// Returns the number of bytes that the job reads from the file.
    pub fn len(&self) -> u64 {
        let range = match &self.target {
            Target::Padding(range) => range.clone(),
            Target::Storage(_, storage, Check::Chunk(chunk)) => storage.stored_chunk(*chunk),
            Target::Storage(_, _, Check::Checksum | Check::Subtrees) => 0..0,
            Target::Storage(_, storage, Check::Text | Check::Decoded | Check::Delta) => {
                storage.stored_range()
            }
            // The job reads the index and little more.
            Target::Shard(_, file, ..) => 0..file.index_len(),
        };
        range.end - range.start
    }

    /// Returns true if the job reads nothing.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Runs the job.
    ///
    /// # Errors
    ///
    /// As [`Archive::verify_deep`].
    pub fn run(&self) -> Result<()> {
        match &self.target {
            Target::Padding(range) => verify_padding(self.archive, range),
            Target::Storage(number, storage, check) => {
                verify_storage(self.archive, *number, storage, *check)
                    .map_err(|error| self.archive.at_storage(error, *number))
            }
            Target::Shard(number, file, storages, depth) => {
                verify_shard(file, self.archive.blob(*number), storages, *depth)
                    .map_err(|error| error.with_path(&file.name))
            }
        }
    }
}

fn verify_padding(archive: &Archive, range: &Range<u64>) -> Result<()> {
    let bytes = archive.read(0, range.clone())?;
    let Some(at) = bytes.iter().position(|byte| *byte != 0) else { return Ok(()) };
    Err(Error::new(ErrorKind::PaddingNotZero).with_offset(range.start + length(&bytes[..at])))
}

fn verify_storage(
    archive: &Archive,
    number: u32,
    storage: &StorageReference,
    check: Check,
) -> Result<()> {
    match check {
        Check::Chunk(chunk) => {
            let range = storage.stored_chunk(chunk);
            let crc = archive.range_crc32(storage.shard, range.clone())?;
            storage.verify_chunk(chunk, crc).map_err(|error| error.with_offset(range.start))
        }
        Check::Checksum => storage.verify_crc32(combine_crcs(
            storage.len,
            storage.chunk_size,
            storage.crcs.iter().copied(),
        )),
        Check::Subtrees => {
            let subtrees = archive.subtrees(number);
            check_digest(storage, &digest::merge(storage.len, storage.chunk_size, subtrees))
        }
        Check::Delta => archive.count_changes(storage).map(drop),
        Check::Text if is_text(&archive.storage_bytes(number)?) => Ok(()),
        Check::Text => Err(Error::new(ErrorKind::ContentNotText)),
        Check::Decoded => {
            let digests = archive.hash_chunks(storage)?;
            check_digest(storage, &digest::merge(storage.len, storage.chunk_size, &digests))?;
            let subtrees = archive.subtrees(number);
            if subtrees.is_empty() || subtrees == digests {
                Ok(())
            } else {
                Err(Error::new(ErrorKind::DigestMismatch))
            }
        }
    }
}

/// Checks a digest of the raw bytes against the recorded one, if there is one.
fn check_digest(storage: &StorageReference, digest: &Digest) -> Result<()> {
    match &storage.digest {
        Some(recorded) if recorded != digest => Err(Error::new(ErrorKind::DigestMismatch)),
        _ => Ok(()),
    }
}

/// Verifies an archive of a shard set: its index, its storages, and the rest of its blob.
///
/// # Errors
///
/// `ShardContent` (F-095) if the archive lacks a storage that the manifest names; `DistributedMismatch` (F-084) if its
/// checksum table is not where the manifest says; the errors of opening and of verifying the archive.
fn verify_shard(
    file: &ShardFile,
    blob: &Arc<dyn Blob>,
    named: &[Arc<StorageReference>],
    depth: Depth,
) -> Result<()> {
    let archive = Archive::from_blob(blob.clone())?;
    // An expanded manifest has been checked with its distributed leaves, and records no other storages.
    file.verify_index(&archive, &DistributedGroups::default())?;
    let by_offset: BTreeMap<u64, &StorageReference> =
        named.iter().map(|storage| (storage.offset, &**storage)).collect();
    let mut found = 0;
    let jobs = match depth {
        Depth::Stored => archive.verify_jobs(),
        Depth::Decoded => archive.deep_verify_jobs(),
    };
    for job in jobs {
        let is_named = match &job.target {
            Target::Storage(number, own, check) => by_offset
                .get(&own.offset)
                .filter(|named| named.matches(own))
                .is_some_and(|named| match check {
                    Check::Chunk(_) => true,
                    Check::Decoded => {
                        (named.digest == own.digest || own.digest.is_none())
                            && archive.subtrees(*number).is_empty()
                    }
                    // A str in the archive need not be a str in the manifest.
                    // Manifests have no digests of chunks.
                    Check::Text | Check::Checksum | Check::Subtrees | Check::Delta => false,
                }),
            Target::Padding(_) | Target::Shard(..) => false,
        };
        // Jobs of the manifest verify the storages that it names, except for digests that it omits.
        if !is_named {
            job.run()?;
        }
    }
    for number in 0..archive.storage_count() {
        let own = archive.storage(number);
        found += usize::from(by_offset.get(&own.offset).is_some_and(|named| named.matches(&own)));
    }
    if found == named.len() {
        return Ok(());
    }
    Err(Error::new(ErrorKind::ShardContent)
        .with_detail("it has other storages than the manifest says"))
}
