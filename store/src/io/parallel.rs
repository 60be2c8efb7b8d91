//! Jobs on all cores.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use crate::io::sync::Lock;

/// How many cores this thread may use. To ask how much of them the process gets takes twenty system calls, so
/// that is asked again only if the cores themselves have changed, as where a launcher pins what it has started.
pub(crate) fn cores() -> usize {
    /// What was asked last: the cores that were allowed, and below that how many there are to use.
    static KNOWN: AtomicU64 = AtomicU64::new(u64::MAX);
    let allowed = allowed();
    let known = KNOWN.load(Ordering::Relaxed);
    if known >> 32 == allowed {
        return usize::try_from(known & u64::from(u32::MAX)).unwrap_or(1);
    }
    let cores = thread::available_parallelism().map_or(1, usize::from);
    KNOWN.store(allowed << 32 | u64::try_from(cores).unwrap_or(1), Ordering::Relaxed);
    cores
}

/// The cores that this thread may run on.
#[cfg(target_os = "linux")]
fn allowed() -> u64 {
    rustix::thread::sched_getaffinity(None).map_or(0, |set| u64::from(set.count()))
}

/// Elsewhere all: so it is asked once how many there are.
#[cfg(not(target_os = "linux"))]
fn allowed() -> u64 {
    0
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
    map_ahead(jobs, (0, |_: &mut J| Ok(())), work)
}

/// The same beside a thread that has other work to do: it keeps a core for itself.
pub(crate) fn map_beside<J: Send, R: Send, E: Send>(
    jobs: Vec<J>,
    work: impl Fn(J) -> Result<R, E> + Sync,
) -> Result<Vec<R>, E> {
    map_on(cores() - 1, jobs, (0, |_: &mut J| Ok(())), work)
}

/// The same, where something of so many of the next jobs has begun already, in their order and one after the other, when
/// one is run.
pub(crate) fn map_ahead<J: Send, R: Send, E: Send>(
    jobs: Vec<J>,
    ahead: (usize, impl Fn(&mut J) -> Result<(), E> + Sync),
    work: impl Fn(J) -> Result<R, E> + Sync,
) -> Result<Vec<R>, E> {
    let cores = if jobs.len() > 1 { cores() } else { 1 };
    map_on(cores, jobs, ahead, work)
}

fn map_on<J: Send, R: Send, E: Send>(
    cores: usize,
    jobs: Vec<J>,
    (ahead, begin): (usize, impl Fn(&mut J) -> Result<(), E> + Sync),
    work: impl Fn(J) -> Result<R, E> + Sync,
) -> Result<Vec<R>, E> {
    let threads = cores.min(jobs.len());
    let count = jobs.len();
    let queue = Lock::new((jobs.into_iter(), VecDeque::with_capacity(ahead), 0..));
    let next = || {
        let (jobs, begun, places) = &mut *queue.lock();
        while begun.len() < ahead
            && let Some(mut job) = jobs.next()
        {
            let started = begin(&mut job).map(|()| job);
            begun.push_back(started);
        }
        let job = begun.pop_front().or_else(|| jobs.next().map(Ok))?;
        Some((places.next()?, job))
    };
    let failed = AtomicBool::new(false);
    let results = Lock::new(Vec::with_capacity(count));
    let run = || {
        while !failed.load(Ordering::Relaxed) {
            let Some((place, job)) = next() else { break };
            let result = job.and_then(&work);
            failed.fetch_or(result.is_err(), Ordering::Relaxed);
            results.lock().push((place, result));
        }
    };
    thread::scope(|scope| {
        for _ in 1..threads {
            // A system that gives no more threads leaves the work to those that there are.
            let _ = thread::Builder::new().spawn_scoped(scope, run);
        }
        run();
    });
    let mut results = results.into_inner();
    results.sort_unstable_by_key(|(place, _)| *place);
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
    fn jobs_begin_in_order_and_not_more_of_them_than_are_wanted_ahead() {
        for ahead in [0, 1, 8, 2 * JOBS] {
            let (begun, taken) = (Lock::new(Vec::new()), AtomicUsize::new(0));
            let begin = |job: &mut (usize, bool)| {
                job.1 = true;
                let mut begun = begun.lock();
                begun.push(job.0);
                // Each thread may have taken one that it has not counted yet.
                assert!(begun.len() <= taken.load(Ordering::SeqCst) + ahead + cores());
                Ok::<(), ()>(())
            };
            let jobs = (0..JOBS).map(|job| (job, false)).collect();
            let work = |(job, has_begun): (usize, bool)| {
                taken.fetch_add(1, Ordering::SeqCst);
                assert_eq!(has_begun, ahead > 0);
                // All that are to be ahead of it have begun, and it is none of them any more.
                let wanted = if ahead > 0 { (job + ahead).min(JOBS) } else { 0 };
                assert!(begun.lock().len() >= wanted, "{job}");
                Ok(job)
            };
            let done = map_ahead(jobs, (ahead, begin), work);
            assert_eq!(done, Ok((0..JOBS).collect()));
            let all = if ahead > 0 { (0..JOBS).collect() } else { Vec::new() };
            assert_eq!(*begun.lock(), all);
        }
    }

    #[test]
    fn what_cannot_begin_is_an_error_when_its_turn_has_come() {
        let (begin, worked) =
            (|job: &mut usize| if *job < 5 { Ok(()) } else { Err(*job) }, Lock::new(Vec::new()));
        let work = |job: usize| {
            worked.lock().push(job);
            Ok(job)
        };
        assert_eq!(map_ahead((0..JOBS).collect(), (8, begin), work), Err(5));
        let mut worked = worked.into_inner();
        worked.sort_unstable();
        assert_eq!(worked, (0..5).collect::<Vec<_>>());
    }
}
