//! Bytes of archives out of a bucket: what lies close together comes in one request, many at once, and is proven
//! before it is handed over.

use std::collections::BTreeSet;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::RecvTimeoutError;
use std::sync::{Arc, mpsc};

use bytes::Bytes;
use object_store::ObjectStoreExt;
use object_store::path::Path;
use tssd_format::{Loop, Runs, checksum, copy_runs};

use crate::blob::{Boxed, Holder, Job, Proof, Proving};
use crate::error::{Error, ErrorKind, Result};
use crate::io::bucket::{Bucket, again};
use crate::io::cancel::Stop;
use crate::io::parallel;
use crate::io::sync::Lock;

/// A request asks for at most so many bytes, unless one chunk or run has more.
const REQUEST_BYTES: u64 = 8 << 20;

/// Bytes that nobody wants come along if they are no more than these: less than a further request costs.
const GAP_BYTES: u64 = 64 << 10;

/// How many requests a pull has under way, or answered and not looked at.
const WINDOW: usize = 16;

pub(super) struct Fetcher {
    bucket: Bucket,
}

/// Runs of bytes of a blob that go to a target, and what must come for them.
struct Want {
    blob: Arc<str>,
    /// What must come: more than the runs, where chunks are proven.
    need: Range<u64>,
    /// Where the runs begin in the blob.
    source: u64,
    job: usize,
    target: u64,
    runs: Runs,
    proof: Proof,
}

/// One request, and what it is for.
struct Fetch {
    blob: Arc<str>,
    range: Range<u64>,
    wants: Vec<Want>,
}

/// What is to come of a request: it is sent when this is dropped, whatever becomes of the request.
struct Answer {
    number: usize,
    bytes: Option<object_store::Result<Bytes>>,
    answers: Answers,
}

type Answers = mpsc::SyncSender<(usize, object_store::Result<Bytes>)>;

impl Answer {
    fn give(mut self, bytes: object_store::Result<Bytes>) {
        self.bytes = Some(bytes);
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        let ended = || {
            let source = "the request was cut off".into();
            Err(object_store::Error::Generic { store: "bucket", source })
        };
        let bytes = self.bytes.take().unwrap_or_else(ended);
        // Nobody waits for it any more, or there is room: no more are sent than that.
        drop(self.answers.try_send((self.number, bytes)));
    }
}

impl Fetcher {
    pub(super) fn new(bucket: Bucket) -> Self {
        Self { bucket }
    }

    /// Lets a request be made; its answer comes with its number.
    fn send(&self, number: usize, path: &Path, range: &Range<u64>, answers: &Answers) {
        let (objects, requests) = (self.bucket.objects(), self.bucket.requests());
        let (path, range) = (path.clone(), range.clone());
        let answer = Answer { number, bytes: None, answers: answers.clone() };
        self.bucket.spawn(async move {
            let _one = requests.acquire().await;
            answer.give(again(|| objects.get_range(&path, range.clone())).await);
        });
    }

    fn received(&self, fetch: &Fetch, answer: object_store::Result<Bytes>) -> Result<Bytes> {
        let name = &*fetch.blob;
        let bytes = match answer {
            Err(object_store::Error::NotFound { .. }) => {
                let text = format_args!(
                    "`{}` was deleted while it was read: read the newest version, or keep more of them",
                    self.bucket.shown(name)
                );
                return Err(Error::new(ErrorKind::Overtaken, text));
            }
            answer => answer.map_err(|error| self.bucket.error(name, &error))?,
        };
        if wide(bytes.len()) != fetch.range.end - fetch.range.start {
            let text = format_args!("`{}` is cut off", self.bucket.shown(name));
            return Err(Error::new(ErrorKind::Corrupt, text));
        }
        Ok(bytes)
    }

    fn corrupt(&self, blob: &str, chunk: &Range<u64>) -> Error {
        let (shown, Range { start, end }) = (self.bucket.shown(blob), chunk);
        let text = format_args!("bytes {start}..{end} of `{shown}` do not have their checksum");
        Error::new(ErrorKind::Corrupt, text)
    }

