//! The command `tssd` of a wheel.
//!
//! It is a binary of this package, so that it has the features of the extension module, and the crates that both use
//! are compiled once.

use std::process::ExitCode;

fn main() -> ExitCode {
    tssd_cli::main()
}
