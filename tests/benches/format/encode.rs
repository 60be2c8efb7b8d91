//! Encoding: a plan, a copy with checksums, an index.

use std::hint::black_box;

use tssd_format::{Fill, Filled, Layout, Options, StateDict};
use tssd_tests::race::{Runner, Target, race};

use crate::model::model;

const BYTES: usize = 256 << 20;

/// Row 3: 32 tensors into memory that was used before. Copying alone is one call for each thread.
pub(crate) fn into_warm_memory() {
    let dict = model(32, BYTES / 32);
    let source = vec![1_u8; BYTES];
    let mut copy = vec![1_u8; BYTES];
    let layout = Layout::plan(&dict, &Options::new()).unwrap();
    let mut file = vec![1_u8; usize::try_from(layout.file_len()).unwrap()];
    for threads in [1, 2] {
        race(
            &format!("3. encode 256 MiB in 32 tensors into warm memory, threads: {threads}"),
            Some(u64::try_from(BYTES).unwrap()),
            21,
            vec![
                Runner::new("memcpy of all of it, one call for each thread", || {
                    let part = BYTES / threads;
                    std::thread::scope(|scope| {
                        for (target, source) in copy.chunks_mut(part).zip(source.chunks(part)) {
                            scope.spawn(|| black_box(target).copy_from_slice(source));
                        }
                    });
                }),
                Runner::new("tssd: plan, fill, seal", || encode(&dict, &mut file, threads))
                    .target(Target::Speed(0.85)),
            ],
        );
    }
}

/// Encodes on so many threads, each with the jobs of one part of the file.
fn encode(dict: &StateDict, file: &mut [u8], threads: usize) {
    let layout = Layout::plan(dict, &Options::new()).unwrap();
    let jobs = layout.jobs();
    let (mut rest, tail) = file.split_at_mut(usize::try_from(layout.index_off()).unwrap());
    let filled: Vec<Filled> = std::thread::scope(|scope| {
        let mut running = Vec::new();
        for part in jobs.chunks(jobs.len().div_ceil(threads)) {
            let target;
            (target, rest) = rest.split_at_mut(part.iter().map(len).sum());
            running.push(scope.spawn(|| fill(part, target)));
        }
        running.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    tail.copy_from_slice(&layout.seal(filled).unwrap());
}

fn fill(jobs: &[Fill], target: &mut [u8]) -> Vec<Filled> {
    let mut rest = target;
    let mut filled = Vec::new();
    for job in jobs {
        let (target, tail) = rest.split_at_mut(len(job));
        filled.push(job.run(target).unwrap());
        rest = tail;
    }
    filled
}

fn len(job: &Fill) -> usize {
    usize::try_from(job.range().end - job.range().start).unwrap()
}
