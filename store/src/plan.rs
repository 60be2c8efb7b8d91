//! The reshard planner: the byte ranges to copy from storages to a reader's memory. Spec: `spec/reshard.md`, section 3.
//!
//! Planning is a pure function. A plan copies exactly the requested elements, each from one stored slice.

use std::borrow::Cow;
use std::collections::BTreeSet;

use tssd_format::{
    Container, Dtype, Error, ErrorKind, Node, Region, Result, Runs, ShardSpec, StorageReference,
    TensorMeta, TensorReference,
};

use crate::convert::to_u64;

/// A request of a reader: a region of a leaf, and its layout in the reader's memory.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct RegionRequest {
    /// The region of the global tensor.
    pub region: Region,
    /// The shape of the whole global tensor.
    pub global_shape: Box<[u64]>,
    /// Dtype and strides of the memory. Its shape is the shape of the region.
    pub meta: TensorMeta,
}

/// A copy of one region from a storage into the memory of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegionCopy {
    /// The source storage.
    pub storage: u32,
    /// Offset of the region in the raw bytes of the storage.
    pub source_offset: u64,
    /// Offset of the region in the reader's memory, in bytes.
    pub target_offset: u64,
    /// The byte runs of the region.
    pub runs: Runs,
}

/// Returns the copies that fill the region of a request from the slices of a stored leaf.
///
/// Of slices with equal regions, the first one is copied. The regions of a committed version are disjoint. If
/// those of other archives have both gaps and overlaps of the same size, this function does not notice.
///
/// # Errors
///
/// - `Uncovered`, with the region that no slice holds.
/// - `Overlap` if slices of different regions overlap in the region of the request.
/// - `OutsideGlobal` if the region is outside the leaf, or the global shapes differ.
/// - `WrongType` if the dtypes differ.
pub fn plan(stored: &[TensorReference], wanted: &RegionRequest) -> Result<Vec<RegionCopy>> {
    let copies = plan_partial(stored, wanted)?;
    // The regions of a committed version tile the global tensor, so counting bytes is sufficient.
    let total =
        |copies: &[RegionCopy]| -> u64 { copies.iter().map(|copy| copy.runs.total_bytes()).sum() };
    let needed = wanted.meta.nbytes();
    if total(&copies) == needed {
        return Ok(copies);
    }
    // An archive of one writer can hold a region more than once. The first one counts.
    let mut regions = BTreeSet::new();
    let distinct: Vec<TensorReference> =
        stored.iter().filter(|slice| regions.insert(region(slice).into_owned())).cloned().collect();
    let mut holes = vec![wanted.region.clone()];
    for stored_region in &regions {
        holes = holes.iter().flat_map(|hole| hole.subtract(stored_region)).collect();
    }
    if let Some(hole) = holes.iter().find(|hole| !hole.is_empty()) {
        return Err(Error::new(ErrorKind::Uncovered).with_region(hole.offsets(), hole.shape()));
    }
    let copies = plan_partial(&distinct, wanted)?;
    if total(&copies) == needed {
        return Ok(copies);
    }
    Err(Error::new(ErrorKind::Overlap).with_region(wanted.region.offsets(), wanted.region.shape()))
}