    /// Puts what has come where it belongs, proven.
    fn place(&self, fetch: &Fetch, bytes: &Bytes, targets: &[Lock<&mut [u8]>]) -> Result<()> {
        let within = |range: Range<u64>| {
            &bytes[native(range.start - fetch.range.start)..native(range.end - fetch.range.start)]
        };
        let mut proven = BTreeSet::new();
        for want in &fetch.wants {
            let source = want.source..want.source + want.runs.source_span();
            let mut target = targets[want.job].lock();
            let target = &mut target[native(want.target)..];
            match &want.proof {
                Proof::Whole(storage) => {
                    let mut proving = Proving::new(storage, source.start - storage.offset);
                    let bytes = within(source);
                    proving.copy(bytes, &mut target[..bytes.len()]);
                    proving
                        .finish()
                        .map_err(|chunk| self.corrupt(&want.blob, &storage.stored_chunk(chunk)))?;
                    continue;
                }
                Proof::Part(storage) => {
                    let raw = source.start - storage.offset..source.end - storage.offset;
                    for number in storage.chunks(&raw) {
                        let chunk = storage.stored_chunk(number);
                        if proven.insert(chunk.start)
                            && checksum(within(chunk.clone())) != storage.crcs[native(number)]
                        {
                            return Err(self.corrupt(&want.blob, &chunk));
                        }
                    }
                }
                Proof::None => {}
            }
            copy_runs(&want.runs, within(source), target, |_| Ok::<(), Error>(()))?;
        }
        Ok(())
    }
}

impl Holder for Fetcher {
    fn pull(&self, jobs: Vec<Job<'_>>, stop: &Stop) -> Result<u64> {
        let (mut targets, mut wants) = (Vec::with_capacity(jobs.len()), Vec::new());
        for (job, Job { target, boxes }) in jobs.into_iter().enumerate() {
            targets.push(Lock::new(target));
            for each in boxes {
                add(job, each, &mut wants);
            }
        }
        let fetches = group(wants);
        let paths = fetches.iter().map(|fetch| self.bucket.path(&fetch.blob));
        let paths: Vec<Path> = paths.collect::<Result<_>>()?;
        let (answers, answered) = mpsc::sync_channel(WINDOW);
        let (answered, next) = (Lock::new(answered), AtomicUsize::new(0));
        let send = || {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if let (Some(fetch), Some(path)) = (fetches.get(number), paths.get(number)) {
                self.send(number, path, &fetch.range, &answers);
            }
        };
        (0..WINDOW).for_each(|_| send());
        let place = |_: usize| {
            let answered = answered.lock();
            let (number, answer) = loop {
                stop.check()?;
                match answered.recv_timeout(Stop::INTERVAL) {
                    Ok(answer) => break answer,
                    Err(RecvTimeoutError::Timeout) => {}
                    Err(RecvTimeoutError::Disconnected) => {
                        let text = "the requests to the bucket ended";
                        return Err(Error::new(ErrorKind::Unreachable, text));
                    }
                }
            };
            drop(answered);
            let bytes = self.received(&fetches[number], answer)?;
            send();
            self.place(&fetches[number], &bytes, &targets)?;
            Ok::<_, Error>(wide(bytes.len()))
        };
        Ok(parallel::map((0..fetches.len()).collect(), place)?.into_iter().sum())
    }

    fn read_exact_at(&self, blob: &str, target: &mut [u8], offset: u64) -> io::Result<()> {
        let runs = Runs::contiguous(wide(target.len()));
        let whole =
            Boxed { blob: blob.into(), source: offset, target: 0, runs, proof: Proof::None };
        let pulled = self.pull(vec![Job { target, boxes: vec![whole] }], &Stop::default());
        pulled.map(drop).map_err(io::Error::other)
    }
}

