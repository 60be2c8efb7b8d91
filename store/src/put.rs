//! Putting: one writer's contribution to a version.

mod replicas;
mod role;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tssd_format::{
    AttrValue, Attrs, Compression, Draft, Fill, Filled, Layout, Options, Pack, StateDict,
};

use self::replicas::without_replicas;
use self::role::Role;
use crate::controller::{Controller, DIVERGENT, digest, folder_of};
use crate::environment::pause;
use crate::error::{Error, ErrorKind, Result};
use crate::key::Key;
use crate::ledger::{
    ArchiveReference, Begin, Command, Commit, Digest, Fate, JobId, Outcome, Refusal, Version,
    VersionId, WriterSet,
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
    /// How storages are compressed: not at all by default, so that reading is one copy. What must last
    /// can be kept small.
    pub compression: Compression,
    /// Whether the archive gets digests: one BLAKE3 for each storage, and one for all.
    pub digests: bool,
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
    controller: &Arc<Controller>,
    key: &Key,
    dict: &StateDict,
    options: &PutOptions,
    calls: &Calls,
) -> Result<PutReport> {
    let started = Instant::now();
    // Counted first: a put that fails is a call all the same.
    let call = match (&options.job, options.writer, options.version) {
        (Some(job), Some(writer), _) => Some(calls.next(key, job, writer)),
        (None, ..) | (_, _, Some(_)) => None,
        (Some(_), None, None) => {
            return Err(Error::new(
                ErrorKind::Invalid,
                "puts of a job are matched by their number or by their writer's count; say version= \
                 or writer=",
            ));
        }
    };
    let role = Role::of(dict, options)?;
    let draft =
        draft(dict, options).map_err(|error| Error::request(format_args!("key `{key}`"), error))?;
    let jobs = draft.jobs();
    let layout = if jobs.is_empty() {
        place(draft, jobs)?
    } else {
        controller.on_disk(move |_| place(draft, jobs)).await?
    };
    let bytes = layout.file_len();
    let begun = begin(controller, key, options, &role, call).await?;
    // Each try has a file of its own: one that died may have left another behind.
    let file = format!("{}-{:032x}.tssd", role.writer, controller.random());
    let mut attempt = Attempt {
        controller: controller.clone(),
        key: key.clone(),
        id: begun.id,
        writer: role.writer,
        folder: folder_of(key, begun.epoch, begun.number),
        file: file.clone(),
        is_decided: false,
    };
    let committed = async {
        let path = format!("{}/{file}", attempt.folder);
        let is_stored = begun.committed.is_some();
        let digest = controller
            .on_disk(
                move |volume| if is_stored { sum(&layout) } else { store(volume, &path, &layout) },
            )
            .await?;
        let archive = ArchiveReference { name: file, file_len: bytes, bytes };
        commit(controller, key, options, &role, begun.id, digest, archive).await
    };
    let committed = committed.await;
    attempt.is_decided = true;
    let (visible, missing) = match committed {
        Ok(done) => done,
        Err(error) => {
            let error = attempt.reason(&begun, error).await;
            attempt.withdraw().await;
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

/// A put between begin and commit. One that is dropped undecided, because its future was, withdraws
/// itself.
struct Attempt {
    controller: Arc<Controller>,
    key: Key,
    id: VersionId,
    writer: u32,
    folder: String,
    file: String,
    is_decided: bool,
}

impl Attempt {
    /// Why the put failed: what has become of the version comes before what that has led to.
    async fn reason(&self, begun: &Begun, error: Error) -> Error {
        let state = self.controller.state(&self.key).await;
        match state.ok().and_then(|state| state.outcome_of(self.id)) {
            Some(Fate::Dropped(reason)) if error.refusal().is_none() => {
                Error::refused(&self.key, Refusal::Dropped { number: begun.number, reason })
            }
            _ => error,
        }
    }

    /// Takes back what is not committed. The put has failed already; if this fails too, the version
    /// ends by its age.
    async fn withdraw(&self) {
        let abort = Command::Abort { id: self.id, writer: self.writer };
        let _ = self.controller.apply(&self.key, abort).await;
        let state = self.controller.state(&self.key).await;
        let is_committed =
            |version: &Version| version.id == self.id && version.digest_of(self.writer).is_some();
        if state.is_ok_and(|state| !state.versions().any(is_committed)) {
            let (folder, path) = (self.folder.clone(), format!("{}/{}", self.folder, self.file));
            let delete = move |volume: &dyn Volume| {
                volume.delete(&path)?;
                volume.remove_folder(&folder)
            };
            let _ = self.controller.on_disk(delete).await;
        }
        let _ = self.controller.reclaim_owed(&self.key).await;
    }
}

impl Drop for Attempt {
    fn drop(&mut self) {
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        if !self.is_decided {
            let attempt = Self {
                controller: self.controller.clone(),
                key: self.key.clone(),
                folder: std::mem::take(&mut self.folder),
                file: std::mem::take(&mut self.file),
                is_decided: true,
                ..*self
            };
            drop(runtime.spawn(async move { attempt.withdraw().await }));
        }
    }
}

/// Arranges what this writer stores.
fn draft(dict: &StateDict, options: &PutOptions) -> tssd_format::Result<Draft> {
    let mut format = Options::new().compress(options.compression);
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

async fn begin(
    controller: &Controller,
    key: &Key,
    options: &PutOptions,
    role: &Role,
    call: Option<u64>,
) -> Result<Begun> {
    // A timeout beyond all time is none.
    let deadline = Instant::now().checked_add(options.timeout);
    let id = VersionId(controller.random());
    let mut span = Duration::from_millis(1);
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
        if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
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
        pause(span).await;
        span = (span * 2).min(Duration::from_millis(100));
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
    if let Err(error) = controller.prove(key, id).await {
        // Nobody is left to complete it: a version that cannot be proven now is no version.
        let reason = error.to_string();
        let _ = controller.apply(key, Command::Rejected { id, reason }).await;
        return Err(error);
    }
    // What is owed beyond the version itself stays owed if it cannot be done now.
    let _ = controller.reclaim_owed(key).await;
    // The same commit again tells how the proof went: visible, or the reason why not.
    match controller.apply(key, Command::Commit(commit())).await {
        Ok(outcome) => Ok(committed(outcome)),
        // A newer version has replaced it already.
        Err(error) if matches!(error.refusal(), Some(Refusal::Gone { .. })) => {
            Ok((true, WriterSet::default()))
        }
        Err(error) => Err(error),
    }
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
