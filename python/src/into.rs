//! The caller's own tensors, which a get fills.
#![expect(unsafe_code, reason = "the memory of tensors belongs to Python")]

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyTuple};
use tssd_format::{Key, MAX_DEPTH, ObjectPath, ShardPlace, Step, Tensor, TensorMeta};
use tssd_store::{GetReport, Opened, Target};

use crate::error::{Refusal, Result};
use crate::value::{key_of, lent};

/// One tensor to fill, or one box of it.
pub(crate) struct Place {
    pub(crate) fqn: String,
    part: Option<ShardPlace>,
    meta: TensorMeta,
    start: usize,
    len: usize,
    /// It keeps the memory.
    _tensor: Tensor,
}

/// The tensors in a nested object, by their fqns.
pub(crate) fn places(object: &Bound<'_, PyAny>) -> Result<Vec<Place>> {
    let mut places = Vec::new();
    gather(object, &mut Vec::new(), &mut places)?;
    Ok(places)
}

/// A tensor of this fqn.
pub(crate) fn places_of(object: &Bound<'_, PyAny>, fqn: &str) -> Result<Vec<Place>> {
    let tensors = lent(object)?.ok_or_else(|| {
        Refusal::leaf("`into` is no tensor", "give a tensor, a TensorShard or an array")
    })?;
    Ok(tensors.into_iter().map(|(tensor, part)| Place::new(fqn.to_owned(), tensor, part)).collect())
}

fn gather(object: &Bound<'_, PyAny>, path: &mut Vec<Step>, places: &mut Vec<Place>) -> Result<()> {
    let here = |path: &[Step]| path.iter().cloned().collect::<ObjectPath>();
    if path.len() > MAX_DEPTH {
        return Err(Refusal::leaf("`into` is nested too deeply", "make it flatter").into());
    }
    let mut child = |step: Step, object: &Bound<'_, PyAny>, path: &mut Vec<Step>| {
        path.push(step);
        let gathered = gather(object, path, places);
        path.pop();
        gathered
    };
    if let Ok(dict) = object.cast::<PyDict>() {
        for item in dict.items().iter() {
            let key: Key =
                key_of(&item.get_item(0)?, MAX_DEPTH).map_err(|error| error.at(&here(path)))?;
            child(Step::Key(key), &item.get_item(1)?, path)?;
        }
        return Ok(());
    }
    let items = match object.cast::<PyList>() {
        Ok(list) => Some(list.to_tuple()),
        Err(_) => object.cast::<PyTuple>().ok().cloned(),
    };
    if let Some(items) = items {
        for (index, item) in (0..).zip(items.iter()) {
            child(Step::Index(index), &item, path)?;
        }
        return Ok(());
    }
    let tensors = lent(object).map_err(|error| error.at(&here(path)))?;
    let fqn = here(path).fqn();
    let found = tensors.into_iter().flatten();
    places.extend(found.map(|(tensor, part)| Place::new(fqn.clone(), tensor, part)));
    Ok(())
}

impl Place {
    fn new(fqn: String, tensor: Tensor, part: Option<ShardPlace>) -> Self {
        let meta = tensor.meta().clone();
        let start = tensor.storage().bytes().as_ptr().addr()
            + usize::try_from(tensor.byte_offset()).expect("it is in memory");
        let len = usize::try_from(meta.span_bytes()).expect("it is in memory");
        Self { fqn, part, meta, start, len, _tensor: tensor }
    }

    /// Whether it is the same memory, as a tied tensor is.
    fn is(&self, other: &Self) -> bool {
        self.fqn == other.fqn
            && self.start == other.start
            && self.meta == other.meta
            && self.part.as_ref().map(ShardPlace::slice)
                == other.part.as_ref().map(ShardPlace::slice)
    }

    fn overlaps(&self, other: &Self) -> bool {
        self.start < other.start + other.len && other.start < self.start + self.len
    }
}

/// Fills all of them. Memory that interleaves is filled one after the other.
pub(crate) fn fill(opened: &Opened, places: Vec<Place>) -> Result<GetReport> {
    let mut rounds: Vec<Vec<Place>> = vec![Vec::new()];
    for place in places {
        if rounds.iter().flatten().any(|other| other.is(&place)) {
            continue;
        }
        let fits = |round: &Vec<Place>| !round.iter().any(|other| other.overlaps(&place));
        match rounds.iter().position(fits) {
            Some(round) => rounds[round].push(place),
            None => rounds.push(vec![place]),
        }
    }
    let mut all: Option<GetReport> = None;
    for round in &rounds {
        let mut targets: Vec<Target<'_>> = round.iter().map(target).collect();
        let report = opened.fill(&mut targets)?;
        all = Some(match all {
            None => report,
            Some(mut all) => {
                all.bytes_needed += report.bytes_needed;
                all.bytes_transferred += report.bytes_transferred;
                all.bytes_verified += report.bytes_verified;
                all.plan_seconds += report.plan_seconds;
                all.seconds += report.seconds;
                all
            }
        });
    }
    Ok(all.expect("there is a round"))
}

fn target(place: &Place) -> Target<'_> {
    let bytes: &mut [u8] = if place.len == 0 {
        &mut []
    } else {
        let start = std::ptr::with_exposed_provenance_mut(place.start);
        // SAFETY: `lent` has proven that the tensor, which the place keeps, has these bytes and may be
        // written to. No other target of a round has one of them (see `fill`), and rounds follow one
        // another. That Python looks at a tensor that is being filled is a race in the caller's program,
        // as with torch's own `copy_`.
        unsafe { std::slice::from_raw_parts_mut(start, place.len) }
    };
    Target { fqn: place.fqn.clone(), place: place.part.clone(), meta: place.meta.clone(), bytes }
}
