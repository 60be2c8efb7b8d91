//! Putting: one writer's contribution to a version.

mod leaves;
mod replicas;
pub(crate) mod residency;
mod role;

use std::collections::BTreeMap;
use std::ops::AddAssign;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tracing::{Instrument, Span};
use tssd_format::{
    AttrValue, Attrs, Chunks, Compression, Draft, Fill, Filled, Layout, Options, Pack, StateDict,
};

use self::replicas::without_replicas;
pub use self::residency::Residency;
pub(crate) use self::role::Role;
use crate::controller::{
    Begun, Carrier, Committed, Contribution, Controller, DIVERGENT, Progress, Proposal, Storing,
    digest,
};
use crate::error::{Error, ErrorKind, Result};
use crate::key::Key;
use crate::ledger::{Digest, Durability, JobId, VersionId, WriterSet};
use crate::merge::Divergent;
use crate::parallel;
use crate::route::{Route, Transport};
use crate::sync::boxed;
use crate::volume::{Part, split};
use crate::work::{BRIEF, at_once, wait};

/// How a state dict is put. The default suits one writer.
#[derive(Clone, Debug)]
pub struct PutOptions {
    /// The number of the version, such as the training step; none is the highest + 1.
    pub version: Option<u64>,
    /// Who puts: the global rank. None is the rank that the dict's meshes say, or the one writer.
    pub writer: Option<u32>,
    /// Everyone who contributes to the version. None is all ranks of the dict's meshes, or one
    /// writer if it has none.
    pub writers: Option<WriterSet>,
    /// The run that the contribution belongs to: the same in all writers, new in every run. One writer
    /// alone needs none.
    pub job: Option<JobId>,
    /// What is said of the state dict as a whole, such as safetensors' metadata. Writers must agree
    /// on what they all say.
    pub attrs: Attrs,
    /// What becomes of a plain leaf that writers hold differently.
    pub divergent: Divergent,
    /// Which replicas of a shard are stored.
    pub replicas: Replicas,
    /// Whether a version that is not above the highest opens a new epoch.
    pub rewind: bool,
    /// Whether leaves that are no typed values are taken ([`tssd_format::Value::Opaque`]).
    pub allow_opaque: bool,
    /// How storages are compressed: not at all by default, so that reading is one copy. What must last
    /// can be kept small.
    pub compression: Compression,
    /// Whether the archive gets digests: one BLAKE3 for each storage, and one for all.
    pub digests: bool,
    /// Whether the version is to outlive the daemon that holds it, or its host; all writers must say the same.
    /// A store in a directory keeps all that is put on disk, and one in a bucket there.
    pub durability: Durability,
    /// Whose memory tensors of GPUs are in, once they are put.
    pub residency: Residency,
    /// How the bytes must go; none: any way is good.
    pub require: Option<Transport>,
    /// For how long to wait for others at most.
    pub timeout: Duration,
}

impl Default for PutOptions {
    fn default() -> Self {
        Self {
            version: None,
            writer: None,
            writers: None,
            job: None,
            attrs: Attrs::new(),
            divergent: Divergent::default(),
            replicas: Replicas::default(),
            rewind: false,
            allow_opaque: false,
            compression: Compression::None,
            digests: false,
            durability: Durability::default(),
            residency: Residency::default(),
            require: None,
            timeout: Duration::from_mins(1),
        }
    }
}

/// Which replicas of a shard are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Replicas {
    /// Only that of the writer whose coordinate is 0 in every dimension that replicates; the others
    /// say what they hold, but not its bytes.
    #[default]
    Primary,
    /// All of them.
    All,
}

/// What a put has done.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct PutReport {
    /// The number of the version.
    pub version: u64,
    /// Its epoch: how often the key had been rewound.
    pub epoch: u32,
    /// Its identity.
    pub id: VersionId,
    /// What this put contains: equal digests are equal contents.
    pub digest: Digest,
    /// Whether readers see it now.
    pub visible: bool,
    /// The writers whose contributions it waits for.
    pub missing: WriterSet,
    /// Whether all of the version is in the bucket, if [`Durability::Object`] was asked for.
    pub stored: bool,
    /// How many bytes this put has stored.
    pub bytes: u64,
    /// How the bytes went.
    pub transport: Transport,
    /// Why that way.
    pub why: String,
    /// Where the time went.
    pub phases: PutPhases,
    /// How long it took.
    pub seconds: f64,
}

