//! Parallel execution of jobs on all cores.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use crate::io::sync::Lock;

/// Returns the number of cores that this thread may use.
///
/// To read the CPU quota of the process takes 20 system calls. The result is cached until the affinity mask changes,
/// for example because a launcher pins the process.
pub(crate) fn cores() -> usize {
    /// The cached result: the high 32 bits are the cores in the mask, the low 32 bits the usable cores.
    static CACHED: AtomicU64 = AtomicU64::new(u64::MAX);
    let affinity = affinity_cores();
    let cached = CACHED.load(Ordering::Relaxed);
    if cached >> 32 == affinity {
        return usize::try_from(cached & u64::from(u32::MAX)).unwrap_or(1);
    }
    let cores = thread::available_parallelism().map_or(1, usize::from);
    CACHED.store(affinity << 32 | u64::try_from(cores).unwrap_or(1), Ordering::Relaxed);
    cores
}

/// Returns the number of cores in the affinity mask of this thread.
#[cfg(target_os = "linux")]
fn affinity_cores() -> u64 {
    rustix::thread::sched_getaffinity(None).map_or(0, |set| u64::from(set.count()))
}

/// Returns 0, because other systems have no affinity mask: the usable cores are read once.
#[cfg(not(target_os = "linux"))]
fn affinity_cores() -> u64 {
    0
}

/// Runs `work` on every job, on one thread per core, and returns the results in the order of the jobs.
///
/// All threads have ended when the call returns, so no borrow of a job is used later. After the first error no new job
/// starts, and the first error in the order of the jobs is returned.
///
/// Each call starts new threads, which costs some ten microseconds each. A pool of threads would be lost in a forked
/// child.
pub(crate) fn map<J: Send, R: Send, E: Send>(
    jobs: Vec<J>,
    work: impl Fn(J) -> Result<R, E> + Sync,
) -> Result<Vec<R>, E> {
    map_with_lookahead(jobs, 0, |_: &mut J| Ok(()), work)
}

/// As [`map`], on one core less: the calling thread keeps one core for its own work.
pub(crate) fn map_on_other_cores<J: Send, R: Send, E: Send>(
    jobs: Vec<J>,
    work: impl Fn(J) -> Result<R, E> + Sync,
) -> Result<Vec<R>, E> {
    map_on(cores() - 1, jobs, 0, |_: &mut J| Ok(()), work)
}

/// As [`map`], but calls `begin` for the next `ahead` jobs before they run.
///
/// The jobs begin in their order, one at a time.
pub(crate) fn map_with_lookahead<J: Send, R: Send, E: Send>(
    jobs: Vec<J>,
    ahead: usize,
    begin: impl Fn(&mut J) -> Result<(), E> + Sync,
    work: impl Fn(J) -> Result<R, E> + Sync,
) -> Result<Vec<R>, E> {
    let cores = if jobs.len() > 1 { cores() } else { 1 };
    map_on(cores, jobs, ahead, begin, work)
}

fn map_on<J: Send, R: Send, E: Send>(
    cores: usize,
    jobs: Vec<J>,
    ahead: usize,
    begin: impl Fn(&mut J) -> Result<(), E> + Sync,
    work: impl Fn(J) -> Result<R, E> + Sync,
) -> Result<Vec<R>, E> {
    let threads = cores.min(jobs.len());
    let count = jobs.len();
    let queue = Lock::new((jobs.into_iter(), VecDeque::with_capacity(ahead), 0..));
    let next = || {
        let (jobs, begun_jobs, indices) = &mut *queue.lock();
        while begun_jobs.len() < ahead
            && let Some(mut job) = jobs.next()
        {
            let started = begin(&mut job).map(|()| job);
            begun_jobs.push_back(started);
        }
        let job = begun_jobs.pop_front().or_else(|| jobs.next().map(Ok))?;
        Some((indices.next()?, job))
    };
    let failed = AtomicBool::new(false);
    let results = Lock::new(Vec::with_capacity(count));
    let run = || {
        while !failed.load(Ordering::Relaxed) {
            let Some((index, job)) = next() else { break };
            let result = job.and_then(&work);
            failed.fetch_or(result.is_err(), Ordering::Relaxed);
            results.lock().push((index, result));
        }
    };
    thread::scope(|scope| {
        for _ in 1..threads {
            // If the system refuses to start more threads, the running ones do all the work.
            let _ = thread::Builder::new().spawn_scoped(scope, run);
        }
        run();
    });
    let mut results = results.into_inner();
    results.sort_unstable_by_key(|(index, _)| *index);
    results.into_iter().map(|(_, result)| result).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    const JOBS: usize = 200;

    #[test]
    fn results_are_in_the_order_of_the_jobs() {
        for jobs in [0, 1, JOBS] {
            let doubled: Result<Vec<_>, ()> = map((0..jobs).collect(), |job| Ok(2 * job));
            assert_eq!(doubled, Ok((0..jobs).map(|job| 2 * job).collect()));
        }
    }

    #[test]
    fn jobs_begin_in_order_and_at_most_ahead_of_the_running_one() {
        for ahead in [0, 1, 8, 2 * JOBS] {
            let (begun, taken) = (Lock::new(Vec::new()), AtomicUsize::new(0));
            let begin = |job: &mut (usize, bool)| {
                job.1 = true;
                let mut begun = begun.lock();
                begun.push(job.0);
                // Each thread may have taken one job that it has not counted yet.
                assert!(begun.len() <= taken.load(Ordering::SeqCst) + ahead + cores());
                Ok::<(), ()>(())
            };
            let jobs = (0..JOBS).map(|job| (job, false)).collect();
            let work = |(job, is_begun): (usize, bool)| {
                taken.fetch_add(1, Ordering::SeqCst);
                assert_eq!(is_begun, ahead > 0);
                // All jobs ahead of this one have begun.
                let wanted = if ahead > 0 { (job + ahead).min(JOBS) } else { 0 };
                assert!(begun.lock().len() >= wanted, "{job}");
                Ok(job)
            };
            let done = map_with_lookahead(jobs, ahead, begin, work);
            assert_eq!(done, Ok((0..JOBS).collect()));
            let all = if ahead > 0 { (0..JOBS).collect() } else { Vec::new() };
            assert_eq!(*begun.lock(), all);
        }
    }

    #[test]
    fn error_of_begin_is_returned_when_the_job_is_due() {
        let (begin, worked) =
            (|job: &mut usize| if *job < 5 { Ok(()) } else { Err(*job) }, Lock::new(Vec::new()));
        let work = |job: usize| {
            worked.lock().push(job);
            Ok(job)
        };
        assert_eq!(map_with_lookahead((0..JOBS).collect(), 8, begin, work), Err(5));
        let mut worked = worked.into_inner();
        worked.sort_unstable();
        assert_eq!(worked, (0..5).collect::<Vec<_>>());
    }
}
