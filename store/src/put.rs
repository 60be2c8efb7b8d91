//! Putting: one writer's contribution to a version.

mod replicas;
mod role;

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use tssd_format::{AttrValue, Attrs, Fill, Filled, Layout, Options, StateDict};

use self::replicas::without_replicas;
use self::role::Role;
use crate::controller::{Controller, DIVERGENT, digest, folder_of};
use crate::error::{Error, ErrorKind, Result};
use crate::key::Key;
use crate::ledger::{
    ArchiveReference, Begin, Command, Commit, Digest, JobId, Outcome, VersionId, WriterSet,
};
use crate::merge::Divergent;
use crate::parallel;
use crate::volume::Volume;

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
    /// Whether readers see it now.
    pub visible: bool,
    /// The writers whose contributions it waits for.
    pub missing: WriterSet,
    /// How many bytes this put has stored.
    pub bytes: u64,
    /// How long it took.
    pub seconds: f64,
}

/// A version that has begun.
#[derive(Clone, Copy)]
struct Begun {
    id: VersionId,
    epoch: u32,
    number: u64,
    /// What this writer has committed to it before, in an earlier try.
    committed: Option<Digest>,
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

/// Puts one writer's state dict.
pub(crate) async fn put(
    controller: &Controller,
    key: &Key,
    dict: &StateDict,
    options: &PutOptions,
    calls: &Calls,
) -> Result<PutReport> {
    let started = Instant::now();
    let role = Role::of(dict, options)?;
    // Counted first: a put that fails is a call all the same.
    let call = options.job.as_ref().map(|job| calls.next(key, job, role.writer));
    let layout =
        plan(dict, options).map_err(|error| Error::request(format_args!("key `{key}`"), error))?;
    let bytes = layout.file_len();
    let begun = begin(controller, key, options, &role, call).await?;
    let committed = async {
        // Each try has a file of its own: one that died may have left another behind.
        let file = format!("{}-{:032x}.tssd", role.writer, controller.random());
        let path = format!("{}/{file}", folder_of(key, begun.epoch, begun.number));
        let is_stored = begun.committed.is_some();
        let digest = controller
            .on_disk(
                move |volume| if is_stored { sum(&layout) } else { store(volume, &path, &layout) },
            )
            .await?;
        let archive = ArchiveReference { name: file, file_len: bytes, bytes };
        commit(controller, key, options, &role, begun.id, digest, archive).await
    };
    let (visible, missing) = match committed.await {
        Ok(done) => done,
        Err(error) => {
            let abort = Command::Abort { id: begun.id, writer: role.writer };
            // The put has failed already; if this fails too, the version ends by its age.
            let _ = controller.apply(key, abort).await;
            let _ = controller.settle(key).await;
            return Err(error);
        }
    };
    Ok(PutReport {
        version: begun.number,
        epoch: begun.epoch,
        id: begun.id,
        visible,
        missing,
        bytes,
        seconds: started.elapsed().as_secs_f64(),
    })
}

fn plan(dict: &StateDict, options: &PutOptions) -> tssd_format::Result<Layout> {
    let mut format = Options::new();
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
        Replicas::All => Layout::plan(dict, &format),
        Replicas::Primary => Layout::plan(&without_replicas(dict)?, &format),
    }
}

async fn begin(
    controller: &Controller,
    key: &Key,
    options: &PutOptions,
    role: &Role,
    call: Option<u64>,
) -> Result<Begun> {
    let deadline = Instant::now() + options.timeout;
    let id = VersionId(controller.random());
    let mut pause = Duration::from_millis(1);
    loop {
        let begin = Begin {
            writer: role.writer,
            writers: role.writers.clone(),
            writers_defaulted: role.defaulted,
            job: options.job.clone(),
            call,
            number: options.version,
            rewind: options.rewind,
            digest: None,
            id,
            now: controller.now(),
        };
        let on = match controller.apply(key, Command::Begin(begin)).await? {
            Outcome::Begun { id, epoch, number } => {
                return Ok(Begun { id, epoch, number, committed: None });
            }
            Outcome::Retry { id, epoch, number, digest } => {
                return Ok(Begun { id, epoch, number, committed: Some(digest) });
            }
            Outcome::Wait { on } => on,
            other => unreachable!("begin does not lead to {other:?}"),
        };
        if Instant::now() >= deadline {
            let on: Vec<String> = on.iter().map(ToString::to_string).collect();
            return Err(Error::new(
                ErrorKind::Busy,
                format_args!(
                    "key `{key}`: versions {} are still open after {:?}",
                    on.join(", "),
                    options.timeout
                ),
            ));
        }
        // Deletions that are owed, and proofs whose prover may have died, are in the way too.
        controller.state(key).await?;
        controller.reclaim_owed(key).await?;
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(Duration::from_millis(100));
    }
}

/// Commits the contribution, and proves the version if it was the last one.
async fn commit(
    controller: &Controller,
    key: &Key,
    options: &PutOptions,
    role: &Role,
    id: VersionId,
    digest: Digest,
    archive: ArchiveReference,
) -> Result<(bool, WriterSet)> {
    let commit = || Commit {
        id,
        writer: role.writer,
        job: options.job.clone(),
        digest,
        archive: archive.clone(),
        now: controller.now(),
    };
    let committed = |outcome| match outcome {
        Outcome::Committed { visible, missing } => (visible, missing),
        other => unreachable!("commit does not lead to {other:?}"),
    };
    let (visible, missing) = committed(controller.apply(key, Command::Commit(commit())).await?);
    if visible || !missing.is_empty() {
        return Ok((visible, missing));
    }
    controller.prove(key, id).await?;
    controller.reclaim_owed(key).await?;
    // The same commit again tells how the proof went: visible, or the reason why not.
    Ok(committed(controller.apply(key, Command::Commit(commit())).await?))
}

/// Writes an archive to a volume; returns its digest.
fn store(volume: &dyn Volume, path: &str, layout: &Layout) -> Result<Digest> {
    let len = |job: &Fill| job.range().end - job.range().start;
    let jobs = layout.jobs();
    let mut lens: Vec<u64> = jobs.iter().map(len).collect();
    lens.push(layout.file_len() - layout.index_off());
    let mut reservation = volume.reserve(path, layout.file_len())?;
    let digest = {
        let mut parts = reservation.parts(&lens);
        let mut tail_part = parts.pop().expect("the tail is a part");
        let work = jobs.iter().zip(parts).collect();
        let filled = parallel::map(work, |(job, mut part)| part.fill(job))?;
        let tail = seal(layout, filled)?;
        tail_part.write(&tail)?;
        digest(&tail)
    };
    if reservation.seal()? {
        return Ok(digest);
    }
    Err(Error::new(ErrorKind::Busy, format_args!("`{path}` is there already")))
}

/// The digest that an archive would have.
fn sum(layout: &Layout) -> Result<Digest> {
    let run = |job: Fill| {
        job.write_to(&mut std::io::sink()).map_err(|error| Error::request("checksum", error))
    };
    let filled = parallel::map(layout.jobs(), run)?;
    Ok(digest(&seal(layout, filled)?))
}

fn seal(layout: &Layout, filled: Vec<Filled>) -> Result<Vec<u8>> {
    layout.seal(filled).map_err(|error| Error::request("index", error))
}
