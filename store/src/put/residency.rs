//! Whose memory tensors are put to: the host's, or that of the GPU that they are on.

use std::borrow::Cow;
use std::collections::btree_map::{BTreeMap, Entry};
use std::ops::Range;
use std::sync::Arc;

use tssd_format::{Blob, Layout, Result as FormatResult, StateDict, Storage, Tensor, Value};

use super::{PutOptions, leaves};
use crate::controller::{Controller, OnDevice, digest};
use crate::error::{Error, ErrorKind, Result};
use crate::ledger::{Digest, Durability, VersionId};
use crate::ring::Ring;
use crate::route::{Route, Transport};
use crate::work::wait;

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
    /// Nobody's, for long: it goes bucket by bucket to those who [receive](crate::Store::receiver) it now, within the memory
    /// of the GPU that it is on, or through the host's; the put returns when all of them have it, and nobody can read it
    /// later. It takes as much memory as the buckets have.
    Ring(Ring),
    /// Where they are: those who receive it copy from there, once, and nothing else is needed. That takes memory of
    /// `cuMemAlloc` (torch's, unless it has expandable segments), and processes that the driver lets open each other's:
    /// of one PID namespace. What cannot be lent goes through the ring, and `why` says so.
    Lent(Ring),
}

impl Residency {
    /// The ring that a version goes through, if it does.
    pub(crate) fn ring(self) -> Option<Ring> {
        match self {
            Self::Host | Self::Device => None,
            Self::Ring(ring) | Self::Lent(ring) => Some(ring),
        }
    }
}

/// How bytes go to the host's memory; an error at once, if that is where they go, and another way is required.
pub(crate) fn admit(controller: &dyn Controller, options: &PutOptions) -> Result<Route> {
    let host = controller.route();
    if options.residency == Residency::Host {
        host.admit(options.require)?;
    }
    Ok(host)
}

/// The GPU that an archive stays on, if it does, and how its bytes go: to the `host`'s memory if not.
pub(crate) fn choose(
    controller: &dyn Controller,
    host: Route,
    layout: &Layout,
    options: &PutOptions,
) -> Result<(Option<OnDevice>, Route)> {
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
    // All buckets are of one size, so that each is written where another one was.
    let room = options.residency.ring().map_or(0, |ring| ring.room());
    let len = layout.index_off();
    Ok(uuid.map(|uuid| OnDevice { uuid, len, room }))
}

/// What is put beside that: plain tensors that several writers put are compared by their checksums, so they are seen.
pub(crate) async fn beside<'a>(
    controller: &dyn Controller,
    dict: &'a StateDict,
    is_alone: bool,
    options: &PutOptions,
) -> Result<Cow<'a, StateDict>> {
    let may_stay = options.residency == Residency::Device && controller.takes_devices();
    if is_alone || !may_stay {
        return Ok(Cow::Borrowed(dict));
    }
    let dict = dict.clone();
    let seen = wait(move || seen(&dict).map_err(|error| Error::request("state dict", error)));
    Ok(Cow::Owned(seen.await?))
}

/// The same with all plain tensors in this process's memory: what tensors of a storage span together is copied once.
fn seen(dict: &StateDict) -> FormatResult<StateDict> {
    let mut spans: BTreeMap<usize, Vec<Range<u64>>> = BTreeMap::new();
    for (_, leaf) in dict.leaves() {
        if let Some((blob, span)) = unseen_span(leaf) {
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
        let (Value::Tensor(tensor), Some((blob, span))) = (leaf, unseen_span(leaf)) else {
            return Ok(leaf.clone());
        };
        let at = Arc::as_ptr(blob).addr();
        let known = &spans[&at];
        let whole = &known[known.partition_point(|whole| whole.start <= span.start) - 1];
        let storage = match storages.entry((at, whole.start)) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(unknown) => unknown.insert(blob.stable(whole.clone())?.into()),
        };
        let (meta, offset) = (tensor.meta().clone(), span.start - whole.start);
        Ok(Value::Tensor(Tensor::new(meta, storage.clone(), offset)?))
    })
}

/// What a plain tensor spans of memory that is not this process's.
fn unseen_span(leaf: &Value) -> Option<(&Arc<dyn Blob>, Range<u64>)> {
    let Value::Tensor(tensor) = leaf else { return None };
    let (blob, start) = (tensor.storage().blob()?, tensor.byte_offset());
    let has_elements = tensor.meta().numel() > 0;
    has_elements.then(|| (blob, start..start + tensor.meta().span_bytes()))
}

/// The digest of an archive that has bytes that nobody has seen: no other version has it.
pub(crate) fn unseen(of_shell: Digest, id: VersionId) -> Digest {
    digest(&[of_shell.0, id.0.to_le_bytes()].concat())
}

#[cfg(test)]
mod tests {
    use tssd_format::{Dtype, TensorMeta};

    use super::*;

    /// Bytes that are in no memory.
    struct Far(Vec<u8>, std::sync::Mutex<u64>);

    impl Blob for Far {
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
    fn what_is_seen_stays_tied_and_is_no_more_than_is_put() {
        let far = Arc::new(Far((0..=255).cycle().take(1000).collect(), 0.into()));
        let storage = Storage::elsewhere(far.clone()).unwrap();
        let tensor = |offset: u64, len: u64| {
            let meta = TensorMeta::new(Dtype::Uint8, &[len]).unwrap();
            Tensor::new(meta, storage.clone(), offset).unwrap()
        };
        let mut dict = StateDict::new();
        let parts = [(500, 100), (500, 100), (550, 90), (700, 7), (0, 0), (10, 5), (640, 3)];
        for (number, (offset, len)) in parts.into_iter().enumerate() {
            dict.insert(format!("{number}"), tensor(offset, len));
        }
        let seen = seen(&dict).unwrap();
        let of = |number: usize| {
            let Value::Tensor(tensor) = seen.leaf(&number.to_string()).unwrap() else { panic!() };
            tensor.clone()
        };
        for (number, (offset, len)) in
            parts.into_iter().enumerate().filter(|(_, (_, len))| *len > 0)
        {
            let [start, end] = [offset, offset + len].map(|at| usize::try_from(at).unwrap());
            assert_eq!(of(number).view().span(), &far.0[start..end], "{number}");
        }
        let place = |number: usize| of(number).view().span().as_ptr().addr();
        assert_eq!((place(0), place(2) - place(0)), (place(1), 50));
        assert_eq!(*far.1.lock().unwrap(), 140 + 7 + 5 + 3);
    }
}
