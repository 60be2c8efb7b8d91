//! Writers that begin, commit, withdraw, or come late.

use std::any::Any;
use std::collections::VecDeque;

use super::*;
use crate::control::{Peers, RunDirectory};
use crate::ledger::{RunId, RunProcess, RunStatus};

#[tokio::test]
async fn late_withdrawal_does_not_affect_next_version_of_same_number() {
    let root = tempfile::tempdir().unwrap();
    let (controller, volume) = directory_controller(&root);
    let (key, proposal) =
        (Key::new("policy").unwrap(), Proposal::single_writer(1, Durability::Disk));
    let (first, _) = controller.open(&key, &proposal, || true).await.unwrap();
    controller.delete(&key, Selection::All).await.unwrap();
    let (second, _) = controller.open(&key, &proposal, || true).await.unwrap();
    assert_ne!(first.folder(), second.folder());
    let reservation = volume.reserve(&second.path(0), 1, Durability::Disk).unwrap();
    controller.withdraw(&first, 1).await;
    assert!(reservation.seal().unwrap());
    // A writer that withdraws removes its own folder.
    controller.withdraw(&second, 1).await;
    assert!(!root.path().join(second.folder()).exists());
}

#[tokio::test]
async fn put_with_zero_timeout_is_not_blocked_by_ended_process() {
    let root = tempfile::tempdir().unwrap();
    // Each controller is a separate process.
    let controller = || directory_controller(&root).0;
    let key = Key::new("policy").unwrap();
    let numbered = |number| Proposal::single_writer(number, Durability::Disk);
    let killed = controller();
    for number in [1, 2] {
        killed.open(&key, &numbered(number), || true).await.unwrap();
    }
    // While the process is alive, two open versions block a third.
    let other = controller();
    let error = other.open(&key, &numbered(3), || true).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
    drop(killed);
    let (place, _) = other.open(&key, &numbered(3), || true).await.unwrap();
    assert!(place.folder().contains("-3-"), "{}", place.folder());
}

#[tokio::test]
async fn drop_reason_replaces_its_consequences() {
    let volume = HookedVolume::default();
    let (controller, key) = (volume.controller(), Key::new("policy").unwrap());
    let proposal = Proposal::single_writer(1, Durability::Memory);
    let (place, _) = controller.open(&key, &proposal, || true).await.unwrap();
    let failed = |kind| Error::new(kind, "the disk says no");
    let reason = async |error| controller.failure_cause(&place, error).await;
    // The version has not ended yet.
    assert_eq!(reason(failed(ErrorKind::Io)).await.kind(), ErrorKind::Io);
    write(&volume, &place.path(0), b"no archive", Durability::Memory).unwrap();
    let rejected = controller.commit(&place, ArchiveDigest::compute(b""), &[10]).await.unwrap_err();
    let text = match rejected.refusal() {
        Some(Refusal::Dropped { reason: Reason::Rejected { reason }, .. }) => reason.clone(),
        other => unreachable!("{other:?}"),
    };
    let error = reason(failed(ErrorKind::Io)).await;
    assert!(matches!(error.refusal(), Some(Refusal::Dropped { number: 1, .. })), "{error}");
    // The error contains the reason in the ledger.
    let error = reason(Error::new(ErrorKind::Io, format_args!("{text}, it says"))).await;
    assert_eq!((error.kind(), error.refusal()), (ErrorKind::Io, None));
    // Errors of an unreachable controller and refusals are returned unchanged.
    let error = reason(failed(ErrorKind::Unreachable)).await;
    assert_eq!((error.kind(), error.refusal()), (ErrorKind::Unreachable, None));
    let refusal = Refusal::UnknownVersion { id: place.id };
    let error = reason(Error::from_refusal(&key, refusal.clone())).await;
    assert_eq!(error.refusal(), Some(&refusal));
}

