//! Verification of every stored byte against its checksum.

use tssd_format::{Archive, TorchStoreStateDict, VerifyJob};
use tssd_tests::bench::{
    Bench, LastResult, Model, Race, Runner, Target, core_label, read_in_pieces, read_into,
    sum_words,
};

/// Verifies a file in the page cache, and the same bytes in memory.
///
/// The limit for the file is one `pread` per thread into warm memory. Variants read 1 MiB at a time into a buffer that
/// stays in the cache of the core, with and without a sum of its words. The limit for memory is the sum of its words.
pub(crate) fn verify_file(bench: &mut Bench) {
    const READ: &str = "read";
    const ADD: &str = "add";
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.tssd");
    let model = Model::four_hundred();
    let bytes = TorchStoreStateDict::from_state_dict(&model.dict).unwrap().as_bytes().clone();
    std::fs::write(&path, &bytes).unwrap();
    let read = |threads, visit: fn(&[u8])| read_in_pieces(&path, threads, visit);
    let verified = |archive: Archive, threads| {
        verify(&archive, threads);
        archive
    };
    let last: LastResult<Archive> = LastResult::new();
    let assert_unchanged = || model.assert_equals(&last.take().to_state_dict().unwrap());
    let mut warm = vec![1; bytes.len()];
    for threads in [1, 2] {
        let case = format!("verify a file, {}", core_label(threads));
        bench.race(
            Race::new(
                &case,
                "in the page cache, every checksum; to read is pread into warm memory",
                7,
            )
            .with_model(&model)
            .with_runner(
                Runner::ours("tssd", || {
                    last.replace_with(|| verified(Archive::open(&path).unwrap(), threads));
                })
                .with_target(Target::Speed(0.9, READ)),
            )
            .with_runner(Runner::limit(READ, || read_into(&path, &mut warm, threads)))
            .with_runner(Runner::variant("read 1 MiB at a time, and add", || {
                read(threads, sum_words);
            }))
            .with_runner(Runner::variant("read 1 MiB at a time", || read(threads, |_| {}))),
        );
        assert_unchanged();
        assert!(warm == bytes, "what is read is what was written");
        let case = format!("verify memory, {}", core_label(threads));
        bench.race(
            Race::new(&case, "every checksum; to add is to look at every word", 7)
                .with_model(&model)
                .with_runner(
                    Runner::ours("tssd", || {
                        let archive = Archive::from_bytes(bytes.clone()).unwrap();
                        last.replace_with(|| verified(archive, threads));
                    })
                    .with_target(Target::Speed(0.9, ADD)),
                )
                .with_runner(Runner::limit(ADD, || on_threads(&bytes, threads, sum_words))),
        );
        assert_unchanged();
    }
}

/// Verifies all chunks of an archive.
pub(crate) fn verify(archive: &Archive, threads: usize) {
    on_threads(&archive.verify_jobs(), threads, |jobs| {
        jobs.iter().try_for_each(VerifyJob::run).unwrap();
    });
}

/// Runs the work on several threads, an equal part on each.
fn on_threads<T: Sync>(work: &[T], threads: usize, run: impl Fn(&[T]) + Sync) {
    std::thread::scope(|scope| {
        for part in work.chunks(work.len().div_ceil(threads)) {
            scope.spawn(|| run(part));
        }
    });
}