/// Cuts a box into parts that a request can have.
fn add(job: usize, each: Boxed, wants: &mut Vec<Want>) {
    let Boxed { blob, source, target, runs, proof } = each;
    if runs.total_bytes() == 0 {
        return;
    }
    let mut windows = Vec::new();
    // What is far apart in the blob is cut first: the order in which runs are copied is nobody's concern.
    let mut loops = runs.loops().to_vec();
    loops.sort_by_key(|each| std::cmp::Reverse(each.source_stride));
    cut(source, target, runs.run_bytes(), &loops, &mut windows);
    for (source, target, runs) in windows {
        let end = source + runs.source_span();
        let need = match &proof {
            Proof::Part(storage) => {
                let chunks = storage.chunks(&(source - storage.offset..end - storage.offset));
                storage.stored_chunk(chunks.start).start..storage.stored_chunk(chunks.end - 1).end
            }
            Proof::Whole(_) | Proof::None => source..end,
        };
        let (blob, proof) = (blob.clone(), proof.clone());
        wants.push(Want { blob, need, source, job, target, runs, proof });
    }
}

/// Runs as parts whose source spans no more than a request has, and no more that nobody wants than it may.
fn cut(source: u64, target: u64, run: u64, loops: &[Loop], windows: &mut Vec<(u64, u64, Runs)>) {
    let span = |loops: &[Loop]| {
        loops.iter().fold(run, |span, each| span + (each.count - 1) * each.source_stride)
    };
    let Some((outer, inner)) = loops.split_first() else {
        for start in (0..run).step_by(native(REQUEST_BYTES)) {
            let part = Runs::contiguous(REQUEST_BYTES.min(run - start));
            windows.push((source + start, target + start, part));
        }
        return;
    };
    let inner_span = span(inner);
    let is_sparse = outer.source_stride > inner_span.saturating_add(GAP_BYTES);
    let at_once = match REQUEST_BYTES.checked_sub(inner_span) {
        Some(room) if !is_sparse => room / outer.source_stride.max(1) + 1,
        _ => 1,
    };
    let place = |number: u64| {
        (source + number * outer.source_stride, target + number * outer.target_stride)
    };
    if at_once == 1 {
        for number in 0..outer.count {
            let (source, target) = place(number);
            cut(source, target, run, inner, windows);
        }
        return;
    }
    for number in (0..outer.count).step_by(native(at_once)) {
        let count = at_once.min(outer.count - number);
        let shape: Vec<u64> =
            [count].into_iter().chain(inner.iter().map(|each| each.count)).chain([run]).collect();
        let strides = |stride: fn(&Loop) -> u64| -> Vec<u64> {
            [stride(outer)].into_iter().chain(inner.iter().map(stride)).chain([1]).collect()
        };
        let (from, to) = (strides(|each| each.source_stride), strides(|each| each.target_stride));
        let (source, target) = place(number);
        windows.push((source, target, Runs::new(1, &shape, &from, &to)));
    }
}

/// Puts what lies close together into one request.
fn group(mut wants: Vec<Want>) -> Vec<Fetch> {
    wants.sort_by(|one, other| {
        (&one.blob, one.need.start, one.need.end).cmp(&(
            &other.blob,
            other.need.start,
            other.need.end,
        ))
    });
    let mut fetches: Vec<Fetch> = Vec::new();
    for want in wants {
        let last = fetches.last_mut().filter(|last| {
            let end = last.range.end.max(want.need.end);
            last.blob == want.blob
                && want.need.start <= last.range.end.saturating_add(GAP_BYTES)
                && (end == last.range.end || end - last.range.start <= REQUEST_BYTES)
        });
        match last {
            Some(last) => {
                last.range.end = last.range.end.max(want.need.end);
                last.wants.push(want);
            }
            None => fetches.push(Fetch {
                blob: want.blob.clone(),
                range: want.need.clone(),
                wants: vec![want],
            }),
        }
    }
    fetches
}

/// Places in what has come, and in targets.
fn native(place: u64) -> usize {
    usize::try_from(place).expect("what is in memory fits usize")
}

fn wide(len: usize) -> u64 {
    u64::try_from(len).expect("usize is at most 64 bits")
}

