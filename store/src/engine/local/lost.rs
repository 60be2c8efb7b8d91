//! What is lost with archives.

use std::collections::BTreeSet;

use tssd_format::{Archive, Node, ObjectPath, TensorReference};

use crate::blob::Volume;
use crate::error::{Error, Result};

/// How many are named.
const NAMED: usize = 8;

/// The leaves, with their regions, that lie in some of the archives of a version, in the order of its manifest; none if
/// that is not there.
pub(super) fn slices(
    volume: &dyn Volume,
    manifest: &str,
    lost: &BTreeSet<String>,
) -> Result<Option<String>> {
    let Some(opened) = volume.open(manifest)? else { return Ok(None) };
    let opened = Archive::from_blob(opened.blob).map_err(|error| Error::format(manifest, error))?;
    let shards = opened.shards();
    let is_lost = |storage: u32| {
        let shard = usize::try_from(opened.storage(storage).shard).ok();
        shard.and_then(|shard| shards.get(shard)).is_some_and(|shard| lost.contains(&shard.name))
    };
    let mut named = Vec::new();
    for (path, node) in opened.leaves() {
        match node {
            Node::Tensors(tensors) => {
                let tensors = tensors.iter().filter(|tensor| tensor.storage.is_some_and(is_lost));
                named.extend(tensors.map(|tensor| shown(&path, tensor)));
            }
            Node::StoredLeaf(_, storage) if is_lost(storage) => named.push(path.fqn()),
            _ => {}
        }
    }
    let more = named.len().saturating_sub(NAMED);
    named.truncate(NAMED);
    let named = named.join(", ");
    Ok(Some(if more == 0 { named } else { format!("{named} and {more} more") }))
}

fn shown(path: &ObjectPath, tensor: &TensorReference) -> String {
    match &tensor.shard_spec {
        Some(place) => format!("{}{}", path.fqn(), place.slice().region()),
        None => path.fqn(),
    }
}
