//! Verifying: every stored byte against its checksum.

use std::fs::File;
use std::hint::black_box;
use std::os::unix::fs::FileExt;
use std::path::Path;

use tssd_format::{Archive, CHUNK_BYTES, TorchStoreStateDict, Verify};
use tssd_tests::bench::{Bench, Model, Race, Runner, Target, adding_up, cores};

/// A file that the system has in memory, against reading it: one `pread` for each thread, of its part of the file into
/// its part of memory that is warm. To compare there is `pread` of chunks of 1 MiB into one buffer, which stays in the
/// cache of the core: with a look at each word of it, and without. Then the same bytes in memory, as they are in a map,
/// against adding them up.
pub(crate) fn a_file(bench: &mut Bench) {
    const READ: &str = "read";
    const ADD: &str = "add";
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.tssd");
    let model = Model::four_hundred();
    let bytes = TorchStoreStateDict::from_state_dict(&model.dict).unwrap().as_bytes().clone();
    std::fs::write(&path, &bytes).unwrap();
    let len = u64::try_from(bytes.len()).unwrap();
    let read = |threads, look: fn(&[u8])| {
        let file = File::open(&path).unwrap();
        let chunks: Vec<u64> = (0..len / CHUNK_BYTES).collect();
        on_threads(&chunks, threads, |chunks| {
            let mut buffer = vec![0; usize::try_from(CHUNK_BYTES).unwrap()];
            for chunk in chunks {
                file.read_exact_at(&mut buffer, chunk * CHUNK_BYTES).unwrap();
                look(black_box(&buffer));
            }
        });
    };
    let mut warm = bytes.to_vec();
    for threads in [1, 2] {
        let case = format!("verify a file, {}", cores(threads));
        bench.race(
            Race::new(
                &case,
                "in the page cache, every checksum; to read is pread into warm memory",
                7,
            )
            .of(&model)
            .with(
                Runner::ours("tssd", || {
                    verify(&Archive::open(&path).unwrap(), threads);
                })
                .target(Target::Speed(0.9, READ)),
            )
            .with(Runner::limit(READ, || read_whole(&path, &mut warm, threads)))
            .with(Runner::also("read 1 MiB at a time, and add", || read(threads, adding_up)))
            .with(Runner::also("read 1 MiB at a time", || read(threads, |_| {}))),
        );
        let case = format!("verify memory, {}", cores(threads));
        bench.race(
            Race::new(&case, "every checksum; to add is to look at every word", 7)
                .of(&model)
                .with(
                    Runner::ours("tssd", || {
                        verify(&Archive::from_bytes(bytes.clone()).unwrap(), threads);
                    })
                    .target(Target::Speed(0.9, ADD)),
                )
                .with(Runner::limit(ADD, || on_threads(&bytes, threads, adding_up))),
        );
    }
}

pub(crate) fn verify(archive: &Archive, threads: usize) {
    on_threads(&archive.verify_jobs(), threads, |jobs| {
        jobs.iter().try_for_each(Verify::run).unwrap();
    });
}

/// All of a file into memory: each thread its part, in one call.
fn read_whole(path: &Path, memory: &mut [u8], threads: usize) {
    let file = File::open(path).unwrap();
    let part = memory.len().div_ceil(threads);
    std::thread::scope(|scope| {
        for (number, memory) in memory.chunks_mut(part).enumerate() {
            let (file, start) = (&file, number * part);
            scope.spawn(move || file.read_exact_at(memory, u64::try_from(start).unwrap()).unwrap());
        }
    });
}

/// Gives each thread its part of the work.
fn on_threads<T: Sync>(work: &[T], threads: usize, run: impl Fn(&[T]) + Sync) {
    std::thread::scope(|scope| {
        for part in work.chunks(work.len().div_ceil(threads)) {
            scope.spawn(|| run(part));
        }
    });
}
