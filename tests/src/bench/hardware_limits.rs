//! Limits of the hardware and the operating system, to compare with.

use std::fs::File;
use std::hint::black_box;
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;

/// Size of a read in bytes. It fits in the cache of a core.
const PIECE_BYTES: usize = 1 << 20;

/// Returns a number of cores in words.
pub const fn core_label(count: usize) -> &'static str {
    if count == 1 { "1 core" } else { "2 cores" }
}

/// Runs a closure on a thread with this number of cores. Threads that it starts share them.
#[cfg(target_os = "linux")]
pub fn run_on_cores(count: usize, work: impl FnOnce() + Send) {
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut cores = rustix::thread::CpuSet::new();
            (0..count).for_each(|core| cores.set(core));
            rustix::thread::sched_setaffinity(None, &cores).unwrap();
            work();
        });
    });
}

/// Returns the number of minor page faults of this process so far.
pub fn minor_faults() -> u64 {
    let Ok(text) = std::fs::read_to_string("/proc/self/stat") else { return 0 };
    let (_, rest) = text.rsplit_once(')').unwrap();
    rest.split_whitespace().nth(7).unwrap().parse().unwrap()
}

/// Two buffers whose pages are mapped.
pub struct CopyBuffers {
    source: Vec<u8>,
    target: Vec<u8>,
}

impl CopyBuffers {
    /// Creates two buffers of this number of bytes.
    pub fn new(bytes: u64) -> Self {
        let source = vec![1; usize::try_from(bytes).unwrap()];
        Self { target: source.clone(), source }
    }

    /// Copies the buffer on several threads, with one call each.
    pub fn copy(&mut self, threads: usize) {
        copy(&self.source, &mut self.target, threads);
    }

    /// Copies the buffer in equal parts, with one call each, evenly distributed over threads.
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

    /// Copies the buffer on several threads into newly allocated memory.
    pub fn copy_to_new_memory(&mut self, threads: usize) {
        self.target = Vec::new();
        // The pages of a large zeroed vector are mapped at the first write, as those of a new
        // segment are.
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

/// Reads a file into memory on several threads, with one call each.
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

/// Reads a file on several threads, through buffers of 1 MiB, and passes each piece to `look`.
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

/// A socket whose other end returns what it receives: the minimum cost of a request.
pub struct Echo(UnixStream);

impl Echo {
    /// Creates the socket. A thread serves the other end until this one is dropped.
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

    /// Sends 64 bytes and waits until they return.
    ///
    /// # Panics
    ///
    /// If they return changed.
    pub fn round_trip(&mut self) {
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
