//! The manifest of 16,384 writers, and plans and checksums of its readers.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use tssd_format::{
    Archive, Blob, CrcTable, DeviceMesh, DistributedGroups, HeldStorage, Node, Placement,
    ShardFile, ShardSpec, TensorReference, TensorSlice,
};
use tssd_store::plan::{RegionCopy, StorageId, TensorLeaf, plan};
use tssd_tests::bench::{Bench, LastResult, Race, Runner};
use tssd_tests::distributed::{LargeModel, eighth};
use tssd_tests::sharding::local_meta;

const TENSORS: u32 = 3000;

/// FSDP and TP.
const MESH: [u64; 2] = [2048, 8];

/// Bytes of an entry of a checksum table.
const ENTRY_BYTES: usize = 4;

/// Entries of a page of a checksum table.
const PAGE: usize = 1024;

/// Plans one of 8 readers from 2,048 x 8 writers, in rows and in columns, and counts the bytes of indexes that it reads.
///
/// The peer is the plan of the same tensors from 16 writers, each slice of which is in the manifest.
pub(crate) fn of_many_writers(bench: &mut Bench) {
    let model = LargeModel::new(TENSORS, &Arc::new(DeviceMesh::from_shape(&MESH).unwrap()));
    let groups = model.groups();
    let encoded = model.manifest(|rank| SyntheticCrcs::new(&groups, rank).table());
    let manifest = Archive::from_bytes(encoded.clone()).unwrap();
    let nodes: Vec<Node> = manifest.leaves().into_iter().map(|(_, node)| node).collect();
    let many: Vec<_> = nodes.iter().map(|node| TensorLeaf::of(node).unwrap()).collect();
    let runs: Vec<_> =
        (0..).zip(&many).map(|(number, leaf)| of_16_writers(number, *leaf)).collect();
    let few: Vec<_> = runs.iter().map(|run| TensorLeaf::Run(run)).collect();
    let mut counts = vec![("manifest, MiB".to_owned(), mib(encoded.len()))];
    for (dim, what) in [(0, "rows"), (1, "columns")] {
        let before = resident_bytes();
        let copies = plan_all(&many, dim);
        let memory = resident_bytes().saturating_sub(before);
        let checksums = read_checksums(&manifest.shards(), &groups, &copies);
        counts.extend([
            (format!("{what}: copies of the plan, in series"), float(copies.len())),
            (format!("{what}: copies"), float(copies.iter().map(count).sum())),
            (format!("{what}: memory of the plan, MiB"), mib(memory)),
            (format!("{what}: checksums of chunks, MiB"), mib(checksums.needed)),
            (
                format!("{what}: the rest of their pages, and page checksums, MiB"),
                mib(checksums.proof),
            ),
            (
                format!("{what}: other index bytes, manifest included, MiB"),
                mib(encoded.len() + checksums.other),
            ),
        ]);
        drop(copies);
        let last = LastResult::new();
        bench.race(
            Race::new(&format!("plan of {what}"), "one of 8 readers, 2,048 x 8 writers", 9)
                .with_tensors("matrices", many.len())
                .with_runner(Runner::ours("tssd", || last.replace_with(|| plan_all(&many, dim))))
                .with_runner(Runner::variant("tssd, 16 writers, slices", || {
                    drop(plan_all(&few, dim));
                })),
        );
    }
    let counts: Vec<_> = counts.iter().map(|(name, count)| (&**name, *count)).collect();
    bench.record_counts("one of 8 readers of 3,000 tensors of 2,048 x 8 writers", &counts);
}

