//! The contents of a bucket: whole tensors, and pieces of tensors.

use std::collections::{BTreeMap, VecDeque};

use tssd_format::{
    Container, Dict, MapKey, Node, ShardSpec, StateDict, Step, Tensor, TensorReference,
    TensorSlice, Value,
};

use crate::engine::put::split_tensor;
use crate::engine::version::OpenVersion;
use crate::error::{Error, ErrorKind, Result};
use crate::plan::TensorLeaf;

/// The entries of the dict that describes a piece of a tensor.
const PIECE_ENTRIES: [&str; 3] = ["tensor", "offsets", "global_shape"];

/// Fills buckets with leaves.
pub(super) struct BucketBuilder {
    limit: u64,
    bytes: u64,
    entries: Dict,
    full: VecDeque<StateDict>,
}

/// Returns the bytes of a bucket that a tensor takes, with the alignment of an archive.
fn aligned_bytes(tensor: &Tensor) -> u64 {
    let span = tensor.meta().span_bytes();
    span.next_multiple_of(if span < 64 << 10 { 256 } else { 4096 })
}

impl BucketBuilder {
    /// Creates a builder of buckets of at most `limit` bytes.
    pub(super) fn new(limit: u64) -> Self {
        Self { limit, bytes: 0, entries: Dict::new(), full: VecDeque::new() }
    }

    /// Adds a leaf. Tensors that are larger than a bucket are split.
    pub(super) fn add(&mut self, fqn: &str, leaf: &Value) -> Result<()> {
        let failed = |error| Error::from_request(format_args!("`{fqn}`"), error);
        match leaf {
            Value::Tensor(tensor) => self.add_tensor(fqn, tensor, None).map_err(failed),
            Value::Shards(shards) => shards.iter().try_for_each(|shard| {
                self.add_tensor(fqn, shard.tensor(), Some(shard.slice())).map_err(failed)
            }),
            _ => {
                let text = format_args!(
                    "`{fqn}` is no tensor, and a ring brings tensors alone: put it elsewhere"
                );
                Err(Error::new(ErrorKind::Invalid, text))
            }
        }
    }

    /// Returns the number of full buckets.
    pub(super) fn full_count(&self) -> usize {
        self.full.len()
    }

    /// Removes and returns the first full bucket.
    pub(super) fn pop(&mut self) -> Option<StateDict> {
        self.full.pop_front()
    }

    /// Completes the current bucket unless it is empty.
    pub(super) fn flush(&mut self) -> Result<()> {
        if self.entries.is_empty() {
            return Ok(());
        }
        self.close().map_err(|error| Error::from_request("state dict", error))
    }

    fn add_tensor(
        &mut self,
        fqn: &str,
        tensor: &Tensor,
        slice: Option<&TensorSlice>,
    ) -> tssd_format::Result<()> {
        if aligned_bytes(tensor) <= self.limit {
            return self.add_piece(fqn, tensor, slice);
        }
        for piece in split_tensor(tensor, self.limit)? {
            let (inner, whole) = (piece.slice(), tensor.meta().shape());
            let (start, shape) = match slice {
                Some(slice) => (slice.offsets(), slice.global_shape()),
                None => (&[][..], whole),
            };
            let offsets = inner.offsets().iter().enumerate();
            let offsets = offsets.map(|(dim, at)| at + start.get(dim).copied().unwrap_or(0));
            let offsets: Vec<u64> = offsets.collect();
            let place = TensorSlice::new(&offsets, inner.local_shape(), shape)?;
            self.add_piece(fqn, piece.tensor(), Some(&place))?;
        }
        Ok(())
    }

    fn add_piece(
        &mut self,
        fqn: &str,
        tensor: &Tensor,
        slice: Option<&TensorSlice>,
    ) -> tssd_format::Result<()> {
        let len = aligned_bytes(tensor);
        if self.bytes > 0 && self.bytes + len > self.limit {
            self.close()?;
        }
        self.bytes += len;
        let value = Value::Tensor(tensor.clone());
        let Some(slice) = slice else {
            self.entries.insert(fqn, value);
            return Ok(());
        };
        let sizes =
            |sizes: &[u64]| Value::Size(sizes.iter().map(|size| size.cast_signed()).collect());
        let values = [value, sizes(slice.offsets()), sizes(slice.global_shape())];
        let piece = Value::Dict(PIECE_ENTRIES.into_iter().zip(values).collect());
        if let Some(Value::List(pieces)) = self.entries.get_mut(fqn) {
            pieces.push(piece);
        } else {
            self.entries.insert(fqn, Value::List(vec![piece]));
        }
        Ok(())
    }

    fn close(&mut self) -> tssd_format::Result<()> {
        self.bytes = 0;
        self.full.push_back(StateDict::from_value(Value::Dict(std::mem::take(&mut self.entries)))?);
        Ok(())
    }
}

/// Returns the tensors of a bucket, each with the references that the bucket contains.
pub(super) fn leaves_of(bucket: &OpenVersion) -> Result<BTreeMap<String, Vec<TensorReference>>> {
    let malformed = || Error::new(ErrorKind::Corrupt, "a bucket that says wrongly what is in it");
    let root = bucket.tree(None)?;
    let Node::Container(Container::Dict, children) = &*root else { return Err(malformed()) };
    let mut leaves = BTreeMap::new();
    for (step, child) in children {
        let Step::Key(MapKey::Str(fqn)) = step else { return Err(malformed()) };
        let references = match child {
            Node::Tensors(run) => run.clone(),
            Node::Container(Container::List, pieces) => pieces
                .iter()
                .map(|(_, piece)| parse_piece(piece))
                .collect::<Option<_>>()
                .ok_or_else(malformed)?,
            _ => return Err(malformed()),
        };
        if !are_of_one_tensor(&references) {
            return Err(malformed());
        }
        leaves.insert(fqn.to_string(), references);
    }
    Ok(leaves)
}

/// Returns whether there is at least one reference, and all are pieces of one tensor.
fn are_of_one_tensor(references: &[TensorReference]) -> bool {
    let identity = |reference| {
        let leaf = TensorLeaf::Run(std::slice::from_ref(reference));
        (leaf.dtype(), leaf.global_shape())
    };
    let first = references.first().map(identity);
    first.is_some() && references.iter().all(|reference| Some(identity(reference)) == first)
}

/// Returns the reference of a piece of a tensor, with its region.
fn parse_piece(piece: &Node) -> Option<TensorReference> {
    let Node::Container(Container::Dict, children) = piece else { return None };
    let [
        (_, Node::Tensors(run)),
        (_, Node::Leaf(Value::Size(offsets))),
        (_, Node::Leaf(Value::Size(shape))),
    ] = children.as_slice()
    else {
        return None;
    };
    let [reference] = run.as_slice() else { return None };
    let sizes = |sizes: &[i64]| sizes.iter().map(|size| u64::try_from(*size).ok()).collect();
    let (offsets, shape): (Option<Vec<u64>>, Option<Vec<u64>>) = (sizes(offsets), sizes(shape));
    let slice = TensorSlice::new(&offsets?, reference.meta.shape(), &shape?).ok()?;
    Some(TensorReference { shard_spec: Some(ShardSpec::new(slice)), ..reference.clone() })
}
