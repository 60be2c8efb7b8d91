//! Tensors that readers copy from where they are: what says where that is.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use tssd_format::{
    Archive, Dtype, Layout, Options, Piece, StateDict, Storage, Tensor, TensorMeta, Value,
};

use crate::controller::Located;
use crate::cuda::{self, DeviceSegment};
use crate::error::{Error, ErrorKind, Result};
use crate::ledger::WriterSet;
use crate::merge::{Contribution, Divergent, Label, merge};
use crate::put::{PutReport, residency};
use crate::route::{Route, Transport};
use crate::version::OpenVersion;
use crate::volume::{Archived, HEAD_BYTES, HEAD_LEN, HollowBlob, Near};
use crate::work::wait;

/// How many bytes the driver's handle of an allocation has.
pub(crate) const HANDLE_BYTES: usize = 64;

/// Memory of a device that a process lends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Loan {
    /// The process, which opens no handle of its own.
    pub(crate) process: [u8; 16],
    pub(crate) allocations: Vec<Allocation>,
    /// In the order of the file.
    pub(crate) pieces: Vec<Lent>,
}

/// What was allocated in one piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Allocation {
    pub(crate) handle: [u8; HANDLE_BYTES],
    /// Where it begins in the process that lends it.
    pub(crate) base: u64,
}

/// Bytes of a file, by where they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Lent {
    /// Where they begin in the file.
    pub(crate) at: u64,
    pub(crate) len: u64,
    /// Which allocation they are in, and from where on.
    pub(crate) allocation: u64,
    pub(crate) offset: u64,
}

/// What a bucket has in place of tensors that are lent.
pub(super) struct Lending {
    pub(super) table: StateDict,
    bytes: u64,
    allocations: usize,
}

impl Lending {
    /// What the put of the table reports, as that of what is lent.
    pub(super) fn report(&self, table: PutReport) -> PutReport {
        let why = format!("lent where it is, in {} allocations", self.allocations);
        let digest = residency::unseen(table.digest, table.id);
        PutReport { bytes: self.bytes, transport: Transport::CudaIpc, why, digest, ..table }
    }
}

/// The table of tensors that can be lent, once all that they wait for is done; or why they cannot.
pub(super) async fn of(
    bucket: &StateDict,
    device: Option<&str>,
) -> Result<std::result::Result<Lending, String>> {
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
    wait(move || {
        let failed = |error| Error::request("state dict", error);
        let layout = Layout::plan(&bucket, &Options::new()).map_err(failed)?;
        let loan = match cuda::lend(&layout)? {
            Ok(loan) => loan,
            Err(why) => return Ok(Err(why)),
        };
        let shell = shell(&layout).map_err(failed)?;
        let bytes = layout.file_len();
        let table = table(&loan, shell, bytes).map_err(failed)?;
        Ok(Ok(Lending { table, bytes, allocations: loan.allocations.len() }))
    })
    .await
}

/// What an archive has in front of its data, and what it has behind it.
fn shell(layout: &Layout) -> tssd_format::Result<Vec<u8>> {
    let mut shell = vec![0; HEAD_LEN];
    let mut filled = Vec::new();
    for job in layout.jobs() {
        filled.push(job.pieces(|at, piece| {
            if let (Ok(at), Piece::Memory(bytes)) = (usize::try_from(at), piece)
                && let Some(rest) = shell.get_mut(at..)
            {
                let len = bytes.len().min(rest.len());
                rest[..len].copy_from_slice(&bytes[..len]);
            }
            Ok(())
        })?);
    }
    shell.extend(layout.seal(filled)?);
    Ok(shell)
}

