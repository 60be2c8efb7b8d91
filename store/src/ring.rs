//! Versions that go to their readers through a few buckets, and stay nowhere. Spec: `spec/protocol.md`, section 11.
//!
//! A bucket is a version of a key of its own, which readers follow: it is held until each has read it, and the next one
//! but `buckets` is written where it was.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tssd_format::{
    AttrValue, Container, Dict, Error as FormatError, ErrorKind as FormatKind, Node, Region,
    ShardPlace, StateDict, Step, Tensor, TensorReference, TensorSlice, Value,
};

use crate::error::{Error, ErrorKind, Result};
use crate::follow::Follower;
use crate::get::{GetOptions, Read, Target};
use crate::key::Key;
use crate::ledger::{Digest, Refusal, WriterSet};
use crate::publish::cut;
use crate::put::{PutOptions, PutReport, Residency, Role};
use crate::route::Transport;
use crate::store::Store;
use crate::version::OpenVersion;

/// How a version goes through a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ring {
    /// How many bytes a bucket has. A tensor that is larger is cut.
    pub bucket_bytes: u64,
    /// How many buckets there are: while readers copy from one, another one is filled.
    pub buckets: NonZeroU32,
    /// How many readers must be there when the put begins.
    pub readers: u64,
}

/// Two buckets of 512 MiB, for whoever is there, one at least.
impl Default for Ring {
    fn default() -> Self {
        Self { bucket_bytes: 512 << 20, buckets: NonZeroU32::MIN.saturating_add(1), readers: 1 }
    }
}

/// What a bucket says of itself.
const MARK: &str = "tssd.ring";

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Mark {
    /// The number of the version that it is a part of.
    version: u64,
    /// The how-manieth part, from 0 on.
    part: u64,
    /// Whether it is the last one.
    #[serde(default)]
    is_last: bool,
}

/// What a piece of a tensor says of itself.
const PIECE: [&str; 3] = ["tensor", "offsets", "shape"];

/// Where the buckets of a key are, for readers of a GPU, or of the host's memory.
fn channel(key: &Key, device: Option<&str>) -> Result<Key> {
    Key::new(format!("{key}/.ring/{}", device.unwrap_or("host")))
}

/// Puts a state dict to those who [receive](Store::receiver) it now. Returns when all of them have it.
pub(crate) async fn put(
    store: &Store,
    key: &Key,
    dict: &StateDict,
    (options, ring): (&PutOptions, Ring),
) -> Result<PutReport> {
    let started = Instant::now();
    let device = home(dict)?;
    let channel = channel(key, device.as_deref())?;
    let writer = Role::of(dict, options)?.writer();
    let version = number(store, &channel, options).await?;
    let buckets = fill(dict, ring.bucket_bytes)?;
    let left = || options.timeout.saturating_sub(started.elapsed());
    let readers = readers(store, &channel, ring.readers, left()).await?;
    let residency = if device.is_some() { Residency::Device } else { Residency::Host };
    let (count, behind) = (buckets.len(), u64::from(ring.buckets.get()) - 1);
    let mut report: Option<PutReport> = None;
    let mut digests = Vec::new();
    for (part, bucket) in (0_u64..).zip(buckets) {
        taken(store, &channel, behind, left()).await?;
        let is_last = usize::try_from(part).is_ok_and(|part| part + 1 == count);
        let mark = serde_json::to_string(&Mark { version, part, is_last }).expect("it is JSON");
        let mut attrs = options.attrs.clone();
        attrs.insert(MARK.to_owned(), AttrValue::Text(mark.as_str().into()));
        let put = PutOptions {
            version: None,
            writer: Some(writer),
            writers: Some(WriterSet::one(writer)),
            attrs,
            rewind: false,
            residency,
            timeout: left(),
            ..options.clone()
        };
        let put = store.put_state_dict(&channel, &bucket, &put).await?;
        digests.extend(put.digest.0);
        match &mut report {
            None => report = Some(put),
            Some(all) => {
                all.bytes += put.bytes;
                all.phases += put.phases;
                all.id = put.id;
            }
        }
    }
    taken(store, &channel, 0, left()).await?;
    let report = report.expect("there is one bucket at least");
    let why = format!("{}; {readers} readers took it from {} buckets", report.why, ring.buckets);
    Ok(PutReport {
        version,
        digest: digest(&digests),
        why,
        seconds: started.elapsed().as_secs_f64(),
        ..report
    })
}

fn digest(digests: &[u8]) -> Digest {
    crate::controller::digest(digests)
}