#[tokio::test]
async fn commit_is_decided_once_recorded_or_version_has_ended() {
    let volume = HookedVolume::default();
    let (controller, key) = (volume.controller(), Key::new("policy").unwrap());
    let open = async |writer, number| {
        let writers = [0, 1].into_iter().collect();
        let job = Some(JobId("a".to_owned()));
        let alone = Proposal::single_writer(number, Durability::Memory);
        let proposal = Proposal { writer, writers, job, ..alone };
        controller.open(&key, &proposal, || true).await.unwrap().0
    };
    let place = open(0, 1).await;
    assert!(!controller.is_decided(&place).await);
    let (digest, len) = write_archive(&volume, &place);
    assert!(!controller.commit(&place, digest, &[len]).await.unwrap().visible);
    assert!(controller.is_decided(&place).await);
    // A commit decides neither other versions nor other writers.
    let (other, next) = (open(1, 1).await, open(0, 2).await);
    assert_eq!(other.id, place.id);
    for pending in [&other, &next] {
        assert!(!controller.is_decided(pending).await);
    }
    controller.delete(&key, Selection::All).await.unwrap();
    for ended in [&place, &other, &next] {
        assert!(controller.is_decided(ended).await);
    }
}

#[tokio::test]
async fn withdrawal_deletes_only_uncommitted_archives() {
    let root = tempfile::tempdir().unwrap();
    let (controller, volume) = directory_controller(&root);
    let (key, proposal) =
        (Key::new("policy").unwrap(), Proposal::single_writer(1, Durability::Disk));
    let (late, _) = controller.open(&key, &proposal, || true).await.unwrap();
    controller.delete(&key, Selection::All).await.unwrap();
    let (committed, _) = controller.open(&key, &proposal, || true).await.unwrap();
    let (digest, len) = write_archive(&*volume, &committed);
    assert!(controller.commit(&committed, digest, &[len]).await.unwrap().visible);
    // The writer has continued to write after its version was deleted.
    write_archive(&*volume, &late);
    controller.withdraw(&late, 1).await;
    assert!(!root.path().join(late.folder()).exists());
    controller.withdraw(&committed, 1).await;
    assert!(root.path().join(committed.path(0)).exists());
}

#[tokio::test]
async fn open_limit_counts_from_begin_of_version() {
    let clock = Clock::default();
    let (volume, ledgers) = (Arc::new(MemoryVolume::default()), Arc::new(OwnedLedgers::default()));
    let controller = LocalController::new(ledgers, volume, Arc::new(clock.clone()));
    let (key, timeout) = (Key::new("policy").unwrap(), Duration::from_mins(1));
    let numbered = |number| Proposal::single_writer(number, Durability::Memory);
    let (first, _) = controller.open(&key, &numbered(1), || true).await.unwrap();
    controller.open(&key, &numbered(2), || true).await.unwrap();
    let waiting = Proposal { timeout, ..numbered(3) };
    let mut begin = std::pin::pin!(controller.open(&key, &waiting, || true));
    tokio::time::timeout(Duration::from_millis(20), &mut begin).await.unwrap_err();
    let open_for = 10 * 60 * 1000;
    clock.0.store(open_for - 1, Ordering::SeqCst);
    controller.withdraw(&first, 0).await;
    let (place, _) = begin.await.unwrap();
    for (now, is_open) in [(2 * open_for - 2, true), (2 * open_for - 1, false)] {
        clock.0.store(now, Ordering::SeqCst);
        controller.apply(&key, Command::Expire { now: controller.now() }).await.unwrap();
        let state = controller.state(&key).await.unwrap();
        assert_eq!(state.open().any(|it| it.id == place.id), is_open, "at {now}");
    }
}

#[tokio::test]
async fn commit_reports_replaced_version_as_visible() {
    let volume = MemoryVolume::default();
    let (key, ledgers) = (Key::new("policy").unwrap(), Arc::new(OwnedLedgers::default()));
    let controller =
        LocalController::new(ledgers, Arc::new(volume.clone()), Arc::new(SystemEnvironment));
    let open = async |number| {
        let proposal = Proposal::single_writer(number, Durability::Memory);
        controller.open(&key, &proposal, || true).await.unwrap().0
    };
    let place = open(1).await;
    let (digest, len) = write_archive(&volume, &place);
    let other = RunningVerification::begin(&controller, place.id).unwrap();
    let lens = [len];
    let mut commit = std::pin::pin!(controller.commit(&place, digest, &lens));
    tokio::time::timeout(Duration::from_millis(20), &mut commit).await.unwrap_err();
    drop(other);
    assert!(controller.verify_version(&key, place.id).await.unwrap());
    // The key retains one version.
    let next = open(2).await;
    let (digest, len) = write_archive(&volume, &next);
    assert!(controller.commit(&next, digest, &[len]).await.unwrap().visible);
    assert!(controller.state(&key).await.unwrap().versions().all(|it| it.id == next.id));
    assert!(commit.await.unwrap().visible);
}

