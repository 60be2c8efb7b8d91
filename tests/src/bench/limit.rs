//! What the machine itself can do.

use std::fs::File;
use std::hint::black_box;
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;

/// As much of a file as stays in the cache of a core.
const PIECE_BYTES: usize = 1 << 20;

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

    /// The same in so many parts of the same size: a call for each, as many of them on each thread.
    pub fn copy_in_parts(&mut self, parts: usize, threads: usize) {
        let part = self.source.len().div_ceil(parts);
        let share = parts.div_ceil(threads) * part;
        thread::scope(|scope| {
            for (source, target) in self.source.chunks(share).zip(self.target.chunks_mut(share)) {
                scope.spawn(move || {
                    for (source, target) in source.chunks(part).zip(target.chunks_mut(part)) {
                        black_box(target).copy_from_slice(source);
                    }
                });
            }
        });
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

/// All of a file into memory that is there: each thread its part, in one call.
///
/// # Panics
///
/// If the file cannot be read, or is shorter than the memory.
pub fn read_into(path: &Path, memory: &mut [u8], threads: usize) {
    let file = File::open(path).unwrap();
    let part = memory.len().div_ceil(threads);
    thread::scope(|scope| {
        for (number, memory) in memory.chunks_mut(part).enumerate() {
            let (file, start) = (&file, number * part);
            scope.spawn(move || file.read_exact_at(memory, u64::try_from(start).unwrap()).unwrap());
        }
    });
}

/// All of a file, each thread its part through a buffer of 1 MiB, with a look at each piece.
///
/// # Panics
///
/// If the file cannot be read.
pub fn read_in_pieces(path: &Path, threads: usize, look: impl Fn(&[u8]) + Sync) {
    let file = File::open(path).unwrap();
    let len = usize::try_from(file.metadata().unwrap().len()).unwrap();
    let starts: Vec<usize> = (0..len).step_by(PIECE_BYTES).collect();
    thread::scope(|scope| {
        for starts in starts.chunks(starts.len().div_ceil(threads)) {
            let (file, look) = (&file, &look);
            scope.spawn(move || {
                let mut buffer = vec![0; PIECE_BYTES];
                for &start in starts {
                    let piece = &mut buffer[..PIECE_BYTES.min(len - start)];
                    file.read_exact_at(piece, u64::try_from(start).unwrap()).unwrap();
                    look(black_box(piece));
                }
            });
        }
    });
}

/// A socket whose other end says what it hears: what a request costs at least.
pub struct Echo(UnixStream);

impl Echo {
    /// With a thread of its own, which ends with this.
    ///
    /// # Panics
    ///
    /// If the system has no sockets.
    pub fn new() -> Self {
        let (here, mut there) = UnixStream::pair().unwrap();
        thread::spawn(move || {
            let mut word = [0; 64];
            while there.read_exact(&mut word).is_ok() {
                there.write_all(&word).unwrap();
            }
        });
        Self(here)
    }

    /// Sends 64 bytes, and waits until they are back.
    ///
    /// # Panics
    ///
    /// If they do not come back as they were.
    pub fn there_and_back(&mut self) {
        let mut word = [7; 64];
        self.0.write_all(&word).unwrap();
        self.0.read_exact(&mut word).unwrap();
        assert_eq!(word, [7; 64]);
    }
}

impl Default for Echo {
    fn default() -> Self {
        Self::new()
    }
}
