//! Verifying: every stored byte against its checksum.

use std::fs::File;
use std::hint::black_box;
use std::os::unix::fs::FileExt;

use tssd_format::{Archive, CHUNK_BYTES, Verify};
use tssd_tests::race::{Runner, Target, race};

use crate::model::{encoded, model};

/// Row 4: a file that the system has in memory, against reading it: `pread` of chunks of 1 MiB, each
/// thread into one buffer of its own that it uses again. Then the same bytes in memory, against adding
/// them up.
pub(crate) fn a_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.tssd");
    let bytes = encoded(&model(32, 8 << 20));
    std::fs::write(&path, &bytes).unwrap();
    let len = u64::try_from(bytes.len()).unwrap();
    for threads in [1, 2] {
        race(
            &format!("4. verify a file of 256 MiB in the page cache, threads: {threads}"),
            Some(len),
            21,
            vec![
                Runner::new("pread, 1 MiB at a time, one buffer", || {
                    let file = File::open(&path).unwrap();
                    let chunks: Vec<u64> = (0..len / CHUNK_BYTES).collect();
                    on_threads(&chunks, threads, |chunks| {
                        let mut buffer = vec![0; usize::try_from(CHUNK_BYTES).unwrap()];
                        for chunk in chunks {
                            file.read_exact_at(&mut buffer, chunk * CHUNK_BYTES).unwrap();
                            black_box(&buffer);
                        }
                    });
                }),
                Runner::new("tssd: Archive::open, verify_jobs", || {
                    verify(&Archive::open(&path).unwrap(), threads);
                })
                .target(Target::Speed(0.9)),
            ],
        );
        race(
            &format!("4. verify 256 MiB in memory, threads: {threads}"),
            Some(len),
            21,
            vec![
                Runner::new("adding up all words", || {
                    let (words, _) = bytes.as_chunks::<8>();
                    on_threads(words, threads, |words| {
                        let add =
                            |sum: u64, word: &[u8; 8]| sum.wrapping_add(u64::from_le_bytes(*word));
                        black_box(black_box(words).iter().fold(0, add));
                    });
                }),
                Runner::new("tssd: Archive::from_bytes, verify_jobs", || {
                    verify(&Archive::from_bytes(bytes.clone()).unwrap(), threads);
                })
                .target(Target::Speed(0.9)),
            ],
        );
    }
}

fn verify(archive: &Archive, threads: usize) {
    on_threads(&archive.verify_jobs(), threads, |jobs| {
        jobs.iter().try_for_each(Verify::run).unwrap();
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
