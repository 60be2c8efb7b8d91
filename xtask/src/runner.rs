use std::collections::{BTreeSet, VecDeque};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::process::{Child, ExitStatus, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use crate::cache;
use crate::etcd;
use crate::report::{FinishedStep, Report, SkippedStep, Style};
use crate::step::{Chain, Step, StepKind};
use crate::test_counts::TestCounts;
use crate::workspace::Workspace;

/// Number of steps that run at the same time.
///
/// Many steps wait for timers, disks, downloads or the one thread of a compiler while others compute.
const MAX_RUNNING: usize = 3;

/// If no step finishes for this time, the run prints the last line of each that is running.
const PROGRESS_INTERVAL: Duration = Duration::from_mins(5);

/// Runs the steps of each chain in order, and chains in parallel, up to the first step that fails.
///
/// Prints a summary.
///
/// The output of each step goes to its own file, and to the terminal if the step fails. A verbose run prints all output
/// immediately, and runs one step at a time.
pub(crate) fn run(
    workspace: &Workspace,
    chains: Vec<Chain>,
    left_out: Vec<SkippedStep>,
    verbose: bool,
) -> io::Result<Report> {
    let style = Style::for_terminal();
    fs::create_dir_all(workspace.logs())?;
    let start = Instant::now();
    let mut report = Report { finished: Vec::new(), skipped: left_out, time: Duration::ZERO };
    let mut schedule = Schedule::new(chains, if verbose { 1 } else { MAX_RUNNING });
    thread::scope(|scope| {
        let (sender, finished) = mpsc::channel();
        loop {
            while report.has_passed()
                && let Some(step) = schedule.next()
            {
                println!("{} …", step.name);
                if verbose {
                    println!("$ {}", step.command_line());
                }
                let sender: Sender<io::Result<FinishedStep>> = sender.clone();
                scope.spawn(move || {
                    // The receiver lives as long as a step runs.
                    sender.send(execute(workspace, step, verbose)).ok();
                });
            }
            if schedule.running == 0 {
                return Ok(());
            }
            let done = loop {
                match finished.recv_timeout(PROGRESS_INTERVAL) {
                    Ok(done) => break done?,
                    Err(RecvTimeoutError::Timeout) => schedule.print_progress(workspace),
                    Err(error) => return Err(io::Error::other(error)),
                }
            };
            schedule.finish(done.name);
            println!("{} … {}", done.name, done.summary_line(style));
            if done.failed > 0 && !verbose {
                println!("\n$ {}\n{}", done.command, done.output.trim_end());
            }
            report.finished.push(done);
        }
    })
    .map_err(|error: io::Error| error)?;
    if !report.has_passed() {
        println!("\nthe output of each step is in {}", workspace.logs().display());
    }
    let rest = schedule.into_rest();
    report.skipped.extend(rest.map(|step| SkippedStep { name: step.name, reason: "not reached" }));
    report.time = start.elapsed();
    report.print(style);
    Ok(report)
}

/// Selects the step that starts next.
struct Schedule {
    chains: Vec<Queue>,
    max_running: usize,
    running: usize,
    /// Whether an exclusive step is running.
    is_exclusive: bool,
    /// Steps that have not finished.
    pending: BTreeSet<&'static str>,
}

/// The steps of a chain that have not started.
struct Queue {
    steps: VecDeque<Step>,
    running: Option<&'static str>,
}

impl Schedule {
    fn new(chains: Vec<Chain>, max_running: usize) -> Self {
        let pending = chains.iter().flatten().map(|step| step.name).collect();
        let queue = |chain: Chain| Queue { steps: chain.into(), running: None };
        let chains = chains.into_iter().map(queue).collect();
        Self { chains, max_running, running: 0, is_exclusive: false, pending }
    }

    /// Removes and returns a step that may start now. Earlier chains have precedence.
    fn next(&mut self) -> Option<Step> {
        if self.is_exclusive || self.running == self.max_running {
            return None;
        }
        let is_ready = |step: &Step| {
            let is_unblocked = step.after.is_none_or(|name| !self.pending.contains(name));
            is_unblocked && (!step.is_exclusive || self.running == 0)
        };
        let queue = self
            .chains
            .iter_mut()
            .find(|queue| queue.running.is_none() && queue.steps.front().is_some_and(is_ready))?;
        let step = queue.steps.pop_front()?;
        queue.running = Some(step.name);
        self.running += 1;
        self.is_exclusive = step.is_exclusive;
        Some(step)
    }

    fn finish(&mut self, name: &'static str) {
        self.pending.remove(name);
        self.running -= 1;
        self.is_exclusive = false;
        if let Some(queue) = self.chains.iter_mut().find(|queue| queue.running == Some(name)) {
            queue.running = None;
        }
    }

    /// Prints the last line of the log of each running step. A step that never ends thus shows where it is.
    fn print_progress(&self, workspace: &Workspace) {
        for name in self.chains.iter().filter_map(|queue| queue.running) {
            let log = fs::read(workspace.log(name)).unwrap_or_default();
            let log = String::from_utf8_lossy(&log);
            println!("{name} … {}", log.trim_end().lines().last().unwrap_or_default());
        }
    }

    fn into_rest(self) -> impl Iterator<Item = Step> {
        self.chains.into_iter().flat_map(|queue| queue.steps)
    }
}

/// Runs the command of a step, and writes its log.
fn execute(workspace: &Workspace, mut step: Step, verbose: bool) -> io::Result<FinishedStep> {
    let mut log = File::create(workspace.log(step.name))?;
    writeln!(log, "$ {}", step.command_line())?;
    let start = Instant::now();
    let mut output = Vec::new();
    let result = stream(workspace, &mut step, &mut log, verbose, &mut output);
    let (status, cpu) = match result {
        Ok((status, cpu)) => (Ok(status), cpu),
        Err(error) => (Err(error), None),
    };
    let output = String::from_utf8_lossy(&output).into_owned();
    let outcome = Outcome::new(&step, &status, &output);
    let done = FinishedStep {
        name: step.name,
        command: step.command_line(),
        time: start.elapsed(),
        cpu,
        passed: outcome.passed,
        failed: outcome.failed,
        note: outcome.note,
        output,
    };
    writeln!(log, "{}", done.summary_line(Style::PLAIN))?;
    Ok(done)
}

/// Runs the command of a step. Returns its exit status and its processor time.
///
/// Writes stdout and stderr, in their order, to the log and to `output`.
fn stream(
    workspace: &Workspace,
    step: &mut Step,
    log: &mut File,
    verbose: bool,
    output: &mut Vec<u8>,
) -> io::Result<(ExitStatus, Option<Duration>)> {
    let (mut reader, writer) = io::pipe()?;
    let command = &mut step.command;
    command.current_dir(&workspace.root).env("CARGO_TERM_COLOR", "never");
    command.env(etcd::VARIABLE, etcd::program());
    // Without its bytecode, the import of torch takes twice as long. Checkouts share it, as they share packages.
    command.env_remove("PYTHONDONTWRITEBYTECODE");
    command.env("PYTHONPYCACHEPREFIX", cache::folder().join("bytecode"));
    // The etcd client is generated at build time.
    if let Ok(protoc) = protoc_bin_vendored::protoc_bin_path() {
        command.env("PROTOC", protoc);
    }
    // Cargo sets these variables for the program that it runs. Build scripts that depend on them would run again.
    let cargo_variables = std::env::vars_os().map(|(name, _)| name).filter(|name| {
        let name = name.to_string_lossy();
        name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_")
    });
    for name in cargo_variables {
        command.env_remove(name);
    }
    command.stdin(Stdio::null()).stdout(writer.try_clone()?).stderr(writer);
    let child = command.spawn();
    // The command owns copies of the write end of the pipe. Close them, or the pipe never reports its end.
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = child?;
    let mut buffer = [0; 8 << 10];
    loop {
        // A test writes its name before it runs, without a line break.
        let bytes = match reader.read(&mut buffer)? {
            0 => break,
            count => &buffer[..count],
        };
        log.write_all(bytes)?;
        if verbose {
            io::stdout().write_all(bytes)?;
            io::stdout().flush()?;
        }
        output.extend_from_slice(bytes);
    }
    let cpu = processor_time(&child);
    Ok((child.wait()?, cpu))
}

/// Waits until a process has ended.
///
/// Returns its processor time and that of its descendants, if available.
#[cfg(target_os = "linux")]
fn processor_time(child: &Child) -> Option<Duration> {
    use rustix::process::{Pid, WaitId, WaitIdOptions, waitid};

    /// `USER_HZ`, which is 100 on all current Linux systems.
    const TICKS_PER_SECOND: u32 = 100;
    // `NOWAIT` leaves the process a zombie, so that its figures can be read.
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
    waitid(WaitId::Pid(Pid::from_child(child)), options).ok()?;
    let stat = fs::read_to_string(format!("/proc/{}/stat", child.id())).ok()?;
    // The second field, a name in parentheses, may contain spaces. Fields 14 to 17 are user and system time of the
    // process, and of its children that have ended.
    let (_, fields) = stat.rsplit_once(')')?;
    let times = fields.split_whitespace().skip(11).take(4);
    let ticks: u64 = times.map(str::parse::<u64>).sum::<Result<_, _>>().ok()?;
    Some(Duration::from_millis(ticks * 1000) / TICKS_PER_SECOND)
}

#[cfg(not(target_os = "linux"))]
fn processor_time(_: &Child) -> Option<Duration> {
    None
}

/// Outcome of a step.
struct Outcome {
    passed: u64,
    failed: u64,
    note: String,
}

impl Outcome {
    fn new(step: &Step, status: &io::Result<ExitStatus>, output: &str) -> Self {
        let outcome = |passed, failed, note| Self { passed, failed, note };
        let tally = TestCounts::parse(output);
        match status {
            Err(error) => {
                let program = step.command.get_program().to_string_lossy();
                outcome(0, 1, format!("{program}: {error}"))
            }
            Ok(status) if !status.success() => match tally {
                Some(tally) if tally.failed > 0 => {
                    outcome(tally.passed, tally.failed, tally.to_string())
                }
                _ => outcome(0, 1, script_counts(output).unwrap_or_else(|| status.to_string())),
            },
            // Cargo succeeds if no test matches the filter.
            Ok(_) if tally.is_some_and(|tally| tally.passed == 0) => {
                outcome(0, 1, "no test ran".into())
            }
            Ok(_) => match (step.kind, tally) {
                (StepKind::Setup, _) => {
                    let last = output.lines().last().filter(|_| step.shows_last_line);
                    outcome(0, 0, last.unwrap_or_default().into())
                }
                (StepKind::Check, _) => outcome(1, 0, script_counts(output).unwrap_or_default()),
                (StepKind::Tests, Some(tally)) => outcome(tally.passed, 0, tally.to_string()),
                (StepKind::Tests, None) => outcome(0, 1, "no test was reported".into()),
            },
        }
    }
}

/// Returns the last line of the output of a script, if it has the form "N passed, M failed".
fn script_counts(output: &str) -> Option<String> {
    let last = output.lines().last()?;
    let (passed, rest) = last.split_once(" passed, ")?;
    let counts = passed.parse::<u64>().is_ok() && rest.ends_with(" failed");
    counts.then(|| last.into())
}

#[cfg(test)]
mod tests {
    use super::{Schedule, Step};

    fn step(name: &'static str) -> Step {
        Step::program(name, "true", "")
    }

    #[test]
    fn chains_run_in_parallel() {
        let chains = vec![
            vec![step("a1"), step("a2").after("b1"), step("a3").exclusive()],
            vec![step("b1"), step("b2").after("no such step")],
            vec![step("c1")],
        ];
        let mut schedule = Schedule::new(chains, 2);
        let mut started = |finished: Option<&'static str>| {
            if let Some(name) = finished {
                schedule.finish(name);
            }
            std::iter::from_fn(|| schedule.next()).map(|step| step.name).collect::<Vec<_>>()
        };
        assert_eq!(started(None), ["a1", "b1"], "earlier chains first, two at once");
        assert_eq!(started(Some("a1")), ["c1"], "a2 waits for b1");
        assert_eq!(started(Some("b1")), ["a2"]);
        assert_eq!(started(Some("a2")), ["b2"], "a3 waits until nothing else runs");
        assert_eq!(started(Some("c1")), [""; 0]);
        assert_eq!(started(Some("b2")), ["a3"]);
        assert_eq!(started(Some("a3")), [""; 0]);
        assert_eq!(schedule.into_rest().count(), 0);
    }

    #[test]
    fn exclusive_step_runs_alone() {
        let chains = vec![vec![step("a1").exclusive(), step("a2")], vec![step("b1")]];
        let mut schedule = Schedule::new(chains, 2);
        assert_eq!(schedule.next().unwrap().name, "a1");
        assert!(schedule.next().is_none());
        schedule.finish("a1");
        assert_eq!(schedule.next().unwrap().name, "a2");
        assert_eq!(schedule.next().unwrap().name, "b1");
    }
}
