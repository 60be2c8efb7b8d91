//! Buckets whose tensors stay where they are: a bucket contains a table that says how to map them.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::sync::Arc;

use bytes::Bytes;
use tssd_format::{
    Archive, Dtype, Layout, Options, Piece, StateDict, Storage, Tensor, TensorMeta, Value,
};

use crate::blob::OpenArchive;
use crate::control::LocatedVersion;
use crate::convert::to_u64;
use crate::device::{
    self, DeviceArchive, ExportedAllocation, ExportedRange, HANDLE_BYTES, HEAD_BYTES, HEAD_LEN,
    IpcExport,
};
use crate::engine::put::{PutReport, unverified_digest};
use crate::engine::version::OpenVersion;
use crate::error::{Error, ErrorKind, Result};
use crate::io::exec::run_blocking;
use crate::io::local_archive::LocalArchive;
use crate::ledger::{VersionPosition, WriterSet};
use crate::merge::{MergeOptions, VersionAttrs, WriterArchive, merge};
use crate::route::{Route, Transport};

/// The table of exported tensors, as the state dict of a bucket.
pub(super) struct ExportTable {
    pub(super) dict: StateDict,
    /// Bytes of the archive that it describes.
    bytes: u64,
    allocations: usize,
}

impl ExportTable {
    /// Turns the report about the put of the table into one about the exported archive.
    pub(super) fn report(&self, table: PutReport) -> PutReport {
        let transport_reason = format!("in place, in {} allocations", self.allocations);
        let digest = unverified_digest(table.digest, table.id);
        PutReport {
            bytes: self.bytes,
            transport: Transport::CudaIpc,
            transport_reason,
            digest,
            ..table
        }
    }
}

/// Exports the tensors of a bucket after all work that they wait for, or says why that is impossible.
pub(super) async fn export(
    bucket: &StateDict,
    device: Option<&str>,
) -> Result<std::result::Result<ExportTable, String>> {
    if device.is_none() {
        return Ok(Err("its tensors are in the host's memory".to_owned()));
    }
    for (path, leaf) in bucket.leaves() {
        if let Value::Tensor(tensor) = leaf
            && tensor.meta().numel() > 0
            && tensor.storage().blob().is_none()
        {
            return Ok(Err(format!("`{}` is in the host's memory", path.fqn())));
        }
    }
    let bucket = bucket.clone();
    run_blocking(move || {
        let failed = |error| Error::from_request("state dict", error);
        let layout = Layout::plan(&bucket, &Options::new()).map_err(failed)?;
        let Ok(driver) = device::driver() else { return Ok(Err(device::NO_DRIVER.to_owned())) };
        let export = match driver.export(&layout)? {
            Ok(export) => export,
            Err(why) => return Ok(Err(why)),
        };
        let host_part = host_part(&layout).map_err(failed)?;
        let bytes = layout.file_len();
        let dict = to_table(&export, host_part, bytes).map_err(failed)?;
        Ok(Ok(ExportTable { dict, bytes, allocations: export.allocations.len() }))
    })
    .await
}

/// Returns the head of an archive, its index and its trailer.
fn host_part(layout: &Layout) -> tssd_format::Result<Vec<u8>> {
    let mut host_part = vec![0; HEAD_LEN];
    let mut checksums = Vec::new();
    for job in layout.jobs() {
        checksums.push(job.for_each_piece(|at, piece| {
            if let (Ok(at), Piece::Memory(bytes)) = (usize::try_from(at), piece)
                && let Some(rest) = host_part.get_mut(at..)
            {
                let len = bytes.len().min(rest.len());
                rest[..len].copy_from_slice(&bytes[..len]);
            }
            Ok(())
        })?);
    }
    host_part.extend(layout.seal(checksums)?);
    Ok(host_part)
}

fn to_table(
    export: &IpcExport,
    host_part: Vec<u8>,
    file_len: u64,
) -> tssd_format::Result<StateDict> {
    let bytes = |bytes: Vec<u8>| -> tssd_format::Result<Tensor> {
        let len = to_u64(bytes.len());
        Tensor::new(TensorMeta::new(Dtype::Uint8, &[len])?, Storage::from(bytes), 0)
    };
    let words = |words: Vec<u64>| bytes(words.into_iter().flat_map(u64::to_le_bytes).collect());
    let IpcExport { process, allocations, ranges } = export;
    let range =
        |range: &ExportedRange| [range.archive_offset, range.len, range.allocation, range.offset];
    let mut table = StateDict::new();
    table.insert("file_len", words(vec![file_len])?);
    table.insert("process", bytes(process.to_vec())?);
    table.insert("handles", bytes(allocations.iter().flat_map(|each| each.handle).collect())?);
    table.insert("bases", words(allocations.iter().map(|each| each.base).collect())?);
    table.insert("ranges", words(ranges.iter().flat_map(range).collect())?);
    table.insert("host_part", bytes(host_part)?);
    Ok(table)
}

