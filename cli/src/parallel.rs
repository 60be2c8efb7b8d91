//! Parallel execution of jobs on all cores.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

use crate::console::Console;

/// Runs all jobs on all cores, and returns their results in any order.
///
/// A progress bar with the message `label` advances by `len` bytes after each job.
pub(crate) fn map<J: Sync, R: Send>(
    jobs: &[J],
    console: Console,
    label: &'static str,
    len: impl Fn(&J) -> u64 + Sync,
    run: impl Fn(&J) -> R + Sync,
) -> Vec<R> {
    let bar = console.bytes_bar(label, jobs.iter().map(&len).sum());
    let next = AtomicUsize::new(0);
    let results = Mutex::new(Vec::with_capacity(jobs.len()));
    let threads = thread::available_parallelism().map_or(1, usize::from).min(jobs.len());
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some(job) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let result = run(job);
                    bar.inc(len(job));
                    results.lock().unwrap_or_else(PoisonError::into_inner).push(result);
                }
            });
        }
    });
    bar.finish_and_clear();
    results.into_inner().unwrap_or_else(PoisonError::into_inner)
}
