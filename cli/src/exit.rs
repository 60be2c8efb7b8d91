//! Exit codes of the command.

use std::fmt::Write;
use std::process::ExitCode;

/// Exit code of a command. Scripts match on the numbers, so their meaning never changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Exit {
    /// Success.
    Ok = 0,
    /// Files differ, bytes are damaged, or a comparison failed.
    Mismatch = 1,
    /// The command line is invalid. clap exits with the same number.
    Usage = 2,
    /// A file, key or version does not exist.
    NotFound = 3,
    /// The store is unreachable at its address.
    Unreachable = 4,
    /// The input, the store or the system rejected the operation. Nothing was changed.
    Refused = 5,
    /// Interrupted by Ctrl-C (SIGINT), SIGTERM or SIGHUP.
    Interrupted = 130,
}

impl Exit {
    const TABLE: [(Self, &'static str); 7] = [
        (Self::Ok, "success"),
        (Self::Mismatch, "files differ, bytes are damaged, or a comparison failed"),
        (Self::Usage, "the command line makes no sense"),
        (Self::NotFound, "a file, key or version is not there"),
        (Self::Unreachable, "the store cannot be reached"),
        (Self::Refused, "refused by the input, the store or the system; nothing was changed"),
        (Self::Interrupted, "interrupted"),
    ];

    /// Returns the number that the process exits with.
    pub(crate) const fn code(self) -> u8 {
        self as u8
    }

    /// Returns the table of exit codes for `--help`.
    pub(crate) fn help() -> String {
        let mut text = String::from("Exit codes:\n");
        for (exit, meaning) in Self::TABLE {
            writeln!(text, "  {:>3}  {meaning}", exit.code()).expect("a String takes any text");
        }
        text.truncate(text.trim_end().len());
        text
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        exit.code().into()
    }
}
