//! Scenario "pool": writers, readers of which some are lost, and a task that deletes, in scarce memory.

use std::collections::{BTreeMap, BTreeSet};
use std::future::pending;
use std::io;
use std::sync::Arc;

use async_trait::async_trait;

use super::{Bug, Observer, one_in, yield_randomly};
use crate::io::sync::{mpsc, spawn};
use crate::shm::{Evictor, PeerId, Pool, PoolExhausted, SegmentId};

/// Size of a segment in bytes: 2 MiB.
const SEGMENT: u64 = 2 << 20;

/// Memory limit of the pool in bytes: two segments, and 4 MiB for small blobs.
const LIMIT: u64 = (4 << 20) + 2 * SEGMENT;

/// The daemon, which writes too. Peers 1 and 2 are the writers, 3 and 4 the readers.
const DAEMON: PeerId = 0;

/// An evictor without evictable blobs.
struct NothingEvictable;

#[async_trait]
impl Evictor for NothingEvictable {
    async fn evict_one(&self) -> bool {
        false
    }
}

/// State that the tasks share.
struct Fixture {
    pool: Arc<Pool>,
    observer: Observer<Usage>,
    bug: Option<Bug>,
}

/// Current use of the segments.
#[derive(Default)]
struct Usage {
    /// Number of writes so far. Each write has its number as its stamp.
    stamps: u64,
    /// Stamp of the last write of each segment.
    contents: BTreeMap<SegmentId, u64>,
    /// Segments that are being written.
    writing: BTreeSet<SegmentId>,
    /// Number of reads in progress.
    reading: BTreeMap<(PeerId, SegmentId), u64>,
    mapped: BTreeSet<(PeerId, SegmentId)>,
}

/// A blob, and the stamp of its contents.
#[derive(Clone)]
struct Blob {
    name: String,
    stamp: u64,
}

pub(super) fn run(bug: Option<Bug>) {
    shuttle::future::block_on(async move {
        let (pool, observer) = (Arc::new(Pool::new(LIMIT)), Observer::default());
        let fixture = Arc::new(Fixture { pool, observer, bug });
        let mut listeners = Vec::new();
        let mut tasks = Vec::new();
        for reader in [3, 4] {
            if reader == 3 || one_in(2) {
                let (sender, blobs) = mpsc::unbounded_channel();
                listeners.push(sender);
                tasks.push(spawn(read(fixture.clone(), reader, blobs)));
            }
        }
        let (sender, blobs) = mpsc::unbounded_channel();
        listeners.push(sender);
        tasks.push(spawn(delete(fixture.clone(), blobs)));
        for writer in [1, 2] {
            tasks.push(spawn(write(fixture.clone(), writer, listeners.clone())));
        }
        if one_in(4) {
            tasks.push(spawn(copy(fixture.clone(), listeners.clone())));
        }
        drop(listeners);
        for task in tasks {
            task.await.unwrap();
        }
        fixture.check_empty();
        fixture.observer.assert_no_violation();
    });
}

/// Writes two segments, and then ends the process of the writer.
async fn write(fixture: Arc<Fixture>, peer: PeerId, listeners: Vec<mpsc::UnboundedSender<Blob>>) {
    let unmapping = spawn(unmap(fixture.clone(), peer, fixture.pool.add_peer(peer)));
    for round in 0..2 {
        let target = fixture.with_memory(|pool| pool.acquire_segment(peer, SEGMENT)).await;
        if target.memory.is_some() {
            fixture.observer.observed().mapped.insert((peer, target.segment));
        }
        let stamp = fixture.begin_write(peer, target.segment);
        yield_randomly().await;
        fixture.observer.observed().writing.remove(&target.segment);
        if one_in(5) {
            fixture.pool.release_segment(peer, target.segment);
            continue;
        }
        let name = format!("{peer}/{round}");
        fixture.pool.publish(peer, target.segment, &name, SEGMENT).unwrap();
        fixture.announce(&listeners, &Blob { name, stamp });
    }
    // The pool reclaims the segment of a writer that leaves during a write.
    if one_in(4) {
        let target = fixture.with_memory(|pool| pool.acquire_segment(peer, SEGMENT)).await;
        if target.memory.is_some() {
            fixture.observer.observed().mapped.insert((peer, target.segment));
        }
    }
    fixture.pool.remove_peer(peer);
    fixture.exit(peer).await;
    unmapping.await.unwrap();
}