#[tokio::test]
async fn retry_returns_committed_version_and_digest() {
    let volume = HookedVolume::default();
    let (controller, key) = (volume.controller(), Key::new("policy").unwrap());
    let alone = Proposal::single_writer(9, Durability::Memory);
    let (place, _) = controller.open(&key, &alone, || true).await.unwrap();
    let (digest, len) = write_archive(&volume, &place);
    assert!(controller.commit(&place, digest, &[len]).await.unwrap().visible);
    let (writers, job) = ([0, 1].into_iter().collect(), Some(JobId("a".to_owned())));
    let proposal = Proposal { writers, job, number: Some(3), rewind: true, ..alone };
    let (place, committed) = controller.open(&key, &proposal, || true).await.unwrap();
    assert_eq!((place.epoch, place.number, committed), (1, 3, None));
    let (digest, len) = write_archive(&volume, &place);
    assert!(!controller.commit(&place, digest, &[len]).await.unwrap().visible);
    let (again, committed) = controller.open(&key, &proposal, || true).await.unwrap();
    assert_eq!((again.id, again.epoch, again.number), (place.id, 1, 3));
    assert_eq!(committed, Some(digest));
}

#[tokio::test]
async fn copy_is_durable_and_keeps_placement() {
    let (volume, bucket) = (HookedVolume::default(), HookedVolume::default());
    let key = Key::new("policy").unwrap();
    let proposal = Proposal::single_writer(7, Durability::Memory);
    let (of, _) = volume.controller().open(&key, &proposal, || true).await.unwrap();
    let bucket = bucket.controller();
    let (copy, _) = bucket.open_copy(&of, proposal.writers.clone(), Duration::ZERO).await.unwrap();
    assert_eq!((copy.path(0), copy.id), (of.path(0), of.id));
    assert_eq!((copy.durability, copy.is_copy), (Durability::Disk, true));
}

/// Ledgers that a test can make unreachable.
#[derive(Default)]
struct UnreachableLedgers(OwnedLedgers, AtomicBool);

#[async_trait]
impl Ledgers for UnreachableLedgers {
    async fn state(&self, key: &Key) -> Result<Arc<State>> {
        self.0.state(key).await
    }

    async fn lock(&self, key: &Key) -> Result<Box<dyn LedgerGuard>> {
        if self.1.load(Ordering::SeqCst) {
            return Err(Error::new(ErrorKind::Unreachable, "nobody answers"));
        }
        self.0.lock(key).await
    }

    async fn begin_session(&self, id: SessionId) -> Result<Option<Box<dyn Any + Send>>> {
        self.0.begin_session(id).await
    }

    async fn has_ended(&self, id: SessionId) -> Result<bool> {
        self.0.has_ended(id).await
    }

    async fn keys(&self) -> Result<Vec<Key>> {
        self.0.keys().await
    }

    async fn changed(&self, key: &Key, seen: &Arc<State>, timeout: Duration) {
        self.0.changed(key, seen, timeout).await;
    }
}

#[tokio::test]
async fn withdrawal_without_ledger_keeps_archives() {
    let (volume, ledgers) =
        (Arc::new(MemoryVolume::default()), Arc::new(UnreachableLedgers::default()));
    let (key, environment) = (Key::new("policy").unwrap(), Arc::new(SystemEnvironment));
    let controller = LocalController::new(ledgers.clone(), volume.clone(), environment);
    let proposal = Proposal::single_writer(1, Durability::Memory);
    let (place, _) = controller.open(&key, &proposal, || true).await.unwrap();
    write_archive(&*volume, &place);
    // An earlier request may still be executed. Then the version needs the archive.
    ledgers.1.store(true, Ordering::SeqCst);
    controller.withdraw(&place, 1).await;
    assert!(volume.open(&place.path(0)).unwrap().is_some());
    ledgers.1.store(false, Ordering::SeqCst);
    controller.withdraw(&place, 1).await;
    assert!(volume.open(&place.path(0)).unwrap().is_none());
}