#[cfg(test)]
mod tests {
    use object_store::PutPayload;
    use object_store::memory::InMemory;
    use tssd_format::{ChunkSize, StorageReference, row_major_strides};

    use super::*;

    fn want(blob: &str, need: Range<u64>) -> Want {
        let (source, runs) = (need.start, Runs::contiguous(need.end - need.start));
        Want { blob: blob.into(), need, source, job: 0, target: 0, runs, proof: Proof::None }
    }

    /// What must come for bytes that lie so, from byte 1000 on.
    fn needs(shape: &[u64], strides: &[u64]) -> Vec<Range<u64>> {
        let runs = Runs::new(1, shape, strides, &row_major_strides(shape));
        let (bytes, mut wants) = (runs.total_bytes(), Vec::new());
        let proof = Proof::None;
        add(7, Boxed { blob: "blob".into(), source: 1000, target: 3, runs, proof }, &mut wants);
        assert!(wants.iter().all(|want| (&*want.blob, want.job) == ("blob", 7)));
        assert_eq!(wants.iter().map(|want| want.runs.total_bytes()).sum::<u64>(), bytes);
        wants.into_iter().map(|want| want.need).collect()
    }

    fn rows(count: u64, stride: u64, span: u64) -> Vec<Range<u64>> {
        (0..count).map(|row| 1000 + row * stride..1000 + row * stride + span).collect()
    }

    #[test]
    fn boxes_are_cut_where_bytes_are_too_many_or_too_far_apart() {
        const MIB: u64 = 1 << 20;
        assert_eq!(needs(&[0, 5], &[5, 1]), []);
        assert_eq!(needs(&[5], &[1]), rows(1, 0, 5));
        let mut three = rows(3, REQUEST_BYTES, REQUEST_BYTES);
        three[2].end = three[2].start + 1;
        assert_eq!(needs(&[2 * REQUEST_BYTES + 1], &[1]), three);
        // Rows whose gaps are no larger than a further request.
        assert_eq!(needs(&[3, 100], &[100 + GAP_BYTES, 1]), rows(1, 0, 300 + 2 * GAP_BYTES));
        assert_eq!(needs(&[3, 100], &[101 + GAP_BYTES, 1]), rows(3, 101 + GAP_BYTES, 100));
        // The same for rows of rows, of which each spans 500 bytes.
        let span = 2 * (500 + GAP_BYTES) + 500;
        assert_eq!(needs(&[3, 3, 100], &[500 + GAP_BYTES, 200, 1]), rows(1, 0, span));
        assert_eq!(needs(&[3, 3, 100], &[501 + GAP_BYTES, 200, 1]), rows(3, 501 + GAP_BYTES, 500));
        // As many rows as a request has.
        let row = MIB - 10;
        let mut wanted = rows(3, 8 * MIB, 8 * MIB - 10);
        wanted[2].end = wanted[2].start + 4 * MIB - 10;
        assert_eq!(needs(&[20, row], &[MIB, 1]), wanted);
        // Rows of which two are too many.
        assert_eq!(needs(&[2, 5 * MIB], &[5 * MIB + 1, 1]), rows(2, 5 * MIB + 1, 5 * MIB));
    }

    #[test]
    fn chunks_that_are_proven_come_whole() {
        let chunk_size = ChunkSize::from_log2(12).unwrap();
        let (offset, len, crcs) = (1 << 20, 10_000, vec![0; 3]);
        let storage = StorageReference { offset, len, chunk_size, crcs, ..Default::default() };
        let proof = Proof::Part(Arc::new(storage));
        for (wanted, chunks) in [
            (5000..5100, 4096..8192),
            (4096..8192, 4096..8192),
            (4095..8193, 0..10_000),
            (9999..10_000, 8192..10_000),
        ] {
            let runs = Runs::contiguous(wanted.end - wanted.start);
            let (source, proof, mut wants) = (offset + wanted.start, proof.clone(), Vec::new());
            add(0, Boxed { blob: "blob".into(), source, target: 0, runs, proof }, &mut wants);
            let [Want { need, source: start, .. }] = &wants[..] else { panic!("{}", wants.len()) };
            assert_eq!((need.start - offset..need.end - offset, *start), (chunks, source));
        }
    }

