//! Jobs on all cores.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

/// How many cores this thread may use. To ask how much of them the process gets takes twenty system calls, so
/// that is asked again only if the cores themselves have changed, as where a launcher pins what it has started.
pub(crate) fn cores() -> usize {
    /// What was asked last: the cores that were allowed, and below that how many there are to use.
    static KNOWN: AtomicU64 = AtomicU64::new(u64::MAX);
    let allowed = rustix::thread::sched_getaffinity(None).map_or(0, |set| u64::from(set.count()));
    let known = KNOWN.load(Ordering::Relaxed);
    if known >> 32 == allowed {
        return usize::try_from(known & u64::from(u32::MAX)).unwrap_or(1);
    }
    let cores = thread::available_parallelism().map_or(1, usize::from);
    KNOWN.store(allowed << 32 | u64::try_from(cores).unwrap_or(1), Ordering::Relaxed);
    cores
}

/// Runs `work` on every job, on as many threads as there are cores, and returns the results in the
/// order of the jobs. All threads have ended when it returns: nothing that a job borrows is touched
/// later. After the first error no new job starts, and the first one found is returned.
///
/// Threads are made anew each time, which costs some ten microseconds, so that none is left over to
/// be lost in a fork.
pub(crate) fn map<J: Send, R: Send, E: Send>(
    jobs: Vec<J>,
    work: impl Fn(J) -> Result<R, E> + Sync,
) -> Result<Vec<R>, E> {
    let threads = if jobs.len() > 1 { cores().min(jobs.len()) } else { 1 };
    if threads <= 1 {
        return jobs.into_iter().map(work).collect();
    }
    let count = jobs.len();
    let queue = Mutex::new(jobs.into_iter().enumerate());
    let failed = AtomicBool::new(false);
    let results = Mutex::new(Vec::with_capacity(count));
    let run = || {
        while !failed.load(Ordering::Relaxed) {
            let next = queue.lock().expect("no job panics while it holds the queue").next();
            let Some((place, job)) = next else { break };
            let result = work(job);
            failed.fetch_or(result.is_err(), Ordering::Relaxed);
            results.lock().expect("no job panics while it holds the results").push((place, result));
        }
    };
    thread::scope(|scope| {
        for _ in 1..threads {
            // A system that gives no more threads leaves the work to those that there are.
            let _ = thread::Builder::new().spawn_scoped(scope, run);
        }
        run();
    });
    let mut results = results.into_inner().expect("all threads have ended well");
    results.sort_unstable_by_key(|(place, _)| *place);
    results.into_iter().map(|(_, result)| result).collect()
}