/// Where the time of a put went, in seconds; of a [`Publisher`](crate::Publisher), of all its archives together.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct PutPhases {
    /// Until every byte had its place.
    pub arrange: f64,
    /// Until there was room for it: others may have been waited for. What is small is written before, goes along, and may
    /// be committed then.
    pub begin: f64,
    /// To copy and to checksum.
    pub write: f64,
    /// Until the contribution was committed, if it was not yet.
    pub commit: f64,
    /// Until it was in the bucket, if it was to be.
    pub store: f64,
}

/// These and those.
impl AddAssign for PutPhases {
    fn add_assign(&mut self, other: Self) {
        self.arrange += other.arrange;
        self.begin += other.begin;
        self.write += other.write;
        self.commit += other.commit;
        self.store += other.store;
    }
}

/// How many puts each writer of each job has called: what matches the contributions to a version
/// without a number.
#[derive(Default)]
pub(crate) struct Calls(Mutex<BTreeMap<(Key, JobId, u32), u64>>);

impl Calls {
    fn next(&self, key: &Key, job: &JobId, writer: u32) -> u64 {
        let mut calls = self.0.lock().expect("nobody panics while holding the calls");
        let call = calls.entry((key.clone(), job.clone(), writer)).or_default();
        *call += 1;
        *call
    }
}

/// What one writer puts: every byte has its place.
pub(crate) struct Arranged<'a> {
    controller: &'a dyn Controller,
    key: &'a Key,
    proposal: Proposal,
    layout: Layout,
    route: Route,
    started: Instant,
    /// How long it took to arrange it.
    seconds: f64,
}

impl<'a> Arranged<'a> {
    pub(crate) async fn new(
        controller: &'a dyn Controller,
        key: &'a Key,
        dict: &StateDict,
        options: &PutOptions,
        calls: &Calls,
    ) -> Result<Self> {
        let started = Instant::now();
        // Counted first: a put that fails is a call all the same.
        let call = call(calls, key, options)?;
        let host = residency::admit(controller, options)?;
        let role = Role::of(dict, options)?;
        let dict = residency::beside(controller, dict, role.is_alone(), options).await?;
        let layout = arrange(key, &dict, options, host.transport).await?;
        let (device, route) = residency::choose(controller, host, &layout, options)?;
        route.admit(options.require)?;
        let proposal = Proposal { device, ..proposal(role, call, options, layout.file_len()) };
        let seconds = started.elapsed().as_secs_f64();
        Ok(Self { controller, key, proposal, layout, route, started, seconds })
    }

    /// Puts it, in as few steps as it takes.
    pub(crate) async fn put(self) -> Result<PutReport> {
        let len = self.layout.file_len();
        let may_go = self.proposal.device.is_none() && is_whole(&self.layout) && len <= BRIEF;
        let carrier =
            self.controller.carrier().filter(|carrier| may_go && len <= carrier.longest());
        let staged = match carrier {
            Some(carrier) => self.carry(carrier).await?,
            None => self.stage().await?,
        };
        staged.commit(|_| {}).await
    }

    /// Begins, and writes where there is room for it.
    pub(crate) async fn stage(self) -> Result<Staged> {
        let Self { controller, key, proposal, layout, route, started, seconds } = self;
        let (asked, is_seen) = (Instant::now(), proposal.device.is_none());
        let bytes = layout.file_len();
        let begun = controller.begin(key, proposal).await?;
        let begun_at = Instant::now();
        let as_is = (begun.committed.is_some(), is_seen);
        let (contribution, written) = write(begun.contribution, layout, as_is).await?;
        let digest = match written {
            Ok(digest) if is_seen => digest,
            Ok(digest) => residency::unseen(digest, begun.id),
            Err(error) => return Err(contribution.withdraw(error).await),
        };
        let phases = PutPhases {
            arrange: seconds,
            begin: (begun_at - asked).as_secs_f64(),
            write: begun_at.elapsed().as_secs_f64(),
            ..PutPhases::default()
        };
        let begun = Begun { contribution, ..begun };
        Ok(Staged::new(begun, digest, (bytes, route), (started, phases)))
    }

