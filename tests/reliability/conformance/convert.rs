//! Conversion between model types and store types: puts, reads and their outcomes.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::time::Duration;

use tssd_format::{
    DeviceMesh, Dtype, Region, Shard, ShardSpec, StateDict, Tensor, TensorMeta, TensorSlice, Value,
};
use tssd_store::ledger::Reason;
use tssd_store::{
    DivergencePolicy, Durability, Error, ErrorKind, GetOptions, JobId, Key, PutOptions, PutReport,
    Refusal, Rewind, Store, Target, VersionId, WriterSet,
};

use super::operations::{ArrayBox, COLUMNS, LEAVES, PutSpec, ROWS, Read};
use crate::conformance::types::{
    Array, Contribution, Dict, DropReason, Extent, Kind, ModelError, Writers,
};

/// Result of a put: number, epoch, visibility, missing writers.
pub(crate) type PutResult = (u64, u32, bool, Writers);

pub(crate) fn put_result(report: &PutReport) -> PutResult {
    (report.version, report.epoch, report.visible, writer_ids(&report.missing))
}

pub(crate) fn writer_ids(writers: &WriterSet) -> Writers {
    writers.iter().collect()
}

/// Outcome of an operation that the store was killed in before it answered.
pub(crate) const UNANSWERED: &str = "Lost";

/// Outcome of an operation as text, for comparison.
pub(crate) type Outcome = Result<String, String>;

pub(crate) fn model_outcome<T: Debug>(answer: Result<T, ModelError>) -> Outcome {
    match answer {
        Ok(answer) => Ok(format!("{answer:?}")),
        Err(fault) => Err(format!("{fault:?}, {}", error_kind(&fault).name())),
    }
}

pub(crate) fn store_outcome<T: Debug, E: std::borrow::Borrow<Error>>(
    answer: Result<T, E>,
) -> Outcome {
    let answer = match answer {
        Ok(answer) => return Ok(format!("{answer:?}")),
        Err(error) => error,
    };
    let error = answer.borrow();
    Err(match to_model_error(error) {
        Some(fault) => format!("{fault:?}, {}", error.kind().name()),
        None if error.kind() == ErrorKind::Unreachable => UNANSWERED.to_owned(),
        None => format!("{}: {error}", error.kind().name()),
    })
}

/// Returns the kind of store error that a model error corresponds to.
fn error_kind(fault: &ModelError) -> ErrorKind {
    match fault {
        ModelError::Invalid => ErrorKind::Invalid,
        ModelError::Busy => ErrorKind::Busy,
        ModelError::NotFound { .. }
        | ModelError::Gone
        | ModelError::LeafNotFound
        | ModelError::WaitTimedOut => ErrorKind::NotFound,
        ModelError::Dropped(DropReason::Rejected) => ErrorKind::Rejected,
        ModelError::Dropped(DropReason::Superseded { .. } | DropReason::Deleted) => {
            ErrorKind::Overtaken
        }
        _ => ErrorKind::Refused,
    }
}