#[tokio::test]
async fn contribution_may_have_several_archives() {
    let volume = HookedVolume::default();
    let (controller, key) = (volume.controller(), Key::new("policy").unwrap());
    let archives = ["one", "other"].map(|name| {
        let mut dict = tssd_format::StateDict::new();
        dict.insert(name, 1_i64);
        tssd_format::TorchStoreStateDict::from_state_dict(&dict).unwrap()
    });
    let lens = archives.each_ref().map(|it| u64::try_from(it.as_bytes().len()).unwrap());
    let proposal = Proposal { file_len: lens[0], ..Proposal::single_writer(1, Durability::Memory) };
    let mut contribution = controller.begin(&key, proposal).await.unwrap().contribution;
    contribution.parts(&lens[..1])[0].write(archives[0].as_bytes()).unwrap();
    contribution.extend(lens[1], None).await.unwrap();
    contribution.parts(&lens[1..])[0].write(archives[1].as_bytes()).unwrap();
    assert!(contribution.commit(ArchiveDigest::compute(b"both")).await.unwrap().progress.visible);
    let (dict, _) =
        Store::new(controller).get_state_dict(&key, &crate::GetOptions::default()).await.unwrap();
    for name in ["one", "other"] {
        assert_eq!(dict.leaf(name).unwrap(), &tssd_format::Value::from(1_i64));
    }
}

fn put_of_run(run: &str, number: u64) -> Proposal {
    let process = RunProcess { run: RunId(run.to_owned()), host: "host".to_owned(), pid: 1 };
    Proposal { process: Some(process), ..Proposal::single_writer(number, Durability::Memory) }
}

/// No run is connected. Before each answer, the next of these puts begins.
struct RunsOfBusyKey {
    writer: LocalController,
    puts: Lock<VecDeque<Proposal>>,
    asked: Lock<Vec<String>>,
}

#[async_trait]
impl RunDirectory for RunsOfBusyKey {
    async fn status(&self, run: &RunId) -> Result<RunStatus> {
        let count = {
            let mut asked = self.asked.lock();
            asked.push(run.0.clone());
            asked.len()
        };
        assert!(count < 10, "runs are asked for again and again: {:?}", self.asked.lock());
        let put = self.puts.lock().pop_front();
        if let Some(put) = put {
            self.writer.open(&Key::new("policy").unwrap(), &put, || true).await?;
        }
        Ok(RunStatus::Disconnected)
    }
}

#[tokio::test]
async fn run_is_asked_for_once_though_another_begins_meanwhile() {
    let (volume, ledgers) = (HookedVolume::default(), Arc::new(OwnedLedgers::default()));
    let environment = || Arc::new(SystemEnvironment);
    let writer = LocalController::new(ledgers.clone(), Arc::new(volume.clone()), environment());
    let key = Key::new("policy").unwrap();
    let (place, _) = writer.open(&key, &put_of_run("a", 5), || true).await.unwrap();
    let (digest, len) = write_archive(&volume, &place);
    assert!(writer.commit(&place, digest, &[len]).await.unwrap().visible);
    let runs = Arc::new(RunsOfBusyKey {
        writer,
        puts: Lock::new(VecDeque::from([put_of_run("b", 6)])),
        asked: Lock::default(),
    });
    let peers = Peers { runs: runs.clone(), ..Peers::default() };
    let controller = LocalController::with_peers(ledgers, Arc::new(volume), peers, environment());
    let (place, _) = controller.open(&key, &put_of_run("c", 3), || true).await.unwrap();
    assert_eq!((place.epoch, place.number), (1, 3));
    assert_eq!(*runs.asked.lock(), ["a", "b"]);
}