    /// Writes, and begins with what is written.
    async fn carry(self, carrier: &dyn Carrier) -> Result<Staged> {
        let Self { key, proposal, layout, route, started, seconds, .. } = self;
        let writing = Instant::now();
        let (archive, digest) = at_once(|| whole(&layout))?;
        let written = Instant::now();
        let begun = carrier.carry(key, proposal, (archive, digest)).await?;
        let phases = PutPhases {
            arrange: seconds,
            begin: written.elapsed().as_secs_f64(),
            write: (written - writing).as_secs_f64(),
            ..PutPhases::default()
        };
        Ok(Staged::new(begun, digest, (layout.file_len(), route), (started, phases)))
    }
}

/// A contribution that is written, and committed or not: the memory of the state dict is read no more.
pub(crate) struct Staged {
    contribution: Box<dyn Contribution>,
    digest: Digest,
    report: PutReport,
    started: Instant,
}

impl Staged {
    fn new(
        Begun { id, epoch, number, contribution, .. }: Begun,
        digest: Digest,
        (bytes, Route { transport, why }): (u64, Route),
        (started, phases): (Instant, PutPhases),
    ) -> Self {
        tracing::debug!(
            version = number,
            bytes,
            arrange_seconds = phases.arrange,
            begin_seconds = phases.begin,
            write_seconds = phases.write,
            "written"
        );
        let report = PutReport {
            version: number,
            epoch,
            id,
            digest,
            visible: false,
            missing: WriterSet::default(),
            stored: false,
            bytes,
            transport,
            why,
            phases,
            seconds: 0.0,
        };
        Self { contribution, digest, report, started }
    }

    /// Commits it, and waits until it is where it is to last. Once it is committed, the report so far is told.
    pub(crate) async fn commit(self, tell: impl FnOnce(&PutReport)) -> Result<PutReport> {
        let Self { contribution, digest, report, started } = self;
        let written = Instant::now();
        let Committed { progress, storing } = contribution.commit(digest).await?;
        let Progress { visible, missing } = progress;
        let committed = Instant::now();
        let commit_seconds = (committed - written).as_secs_f64();
        tracing::debug!(version = report.version, visible, commit_seconds, "committed");
        let phases = PutPhases { commit: commit_seconds, ..report.phases };
        let seconds = started.elapsed().as_secs_f64();
        let report = PutReport { visible, missing, phases, seconds, ..report };
        tell(&report);
        let stored = stored(storing).await?;
        let phases = PutPhases { store: committed.elapsed().as_secs_f64(), ..phases };
        Ok(PutReport { stored, phases, seconds: started.elapsed().as_secs_f64(), ..report })
    }
}

/// Waits until a contribution is in the bucket that it is on its way to; says whether the version is.
pub(crate) async fn stored(storing: Option<Storing>) -> Result<bool> {
    let Some(storing) = storing else { return Ok(false) };
    let stored = storing.await?.visible;
    tracing::debug!(stored, "in the bucket");
    Ok(stored)
}

/// A put that goes on by itself: see [`Store::put_state_dict_later`](crate::Store::put_state_dict_later).
#[derive(Debug)]
pub struct PendingPut {
    task: JoinHandle<Result<PutReport>>,
    committed: watch::Receiver<Option<PutReport>>,
}

impl PendingPut {
    /// Lets a put go on that holds something until it has ended.
    pub(crate) fn spawn(staged: Staged, held: impl Send + 'static, span: Span) -> Self {
        let (tell, committed) = watch::channel(None);
        let commit = async move {
            let report = staged.commit(|report| drop(tell.send(Some(report.clone())))).await;
            drop(held);
            report
        };
        Self { task: tokio::spawn(boxed(commit.instrument(span))), committed }
    }

    /// One that has ended.
    pub(crate) fn ended(report: PutReport) -> Self {
        let (_, committed) = watch::channel(Some(report.clone()));
        Self { task: tokio::spawn(boxed(async { Ok(report) })), committed }
    }

    /// Waits until the contribution is committed, which may be before it is where it is to last; gives the report so
    /// far. After an error the put is done.
    ///
    /// # Errors
    ///
    /// As [`PendingPut::wait`].
    pub async fn committed(&mut self) -> Result<PutReport> {
        if let Ok(report) = self.committed.wait_for(Option::is_some).await
            && let Some(report) = report.as_ref()
        {
            return Ok(report.clone());
        }
        self.done().await
    }

    /// Waits until the contribution is committed, and in the bucket if it is to be there.
    ///
    /// # Errors
    ///
    /// As [`Store::put_state_dict`](crate::Store::put_state_dict).
    pub async fn wait(mut self) -> Result<PutReport> {
        self.done().await
    }

