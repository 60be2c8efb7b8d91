//! Which memory holds the tensors of a put: host memory, or that of their GPU.

use std::borrow::Cow;
use std::collections::btree_map::{BTreeMap, Entry};
use std::ops::Range;
use std::sync::Arc;

use tssd_format::{Blob, Layout, Result as FormatResult, StateDict, Storage, Tensor, Value};

use super::{PutOptions, Residency, leaves};
use crate::control::{Controller, DeviceMemoryRequest};
#[cfg(target_os = "linux")]
use crate::device;
use crate::error::{Error, ErrorKind, Result};
use crate::io::exec::run_blocking;
use crate::ledger::{ArchiveDigest, Durability, VersionId};
use crate::route::{Route, Transport};

/// Returns the route to host memory. It must be the required one if the tensors go to host memory.
pub(super) fn admit(controller: &dyn Controller, options: &PutOptions) -> Result<Route> {
    let host = controller.route();
    if options.residency == Residency::Host {
        host.check_required(options.require_transport)?;
    }
    Ok(host)
}

/// Returns the device that keeps an archive, and the route of the archive.
///
/// Without a device the archive goes to host memory.
pub(super) fn choose(
    controller: &dyn Controller,
    host: Route,
    layout: &Layout,
    options: &PutOptions,
) -> Result<(Option<DeviceMemoryRequest>, Route)> {
    if options.residency == Residency::Host {
        return Ok((None, host));
    }
    Ok(match find_device(controller, layout, options)? {
        Ok(device) => {
            let why = format!("its tensors are on {}", device.uuid);
            (Some(device), Route::new(Transport::CudaIpc, why))
        }
        Err(why) => {
            let why = format!("{}; not in the memory of a GPU: {why}", host.reason);
            (None, Route::new(host.transport, why))
        }
    })
}

/// Returns the device that can keep an archive, or why there is none.
fn find_device(
    controller: &dyn Controller,
    layout: &Layout,
    options: &PutOptions,
) -> Result<std::result::Result<DeviceMemoryRequest, String>> {
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
    if !controller.supports_device_memory() {
        return Ok(Err("that takes a daemon of this host that knows of it".to_owned()));
    }
    #[cfg(target_os = "linux")]
    let uuid = device::driver().map_err(|_| device::NO_DRIVER.to_owned());
    #[cfg(target_os = "linux")]
    let uuid = uuid.and_then(|driver| driver.device_of(layout));
    #[cfg(not(target_os = "linux"))]
    let uuid: std::result::Result<String, String> = Err("there are none here".to_owned());
    // All buckets have one size, so that each reuses the memory of an earlier one.
    let min_capacity = options.residency.ring().map_or(0, |ring| ring.max_data_bytes());
    let len = layout.index_off();
    Ok(uuid.map(|uuid| DeviceMemoryRequest { uuid, len, min_capacity }))
}

/// Returns the dict with plain tensors in host memory if other writers put them too.
///
/// The merge compares such tensors by their checksums.
pub(super) async fn visible_tensors<'a>(
    controller: &dyn Controller,
    dict: &'a StateDict,
    is_alone: bool,
    options: &PutOptions,
) -> Result<Cow<'a, StateDict>> {
    let may_stay = options.residency == Residency::Device && controller.supports_device_memory();
    if is_alone || !may_stay {
        return Ok(Cow::Borrowed(dict));
    }
    let dict = dict.clone();
    let visible = run_blocking(move || {
        to_host(&dict).map_err(|error| Error::from_request("state dict", error))
    });
    Ok(Cow::Owned(visible.await?))
}

