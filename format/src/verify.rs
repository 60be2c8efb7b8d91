//! Proving the payload: stored bytes, padding, what compressed bytes decode to. Spec: section 8.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use crate::archive::{Archive, prove_chunk};
use crate::blob::Blob;
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
        let mut jobs = Vec::new();
        let mut job = |number, storage: &Arc<StorageReference>, part| {
            jobs.push(Verify { archive: self, number, storage: storage.clone(), part });
        };
        let storages: Vec<Arc<StorageReference>> =
            (0..self.storage_count()).map(|number| Arc::new(self.storage(number))).collect();
        let is_alone = self.is_manifest_alone();
        let owns_blob = self.shards().is_empty();
        if !is_alone {
            for number in self.stored_texts(false) {
                job(number, &storages[native(number)], Part::Text);
            }
        }
        let mut end = DATA_START;
        for (number, storage) in (0..).zip(&storages) {
            if owns_blob {
                job(number, storage, Part::Padding(end..storage.offset));
            }
            end = storage.stored_range().end;
            if storage.packing.is_none() {
                job(number, storage, Part::Checksum);
            }
            let chunks = storage.chunks(&(0..storage.len)).filter(|_| !is_alone);
            chunks.for_each(|chunk| job(number, storage, Part::Chunk(chunk)));
        }
        if let Some(storage) = storages.last().filter(|_| owns_blob) {
            let number = self.storage_count() - 1;
            job(number, storage, Part::Padding(end..self.index_range().start));
        }
        if !owns_blob && !is_alone {
            jobs.extend(self.shard_jobs(&storages, Depth::Stored));
        }
        jobs
    }

    /// One job for each archive of a shard set.
    fn shard_jobs(&self, storages: &[Arc<StorageReference>], depth: Depth) -> Vec<Verify<'_>> {
        let none = Arc::new(StorageReference::default());
        // Proven: they are sorted by shard.
        let mut rest = storages;
        let mut job = |(number, file)| {
            let (own, others) = rest.split_at(rest.partition_point(|each| each.shard <= number));
            rest = others;
            let part = Part::Archive(number, file, own.to_vec(), depth);
            Verify { archive: self, number: 0, storage: none.clone(), part }
        };
        (0..).zip(self.shards()).map(&mut job).collect()
    }

    /// The jobs that [`Archive::verify_deep`] has besides, independent of each other.
    pub fn decode_jobs(&self) -> Vec<Verify<'_>> {
        if self.is_manifest_alone() {
            return Vec::new();
        }
        let mut jobs = Vec::new();
        for number in self.stored_texts(true) {
            let storage = Arc::new(self.storage(number));
            jobs.push(Verify { archive: self, number, storage, part: Part::Text });
        }
        for number in 0..self.storage_count() {
            let storage = Arc::new(self.storage(number));
            if storage.packing.is_some() || storage.digest.is_some() {
                jobs.push(Verify { archive: self, number, storage, part: Part::Meaning });
            }
        }
        if !self.shards().is_empty() {
            let storages = (0..self.storage_count()).map(|number| Arc::new(self.storage(number)));
            jobs.extend(self.shard_jobs(&storages.collect::<Vec<_>>(), Depth::Decoded));
        }
        jobs
    }
}

/// One job of [`Archive::verify_jobs`] or [`Archive::decode_jobs`].
#[derive(Debug)]
pub struct Verify<'a> {
    archive: &'a Archive,
    number: u32,
    storage: Arc<StorageReference>,
    part: Part,
}

#[derive(Debug)]
enum Part {
    /// Bytes of the file in front of the storage, or behind the last one, that must be zero.
    Padding(Range<u64>),
    /// A stored chunk.
    Chunk(u64),
    /// The checksum of a raw storage against those of its chunks: no payload at all.
    Checksum,
    /// That the storage, which is a str, is text.
    Text,
    /// The raw bytes: that they can be decoded, their checksum and their digest.
    Meaning,
    /// An archive of a shard set, which must have these storages: its index, and what of its blob the
    /// manifest does not name.
    Archive(u32, ShardFile, Vec<Arc<StorageReference>>, Depth),
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
            Part::Chunk(chunk) => self.storage.stored_chunk(*chunk),
            Part::Checksum => 0..0,
            Part::Text | Part::Meaning => self.storage.stored_range(),
            // Its index, and little more.
            Part::Archive(_, file, ..) => 0..file.index_len(),
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
        if let Part::Padding(range) = &self.part {
            let bytes = self.archive.read(self.storage.shard, range.clone())?;
            let Some(at) = bytes.iter().position(|byte| *byte != 0) else { return Ok(()) };
            let at = range.start + length(&bytes[..at]);
            return Err(Error::new(ErrorKind::PaddingNotZero).byte(at));
        }
        if let Part::Archive(shard, file, storages, depth) = &self.part {
            let proven = prove_shard(self.archive.blob(*shard), storages, *depth);
            return proven.map_err(|error| error.at(&file.name));
        }
        self.prove().map_err(|error| {
            let at = error.offset().unwrap_or(self.storage.offset);
            error.at(self.archive.leaf_in(self.number)).byte(at)
        })
    }

    fn prove(&self) -> Result<()> {
        let Self { archive, number, storage, part } = self;
        let all = || storage.chunks(&(0..storage.len));
        match part {
            Part::Padding(_) | Part::Archive(..) => unreachable!("run has done these"),
            Part::Chunk(chunk) => {
                let place = storage.stored_chunk(*chunk);
                let crc = archive.crc_of(storage.shard, place.clone())?;
                prove_chunk(storage, *chunk, crc).map_err(|error| error.byte(place.start))
            }
            Part::Checksum => {
                check_crc(storage, combine(storage.len, storage.crcs.iter().copied()))
            }
            Part::Text => {
                let bytes = archive.storage_bytes(*number)?;
                if is_text(&bytes) { Ok(()) } else { Err(Error::new(ErrorKind::NotText)) }
            }
            Part::Meaning => {
                let mut crc = crc32fast::Hasher::new();
                let mut digests = Vec::new();
                for chunk in all() {
                    let raw = archive.storage_range(*number, storage.chunk(chunk))?;
                    crc.update(&raw);
                    let mut hasher = ChunkHasher::new(chunk, storage.len);
                    hasher.update(&raw);
                    digests.push(hasher.finish());
                }
                check_crc(storage, crc.finalize())?;
                let digest = digest::merge(storage.len, &digests);
                match storage.digest {
                    Some(recorded) if recorded != digest => {
                        Err(Error::new(ErrorKind::DigestMismatch))
                    }
                    _ => Ok(()),
                }
            }
        }
    }
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
        let own = &*job.storage;
        let named = by_offset.get(&own.offset).filter(|named| named.same_bytes(own));
        match (&job.part, named) {
            // What the manifest names is proven by jobs of its own, but for a digest that it leaves out.
            (Part::Chunk(_), Some(_)) => {}
            (Part::Meaning, Some(named)) if named.digest == own.digest || own.digest.is_none() => {}
            // What is a str here need not be one in the manifest.
            _ => job.run()?,
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