    /// The same for whoever may wait again if this is dropped before it is done.
    ///
    /// # Errors
    ///
    /// As [`PendingPut::wait`].
    ///
    /// # Panics
    ///
    /// If it was done before.
    pub async fn done(&mut self) -> Result<PutReport> {
        let ended = |error| Error::io("the put was cut off", std::io::Error::other(error));
        (&mut self.task).await.map_err(ended)?
    }
}

/// The how-manieth put of its job it is, if that matters. It counts, whatever becomes of it.
pub(crate) fn call(calls: &Calls, key: &Key, options: &PutOptions) -> Result<Option<u64>> {
    match (&options.job, options.writer, options.version) {
        (Some(job), Some(writer), _) => Ok(Some(calls.next(key, job, writer))),
        (None, ..) | (_, _, Some(_)) => Ok(None),
        (Some(_), None, None) => Err(Error::new(
            ErrorKind::Invalid,
            "puts of a job are matched by their number or by their writer's count; say version= or \
             writer=",
        )),
    }
}

/// What a writer says of a contribution whose archive, or first one, has so many bytes.
pub(crate) fn proposal(
    role: Role,
    call: Option<u64>,
    options: &PutOptions,
    file_len: u64,
) -> Proposal {
    Proposal {
        writer: role.writer,
        writers: role.writers,
        writers_defaulted: role.defaulted,
        job: options.job.clone(),
        call,
        number: options.version,
        rewind: options.rewind,
        durability: options.durability,
        file_len,
        device: None,
        timeout: options.timeout,
    }
}

/// Arranges what this writer stores, and compresses what is to be compressed.
pub(crate) async fn arrange(
    key: &Key,
    dict: &StateDict,
    options: &PutOptions,
    host: Transport,
) -> Result<Layout> {
    // Slices are read from there, and each byte beside them is one that is transferred.
    let is_far = options.durability == Durability::Object || host == Transport::Object;
    let draft = draft(dict, options, is_far)
        .map_err(|error| Error::request(format_args!("key `{key}`"), error))?;
    let jobs = draft.jobs();
    if jobs.is_empty() { place(draft, jobs) } else { wait(move || place(draft, jobs)).await }
}

/// Writes an archive, unless it is stored already; gives its digest: of what is seen, or of all.
pub(crate) async fn write(
    mut contribution: Box<dyn Contribution>,
    layout: Layout,
    (is_stored, is_seen): (bool, bool),
) -> Result<(Box<dyn Contribution>, Result<Digest>)> {
    let is_here = is_whole(&layout);
    let is_brief = is_here && contribution.is_in_memory() && layout.file_len() <= BRIEF;
    let work = move || {
        let written = if is_stored {
            sum(&layout, is_seen)
        } else {
            let ahead = if is_here { 0 } else { AHEAD };
            store(|lens| contribution.parts(lens), &layout, ahead)
        };
        Ok((contribution, written))
    };
    if is_brief { at_once(work) } else { wait(work).await }
}

fn draft(dict: &StateDict, options: &PutOptions, is_far: bool) -> tssd_format::Result<Draft> {
    let mut format = Options::new().compress(options.compression);
    if is_far {
        format = format.chunks(Chunks::Fine);
    }
    if options.digests {
        format = format.digests();
    }
    for (name, value) in &options.attrs {
        format = format.attr(name, value.clone());
    }
    if options.allow_opaque {
        format = format.allow_opaque();
    }
    let divergent = match options.divergent {
        Divergent::Error => None,
        Divergent::Lowest => Some("lowest"),
        Divergent::Keep => Some("keep"),
    };
    if let Some(divergent) = divergent {
        format = format.attr(DIVERGENT, AttrValue::Text(divergent.into()));
    }
    match options.replicas {
        Replicas::All => Draft::new(dict, &format),
        Replicas::Primary => Draft::new(&without_replicas(dict)?, &format),
    }
}

/// Compresses what is to be compressed, on all cores.
fn place(draft: Draft, jobs: Vec<Pack>) -> Result<Layout> {
    let failed = |error| Error::request("compression", error);
    let packed = parallel::map(jobs, |job| job.run()).map_err(failed)?;
    draft.place(packed).map_err(failed)
}

/// Of so many jobs the copies that GPUs make by themselves have begun when one is summed: 32 MiB, which take a millisecond,
/// and a stream that is given much more makes whoever gives it wait.
const AHEAD: usize = 8;

