use std::sync::Arc;
use std::time::Instant;

use tracing::{Instrument, Span};
use tssd_format::{Layout, StateDict};

use super::report::{PutPhases, PutReport};
use super::{PutOptions, Rewind, Role, WriterProcess, archive, finite, residency};
use crate::control::{
    BeginResult, CommitResult, Contribution, Controller, DeviceMemoryRequest, InlinePut, Progress,
    Proposal,
};
use crate::error::{Error, Result};
use crate::io::exec::INLINE_MAX_BYTES;
use crate::key::Key;
use crate::ledger::{ArchiveDigest, VersionId, WriterSet};
use crate::route::Route;

/// Writes one writer's contribution to a version, archive by archive.
///
/// Dropping it withdraws the contribution.
pub(crate) struct VersionWriter {
    controller: Arc<dyn Controller>,
    key: Key,
    options: PutOptions,
    process: Arc<WriterProcess>,
    /// Sequence number of this put within its job.
    sequence: Option<u64>,
    /// The route to host memory.
    host_route: Route,
    /// The route of the archives so far.
    route: Route,
    span: Span,
    started: Instant,
    /// From the first archive on.
    open: Option<OpenContribution>,
    /// Bytes of all archives.
    bytes: u64,
    phases: PutPhases,
}

/// A contribution that has begun.
struct OpenContribution {
    id: VersionId,
    epoch: u32,
    number: u64,
    /// Whether the version has no other writer.
    is_alone: bool,
    /// Digest that an earlier attempt has committed. Then nothing is written.
    committed: Option<ArchiveDigest>,
    contribution: Box<dyn Contribution>,
    /// The digests of its archives, in their order.
    digests: Vec<ArchiveDigest>,
}

impl OpenContribution {
    fn new(begun: BeginResult, is_alone: bool) -> Self {
        let BeginResult { id, epoch, number, committed, contribution } = begun;
        Self { id, epoch, number, is_alone, committed, contribution, digests: Vec::new() }
    }
}

/// An archive that is laid out and not written.
struct Planned {
    layout: Layout,
    /// The device that keeps its data.
    device: Option<DeviceMemoryRequest>,
    is_alone: bool,
    /// The proposal that begins the contribution. `None` if it has begun.
    proposal: Option<Proposal>,
}

impl Planned {
    fn take_proposal(&mut self) -> Proposal {
        self.proposal.take().expect("the archive is planned before the contribution begins")
    }
}

impl VersionWriter {
    /// Creates a writer. `process` counts the put, even if it fails.
    ///
    /// # Errors
    ///
    /// `Invalid` for options that contradict each other; `Unsupported` if the required transport is impossible.
    pub(crate) fn new(
        controller: &Arc<dyn Controller>,
        process: &Arc<WriterProcess>,
        key: &Key,
        options: &PutOptions,
        span: Span,
    ) -> Result<Self> {
        let started = Instant::now();
        let sequence = process.next_sequence(key, options)?;
        let host_route = residency::admit(&**controller, options)?;
        Ok(Self {
            controller: controller.clone(),
            key: key.clone(),
            options: options.clone(),
            process: process.clone(),
            sequence,
            route: host_route.clone(),
            host_route,
            span,
            started,
            open: None,
            bytes: 0,
            phases: PutPhases::default(),
        })
    }

    pub(crate) fn options(&self) -> &PutOptions {
        &self.options
    }

    /// The options of the archives that are not written yet.
    pub(crate) fn options_mut(&mut self) -> &mut PutOptions {
        &mut self.options
    }

    /// Replaces the sequence number after job and writer have changed.
    pub(crate) fn renumber(&mut self) -> Result<()> {
        self.sequence = self.process.next_sequence(&self.key, &self.options)?;
        Ok(())
    }

    /// Returns whether an archive is written: the role of this writer cannot change any more.
    pub(crate) fn has_begun(&self) -> bool {
        self.open.is_some()
    }

