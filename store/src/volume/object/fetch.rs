//! Bytes of archives out of a bucket: what lies close together comes in one request, many at once, and is proven
//! before it is handed over.

use std::collections::BTreeSet;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};

use bytes::Bytes;
use object_store::ObjectStoreExt;
use object_store::path::Path;
use tssd_format::{Loop, Runs, checksum, copy_runs};

use crate::bucket::{Bucket, again};
use crate::error::{Error, ErrorKind, Result};
use crate::parallel;
use crate::volume::{Boxed, Holder, Job, Proof, Proving};

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
    fn place(&self, fetch: &Fetch, bytes: &Bytes, targets: &[Mutex<&mut [u8]>]) -> Result<()> {
        let within = |range: Range<u64>| {
            &bytes[native(range.start - fetch.range.start)..native(range.end - fetch.range.start)]
        };
        let mut proven = BTreeSet::new();
        for want in &fetch.wants {
            let source = want.source..want.source + want.runs.source_span();
            let mut target = targets[want.job].lock().expect("nobody panics while copying");
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
    fn pull(&self, jobs: Vec<Job<'_>>) -> Result<u64> {
        let (mut targets, mut wants) = (Vec::with_capacity(jobs.len()), Vec::new());
        for (job, Job { target, boxes }) in jobs.into_iter().enumerate() {
            targets.push(Mutex::new(target));
            for each in boxes {
                add(job, each, &mut wants);
            }
        }
        let fetches = group(wants);
        let paths = fetches.iter().map(|fetch| self.bucket.path(&fetch.blob));
        let paths: Vec<Path> = paths.collect::<Result<_>>()?;
        let (answers, answered) = mpsc::sync_channel(WINDOW);
        let (answered, next) = (Mutex::new(answered), AtomicUsize::new(0));
        let send = || {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if let (Some(fetch), Some(path)) = (fetches.get(number), paths.get(number)) {
                self.send(number, path, &fetch.range, &answers);
            }
        };
        (0..WINDOW).for_each(|_| send());
        let place = |_: usize| {
            let answer = answered.lock().expect("nobody panics while waiting").recv();
            let ended = |_| Error::new(ErrorKind::Unreachable, "the requests to the bucket ended");
            let (number, answer) = answer.map_err(ended)?;
            let bytes = self.received(&fetches[number], answer)?;
            send();
            self.place(&fetches[number], &bytes, &targets)?;
            Ok::<_, Error>(wide(bytes.len()))
        };
        Ok(parallel::map((0..fetches.len()).collect(), place)?.into_iter().sum())
    }

    fn read_exact_at(&self, blob: &str, target: &mut [u8], offset: u64) -> io::Result<()> {
        let runs = Runs::run(wide(target.len()));
        let whole =
            Boxed { blob: blob.into(), source: offset, target: 0, runs, proof: Proof::None };
        self.pull(vec![Job { target, boxes: vec![whole] }]).map(drop).map_err(io::Error::other)
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
            let part = Runs::run(REQUEST_BYTES.min(run - start));
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
