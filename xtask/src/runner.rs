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

        let start = Instant::now();
        let mut output = Vec::new();
        let outcome = self.stream(&mut step, &mut output);
        let output = String::from_utf8_lossy(&output);
        let done = judge(&step, &outcome, &output, start.elapsed());
        if let (0, Some((path, text))) = (done.failed, &step.record) {
            std::fs::write(path, text)?;
        }

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
        command.env(etcd::VARIABLE, etcd::program(self.workspace));
        // What speaks to etcd is built with it.
        if let Ok(protoc) = protoc_bin_vendored::protoc_bin_path() {
            command.env("PROTOC", protoc);
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

/// What has come of a step.
fn judge(step: &Step, outcome: &io::Result<ExitStatus>, output: &str, time: Duration) -> Done {
    let done = |passed, failed, note| Done { name: step.name, time, passed, failed, note };
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
            (Worth::Nothing, _) => done(0, 0, String::new()),
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