fn plan_all(leaves: &[TensorLeaf<'_>], dim: u32) -> Vec<RegionCopy> {
    leaves.iter().flat_map(|leaf| plan(*leaf, &eighth(*leaf, dim, 3)).unwrap()).collect()
}

/// Returns the slices of a tensor that 16 writers hold by rows.
fn of_16_writers(number: u32, leaf: TensorLeaf<'_>) -> Vec<TensorReference> {
    let mesh = Arc::new(DeviceMesh::from_shape(&[16]).unwrap());
    let rows = [Placement::Shard { dim: 0 }];
    let slice = |rank: u32| {
        let slices = TensorSlice::from_placements(leaf.global_shape(), &mesh, rank, &rows);
        let spec = ShardSpec::new(slices.unwrap().remove(0)).with_mesh(mesh.clone()).unwrap();
        TensorReference {
            meta: local_meta(leaf.dtype(), &spec),
            storage: Some(rank * TENSORS + number),
            byte_offset: 0,
            shard_spec: Some(spec),
        }
    };
    (0..16).map(slice).collect()
}

/// Bytes of checksum tables that a reader reads.
#[derive(Default)]
struct ChecksumBytes {
    /// The checksums of the chunks of the storages that are read.
    needed: usize,
    /// The rest of the pages with these checksums, and the checksums of the pages.
    proof: usize,
    /// All other bytes.
    other: usize,
}

/// Reads the checksums of all chunks of the storages of a plan.
fn read_checksums(
    shards: &[ShardFile],
    groups: &DistributedGroups,
    copies: &[RegionCopy],
) -> ChecksumBytes {
    let mut by_shard: BTreeMap<u64, BTreeSet<u32>> = BTreeMap::new();
    for copy in copies.iter().flat_map(RegionCopy::each) {
        let StorageId::Held { group, device } = copy.storage else { unreachable!() };
        by_shard.entry(device).or_default().insert(group);
    }
    let mut bytes = ChecksumBytes::default();
    for (device, wanted) in by_shard {
        let shard = &shards[usize::try_from(device).unwrap()];
        let places = groups.places(shard.writer, shard.others.as_deref().unwrap()).unwrap();
        let held = places.storages.iter().filter(|place| wanted.contains(&place.group));
        let ranges: Vec<_> = held.map(HeldStorage::crc_range).collect();
        let crcs = SyntheticCrcs::new(groups, shard.writer);
        let found = shard.read_crcs(&crcs, &ranges).unwrap();
        let entries: BTreeSet<usize> =
            ranges.into_iter().flatten().map(|entry| usize::try_from(entry).unwrap()).collect();
        let pages: BTreeSet<usize> = entries.iter().map(|entry| entry / PAGE).collect();
        let page = |page: &usize| {
            crcs.crcs.len().min((page + 1) * PAGE * ENTRY_BYTES) - page * PAGE * ENTRY_BYTES
        };
        let needed = found.iter().map(Vec::len).sum::<usize>() * ENTRY_BYTES;
        let proven = pages.iter().map(page).sum::<usize>() + crcs.pages.len();
        bytes.needed += needed;
        bytes.proof += proven - needed;
        bytes.other += crcs.read.into_inner() - proven;
    }
    bytes
}

/// The index of an archive that does not exist. It has a checksum table, and nothing else.
#[derive(Debug)]
struct SyntheticCrcs {
    crcs: Vec<u8>,
    pages: Vec<u8>,
    /// Bytes that were read.
    read: AtomicUsize,
}

impl SyntheticCrcs {
    fn new(groups: &DistributedGroups, rank: u32) -> Self {
        let count = u32::try_from(groups.places(rank, &[]).unwrap().crcs).unwrap();
        let entry = |number: u32| (rank.wrapping_mul(0x9E37_79B9) ^ number).to_le_bytes();
        let crcs: Vec<u8> = (0..count).flat_map(entry).collect();
        let sums = crcs.chunks(PAGE * ENTRY_BYTES).map(tssd_format::checksum);
        let pages = sums.flat_map(u32::to_le_bytes).collect();
        Self { crcs, pages, read: AtomicUsize::new(0) }
    }

    fn table(&self) -> CrcTable {
        let len = u32::try_from(self.crcs.len() / ENTRY_BYTES).unwrap();
        CrcTable { offset: 0, len, pages_crc32: tssd_format::checksum(&self.pages) }
    }
}

impl Blob for SyntheticCrcs {
    fn size(&self) -> io::Result<u64> {
        unimplemented!("only the checksum table is read")
    }

    fn read_exact_at(&self, target: &mut [u8], offset: u64) -> io::Result<()> {
        let table = [&self.crcs[..], &self.pages].concat();
        let start = usize::try_from(offset - LargeModel::INDEX_OFF).unwrap();
        target.copy_from_slice(&table[start..start + target.len()]);
        self.read.fetch_add(target.len(), Ordering::Relaxed);
        Ok(())
    }

    fn bytes(&self) -> Option<&Bytes> {
        None
    }
}

fn count(copy: &RegionCopy) -> usize {
    usize::try_from(copy.count()).unwrap()
}

/// Returns the memory of this process that is in use, in bytes.
fn resident_bytes() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() * 4096
}

#[expect(clippy::cast_precision_loss, reason = "a number to be read")]
fn float(count: usize) -> f64 {
    count as f64
}

fn mib(bytes: usize) -> f64 {
    (float(bytes) / f64::from(1 << 20) * 100.0).round() / 100.0
}