/// Whether all that goes into an archive is in this process's memory.
fn is_whole(layout: &Layout) -> bool {
    layout.elsewhere().next().is_none()
}

/// An archive that is carried along, and its digest.
fn whole(layout: &Layout) -> Result<(Bytes, Digest)> {
    let len = usize::try_from(layout.file_len()).expect("it is brief");
    let mut archive = vec![0; len];
    let digest = store(|lens| split(&mut archive, lens), layout, 0)?;
    Ok((archive.into(), digest))
}

/// Writes an archive into parts of the lengths that are asked for; returns its digest.
fn store<'a>(
    parts: impl FnOnce(&[u64]) -> Vec<Box<dyn Part + 'a>>,
    layout: &Layout,
    ahead: usize,
) -> Result<Digest> {
    let len = |job: &Fill| job.range().end - job.range().start;
    let jobs = layout.jobs();
    let mut lens: Vec<u64> = jobs.iter().map(len).collect();
    lens.push(layout.file_len() - layout.index_off());
    let mut parts = parts(&lens);
    let mut tail_part = parts.pop().expect("the tail is a part");
    let work = jobs.iter().zip(parts).collect();
    let begin = |(job, part): &mut (&Fill, Box<dyn Part + 'a>)| part.begin(job);
    let filled = parallel::map_ahead(work, (ahead, begin), |(job, mut part)| part.fill(job))?;
    let tail = seal(layout, filled)?;
    tail_part.write(&tail)?;
    Ok(digest(&tail))
}

/// The digest that an archive would have.
fn sum(layout: &Layout, is_seen: bool) -> Result<Digest> {
    let run = |job: Fill| {
        let summed = if is_seen { job.sum() } else { job.pieces(|_, _| Ok(())) };
        summed.map_err(|error| Error::request("checksum", error))
    };
    let filled = parallel::map(layout.jobs(), run)?;
    Ok(digest(&seal(layout, filled)?))
}

fn seal(layout: &Layout, filled: Vec<Filled>) -> Result<Vec<u8>> {
    layout.seal(filled).map_err(|error| Error::request("index", error))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::thread::ThreadId;

    use async_trait::async_trait;
    use tssd_format::{Blob, Dtype, Storage, Tensor, TensorMeta};

    use super::*;
    use crate::controller::OnDevice;

    /// Room in memory.
    struct Room(Vec<u8>);

    #[async_trait]
    impl Contribution for Room {
        fn is_in_memory(&self) -> bool {
            true
        }

        fn parts(&mut self, lens: &[u64]) -> Vec<Box<dyn Part + '_>> {
            split(&mut self.0, lens)
        }

        async fn extend(&mut self, _file_len: u64, _device: Option<OnDevice>) -> Result<()> {
            Ok(())
        }

        async fn commit(self: Box<Self>, _digest: Digest) -> Result<Committed> {
            unreachable!("it is written, no more")
        }

        async fn withdraw(self: Box<Self>, error: Error) -> Error {
            error
        }
    }

    /// Bytes that are not in memory, and the thread that has read them.
    struct Elsewhere(Mutex<Option<ThreadId>>);

    impl Blob for Elsewhere {
        fn size(&self) -> std::io::Result<u64> {
            Ok(100)
        }

        fn read_exact_at(&self, target: &mut [u8], _offset: u64) -> std::io::Result<()> {
            target.fill(7);
            *self.0.lock().unwrap() = Some(std::thread::current().id());
            Ok(())
        }

        fn bytes(&self) -> Option<&Bytes> {
            None
        }
    }

    #[tokio::test]
    async fn few_bytes_that_are_elsewhere_are_read_by_a_thread_that_may_wait() {
        let elsewhere = Arc::new(Elsewhere(Mutex::default()));
        let storage = Storage::elsewhere(elsewhere.clone()).unwrap();
        let meta = TensorMeta::new(Dtype::Uint8, &[100]).unwrap();
        let mut dict = StateDict::new();
        dict.insert("x", Tensor::new(meta, storage, 0).unwrap());
        let layout = Draft::new(&dict, &Options::new()).unwrap().place(Vec::new()).unwrap();
        let room = Room(vec![0; layout.file_len().try_into().unwrap()]);
        let (_, digest) = write(Box::new(room), layout, (false, true)).await.unwrap();
        digest.unwrap();
        let reader = elsewhere.0.lock().unwrap().take().expect("it was read");
        assert_ne!(reader, std::thread::current().id());
    }
}