/// The GPU that the tensors of a state dict are on; none if they are in the host's memory.
fn home(dict: &StateDict) -> Result<Option<String>> {
    #[cfg(target_os = "linux")]
    let homes = crate::cuda::homes(dict);
    #[cfg(not(target_os = "linux"))]
    let homes = std::collections::BTreeSet::new();
    let mut homes = homes.into_iter();
    let home = homes.next();
    match homes.next() {
        None => Ok(home),
        Some(other) => {
            let text = format_args!(
                "a ring is of one GPU, and tensors are on {} and on {other}: put what is on each by itself",
                home.unwrap_or_default()
            );
            Err(Error::new(ErrorKind::Invalid, text))
        }
    }
}

/// The number of the version that is put: the one that is asked for, or that after the last one.
async fn number(store: &Store, channel: &Key, options: &PutOptions) -> Result<u64> {
    let last = match store.open(channel, &GetOptions::default()).await {
        Ok(opened) => opened.attrs().get(MARK).and_then(mark_of).map(|mark| mark.version),
        Err(error) if error.kind() == ErrorKind::NotFound => None,
        Err(error) => return Err(error),
    };
    let next = last.map_or(1, |last| last.saturating_add(1));
    match (options.version, last) {
        (Some(number), Some(highest)) if number <= highest && !options.rewind => {
            Err(Error::refused(channel, Refusal::VersionNotNewer { number, highest }))
        }
        (Some(number), _) => Ok(number),
        (None, _) => Ok(next),
    }
}

