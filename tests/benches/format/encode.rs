//! Encoding: plan the layout, copy with checksums, write the index.

use std::cell::RefCell;

use tssd_format::{Archive, JobChecksums, Layout, Options, StateDict, WriteJob, zeroed};
use tssd_tests::bench::{
    Bench, CopyBuffers, LastResult, Model, Race, Runner, Target, core_label, run_on_cores,
};

/// Encodes into used memory and into new memory of the operating system.
///
/// The limit is one memcpy per thread.
pub(crate) fn encode_into_memory(bench: &mut Bench) {
    let model = &Model::four_hundred();
    let layout = Layout::plan(&model.dict, &Options::new()).unwrap();
    let len = usize::try_from(layout.file_len()).unwrap();
    for threads in [1, 2] {
        run_on_cores(threads, || {
            let mut memory = CopyBuffers::new(model.bytes);
            let file = RefCell::new(vec![1_u8; len]);
            let case = format!("encode, {}", core_label(threads));
            bench.race(
                Race::new(&case, "into warm memory: plan, fill, seal", 7)
                    .with_model(model)
                    .with_runner(
                        Runner::ours("tssd", || {
                            encode(&model.dict, &mut file.borrow_mut(), threads);
                        })
                        .with_target(Target::Speed(0.85, "memcpy")),
                    )
                    .with_runner(Runner::limit("memcpy", || memory.copy(threads))),
            );
            let archive = Archive::from_bytes(file.take()).unwrap();
            model.assert_equals(&archive.to_state_dict().unwrap());
            drop(archive);
            let case = format!("encode cold, {}", core_label(threads));
            let (new, huge) = (LastResult::new(), LastResult::new());
            let encoded = |mut file: Vec<u8>| {
                encode(&model.dict, &mut file, threads);
                file
            };
            bench.race(
                Race::new(&case, "into memory that is new each time", 5)
                    .with_model(model)
                    .with_runner(Runner::ours("tssd", || {
                        new.replace_with(|| encoded(vec![0; len]));
                    }))
                    .with_runner(Runner::variant("tssd, huge pages", || {
                        huge.replace_with(|| encoded(zeroed(len).unwrap()));
                    }))
                    .with_runner(Runner::limit("memcpy into new memory", || {
                        memory.copy_to_new_memory(threads);
                    })),
            );
            for file in [new.take(), huge.take()] {
                let archive = Archive::from_bytes(file).unwrap();
                model.assert_equals(&archive.to_state_dict().unwrap());
            }
        });
    }
}

/// Encodes on several threads. Each thread runs the jobs of one contiguous part of the file.
fn encode(dict: &StateDict, file: &mut [u8], threads: usize) {
    let layout = Layout::plan(dict, &Options::new()).unwrap();
    let jobs = layout.jobs();
    let (mut rest, tail) = file.split_at_mut(usize::try_from(layout.index_off()).unwrap());
    let checksums: Vec<JobChecksums> = std::thread::scope(|scope| {
        let mut running = Vec::new();
        for part in jobs.chunks(jobs.len().div_ceil(threads)) {
            let target;
            (target, rest) = rest.split_at_mut(part.iter().map(len).sum());
            running.push(scope.spawn(|| run_jobs(part, target)));
        }
        running.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    tail.copy_from_slice(&layout.seal(checksums).unwrap());
}

fn run_jobs(jobs: &[WriteJob], target: &mut [u8]) -> Vec<JobChecksums> {
    let mut rest = target;
    let mut checksums = Vec::new();
    for job in jobs {
        let (target, tail) = rest.split_at_mut(len(job));
        checksums.push(job.run(target).unwrap());
        rest = tail;
    }
    checksums
}

fn len(job: &WriteJob) -> usize {
    usize::try_from(job.range().end - job.range().start).unwrap()
}
