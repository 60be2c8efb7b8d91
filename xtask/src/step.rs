use std::ffi::OsStr;
use std::process::Command;

/// The Python that is on every machine with Python 3.
pub(crate) const PYTHON: &str = if cfg!(windows) { "python" } else { "python3" };

/// One command of a run.
pub(crate) struct Step {
    pub(crate) name: &'static str,
    pub(crate) command: Command,
    pub(crate) worth: Worth,
    /// Whether the summary shows the last line of its output.
    pub(crate) shows_last_line: bool,
    /// A step of another chain that must have passed before it starts.
    pub(crate) after: Option<&'static str>,
    /// Whether no other step may run beside it.
    pub(crate) is_alone: bool,
}

/// Steps that run in order, beside those of other chains.
pub(crate) type Chain = Vec<Step>;

/// What the success of a step adds to the number of what passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Worth {
    /// Nothing: it only makes what other steps need.
    Nothing,
    /// It is one check.
    One,
    /// The tests of Cargo that its output reports.
    Tests,
}

impl Step {
    /// A command of Cargo; arguments are split at spaces.
    pub(crate) fn cargo(name: &'static str, arguments: &str) -> Self {
        Self::program(name, cargo(), arguments)
    }

    /// A script for any Python 3; arguments are split at spaces.
    pub(crate) fn python(name: &'static str, arguments: &str) -> Self {
        Self::program(name, PYTHON, arguments)
    }

    /// Any program; arguments are split at spaces.
    pub(crate) fn program(name: &'static str, program: impl AsRef<OsStr>, arguments: &str) -> Self {
        let mut command = Command::new(program);
        command.args(arguments.split_whitespace());
        Self {
            name,
            command,
            worth: Worth::One,
            shows_last_line: false,
            after: None,
            is_alone: false,
        }
    }

    /// Adds an argument as it is.
    pub(crate) fn argument(mut self, argument: impl AsRef<OsStr>) -> Self {
        self.command.arg(argument);
        self
    }

    /// Adds arguments as they are.
    pub(crate) fn arguments(mut self, arguments: impl IntoIterator<Item: AsRef<OsStr>>) -> Self {
        self.command.args(arguments);
        self
    }

    pub(crate) fn env(mut self, key: &str, value: impl AsRef<OsStr>) -> Self {
        self.command.env(key, value);
        self
    }

    pub(crate) fn worth(mut self, worth: Worth) -> Self {
        self.worth = worth;
        self
    }

    pub(crate) fn shows_last_line(mut self) -> Self {
        self.shows_last_line = true;
        self
    }

    /// Starts only after this step of another chain, if the run has it.
    pub(crate) fn after(mut self, name: &'static str) -> Self {
        self.after = Some(name);
        self
    }

    /// Runs while no other step does.
    pub(crate) fn alone(mut self) -> Self {
        self.is_alone = true;
        self
    }

    /// The command as one would type it.
    pub(crate) fn spelled(&self) -> String {
        let words = std::iter::once(self.command.get_program()).chain(self.command.get_args());
        words.map(OsStr::to_string_lossy).collect::<Vec<_>>().join(" ")
    }
}

/// The Cargo that runs this program.
pub(crate) fn cargo() -> impl AsRef<OsStr> {
    std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into())
}