/// Writes a blob as the daemon: under a temporary name first, and then renames it.
async fn copy(fixture: Arc<Fixture>, listeners: Vec<mpsc::UnboundedSender<Blob>>) {
    let writing = fixture.with_memory(|pool| pool.begin_blob(SEGMENT)).await;
    writing.publish("unproven").unwrap();
    let span = fixture.pool.span("unproven").unwrap();
    let stamp = fixture.begin_write(DAEMON, span.segment);
    fixture.observer.observed().writing.remove(&span.segment);
    assert!(fixture.pool.rename("unproven", "copy"));
    fixture.announce(&listeners, &Blob { name: "copy".into(), stamp });
}

/// Reads the announced blobs, and then ends the process of the reader.
///
/// The reader may be lost during a read.
async fn read(fixture: Arc<Fixture>, peer: PeerId, mut blobs: mpsc::UnboundedReceiver<Blob>) {
    let unmapping = spawn(unmap(fixture.clone(), peer, fixture.pool.add_peer(peer)));
    while let Some(blob) = blobs.recv().await {
        let names = [blob.name.clone()];
        let mut span = None;
        if fixture.bug == Some(Bug::LookupBeforeHold) {
            span = fixture.pool.span(&blob.name);
            yield_randomly().await;
        }
        fixture.pool.hold(&names);
        if fixture.bug != Some(Bug::LookupBeforeHold) {
            span = fixture.pool.span(&blob.name);
        }
        let Some(span) = span else {
            fixture.pool.release(&names);
            continue;
        };
        match fixture.pool.share(peer, span.segment) {
            Ok(Some(_)) => _ = fixture.observer.observed().mapped.insert((peer, span.segment)),
            Ok(None) => {}
            Err(error) => {
                fixture.observer.check(false, || format!("`{}` is held: {error}", blob.name));
                fixture.pool.release(&names);
                continue;
            }
        }
        fixture.begin_read(peer, span.segment, &blob);
        yield_randomly().await;
        let is_lost = one_in(6);
        if is_lost {
            if fixture.bug != Some(Bug::UnreportedReaderLoss) {
                fixture.pool.block_recycling(&blob.name);
            }
            fixture.pool.remove_peer(peer);
            fixture.pool.release(&names);
            yield_randomly().await;
        } else if fixture.bug == Some(Bug::EarlyHoldRelease) {
            fixture.pool.release(&names);
            yield_randomly().await;
        }
        fixture.end_read(peer, span.segment, &blob);
        if is_lost {
            fixture.exit(peer).await;
            return unmapping.await.unwrap();
        }
        if fixture.bug != Some(Bug::EarlyHoldRelease) {
            fixture.pool.release(&names);
        }
        fixture.check_used_bytes();
    }
    fixture.pool.remove_peer(peer);
    fixture.exit(peer).await;
    unmapping.await.unwrap();
}

async fn delete(fixture: Arc<Fixture>, mut blobs: mpsc::UnboundedReceiver<Blob>) {
    while let Some(blob) = blobs.recv().await {
        yield_randomly().await;
        fixture.pool.delete(&blob.name);
        fixture.check_used_bytes();
    }
}

/// Unmaps the segments of a peer that the pool retires.
async fn unmap(
    fixture: Arc<Fixture>,
    peer: PeerId,
    mut segments: mpsc::UnboundedReceiver<SegmentId>,
) {
    while let Some(segment) = segments.recv().await {
        let is_read = fixture.observer.observed().reading.contains_key(&(peer, segment));
        fixture.observer.check(!is_read, || format!("{peer} reads {segment}, which is retired"));
        fixture.observer.observed().mapped.remove(&(peer, segment));
        fixture.pool.record_unmap(peer, segment);
    }
}