/// Converts a store error to a model error. Returns `None` if the model has no such error.
fn to_model_error(error: &Error) -> Option<ModelError> {
    let Some(refusal) = error.refusal() else {
        return match error.kind() {
            ErrorKind::Invalid => Some(ModelError::Invalid),
            ErrorKind::Busy => Some(ModelError::Busy),
            ErrorKind::NotFound if error.to_string().contains("was put within") => {
                Some(ModelError::WaitTimedOut)
            }
            ErrorKind::NotFound => Some(ModelError::LeafNotFound),
            _ => None,
        };
    };
    Some(match refusal {
        Refusal::NotAWriter { .. } => ModelError::NotAWriter,
        Refusal::JobRequired { .. } => ModelError::JobRequired,
        Refusal::JobsDisagree { .. } => ModelError::JobsDisagree,
        Refusal::WritersDisagree { .. } => ModelError::WritersDisagree,
        Refusal::DurabilityDisagrees { .. } => ModelError::DurabilityDisagrees,
        Refusal::VersionNotNewer { highest, .. } => ModelError::NotNewer { highest: *highest },
        Refusal::StaleSequence { .. } => ModelError::StaleSequence,
        Refusal::NotBegun { .. } => ModelError::NotBegun,
        Refusal::ContributionDiffers { .. } => ModelError::ContributionDiffers,
        Refusal::DataDeleted { .. } => ModelError::Gone,
        Refusal::NotFound { newest, newest_open, .. } => ModelError::NotFound {
            newest: *newest,
            open: newest_open.as_ref().map(|open| (open.number, writer_ids(&open.missing))),
        },
        // The store reports one or the other, depending on whether it checks the job or the version
        // first.
        Refusal::Fenced { .. } | Refusal::Dropped { reason: Reason::Fenced { .. }, .. } => {
            ModelError::Fenced
        }
        Refusal::Dropped { reason, .. } => ModelError::Dropped(match reason {
            Reason::Superseded { number } => DropReason::Superseded { by: *number },
            Reason::Rejected { .. } => DropReason::Rejected,
            Reason::Aborted { .. } => DropReason::Aborted,
            Reason::Deleted => DropReason::Deleted,
            _ => return None,
        }),
        _ => return None,
    })
}

/// Returns the options of a put. If it would wait, the timeout is zero: no other client runs meanwhile.
pub(crate) fn put_options(wish: &PutSpec, is_busy: bool) -> PutOptions {
    PutOptions {
        version: wish.number,
        writer: Some(wish.writer),
        writers: (!wish.infers_writers).then(|| (0..wish.writer_count).collect()),
        job: wish.job.map(|job| JobId(format!("job-{job}"))),
        on_divergence: if wish.takes_lowest {
            DivergencePolicy::Lowest
        } else {
            DivergencePolicy::Error
        },
        rewind: if wish.rewind { Rewind::Always } else { Rewind::Never },
        durability: if wish.durable { Durability::Disk } else { Durability::Memory },
        timeout: if is_busy { Duration::ZERO } else { Duration::from_secs(20) },
        ..PutOptions::default()
    }
}

fn element_values(array: &Array) -> Vec<u32> {
    array.elements.values().copied().collect()
}

fn to_tensor(array: &Array, shape: &[u64]) -> Tensor {
    match array.kind {
        Kind::Int32 => {
            let words: Vec<i32> = element_values(array).into_iter().map(u32::cast_signed).collect();
            Tensor::from_slice(&words, shape).unwrap()
        }
        _ => Tensor::from_slice(&element_values(array), shape).unwrap(),
    }
}

/// Builds the state dict that the store receives for a contribution.
pub(crate) fn build_state_dict(part: &Contribution, wish: &PutSpec) -> StateDict {
    let mut dict = StateDict::new();
    for (name, array, extent) in &part.leaves {
        let (rows, columns) = array.shape;
        let value: Value = match (extent, array.kind) {
            (Extent::Whole, Kind::Number) => i64::from(element_values(array)[0]).into(),
            (Extent::Whole, _) => to_tensor(array, &[rows, columns]).into(),
            (Extent::Slice, _) => {
                let (first, after) = wish.rows();
                let local = [after - first, columns];
                let mut slice = TensorSlice::new(&[first, 0], &local, &[rows, columns]).unwrap();
                let of = u64::from(wish.writer_count);
                if wish.infers_writers {
                    slice = slice.with_mesh(&[of], Some(&[wish.writer.into()])).unwrap();
                }
                let mut place = ShardSpec::new(slice);
                if wish.infers_writers {
                    place = place.with_mesh(DeviceMesh::from_shape(&[of]).unwrap()).unwrap();
                }
                Shard::new(to_tensor(array, &local), place).unwrap().into()
            }
        };
        dict.insert(name.as_str(), value);
    }
    dict
}

