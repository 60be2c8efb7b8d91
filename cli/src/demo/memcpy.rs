//! Memory bandwidth of the machine, as the upper bound for the store.

use std::hint::black_box;
use std::thread;
use std::time::Instant;

use crate::size::gigabytes_per_second;

/// Measured speed of memory copies.
#[derive(Debug)]
pub(super) struct Memcpy {
    /// Total of all threads, in GB/s.
    pub(super) speed: f64,
    pub(super) threads: usize,
}

/// Measures the best speed of several parallel copies of about `bytes` bytes on all cores.
///
/// Source and target are touched before, as the memory of a store in steady state is.
pub(super) fn measure_memcpy(bytes: u64) -> Memcpy {
    const ROUNDS: usize = 5;
    let threads = thread::available_parallelism().map_or(1, usize::from);
    // Larger than the caches, and small enough for a short measurement.
    let bytes = usize::try_from(bytes.clamp(64 << 20, 512 << 20)).expect("at most 512 MiB");
    let len = bytes / threads;
    let mut pairs: Vec<(Vec<u8>, Vec<u8>)> =
        (0..threads).map(|_| (vec![1; len], vec![2; len])).collect();
    let mut best = f64::INFINITY;
    for _ in 0..ROUNDS {
        let started = Instant::now();
        thread::scope(|scope| {
            for (source, target) in &mut pairs {
                scope.spawn(|| black_box(target).copy_from_slice(black_box(source)));
            }
        });
        best = best.min(started.elapsed().as_secs_f64());
    }
    let copied = u64::try_from(len * threads).expect("at most 512 MiB");
    Memcpy { speed: gigabytes_per_second(copied, best), threads }
}