/// Reads a table: the export, the host part of the archive, and the length of the archive in bytes.
fn from_table(table: &StateDict) -> Option<(IpcExport, Bytes, u64)> {
    let bytes = |name: &str| {
        let Some(Value::Tensor(tensor)) = table.leaf(name).ok() else { return None };
        let is_bytes = tensor.meta().dtype() == Dtype::Uint8;
        is_bytes.then(|| tensor.view().span().to_vec())
    };
    let words = |name: &str| {
        let bytes = bytes(name)?;
        let (words, rest) = bytes.as_chunks::<8>();
        rest.is_empty().then(|| words.iter().map(|word| u64::from_le_bytes(*word)).collect())
    };
    let handles = bytes("handles")?;
    let (handles, rest) = handles.as_chunks::<HANDLE_BYTES>();
    let bases: Vec<u64> = words("bases")?;
    let ranges: Vec<u64> = words("ranges")?;
    let (ranges, more) = ranges.as_chunks::<4>();
    if !rest.is_empty() || !more.is_empty() || bases.len() != handles.len() {
        return None;
    }
    let allocation =
        |(handle, base): (&[u8; HANDLE_BYTES], u64)| ExportedAllocation { handle: *handle, base };
    let range = |[archive_offset, len, allocation, offset]: &[u64; 4]| ExportedRange {
        archive_offset: *archive_offset,
        len: *len,
        allocation: *allocation,
        offset: *offset,
    };
    let export = IpcExport {
        process: bytes("process")?.try_into().ok()?,
        allocations: handles.iter().zip(bases).map(allocation).collect(),
        ranges: ranges.iter().map(range).collect(),
    };
    let [file_len] = *words("file_len")?.as_slice() else { return None };
    Some((export, bytes("host_part")?.into(), file_len))
}

/// Maps exported tensors and opens them as a version.
///
/// They are valid as long as the exporting put waits.
pub(super) fn open(
    table: &StateDict,
    bucket: &OpenVersion,
    device: &str,
) -> Result<(OpenVersion, Arc<dyn device::Segment>)> {
    let corrupt =
        |why: &dyn Display| Error::new(ErrorKind::Corrupt, format_args!("exported tensors: {why}"));
    let (export, host_part, file_len) =
        from_table(table).ok_or_else(|| corrupt(&"the table is malformed"))?;
    let archive = |segment| {
        DeviceArchive::new(host_part.clone(), file_len, segment).map_err(|error| corrupt(&error))
    };
    let index = Archive::from_blob(Arc::new(archive(None)?)).map_err(|error| corrupt(&error))?;
    let (file, writer) = ("exported".to_owned(), 0);
    let label = VersionAttrs {
        id: bucket.id.0,
        epoch: bucket.epoch,
        number: bucket.number,
        writers: WriterSet::one(writer),
        digest: bucket.digest,
    };
    let contribution =
        WriterArchive { writer, file: file.clone(), archive: index, is_readable: false };
    let manifest = merge(&[contribution], MergeOptions::default(), &label);
    let manifest = Bytes::from(manifest.map_err(|why| corrupt(&why))?);
    let index_off = file_len.saturating_sub(to_u64(host_part.len()) - HEAD_BYTES);
    let segment = device::driver()?.open_export(device, &export, index_off)?;
    let why = format!("exported by its writer, in {} allocations", export.allocations.len());
    let archive = LocalArchive::without_checksums(archive(Some(segment.clone()))?);
    let located = LocatedVersion {
        id: bucket.id,
        position: VersionPosition { epoch: bucket.epoch, number: bucket.number },
        route: Route::new(Transport::CudaIpc, why),
        manifest: Arc::new(manifest),
        archives: BTreeMap::from([(file, OpenArchive::Local(archive))]),
        lease: Arc::new(bucket.clone()),
    };
    Ok((OpenVersion::open(located, None)?, segment))
}