/// Returns the copies of those parts of the region that the given slices hold: all of it, a part, or none.
///
/// # Errors
///
/// As [`plan`], except that a region that no slice holds is no error. `Uncovered` if there is no slice at all.
pub(crate) fn plan_partial(
    stored: &[TensorReference],
    wanted: &RegionRequest,
) -> Result<Vec<RegionCopy>> {
    let Some(first) = stored.first() else {
        return Err(Error::new(ErrorKind::Uncovered)
            .with_region(wanted.region.offsets(), wanted.region.shape()));
    };
    let (dtype, found) = (wanted.meta.dtype(), first.meta.dtype());
    if dtype != found {
        return Err(Error::new(ErrorKind::WrongType)
            .with_detail(format_args!("wanted {dtype}, stored {found}")));
    }
    let global_shape = global_shape(first);
    if *wanted.global_shape != *global_shape {
        return Err(Error::new(ErrorKind::OutsideGlobal).with_detail(format_args!(
            "wanted a part of shape {:?}, stored {global_shape:?}",
            wanted.global_shape
        )));
    }
    if !Region::whole(&global_shape).contains(&wanted.region) {
        return Err(Error::new(ErrorKind::OutsideGlobal)
            .with_region(wanted.region.offsets(), wanted.region.shape()));
    }
    let target_strides = wanted.meta.strides();
    let itemsize = dtype.itemsize();
    let mut copies = Vec::new();
    for slice in stored {
        let stored_region = region(slice);
        let Some(overlap) = stored_region.intersect(&wanted.region) else { continue };
        let Some(storage) = slice.storage else { continue };
        let source_strides = slice.meta.strides();
        let offset = |outer: &Region, strides: &[u64]| {
            let inner = overlap.relative_to(outer);
            let elements: u64 =
                inner.offsets().iter().zip(strides).map(|(at, stride)| at * stride).sum();
            elements * itemsize
        };
        copies.push(RegionCopy {
            storage,
            source_offset: slice.byte_offset + offset(&stored_region, &source_strides),
            target_offset: offset(&wanted.region, &target_strides),
            runs: Runs::new(itemsize, overlap.shape(), &source_strides, &target_strides),
        });
    }
    Ok(copies)
}

/// Returns the region of the global tensor that a reference holds. A plain tensor holds all of it.
pub fn region(reference: &TensorReference) -> Cow<'_, Region> {
    match &reference.shard_spec {
        Some(spec) => Cow::Borrowed(spec.slice().region()),
        None => Cow::Owned(Region::whole(reference.meta.shape())),
    }
}

/// Returns number and itemsize of a dtype in one word, which plans of equal layouts share.
///
/// The itemsize matters for dtypes that files describe: two files can describe one number differently.
pub(crate) fn dtype_word(dtype: Dtype) -> u64 {
    u64::from(dtype.number()) | dtype.itemsize() << 16
}

/// Returns the shape of the global tensor of a reference.
pub fn global_shape(reference: &TensorReference) -> Vec<u64> {
    match &reference.shard_spec {
        Some(spec) => spec.slice().global_shape().to_vec(),
        None => reference.meta.shape().to_vec(),
    }
}

/// Whether the references are a single one that holds its whole tensor.
pub(crate) fn is_whole(references: &[TensorReference]) -> bool {
    let [reference] = references else { return false };
    let Some(slice) = reference.shard_spec.as_ref().map(ShardSpec::slice) else { return true };
    slice.local_shape() == slice.global_shape()
}

/// Returns a fingerprint of the layout of a version, under which plans are cached.
///
/// Two versions have the same fingerprint if their leaves, shapes, slices and storages are the same. Contents do not
/// count.
pub(crate) fn fingerprint(root: &Node, storages: &[StorageReference]) -> [u8; 16] {
    let mut hasher = LayoutHasher::default();
    for storage in storages {
        hasher.hash_words(&[u64::from(storage.shard), storage.offset, storage.len]);
    }
    hasher.hash_node(root);
    let mut short = [0; 16];
    short.copy_from_slice(&hasher.finish().as_bytes()[..16]);
    short
}

/// A hasher of the layout of a tree: its keys and the metadata of its tensors.
#[derive(Default)]
struct LayoutHasher {
    hash: blake3::Hasher,
    /// Pending input. Hashing a few bytes at a time is slow, so up to 64 KiB are collected first.
    bytes: Vec<u8>,
}