    /// Writes a contribution of one archive.
    ///
    /// A small archive is sent with the request that begins the contribution.
    pub(crate) async fn write_only(mut self, dict: &StateDict) -> Result<StagedPut> {
        let planned = self.plan(dict, true).await?;
        let len = planned.layout.file_len();
        let may_inline = planned.device.is_none()
            && len <= INLINE_MAX_BYTES
            && archive::is_in_memory(&planned.layout);
        let controller = self.controller.clone();
        let inline =
            controller.inline_put().filter(|inline| may_inline && len <= inline.max_bytes());
        let written = match inline {
            Some(inline) => self.write_inline(inline, planned).await,
            None => self.write_planned(planned).await,
        };
        match written {
            Ok(()) => self.stage().await,
            Err(error) => Err(self.withdraw(error).await),
        }
    }

    /// Writes an archive. After an error the contribution is withdrawn.
    pub(crate) async fn write(&mut self, dict: &StateDict, is_only: bool) -> Result<()> {
        let span = self.span.clone();
        let write = async {
            let planned = self.plan(dict, is_only).await?;
            self.write_planned(planned).await
        };
        match write.instrument(span).await {
            Ok(()) => Ok(()),
            Err(error) => Err(self.withdraw(error).await),
        }
    }

    /// Withdraws the contribution because of an error.
    ///
    /// Returns the reason of the ledger if it has one, else the error.
    pub(crate) async fn withdraw(&mut self, error: Error) -> Error {
        match self.open.take() {
            Some(open) => open.contribution.withdraw(error).await,
            None => error,
        }
    }

    /// Ends the writing: no tensor is read any more. At least one archive must be written.
    pub(crate) async fn stage(mut self) -> Result<StagedPut> {
        if let Err(error) = self.route.check_required(self.options.require_transport) {
            return Err(self.withdraw(error).await);
        }
        let open = self.open.take().expect("an archive is written");
        let digest = match open.digests.as_slice() {
            [only] => *only,
            all => {
                ArchiveDigest::compute(&all.iter().flat_map(|digest| digest.0).collect::<Vec<u8>>())
            }
        };
        let phases = self.phases;
        tracing::debug!(
            version = open.number,
            bytes = self.bytes,
            arrange_seconds = phases.arrange,
            begin_seconds = phases.begin,
            write_seconds = phases.write,
            "written"
        );
        let report = PutReport {
            version: open.number,
            epoch: open.epoch,
            id: open.id,
            digest,
            visible: false,
            missing: WriterSet::default(),
            stored: false,
            bytes: self.bytes,
            transport: self.route.transport,
            transport_reason: self.route.reason,
            phases,
            seconds: 0.0,
        };
        Ok(StagedPut { contribution: open.contribution, report, started: self.started })
    }

    /// Lays out an archive, and finds the device that keeps it.
    async fn plan(&mut self, dict: &StateDict, is_only: bool) -> Result<Planned> {
        let started = Instant::now();
        if self.options.check_finite {
            finite::check(dict).await?;
        }
        let (role, is_alone) = if let Some(open) = &self.open {
            (None, open.is_alone)
        } else {
            let role = Role::of(dict, &self.options)?;
            let is_alone = role.is_alone();
            (Some(role), is_alone)
        };
        let (controller, options) = (&*self.controller, &self.options);
        let visible = residency::visible_tensors(controller, dict, is_alone, options).await?;
        let layout =
            archive::layout(&self.key, &visible, options, self.host_route.transport).await?;
        let (device, route) =
            residency::choose(controller, self.host_route.clone(), &layout, options)?;
        // Host memory is accepted for an archive without tensors in device memory, even if others need another route.
        if is_only || device.is_some() || !archive::is_in_memory(&layout) {
            route.check_required(options.require_transport)?;
            self.route = route;
        }
        let proposal = role.map(|role| self.proposal(role, layout.file_len(), device.clone()));
        self.phases.arrange += started.elapsed().as_secs_f64();
        Ok(Planned { layout, device, is_alone, proposal })
    }

    fn proposal(&self, role: Role, file_len: u64, device: Option<DeviceMemoryRequest>) -> Proposal {
        let options = &self.options;
        Proposal {
            writer: role.writer,
            writers: role.writers,
            writers_defaulted: role.defaulted,
            job: options.job.clone(),
            sequence: self.sequence,
            number: options.version,
            rewind: options.rewind == Rewind::Always,
            keeps_earlier_runs: options.rewind == Rewind::Never,
            process: Some(self.process.run_process(options.job.as_ref())),
            durability: options.durability,
            file_len,
            device,
            timeout: options.timeout,
        }
    }