/// Returns a box of an array.
///
/// # Errors
///
/// [`Fault::Invalid`] if the box is not inside the array.
fn crop(array: &Array, (row, column, rows, columns): ArrayBox) -> Result<Array, ModelError> {
    if row + rows > array.shape.0 || column + columns > array.shape.1 {
        return Err(ModelError::Invalid);
    }
    let is_inside = |place: &(u64, u64)| {
        (row..row + rows).contains(&place.0) && (column..column + columns).contains(&place.1)
    };
    let elements = array.elements.iter().filter(|(place, _)| is_inside(place));
    Ok(Array { elements: elements.map(|(place, word)| (*place, *word)).collect(), ..array.clone() })
}

/// Contents of a state dict as a reader receives them: arrays by leaf name.
pub(crate) type Arrays = Vec<(String, Vec<Array>)>;

pub(crate) fn expected_arrays(dict: &Dict, read: &Read) -> Result<Arrays, ModelError> {
    let leaf = |leaf: usize| {
        let found = dict.iter().find(|(name, _)| name == LEAVES[leaf]);
        found.map(|(_, array)| array).ok_or(ModelError::LeafNotFound)
    };
    let single = |at: usize, array: Array| (LEAVES[at].to_owned(), vec![array]);
    match read {
        Read::Whole => {
            Ok(dict.iter().map(|(name, array)| (name.clone(), vec![array.clone()])).collect())
        }
        Read::Tensor(at) => Ok(vec![single(*at, leaf(*at)?.clone())]),
        Read::Slice(at, part) => Ok(vec![single(*at, crop(leaf(*at)?, *part)?)]),
        Read::Into(targets) => {
            let target = |(at, part): &(usize, Option<ArrayBox>)| {
                let array = leaf(*at)?;
                let array = part.map_or_else(|| Ok(array.clone()), |part| crop(array, part))?;
                Ok(single(*at, array))
            };
            targets.iter().map(target).collect()
        }
        Read::Resharded(parts) => dict
            .iter()
            .map(|(name, array)| {
                let cuts = parts.iter().map(|part| crop(array, *part));
                let is_cut = name == LEAVES[0];
                let arrays =
                    if is_cut { cuts.collect::<Result<_, _>>()? } else { vec![array.clone()] };
                Ok((name.clone(), arrays))
            })
            .collect(),
    }
}

/// Returns the position of a box in an array of this shape.
///
/// If the box exceeds the shape, the global shape grows to contain it, so that the target fits no
/// leaf.
fn shard_place(part: ArrayBox, shape: (u64, u64)) -> ShardSpec {
    let (row, column, rows, columns) = part;
    let global = [shape.0.max(row + rows), shape.1.max(column + columns)];
    ShardSpec::new(TensorSlice::new(&[row, column], &[rows, columns], &global).unwrap())
}