fn table(loan: &Loan, shell: Vec<u8>, file_len: u64) -> tssd_format::Result<StateDict> {
    let bytes = |bytes: Vec<u8>| -> tssd_format::Result<Tensor> {
        let len = u64::try_from(bytes.len()).expect("usize is at most 64 bits");
        Tensor::new(TensorMeta::new(Dtype::Uint8, &[len])?, Storage::from(bytes), 0)
    };
    let words = |words: Vec<u64>| bytes(words.into_iter().flat_map(u64::to_le_bytes).collect());
    let Loan { process, allocations, pieces } = loan;
    let piece = |piece: &Lent| [piece.at, piece.len, piece.allocation, piece.offset];
    let mut table = StateDict::new();
    table.insert("file_len", words(vec![file_len])?);
    table.insert("process", bytes(process.to_vec())?);
    table.insert("handles", bytes(allocations.iter().flat_map(|each| each.handle).collect())?);
    table.insert("bases", words(allocations.iter().map(|each| each.base).collect())?);
    table.insert("pieces", words(pieces.iter().flat_map(piece).collect())?);
    table.insert("shell", bytes(shell)?);
    Ok(table)
}

/// What a table says.
fn loan_of(table: &StateDict) -> Option<(Loan, Bytes, u64)> {
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
    let pieces: Vec<u64> = words("pieces")?;
    let (pieces, more) = pieces.as_chunks::<4>();
    if !rest.is_empty() || !more.is_empty() || bases.len() != handles.len() {
        return None;
    }
    let allocation =
        |(handle, base): (&[u8; HANDLE_BYTES], u64)| Allocation { handle: *handle, base };
    let piece = |[at, len, allocation, offset]: &[u64; 4]| Lent {
        at: *at,
        len: *len,
        allocation: *allocation,
        offset: *offset,
    };
    let loan = Loan {
        process: bytes("process")?.try_into().ok()?,
        allocations: handles.iter().zip(bases).map(allocation).collect(),
        pieces: pieces.iter().map(piece).collect(),
    };
    let [file_len] = *words("file_len")?.as_slice() else { return None };
    Some((loan, bytes("shell")?.into(), file_len))
}

/// What is lent, as a version, and the memory that it is in: it can be read as long as it is lent.
pub(super) fn open(
    table: &StateDict,
    bucket: &OpenVersion,
    device: &str,
) -> Result<(OpenVersion, Arc<DeviceSegment>)> {
    let broken =
        |why: &dyn std::fmt::Display| Error::new(ErrorKind::Corrupt, format_args!("a loan: {why}"));
    let (loan, shell, file_len) = loan_of(table).ok_or_else(|| broken(&"its table is none"))?;
    let hollow =
        |segment| HollowBlob::new(shell.clone(), file_len, segment).map_err(|error| broken(&error));
    let archive = Archive::from_blob(Arc::new(hollow(None)?)).map_err(|error| broken(&error))?;
    let (file, writer) = ("lent".to_owned(), 0);
    let label = Label {
        id: bucket.id.0,
        epoch: bucket.epoch,
        number: bucket.number,
        writers: WriterSet::one(writer),
        digest: bucket.digest,
    };
    let contribution = Contribution { writer, file: file.clone(), archive, is_seen: false };
    let manifest = merge(&[contribution], Divergent::default(), &label);
    let manifest = Bytes::from(manifest.map_err(|why| broken(&why))?);
    let index_off = file_len.saturating_sub(wide(shell.len()) - HEAD_BYTES);
    let segment = DeviceSegment::borrow(device, &loan, index_off)?;
    let why = format!("its owner lends it, in {} allocations", loan.allocations.len());
    let located = Located {
        id: bucket.id,
        route: Route::new(Transport::CudaIpc, why),
        manifest: Arc::new(manifest),
        archives: BTreeMap::from([(
            file,
            Archived::Near(Near::hollow(hollow(Some(segment.clone()))?)),
        )]),
        lease: Arc::new(bucket.clone()),
    };
    Ok((OpenVersion::open(located, None)?, segment))
}

fn wide(len: usize) -> u64 {
    u64::try_from(len).expect("usize is at most 64 bits")
}
