//! Puts: one writer's contribution to a version.

mod archive;
mod finite;
mod leaves;
mod options;
mod pending;
mod replicas;
mod report;
mod residency;
mod role;
mod split;
mod version_writer;
mod writer_process;

use std::sync::Arc;

use tracing::Instrument;
use tssd_format::StateDict;

pub use self::options::{PutOptions, Replicas, Residency, Rewind, Ring};
pub use self::pending::PendingPut;
pub use self::report::{PutPhases, PutReport};
#[cfg(target_os = "linux")]
pub(crate) use self::residency::unverified_digest;
pub(crate) use self::role::Role;
pub use self::split::pieces;
pub(crate) use self::split::split_tensor;
pub(crate) use self::version_writer::VersionWriter;
pub(crate) use self::writer_process::WriterProcess;
use crate::control::Controller;
use crate::error::Result;
use crate::key::Key;

/// Puts a state dict as one archive, and waits until it is as durable as it must be.
pub(crate) async fn put(
    controller: &Arc<dyn Controller>,
    process: &Arc<WriterProcess>,
    key: &Key,
    dict: &StateDict,
    options: &PutOptions,
) -> Result<PutReport> {
    let span = tracing::debug_span!("put", %key, version = tracing::field::Empty);
    let writer = VersionWriter::new(controller, process, key, options, span.clone())?;
    let put = async { writer.write_only(dict).await?.commit(|_| {}).await };
    put.instrument(span).await
}

/// As [`put`], but returns as soon as the memory of the state dict is no longer read.
pub(crate) async fn put_later(
    controller: &Arc<dyn Controller>,
    process: &Arc<WriterProcess>,
    key: &Key,
    dict: &StateDict,
    options: &PutOptions,
) -> Result<PendingPut> {
    let span = tracing::debug_span!("put", %key, version = tracing::field::Empty);
    let mut writer = VersionWriter::new(controller, process, key, options, span.clone())?;
    let stage = async {
        writer.write(dict, true).await?;
        writer.stage().await
    };
    let staged = stage.instrument(span.clone()).await?;
    Ok(PendingPut::spawn(staged, controller.clone(), span))
}
