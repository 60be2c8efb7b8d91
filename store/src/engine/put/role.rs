//! The writer of a put, and all writers of its version.

use tssd_format::{DeviceMesh, Shard, ShardSpec, StateDict, Value};

use super::PutOptions;
use crate::error::{Error, ErrorKind, Result};
use crate::ledger::WriterSet;

/// The writer of a contribution, and all writers of the version.
pub(crate) struct Role {
    pub(super) writer: u32,
    pub(super) writers: WriterSet,
    /// Whether the writers come from the meshes of the dict.
    pub(super) defaulted: bool,
}

impl Role {
    /// Returns whether the version has one writer.
    pub(crate) fn is_alone(&self) -> bool {
        self.writers.len() == 1
    }

    /// Returns the global rank of the writer.
    pub(crate) fn writer(&self) -> u32 {
        self.writer
    }

    pub(crate) fn of(dict: &StateDict, options: &PutOptions) -> Result<Self> {
        let leaves = dict.leaves();
        let shards = leaves.iter().flat_map(|(_, leaf)| match leaf {
            Value::Shards(shards) => shards.as_slice(),
            _ => &[],
        });
        let places: Vec<&ShardSpec> = shards.map(Shard::spec).collect();
        let ranks: WriterSet = places
            .iter()
            .filter_map(|place| place.mesh())
            .flat_map(DeviceMesh::ranks)
            .copied()
            .collect();
        let defaulted = options.writers.is_none();
        let writers = match &options.writers {
            Some(writers) => writers.clone(),
            None if ranks.is_empty() => WriterSet::one(options.writer.unwrap_or(0)),
            None => ranks,
        };
        let writer = match options.writer {
            Some(writer) => writer,
            None if writers.len() == 1 => writers.iter().next().unwrap_or(0),
            None => own_rank(&places)?,
        };
        Ok(Self { writer, writers, defaulted })
    }
}

/// Returns the rank that all shards belong to.
fn own_rank(places: &[&ShardSpec]) -> Result<u32> {
    let rank = |place: &&ShardSpec| place.mesh()?.rank_at(place.slice().coordinates()?);
    let mut ranks = places.iter().filter_map(rank);
    let first = ranks.next().ok_or_else(|| {
        Error::new(
            ErrorKind::Invalid,
            "several writers, and nothing says which one this is; say writer=",
        )
    })?;
    match ranks.find(|rank| *rank != first) {
        None => Ok(first),
        Some(other) => Err(Error::new(
            ErrorKind::Invalid,
            format_args!("the shards are those of rank {first} and of rank {other}; say writer="),
        )),
    }
}