/// Waits until so many readers are there. Says how many there are.
async fn readers(store: &Store, channel: &Key, wanted: u64, patience: Duration) -> Result<u64> {
    let until = Instant::now() + patience;
    loop {
        let (readers, _) = store.controller().unread(channel, u64::MAX, Duration::ZERO).await?;
        if readers >= wanted.max(1) {
            return Ok(readers);
        }
        if Instant::now() >= until {
            let text = format_args!(
                "`{channel}`: {readers} readers are there to receive it, {wanted} are wanted: open a receiver in each \
                 before the put"
            );
            return Err(Error::new(ErrorKind::Busy, text));
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Waits until not more than so many buckets are still to be read.
async fn taken(store: &Store, channel: &Key, at_most: u64, patience: Duration) -> Result<()> {
    let (readers, unread) = store.controller().unread(channel, at_most, patience).await?;
    if unread <= at_most {
        return Ok(());
    }
    let text = format_args!(
        "`{channel}`: {unread} buckets have not been taken by all {readers} readers for {patience:?}: `status` says \
         who holds them"
    );
    Err(Error::new(ErrorKind::Busy, text))
}

/// Buckets in the making.
struct Filling {
    limit: u64,
    bytes: u64,
    entries: Dict,
    full: Vec<StateDict>,
}

/// The tensors of a state dict in buckets of at most so many bytes.
fn fill(dict: &StateDict, limit: u64) -> Result<Vec<StateDict>> {
    let mut filling = Filling { limit, bytes: 0, entries: Dict::new(), full: Vec::new() };
    for (path, leaf) in dict.leaves() {
        let fqn = path.fqn();
        let failed = |error| Error::request(format_args!("`{fqn}`"), error);
        match leaf {
            Value::Tensor(tensor) => filling.add(&fqn, tensor, None).map_err(failed)?,
            Value::Shards(shards) => {
                for shard in shards {
                    let slice = Some(shard.slice());
                    filling.add(&fqn, shard.tensor(), slice).map_err(failed)?;
                }
            }
            _ => {
                let text = format_args!(
                    "`{fqn}` is no tensor, and a ring brings tensors alone: put it elsewhere"
                );
                return Err(Error::new(ErrorKind::Invalid, text));
            }
        }
    }
    filling.flush().map_err(|error| Error::request("state dict", error))?;
    Ok(filling.full)
}

/// How much of a bucket a tensor takes, where it lies as archives align it.
fn room_for(tensor: &Tensor) -> u64 {
    let span = tensor.meta().span_bytes();
    span.next_multiple_of(if span < 64 << 10 { 256 } else { 4096 })
}

impl Filling {
    fn add(
        &mut self,
        fqn: &str,
        tensor: &Tensor,
        slice: Option<&TensorSlice>,
    ) -> tssd_format::Result<()> {
        if room_for(tensor) <= self.limit {
            return self.add_piece(fqn, tensor, slice);
        }
        for piece in cut(tensor, self.limit)? {
            let (inner, whole) = (piece.slice(), tensor.meta().shape());
            let (start, shape) = match slice {
                Some(slice) => (slice.offsets(), slice.global_shape()),
                None => (&[][..], whole),
            };
            let offsets = inner.offsets().iter().enumerate();
            let offsets = offsets.map(|(dim, at)| at + start.get(dim).copied().unwrap_or(0));
            let offsets: Vec<u64> = offsets.collect();
            let place = TensorSlice::new(&offsets, inner.local_shape(), shape)?;
            self.add_piece(fqn, piece.tensor(), Some(&place))?;
        }
        Ok(())
    }

    fn add_piece(
        &mut self,
        fqn: &str,
        tensor: &Tensor,
        slice: Option<&TensorSlice>,
    ) -> tssd_format::Result<()> {
        let room = room_for(tensor);
        if self.bytes > 0 && self.bytes + room > self.limit {
            self.flush()?;
        }
        self.bytes += room;
        let value = Value::Tensor(tensor.clone());
        let Some(slice) = slice else {
            self.entries.insert(fqn, value);
            return Ok(());
        };
        let sizes =
            |sizes: &[u64]| Value::Size(sizes.iter().map(|size| size.cast_signed()).collect());
        let values = [value, sizes(slice.offsets()), sizes(slice.global_shape())];
        let piece = Value::Dict(PIECE.into_iter().zip(values).collect());
        if let Some(Value::List(pieces)) = self.entries.get_mut(fqn) {
            pieces.push(piece);
        } else {
            self.entries.insert(fqn, Value::List(vec![piece]));
        }
        Ok(())
    }

    fn flush(&mut self) -> tssd_format::Result<()> {
        self.bytes = 0;
        self.full.push(StateDict::from_value(Value::Dict(std::mem::take(&mut self.entries)))?);
        Ok(())
    }
}

/// Receives versions that are put with [`Residency::Ring`]: see [`Store::receiver`]. As long as it is there, such puts
/// wait for it.
#[derive(Debug)]
pub struct Receiver {
    store: Store,
    follower: Follower,
}

/// What was received.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct ReceiveReport {
    /// The number of the version.
    pub version: u64,
    /// In how many buckets it came.
    pub buckets: u64,
    /// How many bytes of tensors were copied.
    pub bytes: u64,
    /// How the bytes came.
    pub transport: Transport,
    /// Why that way.
    pub why: String,
    /// How long it took, from when its first bucket was there.
    pub seconds: f64,
}

impl Receiver {
    pub(crate) async fn new(store: &Store, key: &Key, device: Option<&str>) -> Result<Self> {
        let follower = store.follow(&channel(key, device)?).await?;
        Ok(Self { store: store.clone(), follower })
    }

    /// Fills the caller's tensors with the next version, bucket by bucket, as they come.
    ///
    /// # Errors
    ///
    /// `NotFound` if no version has come whole within `timeout`, or one does not have all that is wanted; else as
    /// [`Store::get_state_dict_into`]. [`Error::is_target_modified`] says whether a part of a version is in the
    /// targets: then the next one that comes whole mends that.
    pub async fn receive(
        &mut self,
        targets: &mut [Target<'_>],
        options: &GetOptions,
        timeout: Duration,
    ) -> Result<ReceiveReport> {
        let started = Instant::now();
        let mut is_modified = false;
        let received = self.next(targets, (options, started + timeout), &mut is_modified).await;
        received.map_err(|error| if is_modified { error.target_modified() } else { error })
    }

    async fn next(
        &mut self,
        targets: &mut [Target<'_>],
        (options, until): (&GetOptions, Instant),
        is_modified: &mut bool,
    ) -> Result<ReceiveReport> {
        let mut coming: Option<Coming> = None;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let Some(bucket) = self.follower.open(options, left).await? else {
                return Err(self.nothing(coming.as_ref()));
            };
            let mark = bucket.attrs.get(MARK).and_then(mark_of).ok_or_else(|| {
                Error::new(ErrorKind::Corrupt, format_args!("`{}`: no bucket", self.follower.key()))
            })?;
            if mark.part == 0 {
                coming = Some(Coming::new(mark.version, targets.len()));
            }
            // What began before this was there, or does not go on with what it began with.
            let Some(version) = coming.as_mut().filter(|version| version.is_next(&mark)) else {
                coming = None;
                continue;
            };
            let leaves = leaves_of(&bucket)?;
            let mut read = Read::new(&bucket, &self.store, options);
            let filled = read.fill_parts(targets, &leaves)?;
            *is_modified |= !filled.is_empty();
            version.next += 1;
            version.bytes += read.report().bytes_transferred;
            for (at, region) in filled {
                version.filled[at].push(region);
            }
            if mark.is_last {
                version.prove(targets)?;
                return Ok(ReceiveReport {
                    version: mark.version,
                    buckets: version.next,
                    bytes: version.bytes,
                    transport: bucket.route().transport,
                    why: bucket.route().why.clone(),
                    seconds: version.since.elapsed().as_secs_f64(),
                });
            }
        }
    }

    fn nothing(&self, coming: Option<&Coming>) -> Error {
        let key = self.follower.key();
        match coming {
            None => Error::new(ErrorKind::NotFound, format_args!("`{key}`: no version has come")),
            Some(coming) => {
                let (version, buckets) = (coming.version, coming.next);
                let text = format_args!(
                    "`{key}`: of version {version} {buckets} buckets have come, and no more: its writer may have ended"
                );
                Error::new(ErrorKind::NotFound, text)
            }
        }
    }
}

/// A version on its way.
struct Coming {
    version: u64,
    since: Instant,
    /// The part that comes next.
    next: u64,
    bytes: u64,
    /// The boxes of each target that have come.
    filled: Vec<Vec<Region>>,
}

impl Coming {
    fn new(version: u64, targets: usize) -> Self {
        let filled = vec![Vec::new(); targets];
        Self { version, since: Instant::now(), next: 0, bytes: 0, filled }
    }

    fn is_next(&self, mark: &Mark) -> bool {
        (self.version, self.next) == (mark.version, mark.part)
    }

    /// All that is wanted has come.
    fn prove(&self, targets: &[Target<'_>]) -> Result<()> {
        for (target, filled) in targets.iter().zip(&self.filled) {
            let wanted = match &target.place {
                Some(place) => place.slice().region(),
                None => Region::whole(target.meta.shape()),
            };
            let mut holes = vec![wanted];
            for region in filled {
                holes = holes.iter().flat_map(|hole| hole.subtract(region)).collect();
            }
            if let Some(hole) = holes.into_iter().find(|hole| !hole.is_empty()) {
                let error =
                    FormatError::new(FormatKind::Uncovered).at(&*target.fqn).in_region(hole);
                return Err(Error::request(format_args!("version {}", self.version), error));
            }
        }
        Ok(())
    }
}

fn mark_of(attr: &AttrValue) -> Option<Mark> {
    let AttrValue::Text(text) = attr else { return None };
    serde_json::from_slice(text.as_bytes()).ok()
}

/// The tensors of a bucket, each with what of it is there.
fn leaves_of(bucket: &OpenVersion) -> Result<BTreeMap<String, Vec<TensorReference>>> {
    let broken = || Error::new(ErrorKind::Corrupt, "a bucket that says wrongly what is in it");
    let root = bucket.tree(None)?;
    let Node::Container(Container::Dict, children) = &*root else { return Err(broken()) };
    let mut leaves = BTreeMap::new();
    for (step, child) in children {
        let Step::Key(tssd_format::Key::Str(fqn)) = step else { return Err(broken()) };
        let references = match child {
            Node::Tensors(run) => run.clone(),
            Node::Container(Container::List, pieces) => pieces
                .iter()
                .map(|(_, piece)| piece_of(piece))
                .collect::<Option<_>>()
                .ok_or_else(broken)?,
            _ => return Err(broken()),
        };
        leaves.insert(fqn.to_string(), references);
    }
    Ok(leaves)
}

/// A piece of a tensor, with its place.
fn piece_of(piece: &Node) -> Option<TensorReference> {
    let Node::Container(Container::Dict, children) = piece else { return None };
    let [
        (_, Node::Tensors(run)),
        (_, Node::Leaf(Value::Size(offsets))),
        (_, Node::Leaf(Value::Size(shape))),
    ] = children.as_slice()
    else {
        return None;
    };
    let [reference] = run.as_slice() else { return None };
    let sizes = |sizes: &[i64]| sizes.iter().map(|size| u64::try_from(*size).ok()).collect();
    let (offsets, shape): (Option<Vec<u64>>, Option<Vec<u64>>) = (sizes(offsets), sizes(shape));
    let slice = TensorSlice::new(&offsets?, reference.meta.shape(), &shape?).ok()?;
    Some(TensorReference { place: Some(ShardPlace::new(slice)), ..reference.clone() })
}
