//! The commands on a store.

pub(crate) mod get;
pub(crate) mod head;
pub(crate) mod ls;
pub(crate) mod pin;
pub(crate) mod put;
pub(crate) mod rm;
pub(crate) mod status;

use tssd_store::blocking::Store;
use tssd_store::{Error, ErrorKind};

use crate::exit::Exit;
use crate::failure::{Failure, Result};

/// Where the store is: the same for all of its commands.
#[derive(Debug, clap::Args)]
pub(crate) struct Address {
    /// The store: a directory, or unix:PATH or unix:NAME for a daemon
    #[arg(long = "store", env = "TSSD_STORE", value_name = "URL")]
    url: String,
}

impl Address {
    /// Connects to it: there must be one.
    pub(crate) fn connect(&self) -> Result<Store> {
        Store::connect(&self.url).map_err(|error| unreachable(&error))
    }

    /// Connects to it, and makes it if it is not there.
    pub(crate) fn create(&self) -> Result<Store> {
        Store::create(&self.url).map_err(|error| unreachable(&error))
    }
}

fn unreachable(error: &Error) -> Failure {
    match error.kind() {
        ErrorKind::Invalid => Failure::new(Exit::Usage, error),
        _ => failure(error),
    }
}

/// What the store says, with advice.
pub(crate) fn failure(error: &Error) -> Failure {
    let (exit, help) = match error.kind() {
        ErrorKind::NotFound => {
            (Exit::NotFound, "`tssd ls` lists the keys, `tssd ls KEY` its versions")
        }
        ErrorKind::Corrupt => {
            (Exit::Differs, "`tssd verify` names all damage; get another version, or put it again")
        }
        ErrorKind::Unreachable => (Exit::Unreachable, "check --store or TSSD_STORE"),
        ErrorKind::Busy => (Exit::Refused, "try again later"),
        ErrorKind::Rejected => {
            (Exit::Refused, "mend the state dicts, then put again in every writer")
        }
        ErrorKind::Io => (Exit::Refused, "what was visible before is untouched"),
        _ => (Exit::Refused, ""),
    };
    let mut failure = Failure::new(exit, error);
    if let Some(format) = error.format_error() {
        failure = failure.code(Failure::code_of(format.kind()));
    }
    if help.is_empty() { failure } else { failure.help(help) }
}
