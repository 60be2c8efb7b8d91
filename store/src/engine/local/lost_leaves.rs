//! The leaves that are lost with archives.

use std::collections::BTreeSet;

use tssd_format::{Archive, DistributedTensor, Node, ObjectPath, ShardFile, TensorReference};

use crate::blob::Volume;
use crate::error::{Error, Result};

/// Maximum number of leaves in a list.
const MAX_LISTED_LEAVES: usize = 8;

/// Lists the leaves in the lost archives of a version, with regions, in the order of the manifest.
///
/// Returns `None` if the manifest is missing.
pub(super) fn list_lost_leaves(
    volume: &dyn Volume,
    manifest: &str,
    lost: &BTreeSet<String>,
) -> Result<Option<String>> {
    let Some(opened) = volume.open(manifest)? else { return Ok(None) };
    let opened =
        Archive::from_blob(opened.blob).map_err(|error| Error::from_format(manifest, error))?;
    let shards = opened.shards();
    let is_lost = |storage: u32| {
        let shard = usize::try_from(opened.storage(storage).shard).ok();
        shard.and_then(|shard| shards.get(shard)).is_some_and(|shard| lost.contains(&shard.name))
    };
    let mut leaves = Vec::new();
    for (path, node) in opened.leaves() {
        match node {
            Node::Tensors(tensors) => {
                let tensors = tensors.iter().filter(|tensor| tensor.storage.is_some_and(is_lost));
                leaves.extend(tensors.map(|tensor| describe(&path, tensor)));
            }
            Node::Distributed(tensor) => {
                for device in lost_devices(&tensor, &shards, lost) {
                    let references = tensor.local_references(device);
                    let references =
                        references.map_err(|error| Error::from_format(manifest, error))?;
                    leaves.extend(references.iter().map(|reference| describe(&path, reference)));
                }
            }
            Node::StoredLeaf(_, storage) if is_lost(storage) => leaves.push(path.fqn()),
            _ => {}
        }
    }
    let more = leaves.len().saturating_sub(MAX_LISTED_LEAVES);
    leaves.truncate(MAX_LISTED_LEAVES);
    let named = leaves.join(", ");
    Ok(Some(if more == 0 { named } else { format!("{named} and {more} more") }))
}

/// Returns the devices of a tensor whose archives are lost, as row-major indices.
fn lost_devices(
    tensor: &DistributedTensor,
    shards: &[ShardFile],
    lost: &BTreeSet<String>,
) -> Vec<u64> {
    let lost = shards.iter().filter(|shard| lost.contains(&shard.name));
    let writers: BTreeSet<u32> = lost.map(|shard| shard.writer).collect();
    let devices = (0..).zip(tensor.mesh().ranks());
    devices.filter(|(_, rank)| writers.contains(rank)).map(|(device, _)| device).collect()
}

fn describe(path: &ObjectPath, tensor: &TensorReference) -> String {
    match &tensor.shard_spec {
        Some(place) => format!("{}{}", path.fqn(), place.slice().region()),
        None => path.fqn(),
    }
}
