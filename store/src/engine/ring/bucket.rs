//! What is in a bucket: tensors that are there as a whole, and pieces of others.

use std::collections::{BTreeMap, VecDeque};

use tssd_format::{
    Container, Dict, MapKey, Node, ShardSpec, StateDict, Step, Tensor, TensorReference,
    TensorSlice, Value,
};

use crate::engine::put::split_tensor;
use crate::engine::version::OpenVersion;
use crate::error::{Error, ErrorKind, Result};
use crate::plan::global_shape;

/// What a piece of a tensor says of itself.
const PIECE: [&str; 3] = ["tensor", "offsets", "shape"];

/// Buckets in the making.
pub(super) struct Filling {
    limit: u64,
    bytes: u64,
    entries: Dict,
    full: VecDeque<StateDict>,
}

/// How much of a bucket a tensor takes, where it lies as archives align it.
fn room_for(tensor: &Tensor) -> u64 {
    let span = tensor.meta().span_bytes();
    span.next_multiple_of(if span < 64 << 10 { 256 } else { 4096 })
}

impl Filling {
    /// Of buckets of at most so many bytes.
    pub(super) fn new(limit: u64) -> Self {
        Self { limit, bytes: 0, entries: Dict::new(), full: VecDeque::new() }
    }

    /// Adds a leaf, whose tensors are cut if they are larger than a bucket.
    pub(super) fn add(&mut self, fqn: &str, leaf: &Value) -> Result<()> {
        let failed = |error| Error::request(format_args!("`{fqn}`"), error);
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

    /// How many buckets are full.
    pub(super) fn full(&self) -> usize {
        self.full.len()
    }

    /// The first one that is.
    pub(super) fn pop(&mut self) -> Option<StateDict> {
        self.full.pop_front()
    }

    /// What is in none that is full makes one.
    pub(super) fn flush(&mut self) -> Result<()> {
        if self.entries.is_empty() {
            return Ok(());
        }
        self.close().map_err(|error| Error::request("state dict", error))
    }

    fn add_tensor(
        &mut self,
        fqn: &str,
        tensor: &Tensor,
        slice: Option<&TensorSlice>,
    ) -> tssd_format::Result<()> {
        if room_for(tensor) <= self.limit {
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
        let room = room_for(tensor);
        if self.bytes > 0 && self.bytes + room > self.limit {
            self.close()?;
        }
        self.bytes += room;
        let value = Value::Tensor(tensor.clone());
        let Some(slice) = slice else {
            self.entries.insert(fqn, value);
            return Ok(());
        };
        let sizes =
            |sizes: &[u64]| Value::Size(sizes.iter().map(|size| size.cast_signed()).collect());
        let values = [value, sizes(slice.offsets()), sizes(slice.global_shape())];
        let piece = Value::Dict(PIECE.into_iter().zip(values).collect());
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

/// The tensors of a bucket, each with what of it is there.
pub(super) fn leaves_of(bucket: &OpenVersion) -> Result<BTreeMap<String, Vec<TensorReference>>> {
    let broken = || Error::new(ErrorKind::Corrupt, "a bucket that says wrongly what is in it");
    let root = bucket.tree(None)?;
    let Node::Container(Container::Dict, children) = &*root else { return Err(broken()) };
    let mut leaves = BTreeMap::new();
    for (step, child) in children {
        let Step::Key(MapKey::Str(fqn)) = step else { return Err(broken()) };
        let references = match child {
            Node::Tensors(run) => run.clone(),
            Node::Container(Container::List, pieces) => pieces
                .iter()
                .map(|(_, piece)| piece_of(piece))
                .collect::<Option<_>>()
                .ok_or_else(broken)?,
            _ => return Err(broken()),
        };
        if !is_of_one(&references) {
            return Err(broken());
        }
        leaves.insert(fqn.to_string(), references);
    }
    Ok(leaves)
}

/// Whether these are pieces of one tensor, one at least.
fn is_of_one(references: &[TensorReference]) -> bool {
    let of = |reference: &TensorReference| (reference.meta.dtype(), global_shape(reference));
    let first = references.first().map(of);
    first.is_some() && references.iter().all(|reference| Some(of(reference)) == first)
}

/// A piece of a tensor, with its place.
fn piece_of(piece: &Node) -> Option<TensorReference> {
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
