//! The one table of exit codes.

use std::fmt::Write;
use std::process::ExitCode;

/// How a command ended. Scripts match on the number, so a number never changes its meaning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Exit {
    /// All went well.
    Ok = 0,
    /// The answer is no: files differ, bytes are damaged, a comparison failed.
    Differs = 1,
    /// The command line makes no sense; clap exits with this number too.
    Usage = 2,
    /// A file, key or version is not there.
    NotFound = 3,
    /// Nobody answers at the store's address.
    Unreachable = 4,
    /// The input, the store or the system said no; nothing was changed.
    Refused = 5,
    /// Ctrl-C, or the signal that `kill` sends.
    Interrupted = 130,
}

impl Exit {
    const TABLE: [(Self, &'static str); 7] = [
        (Self::Ok, "success"),
        (Self::Differs, "files differ, bytes are damaged, or a comparison failed"),
        (Self::Usage, "the command line makes no sense"),
        (Self::NotFound, "a file, key or version is not there"),
        (Self::Unreachable, "the store cannot be reached"),
        (Self::Refused, "refused by the input, the store or the system; nothing was changed"),
        (Self::Interrupted, "interrupted"),
    ];

    /// The number.
    pub(crate) const fn code(self) -> u8 {
        self as u8
    }

    /// The table for `--help`.
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