impl Fixture {
    /// Repeats `work` until there is enough memory for it, without a timeout.
    async fn with_memory<T>(
        &self,
        mut work: impl FnMut(&Arc<Pool>) -> io::Result<Result<T, PoolExhausted>>,
    ) -> T {
        if self.bug != Some(Bug::LateSubscription) {
            return self
                .pool
                .with_memory(pending(), &NothingEvictable, work)
                .await
                .unwrap()
                .unwrap();
        }
        loop {
            match work(&self.pool).unwrap() {
                Ok(done) => return done,
                Err(_) => self.pool.freed.notified().await,
            }
        }
    }

    /// Sends the name of a blob to the readers and to the task that deletes.
    fn announce(&self, listeners: &[mpsc::UnboundedSender<Blob>], blob: &Blob) {
        for listener in listeners {
            // Lost readers have dropped their receivers.
            let _ = listener.send(blob.clone());
        }
        self.check_used_bytes();
    }

    /// Begins a write, and checks that the segment is mapped by the writer and used by no other task.
    fn begin_write(&self, peer: PeerId, segment: SegmentId) -> u64 {
        let mut usage = self.observer.observed();
        let is_mapped = peer == DAEMON || usage.mapped.contains(&(peer, segment));
        self.observer.check(is_mapped, || format!("{peer} has not mapped {segment}"));
        let is_new = usage.writing.insert(segment);
        self.observer.check(is_new, || format!("{segment} is acquired twice"));
        let is_read = usage.reading.keys().any(|(_, read)| *read == segment);
        self.observer.check(!is_read, || format!("{segment} is written while it is read"));
        usage.stamps += 1;
        let stamp = usage.stamps;
        usage.contents.insert(segment, stamp);
        stamp
    }

    fn begin_read(&self, peer: PeerId, segment: SegmentId, blob: &Blob) {
        *self.observer.observed().reading.entry((peer, segment)).or_default() += 1;
        self.check(segment, blob);
    }

    fn end_read(&self, peer: PeerId, segment: SegmentId, blob: &Blob) {
        self.check(segment, blob);
        self.observer.observed().reading.remove(&(peer, segment));
    }

    /// Checks that a segment has the contents of a blob, and is not being written.
    fn check(&self, segment: SegmentId, blob: &Blob) {
        let usage = self.observer.observed();
        let is_same = usage.contents.get(&segment) == Some(&blob.stamp);
        let is_complete = !usage.writing.contains(&segment);
        self.observer
            .check(is_same && is_complete, || format!("`{}` is not what was put", blob.name));
    }

    /// Ends the process of a peer that has left, and with it its maps.
    async fn exit(&self, peer: PeerId) {
        let is_early = self.bug == Some(Bug::EarlyExit);
        if is_early {
            self.pool.record_exit(peer);
            self.check_used_bytes();
        }
        yield_randomly().await;
        self.observer.observed().mapped.retain(|(mapper, _)| *mapper != peer);
        if !is_early {
            self.pool.record_exit(peer);
        }
    }

    /// Checks that the pool counts all mapped segments as used, and stays within its limit.
    fn check_used_bytes(&self) {
        let mapped = || self.observer.observed().mapped.clone();
        let before = mapped();
        let used = self.pool.status().used_bytes;
        // Segments that are mapped before and after the status were mapped meanwhile.
        let all: BTreeSet<SegmentId> =
            before.intersection(&mapped()).map(|(_, segment)| *segment).collect();
        let bytes = SEGMENT * u64::try_from(all.len()).unwrap();
        self.observer.check(bytes <= used, || format!("{bytes} bytes are mapped, {used} count"));
        self.observer.check(used <= LIMIT, || format!("{used} of {LIMIT} bytes are used"));
    }

    /// Checks the final state: no blobs, no used and no retired segments.
    fn check_empty(&self) {
        let (memory, names) = (self.pool.status(), self.pool.names(""));
        self.observer.check(names.is_empty(), || format!("{names:?} are left"));
        let is_free = memory.used_bytes == memory.free_bytes && memory.retired_bytes == 0;
        self.observer.check(is_free, || format!("memory is left: {memory:?}"));
    }
}
