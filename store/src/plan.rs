//! The reshard planner: which bytes of which storages go where. Pure. Spec: `spec/reshard.md`,
//! section 3.
//!
//! A plan moves exactly the elements that are wanted: every wanted element from one stored slice, and
//! nothing else.

use tssd_format::{
    Error, ErrorKind, Node, Region, Result, Runs, StorageReference, TensorMeta, TensorReference,
};

/// One tensor that a reader wants: a box of a leaf, laid out in the reader's memory.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Wanted {
    /// The box of the global tensor.
    pub region: Region,
    /// The shape of the whole global tensor.
    pub global_shape: Box<[u64]>,
    /// Dtype and strides of the memory; its shape is that of the box.
    pub meta: TensorMeta,
}

/// A copy of one box from a storage into one wanted tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Copy {
    /// The storage.
    pub storage: u32,
    /// Where the box begins in the raw bytes of the storage.
    pub source: u64,
    /// Where the box begins in the reader's memory, in bytes.
    pub target: u64,
    /// The runs of bytes that it is made of.
    pub runs: Runs,
}

/// The slices of a stored leaf that a reader's box is made of.
///
/// # Errors
///
/// `Uncovered` with the region that no slice holds; `OutsideGlobal` if the box or its global shape
/// does not fit the leaf; `WrongType` if the dtype is another one.
pub fn plan(stored: &[TensorReference], wanted: &Wanted) -> Result<Vec<Copy>> {
    let Some(first) = stored.first() else {
        return Err(Error::new(ErrorKind::Uncovered).in_region(wanted.region.clone()));
    };
    let (dtype, found) = (wanted.meta.dtype(), first.meta.dtype());
    if dtype != found {
        return Err(
            Error::new(ErrorKind::WrongType).note(format_args!("wanted {dtype}, stored {found}"))
        );
    }
    let global_shape = global_shape(first);
    if *wanted.global_shape != *global_shape {
        return Err(Error::new(ErrorKind::OutsideGlobal).note(format_args!(
            "wanted a part of shape {:?}, stored {global_shape:?}",
            wanted.global_shape
        )));
    }
    if !Region::whole(&global_shape).contains(&wanted.region) {
        return Err(Error::new(ErrorKind::OutsideGlobal).in_region(wanted.region.clone()));
    }
    let target_strides = wanted.meta.strides();
    let itemsize = dtype.itemsize();
    let mut copies = Vec::new();
    let mut covered = 0;
    for slice in stored {
        let held = region(slice);
        let Some(shared) = held.intersect(&wanted.region) else { continue };
        let Some(storage) = slice.storage else { continue };
        let source_strides = slice.meta.strides();
        let offset = |outer: &Region, strides: &[u64]| {
            let inner = shared.relative_to(outer);
            let elements: u64 =
                inner.offsets().iter().zip(strides).map(|(at, stride)| at * stride).sum();
            elements * itemsize
        };
        covered += shared.numel();
        copies.push(Copy {
            storage,
            source: slice.byte_offset + offset(&held, &source_strides),
            target: offset(&wanted.region, &target_strides),
            runs: Runs::new(itemsize, shared.shape(), &source_strides, &target_strides),
        });
    }
    // The proof of the commit has left no two slices that overlap, so counting is enough.
    if covered == wanted.region.numel() {
        return Ok(copies);
    }
    let mut holes = vec![wanted.region.clone()];
    for slice in stored {
        let held = region(slice);
        holes = holes.iter().flat_map(|hole| hole.subtract(&held)).collect();
    }
    let hole = holes.into_iter().find(|hole| !hole.is_empty());
    Err(Error::new(ErrorKind::Uncovered).in_region(hole.unwrap_or_else(|| wanted.region.clone())))
}

/// The box of its global tensor that a reference holds; all of it for a plain tensor.
pub fn region(reference: &TensorReference) -> Region {
    match &reference.place {
        Some(place) => place.slice().region(),
        None => Region::whole(reference.meta.shape()),
    }
}

/// The shape of the global tensor that a reference is a part of.
pub fn global_shape(reference: &TensorReference) -> Vec<u64> {
    match &reference.place {
        Some(place) => place.slice().global_shape().to_vec(),
        None => reference.meta.shape().to_vec(),
    }
}

/// A name for the layout of a version: equal for two versions whose leaves, shapes, slices and
/// storages are the same and only whose contents differ. Plans are cached under it.
pub(crate) fn fingerprint(root: &Node, storages: &[StorageReference]) -> [u8; 16] {
    let mut hash = blake3::Hasher::new();
    let mut number = |value: u64| {
        hash.update(&value.to_le_bytes());
    };
    for storage in storages {
        number(u64::from(storage.shard));
        number(storage.offset);
        number(storage.len);
    }
    for (path, node) in root.clone().into_leaves() {
        let Node::Tensors(references) = node else { continue };
        let path = path.to_string();
        hash.update(&u64::try_from(path.len()).unwrap_or(u64::MAX).to_le_bytes());
        hash.update(path.as_bytes());
        for reference in references {
            let meta = &reference.meta;
            let region = region(&reference);
            let mut vector = |values: &[u64]| {
                hash.update(&u64::try_from(values.len()).unwrap_or(u64::MAX).to_le_bytes());
                for value in values {
                    hash.update(&value.to_le_bytes());
                }
            };
            vector(&[
                u64::from(meta.dtype().code()),
                reference.storage.map_or(u64::MAX, u64::from),
                reference.byte_offset,
            ]);
            vector(meta.shape());
            vector(&meta.strides());
            vector(region.offsets());
            vector(&global_shape(&reference));
        }
    }
    let mut short = [0; 16];
    short.copy_from_slice(&hash.finalize().as_bytes()[..16]);
    short
}
