use tokio::sync::watch;
use tokio::task::JoinHandle;
use tracing::{Instrument, Span};

use super::PutReport;
use super::version_writer::StagedPut;
use crate::error::{Error, Result};
use crate::io::sync::boxed;

/// A put that continues in the background.
///
/// See [`Store::put_state_dict_later`](crate::Store::put_state_dict_later).
#[derive(Debug)]
pub struct PendingPut {
    task: JoinHandle<Result<PutReport>>,
    committed: watch::Receiver<Option<PutReport>>,
}

impl PendingPut {
    /// Commits a staged put in the background. `keep_alive` is dropped when it has ended.
    pub(crate) fn spawn(staged: StagedPut, keep_alive: impl Send + 'static, span: Span) -> Self {
        let (report_commit, committed) = watch::channel(None);
        let commit = async move {
            let report =
                staged.commit(|report| drop(report_commit.send(Some(report.clone())))).await;
            drop(keep_alive);
            report
        };
        Self { task: tokio::spawn(boxed(commit.instrument(span))), committed }
    }

    /// Returns a put that has ended.
    pub(crate) fn from_report(report: PutReport) -> Self {
        let (_, committed) = watch::channel(Some(report.clone()));
        Self { task: tokio::spawn(boxed(async { Ok(report) })), committed }
    }

    /// Waits until the contribution is committed. It may not be in the bucket yet.
    ///
    /// After an error the put has ended.
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

    /// Waits until the contribution is committed, and in the bucket if it must be there.
    ///
    /// # Errors
    ///
    /// As [`Store::put_state_dict`](crate::Store::put_state_dict).
    pub async fn wait(mut self) -> Result<PutReport> {
        self.done().await
    }

    /// As [`PendingPut::wait`], but can be called again after its future was dropped.
    ///
    /// # Errors
    ///
    /// As [`PendingPut::wait`].
    ///
    /// # Panics
    ///
    /// If it has returned before.
    pub async fn done(&mut self) -> Result<PutReport> {
        let cancelled = |error| Error::io("the put was cut off", std::io::Error::other(error));
        (&mut self.task).await.map_err(cancelled)?
    }
}
