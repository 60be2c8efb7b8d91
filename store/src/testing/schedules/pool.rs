//! The pool: writers that fill what they are lent, readers of that, some of which are lost, and whoever deletes;
//! all in memory that is too small for them.

use std::collections::{BTreeMap, BTreeSet};
use std::future::pending;
use std::io;
use std::sync::Arc;

use async_trait::async_trait;

use super::{Bug, Observer, dawdle, once_in};
use crate::io::sync::{mpsc, spawn};
use crate::shm::{Exhausted, PeerId, Pool, SegmentId, Spare};

/// What a segment takes.
const SEGMENT: u64 = 2 << 20;

/// Two segments, and room for what is small.
const LIMIT: u64 = (4 << 20) + 2 * SEGMENT;

/// Who is there: two writers, then two readers. The daemon itself writes as well.
const DAEMON: PeerId = 0;

/// All of it is needed.
struct Nothing;

#[async_trait]
impl Spare for Nothing {
    async fn let_go_of_one(&self) -> bool {
        false
    }
}

struct Stage {
    pool: Arc<Pool>,
    observer: Observer<Seen>,
    bug: Option<Bug>,
}

#[derive(Default)]
struct Seen {
    stamps: u64,
    /// What was written last.
    contents: BTreeMap<SegmentId, u64>,
    written: BTreeSet<SegmentId>,
    read: BTreeMap<(PeerId, SegmentId), u64>,
    mapped: BTreeSet<(PeerId, SegmentId)>,
}

/// Something that has a name, and what is in it.
#[derive(Clone)]
struct Blob {
    name: String,
    stamp: u64,
}

pub(super) fn run(bug: Option<Bug>) {
    shuttle::future::block_on(async move {
        let (pool, observer) = (Arc::new(Pool::new(LIMIT)), Observer::default());
        let stage = Arc::new(Stage { pool, observer, bug });
        let mut listeners = Vec::new();
        let mut tasks = Vec::new();
        for reader in [3, 4] {
            if reader == 3 || once_in(2) {
                let (named, names) = mpsc::unbounded_channel();
                listeners.push(named);
                tasks.push(spawn(read(stage.clone(), reader, names)));
            }
        }
        let (named, names) = mpsc::unbounded_channel();
        listeners.push(named);
        tasks.push(spawn(delete(stage.clone(), names)));
        for writer in [1, 2] {
            tasks.push(spawn(write(stage.clone(), writer, listeners.clone())));
        }
        if once_in(4) {
            tasks.push(spawn(copy(stage.clone(), listeners.clone())));
        }
        drop(listeners);
        for task in tasks {
            task.await.unwrap();
        }
        stage.empty();
        stage.observer.end();
    });
}

/// A writer, until its process ends.
async fn write(stage: Arc<Stage>, peer: PeerId, listeners: Vec<mpsc::UnboundedSender<Blob>>) {
    let unmapping = spawn(unmap(stage.clone(), peer, stage.pool.join(peer)));
    for round in 0..2 {
        let lent = stage.room(|pool| pool.lend(peer, SEGMENT)).await;
        if lent.memory.is_some() {
            stage.observer.seen().mapped.insert((peer, lent.segment));
        }
        let stamp = stage.begin_write(peer, lent.segment);
        dawdle().await;
        stage.observer.seen().written.remove(&lent.segment);
        if once_in(5) {
            stage.pool.give_back(peer, lent.segment);
            continue;
        }
        let name = format!("{peer}/{round}");
        stage.pool.publish(peer, lent.segment, &name, SEGMENT).unwrap();
        stage.tell(&listeners, &Blob { name, stamp });
    }
    // Whoever leaves amid a loan has it taken back.
    if once_in(4) {
        let lent = stage.room(|pool| pool.lend(peer, SEGMENT)).await;
        if lent.memory.is_some() {
            stage.observer.seen().mapped.insert((peer, lent.segment));
        }
    }
    stage.pool.leave(peer);
    stage.exit(peer).await;
    unmapping.await.unwrap();
}

/// The daemon, which copies something under another name first.
async fn copy(stage: Arc<Stage>, listeners: Vec<mpsc::UnboundedSender<Blob>>) {
    let writing = stage.room(|pool| pool.write_own(SEGMENT)).await;
    writing.publish("unproven").unwrap();
    let span = stage.pool.span("unproven").unwrap();
    let stamp = stage.begin_write(DAEMON, span.segment);
    stage.observer.seen().written.remove(&span.segment);
    assert!(stage.pool.rename("unproven", "copy"));
    stage.tell(&listeners, &Blob { name: "copy".into(), stamp });
}