    /// Of a storage all chunks are proven that have a byte of what is wanted, and no others.
    #[test]
    fn parts_of_chunks_are_proven_with_the_rest_of_them() {
        let payload: Vec<u8> = (0..2500_u32).flat_map(u32::to_le_bytes).collect();
        let object = [&[0; 4096][..], &payload].concat();
        let bucket = Bucket::new(Arc::new(InMemory::new()), Path::default(), "s3://test").unwrap();
        let (objects, put) = (bucket.objects(), PutPayload::from(object));
        bucket.wait("blob", async move { objects.put(&"blob".into(), put).await }).unwrap();
        let fetcher = Fetcher::new(bucket);
        let chunk_size = ChunkSize::from_log2(12).unwrap();
        let crcs: Vec<u32> = payload.chunks(4096).map(checksum).collect();
        for wrong in 0..4 {
            let mut crcs = crcs.clone();
            crcs.iter_mut().skip(wrong).take(1).for_each(|crc| *crc ^= 1);
            let (offset, len) = (4096, 10_000);
            let storage =
                Arc::new(StorageReference { offset, len, chunk_size, crcs, ..Default::default() });
            for (wanted, chunks) in [(5000..5100, 1..2), (4095..8193, 0..3), (9999..10_000, 2..3)] {
                let mut target = vec![0; wanted.len()];
                let runs = Runs::contiguous(wide(wanted.len()));
                let (source, proof) = (4096 + wide(wanted.start), Proof::Part(storage.clone()));
                let part = Boxed { blob: "blob".into(), source, target: 0, runs, proof };
                let pulled = fetcher
                    .pull(vec![Job { target: &mut target, boxes: vec![part] }], &Stop::default());
                if chunks.contains(&wrong) {
                    assert_eq!(pulled.unwrap_err().kind(), ErrorKind::Corrupt);
                } else {
                    pulled.unwrap();
                    assert!(target == payload[wanted]);
                }
            }
        }
    }

    #[test]
    fn what_lies_close_together_is_one_request() {
        type Wanted<'a> = &'a [(&'a str, Range<u64>)];
        const R: u64 = REQUEST_BYTES;
        let near = GAP_BYTES;
        let one: [(Wanted, Range<u64>); 5] = [
            (&[("a", 10 + near..20 + near), ("a", 0..10)], 0..20 + near),
            (&[("a", 0..10), ("a", 0..5), ("a", 5..10)], 0..10),
            (&[("a", 5..R), ("a", 10..R + 5)], 5..R + 5),
            // What has come already costs nothing, however long it is.
            (&[("a", 0..2 * R), ("a", 5..10)], 0..2 * R),
            (&[("a", 0..2 * R), ("a", 0..2 * R)], 0..2 * R),
        ];
        for (wanted, range) in one {
            let fetches =
                group(wanted.iter().map(|(blob, need)| want(blob, need.clone())).collect());
            let [fetch] = &fetches[..] else { panic!("{wanted:?}: {}", fetches.len()) };
            assert_eq!((&fetch.range, fetch.wants.len()), (&range, wanted.len()));
        }
        let apart: [Wanted; 4] = [
            &[("a", 0..10), ("a", 11 + near..20 + near)],
            &[("a", 0..10), ("b", 5..20)],
            &[("a", 5..R), ("a", 10..R + 6)],
            &[("a", 0..2 * R), ("a", 5..2 * R + 1)],
        ];
        for wanted in apart {
            let fetches =
                group(wanted.iter().map(|(blob, need)| want(blob, need.clone())).collect());
            let found = fetches.iter().map(|fetch| (&*fetch.blob, fetch.range.clone()));
            assert!(found.eq(wanted.iter().cloned()), "{wanted:?}");
        }
    }
}