/// Copies all plain tensors to host memory.
///
/// Overlapping tensors of one storage are copied once, and stay tied.
fn to_host(dict: &StateDict) -> FormatResult<StateDict> {
    let mut spans: BTreeMap<usize, Vec<Range<u64>>> = BTreeMap::new();
    for (_, leaf) in dict.leaves() {
        if let Some((blob, span)) = device_span(leaf) {
            spans.entry(Arc::as_ptr(blob).addr()).or_default().push(span);
        }
    }
    for spans in spans.values_mut() {
        spans.sort_unstable_by_key(|span| span.start);
        spans.dedup_by(|next, span| {
            let touches = next.start < span.end;
            if touches {
                span.end = span.end.max(next.end);
            }
            touches
        });
    }
    let mut storages: BTreeMap<(usize, u64), Storage> = BTreeMap::new();
    leaves::map(dict, |leaf| {
        let (Value::Tensor(tensor), Some((blob, span))) = (leaf, device_span(leaf)) else {
            return Ok(leaf.clone());
        };
        let at = Arc::as_ptr(blob).addr();
        let known = &spans[&at];
        let whole = &known[known.partition_point(|whole| whole.start <= span.start) - 1];
        let storage = match storages.entry((at, whole.start)) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(unknown) => unknown.insert(blob.read_stable(whole.clone())?.into()),
        };
        let (meta, offset) = (tensor.meta().clone(), span.start - whole.start);
        Ok(Value::Tensor(Tensor::new(meta, storage.clone(), offset)?))
    })
}

/// Returns the span of a plain tensor in memory that this process cannot address.
fn device_span(leaf: &Value) -> Option<(&Arc<dyn Blob>, Range<u64>)> {
    let Value::Tensor(tensor) = leaf else { return None };
    let (blob, start) = (tensor.storage().blob()?, tensor.byte_offset());
    let has_elements = tensor.meta().numel() > 0;
    has_elements.then(|| (blob, start..start + tensor.meta().span_bytes()))
}

/// Returns the digest of an archive whose data have no checksums. It is unique to the version.
pub(crate) fn unverified_digest(of_host_part: ArchiveDigest, id: VersionId) -> ArchiveDigest {
    ArchiveDigest::compute(&[of_host_part.0, id.0.to_le_bytes()].concat())
}

#[cfg(test)]
mod tests {
    use tssd_format::{Dtype, TensorMeta};

    use super::*;

    /// Bytes without an address. Counts the bytes that are read.
    struct CountingBlob(Vec<u8>, std::sync::Mutex<u64>);

    impl Blob for CountingBlob {
        fn size(&self) -> std::io::Result<u64> {
            self.0.as_slice().len().try_into().map_err(std::io::Error::other)
        }

        fn read_exact_at(&self, target: &mut [u8], offset: u64) -> std::io::Result<()> {
            let start = usize::try_from(offset).unwrap();
            target.copy_from_slice(&self.0[start..start + target.len()]);
            *self.1.lock().unwrap() += u64::try_from(target.len()).unwrap();
            Ok(())
        }

        fn bytes(&self) -> Option<&bytes::Bytes> {
            None
        }
    }

    #[test]
    fn tied_tensors_stay_tied_and_are_copied_once() {
        let blob = Arc::new(CountingBlob((0..=255).cycle().take(1000).collect(), 0.into()));
        let storage = Storage::from_blob(blob.clone()).unwrap();
        let tensor = |offset: u64, len: u64| {
            let meta = TensorMeta::new(Dtype::Uint8, &[len]).unwrap();
            Tensor::new(meta, storage.clone(), offset).unwrap()
        };
        let mut dict = StateDict::new();
        let parts = [(500, 100), (500, 100), (550, 90), (700, 7), (0, 0), (10, 5), (640, 3)];
        for (number, (offset, len)) in parts.into_iter().enumerate() {
            dict.insert(format!("{number}"), tensor(offset, len));
        }
        let host = to_host(&dict).unwrap();
        let of = |number: usize| {
            let Value::Tensor(tensor) = host.leaf(&number.to_string()).unwrap() else { panic!() };
            tensor.clone()
        };
        for (number, (offset, len)) in
            parts.into_iter().enumerate().filter(|(_, (_, len))| *len > 0)
        {
            let [start, end] = [offset, offset + len].map(|at| usize::try_from(at).unwrap());
            assert_eq!(of(number).view().span(), &blob.0[start..end], "{number}");
        }
        let place = |number: usize| of(number).view().span().as_ptr().addr();
        assert_eq!((place(0), place(2) - place(0)), (place(1), 50));
        assert_eq!(*blob.1.lock().unwrap(), 140 + 7 + 5 + 3);
    }
}
