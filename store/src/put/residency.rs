//! Whose memory tensors are put to: the host's, or that of the GPU that they are on.

use std::borrow::Cow;
use std::collections::btree_map::{BTreeMap, Entry};
use std::sync::Arc;

use tssd_format::{Layout, Result as FormatResult, StateDict, Storage, Tensor, Value};

use super::{PutOptions, leaves};
use crate::controller::{Controller, OnDevice, digest};
use crate::environment::wait;
use crate::error::{Error, ErrorKind, Result};
use crate::ledger::{Digest, Durability, VersionId};
use crate::route::{Route, Transport};

/// Whose memory tensors of GPUs are in, once they are put.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Residency {
    /// The host's: everybody reads them, and their checksums are in the archive.
    #[default]
    Host,
    /// The GPU's, in a copy that does not change: readers of the same GPU copy from it within its memory. It takes
    /// as much memory there as what is put, for each version that is kept, and one more. Nothing looks at the bytes:
    /// there are no checksums of them. Without such memory they are put to the host's, unless
    /// [`Transport::CudaIpc`] is required.
    Device,
}

/// The GPU that an archive stays on, if it does, and how its bytes go.
pub(crate) fn choose(
    controller: &dyn Controller,
    layout: &Layout,
    options: &PutOptions,
) -> Result<(Option<OnDevice>, Route)> {
    let host = controller.route();
    if options.residency == Residency::Host {
        return Ok((None, host));
    }
    Ok(match home(controller, layout, options)? {
        Ok(device) => {
            let why = format!("its tensors are on {}", device.uuid);
            (Some(device), Route::new(Transport::CudaIpc, why))
        }
        Err(why) => {
            let why = format!("{}; not in the memory of a GPU: {why}", host.why);
            (None, Route::new(host.transport, why))
        }
    })
}

/// The GPU that an archive can stay on, or why there is none.
fn home(
    controller: &dyn Controller,
    layout: &Layout,
    options: &PutOptions,
) -> Result<std::result::Result<OnDevice, String>> {
    let invalid = |text| Err(Error::new(ErrorKind::Invalid, text));
    if options.durability != Durability::Memory {
        return invalid(
            "what must last is written from the host's memory: put it with residency=host",
        );
    }
    if options.digests {
        return invalid(
            "nobody sees the bytes in the memory of a GPU: digests need residency=host",
        );
    }
    if !controller.takes_devices() {
        return Ok(Err("that takes a daemon of this host that knows of it".to_owned()));
    }
    #[cfg(target_os = "linux")]
    let uuid = crate::cuda::home(layout);
    #[cfg(not(target_os = "linux"))]
    let uuid: std::result::Result<String, String> = Err("there are none here".to_owned());
    let len = layout.index_off();
    Ok(uuid.map(|uuid| OnDevice { uuid, len }))
}

/// What is put beside that: plain tensors that several writers put are compared by their checksums, so they are seen.
pub(crate) async fn beside<'a>(
    dict: &'a StateDict,
    is_alone: bool,
    options: &PutOptions,
) -> Result<Cow<'a, StateDict>> {
    if options.residency == Residency::Host || is_alone {
        return Ok(Cow::Borrowed(dict));
    }
    let dict = dict.clone();
    let seen = wait(move || seen(&dict).map_err(|error| Error::request("state dict", error)));
    Ok(Cow::Owned(seen.await?))
}

/// The same with all plain tensors in this process's memory; those of one storage have one there.
fn seen(dict: &StateDict) -> FormatResult<StateDict> {
    let mut storages: BTreeMap<usize, Storage> = BTreeMap::new();
    leaves::map(dict, |leaf| {
        let Value::Tensor(tensor) = leaf else { return Ok(leaf.clone()) };
        let Some(blob) = tensor.storage().blob() else { return Ok(leaf.clone()) };
        let storage = match storages.entry(Arc::as_ptr(blob).addr()) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(unknown) => unknown.insert(blob.stable(0..blob.size()?)?.into()),
        };
        let (meta, offset) = (tensor.meta().clone(), tensor.byte_offset());
        Ok(Value::Tensor(Tensor::new(meta, storage.clone(), offset)?))
    })
}

/// The digest of an archive that has bytes that nobody has seen: no other version has it.
pub(crate) fn unseen(of_shell: Digest, id: VersionId) -> Digest {
    digest(&[of_shell.0, id.0.to_le_bytes()].concat())
}