/// A reader, until its process ends.
async fn read(stage: Arc<Stage>, peer: PeerId, mut names: mpsc::UnboundedReceiver<Blob>) {
    let unmapping = spawn(unmap(stage.clone(), peer, stage.pool.join(peer)));
    while let Some(blob) = names.recv().await {
        let held = [blob.name.clone()];
        let mut span = None;
        if stage.bug == Some(Bug::LooksBeforeItHolds) {
            span = stage.pool.span(&blob.name);
            dawdle().await;
        }
        stage.pool.hold(&held);
        if stage.bug != Some(Bug::LooksBeforeItHolds) {
            span = stage.pool.span(&blob.name);
        }
        let Some(span) = span else {
            stage.pool.let_go(&held);
            continue;
        };
        match stage.pool.share(peer, span.segment) {
            Ok(Some(_)) => _ = stage.observer.seen().mapped.insert((peer, span.segment)),
            Ok(None) => {}
            Err(error) => {
                stage.observer.must(false, || format!("`{}` is held: {error}", blob.name));
                stage.pool.let_go(&held);
                continue;
            }
        }
        stage.begin_read(peer, span.segment, &blob);
        dawdle().await;
        let is_lost = once_in(6);
        if is_lost {
            if stage.bug != Some(Bug::LosesSilently) {
                stage.pool.suspect(&blob.name);
            }
            stage.pool.leave(peer);
            stage.pool.let_go(&held);
            dawdle().await;
        } else if stage.bug == Some(Bug::LetsGoTooSoon) {
            stage.pool.let_go(&held);
            dawdle().await;
        }
        stage.end_read(peer, span.segment, &blob);
        if is_lost {
            stage.exit(peer).await;
            return unmapping.await.unwrap();
        }
        if stage.bug != Some(Bug::LetsGoTooSoon) {
            stage.pool.let_go(&held);
        }
        stage.account();
    }
    stage.pool.leave(peer);
    stage.exit(peer).await;
    unmapping.await.unwrap();
}

async fn delete(stage: Arc<Stage>, mut names: mpsc::UnboundedReceiver<Blob>) {
    while let Some(blob) = names.recv().await {
        dawdle().await;
        stage.pool.delete(&blob.name);
        stage.account();
    }
}

/// A peer unmaps what it is told to.
async fn unmap(stage: Arc<Stage>, peer: PeerId, mut segments: mpsc::UnboundedReceiver<SegmentId>) {
    while let Some(segment) = segments.recv().await {
        let is_read = stage.observer.seen().read.contains_key(&(peer, segment));
        stage.observer.must(!is_read, || format!("{peer} reads {segment}, which is retired"));
        stage.observer.seen().mapped.remove(&(peer, segment));
        stage.pool.unmapped(peer, segment);
    }
}

impl Stage {
    /// Waits for room, however long it takes.
    async fn room<T>(
        &self,
        mut work: impl FnMut(&Arc<Pool>) -> io::Result<Result<T, Exhausted>>,
    ) -> T {
        if self.bug != Some(Bug::ListensLate) {
            return self.pool.when_free(pending(), &Nothing, work).await.unwrap().unwrap();
        }
        loop {
            match work(&self.pool).unwrap() {
                Ok(done) => return done,
                Err(_) => self.pool.freed.notified().await,
            }
        }
    }

    fn tell(&self, listeners: &[mpsc::UnboundedSender<Blob>], blob: &Blob) {
        for listener in listeners {
            // A reader that is lost does not listen.
            let _ = listener.send(blob.clone());
        }
        self.account();
    }

    /// Somebody writes something new.
    fn begin_write(&self, peer: PeerId, segment: SegmentId) -> u64 {
        let mut seen = self.observer.seen();
        let is_mapped = peer == DAEMON || seen.mapped.contains(&(peer, segment));
        self.observer.must(is_mapped, || format!("{peer} has not mapped {segment}"));
        let is_new = seen.written.insert(segment);
        self.observer.must(is_new, || format!("{segment} is lent twice"));
        let is_read = seen.read.keys().any(|(_, read)| *read == segment);
        self.observer.must(!is_read, || format!("{segment} is written while it is read"));
        seen.stamps += 1;
        let stamp = seen.stamps;
        seen.contents.insert(segment, stamp);
        stamp
    }

    fn begin_read(&self, peer: PeerId, segment: SegmentId, blob: &Blob) {
        *self.observer.seen().read.entry((peer, segment)).or_default() += 1;
        self.check(segment, blob);
    }

    fn end_read(&self, peer: PeerId, segment: SegmentId, blob: &Blob) {
        self.check(segment, blob);
        self.observer.seen().read.remove(&(peer, segment));
    }

    /// What is read is what was put.
    fn check(&self, segment: SegmentId, blob: &Blob) {
        let seen = self.observer.seen();
        let is_it = seen.contents.get(&segment) == Some(&blob.stamp);
        let is_whole = !seen.written.contains(&segment);
        self.observer.must(is_it && is_whole, || format!("`{}` is not what was put", blob.name));
    }

    /// A process that has left ends, and its maps with it.
    async fn exit(&self, peer: PeerId) {
        let is_soon = self.bug == Some(Bug::ExitsTooSoon);
        if is_soon {
            self.pool.exited(peer);
            self.account();
        }
        dawdle().await;
        self.observer.seen().mapped.retain(|(mapper, _)| *mapper != peer);
        if !is_soon {
            self.pool.exited(peer);
        }
    }

    /// What is mapped counts.
    fn account(&self) {
        let mapped = || self.observer.seen().mapped.clone();
        let before = mapped();
        let used = self.pool.status().used;
        // What was mapped before and after was meanwhile.
        let all: BTreeSet<SegmentId> =
            before.intersection(&mapped()).map(|(_, segment)| *segment).collect();
        let bytes = SEGMENT * u64::try_from(all.len()).unwrap();
        self.observer.must(bytes <= used, || format!("{bytes} bytes are mapped, {used} count"));
        self.observer.must(used <= LIMIT, || format!("{used} of {LIMIT} bytes are used"));
    }

    /// Nobody is there any more, nothing has a name.
    fn empty(&self) {
        let (memory, names) = (self.pool.status(), self.pool.names(""));
        self.observer.must(names.is_empty(), || format!("{names:?} are left"));
        let is_free = memory.used == memory.warm && memory.retired == 0;
        self.observer.must(is_free, || format!("memory is left: {memory:?}"));
    }
}