    async fn write_planned(&mut self, mut planned: Planned) -> Result<()> {
        let started = Instant::now();
        let open = self.reserve(&mut planned).await?;
        let begun = Instant::now();
        let Planned { layout, device, .. } = planned;
        let (len, has_checksums) = (layout.file_len(), device.is_none());
        let (contribution, written) = if open.committed.is_some() {
            (open.contribution, archive::digest(layout, has_checksums).await)
        } else {
            archive::write(open.contribution, layout).await?
        };
        let open = self.open.insert(OpenContribution { contribution, ..open });
        self.phases.begin += (begun - started).as_secs_f64();
        self.phases.write += begun.elapsed().as_secs_f64();
        let digest = written?;
        let digest =
            if has_checksums { digest } else { residency::unverified_digest(digest, open.id) };
        open.digests.push(digest);
        self.bytes += len;
        tracing::debug!(bytes = len, seconds = started.elapsed().as_secs_f64(), "archive");
        Ok(())
    }

    /// Reserves room for an archive. The first one begins the contribution.
    async fn reserve(&mut self, planned: &mut Planned) -> Result<OpenContribution> {
        if let Some(mut open) = self.open.take() {
            let (len, device) = (planned.layout.file_len(), planned.device.clone());
            open.contribution.extend(len, device).await?;
            return Ok(open);
        }
        let proposal = planned.take_proposal();
        let begun = self.controller.begin(&self.key, proposal).await?;
        self.span.record("version", begun.number);
        Ok(OpenContribution::new(begun, planned.is_alone))
    }

    /// Writes the only archive, and sends it with the request that begins the contribution.
    async fn write_inline(&mut self, inline: &dyn InlinePut, mut planned: Planned) -> Result<()> {
        let proposal = planned.take_proposal();
        let started = Instant::now();
        let (bytes, digest) = archive::to_bytes(&planned.layout)?;
        let written = Instant::now();
        let begun = inline.put_inline(&self.key, proposal, bytes, digest).await?;
        self.phases.write += (written - started).as_secs_f64();
        self.phases.begin += written.elapsed().as_secs_f64();
        self.span.record("version", begun.number);
        let open = self.open.insert(OpenContribution::new(begun, planned.is_alone));
        open.digests.push(digest);
        self.bytes += planned.layout.file_len();
        Ok(())
    }
}

/// A contribution that is written and not committed.
pub(crate) struct StagedPut {
    contribution: Box<dyn Contribution>,
    report: PutReport,
    started: Instant,
}

impl StagedPut {
    /// Commits the contribution, and waits until it is as durable as it must be.
    ///
    /// `on_commit` gets the report of the commit before the wait.
    pub(crate) async fn commit(self, on_commit: impl FnOnce(&PutReport)) -> Result<PutReport> {
        let Self { contribution, report, started } = self;
        let written = Instant::now();
        let CommitResult { progress, upload } = contribution.commit(report.digest).await?;
        let Progress { visible, missing } = progress;
        let committed = Instant::now();
        let commit_seconds = (committed - written).as_secs_f64();
        tracing::debug!(version = report.version, visible, commit_seconds, "committed");
        let phases = PutPhases { commit: commit_seconds, ..report.phases };
        let seconds = started.elapsed().as_secs_f64();
        let report = PutReport { visible, missing, phases, seconds, ..report };
        on_commit(&report);
        let Some(upload) = upload else {
            let phases = PutPhases { store: committed.elapsed().as_secs_f64(), ..phases };
            return Ok(PutReport { phases, ..report });
        };
        let stored = upload.await?.visible;
        tracing::debug!(stored, "in the bucket");
        let phases = PutPhases { store: committed.elapsed().as_secs_f64(), ..phases };
        Ok(PutReport { stored, phases, seconds: started.elapsed().as_secs_f64(), ..report })
    }
}