impl LayoutHasher {
    fn hash_node(&mut self, node: &Node) {
        match node {
            Node::Leaf(_) | Node::StoredLeaf(..) => self.hash_words(&[0]),
            Node::Container(container, children) => {
                // The fqn of a leaf does not contain its writer, so a divergent node is marked here.
                let kind = if *container == Container::Divergent { 3 } else { 1 };
                self.hash_words(&[kind, to_u64(children.len())]);
                for (step, child) in children {
                    let step = step.to_string();
                    self.hash_words(&[to_u64(step.len())]);
                    self.bytes.extend(step.as_bytes());
                    self.hash_node(child);
                }
            }
            Node::Tensors(references) => {
                self.hash_words(&[2, to_u64(references.len())]);
                for reference in references {
                    self.hash_tensor(reference);
                }
            }
        }
    }

    fn hash_tensor(&mut self, reference: &TensorReference) {
        let meta = &reference.meta;
        self.hash_words(&[
            dtype_word(meta.dtype()),
            reference.storage.map_or(u64::MAX, u64::from),
            reference.byte_offset,
        ]);
        let (strides, region) = (meta.strides(), region(reference));
        for vector in [meta.shape(), &strides, region.offsets(), &global_shape(reference)] {
            self.hash_words(&[to_u64(vector.len())]);
            self.hash_words(vector);
        }
    }

    fn hash_words(&mut self, words: &[u64]) {
        for word in words {
            self.bytes.extend_from_slice(&word.to_le_bytes());
        }
        if self.bytes.len() >= 64 << 10 {
            self.hash.update(&self.bytes);
            self.bytes.clear();
        }
    }

    fn finish(mut self) -> blake3::Hash {
        self.hash.update(&self.bytes);
        self.hash.finalize()
    }
}

#[cfg(test)]
mod tests {
    use tssd_format::{MapKey, Step, TensorSlice};

    use super::*;

    /// Returns a slice of 4 bytes of a tensor of 8 bytes, in a storage of its own.
    fn slice_at(offset: u64, storage: u32) -> TensorReference {
        let slice = TensorSlice::new(&[offset], &[4], &[8]).unwrap();
        TensorReference {
            meta: TensorMeta::new(Dtype::Uint8, &[4]).unwrap(),
            storage: Some(storage),
            byte_offset: 0,
            shard_spec: Some(ShardSpec::new(slice)),
        }
    }

    fn plan_whole(stored: &[TensorReference]) -> Result<Vec<u32>> {
        let wanted = RegionRequest {
            region: Region::whole(&[8]),
            global_shape: [8].into(),
            meta: TensorMeta::new(Dtype::Uint8, &[8])?,
        };
        Ok(plan(stored, &wanted)?.into_iter().map(|copy| copy.storage).collect())
    }

    #[test]
    fn plan_takes_first_of_equal_regions() {
        let stored = [(0, 7), (0, 3), (4, 1), (0, 9), (4, 2)];
        let stored = stored.map(|(offset, storage)| slice_at(offset, storage));
        assert_eq!(plan_whole(&stored).unwrap(), [7, 1]);
    }

    #[test]
    fn plan_refuses_overlap_and_gap() {
        for (offsets, kind) in [
            (&[0, 2, 4][..], ErrorKind::Overlap),
            (&[0, 0, 2, 4], ErrorKind::Overlap),
            (&[2], ErrorKind::Uncovered),
            (&[0, 2, 2], ErrorKind::Uncovered),
        ] {
            let stored: Vec<_> =
                offsets.iter().zip(0..).map(|(offset, number)| slice_at(*offset, number)).collect();
            assert_eq!(plan_whole(&stored).unwrap_err().kind(), kind, "{offsets:?}");
        }
    }

    #[test]
    fn divergent_node_and_dict_have_different_fingerprints() {
        let leaf = Node::Tensors(vec![TensorReference {
            meta: TensorMeta::new(Dtype::Uint8, &[2]).unwrap(),
            storage: Some(0),
            byte_offset: 0,
            shard_spec: None,
        }]);
        let children = [0, 1].map(|writer| (Step::Key(MapKey::from_writer(writer)), leaf.clone()));
        let of = |container| fingerprint(&Node::Container(container, children.to_vec()), &[]);
        assert_eq!(of(Container::Dict), of(Container::OrderedDict));
        assert_ne!(of(Container::Dict), of(Container::Divergent));
    }
}
