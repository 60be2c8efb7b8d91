//! What the machine itself can do.

use std::hint::black_box;
use std::thread;

/// A number of cores in words.
pub const fn cores(count: usize) -> &'static str {
    if count == 1 { "1 core" } else { "2 cores" }
}

/// Runs something on a thread that has only so many cores, with all threads that it starts.
#[cfg(target_os = "linux")]
pub fn on_cores(count: usize, work: impl FnOnce() + Send) {
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut cores = rustix::thread::CpuSet::new();
            (0..count).for_each(|core| cores.set(core));
            rustix::thread::sched_setaffinity(None, &cores).unwrap();
            work();
        });
    });
}

/// Minor page faults of this process so far.
pub fn faults() -> u64 {
    let Ok(text) = std::fs::read_to_string("/proc/self/stat") else { return 0 };
    let (_, rest) = text.rsplit_once(')').unwrap();
    rest.split_whitespace().nth(7).unwrap().parse().unwrap()
}

/// Two buffers that are warm.
pub struct Memory {
    source: Vec<u8>,
    target: Vec<u8>,
}

impl Memory {
    /// Of so many bytes each.
    pub fn new(bytes: u64) -> Self {
        let source = vec![1; usize::try_from(bytes).unwrap()];
        Self { target: source.clone(), source }
    }

    /// Copies all of it: one call for each thread.
    pub fn copy(&mut self, threads: usize) {
        copy(&self.source, &mut self.target, threads);
    }

    /// The same in so many parts of the same size: a call for each, on one thread.
    pub fn copy_in_parts(&mut self, parts: usize) {
        let part = self.source.len().div_ceil(parts);
        for (source, target) in self.source.chunks(part).zip(self.target.chunks_mut(part)) {
            black_box(target).copy_from_slice(source);
        }
    }

    /// The same into memory that the system has just given.
    pub fn copy_fresh(&mut self, threads: usize) {
        self.target = Vec::new();
        // Pages of a large vector of zeros are mapped when they are written, as those of a new segment
        // would be.
        let mut target = vec![0; self.source.len()];
        copy(&self.source, &mut target, threads);
        self.target = target;
    }
}

fn copy(source: &[u8], target: &mut [u8], threads: usize) {
    let part = source.len().div_ceil(threads);
    thread::scope(|scope| {
        for (source, target) in source.chunks(part).zip(target.chunks_mut(part)) {
            scope.spawn(move || black_box(target).copy_from_slice(source));
        }
    });
}
