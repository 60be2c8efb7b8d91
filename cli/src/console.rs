//! Output of the commands: results on stdout, progress on stderr.
//!
//! If the output file is stdout, all text goes to stderr.

use std::fmt;
use std::io::{self, Write};
use std::path::Path;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressFinish, ProgressStyle};
use serde_json::Value as Json;

use crate::exit::Exit;
use crate::failure::{Failure, Result};
use crate::input::is_stream;

/// The standard stream that receives results.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Stream {
    Stdout,
    Stderr,
}

/// Prints results to stdout. A closed pipe is not an error.
pub(crate) fn print(text: impl fmt::Display) -> Result<()> {
    Stream::Stdout.print(text)
}

impl Stream {
    fn print(self, text: impl fmt::Display) -> Result<()> {
        let (name, printed) = match self {
            Self::Stdout => ("stdout", write_all(io::stdout().lock(), text)),
            Self::Stderr => ("stderr", write_all(io::stderr().lock(), text)),
        };
        match printed {
            Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
                Err(Failure::new(Exit::Refused, format_args!("cannot write to {name}: {error}")))
            }
            _ => Ok(()),
        }
    }
}

fn write_all(mut stream: impl Write, text: impl fmt::Display) -> io::Result<()> {
    write!(stream, "{text}")?;
    stream.flush()
}

/// Prints one JSON document to stdout.
pub(crate) fn print_json(json: &Json) -> Result<()> {
    print(format_args!("{json:#}\n"))
}

/// Verbosity and format of the output of a command.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Console {
    /// Print results as JSON.
    pub(crate) json: bool,
    /// Print no progress and no summaries.
    pub(crate) quiet: bool,
    /// Print details.
    pub(crate) verbose: bool,
    /// The stream that [`Console::report`] prints to.
    pub(crate) results: Stream,
}

impl Console {
    /// Returns the console of a command that writes a file. If that is stdout, reports go to stderr.
    pub(crate) fn for_output(self, output: &Path) -> Self {
        if is_stream(output) { Self { results: Stream::Stderr, ..self } } else { self }
    }

    /// Prints one result to stdout, as a line of text or of JSON.
    pub(crate) fn result(self, line: impl fmt::Display, json: &Json) -> Result<()> {
        if self.json { print(format_args!("{json}\n")) } else { print(format_args!("{line}\n")) }
    }

    /// Prints a report on a completed operation: as JSON, or as a line, with details if verbose.
    ///
    /// Prints nothing if the console is quiet, unless the format is JSON.
    pub(crate) fn report(self, line: impl fmt::Display, json: &Json) -> Result<()> {
        match self {
            Self { json: true, .. } => self.results.print(format_args!("{json:#}\n")),
            Self { quiet: true, .. } => Ok(()),
            Self { verbose: true, .. } => {
                let members = json.as_object().into_iter().flatten();
                let details = members.map(|(name, value)| format!("\n  {name}: {value}"));
                self.results.print(format_args!("{line}{}\n", details.collect::<String>()))
            }
            _ => self.results.print(format_args!("{line}\n")),
        }
    }

    /// Creates a progress bar on stderr that counts bytes. It is hidden if stderr is not a terminal.
    pub(crate) fn bytes_bar(self, label: &str, bytes: u64) -> ProgressBar {
        let bar = ProgressBar::with_draw_target(Some(bytes), self.draw_target());
        let style = "{msg:<12} {bar:32} {decimal_bytes:>10} of {decimal_total_bytes}  \
                     {decimal_bytes_per_sec}";
        bar.set_style(progress_style(style));
        bar.set_message(label.to_owned());
        bar.with_finish(ProgressFinish::AndClear)
    }

    /// Creates a spinner on stderr, for an operation of unknown length.
    pub(crate) fn spinner(self, label: &str) -> ProgressBar {
        let spinner = ProgressBar::with_draw_target(None, self.draw_target());
        spinner.set_style(progress_style("{spinner} {msg}"));
        spinner.set_message(label.to_owned());
        spinner.enable_steady_tick(Duration::from_millis(100));
        spinner.with_finish(ProgressFinish::AndClear)
    }

    /// Returns where progress is drawn. Indicatif hides it if stderr is not a terminal.
    fn draw_target(self) -> ProgressDrawTarget {
        if self.quiet || self.json {
            ProgressDrawTarget::hidden()
        } else {
            ProgressDrawTarget::stderr()
        }
    }
}

fn progress_style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template)
        .expect("the templates of this file are well-formed")
        .progress_chars("━╸─")
}
