use std::fs::File;
use std::io::{self, BufRead, BufReader, Write};
use std::process::{ExitStatus, Stdio};
use std::time::{Duration, Instant};

use crate::etcd;
use crate::report::{Done, LeftOut, Report, Style};
use crate::step::{Step, Worth};
use crate::tally::Tally;
use crate::workspace::Workspace;

/// Runs steps up to the first that fails, then prints what ran and what did not.
///
/// While a step runs, its name stands on a line alone. Its output goes to the log, and to the
/// terminal if it fails or the run is verbose.
pub(crate) fn run(
    workspace: &Workspace,
    steps: Vec<Step>,
    left_out: Vec<LeftOut>,
    verbose: bool,
) -> io::Result<Report> {
    let style = Style::of_terminal();
    let log = File::create(workspace.log())?;
    let mut runner = Runner { workspace, log, verbose, style };
    let mut report = Report { done: Vec::new(), left_out };
    let mut steps = steps.into_iter();
    for step in steps.by_ref() {
        let done = runner.step(step)?;
        report.done.push(done);
        if !report.has_passed() {
            println!("\nall output is in {}", workspace.log().display());
            break;
        }
    }
    report.left_out.extend(steps.map(|step| LeftOut { name: step.name, why: "not reached" }));
    report.print(style);
    Ok(report)
}

struct Runner<'a> {
    workspace: &'a Workspace,
    log: File,
    verbose: bool,
    style: Style,
}

impl Runner<'_> {
    fn step(&mut self, mut step: Step) -> io::Result<Done> {
        print!("{} … ", step.name);
        if self.verbose {
            println!("\n$ {}", step.spelled());
        }
        io::stdout().flush()?;
        writeln!(self.log, "$ {}", step.spelled())?;

        let (start, cpu_before) = (Instant::now(), children_cpu());
        let mut output = Vec::new();
        let outcome = self.stream(&mut step, &mut output);
        let output = String::from_utf8_lossy(&output);
        let cpu =
            children_cpu().zip(cpu_before).map(|(after, before)| after.saturating_sub(before));
        let done = Done { cpu, ..judge(&step, &outcome, &output, start.elapsed()) };

        let again = if self.verbose { format!("{} … ", step.name) } else { String::new() };
        println!("{again}{}", done.line(self.style));
        writeln!(self.log, "{}\n", done.line(Style::PLAIN))?;
        if done.failed > 0 && !self.verbose {
            println!("\n$ {}\n{}", step.spelled(), output.trim_end());
        }
        Ok(done)
    }

    /// How the command ends. Its two outputs, in the order in which it wrote them, go to the log as
    /// they come, and to `output`.
    fn stream(&mut self, step: &mut Step, output: &mut Vec<u8>) -> io::Result<ExitStatus> {
        let (reader, writer) = io::pipe()?;
        let command = &mut step.command;
        command.current_dir(&self.workspace.root).env("CARGO_TERM_COLOR", "never");
        command.env(etcd::VARIABLE, etcd::program());
        // What speaks to etcd is built with it.
        if let Ok(protoc) = protoc_bin_vendored::protoc_bin_path() {
            command.env("PROTOC", protoc);
        }
        // Cargo sets these for the program that it runs. Build scripts that look at them would run again.
        let own = std::env::vars_os().map(|(name, _)| name).filter(|name| {
            let name = name.to_string_lossy();
            name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_")
        });
        for name in own {
            command.env_remove(name);
        }
        command.stdin(Stdio::null()).stdout(writer.try_clone()?).stderr(writer);
        let child = command.spawn();
        // The command owns our ends for writing; while they are open, the output has no end.
        command.stdout(Stdio::null()).stderr(Stdio::null());
        let mut child = child?;
        let mut reader = BufReader::new(reader);
        let mut line = Vec::new();
        while reader.read_until(b'\n', &mut line)? > 0 {
            self.log.write_all(&line)?;
            if self.verbose {
                io::stdout().write_all(&line)?;
            }
            output.append(&mut line);
        }
        child.wait()
    }
}

/// The processor time of all processes that have ended below this one, where the system tells.
fn children_cpu() -> Option<Duration> {
    /// `USER_HZ`, the same on all Linux systems of today.
    const TICKS_PER_SECOND: u32 = 100;
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    // The second field, a name in parentheses, may contain spaces; user and system time of children are 16 and 17.
    let (_, fields) = stat.rsplit_once(')')?;
    let times = fields.split_whitespace().skip(13).take(2);
    let ticks: u64 = times.map(str::parse::<u64>).sum::<Result<_, _>>().ok()?;
    Some(Duration::from_millis(ticks * 1000) / TICKS_PER_SECOND)
}

/// What has come of a step.
fn judge(step: &Step, outcome: &io::Result<ExitStatus>, output: &str, time: Duration) -> Done {
    let done =
        |passed, failed, note| Done { name: step.name, time, cpu: None, passed, failed, note };
    let tally = Tally::of(output);
    match outcome {
        Err(error) => {
            let program = step.command.get_program().to_string_lossy();
            done(0, 1, format!("{program}: {error}"))
        }
        Ok(status) if !status.success() => match tally {
            Some(tally) if tally.failed > 0 => done(tally.passed, tally.failed, tally.to_string()),
            _ => done(0, 1, own_count(output).unwrap_or_else(|| status.to_string())),
        },
        // Cargo is content with a name that no test has.
        Ok(_) if tally.is_some_and(|tally| tally.passed == 0) => done(0, 1, "no test ran".into()),
        Ok(_) => match (step.worth, tally) {
            (Worth::Nothing, _) => {
                let last = output.lines().last().filter(|_| step.shows_last_line);
                done(0, 0, last.unwrap_or_default().into())
            }
            (Worth::One, _) => done(1, 0, own_count(output).unwrap_or_default()),
            (Worth::Tests, Some(tally)) => done(tally.passed, 0, tally.to_string()),
            (Worth::Tests, None) => done(0, 1, "no test was reported".into()),
        },
    }
}

/// The last line of a script that ends with a count of its own.
fn own_count(output: &str) -> Option<String> {
    let last = output.lines().last()?;
    let (passed, rest) = last.split_once(" passed, ")?;
    let counts = passed.parse::<u64>().is_ok() && rest.ends_with(" failed");
    counts.then(|| last.into())
}
