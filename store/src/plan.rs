//! The reshard planner: which bytes of which storages go where. Pure. Spec: `spec/reshard.md`,
//! section 3.
//!
//! A plan moves exactly the elements that are wanted: every wanted element from one stored slice, and
//! nothing else.

use tssd_format::{
    Container, Error, ErrorKind, Node, Region, Result, Runs, ShardSpec, StorageReference,
    TensorMeta, TensorReference,
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
    let copies = shared(stored, wanted)?;
    // The proof of the commit has left no two slices that overlap, so counting is enough.
    let covered: u64 = copies.iter().map(|copy| copy.runs.total_bytes()).sum();
    if covered == wanted.meta.nbytes() {
        return Ok(copies);
    }
    let mut holes = vec![wanted.region.clone()];
    for slice in stored {
        let held = region(slice);
        holes = holes.iter().flat_map(|hole| hole.subtract(&held)).collect();
    }
    let hole = holes.into_iter().find(|hole| !hole.is_empty());
    let hole = hole.as_ref().unwrap_or(&wanted.region);
    Err(Error::new(ErrorKind::Uncovered).with_region(hole.offsets(), hole.shape()))
}

/// What of a reader's box these slices of a stored leaf hold, be it all of it, a part or nothing.
///
/// # Errors
///
/// As [`plan`], but for `Uncovered` of what no slice holds.
pub(crate) fn shared(stored: &[TensorReference], wanted: &Wanted) -> Result<Vec<Copy>> {
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
        copies.push(Copy {
            storage,
            source: slice.byte_offset + offset(&held, &source_strides),
            target: offset(&wanted.region, &target_strides),
            runs: Runs::new(itemsize, shared.shape(), &source_strides, &target_strides),
        });
    }
    Ok(copies)
}

/// The box of its global tensor that a reference holds; all of it for a plain tensor.
pub fn region(reference: &TensorReference) -> Region {
    match &reference.shard_spec {
        Some(place) => place.slice().region(),
        None => Region::whole(reference.meta.shape()),
    }
}

/// The shape of the global tensor that a reference is a part of.
pub fn global_shape(reference: &TensorReference) -> Vec<u64> {
    match &reference.shard_spec {
        Some(place) => place.slice().global_shape().to_vec(),
        None => reference.meta.shape().to_vec(),
    }
}

/// Whether one reference is all of its tensor.
pub(crate) fn is_whole(run: &[TensorReference]) -> bool {
    let [only] = run else { return false };
    let Some(slice) = only.shard_spec.as_ref().map(ShardSpec::slice) else { return true };
    slice.local_shape() == slice.global_shape()
}

/// A name for the layout of a version: equal for two versions whose leaves, shapes, slices and
/// storages are the same and only whose contents differ. Plans are cached under it.
pub(crate) fn fingerprint(root: &Node, storages: &[StorageReference]) -> [u8; 16] {
    let mut layout = Layout::default();
    for storage in storages {
        layout.words(&[u64::from(storage.shard), storage.offset, storage.len]);
    }
    layout.node(root);
    let mut short = [0; 16];
    short.copy_from_slice(&layout.finish().as_bytes()[..16]);
    short
}

/// What of a tree is layout, its keys and its tensors, as a hash in the making.
#[derive(Default)]
struct Layout {
    hash: blake3::Hasher,
    /// What is to be hashed next: a few bytes at a time take long.
    bytes: Vec<u8>,
}

impl Layout {
    fn node(&mut self, node: &Node) {
        match node {
            Node::Leaf(_) | Node::StoredLeaf(..) => self.words(&[0]),
            Node::Container(container, children) => {
                // Whose leaf it is stands in no fqn.
                let kind = if *container == Container::Divergent { 3 } else { 1 };
                self.words(&[kind, wide(children.len())]);
                for (step, child) in children {
                    let step = step.to_string();
                    self.words(&[wide(step.len())]);
                    self.bytes.extend(step.as_bytes());
                    self.node(child);
                }
            }
            Node::Tensors(references) => {
                self.words(&[2, wide(references.len())]);
                for reference in references {
                    self.tensor(reference);
                }
            }
        }
    }

    fn tensor(&mut self, reference: &TensorReference) {
        let meta = &reference.meta;
        self.words(&[
            u64::from(meta.dtype().code()),
            reference.storage.map_or(u64::MAX, u64::from),
            reference.byte_offset,
        ]);
        let (strides, region) = (meta.strides(), region(reference));
        for vector in [meta.shape(), &strides, region.offsets(), &global_shape(reference)] {
            self.words(&[wide(vector.len())]);
            self.words(vector);
        }
    }

    fn words(&mut self, words: &[u64]) {
        self.bytes.extend(words.iter().flat_map(|word| word.to_le_bytes()));
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

fn wide(len: usize) -> u64 {
    u64::try_from(len).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use tssd_format::{Dtype, MapKey, Step};

    use super::*;

    #[test]
    fn leaves_of_writers_are_another_layout_than_a_dict_of_them() {
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
