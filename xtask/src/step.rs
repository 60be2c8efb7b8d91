use std::ffi::OsStr;
use std::process::Command;

/// Name of the Python 3 program.
pub(crate) const PYTHON: &str = if cfg!(windows) { "python" } else { "python3" };

/// One command of a run.
pub(crate) struct Step {
    /// Name in the summary, and of the log file.
    pub(crate) name: &'static str,
    pub(crate) command: Command,
    pub(crate) kind: StepKind,
    /// Whether the summary shows the last line of the output.
    pub(crate) shows_last_line: bool,
    /// A step of another chain that must finish before this one starts.
    pub(crate) after: Option<&'static str>,
    /// Whether no other step may run at the same time.
    pub(crate) is_exclusive: bool,
}

/// Steps that run in order, in parallel to other chains.
pub(crate) type Chain = Vec<Step>;

/// How a successful step counts in the number of passed checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StepKind {
    /// It is no check: it prepares other steps.
    Setup,
    /// It is one check.
    Check,
    /// Each test that Cargo reports in its output is a check.
    Tests,
}

impl Step {
    /// Creates a step that runs Cargo. Arguments are split at spaces.
    pub(crate) fn cargo(name: &'static str, arguments: &str) -> Self {
        Self::program(name, cargo(), arguments)
    }

    /// Creates a step that runs a Python script without dependencies. Arguments are split at spaces.
    pub(crate) fn python(name: &'static str, arguments: &str) -> Self {
        Self::program(name, PYTHON, arguments)
    }

    /// Creates a step that runs a program. Arguments are split at spaces.
    pub(crate) fn program(name: &'static str, program: impl AsRef<OsStr>, arguments: &str) -> Self {
        let mut command = Command::new(program);
        command.args(arguments.split_whitespace());
        Self {
            name,
            command,
            kind: StepKind::Check,
            shows_last_line: false,
            after: None,
            is_exclusive: false,
        }
    }

    /// Adds one argument, which is not split.
    pub(crate) fn argument(mut self, argument: impl AsRef<OsStr>) -> Self {
        self.command.arg(argument);
        self
    }

    /// Adds arguments, which are not split.
    pub(crate) fn arguments(mut self, arguments: impl IntoIterator<Item: AsRef<OsStr>>) -> Self {
        self.command.args(arguments);
        self
    }

    pub(crate) fn env(mut self, key: &str, value: impl AsRef<OsStr>) -> Self {
        self.command.env(key, value);
        self
    }

    pub(crate) fn kind(mut self, worth: StepKind) -> Self {
        self.kind = worth;
        self
    }

    pub(crate) fn shows_last_line(mut self) -> Self {
        self.shows_last_line = true;
        self
    }

    /// Lets the step start after this step of another chain, if the run has that step.
    pub(crate) fn after(mut self, name: &'static str) -> Self {
        self.after = Some(name);
        self
    }

    /// Lets the step run while no other step runs.
    pub(crate) fn exclusive(mut self) -> Self {
        self.is_exclusive = true;
        self
    }

    /// Returns the command line.
    pub(crate) fn command_line(&self) -> String {
        let words = std::iter::once(self.command.get_program()).chain(self.command.get_args());
        words.map(OsStr::to_string_lossy).collect::<Vec<_>>().join(" ")
    }
}

/// Returns the Cargo program that runs xtask.
pub(crate) fn cargo() -> impl AsRef<OsStr> {
    std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into())
}