/// Reads from the store. Also returns the id of the version, where the store reports it.
pub(crate) async fn read(
    store: &Store,
    key: &Key,
    options: &GetOptions,
    read: &Read,
    dict: &Dict,
) -> Result<(Arrays, Option<VersionId>), Error> {
    let find_array =
        |at: usize| dict.iter().find(|(name, _)| name == LEAVES[at]).map(|(_, array)| array);
    let shape = |at: usize| find_array(at).map_or((ROWS, COLUMNS), |array| array.shape);
    let single = |at: usize, array: Array| vec![(LEAVES[at].to_owned(), vec![array])];
    match read {
        Read::Whole => {
            let (dict, report) = store.get_state_dict(key, options).await?;
            Ok((to_arrays(&dict), Some(report.id)))
        }
        Read::Tensor(at) => {
            let tensor = store.get(key, LEAVES[*at], options).await?;
            Ok((single(*at, to_array(&tensor, (0, 0), shape(*at))), None))
        }
        Read::Slice(at, (row, column, rows, columns)) => {
            let region = Region::new(&[*row, *column], &[*rows, *columns]).unwrap();
            let tensor = store.get_slice(key, LEAVES[*at], &region, options).await?;
            Ok((single(*at, to_array(&tensor, (*row, *column), shape(*at))), None))
        }
        Read::Into(targets) => {
            let metas = targets.iter().map(|(at, part)| {
                let kind = find_array(*at).map_or(Kind::Uint32, |array| array.kind);
                let dtype = if kind == Kind::Int32 { Dtype::Int32 } else { Dtype::Uint32 };
                let (rows, columns) =
                    part.map_or(shape(*at), |(_, _, rows, columns)| (rows, columns));
                TensorMeta::new(dtype, &[rows, columns]).unwrap()
            });
            let metas: Vec<TensorMeta> = metas.collect();
            let mut memory: Vec<Vec<u8>> = metas
                .iter()
                .map(|meta| vec![0xEE; usize::try_from(meta.nbytes()).unwrap()])
                .collect();
            let places =
                targets.iter().map(|(at, part)| part.map(|part| shard_place(part, shape(*at))));
            let mut into: Vec<Target<'_>> = places
                .zip(&metas)
                .zip(&mut memory)
                .zip(targets)
                .map(|(((place, meta), bytes), (at, _))| Target {
                    fqn: LEAVES[*at].to_owned(),
                    shard_spec: place,
                    meta: meta.clone(),
                    memory: bytes.into(),
                })
                .collect();
            let filled = store.get_state_dict_into(key, &mut into, options).await;
            let is_touched = memory.iter().flatten().any(|byte| *byte != 0xEE);
            let report = filled.inspect_err(|error| {
                let is_unanswered = error.kind() == ErrorKind::Unreachable;
                assert!(is_unanswered || !is_touched, "{error}, and memory is touched");
            })?;
            let mut arrays = Arrays::new();
            for (((at, part), meta), bytes) in targets.iter().zip(metas).zip(memory) {
                let tensor = Tensor::new(meta, bytes.into(), 0).unwrap();
                let offset = part.map_or((0, 0), |(row, column, ..)| (row, column));
                arrays.extend(single(*at, to_array(&tensor, offset, shape(*at))));
            }
            Ok((arrays, Some(report.id)))
        }
        Read::Resharded(parts) => {
            let places = parts.iter().map(|part| shard_place(*part, shape(0))).collect();
            let slices = BTreeMap::from([(LEAVES[0].to_owned(), places)]);
            let options = GetOptions { slices, ..options.clone() };
            let (dict, report) = store.get_state_dict(key, &options).await?;
            Ok((to_arrays(&dict), Some(report.id)))
        }
    }
}

fn to_arrays(dict: &StateDict) -> Arrays {
    let arrays = |value: &Value| match value {
        Value::Tensor(tensor) => {
            let shape = tensor.meta().shape();
            vec![to_array(tensor, (0, 0), (shape[0], shape[1]))]
        }
        Value::Shards(shards) => {
            let array = |shard: &Shard| {
                let (offsets, shape) = (shard.slice().offsets(), shard.slice().global_shape());
                to_array(shard.tensor(), (offsets[0], offsets[1]), (shape[0], shape[1]))
            };
            shards.iter().map(array).collect()
        }
        Value::Int(number) => {
            let number = u32::try_from(number.as_i64().unwrap()).unwrap();
            let elements = BTreeMap::from([((0, 0), number)]);
            vec![Array { kind: Kind::Number, shape: (1, 1), elements }]
        }
        other => panic!("nobody put {other:?}"),
    };
    let leaves = dict.leaves();
    leaves.iter().map(|(path, value)| (path.fqn(), arrays(value))).collect()
}

/// Returns a tensor as the part of an array that begins at `offset`.
pub(crate) fn to_array(tensor: &Tensor, offset: (u64, u64), shape: (u64, u64)) -> Array {
    let kind = match tensor.meta().dtype() {
        Dtype::Int32 => Kind::Int32,
        Dtype::Uint32 => Kind::Uint32,
        other => panic!("nobody put {other}"),
    };
    let bytes = tensor.view().to_contiguous(1 << 20).unwrap();
    let words = bytes.chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().unwrap()));
    let local = tensor.meta().shape();
    let places = (0..local[0]).flat_map(|row| (0..local[1]).map(move |column| (row, column)));
    let places = places.map(|(row, column)| (offset.0 + row, offset.1 + column));
    Array { kind, shape, elements: places.zip(words).collect() }
}
