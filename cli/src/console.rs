//! Where words go: results to stdout, progress to stderr. If a file goes to stdout, all words go to
//! stderr.

use std::fmt;
use std::io::{self, Write};
use std::path::Path;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressFinish, ProgressStyle};
use serde_json::Value as Json;

use crate::exit::Exit;
use crate::failure::{Failure, Result};
use crate::input::is_stream;

/// Where results go.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Stream {
    Stdout,
    Stderr,
}

/// Prints results. A reader who has seen enough and closed the pipe is no error.
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

/// Prints one JSON document.
pub(crate) fn print_json(json: &Json) -> Result<()> {
    print(format_args!("{json:#}\n"))
}

/// How much a command says, and in which form.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Console {
    /// Results are JSON, for programs.
    pub(crate) json: bool,
    /// No progress, and no summary of what is visible anyway.
    pub(crate) quiet: bool,
    /// Details too.
    pub(crate) verbose: bool,
    /// Where [`Console::report`] prints.
    pub(crate) results: Stream,
}

impl Console {
    /// The console of a command that writes a file: `-` takes stdout from the words.
    pub(crate) fn beside(self, output: &Path) -> Self {
        if is_stream(output) { Self { results: Stream::Stderr, ..self } } else { self }
    }

    /// Prints an answer, which is the point of the command, as a line of text or of JSON.
    pub(crate) fn result(self, line: impl fmt::Display, json: &Json) -> Result<()> {
        if self.json { print(format_args!("{json}\n")) } else { print(format_args!("{line}\n")) }
    }

    /// Prints what was done: as JSON, as a line, as a line with details, or
    /// not at all.
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

    /// A bar on stderr that counts bytes; invisible where nobody looks at it.
    pub(crate) fn bytes_bar(self, what: &str, bytes: u64) -> ProgressBar {
        let bar = ProgressBar::with_draw_target(Some(bytes), self.target());
        let style = "{msg:<12} {bar:32} {decimal_bytes:>10} of {decimal_total_bytes}  \
                     {decimal_bytes_per_sec}";
        bar.set_style(style_of(style));
        bar.set_message(what.to_owned());
        bar.with_finish(ProgressFinish::AndClear)
    }

    /// A line on stderr that says what is going on while nothing can be counted.
    pub(crate) fn spinner(self, what: &str) -> ProgressBar {
        let spinner = ProgressBar::with_draw_target(None, self.target());
        spinner.set_style(style_of("{spinner} {msg}"));
        spinner.set_message(what.to_owned());
        spinner.enable_steady_tick(Duration::from_millis(100));
        spinner.with_finish(ProgressFinish::AndClear)
    }

    /// Indicatif itself hides what does not go to a terminal.
    fn target(self) -> ProgressDrawTarget {
        if self.quiet || self.json {
            ProgressDrawTarget::hidden()
        } else {
            ProgressDrawTarget::stderr()
        }
    }
}

fn style_of(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template)
        .expect("the templates of this file are well-formed")
        .progress_chars("━╸─")
}
